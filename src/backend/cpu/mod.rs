//! The CPU: f32 arithmetic on weights widened as they are used. The reference for every other
//! backend, and the default of a machine without a GPU.

mod attention;
mod linear;
mod math;
mod reduce;

use anyhow::Result;
use half::{bf16, f16};
use rayon::prelude::*;
use serde_json::json;

use super::{
    Activation, AttentionShape, Backend, FloatDtype, HeadRows, HostWeight, Into, LogitRule,
    NormKind, Segments, Tensor,
};

/// f32 numbers in host memory, (rows, width).
#[derive(Clone, Debug, Default)]
pub struct Activations {
    data: Vec<f32>,
    rows: usize,
    width: usize,
}

impl Activations {
    fn data(&self) -> &[f32] {
        &self.data[..self.rows * self.width]
    }

    fn data_mut(&mut self) -> &mut [f32] {
        &mut self.data[..self.rows * self.width]
    }
}

impl Tensor for Activations {
    fn rows(&self) -> usize {
        self.rows
    }

    fn width(&self) -> usize {
        self.width
    }

    fn set_rows(&mut self, rows: usize) {
        assert!(
            rows * self.width <= self.data.len(),
            "a tensor of {} rows can't hold {rows}",
            self.data.len() / self.width.max(1)
        );
        self.rows = rows;
    }
}

/// A matrix stays where it is, in its stored dtype; a vector is widened once.
#[derive(Debug)]
pub enum CpuWeight {
    Matrix(HostWeight),
    Vector(Vec<f32>),
}

impl CpuWeight {
    fn matrix(&self) -> &HostWeight {
        match self {
            CpuWeight::Matrix(weight) => weight,
            CpuWeight::Vector(_) => panic!("expected a matrix, found a vector"),
        }
    }

    fn vector(&self) -> &[f32] {
        match self {
            CpuWeight::Vector(values) => values,
            CpuWeight::Matrix(_) => panic!("expected a vector, found a matrix"),
        }
    }
}

/// The CPU backend; all its threads are rayon's.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cpu;

impl Cpu {
    /// Bytes of scratch that all threads together grow to, for products of inner size up to
    /// `inner_max` and heads up to `head_dim`.
    pub fn scratch_bytes(inner_max: usize, head_dim: usize) -> usize {
        let thread = linear::scratch_elements(inner_max) + attention::scratch_elements(head_dim);
        rayon::current_num_threads() * (thread * size_of::<f32>() + GEMM_SCRATCH_BYTES)
    }
}

/// What the gemm crate keeps in a thread for its own packed blocks: up to its cache sizes.
const GEMM_SCRATCH_BYTES: usize = 4 << 20;

impl Backend for Cpu {
    type Tensor = Activations;
    type Weight = CpuWeight;
    type Index = Vec<u32>;

    fn provenance(&self) -> serde_json::Value {
        json!({
            "backend": "cpu",
            "device": cpu_model(),
            "instructions": instructions(),
        })
    }

    fn tensor(&self, rows_max: usize, width: usize) -> Result<Activations> {
        let elements = rows_max
            .checked_mul(width)
            .ok_or_else(|| anyhow::anyhow!("a buffer of {rows_max} x {width} is too large"))?;
        Ok(Activations {
            data: vec![0.0; elements],
            rows: rows_max,
            width,
        })
    }

    fn weight(&self, host: &HostWeight) -> Result<CpuWeight> {
        Ok(match host.shape.len() {
            1 => CpuWeight::Vector(widened(host)),
            _ => CpuWeight::Matrix(host.clone()),
        })
    }

    fn index(&self, values: &[u32]) -> Result<Vec<u32>> {
        Ok(values.to_vec())
    }

    fn download(&self, x: &Activations) -> Vec<f32> {
        x.data().to_vec()
    }

    fn upload(&self, values: &[f32], x: &mut Activations) {
        x.set_rows(values.len() / x.width.max(1));
        x.data_mut().copy_from_slice(values);
    }

    fn embed(&self, table: &CpuWeight, tokens: &Vec<u32>, out: &mut Activations) {
        let table = table.matrix();
        assert_eq!(table.width(), out.width, "embed: width");
        out.set_rows(tokens.len());
        let width = out.width;
        let rows = out.data_mut().par_chunks_exact_mut(width);
        rows.zip(tokens).for_each(|(row, &token)| {
            let token = token as usize;
            widen(&table.slice_rows(token..token + 1), row);
        });
    }

    fn norm(&self, x: &Activations, kind: NormKind, weight: &CpuWeight, out: &mut Activations) {
        let weight = weight.vector();
        assert_eq!(
            (x.width, x.width),
            (out.width, weight.len()),
            "norm: widths"
        );
        out.set_rows(x.rows);
        let NormKind::Rms { eps } = kind;
        let width = x.width;
        let rows = out.data_mut().par_chunks_exact_mut(width);
        rows.zip(x.data().par_chunks_exact(width))
            .for_each(|(out, x)| pulp::Arch::new().dispatch(|| rms_norm(x, weight, eps, out)));
    }

    fn linear(
        &self,
        x: &Activations,
        weight: &CpuWeight,
        bias: Option<&CpuWeight>,
        into: Into,
        out: &mut Activations,
    ) {
        linear::linear(x, weight.matrix(), bias.map(CpuWeight::vector), into, out);
    }

    fn rope(
        &self,
        x: &mut Activations,
        head_dim: usize,
        cos: &Activations,
        sin: &Activations,
        positions: &Vec<u32>,
    ) {
        let (width, half) = (x.width, head_dim / 2);
        assert_eq!((cos.width, sin.width), (half, half), "rope: tables");
        assert_eq!(positions.len(), x.rows, "rope: positions");
        let rows = x.data_mut().par_chunks_exact_mut(width);
        rows.zip(positions).for_each(|(row, &position)| {
            let at = position as usize * half;
            let (cos, sin) = (&cos.data()[at..at + half], &sin.data()[at..at + half]);
            for head in row.chunks_exact_mut(head_dim) {
                rotate_half(head, cos, sin);
            }
        });
    }

    fn attention(
        &self,
        shape: &AttentionShape,
        segments: &Segments,
        q: &Activations,
        k: &Activations,
        v: &Activations,
        out: &mut Activations,
    ) {
        attention::attention(shape, segments, q, k, v, out);
    }

    fn gate(&self, activation: Activation, gate: &mut Activations, up: &Activations) {
        assert_eq!((gate.rows, gate.width), (up.rows, up.width), "gate: shapes");
        let Activation::Silu = activation;
        let width = gate.width;
        let rows = gate.data_mut().par_chunks_exact_mut(width);
        rows.zip(up.data().par_chunks_exact(width))
            .for_each(|(gate, up)| {
                pulp::Arch::new().dispatch(|| {
                    for (g, u) in gate.iter_mut().zip(up) {
                        *g = math::silu(*g) * u;
                    }
                });
            });
    }

    fn gather(&self, x: &Activations, rows: &Vec<u32>, out: &mut Activations) {
        assert_eq!(out.width, x.width, "gather: widths");
        out.set_rows(rows.len());
        let width = x.width;
        for (out, &row) in out.data_mut().chunks_exact_mut(width).zip(rows) {
            let at = row as usize * width;
            out.copy_from_slice(&x.data()[at..at + width]);
        }
    }

    fn reduce_head(
        &self,
        logits: &mut Activations,
        rule: &LogitRule,
        targets: &[i32],
        out: &mut HeadRows,
    ) {
        reduce::reduce_head(logits, rule, targets, out);
    }
}

#[inline(always)]
fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let mean = math::sum_by(x, |v| v * v) / x.len() as f32;
    let factor = 1.0 / (mean + eps).sqrt();
    for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
        *out = w * (x * factor);
    }
}

fn rotate_half(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (low, high) = head.split_at_mut(cos.len());
    for (((a, b), c), s) in low.iter_mut().zip(high).zip(cos).zip(sin) {
        (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
    }
}

fn widened(weight: &HostWeight) -> Vec<f32> {
    let mut out = vec![0.0; weight.shape.iter().product()];
    widen(weight, &mut out);
    out
}

fn widen(weight: &HostWeight, out: &mut [f32]) {
    let bytes = weight.bytes();
    let (twos, fours) = (bytes.as_chunks::<2>().0, bytes.as_chunks::<4>().0);
    let pairs = out.iter_mut();
    match weight.dtype {
        FloatDtype::F32 => pairs
            .zip(fours)
            .for_each(|(o, b)| *o = f32::from_le_bytes(*b)),
        FloatDtype::F16 => pairs
            .zip(twos)
            .for_each(|(o, b)| *o = f16::from_le_bytes(*b).to_f32()),
        FloatDtype::Bf16 => pairs
            .zip(twos)
            .for_each(|(o, b)| *o = bf16::from_le_bytes(*b).to_f32()),
    }
}

/// The widest instructions in use: they decide which of gemm's kernels runs.
fn instructions() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    {
        if pulp::x86::V4::try_new().is_some() {
            return "x86-64-v4";
        }
        if pulp::x86::V3::try_new().is_some() {
            return "x86-64-v3";
        }
    }
    std::env::consts::ARCH
}

/// The processor's name, where the system tells it.
fn cpu_model() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
        .map(|(_, name)| name.trim().to_owned());
    name.unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}
