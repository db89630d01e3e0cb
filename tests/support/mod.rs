//! A small corpus and a teacher made of arithmetic, for tests of the store.
#![allow(dead_code)] // each test file uses a part

pub mod memory_fs;

use std::path::{Path, PathBuf};

use kdscore::corpus::{CorpusShard, ShardArrays};
use kdscore::products::{Dtype, Product, ProductArray, ProductPlan, RowScores, RowSink};
use kdscore::store::{
    CorpusReader, CorpusWriter, Job, PlannedShard, ScoredSet, plan_shards, products_value,
};
use serde_json::{Value, json};

pub const VOCAB: usize = 23;
pub const K: usize = 4;

/// splitmix64: the same numbers everywhere.
pub fn mix(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn shard(seed: u64, lengths: &[usize]) -> ShardArrays {
    let mut arrays = ShardArrays {
        offsets: vec![0],
        ..ShardArrays::default()
    };
    for (s, &length) in lengths.iter().enumerate() {
        for t in 0..length {
            let at = mix(seed ^ ((s as u64) << 20) ^ t as u64);
            arrays.tokens.push((at % VOCAB as u64) as i32);
            arrays.loss_mask.push(u8::from(at >> 32 & 3 != 0));
        }
        arrays.offsets.push(arrays.tokens.len() as i64);
        arrays.source_rows.push(s as i64);
    }
    arrays
}

/// A corpus of one shard per entry, each a list of sequence lengths.
pub fn make_corpus(folder: &Path, shards: &[&[usize]]) -> PathBuf {
    let out = folder.join("corpus");
    let mut writer = CorpusWriter::create(&out).unwrap();
    writer
        .write_file("tokenizer/tokenizer.json", b"{}")
        .unwrap();
    for (i, lengths) in shards.iter().enumerate() {
        writer.write_shard(&shard(i as u64 + 1, lengths)).unwrap();
    }
    let facts = json!({
        "vocab_size": VOCAB, "loss": "assistant", "tokenizer_fingerprint": "t", "template_fingerprint": "c",
    });
    writer.finish(facts.as_object().unwrap().clone()).unwrap();
    out
}

pub fn products(logp_dtype: Dtype) -> ProductPlan {
    ProductPlan {
        k: K,
        logp_dtype,
        extra: Product::EXTRA.to_vec(),
    }
}

pub fn job(corpus: &CorpusReader, products: &ProductPlan, shard_tokens: Option<usize>) -> Job {
    let identity = json!({
        "k": K,
        "vocab_scored": VOCAB,
        "products": products_value(products),
        "corpus_fingerprint": corpus.fingerprint().unwrap(),
        "tokenizer_fingerprint": corpus.tokenizer_fingerprint(),
        "template_fingerprint": corpus.template_fingerprint(),
        "teacher_fingerprint": "arithmetic",
    });
    Job {
        identity: identity.as_object().unwrap().clone(),
        plan: plan_shards(corpus, shard_tokens).unwrap(),
        corpus_path: corpus.place("").trim_end_matches('/').to_owned(),
    }
}

/// Every product of a range of sequences, by a teacher that likes the true next token.
pub fn score(
    view: &CorpusShard,
    planned: &PlannedShard,
    products: &ProductPlan,
) -> Vec<ProductArray> {
    let range = planned.first_sequence as usize..planned.end_sequence as usize;
    let rows: Vec<(u64, i32)> = range
        .flat_map(|s| {
            let rows = view.sequence(s).rows();
            rows.map(move |row| (mix((s as u64) << 32 | row.position as u64), row.target))
        })
        .collect();
    let mut sink = RowSink::new(products, rows.len());
    for (at, &(seed, target)) in rows.iter().enumerate() {
        put_row(&mut sink, at, seed, target);
    }
    sink.finish()
}

fn put_row(sink: &mut RowSink, at: usize, seed: u64, target: i32) {
    let logits: Vec<f32> = (0..VOCAB)
        .map(|id| {
            let noise = (mix(seed ^ ((id as u64) << 7)) >> 40) as f32 / (1u64 << 23) as f32;
            2.0 * noise + if id as i32 == target { 2.5 } else { 0.0 }
        })
        .collect();
    let total: f64 = logits.iter().map(|&z| f64::from(z).exp()).sum();
    let logsumexp = total.ln();
    let logp: Vec<f64> = logits.iter().map(|&z| f64::from(z) - logsumexp).collect();
    let mut order: Vec<usize> = (0..VOCAB).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    let tail: f64 = order[K..].iter().map(|&id| logp[id].exp()).sum();
    let ids: Vec<i32> = order[..K].iter().map(|&id| id as i32).collect();
    let top: Vec<f32> = order[..K].iter().map(|&id| logp[id] as f32).collect();
    let rank = order.iter().position(|&id| id as i32 == target).unwrap();
    sink.put(
        at,
        &RowScores {
            target,
            ids: &ids,
            logp: &top,
            tail: tail as f32,
            target_logp: logp[target as usize] as f32,
            target_rank: rank as i32,
            logsumexp: logsumexp as f32,
            entropy: -logp.iter().map(|l| l.exp() * l).sum::<f64>() as f32,
        },
    );
}

pub fn provenance() -> Value {
    json!({"device": "arithmetic", "kdscore": "test"})
}

/// Scores and commits what is open.
pub fn score_open(
    set: &ScoredSet,
    corpus: &CorpusReader,
    products: &ProductPlan,
) -> anyhow::Result<usize> {
    let open = set.open_shards()?;
    for planned in &open {
        let index = corpus.shard_index(&planned.corpus_shard).unwrap();
        let files = corpus.shard(index)?;
        let arrays = score(&files.view()?, planned, products);
        set.commit(planned, &files, arrays, &provenance())?;
    }
    Ok(open.len())
}
