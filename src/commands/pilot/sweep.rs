//! A short sweep over token budgets: a few batches at each, none of them stored.

use std::ops::Range;
use std::time::Instant;

use anyhow::Result;

use super::advice::SweepPoint;
use crate::backend::Backend;
use crate::commands::machine;
use crate::commands::score::setup::{Setup, shard_index};
use crate::config::ScoreSettings;
use crate::corpus::CorpusShard;
use crate::model::{Decoder, Limits, Vocabulary};
use crate::score::{Proceed, ShardJob, score_shard};
use crate::store::PlannedShard;

/// Budgets tried, in tokens: this one, twice it, and so on.
pub const BUDGET_FIRST: usize = 480;
const BUDGETS: usize = 6;
/// Share of the free memory that a try may take.
const MEMORY_SHARE: f64 = 0.5;
/// A sample that fills a budget less often than this says nothing about it.
const BATCHES_MIN: usize = 1;

/// Rates at the budgets that fit the memory and can be tried in `seconds`, all on the same
/// sequences. `tokens_per_second` is what to expect.
///
/// # Errors
/// A teacher that overflows.
pub fn sweep<B: Backend>(
    backend: &B,
    setup: &Setup,
    settings: &ScoreSettings,
    planned: &PlannedShard,
    [seconds, tokens_per_second]: [f64; 2],
) -> Result<Vec<SweepPoint>> {
    let files = setup.corpus.shard(shard_index(&setup.corpus, planned)?)?;
    let shard = files.view()?;
    let sample_tokens = (seconds * tokens_per_second / BUDGETS as f64) as usize;
    let (sequences, tokens) = sample(&shard, planned.range(), sample_tokens);
    let free = machine::memory_available().unwrap_or(0) as f64 * MEMORY_SHARE;
    let token_bytes = setup.memory.activations as f64 / setup.limits.tokens as f64;
    let mut points: Vec<SweepPoint> = Vec::new();
    for doubled in 0..BUDGETS {
        let budget = BUDGET_FIRST << doubled;
        let fits = budget as f64 * token_bytes <= free && budget * BATCHES_MIN <= tokens;
        if !fits {
            break;
        }
        let limits = Limits {
            tokens: budget.max(setup.limits.sequence),
            ..setup.limits
        };
        let vocabulary = Vocabulary {
            scored: setup.vocab.scored,
            tokenizer: setup.vocab.tokenizer,
        };
        let mut decoder = Decoder::new(backend, &setup.teacher.teacher, limits, vocabulary)?;
        let job = ShardJob {
            shard,
            sequences: sequences.clone(),
            token_budget: budget,
            wave: 1,
            products: &settings.products,
        };
        let started = Instant::now();
        let scored = score_shard(&mut decoder, &job, &mut |_| Proceed::Go)?;
        points.push(SweepPoint {
            token_budget: budget,
            tokens_per_second: scored.map_or(0.0, |s| s.tokens as f64)
                / started.elapsed().as_secs_f64(),
        });
    }
    Ok(points)
}

/// The first sequences of the range that hold about `wanted` tokens, and how many they do.
fn sample(shard: &CorpusShard, range: Range<usize>, wanted: usize) -> (Range<usize>, usize) {
    let (mut end, mut tokens) = (range.start, 0);
    while end < range.end && tokens < wanted {
        let rows = shard.sequence(end).rows();
        tokens += rows.last().map_or(0, |row| row.position + 1);
        end += 1;
    }
    (range.start..end, tokens)
}
