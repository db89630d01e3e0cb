//! Norms of rows, or of equal pieces of them.

use super::math;
use crate::backend::{NormKind, NormShape};

/// out (N) = norm of each piece of x (N). `weight` and `bias` are as wide as the row or as one
/// piece; empty for none.
#[inline(always)]
pub fn norm_row(x: &[f32], shape: &NormShape, weight: &[f32], bias: &[f32], out: &mut [f32]) {
    let width = shape.width;
    let pieces = out.chunks_exact_mut(width).zip(x.chunks_exact(width));
    for (piece, (out, x)) in pieces.enumerate() {
        let (mean, factor) = statistics(x, shape);
        out.iter_mut()
            .zip(x)
            .for_each(|(o, x)| *o = (x - mean) * factor);
        let weights = weight.chunks_exact(width).cycle().nth(piece);
        if let Some(weights) = weights {
            out.iter_mut().zip(weights).for_each(|(o, w)| *o *= w);
        }
        if let Some(biases) = bias.chunks_exact(width).cycle().nth(piece) {
            out.iter_mut().zip(biases).for_each(|(o, b)| *o += b);
        }
    }
}

/// What is subtracted from a piece, and what it is then multiplied by.
#[inline(always)]
fn statistics(x: &[f32], shape: &NormShape) -> (f32, f32) {
    let count = x.len() as f32;
    let mean = match shape.kind {
        NormKind::Rms => 0.0,
        NormKind::Layer => math::sum_by(x, |v| v) / count,
    };
    let variance = math::sum_by(x, |v| (v - mean) * (v - mean)) / count;
    (mean, 1.0 / (variance + shape.eps).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_normalised_apart_and_weights_repeat() {
        let shape = NormShape {
            kind: NormKind::Layer,
            eps: 0.0,
            width: 2,
        };
        let mut out = [0.0; 4];
        norm_row(
            &[1.0, 3.0, 10.0, 6.0],
            &shape,
            &[2.0, 5.0],
            &[0.5, 0.0],
            &mut out,
        );
        assert_eq!(out, [-1.5, 5.0, 2.5, -5.0]);
        norm_row(
            &[1.0, 3.0, 10.0, 6.0],
            &shape,
            &[1.0, 2.0, 3.0, 4.0],
            &[],
            &mut out,
        );
        assert_eq!(out, [-1.0, 2.0, 3.0, -4.0]);
    }
}
