//! One shard's way into a scored set: checked, hashed, written, and named by its manifest last.
//!
//! Architecture invariant: the manifest is created once and never replaced, and only after every
//! array it names is durable. So a manifest that is there names arrays that are whole.

use anyhow::{Context, Result, anyhow, bail, ensure};
use rayon::prelude::*;
use serde_json::{Value, json};

use super::bytes::as_bytes;
use super::job::{PlannedShard, Terms};
use super::manifest::{
    CorpusHashes, ExpectedArray, Layout, Manifest, ProductFile, ROW_OFFSETS, expected_arrays,
    manifest_name,
};
use super::rows::{Column, ScoredRows};
use super::{Created, FileParts, ScoredSet, npy};
use crate::canonical;
use crate::corpus::{CorpusShard, Row};
use crate::products::{Dtype, ProductArray};
use crate::store::CorpusShardFiles;

/// Digits of the folder name that stands for a shard's contents.
const CONTENT_DIGITS: usize = 16;

/// How a commit ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Committed {
    Written,
    /// Another worker was first; its shard stands.
    AlreadyThere,
}

/// Everything a commit writes but the manifest.
struct Staged {
    manifest: Manifest,
    files: Vec<StagedFile>,
}

struct StagedFile {
    header: Vec<u8>,
    data: Vec<u8>,
}

impl ScoredSet {
    /// Commits the arrays of `planned`, in the order of the job's products. When this returns
    /// the shard survives a power loss.
    ///
    /// # Errors
    /// Arrays that are not what the job asks for, targets that are not the corpus's, a value
    /// that is not finite, another run's different arrays of the same provenance, or the disk.
    pub fn commit(
        &self,
        planned: &PlannedShard,
        corpus: &CorpusShardFiles,
        arrays: Vec<ProductArray>,
        provenance: &Value,
    ) -> Result<Committed> {
        let staged = self
            .stage(planned, corpus, arrays, provenance)
            .with_context(|| planned.id.clone())?;
        let ours = &staged.manifest;
        if self.manifest(planned)?.is_some() {
            return self.yield_to_winner(ours);
        }
        if let Err(error) = self.put_arrays(&staged) {
            return match self.manifest(planned) {
                // A winner's `verify --clean` may have removed what we were writing.
                Ok(Some(_)) => self.yield_to_winner(ours),
                _ => Err(error),
            };
        }
        match self
            .store
            .create(&manifest_name(&planned.id), &ours.seal()?)?
        {
            Created::New => Ok(Committed::Written),
            Created::WasThere => self.yield_to_winner(ours),
        }
    }

    fn stage(
        &self,
        planned: &PlannedShard,
        corpus: &CorpusShardFiles,
        mut arrays: Vec<ProductArray>,
        provenance: &Value,
    ) -> Result<Staged> {
        ensure!(
            self.job.plan.contains(planned),
            "expected a shard of the plan, found {planned}"
        );
        let facts = RangeFacts::new(planned, corpus)?;
        let expected = expected_arrays(&self.terms, facts.rows(), planned.range().len());
        check_arrays(&expected, &arrays)?;
        check_targets(&facts, planned, &arrays)?;
        let mut manifest = Manifest::new(&self.job, planned, provenance);
        manifest.tokens = facts.tokens;
        manifest.rows = facts.rows() as u64;
        manifest.corpus = facts.hashes.clone();
        manifest.sums = scored_rows(&self.terms, facts.rows(), &arrays)?.sums();
        let mut files: Vec<StagedFile> = arrays
            .drain(..)
            .map(|array| StagedFile {
                header: npy::header_bytes(array.dtype, &array.shape),
                data: array.bytes,
            })
            .collect();
        files.push(StagedFile {
            header: npy::header_bytes(Dtype::I64, &[facts.row_offsets.len()]),
            data: as_bytes(&facts.row_offsets).to_vec(),
        });
        manifest.products = product_files(&planned.id, &expected, &files);
        Ok(Staged { manifest, files })
    }

    fn put_arrays(&self, staged: &Staged) -> Result<()> {
        let parts: Vec<[&[u8]; 2]> = staged
            .files
            .iter()
            .map(|file| [&file.header[..], &file.data[..]])
            .collect();
        let files: Vec<FileParts> = staged
            .manifest
            .products
            .iter()
            .zip(&parts)
            .map(|(product, parts)| FileParts {
                name: &product.path,
                parts,
            })
            .collect();
        self.store.put(&files)
    }

    /// Another worker committed the shard first: its manifest stands, ours is not written. What
    /// we wrote is the same arrays, or goes away.
    fn yield_to_winner(&self, ours: &Manifest) -> Result<Committed> {
        let id = &ours.shard.id;
        let winner = self
            .manifest(&ours.shard)?
            .ok_or_else(|| anyhow!("{id}: its manifest was there and is gone; run score again"))?;
        if winner.products == ours.products {
            return Ok(Committed::AlreadyThere);
        }
        for product in &ours.products {
            // Best effort: what stays is a leftover that `verify` names.
            let _ = self.store.remove(&product.path);
        }
        let differing: Vec<_> = ours
            .products
            .iter()
            .zip(&winner.products)
            .filter(|(a, b)| a.sha256 != b.sha256)
            .map(|(a, _)| a.name.as_str())
            .collect();
        if winner.provenance == ours.provenance {
            bail!(
                "{id}: expected the arrays of {}, which another run committed on the same device, libraries and build, found other bytes in {}; one of the two machines computes wrongly",
                self.store.place(&manifest_name(id)),
                differing.join(", ")
            );
        }
        Ok(Committed::AlreadyThere)
    }
}

/// What the corpus says about a range of sequences.
struct RangeFacts<'a> {
    view: CorpusShard<'a>,
    tokens: u64,
    row_offsets: Vec<i64>, // (S+1)
    hashes: CorpusHashes,
}

impl<'a> RangeFacts<'a> {
    fn new(planned: &PlannedShard, corpus: &'a CorpusShardFiles) -> Result<RangeFacts<'a>> {
        ensure!(
            planned.corpus_shard == corpus.id(),
            "expected the corpus shard {}, found {}",
            planned.corpus_shard,
            corpus.id()
        );
        let view = corpus.view()?;
        check_range(planned, &view)?;
        let row_offsets = row_offsets(planned, &view);
        let span = token_span(planned, &view);
        Ok(RangeFacts {
            tokens: span.len() as u64,
            row_offsets,
            hashes: corpus_hashes(planned, &view),
            view,
        })
    }

    fn rows(&self) -> usize {
        self.row_offsets.last().map_or(0, |&rows| rows as usize)
    }
}

/// # Errors
/// The range reaches beyond the corpus shard.
pub(super) fn check_range(planned: &PlannedShard, view: &CorpusShard) -> Result<()> {
    ensure!(
        planned.end_sequence <= view.sequences() as u64,
        "expected {} to hold the range of {planned}, found {} sequences",
        planned.corpus_shard,
        view.sequences()
    );
    Ok(())
}

fn token_span(planned: &PlannedShard, view: &CorpusShard) -> std::ops::Range<usize> {
    let range = planned.range();
    view.offsets()[range.start] as usize..view.offsets()[range.end] as usize
}

/// Tokens of the range.
pub(super) fn token_count(planned: &PlannedShard, view: &CorpusShard) -> u64 {
    token_span(planned, view).len() as u64
}

pub(super) fn corpus_hashes(planned: &PlannedShard, view: &CorpusShard) -> CorpusHashes {
    let span = token_span(planned, view);
    let (tokens, mask) = rayon::join(
        || canonical::sha256_hex(as_bytes(&view.tokens()[span.clone()])),
        || canonical::sha256_hex(&view.loss_mask()[span.clone()]),
    );
    CorpusHashes {
        tokens_sha256: tokens,
        loss_mask_sha256: mask,
    }
}

/// Rows before each sequence of the range, and all of them, (S+1).
pub(super) fn row_offsets(planned: &PlannedShard, view: &CorpusShard) -> Vec<i64> {
    let counts: Vec<i64> = planned
        .range()
        .into_par_iter()
        .map(|s| view.sequence(s).rows().count() as i64)
        .collect();
    let mut rows = 0;
    let ends = counts.iter().map(|count| {
        rows += count;
        rows
    });
    std::iter::once(0).chain(ends).collect()
}

fn check_arrays(expected: &[ExpectedArray], arrays: &[ProductArray]) -> Result<()> {
    let names: Vec<_> = expected.iter().map(|e| e.name).collect();
    let names: Vec<_> = names.into_iter().filter(|n| *n != ROW_OFFSETS).collect();
    let found: Vec<_> = arrays.iter().map(|a| a.product.name()).collect();
    ensure!(
        names == found,
        "expected the products {names:?}, found {found:?}"
    );
    for (expected, array) in expected.iter().zip(arrays) {
        let (name, dtype) = (expected.name, expected.dtype);
        let elements: usize = expected.shape.iter().product();
        ensure!(
            array.dtype == dtype && array.shape == expected.shape,
            "{name}: expected {} {:?}, found {} {:?}",
            dtype.name(),
            expected.shape,
            array.dtype.name(),
            array.shape
        );
        ensure!(
            array.bytes.len() == elements * dtype.size(),
            "{name}: expected {} bytes, found {}",
            elements * dtype.size(),
            array.bytes.len()
        );
        if let Some(at) = column(array).first_non_finite() {
            let width = expected.shape.get(1).copied().unwrap_or(1);
            bail!(
                "{name}: expected finite values, found {} at row {}",
                column(array).f32(at),
                at / width
            );
        }
    }
    Ok(())
}

fn check_targets(
    facts: &RangeFacts,
    planned: &PlannedShard,
    arrays: &[ProductArray],
) -> Result<()> {
    let Some(targets) = arrays.first() else {
        bail!("expected targets, found no arrays");
    };
    match wrong_target(planned, &facts.view, &facts.row_offsets, column(targets)) {
        Some(wrong) => bail!("{wrong}"),
        None => Ok(()),
    }
}

/// The first row whose stored target is not the corpus's, in words.
pub(super) fn wrong_target(
    planned: &PlannedShard,
    view: &CorpusShard,
    row_offsets: &[i64],
    targets: Column,
) -> Option<String> {
    let first = planned.range().start;
    planned.range().into_par_iter().find_map_first(|s| {
        let first_row = row_offsets[s - first] as usize;
        let differs = |(i, row): &(usize, Row)| targets.i32(first_row + i) != row.target;
        let (i, row) = view.sequence(s).rows().enumerate().find(differs)?;
        Some(format!(
            "targets: expected token {} of the corpus at row {} (sequence {s} of {}, position {}), found {}",
            row.target,
            first_row + i,
            planned.corpus_shard,
            row.position,
            targets.i32(first_row + i)
        ))
    })
}

fn column(array: &ProductArray) -> Column<'_> {
    Column {
        dtype: array.dtype,
        bytes: &array.bytes,
    }
}

fn scored_rows<'a>(
    terms: &Terms,
    rows: usize,
    arrays: &'a [ProductArray],
) -> Result<ScoredRows<'a>> {
    ScoredRows::new(terms, rows, |product| {
        arrays.iter().find(|a| a.product == product).map(column)
    })
}

/// Hashes the files, all at once, and gives them their names.
fn product_files(
    shard_id: &str,
    expected: &[ExpectedArray],
    files: &[StagedFile],
) -> Vec<ProductFile> {
    let hashes: Vec<String> = files
        .par_iter()
        .map(|file| canonical::sha256_hex_of(&[&file.header, &file.data]))
        .collect();
    let named: Vec<_> = expected.iter().map(|e| e.name).zip(&hashes).collect();
    let content = canonical::fingerprint(&json!(named));
    let content = &content[..CONTENT_DIGITS];
    expected
        .iter()
        .zip(files)
        .zip(&hashes)
        .map(|((expected, file), sha256)| ProductFile {
            name: expected.name.into(),
            path: format!("{shard_id}/{content}/{}.npy", expected.name),
            dtype: expected.dtype.name().into(),
            shape: expected.shape.clone(),
            layout: Layout::Fixed,
            bytes: (file.header.len() + file.data.len()) as u64,
            sha256: sha256.clone(),
        })
        .collect()
}
