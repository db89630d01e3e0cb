//! A teacher that can be scored with: a description and a checkpoint that were checked against
//! each other.

use std::path::Path;

use anyhow::{Result, bail};

use super::checkpoint::{Checkpoint, StoredTensor};
use super::description::{Description, TensorSpec};
use super::families;
use crate::backend::HostWeight;

/// Names listed in a message before the rest are only counted.
const LISTED_MAX: usize = 5;

/// A checked checkpoint. Every tensor that the description needs is there, once, with its shape
/// and a dtype that weights have.
#[derive(Debug)]
pub struct Teacher {
    pub description: Description,
    pub checkpoint: Checkpoint,
    /// Tensor names of the embedding and of the head: the same one where they are tied.
    embedding: String,
    head: String,
    /// What a user should know and needs not act on.
    pub notes: Vec<String>,
}

impl Teacher {
    /// # Errors
    /// All that is wrong with the checkpoint, in one message, before anything is scored.
    pub fn open(folder: &Path) -> Result<Teacher> {
        let checkpoint = Checkpoint::open(folder)?;
        let description = families::describe(&checkpoint.config)?;
        let mut check = Check {
            checkpoint: &checkpoint,
            problems: Vec::new(),
            notes: Vec::new(),
        };
        let (embedding, head) = check.tie(&description);
        let renamed = [
            (&description.embedding, &embedding),
            (&description.head.weight, &head),
        ]
        .map(|(spec, name)| TensorSpec::new(name.clone(), &spec.shape));
        let needed: Vec<&TensorSpec> = description.body_tensors().chain(&renamed).collect();
        needed.iter().for_each(|spec| check.tensor(spec));
        check.unused(&description, &needed);
        let Check {
            problems, notes, ..
        } = check;
        if !problems.is_empty() {
            let (count, s) = (problems.len(), if problems.len() == 1 { "" } else { "s" });
            bail!(
                "{}: {count} problem{s} with the teacher:\n  {}",
                folder.display(),
                problems.join("\n  ")
            );
        }
        Ok(Teacher {
            description,
            checkpoint,
            embedding,
            head,
            notes,
        })
    }

    /// The weight of a needed tensor.
    ///
    /// # Panics
    /// When the description doesn't need it: `open` has checked those it needs.
    pub fn weight(&self, name: &str) -> HostWeight {
        let tensor = self.checkpoint.tensors.get(name);
        tensor
            .and_then(StoredTensor::weight)
            .expect("open() checked every tensor of the description")
    }

    /// (V, H)
    pub fn embedding(&self) -> HostWeight {
        self.weight(&self.embedding)
    }

    /// (V, H)
    pub fn head(&self) -> HostWeight {
        self.weight(&self.head)
    }
}

struct Check<'a> {
    checkpoint: &'a Checkpoint,
    problems: Vec<String>,
    notes: Vec<String>,
}

impl Check<'_> {
    /// Which tensors are the embedding and the head. Where the config's flag and the tensors
    /// disagree, this is what transformers 5 does (modeling_utils.py, tie_weights).
    fn tie(&mut self, description: &Description) -> (String, String) {
        let (embedding, head) = (
            description.embedding.name.clone(),
            description.head.weight.name.clone(),
        );
        if !description.head.tied {
            return (embedding, head);
        }
        let stored = |name: &String| self.checkpoint.tensors.get(name);
        match (stored(&embedding), stored(&head)) {
            (Some(e), Some(h)) if e.bytes() != h.bytes() => {
                self.notes.push(format!(
                    "config.json says tie_word_embeddings, but {head} differs from {embedding}: the head is {head}, as in transformers"
                ));
                (embedding, head)
            }
            (None, Some(_)) => {
                self.notes.push(format!(
                    "{embedding} is not there; the tied {head} serves as the embedding, as in transformers"
                ));
                (head.clone(), head)
            }
            _ => (embedding.clone(), embedding),
        }
    }

    fn tensor(&mut self, spec: &TensorSpec) {
        let name = &spec.name;
        let Some(found) = self.checkpoint.tensors.get(name) else {
            self.problems.push(format!(
                "tensor {name}: expected shape {:?}, found none",
                spec.shape
            ));
            return;
        };
        let file = self.checkpoint.file_of(found).display();
        if found.shape != spec.shape {
            self.problems.push(format!(
                "tensor {name}: expected shape {:?}, found {:?} in {file}",
                spec.shape, found.shape
            ));
        }
        if found.weight().is_none() {
            self.problems.push(format!(
                "tensor {name}: expected bf16, f16 or f32, found {:?} in {file}",
                found.dtype
            ));
        }
    }

    /// Tensors that nothing reads: an error where this family could have used them, else a note.
    fn unused(&mut self, description: &Description, needed: &[&TensorSpec]) {
        let is_tied_copy =
            |name: &str| description.head.tied && name == description.head.weight.name;
        let unused: Vec<&String> = self
            .checkpoint
            .tensors
            .keys()
            .filter(|name| !needed.iter().any(|spec| spec.name == **name))
            .filter(|name| !is_tied_copy(name))
            .collect();
        let (could, rest): (Vec<_>, Vec<_>) = unused
            .into_iter()
            .partition(|name| description.could_use(name));
        for name in could {
            self.problems.push(format!(
                "tensor {name}: the {} family could use it, but config.json says that it is not needed; check the number of layers and the bias flags",
                description.family
            ));
        }
        if !rest.is_empty() {
            let listed: Vec<&str> = rest.iter().take(LISTED_MAX).map(|n| n.as_str()).collect();
            let more = match rest.len().saturating_sub(LISTED_MAX) {
                0 => String::new(),
                n => format!(" and {n} more"),
            };
            self.notes
                .push(format!("tensors not used: {}{more}", listed.join(", ")));
        }
    }
}
