//! Writes a token corpus: staged beside its final folder, published whole by one rename.

use std::io::ErrorKind::{AlreadyExists, DirectoryNotEmpty, NotFound};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value, json};

use super::bytes::as_bytes;
use super::corpus::{FORMAT_VERSION, MANIFEST, array_name};
use super::disk::{LocalDisk, failed, parent};
use super::fs::{Fs, Held, RealFs};
use super::npy;
use super::{Created, FileParts, Store};
use crate::canonical;
use crate::corpus::{CorpusShard, ShardArrays};
use crate::products::Dtype;

/// How a staging folder ends. It starts with a dot and the corpus folder's name.
const STAGING_END: &str = ".staging";

/// A corpus in the making. Dropped before [`CorpusWriter::finish`], it leaves nothing.
#[derive(Debug)]
pub struct CorpusWriter {
    out: PathBuf,
    staging: PathBuf,
    disk: LocalDisk,
    fs: Arc<dyn Fs>,
    shards: Vec<Value>,
    published: bool,
    /// Tells others that this run is at work; `None` where the disk has no locks.
    held: Option<Held>,
}

/// A staging folder for the same corpus that is not this run's.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OtherStaging {
    pub folder: PathBuf,
    /// Whether its run is at work now; `None` where the disk can't say.
    pub is_at_work: Option<bool>,
}

impl CorpusWriter {
    /// # Errors
    /// `out` is there already and not an empty folder.
    pub fn create(out: &Path) -> Result<CorpusWriter> {
        CorpusWriter::create_over(out, Arc::new(RealFs))
    }

    /// The same over other primitives than the operating system's.
    pub fn create_over(out: &Path, fs: Arc<dyn Fs>) -> Result<CorpusWriter> {
        let Some(name) = out.file_name() else {
            bail!(
                "{}: expected a folder to make, found no name in it",
                out.display()
            );
        };
        match fs.list(out) {
            Err(e) if e.kind() == NotFound => {}
            Ok(entries) if entries.is_empty() => {}
            Ok(_) => bail!(
                "{}: expected a new or empty folder, found files in it; remove it or give another --out",
                out.display()
            ),
            Err(e) => return Err(failed(out, "list", e)),
        }
        let name = name.to_string_lossy();
        let staging = parent(out).join(format!(".{name}.{}{STAGING_END}", fs.unique()));
        let mut writer = CorpusWriter {
            out: out.to_path_buf(),
            disk: LocalDisk::over(&staging, fs.clone()),
            staging,
            fs,
            shards: Vec::new(),
            published: false,
            held: None,
        };
        writer.disk.make()?;
        writer.held = writer.fs.hold(&writer.staging).ok();
        Ok(writer)
    }

    /// Staging folders of other runs for the same corpus. Where locks don't reach from machine to
    /// machine, one that nobody holds may still be worked in, so only the user removes it.
    pub fn other_stagings(&self) -> Vec<OtherStaging> {
        let folder = parent(&self.out);
        let name = self.out.file_name().unwrap_or_default().to_string_lossy();
        let start = format!(".{name}.");
        let entries = self.fs.list(&folder).unwrap_or_default();
        entries
            .into_iter()
            .filter(|e| e.is_folder && e.name.starts_with(&start) && e.name.ends_with(STAGING_END))
            .map(|e| folder.join(e.name))
            .filter(|path| *path != self.staging)
            .map(|folder| OtherStaging {
                is_at_work: self.fs.is_held(&folder).ok(),
                folder,
            })
            .collect()
    }

    /// A file of the corpus beside its shards, for example `tokenizer/tokenizer.json`.
    pub fn write_file(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        self.disk.put(&[FileParts {
            name,
            parts: &[bytes],
        }])
    }

    /// The next shard. Its id is its place in the corpus.
    pub fn write_shard(&mut self, arrays: &ShardArrays) -> Result<()> {
        let id = format!("shard-{:06}", self.shards.len());
        let view = CorpusShard::new(&arrays.tokens, &arrays.offsets, &arrays.loss_mask)
            .with_context(|| id.clone())?;
        let (tokens, sequences) = (view.tokens().len(), view.sequences());
        ensure!(
            arrays.source_rows.len() == sequences,
            "{id}: expected {sequences} source rows, one per sequence, found {}",
            arrays.source_rows.len()
        );
        let files = [
            ("tokens", Dtype::I32, tokens, as_bytes(&arrays.tokens)),
            (
                "offsets",
                Dtype::I64,
                sequences + 1,
                as_bytes(&arrays.offsets),
            ),
            ("loss_mask", Dtype::Bool, tokens, &arrays.loss_mask[..]),
            (
                "source_rows",
                Dtype::I64,
                sequences,
                as_bytes(&arrays.source_rows),
            ),
        ];
        let mut facts = Map::new();
        for (array, dtype, length, data) in files {
            let header = npy::header_bytes(dtype, &[length]);
            let parts = [&header[..], data];
            self.disk.put(&[FileParts {
                name: &array_name(&id, array),
                parts: &parts,
            }])?;
            let sha256 = canonical::sha256_hex_of(&parts);
            let bytes = header.len() + data.len();
            facts.insert(array.into(), json!({"bytes": bytes, "sha256": sha256}));
        }
        let rows: usize = (0..sequences)
            .map(|s| view.sequence(s).rows().count())
            .sum();
        self.shards.push(json!({
            "id": id, "sequences": sequences, "tokens": tokens, "rows": rows, "arrays": facts,
        }));
        Ok(())
    }

    /// Writes `corpus.json` with `facts` in it, and gives the corpus its name, unless another run
    /// has taken it meanwhile.
    pub fn finish(mut self, facts: Map<String, Value>) -> Result<Created> {
        let mut document = facts;
        for (key, value) in [
            ("format_version", FORMAT_VERSION.into()),
            ("shards", Value::Array(std::mem::take(&mut self.shards))),
        ] {
            ensure!(
                document.insert(key.into(), value).is_none(),
                "{MANIFEST}: {key} is the writer's to set"
            );
        }
        let sealed = canonical::seal(&Value::Object(document));
        self.write_file(MANIFEST, &sealed)?;
        match self.fs.rename(&self.staging, &self.out) {
            Ok(()) => self.published = true,
            Err(e) if [DirectoryNotEmpty, AlreadyExists].contains(&e.kind()) => {
                return Ok(Created::WasThere);
            }
            Err(e) => return Err(failed(&self.out, "give the finished corpus its name", e)),
        }
        let folder = parent(&self.out);
        self.fs
            .sync_folder(&folder)
            .map_err(|e| failed(&folder, "sync the folder", e))?;
        Ok(Created::New)
    }
}

impl Drop for CorpusWriter {
    fn drop(&mut self) {
        if self.published {
            return;
        }
        // Best effort: a staging folder is recognised by its name and never read.
        for entry in self.disk.list().unwrap_or_default() {
            let _ = self.disk.remove(&entry.name);
        }
        let _ = self.fs.remove_folder(&self.staging);
    }
}
