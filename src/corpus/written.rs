//! What people and models wrote in a chat, held against what was rendered of it.

use serde_json::Value;

use super::problem::{Reason, RowProblem, RowResult, quoted};
use super::rows::Chat;
use super::template::is_space;
use super::tokenizer::TextTokenizer;

/// Strings of a chat that are names of the format, not content.
const NAMES: [&str; 3] = ["role", "type", "tool_call_id"];

/// # Errors
/// A control token written out in content, a tool call or a tool's schema.
pub fn check_control_tokens(tokenizer: &TextTokenizer, chat: &Chat) -> RowResult<()> {
    let messages = chat.messages.iter().enumerate();
    let messages = messages.map(|(i, m)| (format!("message {i}"), m));
    let tools = chat.tools.iter().map(|tools| ("tools".to_owned(), tools));
    for (place, value) in messages.chain(tools) {
        let Some(control) = control_in(tokenizer, value) else {
            continue;
        };
        return Err(RowProblem::new(
            Reason::ControlTokenInContent,
            format!(
                "{place}: expected content without control tokens, found {}, which would end or start a turn; \
                 --allow-control-tokens takes it as one",
                quoted(control)
            ),
        ));
    }
    Ok(())
}

fn control_in<'a>(tokenizer: &'a TextTokenizer, value: &Value) -> Option<&'a str> {
    match value {
        Value::String(text) => tokenizer.control_token_in(text),
        Value::Array(items) => items.iter().find_map(|v| control_in(tokenizer, v)),
        Value::Object(object) => object.iter().find_map(|(key, value)| {
            if NAMES.contains(&key.as_str()) && value.is_string() {
                return None;
            }
            tokenizer
                .control_token_in(key)
                .or_else(|| control_in(tokenizer, value))
        }),
        _ => None,
    }
}

/// Every text of a trained turn must stand in what is learnt: a template that drops the
/// reasoning, or prints it outside its generation blocks, would teach another answer.
///
/// # Errors
/// The first text that does not.
pub fn check_written(chat: &Chat, trained: &[usize], learnt: &str) -> RowResult<()> {
    let last = trained.last();
    let dropped = |i: usize, what: &str, text: &str| dropped(i, last == Some(&i), what, text);
    for (i, text) in chat.texts().filter(|(i, _)| trained.contains(i)) {
        if !holds(learnt, text) {
            return Err(dropped(i, "text", text));
        }
    }
    for &i in trained {
        let calls = chat.messages[i]["tool_calls"].as_array();
        for call in calls.into_iter().flatten() {
            let function = call.get("function").unwrap_or(call);
            let name = function["name"].as_str().unwrap_or_default();
            if !learnt.contains(name) {
                return Err(dropped(i, "tool call", name));
            }
            if let Some(text) = missing_leaf(&function["arguments"], learnt) {
                return Err(dropped(i, "argument of a tool call", text));
            }
        }
    }
    Ok(())
}

/// Whether `text` is a part of `rendered`, white space aside: templates trim texts, and take
/// reasoning apart and set it anew with other line ends.
pub fn holds(rendered: &str, text: &str) -> bool {
    let bare = |text: &str| text.split(is_space).collect::<String>();
    rendered.contains(text.trim_matches(is_space)) || bare(rendered).contains(&bare(text))
}

/// The first string that is printed neither as it is nor as JSON or Python write it.
fn missing_leaf<'a>(value: &'a Value, learnt: &str) -> Option<&'a str> {
    match value {
        Value::String(text) if !is_printed(text, learnt) => Some(text),
        Value::Array(items) => items.iter().find_map(|v| missing_leaf(v, learnt)),
        Value::Object(object) => object.iter().find_map(|(key, value)| {
            let key = Some(key.as_str()).filter(|k| !is_printed(k, learnt));
            key.or_else(|| missing_leaf(value, learnt))
        }),
        _ => None,
    }
}

fn is_printed(text: &str, learnt: &str) -> bool {
    if learnt.contains(text.trim_matches(is_space)) {
        return true;
    }
    // As long as each run without escapes is there: which escapes a template uses is its choice.
    let plain = |c: char| c.is_ascii() && !c.is_control() && !"\"'\\<>&".contains(c);
    text.split(|c| !plain(c))
        .all(|run| learnt.contains(run.trim()))
}

fn dropped(message: usize, is_last: bool, what: &str, text: &str) -> RowProblem {
    let or = match is_last {
        true => "",
        // Most templates of models that think print the thoughts of the last answer alone.
        false => ", or train the last answer alone with --loss last-assistant",
    };
    RowProblem::new(
        Reason::DroppedByTemplate,
        format!(
            "message {message}: expected every trained {what} in what the chat template renders as the answer, \
             found {} left out; give another template with --chat-template, or leave the message untrained (weight 0){or}",
            quoted(text.trim_matches(is_space))
        ),
    )
}
