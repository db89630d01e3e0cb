//! Chats: `messages`, and `prompt` + `completion` given as lists of messages.

use serde_json::{Map, Value};

use super::key_list;
use crate::corpus::json::{kind, parse_strict};
use crate::corpus::problem::{RowProblem, RowResult, quoted};

const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];
const MESSAGE_KEYS: [&str; 6] = [
    "role",
    "content",
    "name",
    "reasoning_content",
    "tool_calls",
    "tool_call_id",
];
/// Columns that change what the template renders or what is trained. They are not read, and
/// leaving them out silently would give another chat than the row means.
const REFUSED_COLUMNS: [&str; 8] = [
    "system",
    "documents",
    "functions",
    "function_call",
    "chat_template_kwargs",
    "images",
    "videos",
    "audios",
];

/// A chat, as the template is to see it.
#[derive(Clone, PartialEq, Debug)]
pub struct Chat {
    /// Objects with `role` and, but for a message of tool calls alone, a string `content`.
    pub messages: Vec<Value>,
    pub tools: Option<Value>,
    /// For rows of prompt and completion: index of the completion's first message.
    pub completion: Option<usize>,
}

impl Chat {
    /// Checks a chat given as a list of messages outside any row.
    ///
    /// # Errors
    /// As for a row's `messages`.
    pub fn new(messages: Value) -> RowResult<Chat> {
        Ok(Chat {
            messages: message_list("messages", messages)?,
            tools: None,
            completion: None,
        })
    }

    pub(super) fn from_messages(mut row: Map<String, Value>) -> RowResult<Chat> {
        refuse_columns(&row)?;
        let messages = message_list("messages", row.remove("messages").unwrap_or_default())?;
        Ok(Chat {
            messages,
            tools: tools(row.remove("tools"))?,
            completion: None,
        })
    }

    pub(super) fn from_prompt_completion(mut row: Map<String, Value>) -> RowResult<Chat> {
        refuse_columns(&row)?;
        let mut messages = message_list("prompt", row.remove("prompt").unwrap_or_default())?;
        let first = messages.len();
        messages.extend(message_list(
            "completion",
            row.remove("completion").unwrap_or_default(),
        )?);
        Ok(Chat {
            messages,
            tools: tools(row.remove("tools"))?,
            completion: Some(first),
        })
    }

    /// Indices of the assistant's messages.
    pub fn assistant_turns(&self) -> impl Iterator<Item = usize> + '_ {
        let is_assistant = |m: &Value| m["role"] == "assistant";
        (0..self.messages.len()).filter(move |&i| is_assistant(&self.messages[i]))
    }

    /// Every text a person or model wrote in this chat, with the index of its message.
    pub fn texts(&self) -> impl Iterator<Item = (usize, &str)> {
        self.messages.iter().enumerate().flat_map(|(i, m)| {
            ["content", "reasoning_content"]
                .into_iter()
                .filter_map(move |key| m.get(key)?.as_str().map(|text| (i, text)))
        })
    }
}

fn refuse_columns(row: &Map<String, Value>) -> RowResult<()> {
    let found = |c: &&&str| row.get(**c).is_some_and(|v| !v.is_null());
    match REFUSED_COLUMNS.iter().find(found) {
        None => Ok(()),
        Some(column) => Err(RowProblem::unusable(format!(
            "expected messages and tools only, found the column {column}, which is not read; \
             put it into the messages or remove it"
        ))),
    }
}

/// Absent, null and empty mean that the chat has no tools.
fn tools(value: Option<Value>) -> RowResult<Option<Value>> {
    let value = match value {
        Some(Value::String(text)) => parse_strict(&text).map_err(|e| {
            RowProblem::unusable(format!(
                "tools: expected a list or JSON text of one, found {e}"
            ))
        })?,
        other => other.unwrap_or_default(),
    };
    match value {
        Value::Null => Ok(None),
        Value::Array(list) if list.is_empty() => Ok(None),
        Value::Array(_) => check_numbers("tools", &value).map(|()| Some(value)),
        other => Err(RowProblem::unusable(format!(
            "tools: expected a list, found {}",
            kind(&other)
        ))),
    }
}

fn message_list(key: &str, value: Value) -> RowResult<Vec<Value>> {
    let Value::Array(list) = value else {
        return Err(RowProblem::unusable(format!(
            "{key}: expected a list of messages, found {}",
            kind(&value)
        )));
    };
    if list.is_empty() {
        return Err(RowProblem::unusable(format!(
            "{key}: expected at least one message, found none"
        )));
    }
    let check = |(i, m)| message(&format!("{key}[{i}]"), m);
    list.into_iter().enumerate().map(check).collect()
}

/// One message, checked; null keys are dropped and tool arguments given as JSON text are parsed,
/// as templates expect them.
fn message(place: &str, value: Value) -> RowResult<Value> {
    let Value::Object(mut message) = value else {
        return Err(RowProblem::unusable(format!(
            "{place}: expected a message object, found {}",
            kind(&value)
        )));
    };
    message.retain(|_, v| !v.is_null());
    check_role(place, &message)?;
    if let Some(unknown) = message.keys().find(|k| !MESSAGE_KEYS.contains(&k.as_str())) {
        return Err(RowProblem::unusable(format!(
            "{place}: expected the keys {}, found {}",
            MESSAGE_KEYS.join(", "),
            quoted(unknown)
        )));
    }
    for key in ["content", "name", "reasoning_content", "tool_call_id"] {
        if let Some(other) = message.get(key).filter(|v| !v.is_string()) {
            return Err(RowProblem::unusable(format!(
                "{place}.{key}: expected a string, found {}",
                kind(other)
            )));
        }
    }
    if let Some(calls) = message.get_mut("tool_calls") {
        parse_arguments(place, calls)?;
        check_numbers(place, calls)?;
    } else if !message.contains_key("content") {
        return Err(RowProblem::unusable(format!(
            "{place}: expected content or tool_calls, found {}",
            key_list(&message)
        )));
    }
    Ok(Value::Object(message))
}

fn check_role(place: &str, message: &Map<String, Value>) -> RowResult<()> {
    let expected = ROLES.join(", ");
    match message.get("role") {
        Some(Value::String(role)) if ROLES.contains(&role.as_str()) => Ok(()),
        Some(Value::String(role)) => Err(RowProblem::unusable(format!(
            "{place}.role: expected {expected}, found {}",
            quoted(role)
        ))),
        Some(other) => Err(RowProblem::unusable(format!(
            "{place}.role: expected {expected}, found {}",
            kind(other)
        ))),
        None => Err(RowProblem::unusable(format!(
            "{place}: expected a key role, found {}",
            key_list(message)
        ))),
    }
}

/// Arguments as JSON text and as an object render differently; templates mean the object.
fn parse_arguments(place: &str, calls: &mut Value) -> RowResult<()> {
    let Value::Array(calls) = calls else {
        return Err(RowProblem::unusable(format!(
            "{place}.tool_calls: expected a list, found {}",
            kind(calls)
        )));
    };
    for (i, call) in calls.iter_mut().enumerate() {
        let Some(call) = call.as_object_mut() else {
            return Err(RowProblem::unusable(format!(
                "{place}.tool_calls[{i}]: expected an object, found {}",
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
            Ok(object @ Value::Object(_)) => {
                holder.insert("arguments".into(), object);
                continue;
            }
            Ok(other) => kind(&other).to_owned(),
            Err(e) => e,
        };
        return Err(RowProblem::unusable(format!(
            "{place}.tool_calls[{i}].arguments: expected a JSON object, found {found}"
        )));
    }
    Ok(())
}

/// Numbers that Python would print in another way than templates here do, or that lost digits
/// on the way, can't be rendered faithfully.
fn check_numbers(place: &str, value: &Value) -> RowResult<()> {
    match value {
        Value::Array(items) => items.iter().try_for_each(|v| check_numbers(place, v)),
        Value::Object(object) => object.values().try_for_each(|v| check_numbers(place, v)),
        Value::Number(number) if number.is_f64() => {
            let size = number.as_f64().unwrap_or_default().abs();
            if size == 0.0 || (1e-4..1e16).contains(&size) {
                return Ok(());
            }
            Err(RowProblem::unusable(format!(
                "{place}: expected numbers of at most 64 bits, or between 1e-4 and 1e16, found {number}; \
                 write it as a string"
            )))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn chat(messages: Value) -> Result<Chat, String> {
        Chat::new(messages).map_err(|p| p.message)
    }

    #[test]
    fn null_keys_are_dropped_and_arguments_parsed() {
        let found = chat(json!([{
            "role": "assistant", "content": null, "name": null,
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{\"z\": 1, \"a\": 2}"}}],
        }]))
        .unwrap();
        assert_eq!(
            found.messages[0].to_string(),
            r#"{"role":"assistant","tool_calls":[{"type":"function","function":{"name":"f","arguments":{"z":1,"a":2}}}]}"#
        );
    }

    #[test]
    fn broken_chats_are_named() {
        for (messages, says) in [
            (
                json!("hi"),
                "messages: expected a list of messages, found a string",
            ),
            (json!([]), "expected at least one message"),
            (
                json!(["hi"]),
                "messages[0]: expected a message object, found a string",
            ),
            (
                json!([{"role": "user", "content": "a"}, {"content": "a"}]),
                "messages[1]: expected a key role",
            ),
            (
                json!([{"role": "gpt", "content": "a"}]),
                "expected system, developer, user, assistant, tool, found \"gpt\"",
            ),
            (json!([{"role": 1, "content": "a"}]), "messages[0].role"),
            (
                json!([{"role": "user"}]),
                "expected content or tool_calls, found the keys role",
            ),
            (
                json!([{"role": "user", "content": null}]),
                "expected content or tool_calls",
            ),
            (
                json!([{"role": "user", "content": [{"type": "text"}]}]),
                "messages[0].content: expected a string, found a list",
            ),
            (
                json!([{"role": "user", "content": "a", "weight": 1}]),
                "found \"weight\"",
            ),
            (
                json!([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]),
                "arguments: expected a JSON object, found EOF",
            ),
            (
                json!([{"role": "assistant", "tool_calls": [{"arguments": "[1]"}]}]),
                "expected a JSON object, found a list",
            ),
            (
                json!([{"role": "assistant", "tool_calls": {}}]),
                "tool_calls: expected a list, found an object",
            ),
            (
                json!([{"role": "assistant", "tool_calls": [{"arguments": {"x": 1e-7}}]}]),
                "found 1e-7",
            ),
        ] {
            let message = chat(messages.clone()).unwrap_err();
            assert!(message.contains(says), "{messages}: {message}");
        }
    }

    #[test]
    fn columns_that_would_change_the_chat_are_refused() {
        let row = json!({"messages": [{"role": "user", "content": "a"}], "system": "be brief"});
        let problem = Chat::from_messages(row.as_object().unwrap().clone()).unwrap_err();
        assert!(problem.message.contains("the column system"));
    }

    #[test]
    fn empty_tools_are_no_tools() {
        assert_eq!(tools(None), Ok(None));
        assert_eq!(tools(Some(json!([]))), Ok(None));
        assert_eq!(tools(Some(json!("[]"))), Ok(None));
        assert_eq!(tools(Some(json!("[{}]"))), Ok(Some(json!([{}]))));
        assert!(tools(Some(json!({}))).is_err());
        assert!(tools(Some(json!("{"))).is_err());
    }
}
