//! Matrix products on one constant row tile.
//!
//! The gemm crate picks its kernels, and with them the order of additions, by the shape of the
//! call. So every product here has the same shape for a given weight: [`ROW_TILE`] rows of x, the
//! last tile padded with zeros, against panels of [`PANEL`] rows of the weight. A row's bits then
//! don't depend on how many rows came with it, nor on which row of the tile it is, nor on the
//! thread that computed it.
//!
//! A panel is widened to f32 and transposed once per group of tiles, because gemm reads its left
//! side fastest in that order; the weight itself stays where it is, in its stored dtype.

use std::cell::RefCell;
use std::ops::Range;

use rayon::prelude::*;

use super::Activations;
use crate::backend::{Encoding, FloatDtype, HostWeight, Into, Tensor};

/// Rows of x in one call of gemm: a multiple of the rows its kernels take at once (4, 6 or 8), so
/// that every row of a tile goes through the same kernel.
pub const ROW_TILE: usize = 96;

/// Rows of the weight, output features, in one call of gemm.
pub const PANEL: usize = 192;

/// Rows and columns transposed at a time: 16 f32 are a cache line of the result.
const SQUARE: usize = 16;

/// f32 scratch of one thread for products of inner size `k`: a panel, and a tile in and out.
pub fn scratch_elements(k: usize) -> usize {
    PANEL * k + ROW_TILE * (k + PANEL)
}

#[derive(Default)]
struct Scratch {
    panel: Vec<f32>,    // (K, PANEL)
    tile_in: Vec<f32>,  // (ROW_TILE, K)
    tile_out: Vec<f32>, // (ROW_TILE, PANEL)
}

thread_local! {
    /// Grows to the largest weight seen and is then reused.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// out (T, N) = or += x (T, K) · weightᵀ (N, K) + bias (N).
pub fn linear(
    x: &Activations,
    weight: &HostWeight,
    bias: Option<&[f32]>,
    into: Into,
    out: &mut Activations,
) {
    let (n, k) = (weight.rows(), weight.width());
    assert_eq!(x.width, k, "linear: shapes don't fit");
    match into {
        Into::Replace => out.set_shape(x.rows, n),
        Into::Add => assert_eq!(
            (x.rows, n),
            (out.rows, out.width),
            "linear: shapes don't fit"
        ),
    }
    if x.rows == 0 {
        return;
    }
    let job = Product {
        x: x.data(),
        rows: x.rows,
        weight,
        bias,
        into,
        out: OutPointer(out.data_mut().as_mut_ptr()),
    };
    let panels = n.div_ceil(PANEL);
    let tiles = x.rows.div_ceil(ROW_TILE);
    let groups = tile_groups(panels, tiles);
    (0..panels * groups).into_par_iter().for_each(|task| {
        let (panel, group) = (task / groups, task % groups);
        let features = panel * PANEL..((panel + 1) * PANEL).min(n);
        let tiles = tiles * group / groups..tiles * (group + 1) / groups;
        SCRATCH.with_borrow_mut(|scratch| job.panel(features, tiles, scratch));
    });
}

/// How many groups the tiles are split into, so that every thread has work. Only who computes a
/// tile depends on it, never what.
fn tile_groups(panels: usize, tiles: usize) -> usize {
    let tasks_wanted = 2 * rayon::current_num_threads();
    tasks_wanted.div_ceil(panels).clamp(1, tiles)
}

/// Where the threads write; each task owns its own columns and rows of it.
struct OutPointer(*mut f32);
// SAFETY: tasks write disjoint parts, see `Product::panel`.
unsafe impl Sync for OutPointer {}

struct Product<'a> {
    x: &'a [f32], // (T, K)
    rows: usize,
    weight: &'a HostWeight,
    bias: Option<&'a [f32]>, // (N)
    into: Into,
    out: OutPointer, // (T, N)
}

impl Product<'_> {
    /// Columns `features` of the output, in the rows of `tiles`.
    fn panel(&self, features: Range<usize>, tiles: Range<usize>, scratch: &mut Scratch) {
        let k = self.weight.width();
        let n = features.len();
        scratch.panel.resize(PANEL.max(n) * k, 0.0);
        scratch.tile_in.resize(ROW_TILE * k, 0.0);
        scratch.tile_out.resize(ROW_TILE * PANEL, 0.0);
        widen_transposed(
            &self.weight.slice_rows(features.clone()),
            &mut scratch.panel[..n * k],
        );
        for tile in tiles {
            let rows = tile * ROW_TILE..((tile + 1) * ROW_TILE).min(self.rows);
            let x = &self.x[rows.start * k..rows.end * k];
            let x = if rows.len() == ROW_TILE {
                x
            } else {
                scratch.tile_in.fill(0.0);
                scratch.tile_in[..x.len()].copy_from_slice(x);
                &scratch.tile_in
            };
            tile_product(x, &scratch.panel, k, n, &mut scratch.tile_out);
            self.store(&scratch.tile_out, rows, features.clone());
        }
    }

    /// Adds the bias and puts the tile's rows in their place.
    fn store(&self, tile: &[f32], rows: Range<usize>, features: Range<usize>) {
        let (n_all, n) = (self.weight.rows(), features.len());
        for (row, values) in rows.zip(tile.chunks_exact(n)) {
            // SAFETY: row < T and features.end <= N, so the span lies inside out; no other task
            // has the same row and features, and `linear` holds out exclusively while tasks run.
            let out = unsafe {
                std::slice::from_raw_parts_mut(self.out.0.add(row * n_all + features.start), n)
            };
            match self.into {
                Into::Replace => out.copy_from_slice(values),
                Into::Add => add(values, out),
            }
            if let Some(bias) = self.bias {
                add(&bias[features.clone()], out);
            }
        }
    }
}

fn add(values: &[f32], out: &mut [f32]) {
    pulp::Arch::new().dispatch(|| out.iter_mut().zip(values).for_each(|(o, v)| *o += v));
}

/// out (ROW_TILE, n) = x (ROW_TILE, K) · panel (K, n). The one shape gemm is called with.
fn tile_product(x: &[f32], panel: &[f32], k: usize, n: usize, out: &mut [f32]) {
    assert!(x.len() >= ROW_TILE * k && panel.len() >= k * n && out.len() >= ROW_TILE * n);
    // SAFETY: the lengths were just checked against the strides given here, and `out` overlaps
    // neither input, being a mutable borrow.
    unsafe {
        gemm::gemm(
            ROW_TILE,
            n,
            k,
            out.as_mut_ptr(),
            1,
            n as isize,
            false,
            x.as_ptr(),
            1,
            k as isize,
            panel.as_ptr(),
            1,
            n as isize,
            0.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

/// out (K, n) = weight (n, K), transposed, as f32.
fn widen_transposed(weight: &HostWeight, out: &mut [f32]) {
    let w = weight;
    let shape = [w.rows(), w.width()];
    pulp::Arch::new().dispatch(|| match w.encoding {
        Encoding::Float(FloatDtype::F32) => transposed(shape, out, |n, k, o| w.read_f32(n, k, o)),
        Encoding::Float(FloatDtype::F16) => transposed(shape, out, |n, k, o| w.read_f16(n, k, o)),
        Encoding::Float(FloatDtype::Bf16) => {
            transposed(shape, out, |n, k, o| w.read_bf16(n, k, o));
        }
        Encoding::Fp8Blocks { .. } | Encoding::Mxfp4 => {
            transposed(shape, out, |n, k, o| w.read(n, k, o));
        }
    });
}

/// In squares of [`SQUARE`], so that the weight is read along its rows and whole cache lines of
/// the result are written. `read(n, k, o)` gives the numbers from k on of row n.
#[inline(always)]
fn transposed([n, k]: [usize; 2], out: &mut [f32], read: impl Fn(usize, usize, &mut [f32])) {
    let mut square = [[0.0f32; SQUARE]; SQUARE]; // (k, n)
    let mut line = [0.0f32; SQUARE];
    for n0 in (0..n).step_by(SQUARE) {
        let features = SQUARE.min(n - n0);
        for k0 in (0..k).step_by(SQUARE) {
            let columns = SQUARE.min(k - k0);
            for f in 0..features {
                read(n0 + f, k0, &mut line[..columns]);
                for (row, &value) in square.iter_mut().zip(&line[..columns]) {
                    row[f] = value;
                }
            }
            for (c, row) in square[..columns].iter().enumerate() {
                let at = (k0 + c) * n + n0;
                out[at..at + features].copy_from_slice(&row[..features]);
            }
        }
    }
}
