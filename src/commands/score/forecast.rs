//! What a run should take, said before it starts and held against it when it ends.

use anyhow::Result;
use serde_json::{Value, json};

use super::pass::{Run, Tally};
use crate::backend::Backend;
use crate::commands::text;
use crate::cost::bill::mfu;
use crate::store::ScoredSet;
use crate::store::size::ShardCounts;

/// Share of the peak that is taken for granted where no pilot has measured it.
pub const MFU_ASSUMED: f64 = 0.4;
/// The name under which pilots note what they measured, in the set's log.
pub const PILOT_LOG: &str = "pilot";
/// A peak this much off the pilot's is worth a word.
const PEAK_CHANGE_PERCENT: f64 = 5.0;

/// What is expected of a run.
#[derive(Clone, PartialEq, Debug)]
pub struct Forecast {
    seconds_per_flop: f64,
    /// Relative, 95 %.
    error: Option<f64>,
    source: &'static str,
    peak_flops: f64,
    /// As the pilot measured it, for as many devices.
    pilot_peak_flops: Option<f64>,
    set_bytes: u64,
}

impl Forecast {
    /// # Errors
    /// A pilot's note that can't be read.
    pub fn new<B: Backend>(run: &Run<B>) -> Result<Forecast> {
        let provenance = run.provenance();
        let counts = run.setup.shards().map(|(planned, demand)| {
            Ok(ShardCounts {
                tokens: run.setup.corpus.tokens_of(planned)?,
                rows: demand.rows,
            })
        });
        let counts: Vec<ShardCounts> = counts.collect::<Result<_>>()?;
        let bytes = run.setup.job.predicted_bytes(&counts, &provenance)?;
        let pilot = pilots_note(run.set, &provenance["device"])?;
        let of_pilot = |key: &str| pilot.as_ref().and_then(|note| note[key].as_f64());
        // A pilot measures one device.
        let devices = run.backends.len() as f64;
        let measured = of_pilot("seconds_per_flop").map(|of_one| of_one / devices);
        Ok(Forecast {
            seconds_per_flop: measured.unwrap_or(1.0 / (run.peak_flops * MFU_ASSUMED)),
            error: of_pilot("relative_error"),
            source: match measured {
                Some(_) => "the pilot",
                None => "40 % of the peak, assumed",
            },
            peak_flops: run.peak_flops,
            pilot_peak_flops: of_pilot("peak_flops").map(|of_one| of_one * devices),
            set_bytes: bytes.total(),
        })
    }

    /// How the run went, in words.
    pub fn facts(&self, tally: &Tally, bytes: Option<u64>) -> Vec<(&'static str, String)> {
        let predicted = self.seconds(tally);
        let error = self
            .error
            .map_or(String::new(), |e| format!(" ± {:.1}", e * predicted));
        let mut facts = vec![
            (
                "MFU",
                format!(
                    "{:.1} % of {:.0} GFLOP/s, this machine's products at best{}",
                    100.0 * mfu(tally.flops, tally.seconds, self.peak_flops),
                    self.peak_flops / 1e9,
                    self.change_of_peak()
                ),
            ),
            (
                "time",
                format!(
                    "{:.1} s{error} predicted ({}), {:.1} s taken ({:+.1} %)",
                    predicted,
                    self.source,
                    tally.seconds,
                    off_percent(predicted, tally.seconds)
                ),
            ),
        ];
        if let Some(bytes) = bytes {
            facts.push((
                "files",
                format!(
                    "{} bytes predicted, {} written ({:+.3} %)",
                    text::count(self.set_bytes),
                    text::count(bytes),
                    off_percent(self.set_bytes as f64, bytes as f64)
                ),
            ));
        }
        facts
    }

    pub fn json(&self, tally: &Tally, bytes: Option<u64>) -> Value {
        json!({
            "seconds_predicted": self.seconds(tally),
            "relative_error": self.error,
            "source": self.source,
            "bytes_predicted": self.set_bytes,
            "bytes": bytes,
            "peak_flops": self.peak_flops,
            "pilot_peak_flops": self.pilot_peak_flops,
            "mfu": mfu(tally.flops, tally.seconds, self.peak_flops),
        })
    }

    /// A machine that others use too is not the one that the pilot measured.
    fn change_of_peak(&self) -> String {
        let change = self
            .pilot_peak_flops
            .map(|then| off_percent(then, self.peak_flops));
        let change = change.filter(|change| change.abs() >= PEAK_CHANGE_PERCENT);
        change.map_or(String::new(), |change| {
            format!(", {change:+.0} % since the pilot")
        })
    }

    /// For the work that was done.
    fn seconds(&self, tally: &Tally) -> f64 {
        tally.flops * self.seconds_per_flop
    }
}

fn off_percent(predicted: f64, found: f64) -> f64 {
    100.0 * (found / predicted - 1.0)
}

/// The last note of a pilot on this device.
fn pilots_note(set: &ScoredSet, device: &Value) -> Result<Option<Value>> {
    let notes = set.log_lines(PILOT_LOG)?;
    Ok(notes
        .into_iter()
        .rev()
        .find(|note| note["device"] == *device))
}
