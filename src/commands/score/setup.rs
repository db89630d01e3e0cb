//! What `score` knows before the first batch: inputs checked, shards planned, memory planned, the
//! identity taken.

use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use rayon::prelude::*;
use serde_json::{Value, json};

use crate::backend::cpu::Cpu;
use crate::backend::cuda::Bytes;
use crate::canonical;
use crate::commands::devices::{self, Devices};
use crate::commands::teacher::{OpenTeacher, open_teacher};
use crate::commands::{machine, text};
use crate::config::ScoreSettings;
use crate::corpus::tokenizer_fingerprint;
use crate::cost::{MemoryPlan, RunShape};
use crate::model::{Demand, Description, Limits, Work, file_states};
use crate::products::ProductPlan;
use crate::progress;
use crate::store::{
    CorpusReader, Job, PlannedShard, identity as keys, plan_shards, products_value,
};

/// Changes whenever the arithmetic does, so that old and new numbers never mix in one set.
const NUMERICS_VERSION: u64 = 1;

/// Everything that is known before the first batch.
pub struct Setup {
    pub teacher: OpenTeacher,
    /// What the weight files were known by before they were hashed.
    teacher_files: Vec<String>,
    pub corpus: CorpusReader,
    pub vocab: Vocab,
    pub job: Job,
    /// Of each shard of the plan.
    pub demands: Vec<Demand>,
    pub limits: Limits,
    pub memory: MemoryPlan,
    /// Of each CUDA device; `None` on the CPU.
    pub device_memory: Option<Bytes>,
}

impl Setup {
    /// # Errors
    /// Anything that makes the numbers doubtful, before anything is scored: a broken teacher, ids
    /// it doesn't have, sequences longer than its context, another tokenizer.
    pub fn new(settings: &ScoreSettings, devices: &Devices) -> Result<Setup> {
        Setup::with_slices(settings, devices, 1)
    }

    /// With room for so many logits slices and their rows.
    ///
    /// # Errors
    /// As for [`Setup::new`].
    pub fn with_slices(
        settings: &ScoreSettings,
        devices: &Devices,
        slices: usize,
    ) -> Result<Setup> {
        let teacher = open_teacher(&settings.teacher, settings.unknown)?;
        let corpus = CorpusReader::open(&settings.corpus)?;
        let vocab = Vocab::new(settings, &teacher, &corpus)?;
        check_folders(settings)?;
        let teacher_files = file_states(&teacher.teacher.checkpoint)?;
        let plan = plan_shards(&corpus, settings.shard_tokens)?;
        let longest = longest_sequence(&corpus, teacher.description().context)?;
        check_ids(&corpus, &vocab)?;
        let demands = demands(teacher.description(), &corpus, &plan)?;
        let most = Most::of(&plan, &demands, longest);
        let (limits, memory, device_memory) =
            plan_memory(settings, &teacher, &vocab, most, (devices, slices))?;
        let job = Job {
            identity: identity(settings, &teacher, &corpus, &vocab, devices.compute_dtype())?,
            plan,
            corpus_path: absolute(&settings.corpus),
        };
        Ok(Setup {
            teacher,
            teacher_files,
            corpus,
            vocab,
            job,
            demands,
            limits,
            memory,
            device_memory,
        })
    }

    /// # Errors
    /// A weight file that is no longer what it was when it was hashed.
    pub fn check_teacher(&self, settings: &ScoreSettings) -> Result<()> {
        ensure!(
            file_states(&self.teacher.teacher.checkpoint)? == self.teacher_files,
            "{}: expected weight files that stay as they are, found one that changed during the run; nothing more was committed; put the teacher back, or score with the new one into another --out",
            settings.teacher.display()
        );
        Ok(())
    }

    /// What memory is planned for, in words.
    pub fn memory_text(&self) -> String {
        let (memory, limits) = (&self.memory, &self.limits);
        let tokens = text::count(limits.tokens as u64);
        let chunk = text::count(limits.head_chunk as u64);
        let Some(device) = &self.device_memory else {
            return format!(
                "memory: weights {} (mapped), activations {} for {tokens} tokens, logits slice {} for {chunk} rows, rows {}, scratch {}",
                text::bytes(memory.weights),
                text::bytes(memory.activations),
                text::bytes(memory.logits),
                text::bytes(memory.rows),
                text::bytes(memory.scratch),
            );
        };
        let bytes = |n: usize| text::bytes(n as u64);
        format!(
            "device memory: {}: weights {}, buffers {} for {tokens} tokens and logits slices of {chunk} rows, batches {}; host memory: rows {}, scratch {}",
            bytes(device.total()),
            bytes(device.weights),
            bytes(device.buffers),
            bytes(device.batch),
            text::bytes(memory.rows),
            text::bytes(memory.scratch),
        )
    }

    /// The planned shards beside what each asks for.
    pub fn shards(&self) -> impl Iterator<Item = (&PlannedShard, &Demand)> {
        self.job.plan.iter().zip(&self.demands)
    }

    pub fn demand_of(&self, planned: &PlannedShard) -> Option<&Demand> {
        let mut shards = self.shards();
        shards.find(|(p, _)| p.id == planned.id).map(|(_, d)| d)
    }

    pub fn work_of(&self, demand: &Demand) -> Work {
        self.teacher.description().work(demand, self.vocab.scored)
    }
}

/// Sizes of the vocabulary as head, tokenizer and user see it.
#[derive(Clone, Copy, Debug)]
pub struct Vocab {
    /// Rows of the head.
    pub head: usize,
    /// Head rows that take part in the softmax.
    pub scored: usize,
    /// Tokens the corpus's tokenizer has.
    pub tokenizer: usize,
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
    compute_dtype: &str,
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
        "compute_dtype": compute_dtype,
        "numerics_version": NUMERICS_VERSION,
    });
    match identity {
        Value::Object(identity) => Ok(identity),
        _ => unreachable!("written as an object above"),
    }
}

/// An identity as long as a real one, for what has no teacher to fingerprint.
pub fn stand_in_identity(
    products: &ProductPlan,
    [vocab_scored, vocab_head]: [usize; 2],
) -> serde_json::Map<String, Value> {
    let hash = canonical::sha256_hex(b"");
    let identity = json!({
        keys::TEACHER: hash,
        keys::CORPUS: hash,
        keys::TOKENIZER: hash,
        keys::TEMPLATE: hash,
        keys::K: products.k,
        keys::PRODUCTS: products_value(products),
        keys::VOCAB_SCORED: vocab_scored,
        "vocab_head": vocab_head,
        "vocab_tokenizer": vocab_head,
        "loss": "assistant",
        "trust_tokens": false,
        "compute_dtype": "f32",
        "numerics_version": NUMERICS_VERSION,
    });
    identity.as_object().cloned().unwrap_or_default()
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
pub fn longest_sequence(corpus: &CorpusReader, context: usize) -> Result<usize> {
    let mut longest = 0;
    for shard in 0..corpus.shards().len() {
        let files = corpus.shard(shard)?;
        let view = files.view()?;
        for s in 0..view.sequences() {
            let length = view.sequence(s).tokens.len();
            if length > context {
                bail!(
                    "{} sequence {s}: expected at most {context} tokens, the teacher's context (max_position_embeddings, or what its rope is scaled to), found {length}; prepare with --max-length {context} --on-overlong skip leaves such sequences out, counted",
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

/// The corpus shard that holds a planned one.
pub fn shard_index(corpus: &CorpusReader, planned: &PlannedShard) -> Result<usize> {
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
    fn of(plan: &[PlannedShard], demands: &[Demand], length: usize) -> Most {
        Most {
            rows: demands.iter().map(|d| d.rows).max().unwrap_or(0),
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
    (devices, slices): (&Devices, usize),
) -> Result<(Limits, MemoryPlan, Option<Bytes>)> {
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
    if let Devices::Cuda(devices) = devices {
        let sizes = [most.length, vocab.tokenizer];
        let shape = &shape;
        let (limits, bytes) =
            devices::plan((devices, slices), &teacher.teacher, shape, settings, sizes)?;
        let memory = shape.host_memory(&limits, devices.len() as u64);
        let needed = memory.anonymous() + (2 * devices.len() * bytes.slot) as u64;
        ensure!(
            needed <= free,
            "expected {} of host memory for the rows of a shard on each device, found {} available; a smaller --shard-tokens needs less",
            text::bytes(needed),
            text::bytes(free)
        );
        return Ok((limits, memory, Some(bytes)));
    }
    let (budget, chunk) = (settings.token_budget, settings.head_chunk);
    let room = free.saturating_sub(shape.weights);
    let limits = shape.limits(budget, chunk, most.length, room);
    let mut memory = shape.memory(&limits);
    memory.logits *= slices as u64;
    ensure!(
        memory.total() <= free,
        "{}: the teacher doesn't fit: expected {} of memory (weights {}, everything else {}), found {} available; a smaller --token-budget, --head-chunk or --shard-tokens needs less",
        settings.teacher.display(),
        text::bytes(memory.total()),
        text::bytes(memory.weights),
        text::bytes(memory.anonymous()),
        text::bytes(free)
    );
    Ok((limits, memory, None))
}

/// What every planned shard asks for, counted in the corpus, each of whose shards is looked at once.
pub fn demands(
    description: &Description,
    corpus: &CorpusReader,
    plan: &[PlannedShard],
) -> Result<Vec<Demand>> {
    let mut demands = Vec::with_capacity(plan.len());
    for pieces in plan.chunk_by(|a, b| a.corpus_shard == b.corpus_shard) {
        let files = corpus.shard(shard_index(corpus, &pieces[0])?)?;
        let view = files.view()?;
        let counted: Vec<Demand> = pieces
            .par_iter()
            .map(|piece| {
                let mut demand = Demand::none(description);
                for s in piece.range() {
                    let rows: Vec<usize> = view.sequence(s).rows().map(|r| r.position).collect();
                    demand.add(rows.iter().copied());
                }
                demand
            })
            .collect();
        demands.extend(counted);
    }
    Ok(demands)
}
