//! Tool calls and tool schemas.

use std::io::{Result, Write};

use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};
use serde_json::{Value, json};

use crate::corpus::json::{kind, parse_strict};
use crate::corpus::problem::{RowProblem, RowResult};
use crate::corpus::rules::RowRules;

/// Absent, null and empty mean that the chat has no tools.
///
/// # Errors
/// Something that is not a list of schemas, nor JSON text of one.
pub fn tools(value: Option<Value>) -> RowResult<Option<Value>> {
    let mut value = match value {
        Some(Value::String(text)) if text.trim().is_empty() => Value::Null,
        Some(Value::String(text)) => parse_strict(&text).map_err(|e| {
            RowProblem::unusable(format!(
                "tools: expected a list or JSON text of one, found {e}"
            ))
        })?,
        other => other.unwrap_or_default(),
    };
    let list = match &mut value {
        Value::Null => return Ok(None),
        Value::Array(list) if list.is_empty() => return Ok(None),
        Value::Array(list) => list,
        other => {
            return Err(RowProblem::unusable(format!(
                "tools: expected a list, found {}",
                kind(other)
            )));
        }
    };
    for (i, tool) in list.iter_mut().enumerate() {
        parse_text(&format!("tools[{i}]"), tool)?;
        if !tool.is_object() {
            return Err(RowProblem::unusable(format!(
                "tools[{i}]: expected an object, found {}",
                kind(tool)
            )));
        }
        for schema in ["/function/parameters", "/parameters"] {
            if let Some(parameters) = tool.pointer_mut(schema) {
                parse_text(&format!("tools[{i}].parameters"), parameters)?;
            }
        }
    }
    check_numbers("tools", &value)?;
    Ok(Some(value))
}

/// JSON text in place of what it says, as datasets with fixed columns store it.
fn parse_text(place: &str, value: &mut Value) -> RowResult<()> {
    let Value::String(text) = value else {
        return Ok(());
    };
    *value = parse_strict(text)
        .map_err(|e| RowProblem::unusable(format!("{place}: expected JSON text, found {e}")))?;
    Ok(())
}

/// Arguments as JSON text and as an object render differently; templates mean the object. Texts
/// that Python's printer of JSON would have written in another way go into `reprinted`.
///
/// # Errors
/// Calls that are not objects with a name, or arguments that are no JSON object.
pub fn check_calls(
    place: &str,
    calls: &mut Value,
    rules: &RowRules,
    reprinted: &mut Vec<(String, String)>,
) -> RowResult<()> {
    let Value::Array(list) = calls else {
        return Err(RowProblem::unusable(format!(
            "{place}.tool_calls: expected a list, found {}",
            kind(calls)
        )));
    };
    for (i, call) in list.iter_mut().enumerate() {
        let place = format!("{place}.tool_calls[{i}]");
        let Some(call) = call.as_object_mut() else {
            return Err(RowProblem::unusable(format!(
                "{place}: expected an object, found {}",
                kind(call)
            )));
        };
        let holder = match call.get_mut("function").and_then(Value::as_object_mut) {
            Some(function) => function,
            None => call,
        };
        let Some(Value::String(text)) = holder.get("arguments") else {
            continue;
        };
        let found = match parse_strict(text) {
            Ok(Value::Object(_)) if rules.arguments_as_given => continue,
            Ok(object @ Value::Object(_)) => {
                let printed = python_json(&object);
                if printed != *text {
                    reprinted.push((text.clone(), printed));
                }
                holder.insert("arguments".into(), object);
                continue;
            }
            Ok(other) => kind(&other).to_owned(),
            Err(_) if text.trim().is_empty() => "an empty string; write {}".to_owned(),
            Err(e) => e,
        };
        return Err(RowProblem::unusable(format!(
            "{place}.arguments: expected a JSON object, found {found}"
        )));
    }
    check_numbers(place, calls)
}

/// JSON as Python prints it, and templates with it.
fn python_json(value: &Value) -> String {
    let mut bytes = Vec::new();
    let mut printer = Serializer::with_formatter(&mut bytes, Spaced);
    value
        .serialize(&mut printer)
        .expect("a Vec takes every write");
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A space behind each comma and colon.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> Result<()> {
        out.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> Result<()> {
        out.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> Result<()> {
        out.write_all(b": ")
    }
}

/// A call written as JSON text: one object or a list of them, each with name and arguments.
///
/// # Errors
/// Text that is none.
pub fn calls_of_text(place: &str, text: &str) -> RowResult<Value> {
    let found = parse_strict(text).map_err(|e| {
        RowProblem::unusable(format!("{place}: expected a tool call in JSON, found {e}"))
    })?;
    let list = match found {
        Value::Array(list) => list,
        one => vec![one],
    };
    let call = |call: Value| match (call["name"].as_str(), call.get("arguments")) {
        (Some(name), Some(arguments)) => {
            Ok(json!({"type": "function", "function": {"name": name, "arguments": arguments}}))
        }
        _ => Err(RowProblem::unusable(format!(
            "{place}: expected a tool call with name and arguments, found {}",
            kind(&call)
        ))),
    };
    list.into_iter().map(call).collect()
}

/// Numbers that lost digits on the way can't be rendered faithfully.
///
/// # Errors
/// Such a number.
pub fn check_numbers(place: &str, value: &Value) -> RowResult<()> {
    match value {
        Value::Array(items) => items.iter().try_for_each(|v| check_numbers(place, v)),
        Value::Object(object) => object.values().try_for_each(|v| check_numbers(place, v)),
        Value::Number(number) if number.is_f64() => {
            let float = number.as_f64().unwrap_or_default();
            // The zero of "-0" and that of "-0.0" can't be told apart, and Python prints two.
            if (float != 0.0 || float.is_sign_positive()) && float.abs() < 1e16 {
                return Ok(());
            }
            Err(RowProblem::unusable(format!(
                "{place}: expected numbers of at most 64 bits, below 1e16 and other than -0, found {number}; \
                 write it as a string"
            )))
        }
        _ => Ok(()),
    }
}
