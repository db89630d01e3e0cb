//! How much there is to score: counted in a corpus, or as the user says.

use anyhow::{Result, anyhow, ensure};

use crate::commands::score::setup::{demands, longest_sequence};
use crate::commands::text;
use crate::config::{PlanSettings, SHARD_TOKENS};
use crate::model::{Demand, Description};
use crate::store::size::ShardCounts;
use crate::store::{CorpusReader, PlannedShard, plan_shards};

/// Tokens of a sequence where nothing says how long they are.
const LENGTH_ASSUMED: usize = 2048;
/// More shards than this are no job, and their records alone would fill the memory.
const SHARDS_MAX: u64 = 1_000_000;

/// How much there is to score.
pub struct Size {
    pub demand: Demand,
    pub plan: Vec<PlannedShard>,
    pub counts: Vec<ShardCounts>,
    /// Tokens in the corpus, those behind the last rows included.
    pub tokens: u64,
    pub longest: usize,
    pub source: String,
}

impl Size {
    pub fn of(settings: &PlanSettings, description: &Description) -> Result<Size> {
        match (settings.has_corpus, settings.tokens) {
            (_, Some(tokens)) => Size::of_totals(settings, description, tokens),
            (true, None) => Size::of_corpus(settings, description),
            (false, None) => Err(anyhow!("expected --corpus, or --tokens and --rows")),
        }
    }

    fn of_corpus(settings: &PlanSettings, description: &Description) -> Result<Size> {
        let corpus = CorpusReader::open(&settings.score.corpus)?;
        let longest = longest_sequence(&corpus, description.context)?;
        let plan = plan_shards(&corpus, settings.score.shard_tokens)?;
        let each = demands(description, &corpus, &plan)?;
        let mut demand = Demand::none(description);
        each.iter().for_each(|d| demand.merge(d));
        let counts = plan.iter().zip(&each).map(|(planned, demand)| {
            Ok(ShardCounts {
                tokens: corpus.tokens_of(planned)?,
                rows: demand.rows,
            })
        });
        let counts: Vec<ShardCounts> = counts.collect::<Result<_>>()?;
        Ok(Size {
            tokens: counts.iter().map(|c| c.tokens).sum(),
            source: format!("{} sequences", text::count(corpus.sequences())),
            demand,
            plan,
            counts,
            longest,
        })
    }

    fn of_totals(settings: &PlanSettings, description: &Description, tokens: u64) -> Result<Size> {
        let rows = settings.rows.unwrap_or(tokens);
        let assumed = LENGTH_ASSUMED.min(description.context);
        let length = settings.length.unwrap_or(assumed);
        let shard_tokens = settings.score.shard_tokens.unwrap_or(SHARD_TOKENS) as u64;
        let shards = tokens.div_ceil(shard_tokens).max(1);
        ensure!(
            shards <= SHARDS_MAX,
            "tokens: expected at most {SHARDS_MAX} shards, found {shards} of {shard_tokens} tokens; --shard-tokens {} makes fewer",
            tokens.div_ceil(SHARDS_MAX)
        );
        ensure!(
            length <= description.context,
            "length: expected at most {}, the teacher's max_position_embeddings, found {length}; --length says how long sequences are",
            description.context
        );
        let share = |total: u64, i: u64| {
            let at = |i: u64| (u128::from(total) * u128::from(i) / u128::from(shards)) as u64;
            at(i + 1) - at(i)
        };
        let sequences = tokens.div_ceil(length as u64);
        let plan = (0..shards).map(|i| PlannedShard {
            id: format!("shard-{i:06}"),
            corpus_shard: format!("shard-{i:06}"),
            first_sequence: 0,
            end_sequence: share(sequences, i),
        });
        let counts = (0..shards).map(|i| ShardCounts {
            tokens: share(tokens, i),
            rows: share(rows, i),
        });
        Ok(Size {
            demand: Demand::even(description, tokens, rows, length),
            plan: plan.collect(),
            counts: counts.collect(),
            tokens,
            longest: length,
            source: match settings.length {
                Some(length) => format!("{length} tokens a sequence"),
                None => format!("{length} tokens a sequence, assumed; --length says otherwise"),
            },
        })
    }
}
