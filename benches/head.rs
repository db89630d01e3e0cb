//! The head reduction: rows of logits to top-k, logsumexp, tail and the rest. Checked against f64
//! before it is timed.
//!
//!     cargo bench --bench head

use divan::counter::{BytesCount, ItemsCount};
use kdscore::backend::cpu::Cpu;
use kdscore::backend::{Backend, HeadRows, LogitRule, Precision};

const K: usize = 32;

fn main() {
    for vocab in [507, 32_000] {
        check(vocab);
    }
    divan::main();
}

/// (rows, vocab), a few large values among many small, as a trained teacher gives.
fn logits(rows: usize, vocab: usize) -> Vec<f32> {
    let mut seed = 17u64;
    let draws = (0..rows * vocab).map(|_| {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let uniform = (seed >> 40) as f32 / (1u64 << 24) as f32;
        uniform.powi(8) * 18.0 - 4.0
    });
    draws.collect()
}

fn reduce(values: &[f32], rows: usize, vocab: usize) -> HeadRows {
    let mut tensor = Cpu.tensor(Precision::Single, rows, vocab).unwrap();
    Cpu.upload(values, &mut tensor);
    let mut out = HeadRows::with_capacity(rows, K);
    let rule = LogitRule {
        vocab,
        vocab_real: vocab,
        scale: 1.0,
        cap: None,
    };
    Cpu.reduce_head(&mut tensor, &rule, &vec![0; rows], &mut out);
    out
}

fn check(vocab: usize) {
    let rows = 3;
    let values = logits(rows, vocab);
    let got = reduce(&values, rows, vocab);
    for (row, logits) in values.chunks(vocab).enumerate() {
        let mut order: Vec<usize> = (0..vocab).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        let max = f64::from(logits[order[0]]);
        let mass = |id: &usize| (f64::from(logits[*id]) - max).exp();
        let total: f64 = order.iter().map(mass).sum();
        let tail = order[K..].iter().map(mass).sum::<f64>() / total;
        let ids: Vec<i32> = order[..K].iter().map(|&id| id as i32).collect();
        assert_eq!(
            &got.ids[row * K..(row + 1) * K],
            ids,
            "vocabulary {vocab} row {row}"
        );
        let lse = max + total.ln();
        assert!((f64::from(got.logsumexp[row]) - lse).abs() < 1e-5);
        assert!((f64::from(got.tail[row]) - tail).abs() < 1e-6);
    }
}

#[divan::bench(args = [32_000, 128_256])]
fn rows_of_vocabulary(bencher: divan::Bencher, vocab: usize) {
    let rows = 96;
    let values = logits(rows, vocab);
    bencher
        .counter(ItemsCount::new(rows))
        .counter(BytesCount::of_slice(&values))
        .bench_local(|| reduce(&values, rows, vocab));
}
