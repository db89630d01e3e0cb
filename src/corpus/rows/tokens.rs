//! Pre-tokenised rows: `input_ids` with `labels` or masks.

use serde_json::{Map, Value};

use crate::corpus::json::{kind, shown};
use crate::corpus::problem::{RowProblem, RowResult};

/// The label of a token that is not trained.
const UNTRAINED: i64 = -100;
/// Masks that may stand beside each other; a token is trained where all say so.
const MASKS: [&str; 3] = ["loss_mask", "completion_mask", "assistant_masks"];

/// A row that is tokenised already.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TokenRow {
    pub ids: Vec<i64>, // (T)
    /// (T), 0 or 1; `None` when the row has neither labels nor a mask.
    pub loss_mask: Option<Vec<u8>>,
}

impl TokenRow {
    pub(super) fn from_row(row: &Map<String, Value>) -> RowResult<TokenRow> {
        let ids = integers(row, "input_ids")?.unwrap_or_default();
        refuse_padding(row, ids.len())?;
        refuse_packed(row, ids.len())?;
        let mut loss_mask: Option<Vec<u8>> = None;
        for name in MASKS {
            let Some(mask) = flags(row, name, ids.len())? else {
                continue;
            };
            loss_mask = Some(match loss_mask {
                None => mask,
                Some(so_far) => so_far.iter().zip(&mask).map(|(a, b)| a & b).collect(),
            });
        }
        if let Some(from_labels) = label_mask(row, &ids)? {
            check_agreement(&from_labels, loss_mask.as_deref())?;
            loss_mask = Some(from_labels);
        }
        Ok(TokenRow { ids, loss_mask })
    }
}

fn refuse_padding(row: &Map<String, Value>, len: usize) -> RowResult<()> {
    let attention = flags(row, "attention_mask", len)?.unwrap_or_default();
    match attention.iter().position(|&f| f == 0) {
        None => Ok(()),
        Some(t) => Err(RowProblem::unusable(format!(
            "attention_mask: expected ones only, found 0 at token {t}; remove the padding"
        ))),
    }
}

/// Several sequences in one row would see each other.
fn refuse_packed(row: &Map<String, Value>, len: usize) -> RowResult<()> {
    let positions = integers(row, "position_ids")?;
    let restart = positions.and_then(|p| (0..).zip(&p).position(|(t, &at): (i64, _)| at != t));
    let lengths = integers(row, "seq_lengths")?.filter(|lengths| *lengths != [len as i64]);
    let found = match (restart, lengths) {
        (None, None) => return Ok(()),
        (Some(t), _) => format!("position_ids that start anew at token {t}"),
        (_, Some(lengths)) => format!("seq_lengths of {} sequences", lengths.len()),
    };
    Err(RowProblem::unusable(format!(
        "expected one sequence a row, found {found}; give rows before they are packed"
    )))
}

fn label_mask(row: &Map<String, Value>, ids: &[i64]) -> RowResult<Option<Vec<u8>>> {
    let Some(labels) = integers(row, "labels")? else {
        return Ok(None);
    };
    check_length("labels", labels.len(), ids.len())?;
    let wrong = |(label, id): (&i64, &i64)| *label != UNTRAINED && label != id;
    if let Some(t) = labels.iter().zip(ids).position(wrong) {
        return Err(RowProblem::unusable(format!(
            "labels: expected {UNTRAINED} or the token's own id {} at token {t}, found {}; \
             labels must not be shifted",
            ids[t], labels[t]
        )));
    }
    Ok(Some(
        labels.iter().map(|&l| u8::from(l != UNTRAINED)).collect(),
    ))
}

fn check_agreement(labels: &[u8], masks: Option<&[u8]>) -> RowResult<()> {
    let differs = |(a, b): (&u8, &u8)| a != b;
    match masks.and_then(|m| labels.iter().zip(m).position(differs)) {
        None => Ok(()),
        Some(t) => Err(RowProblem::unusable(format!(
            "expected labels and mask to agree, found token {t} {} by labels only; remove one of them",
            if labels[t] == 1 {
                "trained"
            } else {
                "left out"
            }
        ))),
    }
}

fn check_length(name: &str, found: usize, expected: usize) -> RowResult<()> {
    if found == expected {
        return Ok(());
    }
    Err(RowProblem::unusable(format!(
        "{name}: expected {expected} values, one per token of input_ids, found {found}"
    )))
}

/// A mask of 0 and 1, or of booleans.
fn flags(row: &Map<String, Value>, name: &str, len: usize) -> RowResult<Option<Vec<u8>>> {
    let Some(list) = list(row, name)? else {
        return Ok(None);
    };
    check_length(name, list.len(), len)?;
    let flag = |(t, value): (usize, &Value)| match (value.as_bool(), value.as_i64()) {
        (Some(flag), _) => Ok(u8::from(flag)),
        (_, Some(flag @ (0 | 1))) => Ok(flag as u8),
        _ => Err(RowProblem::unusable(format!(
            "{name}: expected 0 or 1, found {} at token {t}",
            shown(value)
        ))),
    };
    list.iter()
        .enumerate()
        .map(flag)
        .collect::<RowResult<_>>()
        .map(Some)
}

fn integers(row: &Map<String, Value>, name: &str) -> RowResult<Option<Vec<i64>>> {
    let Some(list) = list(row, name)? else {
        return Ok(None);
    };
    let integer = |(t, value): (usize, &Value)| {
        value.as_i64().ok_or_else(|| {
            RowProblem::unusable(format!(
                "{name}: expected a token id, found {} at token {t}",
                shown(value)
            ))
        })
    };
    list.iter()
        .enumerate()
        .map(integer)
        .collect::<RowResult<_>>()
        .map(Some)
}

fn list<'a>(row: &'a Map<String, Value>, name: &str) -> RowResult<Option<&'a Vec<Value>>> {
    match row.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Array(list)) => Ok(Some(list)),
        Some(other) => Err(RowProblem::unusable(format!(
            "{name}: expected a list, found {}",
            kind(other)
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(row: &Value) -> Result<TokenRow, String> {
        TokenRow::from_row(row.as_object().unwrap()).map_err(|p| p.message)
    }

    #[test]
    fn packed_rows_are_refused() {
        let row = |key: &str, value: Value| parse(&json!({"input_ids": [1, 2, 3], key: value}));
        assert!(row("position_ids", json!([0, 1, 2])).is_ok());
        assert!(row("seq_lengths", json!([3])).is_ok());
        for packed in [
            row("position_ids", json!([0, 1, 0])),
            row("seq_lengths", json!([2, 1])),
        ] {
            let error = packed.unwrap_err();
            assert!(error.contains("one sequence a row"), "{error}");
        }
    }

    #[test]
    fn masks_come_from_labels_or_flags() {
        for (row, mask) in [
            (json!({"input_ids": [1, 2, 3]}), None),
            (
                json!({"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}),
                Some(vec![0, 1, 1]),
            ),
            (
                json!({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 0], "labels": null}),
                Some(vec![0, 1, 0]),
            ),
            (
                json!({"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1], "assistant_masks": [true, true, false]}),
                Some(vec![0, 1, 0]),
            ),
            (
                json!({"input_ids": [1, 2], "labels": [-100, 2], "loss_mask": [0, 1], "attention_mask": [1, 1]}),
                Some(vec![0, 1]),
            ),
        ] {
            assert_eq!(parse(&row).unwrap().loss_mask, mask, "{row}");
        }
    }

    #[test]
    fn broken_rows_are_named() {
        for (row, says) in [
            (
                json!({"input_ids": "1 2"}),
                "input_ids: expected a list, found a string",
            ),
            (
                json!({"input_ids": [1, 2.5]}),
                "expected a token id, found 2.5 at token 1",
            ),
            (
                json!({"input_ids": [1, 2], "labels": [2, -100]}),
                "own id 1 at token 0, found 2; labels must not be shifted",
            ),
            (
                json!({"input_ids": [1, 2], "labels": [1]}),
                "labels: expected 2 values, one per token of input_ids, found 1",
            ),
            (
                json!({"input_ids": [1, 2], "loss_mask": [0, 2]}),
                "expected 0 or 1, found 2 at token 1",
            ),
            (
                json!({"input_ids": [1, 2], "labels": [1, 2], "loss_mask": [0, 1]}),
                "found token 0 trained by labels only",
            ),
            (
                json!({"input_ids": [1, 2], "attention_mask": [1, 0]}),
                "found 0 at token 1; remove the padding",
            ),
        ] {
            let message = parse(&row).unwrap_err();
            assert!(message.contains(says), "{row}: {message}");
        }
    }
}
