//! One scored shard, start to end.
//!
//! Architecture invariant: nothing here opens a file, draws, or knows where rows are kept.

use std::collections::VecDeque;
use std::iter::Peekable;
use std::ops::Range;
use std::time::Instant;

use anyhow::{Result, bail, ensure};

use crate::backend::{Backend, HeadRows};
use crate::batch::{PackPlan, PackedBatch};
use crate::corpus::CorpusShard;
use crate::model::{Begun, Decoder};
use crate::products::{ProductArray, ProductPlan, RowScores, RowSink};

/// What to do after a wave.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Proceed {
    Go,
    /// The shard is given up.
    Stop,
}

/// What a wave did, for whoever watches.
#[derive(Clone, Copy, Debug)]
pub struct WaveDone<'a> {
    pub tokens: usize,
    pub rows: usize,
    pub batches: &'a [PackedBatch],
    /// Entry i of batch b is row i of `batches[b].rows`.
    pub scored: &'a [HeadRows],
}

/// Where the time of a shard went.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct ShardSeconds {
    /// Cutting the shard into batches and laying sequences end to end.
    pub pack: f64,
    /// The forward pass, head and reduction included.
    pub compute: f64,
    /// Encoding rows into their final place.
    pub place: f64,
    /// In `watch`.
    pub watch: f64,
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
    pub seconds: ShardSeconds,
}

/// Adds the time of `work` to `seconds`.
fn timed<T>(seconds: &mut f64, work: impl FnOnce() -> T) -> T {
    let started = Instant::now();
    let done = work();
    *seconds += started.elapsed().as_secs_f64();
    done
}

/// Scores every row of a range of sequences. `None` when `watch` said stop.
///
/// # Errors
/// A logit that is NaN or +inf: the message names sequence and position.
pub fn score_shard<B: Backend>(
    decoder: &mut Decoder<B>,
    job: &ShardJob,
    watch: &mut dyn FnMut(&WaveDone) -> Proceed,
) -> Result<Option<ScoredShard>> {
    let mut seconds = ShardSeconds::default();
    let plan = timed(&mut seconds.pack, || {
        PackPlan::new(&job.shard, job.sequences.clone(), job.token_budget)
    });
    let mut sink = timed(&mut seconds.place, || {
        RowSink::new(job.products, plan.rows())
    });
    let (mut tokens, mut padded_mass) = (0, 0.0);
    let mut waves = Waves {
        decoder,
        batches: plan.batches(job.shard).peekable(),
        size: job.wave,
        k: job.products.k,
        begun: VecDeque::new(),
    };
    while let Some((wave, begun)) = waves.next(&mut seconds)? {
        let mut scored: Vec<HeadRows> = wave
            .iter()
            .map(|batch| HeadRows::with_capacity(batch.rows.len(), job.products.k))
            .collect();
        timed(&mut seconds.compute, || {
            waves.decoder.finish(begun, &mut scored)
        })?;
        timed(&mut seconds.place, || {
            let mut pairs = wave.iter().zip(&scored);
            pairs.try_for_each(|(batch, rows)| place(batch, rows, &mut sink))
        })?;
        let masses = scored.iter().flat_map(|rows| &rows.padded_mass);
        padded_mass += masses.map(|&m| f64::from(m)).sum::<f64>();
        let done = WaveDone {
            tokens: wave.iter().map(|batch| batch.tokens.len()).sum(),
            rows: wave.iter().map(|batch| batch.rows.len()).sum(),
            batches: &wave,
            scored: &scored,
        };
        tokens += done.tokens;
        let said = timed(&mut seconds.watch, || watch(&done));
        // A shard that is done is kept, whoever says stop.
        if said == Proceed::Stop && waves.are_left() {
            return Ok(None);
        }
    }
    Ok(Some(ScoredShard {
        arrays: timed(&mut seconds.place, || sink.finish()),
        tokens,
        padded_mass,
        seconds,
    }))
}

/// The waves of a shard, begun in order. Where the backend runs behind, the next one computes while
/// the one before it is put in its place.
struct Waves<'d, 'a, B: Backend, I: Iterator<Item = PackedBatch>> {
    decoder: &'d mut Decoder<'a, B>,
    batches: Peekable<I>,
    /// Batches a wave.
    size: usize,
    k: usize,
    begun: VecDeque<(Vec<PackedBatch>, Begun<B>)>,
}

impl<B: Backend, I: Iterator<Item = PackedBatch>> Waves<'_, '_, B, I> {
    /// The next wave to finish.
    fn next(&mut self, seconds: &mut ShardSeconds) -> Result<Option<(Vec<PackedBatch>, Begun<B>)>> {
        let ahead = usize::from(self.decoder.backend.runs_behind());
        while self.begun.len() <= ahead {
            let wave: Vec<PackedBatch> = timed(&mut seconds.pack, || {
                self.batches.by_ref().take(self.size).collect()
            });
            if wave.is_empty() {
                break;
            }
            let begun = timed(&mut seconds.compute, || self.decoder.begin(&wave, self.k))?;
            self.begun.push_back((wave, begun));
        }
        Ok(self.begun.pop_front())
    }

    fn are_left(&mut self) -> bool {
        !self.begun.is_empty() || self.batches.peek().is_some()
    }
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
