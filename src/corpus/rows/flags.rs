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
}

/// Takes the flags out of a message.
///
/// # Errors
/// Flags that contradict each other, a weight between 0 and 1, a flag on a message that is not
/// the assistant's.
pub fn take_flags(
    place: &str,
    role: &str,
    message: &mut Map<String, Value>,
) -> RowResult<TurnFlags> {
    let trained = part_flag(place, message)?;
    if trained == Some(true) && role != "assistant" {
        return Err(RowProblem::unusable(format!(
            "{place}: expected only the assistant's messages to be trained, found a {role} message that asks for it; \
             take its flag out, or give it the role with --roles"
        )));
    }
    let detail = message.shift_remove("train_detail");
    let content = message
        .get("content")
        .and_then(Value::as_str)
        .unwrap_or_default();
    let parts = match detail {
        None => Vec::new(),
        Some(Value::Array(list)) => details(&format!("{place}.train_detail"), &list, content)?,
        Some(other) => {
            return Err(RowProblem::unusable(format!(
                "{place}.train_detail: expected a list, found {}",
                kind(&other)
            )));
        }
    };
    Ok(TurnFlags { trained, parts })
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

/// `{begin_offset, end_offset, train}`, in characters, the end included.
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
        found.push(PartFlag {
            span: bytes[begin]..bytes[end + 1],
            trained,
        });
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn flags(message: Value) -> Result<TurnFlags, String> {
        let mut message = message.as_object().unwrap().clone();
        take_flags("m", "assistant", &mut message).map_err(|p| p.message)
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
        let mut user = json!({"train": true}).as_object().unwrap().clone();
        assert!(take_flags("m", "user", &mut user).is_err());
    }

    #[test]
    fn details_are_characters_with_their_end() {
        let found = flags(json!({"content": "é東c", "train_detail": [
            {"begin_offset": 0, "end_offset": 0, "train": false}, {"begin_offset": 1, "end_offset": 2, "train": true},
        ]}));
        let spans: Vec<_> = found
            .unwrap()
            .parts
            .into_iter()
            .map(|p| (p.span, p.trained))
            .collect();
        assert_eq!(spans, [(0..2, false), (2..6, true)]);
    }
}
