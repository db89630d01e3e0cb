//! A backend that computes nothing and notes what each op takes on a CUDA device: which kernel,
//! how many launches, the bytes it has to move and the floating-point operations it does.
//!
//! A decoder run on it has its own cost noted, whatever the family: nothing is counted twice, once
//! where it is done and once where it is predicted.
//!
//! Architecture invariant: nothing here knows a device or how fast it is.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Mutex;

use anyhow::{Result, ensure};
use serde_json::Value;

use super::cuda::Kind;
use super::cuda::attention::{self, AttentionKernel};
use super::observed::OpClass;
use super::{
    Activation, AttentionShape, Backend, Experts, ExpertsRule, FloatDtype, HeadRows, HostWeight,
    Into, Linear, LogitRule, MlpSizes, MlpWork, Norm, NormKind, Precision, RopePairs, RopeShape,
    Segments, Tensor, Weighs,
};

/// Rows of a product come in whole tiles of this.
const TILE: usize = 128;
/// Bytes of an index, and of a number in fp32.
const WORD: usize = 4;

/// What does an op's arithmetic, and so how fast it can be.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Engine {
    /// The library's products.
    Library,
    /// Tensor cores by the project's own kernels.
    Own,
    /// Arithmetic that costs nothing beside the bytes.
    Memory,
}

/// What a kernel takes in all its launches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cost {
    pub launches: u64,
    /// Read and written, each number once a launch.
    pub bytes: u64,
    /// As computed: padding of tiles and the masked part of blocks included.
    pub flops: u64,
    pub engine: Engine,
}

impl Cost {
    pub fn add(&mut self, other: &Cost) {
        self.launches += other.launches;
        self.bytes += other.bytes;
        self.flops += other.flops;
    }
}

/// A kernel, and for a product its shape.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct KernelUse {
    /// Its class's place in `OpClass::ALL`.
    class: usize,
    pub kernel: String,
    /// Inputs and outputs of a product.
    pub shape: Option<(usize, usize)>,
}

impl KernelUse {
    pub fn class(&self) -> OpClass {
        OpClass::ALL[self.class]
    }
}

/// Costs by kernel.
pub type Costs = BTreeMap<KernelUse, Cost>;

/// Notes the costs of ops in bf16, with sums, residual stream and logits in fp32.
#[derive(Debug, Default)]
pub struct Priced {
    costs: Mutex<Costs>,
    /// The last product, which is the head's if a reduction follows.
    last: Mutex<Option<(KernelUse, Cost)>>,
}

/// A buffer without numbers.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    rows: usize,
    width: usize,
    kind: Kind,
}

impl Shape {
    fn numbers(&self) -> usize {
        self.rows * self.width
    }

    fn bytes(&self) -> usize {
        self.numbers() * self.kind.size()
    }
}

impl Tensor for Shape {
    fn rows(&self) -> usize {
        self.rows
    }

    fn width(&self) -> usize {
        self.width
    }

    fn set_shape(&mut self, rows: usize, width: usize) {
        (self.rows, self.width) = (rows, width);
    }
}

/// Experts by the shapes of the first: all are alike.
#[derive(Debug)]
pub struct SizedExperts {
    count: usize,
    inner: usize,
    hidden: usize,
    is_gated: bool,
}

impl Priced {
    pub fn take(&self) -> Costs {
        self.settle();
        std::mem::take(&mut self.costs.lock().expect("no thread panics with it"))
    }

    /// One launch of a kernel.
    fn note(&self, class: OpClass, kernel: String, bytes: usize) {
        let cost = Cost {
            launches: 1,
            bytes: bytes as u64,
            flops: 0,
            engine: Engine::Memory,
        };
        self.note_cost(class, kernel, None, cost);
    }

    fn note_cost(&self, class: OpClass, kernel: String, shape: Option<(usize, usize)>, cost: Cost) {
        self.settle();
        let used = KernelUse {
            class: class as usize,
            kernel,
            shape,
        };
        let mut last = self.last.lock().expect("no thread panics with it");
        *last = Some((used, cost));
    }

    /// Adds the last op to the rest.
    fn settle(&self) {
        let last = self.last.lock().expect("no thread panics with it").take();
        if let Some((used, cost)) = last {
            let mut costs = self.costs.lock().expect("no thread panics with it");
            costs
                .entry(used)
                .and_modify(|sum| sum.add(&cost))
                .or_insert(cost);
        }
    }

    /// x in and out, `more` bytes besides.
    fn in_place(&self, class: OpClass, op: &str, x: &Shape, more: usize) {
        self.note(
            class,
            format!("{op}_{}", x.kind.name()),
            2 * x.bytes() + more,
        );
    }

    /// `rows` rows at `count` experts; the last tile of each is half empty in the mean.
    fn expert_product(&self, rows: usize, count: usize, inputs: usize, outputs: usize) {
        let tiled = rows + count * TILE / 2;
        let sizes = rows * (inputs + outputs) + count * inputs * outputs;
        let cost = Cost {
            launches: 1,
            bytes: (sizes * Kind::Bf16.size()) as u64,
            flops: product_flops(tiled, inputs, outputs),
            engine: Engine::Own,
        };
        let kernel = "expert_matmul_bf16".to_owned();
        self.note_cost(OpClass::Experts, kernel, Some((inputs, outputs)), cost);
    }

    fn normed(&self, x: &Shape, norm: &Norm<Shape>, out: &Shape) {
        let kind = match norm.shape.kind {
            NormKind::Rms => "rms",
            NormKind::Layer => "layer",
        };
        let kernel = format!("{kind}_norm_{}_{}", x.kind.name(), out.kind.name());
        self.note(OpClass::Norm, kernel, x.bytes() + out.bytes());
    }
}

fn product_flops(rows: usize, inputs: usize, outputs: usize) -> u64 {
    2 * rows as u64 * inputs as u64 * outputs as u64
}

/// Query-key pairs that a kernel's tiles cover, each with all heads of a kv head.
fn pairs_covered(kernel: &AttentionKernel, shape: &AttentionShape, segments: &Segments) -> u64 {
    let group = shape.heads / shape.kv_heads;
    let tiles = attention::tiles(segments, group, kernel.rows);
    let pairs = tiles.iter().map(|[query, queries, first, _]| {
        let at = |packed: i32| segments.query_positions[(query + packed / group as i32) as usize];
        let last = (first + kernel.rows as i32).min(queries * group as i32) - 1;
        let (low, high) = (at(*first) as usize, at(last) as usize);
        let start = shape.mask.first_key(low) / kernel.keys * kernel.keys;
        let keys = (high + 1 - start).next_multiple_of(kernel.keys);
        (kernel.rows * keys) as u64
    });
    pairs.sum()
}

impl Backend for Priced {
    type Tensor = Shape;
    type Weight = Shape;
    type Index = usize;
    type Segments = Segments;
    type Experts = SizedExperts;
    type Routing = ();
    type Rows = usize;

    fn compute_dtype(&self) -> FloatDtype {
        FloatDtype::Bf16
    }

    fn provenance(&self) -> Value {
        Value::Null
    }

    fn tensor(&self, precision: Precision, rows: usize, width: usize) -> Result<Shape> {
        let kind = match precision {
            Precision::Compute => Kind::Bf16,
            Precision::Single => Kind::F32,
        };
        Ok(Shape { rows, width, kind })
    }

    fn mlp_work(&self, sizes: &MlpSizes) -> Result<MlpWork<Shape, ()>> {
        let tensor = |width| self.tensor(Precision::Compute, sizes.rows_max, width);
        let hidden = sizes.experts.map_or(0, |experts| experts.hidden);
        Ok(MlpWork {
            rows: tensor(hidden)?,
            gate: tensor(sizes.inner)?,
            up: tensor(sizes.inner)?,
            result: tensor(hidden)?,
            routing: (),
        })
    }

    fn rows(&self, _rows_max: usize, k: usize) -> Result<usize> {
        Ok(k)
    }

    fn weight(&self, host: &HostWeight) -> Result<Shape> {
        Ok(Shape {
            rows: host.rows(),
            width: host.width(),
            kind: Kind::Bf16,
        })
    }

    fn experts_of(&self, experts: Experts<Shape>) -> Result<SizedExperts> {
        ensure!(!experts.list.is_empty(), "expected experts, found none");
        let first = &experts.list[0];
        Ok(SizedExperts {
            count: experts.list.len(),
            inner: first.up.weight.rows,
            hidden: first.up.weight.width,
            is_gated: first.gate.is_some(),
        })
    }

    fn index(&self, values: &[u32]) -> Result<usize> {
        Ok(values.len())
    }

    fn segments(&self, segments: Segments) -> Result<Segments> {
        Ok(segments)
    }

    fn download(&self, x: &Shape) -> Vec<f32> {
        vec![0.0; x.numbers()]
    }

    fn upload(&self, values: &[f32], x: &mut Shape) {
        x.set_shape(values.len() / x.width.max(1), x.width);
    }

    fn embed(&self, table: &Shape, rows: &usize, into: Into, out: &mut Shape) {
        out.set_shape(*rows, table.width);
        let (verb, passes) = match into {
            Into::Replace => ("replace", 1),
            Into::Add => ("add", 2),
        };
        let bytes = out.numbers() * table.kind.size() + passes * out.bytes() + rows * WORD;
        let kernel = format!("embed_{verb}_{}", table.kind.name());
        self.note(OpClass::Embed, kernel, bytes);
    }

    fn scale(&self, x: &mut Shape, _factor: f32) {
        self.in_place(OpClass::Elementwise, "scale", x, 0);
    }

    fn scale_rows(&self, x: &mut Shape, _factors: &Shape, rows: &usize) {
        self.in_place(OpClass::Elementwise, "scale_rows", x, rows * 2 * WORD);
    }

    fn gate_rows(&self, x: &mut Shape, gate: &Shape) {
        let op = match (x.kind, gate.kind) {
            (Kind::Bf16, Kind::F32) => "gate_rows_bf16_by_f32".to_owned(),
            (kind, _) => format!("gate_rows_{}", kind.name()),
        };
        self.note(OpClass::Elementwise, op, 2 * x.bytes() + gate.bytes());
    }

    fn clip(&self, x: &mut Shape, _bound: f32) {
        self.in_place(OpClass::Elementwise, "clip", x, 0);
    }

    fn copy(&self, x: &Shape, out: &mut Shape) {
        out.set_shape(x.rows, x.width);
        let kernel = format!("copy_{}_{}", x.kind.name(), out.kind.name());
        self.note(OpClass::Elementwise, kernel, x.bytes() + out.bytes());
    }

    fn add_scaled(&self, x: &Shape, _factor: f32, out: &mut Shape) {
        let kernel = format!("add_scaled_{}", x.kind.name());
        self.note(OpClass::Elementwise, kernel, x.bytes() + 2 * out.bytes());
    }

    fn norm(&self, x: &Shape, norm: &Norm<Shape>, out: &mut Shape) {
        out.set_shape(x.rows, x.width);
        self.normed(x, norm, out);
    }

    fn norm_in_place(&self, x: &mut Shape, norm: &Norm<Shape>) {
        self.normed(x, norm, x);
    }

    fn linear(&self, x: &Shape, linear: &Linear<Shape>, into: Into, out: &mut Shape) {
        let (inputs, outputs) = (linear.weight.width, linear.weight.rows);
        out.set_shape(x.rows, outputs);
        let passes = match into {
            Into::Replace => 1,
            Into::Add => 2,
        };
        let cost = Cost {
            launches: 1,
            bytes: (x.bytes() + linear.weight.bytes() + passes * out.bytes()) as u64,
            flops: product_flops(x.rows.next_multiple_of(TILE), inputs, outputs),
            engine: Engine::Library,
        };
        let kernel = format!("matmul_{}_{}", x.kind.name(), out.kind.name());
        self.note_cost(OpClass::Linear, kernel, Some((inputs, outputs)), cost);
    }

    fn rope(&self, x: &mut Shape, shape: &RopeShape, cos: &Shape, _: &Shape, rows: &usize) {
        let pairs = match shape.pairs {
            RopePairs::Halves => "halves",
            RopePairs::Neighbours => "neighbours",
        };
        let heads = x.width / shape.head_dim;
        let turned = rows * heads * 2 * cos.width * x.kind.size();
        let angles = rows * (2 * cos.width + 1) * WORD;
        let kernel = format!("rope_{pairs}_{}", x.kind.name());
        self.note(OpClass::Rope, kernel, 2 * turned + angles);
    }

    fn join_heads(&self, own: &Shape, shared: &Shape, heads: usize, out: &mut Shape) {
        out.set_shape(own.rows, own.width + heads * shared.width);
        let kernel = format!("join_heads_{}", out.kind.name());
        let bytes = own.bytes() + shared.bytes() + out.bytes();
        self.note(OpClass::Elementwise, kernel, bytes);
    }

    fn attention(
        &self,
        shape: &AttentionShape,
        segments: &Segments,
        _sinks: Option<&Shape>,
        [q, k, v]: [&Shape; 3],
        out: &mut Shape,
    ) {
        out.set_shape(q.rows, shape.heads * shape.value_dim);
        let Some(kernel) = AttentionKernel::of(Kind::Bf16, shape) else {
            return;
        };
        let pairs = pairs_covered(&kernel, shape, segments) * shape.kv_heads as u64;
        let cost = Cost {
            launches: 1,
            bytes: (q.bytes() + k.bytes() + v.bytes() + out.bytes()) as u64,
            flops: 2 * pairs * (kernel.head_dim + kernel.value_dim) as u64,
            engine: Engine::Own,
        };
        let name = kernel.name.to_owned();
        self.note_cost(OpClass::Attention, name, None, cost);
    }

    fn activate(&self, _activation: Activation, x: &mut Shape, up: Option<&Shape>) {
        let more = up.map_or(0, Shape::bytes);
        self.in_place(OpClass::Elementwise, "activate", x, more);
    }

    fn experts(
        &self,
        x: &Shape,
        logits: &Shape,
        rule: &ExpertsRule,
        experts: &SizedExperts,
        _work: &mut MlpWork<Shape, ()>,
        out: &mut Shape,
    ) {
        out.set_shape(x.rows, x.width);
        let (chosen, count) = (rule.router.chosen, experts.count);
        let choices = x.rows * chosen;
        let note = |kernel: &str, bytes| self.note(OpClass::Experts, kernel.to_owned(), bytes);
        let at_experts = choices * x.width * x.kind.size();
        note("route", logits.bytes() + 2 * choices * WORD);
        // Every expert's block reads all choices.
        note("count_choices", (count * choices + count) * WORD);
        note("place_choices", (count * choices + 2 * choices) * WORD);
        if rule.router.weighs == Weighs::Inputs {
            note("weigh_inputs_bf16", 2 * at_experts + 2 * choices * WORD);
        }
        let products = if experts.is_gated { 2 } else { 1 };
        for _ in 0..products {
            self.expert_product(choices, count, experts.hidden, experts.inner);
        }
        let inner = choices * experts.inner * Kind::Bf16.size();
        let activated = inner * (1 + products);
        self.note(OpClass::Elementwise, "activate_bf16".to_owned(), activated);
        self.expert_product(choices, count, experts.inner, experts.hidden);
        note(
            "combine_bf16",
            at_experts + 2 * choices * WORD + out.bytes(),
        );
    }

    fn gather(&self, x: &Shape, rows: &usize, out: &mut Shape) {
        out.set_shape(*rows, x.width);
        let kernel = format!("gather_{}", x.kind.name());
        self.note(OpClass::Elementwise, kernel, 2 * out.bytes() + rows * WORD);
    }

    fn slice(&self, x: &Shape, rows: Range<usize>, out: &mut Shape) {
        out.set_shape(rows.len(), x.width);
        self.note(OpClass::Elementwise, "copy".to_owned(), 2 * out.bytes());
    }

    fn reduce_head(&self, logits: &mut Shape, rule: &LogitRule, targets: &[i32], k: &mut usize) {
        if let Some((product, _)) = &mut *self.last.lock().expect("no thread panics with it") {
            product.class = OpClass::Head as usize;
        }
        // Both passes read the row, which is too long to stay where it was read to.
        let row = 2 * rule.vocab + 2 * *k + 8;
        let kernel = "reduce_head".to_owned();
        self.note(OpClass::Reduction, kernel, targets.len() * row * WORD);
        debug_assert_eq!(logits.rows, targets.len());
    }

    fn take_rows(&self, _k: usize, _out: &mut HeadRows) -> Result<()> {
        Ok(())
    }
}
