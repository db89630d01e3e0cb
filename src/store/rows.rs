//! The rows of a scored shard, read where they lie: at a commit, in `verify`, in `show`.

use anyhow::{Result, anyhow};
use half::f16;
use rayon::prelude::*;

use super::job::Terms;
use super::manifest::Sums;
use crate::products::{Dtype, Product};

/// Rows summed as one piece. Part of what a sum means: pieces are added in order.
const PIECE_ROWS: usize = 1 << 14;

/// Little-endian elements of one array.
#[derive(Clone, Copy, Debug)]
pub struct Column<'a> {
    pub dtype: Dtype,
    pub bytes: &'a [u8],
}

impl Column<'_> {
    /// Elements.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.dtype.size()
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    fn element<const N: usize>(&self, i: usize) -> [u8; N] {
        let at = &self.bytes[i * N..(i + 1) * N];
        at.try_into().expect("the slice has N bytes")
    }

    /// Element `i` of an int32 array.
    pub fn i32(&self, i: usize) -> i32 {
        i32::from_le_bytes(self.element(i))
    }

    /// Element `i` of a float16 or float32 array.
    pub fn f32(&self, i: usize) -> f32 {
        match self.dtype {
            Dtype::F16 => f16::from_le_bytes(self.element(i)).to_f32(),
            _ => f32::from_le_bytes(self.element(i)),
        }
    }

    fn is_float(&self) -> bool {
        matches!(self.dtype, Dtype::F16 | Dtype::F32)
    }

    /// First element that is NaN or infinite.
    pub fn first_non_finite(&self) -> Option<usize> {
        if !self.is_float() {
            return None;
        }
        (0..self.len())
            .into_par_iter()
            .find_first(|&i| !self.f32(i).is_finite())
    }

    /// Half the distance from `value` to the next number of this dtype: what rounding may take.
    pub fn half_spacing(&self, value: f32) -> f64 {
        let (digits, exponent_min) = match self.dtype {
            Dtype::F16 => (10, -14),
            _ => (23, -126),
        };
        let exponent = match value.abs() {
            v if v < f32::MIN_POSITIVE => exponent_min,
            v => (((v.to_bits() >> 23) as i32) - 127).max(exponent_min),
        };
        f64::from(exponent - digits - 1).exp2()
    }
}

/// The arrays of a shard side by side.
#[derive(Clone, Debug)]
pub struct ScoredRows<'a> {
    pub rows: usize,
    pub k: usize,
    vocab: usize,
    targets: Column<'a>, // (R)
    ids: Column<'a>,     // (R, K)
    logp: Column<'a>,    // (R, K)
    tail: Column<'a>,    // (R)
    extra: Vec<(Product, Column<'a>)>,
}

impl<'a> ScoredRows<'a> {
    /// `find` hands out the column of a product, whose length is already checked.
    pub(super) fn new(
        terms: &Terms,
        rows: usize,
        find: impl Fn(Product) -> Option<Column<'a>>,
    ) -> Result<ScoredRows<'a>> {
        let column = |product: Product| {
            find(product).ok_or_else(|| anyhow!("expected the product {}", product.name()))
        };
        let extra = terms.products.iter().map(|&(p, _)| p);
        let extra = extra.filter(|p| Product::EXTRA.contains(p));
        Ok(ScoredRows {
            rows,
            k: terms.k,
            vocab: terms.vocab_scored,
            targets: column(Product::Targets)?,
            ids: column(Product::Ids)?,
            logp: column(Product::Logp)?,
            tail: column(Product::Tail)?,
            extra: extra.map(|p| Ok((p, column(p)?))).collect::<Result<_>>()?,
        })
    }

    /// Ids are below this.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    pub fn target(&self, row: usize) -> i32 {
        self.targets.i32(row)
    }

    /// The `j`-th of the row's ids, best first.
    pub fn id(&self, row: usize, j: usize) -> i32 {
        self.ids.i32(row * self.k + j)
    }

    pub fn logp(&self, row: usize, j: usize) -> f32 {
        self.logp.f32(row * self.k + j)
    }

    pub fn tail(&self, row: usize) -> f32 {
        self.tail.f32(row)
    }

    /// The column of an extra product, where it is stored.
    pub fn extra(&self, product: Product) -> Option<Column<'a>> {
        let found = self.extra.iter().find(|(p, _)| *p == product);
        found.map(|(_, column)| *column)
    }

    /// Place of `token` among the row's ids.
    pub fn rank(&self, row: usize, token: i32) -> Option<usize> {
        (0..self.k).find(|&j| self.id(row, j) == token)
    }

    /// Log-prob of `token` as far as the row knows it: a token outside the top-k gets an even
    /// share of the tail.
    pub fn logp_of(&self, row: usize, token: i32) -> f64 {
        if let Some(j) = self.rank(row, token) {
            return f64::from(self.logp(row, j));
        }
        let tail = self.tail_at_most(row);
        let outside = self.vocab.saturating_sub(self.k).max(1);
        (tail / outside as f64).ln()
    }

    /// The tail mass; one that was rounded to 0 counts as the most that rounds to 0.
    pub(super) fn tail_at_most(&self, row: usize) -> f64 {
        f64::from(self.tail(row)).max(self.tail.half_spacing(0.0))
    }

    pub(super) fn logp_half_spacing(&self, value: f32) -> f64 {
        self.logp.half_spacing(value)
    }

    pub(super) fn tail_half_spacing(&self, value: f32) -> f64 {
        self.tail.half_spacing(value)
    }

    /// The manifest's figures. The same on any number of threads.
    pub(super) fn sums(&self) -> Sums {
        let exact = self.extra(Product::TargetLogp);
        let pieces: Vec<(f64, f64)> = (0..self.rows.div_ceil(PIECE_ROWS))
            .into_par_iter()
            .map(|piece| {
                let end = ((piece + 1) * PIECE_ROWS).min(self.rows);
                (piece * PIECE_ROWS..end).fold((0.0, 0.0), |(logp, tail), row| {
                    let target = match exact {
                        Some(column) => f64::from(column.f32(row)),
                        None => self.logp_of(row, self.target(row)),
                    };
                    (logp + target, tail + f64::from(self.tail(row)))
                })
            })
            .collect();
        let (logp, tail) = pieces
            .iter()
            .fold((0.0, 0.0), |sum, piece| (sum.0 + piece.0, sum.1 + piece.1));
        let mean = |sum: f64| (self.rows > 0).then(|| sum / self.rows as f64);
        Sums {
            mean_target_logp: mean(logp),
            mean_tail: mean(tail),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_spacing_is_half_the_way_to_the_next_number() {
        let column = |dtype| Column { dtype, bytes: &[] };
        for bits in [0u16, 1, 0x3ff, 0x400, 0x3c00, 0x4248, 0x7bfe] {
            let (value, next) = (f16::from_bits(bits), f16::from_bits(bits + 1));
            let half = (next.to_f64() - value.to_f64()) / 2.0;
            assert_eq!(column(Dtype::F16).half_spacing(value.to_f32()), half);
            assert_eq!(column(Dtype::F16).half_spacing(-value.to_f32()), half);
        }
        for value in [0.0f32, 1e-45, 1e-38, 0.7, 1.0, 65504.0] {
            let half = (f64::from(value.next_up()) - f64::from(value)) / 2.0;
            assert_eq!(column(Dtype::F32).half_spacing(value), half);
        }
    }
}
