//! What a pass stores for every row: each product's name, dtype, width and encoding.
//!
//! A logits slice is reduced once; every product of a row comes out of that one reduction. A new
//! product is a new variant of [`Product`], a field of [`RowScores`] and an arm of
//! `Product::encode`.

use half::f16;

/// Log-prob stored for a token the teacher's head rules out (-inf). It is the lowest finite
/// float16, used for float32 too, so that nothing non-finite is ever written.
pub const LOGP_FLOOR: f32 = -65504.0;

/// Element type of a stored array; `descr` is numpy's name for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Dtype {
    Bool,
    U8,
    I32,
    I64,
    F16,
    F32,
}

impl Dtype {
    pub const ALL: [Dtype; 6] = [
        Dtype::Bool,
        Dtype::U8,
        Dtype::I32,
        Dtype::I64,
        Dtype::F16,
        Dtype::F32,
    ];

    /// numpy's `dtype.str`, as it stands in an .npy header.
    pub fn descr(self) -> &'static str {
        match self {
            Dtype::Bool => "|b1",
            Dtype::U8 => "|u1",
            Dtype::I32 => "<i4",
            Dtype::I64 => "<i8",
            Dtype::F16 => "<f2",
            Dtype::F32 => "<f4",
        }
    }

    /// The name used in manifests and messages.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::Bool => "bool",
            Dtype::U8 => "uint8",
            Dtype::I32 => "int32",
            Dtype::I64 => "int64",
            Dtype::F16 => "float16",
            Dtype::F32 => "float32",
        }
    }

    pub fn from_name(name: &str) -> Option<Dtype> {
        Dtype::ALL.into_iter().find(|d| d.name() == name)
    }

    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Dtype::Bool | Dtype::U8 => 1,
            Dtype::F16 => 2,
            Dtype::I32 | Dtype::F32 => 4,
            Dtype::I64 => 8,
        }
    }
}

/// One array of a scored shard.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub enum Product {
    /// Token t+1, stored so that alignment can be proved.
    Targets,
    /// Top-k token ids, best first.
    Ids,
    /// Their log-probs.
    Logp,
    /// Probability outside the top-k.
    Tail,
    /// Log-prob of the target.
    TargetLogp,
    /// Ids that come before the target in top-k order; 0 is the teacher's first choice.
    TargetRank,
    /// Logsumexp of the logits over the full vocabulary.
    Logsumexp,
    /// Entropy of the teacher's distribution, in nats.
    Entropy,
}

impl Product {
    /// Always stored, in this order.
    pub const BASE: [Product; 4] = [Product::Targets, Product::Ids, Product::Logp, Product::Tail];

    /// Stored when asked for with `--emit`, in this order.
    pub const EXTRA: [Product; 4] = [
        Product::TargetLogp,
        Product::TargetRank,
        Product::Logsumexp,
        Product::Entropy,
    ];

    /// The array's name: `<name>.npy`.
    pub fn name(self) -> &'static str {
        match self {
            Product::Targets => "targets",
            Product::Ids => "ids",
            Product::Logp => "logp",
            Product::Tail => "tail",
            Product::TargetLogp => "target_logp",
            Product::TargetRank => "target_rank",
            Product::Logsumexp => "logsumexp",
            Product::Entropy => "entropy",
        }
    }

    pub fn from_name(name: &str) -> Option<Product> {
        Product::BASE
            .into_iter()
            .chain(Product::EXTRA)
            .find(|p| p.name() == name)
    }

    /// Element type, given the dtype chosen for `logp` and `tail`.
    pub fn dtype(self, logp_dtype: Dtype) -> Dtype {
        match self {
            Product::Targets | Product::Ids | Product::TargetRank => Dtype::I32,
            Product::Logp | Product::Tail => logp_dtype,
            Product::TargetLogp | Product::Logsumexp | Product::Entropy => Dtype::F32,
        }
    }

    /// Elements a row holds: k for the top-k arrays (shape (R, k)), `None` for one (shape (R)).
    pub fn width(self, k: usize) -> Option<usize> {
        match self {
            Product::Ids | Product::Logp => Some(k),
            _ => None,
        }
    }

    /// Appends the row's little-endian elements to `out`.
    fn encode(self, row: &RowScores, logp_dtype: Dtype, out: &mut Vec<u8>) {
        let mut ints = |values: &[i32]| values.iter().for_each(|v| out.extend(v.to_le_bytes()));
        match self {
            Product::Targets => ints(&[row.target]),
            Product::Ids => ints(row.ids),
            Product::TargetRank => ints(&[row.target_rank]),
            Product::Logp => row
                .logp
                .iter()
                .for_each(|&v| encode_float(finite_logp(v), logp_dtype, out)),
            Product::Tail => encode_float(row.tail, logp_dtype, out),
            Product::TargetLogp => encode_float(finite_logp(row.target_logp), Dtype::F32, out),
            Product::Logsumexp => encode_float(row.logsumexp, Dtype::F32, out),
            Product::Entropy => encode_float(row.entropy, Dtype::F32, out),
        }
    }
}

/// All that one row's logits give. Floats are unrounded.
#[derive(Clone, Copy, Debug)]
pub struct RowScores<'a> {
    pub target: i32,
    pub ids: &'a [i32],  // (K)
    pub logp: &'a [f32], // (K)
    pub tail: f32,
    pub target_logp: f32,
    pub target_rank: i32,
    pub logsumexp: f32,
    pub entropy: f32,
}

/// Which products a run stores, and how.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ProductPlan {
    pub k: usize,
    /// [`Dtype::F16`] or [`Dtype::F32`], for `logp` and `tail`.
    pub logp_dtype: Dtype,
    /// Out of [`Product::EXTRA`], in that order.
    pub extra: Vec<Product>,
}

impl ProductPlan {
    /// Every product stored, in the order of the manifest.
    pub fn products(&self) -> impl Iterator<Item = Product> + '_ {
        Product::BASE.into_iter().chain(self.extra.iter().copied())
    }

    /// Bytes a row takes on disk, headers aside.
    pub fn bytes_per_row(&self) -> usize {
        self.products().map(|p| self.row_bytes(p)).sum()
    }

    /// Bytes that one product of a row takes.
    pub fn row_bytes(&self, product: Product) -> usize {
        product.dtype(self.logp_dtype).size() * product.width(self.k).unwrap_or(1)
    }
}

/// The bytes of one product for the rows of a shard, each row in its final place.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ProductArray {
    pub product: Product,
    pub dtype: Dtype,
    /// (R) or (R, K)
    pub shape: Vec<usize>,
    /// Little endian, C order.
    pub bytes: Vec<u8>,
}

/// Collects the rows of one shard, in any order, straight into their final place.
#[derive(Debug)]
pub struct RowSink {
    plan: ProductPlan,
    arrays: Vec<ProductArray>,
    written: Vec<bool>, // (R)
    scratch: Vec<u8>,
}

impl RowSink {
    /// Room for `rows` rows; all of it is allocated here.
    pub fn new(plan: &ProductPlan, rows: usize) -> RowSink {
        let arrays = plan
            .products()
            .map(|product| ProductArray {
                product,
                dtype: product.dtype(plan.logp_dtype),
                shape: std::iter::once(rows).chain(product.width(plan.k)).collect(),
                bytes: vec![0; rows * plan.row_bytes(product)],
            })
            .collect();
        RowSink {
            plan: plan.clone(),
            arrays,
            written: vec![false; rows],
            scratch: Vec::with_capacity(plan.k * 4),
        }
    }

    /// Puts `scores` in row `row`.
    ///
    /// # Panics
    /// When the row was written before: every row comes exactly once.
    pub fn put(&mut self, row: usize, scores: &RowScores) {
        assert!(!self.written[row], "row {row} was scored twice");
        self.written[row] = true;
        for array in &mut self.arrays {
            self.scratch.clear();
            array
                .product
                .encode(scores, self.plan.logp_dtype, &mut self.scratch);
            let at = row * self.scratch.len();
            array.bytes[at..at + self.scratch.len()].copy_from_slice(&self.scratch);
        }
    }

    /// The finished arrays.
    ///
    /// # Panics
    /// When a row is missing: every row comes exactly once.
    pub fn finish(self) -> Vec<ProductArray> {
        if let Some(row) = self.written.iter().position(|written| !written) {
            panic!("row {row} was never scored");
        }
        self.arrays
    }
}

fn encode_float(value: f32, dtype: Dtype, out: &mut Vec<u8>) {
    match dtype {
        Dtype::F16 => out.extend(f16::from_f32(value).to_le_bytes()),
        _ => out.extend(value.to_le_bytes()),
    }
}

/// A log-prob as it is stored: at most 0, never below [`LOGP_FLOOR`].
fn finite_logp(value: f32) -> f32 {
    value.clamp(LOGP_FLOOR, 0.0)
}
