//! Which shards a pilot scores: some of every length, the same ones for the same seed.

use crate::model::Demand;

/// Fewer shards than this tell nothing of the spread between them.
const SHARDS_MIN: usize = 4;

/// A shard that may be chosen.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Candidate {
    /// Its place in the plan.
    pub index: usize,
    /// Mean tokens of its sequences.
    pub length: f64,
}

impl Candidate {
    pub fn new(index: usize, demand: &Demand, sequences: u64) -> Candidate {
        Candidate {
            index,
            length: demand.tokens as f64 / sequences.max(1) as f64,
        }
    }
}

/// Places in the plan of the chosen shards, rising. The candidates are sorted by length and cut
/// into as many strata as shards are wanted; one is drawn from each.
pub fn choose(mut candidates: Vec<Candidate>, fraction: f64, seed: u64) -> Vec<usize> {
    let all = candidates.len();
    let wanted = (all as f64 * fraction).ceil() as usize;
    let wanted = wanted.max(SHARDS_MIN).min(all);
    candidates.sort_by(|a, b| a.length.total_cmp(&b.length).then(a.index.cmp(&b.index)));
    let mut chosen: Vec<usize> = (0..wanted)
        .map(|i| {
            let (from, to) = (i * all / wanted, (i + 1) * all / wanted);
            let drawn = from as u64 + mix(seed ^ (i as u64) << 32) % (to - from) as u64;
            candidates[drawn as usize].index
        })
        .collect();
    chosen.sort_unstable();
    chosen
}

/// splitmix64 (Steele et al. 2014, Fast splittable pseudorandom number generators).
fn mix(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidates(n: usize) -> Vec<Candidate> {
        let length = |index: usize| ((index * 37) % n) as f64;
        let all = (0..n).map(|index| Candidate {
            index,
            length: length(index),
        });
        all.collect()
    }

    #[test]
    fn one_shard_comes_from_every_stratum_of_length() {
        for seed in 0..20 {
            let chosen = choose(candidates(100), 0.05, seed);
            let mut lengths: Vec<usize> = chosen.iter().map(|i| i * 37 % 100).collect();
            lengths.sort_unstable();
            let strata: Vec<usize> = lengths.iter().map(|length| length / 20).collect();
            assert_eq!(strata, [0, 1, 2, 3, 4]);
            assert_eq!(choose(candidates(100), 0.05, seed), chosen);
        }
        let other = (1..20)
            .any(|seed| choose(candidates(100), 0.05, seed) != choose(candidates(100), 0.05, 0));
        assert!(other, "the seed must matter");
    }

    #[test]
    fn a_pilot_has_four_shards_where_there_are_four() {
        assert_eq!(choose(candidates(1), 0.01, 0), [0]);
        assert_eq!(choose(candidates(3), 0.01, 0), [0, 1, 2]);
        assert_eq!(choose(candidates(7), 0.01, 0).len(), 4);
        assert_eq!(choose(candidates(7), 1.0, 0), [0, 1, 2, 3, 4, 5, 6]);
        assert!(choose(Vec::new(), 0.5, 0).is_empty());
    }
}
