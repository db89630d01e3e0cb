//! Linear maps: by the algorithm stored for their shape. The first call of a shape decides it.
//!
//! An algorithm is tried on the weight at hand and rows of noise, over and over: on numbers of row
//! tiles from one to the most there is room for, rows at the start, in the middle and at the end must
//! have the bits they have in a single tile.

use std::time::Instant;

use anyhow::{Result, ensure};

use super::arena::{Bytes, Room, Use};
use super::driver::Stream;
use super::gemm::{self, Choice, Product, ROWS_LEAST, Shape, rows_to_try};
use super::kernels::OwnProduct;
use super::libraries::Algorithm;
use super::tensor::{DeviceTensor, Kind, TILE, View};
use super::weights::DeviceWeight;
use super::{Cuda, encode, word_bytes};
use crate::backend::{Backend, Into, Linear, Precision, Tensor};

/// Most rows that a batch may have when the first product of a shape is asked for: those are put
/// back after the trial, what lies behind them isn't.
const ROWS_KEPT_MAX: usize = 64;
/// Rows of noise. Each lies elsewhere in every tile; and sums that differ in the last bits of fp32
/// seldom differ in bf16, so that it takes many numbers to tell.
const NOISE_ROWS: usize = TILE - 1;

impl Cuda {
    /// out = or += x · wᵀ + bias; the shapes are set.
    pub(super) fn multiply(
        &self,
        stream: &Stream,
        x: &DeviceTensor,
        linear: &Linear<DeviceWeight>,
        into: Into,
        out: &DeviceTensor,
    ) -> Result<()> {
        let (weight, kind, outputs, inputs) = linear.weight.matrix();
        let (x_view, out_view) = (x.view(), out.view());
        ensure!(
            x_view.kind == kind && x_view.width == inputs && out_view.width == outputs,
            "linear: expected x of width {inputs} in {kind:?}, found {} in {:?}",
            x_view.width,
            x_view.kind
        );
        let bias_in = |kind| linear.bias.as_ref().map_or(0, |bias| bias.vector_in(kind));
        let product = Product {
            out: out_view,
            x: x_view,
            weight,
            bias: bias_in(out_view.kind),
            into,
        };
        let shape = Shape::of(&product);
        let choice = match self.made.gemm.chosen(&shape) {
            Some(choice) => choice,
            None => self.decide(stream, &product, x.rows_max().min(out.rows_max()))?,
        };
        match choice {
            Choice::Library(algorithm) => self.by_library(stream, &product, &algorithm),
            Choice::Own => self.by_own(stream, &product, bias_in(Kind::F32)),
        }
    }

    fn by_library(&self, stream: &Stream, product: &Product, with: &Algorithm) -> Result<()> {
        let workspace = self.workspace.as_ref().map_or(0, Room::address);
        self.made.gemm.multiply(stream, product, with, workspace)
    }

    /// `bias` in fp32, or 0.
    fn by_own(&self, stream: &Stream, product: &Product, bias: u64) -> Result<()> {
        let own = OwnProduct {
            out: product.out,
            x: product.x,
            weight: product.weight,
            bias,
            into: product.into,
        };
        self.made.kernels.multiply(stream, &own)
    }

    /// Finds the algorithm of a shape, and keeps it.
    fn decide(&self, stream: &Stream, product: &Product, rows_max: usize) -> Result<Choice> {
        let shape = Shape::of(product);
        let gemm = &self.made.gemm;
        let trial = Trial {
            cuda: self,
            stream,
            product,
            rows_max,
        };
        let mut choice = Choice::Own;
        let proposals = gemm.proposals(stream, product)?;
        if !proposals.is_empty() {
            choice = trial.first_that_keeps_bits(&proposals)?;
        }
        gemm.keep(shape, choice);
        Ok(choice)
    }
}

/// The trial of algorithms on a product.
struct Trial<'a> {
    cuda: &'a Cuda,
    stream: &'a Stream,
    product: &'a Product,
    /// Rows that both buffers have room for, in whole tiles.
    rows_max: usize,
}

impl Trial<'_> {
    fn first_that_keeps_bits(&self, proposals: &[Algorithm]) -> Result<Choice> {
        let rows = self.product.x.rows;
        ensure!(
            (1..=ROWS_KEPT_MAX).contains(&rows) && self.rows_max >= TILE,
            "a product of a new shape: expected at most {ROWS_KEPT_MAX} rows to try it on, found {rows}"
        );
        let used = [self.product.x, self.product.out];
        let kept = used.map(|view| self.cuda.read(view.address, view.bytes()));
        let kept: Vec<Vec<u8>> = kept.into_iter().collect::<Result<_>>()?;
        self.fill_with_noise()?;
        let mut choice = Choice::Own;
        for algorithm in proposals {
            if self.keeps_bits(algorithm)? {
                choice = Choice::Library(*algorithm);
                break;
            }
        }
        for (view, bytes) in used.iter().zip(kept) {
            self.cuda.overwrite(view.address, &bytes)?;
        }
        Ok(choice)
    }

    /// Noise in all rows of x.
    fn fill_with_noise(&self) -> Result<()> {
        let first = self.product.x.at_row(0, NOISE_ROWS);
        let mut bytes = vec![0; first.bytes()];
        encode(&noise(first.numbers()), first.kind, &mut bytes);
        self.cuda.overwrite(first.address, &bytes)?;
        let behind = first.at_row(NOISE_ROWS, self.rows_max - NOISE_ROWS);
        let repeated = (0..behind.rows).map(|row| (row % NOISE_ROWS) as u32);
        let numbers: Vec<u32> = repeated.collect();
        let index = self.cuda.sent(&word_bytes(&numbers), Use::Batch)?;
        let (kernels, rows) = (&self.cuda.made.kernels, index.address());
        kernels.gather(self.stream, behind, first, rows)
    }

    fn keeps_bits(&self, algorithm: &Algorithm) -> Result<bool> {
        let mut expected: Option<Vec<u8>> = None;
        for tiled in rows_to_try(self.rows_max) {
            let all = self.product.on_rows(tiled);
            let (at, bytes) = (all.out.address, all.out.bytes());
            // SAFETY: the buffer has room for `rows_max` rows.
            unsafe { self.stream.clear(at, bytes)? };
            self.cuda.by_library(self.stream, &all, algorithm)?;
            for first in self.places(tiled) {
                let found = self.rows_at(&all.out, first)?;
                match &expected {
                    None => expected = Some(found),
                    Some(expected) if *expected != found => return Ok(false),
                    Some(_) => {}
                }
            }
        }
        Ok(true)
    }

    /// Rows where a copy starts: the first, one in the middle, and the last whole one.
    fn places(&self, tiled: usize) -> [usize; 3] {
        let copies = tiled / NOISE_ROWS;
        [0, copies / 2, copies - 1].map(|copy| copy * NOISE_ROWS)
    }

    fn rows_at(&self, out: &View, first: usize) -> Result<Vec<u8>> {
        let rows = out.at_row(first, NOISE_ROWS);
        self.cuda.read(rows.address, rows.bytes())
    }
}

/// Numbers in [-1, 1), the same in every run.
fn noise(count: usize) -> Vec<f32> {
    // SplitMix64 (Steele, Lea and Flood 2014).
    let numbers = (1..=count as u64).map(|i| {
        let mut z = i.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    });
    numbers.collect()
}

/// A device that takes longer for a product of 512 by 512 is no GPU that large ones are made for:
/// this is a thousand times what those take.
const SMALL_SECONDS_MAX: f64 = 5e-3;

/// FLOP/s of square products, a few in a row.
pub(super) fn peak_flops(cuda: &Cuda) -> Result<f64> {
    // Small first: a device that takes long for that, or has no room for more, is measured with it.
    let (mut best, seconds) = square(cuda, 512, 1)?;
    let (free, _) = cuda.memory()?;
    if seconds < SMALL_SECONDS_MAX && square_bytes(2048) < free / 2 {
        // Memory that looks free may be somebody else's by now; the plan will say so.
        if let Ok((rate, _)) = square(cuda, 2048, 32) {
            best = f64::max(best, rate);
        }
    }
    Ok(best)
}

/// What three square matrices take, and the library.
fn square_bytes(size: usize) -> usize {
    3 * size.max(ROWS_LEAST) * size * Kind::F32.size() + gemm::WORKSPACE_BYTES + (1 << 20)
}

/// FLOP/s and seconds of `times` products of square matrices.
fn square(cuda: &Cuda, size: usize, times: usize) -> Result<(f64, f64)> {
    let bytes = Bytes {
        buffers: square_bytes(size),
        ..Bytes::default()
    };
    let cuda = cuda.with_memory(bytes)?;
    let stream = &cuda.made.stream;
    let tensor = || cuda.tensor(Precision::Compute, size, size);
    let (mut x, weight, mut out) = (tensor()?, tensor()?, tensor()?);
    let on_rows = |x: &mut DeviceTensor, out: &mut DeviceTensor, rows| {
        x.set_shape(rows, size);
        out.set_shape(rows, size);
        Product {
            out: out.view(),
            x: x.view(),
            weight: weight.view().address,
            bias: 0,
            into: Into::Replace,
        }
    };
    for tensor in [&x, &weight] {
        // SAFETY: the tensor's own bytes.
        unsafe { stream.clear(tensor.view().address, tensor.view().bytes())? };
    }
    let few = on_rows(&mut x, &mut out, 8);
    let choice = cuda.decide(stream, &few, size)?;
    cuda.made.gemm.forget(&Shape::of(&few));
    let all = on_rows(&mut x, &mut out, size);
    let run = || match choice {
        Choice::Library(algorithm) => cuda.by_library(stream, &all, &algorithm),
        Choice::Own => cuda.by_own(stream, &all, 0),
    };
    run()?;
    stream.wait()?;
    let started = Instant::now();
    (0..times).try_for_each(|_| run())?;
    stream.wait()?;
    let seconds = started.elapsed().as_secs_f64();
    Ok((
        times as f64 * 2.0 * (size as f64).powi(3) / seconds,
        seconds,
    ))
}
