//! What lies in a scored set although nothing names it, and what is put aside.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;

use super::manifest::{Manifest, manifest_name};
use super::scored::{JOB, LOG};
use super::{Entry, ScoredSet};

/// Folder of damaged shards that were moved aside.
pub const DISCARDED: &str = "discarded";

/// A file or empty folder that nothing names.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Leftover {
    pub name: String,
    pub bytes: u64,
    /// Whether its owner is committed, so that nobody can need it any more.
    pub removable: bool,
}

/// What a scored set holds beside its data.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Besides {
    pub leftovers: Vec<Leftover>,
    pub discarded_bytes: u64,
}

/// Whether a shard is committed, as far as leftovers care.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Owner {
    Open,
    Committed,
    /// Its manifest can't be read, so nobody knows what it names.
    Damaged,
}

impl ScoredSet {
    /// Lists the set without opening an array.
    pub fn besides(&self) -> Result<Besides> {
        // Listed first: what a worker commits meanwhile can't look like a leftover then.
        let entries = self.store.list()?;
        let mut named = BTreeSet::from([JOB.to_owned()]);
        let mut owners = BTreeMap::new();
        for planned in &self.job.plan {
            let owner = match self.manifest(planned) {
                Ok(None) => Owner::Open,
                Ok(Some(manifest)) => {
                    named.extend(manifest.products.into_iter().map(|p| p.path));
                    Owner::Committed
                }
                Err(_) => Owner::Damaged,
            };
            named.insert(manifest_name(&planned.id));
            owners.insert(planned.id.as_str(), owner);
        }
        let mut besides = Besides::default();
        for entry in entries {
            match entry.name.split('/').next() {
                _ if named.contains(&entry.name) => {}
                Some(LOG) => {}
                Some(DISCARDED) => besides.discarded_bytes += entry.bytes,
                _ => besides.leftovers.extend(leftover(entry, &owners)),
            }
        }
        Ok(besides)
    }

    /// Removes the leftovers of committed shards.
    pub fn clean(&self, besides: &Besides) -> Result<()> {
        let removable = besides.leftovers.iter().filter(|l| l.removable);
        removable
            .into_iter()
            .try_for_each(|l| self.store.remove(&l.name))
    }

    /// Moves a shard's manifest and arrays aside and says where to. The shard is open then.
    pub fn discard(&self, shard_id: &str) -> Result<String> {
        let taken: BTreeSet<String> = self
            .store
            .list()?
            .iter()
            .filter_map(|entry| entry.name.strip_prefix(DISCARDED)?.split('/').nth(1))
            .map(str::to_owned)
            .collect();
        let folder = (0..)
            .map(|n| format!("{shard_id}-{n}"))
            .find(|name| !taken.contains(name))
            .unwrap_or_default();
        let manifest = manifest_name(shard_id);
        // The manifest last: while it is there nobody makes the shard again, so what is moved is
        // never what another worker has just written. Stopped in between, the shard is damaged as
        // before, and is discarded again.
        for name in [shard_id, manifest.as_str()] {
            let there = match name == manifest {
                true => self.store.read(name)?.is_some(),
                false => self.has_files_in(shard_id)?,
            };
            if there {
                self.store
                    .move_aside(name, &format!("{DISCARDED}/{folder}/{name}"))?;
            }
        }
        Ok(self.store.place(&format!("{DISCARDED}/{folder}")))
    }

    fn has_files_in(&self, folder: &str) -> Result<bool> {
        let inside = format!("{folder}/");
        let entries = self.store.list()?;
        Ok(entries.iter().any(|e| e.name.starts_with(&inside)))
    }
}

/// `None` for what belongs to a shard nobody can judge.
fn leftover(entry: Entry, owners: &BTreeMap<&str, Owner>) -> Option<Leftover> {
    let owner = owner_of(&entry.name, owners);
    (owner != Some(Owner::Damaged)).then(|| Leftover {
        removable: owner == Some(Owner::Committed),
        name: entry.name,
        bytes: entry.bytes,
    })
}

/// The shard in whose folder a file lies, or whose manifest it was to become. The temporary
/// files of `job.json` belong to what is committed, since it is there.
fn owner_of(name: &str, owners: &BTreeMap<&str, Owner>) -> Option<Owner> {
    if let Some((folder, _)) = name.split_once('/') {
        return owners.get(folder).copied();
    }
    let temp = name.strip_prefix('.')?.strip_suffix(".tmp")?;
    if temp.starts_with(JOB) {
        return Some(Owner::Committed);
    }
    let (id, _) = temp.split_once(".manifest.json.")?;
    owners.get(id).copied()
}

/// The bytes of the arrays a manifest names.
pub fn stored_bytes(manifest: &Manifest) -> u64 {
    manifest.products.iter().map(|p| p.bytes).sum()
}
