//! What people and models wrote in a chat, held against what was rendered of it.

use std::borrow::Cow;
use std::ops::Range;

use serde_json::Value;

use super::problem::{Reason, RowProblem, RowResult, quoted};
use super::rows::{Chat, REASONING_KEYS};
use super::template::{ChatTemplate, Rendered, Until, float_text, is_space};
use super::tokenizer::TextTokenizer;

/// Strings of a chat that are names of the format, not content.
const NAMES: [&str; 3] = ["role", "type", "tool_call_id"];
const CALL: &str = "tool call";
const ARGUMENT: &str = "argument of a tool call";
/// Stands around the number of a text that is to be found again in what is rendered, and how
/// Python and JSON escape it.
const MARK: char = '\u{10fff3}';
const ESCAPED_MARKS: [&str; 2] = ["\\U0010fff3", "\\udbff\\udff3"];

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

/// What is learnt of a chat.
pub struct Learnt<'a> {
    pub template: &'a ChatTemplate,
    pub chat: &'a Chat,
    pub whole: &'a Rendered,
    /// Trained messages.
    pub trained: &'a [usize],
    /// Learnt bytes, rising, and the message they are of.
    pub spans: &'a [(usize, Range<usize>)],
    /// No span is known to be of one message rather than of another.
    pub shared: bool,
}

/// A string of a trained message with a mark in it.
struct Mark {
    message: usize,
    what: &'static str,
    text: String,
}

impl Learnt<'_> {
    /// What is learnt must hold every trained text, call and argument, and each in the answer it
    /// belongs to: a template that leaves some out, or prints them outside of its
    /// generation blocks, would teach another answer.
    ///
    /// # Errors
    /// The first text that is not there.
    pub fn check(&self) -> RowResult<()> {
        let traced = self.check_marks()?;
        let all = self.shared.then(|| self.of(0));
        let mut from = 0;
        for &i in self.trained {
            let learnt = match &all {
                Some(all) => Cow::Borrowed(all.as_str()),
                None => Cow::Owned(self.of(i)),
            };
            // Answers that share their spans stand there one behind the other.
            let start = if self.shared { from } else { 0 };
            for text in self.texts(i) {
                let bare = text.trim_matches(is_space);
                match learnt[start..].find(bare) {
                    Some(at) => from = from.max(start + at + bare.len()),
                    None if !learnt.contains(bare) && holds(&learnt, text) => {}
                    None => return Err(self.dropped(i, "text", text)),
                }
            }
            self.check_calls(i, &learnt, traced)?;
        }
        Ok(())
    }

    fn check_calls(&self, i: usize, learnt: &str, traced: bool) -> RowResult<()> {
        // Numbers can't be marked. What the texts hold besides is known where they stand apart.
        let besides = match traced && !self.shared {
            true => self.texts(i).collect::<Vec<_>>().join("\u{0}"),
            false => String::new(),
        };
        let calls = self.chat.messages[i]["tool_calls"].as_array();
        for call in calls.into_iter().flatten() {
            let function = call.get("function").unwrap_or(call);
            let name = function["name"].as_str().unwrap_or_default();
            if !learnt.contains(name) {
                return Err(self.dropped(i, CALL, name));
            }
            let arguments = &function["arguments"];
            if let Some(text) = missing_leaf(arguments, learnt) {
                return Err(self.dropped(i, ARGUMENT, text));
            }
            if let Some(found) = missing_number(arguments, learnt, &besides) {
                return Err(self.dropped(i, ARGUMENT, &found));
            }
        }
        Ok(())
    }

    fn texts(&self, message: usize) -> impl Iterator<Item = &str> {
        let of_it = move |(i, text)| (i == message).then_some(text);
        self.chat.texts().filter_map(of_it)
    }

    /// What is learnt of a message, or of all of them.
    fn of(&self, message: usize) -> String {
        let own = self.spans.iter();
        let own = own.filter(|(i, _)| self.shared || *i == message);
        let own = own.map(|(_, span)| &self.whole.text[span.clone()]);
        own.collect::<Vec<_>>().join("\u{0}")
    }

    /// Renders the chat once more, with a mark in each reasoning, each name and each string of a
    /// call: a text that stands in the answer for another reason has none. Whether that changed
    /// nothing else; where it does, the marks say nothing.
    fn check_marks(&self) -> RowResult<bool> {
        let mut chat = self.chat.clone();
        let mut marks = Vec::new();
        for &i in self.trained {
            mark_message(i, &mut chat.messages[i], &mut marks);
        }
        if marks.is_empty() {
            return Ok(true);
        }
        let values = self.template.values(&chat);
        let rendered = values.and_then(|values| self.template.render(&values, Until::End));
        let Ok(rendered) = rendered else {
            return Ok(false);
        };
        let (plain, places) = unmarked(&rendered.text);
        if plain != self.whole.text {
            return Ok(false);
        }
        for (id, mark) in marks.iter().enumerate() {
            let own = |(i, _): &&(usize, Range<usize>)| self.shared || *i == mark.message;
            let learnt = |at: &usize| self.spans.iter().filter(own).any(|(_, s)| s.contains(at));
            if !places.iter().any(|(found, at)| *found == id && learnt(at)) {
                return Err(self.dropped(mark.message, mark.what, &mark.text));
            }
        }
        Ok(true)
    }

    fn dropped(&self, message: usize, what: &str, text: &str) -> RowProblem {
        dropped(message, self.trained.last() == Some(&message), what, text)
    }
}

fn mark_message(i: usize, message: &mut Value, marks: &mut Vec<Mark>) {
    let reasoning = REASONING_KEYS
        .iter()
        .find_map(|key| message[*key].as_str().map(str::to_owned));
    if let Some(text) = reasoning.filter(|text| !text.trim_matches(is_space).is_empty()) {
        for key in REASONING_KEYS {
            if let Some(Value::String(text)) = message.get_mut(key) {
                *text = with_mark(text, marks.len());
            }
        }
        marks.push(Mark {
            message: i,
            what: "text",
            text,
        });
    }
    let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
    for call in calls.into_iter().flatten() {
        let function = match call.get("function").is_some() {
            true => &mut call["function"],
            false => call,
        };
        for (key, what) in [("name", CALL), ("arguments", ARGUMENT)] {
            if let Some(value) = function.get_mut(key) {
                mark_strings(i, what, value, marks);
            }
        }
    }
}

fn mark_strings(i: usize, what: &'static str, value: &mut Value, marks: &mut Vec<Mark>) {
    match value {
        Value::String(text) if !text.trim_matches(is_space).is_empty() => {
            let marked = with_mark(text, marks.len());
            marks.push(Mark {
                message: i,
                what,
                text: std::mem::replace(text, marked),
            });
        }
        Value::Array(items) => {
            for item in items {
                mark_strings(i, what, item, marks);
            }
        }
        Value::Object(object) => {
            for item in object.values_mut() {
                mark_strings(i, what, item, marks);
            }
        }
        _ => {}
    }
}

/// A number between two marks, in front of the text; templates may take white space off.
fn with_mark(text: &str, id: usize) -> String {
    let (blank, rest) = text.split_at(text.len() - text.trim_start_matches(is_space).len());
    format!("{blank}{MARK}{id}{MARK}{rest}")
}

/// A text without its marks, and where each stood.
fn unmarked(text: &str) -> (String, Vec<(usize, usize)>) {
    let text = ESCAPED_MARKS.iter().fold(text.to_owned(), |text, escaped| {
        match text.contains(escaped) {
            true => text.replace(escaped, &MARK.to_string()),
            false => text,
        }
    });
    let mut plain = String::with_capacity(text.len());
    let mut places = Vec::new();
    for (k, piece) in text.split(MARK).enumerate() {
        match piece.parse() {
            Ok(id) if k % 2 == 1 => places.push((id, plain.len())),
            _ => plain.push_str(piece),
        }
    }
    (plain, places)
}

/// The first number or truth value that `learnt` holds no more often than `besides` does.
fn missing_number(value: &Value, learnt: &str, besides: &str) -> Option<String> {
    match value {
        Value::Number(number) => {
            let float = number.as_f64().filter(|_| number.is_f64());
            let text = float.map_or_else(|| number.to_string(), float_text);
            (numbers(learnt, &text) <= numbers(besides, &text)).then_some(text)
        }
        Value::Bool(flag) => {
            let text = flag.to_string();
            let count = |within: &str| within.to_ascii_lowercase().matches(&text).count();
            (count(learnt) <= count(besides)).then_some(text)
        }
        Value::Array(items) => items
            .iter()
            .find_map(|v| missing_number(v, learnt, besides)),
        Value::Object(object) => object
            .values()
            .find_map(|v| missing_number(v, learnt, besides)),
        _ => None,
    }
}

/// How often a number stands in a text and not as a part of a longer one.
fn numbers(text: &str, number: &str) -> usize {
    let is_digit = |c: Option<char>| c.is_some_and(|c| c.is_ascii_digit());
    let whole = |&at: &usize| {
        let behind = text[at + number.len()..].chars().next();
        !is_digit(text[..at].chars().next_back()) && !is_digit(behind)
    };
    let found = text.match_indices(number).map(|(at, _)| at);
    found.filter(whole).count()
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
