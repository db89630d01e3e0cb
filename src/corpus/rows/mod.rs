//! Source rows, format by format: what keys a row has, and what they may hold.
//!
//! A new format is a new [`Family`], a variant of [`SourceRow`] and a file beside this one.

mod calls;
mod content;
mod families;
mod flags;
mod hints;
mod messages;
mod segments;
mod tokens;

use serde_json::{Map, Value};

use super::json::{kind, shown};
use super::problem::{RowProblem, RowResult};
use super::rules::{Format, RowRules};
use messages::refuse_beside_texts;
pub use messages::{Chat, REASONING_KEYS};
pub use segments::Segments;
pub use tokens::TokenRow;

/// One source row, its shape checked.
#[derive(Clone, PartialEq, Debug)]
pub enum SourceRow {
    Chat(Chat),
    PromptCompletion { prompt: String, completion: String },
    Text(String),
    Segments(Segments),
    Tokens(TokenRow),
}

/// A format, resolved: all rows of a run are of one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Family {
    Messages,
    Sharegpt,
    Alpaca,
    Conversation,
    QueryResponse,
    PromptCompletion,
    Text,
    Segments,
    Tokens,
}

/// Columns of TRL and LLaMA-Factory that say whether an answer is a good one.
const MARKS: [&str; 2] = ["label", "kto_tag"];

impl Family {
    pub const ALL: [Family; 9] = [
        Family::Messages,
        Family::Sharegpt,
        Family::Alpaca,
        Family::Conversation,
        Family::QueryResponse,
        Family::PromptCompletion,
        Family::Text,
        Family::Segments,
        Family::Tokens,
    ];

    /// The family a format names; none for the one that the first row decides.
    pub fn of_format(format: Format) -> Option<Family> {
        match format {
            Format::Auto => None,
            Format::Messages => Some(Family::Messages),
            Format::Sharegpt => Some(Family::Sharegpt),
            Format::Alpaca => Some(Family::Alpaca),
            Format::Conversation => Some(Family::Conversation),
            Format::QueryResponse => Some(Family::QueryResponse),
            Format::PromptCompletion => Some(Family::PromptCompletion),
            Format::Text => Some(Family::Text),
            Format::Segments => Some(Family::Segments),
            Format::Tokens => Some(Family::Tokens),
        }
    }

    /// The name on the command line and in corpus.json.
    pub fn name(self) -> &'static str {
        match self {
            Family::Messages => "messages",
            Family::Sharegpt => "sharegpt",
            Family::Alpaca => "alpaca",
            Family::Conversation => "conversation",
            Family::QueryResponse => "query-response",
            Family::PromptCompletion => "prompt-completion",
            Family::Text => "text",
            Family::Segments => "segments",
            Family::Tokens => "tokens",
        }
    }

    /// The keys that make a row one of this family.
    fn keys(self) -> &'static [&'static str] {
        match self {
            Family::Messages => &["messages"],
            Family::Sharegpt => &["conversations"],
            Family::Alpaca => &["instruction", "output"],
            Family::Conversation => &["conversation"],
            Family::QueryResponse => &["query", "response"],
            Family::PromptCompletion => &["prompt", "completion"],
            Family::Text => &["text"],
            Family::Segments => &["segments"],
            Family::Tokens => &["input_ids"],
        }
    }

    /// Whether every row is a chat, which needs a template.
    pub fn is_chat(self) -> bool {
        use Family::{Alpaca, Conversation, Messages, QueryResponse, Sharegpt};
        matches!(
            self,
            Messages | Sharegpt | Alpaca | Conversation | QueryResponse
        )
    }

    fn is_of(self, row: &Map<String, Value>) -> bool {
        let there = |k: &&str| row.get(*k).is_some_and(|v| !v.is_null());
        self.keys().iter().all(there)
    }

    /// The one family whose keys the row has.
    ///
    /// # Errors
    /// A row of no family, or of two: which one is meant can't be guessed. One that has a family's
    /// keys and is known to be something else.
    pub fn detect(row: &Map<String, Value>) -> RowResult<Family> {
        let found: Vec<_> = Family::ALL.into_iter().filter(|f| f.is_of(row)).collect();
        match found[..] {
            [family] => match hints::mistaken(row) {
                None => Ok(family),
                Some(found) => Err(RowProblem::unusable(found)),
            },
            [] => {
                let named = |f: &Family| f.keys().iter().all(|k| row.contains_key(*k));
                if let Some(family) = Family::ALL.into_iter().find(named) {
                    family.check_keys(row)?;
                }
                Err(RowProblem::unusable(format!(
                    "expected a key messages, conversations, conversation, text, segments or input_ids, or prompt and completion, \
                     instruction and output, or query and response, found {}{}",
                    key_list(row),
                    hints::of_row(row)
                )))
            }
            _ => {
                let names: Vec<_> = found.iter().map(|f| f.name()).collect();
                Err(RowProblem::unusable(format!(
                    "expected the keys of one format, found those of {}; say which with --format",
                    names.join(" and ")
                )))
            }
        }
    }

    /// # Errors
    /// A key of the family that is not there, or holds nothing.
    fn check_keys(self, row: &Map<String, Value>) -> RowResult<()> {
        for key in self.keys() {
            let message = match row.get(*key) {
                Some(Value::Null) => format!(
                    "{key}: expected what a row of format {} holds there, found null",
                    self.name()
                ),
                None => format!(
                    "expected a key {key}, as in all rows of format {}, found {}",
                    self.name(),
                    key_list(row)
                ),
                Some(_) => continue,
            };
            return Err(RowProblem::unusable(message));
        }
        Ok(())
    }

    /// Checks the row's shape and takes what it holds.
    ///
    /// # Errors
    /// Missing keys, wrong types, unknown roles.
    pub fn parse(self, mut row: Map<String, Value>, rules: &RowRules) -> RowResult<SourceRow> {
        self.check_keys(&row)?;
        row.retain(|_, v| !v.is_null());
        if self.is_chat() || self == Family::PromptCompletion {
            refuse_unwanted(&row, rules)?;
        }
        refuse_weights(&row, rules)?;
        let is_list = |key: &str| row[key].is_array();
        match self {
            Family::Messages => Chat::from_messages(row, rules).map(SourceRow::Chat),
            Family::Sharegpt => families::sharegpt(row, rules).map(SourceRow::Chat),
            Family::Alpaca => families::alpaca(row, rules).map(SourceRow::Chat),
            Family::Conversation => families::conversation(row, rules).map(SourceRow::Chat),
            Family::QueryResponse => families::query_response(row, rules).map(SourceRow::Chat),
            Family::PromptCompletion if is_list("prompt") => {
                Chat::from_prompt_completion(row, rules).map(SourceRow::Chat)
            }
            Family::PromptCompletion => {
                refuse_beside_texts(&row, rules)?;
                Ok(SourceRow::PromptCompletion {
                    prompt: take_string(&mut row, "prompt")?,
                    completion: take_string(&mut row, "completion")?,
                })
            }
            Family::Text => take_string(&mut row, "text").map(SourceRow::Text),
            Family::Segments => Segments::from_row(&row).map(SourceRow::Segments),
            Family::Tokens => TokenRow::from_row(&row).map(SourceRow::Tokens),
        }
    }
}

/// Flags that messages may carry, as keys of a row.
const FLAGS: [&str; 4] = ["weight", "train", "loss", "loss_scale"];

/// # Errors
/// A row of a preference set whose answer is marked as one to avoid.
fn refuse_unwanted(row: &Map<String, Value>, rules: &RowRules) -> RowResult<()> {
    let marked = |key: &&str| row.get(*key) == Some(&Value::Bool(false));
    let unread = |key: &&str| rules.ignored_keys.iter().any(|ignored| ignored == key);
    match MARKS.iter().find(|key| marked(key) && !unread(key)) {
        None => Ok(()),
        Some(key) => Err(RowProblem::unusable(format!(
            "{key}: expected an answer to learn, found one marked false; --ignore-keys {key} trains it all the same"
        ))),
    }
}

/// A row counts whole or not at all, and says so by being there.
///
/// # Errors
/// A flag on the row itself that says anything but "train this".
fn refuse_weights(row: &Map<String, Value>, rules: &RowRules) -> RowResult<()> {
    let differs = |key: &&str| {
        let value = row.get(*key);
        value.is_some_and(|v| v.as_f64() != Some(1.0) && *v != Value::Bool(true))
    };
    let unread = |key: &&str| rules.ignored_keys.iter().any(|ignored| ignored == key);
    match FLAGS.iter().find(|key| differs(key) && !unread(key)) {
        None => Ok(()),
        Some(key) => Err(RowProblem::unusable(format!(
            "{key}: expected 1 or true for a whole row, found {}; leave such rows out, or flag messages one by one; --ignore-keys {key} trains the row all the same",
            shown(&row[*key])
        ))),
    }
}

/// Gives the keys of a row, and of the messages in its lists, our names for them.
///
/// # Errors
/// A key that would take the name of one that is there.
pub fn renamed(row: Map<String, Value>, rules: &RowRules) -> RowResult<Map<String, Value>> {
    if rules.map.is_empty() {
        return Ok(row);
    }
    let mut out = Map::new();
    for (key, value) in row {
        let value = match value {
            Value::Array(items) => Value::Array(
                items
                    .into_iter()
                    .map(|item| match item {
                        Value::Object(object) => rename_keys(object, rules).map(Value::Object),
                        other => Ok(other),
                    })
                    .collect::<RowResult<_>>()?,
            ),
            other => other,
        };
        out.insert(key, value);
    }
    rename_keys(out, rules)
}

fn rename_keys(object: Map<String, Value>, rules: &RowRules) -> RowResult<Map<String, Value>> {
    let mut out = Map::new();
    for (key, value) in object {
        let named = rules.map.iter().find(|(_, theirs)| *theirs == key);
        let name = named.map_or(key.as_str(), |(ours, _)| ours);
        // A key whose name was given to another is out of the way.
        let displaced = named.is_none() && rules.map.iter().any(|(ours, _)| *ours == key);
        if displaced || out.contains_key(name) {
            return Err(RowProblem::unusable(format!(
                "expected --map to give free names, found {name} taken already"
            )));
        }
        out.insert(name.to_owned(), value);
    }
    Ok(out)
}

fn take_string(row: &mut Map<String, Value>, key: &str) -> RowResult<String> {
    match row.remove(key) {
        Some(Value::String(text)) => Ok(text),
        other => Err(RowProblem::unusable(format!(
            "{key}: expected a string, found {}",
            other.as_ref().map_or("none", kind)
        ))),
    }
}

fn key_list(row: &Map<String, Value>) -> String {
    if row.is_empty() {
        return "no keys".to_owned();
    }
    let mut keys: Vec<_> = row
        .keys()
        .take(8)
        .map(|k| k.escape_debug().to_string())
        .collect();
    if row.len() > keys.len() {
        keys.push("…".to_owned());
    }
    format!("the keys {}", keys.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::corpus::json::parse_object;

    fn parse(line: &str) -> Result<SourceRow, String> {
        let row = parse_object(line.as_bytes()).unwrap();
        Family::detect(&row)
            .and_then(|f| f.parse(row, &RowRules::default()))
            .map_err(|p| p.message)
    }

    #[test]
    fn the_keys_decide_the_family() {
        assert_eq!(
            parse(r#"{"text": "a", "id": 1}"#),
            Ok(SourceRow::Text("a".into()))
        );
        assert_eq!(
            parse(r#"{"prompt": "a", "completion": "b"}"#),
            Ok(SourceRow::PromptCompletion {
                prompt: "a".into(),
                completion: "b".into()
            })
        );
        let Ok(SourceRow::Chat(chat)) =
            parse(r#"{"messages": [{"role": "user", "content": "a"}], "prompt": "a"}"#)
        else {
            panic!("a chat")
        };
        assert_eq!(chat.messages.len(), 1);
    }

    #[test]
    fn unclear_rows_are_refused() {
        for (line, says) in [
            (
                r#"{"text": "a", "messages": []}"#,
                "found those of messages and text; say which with --format",
            ),
            (
                r#"{"answer": 1, "question": 2}"#,
                "--map query=question,response=answer",
            ),
            (r#"{"x": []}"#, "found the keys x; --map"),
            (r#"{}"#, "found no keys"),
            (r#"{"text": 3}"#, "text: expected a string, found a number"),
            (
                r#"{"prompt": "a", "completion": []}"#,
                "completion: expected a string, found a list",
            ),
            (
                r#"{"prompt": [], "completion": "a"}"#,
                "prompt: expected at least one message",
            ),
        ] {
            let message = parse(line).unwrap_err();
            assert!(message.contains(says), "{line}: {message}");
        }
    }
}
