//! The template engine, made to answer as Jinja under transformers does.

use std::fmt;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, Value, ValueKind, from_args};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, UndefinedBehavior, filters};

use super::date::TemplateDate;
use super::held::{HELD, charge_bytes, charge_items, held};
use super::print::BYTES_OF_ITEM;
use super::range::Range;
use super::{methods, print, python};

/// Steps a template may take for one chat: a runaway loop ends here instead of never. Every 64
/// bytes of text that are made or read count as one, so memory is bounded too, at some 300 MB.
pub const FUEL: u64 = 5_000_000;
/// The filter that `for` loops get their values through, see `rewrite`.
pub const LOOPED: &str = "kdscore_looped";

/// An environment without templates. Dates print only when one is given.
pub fn environment(date: Option<TemplateDate>) -> Environment<'static> {
    let mut env = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build();
    env.set_syntax(syntax.expect("the default delimiters are valid"));
    env.set_undefined_behavior(UndefinedBehavior::Lenient);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_formatter(print::print);
    env.set_fuel(Some(FUEL));
    env.set_unknown_method_callback(methods::call);
    env.add_test("iterable", python::is_iterable);
    env.add_test("sequence", python::is_sequence);
    env.add_test("lower", python::is_lower);
    env.add_test("upper", python::is_upper);
    env.add_function("raise_exception", raise_exception);
    env.add_function("range", Range::make);
    env.add_function("strftime_now", move |format: &str| match &date {
        Some(date) => date.format(format).map_err(fail),
        // A corpus that depends on the day it was made can't be made again.
        None => Err(fail(
            "the template prints today's date; fix it with --template-date YYYY-MM-DD",
        )),
    });
    add_filters(&mut env);
    env
}

fn add_filters(env: &mut Environment<'static>) {
    env.add_filter(LOOPED, |state: &State, value: &Value| {
        held(state, &looped(state, value)?)
    });
    env.add_filter(HELD, held);
    env.add_filter("tojson", python::tojson);
    env.add_filter("string", print::text);
    env.add_filter("trim", trim);
    env.add_filter("upper", |state: &State, value: &Value| {
        print::text(state, value).map(|s| s.to_uppercase())
    });
    env.add_filter("lower", |state: &State, value: &Value| {
        print::text(state, value).map(|s| s.to_lowercase())
    });
    env.add_filter("capitalize", |state: &State, value: &Value| {
        methods::capitalize(&print::text(state, value)?)
    });
    env.add_filter("title", title);
    env.add_filter("join", join);
    env.add_filter("list", |state: &State, value: &Value| {
        let list = held(state, &looped(state, value)?)?;
        Ok::<_, Error>(list.try_iter()?.collect::<Value>())
    });
    env.add_filter("first", |state: &State, value: &Value| {
        Ok::<_, Error>(
            looped(state, value)?
                .try_iter()?
                .next()
                .unwrap_or(Value::UNDEFINED),
        )
    });
    env.add_filter("last", |state: &State, value: &Value| {
        filters::last(held(state, &looped(state, value)?)?)
    });
    env.add_filter("sort", sort);
    env.add_filter("unique", |state: &State, value: &Value, kwargs: Kwargs| {
        filters::unique(state, held(state, &looped(state, value)?)?, kwargs)
    });
    env.add_filter(
        "sum",
        |state: &mut State, value: &Value, args: Rest<Value>| {
            looped(state, value)?;
            let _ = (&state, &args);
            Err::<Value, _>(fail("the filter sum is not known here"))
        },
    );
    env.add_filter("int", int);
    env.add_filter("float", float);
    env.add_filter("indent", indent);
    for name in ["length", "count"] {
        env.add_filter(name, length);
    }
    refuse_filters(env);
}

fn refuse_filters(env: &mut Environment<'static>) {
    // Filters of the engine that answer otherwise than Jinja's, and that no chat template needs.
    for name in [
        "attr",
        "batch",
        "e",
        "escape",
        "filesizeformat",
        "forceescape",
        "format",
        "groupby",
        "max",
        "min",
        "pprint",
        "slice",
        "sum",
        "urlencode",
        "wordwrap",
    ] {
        env.add_filter(
            name,
            move |_: &Value, _: Rest<Value>| -> Result<Value, Error> {
                Err(fail(format!("the filter {name} is not known here")))
            },
        );
    }
}

pub fn fail(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// Marks an error that a template raises itself.
#[derive(Debug)]
struct Raised;

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("raised by the template")
    }
}

impl std::error::Error for Raised {}

fn raise_exception(state: &State, message: &Value) -> Result<Value, Error> {
    Err(fail(print::text(state, message)?).with_source(Raised))
}

/// Whether the template raised it, by `raise_exception`.
pub fn is_raised(error: &Error) -> bool {
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        if cause.is::<Raised>() {
            return true;
        }
        source = cause.source();
    }
    false
}

/// What Python iterates over: a string by characters, and never None or a number.
fn looped(state: &State, value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default();
            charge_items(state, text.len())?;
            let chars = text.chars();
            Ok(chars.map(|c| Value::from(c.to_string())).collect())
        }
        ValueKind::None | ValueKind::Bool | ValueKind::Number => Err(fail(format!(
            "expected something to loop over, found {}",
            print::text(state, value)?
        ))),
        _ => Ok(value.clone()),
    }
}

fn trim(state: &State, value: &Value, chars: Option<Value>) -> Result<String, Error> {
    let text = print::text(state, value)?;
    let set: Option<Vec<char>> = match chars.filter(|c| !c.is_none()) {
        None => None,
        Some(chars) => Some(
            chars
                .as_str()
                .ok_or_else(|| fail("trim: expected a string"))?
                .chars()
                .collect(),
        ),
    };
    let goes = |c: char| {
        set.as_ref()
            .map_or(methods::is_space(c), |set| set.contains(&c))
    };
    Ok(text.trim_matches(goes).to_owned())
}

/// Jinja's filter goes by words between spaces, hyphens and brackets, unlike Python's method.
fn title(state: &State, value: &Value) -> Result<String, Error> {
    let text = print::text(state, value)?;
    let between = |c: char| methods::is_space(c) || "-({[<".contains(c);
    let mut out = String::with_capacity(text.len());
    for word in text.split_inclusive(between) {
        out.push_str(&methods::capitalize(word)?);
    }
    Ok(out)
}

fn join(
    state: &State,
    value: &Value,
    separator: Option<&Value>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    let named: Option<Value> = kwargs.get("d")?;
    let attribute: Option<String> = kwargs.get("attribute")?;
    kwargs.assert_all_used()?;
    let separator = match separator.or(named.as_ref()) {
        Some(separator) => print::text(state, separator)?,
        None => String::new(),
    };
    let mut out = String::new();
    for (i, item) in looped(state, value)?.try_iter()?.enumerate() {
        charge_bytes(state, BYTES_OF_ITEM + separator.len())?;
        if i > 0 {
            out.push_str(&separator);
        }
        let item = match &attribute {
            Some(name) => item.get_attr(name)?,
            None => item,
        };
        out.push_str(&print::text(state, &item)?);
    }
    Ok(out)
}

fn length(value: &Value) -> Result<usize, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(0),
        ValueKind::Iterable => value
            .len()
            .ok_or_else(|| fail("expected a length, found none")),
        _ => filters::length(value),
    }
}

/// Values of one kind only: Python orders no others.
fn sort(state: &State, value: &Value, kwargs: Kwargs) -> Result<Value, Error> {
    let list = held(state, &looped(state, value)?)?;
    if !kwargs.has("attribute") {
        let mut kinds: Vec<ValueKind> = list.try_iter()?.map(|item| item.kind()).collect();
        kinds.dedup();
        if !matches!(kinds[..], [] | [ValueKind::String] | [ValueKind::Number]) {
            return Err(fail("sort: expected strings alone or numbers alone"));
        }
    }
    filters::sort(state, list, kwargs)
}

fn float(value: &Value) -> Result<f64, Error> {
    match (value.kind(), value.as_str()) {
        (ValueKind::Number, _) => f64::try_from(value.clone()),
        (_, Some(text)) => {
            let text = text.trim_matches(methods::is_space);
            let plain = |c: char| c.is_ascii_digit() || "+-.".contains(c);
            match text.parse() {
                Ok(float) if text.chars().all(plain) => Ok(float),
                _ => Err(fail(format!(
                    "float: expected plain digits, found {text:?}"
                ))),
            }
        }
        (other, _) => Err(fail(format!("float: expected a number, found {other}"))),
    }
}

fn indent(state: &State, text: &str, args: Rest<Value>) -> Result<String, Error> {
    type Given<'a> = (Option<&'a Value>, Option<bool>, Option<bool>, Kwargs);
    let (width, first, blank, kwargs): Given = from_args(&args)?;
    let width = width.cloned().or(kwargs.get("width")?);
    let first = first.or(kwargs.get("first")?).unwrap_or(false);
    let blank = blank.or(kwargs.get("blank")?).unwrap_or(false);
    kwargs.assert_all_used()?;
    let indent = match width {
        None => "    ".to_owned(),
        Some(width) => match (width.as_str(), width.as_usize()) {
            (Some(text), _) => text.to_owned(),
            (_, Some(width)) if width <= 1024 => " ".repeat(width),
            _ => return Err(fail("indent: expected a width of at most 1024")),
        },
    };
    let with_end = format!("{text}\n");
    let breaks = text.chars().filter(|c| methods::ends_line(*c)).count();
    charge_bytes(
        state,
        (breaks + 1).saturating_mul(indent.len().max(BYTES_OF_ITEM)),
    )?;
    let mut out = String::new();
    for (i, line) in methods::lines(&with_end, false).into_iter().enumerate() {
        if i > 0 {
            out.push('\n');
        }
        if if i == 0 {
            first
        } else {
            blank || !line.is_empty()
        } {
            out.push_str(&indent);
        }
        out.push_str(line);
    }
    Ok(out)
}

/// Python's `int()` with Jinja's default of 0 for what is no number.
fn int(value: &Value, default: Option<Value>) -> Result<Value, Error> {
    let default = default.unwrap_or(Value::from(0));
    match value.kind() {
        ValueKind::Number if value.is_integer() => Ok(value.clone()),
        ValueKind::Bool => Ok(Value::from(i64::from(value.is_true()))),
        ValueKind::Number => match f64::try_from(value.clone()) {
            Ok(float) if float.abs() < 9e15 => Ok(Value::from(float.trunc() as i64)),
            _ => Err(fail("int: expected a number below 9e15")),
        },
        ValueKind::String => {
            let text = value
                .as_str()
                .unwrap_or_default()
                .trim_matches(methods::is_space);
            if text.contains(['_', 'e', 'E', '.', 'n']) || !text.is_ascii() {
                return Err(fail(format!("int: expected plain digits, found {text:?}")));
            }
            Ok(text.parse::<i64>().map_or(default, Value::from))
        }
        ValueKind::Undefined => Err(fail("int: expected a number, found nothing")),
        _ => Ok(default),
    }
}
