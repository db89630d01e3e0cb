//! Source rows, format by format: what keys a row has, and what they may hold.
//!
//! A new format is a new [`Family`], a variant of [`SourceRow`] and a file beside this one.

mod messages;
mod tokens;

use serde_json::{Map, Value};

use super::json::kind;
use super::problem::{RowProblem, RowResult};
pub use messages::Chat;
pub use tokens::TokenRow;

/// One source row, its shape checked.
#[derive(Clone, PartialEq, Debug)]
pub enum SourceRow {
    Chat(Chat),
    PromptCompletion { prompt: String, completion: String },
    Text(String),
    Tokens(TokenRow),
}

/// A format, resolved: all rows of a run are of one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Family {
    Messages,
    PromptCompletion,
    Text,
    Tokens,
}

impl Family {
    const ALL: [Family; 4] = [
        Family::Messages,
        Family::PromptCompletion,
        Family::Text,
        Family::Tokens,
    ];

    /// The name on the command line and in corpus.json.
    pub fn name(self) -> &'static str {
        match self {
            Family::Messages => "messages",
            Family::PromptCompletion => "prompt-completion",
            Family::Text => "text",
            Family::Tokens => "tokens",
        }
    }

    /// The keys that make a row one of this family.
    fn keys(self) -> &'static [&'static str] {
        match self {
            Family::Messages => &["messages"],
            Family::PromptCompletion => &["prompt", "completion"],
            Family::Text => &["text"],
            Family::Tokens => &["input_ids"],
        }
    }

    fn is_of(self, row: &Map<String, Value>) -> bool {
        self.keys().iter().all(|&k| row.contains_key(k))
    }

    /// The one family whose keys the row has.
    ///
    /// # Errors
    /// A row of no family, or of two: which one is meant can't be guessed.
    pub fn detect(row: &Map<String, Value>) -> RowResult<Family> {
        let found: Vec<_> = Family::ALL.into_iter().filter(|f| f.is_of(row)).collect();
        match found[..] {
            [family] => Ok(family),
            [] => Err(RowProblem::unusable(format!(
                "expected a key messages, text or input_ids, or both prompt and completion, found {}",
                key_list(row)
            ))),
            _ => {
                let names: Vec<_> = found.iter().map(|f| f.name()).collect();
                Err(RowProblem::unusable(format!(
                    "expected the keys of one format, found those of {}; say which with --format",
                    names.join(" and ")
                )))
            }
        }
    }

    /// Checks the row's shape and takes what it holds.
    ///
    /// # Errors
    /// Missing keys, wrong types, unknown roles.
    pub fn parse(self, mut row: Map<String, Value>) -> RowResult<SourceRow> {
        if let Some(missing) = self.keys().iter().find(|&&k| !row.contains_key(k)) {
            return Err(RowProblem::unusable(format!(
                "expected a key {missing}, as in all rows of format {}, found {}",
                self.name(),
                key_list(&row)
            )));
        }
        match self {
            Family::Messages => Chat::from_messages(row).map(SourceRow::Chat),
            Family::PromptCompletion if row["prompt"].is_array() => {
                Chat::from_prompt_completion(row).map(SourceRow::Chat)
            }
            Family::PromptCompletion => Ok(SourceRow::PromptCompletion {
                prompt: take_string(&mut row, "prompt")?,
                completion: take_string(&mut row, "completion")?,
            }),
            Family::Text => take_string(&mut row, "text").map(SourceRow::Text),
            Family::Tokens => TokenRow::from_row(&row).map(SourceRow::Tokens),
        }
    }
}

fn take_string(row: &mut Map<String, Value>, key: &str) -> RowResult<String> {
    match row.remove(key) {
        Some(Value::String(text)) => Ok(text),
        other => Err(RowProblem::unusable(format!(
            "{key}: expected a string, found {}",
            kind(&other.unwrap_or_default())
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
            .and_then(|f| f.parse(row))
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
            (r#"{"conversations": []}"#, "found the keys conversations"),
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
