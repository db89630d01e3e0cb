//! A shard from tokens to rows on the embedded teacher, beside what the same cores reach in one
//! large matrix product: both count floating-point operations as items, so their ratio is the
//! share of the peak. Checked against the Hugging Face goldens before it is timed.
//!
//!     cargo bench --bench end_to_end

use std::path::{Path, PathBuf};

use divan::counter::ItemsCount;
use kdscore::backend::cpu::Cpu;
use kdscore::backend::{Backend, HostWeight, Into, Linear, Precision};
use kdscore::corpus::CorpusShard;
use kdscore::model::{Decoder, Limits, Teacher, Unknown, Vocabulary};
use kdscore::products::{Dtype, Product, ProductPlan};
use kdscore::score::{Proceed, ScoredShard, ShardJob, score_shard};
use kdscore::store::NpyFile;

fn main() {
    check();
    divan::main();
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

struct Arrays {
    tokens: Vec<i32>,
    offsets: Vec<i64>,
    mask: Vec<u8>,
}

impl Arrays {
    /// The golden corpus, `times` times over.
    fn golden(times: usize) -> Arrays {
        let text = std::fs::read_to_string(fixture("golden/corpus.json")).unwrap();
        let corpus: serde_json::Value = serde_json::from_str(&text).unwrap();
        let (mut tokens, mut offsets, mut mask) = (Vec::new(), vec![0], Vec::new());
        let numbers = |v: &serde_json::Value| {
            let list = v.as_array().unwrap().iter();
            list.map(|n| n.as_i64().unwrap()).collect::<Vec<_>>()
        };
        for _ in 0..times {
            for sequence in corpus["sequences"].as_array().unwrap() {
                tokens.extend(numbers(&sequence["tokens"]).iter().map(|&t| t as i32));
                mask.extend(numbers(&sequence["mask"]).iter().map(|&m| m as u8));
                offsets.push(tokens.len() as i64);
            }
        }
        Arrays {
            tokens,
            offsets,
            mask,
        }
    }

    fn shard(&self) -> CorpusShard<'_> {
        CorpusShard::new(&self.tokens, &self.offsets, &self.mask).unwrap()
    }
}

fn decoder(teacher: &Teacher) -> Decoder<'_, Cpu> {
    let limits = Limits {
        tokens: 4032,
        sequence: 1024,
        head_chunk: 480,
        wave: 1,
    };
    let vocab = teacher.description.vocab;
    let vocabulary = Vocabulary {
        scored: vocab,
        tokenizer: vocab,
    };
    Decoder::new(&Cpu, teacher, limits, vocabulary).unwrap()
}

fn score(decoder: &mut Decoder<'_, Cpu>, shard: CorpusShard<'_>) -> ScoredShard {
    let products = ProductPlan {
        k: 32,
        logp_dtype: Dtype::F32,
        extra: Vec::new(),
    };
    let job = ShardJob {
        shard,
        sequences: 0..shard.sequences(),
        token_budget: 4032,
        wave: 1,
        products: &products,
    };
    let scored = score_shard(decoder, &job, &mut |_| Proceed::Go).unwrap();
    scored.expect("nobody says stop")
}

fn check() {
    let teacher = Teacher::open(&fixture("teacher"), Unknown::Refuse).unwrap();
    let arrays = Arrays::golden(1);
    let scored = score(&mut decoder(&teacher), arrays.shard());
    let is_logp = |a: &&kdscore::products::ProductArray| a.product == Product::Logp;
    let logp = scored.arrays.iter().find(is_logp).unwrap();
    let golden = NpyFile::open(&fixture("golden/logp.npy")).unwrap();
    let (values, _) = logp.bytes.as_chunks::<4>();
    for (value, golden) in values.iter().zip(golden.f32s().unwrap()) {
        assert!((f32::from_le_bytes(*value) - golden).abs() < 1e-3);
    }
}

/// Multiplications and additions of every matrix product but the head's and attention's.
fn body_flops(teacher: &Teacher, tokens: usize) -> usize {
    let needed = |name: &&String| name.contains("proj");
    let names = teacher.checkpoint.tensors.iter().filter(|(n, _)| needed(n));
    let weights: usize = names.map(|(_, t)| t.shape.iter().product::<usize>()).sum();
    2 * weights * tokens
}

#[divan::bench(sample_count = 10)]
fn score_shard_of_the_embedded_teacher(bencher: divan::Bencher) {
    let teacher = Teacher::open(&fixture("teacher"), Unknown::Refuse).unwrap();
    let arrays = Arrays::golden(4);
    let mut decoder = decoder(&teacher);
    let flops = body_flops(&teacher, arrays.tokens.len());
    bencher
        .counter(ItemsCount::new(flops))
        .bench_local(|| score(&mut decoder, arrays.shard()));
}

#[divan::bench(sample_count = 10)]
fn one_large_product(bencher: divan::Bencher) {
    let size = 1536;
    let weight = HostWeight::from_f32(&vec![0.5; size * size], vec![size, size]);
    let linear = Linear {
        weight: Cpu.weight(&weight).unwrap(),
        bias: None,
    };
    let (mut x, mut out) = (
        Cpu.tensor(Precision::Single, size, size).unwrap(),
        Cpu.tensor(Precision::Single, size, size).unwrap(),
    );
    Cpu.upload(&vec![0.25; size * size], &mut x);
    bencher
        .counter(ItemsCount::new(2 * size * size * size))
        .bench_local(|| {
            Cpu.linear(&x, &linear, Into::Replace, &mut out);
        });
}
