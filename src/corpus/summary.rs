//! What became of the source rows: counts and first examples, in bounded memory.

use std::collections::{BTreeMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use anyhow::{Result, ensure};

use super::Sequence;
use super::encode::TokenisedRow;
use super::problem::{Lint, Reason, RowProblem};
use super::source::SourceFile;

/// A count and the first example, with its place.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Counted {
    pub count: u64,
    pub example: String,
}

/// The result of a run over all source rows.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Summary {
    pub sources: Vec<SourceFile>,
    /// Always `sequences` plus the counts of `left_out`.
    pub source_rows: u64,
    pub sequences: u64,
    pub left_out: BTreeMap<Reason, Counted>,
    pub lints: BTreeMap<Lint, Counted>,
    pub tokens: u64,
    /// Scored positions.
    pub rows: u64,
    pub lengths: Lengths,
}

/// Sequence lengths in tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Lengths {
    pub min: usize,
    /// The lower one of the two in the middle.
    pub median: usize,
    /// Nine in ten are at most this long.
    pub p90: usize,
    pub p99: usize,
    pub max: usize,
}

/// A [`Summary`] in the making.
#[derive(Debug, Default)]
pub struct Tally {
    summary: Summary,
    /// Sequences by length: bounded by the longest sequence, not by the corpus.
    lengths: BTreeMap<usize, u64>,
    /// Hashes of sequences and masks, as many as [`SEEN_MAX`].
    seen: HashSet<u64>,
}

/// Sequences that later ones are compared with: as many hashes as a table of 2^21 places holds before
/// it doubles, 18 MiB, so that memory stays flat.
const SEEN_MAX: usize = (1 << 21) / 8 * 7;

impl Tally {
    /// The number of the next source row.
    pub fn source_row(&self) -> u64 {
        self.summary.source_rows
    }

    pub fn tokens(&self) -> u64 {
        self.summary.tokens
    }

    /// Counts a row that became a sequence.
    pub fn keep(&mut self, row: &TokenisedRow, place: impl Fn() -> String) {
        let sequence = Sequence {
            tokens: &row.tokens,
            loss_mask: &row.loss_mask,
        };
        self.summary.source_rows += 1;
        self.summary.sequences += 1;
        self.summary.tokens += row.tokens.len() as u64;
        self.summary.rows += sequence.rows().count() as u64;
        *self.lengths.entry(row.tokens.len()).or_default() += 1;
        if self.repeats(row) {
            let counted = self.summary.lints.entry(Lint::Duplicate).or_default();
            counted.add(1, &place);
        }
        for finding in &row.findings {
            let counted = self.summary.lints.entry(finding.lint).or_default();
            counted.add(finding.count, || {
                format!("{}: {}", place(), finding.example)
            });
        }
    }

    /// Whether an earlier sequence had the same tokens and mask.
    fn repeats(&mut self, row: &TokenisedRow) -> bool {
        let mut hash = DefaultHasher::new();
        (&row.tokens, &row.loss_mask).hash(&mut hash);
        let hash = hash.finish();
        match self.seen.len() < SEEN_MAX {
            true => !self.seen.insert(hash),
            false => self.seen.contains(&hash),
        }
    }

    /// Counts a row that did not.
    pub fn leave_out(&mut self, problem: &RowProblem, place: impl Fn() -> String) {
        self.summary.source_rows += 1;
        let counted = self.summary.left_out.entry(problem.reason).or_default();
        counted.add(1, || format!("{}: {}", place(), problem.message));
    }

    /// # Errors
    /// Not one sequence: a corpus of nothing is a mistake in the data or the settings.
    pub fn finish(mut self, sources: Vec<SourceFile>) -> Result<Summary> {
        let rows = self.summary.source_rows;
        let first = self.summary.left_out.values().next();
        ensure!(
            self.summary.sequences > 0,
            "data: expected at least one row with a position to score, found none in {rows} rows{}",
            first.map_or(String::new(), |c| format!("; first example {}", c.example))
        );
        self.summary.lengths = Lengths {
            min: self.length_at(0),
            median: self.length_at((self.summary.sequences - 1) / 2),
            p90: self.length_at((self.summary.sequences - 1) * 9 / 10),
            p99: self.length_at((self.summary.sequences - 1) * 99 / 100),
            max: self.length_at(self.summary.sequences - 1),
        };
        self.summary.sources = sources;
        Ok(self.summary)
    }

    /// The length of the `nth` shortest sequence.
    fn length_at(&self, nth: u64) -> usize {
        let mut before = 0;
        let found = self.lengths.iter().find(|(_, count)| {
            before += **count;
            before > nth
        });
        found.map_or(0, |(length, _)| *length)
    }
}

impl Counted {
    fn add(&mut self, count: u64, example: impl FnOnce() -> String) {
        if self.count == 0 {
            self.example = example();
        }
        self.count += count;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_kept_or_left_out() {
        let mut tally = Tally::default();
        for length in [5, 2, 9, 4] {
            let row = TokenisedRow {
                tokens: vec![0; length],
                loss_mask: vec![1; length],
                findings: Vec::new(),
            };
            tally.keep(&row, || "f:1".into());
        }
        tally.leave_out(&RowProblem::new(Reason::TooLong, "m"), || "f:9".into());
        tally.leave_out(&RowProblem::new(Reason::TooLong, "n"), || "f:10".into());
        let summary = tally.finish(Vec::new()).unwrap();
        assert_eq!((summary.source_rows, summary.sequences), (6, 4));
        assert_eq!((summary.tokens, summary.rows), (20, 16));
        assert_eq!(
            summary.lengths,
            Lengths {
                min: 2,
                median: 4,
                p90: 5,
                p99: 5,
                max: 9
            }
        );
        let left_out = &summary.left_out[&Reason::TooLong];
        assert_eq!((left_out.count, left_out.example.as_str()), (2, "f:9: m"));
    }

    #[test]
    fn a_corpus_of_nothing_is_an_error() {
        let mut tally = Tally::default();
        tally.leave_out(&RowProblem::new(Reason::NoScoredPosition, "m"), || {
            "f:9".into()
        });
        let message = tally.finish(Vec::new()).unwrap_err().to_string();
        assert!(
            message.contains("found none in 1 rows; first example f:9: m"),
            "{message}"
        );
    }
}
