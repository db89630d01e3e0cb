//! Read-only memory maps of files.

use std::fs::File;
use std::io;
use std::path::Path;

use anyhow::{Context, Result};
use memmap2::Mmap;

/// Maps a whole file. The pages are shared with the system's cache and count as file memory, not
/// as the process's own.
///
/// # Errors
/// The file can't be opened or mapped.
pub fn map_file(path: &Path) -> Result<Mmap> {
    let file = File::open(path).with_context(|| format!("{}: can't open", path.display()))?;
    map(&file).with_context(|| format!("{}: can't map into memory", path.display()))
}

/// Maps a whole open file.
///
/// # Errors
/// The file can't be mapped.
pub fn map(file: &File) -> io::Result<Mmap> {
    // SAFETY: the map is read-only and private to this process. A file that another process cuts
    // short while it is mapped ends this one by SIGBUS; kdscore's own files are never rewritten
    // in place, and a checkpoint that changes while it is read is not one teacher.
    unsafe { Mmap::map(file) }
}
