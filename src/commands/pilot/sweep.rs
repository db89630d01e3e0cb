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
/// Batches of the largest budget that tell its rate well enough.
const BATCHES_MAX: usize = 4;
/// Share of the free memory that a try may take.
const MEMORY_SHARE: f64 = 0.5;

/// Rates at the budgets that fit the memory and can be tried in `seconds`, all on the same
/// sequences of the corpus shard that `planned` is a part of, of which the largest budget makes
/// at least one batch. `tokens_per_second` is what to expect.
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
    let free = machine::memory_available().unwrap_or(0) as f64 * MEMORY_SHARE;
    let token_bytes = setup.memory.activations as f64 / setup.limits.tokens as f64;
    let held: usize = (0..shard.sequences()).map(|s| computed(&shard, s)).sum();
    let most = held.min(match setup.device_memory {
        // No more than was planned for.
        Some(_) => setup.limits.tokens,
        None => (free / token_bytes) as usize,
    });
    let (tried, sample_tokens) = ladder(seconds * tokens_per_second, most, held);
    let sequences = sample(&shard, sample_tokens);
    let mut points: Vec<SweepPoint> = Vec::new();
    for doubled in 0..tried {
        let budget = BUDGET_FIRST << doubled;
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

/// How many budgets to try, and on how many tokens: as many budgets as `affordable` tokens in all
/// give a full batch each, none above `most`; then whole batches of the largest, a few, of the
/// tokens that are `held`.
fn ladder(affordable: f64, most: usize, held: usize) -> (usize, usize) {
    let each = |tried: usize| affordable as usize / tried.max(1);
    let fits = |tried: &usize| {
        let largest = BUDGET_FIRST << (tried - 1);
        largest <= most && largest <= each(*tried)
    };
    let Some(tried) = (1..=BUDGETS).rev().find(fits) else {
        return (0, 0);
    };
    let largest = BUDGET_FIRST << (tried - 1);
    let batches = (each(tried).min(held) / largest).min(BATCHES_MAX);
    (tried, batches * largest)
}

/// The first sequences that hold up to `most` tokens.
fn sample(shard: &CorpusShard, most: usize) -> Range<usize> {
    let (mut end, mut tokens) = (0, 0);
    while end < shard.sequences() {
        tokens += computed(shard, end);
        if tokens > most {
            break;
        }
        end += 1;
    }
    0..end
}

/// Tokens of a sequence that are computed: those up to its last row.
fn computed(shard: &CorpusShard, sequence: usize) -> usize {
    let last = shard.sequence(sequence).rows().last();
    last.map_or(0, |row| row.position + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_budgets_are_tried_as_the_time_allows() {
        let plenty = 1 << 30;
        assert_eq!(ladder(479.0, plenty, plenty), (0, 0));
        assert_eq!(ladder(480.0, plenty, plenty), (1, 480));
        assert_eq!(ladder(2.0 * 960.0, plenty, plenty), (2, 960));
        assert_eq!(ladder(6.0 * 15360.0, plenty, plenty), (6, 15360));
        assert_eq!(ladder(6.0 * 40000.0, plenty, plenty), (6, 30720));
        assert_eq!(ladder(1e9, 2000, plenty), (3, 4 * 1920));
        assert_eq!(ladder(1e9, 2000, 2000), (3, 1920));
        assert_eq!(ladder(0.0, plenty, plenty), (0, 0));
    }
}
