//! A mixture of experts: each row goes to the experts its router chose, and to no other.
//!
//! The rows of one expert are laid together, so that its weights are read once; a product is the
//! one of `linear`, on its constant row tile, so which rows came along doesn't change a bit. A
//! row's experts are added by rising number, which depends on that row alone.

use std::cmp::Ordering::Equal;

use rayon::prelude::*;

use super::{Activations, Cpu, CpuWeight, math};
use crate::backend::{
    Backend, Experts, ExpertsRule, Into, MlpWork, RouterRule, RouterScore, Tensor, Weighs,
};

/// One row at one expert.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Choice {
    expert: usize,
    weight: f32,
}

/// See `Backend::experts`.
pub fn experts(
    x: &Activations,
    logits: &Activations,
    rule: &ExpertsRule,
    experts: &Experts<CpuWeight>,
    work: &mut MlpWork<Activations, ()>,
    out: &mut Activations,
) {
    let count = experts.list.len();
    assert_eq!(
        (logits.rows, logits.width),
        (x.rows, count),
        "experts: logits"
    );
    let correction = experts.correction.as_ref().map(CpuWeight::vector);
    let per_row = rule.router.chosen;
    let choices: Vec<Choice> = logits
        .data()
        .par_chunks_exact(count)
        .flat_map_iter(|row| choose(row, correction, &rule.router))
        .collect(); // (T, chosen)
    let mut rows_of: Vec<Vec<(usize, f32)>> = vec![Vec::new(); count];
    for (at, choice) in choices.iter().enumerate() {
        rows_of[choice.expert].push((at / per_row, choice.weight));
    }
    out.set_shape(x.rows, x.width);
    out.data_mut().fill(0.0);
    for (mlp, rows) in experts.list.iter().zip(&rows_of) {
        if rows.is_empty() {
            continue;
        }
        gather(x, rows, rule.router.weighs, &mut work.rows);
        let hidden = match &mlp.gate {
            Some(gate) => {
                Cpu.linear(&work.rows, gate, Into::Replace, &mut work.gate);
                Cpu.linear(&work.rows, &mlp.up, Into::Replace, &mut work.up);
                Cpu.activate(rule.activation, &mut work.gate, Some(&work.up));
                &work.gate
            }
            None => {
                Cpu.linear(&work.rows, &mlp.up, Into::Replace, &mut work.up);
                Cpu.activate(rule.activation, &mut work.up, None);
                &work.up
            }
        };
        Cpu.linear(hidden, &mlp.down, Into::Replace, &mut work.result);
        scatter(&work.result, rows, rule.router.weighs, out);
    }
}

fn gather(x: &Activations, rows: &[(usize, f32)], weighs: Weighs, out: &mut Activations) {
    let width = x.width;
    out.set_shape(rows.len(), width);
    let each = out.data_mut().par_chunks_exact_mut(width).zip(rows);
    each.for_each(|(out, &(row, weight))| {
        out.copy_from_slice(&x.data()[row * width..(row + 1) * width]);
        if weighs == Weighs::Inputs {
            out.iter_mut().for_each(|v| *v *= weight);
        }
    });
}

fn scatter(x: &Activations, rows: &[(usize, f32)], weighs: Weighs, out: &mut Activations) {
    let width = x.width;
    for (x, &(row, weight)) in x.data().chunks_exact(width).zip(rows) {
        let weight = match weighs {
            Weighs::Outputs => weight,
            Weighs::Inputs => 1.0,
        };
        let out = &mut out.data_mut()[row * width..(row + 1) * width];
        out.iter_mut().zip(x).for_each(|(o, v)| *o += v * weight);
    }
}

/// The experts of a row and their weights.
fn choose(logits: &[f32], correction: Option<&[f32]>, rule: &RouterRule) -> Vec<Choice> {
    let scores: Vec<f32> = match rule.score {
        RouterScore::Softmax => softmax(logits),
        RouterScore::Sigmoid => logits.iter().map(|&x| math::sigmoid(x)).collect(),
        RouterScore::SoftmaxOfChosen | RouterScore::SigmoidOfChosen => logits.to_vec(),
    };
    let mut keys = scores.clone();
    if let Some(correction) = correction {
        keys.iter_mut().zip(correction).for_each(|(k, c)| *k += c);
    }
    if let Some(groups) = rule.groups {
        drop_groups(&mut keys, groups.count, groups.kept);
    }
    let chosen = best(&keys, rule.chosen);
    let of_chosen: Vec<f32> = chosen.iter().map(|&e| scores[e]).collect();
    let mut weights = match rule.score {
        RouterScore::Softmax | RouterScore::Sigmoid => of_chosen,
        RouterScore::SoftmaxOfChosen => softmax(&of_chosen),
        RouterScore::SigmoidOfChosen => of_chosen.iter().map(|&x| math::sigmoid(x)).collect(),
    };
    if rule.renormalise {
        // Sigmoids can all be 0; the term keeps 0 / 0 away (modeling_deepseek_v3.py).
        let total = weights.iter().sum::<f32>() + 1e-20;
        weights.iter_mut().for_each(|w| *w /= total);
    }
    let choices = chosen.into_iter().zip(weights);
    choices
        .map(|(expert, weight)| Choice {
            expert,
            weight: weight * rule.scale,
        })
        .collect()
}

fn softmax(logits: &[f32]) -> Vec<f32> {
    let max = math::max(logits);
    let mut out: Vec<f32> = logits.iter().map(|&x| math::exp(x - max)).collect();
    let total = math::sum_by(&out, |x| x);
    out.iter_mut().for_each(|x| *x /= total);
    out
}

/// The `count` largest, best first, equal ones by rising index. A NaN comes last.
fn best(keys: &[f32], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..keys.len()).collect();
    let key = |i: usize| {
        if keys[i].is_nan() {
            f32::NEG_INFINITY
        } else {
            keys[i]
        }
    };
    order.sort_by(|&a, &b| key(b).partial_cmp(&key(a)).unwrap_or(Equal).then(a.cmp(&b)));
    order.truncate(count);
    order
}

/// Leaves only the experts of the best groups; a group is as good as its two best together.
fn drop_groups(keys: &mut [f32], count: usize, kept: usize) {
    let size = keys.len() / count;
    let scores: Vec<f32> = keys
        .chunks_exact(size)
        .map(|group| best(group, 2).iter().map(|&e| group[e]).sum())
        .collect();
    let kept = best(&scores, kept);
    for (group, keys) in keys.chunks_exact_mut(size).enumerate() {
        if !kept.contains(&group) {
            keys.fill(f32::NEG_INFINITY);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::RouterGroups;

    fn rule(score: RouterScore) -> RouterRule {
        RouterRule {
            chosen: 2,
            score,
            renormalise: false,
            groups: None,
            scale: 1.0,
            weighs: Weighs::Outputs,
        }
    }

    fn chosen(logits: &[f32], correction: Option<&[f32]>, rule: &RouterRule) -> Vec<usize> {
        choose(logits, correction, rule)
            .iter()
            .map(|c| c.expert)
            .collect()
    }

    #[test]
    fn equal_scores_go_to_the_lower_expert() {
        for score in [
            RouterScore::Softmax,
            RouterScore::Sigmoid,
            RouterScore::SoftmaxOfChosen,
        ] {
            assert_eq!(
                chosen(&[1.0, 2.0, 1.0, 2.0, 2.0], None, &rule(score)),
                [1, 3]
            );
        }
    }

    #[test]
    fn a_correction_chooses_and_does_not_weigh() {
        let rule = rule(RouterScore::Sigmoid);
        let choices = choose(&[0.0, 0.0, 0.0], Some(&[0.0, 0.3, 0.2]), &rule);
        assert_eq!(
            choices[0],
            Choice {
                expert: 1,
                weight: 0.5
            }
        );
        assert_eq!(
            choices[1],
            Choice {
                expert: 2,
                weight: 0.5
            }
        );
    }

    #[test]
    fn experts_of_dropped_groups_are_never_chosen() {
        let mut rule = rule(RouterScore::Sigmoid);
        rule.groups = Some(RouterGroups { count: 2, kept: 1 });
        // The best expert alone doesn't make the best group; two good ones do.
        assert_eq!(chosen(&[3.0, -9.0, 2.0, 2.0], None, &rule), [2, 3]);
        assert_eq!(chosen(&[3.0, -9.0, -8.0, -8.0], None, &rule), [0, 1]);
    }

    #[test]
    fn weights_are_those_of_the_chosen() {
        let mut rule = rule(RouterScore::Softmax);
        rule.renormalise = true;
        let by_all = choose(&[2.0, 0.0, 1.0], None, &rule);
        rule.score = RouterScore::SoftmaxOfChosen;
        rule.renormalise = false;
        let by_chosen = choose(&[2.0, 0.0, 1.0], None, &rule);
        for (a, b) in by_all.iter().zip(&by_chosen) {
            assert_eq!(a.expert, b.expert);
            assert!((a.weight - b.weight).abs() < 1e-6);
        }
    }
}
