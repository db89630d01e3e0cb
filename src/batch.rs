//! From a range of sequences to packed batches: sequences of like length laid end to end, without
//! padding, up to a token budget.
//!
//! Rows are numbered before packing and carry their target, so batches may come in any order and
//! nothing is ever un-sorted.

use std::ops::Range;

use crate::corpus::CorpusShard;

/// Sequences laid end to end.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PackedBatch {
    pub tokens: Vec<u32>,    // (T)
    pub positions: Vec<u32>, // (T), inside the token's own sequence
    pub sequences: Vec<PackedSequence>,
    pub rows: Vec<BatchRow>, // (R), by rising token
}

/// Where one sequence lies in a batch. Tokens behind its last row are left out: no row sees them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PackedSequence {
    /// Its number in the corpus shard.
    pub sequence: usize,
    /// Its length in the corpus, all tokens counted.
    pub length: usize,
    /// Its part of `tokens` and `positions`.
    pub tokens: Range<usize>,
    /// Its part of `rows`.
    pub rows: Range<usize>,
}

/// A row on its way: where its logits come from, where its scores go, what it is compared with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchRow {
    /// Index into `tokens` of the batch.
    pub token: u32,
    /// Row of the scored shard.
    pub row: usize,
    pub target: i32,
}

/// How a range of sequences of one corpus shard becomes batches.
#[derive(Clone, Debug)]
pub struct PackPlan {
    /// The sequences of all batches, one batch after another.
    order: Vec<u32>,
    /// Where each batch ends in `order`.
    ends: Vec<u32>,
    /// First row of each sequence of the range, and the number of rows behind the last.
    row_offsets: Vec<usize>, // (S+1)
    first_sequence: usize,
}

impl PackPlan {
    /// Longest first: the batch that needs most comes first, not after hours. A sequence above
    /// the budget is a batch of its own; one without rows is in none.
    pub fn new(shard: &CorpusShard, sequences: Range<usize>, token_budget: usize) -> PackPlan {
        let mut row_offsets = Vec::with_capacity(sequences.len() + 1);
        row_offsets.push(0);
        let mut scored: Vec<(u32, u32)> = Vec::with_capacity(sequences.len()); // (tokens needed, sequence)
        for s in sequences.clone() {
            let (mut rows, mut needed) = (0, 0);
            for row in shard.sequence(s).rows() {
                rows += 1;
                needed = row.position + 1;
            }
            row_offsets.push(row_offsets[row_offsets.len() - 1] + rows);
            if rows > 0 {
                scored.push((needed as u32, s as u32));
            }
        }
        scored.sort_by_key(|&(needed, s)| (std::cmp::Reverse(needed), s));
        let mut ends = Vec::with_capacity(scored.len());
        let mut room = 0;
        for (i, &(needed, _)) in scored.iter().enumerate() {
            let needed = needed as usize;
            if needed > room || ends.is_empty() {
                ends.push(0);
                room = token_budget;
            }
            if let Some(end) = ends.last_mut() {
                *end = i as u32 + 1;
            }
            room = room.saturating_sub(needed);
        }
        PackPlan {
            order: scored.into_iter().map(|(_, s)| s).collect(),
            ends,
            row_offsets,
            first_sequence: sequences.start,
        }
    }

    /// R
    pub fn rows(&self) -> usize {
        self.row_offsets[self.row_offsets.len() - 1]
    }

    /// The batches, made one at a time.
    pub fn batches<'a>(&'a self, shard: CorpusShard<'a>) -> impl Iterator<Item = PackedBatch> + 'a {
        (0..self.ends.len()).map(move |i| {
            let start = i.checked_sub(1).map_or(0, |before| self.ends[before]);
            let mut packed = PackedBatch::default();
            for &s in &self.order[start as usize..self.ends[i] as usize] {
                self.push(&mut packed, &shard, s as usize);
            }
            packed
        })
    }

    fn push(&self, batch: &mut PackedBatch, shard: &CorpusShard, s: usize) {
        let sequence = shard.sequence(s);
        let (first_token, first_row) = (batch.tokens.len(), batch.rows.len());
        let first_scored = self.row_offsets[s - self.first_sequence];
        let mut needed = 0;
        for (i, row) in sequence.rows().enumerate() {
            needed = row.position + 1;
            batch.rows.push(BatchRow {
                token: (first_token + row.position) as u32,
                row: first_scored + i,
                target: row.target,
            });
        }
        let tokens = sequence.tokens[..needed].iter();
        batch.tokens.extend(tokens.map(|&token| token as u32));
        batch.positions.extend(0..needed as u32);
        batch.sequences.push(PackedSequence {
            sequence: s,
            length: sequence.tokens.len(),
            tokens: first_token..first_token + needed,
            rows: first_row..batch.rows.len(),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn corpus() -> impl Strategy<Value = (Vec<i32>, Vec<i64>, Vec<u8>)> {
        prop::collection::vec(prop::collection::vec((0..50i32, 0..2u8), 0..20), 0..12).prop_map(
            |sequences| {
                let mut offsets = vec![0i64];
                for s in &sequences {
                    offsets.push(offsets[offsets.len() - 1] + s.len() as i64);
                }
                let flat = sequences.into_iter().flatten();
                let (tokens, mask) = flat.unzip();
                (tokens, offsets, mask)
            },
        )
    }

    proptest! {
        /// Every row of the range comes once, at its own place, with its own token and target,
        /// whatever the budget; and no batch is over the budget but by a single long sequence.
        #[test]
        fn packs_every_row_once(
            (tokens, offsets, mask) in corpus(),
            budget in 1usize..40,
            from in 0.0f64..1.0,
            to in 0.0f64..1.0,
        ) {
            let shard = CorpusShard::new(&tokens, &offsets, &mask).unwrap();
            let s = shard.sequences() as f64;
            let range = (s * from.min(to)) as usize..(s * from.max(to)).ceil() as usize;
            let plan = PackPlan::new(&shard, range.clone(), budget);
            let expected: Vec<(usize, usize, i32)> = range
                .flat_map(|s| shard.sequence(s).rows().map(move |r| (s, r.position, r.target)))
                .collect();
            prop_assert_eq!(plan.rows(), expected.len());
            let mut seen = vec![false; expected.len()];
            for batch in plan.batches(shard) {
                prop_assert!(batch.tokens.len() <= budget || batch.sequences.len() == 1);
                prop_assert_eq!(batch.tokens.len(), batch.positions.len());
                for sequence in &batch.sequences {
                    prop_assert!(!sequence.rows.is_empty());
                    for row in &batch.rows[sequence.rows.clone()] {
                        prop_assert!(sequence.tokens.contains(&(row.token as usize)));
                        let position = batch.positions[row.token as usize] as usize;
                        prop_assert_eq!(
                            (sequence.sequence, position, row.target),
                            expected[row.row]
                        );
                        let token = shard.sequence(sequence.sequence).tokens[position];
                        prop_assert_eq!(batch.tokens[row.token as usize], token as u32);
                        prop_assert!(!std::mem::replace(&mut seen[row.row], true));
                    }
                }
            }
            prop_assert!(seen.into_iter().all(|s| s));
        }
    }
}
