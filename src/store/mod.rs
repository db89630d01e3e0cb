//! What lies on disk, and the protocol that puts it there.
//!
//! | file | what it holds |
//! |---|---|
//! | `bytes` | file contents, mapped or owned, and typed views of them |
//! | `npy` | numpy's array files |
//! | `fs` | primitive operations, so that tests can fail each one |
//! | `disk` | [`LocalDisk`]: the durable write |
//! | `corpus`, `corpus_writer` | the token corpus |
//! | `job`, `manifest` | what a scored set means, and the commit record of a shard |
//! | `scored`, `commit`, `rows` | the scored set: opened, added to, read row by row |
//! | `verify`, `check`, `shift` | the proof that a set is whole, undamaged and aligned |
//! | `size` | what a set will weigh |
//! | `timed` | a store that notes how long its writes take |
//! | `leftovers` | what nothing names, and damaged shards put aside |
//!
//! Architecture invariant: nothing outside this module creates, renames or removes a file, and
//! nothing in it knows a model, a device or a flag.

pub mod bytes;
pub mod check;
pub mod commit;
pub mod compare;
pub mod corpus;
pub mod corpus_writer;
pub mod disk;
pub mod fs;
pub mod job;
pub mod leftovers;
pub mod manifest;
pub mod npy;
pub mod rows;
pub mod scored;
pub mod shift;
pub mod size;
pub mod timed;
pub mod verify;

use std::fmt::Debug;
use std::ops::Range;

use anyhow::Result;

pub use bytes::Bytes;
pub use commit::Committed;
pub use corpus::{CorpusReader, CorpusShardFiles};
pub use corpus_writer::{CorpusWriter, OtherStaging};
pub use disk::LocalDisk;
pub use job::{Job, PlannedShard, identity, plan_shards, products_value};
pub use manifest::{Manifest, Sums};
pub use npy::NpyFile;
pub use rows::ScoredRows;
pub use scored::{ScoredSet, ScoredShardFiles};

/// Named pieces of bytes. A local disk first; shaped so that an object store can be one too:
/// whole puts, create-only puts, ranged reads, listing, no rename that callers rely on.
pub trait Store: Send + Sync + Debug {
    /// What messages call `name`.
    fn place(&self, name: &str) -> String;

    /// Writes files under their names, replacing what has them. When this returns they are
    /// whole and survive a power loss; until then each is whole or as it was before.
    fn put(&self, files: &[FileParts]) -> Result<()>;

    /// Writes a file durably unless the name is taken. Of many callers one wins.
    fn create(&self, name: &str, bytes: &[u8]) -> Result<Created>;

    /// A whole file, mapped where possible; `None` when there is none.
    fn read(&self, name: &str) -> Result<Option<Bytes>>;

    /// A part of a file.
    fn read_range(&self, name: &str, range: Range<usize>) -> Result<Vec<u8>>;

    /// Every file, by name, and every empty folder, its name ending in a slash.
    fn list(&self) -> Result<Vec<Entry>>;

    /// Removes a file or empty folder of the list, and the folders this leaves empty. One that
    /// is gone already is fine.
    fn remove(&self, name: &str) -> Result<()>;

    /// Gives a file, or all files below a folder, another name.
    fn move_aside(&self, from: &str, to: &str) -> Result<()>;

    /// Adds to the end of a file. For logs: it promises nothing about a power loss.
    fn append(&self, name: &str, bytes: &[u8]) -> Result<()>;
}

/// A file to be written: its parts end to end.
#[derive(Clone, Copy, Debug)]
pub struct FileParts<'a> {
    pub name: &'a str,
    pub parts: &'a [&'a [u8]],
}

/// How a create-only write ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Created {
    New,
    /// The name was taken; what has it is as it was, and durable.
    WasThere,
}

/// One name of a store's list.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Entry {
    pub name: String,
    pub bytes: u64,
}
