//! `pilot`: a small part of the job, scored for good and measured, and the bill for the rest.

mod advice;
mod alarms;
mod choose;
mod corpus;
mod findings;
mod measure;
mod page;
mod show;
mod sweep;

use std::sync::Arc;

use anyhow::{Result, ensure};

use self::alarms::{Signs, alarms, not_judged};
use self::choose::{Candidate, choose};
use self::corpus::{CorpusSigns, shift_test};
use self::findings::{Extent, Findings, Inputs};
use self::measure::{Recorder, WIDE_K};
use super::devices::{self, Devices};
use super::score::check_arrays;
use super::score::forecast::PILOT_LOG;
use super::score::pass::{Run, Tally};
use super::score::setup::Setup;
use super::written::{self, write_page};
use super::{Interrupt, Outcome, Status};
use crate::backend::Backend;
use crate::backend::cpu::Cpu;
use crate::backend::observed::Observed;
use crate::config::PilotSettings;
use crate::corpus::Decoder as TokenDecoder;
use crate::progress;
use crate::store::timed::TimedStore;
use crate::store::{LocalDisk, PlannedShard, ScoredSet};

/// What the budget sweep may take: so many seconds, or such a share of the pilot's own.
const SWEEP_SECONDS: f64 = 45.0;
const SWEEP_SHARE: f64 = 0.1;

/// Scores some shards of the job and says what the whole of it takes.
///
/// # Errors
/// As for `score`; a set without an open shard.
pub fn pilot(settings: &PilotSettings, interrupt: &Interrupt) -> Result<Outcome> {
    check_written(settings)?;
    let devices = Devices::open(&settings.score)?;
    // The second reduction has a slice of its own.
    let setup = Setup::with_slices(&settings.score, &devices, 2)?;
    match &devices {
        Devices::Cpu => pilot_on(Cpu, &Cpu::peak_flops, settings, &setup, interrupt),
        Devices::Cuda(devices) => {
            if devices.len() > 1 {
                progress::note("note: a pilot measures on the first device alone");
            }
            let (mut devices, peak) = devices::with_memory(&devices[..1], setup.device_memory)?;
            pilot_on(devices.remove(0), &|| peak, settings, &setup, interrupt)
        }
    }
}

/// The pilot on one device. `peak_flops` is asked before and after.
fn pilot_on<B: Backend>(
    backend: B,
    peak_flops: &dyn Fn() -> f64,
    settings: &PilotSettings,
    setup: &Setup,
    interrupt: &Interrupt,
) -> Result<Outcome> {
    ensure!(
        setup.demands.iter().any(|demand| demand.rows > 0),
        "{}: expected rows to score, found none: every loss mask is 0",
        settings.score.corpus.display()
    );
    let store = Arc::new(TimedStore::new(Arc::new(LocalDisk::new(
        &settings.score.out,
    ))));
    let set = ScoredSet::join_in(store.clone(), &setup.job)?;
    check_arrays(&set)?;
    let shards = chosen(settings, setup, &set)?;
    let wide_k = WIDE_K.min(setup.vocab.scored);
    let observed = [Observed::new(backend, Some(wide_k))];
    let first_peak = peak_flops();
    let run = Run {
        settings: &settings.score,
        setup,
        set: &set,
        backends: &observed,
        peak_flops: first_peak,
        interrupt,
    };
    let mut recorder = Recorder::new(setup, &observed[0], &store, wide_k);
    let decoders = run.decoders()?;
    set.begin()?;
    let tally = run.score(decoders, &shards, &mut recorder)?;
    let measured = recorder.measured;
    if tally.interrupted || measured.shards.is_empty() {
        return Ok(unfinished(&tally));
    }
    let tokenizer = setup_tokenizer(settings)?;
    let corpus = CorpusSigns::of(setup, tokenizer.as_ref().map(TokenDecoder::tokenizer))?;
    let signs = signs(setup, &set, &shards, &measured, &corpus)?;
    let rate = tally.tokens as f64 / tally.seconds;
    let middle = &shards[shards.len() / 2];
    let seconds = settings.sweep_seconds;
    let seconds = seconds.unwrap_or((SWEEP_SHARE * tally.seconds).max(SWEEP_SECONDS));
    let device = observed[0].inner();
    let sweep = sweep::sweep(device, setup, &settings.score, middle, [seconds, rate])?;
    let provenance = run.provenance();
    let findings = Findings::new(Inputs {
        settings,
        setup,
        measured: &measured,
        extent: extent(setup, &set)?,
        wall_seconds: tally.seconds,
        peaks: [first_peak, peak_flops()],
        sweep,
        lengths: corpus.lengths,
        alarms: alarms(&signs),
        not_judged: not_judged(&signs),
        provenance: &provenance,
    })?;
    set.log(PILOT_LOG, &findings.note())?;
    Ok(Outcome {
        text: show::text(&findings),
        json: show::json(&findings),
        status: report(settings, &findings, tokenizer.as_ref())?,
    })
}

/// Writes the page that was asked for. What was measured is worth more than its page: without one
/// work is left.
fn report(
    settings: &PilotSettings,
    findings: &Findings,
    tokenizer: Option<&TokenDecoder>,
) -> Result<Status> {
    let Some(path) = &settings.report else {
        return Ok(Status::Done);
    };
    let page = page::page(findings, tokenizer)?;
    Ok(match write_page(path, &page) {
        Ok(()) => {
            progress::note(&format!("report: {}", path.display()));
            Status::Done
        }
        Err(error) => {
            progress::note(&format!("note: no report: {error:#}"));
            Status::Unfinished
        }
    })
}

fn check_written(settings: &PilotSettings) -> Result<()> {
    let PilotSettings { score, report, .. } = settings;
    let files = [
        ("report", report.as_deref()),
        ("events", score.listeners.events.as_deref()),
        ("metrics", score.listeners.metrics.as_deref()),
    ];
    written::check(&files, &[&score.out, &score.corpus, &score.teacher])
}

/// The shards to score: of those that are open.
fn chosen(settings: &PilotSettings, setup: &Setup, set: &ScoredSet) -> Result<Vec<PlannedShard>> {
    let manifests = set.manifests()?;
    let candidates = setup.shards().zip(&manifests).enumerate();
    let candidates: Vec<Candidate> = candidates
        .filter(|(_, ((_, demand), manifest))| manifest.is_none() && demand.rows > 0)
        .map(|(index, ((planned, demand), _))| Candidate::new(index, demand, planned.sequences()))
        .collect();
    ensure!(
        !candidates.is_empty(),
        "{}: expected an open shard to measure, found all committed; give another --out",
        settings.score.out.display()
    );
    let chosen = choose(candidates, settings.fraction, settings.seed);
    if chosen.len() < 2 {
        progress::note(
            "note: one shard tells nothing of the spread between shards; a smaller --shard-tokens makes more",
        );
    }
    Ok(chosen.iter().map(|&i| setup.job.plan[i].clone()).collect())
}

fn setup_tokenizer(settings: &PilotSettings) -> Result<Option<TokenDecoder>> {
    let folder = settings.score.corpus.join("tokenizer");
    let there = folder.join("tokenizer.json").is_file();
    there.then(|| TokenDecoder::load(&folder)).transpose()
}

fn signs(
    setup: &Setup,
    set: &ScoredSet,
    shards: &[PlannedShard],
    measured: &measure::Measured,
    corpus: &CorpusSigns,
) -> Result<Signs> {
    let rows: u64 = measured.shards.iter().map(|s| s.rows).sum();
    let mean = |of: fn(&measure::ShardMeasure) -> f64| {
        measured.shards.iter().map(of).sum::<f64>() / rows.max(1) as f64
    };
    Ok(Signs {
        rows,
        mean_entropy: mean(|s| s.entropy),
        mean_nll: mean(|s| s.nll),
        vocab: setup.vocab.scored,
        padded_mass: mean(|s| s.padded_mass),
        sequences: corpus.lengths.sequences,
        with_bos: corpus.with_bos,
        longest: corpus.lengths.longest,
        at_longest: corpus.at_longest,
        at_longest_stopped: corpus.at_longest_stopped,
        shift: shift_test(setup, set, shards)?,
    })
}

fn extent(setup: &Setup, set: &ScoredSet) -> Result<Extent> {
    let mut extent = Extent::default();
    for ((_, demand), manifest) in setup.shards().zip(set.manifests()?) {
        let flops = setup.work_of(demand).flops();
        extent.shards += 1;
        extent.rows += demand.rows;
        extent.tokens += demand.tokens;
        extent.flops += flops;
        if manifest.is_none() {
            extent.shards_open += 1;
            extent.flops_left += flops;
        }
    }
    Ok(extent)
}

fn unfinished(tally: &Tally) -> Outcome {
    Outcome {
        text: format!(
            "stopped after {} shards: too little was measured for a bill; the same command goes on\n",
            tally.shards
        ),
        json: serde_json::json!({"interrupted": tally.interrupted, "shards": tally.shards}),
        status: Status::Unfinished,
    }
}
