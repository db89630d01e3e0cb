//! The ops a decoder is made of, each with the shape of its buffers. The CPU backend is the
//! reference; another device implements the same trait and must give the same rows.
//!
//! Architecture invariant: a backend knows no family, no config and no file. It never decides
//! what to compute, and the bits of a row depend on that row's own sequence alone, whatever else
//! is in the buffer.

pub mod cpu;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use anyhow::Result;

/// How a stored weight encodes its numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FloatDtype {
    F32,
    F16,
    Bf16,
}

impl FloatDtype {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            FloatDtype::F32 => 4,
            FloatDtype::F16 | FloatDtype::Bf16 => 2,
        }
    }
}

/// A weight in host memory, usually a piece of a memory-mapped file; cheap to clone.
#[derive(Clone)]
pub struct HostWeight {
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    span: Range<usize>,
    pub dtype: FloatDtype,
    /// (N) or (N, K), C order, little endian.
    pub shape: Vec<usize>,
}

impl HostWeight {
    /// # Panics
    /// When `span` is not exactly the bytes that `dtype` and `shape` need; the caller has checked
    /// the file.
    pub fn new(
        owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
        span: Range<usize>,
        dtype: FloatDtype,
        shape: Vec<usize>,
    ) -> HostWeight {
        assert_eq!(span.len(), shape.iter().product::<usize>() * dtype.size());
        assert!(span.end <= (*owner).as_ref().len());
        HostWeight {
            owner,
            span,
            dtype,
            shape,
        }
    }

    /// A weight made of numbers at hand, kept as f32.
    pub fn from_f32(values: &[f32], shape: Vec<usize>) -> HostWeight {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let span = 0..bytes.len();
        HostWeight::new(Arc::new(bytes), span, FloatDtype::F32, shape)
    }

    pub fn bytes(&self) -> &[u8] {
        &(*self.owner).as_ref()[self.span.clone()]
    }

    /// Rows of a matrix, or the length of a vector.
    pub fn rows(&self) -> usize {
        self.shape[0]
    }

    /// Elements of one row.
    pub fn width(&self) -> usize {
        self.shape[1..].iter().product()
    }

    /// Rows `rows` of this weight, sharing its memory.
    pub fn slice_rows(&self, rows: Range<usize>) -> HostWeight {
        let row_bytes = self.width() * self.dtype.size();
        let start = self.span.start;
        let mut shape = self.shape.clone();
        shape[0] = rows.len();
        HostWeight::new(
            self.owner.clone(),
            start + rows.start * row_bytes..start + rows.end * row_bytes,
            self.dtype,
            shape,
        )
    }
}

impl fmt::Debug for HostWeight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostWeight({:?} {:?})", self.dtype, self.shape)
    }
}

/// Activations: (rows, width) in C order. Allocated once for the most rows it will ever hold.
pub trait Tensor {
    fn rows(&self) -> usize;
    fn width(&self) -> usize;
    /// Sets how many rows are in use, up to those allocated. Their content is then undefined.
    fn set_rows(&mut self, rows: usize);
}

/// Whether a product replaces what is in the output or is added to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Into {
    Replace,
    Add,
}

/// How a row is normalised before its weight is applied.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum NormKind {
    /// x / sqrt(mean(x^2) + eps)
    Rms { eps: f32 },
}

/// What stands between the two halves of a gated MLP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Activation {
    /// x * sigmoid(x)
    Silu,
}

/// Attention of one layer, whatever the batch.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct AttentionShape {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Factor on the scores before the softmax.
    pub scale: f32,
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
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct LogitRule {
    /// Head rows that take part; those beyond are as if they were not there.
    pub vocab: usize,
    /// Tokens the tokenizer has; head rows from here to `vocab` are padding.
    pub vocab_real: usize,
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

/// The ops. Each sets the rows of its output to fit. Shapes: T tokens of a packed batch, H hidden, V vocabulary, R rows of a slice.
pub trait Backend: Send + Sync {
    type Tensor: Tensor + Send;
    /// A weight where the backend computes.
    type Weight: Send + Sync;
    /// Row numbers, token ids or positions where the backend computes.
    type Index: Send + Sync;

    /// What produced the bits: device, libraries, kernels. Recorded with every shard.
    fn provenance(&self) -> serde_json::Value;

    /// Room for `rows_max` rows of `width` numbers.
    fn tensor(&self, rows_max: usize, width: usize) -> Result<Self::Tensor>;

    /// Makes a weight ready to be used.
    fn weight(&self, host: &HostWeight) -> Result<Self::Weight>;

    fn index(&self, values: &[u32]) -> Result<Self::Index>;

    /// A copy in host memory, (rows, width).
    fn download(&self, x: &Self::Tensor) -> Vec<f32>;

    /// Puts (rows, width) numbers in `x`, whose rows are set to match.
    fn upload(&self, values: &[f32], x: &mut Self::Tensor);

    /// out (T, H) = rows `tokens` of `table` (V, H).
    fn embed(&self, table: &Self::Weight, tokens: &Self::Index, out: &mut Self::Tensor);

    /// out (T, H) = norm of each row of x (T, H), times weight (H).
    fn norm(&self, x: &Self::Tensor, kind: NormKind, weight: &Self::Weight, out: &mut Self::Tensor);

    /// out (T, N) = or += x (T, K) · weightᵀ (N, K) + bias (N).
    fn linear(
        &self,
        x: &Self::Tensor,
        weight: &Self::Weight,
        bias: Option<&Self::Weight>,
        into: Into,
        out: &mut Self::Tensor,
    );

    /// Rotates each head of x (T, heads · head_dim) in place by the angles of its row of the
    /// tables: cos and sin (P, head_dim / 2), row `positions[t]`. Halves are rotated against
    /// each other, as Hugging Face's `rotate_half` does.
    fn rope(
        &self,
        x: &mut Self::Tensor,
        head_dim: usize,
        cos: &Self::Tensor,
        sin: &Self::Tensor,
        positions: &Self::Index,
    );

    /// out (Q, heads · head_dim) = causal attention of q (Q, heads · head_dim) over
    /// k, v (T, kv_heads · head_dim), within each segment.
    fn attention(
        &self,
        shape: &AttentionShape,
        segments: &Segments,
        q: &Self::Tensor,
        k: &Self::Tensor,
        v: &Self::Tensor,
        out: &mut Self::Tensor,
    );

    /// gate (T, I) = activation(gate) * up (T, I), in place.
    fn gate(&self, activation: Activation, gate: &mut Self::Tensor, up: &Self::Tensor);

    /// out (R, H) = rows `rows` of x (T, H).
    fn gather(&self, x: &Self::Tensor, rows: &Self::Index, out: &mut Self::Tensor);

    /// Reduces a logits slice (R, V), which is consumed, and appends its rows to `out`.
    /// `targets` (R) are below the rule's vocabulary.
    fn reduce_head(
        &self,
        logits: &mut Self::Tensor,
        rule: &LogitRule,
        targets: &[i32],
        out: &mut HeadRows,
    );
}
