//! A few tokens before the first batch: every op meets its shapes, and what the head says is
//! compared with a plain product in fp64 on the host.

use anyhow::{Result, ensure};
use half::bf16;
use rayon::prelude::*;

use super::decoder::Decoder;
use super::teacher::{Teacher, WeightSource};
use crate::backend::{Backend, FloatDtype, HeadRows, HostWeight, LogitRule};
use crate::batch::{BatchRow, PackedBatch, PackedSequence};

/// Rows of a rehearsal.
const ROWS: usize = 8;

/// What one row of the head came to, and what it may come to.
struct Exact {
    logits: Vec<f64>,
    /// How far a sum of fp32 products may be from the exact one, and a log-prob with it.
    bound: f64,
}

impl<B: Backend> Decoder<'_, B> {
    /// Lets a few tokens pass, where the backend asks for that.
    ///
    /// # Errors
    /// A device whose head isn't what the host computes from the same hidden rows.
    pub fn rehearse(&mut self, teacher: &Teacher) -> Result<()> {
        let limits = self.limits;
        // A corpus without a token needs no rehearsal.
        if !self.backend.rehearses() || limits.sequence == 0 {
            return Ok(());
        }
        let rows = ROWS.min(limits.head_chunk).min(limits.tokens);
        let batch = batch(rows, limits.sequence.min(rows), self.rule.vocab);
        let mut scored = [HeadRows {
            k: ROWS.min(self.rule.vocab),
            ..HeadRows::default()
        }];
        self.score(std::slice::from_ref(&batch), &mut scored)?;
        let [scored] = scored;
        if scored.bad_row.is_some() {
            // Any first tokens may overflow in a teacher that is sound on real ones.
            return Ok(());
        }
        let hidden = self.backend.download(&self.work.chunk_normed);
        let head = teacher.head().slice_rows(0..self.rule.vocab);
        let compute = self.backend.compute_dtype();
        let bias = teacher.description.head.bias.as_ref();
        let bias = bias.map(|spec| teacher.weight(spec).values());
        for (row, hidden) in hidden.chunks_exact(teacher.description.hidden).enumerate() {
            let exact = exact_logits(&head, bias.as_deref(), hidden, &self.rule, compute);
            compare(&scored, row, batch.rows[row].target, &exact)?;
        }
        Ok(())
    }
}

/// Sequences of up to `length` tokens, every token a row.
fn batch(rows: usize, length: usize, vocab: usize) -> PackedBatch {
    let mut batch = PackedBatch::default();
    for start in (0..rows).step_by(length.max(1)) {
        let tokens = start..(start + length).min(rows);
        batch.positions.extend(0..tokens.len() as u32);
        batch.sequences.push(PackedSequence {
            sequence: batch.sequences.len(),
            length: tokens.len(),
            tokens: tokens.clone(),
            rows: tokens,
        });
    }
    batch.tokens = (0..rows).map(|token| (token * 7 % vocab) as u32).collect();
    let rows = (0..rows).map(|token| BatchRow {
        token: token as u32,
        row: token,
        target: (token * 5 % vocab) as i32,
    });
    batch.rows = rows.collect();
    batch
}

/// A row's logits after the head's rule, from numbers as the backend keeps them.
fn exact_logits(
    head: &HostWeight,
    bias: Option<&[f32]>,
    hidden: &[f32],
    rule: &LogitRule,
    compute: FloatDtype,
) -> Exact {
    let rounded = |x: f32| match compute {
        FloatDtype::Bf16 => bf16::from_f32(x).to_f32(),
        FloatDtype::F16 | FloatDtype::F32 => x,
    };
    let products = |weights: &mut Vec<f32>, id: usize| {
        head.read(id, 0, weights);
        let terms = weights.iter().zip(hidden);
        let terms = terms.map(|(&w, &x)| f64::from(rounded(w)) * f64::from(x));
        let (sum, size) = terms.fold((0.0, 0.0), |(s, a), t| (s + t, a + t.abs()));
        let bias = bias.map_or(0.0, |bias| f64::from(bias[id]));
        (sum + bias, size + bias.abs())
    };
    let each: Vec<(f64, f64)> = (0..head.rows())
        .into_par_iter()
        .map_init(|| vec![0.0; hidden.len()], products)
        .collect();
    let finish = |z: f64| {
        let z = z * f64::from(rule.scale);
        rule.cap
            .map_or(z, |cap| f64::from(cap) * (z / f64::from(cap)).tanh())
    };
    // Higham, Accuracy and Stability of Numerical Algorithms, 3.1, with the unit of an adder that
    // cuts off instead of rounding; twice, for the logit and the logsumexp.
    let unit = 4.0 * f64::from(f32::EPSILON);
    let largest = each.iter().map(|(_, size)| *size).fold(0.0, f64::max);
    let scale = f64::from(rule.scale).abs();
    Exact {
        logits: each.into_iter().map(|(sum, _)| finish(sum)).collect(),
        bound: 2.0 * (hidden.len() as f64 + 4.0) * unit * largest * scale + 1e-4,
    }
}

fn compare(scored: &HeadRows, row: usize, target: i32, exact: &Exact) -> Result<()> {
    let logits = &exact.logits;
    let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let logsumexp = most + logits.iter().map(|z| (z - most).exp()).sum::<f64>().ln();
    let expect = |what: &str, found: f32, expected: f64| {
        let off = (f64::from(found) - expected).abs();
        ensure!(
            off <= exact.bound,
            "the device's head is not what the host computes: row {row}: expected {what} {expected:.6}, found {found:.6} (within {:.1e}); the driver, a library or the device is at fault",
            exact.bound
        );
        Ok(())
    };
    expect("a logsumexp of", scored.logsumexp[row], logsumexp)?;
    let logp = |id: i32| logits[id as usize] - logsumexp;
    expect(
        "the target's log-prob",
        scored.target_logp[row],
        logp(target),
    )?;
    let best = row * scored.k..(row + 1) * scored.k;
    for (&id, &found) in scored.ids[best.clone()].iter().zip(&scored.logp[best]) {
        expect("a log-prob of", found, logp(id))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scored(logits: &[f64], k: usize) -> HeadRows {
        let lse = logits.iter().map(|z| z.exp()).sum::<f64>().ln();
        let mut ids: Vec<i32> = (0..logits.len() as i32).collect();
        ids.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
        ids.truncate(k);
        HeadRows {
            k,
            logp: ids
                .iter()
                .map(|&id| (logits[id as usize] - lse) as f32)
                .collect(),
            ids,
            logsumexp: vec![lse as f32],
            target_logp: vec![(logits[1] - lse) as f32],
            ..HeadRows::default()
        }
    }

    #[test]
    fn a_head_that_is_off_is_found() {
        let (hidden, weights) = ([1.0f32, -2.0], [0.5f32, 0.25, -1.0, 0.75, 2.0, 1.0]);
        let head = HostWeight::from_f32(&weights, vec![3, 2]);
        let rule = LogitRule {
            vocab: 3,
            vocab_real: 3,
            scale: 1.0,
            cap: None,
        };
        let exact = exact_logits(&head, None, &hidden, &rule, FloatDtype::F32);
        assert_eq!(exact.logits, [0.0, -2.5, 0.0]);
        let right = scored(&exact.logits, 2);
        compare(&right, 0, 1, &exact).unwrap();
        let mut wrong = right.clone();
        wrong.logp[1] += 0.01;
        let error = compare(&wrong, 0, 1, &exact).unwrap_err().to_string();
        assert!(error.contains("row 0"), "{error}");
    }

    #[test]
    fn a_rehearsal_has_whole_sequences_within_the_limit() {
        let batch = batch(8, 3, 5);
        let lengths: Vec<usize> = batch.sequences.iter().map(|s| s.tokens.len()).collect();
        assert_eq!(lengths, [3, 3, 2]);
        assert_eq!(batch.positions, [0, 1, 2, 0, 1, 2, 0, 1]);
        assert!(batch.tokens.iter().all(|&id| id < 5));
        assert_eq!(batch.rows.len(), 8);
    }
}
