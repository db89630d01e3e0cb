//! What the corpus itself tells: lengths, and signs that something is wrong with it.

use anyhow::Result;

use crate::commands::score::setup::Setup;
use crate::corpus::TextTokenizer;
use crate::store::shift::ShiftTest;
use crate::store::{PlannedShard, ScoredSet};

/// Tokens at the end of a sequence among which a stop token ends it: templates put a line break
/// behind it.
const STOP_WITHIN: usize = 2;
/// Bins of the histogram of lengths.
const LENGTH_BINS: usize = 32;

/// Lengths of all sequences, in tokens.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Lengths {
    pub sequences: u64,
    pub mean: f64,
    pub half: usize,
    pub most_95: usize,
    pub longest: usize,
    /// From 0 to the longest.
    pub bins: Vec<u64>,
}

impl Lengths {
    fn new(mut lengths: Vec<usize>) -> Lengths {
        lengths.sort_unstable();
        let Some(&longest) = lengths.last() else {
            return Lengths::default();
        };
        let at = |share: f64| lengths[((lengths.len() - 1) as f64 * share) as usize];
        let mut bins = vec![0; LENGTH_BINS.min(longest.max(1))];
        let last = bins.len() - 1;
        for length in &lengths {
            bins[(length * (last + 1) / longest.max(1)).min(last)] += 1;
        }
        Lengths {
            sequences: lengths.len() as u64,
            mean: lengths.iter().sum::<usize>() as f64 / lengths.len() as f64,
            half: at(0.5),
            most_95: at(0.95),
            longest,
            bins,
        }
    }
}

/// Counted over the whole corpus.
#[derive(Clone, Debug)]
pub struct CorpusSigns {
    pub lengths: Lengths,
    /// Sequences that begin with the token the tokenizer puts before every text, where it does.
    pub with_bos: Option<u64>,
    pub at_longest: u64,
    /// `None`: no stop token is known.
    pub at_longest_stopped: Option<u64>,
}

/// What the tokenizer puts before every text, if anything.
fn first_token(tokenizer: &TextTokenizer) -> Option<i32> {
    let bos = tokenizer.bos()?;
    let encoded = tokenizer.encode_plain("a").ok()?;
    (encoded.ids.first() == Some(&bos)).then_some(bos)
}

impl CorpusSigns {
    /// # Errors
    /// A corpus shard that can't be read.
    pub fn of(setup: &Setup, tokenizer: Option<&TextTokenizer>) -> Result<CorpusSigns> {
        let first = tokenizer.and_then(first_token);
        let knows_stops = tokenizer.is_some_and(|t| !t.stops().is_empty() || t.eos().is_some());
        let is_stop =
            |id: &i32| tokenizer.is_some_and(|t| t.stops().contains(id) || t.eos() == Some(*id));
        let mut lengths = Vec::new();
        let mut with_bos = 0;
        let mut stopped = Vec::new();
        for shard in 0..setup.corpus.shards().len() {
            let files = setup.corpus.shard(shard)?;
            let view = files.view()?;
            for s in 0..view.sequences() {
                let tokens = view.sequence(s).tokens;
                lengths.push(tokens.len());
                with_bos += u64::from(first.is_some() && tokens.first().copied() == first);
                stopped.push(tokens.iter().rev().take(STOP_WITHIN).any(is_stop));
            }
        }
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let at_longest = lengths.iter().zip(&stopped).filter(|(l, _)| **l == longest);
        let (mut count, mut ended) = (0, 0);
        for (_, stopped) in at_longest {
            (count, ended) = (count + 1, ended + u64::from(*stopped));
        }
        Ok(CorpusSigns {
            lengths: Lengths::new(lengths),
            with_bos: first.map(|_| with_bos),
            at_longest: count,
            at_longest_stopped: knows_stops.then_some(ended),
        })
    }
}

/// The shift test over the shards that were scored.
///
/// # Errors
/// A shard that can't be read back.
pub fn shift_test(setup: &Setup, set: &ScoredSet, shards: &[PlannedShard]) -> Result<ShiftTest> {
    let mut test = ShiftTest::default();
    for planned in shards {
        let Some(manifest) = set.manifest(planned)? else {
            continue;
        };
        let scored = set.shard(&manifest)?;
        let index = crate::commands::score::setup::shard_index(&setup.corpus, planned)?;
        let files = setup.corpus.shard(index)?;
        let offsets = scored.row_offsets()?;
        test.add_shard(&scored.rows()?, &files.view()?, planned, offsets);
    }
    Ok(test)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_counted_once_each() {
        let lengths = Lengths::new(vec![10, 1, 5, 10]);
        assert_eq!(
            (
                lengths.sequences,
                lengths.mean,
                lengths.half,
                lengths.longest
            ),
            (4, 6.5, 5, 10)
        );
        assert_eq!(lengths.bins.iter().sum::<u64>(), 4);
        assert_eq!(Lengths::new(vec![]), Lengths::default());
        assert_eq!(Lengths::new(vec![0, 0]).bins, [2]);
    }
}
