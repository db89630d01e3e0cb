//! Message content given as parts: texts, reasoning, tool calls and their results.

use serde_json::{Map, Value, json};

use super::flags::{PartFlag, part_flag};
use crate::corpus::json::kind;
use crate::corpus::problem::{RowProblem, RowResult, quoted};

/// A message's content taken apart.
#[derive(Debug, Default)]
pub struct Content {
    pub text: String,
    /// Parts that say whether they are trained, by their bytes in `text`.
    pub flags: Vec<PartFlag>,
    pub reasoning: Option<String>,
    pub calls: Vec<Value>,
    /// Messages of role tool that stand in front of this one.
    pub results: Vec<Value>,
    pub has_text: bool,
}

/// The parts as a template may be handed them, where all are text.
pub fn text_parts(parts: &[Value]) -> Option<Value> {
    let text = |part: &Value| {
        let text = part.get("text").or_else(|| part.get("content"))?;
        (part["type"] == "text").then(|| json!({"type": "text", "text": text}))
    };
    parts.iter().map(text).collect()
}

/// # Errors
/// A part of another kind, or with keys that are not read.
pub fn take_parts(place: &str, parts: Vec<Value>) -> RowResult<Content> {
    let mut content = Content::default();
    for (i, part) in parts.into_iter().enumerate() {
        let place = format!("{place}.content[{i}]");
        let Value::Object(mut part) = part else {
            return Err(RowProblem::unusable(format!(
                "{place}: expected a part with a type, found {}",
                kind(&part)
            )));
        };
        part.retain(|_, v| !v.is_null());
        let Some(Value::String(name)) = part.remove("type") else {
            return Err(RowProblem::unusable(format!(
                "{place}: expected a key type, found none"
            )));
        };
        take_part(&place, &name, part, &mut content)?;
    }
    Ok(content)
}

fn take_part(
    place: &str,
    name: &str,
    mut part: Map<String, Value>,
    content: &mut Content,
) -> RowResult<()> {
    match name {
        "text" => {
            let flag = part_flag(place, &mut part)?;
            // Older files name the text after the message's key.
            let text = match part.remove("content") {
                Some(text) if !part.contains_key("text") => text,
                _ => part.remove("text").unwrap_or_default(),
            };
            let text = string(place, "text", text)?;
            let start = content.text.len();
            content.text.push_str(&text);
            if let Some(trained) = flag {
                content.flags.push(PartFlag {
                    span: start..content.text.len(),
                    trained,
                });
            }
            content.has_text = true;
        }
        "thinking" | "reasoning" => {
            let text = part
                .remove(name)
                .or_else(|| part.remove("text"))
                .unwrap_or_default();
            let text = string(place, name, text)?;
            part.remove("signature");
            content.reasoning.get_or_insert_default().push_str(&text);
        }
        "tool_use" => content.calls.push(tool_use(place, &mut part)?),
        "tool_result" => content.results.push(tool_result(place, &mut part)?),
        other => {
            return Err(RowProblem::unusable(format!(
                "{place}.type: expected text, thinking, tool_use or tool_result, found {}; kdscore scores text only",
                quoted(other)
            )));
        }
    }
    match part.keys().find(|k| k.as_str() != "cache_control") {
        None => Ok(()),
        Some(key) => Err(RowProblem::unusable(format!(
            "{place}: expected the keys of a {name} part, found {}",
            quoted(key)
        ))),
    }
}

fn tool_use(place: &str, part: &mut Map<String, Value>) -> RowResult<Value> {
    let (id, called) = (part.remove("id"), part.remove("name").unwrap_or_default());
    let called = string(place, "name", called)?;
    let input = part.remove("input").unwrap_or_else(|| json!({}));
    let mut call = Map::new();
    call.insert("type".into(), "function".into());
    if let Some(id) = id {
        call.insert("id".into(), id);
    }
    call.insert(
        "function".into(),
        json!({"name": called, "arguments": input}),
    );
    Ok(call.into())
}

/// A message of role tool.
fn tool_result(place: &str, part: &mut Map<String, Value>) -> RowResult<Value> {
    let id = part.remove("tool_use_id");
    part.remove("is_error");
    let text = match part.remove("content").unwrap_or_default() {
        Value::Array(parts) => take_parts(place, parts)?.text,
        other => string(place, "content", other)?,
    };
    let mut message = Map::new();
    message.insert("role".into(), "tool".into());
    message.insert("content".into(), text.into());
    if let Some(id) = id {
        message.insert("tool_call_id".into(), id);
    }
    Ok(message.into())
}

fn string(place: &str, key: &str, value: Value) -> RowResult<String> {
    match value {
        Value::String(text) => Ok(text),
        other => Err(RowProblem::unusable(format!(
            "{place}.{key}: expected a string, found {}",
            kind(&other)
        ))),
    }
}
