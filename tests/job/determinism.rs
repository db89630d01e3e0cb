//! A row's bytes depend on its own sequence and the identity, and on nothing else. Compared by
//! sha256 of the arrays, not by tolerance.

use std::path::Path;

use kdscore::backend::cpu::Cpu;
use kdscore::corpus::CorpusShard;
use kdscore::model::{Decoder, Limits, Teacher, Unknown, Vocabulary};
use kdscore::products::{Dtype, Product, ProductPlan};
use kdscore::score::{Proceed, ShardJob, score_shard};
use sha2::{Digest, Sha256};

use super::program::{Tokens, fixture, golden_corpus, manifests, succeed, write_corpus};

const PRODUCTS: &str = "target_logp,target_rank,logsumexp,entropy";

/// sha256 of each sequence's rows of every product, read back in corpus order.
fn row_hashes(at: &Path, corpus: &str, options: &[&str]) -> Vec<String> {
    let out = tempfile::tempdir_in(at).unwrap();
    let out = out.path().join("out");
    let teacher = fixture("teacher");
    let mut args = vec![
        "score",
        "--teacher",
        teacher.to_str().unwrap(),
        "--corpus",
        corpus,
        "--out",
        out.to_str().unwrap(),
        "--logp-dtype",
        "f32",
        "--emit",
        PRODUCTS,
    ];
    args.extend(options);
    succeed(at, &args);
    let mut hashes = Vec::new();
    for manifest in manifests(&out) {
        let products = manifest["products"].as_array().unwrap();
        let file = |name: &str| {
            let product = products.iter().find(|p| p["name"] == name).unwrap();
            std::fs::read(out.join(product["path"].as_str().unwrap())).unwrap()
        };
        let data = |bytes: &[u8]| {
            let header = 10 + u16::from_le_bytes([bytes[8], bytes[9]]) as usize;
            bytes[header..].to_vec()
        };
        let offsets = data(&file("row_offsets"));
        let offsets: Vec<usize> = offsets
            .chunks_exact(8)
            .map(|o| i64::from_le_bytes(o.try_into().unwrap()) as usize)
            .collect();
        let rows = offsets[offsets.len() - 1];
        let arrays: Vec<Vec<u8>> = products
            .iter()
            .filter(|p| p["name"] != "row_offsets")
            .map(|p| data(&file(p["name"].as_str().unwrap())))
            .collect();
        for pair in offsets.windows(2) {
            let mut hash = Sha256::new();
            for array in &arrays {
                let width = array.len() / rows.max(1);
                hash.update(&array[pair[0] * width..pair[1] * width]);
            }
            hashes.push(format!("{:x?}", hash.finalize()));
        }
    }
    hashes
}

#[test]
fn budgets_chunks_shards_and_threads_change_no_bit() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    write_corpus(&at.join("corpus"), &golden_corpus(), 2048);
    let reference = row_hashes(at, "corpus", &["--threads", "1"]);
    let variants: &[&[&str]] = &[
        &["--token-budget", "1"],
        &["--token-budget", "97"],
        &["--token-budget", "300", "--threads", "5"],
        &["--token-budget", "1000000"],
        &["--head-chunk", "1"],
        &["--head-chunk", "7", "--threads", "2"],
        &["--head-chunk", "100000"],
        &["--shard-tokens", "1"],
        &[
            "--shard-tokens",
            "500",
            "--token-budget",
            "128",
            "--head-chunk",
            "33",
            "--threads",
            "2",
        ],
        &["--threads", "5"],
    ];
    for options in variants {
        assert_eq!(row_hashes(at, "corpus", options), reference, "{options:?}");
    }
}

#[test]
fn the_order_of_sequences_changes_no_bit() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let sequences = golden_corpus();
    write_corpus(&at.join("corpus"), &sequences, 2048);
    let reference = row_hashes(at, "corpus", &[]);
    let reversed: Vec<Tokens> = sequences.iter().rev().cloned().collect();
    write_corpus(&at.join("reversed"), &reversed, 2048);
    let mut hashes = row_hashes(at, "reversed", &[]);
    hashes.reverse();
    assert_eq!(hashes, reference);
}

/// No leak between packed sequences: with every other sequence replaced by noise of another
/// length, the rest keep their bits.
#[test]
fn noise_in_the_neighbours_changes_no_bit() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let sequences = golden_corpus();
    write_corpus(&at.join("corpus"), &sequences, 2048);
    let reference = row_hashes(at, "corpus", &[]);
    for kept in 0..2 {
        let noise = |s: usize| -> Tokens {
            let length = 1 + (s * 37) % 211;
            let tokens = (0..length).map(|t| ((s * 7919 + t * 104_729) % 2048) as i32);
            (tokens.collect(), vec![1; length])
        };
        let mixed: Vec<Tokens> = sequences
            .iter()
            .enumerate()
            .map(|(s, own)| if s % 2 == kept { own.clone() } else { noise(s) })
            .collect();
        let name = format!("mixed-{kept}");
        write_corpus(&at.join(&name), &mixed, 2048);
        let hashes = row_hashes(at, &name, &[]);
        for s in (kept..sequences.len()).step_by(2) {
            assert_eq!(hashes[s], reference[s], "sequence {s}");
        }
        let changed = (0..hashes.len())
            .filter(|&s| hashes[s] != reference[s])
            .count();
        assert!(changed > 4, "the noise must be seen in its own rows");
    }
}

/// Batches that pass the layers together give what each gives alone.
#[test]
fn waves_change_no_bit() {
    let teacher = Teacher::open(&fixture("teacher"), Unknown::Refuse).unwrap();
    let sequences = golden_corpus();
    let tokens: Vec<i32> = sequences.iter().flat_map(|s| s.0.clone()).collect();
    let mask: Vec<u8> = sequences.iter().flat_map(|s| s.1.clone()).collect();
    let mut offsets = vec![0];
    for (tokens, _) in &sequences {
        offsets.push(offsets[offsets.len() - 1] + tokens.len() as i64);
    }
    let shard = CorpusShard::new(&tokens, &offsets, &mask).unwrap();
    let products = ProductPlan {
        k: 32,
        logp_dtype: Dtype::F32,
        extra: Product::EXTRA.to_vec(),
    };
    let vocab = teacher.description.vocab;
    let vocabulary = Vocabulary {
        scored: vocab,
        tokenizer: vocab,
    };
    let score = |wave: usize| {
        let limits = Limits {
            tokens: 512,
            sequence: 512,
            head_chunk: 96,
            wave,
        };
        let mut decoder = Decoder::new(&Cpu, &teacher, limits, vocabulary).unwrap();
        let job = ShardJob {
            shard,
            sequences: 0..shard.sequences(),
            token_budget: 200,
            wave,
            products: &products,
        };
        let scored = score_shard(&mut decoder, &job, &mut |_| Proceed::Go).unwrap();
        scored.unwrap().arrays
    };
    let one = score(1);
    assert!(one == score(3));
    assert!(one == score(100));
}
