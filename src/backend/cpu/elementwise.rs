//! Ops that touch each number once.

use rayon::prelude::*;

use super::{Activations, math};
use crate::backend::{Activation, HostWeight, Into, RopePairs, RopeShape, Tensor};

/// See `Backend::embed`.
pub fn embed(table: &HostWeight, rows: &[u32], into: Into, out: &mut Activations) {
    let width = table.width();
    match into {
        Into::Replace => out.set_shape(rows.len(), width),
        Into::Add => assert_eq!((rows.len(), width), (out.rows, out.width), "embed: shapes"),
    }
    let each = out.data_mut().par_chunks_exact_mut(width).zip(rows);
    each.for_each_with(vec![0.0; width], |values, (out, &row)| {
        table.read(row as usize, 0, values);
        match into {
            Into::Replace => out.copy_from_slice(values),
            Into::Add => out.iter_mut().zip(values).for_each(|(o, v)| *o += *v),
        }
    });
}

/// See `Backend::rope`.
pub fn rope(
    x: &mut Activations,
    shape: &RopeShape,
    [cos, sin]: [&Activations; 2],
    positions: &[u32],
) {
    let half = cos.width;
    let rotated = shape.start..shape.start + 2 * half;
    assert_eq!(sin.width, half, "rope: tables");
    assert!(rotated.end <= shape.head_dim, "rope: wider than a head");
    assert_eq!(positions.len(), x.rows, "rope: positions");
    let width = x.width;
    let rows = x.data_mut().par_chunks_exact_mut(width);
    rows.zip(positions).for_each(|(row, &position)| {
        let at = position as usize * half;
        let (cos, sin) = (&cos.data()[at..at + half], &sin.data()[at..at + half]);
        for head in row.chunks_exact_mut(shape.head_dim) {
            let head = &mut head[rotated.clone()];
            match shape.pairs {
                RopePairs::Halves => rotate_halves(head, cos, sin),
                RopePairs::Neighbours => rotate_neighbours(head, cos, sin),
            }
        }
    });
}

fn rotate_halves(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (low, high) = head.split_at_mut(cos.len());
    for (((a, b), c), s) in low.iter_mut().zip(high).zip(cos).zip(sin) {
        (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
    }
}

fn rotate_neighbours(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (pairs, _) = head.as_chunks_mut::<2>();
    for (([a, b], c), s) in pairs.iter_mut().zip(cos).zip(sin) {
        (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
    }
}

/// See `Backend::join_heads`.
pub fn join_heads(own: &Activations, shared: &Activations, heads: usize, out: &mut Activations) {
    assert_eq!(own.rows, shared.rows, "join: rows");
    let (part, tail) = (own.width / heads, shared.width);
    out.set_shape(own.rows, heads * (part + tail));
    let width = out.width;
    let rows = out.data_mut().par_chunks_exact_mut(width).enumerate();
    rows.for_each(|(row, out)| {
        let own = &own.data()[row * heads * part..];
        let shared = &shared.data()[row * tail..(row + 1) * tail];
        for (head, own) in out
            .chunks_exact_mut(part + tail)
            .zip(own.chunks_exact(part))
        {
            head[..part].copy_from_slice(own);
            head[part..].copy_from_slice(shared);
        }
    });
}

/// See `Backend::activate`.
pub fn activate(activation: Activation, x: &mut Activations, up: Option<&Activations>) {
    let width = x.width;
    if let Some(up) = up {
        assert_eq!((x.rows, x.width), (up.rows, up.width), "activate: shapes");
    }
    let rows = x.data_mut().par_chunks_exact_mut(width).enumerate();
    rows.for_each(|(row, x)| {
        let up = up.map(|up| &up.data()[row * width..(row + 1) * width]);
        pulp::Arch::new().dispatch(|| activate_row(activation, x, up));
    });
}

#[inline(always)]
fn activate_row(activation: Activation, x: &mut [f32], up: Option<&[f32]>) {
    match activation {
        Activation::Silu => apply(x, up, math::silu),
        Activation::Gelu => apply(x, up, gelu),
        Activation::GeluTanh => apply(x, up, gelu_tanh),
        Activation::Relu => apply(x, up, relu),
        Activation::Relu2 => apply(x, up, |v| relu(v) * relu(v)),
        Activation::ClampedSwiglu { alpha, limit } => {
            let up = up.unwrap_or(&[]);
            for (g, &u) in x.iter_mut().zip(up) {
                let gate = if *g > limit { limit } else { *g };
                *g = (u.clamp(-limit, limit) + 1.0) * (gate * math::sigmoid(gate * alpha));
            }
        }
    }
}

#[inline(always)]
fn apply(x: &mut [f32], up: Option<&[f32]>, f: impl Fn(f32) -> f32) {
    match up {
        Some(up) => x.iter_mut().zip(up).for_each(|(x, u)| *x = f(*x) * u),
        None => x.iter_mut().for_each(|x| *x = f(*x)),
    }
}

#[inline(always)]
fn gelu(x: f32) -> f32 {
    0.5 * x * (1.0 + math::erf(x * std::f32::consts::FRAC_1_SQRT_2))
}

#[inline(always)]
fn gelu_tanh(x: f32) -> f32 {
    const SQRT_2_OVER_PI: f32 = 0.797_884_6;
    0.5 * x * (1.0 + math::tanh(SQRT_2_OVER_PI * (x + 0.044715 * (x * x * x))))
}

#[inline(always)]
fn relu(x: f32) -> f32 {
    if x < 0.0 { 0.0 } else { x }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(values: &[f32], width: usize) -> Activations {
        Activations {
            data: values.to_vec(),
            rows: values.len() / width,
            width,
        }
    }

    #[test]
    fn a_quarter_turn_swaps_each_pair_and_leaves_the_rest() {
        let (cos, sin) = (tensor(&[0.0, 0.0], 2), tensor(&[1.0, 1.0], 2));
        let turned = |pairs, start| {
            let mut x = tensor(&[1.0, 2.0, 3.0, 4.0, 5.0], 5);
            let shape = RopeShape {
                head_dim: 5,
                start,
                pairs,
            };
            rope(&mut x, &shape, [&cos, &sin], &[0]);
            x.data
        };
        assert_eq!(turned(RopePairs::Halves, 0), [-3.0, -4.0, 1.0, 2.0, 5.0]);
        assert_eq!(
            turned(RopePairs::Neighbours, 1),
            [1.0, -3.0, 2.0, -5.0, 4.0]
        );
    }

    #[test]
    fn clamped_swiglu_limits_both_sides() {
        let rule = Activation::ClampedSwiglu {
            alpha: 1.0,
            limit: 2.0,
        };
        let mut x = tensor(&[9.0, -9.0], 2);
        activate(rule, &mut x, Some(&tensor(&[5.0, -5.0], 2)));
        let sigmoid = |v: f32| 1.0 / (1.0 + (-v).exp());
        assert!((x.data[0] - 3.0 * 2.0 * sigmoid(2.0)).abs() < 1e-5);
        assert!((x.data[1] + -9.0 * sigmoid(-9.0)).abs() < 1e-5);
    }

    #[test]
    fn shared_numbers_go_to_every_head() {
        let mut out = tensor(&[0.0; 6], 6);
        join_heads(
            &tensor(&[1.0, 2.0, 3.0, 4.0], 4),
            &tensor(&[9.0], 1),
            2,
            &mut out,
        );
        assert_eq!(out.data, [1.0, 2.0, 9.0, 3.0, 4.0, 9.0]);
    }
}
