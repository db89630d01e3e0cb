//! What a scored set will weigh, before there is one: the real headers and documents, made with
//! stand-ins of the right length where only the run knows the content.

use anyhow::Result;
use serde_json::Value;

use super::job::{Job, PlannedShard};
use super::manifest::{Layout, Manifest, ProductFile, Sums, expected_arrays, manifest_name};
use super::npy;
use crate::canonical;

/// As long as any figure that stands in a manifest is likely to be.
const LONG_FIGURE: f64 = -1.234_567_890_123_456_7;
/// As the folder of a shard's arrays is called.
const CONTENT: &str = "0000000000000000";

/// Bytes of files, by kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SetBytes {
    /// Arrays of rows, headers included.
    pub arrays: u64,
    /// row_offsets, manifests and job.json.
    pub records: u64,
}

impl SetBytes {
    pub fn total(&self) -> u64 {
        self.arrays + self.records
    }
}

/// How much a planned shard holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ShardCounts {
    pub tokens: u64,
    pub rows: u64,
}

impl Job {
    /// Bytes of the whole set; `counts` are those of each shard of the plan.
    ///
    /// # Errors
    /// An identity that no scored set could have.
    pub fn predicted_bytes(&self, counts: &[ShardCounts], provenance: &Value) -> Result<SetBytes> {
        let mut bytes = SetBytes {
            arrays: 0,
            records: self.seal().len() as u64,
        };
        for (planned, counts) in self.plan.iter().zip(counts) {
            let shard = self.predicted_shard(planned, *counts, provenance)?;
            bytes.arrays += shard.arrays;
            bytes.records += shard.records;
        }
        Ok(bytes)
    }

    fn predicted_shard(
        &self,
        planned: &PlannedShard,
        counts: ShardCounts,
        provenance: &Value,
    ) -> Result<SetBytes> {
        let rows = usize::try_from(counts.rows)?;
        let expected = expected_arrays(&self.terms()?, rows, planned.range().len());
        let hash = canonical::sha256_hex(b"");
        let mut manifest = Manifest::new(self, planned, provenance);
        (manifest.tokens, manifest.rows) = (counts.tokens, counts.rows);
        manifest.corpus.tokens_sha256.clone_from(&hash);
        manifest.corpus.loss_mask_sha256.clone_from(&hash);
        manifest.sums = Sums {
            mean_target_logp: Some(LONG_FIGURE),
            mean_tail: Some(-LONG_FIGURE / 10.0),
        };
        for array in &expected {
            let elements: usize = array.shape.iter().product();
            let header = npy::header_bytes(array.dtype, &array.shape).len();
            manifest.products.push(ProductFile {
                name: array.name.into(),
                path: format!("{}/{CONTENT}/{}.npy", planned.id, array.name),
                dtype: array.dtype.name().into(),
                shape: array.shape.clone(),
                layout: Layout::Fixed,
                bytes: (header + elements * array.dtype.size()) as u64,
                sha256: hash.clone(),
            });
        }
        let (offsets, arrays) = manifest.products.split_last().map_or((0, 0), |(last, of)| {
            (last.bytes, of.iter().map(|p| p.bytes).sum())
        });
        Ok(SetBytes {
            arrays,
            records: offsets + manifest.seal()?.len() as u64,
        })
    }
}

impl super::ScoredSet {
    /// Bytes that the files of committed shards and job.json take.
    ///
    /// # Errors
    /// A manifest that is damaged.
    pub fn committed_bytes(&self) -> Result<u64> {
        let mut bytes = self.job.seal().len() as u64;
        for manifest in self.manifests()?.into_iter().flatten() {
            bytes += manifest.products.iter().map(|p| p.bytes).sum::<u64>();
            let name = manifest_name(&manifest.shard.id);
            let found = self.store.read(&name)?;
            bytes += found.map_or(0, |record| record.len() as u64);
        }
        Ok(bytes)
    }
}
