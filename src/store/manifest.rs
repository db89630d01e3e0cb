//! The commit record of a scored shard: written last, and naming everything that belongs to it.

use anyhow::{Context, Result, anyhow, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::corpus::check_id;
use super::job::{FORMAT_VERSION, Job, PlannedShard, Terms, check_version};
use crate::canonical::{self, Seal};
use crate::products::{Dtype, Product};

/// Name of the array that says which rows belong to which sequence.
pub const ROW_OFFSETS: &str = "row_offsets";

/// The commit record. The same work gives the same bytes on the same provenance.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    pub format_version: u64,
    pub shard: PlannedShard,
    pub tokens: u64,
    pub rows: u64,
    /// In the order of the job's products, `row_offsets` last.
    pub products: Vec<ProductFile>,
    pub corpus: CorpusHashes,
    pub identity_sha256: String,
    /// What produced the bits.
    pub provenance: Value,
    pub sums: Sums,
}

/// One array file of a scored shard.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProductFile {
    pub name: String,
    /// Relative to the scored set.
    pub path: String,
    pub dtype: String,
    pub shape: Vec<usize>,
    pub layout: Layout,
    pub bytes: u64,
    /// Of the whole file.
    pub sha256: String,
}

/// How rows find their elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// Row r is element r.
    Fixed,
    /// Rows vary in length.
    Csr,
}

/// What was scored: hashes of the range's tokens (int32) and mask (one byte each).
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CorpusHashes {
    pub tokens_sha256: String,
    pub loss_mask_sha256: String,
}

/// Figures a reader can check. `None` where there is no row.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sums {
    /// From `target_logp` where it is stored; else from the top-k, and a target outside it counts
    /// ln(tail / (V - K)).
    pub mean_target_logp: Option<f64>,
    pub mean_tail: Option<f64>,
}

/// An array a shard must have.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct ExpectedArray {
    pub name: &'static str,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
}

/// The arrays of a shard with this many rows and sequences, in the manifest's order.
pub(super) fn expected_arrays(terms: &Terms, rows: usize, sequences: usize) -> Vec<ExpectedArray> {
    let products = terms
        .products
        .iter()
        .map(|&(product, dtype)| ExpectedArray {
            name: product.name(),
            dtype,
            shape: std::iter::once(rows)
                .chain(product.width(terms.k))
                .collect(),
        });
    let row_offsets = ExpectedArray {
        name: ROW_OFFSETS,
        dtype: Dtype::I64,
        shape: vec![sequences + 1],
    };
    products.chain([row_offsets]).collect()
}

/// An array lies in a folder of its own shard and nowhere else.
fn check_path(shard_id: &str, file: &ProductFile) -> Result<()> {
    let parts: Vec<&str> = file.path.split('/').collect();
    let fits = match parts[..] {
        [shard, content, name] => {
            shard == shard_id && check_id(content).is_ok() && name == format!("{}.npy", file.name)
        }
        _ => false,
    };
    ensure!(
        fits,
        "{}: expected a path like {shard_id}/…/{}.npy, found {:?}",
        file.name,
        file.name,
        file.path
    );
    Ok(())
}

/// How the name of every manifest ends.
pub(super) const MANIFEST_END: &str = ".manifest.json";

/// Where a shard's manifest lies.
pub(super) fn manifest_name(shard_id: &str) -> String {
    format!("{shard_id}{MANIFEST_END}")
}

impl Manifest {
    pub(super) fn seal(&self) -> Result<Vec<u8>> {
        Ok(canonical::seal(&serde_json::to_value(self)?))
    }

    /// Reads a manifest and holds it against the job: it is this shard's, of this identity, and
    /// names the arrays the job asks for.
    pub(super) fn parse(bytes: &[u8], job: &Job, planned: &PlannedShard) -> Result<Manifest> {
        let mut document = canonical::unseal(bytes, Seal::Required)?;
        check_version(&document)?;
        document.remove("self_sha256");
        let manifest: Manifest = serde_json::from_value(Value::Object(document))?;
        ensure!(
            manifest.shard == *planned,
            "expected {planned}, as job.json says, found {}",
            manifest.shard
        );
        let identity = job.identity_sha256();
        ensure!(
            manifest.identity_sha256 == identity,
            "expected the identity {identity} of job.json, found {}: the shard belongs to another job",
            manifest.identity_sha256
        );
        manifest.check_products(&job.terms()?).context("products")?;
        Ok(manifest)
    }

    fn check_products(&self, terms: &Terms) -> Result<()> {
        let rows = usize::try_from(self.rows)?;
        let expected = expected_arrays(terms, rows, self.shard.range().len());
        let stated: Vec<_> = self.products.iter().map(|p| p.name.as_str()).collect();
        let names: Vec<_> = expected.iter().map(|e| e.name).collect();
        ensure!(stated == names, "expected {names:?}, found {stated:?}");
        for (file, expected) in self.products.iter().zip(&expected) {
            let name = &file.name;
            ensure!(
                file.dtype == expected.dtype.name(),
                "{name}: expected {}, found {}",
                expected.dtype.name(),
                file.dtype
            );
            ensure!(
                file.shape == expected.shape,
                "{name}: expected shape {:?}, found {:?}",
                expected.shape,
                file.shape
            );
            ensure!(
                file.layout == Layout::Fixed,
                "{name}: expected layout fixed"
            );
            check_path(&self.shard.id, file)?;
        }
        Ok(())
    }

    /// The entry of one array.
    pub fn product(&self, name: &str) -> Result<&ProductFile> {
        let found = self.products.iter().find(|p| p.name == name);
        found.ok_or_else(|| anyhow!("{}: expected {name}, found none", self.shard.id))
    }

    /// Whether an extra product was stored.
    pub fn has(&self, product: Product) -> bool {
        self.product(product.name()).is_ok()
    }

    /// An empty record for `planned`.
    pub(super) fn new(job: &Job, planned: &PlannedShard, provenance: &Value) -> Manifest {
        Manifest {
            format_version: FORMAT_VERSION,
            shard: planned.clone(),
            tokens: 0,
            rows: 0,
            products: Vec::new(),
            corpus: CorpusHashes {
                tokens_sha256: String::new(),
                loss_mask_sha256: String::new(),
            },
            identity_sha256: job.identity_sha256(),
            provenance: provenance.clone(),
            sums: Sums {
                mean_target_logp: None,
                mean_tail: None,
            },
        }
    }
}
