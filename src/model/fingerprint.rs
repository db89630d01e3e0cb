//! The teacher fingerprint: config and every weight byte, tensor by tensor, so that the same
//! weights in other files are the same teacher.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, Result};
use rayon::prelude::*;
use serde_json::{Value, json};

use super::checkpoint::{Checkpoint, StoredTensor};
use crate::canonical;

/// Hashes of the tensors of one file, by name, as they may be kept between runs.
pub type FileHashes = BTreeMap<String, String>;

/// Keeps the hashes of files that have not changed. `key` stands for path, inode, size, mtime and
/// ctime, which no program can set back.
pub trait HashCache: Sync {
    fn get(&self, key: &str) -> Option<FileHashes>;
    fn put(&self, key: &str, hashes: &FileHashes);
}

/// sha256 over the config and the hash, dtype and shape of every tensor. `on_bytes` hears how
/// many bytes were dealt with.
///
/// # Errors
/// A file that can't be looked at any more.
pub fn teacher_fingerprint(
    checkpoint: &Checkpoint,
    cache: &dyn HashCache,
    on_bytes: &(dyn Fn(u64) + Sync),
) -> Result<String> {
    let files = (0..checkpoint.files.len()).into_par_iter();
    let hashes: Vec<FileHashes> = files
        .map(|file| file_hashes(checkpoint, file, cache, on_bytes))
        .collect::<Result<_>>()?;
    let tensors: serde_json::Map<String, Value> = checkpoint
        .tensors
        .iter()
        .map(|(name, tensor)| {
            let entry = json!({
                "dtype": format!("{:?}", tensor.dtype),
                "shape": tensor.shape,
                "sha256": hashes[tensor.file][name],
            });
            (name.clone(), entry)
        })
        .collect();
    Ok(canonical::fingerprint(&json!({
        "config": checkpoint.config.as_value(),
        "tensors": tensors,
    })))
}

fn file_hashes(
    checkpoint: &Checkpoint,
    file: usize,
    cache: &dyn HashCache,
    on_bytes: &(dyn Fn(u64) + Sync),
) -> Result<FileHashes> {
    let tensors: Vec<(&String, &StoredTensor)> = checkpoint
        .tensors
        .iter()
        .filter(|(_, tensor)| tensor.file == file)
        .collect();
    let key = cache_key(&checkpoint.files[file])?;
    let kept = cache.get(&key);
    if let Some(kept) = kept.filter(|kept| tensors.iter().all(|(name, _)| kept.contains_key(*name)))
    {
        on_bytes(tensors.iter().map(|(_, t)| t.bytes().len() as u64).sum());
        return Ok(kept);
    }
    let hash = |(name, tensor): &(&String, &StoredTensor)| {
        let hash = canonical::sha256_hex(tensor.bytes());
        on_bytes(tensor.bytes().len() as u64);
        ((*name).clone(), hash)
    };
    let hashes: FileHashes = tensors.par_iter().map(hash).collect();
    cache.put(&key, &hashes);
    Ok(hashes)
}

/// What the weight files are known by, to be compared later: a teacher that changes while it is
/// read is not the one whose fingerprint was taken.
///
/// # Errors
/// A file that can't be looked at any more.
pub fn file_states(checkpoint: &Checkpoint) -> Result<Vec<String>> {
    checkpoint
        .files
        .iter()
        .map(|file| cache_key(file))
        .collect()
}

/// What a file is known by while it has not changed.
fn cache_key(file: &Path) -> Result<String> {
    let look = || -> std::io::Result<Value> {
        let path = file.canonicalize()?;
        let meta = path.metadata()?;
        Ok(json!([
            path.to_string_lossy(),
            meta.dev(),
            meta.ino(),
            meta.size(),
            meta.mtime(),
            meta.mtime_nsec(),
            meta.ctime(),
            meta.ctime_nsec(),
        ]))
    };
    let facts = look().with_context(|| format!("{}: can't look at the file", file.display()))?;
    Ok(canonical::fingerprint(&facts))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// Keeps hashes in memory and counts what had to be hashed anew.
    #[derive(Default)]
    struct Memory {
        kept: Mutex<BTreeMap<String, FileHashes>>,
        misses: Mutex<usize>,
    }

    impl HashCache for Memory {
        fn get(&self, key: &str) -> Option<FileHashes> {
            let found = self.kept.lock().unwrap().get(key).cloned();
            *self.misses.lock().unwrap() += usize::from(found.is_none());
            found
        }

        fn put(&self, key: &str, hashes: &FileHashes) {
            self.kept.lock().unwrap().insert(key.into(), hashes.clone());
        }
    }

    fn fingerprint(folder: &Path, cache: &Memory) -> String {
        let checkpoint = Checkpoint::open(folder).unwrap();
        teacher_fingerprint(&checkpoint, cache, &|_| {}).unwrap()
    }

    #[test]
    fn a_changed_byte_changes_it_and_an_unchanged_file_is_not_hashed_again() {
        let folder = tempfile::tempdir().unwrap();
        let teacher = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/teacher");
        for name in ["config.json", "model.safetensors"] {
            std::fs::copy(teacher.join(name), folder.path().join(name)).unwrap();
        }
        let cache = Memory::default();
        let first = fingerprint(folder.path(), &cache);
        assert_eq!(first, fingerprint(folder.path(), &cache));
        assert_eq!(*cache.misses.lock().unwrap(), 1);

        let weights = folder.path().join("model.safetensors");
        let mut bytes = std::fs::read(&weights).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        std::fs::write(&weights, bytes).unwrap();
        assert_ne!(first, fingerprint(folder.path(), &cache));
        assert_eq!(*cache.misses.lock().unwrap(), 2);
        assert_eq!(
            first,
            fingerprint(&teacher, &cache),
            "the path is no part of it"
        );
    }
}
