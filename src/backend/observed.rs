//! A backend that notes how long each kind of op takes and, where asked, reduces every logits
//! slice a second time with more ids than are stored.
//!
//! Architecture invariant: what comes out of the ops is the inner backend's, bit for bit. Each op
//! is waited for, so that its time is its own.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use anyhow::Result;

use super::{
    Activation, AttentionShape, Backend, Experts, ExpertsRule, FloatDtype, HeadRows, HostWeight,
    Into, Linear, LogitRule, MlpSizes, MlpWork, Norm, Precision, RopeShape, Segments, Tensor,
};

/// What an op is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OpClass {
    Embed,
    Norm,
    Linear,
    Rope,
    Attention,
    Experts,
    /// Activations, factors, residuals, gathered rows.
    Elementwise,
    /// The output projection.
    Head,
    Reduction,
    /// To and from where the backend computes.
    Copy,
}

impl OpClass {
    pub const ALL: [OpClass; 10] = [
        OpClass::Embed,
        OpClass::Norm,
        OpClass::Linear,
        OpClass::Rope,
        OpClass::Attention,
        OpClass::Experts,
        OpClass::Elementwise,
        OpClass::Head,
        OpClass::Reduction,
        OpClass::Copy,
    ];

    pub fn name(self) -> &'static str {
        match self {
            OpClass::Embed => "embedding",
            OpClass::Norm => "norms",
            OpClass::Linear => "projections and MLP",
            OpClass::Rope => "rotary positions",
            OpClass::Attention => "attention",
            OpClass::Experts => "experts",
            OpClass::Elementwise => "elementwise",
            OpClass::Head => "head",
            OpClass::Reduction => "reduction",
            OpClass::Copy => "copies",
        }
    }
}

/// What was noted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Observations {
    seconds: [f64; OpClass::ALL.len()],
    /// Seconds of the second reduction, in none of the classes.
    pub wide_seconds: f64,
}

impl Observations {
    pub fn seconds(&self, class: OpClass) -> f64 {
        self.seconds[class as usize]
    }

    pub fn total_seconds(&self) -> f64 {
        self.seconds.iter().sum::<f64>() + self.wide_seconds
    }
}

/// Passes every op on to `inner`.
#[derive(Debug)]
pub struct Observed<B: Backend> {
    inner: B,
    /// Ids of the second reduction.
    wide_k: Option<usize>,
    notes: Mutex<Notes<B::Tensor>>,
}

#[derive(Debug)]
struct Notes<T> {
    seen: Observations,
    /// Seconds of the last product: that of the head, if a reduction follows.
    last_linear: f64,
    /// The rows of second reductions, in the order they were reduced.
    wide: HeadRows,
    /// A second slice, as large as the largest so far.
    slice: Option<T>,
}

impl<B: Backend> Observed<B> {
    pub fn new(inner: B, wide_k: Option<usize>) -> Observed<B> {
        Observed {
            inner,
            wide_k,
            notes: Mutex::new(Notes {
                seen: Observations::default(),
                last_linear: 0.0,
                wide: HeadRows::default(),
                slice: None,
            }),
        }
    }

    pub fn inner(&self) -> &B {
        &self.inner
    }

    /// What was noted since this was last asked.
    pub fn take(&self) -> Observations {
        std::mem::take(&mut self.notes().seen)
    }

    /// The rows of second reductions since this was last asked, in the order of the first.
    pub fn take_wide(&self) -> HeadRows {
        std::mem::take(&mut self.notes().wide)
    }

    fn notes(&self) -> MutexGuard<'_, Notes<B::Tensor>> {
        self.notes.lock().expect("no thread panics while it notes")
    }

    fn time<T>(&self, class: OpClass, op: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let done = op();
        self.inner.wait();
        let seconds = started.elapsed().as_secs_f64();
        let mut notes = self.notes();
        notes.seen.seconds[class as usize] += seconds;
        if class == OpClass::Linear {
            notes.last_linear = seconds;
        }
        done
    }

    /// Reduces a copy of the slice with `wide_k` ids.
    fn reduce_wide(&self, logits: &B::Tensor, rule: &LogitRule, targets: &[i32]) -> Result<()> {
        let Some(k) = self.wide_k else { return Ok(()) };
        let started = Instant::now();
        let mut notes = self.notes();
        let rows_max = notes.slice.as_ref().map_or(0, Tensor::rows);
        if rows_max < logits.rows() {
            let [rows, width] = [logits.rows(), logits.width()];
            notes.slice = Some(self.inner.tensor(Precision::Single, rows, width)?);
        }
        let Notes {
            seen, wide, slice, ..
        } = &mut *notes;
        if let Some(slice) = slice {
            let rows_max = slice.rows();
            self.inner.copy(logits, slice);
            wide.k = k;
            let mut rows = self.inner.rows(targets.len(), k)?;
            self.inner.reduce_head(slice, rule, targets, &mut rows);
            self.inner.send_rows(&mut rows);
            self.inner.take_rows(rows, wide)?;
            slice.set_shape(rows_max, logits.width());
        }
        seen.wide_seconds += started.elapsed().as_secs_f64();
        Ok(())
    }
}

impl<B: Backend> Backend for Observed<B> {
    type Tensor = B::Tensor;
    type Weight = B::Weight;
    type Index = B::Index;
    type Segments = B::Segments;
    type Experts = B::Experts;
    type Routing = B::Routing;
    type Rows = B::Rows;

    fn compute_dtype(&self) -> FloatDtype {
        self.inner.compute_dtype()
    }

    fn send_rows(&self, rows: &mut B::Rows) {
        self.inner.send_rows(rows);
    }

    fn rehearses(&self) -> bool {
        self.inner.rehearses()
    }

    fn provenance(&self) -> serde_json::Value {
        self.inner.provenance()
    }

    fn tensor(&self, precision: Precision, rows_max: usize, width: usize) -> Result<B::Tensor> {
        self.inner.tensor(precision, rows_max, width)
    }

    fn mlp_work(&self, sizes: &MlpSizes) -> Result<MlpWork<B::Tensor, B::Routing>> {
        self.inner.mlp_work(sizes)
    }

    fn rows(&self, rows_max: usize, k: usize) -> Result<B::Rows> {
        self.inner.rows(rows_max, k)
    }

    fn experts_of(&self, experts: Experts<B::Weight>) -> Result<B::Experts> {
        self.inner.experts_of(experts)
    }

    fn segments(&self, segments: Segments) -> Result<B::Segments> {
        self.time(OpClass::Copy, || self.inner.segments(segments))
    }

    fn wait(&self) {
        self.inner.wait();
    }

    fn weight(&self, host: &HostWeight) -> Result<B::Weight> {
        self.time(OpClass::Copy, || self.inner.weight(host))
    }

    fn index(&self, values: &[u32]) -> Result<B::Index> {
        self.time(OpClass::Copy, || self.inner.index(values))
    }

    fn download(&self, x: &B::Tensor) -> Vec<f32> {
        self.time(OpClass::Copy, || self.inner.download(x))
    }

    fn upload(&self, values: &[f32], x: &mut B::Tensor) {
        self.time(OpClass::Copy, || self.inner.upload(values, x));
    }

    fn embed(&self, table: &B::Weight, rows: &B::Index, into: Into, out: &mut B::Tensor) {
        let op = || self.inner.embed(table, rows, into, out);
        self.time(OpClass::Embed, op);
    }

    fn scale(&self, x: &mut B::Tensor, factor: f32) {
        self.time(OpClass::Elementwise, || self.inner.scale(x, factor));
    }

    fn scale_rows(&self, x: &mut B::Tensor, factors: &B::Tensor, rows: &B::Index) {
        let op = || self.inner.scale_rows(x, factors, rows);
        self.time(OpClass::Elementwise, op);
    }

    fn gate_rows(&self, x: &mut B::Tensor, gate: &B::Tensor) {
        self.time(OpClass::Elementwise, || self.inner.gate_rows(x, gate));
    }

    fn clip(&self, x: &mut B::Tensor, bound: f32) {
        self.time(OpClass::Elementwise, || self.inner.clip(x, bound));
    }

    fn copy(&self, x: &B::Tensor, out: &mut B::Tensor) {
        self.time(OpClass::Elementwise, || self.inner.copy(x, out));
    }

    fn add_scaled(&self, x: &B::Tensor, factor: f32, out: &mut B::Tensor) {
        let op = || self.inner.add_scaled(x, factor, out);
        self.time(OpClass::Elementwise, op);
    }

    fn norm(&self, x: &B::Tensor, norm: &Norm<B::Weight>, out: &mut B::Tensor) {
        self.time(OpClass::Norm, || self.inner.norm(x, norm, out));
    }

    fn norm_in_place(&self, x: &mut B::Tensor, norm: &Norm<B::Weight>) {
        self.time(OpClass::Norm, || self.inner.norm_in_place(x, norm));
    }

    fn linear(&self, x: &B::Tensor, linear: &Linear<B::Weight>, into: Into, out: &mut B::Tensor) {
        let op = || self.inner.linear(x, linear, into, out);
        self.time(OpClass::Linear, op);
    }

    fn rope(
        &self,
        x: &mut B::Tensor,
        shape: &RopeShape,
        cos: &B::Tensor,
        sin: &B::Tensor,
        positions: &B::Index,
    ) {
        let op = || self.inner.rope(x, shape, cos, sin, positions);
        self.time(OpClass::Rope, op);
    }

    fn join_heads(&self, own: &B::Tensor, shared: &B::Tensor, heads: usize, out: &mut B::Tensor) {
        let op = || self.inner.join_heads(own, shared, heads, out);
        self.time(OpClass::Elementwise, op);
    }

    fn attention(
        &self,
        shape: &AttentionShape,
        segments: &B::Segments,
        sinks: Option<&B::Weight>,
        qkv: [&B::Tensor; 3],
        out: &mut B::Tensor,
    ) {
        let op = || self.inner.attention(shape, segments, sinks, qkv, out);
        self.time(OpClass::Attention, op);
    }

    fn activate(&self, activation: Activation, x: &mut B::Tensor, up: Option<&B::Tensor>) {
        let op = || self.inner.activate(activation, x, up);
        self.time(OpClass::Elementwise, op);
    }

    fn experts(
        &self,
        x: &B::Tensor,
        logits: &B::Tensor,
        rule: &ExpertsRule,
        experts: &B::Experts,
        work: &mut MlpWork<B::Tensor, B::Routing>,
        out: &mut B::Tensor,
    ) {
        let op = || self.inner.experts(x, logits, rule, experts, work, out);
        self.time(OpClass::Experts, op);
    }

    fn gather(&self, x: &B::Tensor, rows: &B::Index, out: &mut B::Tensor) {
        self.time(OpClass::Elementwise, || self.inner.gather(x, rows, out));
    }

    fn slice(&self, x: &B::Tensor, rows: Range<usize>, out: &mut B::Tensor) {
        self.time(OpClass::Elementwise, || self.inner.slice(x, rows, out));
    }

    fn take_rows(&self, rows: B::Rows, out: &mut HeadRows) -> Result<()> {
        self.time(OpClass::Copy, || self.inner.take_rows(rows, out))
    }

    fn reduce_head(
        &self,
        logits: &mut B::Tensor,
        rule: &LogitRule,
        targets: &[i32],
        out: &mut B::Rows,
    ) {
        {
            let mut notes = self.notes();
            let head = std::mem::take(&mut notes.last_linear);
            notes.seen.seconds[OpClass::Linear as usize] -= head;
            notes.seen.seconds[OpClass::Head as usize] += head;
        }
        // Without room for a second slice the pilot only lacks its curve for this chunk.
        let _ = self.reduce_wide(logits, rule, targets);
        let op = || self.inner.reduce_head(logits, rule, targets, out);
        self.time(OpClass::Reduction, op);
    }
}
