//! The head reduction: from a row of logits to its products, in two passes over the row.
//!
//! The first pass finds the k best and the maximum. They are then taken out of the row, so that
//! the second pass sums the tail directly: 1 - sum(top-k) would lose all its digits when the tail
//! is small.

use rayon::prelude::*;

use super::{Activations, math};
use crate::backend::{HeadRows, LogitRule};

/// Logits summed in f32 before the sum goes on in f64.
const SUM_BLOCK: usize = 1024;
/// Logits looked at together for one that enters the top-k.
const SCAN_BLOCK: usize = 64;

/// Appends the reduction of each row of `logits` (R, V) to `out`. The logits are consumed.
pub fn reduce_head(
    logits: &mut Activations,
    rule: &LogitRule,
    targets: &[i32],
    out: &mut HeadRows,
) {
    assert_eq!(targets.len(), logits.rows, "head: one target a row");
    let (rows, width, k) = (logits.rows, logits.width, out.k);
    assert!(
        rule.vocab <= width && k <= rule.vocab,
        "head: k within the vocabulary"
    );
    let first = out.tail.len();
    out.ids.resize((first + rows) * k, 0);
    out.logp.resize((first + rows) * k, 0.0);
    let scores: Vec<Option<Scores>> = logits
        .data_mut()
        .par_chunks_exact_mut(width)
        .zip(targets)
        .zip(out.ids[first * k..].par_chunks_exact_mut(k))
        .zip(out.logp[first * k..].par_chunks_exact_mut(k))
        .map(|(((row, &target), ids), logp)| {
            let row = &mut row[..rule.vocab];
            pulp::Arch::new().dispatch(|| {
                finish(row, rule);
                reduce_row(row, rule.vocab_real, target as usize, ids, logp)
            })
        })
        .collect();
    for (row, scores) in scores.into_iter().enumerate() {
        if scores.is_none() && out.bad_row.is_none() {
            out.bad_row = Some(first + row);
        }
        let scores = scores.unwrap_or_default();
        out.tail.push(scores.tail);
        out.target_logp.push(scores.target_logp);
        out.target_rank.push(scores.target_rank);
        out.logsumexp.push(scores.logsumexp);
        out.entropy.push(scores.entropy);
        out.padded_mass.push(scores.padded_mass);
    }
}

/// What the architecture does to logits after the product.
#[inline(always)]
fn finish(row: &mut [f32], rule: &LogitRule) {
    if rule.scale != 1.0 {
        row.iter_mut().for_each(|x| *x *= rule.scale);
    }
    if let Some(cap) = rule.cap {
        // A NaN and an infinity must still be seen after it.
        let capped = |x: f32| {
            if x.is_finite() {
                math::soft_cap(x, cap)
            } else {
                x
            }
        };
        row.iter_mut().for_each(|x| *x = capped(*x));
    }
}

#[derive(Default)]
struct Scores {
    tail: f32,
    target_logp: f32,
    target_rank: i32,
    logsumexp: f32,
    entropy: f32,
    padded_mass: f32,
}

/// `None` for a row with a NaN or +inf in it, or without a finite logit.
#[inline(always)]
fn reduce_row(
    row: &mut [f32],
    vocab_real: usize,
    target: usize,
    ids: &mut [i32],
    logp: &mut [f32],
) -> Option<Scores> {
    // A NaN fails every comparison, so it is counted here as +inf is. Counting, unlike a search
    // that stops, is vectorised.
    let sound: usize = row.iter().map(|&x| usize::from(x < f32::INFINITY)).sum();
    if sound < row.len() {
        return None;
    }
    let target_logit = row[target];
    let target_rank = rank(row, target);
    top_k(row, ids, logp);
    let max = logp[0];
    if max == f32::NEG_INFINITY {
        return None;
    }
    let padding = exp_sums(&row[vocab_real.min(row.len())..], max).mass;
    for &id in ids.iter() {
        row[id as usize] = f32::NEG_INFINITY;
    }
    let rest = exp_sums(row, max);
    let best = exp_sums(logp, max);
    let total = rest.mass + best.mass;
    let ln_total = total.ln();
    let logp_of = |logit: f32| (f64::from(logit - max) - ln_total) as f32;
    logp.iter_mut().for_each(|x| *x = logp_of(*x));
    Some(Scores {
        tail: (rest.mass / total) as f32,
        target_logp: logp_of(target_logit),
        target_rank,
        logsumexp: (f64::from(max) + ln_total) as f32,
        entropy: (ln_total - (rest.moment + best.moment) / total).max(0.0) as f32,
        padded_mass: (padding / total) as f32,
    })
}

/// Ids that come before `target`: greater logits, and equal ones of a lower id.
#[inline(always)]
fn rank(row: &[f32], target: usize) -> i32 {
    let logit = row[target];
    let (before, after) = row.split_at(target);
    let ahead: i32 = before.iter().map(|&x| i32::from(x >= logit)).sum();
    ahead + after.iter().map(|&x| i32::from(x > logit)).sum::<i32>()
}

/// The k largest, best first, equal ones by rising id. A sorted list by insertion: after the
/// first few blocks next to nothing enters it.
#[inline(always)]
fn top_k(row: &[f32], ids: &mut [i32], best: &mut [f32]) {
    let k = ids.len();
    let mut held = 0;
    for (block, values) in row.chunks(SCAN_BLOCK).enumerate() {
        if held == k && math::max(values) <= best[k - 1] {
            continue;
        }
        for (i, &value) in values.iter().enumerate() {
            if held == k && value <= best[k - 1] {
                continue;
            }
            let at = best[..held].partition_point(|&b| b >= value);
            held = (held + 1).min(k);
            best[at..held].rotate_right(1);
            ids[at..held].rotate_right(1);
            best[at] = value;
            ids[at] = (block * SCAN_BLOCK + i) as i32;
        }
    }
}

struct ExpSums {
    /// sum of exp(x - max)
    mass: f64,
    /// sum of exp(x - max) * (x - max), 0 for x = -inf
    moment: f64,
}

#[inline(always)]
fn exp_sums(values: &[f32], max: f32) -> ExpSums {
    let mut sums = ExpSums {
        mass: 0.0,
        moment: 0.0,
    };
    for block in values.chunks(SUM_BLOCK) {
        sums.mass += f64::from(math::sum_by(block, |x| math::exp(x - max)));
        sums.moment += f64::from(math::sum_by(block, |x| {
            let d = x - max;
            let d = if d < -200.0 { -200.0 } else { d };
            math::exp(d) * d
        }));
    }
    sums
}
