//! What a row itself says about the loss: per message, per part, per range of characters.

use std::ops::Range;

use serde_json::{Map, Value};

use crate::corpus::json::{kind, shown};
use crate::corpus::problem::{RowProblem, RowResult};

/// Keys that mean one thing: 1 or true trains the message, 0 or false does not.
const FLAG_KEYS: [&str; 4] = ["weight", "train", "loss", "loss_scale"];

/// Bytes of a message's content, and whether they are trained.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PartFlag {
    pub span: Range<usize>,
    pub trained: bool,
}

/// What a message says about its own loss.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TurnFlags {
    pub trained: Option<bool>,
    /// Rising, not overlapping.
    pub parts: Vec<PartFlag>,
    /// The parts are those of a `train_detail`: they cover the content, and what the template
    /// prints around it is not trained but for the end of the turn, which always is.
    pub detailed: bool,
}

/// Takes the flags out of a message; `parts` are those of the parts of its content.
///
/// # Errors
/// Flags that contradict each other, a weight between 0 and 1, a flag on a message that is not
/// the assistant's.
pub fn take_flags(
    place: &str,
    role: &str,
    message: &mut Map<String, Value>,
    parts: Vec<PartFlag>,
) -> RowResult<TurnFlags> {
    let mut flags = TurnFlags {
        trained: part_flag(place, message)?,
        parts,
        detailed: false,
    };
    match message.shift_remove("train_detail").unwrap_or_default() {
        Value::Null => {}
        // No range is trained, unless the message's own flag says that all of it is.
        Value::Array(list) if list.is_empty() => {
            flags.trained.get_or_insert(false);
        }
        Value::Array(_) if !flags.parts.is_empty() => {
            return Err(RowProblem::unusable(format!(
                "{place}: expected train_detail or flags on parts, found both"
            )));
        }
        Value::Array(list) => {
            let content = message.get("content").and_then(Value::as_str);
            let place = format!("{place}.train_detail");
            flags.parts = details(&place, &list, content.unwrap_or_default())?;
            flags.detailed = true;
        }
        other => {
            return Err(RowProblem::unusable(format!(
                "{place}.train_detail: expected a list, found {}",
                kind(&other)
            )));
        }
    }
    let asks = flags.trained == Some(true) || flags.parts.iter().any(|p| p.trained);
    if asks && role != "assistant" {
        return Err(RowProblem::unusable(format!(
            "{place}: expected only the assistant's messages to be trained, found a {role} message that asks for it; \
             take its flag out, or give it the role with --roles"
        )));
    }
    Ok(flags)
}

/// The one flag a message or part has, under whatever name.
///
/// # Errors
/// Two that differ, or one that is neither 0 nor 1.
pub fn part_flag(place: &str, object: &mut Map<String, Value>) -> RowResult<Option<bool>> {
    let mut found: Option<(&str, bool)> = None;
    for key in FLAG_KEYS {
        let Some(value) = object.shift_remove(key).filter(|v| !v.is_null()) else {
            continue;
        };
        let number = value.as_f64();
        let flag = match (value.as_bool(), number) {
            (Some(flag), _) => flag,
            (_, Some(number)) if number == 0.0 || number == 1.0 => number == 1.0,
            _ => {
                return Err(RowProblem::unusable(format!(
                    "{place}.{key}: expected 0 or 1, false or true, found {}; a corpus has no weights in between",
                    shown(&value)
                )));
            }
        };
        match found {
            Some((other, before)) if before != flag => {
                return Err(RowProblem::unusable(format!(
                    "{place}: expected {other} and {key} to say the same, found that they differ"
                )));
            }
            _ => found = Some((key, flag)),
        }
    }
    Ok(found.map(|(_, flag)| flag))
}

/// `{begin_offset, end_offset, train}`, in characters, the end included; what lies between them is
/// not trained.
fn details(place: &str, list: &[Value], content: &str) -> RowResult<Vec<PartFlag>> {
    let bytes: Vec<usize> = content
        .char_indices()
        .map(|(at, _)| at)
        .chain([content.len()])
        .collect();
    let mut found: Vec<PartFlag> = Vec::new();
    for (i, item) in list.iter().enumerate() {
        let number = |key: &str| item[key].as_u64().and_then(|n| usize::try_from(n).ok());
        let (begin, end) = (number("begin_offset"), number("end_offset"));
        let (Some(begin), Some(end), Some(trained)) = (begin, end, item["train"].as_bool()) else {
            return Err(RowProblem::unusable(format!(
                "{place}[{i}]: expected begin_offset, end_offset and train, found {item}"
            )));
        };
        let last = found.last().map_or(0, |f| f.span.end);
        let inside = begin <= end && end + 1 < bytes.len();
        if !inside || bytes[begin] < last {
            return Err(RowProblem::unusable(format!(
                "{place}[{i}]: expected rising ranges inside the {} characters of the content, found {begin} to {end}",
                bytes.len() - 1
            )));
        }
        let span = bytes[begin]..bytes[end + 1];
        if last < span.start {
            found.push(untrained(last..span.start));
        }
        found.push(PartFlag { span, trained });
    }
    let last = found.last().map_or(0, |f| f.span.end);
    if last < content.len() {
        found.push(untrained(last..content.len()));
    }
    Ok(found)
}

fn untrained(span: Range<usize>) -> PartFlag {
    PartFlag {
        span,
        trained: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn flags(message: Value) -> Result<TurnFlags, String> {
        let mut message = message.as_object().unwrap().clone();
        take_flags("m", "assistant", &mut message, Vec::new()).map_err(|p| p.message)
    }

    #[test]
    fn flags_say_one_thing_or_are_refused() {
        assert_eq!(flags(json!({"weight": 0})).unwrap().trained, Some(false));
        assert_eq!(
            flags(json!({"loss": true, "train": true, "weight": 1.0}))
                .unwrap()
                .trained,
            Some(true)
        );
        assert_eq!(flags(json!({"weight": null})).unwrap().trained, None);
        for (message, says) in [
            (
                json!({"weight": 0.5}),
                "expected 0 or 1, false or true, found 0.5",
            ),
            (
                json!({"weight": 1, "train": false}),
                "expected weight and train to say the same",
            ),
            (json!({"train_detail": {}}), "expected a list"),
            (
                json!({"content": "ab", "train_detail": [{"begin_offset": 0, "end_offset": 2, "train": true}]}),
                "inside the 2 characters",
            ),
        ] {
            let found = flags(message).unwrap_err();
            assert!(found.contains(says), "{found}");
        }
    }

    #[test]
    fn only_the_assistants_messages_ask_to_be_trained() {
        let range = |train: bool| json!([{"begin_offset": 0, "end_offset": 0, "train": train}]);
        for (asks, message) in [
            (true, json!({"train": true})),
            (true, json!({"content": "ab", "train_detail": range(true)})),
            (false, json!({"weight": 0})),
            (
                false,
                json!({"content": "ab", "train_detail": range(false)}),
            ),
            (false, json!({"content": "ab", "train_detail": []})),
            (false, json!({"content": "ab", "train_detail": null})),
        ] {
            let mut message = message.as_object().unwrap().clone();
            let found = take_flags("m", "user", &mut message, Vec::new());
            assert_eq!(found.is_err(), asks, "{found:?}");
        }
        let part = PartFlag {
            span: 0..1,
            trained: true,
        };
        assert!(take_flags("m", "tool", &mut Map::new(), vec![part]).is_err());
    }

    #[test]
    fn details_are_characters_with_their_end() {
        let found = flags(json!({"content": "é東cde", "train_detail": [
            {"begin_offset": 1, "end_offset": 2, "train": true}, {"begin_offset": 3, "end_offset": 3, "train": true},
        ]})).unwrap();
        assert!(found.detailed);
        let spans: Vec<_> = found
            .parts
            .into_iter()
            .map(|p| (p.span, p.trained))
            .collect();
        let expected = [(0..2, false), (2..6, true), (6..7, true), (7..8, false)];
        assert_eq!(spans, expected);
        let empty = |message: Value| flags(message).unwrap().trained;
        assert_eq!(empty(json!({"train_detail": []})), Some(false));
        assert_eq!(
            empty(json!({"train_detail": [], "train": true})),
            Some(true)
        );
    }
}
