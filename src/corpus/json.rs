//! One JSON object per line, read strictly: no duplicate keys, no NaN, no lone surrogates.
//!
//! Python's reader and serde's both keep the last of two equal keys, which loses text silently.
//! Python's writer puts NaN, Infinity and halves of characters into files that then are no JSON.
//! In columns that nothing reads they harm nobody, so they become values that no reader takes.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use super::problem::{Reason, RowProblem, RowResult, quoted};

/// Parses one line that must hold one JSON object.
///
/// # Errors
/// Reason "broken line", with the column.
pub fn parse_object(line: &[u8]) -> RowResult<Map<String, Value>> {
    let broken = |message| RowProblem::new(Reason::BrokenLine, message);
    let text = std::str::from_utf8(line).map_err(|e| {
        broken(format!(
            "expected UTF-8, found other bytes at byte {}",
            e.valid_up_to() + 1
        ))
    })?;
    let parsed: Result<Strict, _> = serde_json::from_str(text);
    match parsed {
        Ok(Strict(Value::Object(object))) => Ok(object),
        Ok(Strict(other)) => Err(broken(format!(
            "expected a JSON object, found {}{}",
            kind(&other),
            match other.is_array() {
                true => "; one list of all rows belongs in a file ending in .json",
                false => "",
            }
        ))),
        Err(error) => {
            if let Ok(Strict(Value::Object(object))) = serde_json::from_str(&tamed(text)) {
                return Ok(object);
            }
            Err(broken(format!(
                "expected a JSON object on one line, found {} at column {}{}",
                what(&error),
                error.column(),
                hint(text)
            )))
        }
    }
}

/// What a line that is no JSON most often is.
fn hint(line: &str) -> String {
    let line = line.trim();
    if line.ends_with(['{', '[']) || line.ends_with(',') {
        return "; a row that goes on in the next line belongs on one line, as jq -c . writes it, \
                or into a list in a file ending in .json"
            .to_owned();
    }
    match line.starts_with('{') {
        true => String::new(),
        false => format!("; the line begins with {}", quoted(line)),
    }
}

/// The key of the object that stands for a value which is no JSON.
const NO_JSON: &str = "no JSON";
/// What Python writes for numbers that JSON doesn't have.
const NO_NUMBERS: [&str; 3] = ["NaN", "Infinity", "-Infinity"];

/// The value that stands for one which is no JSON: an object, which nothing that is read may be,
/// and which [`kind`] and the templates know.
pub fn no_json(found: &str) -> Value {
    let found: String = found.chars().take(60).collect();
    Value::Object(Map::from_iter([(NO_JSON.to_owned(), found.into())]))
}

/// Whether an object stands for a value that is no JSON.
pub fn is_no_json(object: &Map<String, Value>) -> bool {
    object.contains_key(NO_JSON)
}

/// A text of JSON in which [`no_json`] stands for whatever Python writes and JSON doesn't have.
fn tamed(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(['"', 'N', 'I', '-']) {
        out.push_str(&rest[..at]);
        let number = NO_NUMBERS.iter().find(|n| rest[at..].starts_with(**n));
        let length = match rest[at..].starts_with('"') {
            true => string_length(&rest[at..]),
            false => number.map_or(1, |n| n.len()),
        };
        let (piece, behind) = rest[at..].split_at(length);
        let is_key = behind.trim_start().starts_with(':');
        match number.is_some() || (!is_key && has_half_character(piece)) {
            true => out.push_str(&no_json(piece).to_string()),
            false => out.push_str(piece),
        }
        rest = behind;
    }
    out + rest
}

/// Bytes of the string that `text` begins with, quotes included.
fn string_length(text: &str) -> usize {
    let mut escaped = false;
    let ends = |&(_, byte): &(usize, u8)| {
        let ends = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        ends
    };
    let end = text.bytes().enumerate().skip(1).find(ends);
    end.map_or(text.len(), |(at, _)| at + 1)
}

/// Whether a string of JSON has an escape for one half of a surrogate pair alone.
fn has_half_character(string: &str) -> bool {
    let unit = |at: usize| {
        let escape = string.get(at..at + 6)?.strip_prefix("\\u")?;
        u16::from_str_radix(escape, 16).ok()
    };
    let mut at = 0;
    while let Some(next) = string[at..].find('\\').map(|i| at + i) {
        at = match (unit(next), unit(next + 6)) {
            (Some(0xd800..=0xdbff), Some(0xdc00..=0xdfff)) => next + 12,
            (Some(0xd800..=0xdfff), _) => return true,
            (Some(_), _) => next + 6,
            // The escaped character may be of several bytes in a text that is no JSON.
            (None, _) => next + 1 + string[next + 1..].chars().next().map_or(0, char::len_utf8),
        };
    }
    false
}

/// Parses any JSON with the same strictness, for JSON that stands inside a string.
///
/// # Errors
/// Text that is no JSON; the message says what was found.
pub fn parse_strict(text: &str) -> Result<Value, String> {
    serde_json::from_str::<Strict>(text)
        .map(|s| s.0)
        .map_err(|e| what(&e))
}

/// serde's own words without its " at line 1 column n".
fn what(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let end = text.rfind(" at line ").unwrap_or(text.len());
    match &text[..end] {
        "expected value" | "expected ident" => "no value of JSON".to_owned(),
        found => found.to_owned(),
    }
}

/// A value itself, for messages.
pub fn shown(value: &Value) -> String {
    match value {
        Value::Object(object) if is_no_json(object) => kind(value).to_owned(),
        other => other.to_string(),
    }
}

/// The kind of a JSON value, for messages.
pub fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(object) => match object.get(NO_JSON).and_then(Value::as_str) {
            None => "an object",
            Some("NaN") => "NaN, which is no JSON",
            Some("Infinity" | "-Infinity") => "an infinity, which is no JSON",
            Some(found) if found.starts_with("a value of type ") => {
                "a column of a type that rows have no value for"
            }
            Some(_) => "a string with half a character (a lone surrogate), which is no JSON",
        },
    }
}

struct Strict(Value);

impl<'de> Deserialize<'de> for Strict {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Strict, D::Error> {
        deserializer.deserialize_any(StrictVisitor).map(Strict)
    }
}

struct StrictVisitor;

impl<'de> Visitor<'de> for StrictVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        let number = Number::from_f64(value);
        number
            .map(Value::Number)
            .ok_or_else(|| E::custom("a number out of range"))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(Value::String(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(Strict(item)) = items.next_element()? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            if object.contains_key(&key) {
                return Err(A::Error::custom(format!(
                    "the key {} twice in one object",
                    quoted(&key)
                )));
            }
            let Strict(value) = entries.next_value()?;
            object.insert(key, value);
        }
        Ok(Value::Object(object))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_python_writes_and_json_lacks_becomes_a_value_that_no_reader_takes() {
        for (written, found) in [
            ("NaN", "NaN, which"),
            ("-Infinity", "an infinity"),
            ("Infinity", "an infinity"),
            (r#""a \ud83d""#, "half a character"),
            (r#""\ude42 \\""#, "half a character"),
            (r#""\ud83d\u0041""#, "half a character"),
        ] {
            let line = format!(
                r#"{{"NaN": "-Infinity \\ud800", "a": [1, {written}], "b": "\ud83d\ude42"}}"#
            );
            let object = parse_object(line.as_bytes()).unwrap();
            assert_eq!(object["NaN"], r"-Infinity \ud800", "{line}");
            assert_eq!((&object["a"][0], &object["b"]), (&json!(1), &json!("🙂")));
            let kind = kind(&object["a"][1]);
            assert!(kind.contains(found), "{kind}");
        }
    }

    #[test]
    fn keeps_the_order_of_keys() {
        let object = parse_object(r#"{"z": 1, "a": {"y": -2, "b": 0.5}}"#.as_bytes()).unwrap();
        assert_eq!(
            Value::Object(object).to_string(),
            r#"{"z":1,"a":{"y":-2,"b":0.5}}"#
        );
    }

    #[test]
    fn broken_lines_say_what_is_wrong() {
        for (line, says) in [
            (&b"{\"a\": 1"[..], "EOF while parsing an object at column 7"),
            (b"[1]", "expected a JSON object, found a list"),
            (b"\"text\"", "found a string"),
            (
                b"{\"a\": 1, \"a\": 2}",
                "the key \"a\" twice in one object at column 12",
            ),
            (b"{\"a\": {\"b\": 1, \"b\": 1}}", "the key \"b\" twice"),
            (b"{\"a\": nope}", "found no value of JSON"),
            (b"{\"a\": NaN, 1}", "no value of JSON at column 7"),
            (b"{\"a\": NaNa}", "no value of JSON at column 7"),
            (b"{\"a\": 1e999}", "number out of range"),
            (b"{\"\\udc00\": 1}", "lone leading surrogate"),
            (b"{", "jq -c ."),
            (b"[", "a file ending in .json"),
            (b"{\"a\": [", "jq -c ."),
            (b"[{}]", "a file ending in .json"),
            (b"text,label", "the line begins with \"text,label\""),
            (
                b"{\"a\": \"\xff\"}",
                "expected UTF-8, found other bytes at byte 8",
            ),
            (b"{} {}", "trailing characters at column 4"),
        ] {
            let problem = parse_object(line).unwrap_err();
            assert_eq!(problem.reason, Reason::BrokenLine);
            assert!(problem.message.contains(says), "{}", problem.message);
        }
    }
}
