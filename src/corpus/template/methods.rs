//! Python's methods of strings, dicts and lists, as chat templates call them.
//!
//! What is here answers as CPython does or fails; what is not goes to the engine's own set, and
//! a method that neither knows is an error with the template's line.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind, State};

use super::held::{charge_bytes, charge_items};
use super::print::BYTES_OF_ITEM;

/// Longest string a padding method may make.
const WIDTH_MAX: usize = 1 << 16;
/// Methods of the engine's set that agree with Python where they succeed.
const SHARED: [&str; 7] = [
    "format", "get", "islower", "items", "isupper", "keys", "values",
];

/// The engine's hook for methods it does not know itself: all those of strings, dicts and lists.
pub fn call(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let found = match value.kind() {
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default();
            charge(state, text, name, args)?;
            match name {
                "join" => Some(join(state, text, args)?),
                _ => of_string(text, name, args)?,
            }
        }
        ValueKind::Map if name == "copy" && args.is_empty() => Some(value.clone()),
        ValueKind::Seq => of_list(value, name, args)?,
        _ => None,
    };
    match found {
        Some(result) => Ok(result),
        None if SHARED.contains(&name) || value.kind() == ValueKind::Plain => {
            minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
        }
        None => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

/// Charges for what a method is about to make, where that may be much more than it is given.
fn charge(state: &State, s: &str, name: &str, args: &[Value]) -> Result<(), Error> {
    match name {
        "split" | "rsplit" => {
            let given = Given::new(name, &["sep", "maxsplit"], args)?;
            match given.text(0)? {
                Some(sep) if !sep.is_empty() => charge_items(state, s.matches(sep).count()),
                _ => charge_items(state, s.len() / 2),
            }
        }
        "splitlines" => charge_items(state, s.len() / 2),
        "format" => {
            let numbers = s.split(|c: char| !c.is_ascii_digit());
            let is_wide = |digits: &str| {
                digits
                    .parse()
                    .map_or(!digits.is_empty(), |n: usize| n > WIDTH_MAX)
            };
            match numbers.into_iter().any(is_wide) {
                true => Err(fail(format!(
                    "{name}: expected widths of at most {WIDTH_MAX}"
                ))),
                false => Ok(()),
            }
        }
        "replace" => {
            let given = Given::new(name, &["old", "new", "count"], args)?;
            let (old, new) = (given.needed(0)?, given.needed(1)?);
            let times = match old.is_empty() {
                true => s.len() + 1,
                false => s.matches(old).count(),
            };
            let made = times.saturating_mul(new.len()).saturating_add(s.len());
            charge_bytes(state, made)
        }
        _ => Ok(()),
    }
}

/// Python joins strings alone.
fn join(state: &State, separator: &str, args: &[Value]) -> Result<Value, Error> {
    let given = Given::new("join", &["iterable"], args)?;
    let Some(items) = &given.values[0] else {
        return Err(fail("join: expected a list of strings, found nothing"));
    };
    let mut out = String::new();
    let of_text = items
        .as_str()
        .map(|text| text.chars().map(|c| Value::from(c.to_string())));
    let items: Box<dyn Iterator<Item = Value>> = match of_text {
        Some(chars) => Box::new(chars),
        None => Box::new(items.try_iter()?),
    };
    for (i, item) in items.enumerate() {
        let Some(text) = item.as_str() else {
            return Err(fail(format!(
                "join: expected strings, found {}",
                item.kind()
            )));
        };
        charge_bytes(state, BYTES_OF_ITEM + separator.len() + text.len())?;
        if i > 0 {
            out.push_str(separator);
        }
        out.push_str(text);
    }
    Ok(Value::from(out))
}

/// What Python's `str.isspace` says of a character, and `strip` and `split` go by.
pub fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

fn fail(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// Positional and named arguments by the method's signature; `None` counts as absent.
struct Given {
    values: Vec<Option<Value>>,
}

impl Given {
    fn new(method: &str, names: &[&str], args: &[Value]) -> Result<Given, Error> {
        let (positional, named) = match args.split_last() {
            Some((last, before)) if last.is_kwargs() => {
                (before, Some(Kwargs::try_from(last.clone())?))
            }
            _ => (args, None),
        };
        if positional.len() > names.len() {
            return Err(fail(format!(
                "{method}: expected at most {} arguments, found {}",
                names.len(),
                positional.len()
            )));
        }
        let mut values: Vec<Option<Value>> = vec![None; names.len()];
        for (slot, value) in values.iter_mut().zip(positional) {
            *slot = Some(value.clone());
        }
        if let Some(named) = named {
            for (slot, name) in values.iter_mut().zip(names) {
                if named.has(name) {
                    *slot = Some(named.get(name)?);
                }
            }
            named.assert_all_used()?;
        }
        let absent = |v: &Value| v.is_none();
        values
            .iter_mut()
            .for_each(|v| *v = v.take().filter(|v| !absent(v)));
        Ok(Given { values })
    }

    fn text(&self, index: usize) -> Result<Option<&str>, Error> {
        match &self.values[index] {
            None => Ok(None),
            Some(value) => match value.as_str() {
                Some(text) => Ok(Some(text)),
                None => Err(fail(format!("expected a string, found {}", value.kind()))),
            },
        }
    }

    fn needed(&self, index: usize) -> Result<&str, Error> {
        self.text(index)?
            .ok_or_else(|| fail("expected a string, found nothing"))
    }

    fn whole(&self, index: usize) -> Result<Option<i64>, Error> {
        match &self.values[index] {
            None => Ok(None),
            Some(value) if value.is_integer() => Ok(value.as_i64()),
            Some(value) => Err(fail(format!("expected a number, found {}", value.kind()))),
        }
    }
}

fn of_string(s: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    if let Some(found) = cut(s, name, args)? {
        return Ok(Some(found));
    }
    if let Some(found) = search(s, name, args)? {
        return Ok(Some(found));
    }
    changed(s, name, args)
}

/// Methods that take a string apart.
fn cut(s: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match name {
        "strip" | "lstrip" | "rstrip" => {
            let given = Given::new(name, &["chars"], args)?;
            let chars: Option<Vec<char>> = given.text(0)?.map(|c| c.chars().collect());
            let goes = |c: char| chars.as_ref().map_or(is_space(c), |set| set.contains(&c));
            let text = if name == "rstrip" {
                s
            } else {
                s.trim_start_matches(goes)
            };
            Value::from(if name == "lstrip" {
                text
            } else {
                text.trim_end_matches(goes)
            })
        }
        "split" | "rsplit" => {
            let given = Given::new(name, &["sep", "maxsplit"], args)?;
            let max = given.whole(1)?.unwrap_or(-1);
            let max = usize::try_from(max).unwrap_or(usize::MAX);
            let parts = match (given.text(0)?, name) {
                (Some(""), _) => return Err(fail("split: empty separator")),
                (Some(sep), "split") => s.splitn(max.saturating_add(1), sep).collect(),
                (Some(sep), _) => reversed(s.rsplitn(max.saturating_add(1), sep).collect()),
                (None, "split") => words(s, max),
                (None, _) => words_from_the_end(s, max),
            };
            parts.into_iter().map(Value::from).collect()
        }
        "splitlines" => {
            let given = Given::new(name, &["keepends"], args)?;
            let keep = given.values[0].as_ref().is_some_and(Value::is_true);
            lines(s, keep).into_iter().map(Value::from).collect()
        }
        "partition" | "rpartition" => {
            let given = Given::new(name, &["sep"], args)?;
            let sep = given.needed(0)?;
            if sep.is_empty() {
                return Err(fail("partition: empty separator"));
            }
            let at = if name == "partition" {
                s.find(sep)
            } else {
                s.rfind(sep)
            };
            let parts = match (at, name) {
                (Some(at), _) => [&s[..at], sep, &s[at + sep.len()..]],
                (None, "partition") => [s, "", ""],
                (None, _) => ["", "", s],
            };
            Value::from(minijinja::value::Tuple::from(parts.map(Value::from)))
        }
        "removeprefix" | "removesuffix" => {
            let given = Given::new(name, &["affix"], args)?;
            let affix = given.needed(0)?;
            let rest = match name {
                "removeprefix" => s.strip_prefix(affix),
                _ => s.strip_suffix(affix),
            };
            Value::from(rest.unwrap_or(s))
        }
        _ => return Ok(None),
    }))
}

/// Methods that look for something in a string.
fn search(s: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match name {
        "find" | "rfind" | "index" | "rindex" | "count" => find(s, name, args)?,
        "startswith" | "endswith" => {
            let given = Given::new(name, &["affix"], args)?;
            let tests = match &given.values[0] {
                Some(one) if one.as_str().is_some() => vec![one.clone()],
                Some(many) if many.kind() == ValueKind::Seq => many.try_iter()?.collect(),
                _ => {
                    return Err(fail(format!(
                        "{name}: expected a string or tuple of strings"
                    )));
                }
            };
            let mut found = false;
            for test in tests {
                let test = test
                    .as_str()
                    .ok_or_else(|| fail(format!("{name}: expected strings")))?;
                found |= if name == "startswith" {
                    s.starts_with(test)
                } else {
                    s.ends_with(test)
                };
            }
            Value::from(found)
        }
        "isspace" => Value::from(!s.is_empty() && s.chars().all(is_space)),
        "isascii" => Value::from(s.is_ascii()),
        "isdigit" | "isnumeric" | "isdecimal" | "isalnum" | "isalpha" => {
            let of_kind: fn(&char) -> bool = match name {
                "isalpha" => char::is_ascii_alphabetic,
                "isalnum" => char::is_ascii_alphanumeric,
                _ => char::is_ascii_digit,
            };
            if !s.is_ascii() {
                return Err(fail(format!(
                    "{name}: expected ASCII text, whose answer is known, found other characters"
                )));
            }
            Value::from(!s.is_empty() && s.chars().all(|c| of_kind(&c)))
        }
        _ => return Ok(None),
    }))
}

/// Places count in characters.
fn find(s: &str, name: &str, args: &[Value]) -> Result<Value, Error> {
    let given = Given::new(name, &["sub", "start", "end"], args)?;
    let sub = given.needed(0)?;
    let length = s.chars().count();
    let (start, end) = (given.whole(1)?.unwrap_or(0), given.whole(2)?);
    let (from, to) = (
        place(start, length),
        end.map_or(length, |e| place(e, length)),
    );
    if from > to || (name == "count" && from > length) {
        return Ok(Value::from(if name == "count" { 0 } else { -1 }));
    }
    let part = &s[byte_at(s, from)..byte_at(s, to)];
    if name == "count" {
        return Ok(Value::from(part.matches(sub).count()));
    }
    let at = if name.starts_with('r') {
        part.rfind(sub)
    } else {
        part.find(sub)
    };
    Ok(match at {
        Some(at) => Value::from(from + part[..at].chars().count()),
        None if name.ends_with("find") => Value::from(-1),
        None => return Err(fail("substring not found")),
    })
}

/// Methods that make another string.
fn changed(s: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let none = |method: &str| Given::new(method, &[], args).map(|_| ());
    Ok(Some(match name {
        "upper" => none(name).map(|()| Value::from(s.to_uppercase()))?,
        "lower" => none(name).map(|()| Value::from(s.to_lowercase()))?,
        "title" => none(name).and_then(|()| title(s)).map(Value::from)?,
        "capitalize" => none(name).and_then(|()| capitalize(s)).map(Value::from)?,
        "replace" => {
            let given = Given::new(name, &["old", "new", "count"], args)?;
            let (old, new) = (given.needed(0)?, given.needed(1)?);
            let count = given.whole(2)?.unwrap_or(-1);
            Value::from(match usize::try_from(count) {
                Ok(count) => s.replacen(old, new, count),
                Err(_) => s.replace(old, new),
            })
        }
        "zfill" | "ljust" | "rjust" | "center" => {
            let given = Given::new(name, &["width", "fillchar"], args)?;
            let width = given
                .whole(0)?
                .ok_or_else(|| fail(format!("{name}: expected a width")))?;
            let width = usize::try_from(width).unwrap_or(0);
            if width > WIDTH_MAX {
                return Err(fail(format!(
                    "{name}: expected a width of at most {WIDTH_MAX}"
                )));
            }
            let fill = given.text(1)?.unwrap_or(" ");
            if fill.chars().count() != 1 {
                return Err(fail(format!("{name}: expected one fill character")));
            }
            Value::from(padded(s, name, width, fill))
        }
        _ => return Ok(None),
    }))
}

fn of_list(list: &Value, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    match name {
        "index" => {
            let [wanted] = args else {
                return Err(fail("index: expected one value to look for"));
            };
            let at = list.try_iter()?.position(|item| item == *wanted);
            at.map(|at| Some(Value::from(at)))
                .ok_or_else(|| fail("index: the value is not in the list"))
        }
        "count" => {
            let [wanted] = args else {
                return Err(fail("count: expected one value to look for"));
            };
            let found = list.try_iter()?.filter(|item| item == wanted).count();
            Ok(Some(Value::from(found)))
        }
        "copy" if args.is_empty() => Ok(Some(list.clone())),
        _ => Ok(None),
    }
}

/// An index as Python's slices take it: negative from the end, clamped.
fn place(index: i64, length: usize) -> usize {
    match usize::try_from(index) {
        Ok(index) => index.min(length + 1),
        Err(_) => length.saturating_sub(index.unsigned_abs() as usize),
    }
}

fn byte_at(s: &str, chars: usize) -> usize {
    s.char_indices().nth(chars).map_or(s.len(), |(at, _)| at)
}

fn reversed(mut parts: Vec<&str>) -> Vec<&str> {
    parts.reverse();
    parts
}

fn words(s: &str, max: usize) -> Vec<&str> {
    let mut found = Vec::new();
    let mut rest = s.trim_start_matches(is_space);
    while !rest.is_empty() {
        if found.len() == max {
            found.push(rest.trim_end_matches(is_space));
            break;
        }
        let end = rest.find(is_space).unwrap_or(rest.len());
        found.push(&rest[..end]);
        rest = rest[end..].trim_start_matches(is_space);
    }
    found
}

fn words_from_the_end(s: &str, max: usize) -> Vec<&str> {
    let mut found = Vec::new();
    let mut rest = s.trim_end_matches(is_space);
    while !rest.is_empty() {
        if found.len() == max {
            found.push(rest.trim_start_matches(is_space));
            break;
        }
        let last = rest.char_indices().rev().find(|(_, c)| is_space(*c));
        let start = last.map_or(0, |(at, c)| at + c.len_utf8());
        found.push(&rest[start..]);
        rest = rest[..start].trim_end_matches(is_space);
    }
    reversed(found)
}

/// Python breaks lines at more than line feeds.
pub(super) fn ends_line(c: char) -> bool {
    matches!(c, '\n'..='\r' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}')
}

pub(super) fn lines(s: &str, keep: bool) -> Vec<&str> {
    let mut found = Vec::new();
    let mut rest = s;
    while !rest.is_empty() {
        let end = rest.find(ends_line).unwrap_or(rest.len());
        let after = match rest[end..].chars().next() {
            Some('\r') if rest[end..].starts_with("\r\n") => end + 2,
            Some(c) => end + c.len_utf8(),
            None => end,
        };
        found.push(if keep { &rest[..after] } else { &rest[..end] });
        rest = &rest[after..];
    }
    found
}

/// # Errors
/// A character whose title case is not its upper case, which the standard library doesn't know.
fn title_char(c: char, out: &mut String) -> Result<(), Error> {
    let special = matches!(c, '\u{1c4}'..='\u{1cc}' | '\u{1f1}'..='\u{1f3}' | '\u{10d0}'..='\u{10ff}' | '\u{1f80}'..='\u{1fff}');
    if special || c.to_uppercase().count() > 1 {
        return Err(fail(format!("title case of {c:?} is not known here")));
    }
    out.extend(c.to_uppercase());
    Ok(())
}

/// Every letter behind a character without case is a capital: "they'Re".
fn title(s: &str) -> Result<String, Error> {
    let mut out = String::with_capacity(s.len());
    let mut inside = false;
    for c in s.chars() {
        let cased = c.is_lowercase() || c.is_uppercase();
        if inside {
            lower_char(c, &mut out)?;
        } else {
            title_char(c, &mut out)?;
        }
        inside = cased;
    }
    Ok(out)
}

pub(super) fn capitalize(s: &str) -> Result<String, Error> {
    let mut out = String::with_capacity(s.len());
    let mut chars = s.chars();
    if let Some(first) = chars.next() {
        title_char(first, &mut out)?;
    }
    chars.try_for_each(|c| lower_char(c, &mut out))?;
    Ok(out)
}

/// # Errors
/// A capital sigma, whose lower case depends on its place in the word.
fn lower_char(c: char, out: &mut String) -> Result<(), Error> {
    if c == 'Σ' {
        return Err(fail("the lower case of 'Σ' in a title is not known here"));
    }
    out.extend(c.to_lowercase());
    Ok(())
}

fn padded(s: &str, method: &str, width: usize, fill: &str) -> String {
    let room = width.saturating_sub(s.chars().count());
    match method {
        "ljust" => s.to_owned() + &fill.repeat(room),
        "rjust" => fill.repeat(room) + s,
        "center" => {
            // CPython puts the odd character to the left of texts in odd widths.
            let left = room / 2 + (room & width & 1);
            fill.repeat(left) + s + &fill.repeat(room - left)
        }
        _ => {
            let sign = usize::from(s.starts_with(['+', '-']));
            format!("{}{}{}", &s[..sign], "0".repeat(room), &s[sign..])
        }
    }
}
