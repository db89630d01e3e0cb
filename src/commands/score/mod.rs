//! `score`: the open shards of a scored set, one after another, until none is left.

pub mod forecast;
pub mod pass;
pub mod setup;
pub mod told;

use anyhow::{Result, ensure};
use serde_json::json;

use self::forecast::Forecast;
use self::pass::{NoWatcher, Run, Tally};
use self::setup::Setup;
use super::devices::{self, Devices};
use super::{Interrupt, Outcome, Status, text, written};
use crate::backend::Backend;
use crate::backend::cpu::Cpu;
use crate::config::ScoreSettings;
use crate::progress;
use crate::store::{Manifest, PlannedShard, ScoredSet, Sums};

/// Scores what is not committed yet.
///
/// # Errors
/// What [`Setup::new`] refuses, another identity, or a shard that can't be scored.
pub fn score(settings: &ScoreSettings, interrupt: &Interrupt) -> Result<Outcome> {
    let files = [
        ("events", settings.listeners.events.as_deref()),
        ("metrics", settings.listeners.metrics.as_deref()),
    ];
    written::check(
        &files,
        &[&settings.out, &settings.corpus, &settings.teacher],
    )?;
    let devices = Devices::open(settings)?;
    let setup = Setup::new(settings, &devices)?;
    let set = ScoredSet::join(&settings.out, &setup.job)?;
    let open = set.open_shards()?;
    if setup.demands.iter().all(|demand| demand.rows == 0) {
        progress::note("note: the corpus has no scored position: every loss mask is 0");
    }
    check_arrays(&set)?;
    let mut report = Report {
        settings,
        setup: &setup,
        set: &set,
        forecast: None,
    };
    if open.is_empty() {
        set.begin()?;
        let remark = "all shards were committed before; nothing to do";
        return report.outcome(&Tally::default(), remark);
    }
    let tally = match devices {
        Devices::Cpu => pass(&mut report, &[Cpu], Cpu::peak_flops(), &open, interrupt)?,
        Devices::Cuda(devices) => {
            let (devices, peak) = devices::with_memory(&devices, setup.device_memory)?;
            pass(&mut report, &devices, peak, &open, interrupt)?
        }
    };
    report.outcome(&tally, "")
}

/// Scores the open shards on these devices.
fn pass<B: Backend>(
    report: &mut Report,
    backends: &[B],
    peak_flops: f64,
    open: &[PlannedShard],
    interrupt: &Interrupt,
) -> Result<Tally> {
    let run = Run {
        settings: report.settings,
        setup: report.setup,
        set: report.set,
        backends,
        peak_flops,
        interrupt,
    };
    let decoders = run.decoders()?;
    // Nothing is begun that can't be started.
    report.set.begin()?;
    report.forecast = Some(Forecast::new(&run)?);
    run.score(decoders, open, &mut NoWatcher)
}

/// Every array that a manifest names must be there.
pub fn check_arrays(set: &ScoredSet) -> Result<()> {
    let manifests = set.manifests()?;
    let manifests: Vec<&Manifest> = manifests.iter().flatten().collect();
    let missing = set.missing_arrays(&manifests)?;
    ensure!(
        missing.is_empty(),
        "{}; `kdscore verify --discard-damaged` moves damaged shards aside, then this command makes them again",
        missing.join("; ")
    );
    Ok(())
}

/// The mean over all rows of a figure that manifests give per shard.
fn mean_of(manifests: &[Manifest], of: fn(&Sums) -> Option<f64>) -> Option<f64> {
    let rows: u64 = manifests.iter().map(|m| m.rows).sum();
    let parts = manifests
        .iter()
        .filter_map(|m| Some(of(&m.sums)? * m.rows as f64));
    (rows > 0).then(|| parts.sum::<f64>() / rows as f64)
}

/// The set as it stands when a run ends.
struct Report<'a> {
    settings: &'a ScoreSettings,
    setup: &'a Setup,
    set: &'a ScoredSet,
    forecast: Option<Forecast>,
}

impl Report<'_> {
    /// How much of the teacher's probability lies where no token is.
    fn padded_mass(&self, tally: &Tally) -> Option<(&'static str, String)> {
        let vocab = &self.setup.vocab;
        let padded = vocab.scored.checked_sub(vocab.tokenizer)?;
        (tally.rows > 0 && padded > 0).then(|| {
            let mass = tally.padded_mass / tally.rows as f64;
            let tokens = vocab.tokenizer;
            (
                "mass on padded vocabulary",
                format!("{mass:.2e} on {padded} head rows beyond the tokenizer's {tokens}"),
            )
        })
    }

    /// The set as it stands now, and what this run added to it.
    fn outcome(&self, tally: &Tally, remark: &str) -> Result<Outcome> {
        let manifests: Vec<_> = self.set.manifests()?.into_iter().flatten().collect();
        let total = self.set.job().plan.len();
        let left = total - manifests.len();
        let rows: u64 = manifests.iter().map(|m| m.rows).sum();
        let tail = mean_of(&manifests, |sums| sums.mean_tail);
        let target = mean_of(&manifests, |sums| sums.mean_target_logp);
        let rate = tally.tokens as f64 / tally.seconds.max(1e-9);
        let figure = |v: Option<f64>| v.map_or("-".to_owned(), |v| format!("{v:.4}"));
        let mut facts = vec![
            ("scored set", self.settings.out.display().to_string()),
            ("shards", format!("{} of {total} committed", total - left)),
            ("rows", text::count(rows)),
            ("mean tail mass", figure(tail)),
            (
                "mean log-prob of the targets",
                figure(target) + &text::target_logp_note(self.set.terms()),
            ),
            ("identity", self.set.job().identity_sha256()),
        ];
        if tally.tokens > 0 {
            let (tokens, seconds) = (text::count(tally.tokens), tally.seconds);
            let speed = format!("{rate:.0} ({tokens} tokens in {seconds:.1} s)");
            facts.insert(3, ("tokens/s", speed));
        }
        facts.extend(self.padded_mass(tally));
        let bytes = match left {
            0 => Some(self.set.committed_bytes()?),
            _ => None,
        };
        let forecast = self.forecast.as_ref().filter(|_| tally.shards > 0);
        facts.extend(forecast.map(|f| f.facts(tally, bytes)).unwrap_or_default());
        let mut shown = text::facts(&facts);
        match left {
            0 if !remark.is_empty() => shown += &format!("{remark}\n"),
            0 => shown += "all shards are committed\n",
            n => {
                shown += &format!(
                    "{} left: the same command goes on with the first of them; what was computed of an unfinished shard is computed again\n",
                    text::plural(n, "shard")
                );
            }
        }
        Ok(Outcome {
            text: shown,
            json: json!({
                "out": self.settings.out.to_string_lossy(),
                "shards": total,
                "shards_committed": total - left,
                "shards_scored_now": tally.shards,
                "rows": rows,
                "rows_scored_now": tally.rows,
                "tokens_computed": tally.tokens,
                "seconds": tally.seconds,
                "tokens_per_second": if tally.tokens > 0 { Some(rate) } else { None },
                "mean_tail": tail,
                "mean_target_logp": target,
                "interrupted": tally.interrupted,
                "forecast": forecast.map(|f| f.json(tally, bytes)),
                "identity_sha256": self.set.job().identity_sha256(),
            }),
            status: if left == 0 {
                Status::Done
            } else {
                Status::Unfinished
            },
        })
    }
}
