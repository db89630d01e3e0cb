//! A store on a disk.
//!
//! Architecture invariant: a file gets its final name only in `LocalDisk::durable`, which
//! writes under a temporary name, syncs, renames and syncs every folder on the way, in that
//! order. So no name ever stands for half a file, and no caller can forget a step.

use std::collections::BTreeSet;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, ensure};

use super::bytes::Bytes;
use super::fs::{Fs, RealFs};
use super::{Created, Entry, FileParts, Store};

/// How a temporary file ends. It starts with a dot and the final name.
const TEMP_END: &str = ".tmp";

/// A folder on a local or network disk.
#[derive(Clone, Debug)]
pub struct LocalDisk {
    root: PathBuf,
    fs: Arc<dyn Fs>,
}

/// What to do when the final name is taken.
#[derive(Clone, Copy, PartialEq, Eq)]
enum IfTaken {
    Replace,
    Keep,
}

impl LocalDisk {
    /// The folder need not exist; the first write makes it.
    pub fn new(root: &Path) -> LocalDisk {
        LocalDisk::over(root, Arc::new(RealFs))
    }

    /// The same over other primitives than the operating system's.
    pub fn over(root: &Path, fs: Arc<dyn Fs>) -> LocalDisk {
        let empty = root.as_os_str().is_empty();
        LocalDisk {
            root: if empty {
                ".".into()
            } else {
                root.to_path_buf()
            },
            fs,
        }
    }

    /// Writes `files` so that they have their names and survive a power loss when this returns:
    /// the one durable write. A file is whole or absent at every moment.
    fn durable(&self, files: &[FileParts], if_taken: IfTaken) -> Result<Created> {
        let mut folders = BTreeSet::new();
        for file in files {
            let path = self.path(file.name)?;
            let folder = parent(&path);
            if folders.insert(folder.clone()) {
                self.make_folders(&folder)?;
            }
        }
        let mut created = Created::New;
        for file in files {
            if self.write_one(file, if_taken)? == Created::WasThere {
                created = Created::WasThere;
            }
        }
        // Also when the name was taken: whoever took it may not have come this far.
        for folder in &folders {
            self.sync_up(folder)?;
        }
        Ok(created)
    }

    /// Temporary name, write, sync, final name. The temporary file goes away on any error.
    fn write_one(&self, file: &FileParts, if_taken: IfTaken) -> Result<Created> {
        let path = self.path(file.name)?;
        let stem = path.file_name().unwrap_or_default().to_string_lossy();
        let temp = parent(&path).join(format!(".{stem}.{}{TEMP_END}", self.fs.unique()));
        let done = self
            .write_temp(&temp, file.parts)
            .and_then(|()| self.publish(&temp, &path, if_taken));
        match done {
            Ok(Created::New) => Ok(Created::New),
            other => {
                // Best effort: what is left of it is a leftover that `verify` names.
                let _ = self.fs.remove_file(&temp);
                other.map_err(|e| failed(&path, "write", e))
            }
        }
    }

    fn write_temp(&self, temp: &Path, parts: &[&[u8]]) -> io::Result<()> {
        let mut new = self.fs.create_new(temp)?;
        for part in parts {
            new.write(part)?;
        }
        new.sync()
    }

    fn publish(&self, temp: &Path, path: &Path, if_taken: IfTaken) -> io::Result<Created> {
        let done = match if_taken {
            IfTaken::Replace => self.fs.rename(temp, path),
            IfTaken::Keep => self.rename_new(temp, path),
        };
        match done {
            Ok(()) => Ok(Created::New),
            Err(e) if if_taken == IfTaken::Keep && e.kind() == ErrorKind::AlreadyExists => {
                Ok(Created::WasThere)
            }
            // The temporary file is gone: somebody cleaned up, since the name was taken.
            Err(e)
                if if_taken == IfTaken::Keep
                    && e.kind() == ErrorKind::NotFound
                    && self.fs.open(path).is_ok() =>
            {
                Ok(Created::WasThere)
            }
            Err(e) => Err(e),
        }
    }

    fn rename_new(&self, temp: &Path, path: &Path) -> io::Result<()> {
        match self.fs.rename_new(temp, path) {
            Err(e) if e.kind() == ErrorKind::Unsupported => {
                self.fs.hard_link(temp, path)?;
                self.fs.remove_file(temp)
            }
            other => other,
        }
    }

    /// Makes the root, empty.
    pub(super) fn make(&self) -> Result<()> {
        self.make_folders(&self.root)
    }

    /// Makes `folder` and those above it.
    fn make_folders(&self, folder: &Path) -> Result<()> {
        let made = match self.fs.make_folder(folder) {
            Err(e) if e.kind() == ErrorKind::NotFound && folder.parent().is_some() => {
                self.make_folders(&parent(folder))?;
                self.sync(&parent(&parent(folder)))?;
                self.fs.make_folder(folder)
            }
            other => other,
        };
        made.map_err(|e| failed(folder, "make the folder", e))
    }

    /// Syncs `folder` and those above it, up to the one that holds the root.
    fn sync_up(&self, folder: &Path) -> Result<()> {
        let mut folder = folder.to_path_buf();
        while folder != self.root {
            self.sync(&folder)?;
            folder = parent(&folder);
        }
        self.sync(&self.root)?;
        match self.fs.sync_folder(&parent(&self.root)) {
            // The folder above may be another's; then the root was there before.
            Err(e) if e.kind() == ErrorKind::PermissionDenied => Ok(()),
            other => other.map_err(|e| failed(&parent(&self.root), "sync the folder", e)),
        }
    }

    fn sync(&self, folder: &Path) -> Result<()> {
        self.fs
            .sync_folder(folder)
            .map_err(|e| failed(folder, "sync the folder", e))
    }

    /// Where `name` lies. A name read from a file may hold anything, so it is checked.
    fn path(&self, name: &str) -> Result<PathBuf> {
        let plain = Path::new(name)
            .components()
            .all(|c| matches!(c, Component::Normal(_)));
        ensure!(
            plain && !name.is_empty(),
            "{}: expected a relative path inside it, found {name:?}",
            self.root.display()
        );
        Ok(self.root.join(name))
    }

    fn list_into(&self, folder: &Path, name: &str, out: &mut Vec<Entry>) -> Result<()> {
        let entries = match self.fs.list(folder) {
            // Gone since its parent was listed, or never there.
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
            other => other.map_err(|e| failed(folder, "list", e))?,
        };
        if entries.is_empty() && !name.is_empty() {
            out.push(Entry {
                name: format!("{name}/"),
                bytes: 0,
            });
        }
        for entry in entries {
            let name = match name {
                "" => entry.name.clone(),
                _ => format!("{name}/{}", entry.name),
            };
            if entry.is_folder {
                self.list_into(&folder.join(&entry.name), &name, out)?;
            } else {
                out.push(Entry {
                    name,
                    bytes: entry.bytes,
                });
            }
        }
        Ok(())
    }

    /// Removes folders from `folder` upwards, below the root, as long as they are empty.
    fn prune(&self, folder: &Path) -> Result<()> {
        let mut folder = folder.to_path_buf();
        while folder != self.root && self.fs.remove_folder(&folder).is_ok() {
            folder = parent(&folder);
        }
        match self.fs.sync_folder(&folder) {
            // Somebody else removed it.
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
            other => other.map_err(|e| failed(&folder, "sync the folder", e)),
        }
    }
}

impl Store for LocalDisk {
    fn place(&self, name: &str) -> String {
        self.root.join(name).display().to_string()
    }

    fn put(&self, files: &[FileParts]) -> Result<()> {
        self.durable(files, IfTaken::Replace).map(drop)
    }

    fn create(&self, name: &str, bytes: &[u8]) -> Result<Created> {
        let file = FileParts {
            name,
            parts: &[bytes],
        };
        self.durable(&[file], IfTaken::Keep)
    }

    fn read(&self, name: &str) -> Result<Option<Bytes>> {
        let path = self.path(name)?;
        match self.fs.open(&path) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                Ok(None)
            }
            Err(e) => Err(failed(&path, "read", e)),
        }
    }

    fn read_range(&self, name: &str, range: Range<usize>) -> Result<Vec<u8>> {
        let bytes = self.read(name)?;
        let bytes = bytes.with_context(|| format!("{}: not there", self.place(name)))?;
        let part = bytes.get(range.clone()).ok_or_else(|| {
            anyhow!(
                "{}: expected bytes {range:?}, found {} bytes",
                self.place(name),
                bytes.len()
            )
        })?;
        Ok(part.to_vec())
    }

    fn list(&self) -> Result<Vec<Entry>> {
        let mut out = Vec::new();
        self.list_into(&self.root, "", &mut out)?;
        out.sort();
        Ok(out)
    }

    fn remove(&self, name: &str) -> Result<()> {
        let path = self.path(name)?;
        if name.ends_with('/') {
            return self.prune(&path);
        }
        match self.fs.remove_file(&path) {
            Err(e) if e.kind() != ErrorKind::NotFound => Err(failed(&path, "remove", e)),
            _ => self.prune(&parent(&path)),
        }
    }

    fn move_aside(&self, from: &str, to: &str) -> Result<()> {
        let (from, to) = (self.path(from)?, self.path(to)?);
        self.make_folders(&parent(&to))?;
        self.fs
            .rename(&from, &to)
            .map_err(|e| failed(&from, "move aside", e))?;
        // The new name first: between the two a power loss may show both, never neither.
        self.sync_up(&parent(&to))?;
        self.sync(&parent(&from))
    }

    fn append(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let path = self.path(name)?;
        self.make_folders(&parent(&path))?;
        self.fs
            .append(&path, bytes)
            .map_err(|e| failed(&path, "append to", e))
    }
}

/// The folder that holds `path`.
pub(super) fn parent(path: &Path) -> PathBuf {
    match path.parent() {
        Some(folder) if folder.as_os_str().is_empty() => PathBuf::from("."),
        Some(folder) => folder.to_path_buf(),
        None => path.to_path_buf(),
    }
}

/// An error that names the path, and the way out where there is one.
pub(super) fn failed(path: &Path, what: &str, error: io::Error) -> anyhow::Error {
    let hint = match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            "; free some space and run the same command again"
        }
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
            "; check who may write there"
        }
        _ => "",
    };
    anyhow!("{}: can't {what}: {error}{hint}", path.display())
}
