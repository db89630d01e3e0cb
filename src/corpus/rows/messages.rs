//! Chats: lists of messages, checked and made what templates expect.

use serde_json::{Map, Value, json};

use super::calls::{calls_of_text, check_calls, tools};
use super::content::{take_parts, text_parts};
use super::flags::{TurnFlags, take_flags};
use super::{hints, key_list, take_string};
use crate::corpus::json::{is_no_json, kind, parse_strict};
use crate::corpus::problem::{RowProblem, RowResult, quoted};
use crate::corpus::rules::RowRules;

const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];
const MESSAGE_KEYS: [&str; 8] = [
    "role",
    "content",
    "name",
    "reasoning_content",
    "thinking",
    "reasoning",
    "tool_calls",
    "tool_call_id",
];
/// Names a message's reasoning goes by.
pub const REASONING_KEYS: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];
/// Columns that change what the template renders or what is trained. They are not read, and
/// leaving them out silently would give another chat than the row means.
const REFUSED_COLUMNS: [&str; 11] = [
    "documents",
    "functions",
    "function_call",
    "image",
    "images",
    "video",
    "videos",
    "audio",
    "audios",
    "system_prompt",
    "system_message",
];

/// A chat, as the template is to see it.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Chat {
    /// Objects with `role` and, but for a message of tool calls alone, a string `content`.
    pub messages: Vec<Value>,
    /// What each message says about its own loss.
    pub flags: Vec<TurnFlags>,
    pub tools: Option<Value>,
    /// Variables this row gives the template.
    pub template_kwargs: Vec<(String, Value)>,
    /// For rows of prompt and completion: index of the completion's first message.
    pub completion: Option<usize>,
    /// Arguments of tool calls given as JSON text, and that text as JSON is printed.
    pub reprinted: Vec<(String, String)>,
    /// Contents given as parts that are all text, by their messages' indices.
    pub parts: Vec<(usize, Value)>,
}

impl Chat {
    /// Checks a chat given as a list of messages outside any row.
    ///
    /// # Errors
    /// As for a row's `messages`.
    pub fn new(messages: Value) -> RowResult<Chat> {
        let mut chat = Chat::default();
        chat.add_list("messages", messages, &RowRules::default())?;
        Ok(chat)
    }

    pub(super) fn from_messages(mut row: Map<String, Value>, rules: &RowRules) -> RowResult<Chat> {
        let mut chat = Chat::default();
        let system = row.remove("system");
        chat.add_list(
            "messages",
            row.remove("messages").unwrap_or_default(),
            rules,
        )?;
        chat.add_system(system)?;
        chat.with_columns(row, rules)
    }

    pub(super) fn from_prompt_completion(
        mut row: Map<String, Value>,
        rules: &RowRules,
    ) -> RowResult<Chat> {
        let mut chat = Chat::default();
        let system = row.remove("system");
        chat.add_list("prompt", row.remove("prompt").unwrap_or_default(), rules)?;
        chat.add_system(system)?;
        chat.completion = Some(chat.messages.len());
        chat.add_list(
            "completion",
            row.remove("completion").unwrap_or_default(),
            rules,
        )?;
        chat.with_columns(row, rules)
    }

    /// Takes the columns beside the messages that belong to a chat.
    ///
    /// # Errors
    /// A column that would change the chat and is not read.
    pub(super) fn with_columns(
        mut self,
        mut row: Map<String, Value>,
        rules: &RowRules,
    ) -> RowResult<Chat> {
        refuse_columns(&row, &REFUSED_COLUMNS, rules, way_out)?;
        self.tools = tools(row.remove("tools"))?;
        self.template_kwargs = match row.remove("chat_template_kwargs").unwrap_or_default() {
            Value::Null => Vec::new(),
            Value::String(text) => kwargs(parse_strict(&text).unwrap_or_default())?,
            other => kwargs(other)?,
        };
        Ok(self)
    }

    /// Adds one message, checked.
    ///
    /// # Errors
    /// Keys, roles or content that are not a message's.
    pub(super) fn add(&mut self, place: &str, value: Value, rules: &RowRules) -> RowResult<()> {
        let Value::Object(mut message) = value else {
            return Err(RowProblem::unusable(format!(
                "{place}: expected a message object, found {}",
                kind(&value)
            )));
        };
        if !rules.null_keys {
            message.retain(|_, v| !v.is_null());
        }
        let is_call = take_tool_role(place, &mut message, rules)?;
        let role = take_role(place, &mut message, rules)?;
        message.retain(|k, _| !rules.ignored_keys.contains(k));
        let before = self.messages.len();
        let mut part_flags = Vec::new();
        let mut given = None;
        if let Some(Value::Array(parts)) = message.get_mut("content") {
            let parts = std::mem::take(parts);
            given = text_parts(&parts);
            part_flags = self.spread_parts(place, &role, parts, &mut message)?;
        }
        let flags = take_flags(place, &role, &mut message, part_flags)?;
        // A message that held nothing but tool results has become those.
        if message.len() == 1 && self.messages.len() > before {
            return Ok(());
        }
        check_keys(place, &mut message, rules, &mut self.reprinted)?;
        if is_call && self.takes_calls(&flags) {
            let calls = message.shift_remove("tool_calls").unwrap_or_default();
            self.add_calls(calls);
            return Ok(());
        }
        if let Some(parts) = given {
            self.parts.push((self.messages.len(), parts));
        }
        self.messages.push(message.into());
        self.flags.push(flags);
        Ok(())
    }

    /// Whether a call in a message of its own belongs to the message before it.
    fn takes_calls(&self, flags: &TurnFlags) -> bool {
        let begins = self.completion == Some(self.messages.len());
        let last = self.messages.last();
        !begins
            && last.is_some_and(|m| m["role"] == "assistant")
            && self.flags.last() == Some(flags)
    }

    fn add_calls(&mut self, calls: Value) {
        let last = self.messages.last_mut().and_then(Value::as_object_mut);
        let known = last.map(|m| m.entry("tool_calls").or_insert_with(|| json!([])));
        if let (Some(Value::Array(known)), Value::Array(calls)) = (known, calls) {
            known.extend(calls);
        }
    }

    fn add_list(&mut self, key: &str, value: Value, rules: &RowRules) -> RowResult<()> {
        let value = match value {
            Value::String(text) => parse_strict(&text).unwrap_or(Value::String(text)),
            other => other,
        };
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
        let add = |(i, m)| self.add(&format!("{key}[{i}]"), m, rules);
        list.into_iter().enumerate().try_for_each(add)
    }

    /// A `system` column stands in front.
    ///
    /// # Errors
    /// A column that differs from the messages' own.
    pub(super) fn add_system(&mut self, system: Option<Value>) -> RowResult<()> {
        let text = match system.unwrap_or_default() {
            Value::Null => return Ok(()),
            Value::String(text) if text.is_empty() => return Ok(()),
            Value::String(text) => text,
            other => {
                return Err(RowProblem::unusable(format!(
                    "system: expected a string, found {}",
                    kind(&other)
                )));
            }
        };
        match self.messages.first() {
            Some(first) if first["role"] == "system" && first["content"] != text.as_str() => {
                Err(RowProblem::unusable(
                    "expected one system message, found one in the column system and another in the chat",
                ))
            }
            Some(first) if first["role"] == "system" => Ok(()),
            _ => {
                self.messages
                    .insert(0, json!({"role": "system", "content": text}));
                self.flags.insert(0, TurnFlags::default());
                self.parts.iter_mut().for_each(|(message, _)| *message += 1);
                Ok(())
            }
        }
    }

    /// Parts become the text, reasoning and tool calls that templates read.
    fn spread_parts(
        &mut self,
        place: &str,
        role: &str,
        parts: Vec<Value>,
        message: &mut Map<String, Value>,
    ) -> RowResult<Vec<super::flags::PartFlag>> {
        let content = take_parts(place, parts)?;
        let misplaced = match (role, content.calls.is_empty(), content.results.is_empty()) {
            ("assistant", _, true) | ("user" | "tool", true, _) | (_, true, true) => None,
            (_, false, _) => Some("tool_use"),
            _ => Some("tool_result"),
        };
        if let Some(part) = misplaced {
            return Err(RowProblem::unusable(format!(
                "{place}: expected no {part} part in a message of role {role}, found one"
            )));
        }
        let only_results = !content.results.is_empty() && !content.has_text;
        for result in content.results {
            self.messages.push(result);
            self.flags.push(TurnFlags::default());
        }
        if only_results {
            message.retain(|key, _| key == "role");
            return Ok(Vec::new());
        }
        if !content.calls.is_empty() {
            if message.contains_key("tool_calls") {
                return Err(RowProblem::unusable(format!(
                    "{place}: expected tool_calls or tool_use parts, found both"
                )));
            }
            message.insert("tool_calls".into(), content.calls.into());
        }
        if let Some(reasoning) = content.reasoning {
            message.insert("reasoning_content".into(), reasoning.into());
        }
        message.insert("content".into(), content.text.into());
        Ok(content.flags)
    }

    /// Indices of the assistant's messages.
    pub fn assistant_turns(&self) -> impl Iterator<Item = usize> + '_ {
        let is_assistant = |m: &Value| m["role"] == "assistant";
        (0..self.messages.len()).filter(move |&i| is_assistant(&self.messages[i]))
    }

    /// Every text a person or model wrote in this chat, with the index of its message; a text
    /// that stands under several names counts once.
    pub fn texts(&self) -> impl Iterator<Item = (usize, &str)> {
        self.messages.iter().enumerate().flat_map(|(i, m)| {
            let reasoning = REASONING_KEYS.iter().find_map(|key| m.get(*key)?.as_str());
            let content = m.get("content").and_then(Value::as_str);
            reasoning
                .into_iter()
                .chain(content)
                .map(move |text| (i, text))
        })
    }
}

/// A prompt and completion that are texts take nothing else.
///
/// # Errors
/// A column that would be part of them if they were chats.
pub(super) fn refuse_beside_texts(row: &Map<String, Value>, rules: &RowRules) -> RowResult<()> {
    let theirs = |ours: &str| {
        let mapped = rules.map.iter().find(|(name, _)| name == ours);
        mapped.map_or(ours.to_owned(), |(_, theirs)| theirs.clone())
    };
    let chat = format!(
        "--map query={},response={}",
        theirs("prompt"),
        theirs("completion")
    );
    refuse_columns(row, &["system", "tools"], rules, |_| {
        format!("{chat} makes a chat with it")
    })?;
    refuse_columns(row, &REFUSED_COLUMNS, rules, |column| {
        match column.strip_prefix("system_") {
            Some(_) => format!("{chat},system={column} makes a chat with it"),
            None => way_out(column),
        }
    })
}

fn way_out(column: &str) -> String {
    match column {
        "system_prompt" | "system_message" => {
            format!("--map system={column} makes it the system message")
        }
        "documents" | "functions" | "function_call" => "put it into the messages".to_owned(),
        _ => "kdscore scores text only, so take such rows out".to_owned(),
    }
}

fn refuse_columns(
    row: &Map<String, Value>,
    refused: &[&str],
    rules: &RowRules,
    way_out: impl Fn(&str) -> String,
) -> RowResult<()> {
    let found = |c: &&&str| row.get(**c).is_some_and(|v| !is_empty(v));
    let unread = |c: &&&str| !rules.ignored_keys.iter().any(|key| key == **c);
    let Some(column) = refused.iter().filter(unread).find(found) else {
        return Ok(());
    };
    Err(RowProblem::unusable(format!(
        "expected no column {column} beside what this format reads, found one, which would change what is learnt; \
         {}, or --ignore-keys {column} leaves it unread",
        way_out(column)
    )))
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(object) => object.values().all(Value::is_null),
        Value::String(text) => text.trim().is_empty(),
        _ => false,
    }
}

fn kwargs(value: Value) -> RowResult<Vec<(String, Value)>> {
    match value {
        Value::Object(object) if !is_no_json(&object) => Ok(object.into_iter().collect()),
        other => Err(RowProblem::unusable(format!(
            "chat_template_kwargs: expected an object, found {}",
            kind(&other)
        ))),
    }
}

/// ms-swift writes a call and its result as messages of roles of their own. Whether it is a call.
fn take_tool_role(
    place: &str,
    message: &mut Map<String, Value>,
    rules: &RowRules,
) -> RowResult<bool> {
    let role = message
        .get("role")
        .and_then(Value::as_str)
        .unwrap_or_default();
    if rules.roles.iter().any(|(theirs, _)| theirs == role) {
        return Ok(false);
    }
    match role {
        "tool_response" => {
            message.insert("role".into(), "tool".into());
            Ok(false)
        }
        "tool_call" => {
            let text = take_string(message, "content").map_err(|p| p.at(place))?;
            message.insert("role".into(), "assistant".into());
            // Many templates can't print a message without content.
            message.insert("content".into(), "".into());
            message.insert("tool_calls".into(), calls_of_text(place, &text)?);
            Ok(true)
        }
        _ => Ok(false),
    }
}

fn take_role(place: &str, message: &mut Map<String, Value>, rules: &RowRules) -> RowResult<String> {
    let expected = ROLES.join(", ");
    let found = match message.get("role") {
        Some(Value::String(role)) => role.clone(),
        Some(other) => {
            return Err(RowProblem::unusable(format!(
                "{place}.role: expected {expected}, found {}",
                kind(other)
            )));
        }
        None => {
            return Err(RowProblem::unusable(format!(
                "{place}: expected a key role, found {}{}",
                key_list(message),
                hints::of_message(message)
            )));
        }
    };
    let named = rules.roles.iter().find(|(theirs, _)| *theirs == found);
    let role = named.map_or(found.as_str(), |(_, ours)| ours);
    if ROLES.contains(&role) {
        message.insert("role".into(), role.into());
        return Ok(role.to_owned());
    }
    Err(RowProblem::unusable(format!(
        "{place}.role: expected {expected}, found {}; {}",
        quoted(role),
        hints::of_role(role)
    )))
}

/// What a message may hold when its flags are taken.
fn check_keys(
    place: &str,
    message: &mut Map<String, Value>,
    rules: &RowRules,
    reprinted: &mut Vec<(String, String)>,
) -> RowResult<()> {
    if let Some(unknown) = message.keys().find(|k| !MESSAGE_KEYS.contains(&k.as_str())) {
        return Err(RowProblem::unusable(format!(
            "{place}: expected the keys {}, found {}; {}",
            MESSAGE_KEYS.join(", "),
            quoted(unknown),
            hints::of_key(unknown)
        )));
    }
    for key in MESSAGE_KEYS.iter().filter(|k| **k != "tool_calls") {
        if let Some(other) = message.get(*key).filter(|v| !v.is_string() && !v.is_null()) {
            return Err(RowProblem::unusable(format!(
                "{place}.{key}: expected a string, found {}",
                kind(other)
            )));
        }
    }
    let mut reasons = REASONING_KEYS
        .iter()
        .filter_map(|k| message.get(*k)?.as_str());
    if let Some(first) = reasons.next()
        && reasons.any(|other| other != first)
    {
        return Err(RowProblem::unusable(format!(
            "{place}: expected one text under {}, found two that differ",
            REASONING_KEYS.join(", ")
        )));
    }
    match message.get_mut("tool_calls") {
        Some(Value::Null) | None => {}
        Some(Value::Array(calls)) if calls.is_empty() => {
            message.shift_remove("tool_calls");
        }
        Some(calls) => return check_calls(place, calls, rules, reprinted),
    }
    if message.get("content").is_none_or(Value::is_null) {
        return Err(RowProblem::unusable(format!(
            "{place}: expected content or tool_calls, found {}",
            key_list(message)
        )));
    }
    Ok(())
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
                json!([{"role": "user", "content": [{"type": "image", "image": "x"}]}]),
                "messages[0].content[0].type: expected text, thinking, tool_use or tool_result, found \"image\"",
            ),
            (
                json!([{"role": "user", "content": "a", "mood": 1}]),
                "found \"mood\"",
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
                json!([{"role": "assistant", "tool_calls": [{"arguments": {"x": 1e17}}]}]),
                "found 1e+17",
            ),
        ] {
            let message = chat(messages.clone()).unwrap_err();
            assert!(message.contains(says), "{messages}: {message}");
        }
    }

    #[test]
    fn columns_that_would_change_the_chat_are_refused() {
        let row = json!({"messages": [{"role": "user", "content": "a"}], "images": ["x"]});
        let row = row.as_object().unwrap().clone();
        let problem = Chat::from_messages(row, &RowRules::default()).unwrap_err();
        assert!(problem.message.contains("expected no column images beside"));
    }

    #[test]
    fn parts_become_text_calls_and_results() {
        let found = chat(json!([
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "tool_use", "id": "1", "name": "f", "input": {"z": 1}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "42"}]}, {"type": "text", "text": "so?"},
            ]},
            {"role": "assistant", "content": [{"type": "text", "text": "x", "weight": 0}, {"type": "text", "text": "y"}]},
        ]))
        .unwrap();
        assert_eq!(
            Value::from(found.messages.clone()),
            json!([
                {"role": "user", "content": "ab"},
                {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "1", "function": {"name": "f", "arguments": {"z": 1}}}], "reasoning_content": "hm"},
                {"role": "tool", "content": "42", "tool_call_id": "1"},
                {"role": "user", "content": "so?"},
                {"role": "assistant", "content": "xy"},
            ])
        );
        assert_eq!(found.flags[4].parts[0].span, 0..1);
        assert!(
            chat(json!([{"role": "user", "content": [{"type": "tool_use", "name": "f"}]}]))
                .is_err()
        );
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
