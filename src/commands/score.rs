//! `score`: the open shards of a scored set, one after another, until none is left.

use std::collections::HashSet;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::teacher::{OpenTeacher, open_teacher};
use super::{Interrupt, Outcome, Status, machine, text};
use crate::backend::Backend;
use crate::backend::cpu::Cpu;
use crate::config::ScoreSettings;
use crate::corpus::tokenizer_fingerprint;
use crate::cost::{MemoryPlan, RunShape};
use crate::model::{Decoder, Limits, Vocabulary, file_states};
use crate::progress::{self, Progress};
use crate::score::{Proceed, ScoredShard, ShardJob, WaveDone, score_shard};
use crate::store::{
    Committed, CorpusReader, Job, Manifest, PlannedShard, ScoredSet, Sums, identity as keys,
    plan_shards, products_value,
};

/// Changes whenever the arithmetic does, so that old and new numbers never mix in one set.
const NUMERICS_VERSION: u64 = 1;

/// Scores what is not committed yet.
///
/// # Errors
/// Anything that makes the numbers doubtful, before anything is scored: a broken teacher, ids it
/// doesn't have, sequences longer than its context, another tokenizer, another identity.
pub fn score(settings: &ScoreSettings, interrupt: &Interrupt) -> Result<Outcome> {
    let teacher = open_teacher(&settings.teacher, settings.unknown)?;
    let corpus = CorpusReader::open(&settings.corpus)?;
    let vocab = Vocab::new(settings, &teacher, &corpus)?;
    check_folders(settings)?;
    let teacher_files = file_states(&teacher.teacher.checkpoint)?;
    let plan = plan_shards(&corpus, settings.shard_tokens)?;
    let longest = longest_sequence(&corpus, teacher.description().context)?;
    check_ids(&corpus, &vocab)?;
    let rows = rows_of_plan(&corpus, &plan)?;
    let most = Most::of(&plan, &rows, longest);
    let (limits, memory) = plan_memory(settings, &teacher, &vocab, most)?;
    let job = Job {
        identity: identity(settings, &teacher, &corpus, &vocab)?,
        plan,
        corpus_path: absolute(&settings.corpus),
    };
    let set = ScoredSet::open_or_create(&settings.out, &job)?;
    let open = set.open_shards()?;
    let run = Run {
        settings,
        corpus: &corpus,
        set: &set,
        teacher: &teacher,
        teacher_files,
        rows,
        vocab,
        interrupt,
    };
    if run.rows.iter().sum::<u64>() == 0 {
        progress::note("note: the corpus has no scored position: every loss mask is 0");
    }
    let manifests = set.manifests()?;
    let manifests: Vec<&Manifest> = manifests.iter().flatten().collect();
    let missing = set.missing_arrays(&manifests)?;
    ensure!(
        missing.is_empty(),
        "{}; `kdscore verify --discard-damaged` moves damaged shards aside, then this command makes them again",
        missing.join("; ")
    );
    if open.is_empty() {
        return run.outcome(
            Tally::default(),
            "all shards were committed before; nothing to do",
        );
    }
    run.score_all(&teacher, &open, limits, memory)
}

/// Sizes of the vocabulary as head, tokenizer and user see it.
#[derive(Clone, Copy, Debug)]
struct Vocab {
    /// Rows of the head.
    head: usize,
    /// Head rows that take part in the softmax.
    scored: usize,
    /// Tokens the corpus's tokenizer has.
    tokenizer: usize,
}

impl Vocab {
    fn new(s: &ScoreSettings, teacher: &OpenTeacher, corpus: &CorpusReader) -> Result<Vocab> {
        let head = teacher.description().vocab;
        let scored = s.vocab_limit.unwrap_or(head);
        ensure!(
            scored <= head,
            "vocab-limit: expected at most {head}, the rows of the teacher's head, found {scored}"
        );
        ensure!(
            s.products.k <= scored,
            "k: expected at most {scored}, the vocabulary scored, found {}",
            s.products.k
        );
        let tokenizer = corpus.vocab_size();
        ensure!(
            tokenizer <= head || s.trust_tokens,
            "{}: vocab_size: expected at most {head}, the rows of the teacher's head, found {tokenizer}: the corpus was made for another teacher",
            s.corpus.display()
        );
        Ok(Vocab {
            head,
            scored,
            tokenizer,
        })
    }
}

/// A scored set inside its corpus or teacher, or one of them inside it, would be cleaned up or
/// read as part of the other.
fn check_folders(settings: &ScoreSettings) -> Result<()> {
    let out = PathBuf::from(absolute(&settings.out));
    for (what, folder) in [("corpus", &settings.corpus), ("teacher", &settings.teacher)] {
        let folder = PathBuf::from(absolute(folder));
        ensure!(
            !out.starts_with(&folder) && !folder.starts_with(&out),
            "out: expected a folder apart from the {what} {}, found {}",
            folder.display(),
            out.display()
        );
    }
    Ok(())
}

/// All that defines what the numbers mean.
fn identity(
    settings: &ScoreSettings,
    teacher: &OpenTeacher,
    corpus: &CorpusReader,
    vocab: &Vocab,
) -> Result<serde_json::Map<String, Value>> {
    check_tokenizer(settings, corpus)?;
    let identity = json!({
        keys::TEACHER: teacher.fingerprint()?,
        keys::CORPUS: corpus.fingerprint()?,
        keys::TOKENIZER: corpus.tokenizer_fingerprint(),
        keys::TEMPLATE: corpus.template_fingerprint(),
        keys::K: settings.products.k,
        keys::PRODUCTS: products_value(&settings.products),
        keys::VOCAB_SCORED: vocab.scored,
        "vocab_head": vocab.head,
        "vocab_tokenizer": vocab.tokenizer,
        "loss": corpus.loss(),
        "trust_tokens": settings.trust_tokens,
        "compute_dtype": "f32",
        "numerics_version": NUMERICS_VERSION,
    });
    match identity {
        Value::Object(identity) => Ok(identity),
        _ => unreachable!("written as an object above"),
    }
}

/// The teacher's tokenizer must be the corpus's, by fingerprint.
fn check_tokenizer(settings: &ScoreSettings, corpus: &CorpusReader) -> Result<()> {
    let Some(made_with) = corpus.tokenizer_fingerprint() else {
        progress::note(
            "note: the corpus doesn't say which tokenizer made it; that it is the teacher's is not known",
        );
        return Ok(());
    };
    if settings.trust_tokens {
        return Ok(());
    }
    let way_out = "if the token ids are right all the same, --trust-tokens says so and is recorded";
    let teachers = tokenizer_fingerprint(&settings.teacher).with_context(|| {
        format!("the teacher's tokenizer can't be compared with the corpus's; {way_out}")
    })?;
    ensure!(
        teachers == made_with,
        "{}: expected a corpus made with the teacher's tokenizer {}, found one made with {}: prepare it with --tokenizer {}; {way_out}",
        settings.corpus.display(),
        &teachers[..12],
        &made_with[..made_with.len().min(12)],
        settings.teacher.display()
    );
    Ok(())
}

/// Tokens of the longest sequence; one beyond the teacher's context is an error.
fn longest_sequence(corpus: &CorpusReader, context: usize) -> Result<usize> {
    let mut longest = 0;
    for shard in 0..corpus.shards().len() {
        let files = corpus.shard(shard)?;
        let view = files.view()?;
        for s in 0..view.sequences() {
            let length = view.sequence(s).tokens.len();
            if length > context {
                bail!(
                    "{} sequence {s}: expected at most {context} tokens, the teacher's max_position_embeddings, found {length}; prepare with --max-length {context} --on-overlong skip leaves such sequences out, counted",
                    files.id()
                );
            }
            longest = longest.max(length);
        }
    }
    Ok(longest)
}

/// Every id must have a row of the embedding, every target one of the head rows scored. The
/// reader has compared all ids with the corpus's own vocabulary, which is most often enough.
fn check_ids(corpus: &CorpusReader, vocab: &Vocab) -> Result<()> {
    if vocab.tokenizer <= vocab.scored {
        return Ok(());
    }
    for shard in 0..corpus.shards().len() {
        let files = corpus.shard(shard)?;
        let view = files.view()?;
        for s in 0..view.sequences() {
            let sequence = view.sequence(s);
            let outside = |id: &&i32| **id >= vocab.head as i32;
            if let Some(id) = sequence.tokens.iter().find(outside) {
                bail!(
                    "{} sequence {s}: expected token ids below {}, the teacher's vocabulary, found {id}",
                    files.id(),
                    vocab.head,
                );
            }
            let outside = sequence.rows().find(|r| r.target >= vocab.scored as i32);
            if let Some(row) = outside {
                bail!(
                    "{} sequence {s} position {}: expected a target below vocab-limit {}, found {}",
                    files.id(),
                    row.position,
                    vocab.scored,
                    row.target
                );
            }
        }
    }
    Ok(())
}

fn shard_index(corpus: &CorpusReader, planned: &PlannedShard) -> Result<usize> {
    corpus
        .shard_index(&planned.corpus_shard)
        .with_context(|| format!("expected corpus shard {}, found none", planned.corpus_shard))
}

fn absolute(path: &std::path::Path) -> String {
    let known = path.canonicalize().or_else(|_| std::path::absolute(path));
    let path = known.unwrap_or_else(|_| path.to_path_buf());
    path.to_string_lossy().into_owned()
}

/// The largest of everything that memory depends on.
#[derive(Clone, Copy, Debug)]
struct Most {
    rows: u64,
    sequences: u64,
    /// Tokens of the longest sequence.
    length: usize,
}

impl Most {
    fn of(plan: &[PlannedShard], rows: &[u64], length: usize) -> Most {
        Most {
            rows: rows.iter().copied().max().unwrap_or(0),
            sequences: plan.iter().map(PlannedShard::sequences).max().unwrap_or(0),
            length,
        }
    }
}

/// Limits that fit the machine, or an error with bytes needed and present. Before the weights are
/// hashed: a teacher that doesn't fit should say so at once.
fn plan_memory(
    settings: &ScoreSettings,
    teacher: &OpenTeacher,
    vocab: &Vocab,
    most: Most,
) -> Result<(Limits, MemoryPlan)> {
    let description = teacher.description();
    let (inner_max, value_dim) = (description.inner_max(), description.value_dim_max());
    let shape = RunShape {
        description,
        products: &settings.products,
        vocab_scored: vocab.scored,
        weights: teacher.teacher.checkpoint.bytes(),
        rows_max: most.rows,
        sequences_max: most.sequences,
        scratch: Cpu::scratch_bytes(inner_max, value_dim) as u64,
    };
    let free = machine::memory_available().unwrap_or(u64::MAX);
    let (budget, chunk) = (settings.token_budget, settings.head_chunk);
    let room = free.saturating_sub(shape.weights);
    let limits = shape.limits(budget, chunk, most.length, room);
    let memory = shape.memory(&limits);
    ensure!(
        memory.total() <= free,
        "{}: the teacher doesn't fit: expected {} of memory (weights {}, everything else {}), found {} available; a smaller --token-budget, --head-chunk or --shard-tokens needs less",
        settings.teacher.display(),
        text::bytes(memory.total()),
        text::bytes(memory.weights),
        text::bytes(memory.anonymous()),
        text::bytes(free)
    );
    Ok((limits, memory))
}

/// Rows of every scored shard, counted in the corpus, each of whose shards is looked at once.
fn rows_of_plan(corpus: &CorpusReader, plan: &[PlannedShard]) -> Result<Vec<u64>> {
    let mut rows = Vec::with_capacity(plan.len());
    for pieces in plan.chunk_by(|a, b| a.corpus_shard == b.corpus_shard) {
        let files = corpus.shard(shard_index(corpus, &pieces[0])?)?;
        let view = files.view()?;
        rows.extend(pieces.iter().map(|piece| {
            let counts = piece
                .range()
                .map(|s| view.sequence(s).rows().count() as u64);
            counts.sum::<u64>()
        }));
    }
    Ok(rows)
}

/// What this process has done so far.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    shards: usize,
    rows: u64,
    tokens: u64,
    padded_mass: f64,
    seconds: f64,
    interrupted: bool,
}

/// How one shard went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    Committed,
    Skipped,
    /// Another worker committed it while this one scored it.
    LostRace,
    Interrupted,
}

/// One pass over the open shards: what it computes with, and what it has done.
struct Pass<'a> {
    decoder: Decoder<'a, Cpu>,
    limits: Limits,
    memory: MemoryPlan,
    provenance: Value,
    progress: Progress,
    started: Instant,
    tally: Tally,
    /// The corpus shard whose hashes were found right last.
    corpus_checked: Option<usize>,
}

impl Pass<'_> {
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

struct Run<'a> {
    settings: &'a ScoreSettings,
    corpus: &'a CorpusReader,
    set: &'a ScoredSet,
    teacher: &'a OpenTeacher,
    /// What the weight files were known by before they were hashed.
    teacher_files: Vec<String>,
    /// Of each shard of the plan.
    rows: Vec<u64>,
    vocab: Vocab,
    interrupt: &'a Interrupt,
}

impl Run<'_> {
    fn score_all(
        &self,
        teacher: &OpenTeacher,
        open: &[PlannedShard],
        limits: Limits,
        memory: MemoryPlan,
    ) -> Result<Outcome> {
        let backend = Cpu;
        let provenance = self.provenance(&backend, &limits);
        self.check_same_device(&provenance)?;
        progress::note(&memory_text(&memory, &limits));
        let vocabulary = Vocabulary {
            scored: self.vocab.scored,
            tokenizer: self.vocab.tokenizer,
        };
        let mut pass = Pass {
            decoder: Decoder::new(&backend, &teacher.teacher, limits, vocabulary)?,
            limits,
            memory,
            provenance,
            progress: self.progress(open),
            started: Instant::now(),
            tally: Tally::default(),
            corpus_checked: None,
        };
        let mut queue = Queue::new(open);
        while let Some(planned) = queue.next() {
            match self.score_one(&mut pass, planned)? {
                Step::Committed | Step::Skipped => {}
                Step::LostRace => queue.scatter(),
                Step::Interrupted => {
                    pass.tally.interrupted = true;
                    break;
                }
            }
        }
        pass.progress.finish();
        pass.tally.seconds = pass.started.elapsed().as_secs_f64();
        self.outcome(pass.tally, "")
    }

    fn score_one(&self, pass: &mut Pass, planned: &PlannedShard) -> Result<Step> {
        if self.interrupt.is_raised() {
            return Ok(Step::Interrupted);
        }
        if self.set.manifest(planned)?.is_some() {
            return Ok(Step::Skipped); // another worker was here
        }
        let started = Instant::now();
        let index = shard_index(self.corpus, planned)?;
        pass.check_corpus(self.corpus, index)?;
        let files = self.corpus.shard(index)?;
        let job = ShardJob {
            shard: files.view()?,
            sequences: planned.range(),
            token_budget: self.token_budget(&pass.limits),
            wave: pass.limits.wave,
            products: &self.settings.products,
        };
        let mut watch = |done: WaveDone| {
            pass.tally.tokens += done.tokens as u64;
            let rate = pass.tally.tokens as f64 / pass.started.elapsed().as_secs_f64();
            let detail = format!("{rate:.0} tokens/s");
            pass.progress.add(done.rows as u64, &detail);
            match self.interrupt.is_raised() {
                true => Proceed::Stop,
                false => Proceed::Go,
            }
        };
        let scored =
            score_shard(&mut pass.decoder, &job, &mut watch).with_context(|| planned.id.clone())?;
        let Some(scored) = scored else {
            return Ok(Step::Interrupted);
        };
        let line = log_line(planned, &scored, started, &pass.memory);
        pass.tally.shards += 1;
        pass.tally.rows += scored_rows(&scored) as u64;
        pass.tally.padded_mass += scored.padded_mass;
        ensure!(
            file_states(&self.teacher.teacher.checkpoint)? == self.teacher_files,
            "{}: expected weight files that stay as they are, found one that changed during the run; nothing more was committed; put the teacher back, or score with the new one into another --out",
            self.settings.teacher.display()
        );
        let committed = self
            .set
            .commit(planned, &files, scored.arrays, &pass.provenance)?;
        self.set.log(&machine::worker_name(), &line)?;
        Ok(match committed {
            Committed::Written => Step::Committed,
            Committed::AlreadyThere => Step::LostRace,
        })
    }

    /// The budget the packer fills batches to. `limits.tokens` may be above it, for one long
    /// sequence.
    fn token_budget(&self, limits: &Limits) -> usize {
        self.settings.token_budget.unwrap_or(limits.tokens)
    }

    fn provenance(&self, backend: &Cpu, limits: &Limits) -> Value {
        json!({
            "device": backend.provenance(),
            "kdscore": machine::build(),
            "token_budget": self.token_budget(limits),
            "head_chunk": limits.head_chunk,
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

    fn progress(&self, open: &[PlannedShard]) -> Progress {
        let open: HashSet<&str> = open.iter().map(|planned| planned.id.as_str()).collect();
        let plan = self.set.job().plan.iter();
        let left: u64 = plan
            .zip(&self.rows)
            .filter(|(planned, _)| open.contains(planned.id.as_str()))
            .map(|(_, rows)| rows)
            .sum();
        let total = self.rows.iter().sum();
        Progress::new("scoring", "rows", total, total - left)
    }

    /// How much of the teacher's probability lies where no token is.
    fn padded_mass(&self, tally: &Tally) -> Option<(&'static str, String)> {
        let vocab = &self.vocab;
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
    fn outcome(&self, tally: Tally, remark: &str) -> Result<Outcome> {
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
            facts.insert(
                3,
                (
                    "tokens/s",
                    format!(
                        "{rate:.0} ({} tokens in {:.1} s)",
                        text::count(tally.tokens),
                        tally.seconds
                    ),
                ),
            );
        }
        facts.extend(self.padded_mass(&tally));
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

/// The mean over all rows of a figure that manifests give per shard.
fn mean_of(manifests: &[Manifest], of: fn(&Sums) -> Option<f64>) -> Option<f64> {
    let rows: u64 = manifests.iter().map(|m| m.rows).sum();
    let parts = manifests
        .iter()
        .filter_map(|m| Some(of(&m.sums)? * m.rows as f64));
    (rows > 0).then(|| parts.sum::<f64>() / rows as f64)
}

/// What was observed about a shard; no part of the data.
fn log_line(
    planned: &PlannedShard,
    scored: &ScoredShard,
    started: Instant,
    memory: &MemoryPlan,
) -> Value {
    let seconds = started.elapsed().as_secs_f64();
    json!({
        "shard": planned.id,
        "rows": scored_rows(scored),
        "tokens": scored.tokens,
        "seconds": seconds,
        "tokens_per_second": scored.tokens as f64 / seconds,
        "memory_planned_bytes": memory.anonymous(),
    })
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
