//! What this machine has to offer, and what this build is.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use etcetera::BaseStrategy;
use serde_json::{Value, json};

use crate::backend::cuda::KernelCache;
use crate::model::{FileHashes, HashCache};
use crate::progress;
use crate::store::{FileParts, LocalDisk, Store};

/// Bytes of memory that can be had without pushing anything out: the least of what the system,
/// the control group and the process's own limit have left. `None` where neither tells.
pub fn memory_available() -> Option<u64> {
    [system_memory(), group_memory(), process_memory()]
        .into_iter()
        .flatten()
        .min()
}

/// What the process may still map, where its address space is limited (`ulimit -v`).
fn process_memory() -> Option<u64> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::As).current?;
    let statm = fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split(' ').next()?.parse().ok()?;
    Some(limit.saturating_sub(pages * rustix::param::page_size() as u64))
}

fn system_memory() -> Option<u64> {
    let info = fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

fn group_memory() -> Option<u64> {
    let number = |name: &str| -> Option<u64> {
        let text = fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok()?;
        text.trim().parse().ok()
    };
    // Cached files count as used, but make room when it is needed.
    let stat = fs::read_to_string("/sys/fs/cgroup/memory.stat").unwrap_or_default();
    let cached = stat.lines().find_map(|line| line.strip_prefix("file "));
    let cached: u64 = cached.and_then(|n| n.trim().parse().ok()).unwrap_or(0);
    let used = number("memory.current")?.saturating_sub(cached);
    Some(number("memory.max")?.saturating_sub(used))
}

/// Bytes that belong to this process alone, as the system counts them now.
pub fn memory_of_process() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("RssAnon:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// Which kdscore this is: version and, where it was built from a checkout, the commit.
pub fn build() -> Value {
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "commit": option_env!("KDSCORE_COMMIT").unwrap_or("unknown"),
    })
}

/// A name for this process that no other running one has, for the log.
pub fn worker_name() -> String {
    let node = rustix::system::uname();
    let host: String = node
        .nodename()
        .to_string_lossy()
        .chars()
        .filter(char::is_ascii_alphanumeric)
        .collect();
    format!("{host}-{}", std::process::id())
}

/// Hashes of weight files in the user's cache folder. Losing it costs only time, so a failure to
/// write is passed over.
#[derive(Debug)]
pub struct UserCache {
    folder: Option<PathBuf>,
}

impl UserCache {
    pub fn open() -> UserCache {
        let folder = etcetera::choose_base_strategy().ok();
        UserCache {
            folder: folder.map(|dirs| dirs.cache_dir().join("kdscore").join("weights")),
        }
    }
}

/// Compiled kernels in the user's cache folder. Losing them costs only time, so a failure to write
/// is passed over.
#[derive(Debug)]
pub struct KernelFolder {
    folder: Option<PathBuf>,
    /// Whether somebody was told what takes so long.
    told: AtomicBool,
}

impl KernelFolder {
    pub fn open() -> KernelFolder {
        let folder = etcetera::choose_base_strategy().ok();
        KernelFolder {
            folder: folder.map(|dirs| dirs.cache_dir().join("kdscore").join("kernels")),
            told: AtomicBool::new(false),
        }
    }

    fn tell_once(&self) {
        if self.told.swap(true, Ordering::Relaxed) {
            return;
        }
        let kept = match &self.folder {
            Some(folder) => format!(", to be kept in {}", folder.display()),
            None => String::new(),
        };
        progress::note(&format!("compiling kernels{kept}"));
    }
}

impl KernelCache for KernelFolder {
    fn get(&self, key: &str) -> Option<Vec<u8>> {
        let kept = self.folder.as_ref();
        let kept = kept.and_then(|folder| fs::read(folder.join(key)).ok());
        if kept.is_none() {
            self.tell_once();
        }
        kept
    }

    fn put(&self, key: &str, image: &[u8]) {
        let Some(folder) = &self.folder else { return };
        let file = FileParts {
            name: key,
            parts: &[image],
        };
        let _ = LocalDisk::new(folder).put(&[file]);
    }
}

impl HashCache for UserCache {
    fn get(&self, key: &str) -> Option<FileHashes> {
        let path = self.folder.as_ref()?.join(format!("{key}.json"));
        serde_json::from_slice(&fs::read(path).ok()?).ok()
    }

    fn put(&self, key: &str, hashes: &FileHashes) {
        let Some(folder) = &self.folder else { return };
        let Ok(bytes) = serde_json::to_vec(hashes) else {
            return;
        };
        let file = FileParts {
            name: &format!("{key}.json"),
            parts: &[&bytes],
        };
        let _ = LocalDisk::new(folder).put(&[file]);
    }
}
