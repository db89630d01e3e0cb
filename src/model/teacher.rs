//! A teacher that can be scored with: a description and a checkpoint that were checked against
//! each other.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Error, Result, anyhow, ensure};
use safetensors::Dtype;

use super::checkpoint::{Checkpoint, StoredTensor};
use super::config::Config;
use super::description::{Description, TensorSpec, WeightSpec};
use super::families::{self, HARMLESS};
use super::spelling::{Spelling, matches};
use crate::backend::{Encoding, FloatDtype, HostWeight, Order};

/// Names listed in a message before the rest are only counted.
const LISTED_MAX: usize = 5;
/// Problems told before the rest are only counted: one wrong key can make every tensor one.
const PROBLEMS_MAX: usize = 20;

/// What to do with config keys and tensors that kdscore doesn't know.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Unknown {
    /// They could change the numbers.
    #[default]
    Refuse,
    /// Say so and go on without them.
    Allow,
}

/// A checked checkpoint. Every tensor that the description needs is there, once, with its shape
/// and an encoding that weights have.
#[derive(Debug)]
pub struct Teacher {
    pub description: Description,
    pub checkpoint: Checkpoint,
    spelling: Spelling,
    /// Whose tensors the embedding and the head are: the same where they are tied.
    embedding: WeightSpec,
    head: WeightSpec,
    /// What a user should know and needs not act on.
    pub notes: Vec<String>,
}

/// Where a decoder's weights come from.
pub trait WeightSource {
    fn description(&self) -> &Description;

    fn weight(&self, spec: &WeightSpec) -> HostWeight;

    /// (V, H)
    fn embedding(&self) -> HostWeight;

    /// (V, H)
    fn head(&self) -> HostWeight;

    /// Whether those two are one matrix.
    fn is_tied(&self) -> bool;
}

/// A description alone: every weight has its shape, and zeros for numbers.
impl WeightSource for Description {
    fn description(&self) -> &Description {
        self
    }

    fn weight(&self, spec: &WeightSpec) -> HostWeight {
        HostWeight::zeros(spec.shape.clone())
    }

    fn embedding(&self) -> HostWeight {
        self.weight(&self.embedding)
    }

    fn head(&self) -> HostWeight {
        self.weight(&self.head.weight)
    }

    fn is_tied(&self) -> bool {
        self.head.tied
    }
}

impl Teacher {
    /// # Errors
    /// All that is wrong with the checkpoint, in one message, before anything is scored.
    pub fn open(folder: &Path, unknown: Unknown) -> Result<Teacher> {
        let checkpoint = Checkpoint::open(folder)?;
        let config = &checkpoint.config;
        let description = families::describe(config).map_err(|e| with_defaults(config, e))?;
        let notes = config_notes(&checkpoint, unknown);
        let mut notes = notes.map_err(|e| with_defaults(config, e))?;
        let tensors = &checkpoint.tensors;
        let is_there = |name: &str| tensors.contains_key(name);
        let spelling = Spelling::choose(&description, is_there);
        let mut check = Check {
            checkpoint: &checkpoint,
            spelling: &spelling,
            fp8_block: description.fp8_block,
            needed: BTreeSet::new(),
            problems: Vec::new(),
            told: BTreeSet::new(),
            notes: Vec::new(),
        };
        let (embedding, head) = check.tie(&description);
        let around = [&embedding, &head].into_iter();
        around
            .chain(description.body_weights())
            .for_each(|spec| check.weight(spec));
        check.unused(&description, unknown);
        let problems = check.problems;
        notes.extend(check.notes);
        if !problems.is_empty() {
            let (count, s) = (problems.len(), if problems.len() == 1 { "" } else { "s" });
            let told = problems.iter().take(PROBLEMS_MAX).cloned();
            let rest = count.saturating_sub(PROBLEMS_MAX);
            let rest = (rest > 0).then(|| format!("and {rest} more"));
            let error = anyhow!(
                "{}: {count} problem{s} with the teacher:\n  {}",
                folder.display(),
                told.chain(rest).collect::<Vec<_>>().join("\n  ")
            );
            return Err(with_defaults(config, error));
        }
        Ok(Teacher {
            description,
            checkpoint,
            spelling,
            embedding,
            head,
            notes,
        })
    }
}

impl WeightSource for Teacher {
    fn description(&self) -> &Description {
        &self.description
    }

    /// A needed weight.
    ///
    /// # Panics
    /// When the description doesn't need it: `open` has checked those it needs.
    fn weight(&self, spec: &WeightSpec) -> HostWeight {
        let stored = |tensor: &TensorSpec| {
            let name = self.spelling.of(&tensor.name);
            let tensor = self.checkpoint.tensors.get(&name);
            tensor.expect("open() checked every tensor of the description")
        };
        let tensor = stored(&spec.tensor);
        let encoding = encoding_of(tensor, spec, self.description.fp8_block)
            .expect("open() checked every encoding");
        let scales = match encoding {
            Encoding::Float(_) => None,
            Encoding::Mxfp4 => spec.scales.clone(),
            Encoding::Fp8Blocks { block } => Some(fp8_scales(spec, block)),
        };
        let piece = |tensor: &StoredTensor| tensor.shared_bytes().part(spec.piece, spec.pieces);
        let scales = scales.map(|scales| piece(stored(&scales)));
        // One piece, as lines of numbers: stacked tensors lose their first axis.
        let shape = &spec.tensor.shape[usize::from(spec.pieces > 1)..];
        let lines = match spec.shape.len() {
            1 => vec![shape.iter().product()],
            _ => vec![shape[0], spec.columns()],
        };
        HostWeight::stored(piece(tensor), scales, encoding, lines).used_as(
            spec.lines,
            spec.order,
            spec.shape.clone(),
        )
    }

    /// (V, H)
    fn embedding(&self) -> HostWeight {
        self.weight(&self.embedding)
    }

    /// (V, H)
    fn head(&self) -> HostWeight {
        self.weight(&self.head)
    }

    fn is_tied(&self) -> bool {
        self.embedding == self.head
    }
}

/// Adds the keys that config.json leaves to their defaults: what is wrong may be one of those.
fn with_defaults(config: &Config, error: Error) -> Error {
    match config.absent() {
        absent if absent.is_empty() => error,
        absent => anyhow!(
            "{error:#}\n  taken by default, as config.json doesn't say: {}",
            absent.join(", ")
        ),
    }
}

/// How the numbers of `spec` are stored; `None` for a way that is not supported.
fn encoding_of(
    tensor: &StoredTensor,
    spec: &WeightSpec,
    fp8_block: Option<usize>,
) -> Option<Encoding> {
    match (tensor.dtype, &spec.scales, fp8_block) {
        (Dtype::U8, Some(_), _) => Some(Encoding::Mxfp4),
        (Dtype::F32, None, _) => Some(Encoding::Float(FloatDtype::F32)),
        (Dtype::F16, None, _) => Some(Encoding::Float(FloatDtype::F16)),
        (Dtype::BF16, None, _) => Some(Encoding::Float(FloatDtype::Bf16)),
        (Dtype::F8_E4M3, None, Some(block))
            if spec.shape.len() == 2 && spec.order == Order::Lines && spec.pieces == 1 =>
        {
            Some(Encoding::Fp8Blocks { block })
        }
        _ => None,
    }
}

/// The factors of an 8-bit weight, as DeepSeek-V3 publishes them.
fn fp8_scales(spec: &WeightSpec, block: usize) -> TensorSpec {
    let blocks = spec.tensor.shape.iter().map(|n| n.div_ceil(block));
    TensorSpec {
        name: format!("{}_scale_inv", spec.tensor.name),
        shape: blocks.collect(),
    }
}

/// What the config says that nothing read: an error, unless it is known to change no number.
fn config_notes(checkpoint: &Checkpoint, unknown: Unknown) -> Result<Vec<String>> {
    let unasked = checkpoint.config.unasked();
    let harmless = |place: &String| {
        let is_named = |key: &&str| {
            let before = place.strip_suffix(*key);
            before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
        };
        HARMLESS.iter().any(is_named)
    };
    let (harmless, rest): (Vec<_>, Vec<_>) = unasked.into_iter().partition(harmless);
    let mut notes = Vec::new();
    if !harmless.is_empty() {
        notes.push(format!(
            "config keys that change no score: {}",
            harmless.join(", ")
        ));
    }
    if !rest.is_empty() {
        let listed = listed(&rest);
        ensure!(
            unknown == Unknown::Allow,
            "{}: expected only known keys, found {listed}, which could change the scores; --allow-unknown-config scores without them",
            checkpoint.folder.join("config.json").display()
        );
        notes.push(format!("unknown config keys, not honoured: {listed}"));
    }
    Ok(notes)
}

fn listed<T: AsRef<str>>(names: &[T]) -> String {
    let shown: Vec<&str> = names.iter().take(LISTED_MAX).map(AsRef::as_ref).collect();
    match names.len().saturating_sub(LISTED_MAX) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

struct Check<'a> {
    checkpoint: &'a Checkpoint,
    spelling: &'a Spelling,
    fp8_block: Option<usize>,
    /// Stored names that something reads.
    needed: BTreeSet<String>,
    problems: Vec<String>,
    /// The same, to be said once.
    told: BTreeSet<String>,
    notes: Vec<String>,
}

impl Check<'_> {
    fn stored(&self, tensor: &TensorSpec) -> Option<&StoredTensor> {
        let name = self.spelling.of(&tensor.name);
        self.checkpoint.tensors.get(&name)
    }

    /// Which tensors are the embedding and the head. Where the config's flag and the tensors
    /// disagree, this is what transformers 5 does (modeling_utils.py, tie_weights).
    fn tie(&mut self, description: &Description) -> (WeightSpec, WeightSpec) {
        let (embedding, head) = (
            description.embedding.clone(),
            description.head.weight.clone(),
        );
        if !description.head.tied {
            return (embedding, head);
        }
        let (e, h) = (&embedding.tensor, &head.tensor);
        match (self.stored(e), self.stored(h)) {
            (Some(of_e), Some(of_h)) if of_e.bytes() != of_h.bytes() => {
                let note = format!(
                    "config.json says tie_word_embeddings, but {} differs from {}: the head is {0}, as in transformers",
                    h.name, e.name
                );
                self.notes.push(note);
                (embedding, head)
            }
            (None, Some(_)) => {
                let note = format!(
                    "{} is not there; the tied {} serves as the embedding, as in transformers",
                    e.name, h.name
                );
                self.notes.push(note);
                (head.clone(), head)
            }
            (_, copy) => {
                if copy.is_some() {
                    let name = self.spelling.of(&h.name);
                    self.needed.insert(name);
                }
                (embedding.clone(), embedding)
            }
        }
    }

    /// The tensors of a weight: there, of the right shape, in an encoding that can be read.
    fn weight(&mut self, spec: &WeightSpec) {
        self.tensor(&spec.tensor);
        let Some(found) = self.stored(&spec.tensor) else {
            return;
        };
        let (dtype, file) = (
            found.dtype,
            self.checkpoint.file_of(found).display().to_string(),
        );
        match encoding_of(found, spec, self.fp8_block) {
            Some(Encoding::Float(_)) => {}
            Some(Encoding::Mxfp4) => {
                let scales = spec.scales.as_ref();
                scales.into_iter().for_each(|s| self.scales(s, Dtype::U8));
            }
            Some(Encoding::Fp8Blocks { block }) => {
                self.scales(&fp8_scales(spec, block), Dtype::F32);
            }
            None => {
                let expected = match (&spec.scales, self.fp8_block) {
                    (Some(_), _) => "U8 blocks of mxfp4",
                    (None, None) => "bf16, f16 or f32",
                    (None, Some(_)) => "bf16, f16, f32 or, for a matrix, F8_E4M3",
                };
                self.problem(format!(
                    "tensor {}: expected {expected}, found {dtype:?} in {file}",
                    spec.tensor.name
                ));
            }
        }
    }

    fn scales(&mut self, tensor: &TensorSpec, dtype: Dtype) {
        self.tensor(tensor);
        if let Some(found) = self.stored(tensor)
            && found.dtype != dtype
        {
            let found = found.dtype;
            self.problem(format!(
                "tensor {}: expected {dtype:?}, found {found:?}",
                tensor.name
            ));
        }
    }

    fn tensor(&mut self, tensor: &TensorSpec) {
        let name = self.spelling.of(&tensor.name);
        let problem = match self.checkpoint.tensors.get(&name) {
            None => Some(format!(
                "tensor {name}: expected shape {:?}, found none",
                tensor.shape
            )),
            Some(found) if found.shape != tensor.shape => Some(format!(
                "tensor {name}: expected shape {:?}, found {:?} in {}",
                tensor.shape,
                found.shape,
                self.checkpoint.file_of(found).display()
            )),
            Some(_) => None,
        };
        self.needed.insert(name);
        problem.into_iter().for_each(|p| self.problem(p));
    }

    /// Several weights may lie in one tensor; what is wrong with it is said once.
    fn problem(&mut self, problem: String) {
        if self.told.insert(problem.clone()) {
            self.problems.push(problem);
        }
    }

    /// Tensors that nothing reads: an error where they belong to the decoder, else a note.
    fn unused(&mut self, description: &Description, unknown: Unknown) {
        let names = self.checkpoint.tensors.keys();
        let unused = names.filter(|name| !self.needed.contains(*name));
        let (decoders, rest): (Vec<&String>, Vec<&String>) =
            unused.partition(|name| self.spelling.is_decoders(name));
        let may_be = |name: &str| {
            let patterns = description.names.unread.iter();
            let name = self.spelling.back(name);
            patterns.into_iter().any(|pattern| matches(pattern, &name))
        };
        let (mut notes, mut problems) = (Vec::new(), Vec::new());
        for name in decoders {
            if may_be(name) {
                notes.push(name);
            } else if unknown == Unknown::Allow {
                self.notes
                    .push(format!("tensor {name}: not known, not used"));
            } else {
                problems.push(format!(
                    "tensor {name}: config.json gives the {} family no use for it; check the number of layers and the flags in config.json, or --allow-unknown-config scores without it",
                    description.family
                ));
            }
        }
        notes.extend(rest);
        if !notes.is_empty() {
            let note = format!("tensors not used: {}", listed(&notes));
            self.notes.push(note);
        }
        problems.into_iter().for_each(|p| self.problem(p));
    }
}
