//! The ops a decoder is made of, each with the shape of its buffers. The CPU backend is the
//! reference; another device implements the same trait and must give the same rows.
//!
//! Architecture invariant: a backend knows no family, no config and no file. It never decides
//! what to compute, and the bits of a row depend on that row's own sequence alone, whatever else
//! is in the buffer.

pub mod cpu;
pub mod cuda;
pub mod observed;
pub mod priced;
mod weight;

use std::ops::Range;

use anyhow::Result;

pub use weight::{Encoding, FloatDtype, HostBytes, HostWeight, Lines, MX_BLOCK, Order};

/// Activations: (rows, width) in C order. Allocated once for the most it will ever hold.
pub trait Tensor {
    fn rows(&self) -> usize;
    fn width(&self) -> usize;
    /// Sets the rows and width in use, up to the numbers allocated. Their content is then
    /// undefined.
    fn set_shape(&mut self, rows: usize, width: usize);
}

/// How exactly a buffer keeps its numbers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Precision {
    /// In the backend's compute dtype: activations.
    Compute,
    /// In fp32, whatever the compute dtype: the residual stream and what is added to it, logits,
    /// scores and gates of single numbers, tables.
    Single,
}

/// Whether a product replaces what is in the output or is added to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Into {
    Replace,
    Add,
}

/// How rows, or pieces of rows, are normalised before weight and bias are applied.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct NormShape {
    pub kind: NormKind,
    pub eps: f32,
    /// Numbers normalised together; a row is a whole number of such pieces.
    pub width: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NormKind {
    /// x / sqrt(mean(x^2) + eps)
    Rms,
    /// (x - mean(x)) / sqrt(var(x) + eps)
    Layer,
}

/// A norm ready to be applied. Weight and bias (N) are as wide as a row, or as one piece of it
/// and then the same for every piece.
#[derive(Debug)]
pub struct Norm<W> {
    pub shape: NormShape,
    pub weight: Option<W>,
    pub bias: Option<W>,
}

/// A linear map ready to be applied.
#[derive(Debug)]
pub struct Linear<W> {
    pub weight: W,       // (N, K)
    pub bias: Option<W>, // (N)
}

/// What an MLP does between its projections.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Activation {
    /// x * sigmoid(x)
    Silu,
    /// x * (1 + erf(x / sqrt 2)) / 2
    Gelu,
    /// x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2
    GeluTanh,
    /// max(x, 0)
    Relu,
    /// max(x, 0)^2
    Relu2,
    /// gpt-oss: with the gate limited from above and the other side from both,
    /// gate * sigmoid(alpha * gate) * (up + 1).
    ClampedSwiglu { alpha: f32, limit: f32 },
}

/// An MLP ready to be applied: down(activation(gate(x)) * up(x)), or down(activation(up(x)))
/// without a gate.
#[derive(Debug)]
pub struct Mlp<W> {
    pub gate: Option<Linear<W>>, // (I, H)
    pub up: Linear<W>,           // (I, H)
    pub down: Linear<W>,         // (H, I)
}

/// Which pairs of a head are rotated against each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RopePairs {
    /// i and i + width / 2
    Halves,
    /// 2 i and 2 i + 1
    Neighbours,
}

/// The part of every head that is rotated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RopeShape {
    pub head_dim: usize,
    /// First number of a head that is rotated; as many as two columns of the table's.
    pub start: usize,
    pub pairs: RopePairs,
}

/// Which keys a query at position p sees, of those up to p.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mask {
    /// All of them.
    Causal,
    /// The last so many: p - w + 1 to p.
    Window(usize),
    /// Those of its own chunk: p / c * c to p.
    Chunk(usize),
}

impl Mask {
    /// First key that a query at `position` sees.
    pub fn first_key(self, position: usize) -> usize {
        match self {
            Mask::Causal => 0,
            Mask::Window(w) => (position + 1).saturating_sub(w),
            Mask::Chunk(c) => position / c * c,
        }
    }
}

/// Attention of one layer, whatever the batch.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct AttentionShape {
    pub heads: usize,
    pub kv_heads: usize,
    /// Width of a head's queries and keys.
    pub head_dim: usize,
    /// Width of a head's values.
    pub value_dim: usize,
    /// Factor on the scores before the softmax.
    pub scale: f32,
    /// Scores, scaled, become cap * tanh(score / cap).
    pub cap: Option<f32>,
    pub mask: Mask,
}

/// How a row of router logits becomes experts and their weights. Equal scores go to the lower
/// expert.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct RouterRule {
    /// Experts a row takes.
    pub chosen: usize,
    pub score: RouterScore,
    /// Whether the weights of the chosen are divided by their sum.
    pub renormalise: bool,
    /// Only experts of the best groups take part; a group is as good as its two best together.
    pub groups: Option<RouterGroups>,
    /// Factor on the weights.
    pub scale: f32,
    pub weighs: Weighs,
}

/// What a layer's experts do, whatever their weights.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ExpertsRule {
    pub router: RouterRule,
    pub activation: Activation,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RouterScore {
    /// Chosen and weighted by the softmax over all experts.
    Softmax,
    /// Chosen by logit, weighted by the softmax over the chosen.
    SoftmaxOfChosen,
    /// Chosen by sigmoid(logit) + correction, weighted by sigmoid(logit).
    Sigmoid,
    /// Chosen by logit, weighted by sigmoid(logit).
    SigmoidOfChosen,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RouterGroups {
    pub count: usize,
    pub kept: usize,
}

/// What a router's weights multiply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Weighs {
    Outputs,
    Inputs,
}

/// A layer's experts.
#[derive(Debug)]
pub struct Experts<W> {
    /// Added to the scores when experts are chosen, not when they are weighted.
    pub correction: Option<W>, // (E)
    pub list: Vec<Mlp<W>>,
}

/// The most that the MLPs of any layer take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MlpSizes {
    pub rows_max: usize,
    /// Inner size of MLPs that every row passes.
    pub inner: usize,
    /// `None` where no layer has experts.
    pub experts: Option<ExpertSizes>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExpertSizes {
    pub count: usize,
    pub chosen: usize,
    pub hidden: usize,
    pub inner: usize,
    /// Whether any layer's routers weigh what goes into an expert.
    pub weighs_inputs: bool,
}

/// Room for an MLP, or for the experts. R is what the backend needs to lay choices together.
#[derive(Debug)]
pub struct MlpWork<T, R> {
    pub rows: T,   // (T, H), of one expert or of all choices
    pub gate: T,   // (T, I)
    pub up: T,     // (T, I)
    pub result: T, // (T, H)
    pub routing: R,
}

/// One sequence of a packed batch, as attention sees it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Segment {
    /// Its keys and values: these rows of k and v, in order.
    pub keys: Range<usize>,
    /// Its queries: these rows of q.
    pub queries: Range<usize>,
}

/// The queries of a layer and the sequences they belong to.
#[derive(Clone, Debug, Default)]
pub struct Segments {
    pub list: Vec<Segment>,
    /// Position of each row of q inside its own sequence, rising within a segment.
    pub query_positions: Vec<u32>,
}

/// What the head does to logits after the product, in this order.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LogitRule {
    /// Head rows that take part; those beyond are as if they were not there.
    pub vocab: usize,
    /// Tokens the tokenizer has; head rows from here to `vocab` are padding.
    pub vocab_real: usize,
    /// Factor on every logit.
    pub scale: f32,
    /// Logits, scaled, become cap * tanh(logit / cap).
    pub cap: Option<f32>,
}

/// The reduction of a logits slice: one entry a row.
#[derive(Clone, Debug, Default)]
pub struct HeadRows {
    pub k: usize,
    pub ids: Vec<i32>,         // (R, K), best first; equal logits by lower id
    pub logp: Vec<f32>,        // (R, K)
    pub tail: Vec<f32>,        // (R), summed over the ids outside the top-k
    pub target_logp: Vec<f32>, // (R)
    pub target_rank: Vec<i32>, // (R)
    pub logsumexp: Vec<f32>,   // (R)
    pub entropy: Vec<f32>,     // (R), nats
    pub padded_mass: Vec<f32>, // (R), probability on padding of the vocabulary
    /// First row that holds a NaN or +inf, or no finite logit at all.
    pub bad_row: Option<usize>,
}

impl HeadRows {
    /// Adds the rows of another, which has as many ids a row.
    pub fn append(&mut self, mut other: HeadRows) {
        let first = self.tail.len();
        self.bad_row = self.bad_row.or(other.bad_row.map(|row| first + row));
        self.ids.append(&mut other.ids);
        self.logp.append(&mut other.logp);
        self.tail.append(&mut other.tail);
        self.target_logp.append(&mut other.target_logp);
        self.target_rank.append(&mut other.target_rank);
        self.logsumexp.append(&mut other.logsumexp);
        self.entropy.append(&mut other.entropy);
        self.padded_mass.append(&mut other.padded_mass);
    }

    /// Room for `rows` rows of `k` ids.
    pub fn with_capacity(rows: usize, k: usize) -> HeadRows {
        HeadRows {
            k,
            ids: Vec::with_capacity(rows * k),
            logp: Vec::with_capacity(rows * k),
            tail: Vec::with_capacity(rows),
            target_logp: Vec::with_capacity(rows),
            target_rank: Vec::with_capacity(rows),
            logsumexp: Vec::with_capacity(rows),
            entropy: Vec::with_capacity(rows),
            padded_mass: Vec::with_capacity(rows),
            bad_row: None,
        }
    }
}

/// The ops. Each sets the shape of its output to fit. Shapes: T tokens of a packed batch, H hidden, V vocabulary, R rows of a slice.
pub trait Backend: Send + Sync {
    type Tensor: Tensor + Send;
    /// A weight where the backend computes.
    type Weight: Send + Sync;
    /// Row numbers, token ids or positions where the backend computes.
    type Index: Send + Sync;
    /// [`Segments`] where the backend computes.
    type Segments: Send + Sync;
    /// A layer's experts, ready to be applied.
    type Experts: Send + Sync;
    /// See [`MlpWork`].
    type Routing: Send;
    /// Rows that were reduced, until they are taken.
    type Rows: Send;

    /// What the numbers of [`Precision::Compute`] are kept in.
    fn compute_dtype(&self) -> FloatDtype {
        FloatDtype::F32
    }

    /// Whether ops run behind the caller, who may prepare the next batch meanwhile.
    fn runs_behind(&self) -> bool {
        false
    }

    /// Whether a few tokens have to pass before the first batch: where the backend chooses by
    /// shapes as it meets them.
    fn rehearses(&self) -> bool {
        false
    }

    /// What produced the bits: device, libraries, kernels. Recorded with every shard.
    fn provenance(&self) -> serde_json::Value;

    /// Room for `rows_max` rows of `width` numbers.
    fn tensor(&self, precision: Precision, rows_max: usize, width: usize) -> Result<Self::Tensor>;

    fn mlp_work(&self, sizes: &MlpSizes) -> Result<MlpWork<Self::Tensor, Self::Routing>>;

    /// Room for `rows_max` reduced rows of `k` ids.
    fn rows(&self, rows_max: usize, k: usize) -> Result<Self::Rows>;

    /// Makes a weight ready to be used.
    fn weight(&self, host: &HostWeight) -> Result<Self::Weight>;

    fn experts_of(&self, experts: Experts<Self::Weight>) -> Result<Self::Experts>;

    fn index(&self, values: &[u32]) -> Result<Self::Index>;

    fn segments(&self, segments: Segments) -> Result<Self::Segments>;

    /// Until everything asked for so far is done, where ops run behind the caller.
    fn wait(&self) {}

    /// A copy in host memory, (rows, width).
    fn download(&self, x: &Self::Tensor) -> Vec<f32>;

    /// Puts (rows, width) numbers in `x`, whose rows are set to match.
    fn upload(&self, values: &[f32], x: &mut Self::Tensor);

    /// out (T, H) = or += rows `rows` of `table` (V, H).
    fn embed(&self, table: &Self::Weight, rows: &Self::Index, into: Into, out: &mut Self::Tensor);

    /// x (T, N) = x * factor.
    fn scale(&self, x: &mut Self::Tensor, factor: f32);

    /// Row t of x (T, N) times row `rows[t]` of `factors` (P, 1).
    fn scale_rows(&self, x: &mut Self::Tensor, factors: &Self::Tensor, rows: &Self::Index);

    /// Row t of x (T, N) times sigmoid of row t of `gate` (T, 1).
    fn gate_rows(&self, x: &mut Self::Tensor, gate: &Self::Tensor);

    /// x (T, N), each number brought within -bound and bound.
    fn clip(&self, x: &mut Self::Tensor, bound: f32);

    /// out (T, N) = x (T, N).
    fn copy(&self, x: &Self::Tensor, out: &mut Self::Tensor);

    /// out (T, N) += x (T, N) * factor.
    fn add_scaled(&self, x: &Self::Tensor, factor: f32, out: &mut Self::Tensor);

    /// out (T, N) = norm of x (T, N).
    fn norm(&self, x: &Self::Tensor, norm: &Norm<Self::Weight>, out: &mut Self::Tensor);

    /// x (T, N) = norm of x.
    fn norm_in_place(&self, x: &mut Self::Tensor, norm: &Norm<Self::Weight>);

    /// out (T, N) = or += x (T, K) · weightᵀ (N, K) + bias (N).
    fn linear(
        &self,
        x: &Self::Tensor,
        linear: &Linear<Self::Weight>,
        into: Into,
        out: &mut Self::Tensor,
    );

    /// Rotates each head of x (T, heads · head_dim) in place by the angles of its row of the
    /// tables: cos and sin (P, width / 2), row `positions[t]`.
    fn rope(
        &self,
        x: &mut Self::Tensor,
        shape: &RopeShape,
        cos: &Self::Tensor,
        sin: &Self::Tensor,
        positions: &Self::Index,
    );

    /// out (T, heads · (M + N)) = for each head, its part of `own` (T, heads · M), then all of
    /// `shared` (T, N).
    fn join_heads(
        &self,
        own: &Self::Tensor,
        shared: &Self::Tensor,
        heads: usize,
        out: &mut Self::Tensor,
    );

    /// out (Q, heads · value_dim) = causal attention of q (Q, heads · head_dim) over
    /// k (T, kv_heads · head_dim) and v (T, kv_heads · value_dim), within each segment. `sinks`
    /// (heads) are scores that take their share of each softmax and bring no value.
    fn attention(
        &self,
        shape: &AttentionShape,
        segments: &Self::Segments,
        sinks: Option<&Self::Weight>,
        qkv: [&Self::Tensor; 3],
        out: &mut Self::Tensor,
    );

    /// x (T, I) = activation(x), or activation(x) * up (T, I), in place.
    fn activate(&self, activation: Activation, x: &mut Self::Tensor, up: Option<&Self::Tensor>);

    /// out (T, H) = for each row of x (T, H), the experts that `rule` chooses by its row of
    /// `logits` (T, E), each weighted, added by rising expert.
    fn experts(
        &self,
        x: &Self::Tensor,
        logits: &Self::Tensor,
        rule: &ExpertsRule,
        experts: &Self::Experts,
        work: &mut MlpWork<Self::Tensor, Self::Routing>,
        out: &mut Self::Tensor,
    );

    /// out (R, H) = rows `rows` of x (T, H).
    fn gather(&self, x: &Self::Tensor, rows: &Self::Index, out: &mut Self::Tensor);

    /// out (R, H) = rows `rows` of x (T, H), which follow one another.
    fn slice(&self, x: &Self::Tensor, rows: Range<usize>, out: &mut Self::Tensor);

    /// Reduces a logits slice (R, V), which is consumed, and appends its rows to `out`.
    /// `targets` (R) are below the rule's vocabulary.
    fn reduce_head(
        &self,
        logits: &mut Self::Tensor,
        rule: &LogitRule,
        targets: &[i32],
        out: &mut Self::Rows,
    );

    /// Sends rows that are complete on their way, where ops run behind the caller.
    fn send_rows(&self, _rows: &mut Self::Rows) {}

    /// Waits for the rows that were sent, and appends them to `out`.
    ///
    /// # Errors
    /// Whatever went wrong where the backend computes since this was last asked.
    fn take_rows(&self, rows: Self::Rows, out: &mut HeadRows) -> Result<()>;
}
