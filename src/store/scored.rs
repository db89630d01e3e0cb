//! A scored set: its job, which shards are committed, and their arrays.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, ensure};
use rayon::prelude::*;
use serde_json::Value;

use super::corpus::{MANIFEST as CORPUS_MANIFEST, check_id};
use super::job::{Job, PlannedShard, Terms};
use super::leftovers::DISCARDED;
use super::manifest::{MANIFEST_END, Manifest, ProductFile, ROW_OFFSETS, manifest_name};
use super::rows::{Column, ScoredRows};
use super::{Created, LocalDisk, NpyFile, Store};
use crate::canonical;

pub(super) const JOB: &str = "job.json";
/// Folder of what was observed; not part of the data.
pub(super) const LOG: &str = "log";

/// A folder of scored shards, all of one job.
#[derive(Debug)]
pub struct ScoredSet {
    pub(super) store: Arc<dyn Store>,
    pub(super) job: Job,
    pub(super) terms: Terms,
}

impl ScoredSet {
    /// Joins the set in `out`, or begins it: `job.json` is there, durable, when this returns.
    ///
    /// # Errors
    /// The set there is another job: each field that differs is named.
    pub fn open_or_create(out: &Path, job: &Job) -> Result<ScoredSet> {
        ScoredSet::open_or_create_in(Arc::new(LocalDisk::new(out)), job)
    }

    pub fn open(out: &Path) -> Result<ScoredSet> {
        ScoredSet::open_in(Arc::new(LocalDisk::new(out)))
    }

    pub fn open_or_create_in(store: Arc<dyn Store>, job: &Job) -> Result<ScoredSet> {
        let set = ScoredSet::join_in(store, job)?;
        set.begin()?;
        Ok(set)
    }

    /// The set in `out` as this job would go on with it; nothing is written before
    /// [`ScoredSet::begin`].
    ///
    /// # Errors
    /// The set there is another job: each field that differs is named.
    pub fn join(out: &Path, job: &Job) -> Result<ScoredSet> {
        ScoredSet::join_in(Arc::new(LocalDisk::new(out)), job)
    }

    pub fn join_in(store: Arc<dyn Store>, job: &Job) -> Result<ScoredSet> {
        job.check()?;
        ensure!(
            store.read(CORPUS_MANIFEST)?.is_none(),
            "{}: expected a folder for the scored set, found a token corpus; give another --out",
            store.place("")
        );
        if store.read(JOB)?.is_some() {
            let set = ScoredSet::open_in(store)?;
            set.expect_same(job)?;
            return Ok(set);
        }
        expect_ours(store.as_ref(), job)?;
        Ok(ScoredSet {
            terms: job.terms()?,
            job: job.clone(),
            store,
        })
    }

    /// `job.json` is there, durable, when this returns.
    ///
    /// # Errors
    /// Somebody else began another job there meanwhile.
    pub fn begin(&self) -> Result<()> {
        if self.store.read(JOB)?.is_none() {
            let (Created::New | Created::WasThere) = self.store.create(JOB, &self.job.seal())?;
        }
        ScoredSet::open_in(self.store.clone())?.expect_same(&self.job)
    }

    fn expect_same(&self, job: &Job) -> Result<()> {
        self.job
            .expect_same(job)
            .with_context(|| self.store.place(JOB))
    }

    pub fn open_in(store: Arc<dyn Store>) -> Result<ScoredSet> {
        let place = store.place(JOB);
        let bytes = store.read(JOB)?.ok_or_else(|| {
            anyhow!("{place}: expected a scored set, found no such file; `kdscore score` makes one")
        })?;
        let job = Job::parse(&bytes).with_context(|| {
            format!("{place}: can't be used; if it is damaged, remove it and run the same score command again, which writes it anew and keeps the shards")
        })?;
        let terms = job.terms()?;
        Ok(ScoredSet { store, job, terms })
    }

    pub fn job(&self) -> &Job {
        &self.job
    }

    pub fn terms(&self) -> &Terms {
        &self.terms
    }

    /// What messages call a file of the set.
    pub fn place(&self, name: &str) -> String {
        self.store.place(name)
    }

    /// The shard's manifest; `None` while it is open.
    ///
    /// # Errors
    /// A manifest that is damaged or another job's.
    pub fn manifest(&self, planned: &PlannedShard) -> Result<Option<Manifest>> {
        let name = manifest_name(&planned.id);
        let Some(bytes) = self.store.read(&name)? else {
            return Ok(None);
        };
        let manifest = Manifest::parse(&bytes, &self.job, planned);
        manifest.map(Some).with_context(|| self.store.place(&name))
    }

    /// The shard of every planned one that is committed, in the plan's order.
    ///
    /// # Errors
    /// The first manifest that is damaged.
    pub fn manifests(&self) -> Result<Vec<Option<Manifest>>> {
        let manifests = self.job.plan.par_iter().map(|p| self.manifest(p));
        manifests
            .collect::<Result<_>>()
            .context("move the damaged shard aside with `kdscore verify --discard-damaged`")
    }

    /// The shards that have no manifest, in the plan's order.
    pub fn open_shards(&self) -> Result<Vec<PlannedShard>> {
        let manifests = self.manifests()?;
        let shards = self.job.plan.iter().zip(manifests);
        Ok(shards
            .filter(|(_, manifest)| manifest.is_none())
            .map(|(planned, _)| planned.clone())
            .collect())
    }

    /// The arrays of a committed shard, mapped; dtypes and shapes are as the manifest says.
    pub fn shard(&self, manifest: &Manifest) -> Result<ScoredShardFiles> {
        let files = manifest.products.iter().map(|p| self.array(p));
        Ok(ScoredShardFiles {
            terms: self.terms.clone(),
            rows: usize::try_from(manifest.rows)?,
            names: manifest.products.iter().map(|p| p.name.clone()).collect(),
            files: files.collect::<Result<_>>()?,
        })
    }

    /// One array that a manifest names.
    pub(super) fn array(&self, product: &ProductFile) -> Result<NpyFile> {
        let place = self.store.place(&product.path);
        let bytes = self.store.read(&product.path)?.ok_or_else(|| {
            anyhow!("{place}: expected the array that its manifest names, found no such file")
        })?;
        ensure!(
            bytes.len() as u64 == product.bytes,
            "{place}: expected {} bytes, as its manifest says, found {}",
            product.bytes,
            bytes.len()
        );
        let file = NpyFile::from_bytes(place, bytes)?;
        ensure!(
            file.dtype().name() == product.dtype && file.shape() == product.shape,
            "{}: expected {} {:?}, as its manifest says, found {} {:?}",
            file.place(),
            product.dtype,
            product.shape,
            file.dtype().name(),
            file.shape()
        );
        Ok(file)
    }

    /// Arrays of committed shards that are not there or not of the size their manifest says, as
    /// far as a look at the folder tells; `verify` reads them.
    pub fn missing_arrays(&self, manifests: &[&Manifest]) -> Result<Vec<String>> {
        let entries = self.store.list()?;
        let sizes: std::collections::HashMap<&str, u64> =
            entries.iter().map(|e| (e.name.as_str(), e.bytes)).collect();
        let products = manifests.iter().flat_map(|m| &m.products);
        let wrong = products.filter(|p| sizes.get(p.path.as_str()) != Some(&p.bytes));
        Ok(wrong
            .map(|p| {
                let found = sizes.get(p.path.as_str());
                let found = found.map_or("none".to_owned(), |bytes| format!("{bytes} bytes"));
                let place = self.store.place(&p.path);
                format!("{place}: expected {} bytes, found {found}", p.bytes)
            })
            .collect())
    }

    /// Notes what was observed, one JSON object a line, in the worker's own file. It is not part
    /// of the data, and it promises nothing about a power loss.
    pub fn log(&self, worker: &str, line: &Value) -> Result<()> {
        check_id(worker).context("log")?;
        let mut text = canonical::to_canonical(line);
        text.push('\n');
        self.store
            .append(&format!("{LOG}/{worker}.jsonl"), text.as_bytes())
    }

    /// What `worker` noted, in order. A line that a crash cut short is left out.
    pub fn log_lines(&self, worker: &str) -> Result<Vec<Value>> {
        check_id(worker).context("log")?;
        let bytes = self.store.read(&format!("{LOG}/{worker}.jsonl"))?;
        let text = bytes.map_or(String::new(), |b| String::from_utf8_lossy(&b).into_owned());
        let lines = text
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok());
        Ok(lines.collect())
    }
}

/// A folder without job.json may be empty, hold what a killed run left, or the shards of this very
/// job; nothing else, or two jobs would mix.
///
/// # Errors
/// Shards of another job, or files that no scored set has.
fn expect_ours(store: &dyn Store, job: &Job) -> Result<()> {
    let identity = job.identity_sha256();
    for entry in store.list()? {
        let name = &entry.name;
        let place = store.place(name);
        ensure!(
            name == JOB || name.starts_with('.') || name.starts_with("shard-") || is_beside(name),
            "{place}: expected a new or empty folder or a scored set, found this; give another --out"
        );
        if !name.ends_with(MANIFEST_END) || name.contains('/') || name.starts_with('.') {
            continue;
        }
        let bytes = store.read(name)?;
        let document = bytes.and_then(|b| serde_json::from_slice::<Value>(&b).ok());
        let theirs = document
            .as_ref()
            .and_then(|d| d["identity_sha256"].as_str());
        ensure!(
            theirs.is_none_or(|theirs| theirs == identity),
            "{place}: expected a shard of this job (identity {identity}), found one of another ({}): job.json is gone, and the options or inputs of this run are not those it was begun with; nothing was changed",
            theirs.unwrap_or_default()
        );
    }
    Ok(())
}

fn is_beside(name: &str) -> bool {
    [LOG, DISCARDED].iter().any(|folder| {
        let rest = name.strip_prefix(folder);
        rest.is_some_and(|rest| rest.starts_with('/'))
    })
}

/// The mapped arrays of one scored shard.
#[derive(Debug)]
pub struct ScoredShardFiles {
    terms: Terms,
    rows: usize,
    names: Vec<String>,
    files: Vec<NpyFile>,
}

impl ScoredShardFiles {
    /// The rows, read where they lie.
    pub fn rows(&self) -> Result<ScoredRows<'_>> {
        ScoredRows::new(&self.terms, self.rows, |product| {
            self.file(product.name()).map(|file| Column {
                dtype: file.dtype(),
                bytes: file.data(),
            })
        })
    }

    /// Rows before each sequence of the range, (S+1).
    pub fn row_offsets(&self) -> Result<&[i64]> {
        let file = self.file(ROW_OFFSETS);
        file.ok_or_else(|| anyhow!("expected {ROW_OFFSETS}, found none"))?
            .i64s()
    }

    pub(super) fn file(&self, name: &str) -> Option<&NpyFile> {
        let at = self.names.iter().position(|n| n == name)?;
        self.files.get(at)
    }
}
