//! A row's bits depend on its own sequence alone, for each kind of layer.

use kdscore::canonical::sha256_hex;
use kdscore::model::{Teacher, Unknown};

use super::golden::{Cut, Scored, Sequences, score};
use super::teachers::{corpus, root};

/// A window, soft-caps, experts of two kinds, latent attention, chunks, ropes by length.
const KINDS: &[&str] = &[
    "mistral",
    "gemma2",
    "mixtral",
    "gpt_oss_mxfp4",
    "deepseek_v3",
    "deepseek_v3_fp8",
    "llama4_text",
    "phi3_longrope",
    "llama_dynamic",
    "gpt2",
];

fn hashes(scored: &Scored) -> Vec<String> {
    scored.arrays.iter().map(|a| sha256_hex(&a.bytes)).collect()
}

fn cut(token_budget: usize, head_chunk: usize, wave: usize) -> Cut {
    Cut {
        token_budget,
        head_chunk,
        wave,
    }
}

#[test]
fn no_cut_of_the_work_changes_a_bit() {
    let corpus = corpus();
    for name in KINDS {
        let teacher = Teacher::open(&root().join(name), Unknown::Refuse).unwrap();
        let run = |cut| hashes(&score(&teacher, &corpus, 8, cut).unwrap());
        let expected = run(Cut::default());
        for (budget, chunk, wave) in [(1, 1, 1), (30, 7, 3), (100, 64, 2), (4000, 1000, 1)] {
            assert_eq!(
                run(cut(budget, chunk, wave)),
                expected,
                "{name} at {budget} tokens"
            );
        }
        for threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
            let found = pool.build().unwrap().install(|| run(cut(200, 50, 1)));
            assert_eq!(found, expected, "{name} on {threads} threads");
        }
    }
}

/// Each sequence alone, and each between others, gives the same rows.
#[test]
fn neighbours_change_no_bit() {
    let corpus = corpus();
    let noise: Vec<i32> = (0..90).map(|i| 3 + (i * 37) % 140).collect();
    for name in KINDS {
        let teacher = Teacher::open(&root().join(name), Unknown::Refuse).unwrap();
        let all = score(&teacher, &corpus, 8, Cut::default()).unwrap();
        let mut first = 0;
        for s in 0..corpus.count() {
            let span = corpus.offsets[s] as usize..corpus.offsets[s + 1] as usize;
            let mut between = Sequences {
                offsets: vec![0],
                ..Sequences::default()
            };
            let silent = || std::iter::repeat_n(0, noise.len());
            between.push(noise.iter().copied(), silent());
            between.push(
                corpus.tokens[span.clone()].iter().copied(),
                corpus.mask[span].iter().copied(),
            );
            // The noise behind is scored too, so that it is computed.
            between.push(noise.iter().copied(), std::iter::repeat_n(1, noise.len()));
            let scored = score(&teacher, &between, 8, Cut::default()).unwrap();
            let rows = scored.targets.len() - (noise.len() - 1);
            let bits = |v: &[f32]| -> Vec<u32> { v.iter().map(|x| x.to_bits()).collect() };
            let here = &all.logp[first * 8..(first + rows) * 8];
            assert_eq!(
                bits(&scored.logp[..rows * 8]),
                bits(here),
                "{name} sequence {s}"
            );
            first += rows;
        }
        assert_eq!(first, all.targets.len());
    }
}
