//! Files that a command writes for people and machines beside its result.

use std::path::{Path, PathBuf, absolute};

use anyhow::{Context, Result, bail, ensure};

use crate::store::{FileParts, LocalDisk, Store};

/// Checks, before any work is done, that every file named by an option can be written later
/// without harm: its folder is there, it is a file if it exists, no other option names it, and it
/// lies in none of `kept`, the folders the command reads and commits to.
///
/// # Errors
/// One that can't.
pub fn check(files: &[(&str, Option<&Path>)], kept: &[&Path]) -> Result<()> {
    let mut seen: Vec<(PathBuf, &str)> = Vec::new();
    for (option, path) in files {
        let Some(path) = *path else { continue };
        let there = resolved(path).with_context(|| {
            let folder = path.parent().unwrap_or(Path::new("")).display();
            format!("{option}: expected a file in a folder that exists, found {folder}")
        })?;
        if there.exists() && !there.is_file() {
            bail!(
                "{option}: expected a file, or a name that is free, found a folder, a device or a pipe: {}",
                path.display()
            );
        }
        for folder in kept {
            let folder = folder.canonicalize().or_else(|_| absolute(folder))?;
            ensure!(
                !there.starts_with(&folder),
                "{option}: expected a file outside {}, found {}",
                folder.display(),
                path.display()
            );
        }
        if let Some((_, other)) = seen.iter().find(|(taken, _)| *taken == there) {
            bail!(
                "{option}: expected a file of its own, found {}, which is --{other}'s too",
                path.display()
            );
        }
        seen.push((there, option));
    }
    Ok(())
}

/// Where a path leads, links followed; its last part need not exist.
fn resolved(path: &Path) -> Result<PathBuf> {
    if let Ok(there) = path.canonicalize() {
        return Ok(there);
    }
    let name = path.file_name().context("a path without a name")?;
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    Ok(folder.canonicalize()?.join(name))
}

/// Writes a whole file, replacing one that is there.
///
/// # Errors
/// A file that can't be written.
pub fn write_page(path: &Path, text: &str) -> Result<()> {
    let name = path.file_name().and_then(|name| name.to_str());
    let name = name.with_context(|| format!("expected a file, found {}", path.display()))?;
    let folder = path.parent().unwrap_or(Path::new(""));
    LocalDisk::new(folder).put(&[FileParts {
        name,
        parts: &[text.as_bytes()],
    }])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_that_harm_nothing_are_written() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let set = at("set");
        std::fs::create_dir(&set).unwrap();
        std::fs::write(at("old"), "").unwrap();
        let said = |files: &[(&str, &Path)]| {
            let files: Vec<_> = files.iter().map(|&(o, p)| (o, Some(p))).collect();
            check(&files, &[&set]).map_err(|error| format!("{error:#}"))
        };
        assert_eq!(
            said(&[("report", &at("new")), ("events", &at("old"))]),
            Ok(())
        );
        let cases = [
            (
                at("nowhere/page"),
                "report: expected a file in a folder that exists",
            ),
            (set.clone(), "found a folder, a device or a pipe"),
            (
                PathBuf::from("/dev/null"),
                "found a folder, a device or a pipe",
            ),
            (set.join("job.json"), "report: expected a file outside"),
        ];
        for (path, expected) in cases {
            let found = said(&[("report", &path)]).unwrap_err();
            assert!(found.contains(expected), "{found}");
        }
        let both = said(&[
            ("events", &at("old")),
            ("metrics", &at("../").join(folder.path()).join("old")),
        ]);
        assert!(both.unwrap_err().contains("--events's too"));
    }
}
