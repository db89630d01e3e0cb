//! The primitive operations the durable write is made of, so that a test can fail or stop at
//! each of them. Nothing here is durable by itself: only `disk` puts them in the right order.

use std::fmt::Debug;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{CWD, FlockOperation, RenameFlags, flock};
use rustix::io::Errno;

use super::bytes::Bytes;

/// What a disk can do. Each call is one step; a crash may come before or after any of them.
pub trait Fs: Send + Sync + Debug {
    /// Text that no other process, on this machine or another, has in a name.
    fn unique(&self) -> String;

    /// Makes one folder; one that is there already is fine.
    fn make_folder(&self, path: &Path) -> io::Result<()>;

    /// Makes a file that was not there.
    fn create_new(&self, path: &Path) -> io::Result<Box<dyn NewFile>>;

    /// Renames a file or folder. A file that has the new name is replaced.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Renames a file unless the new name is taken (`AlreadyExists`). `Unsupported` where the
    /// disk can't.
    fn rename_new(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Gives a file a second name unless that is taken (`AlreadyExists`).
    fn hard_link(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Makes a folder's entries survive a power loss.
    fn sync_folder(&self, path: &Path) -> io::Result<()>;

    fn remove_file(&self, path: &Path) -> io::Result<()>;

    /// Removes an empty folder.
    fn remove_folder(&self, path: &Path) -> io::Result<()>;

    /// What one folder holds, in any order.
    fn list(&self, folder: &Path) -> io::Result<Vec<FolderEntry>>;

    /// A whole file, mapped where possible.
    fn open(&self, path: &Path) -> io::Result<Bytes>;

    /// Adds to the end of a file, which is made if need be.
    fn append(&self, path: &Path, bytes: &[u8]) -> io::Result<()>;

    /// Marks a folder as worked in, until what is handed back is dropped or this process ends,
    /// however it ends.
    fn hold(&self, folder: &Path) -> io::Result<Held>;

    /// Whether anybody holds the folder. An error where the disk can't say.
    fn is_held(&self, folder: &Path) -> io::Result<bool>;
}

/// A folder that is worked in.
#[derive(Debug, Default)]
pub struct Held {
    _file: Option<File>,
}

/// A file being written.
pub trait NewFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// Makes what was written survive a power loss.
    fn sync(&mut self) -> io::Result<()>;
}

/// One name in a folder.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FolderEntry {
    pub name: String,
    pub is_folder: bool,
    pub bytes: u64,
}

/// The operating system's own.
#[derive(Clone, Copy, Debug, Default)]
pub struct RealFs;

impl Fs for RealFs {
    fn unique(&self) -> String {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let nanos = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |d| d.as_nanos());
        format!("{:x}-{nanos:x}-{count:x}", std::process::id())
    }

    fn make_folder(&self, path: &Path) -> io::Result<()> {
        match std::fs::create_dir(path) {
            Err(_) if path.is_dir() => Ok(()),
            other => other,
        }
    }

    fn create_new(&self, path: &Path) -> io::Result<Box<dyn NewFile>> {
        Ok(Box::new(File::create_new(path)?))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        std::fs::rename(from, to)
    }

    fn rename_new(&self, from: &Path, to: &Path) -> io::Result<()> {
        let done = rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE);
        done.map_err(|e| match io::Error::from(e) {
            // What old kernels and some network disks say to the flag.
            e if e.kind() == io::ErrorKind::InvalidInput => io::ErrorKind::Unsupported.into(),
            e => e,
        })
    }

    fn hard_link(&self, from: &Path, to: &Path) -> io::Result<()> {
        std::fs::hard_link(from, to)
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        match File::open(path)?.sync_all() {
            // Some network disks have nothing to sync a folder with.
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => Ok(()),
            other => other,
        }
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        std::fs::remove_file(path)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        std::fs::remove_dir(path)
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<FolderEntry>> {
        std::fs::read_dir(folder)?
            .map(|entry| {
                let entry = entry?;
                let facts = entry.metadata()?; // of a link itself, not of what it points to
                Ok(FolderEntry {
                    name: entry.file_name().to_string_lossy().into_owned(),
                    is_folder: facts.is_dir(),
                    bytes: facts.len(),
                })
            })
            .collect()
    }

    fn open(&self, path: &Path) -> io::Result<Bytes> {
        Bytes::map(&File::open(path)?)
    }

    fn append(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        OpenOptions::new()
            .append(true)
            .create(true)
            .open(path)?
            .write_all(bytes)
    }

    fn hold(&self, folder: &Path) -> io::Result<Held> {
        let folder = File::open(folder)?;
        // Waits at most for one who looks whether it is held.
        flock(&folder, FlockOperation::LockExclusive)?;
        Ok(Held {
            _file: Some(folder),
        })
    }

    fn is_held(&self, folder: &Path) -> io::Result<bool> {
        let folder = File::open(folder)?;
        match flock(&folder, FlockOperation::NonBlockingLockShared) {
            Ok(()) => Ok(false),
            Err(Errno::WOULDBLOCK) => Ok(true),
            Err(e) => Err(e.into()),
        }
    }
}

impl NewFile for File {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write_all(bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}
