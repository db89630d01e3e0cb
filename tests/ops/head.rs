//! The head reduction against f64: ties, masks, tiny tails, rows that must be refused.

use kdscore::backend::cpu::Cpu;
use kdscore::backend::{Backend, HeadRows, LogitRule};

use super::{draws, tensor};

struct Slice {
    name: &'static str,
    vocab: usize,
    real: usize,
    k: usize,
    logits: Vec<f32>, // (R, V)
    targets: Vec<i32>,
}

fn slices() -> Vec<Slice> {
    let slice = |name, vocab, k, logits: Vec<f32>| {
        let rows = logits.len() / vocab;
        let targets = (0..rows).map(|r| ((r * 7919 + 3) % vocab) as i32).collect();
        Slice {
            name,
            vocab,
            real: vocab,
            k,
            logits,
            targets,
        }
    };
    let mut ties = draws(1, 5 * 507);
    ties.iter_mut().for_each(|v| *v = (*v * 4.0).round());
    let mut masked = draws(2, 4 * 300);
    masked
        .iter_mut()
        .step_by(3)
        .for_each(|v| *v = f32::NEG_INFINITY);
    let peaked = draws(3, 3 * 1000).iter().map(|v| v * 40.0).collect();
    let large = draws(4, 2 * 70_000).iter().map(|v| v * 3.0 + 1e4).collect();
    let mut padded = slice("padded vocabulary", 640, 8, draws(5, 3 * 640));
    padded.real = 600;
    vec![
        slice("odd", 507, 32, draws(6, 9 * 507)),
        slice("ties", 507, 17, ties),
        slice("all equal", 100, 9, vec![2.5; 3 * 100]),
        slice("k is the vocabulary", 7, 7, draws(7, 4 * 7)),
        slice("vocabulary of one", 1, 1, vec![0.3, -4.0]),
        slice("masked", 300, 16, masked),
        slice("more asked than is left", 12, 11, {
            let mut row = vec![f32::NEG_INFINITY; 12];
            (row[4], row[9]) = (1.0, 1.0);
            row
        }),
        slice("peaked: the tail is tiny", 1000, 4, peaked),
        slice("far from zero", 70_000, 32, large),
        padded,
    ]
}

fn reduce<B: Backend>(b: &B, s: &Slice) -> HeadRows {
    let mut rows = b.rows(s.targets.len(), s.k).unwrap();
    let rule = LogitRule {
        vocab: s.vocab,
        vocab_real: s.real,
        scale: 1.0,
        cap: None,
    };
    b.reduce_head(
        &mut tensor(b, &s.logits, s.vocab),
        &rule,
        &s.targets,
        &mut rows,
    );
    let mut out = HeadRows::with_capacity(s.targets.len(), s.k);
    b.take_rows(rows, &mut out).unwrap();
    out
}

fn every_row_is_right<B: Backend>(b: &B) {
    for s in slices() {
        let got = reduce(b, &s);
        assert_eq!(got.bad_row, None, "{}", s.name);
        for (row, logits) in s.logits.chunks(s.vocab).enumerate() {
            check(&s, &got, row, logits);
        }
    }
}

fn check(s: &Slice, got: &HeadRows, row: usize, logits: &[f32]) {
    let name = s.name;
    let mut order: Vec<usize> = (0..s.vocab).collect();
    order.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap().then(a.cmp(&b)));
    let max = f64::from(logits[order[0]]);
    let mass = |id: usize| (f64::from(logits[id]) - max).exp();
    let total: f64 = (0..s.vocab).map(mass).sum();
    let logp = |id: usize| f64::from(logits[id]) - max - total.ln();
    let close = |what: &str, got: f32, exact: f64, relative: f64, absolute: f64| {
        let bound = relative * exact.abs() + absolute;
        let same = f64::from(got) == exact || (f64::from(got) - exact).abs() <= bound;
        assert!(same, "{name} row {row}: {what}: {got} and {exact}");
    };
    let ids: Vec<i32> = order[..s.k].iter().map(|&id| id as i32).collect();
    assert_eq!(got.ids[row * s.k..(row + 1) * s.k], ids, "{name} row {row}");
    for (j, &id) in order[..s.k].iter().enumerate() {
        close("logp", got.logp[row * s.k + j], logp(id), 1e-6, 1e-6);
    }
    // Relative: a tail of 1e-20 is as right as one of 0.1.
    let tail = order[s.k..].iter().map(|&id| mass(id)).sum::<f64>() / total;
    close("tail", got.tail[row], tail, 2e-6, 1e-37);
    let target = s.targets[row] as usize;
    close("target", got.target_logp[row], logp(target), 1e-6, 1e-6);
    let rank = order.iter().position(|&id| id == target).unwrap();
    assert_eq!(got.target_rank[row], rank as i32, "{name} row {row}");
    close(
        "logsumexp",
        got.logsumexp[row],
        max + total.ln(),
        1e-6,
        1e-6,
    );
    let entropy: f64 = (0..s.vocab)
        .filter(|&id| mass(id) > 0.0)
        .map(|id| -mass(id) / total * logp(id))
        .sum();
    close("entropy", got.entropy[row], entropy, 1e-5, 2e-6);
    let padded = (s.real..s.vocab).map(mass).sum::<f64>() / total;
    close("padded mass", got.padded_mass[row], padded, 1e-5, 1e-30);
}

fn bad_rows_are_found<B: Backend>(b: &B) {
    for bad in [f32::NAN, f32::INFINITY] {
        for place in [0, 63, 506] {
            let mut s = slices().remove(0);
            s.logits[4 * s.vocab + place] = bad;
            assert_eq!(reduce(b, &s).bad_row, Some(4), "{bad} at {place}");
        }
    }
    let mut s = slices().remove(0);
    s.logits[2 * s.vocab..3 * s.vocab].fill(f32::NEG_INFINITY);
    assert_eq!(reduce(b, &s).bad_row, Some(2), "nothing finite");
}

#[test]
fn head() {
    every_row_is_right(&Cpu);
    bad_rows_are_found(&Cpu);
}
