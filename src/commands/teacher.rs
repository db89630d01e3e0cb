//! Opening a teacher for any command: its notes are said once, its fingerprint taken with
//! progress.

use std::path::Path;

use anyhow::Result;

use super::machine::UserCache;
use crate::model::{Description, Teacher, Unknown, teacher_fingerprint};
use crate::progress::{self, Progress};

/// A checked teacher.
#[derive(Debug)]
pub struct OpenTeacher {
    pub teacher: Teacher,
}

/// # Errors
/// All that is wrong with the checkpoint.
pub fn open_teacher(folder: &Path, unknown: Unknown) -> Result<OpenTeacher> {
    let teacher = Teacher::open(folder, unknown)?;
    for note in &teacher.notes {
        progress::note(&format!("note: {note}"));
    }
    Ok(OpenTeacher { teacher })
}

impl OpenTeacher {
    pub fn description(&self) -> &Description {
        &self.teacher.description
    }

    /// Over config and every weight byte; unchanged files are looked up in the user's cache.
    ///
    /// # Errors
    /// A weight file that can't be read any more.
    pub fn fingerprint(&self) -> Result<String> {
        let checkpoint = &self.teacher.checkpoint;
        let progress = Progress::new("hashing the teacher", "bytes", checkpoint.bytes(), 0);
        let cache = UserCache::open();
        let fingerprint = teacher_fingerprint(checkpoint, &cache, &|bytes| progress.add(bytes, ""));
        progress.finish();
        fingerprint
    }
}

/// The fingerprint of the checkpoint in `folder`.
///
/// # Errors
/// As for opening it.
pub fn fingerprint(folder: &Path) -> Result<String> {
    // The fingerprint covers every key, known or not.
    open_teacher(folder, Unknown::Allow)?.fingerprint()
}
