//! The places where templates would notice that the engine is not Python's.

use std::fmt::Write;

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind, State};
use serde_json::Value as Json;

use super::engine::fail;
use super::held::charge_bytes;
use super::print::{self, BYTES_OF_ITEM};
use super::range::Range;
use super::rewrite::has_mark;
use crate::corpus::json::{is_no_json, kind};
use crate::corpus::problem::{RowProblem, RowResult, quoted};

/// Deepest nesting `tojson` prints.
const DEPTH_MAX: usize = 128;

/// A JSON value as the engine's, key order kept.
///
/// # Errors
/// A string with one of the characters that mark generation blocks, or a value that is no JSON.
pub fn to_value(json: &Json) -> RowResult<Value> {
    Ok(match json {
        Json::Null => Value::from(()),
        Json::Bool(b) => Value::from(*b),
        Json::Number(n) => match (n.as_i64(), n.as_u64()) {
            (Some(i), _) => Value::from(i),
            (_, Some(u)) => Value::from(u),
            _ => Value::from(n.as_f64().unwrap_or_default()),
        },
        Json::String(s) => {
            check_marks(s)?;
            Value::from(s.as_str())
        }
        Json::Array(items) => {
            let items: RowResult<Vec<Value>> = items.iter().map(to_value).collect();
            Value::from(items?)
        }
        Json::Object(object) if is_no_json(object) => {
            return Err(RowProblem::unusable(format!(
                "expected what JSON has a way to write, found {}",
                kind(json)
            )));
        }
        Json::Object(object) => {
            let entry = |(k, v): (&String, &Json)| {
                check_marks(k)?;
                Ok((k.clone(), to_value(v)?))
            };
            let entries: RowResult<Vec<_>> = object.iter().map(entry).collect();
            Value::from_pairs(entries?)
        }
    })
}

fn check_marks(text: &str) -> RowResult<()> {
    if !has_mark(text) {
        return Ok(());
    }
    Err(RowProblem::unusable(format!(
        "expected text without U+10FFF0 and U+10FFF1, which mark generation blocks here, found {}",
        quoted(text)
    )))
}

/// What Python can loop over: strings, too, but not None.
pub fn is_iterable(value: &Value) -> bool {
    use ValueKind::{Iterable, Map, Seq, String, Undefined};
    matches!(value.kind(), Iterable | Map | Seq | String | Undefined)
}

/// What Python can index and measure: strings and maps, too. Here a list made of two others can't
/// be told from a generator.
pub fn is_sequence(value: &Value) -> Result<bool, Error> {
    use ValueKind::{Iterable, Map, Seq, String, Undefined};
    match value.kind() {
        Iterable => Err(fail(
            "sequence: expected a list or a string, found a generator or a sum of lists",
        )),
        kind => Ok(matches!(kind, Map | Seq | String | Undefined)),
    }
}

/// Python's `str` method of the name; other values are an error here.
pub fn is_lower(value: &str) -> bool {
    value.chars().any(char::is_lowercase) && !value.chars().any(char::is_uppercase)
}

/// Python's `str` method of the name; other values are an error here.
pub fn is_upper(value: &str) -> bool {
    value.chars().any(char::is_uppercase) && !value.chars().any(char::is_lowercase)
}

/// `json.dumps(value, ensure_ascii=False, …)`, as transformers gives it to templates.
pub fn tojson(
    state: &State,
    value: &Value,
    indent: Option<Value>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => kwargs.get::<Option<Value>>("indent")?,
    };
    let indent = match indent.filter(|i| !i.is_none()) {
        None => None,
        Some(text) if text.as_str().is_some() => text.as_str().map(str::to_owned),
        Some(count) => {
            let count = count.as_usize().filter(|&c| c <= 64).ok_or_else(|| {
                Error::new(
                    ErrorKind::InvalidOperation,
                    "tojson: expected an indent of 0 to 64",
                )
            })?;
            Some(" ".repeat(count))
        }
    };
    let separators: Option<Vec<String>> = kwargs.get("separators")?;
    let mut writer = Writer {
        state,
        out: String::new(),
        item: if indent.is_some() { "," } else { ", " }.to_owned(),
        key: ": ".to_owned(),
        indent,
        ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    kwargs.assert_all_used()?;
    if let Some([item, key]) = separators.as_deref() {
        (writer.item, writer.key) = (item.clone(), key.clone());
    }
    writer.value(value, 0)?;
    Ok(writer.out)
}

struct Writer<'a, 't, 'e> {
    state: &'a State<'t, 'e>,
    out: String,
    item: String,
    key: String,
    indent: Option<String>,
    ascii: bool,
    sort: bool,
}

impl Writer<'_, '_, '_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > DEPTH_MAX {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                "tojson: nested too deep",
            ));
        }
        let indent = self.indent.as_ref().map_or(0, |i| i.len() * depth);
        let text = value.as_str().map_or(0, str::len);
        charge_bytes(self.state, BYTES_OF_ITEM + indent + text)?;
        if value.downcast_object_ref::<Range>().is_some() {
            return Err(fail("tojson: expected JSON data, found a range"));
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self
                .out
                .push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.number(value),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => self.list(value, depth)?,
            ValueKind::Map => self.map(value, depth)?,
            other => {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("tojson: expected JSON data, found a value that is {other}"),
                ));
            }
        }
        Ok(())
    }

    fn number(&mut self, value: &Value) {
        self.out.push_str(&print::number(value));
    }

    fn list(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        self.out.push('[');
        let mut empty = true;
        for item in value.try_iter()? {
            self.between(empty, depth + 1);
            empty = false;
            self.value(&item, depth + 1)?;
        }
        self.close(']', empty, depth);
        Ok(())
    }

    fn map(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let mut entries = Vec::new();
        for key in value.try_iter()? {
            entries.push((json_key(&key), value.get_item(&key)?));
        }
        if self.sort {
            entries.sort_by(|a, b| a.0.cmp(&b.0));
        }
        self.out.push('{');
        let empty = entries.is_empty();
        for (i, (key, item)) in entries.iter().enumerate() {
            self.between(i == 0, depth + 1);
            self.string(key);
            self.out.push_str(&self.key.clone());
            self.value(item, depth + 1)?;
        }
        self.close('}', empty, depth);
        Ok(())
    }

    fn between(&mut self, first: bool, depth: usize) {
        if !first {
            self.out.push_str(&self.item);
        }
        self.newline(depth);
    }

    fn close(&mut self, bracket: char, empty: bool, depth: usize) {
        if !empty {
            self.newline(depth);
        }
        self.out.push(bracket);
    }

    fn newline(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            self.out.push_str(&indent.repeat(depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        write!(self.out, "\\u{unit:04x}").expect("a String takes every write");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

fn json_key(key: &Value) -> String {
    match key.kind() {
        ValueKind::None => "null".to_owned(),
        ValueKind::Bool => key.is_true().to_string(),
        _ => key.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use minijinja::context;

    fn render(expression: &str) -> String {
        let env = super::super::engine::environment(None);
        let value: serde_json::Value = serde_json::from_str(
            r#"{"z": [1, -0.0, 2.50, true, null], "a": {"é<&'>": "\"\\\n\u0001😀\u007f"}, "e": [], "o": {}}"#,
        )
        .unwrap();
        let x = super::to_value(&value).unwrap();
        env.render_str(expression, context! { x }).unwrap()
    }

    #[test]
    fn tojson_prints_as_python() {
        assert_eq!(
            render("{{ x | tojson }}"),
            r#"{"z": [1, -0.0, 2.5, true, null], "a": {"é<&'>": "\"\\\n\u0001😀"#.to_owned()
                + "\u{7f}\"}, \"e\": [], \"o\": {}}"
        );
        assert_eq!(
            render("{{ x.z | tojson(indent=2) }}"),
            "[\n  1,\n  -0.0,\n  2.5,\n  true,\n  null\n]"
        );
        assert_eq!(
            render("{{ x | tojson(separators=(',', ':'), sort_keys=true, ensure_ascii=true) }}"),
            r#"{"a":{"\u00e9<&'>":"\"\\\n\u0001\ud83d\ude00"#.to_owned()
                + "\u{7f}\"},\"e\":[],\"o\":{},\"z\":[1,-0.0,2.5,true,null]}"
        );
    }

    #[test]
    fn tests_and_printing_follow_python() {
        assert_eq!(
            render(
                "{{ none is iterable }} {{ 'a' is sequence }} {{ x is sequence }} {{ 3 is iterable }}"
            ),
            "False True True False"
        );
    }
}
