//! The teacher: what it is, its weights, and the forward pass.
//!
//! Architecture invariant: a family is data. Nothing below `families` branches on a family's
//! name, and nothing here knows which device computes.

mod buffers;
mod checkpoint;
mod config;
mod decoder;
mod description;
mod families;
mod fingerprint;
mod parts;
mod rehearsal;
mod rope;
mod spelling;
mod teacher;
mod weights;
mod work;

pub use checkpoint::Checkpoint;
pub use decoder::{Begun, Decoder, Limits, Vocabulary};
pub use description::Description;
pub use fingerprint::{FileHashes, HashCache, file_states, teacher_fingerprint};
pub use teacher::{Teacher, Unknown, WeightSource};
pub use work::{Demand, Parameters, Work};

use std::path::Path;

use anyhow::Result;

/// Reads a teacher's description from its config alone, no weights needed.
///
/// # Errors
/// A config that is missing or can't be honoured.
pub fn describe(folder: &Path) -> Result<Description> {
    families::describe(&config::Config::read(&folder.join("config.json"))?)
}
