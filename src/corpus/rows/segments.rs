//! Texts in segments, each trained or not: axolotl's input_output rows.

use std::ops::Range;

use serde_json::{Map, Value};

use crate::corpus::json::kind;
use crate::corpus::problem::{RowProblem, RowResult};

/// One text and the bytes of it that are trained.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Segments {
    pub text: String,
    /// Rising.
    pub trained: Vec<Range<usize>>,
}

impl Segments {
    pub(super) fn from_row(row: &Map<String, Value>) -> RowResult<Segments> {
        let Value::Array(list) = &row["segments"] else {
            return Err(RowProblem::unusable(format!(
                "segments: expected a list, found {}",
                kind(&row["segments"])
            )));
        };
        let mut segments = Segments::default();
        for (i, segment) in list.iter().enumerate() {
            let (Some(text), Some(label)) = (segment["text"].as_str(), segment["label"].as_bool())
            else {
                return Err(RowProblem::unusable(format!(
                    "segments[{i}]: expected a text and a label of true or false, found {}",
                    kind(segment)
                )));
            };
            let start = segments.text.len();
            segments.text.push_str(text);
            if label {
                segments.trained.push(start..segments.text.len());
            }
        }
        Ok(segments)
    }
}
