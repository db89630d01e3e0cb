//! The proof that a scored set is whole, undamaged, aligned and of one teacher.
//!
//! Every array is mapped and walked; nothing the size of an array is allocated.

use std::collections::BTreeMap;

use anyhow::{Result, anyhow};
use rayon::prelude::*;
use serde_json::Value;

use super::check::first_bad_row;
use super::commit::{check_range, corpus_hashes, row_offsets, token_count, wrong_target};
use super::job::identity;
use super::manifest::{ROW_OFFSETS, manifest_name};
use super::rows::Column;
use super::shift::{Alignment, ShiftTest};
use super::{CorpusReader, CorpusShardFiles, Manifest, PlannedShard, ScoredSet, ScoredShardFiles};
use crate::canonical;
use crate::products::Product;

/// Sums may differ in the last digits between machines, whose logarithms do.
const SUM_TOLERANCE: f64 = 1e-9;

/// Whoever watches a verification.
pub trait Watch: Sync {
    /// A shard with this many rows is done.
    fn shard_done(&self, rows: u64);

    /// Whether to give up.
    fn stopped(&self) -> bool;
}

/// What was found.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Shards of the plan.
    pub planned: usize,
    /// Shards that are committed and undamaged.
    pub sound: usize,
    /// Rows and tokens of the sound shards.
    pub rows: u64,
    pub tokens: u64,
    /// Ids of the shards that have no manifest.
    pub missing: Vec<String>,
    /// Each names a shard that scoring again repairs.
    pub damaged: Vec<Damage>,
    /// What is wrong with the corpus or the job, each naming a file; scoring again is no cure.
    pub faults: Vec<String>,
    /// What produced the bits, and of how many shards.
    pub provenances: Vec<(Value, usize)>,
    pub shift: ShiftTest,
    /// Over the rows of the sound shards.
    pub mean_target_logp: Option<f64>,
    pub mean_tail: Option<f64>,
    pub stopped: bool,
}

/// One thing that is wrong with a committed shard.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Damage {
    pub shard: String,
    /// Names the file.
    pub what: String,
}

impl Report {
    /// Everything there, undamaged, and not shown to be misaligned.
    pub fn is_sound(&self) -> bool {
        let nothing_wrong = self.damaged.is_empty() && self.faults.is_empty();
        nothing_wrong
            && self.missing.is_empty()
            && !self.stopped
            && !matches!(self.shift.alignment(), Alignment::Shifted(_))
    }

    /// The damaged shards, each once.
    pub fn damaged_shards(&self) -> Vec<&str> {
        let mut shards: Vec<_> = self.damaged.iter().map(|d| d.shard.as_str()).collect();
        shards.dedup();
        shards
    }
}

/// How one shard of the plan fared.
enum Checked {
    Missing,
    Damaged(Vec<String>),
    Sound(Box<Manifest>, ShiftTest),
    Skipped,
}

/// Verifies every shard of `set` against `corpus`.
pub fn verify(set: &ScoredSet, corpus: &CorpusReader, watch: &dyn Watch) -> Report {
    let mut report = Report {
        planned: set.job().plan.len(),
        faults: check_corpus(set, corpus),
        ..Report::default()
    };
    let corpus_is_sound = report.faults.is_empty();
    let checked: Vec<Checked> = set
        .job()
        .plan
        .par_iter()
        .map(|planned| {
            if watch.stopped() {
                return Checked::Skipped;
            }
            let checked = check_shard(set, corpus_is_sound.then_some(corpus), planned);
            let rows = match &checked {
                Checked::Sound(manifest, _) => manifest.rows,
                _ => 0,
            };
            watch.shard_done(rows);
            checked
        })
        .collect();
    for (planned, checked) in set.job().plan.iter().zip(checked) {
        tally(&mut report, &planned.id, checked);
    }
    finish_means(&mut report);
    report
}

fn tally(report: &mut Report, id: &str, checked: Checked) {
    match checked {
        Checked::Missing => report.missing.push(id.to_owned()),
        Checked::Skipped => report.stopped = true,
        Checked::Damaged(what) => report.damaged.extend(what.into_iter().map(|what| Damage {
            shard: id.to_owned(),
            what,
        })),
        Checked::Sound(manifest, shift) => {
            report.sound += 1;
            report.rows += manifest.rows;
            report.tokens += manifest.tokens;
            report.shift.merge(&shift);
            let rows = manifest.rows as f64;
            let sums = manifest.sums;
            for (total, mean) in [
                (&mut report.mean_target_logp, sums.mean_target_logp),
                (&mut report.mean_tail, sums.mean_tail),
            ] {
                *total.get_or_insert(0.0) += mean.unwrap_or(0.0) * rows;
            }
            let known = report.provenances.iter_mut();
            match known.into_iter().find(|(p, _)| *p == manifest.provenance) {
                Some((_, shards)) => *shards += 1,
                None => report.provenances.push((manifest.provenance, 1)),
            }
        }
    }
}

fn finish_means(report: &mut Report) {
    let rows = report.rows as f64;
    for total in [&mut report.mean_target_logp, &mut report.mean_tail] {
        *total = total.filter(|_| rows > 0.0).map(|sum| sum / rows);
    }
}

/// Is the corpus whole, and the one the job names? Does the plan cover it?
fn check_corpus(set: &ScoredSet, corpus: &CorpusReader) -> Vec<String> {
    let mut faults: Vec<String> = (0..corpus.shards().len())
        .into_par_iter()
        .flat_map_iter(|shard| {
            let opened = corpus.shard(shard).and_then(|files| files.view().map(drop));
            let opened = opened.err().map(|e| format!("{e:#}"));
            corpus.check_hashes(shard).into_iter().chain(opened)
        })
        .collect();
    faults.extend(check_identity(set, corpus));
    faults.extend(check_coverage(&set.job().plan, corpus));
    faults
}

fn check_identity(set: &ScoredSet, corpus: &CorpusReader) -> Vec<String> {
    let job = set.job();
    let place = corpus.place("corpus.json");
    let fingerprint = match corpus.fingerprint() {
        Ok(fingerprint) => fingerprint,
        Err(e) => return vec![format!("{e:#}")],
    };
    let found = [
        (identity::CORPUS, Some(fingerprint.as_str())),
        (identity::TOKENIZER, corpus.tokenizer_fingerprint()),
        (identity::TEMPLATE, corpus.template_fingerprint()),
    ];
    found
        .into_iter()
        .filter_map(|(key, found)| {
            let stated = job.identity_text(key)?;
            (found != Some(stated)).then(|| {
                format!(
                    "{place}: expected the {key} {stated} of job.json, found {}: it is another corpus, or it was changed",
                    found.unwrap_or("none")
                )
            })
        })
        .collect()
}

/// Every sequence of the corpus in exactly one scored shard.
fn check_coverage(plan: &[PlannedShard], corpus: &CorpusReader) -> Vec<String> {
    let mut ranges: BTreeMap<&str, Vec<(u64, u64)>> = BTreeMap::new();
    for planned in plan {
        let range = (planned.first_sequence, planned.end_sequence);
        ranges.entry(&planned.corpus_shard).or_default().push(range);
    }
    let mut faults = Vec::new();
    for (index, shard) in corpus.shards().iter().enumerate() {
        let mut pieces = ranges.remove(shard.id.as_str()).unwrap_or_default();
        pieces.sort();
        let end = pieces
            .iter()
            .try_fold(0, |end, &(first, next)| (first == end).then_some(next));
        let sequences = corpus.sequences_of(index);
        if end != Some(sequences) {
            faults.push(format!(
                "job.json: expected a plan that covers the {sequences} sequences of {} once, found {pieces:?}",
                shard.id
            ));
        }
    }
    faults.extend(ranges.into_keys().map(|id| {
        format!("job.json: expected a plan over the corpus's shards, found {id:?}, which it does not have")
    }));
    faults
}

fn check_shard(set: &ScoredSet, corpus: Option<&CorpusReader>, planned: &PlannedShard) -> Checked {
    let manifest = match set.manifest(planned) {
        Ok(None) => return Checked::Missing,
        Ok(Some(manifest)) => manifest,
        Err(e) => return Checked::Damaged(vec![format!("{e:#}")]),
    };
    let mut damage = check_files(set, &manifest);
    if !damage.is_empty() {
        return Checked::Damaged(damage);
    }
    match check_contents(set, corpus, &manifest, &mut damage) {
        Ok(shift) if damage.is_empty() => Checked::Sound(Box::new(manifest), shift),
        Ok(_) => Checked::Damaged(damage),
        Err(e) => {
            damage.push(format!("{e:#}"));
            Checked::Damaged(damage)
        }
    }
}

/// Sizes, dtypes, shapes and hashes.
fn check_files(set: &ScoredSet, manifest: &Manifest) -> Vec<String> {
    let products = manifest.products.par_iter();
    products
        .filter_map(|product| {
            let file = match set.array(product) {
                Ok(file) => file,
                Err(e) => return Some(format!("{e:#}")),
            };
            let found = canonical::sha256_hex(file.file_bytes());
            (found != product.sha256).then(|| {
                format!(
                    "{}: expected sha256 {}, found {found}: the file was changed or damaged",
                    file.place(),
                    product.sha256
                )
            })
        })
        .collect()
}

/// The rows themselves, and the rows against the corpus.
fn check_contents(
    set: &ScoredSet,
    corpus: Option<&CorpusReader>,
    manifest: &Manifest,
    damage: &mut Vec<String>,
) -> Result<ShiftTest> {
    let shard = set.shard(manifest)?;
    let rows = shard.rows()?;
    if let Some(bad) = first_bad_row(&rows) {
        let path = &manifest.product(bad.product.name())?.path;
        damage.push(format!(
            "{}: row {}: {}",
            set.place(path),
            bad.row,
            bad.what
        ));
    }
    let place = set.place(&manifest_name(&manifest.shard.id));
    let found = rows.sums();
    for (what, stated, found) in [
        (
            "mean_target_logp",
            manifest.sums.mean_target_logp,
            found.mean_target_logp,
        ),
        ("mean_tail", manifest.sums.mean_tail, found.mean_tail),
    ] {
        if !same_sum(stated, found) {
            damage.push(format!(
                "{place}: expected {what} {found:?}, found {stated:?}"
            ));
        }
    }
    let mut shift = ShiftTest::default();
    if let Some(corpus) = corpus {
        let index = corpus
            .shard_index(&manifest.shard.corpus_shard)
            .ok_or_else(|| anyhow!("{place}: expected a shard of the corpus"))?;
        let files = corpus.shard(index)?;
        against_corpus(set, manifest, &shard, &files, damage, &mut shift)?;
    }
    Ok(shift)
}

fn same_sum(stated: Option<f64>, found: Option<f64>) -> bool {
    match (stated, found) {
        (Some(a), Some(b)) => (a - b).abs() <= SUM_TOLERANCE * a.abs().max(1.0),
        (a, b) => a == b,
    }
}

fn against_corpus(
    set: &ScoredSet,
    manifest: &Manifest,
    shard: &ScoredShardFiles,
    corpus: &CorpusShardFiles,
    damage: &mut Vec<String>,
    shift: &mut ShiftTest,
) -> Result<()> {
    let planned = &manifest.shard;
    let view = corpus.view()?;
    check_range(planned, &view)?;
    let place = set.place(&manifest_name(&planned.id));
    let expected_offsets = row_offsets(planned, &view);
    let expected = (
        token_count(planned, &view),
        expected_offsets.last().copied().unwrap_or(0) as u64,
        corpus_hashes(planned, &view),
    );
    let found = (manifest.tokens, manifest.rows, manifest.corpus.clone());
    if expected != found {
        damage.push(format!(
            "{place}: expected tokens, rows and hashes of the corpus range {expected:?}, found {found:?}"
        ));
        return Ok(());
    }
    if expected_offsets != shard.row_offsets()? {
        let path = &manifest.product(ROW_OFFSETS)?.path;
        damage.push(format!(
            "{}: expected the rows of each sequence as the corpus has them, found others",
            set.place(path)
        ));
        return Ok(());
    }
    let targets = shard.file(Product::Targets.name());
    let targets = targets.ok_or_else(|| anyhow!("{place}: expected targets"))?;
    let column = Column {
        dtype: targets.dtype(),
        bytes: targets.data(),
    };
    match wrong_target(planned, &view, &expected_offsets, column) {
        Some(wrong) => damage.push(format!("{}: {wrong}", targets.place())),
        None => shift.add_shard(&shard.rows()?, &view, planned, &expected_offsets),
    }
    Ok(())
}
