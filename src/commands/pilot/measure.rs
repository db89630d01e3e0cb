//! What a pilot sees while its shards are scored.

use crate::backend::observed::{Observed, OpClass};
use crate::backend::{Backend, HeadRows};
use crate::batch::PackedBatch;
use crate::commands::machine;
use crate::commands::score::pass::{ShardDone, Watcher};
use crate::commands::score::setup::Setup;
use crate::score::WaveDone;
use crate::store::PlannedShard;
use crate::store::timed::TimedStore;

/// Ids of the second reduction: the curve of tail mass goes this far.
pub const WIDE_K: usize = 256;
/// Rows kept for a look.
const UNCERTAIN_MAX: usize = 8;
/// Ids of such a row.
const UNCERTAIN_K: usize = 5;

/// Where the time of the compute thread went, in seconds. Nothing runs beside it.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Phases {
    pub read: f64,
    pub pack: f64,
    pub ops: [f64; OpClass::ALL.len()],
    /// Rows to their final place.
    pub place: f64,
    /// Checks and hashes of a commit.
    pub hash: f64,
    pub write: f64,
    /// The second reduction, and what the pilot itself notes.
    pub pilot: f64,
}

impl Phases {
    /// By name, in the order of the work.
    pub fn list(&self) -> Vec<(&'static str, f64)> {
        let mut list = vec![("read", self.read), ("pack", self.pack)];
        for class in OpClass::ALL {
            if class != OpClass::Copy {
                list.push((class.name(), self.of(class)));
            }
        }
        list.extend([
            ("copy", self.of(OpClass::Copy) + self.place),
            ("check and hash", self.hash),
            ("write", self.write),
            ("the pilot's own", self.pilot),
        ]);
        list
    }

    pub fn of(&self, class: OpClass) -> f64 {
        self.ops[class as usize]
    }

    pub fn sum(&self) -> f64 {
        self.list().iter().map(|(_, seconds)| seconds).sum()
    }

    pub fn add(&mut self, other: &Phases) {
        self.read += other.read;
        self.pack += other.pack;
        self.place += other.place;
        self.hash += other.hash;
        self.write += other.write;
        self.pilot += other.pilot;
        self.ops
            .iter_mut()
            .zip(other.ops)
            .for_each(|(a, b)| *a += b);
    }
}

/// One scored shard.
#[derive(Clone, Debug, Default)]
pub struct ShardMeasure {
    pub id: String,
    pub tokens: u64,
    pub rows: u64,
    pub flops: f64,
    /// From the corpus to the manifest, the pilot's own work left out.
    pub seconds: f64,
    /// Of checks, hashes and writes.
    pub commit_seconds: f64,
    pub phases: Phases,
    /// Tail mass outside the k best, summed over rows, for k from 1.
    pub tails: Vec<f64>,
    pub nll: f64,
    pub entropy: f64,
    pub padded_mass: f64,
}

/// Counts of values in bins of one width.
#[derive(Clone, PartialEq, Debug)]
pub struct Histogram {
    pub from: f64,
    pub to: f64,
    pub counts: Vec<u64>,
}

impl Histogram {
    pub fn new(from: f64, to: f64, bins: usize) -> Histogram {
        Histogram {
            from,
            to,
            counts: vec![0; bins],
        }
    }

    /// Values outside count in the first or last bin.
    pub fn add(&mut self, value: f64) {
        let bins = self.counts.len();
        let at = (value - self.from) / (self.to - self.from) * bins as f64;
        self.counts[(at.max(0.0) as usize).min(bins - 1)] += 1;
    }
}

/// A row whose teacher is in doubt.
#[derive(Clone, PartialEq, Debug)]
pub struct UncertainRow {
    pub entropy: f32,
    pub corpus_shard: String,
    /// In the corpus shard.
    pub sequence: usize,
    pub position: usize,
    pub target: i32,
    pub target_logp: f32,
    /// Ids and log-probs, best first.
    pub best: Vec<(i32, f32)>,
}

/// Everything seen.
#[derive(Clone, Debug)]
pub struct Measured {
    pub shards: Vec<ShardMeasure>,
    pub phases: Phases,
    /// Nats.
    pub entropy: Histogram,
    /// log10 of the tail mass outside the stored ids.
    pub tail: Histogram,
    pub uncertain: Vec<UncertainRow>,
    pub batches: u64,
    /// Bytes of the process alone, the most at the end of any wave.
    pub memory_seen: u64,
}

/// Looks on while shards are scored.
pub struct Recorder<'a, B: Backend> {
    setup: &'a Setup,
    observed: &'a Observed<B>,
    store: &'a TimedStore,
    wide_k: usize,
    shard: ShardMeasure,
    pub measured: Measured,
}

impl<'a, B: Backend> Recorder<'a, B> {
    pub fn new(
        setup: &'a Setup,
        observed: &'a Observed<B>,
        store: &'a TimedStore,
        wide_k: usize,
    ) -> Recorder<'a, B> {
        let most = (setup.vocab.scored as f64).ln();
        Recorder {
            setup,
            observed,
            store,
            wide_k,
            shard: ShardMeasure::default(),
            measured: Measured {
                shards: Vec::new(),
                phases: Phases::default(),
                entropy: Histogram::new(0.0, most, 32),
                tail: Histogram::new(-8.0, 0.0, 32),
                uncertain: Vec::new(),
                batches: 0,
                memory_seen: 0,
            },
        }
    }

    fn row_figures(&mut self, scored: &HeadRows) {
        let sum = |values: &[f32]| values.iter().map(|&v| f64::from(v)).sum::<f64>();
        self.shard.nll -= sum(&scored.target_logp);
        self.shard.entropy += sum(&scored.entropy);
        let Measured { entropy, tail, .. } = &mut self.measured;
        scored
            .entropy
            .iter()
            .for_each(|&v| entropy.add(f64::from(v)));
        let logs = scored.tail.iter().map(|&v| f64::from(v).max(1e-30).log10());
        logs.for_each(|v| tail.add(v));
    }

    /// The row of each sequence where the teacher is least sure, if it is among the least sure.
    fn keep_uncertain(&mut self, planned: &PlannedShard, batch: &PackedBatch, scored: &HeadRows) {
        let kept = &mut self.measured.uncertain;
        for sequence in &batch.sequences {
            let rows = sequence.rows.clone();
            let entropy = |row: &usize| scored.entropy[*row];
            let Some(row) = rows.max_by(|a, b| entropy(a).total_cmp(&entropy(b))) else {
                continue;
            };
            let least = kept.last().map_or(f32::NEG_INFINITY, |last| last.entropy);
            if kept.len() == UNCERTAIN_MAX && entropy(&row) <= least {
                continue;
            }
            let best = (0..scored.k.min(UNCERTAIN_K)).map(|j| {
                let at = row * scored.k + j;
                (scored.ids[at], scored.logp[at])
            });
            kept.push(UncertainRow {
                entropy: entropy(&row),
                corpus_shard: planned.corpus_shard.clone(),
                sequence: sequence.sequence,
                position: batch.positions[batch.rows[row].token as usize] as usize,
                target: batch.rows[row].target,
                target_logp: scored.target_logp[row],
                best: best.collect(),
            });
            kept.sort_by(|a, b| b.entropy.total_cmp(&a.entropy));
            kept.truncate(UNCERTAIN_MAX);
        }
    }
}

impl<B: Backend> Watcher for Recorder<'_, B> {
    fn start(&mut self, planned: &PlannedShard) {
        self.observed.take();
        self.observed.take_wide();
        self.store.take_write_seconds();
        self.shard = ShardMeasure {
            id: planned.id.clone(),
            tails: vec![0.0; self.wide_k],
            ..ShardMeasure::default()
        };
    }

    fn wave(&mut self, planned: &PlannedShard, done: &WaveDone) {
        add_tails(&self.observed.take_wide(), &mut self.shard.tails);
        for (batch, scored) in done.batches.iter().zip(done.scored) {
            self.measured.batches += 1;
            self.row_figures(scored);
            self.keep_uncertain(planned, batch, scored);
        }
        let held = machine::memory_of_process().unwrap_or(0);
        self.measured.memory_seen = self.measured.memory_seen.max(held);
    }

    fn shard(&mut self, done: &ShardDone) {
        let ops = self.observed.take();
        let write = self.store.take_write_seconds();
        let mut shard = std::mem::take(&mut self.shard);
        let seconds = &done.seconds;
        shard.phases = Phases {
            read: done.read_seconds,
            pack: seconds.pack,
            ops: OpClass::ALL.map(|class| ops.seconds(class)),
            place: seconds.place,
            hash: done.commit_seconds - write,
            write,
            pilot: ops.wide_seconds + seconds.watch,
        };
        shard.commit_seconds = done.commit_seconds;
        shard.seconds = done.total_seconds - shard.phases.pilot;
        shard.tokens = done.tokens as u64;
        shard.rows = done.rows as u64;
        shard.padded_mass = done.padded_mass;
        let demand = self.setup.demand_of(done.planned);
        shard.flops = demand.map_or(0.0, |d| self.setup.work_of(d).flops());
        self.measured.phases.add(&shard.phases);
        self.measured.shards.push(shard);
    }
}

/// Adds to `tails[k - 1]` the mass outside the k best of every row. From the least likely id up,
/// so that small tails keep their digits.
fn add_tails(wide: &HeadRows, tails: &mut [f64]) {
    for (row, &outside) in wide.tail.iter().enumerate() {
        let mut tail = f64::from(outside);
        let logp = &wide.logp[row * wide.k..(row + 1) * wide.k];
        for (sum, &logp) in tails.iter_mut().zip(logp).rev() {
            *sum += tail;
            tail += f64::from(logp).exp();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tails_of_every_k_come_from_one_wide_row() {
        let p = [0.5f64, 0.25, 0.125];
        let wide = HeadRows {
            k: 3,
            logp: p.iter().map(|p| p.ln() as f32).collect(),
            tail: vec![0.125],
            ..HeadRows::default()
        };
        let mut tails = [0.0; 3];
        add_tails(&wide, &mut tails);
        for (found, expected) in tails.iter().zip([0.5, 0.25, 0.125]) {
            assert!((found - expected).abs() < 1e-7, "{tails:?}");
        }
    }

    #[test]
    fn histograms_count_what_lies_outside_at_their_ends() {
        let mut histogram = Histogram::new(0.0, 2.0, 2);
        for value in [-1.0, 0.5, 1.5, 2.0, 9.0] {
            histogram.add(value);
        }
        assert_eq!(histogram.counts, [2, 3]);
    }
}
