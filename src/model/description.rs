//! What a teacher is, as data. One decoder runs every description; a family is a function from
//! config.json to this.

use crate::backend::{
    Activation, AttentionShape, ExpertsRule, Lines, MX_BLOCK, NormKind, NormShape, Order, RopeShape,
};

use super::rope::Rope;

/// A teacher's architecture, and the tensors it needs by name.
#[derive(Clone, PartialEq, Debug)]
pub struct Description {
    /// `model_type` of config.json.
    pub family: &'static str,
    pub hidden: usize,
    /// Rows of the embedding, and of the head.
    pub vocab: usize,
    /// Most positions the teacher takes: `max_position_embeddings`, or what its rope is scaled to.
    pub context: usize,
    pub embedding: WeightSpec, // (V, H)
    /// Factor on embedded tokens.
    pub embedding_scale: f32,
    /// Learned positions, added to the embedded tokens.
    pub positions: Option<WeightSpec>, // (context, H)
    pub layers: Vec<Layer>,
    pub final_norm: Norm,
    pub head: Head,
    /// The kinds of rotary embedding that layers refer to.
    pub ropes: Vec<Rope>,
    /// What queries of tempered layers are multiplied by.
    pub temperature: Option<Temperature>,
    pub names: Names,
    /// Lines and columns that share a factor, where the checkpoint has 8-bit weights.
    pub fp8_block: Option<usize>,
}

/// How a checkpoint may spell the names that the description uses.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Names {
    /// Ways to spell the names: for each prefix of the description, the stored one. The way under
    /// which most tensors are there holds for the whole checkpoint; none means as written.
    pub spellings: &'static [&'static [(&'static str, &'static str)]],
    /// Patterns of names that may be there though nothing reads them, `{}` standing for a number:
    /// buffers, and parts of the model that don't decode.
    pub unread: Vec<String>,
}

/// One decoder layer: attention and an MLP, each between norms and beside the residual.
#[derive(Clone, PartialEq, Debug)]
pub struct Layer {
    /// Before attention; without it attention reads the residual.
    pub attention_norm: Option<Norm>,
    pub attention: Attention,
    /// On what attention adds to the residual.
    pub attention_post_norm: Option<Norm>,
    /// Before the MLP. Without it the MLP reads the residual, or what attention reads where they
    /// are parallel.
    pub mlp_norm: Option<Norm>,
    pub mlp: Mlp,
    /// On what the MLP adds to the residual.
    pub mlp_post_norm: Option<Norm>,
    pub residual: Residual,
    /// Factor on what attention and the MLP add.
    pub residual_scale: f32,
}

/// Whether the MLP sees what attention added.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Residual {
    Sequential,
    Parallel,
}

#[derive(Clone, PartialEq, Debug)]
pub struct Attention {
    pub query: Query,
    pub keys: Keys,
    pub o: Projection, // (H, heads * value_dim)
    pub shape: AttentionShape,
    /// On queries and on keys, by `qk_norm_at`.
    pub q_norm: Option<Norm>,
    pub k_norm: Option<Norm>,
    pub qk_norm_at: QkNormAt,
    /// Queries, keys and values are brought within this of 0.
    pub clip: Option<f32>,
    /// `None`: the layer has no positions of its own.
    pub rope: Option<LayerRope>,
    /// Scores that take a share of each head's softmax and bring no value.
    pub sinks: Option<WeightSpec>, // (heads)
    /// Whether queries are multiplied by the temperature of their position.
    pub tempered: bool,
}

/// Where queries come from.
#[derive(Clone, PartialEq, Debug)]
#[expect(clippy::large_enum_variant, reason = "one a layer")]
pub enum Query {
    Full(Projection), // (heads * head_dim, H)
    /// Through a narrow, normalised latent (DeepSeek-V2, arXiv:2405.04434).
    Latent {
        down: Projection, // (rank, H)
        norm: Norm,
        up: Projection, // (heads * head_dim, rank)
    },
}

/// Where keys and values come from.
#[derive(Clone, PartialEq, Debug)]
#[expect(clippy::large_enum_variant, reason = "one a layer")]
pub enum Keys {
    Full {
        k: Projection, // (kv_heads * head_dim, H)
        v: Projection, // (kv_heads * value_dim, H)
    },
    /// Through one latent; the rotated part of the keys is shared by all heads.
    Latent {
        down: Projection, // (rank, H)
        norm: Norm,
        k: Projection,       // (heads * plain, rank)
        v: Projection,       // (heads * value_dim, rank)
        rotated: Projection, // (head_dim - plain, H)
    },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QkNormAt {
    BeforeRope,
    AfterRope,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LayerRope {
    /// Index into `Description::ropes`.
    pub table: usize,
    pub shape: RopeShape,
}

/// Queries at position p are multiplied by 1 + scale * ln(1 + floor((p + 1) / floor))
/// (Nakanishi 2025, arXiv:2501.19399, as Llama 4 uses it).
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Temperature {
    pub floor: f32,
    pub scale: f32,
}

#[derive(Clone, PartialEq, Debug)]
#[expect(clippy::large_enum_variant, reason = "one a layer")]
pub enum Mlp {
    Dense(DenseMlp),
    Experts(Experts),
}

/// down(activation(gate(x)) * up(x)), or down(activation(up(x))) without a gate.
#[derive(Clone, PartialEq, Debug)]
pub struct DenseMlp {
    pub gate: Option<Projection>, // (I, H)
    pub up: Projection,           // (I, H)
    pub down: Projection,         // (H, I)
    pub activation: Activation,
}

#[derive(Clone, PartialEq, Debug)]
pub struct Experts {
    pub router: Projection,             // (E, H)
    pub correction: Option<WeightSpec>, // (E)
    pub rule: ExpertsRule,
    pub list: Vec<DenseMlp>,
    /// An MLP that every row takes, and what its output is gated by.
    pub shared: Option<DenseMlp>,
    pub shared_gate: Option<Projection>, // (1, H)
}

/// The output projection and what follows it.
#[derive(Clone, PartialEq, Debug)]
pub struct Head {
    pub weight: WeightSpec,       // (V, H)
    pub bias: Option<WeightSpec>, // (V)
    /// Whether the config says that the head is the embedding.
    pub tied: bool,
    pub scale: f32,
    pub cap: Option<f32>,
}

/// The weight is that of `weights`, one after the other, plus `offset`.
#[derive(Clone, PartialEq, Debug)]
pub struct Norm {
    pub shape: NormShape,
    pub weights: Vec<WeightSpec>,
    pub offset: f32,
    pub bias: Option<WeightSpec>,
}

/// A linear map, its weight (N, K) and, where the config says so, its bias (N).
#[derive(Clone, PartialEq, Debug)]
pub struct Projection {
    pub weight: WeightSpec,
    pub bias: Option<WeightSpec>,
}

/// A weight, and the tensor it is a part of.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WeightSpec {
    pub tensor: TensorSpec,
    /// Factors of `tensor`, where it is quantised by its family.
    pub scales: Option<TensorSpec>,
    /// As it is used: (N) or (N, K).
    pub shape: Vec<usize>,
    /// Which of the equal pieces of the tensor it lies in.
    pub piece: usize,
    pub pieces: usize,
    pub lines: Lines,
    pub order: Order,
}

/// A tensor that must exist under this name with this shape.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct TensorSpec {
    pub name: String,
    pub shape: Vec<usize>,
}

impl TensorSpec {
    pub fn new(name: impl Into<String>, shape: &[usize]) -> TensorSpec {
        TensorSpec {
            name: name.into(),
            shape: shape.to_vec(),
        }
    }
}

impl WeightSpec {
    /// All of a tensor.
    pub fn new(name: impl Into<String>, shape: &[usize]) -> WeightSpec {
        WeightSpec {
            tensor: TensorSpec::new(name, shape),
            scales: None,
            shape: shape.to_vec(),
            piece: 0,
            pieces: 1,
            lines: Lines::ALL,
            order: Order::Lines,
        }
    }

    /// Numbers of a stored line.
    pub fn columns(&self) -> usize {
        match (self.order, self.shape.len()) {
            (_, 1) => 1,
            (Order::Lines, _) => self.shape[1],
            (Order::Columns, _) => self.tensor.shape[self.tensor.shape.len() - 1],
        }
    }

    /// The tensor is stored with its axes swapped.
    pub fn transposed(mut self) -> WeightSpec {
        self.tensor.shape.reverse();
        self.order = Order::Columns;
        self
    }

    /// The tensors stack `pieces` of these, of which this is one.
    pub fn stacked(mut self, piece: usize, pieces: usize) -> WeightSpec {
        for tensor in std::iter::once(&mut self.tensor).chain(&mut self.scales) {
            tensor.shape.insert(0, pieces);
        }
        (self.piece, self.pieces) = (piece, pieces);
        self
    }

    /// Stored as 4-bit blocks under `name_blocks` with factors under `name_scales`.
    pub fn mxfp4(name: &str, [outputs, inputs]: [usize; 2]) -> WeightSpec {
        let blocks = inputs / MX_BLOCK;
        let (stored, factors) = (format!("{name}_blocks"), format!("{name}_scales"));
        WeightSpec {
            tensor: TensorSpec::new(stored, &[outputs, blocks, MX_BLOCK / 2]),
            scales: Some(TensorSpec::new(factors, &[outputs, blocks])),
            ..WeightSpec::new(name, &[outputs, inputs])
        }
    }

    /// Some lines of a fused tensor, used as `outputs` rows.
    pub fn lines(mut self, lines: Lines, outputs: usize) -> WeightSpec {
        (self.lines, self.shape[0]) = (lines, outputs);
        self
    }
}

impl Projection {
    /// `name.weight` (outputs, inputs) and, if `bias`, `name.bias` (outputs).
    pub fn new(name: &str, [outputs, inputs]: [usize; 2], bias: Bias) -> Projection {
        Projection {
            weight: WeightSpec::new(format!("{name}.weight"), &[outputs, inputs]),
            bias: (bias == Bias::Present)
                .then(|| WeightSpec::new(format!("{name}.bias"), &[outputs])),
        }
    }

    /// `outputs` lines of what `self` stores as one projection.
    pub fn lines(mut self, lines: Lines, outputs: usize) -> Projection {
        self.weight = self.weight.lines(lines, outputs);
        self.bias = self.bias.map(|bias| bias.lines(lines, outputs));
        self
    }

    /// The weight is stored (inputs, outputs).
    pub fn transposed(mut self) -> Projection {
        self.weight = self.weight.transposed();
        self
    }

    pub fn outputs(&self) -> usize {
        self.weight.shape[0]
    }

    pub fn inputs(&self) -> usize {
        self.weight.shape[1]
    }
}

impl Norm {
    /// x / rms(x) * weight, over `width` numbers.
    pub fn rms(name: impl Into<String>, eps: f32, width: usize) -> Norm {
        Norm {
            shape: NormShape {
                kind: NormKind::Rms,
                eps,
                width,
            },
            weights: vec![WeightSpec::new(name, &[width])],
            offset: 0.0,
            bias: None,
        }
    }

    /// (x - mean) / sd * `name.weight`, plus `name.bias` if `bias`.
    pub fn layer(name: &str, eps: f32, width: usize, bias: Bias) -> Norm {
        let mut norm = Norm::rms(format!("{name}.weight"), eps, width);
        norm.shape.kind = NormKind::Layer;
        norm.bias =
            (bias == Bias::Present).then(|| WeightSpec::new(format!("{name}.bias"), &[width]));
        norm
    }

    /// The weight is stored less one.
    pub fn plus_one(mut self) -> Norm {
        self.offset = 1.0;
        self
    }
}

/// Whether a projection has a bias.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bias {
    Present,
    Absent,
}

impl From<bool> for Bias {
    fn from(present: bool) -> Bias {
        if present { Bias::Present } else { Bias::Absent }
    }
}

impl Description {
    /// The most in any layer of what `of` tells of one.
    pub fn widest(&self, of: impl Fn(&Layer) -> usize) -> usize {
        self.layers.iter().map(of).max().unwrap_or(0)
    }
}
