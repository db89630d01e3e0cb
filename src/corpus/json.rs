//! One JSON object per line, read strictly: no duplicate keys, no NaN, no lone surrogates.
//!
//! Python's reader and serde's both keep the last of two equal keys, which loses text silently.

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
            "expected a JSON object, found {}",
            kind(&other)
        ))),
        Err(error) => Err(broken(format!(
            "expected a JSON object on one line, found {} at column {}",
            what(&error),
            error.column()
        ))),
    }
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
    match text.rfind(" at line ") {
        Some(end) => text[..end].to_owned(),
        None => text,
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
        Value::Object(_) => "an object",
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
            (b"{\"a\": NaN}", "expected value at column 7"),
            (b"{\"a\": 1e999}", "number out of range"),
            (b"{\"a\": \"\\ud800\"}", "unexpected end of hex escape"),
            (b"{\"a\": \"\\udc00\"}", "lone leading surrogate"),
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
