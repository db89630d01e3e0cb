//! `job.json`: what a scored set means and how it is cut, fixed before the first commit.

use anyhow::{Context, Result, anyhow, bail, ensure};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::CorpusReader;
use super::corpus::check_id;
use crate::canonical::{self, Seal};
use crate::products::{Dtype, Product, ProductPlan};

pub(super) const FORMAT_VERSION: u64 = 1;

/// Keys of the identity that the store itself reads; the rest is the caller's.
pub mod identity {
    /// Ids kept per row.
    pub const K: &str = "k";
    /// Stored products and their dtypes; see [`super::products_value`].
    pub const PRODUCTS: &str = "products";
    /// Head rows the softmax runs over: ids are below it.
    pub const VOCAB_SCORED: &str = "vocab_scored";
    /// `CorpusReader::fingerprint`.
    pub const CORPUS: &str = "corpus_fingerprint";
    pub const TOKENIZER: &str = "tokenizer_fingerprint";
    pub const TEMPLATE: &str = "template_fingerprint";
    pub const TEACHER: &str = "teacher_fingerprint";
}

/// What a run is, to itself and to every run that joins it.
#[derive(Clone, PartialEq, Debug)]
pub struct Job {
    /// All that defines what the numbers mean. Must match across runs.
    pub identity: Map<String, Value>,
    /// The scored shards, in corpus order. Must match across runs.
    pub plan: Vec<PlannedShard>,
    /// Where the corpus was. May differ.
    pub corpus_path: String,
}

/// A scored shard: a range of sequences of one corpus shard.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlannedShard {
    pub id: String,
    pub corpus_shard: String,
    /// Counted inside the corpus shard.
    pub first_sequence: u64,
    pub end_sequence: u64,
}

impl PlannedShard {
    pub fn sequences(&self) -> u64 {
        self.end_sequence.saturating_sub(self.first_sequence)
    }

    /// The sequences, inside the corpus shard.
    pub fn range(&self) -> std::ops::Range<usize> {
        self.first_sequence as usize..self.end_sequence as usize
    }
}

/// Cuts a corpus into scored shards: its own shards, or pieces of them of about
/// `shard_tokens` tokens. A piece never spans two corpus shards, and a sequence is never cut.
pub fn plan_shards(
    corpus: &CorpusReader,
    shard_tokens: Option<usize>,
) -> Result<Vec<PlannedShard>> {
    let pieces: Vec<Vec<PlannedShard>> = (0..corpus.shards().len())
        .into_par_iter()
        .map(|shard| cut(corpus, shard, shard_tokens))
        .collect::<Result<_>>()?;
    let mut plan: Vec<_> = pieces.into_iter().flatten().collect();
    for (i, piece) in plan.iter_mut().enumerate() {
        piece.id = format!("shard-{i:06}");
    }
    Ok(plan)
}

fn cut(
    corpus: &CorpusReader,
    shard: usize,
    shard_tokens: Option<usize>,
) -> Result<Vec<PlannedShard>> {
    let piece = |first: usize, end: usize| PlannedShard {
        id: String::new(),
        corpus_shard: corpus.shards()[shard].id.clone(),
        first_sequence: first as u64,
        end_sequence: end as u64,
    };
    let sequences = corpus.sequences_of(shard) as usize;
    let Some(shard_tokens) = shard_tokens else {
        return Ok(vec![piece(0, sequences)]);
    };
    let files = corpus.shard(shard)?;
    let view = files.view()?;
    let (mut pieces, mut first) = (Vec::new(), 0);
    for s in 0..sequences {
        let tokens = view.offsets()[s + 1] - view.offsets()[first];
        if tokens as usize >= shard_tokens || s + 1 == sequences {
            pieces.push(piece(first, s + 1));
            first = s + 1;
        }
    }
    if pieces.is_empty() {
        pieces.push(piece(0, 0));
    }
    Ok(pieces)
}

/// The identity's entry for what is stored: each product's dtype.
pub fn products_value(plan: &ProductPlan) -> Value {
    let entries = plan
        .products()
        .map(|p| (p.name().to_owned(), p.dtype(plan.logp_dtype).name().into()));
    Value::Object(entries.collect())
}

/// What the store reads out of an identity.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Terms {
    pub k: usize,
    pub vocab_scored: usize,
    /// Base products first, then the others, each in its order.
    pub products: Vec<(Product, Dtype)>,
}

impl Terms {
    fn new(identity: &Map<String, Value>) -> Result<Terms> {
        let size = |key: &str| {
            let value = identity.get(key).and_then(Value::as_u64);
            value
                .filter(|n| (1..=i32::MAX as u64).contains(n))
                .map(|n| n as usize)
                .ok_or_else(|| anyhow!("identity: expected {key}, a number from 1"))
        };
        let stored = identity
            .get(identity::PRODUCTS)
            .and_then(Value::as_object)
            .ok_or_else(|| anyhow!("identity: expected {}", identity::PRODUCTS))?;
        let mut products = Vec::new();
        for product in Product::BASE.into_iter().chain(Product::EXTRA) {
            match stored.get(product.name()) {
                Some(dtype) => products.push((product, product_dtype(product, dtype)?)),
                None if Product::BASE.contains(&product) => {
                    bail!("identity: expected the product {}", product.name())
                }
                None => {}
            }
        }
        ensure!(
            products.len() == stored.len(),
            "identity: expected known products, found {:?}",
            stored.keys().collect::<Vec<_>>()
        );
        Ok(Terms {
            k: size(identity::K)?,
            vocab_scored: size(identity::VOCAB_SCORED)?,
            products,
        })
    }
}

fn product_dtype(product: Product, stated: &Value) -> Result<Dtype> {
    let dtype = stated.as_str().and_then(Dtype::from_name);
    let allowed = |d: &Dtype| *d == product.dtype(Dtype::F16) || *d == product.dtype(Dtype::F32);
    dtype.filter(allowed).ok_or_else(|| {
        anyhow!(
            "identity: expected a dtype of {}, found {stated}",
            product.name()
        )
    })
}

impl Job {
    pub fn terms(&self) -> Result<Terms> {
        Terms::new(&self.identity)
    }

    /// The hash every manifest carries.
    pub fn identity_sha256(&self) -> String {
        canonical::fingerprint(&Value::Object(self.identity.clone()))
    }

    /// The identity's text under `key`, where it is one.
    pub fn identity_text(&self, key: &str) -> Option<&str> {
        self.identity.get(key).and_then(Value::as_str)
    }

    pub(super) fn seal(&self) -> Vec<u8> {
        canonical::seal(&json!({
            "format_version": FORMAT_VERSION,
            "identity": self.identity,
            "identity_sha256": self.identity_sha256(),
            "plan": self.plan,
            "corpus_path": self.corpus_path,
        }))
    }

    pub(super) fn parse(bytes: &[u8]) -> Result<Job> {
        let mut document = canonical::unseal(bytes, Seal::Required)?;
        check_version(&document)?;
        let mut take = |key: &str| {
            document
                .remove(key)
                .ok_or_else(|| anyhow!("expected {key}, found none"))
        };
        let job = Job {
            identity: serde_json::from_value(take("identity")?).context("identity")?,
            plan: serde_json::from_value(take("plan")?).context("plan")?,
            corpus_path: serde_json::from_value(take("corpus_path")?).context("corpus_path")?,
        };
        job.check()?;
        Ok(job)
    }

    /// What must hold before anything is stored under this job.
    pub(super) fn check(&self) -> Result<()> {
        self.terms()?;
        let mut ids = std::collections::BTreeSet::new();
        for shard in &self.plan {
            check_id(&shard.id).context("plan")?;
            check_id(&shard.corpus_shard).context("plan")?;
            ensure!(
                ids.insert(&shard.id),
                "plan: expected each shard once, found {} twice",
                shard.id
            );
            ensure!(
                shard.first_sequence <= shard.end_sequence,
                "plan: {}: expected first_sequence <= end_sequence, found {} and {}",
                shard.id,
                shard.first_sequence,
                shard.end_sequence
            );
        }
        Ok(())
    }

    /// Refuses another job, field by field.
    pub(super) fn expect_same(&self, run: &Job) -> Result<()> {
        let mut differences = Vec::new();
        let keys: std::collections::BTreeSet<_> =
            self.identity.keys().chain(run.identity.keys()).collect();
        for key in keys {
            let (stored, asked) = (self.identity.get(key), run.identity.get(key));
            if stored != asked {
                differences.push(format!(
                    "{key}: it has {}, this run {}",
                    text(stored),
                    text(asked)
                ));
            }
        }
        if differences.is_empty() {
            differences.extend(self.plan_difference(run));
        }
        ensure!(
            differences.is_empty(),
            "the scored set was begun as another job:\n  {}\ngive another --out, or the options and inputs it was begun with",
            differences.join("\n  ")
        );
        Ok(())
    }

    fn plan_difference(&self, run: &Job) -> Option<String> {
        if self.plan.len() != run.plan.len() {
            return Some(format!(
                "shard plan: it has {} shards, this run {} (shard-tokens or the corpus's shards differ)",
                self.plan.len(),
                run.plan.len()
            ));
        }
        let (stored, asked) = self.plan.iter().zip(&run.plan).find(|(a, b)| a != b)?;
        Some(format!(
            "shard plan (shard-tokens): it has {stored}, this run {asked}"
        ))
    }
}

impl std::fmt::Display for PlannedShard {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(
            f,
            "{} = sequences {} to below {} of {}",
            self.id, self.first_sequence, self.end_sequence, self.corpus_shard
        )
    }
}

pub(super) fn check_version(document: &Map<String, Value>) -> Result<()> {
    let found = document.get("format_version");
    ensure!(
        found == Some(&json!(FORMAT_VERSION)),
        "format_version: expected {FORMAT_VERSION}, found {}; it was written by another version of kdscore",
        text(found)
    );
    Ok(())
}

fn text(value: Option<&Value>) -> String {
    value.map_or_else(|| "none".into(), canonical::to_canonical)
}
