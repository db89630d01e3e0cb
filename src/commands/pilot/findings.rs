//! From what was measured to what it means for the whole job: the new bill, k, storage.

use anyhow::Result;
use serde_json::{Value, json};

use super::advice::{self, SweepPoint};
use super::alarms::Alarm;
use super::corpus::Lengths;
use super::measure::{Measured, ShardMeasure};
use crate::backend::observed::OpClass;
use crate::commands::score::setup::Setup;
use crate::config::PilotSettings;
use crate::cost::bill::mfu;
use crate::cost::spread::{Estimate, ratio};
use crate::store::identity as keys;
use crate::store::size::ShardCounts;

/// k for which storage is listed.
const LISTED_K: [usize; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];

/// What storing `k` ids costs and keeps.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct KCost {
    pub k: usize,
    pub bytes_per_row: usize,
    /// Of the whole set.
    pub bytes: u64,
    pub tail: Estimate,
}

/// Where the work of a pilot stands in the whole job.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Extent {
    pub shards: usize,
    pub shards_open: usize,
    pub rows: u64,
    pub tokens: u64,
    pub flops: f64,
    /// Of the shards that are still open.
    pub flops_left: f64,
}

/// Seconds, with their 95 % error where it is known, and what they cost.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Time {
    pub seconds: Estimate,
    pub cost: Option<f64>,
}

/// Everything that depends on the run and not on the sums made of it.
pub struct Inputs<'a> {
    pub settings: &'a PilotSettings,
    pub setup: &'a Setup,
    pub measured: &'a Measured,
    pub extent: Extent,
    pub wall_seconds: f64,
    /// FLOP/s of plain products before and after.
    pub peaks: [f64; 2],
    pub sweep: Vec<SweepPoint>,
    pub lengths: Lengths,
    pub alarms: Vec<Alarm>,
    /// Signs that could not be looked at.
    pub not_judged: Vec<String>,
    pub provenance: &'a Value,
}

/// What a pilot found.
pub struct Findings<'a> {
    pub inputs: Inputs<'a>,
    pub seconds_per_flop: Estimate,
    pub whole: Time,
    pub left: Time,
    /// Model FLOP/s of the shards, all phases included.
    pub achieved: f64,
    /// FLOP/s while products run: what is reached if nothing else took time.
    pub ceiling: f64,
    pub peak: f64,
    /// Mean tail mass outside the k best, for k from 1.
    pub tails: Vec<Estimate>,
    pub k_stored: usize,
    pub k_advised: Option<usize>,
    /// The advice at the ends of the error of the tails; `None` where no k of the curve will do.
    pub k_between: [Option<usize>; 2],
    pub k_costs: Vec<KCost>,
    pub budget_advised: Option<usize>,
}

impl<'a> Findings<'a> {
    /// # Errors
    /// An identity that no set could have.
    pub fn new(inputs: Inputs<'a>) -> Result<Findings<'a>> {
        let shards = &inputs.measured.shards;
        let all = inputs.extent.shards;
        let times: Vec<(f64, f64)> = shards.iter().map(|s| (s.flops, s.seconds)).collect();
        let rate = advice::with_drift(ratio(&times, all), inputs.peaks);
        let time = |flops: f64| {
            let seconds = Estimate {
                value: rate.value * flops,
                error: rate.error.map(|error| error * flops),
            };
            let price = inputs.settings.price;
            let cost = price.map(|price| price * seconds.value / 3600.0);
            Time { seconds, cost }
        };
        let (whole, left) = (time(inputs.extent.flops), time(inputs.extent.flops_left));
        let tails = tails(shards, all);
        let means: Vec<f64> = tails.iter().map(|tail| tail.value).collect();
        let below = inputs.settings.tail_below;
        let k_advised = advice::smallest_k(&means, below);
        let k_between = [-1.0, 1.0].map(|side| {
            let ends = tails
                .iter()
                .map(|t| t.value + side * t.error.unwrap_or(0.0));
            advice::smallest_k(&ends.collect::<Vec<_>>(), below)
        });
        let peak = inputs.peaks[0].max(inputs.peaks[1]);
        let k_costs = k_costs(&inputs, &tails, k_advised)?;
        Ok(Findings {
            seconds_per_flop: rate,
            whole,
            left,
            achieved: 1.0 / rate.value,
            ceiling: product_rate(&inputs),
            peak,
            k_stored: inputs.settings.score.products.k,
            k_advised,
            k_between,
            k_costs,
            budget_advised: advice::token_budget(&inputs.sweep, budget(&inputs)),
            tails,
            inputs,
        })
    }

    fn mean(&self, of: impl Fn(&ShardMeasure) -> f64) -> f64 {
        let shards = &self.inputs.measured.shards;
        shards.iter().map(of).sum::<f64>() / self.rows().max(1) as f64
    }

    pub fn rows(&self) -> u64 {
        self.inputs.measured.shards.iter().map(|s| s.rows).sum()
    }

    pub fn tokens(&self) -> u64 {
        self.inputs.measured.shards.iter().map(|s| s.tokens).sum()
    }

    /// Seconds of the scored shards, the pilot's own work left out.
    pub fn seconds(&self) -> f64 {
        self.inputs.measured.shards.iter().map(|s| s.seconds).sum()
    }

    pub fn mean_nll(&self) -> f64 {
        self.mean(|s| s.nll)
    }

    pub fn mean_entropy(&self) -> f64 {
        self.mean(|s| s.entropy)
    }

    pub fn padded_mass(&self) -> f64 {
        self.mean(|s| s.padded_mass)
    }

    pub fn mfu(&self) -> f64 {
        mfu(self.achieved, 1.0, self.peak)
    }

    /// Mean seconds of a commit.
    pub fn commit_seconds(&self) -> f64 {
        let shards = &self.inputs.measured.shards;
        let sum: f64 = shards.iter().map(|s| s.commit_seconds).sum();
        sum / shards.len().max(1) as f64
    }

    /// Time of the thread that computes in which no phase ran.
    pub fn unaccounted(&self) -> f64 {
        self.inputs.wall_seconds - self.inputs.measured.phases.sum()
    }

    /// Time in which the arithmetic waited for the disk.
    pub fn stalls(&self) -> f64 {
        let phases = &self.inputs.measured.phases;
        phases.read + phases.write
    }

    /// Mean tokens of a batch, as a share of the budget.
    pub fn packing(&self) -> f64 {
        let batches = self.inputs.measured.batches.max(1) as f64;
        self.tokens() as f64 / batches / self.budget() as f64
    }

    pub fn budget(&self) -> usize {
        budget(&self.inputs)
    }

    /// What is to be said about the stored shards where another k is advised.
    pub fn rescoring(&self) -> Option<String> {
        let advised = self.k_advised.filter(|k| *k != self.k_stored)?;
        let seconds = self.seconds();
        let price = self.inputs.settings.price;
        let cost = price.map_or(String::new(), |p| format!(", ${:.2}", p * seconds / 3600.0));
        let (shards, stored) = (self.inputs.measured.shards.len(), self.k_stored);
        Some(match self.inputs.settings.is_wide && advised < stored {
            true => format!(
                "These {shards} shards hold k = {stored}: a run with -k {stored} counts them, and a reader takes the first {advised} columns; a run with -k {advised} goes to another --out and scores them again ({seconds:.0} s{cost})"
            ),
            false => format!(
                "These {shards} shards hold k = {stored} and count toward a run with -k {stored}; a run with -k {advised} goes to another --out and scores them again ({seconds:.0} s{cost}); a pilot with --k-max stores wide at once"
            ),
        })
    }

    /// What `score` reads to know how long a run will take.
    pub fn note(&self) -> Value {
        json!({
            "device": self.inputs.provenance["device"],
            "seconds_per_flop": self.seconds_per_flop.value,
            "relative_error": self.seconds_per_flop.error.map(|e| e / self.seconds_per_flop.value),
            "shards": self.inputs.measured.shards.len(),
            "peak_flops": self.peak,
        })
    }
}

/// Tokens of a batch as the pilot ran.
fn budget(inputs: &Inputs) -> usize {
    let asked = inputs.settings.score.token_budget;
    asked.unwrap_or(inputs.setup.limits.tokens)
}

/// FLOP/s of the products alone: projections, MLPs, experts and head, in their own seconds.
fn product_rate(inputs: &Inputs) -> f64 {
    let setup = inputs.setup;
    let shards = inputs.measured.shards.iter();
    let demands = setup.shards().filter(|(planned, _)| {
        let mut scored = shards.clone();
        scored.any(|shard| shard.id == planned.id)
    });
    let flops: f64 = demands
        .map(|(_, demand)| {
            let work = setup.work_of(demand);
            2.0 * (work.body + work.head) as f64
        })
        .sum();
    let phases = &inputs.measured.phases;
    let classes = [OpClass::Linear, OpClass::Experts, OpClass::Head];
    flops / classes.map(|class| phases.of(class)).iter().sum::<f64>()
}

fn tails(shards: &[ShardMeasure], all: usize) -> Vec<Estimate> {
    let wide = shards.first().map_or(0, |shard| shard.tails.len());
    let of_k = |k: usize| {
        let drawn: Vec<(f64, f64)> = shards.iter().map(|s| (s.rows as f64, s.tails[k])).collect();
        ratio(&drawn, all)
    };
    (0..wide).map(of_k).collect()
}

fn k_costs(inputs: &Inputs, tails: &[Estimate], advised: Option<usize>) -> Result<Vec<KCost>> {
    let settings = &inputs.settings.score;
    let mut listed: Vec<usize> = LISTED_K
        .into_iter()
        .chain([settings.products.k])
        .chain(advised)
        .collect();
    listed.retain(|k| *k <= tails.len());
    listed.sort_unstable();
    listed.dedup();
    let counts = inputs.setup.shards().map(|(planned, demand)| {
        Ok(ShardCounts {
            tokens: inputs.setup.corpus.tokens_of(planned)?,
            rows: demand.rows,
        })
    });
    let counts: Vec<ShardCounts> = counts.collect::<Result<_>>()?;
    let mut costs = Vec::new();
    for k in listed {
        let mut products = settings.products.clone();
        products.k = k;
        let mut job = inputs.setup.job.clone();
        job.identity.insert(keys::K.to_owned(), k.into());
        let bytes = job.predicted_bytes(&counts, inputs.provenance)?;
        costs.push(KCost {
            k,
            bytes_per_row: products.bytes_per_row(),
            bytes: bytes.total(),
            tail: tails[k - 1],
        });
    }
    Ok(costs)
}
