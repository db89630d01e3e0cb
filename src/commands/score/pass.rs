//! The pass over open shards: score one, commit it, go on.

use std::collections::HashSet;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::setup::{Setup, shard_index};
use super::told::Told;
use crate::backend::Backend;
use crate::batch::PackedBatch;
use crate::commands::{Interrupt, machine, text};
use crate::config::ScoreSettings;
use crate::corpus::CorpusShard;
use crate::cost::MemoryPlan;
use crate::cost::bill::mfu;
use crate::model::{Decoder, Demand, Limits, Vocabulary};
use crate::progress::{self, Progress};
use crate::score::{Proceed, ScoredShard, ShardJob, ShardSeconds, WaveDone, score_shard};
use crate::store::{Committed, CorpusReader, PlannedShard, ScoredSet};

/// What a pass has done so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    pub shards: usize,
    pub rows: u64,
    pub tokens: u64,
    /// Of the waves that are done.
    pub flops: f64,
    pub padded_mass: f64,
    pub seconds: f64,
    pub interrupted: bool,
}

/// A shard that was scored and committed, and where its time went.
#[derive(Debug)]
pub struct ShardDone<'a> {
    pub planned: &'a PlannedShard,
    pub tokens: usize,
    pub rows: usize,
    pub padded_mass: f64,
    pub seconds: ShardSeconds,
    /// Checking, opening and mapping the corpus shard.
    pub read_seconds: f64,
    /// Checks, hashes and writes of the commit.
    pub commit_seconds: f64,
    pub total_seconds: f64,
}

/// Who looks on while a pass runs.
pub trait Watcher {
    fn start(&mut self, _planned: &PlannedShard) {}

    fn wave(&mut self, _planned: &PlannedShard, _done: &WaveDone) {}

    fn shard(&mut self, _done: &ShardDone) {}
}

/// Looks at nothing.
pub struct NoWatcher;

impl Watcher for NoWatcher {}

/// How one shard went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    Committed,
    Skipped,
    /// Another worker committed it while this one scored it.
    LostRace,
    Interrupted,
}

/// What a pass computes with, and what it has done.
struct Pass<'a, B: Backend> {
    decoder: Decoder<'a, B>,
    provenance: Value,
    progress: Progress,
    started: Instant,
    tally: Tally,
    /// The corpus shard whose hashes were found right last.
    corpus_checked: Option<usize>,
}

impl<B: Backend> Pass<'_, B> {
    /// A corpus shard is compared with the hashes of corpus.json once, before its first row is
    /// scored: targets of a damaged corpus would be committed as they are.
    fn check_corpus(&mut self, corpus: &CorpusReader, index: usize) -> Result<()> {
        if self.corpus_checked == Some(index) {
            return Ok(());
        }
        let damage = corpus.check_hashes(index);
        ensure!(
            damage.is_empty(),
            "{}; restore the corpus, or prepare it again elsewhere",
            damage.join("; ")
        );
        self.corpus_checked = Some(index);
        Ok(())
    }
}

/// A job that is being scored on a backend.
pub struct Run<'a, B: Backend> {
    pub settings: &'a ScoreSettings,
    pub setup: &'a Setup,
    pub set: &'a ScoredSet,
    pub backend: &'a B,
    /// FLOP/s of the device at best.
    pub peak_flops: f64,
    pub interrupt: &'a Interrupt,
}

impl<B: Backend> Run<'_, B> {
    /// Scores `shards`, those that other workers commit meanwhile left out.
    ///
    /// # Errors
    /// As for scoring and committing one.
    pub fn score(&self, shards: &[PlannedShard], watcher: &mut dyn Watcher) -> Result<Tally> {
        let provenance = self.provenance();
        self.check_same_device(&provenance)?;
        progress::note(&memory_text(&self.setup.memory, &self.setup.limits));
        let vocabulary = Vocabulary {
            scored: self.setup.vocab.scored,
            tokenizer: self.setup.vocab.tokenizer,
        };
        let teacher = &self.setup.teacher.teacher;
        let mut pass = Pass {
            decoder: Decoder::new(self.backend, teacher, self.setup.limits, vocabulary)?,
            provenance,
            progress: self.progress(shards),
            started: Instant::now(),
            tally: Tally::default(),
            corpus_checked: None,
        };
        let flops_of = |done: &WaveDone| self.flops_of(done.batches);
        let sizes = [self.peak_flops, shards.len() as f64];
        let mut told = Told::new(&self.settings.listeners, watcher, &flops_of, sizes);
        let mut queue = Queue::new(shards);
        while let Some(planned) = queue.next() {
            match self.score_one(&mut pass, planned, &mut told)? {
                Step::Committed | Step::Skipped => {}
                Step::LostRace => queue.scatter(),
                Step::Interrupted => {
                    pass.tally.interrupted = true;
                    break;
                }
            }
        }
        told.finish();
        pass.progress.finish();
        pass.tally.seconds = pass.started.elapsed().as_secs_f64();
        Ok(pass.tally)
    }

    fn score_one(
        &self,
        pass: &mut Pass<B>,
        planned: &PlannedShard,
        watcher: &mut dyn Watcher,
    ) -> Result<Step> {
        if self.interrupt.is_raised() {
            return Ok(Step::Interrupted);
        }
        if self.set.manifest(planned)?.is_some() {
            return Ok(Step::Skipped); // another worker was here
        }
        watcher.start(planned);
        let started = Instant::now();
        let corpus = &self.setup.corpus;
        let index = shard_index(corpus, planned)?;
        pass.check_corpus(corpus, index)?;
        let files = corpus.shard(index)?;
        let read_seconds = started.elapsed().as_secs_f64();
        let scored = self
            .compute(pass, planned, files.view()?, watcher)
            .with_context(|| planned.id.clone())?;
        let Some(scored) = scored else {
            return Ok(Step::Interrupted);
        };
        let line = self.log_line(planned, &scored, started);
        let mut done = ShardDone {
            planned,
            tokens: scored.tokens,
            rows: scored_rows(&scored),
            padded_mass: scored.padded_mass,
            seconds: scored.seconds,
            read_seconds,
            commit_seconds: 0.0,
            total_seconds: 0.0,
        };
        pass.tally.shards += 1;
        pass.tally.rows += done.rows as u64;
        pass.tally.padded_mass += done.padded_mass;
        let scored_at = Instant::now();
        self.setup.check_teacher(self.settings)?;
        let committed = self
            .set
            .commit(planned, &files, scored.arrays, &pass.provenance)?;
        self.set.log(&machine::worker_name(), &line)?;
        done.commit_seconds = scored_at.elapsed().as_secs_f64();
        done.total_seconds = started.elapsed().as_secs_f64();
        watcher.shard(&done);
        Ok(match committed {
            Committed::Written => Step::Committed,
            Committed::AlreadyThere => Step::LostRace,
        })
    }

    /// The rows of one shard; `None` when interrupted.
    fn compute(
        &self,
        pass: &mut Pass<B>,
        planned: &PlannedShard,
        shard: CorpusShard,
        watcher: &mut dyn Watcher,
    ) -> Result<Option<ScoredShard>> {
        let job = ShardJob {
            shard,
            sequences: planned.range(),
            token_budget: self.token_budget(),
            wave: self.setup.limits.wave,
            products: &self.settings.products,
        };
        let Pass {
            decoder,
            progress,
            started,
            tally,
            ..
        } = pass;
        let mut watch = |done: &WaveDone| {
            tally.tokens += done.tokens as u64;
            tally.flops += self.flops_of(done.batches);
            let detail = self.rates(tally, started.elapsed().as_secs_f64());
            progress.add(done.rows as u64, &detail);
            watcher.wave(planned, done);
            match self.interrupt.is_raised() {
                true => Proceed::Stop,
                false => Proceed::Go,
            }
        };
        score_shard(decoder, &job, &mut watch)
    }

    fn flops_of(&self, batches: &[PackedBatch]) -> f64 {
        let mut demand = Demand::none(self.setup.teacher.description());
        for batch in batches {
            for sequence in &batch.sequences {
                let rows = &batch.rows[sequence.rows.clone()];
                let positions = rows
                    .iter()
                    .map(|r| batch.positions[r.token as usize] as usize);
                demand.add(positions);
            }
        }
        self.setup.work_of(&demand).flops()
    }

    fn rates(&self, tally: &Tally, seconds: f64) -> String {
        format!(
            "{:.0} tokens/s, MFU {:.0} %",
            tally.tokens as f64 / seconds,
            100.0 * mfu(tally.flops, seconds, self.peak_flops)
        )
    }

    /// The budget the packer fills batches to. `limits.tokens` may be above it, for one long
    /// sequence.
    pub fn token_budget(&self) -> usize {
        let limits = &self.setup.limits;
        self.settings.token_budget.unwrap_or(limits.tokens)
    }

    pub fn provenance(&self) -> Value {
        json!({
            "device": self.backend.provenance(),
            "kdscore": machine::build(),
            "token_budget": self.token_budget(),
            "head_chunk": self.setup.limits.head_chunk,
        })
    }

    /// With --same-device: every shard that is there came from this device and build.
    fn check_same_device(&self, ours: &Value) -> Result<()> {
        if !self.settings.same_device {
            return Ok(());
        }
        for manifest in self.set.manifests()?.into_iter().flatten() {
            for key in ["device", "kdscore"] {
                let theirs = &manifest.provenance[key];
                ensure!(
                    *theirs == ours[key],
                    "same-device: {}: expected {key} {}, found {theirs}; without --same-device mixed provenance is allowed, and verify lists it",
                    manifest.shard.id,
                    ours[key]
                );
            }
        }
        Ok(())
    }

    fn progress(&self, shards: &[PlannedShard]) -> Progress {
        let now: HashSet<&str> = shards.iter().map(|planned| planned.id.as_str()).collect();
        let left = self
            .setup
            .shards()
            .filter(|(planned, _)| now.contains(planned.id.as_str()))
            .map(|(_, demand)| demand.rows);
        let total = self.setup.demands.iter().map(|demand| demand.rows).sum();
        Progress::new("scoring", "rows", total, total - left.sum::<u64>())
    }

    /// What was observed about a shard; no part of the data.
    fn log_line(&self, planned: &PlannedShard, scored: &ScoredShard, started: Instant) -> Value {
        let seconds = started.elapsed().as_secs_f64();
        json!({
            "shard": planned.id,
            "rows": scored_rows(scored),
            "tokens": scored.tokens,
            "seconds": seconds,
            "tokens_per_second": scored.tokens as f64 / seconds,
            "memory_planned_bytes": self.setup.memory.anonymous(),
        })
    }
}

fn scored_rows(scored: &ScoredShard) -> usize {
    scored.arrays.first().map_or(0, |array| array.shape[0])
}

fn memory_text(memory: &MemoryPlan, limits: &Limits) -> String {
    format!(
        "memory: weights {} (mapped), activations {} for {} tokens, logits slice {} for {} rows, rows {}, scratch {}",
        text::bytes(memory.weights),
        text::bytes(memory.activations),
        text::count(limits.tokens as u64),
        text::bytes(memory.logits),
        text::count(limits.head_chunk as u64),
        text::bytes(memory.rows),
        text::bytes(memory.scratch),
    )
}

/// The open shards in order; once another worker is met, from a place of this process's own, so
/// that two don't walk side by side.
struct Queue<'a> {
    open: Vec<&'a PlannedShard>,
}

impl<'a> Queue<'a> {
    fn new(open: &'a [PlannedShard]) -> Queue<'a> {
        Queue {
            open: open.iter().rev().collect(),
        }
    }

    fn next(&mut self) -> Option<&'a PlannedShard> {
        self.open.pop()
    }

    fn scatter(&mut self) {
        if !self.open.is_empty() {
            let step = std::process::id() as usize % self.open.len();
            self.open.rotate_right(step);
        }
    }
}
