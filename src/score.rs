//! One scored shard, start to end.
//!
//! Architecture invariant: nothing here opens a file, draws, or knows where rows are kept.

use std::ops::Range;

use anyhow::{Result, bail, ensure};

use crate::backend::{Backend, HeadRows};
use crate::batch::{PackPlan, PackedBatch};
use crate::corpus::CorpusShard;
use crate::model::Decoder;
use crate::products::{ProductArray, ProductPlan, RowScores, RowSink};

/// What to do after a wave.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Proceed {
    Go,
    /// The shard is given up.
    Stop,
}

/// What a wave did, for whoever watches.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct WaveDone {
    pub tokens: usize,
    pub rows: usize,
}

/// How a shard is cut and what is kept of it.
#[derive(Clone, Debug)]
pub struct ShardJob<'a> {
    pub shard: CorpusShard<'a>,
    pub sequences: Range<usize>,
    pub token_budget: usize,
    /// Batches a wave.
    pub wave: usize,
    pub products: &'a ProductPlan,
}

/// A shard's rows, all of them, each in its place.
#[derive(Debug)]
pub struct ScoredShard {
    pub arrays: Vec<ProductArray>,
    /// Tokens computed; those behind a sequence's last row are not.
    pub tokens: usize,
    /// Probability on head rows beyond the tokenizer, summed over rows.
    pub padded_mass: f64,
}

/// Scores every row of a range of sequences. `None` when `watch` said stop.
///
/// # Errors
/// A logit that is NaN or +inf: the message names sequence and position.
pub fn score_shard<B: Backend>(
    decoder: &mut Decoder<B>,
    job: &ShardJob,
    watch: &mut dyn FnMut(WaveDone) -> Proceed,
) -> Result<Option<ScoredShard>> {
    let plan = PackPlan::new(&job.shard, job.sequences.clone(), job.token_budget);
    let mut sink = RowSink::new(job.products, plan.rows());
    let (mut tokens, mut padded_mass) = (0, 0.0);
    let mut batches = plan.batches(job.shard).peekable();
    while batches.peek().is_some() {
        let wave: Vec<PackedBatch> = batches.by_ref().take(job.wave).collect();
        let mut scored: Vec<HeadRows> = wave
            .iter()
            .map(|batch| HeadRows::with_capacity(batch.rows.len(), job.products.k))
            .collect();
        decoder.score(&wave, &mut scored)?;
        let mut done = WaveDone::default();
        for (batch, rows) in wave.iter().zip(&scored) {
            place(batch, rows, &mut sink)?;
            padded_mass += rows.padded_mass.iter().map(|&m| f64::from(m)).sum::<f64>();
            done.tokens += batch.tokens.len();
            done.rows += batch.rows.len();
        }
        tokens += done.tokens;
        // A shard that is done is kept, whoever says stop.
        if watch(done) == Proceed::Stop && batches.peek().is_some() {
            return Ok(None);
        }
    }
    Ok(Some(ScoredShard {
        arrays: sink.finish(),
        tokens,
        padded_mass,
    }))
}

/// Puts a batch's rows in their final place.
fn place(batch: &PackedBatch, scored: &HeadRows, sink: &mut RowSink) -> Result<()> {
    if let Some(bad) = scored.bad_row {
        bail!("{}", bad_row(batch, bad));
    }
    ensure!(
        scored.tail.len() == batch.rows.len(),
        "expected {} rows from the head, found {}",
        batch.rows.len(),
        scored.tail.len()
    );
    let k = scored.k;
    for (i, row) in batch.rows.iter().enumerate() {
        sink.put(
            row.row,
            &RowScores {
                target: row.target,
                ids: &scored.ids[i * k..(i + 1) * k],
                logp: &scored.logp[i * k..(i + 1) * k],
                tail: scored.tail[i],
                target_logp: scored.target_logp[i],
                target_rank: scored.target_rank[i],
                logsumexp: scored.logsumexp[i],
                entropy: scored.entropy[i],
            },
        );
    }
    Ok(())
}

fn bad_row(batch: &PackedBatch, row: usize) -> String {
    let sequence = batch.sequences.iter().find(|s| s.rows.contains(&row));
    let number = sequence.map_or(0, |s| s.sequence);
    let position = batch.positions[batch.rows[row].token as usize];
    format!(
        "sequence {number}, position {position}: expected finite logits, found NaN, +inf or none that is finite; the teacher overflows or its weights are damaged (a token shortly behind can be the cause: attention multiplies it by 0)"
    )
}
