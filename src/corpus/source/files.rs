//! Which files a path means, and what kind of file each is.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

/// Stands for standard input.
pub const STDIN: &str = "-";
const ENDINGS: [&str; 5] = ["jsonl", "json", "ndjson", "parquet", "arrow"];
const PACKED: [&str; 2] = ["gz", "zst"];
/// Files beside the data that hold none.
const BESIDE: [&str; 5] = [
    "dataset_info.json",
    "dataset_infos.json",
    "state.json",
    "dataset_dict.json",
    "package.json",
];
const SPLITS: [&str; 7] = ["train", "test", "validation", "valid", "val", "dev", "eval"];
/// Most files one folder may mean.
const FILES_MAX: usize = 100_000;

/// What a file holds, by its first bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Text(Packing),
    Parquet,
    ArrowStream,
    ArrowFile,
}

/// How a text file is compressed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Packing {
    Plain,
    Gzip,
    Zstd,
}

impl Kind {
    /// # Errors
    /// No such file, or something else than a file.
    pub fn of(path: &Path) -> Result<Kind> {
        if path == Path::new(STDIN) {
            return Ok(Kind::Text(Packing::Plain));
        }
        let name = path.display();
        let meta = std::fs::metadata(path).with_context(|| format!("{name}: can't open"))?;
        ensure!(
            meta.is_file(),
            "{name}: expected a file or folder of rows, found a pipe or device; --data - reads standard input"
        );
        let mut head = Vec::new();
        let file = File::open(path).with_context(|| format!("{name}: can't open"))?;
        file.take(6)
            .read_to_end(&mut head)
            .with_context(|| format!("{name}: can't read"))?;
        if let Some(found) = foreign(path, &head) {
            bail!("{name}: expected JSON, JSON lines, Parquet or Arrow, found {found}");
        }
        Ok(Kind::of_bytes(&head))
    }

    pub fn of_bytes(head: &[u8]) -> Kind {
        match head {
            [0x1f, 0x8b, ..] => Kind::Text(Packing::Gzip),
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Kind::Text(Packing::Zstd),
            [b'P', b'A', b'R', b'1', ..] => Kind::Parquet,
            [b'A', b'R', b'R', b'O', b'W', b'1', ..] => Kind::ArrowFile,
            [0xff, 0xff, 0xff, 0xff, ..] => Kind::ArrowStream,
            _ => Kind::Text(Packing::Plain),
        }
    }
}

/// A kind of file that is not read, and how to make one that is.
fn foreign(path: &Path, head: &[u8]) -> Option<&'static str> {
    let ending = path.extension().unwrap_or_default().to_ascii_lowercase();
    match head {
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] | [b'{' | b'[', 0, ..] | [0, b'{' | b'[', ..] => {
            Some("text in UTF-16; iconv -f UTF-16 -t UTF-8 FILE writes it in UTF-8")
        }
        _ if ending == "csv" || ending == "tsv" => Some(
            "a table of text; in Python pandas.read_csv(FILE).to_json(\"rows.jsonl\", orient=\"records\", lines=True) writes JSON lines",
        ),
        _ => None,
    }
}

/// The first of the user's paths that means what is in `folder`, whatever stands there: a folder
/// above it, or a pattern of one.
pub fn path_above<'a>(data: &'a [PathBuf], folder: &Path) -> Option<&'a PathBuf> {
    let (real, spelt) = (real_path(folder), absolute(folder));
    let is_pattern_of = |path: &Path| {
        let pattern = glob::Pattern::new(&absolute(path).to_string_lossy());
        let options = glob::MatchOptions {
            require_literal_separator: true,
            ..glob::MatchOptions::new()
        };
        pattern.is_ok_and(|p| spelt.ancestors().any(|a| p.matches_path_with(a, options)))
    };
    data.iter().find(|path| match path.is_dir() {
        true => real.starts_with(real_path(path)),
        false => !path.is_file() && is_pattern_of(path),
    })
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf())
}

/// The path without links, of a file that may not be there yet.
fn real_path(path: &Path) -> PathBuf {
    let path = absolute(path);
    let real = path.ancestors().find_map(|above| {
        let below = path.strip_prefix(above).ok()?;
        Some(above.canonicalize().ok()?.join(below))
    });
    real.unwrap_or(path)
}

/// The files that the user's paths mean, in the order in which their rows count: paths sorted,
/// what a path means in its own order.
///
/// # Errors
/// A path or pattern that means nothing, several splits without one chosen.
pub fn expanded(data: &[PathBuf], split: Option<&str>) -> Result<Vec<PathBuf>> {
    let mut sorted = data.to_vec();
    sorted.sort();
    let mut files = Vec::new();
    for path in &sorted {
        if path == Path::new(STDIN) || path.is_file() {
            files.push(path.clone());
        } else if path.is_dir() {
            files.extend(of_folder(path, split)?);
        } else if path.to_string_lossy().contains(['*', '?', '[']) {
            files.extend(of_pattern(path, split)?);
        } else {
            files.push(path.clone());
        }
    }
    ensure!(
        !files.is_empty(),
        "data: expected at least one file, found none"
    );
    if let Some(i) = (1..files.len()).find(|&i| files[..i].contains(&files[i])) {
        bail!(
            "data: expected each file once, found {} twice",
            files[i].display()
        );
    }
    Ok(files)
}

fn of_pattern(pattern: &Path, split: Option<&str>) -> Result<Vec<PathBuf>> {
    let place = pattern.display();
    let paths = glob::glob(&pattern.to_string_lossy())
        .with_context(|| format!("{place}: expected a file or a pattern of files"))?;
    let mut found: Vec<PathBuf> = Vec::new();
    for path in paths {
        let path = path.with_context(|| format!("{place}: can't list"))?;
        if path.is_dir() {
            found.extend(of_folder(&path, split)?);
        } else {
            found.push(path);
        }
    }
    ensure!(
        !found.is_empty(),
        "{place}: expected at least one file, found none"
    );
    Ok(found)
}

fn of_folder(folder: &Path, split: Option<&str>) -> Result<Vec<PathBuf>> {
    let place = folder.display();
    let dict = folder.join("dataset_dict.json");
    if dict.exists() {
        let splits = read_json(&dict)?["splits"].clone();
        let splits: Vec<&str> = splits
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .collect();
        return match split {
            Some(split) if splits.contains(&split) => of_folder(&folder.join(split), None),
            Some(split) => bail!(
                "{place}: expected a split of {}, found {split}",
                splits.join(", ")
            ),
            None => bail!(
                "{place}: expected --split with one of {}, found none",
                splits.join(", ")
            ),
        };
    }
    if folder.join("state.json").exists() {
        return of_saved_dataset(folder);
    }
    let mut found = Vec::new();
    collect(folder, &mut Vec::new(), &mut found)?;
    found.sort();
    let splits = splits_of(folder, &found);
    let mut names: Vec<&str> = splits.iter().flatten().map(String::as_str).collect();
    names.sort_unstable();
    names.dedup();
    match split {
        Some(split) => {
            let mut of_split = splits.iter().map(|s| s.as_deref() == Some(split));
            found.retain(|_| of_split.next().unwrap_or(false));
            ensure!(
                !found.is_empty(),
                "{place}: expected files of the split {split}, found those of {}",
                names.join(", ")
            );
        }
        None => ensure!(
            names.len() < 2,
            "{place}: expected --split, found files of {}",
            names.join(", ")
        ),
    }
    ensure!(
        !found.is_empty(),
        "{place}: expected files ending in {}, found none",
        ENDINGS.join(", ")
    );
    Ok(found)
}

/// `datasets.save_to_disk`: the files of state.json, in its order.
fn of_saved_dataset(folder: &Path) -> Result<Vec<PathBuf>> {
    let state = folder.join("state.json");
    let value = read_json(&state)?;
    if let Some(indices) = value["_indices_data_files"]
        .as_array()
        .filter(|i| !i.is_empty())
    {
        bail!(
            "{}: expected a dataset stored as it is, found one with {} index files; save dataset.flatten_indices()",
            state.display(),
            indices.len()
        );
    }
    let files = value["_data_files"].as_array();
    let files = files.into_iter().flatten().map(|f| {
        let name = f["filename"].as_str();
        let plain = name.filter(|n| !n.contains(['/', '\\']));
        plain.map(|n| folder.join(n)).with_context(|| {
            format!(
                "{}: expected _data_files with a filename each, found {f}",
                state.display()
            )
        })
    });
    let files: Vec<PathBuf> = files.collect::<Result<_>>()?;
    ensure!(
        !files.is_empty(),
        "{}: expected _data_files, found none",
        state.display()
    );
    Ok(files)
}

/// The data files in a folder and those below it. A link to a folder above leads to nothing new.
fn collect(folder: &Path, above: &mut Vec<PathBuf>, found: &mut Vec<PathBuf>) -> Result<()> {
    let failed = || format!("{}: can't list", folder.display());
    let real = folder.canonicalize().with_context(failed)?;
    if above.contains(&real) {
        return Ok(());
    }
    above.push(real);
    for entry in std::fs::read_dir(folder).with_context(failed)? {
        let path = entry.with_context(failed)?.path();
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        if name.starts_with('.') {
            continue;
        }
        if path.is_dir() {
            collect(&path, above, found)?;
        } else if is_data(&name) {
            found.push(path);
        }
        ensure!(
            found.len() <= FILES_MAX,
            "{}: expected at most {FILES_MAX} files, found more",
            folder.display()
        );
    }
    above.pop();
    Ok(())
}

fn is_data(name: &str) -> bool {
    let mut parts = name.rsplit('.').peekable();
    let packed = parts.peek().is_some_and(|e| PACKED.contains(e));
    if packed {
        parts.next();
    }
    let ending = parts.next().unwrap_or_default();
    ENDINGS.contains(&ending) && parts.next().is_some() && !BESIDE.contains(&name)
}

/// The split each file says it is of, in its name or a folder's: `train-00000-of-00002.parquet`.
fn splits_of(folder: &Path, files: &[PathBuf]) -> Vec<Option<String>> {
    let split = |file: &PathBuf| {
        let below = file.strip_prefix(folder).unwrap_or(file);
        let name = below.to_string_lossy().to_lowercase();
        let mut words = name.split(|c: char| !c.is_ascii_alphanumeric());
        words.find(|w| SPLITS.contains(w)).map(str::to_owned)
    };
    files.iter().map(split).collect()
}

fn read_json(path: &Path) -> Result<Value> {
    let bytes = std::fs::read(path).with_context(|| format!("{}: can't read", path.display()))?;
    serde_json::from_slice(&bytes).with_context(|| format!("{}: expected JSON", path.display()))
}
