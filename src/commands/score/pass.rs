//! The pass over open shards: score one, commit it, go on.

use std::collections::HashSet;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::setup::{Setup, shard_index};
use super::told::Told;
use crate::backend::Backend;
use crate::batch::PackedBatch;
use crate::commands::{Interrupt, machine};
use crate::config::ScoreSettings;
use crate::corpus::CorpusShard;
use crate::cost::bill::mfu;
use crate::model::{Decoder, Demand, Vocabulary};
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

/// What the workers of a pass share: what is left to do, what was done, and who is told.
struct Pass<'a, W: ?Sized> {
    queue: Mutex<Queue<'a>>,
    tally: Mutex<Tally>,
    watcher: Mutex<&'a mut W>,
    progress: Progress,
    started: Instant,
    /// A worker failed: the others end with the shard they have.
    failed: AtomicBool,
}

impl<'a, W: ?Sized> Pass<'a, W> {
    fn tally(&self) -> MutexGuard<'_, Tally> {
        self.tally.lock().expect("no thread panics with it")
    }

    fn watcher(&self) -> MutexGuard<'_, &'a mut W> {
        self.watcher.lock().expect("no thread panics with it")
    }
}

/// One device's part in a pass.
struct Worker<'a, B: Backend> {
    decoder: Decoder<'a, B>,
    provenance: Value,
    /// The corpus shard whose hashes were found right last.
    corpus_checked: Option<usize>,
}

impl<B: Backend> Worker<'_, B> {
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
    /// One worker each; at least one.
    pub backends: &'a [B],
    /// FLOP/s of all devices at best.
    pub peak_flops: f64,
    pub interrupt: &'a Interrupt,
}

impl<'a, B: Backend> Run<'a, B> {
    /// A decoder on every device, its weights loaded and its memory taken.
    ///
    /// # Errors
    /// Too little memory, or a device that doesn't compute what it should.
    pub fn decoders(&self) -> Result<Vec<Decoder<'a, B>>> {
        progress::note(&self.setup.memory_text());
        let vocabulary = Vocabulary {
            scored: self.setup.vocab.scored,
            tokenizer: self.setup.vocab.tokenizer,
        };
        let teacher = &self.setup.teacher.teacher;
        let limits = self.setup.limits;
        let decoder = |backend| {
            let mut decoder = Decoder::new(backend, teacher, limits, vocabulary)?;
            decoder.rehearse(teacher)?;
            Ok(decoder)
        };
        let decoder = &decoder;
        thread::scope(|scope| {
            let threads = self.backends.iter();
            let threads = threads.map(|backend| scope.spawn(move || decoder(backend)));
            let threads: Vec<_> = threads.collect();
            let ends = threads.into_iter().map(|thread| thread.join());
            ends.map(|end| end.unwrap_or_else(|panic| resume_unwind(panic)))
                .collect()
        })
    }

    /// Scores `shards`, those that other workers commit meanwhile left out.
    ///
    /// # Errors
    /// As for scoring and committing one.
    pub fn score(
        &self,
        decoders: Vec<Decoder<'a, B>>,
        shards: &[PlannedShard],
        watcher: &mut (dyn Watcher + Send),
    ) -> Result<Tally> {
        self.check_same_device(&self.provenance())?;
        let flops_of = |done: &WaveDone| self.flops_of(done.batches);
        let sizes = [self.peak_flops, shards.len() as f64];
        let mut told = Told::new(&self.settings.listeners, watcher, &flops_of, sizes);
        let pass = Pass {
            queue: Mutex::new(Queue::new(shards)),
            tally: Mutex::default(),
            watcher: Mutex::new(&mut told),
            progress: self.progress(shards)?,
            started: Instant::now(),
            failed: AtomicBool::new(false),
        };
        self.work_all(&pass, decoders)?;
        let Pass {
            tally,
            progress,
            started,
            ..
        } = pass;
        told.finish();
        progress.finish();
        let mut tally = tally.into_inner().expect("no thread panics with it");
        tally.seconds = started.elapsed().as_secs_f64();
        Ok(tally)
    }

    /// One thread a device; a single one works here.
    fn work_all(&self, pass: &Pass<Told>, decoders: Vec<Decoder<'a, B>>) -> Result<()> {
        let workers = decoders.into_iter().zip(self.backends);
        let mut workers: Vec<Worker<B>> = workers
            .map(|(decoder, backend)| Worker {
                decoder,
                provenance: self.provenance_of(backend),
                corpus_checked: None,
            })
            .collect();
        if let [worker] = &mut workers[..] {
            return self.work(pass, worker);
        }
        thread::scope(|scope| {
            let threads = workers.iter_mut().map(|worker| {
                scope.spawn(|| {
                    let done = self.work(pass, worker);
                    pass.failed.fetch_or(done.is_err(), Ordering::Relaxed);
                    done
                })
            });
            let threads: Vec<_> = threads.collect();
            let ends = threads.into_iter().map(|thread| thread.join());
            let ends: Vec<Result<()>> = ends
                .map(|end| end.unwrap_or_else(|panic| resume_unwind(panic)))
                .collect();
            ends.into_iter().collect()
        })
    }

    /// One shard after another, until none is left.
    fn work(&self, pass: &Pass<Told>, worker: &mut Worker<B>) -> Result<()> {
        let queue = || pass.queue.lock().expect("no thread panics with it");
        loop {
            let Some(planned) = queue().next() else {
                return Ok(());
            };
            match self.score_one(pass, worker, planned)? {
                Step::Committed | Step::Skipped => {}
                Step::LostRace => queue().scatter(),
                Step::Interrupted => {
                    pass.tally().interrupted = true;
                    return Ok(());
                }
            }
            if pass.failed.load(Ordering::Relaxed) {
                return Ok(());
            }
        }
    }

    fn score_one(
        &self,
        pass: &Pass<Told>,
        worker: &mut Worker<B>,
        planned: &PlannedShard,
    ) -> Result<Step> {
        if self.interrupt.is_raised() {
            return Ok(Step::Interrupted);
        }
        if self.set.manifest(planned)?.is_some() {
            return Ok(Step::Skipped); // another worker was here
        }
        pass.watcher().start(planned);
        let started = Instant::now();
        let corpus = &self.setup.corpus;
        let index = shard_index(corpus, planned)?;
        worker.check_corpus(corpus, index)?;
        let files = corpus.shard(index)?;
        let read_seconds = started.elapsed().as_secs_f64();
        let scored = self
            .compute(pass, worker, planned, files.view()?)
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
        {
            let mut tally = pass.tally();
            tally.shards += 1;
            tally.rows += done.rows as u64;
            tally.padded_mass += done.padded_mass;
        }
        let scored_at = Instant::now();
        self.setup.check_teacher(self.settings)?;
        let committed = self
            .set
            .commit(planned, &files, scored.arrays, &worker.provenance)?;
        self.set.log(&machine::worker_name(), &line)?;
        done.commit_seconds = scored_at.elapsed().as_secs_f64();
        done.total_seconds = started.elapsed().as_secs_f64();
        pass.watcher().shard(&done);
        Ok(match committed {
            Committed::Written => Step::Committed,
            Committed::AlreadyThere => Step::LostRace,
        })
    }

    /// The rows of one shard; `None` when interrupted.
    fn compute(
        &self,
        pass: &Pass<Told>,
        worker: &mut Worker<B>,
        planned: &PlannedShard,
        shard: CorpusShard,
    ) -> Result<Option<ScoredShard>> {
        let job = ShardJob {
            shard,
            sequences: planned.range(),
            token_budget: self.token_budget(),
            wave: self.setup.limits.wave,
            products: &self.settings.products,
        };
        let mut watch = |done: &WaveDone| {
            let so_far = {
                let mut tally = pass.tally();
                tally.tokens += done.tokens as u64;
                tally.flops += self.flops_of(done.batches);
                *tally
            };
            let detail = self.rates(&so_far, pass.started.elapsed().as_secs_f64());
            pass.progress.add(done.rows as u64, &detail);
            pass.watcher().wave(planned, done);
            match self.interrupt.is_raised() {
                true => Proceed::Stop,
                false => Proceed::Go,
            }
        };
        score_shard(&mut worker.decoder, &job, &mut watch)
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

    /// Of the first device.
    pub fn provenance(&self) -> Value {
        self.provenance_of(&self.backends[0])
    }

    fn provenance_of(&self, backend: &B) -> Value {
        json!({
            "device": backend.provenance(),
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

    fn progress(&self, shards: &[PlannedShard]) -> Result<Progress> {
        let now: HashSet<&str> = shards.iter().map(|planned| planned.id.as_str()).collect();
        let left = self
            .setup
            .shards()
            .filter(|(planned, _)| now.contains(planned.id.as_str()))
            .map(|(_, demand)| demand.rows);
        let manifests = self.set.manifests()?;
        let committed = self.setup.shards().zip(&manifests);
        let committed = committed.filter(|(_, manifest)| manifest.is_some());
        let committed: u64 = committed.map(|((_, demand), _)| demand.rows).sum();
        let total = committed + left.sum::<u64>();
        Ok(Progress::new("scoring", "rows", total, committed))
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
