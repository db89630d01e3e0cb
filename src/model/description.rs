//! What a teacher is, as data. One decoder runs every description; a family is a function from
//! config.json to this.

use crate::backend::{Activation, AttentionShape, NormKind};

use super::rope::Rope;

/// A teacher's architecture, and the tensors it needs by name.
#[derive(Clone, PartialEq, Debug)]
pub struct Description {
    /// `model_type` of config.json.
    pub family: &'static str,
    pub hidden: usize,
    /// Rows of the embedding, and of the head.
    pub vocab: usize,
    /// Most positions the teacher was made for.
    pub context: usize,
    pub embedding: TensorSpec, // (V, H)
    pub layers: Vec<Layer>,
    pub final_norm: Norm,
    pub head: Head,
    /// The kinds of rotary embedding that layers refer to.
    pub ropes: Vec<Rope>,
    /// Patterns of tensor names that this family could use, `{}` standing for a layer number.
    /// One that is there and not needed is an error: the config must be wrong about it.
    pub could_use: &'static [&'static str],
}

/// One decoder layer: attention, then a gated MLP, each behind a norm and beside the residual.
#[derive(Clone, PartialEq, Debug)]
pub struct Layer {
    pub attention_norm: Norm,
    pub q: Projection, // (heads * head_dim, H)
    pub k: Projection, // (kv_heads * head_dim, H)
    pub v: Projection, // (kv_heads * head_dim, H)
    pub o: Projection, // (H, heads * head_dim)
    pub attention: AttentionShape,
    /// Index into `Description::ropes`.
    pub rope: usize,
    pub mlp_norm: Norm,
    pub gate: Projection, // (I, H)
    pub up: Projection,   // (I, H)
    pub down: Projection, // (H, I)
    pub activation: Activation,
}

/// The output projection.
#[derive(Clone, PartialEq, Debug)]
pub struct Head {
    pub weight: TensorSpec, // (V, H)
    /// Whether the config says that the head is the embedding.
    pub tied: bool,
}

#[derive(Clone, PartialEq, Debug)]
pub struct Norm {
    pub kind: NormKind,
    pub weight: TensorSpec, // (H)
}

/// A linear map, its weight (N, K) and, where the config says so, its bias (N).
#[derive(Clone, PartialEq, Debug)]
pub struct Projection {
    pub weight: TensorSpec,
    pub bias: Option<TensorSpec>,
}

/// A tensor that must exist under this name with this shape.
#[derive(Clone, PartialEq, Eq, Debug)]
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

impl Projection {
    /// `name.weight` (outputs, inputs) and, if `bias`, `name.bias` (outputs).
    pub fn new(name: &str, [outputs, inputs]: [usize; 2], bias: Bias) -> Projection {
        Projection {
            weight: TensorSpec::new(format!("{name}.weight"), &[outputs, inputs]),
            bias: (bias == Bias::Present)
                .then(|| TensorSpec::new(format!("{name}.bias"), &[outputs])),
        }
    }

    pub fn outputs(&self) -> usize {
        self.weight.shape[0]
    }

    pub fn inputs(&self) -> usize {
        self.weight.shape[1]
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

impl Layer {
    pub fn projections(&self) -> [&Projection; 7] {
        [
            &self.q, &self.k, &self.v, &self.o, &self.gate, &self.up, &self.down,
        ]
    }
}

impl Description {
    /// Every tensor that must be there, the head apart: whether that exists decides whether it
    /// is tied.
    pub fn body_tensors(&self) -> impl Iterator<Item = &TensorSpec> {
        let layers = self.layers.iter().flat_map(|layer| {
            let norms = [&layer.attention_norm.weight, &layer.mlp_norm.weight];
            let projections = layer.projections().into_iter();
            norms
                .into_iter()
                .chain(projections.flat_map(|p| std::iter::once(&p.weight).chain(&p.bias)))
        });
        layers.chain([&self.final_norm.weight])
    }

    /// Whether this family could use a tensor of this name.
    pub fn could_use(&self, name: &str) -> bool {
        self.could_use.iter().any(|pattern| matches(pattern, name))
    }

    /// Largest inner size of any product.
    pub fn inner_max(&self) -> usize {
        let of_layer = |l: &Layer| l.projections().map(Projection::inputs).into_iter().max();
        self.widest(|l| of_layer(l).unwrap_or(0)).max(self.hidden)
    }

    pub fn head_dim_max(&self) -> usize {
        self.widest(|l| l.attention.head_dim)
    }

    /// The most in any layer of what `of` tells of one.
    pub fn widest(&self, of: impl Fn(&Layer) -> usize) -> usize {
        self.layers.iter().map(of).max().unwrap_or(0)
    }
}

fn matches(pattern: &str, name: &str) -> bool {
    let Some((before, after)) = pattern.split_once("{}") else {
        return pattern == name;
    };
    let middle = name
        .strip_prefix(before)
        .and_then(|rest| rest.strip_suffix(after));
    middle.is_some_and(|m| !m.is_empty() && m.bytes().all(|b| b.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_take_a_layer_number_and_nothing_else() {
        assert!(matches("lm_head.weight", "lm_head.weight"));
        assert!(matches("a.{}.b", "a.12.b"));
        assert!(!matches("a.{}.b", "a..b"));
        assert!(!matches("a.{}.b", "a.1.2.b"));
        assert!(!matches("a.{}.b", "a.1.bb"));
    }
}
