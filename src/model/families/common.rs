//! What most families share: the sizes every config gives, the layer Llama made common, and
//! readers for keys that mean the same everywhere. A family takes these and changes what differs.

use anyhow::{Result, ensure};

use crate::backend::{Activation, AttentionShape, Mask, RopePairs, RopeShape};
use crate::model::config::Config;
use crate::model::description::{
    Attention, Bias, DenseMlp, Description, Head, Keys, Layer, LayerRope, Mlp, Names, Norm,
    Projection, QkNormAt, Query, Residual, WeightSpec,
};
use crate::model::rope::Rope;

/// What a family's config class says where config.json says nothing.
#[derive(Clone, Copy, Debug)]
pub struct Defaults {
    pub hidden: usize,
    pub vocab: usize,
    pub inner: usize,
    pub layers: usize,
    pub heads: usize,
    /// `None`: as many as heads.
    pub kv_heads: Option<usize>,
    /// `None`: hidden / heads.
    pub head_dim: Option<usize>,
    pub context: usize,
}

/// Some families have tensors for each head, so there must be few enough to describe.
const HEADS_MAX: usize = 1024;

#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub hidden: usize,
    pub vocab: usize,
    pub inner: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub context: usize,
}

impl Sizes {
    /// # Errors
    /// A size of the wrong kind, or sizes that don't go together.
    pub fn read(config: &Config, defaults: &Defaults) -> Result<Sizes> {
        let hidden = config.usize_or("hidden_size", defaults.hidden)?;
        let heads = config.usize_or("num_attention_heads", defaults.heads)?;
        ensure!(
            heads <= HEADS_MAX,
            config.error(
                "num_attention_heads",
                &format!("expected at most {HEADS_MAX}, found {heads}")
            )
        );
        let kv_heads = config.usize_or_none("num_key_value_heads", defaults.kv_heads)?;
        let kv_heads = kv_heads.unwrap_or(heads);
        ensure!(
            heads.is_multiple_of(kv_heads),
            config.error(
                "num_key_value_heads",
                &format!("expected a divisor of num_attention_heads {heads}, found {kv_heads}")
            )
        );
        let head_dim = match config.usize_or_none("head_dim", defaults.head_dim)? {
            Some(head_dim) => head_dim,
            None => shared_evenly(config, hidden, heads)?,
        };
        Ok(Sizes {
            hidden,
            vocab: config.usize_or("vocab_size", defaults.vocab)?,
            inner: config.usize_or("intermediate_size", defaults.inner)?,
            layers: config.layers("num_hidden_layers", defaults.layers)?,
            heads,
            kv_heads,
            head_dim,
            context: config.usize_or("max_position_embeddings", defaults.context)?,
        })
    }

    pub fn q(&self) -> usize {
        self.heads * self.head_dim
    }

    pub fn kv(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

/// hidden / heads, where that is whole.
pub fn shared_evenly(config: &Config, hidden: usize, heads: usize) -> Result<usize> {
    ensure!(
        hidden.is_multiple_of(heads),
        config.error(
            "num_attention_heads",
            &format!("expected a divisor of hidden_size {hidden}, found {heads}")
        )
    );
    Ok(hidden / heads)
}

/// `model.layers.{i}.{name}`
pub fn layer_name(i: usize, name: &str) -> String {
    format!("model.layers.{i}.{name}")
}

/// Which projections have a bias.
#[derive(Clone, Copy, Debug, Default)]
pub struct Biases {
    pub qkv: bool,
    pub o: bool,
    pub mlp: bool,
}

/// The layer of Llama: causal attention with a whole rope behind one norm, a gated MLP behind
/// another.
pub fn llama_layer(
    sizes: &Sizes,
    i: usize,
    biases: Biases,
    activation: Activation,
    norm: &dyn Fn(String) -> Norm,
) -> Layer {
    Layer {
        attention_norm: Some(norm(layer_name(i, "input_layernorm"))),
        attention: llama_attention(sizes, i, biases),
        attention_post_norm: None,
        mlp_norm: Some(norm(layer_name(i, "post_attention_layernorm"))),
        mlp: Mlp::Dense(gated_mlp(
            &layer_name(i, "mlp"),
            [sizes.hidden, sizes.inner],
            biases.mlp,
            activation,
        )),
        mlp_post_norm: None,
        residual: Residual::Sequential,
        residual_scale: 1.0,
    }
}

fn llama_attention(sizes: &Sizes, i: usize, biases: Biases) -> Attention {
    let project = |name: &str, shape, bias: bool| {
        let name = layer_name(i, &format!("self_attn.{name}"));
        Projection::new(&name, shape, Bias::from(bias))
    };
    let (hidden, q, kv) = (sizes.hidden, sizes.q(), sizes.kv());
    Attention {
        query: Query::Full(project("q_proj", [q, hidden], biases.qkv)),
        keys: Keys::Full {
            k: project("k_proj", [kv, hidden], biases.qkv),
            v: project("v_proj", [kv, hidden], biases.qkv),
        },
        o: project("o_proj", [hidden, q], biases.o),
        shape: attention_shape(sizes),
        q_norm: None,
        k_norm: None,
        qk_norm_at: QkNormAt::BeforeRope,
        clip: None,
        rope: Some(whole_rope(sizes.head_dim)),
        sinks: None,
        tempered: false,
    }
}

/// Causal attention with the usual scale.
pub fn attention_shape(sizes: &Sizes) -> AttentionShape {
    AttentionShape {
        heads: sizes.heads,
        kv_heads: sizes.kv_heads,
        head_dim: sizes.head_dim,
        value_dim: sizes.head_dim,
        scale: inverse_root(sizes.head_dim as f64),
        cap: None,
        mask: Mask::Causal,
    }
}

pub fn inverse_root(n: f64) -> f32 {
    n.powf(-0.5) as f32
}

/// The rope of table 0, from the head's first number on.
pub fn whole_rope(head_dim: usize) -> LayerRope {
    LayerRope {
        table: 0,
        shape: RopeShape {
            head_dim,
            start: 0,
            pairs: RopePairs::Halves,
        },
    }
}

/// An MLP with `gate_proj`, `up_proj` and `down_proj` under `name`.
pub fn gated_mlp(
    name: &str,
    [hidden, inner]: [usize; 2],
    bias: bool,
    activation: Activation,
) -> DenseMlp {
    let project =
        |part: &str, shape| Projection::new(&format!("{name}.{part}"), shape, bias.into());
    DenseMlp {
        gate: Some(project("gate_proj", [inner, hidden])),
        up: project("up_proj", [inner, hidden]),
        down: project("down_proj", [hidden, inner]),
        activation,
    }
}

/// An MLP without a gate, its two projections under `names`.
pub fn plain_mlp(
    names: [&str; 2],
    [hidden, inner]: [usize; 2],
    bias: bool,
    activation: Activation,
) -> DenseMlp {
    DenseMlp {
        gate: None,
        up: Projection::new(names[0], [inner, hidden], bias.into()),
        down: Projection::new(names[1], [hidden, inner], bias.into()),
        activation,
    }
}

/// Puts RMS norms of each head's numbers on queries and keys.
pub fn norm_each_head(layer: &mut Layer, i: usize, eps: f32, offset: f32) {
    let width = layer.attention.shape.head_dim;
    let norm = |name: &str| {
        let norm = Norm::rms(layer_name(i, name), eps, width);
        Some(Norm { offset, ..norm })
    };
    layer.attention.q_norm = norm("self_attn.q_norm.weight");
    layer.attention.k_norm = norm("self_attn.k_norm.weight");
}

/// Puts RMS norms of all heads' numbers together on queries and keys.
pub fn norm_all_heads(layer: &mut Layer, sizes: &Sizes, i: usize, eps: f32) {
    let norm = |name: &str, width| Some(Norm::rms(layer_name(i, name), eps, width));
    layer.attention.q_norm = norm("self_attn.q_norm.weight", sizes.q());
    layer.attention.k_norm = norm("self_attn.k_norm.weight", sizes.kv());
}

/// A description with Llama's names around the layers.
pub fn llama_like(
    family: &'static str,
    sizes: &Sizes,
    layers: Vec<Layer>,
    final_norm: Norm,
    tied: bool,
    ropes: Vec<Rope>,
) -> Description {
    let (vocab, hidden) = (sizes.vocab, sizes.hidden);
    Description {
        family,
        hidden,
        vocab,
        context: sizes.context,
        embedding: WeightSpec::new("model.embed_tokens.weight", &[vocab, hidden]),
        embedding_scale: 1.0,
        positions: None,
        layers,
        final_norm,
        head: Head {
            weight: WeightSpec::new("lm_head.weight", &[vocab, hidden]),
            bias: None,
            tied,
            scale: 1.0,
            cap: None,
        },
        ropes,
        temperature: None,
        names: Names {
            spellings: &[],
            // Frequencies, which older checkpoints stored.
            unread: vec!["model.layers.{}.self_attn.rotary_emb.inv_freq".to_owned()],
        },
        fp8_block: None,
    }
}

/// An activation by the names transformers has for it (activations.py).
pub fn activation(config: &Config, key: &str, default: &str) -> Result<Activation> {
    let found = config.str(key)?.unwrap_or(default);
    Ok(match found {
        "silu" | "swish" => Activation::Silu,
        "gelu" => Activation::Gelu,
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => Activation::GeluTanh,
        "relu" => Activation::Relu,
        "relu2" => Activation::Relu2,
        other => {
            return Err(config.error(
                key,
                &format!("expected silu, gelu, gelu_new, gelu_pytorch_tanh, relu or relu2, found {other:?}"),
            ));
        }
    })
}

pub fn eps(config: &Config, key: &str, default: f64) -> Result<f32> {
    Ok(config.positive_or(key, default)? as f32)
}

/// What a layer of `layer_types` sees.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sees {
    Full,
    Sliding,
    Chunked,
}

/// `layer_types`, or what the older keys mean for each layer.
pub fn layer_types(
    config: &Config,
    layers: usize,
    otherwise: impl Fn(usize) -> Sees,
) -> Result<Vec<Sees>> {
    let Some(types) = config.strings("layer_types")? else {
        return Ok((0..layers).map(otherwise).collect());
    };
    ensure!(
        types.len() == layers,
        config.error(
            "layer_types",
            &format!(
                "expected {layers} entries, one a layer, found {}",
                types.len()
            )
        )
    );
    let kinds = types.into_iter().map(|name| match name {
        "full_attention" => Ok(Sees::Full),
        "sliding_attention" => Ok(Sees::Sliding),
        "chunked_attention" => Ok(Sees::Chunked),
        other => Err(config.error(
            "layer_types",
            &format!(
                "expected full_attention, sliding_attention or chunked_attention, found {other:?}"
            ),
        )),
    });
    kinds.collect()
}

/// The mask of a layer; one that slides needs a window.
pub fn mask(config: &Config, sees: Sees, window: Option<usize>) -> Result<Mask> {
    match (sees, window) {
        (Sees::Full, _) => Ok(Mask::Causal),
        (Sees::Sliding, Some(window)) => Ok(Mask::Window(window)),
        (Sees::Sliding, None) => {
            Err(config.error("sliding_window", "expected a window for the layers that slide, found none"))
        }
        (Sees::Chunked, _) => Err(config.error(
            "layer_types",
            "expected full_attention or sliding_attention, found chunked_attention, which this family doesn't have",
        )),
    }
}

/// The same window in every layer, where there is one.
pub fn window_everywhere(window: Option<usize>) -> Mask {
    window.map_or(Mask::Causal, Mask::Window)
}
