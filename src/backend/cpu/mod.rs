//! The CPU: f32 arithmetic on weights widened as they are used. The reference for every other
//! backend, and the default of a machine without a GPU.

mod attention;
mod elementwise;
mod experts;
mod linear;
mod math;
mod norm;
mod peak;
mod reduce;

use std::ops::Range;

use anyhow::Result;
use rayon::prelude::*;
use serde_json::json;

use super::{
    Activation, AttentionShape, Backend, Experts, ExpertsRule, HeadRows, HostWeight, Into, Linear,
    LogitRule, MlpSizes, MlpWork, Norm, Precision, RopeShape, Segments, Tensor,
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

    fn set_shape(&mut self, rows: usize, width: usize) {
        assert!(
            rows * width <= self.data.len(),
            "a tensor of {} numbers can't hold {rows} x {width}",
            self.data.len()
        );
        (self.rows, self.width) = (rows, width);
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
    /// `inner_max` and heads with values up to `value_dim`.
    pub fn scratch_bytes(inner_max: usize, value_dim: usize) -> usize {
        let thread = linear::scratch_elements(inner_max) + attention::scratch_elements(value_dim);
        rayon::current_num_threads() * (thread * size_of::<f32>() + GEMM_SCRATCH_BYTES)
    }

    /// FLOP/s that this machine's f32 products reach at best, measured now.
    pub fn peak_flops() -> f64 {
        peak::gemm_peak_flops()
    }
}

/// What the gemm crate keeps in a thread for its own packed blocks: up to its cache sizes.
const GEMM_SCRATCH_BYTES: usize = 4 << 20;

impl Backend for Cpu {
    type Tensor = Activations;
    type Weight = CpuWeight;
    type Index = Vec<u32>;
    type Segments = Segments;
    type Experts = Experts<CpuWeight>;
    type Routing = ();
    type Rows = HeadRows;

    fn provenance(&self) -> serde_json::Value {
        json!({
            "backend": "cpu",
            "device": cpu_model(),
            "instructions": instructions(),
            "gemm": option_env!("KDSCORE_GEMM").unwrap_or("unknown"),
        })
    }

    /// All numbers are f32 here.
    fn tensor(&self, _: Precision, rows_max: usize, width: usize) -> Result<Activations> {
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
            1 => CpuWeight::Vector(host.values()),
            _ => CpuWeight::Matrix(host.clone()),
        })
    }

    fn mlp_work(&self, sizes: &MlpSizes) -> Result<MlpWork<Activations, ()>> {
        let experts = sizes.experts.as_ref();
        let hidden = experts.map_or(0, |experts| experts.hidden);
        let inner = sizes.inner.max(experts.map_or(0, |experts| experts.inner));
        let room = |width| self.tensor(Precision::Compute, sizes.rows_max, width);
        Ok(MlpWork {
            rows: room(hidden)?,
            gate: room(inner)?,
            up: room(inner)?,
            result: room(hidden)?,
            routing: (),
        })
    }

    fn rows(&self, rows_max: usize, k: usize) -> Result<HeadRows> {
        Ok(HeadRows::with_capacity(rows_max, k))
    }

    fn experts_of(&self, experts: Experts<CpuWeight>) -> Result<Experts<CpuWeight>> {
        Ok(experts)
    }

    fn segments(&self, segments: Segments) -> Result<Segments> {
        Ok(segments)
    }

    fn index(&self, values: &[u32]) -> Result<Vec<u32>> {
        Ok(values.to_vec())
    }

    fn download(&self, x: &Activations) -> Vec<f32> {
        x.data().to_vec()
    }

    fn upload(&self, values: &[f32], x: &mut Activations) {
        x.set_shape(values.len() / x.width.max(1), x.width);
        x.data_mut().copy_from_slice(values);
    }

    fn embed(&self, table: &CpuWeight, rows: &Vec<u32>, into: Into, out: &mut Activations) {
        elementwise::embed(table.matrix(), rows, into, out);
    }

    fn scale(&self, x: &mut Activations, factor: f32) {
        x.data_mut().par_iter_mut().for_each(|v| *v *= factor);
    }

    fn scale_rows(&self, x: &mut Activations, factors: &Activations, rows: &Vec<u32>) {
        assert_eq!((x.rows, 1), (rows.len(), factors.width), "scale rows");
        let width = x.width;
        let each = x.data_mut().par_chunks_exact_mut(width).zip(rows);
        each.for_each(|(x, &row)| {
            let factor = factors.data()[row as usize];
            x.iter_mut().for_each(|v| *v *= factor);
        });
    }

    fn gate_rows(&self, x: &mut Activations, gate: &Activations) {
        assert_eq!((x.rows, 1), (gate.rows, gate.width), "gate rows");
        let width = x.width;
        let each = x.data_mut().par_chunks_exact_mut(width).zip(gate.data());
        each.for_each(|(x, &gate)| {
            let factor = math::sigmoid(gate);
            x.iter_mut().for_each(|v| *v *= factor);
        });
    }

    fn clip(&self, x: &mut Activations, bound: f32) {
        let each = x.data_mut().par_iter_mut();
        each.for_each(|v| *v = v.clamp(-bound, bound));
    }

    fn copy(&self, x: &Activations, out: &mut Activations) {
        out.set_shape(x.rows, x.width);
        out.data_mut().copy_from_slice(x.data());
    }

    fn add_scaled(&self, x: &Activations, factor: f32, out: &mut Activations) {
        assert_eq!((x.rows, x.width), (out.rows, out.width), "add: shapes");
        let each = out.data_mut().par_iter_mut().zip(x.data());
        each.for_each(|(o, v)| *o += v * factor);
    }

    fn norm(&self, x: &Activations, norm: &Norm<CpuWeight>, out: &mut Activations) {
        out.set_shape(x.rows, x.width);
        let (weight, bias) = norm_vectors(norm, x.width);
        let rows = out.data_mut().par_chunks_exact_mut(x.width);
        rows.zip(x.data().par_chunks_exact(x.width))
            .for_each(|(out, x)| {
                pulp::Arch::new().dispatch(|| norm::norm_row(x, &norm.shape, weight, bias, out));
            });
    }

    fn norm_in_place(&self, x: &mut Activations, norm: &Norm<CpuWeight>) {
        let width = x.width;
        let (weight, bias) = norm_vectors(norm, width);
        let rows = x.data_mut().par_chunks_exact_mut(width);
        rows.for_each_with(Vec::new(), |before: &mut Vec<f32>, row| {
            before.clear();
            before.extend_from_slice(row);
            pulp::Arch::new().dispatch(|| norm::norm_row(before, &norm.shape, weight, bias, row));
        });
    }

    fn linear(
        &self,
        x: &Activations,
        linear: &Linear<CpuWeight>,
        into: Into,
        out: &mut Activations,
    ) {
        let bias = linear.bias.as_ref().map(CpuWeight::vector);
        linear::linear(x, linear.weight.matrix(), bias, into, out);
    }

    fn rope(
        &self,
        x: &mut Activations,
        shape: &RopeShape,
        cos: &Activations,
        sin: &Activations,
        positions: &Vec<u32>,
    ) {
        elementwise::rope(x, shape, [cos, sin], positions);
    }

    fn join_heads(
        &self,
        own: &Activations,
        shared: &Activations,
        heads: usize,
        out: &mut Activations,
    ) {
        elementwise::join_heads(own, shared, heads, out);
    }

    fn attention(
        &self,
        shape: &AttentionShape,
        segments: &Segments,
        sinks: Option<&CpuWeight>,
        qkv: [&Activations; 3],
        out: &mut Activations,
    ) {
        attention::attention(shape, segments, sinks.map(CpuWeight::vector), qkv, out);
    }

    fn activate(&self, activation: Activation, x: &mut Activations, up: Option<&Activations>) {
        elementwise::activate(activation, x, up);
    }

    fn experts(
        &self,
        x: &Activations,
        logits: &Activations,
        rule: &ExpertsRule,
        experts: &Experts<CpuWeight>,
        work: &mut MlpWork<Activations, ()>,
        out: &mut Activations,
    ) {
        experts::experts(x, logits, rule, experts, work, out);
    }

    fn gather(&self, x: &Activations, rows: &Vec<u32>, out: &mut Activations) {
        out.set_shape(rows.len(), x.width);
        let width = x.width;
        for (out, &row) in out.data_mut().chunks_exact_mut(width).zip(rows) {
            let at = row as usize * width;
            out.copy_from_slice(&x.data()[at..at + width]);
        }
    }

    fn slice(&self, x: &Activations, rows: Range<usize>, out: &mut Activations) {
        out.set_shape(rows.len(), x.width);
        let numbers = rows.start * x.width..rows.end * x.width;
        out.data_mut().copy_from_slice(&x.data()[numbers]);
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

    fn take_rows(&self, rows: HeadRows, out: &mut HeadRows) -> Result<()> {
        out.append(rows);
        Ok(())
    }
}

/// Weight and bias of a norm for rows of `row` numbers; empty for none.
fn norm_vectors(norm: &Norm<CpuWeight>, row: usize) -> (&[f32], &[f32]) {
    let width = norm.shape.width;
    assert!(
        row.is_multiple_of(width),
        "norm: pieces of {width} in a row of {row}"
    );
    let [weight, bias] = [&norm.weight, &norm.bias].map(|vector| {
        let values = vector.as_ref().map_or(&[][..], CpuWeight::vector);
        assert!([0, width, row].contains(&values.len()), "norm: weight");
        values
    });
    (weight, bias)
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
