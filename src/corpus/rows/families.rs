//! Rows of other families, made chats.

use serde_json::{Map, Value, json};

use super::calls::calls_of_text;
use super::messages::Chat;
use super::{hints, key_list, take_string};
use crate::corpus::json::kind;
use crate::corpus::problem::{RowProblem, RowResult, quoted};
use crate::corpus::rules::RowRules;

/// `conversations` of `from` and `value`, or of `role` and `content`. Turns must take turns, as
/// LLaMA-Factory demands: what skips one is a dump with messages missing.
pub fn sharegpt(mut row: Map<String, Value>, rules: &RowRules) -> RowResult<Chat> {
    let list = match row.shift_remove("conversations") {
        Some(Value::Array(list)) if !list.is_empty() => list,
        other => {
            return Err(RowProblem::unusable(format!(
                "conversations: expected a list of messages, found {}",
                other.as_ref().map_or("none", |v| if v.is_array() {
                    "an empty list"
                } else {
                    kind(v)
                })
            )));
        }
    };
    let mut chat = Chat::default();
    for (i, message) in list.into_iter().enumerate() {
        let place = format!("conversations[{i}]");
        let message = match message {
            Value::Object(message) if message.contains_key("from") => turn(&place, message, rules)?,
            other => other,
        };
        chat.add(&place, message, rules)?;
    }
    chat.add_system(row.shift_remove("system"))?;
    check_turns(&chat)?;
    chat.with_columns(row, rules)
}

fn turn(place: &str, mut message: Map<String, Value>, rules: &RowRules) -> RowResult<Value> {
    let from = take_string(&mut message, "from").map_err(|p| p.at(place))?;
    let value = take_string(&mut message, "value").map_err(|p| p.at(place))?;
    let named = rules.roles.iter().find(|(theirs, _)| *theirs == from);
    let role = match named.map_or(from.as_str(), |(_, ours)| ours) {
        "human" | "user" => "user",
        "gpt" | "assistant" | "function_call" => "assistant",
        "observation" | "tool" => "tool",
        "system" => "system",
        other => {
            return Err(RowProblem::unusable(format!(
                "{place}.from: expected human, gpt, system, function_call or observation, found {}; {}",
                quoted(other),
                hints::of_role(other)
            )));
        }
    };
    let mut made = Map::new();
    made.insert("role".into(), role.into());
    if from == "function_call" {
        // Many templates can't print a message without content.
        made.insert("content".into(), "".into());
        made.insert("tool_calls".into(), calls_of_text(place, &value)?);
    } else {
        made.insert("content".into(), value.into());
    }
    made.extend(message);
    Ok(made.into())
}

fn check_turns(chat: &Chat) -> RowResult<()> {
    let mut asked = false;
    for (i, message) in chat.messages.iter().enumerate() {
        let asks = match message["role"].as_str() {
            Some("system") if i == 0 => continue,
            Some("assistant") => false,
            _ => true,
        };
        if asks == asked {
            return Err(RowProblem::unusable(format!(
                "conversations: expected human and gpt in turn, found {} in place {i}; \
                 a message is missing or doubled; for chats in any order rename the column with --map messages=conversations,role=from,content=value --roles human=user,gpt=assistant",
                message["role"].as_str().unwrap_or_default()
            )));
        }
        asked = asks;
    }
    Ok(())
}

/// `instruction`, `input`, `output`, with `system` and `history`: the question is the instruction
/// and, on the next line, the input.
pub fn alpaca(mut row: Map<String, Value>, rules: &RowRules) -> RowResult<Chat> {
    let instruction = take_string(&mut row, "instruction")?;
    let output = take_string(&mut row, "output")?;
    let input = match row.contains_key("input") {
        true => take_string(&mut row, "input")?,
        false => String::new(),
    };
    let question = match (instruction.is_empty(), input.is_empty()) {
        (_, true) => instruction,
        (true, _) => input,
        _ => format!("{instruction}\n{input}"),
    };
    asked_and_answered(row, question, output, rules)
}

/// `query` and `response`, with `system` and `history`.
pub fn query_response(mut row: Map<String, Value>, rules: &RowRules) -> RowResult<Chat> {
    let query = take_string(&mut row, "query")?;
    let response = take_string(&mut row, "response")?;
    asked_and_answered(row, query, response, rules)
}

fn asked_and_answered(
    mut row: Map<String, Value>,
    question: String,
    answer: String,
    rules: &RowRules,
) -> RowResult<Chat> {
    let mut chat = Chat::default();
    let history = match row.shift_remove("history").unwrap_or_default() {
        Value::Null => Vec::new(),
        Value::Array(list) => list,
        other => {
            return Err(RowProblem::unusable(format!(
                "history: expected a list of pairs, found {}",
                kind(&other)
            )));
        }
    };
    for (i, pair) in history.iter().enumerate() {
        let pair = pair.as_array().map_or(&[][..], Vec::as_slice);
        let [Value::String(asked), Value::String(answered)] = pair else {
            return Err(RowProblem::unusable(format!(
                "history[{i}]: expected a pair of strings, question and answer, found another"
            )));
        };
        add_pair(&mut chat, asked, answered, rules)?;
    }
    add_pair(&mut chat, &question, &answer, rules)?;
    chat.add_system(row.shift_remove("system"))?;
    chat.with_columns(row, rules)
}

fn add_pair(chat: &mut Chat, asked: &str, answered: &str, rules: &RowRules) -> RowResult<()> {
    chat.add("question", json!({"role": "user", "content": asked}), rules)?;
    chat.add(
        "answer",
        json!({"role": "assistant", "content": answered}),
        rules,
    )
}

/// `conversation` of `human` and `assistant` pairs.
pub fn conversation(mut row: Map<String, Value>, rules: &RowRules) -> RowResult<Chat> {
    let list = match row.shift_remove("conversation") {
        Some(Value::Array(list)) if !list.is_empty() => list,
        other => {
            return Err(RowProblem::unusable(format!(
                "conversation: expected a list of pairs, found {}",
                other.as_ref().map_or("none", |v| if v.is_array() {
                    "an empty list"
                } else {
                    kind(v)
                })
            )));
        }
    };
    let mut chat = Chat::default();
    let mut system = row.shift_remove("system");
    for (i, pair) in list.into_iter().enumerate() {
        let place = format!("conversation[{i}]");
        let Value::Object(mut pair) = pair else {
            return Err(RowProblem::unusable(format!(
                "{place}: expected an object with human and assistant, found {}",
                kind(&pair)
            )));
        };
        if i == 0 && system.is_none() {
            system = pair.shift_remove("system");
        }
        if !pair.contains_key("human") || !pair.contains_key("assistant") {
            return Err(RowProblem::unusable(format!(
                "{place}: expected human and assistant, found {}; {}",
                key_list(&pair),
                match pair.contains_key("role") {
                    true => "--map messages=conversation reads a list of messages",
                    false => "--map gives them these names, as in human=input,assistant=output",
                }
            )));
        }
        let human = take_string(&mut pair, "human").map_err(|p| p.at(&place))?;
        let assistant = take_string(&mut pair, "assistant").map_err(|p| p.at(&place))?;
        if let Some(key) = pair.keys().next() {
            return Err(RowProblem::unusable(format!(
                "{place}: expected human and assistant, found {}",
                quoted(key)
            )));
        }
        add_pair(&mut chat, &human, &assistant, rules)?;
    }
    chat.add_system(system)?;
    chat.with_columns(row, rules)
}
