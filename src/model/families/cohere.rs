//! Cohere's Command R and R7B (transformers models/cohere/configuration_cohere.py and
//! models/cohere2): attention and MLP side by side behind one LayerNorm without bias, neighbours
//! rotated against each other, a factor on the logits. Command R7B's sliding layers have the rope;
//! its full ones have no positions at all.

use anyhow::Result;
use serde_json::json;

use super::common::{
    Biases, Defaults, Sees, Sizes, activation, eps, layer_name, layer_types, llama_layer,
    llama_like, mask,
};
use crate::backend::RopePairs;
use crate::model::config::Config;
use crate::model::description::{Bias, Description, Layer, Norm, Residual};
use crate::model::rope::{Rope, RopeFamily};

const DEFAULTS: Defaults = Defaults {
    hidden: 8192,
    vocab: 256_000,
    inner: 22_528,
    layers: 40,
    heads: 64,
    kv_heads: None,
    head_dim: None,
    context: 8192,
};

pub fn describe1(config: &Config) -> Result<Description> {
    let mut base = Base::read(config)?;
    // Command R's own context, where max_position_embeddings is what it began with.
    let own = config.usize_or("model_max_length", base.sizes.context)?;
    base.sizes.context = base.sizes.context.max(own);
    let qk_norm = config.bool_or("use_qk_norm", false)?;
    let layers = (0..base.sizes.layers).map(|i| {
        let mut layer = base.layer(i);
        if qk_norm {
            let norm = |name: &str, heads| base.per_head_norm(&layer_name(i, name), heads);
            layer.attention.q_norm = Some(norm("self_attn.q_norm", base.sizes.heads));
            layer.attention.k_norm = Some(norm("self_attn.k_norm", base.sizes.kv_heads));
        }
        layer
    });
    base.describe("cohere", config, layers.collect(), 500_000.0)
}

pub fn describe2(config: &Config) -> Result<Description> {
    let base = Base::read(config)?;
    let pattern = config.usize_or("sliding_window_pattern", 4)?;
    only_layout(config, pattern)?;
    let window = config.usize_or_none("sliding_window", Some(4096))?;
    let otherwise = |i: usize| match (i + 1).is_multiple_of(pattern) {
        true => Sees::Full,
        false => Sees::Sliding,
    };
    let layers = layer_types(config, base.sizes.layers, otherwise)?;
    let layers = layers.into_iter().enumerate().map(|(i, sees)| {
        let mut layer = base.layer(i);
        layer.attention.shape.mask = mask(config, sees, window)?;
        if sees == Sees::Full {
            layer.attention.rope = None;
        }
        Ok(layer)
    });
    base.describe("cohere2", config, layers.collect::<Result<_>>()?, 10_000.0)
}

/// The keys by which the first release told its one layout.
fn only_layout(config: &Config, pattern: usize) -> Result<()> {
    config.ignore(&["use_parallel_embedding"]);
    config.must_be(&[
        ("layer_switch", json!(pattern)),
        ("order_of_interleaved_layers", json!("local_attn_first")),
        ("position_embedding_type", json!("rope_gptj")),
        ("rotary_pct", json!(1.0)),
        (
            "use_embedding_sharing",
            json!(config.bool_or("tie_word_embeddings", true)?),
        ),
        ("use_gated_activation", json!(true)),
        ("use_parallel_block", json!(true)),
        ("use_qk_norm", json!(false)),
    ])
}

struct Base {
    sizes: Sizes,
    eps: f32,
    bias: bool,
    activation: crate::backend::Activation,
}

impl Base {
    fn read(config: &Config) -> Result<Base> {
        Ok(Base {
            sizes: Sizes::read(config, &DEFAULTS)?,
            eps: eps(config, "layer_norm_eps", 1e-5)?,
            bias: config.bool_or("attention_bias", false)?,
            activation: activation(config, "hidden_act", "silu")?,
        })
    }

    fn norm(&self, name: String) -> Norm {
        Norm::layer(&name, self.eps, self.sizes.hidden, Bias::Absent)
    }

    /// A norm of each head's numbers, every head with weights of its own in one tensor.
    fn per_head_norm(&self, name: &str, heads: usize) -> Norm {
        let mut norm = Norm::layer(name, self.eps, self.sizes.head_dim, Bias::Absent);
        for weight in &mut norm.weights {
            weight.tensor.shape.insert(0, heads);
            weight.shape = vec![heads * self.sizes.head_dim];
        }
        norm
    }

    fn layer(&self, i: usize) -> Layer {
        let biases = Biases {
            qkv: self.bias,
            o: self.bias,
            mlp: false,
        };
        let norm = |name: String| self.norm(name);
        let mut layer = llama_layer(&self.sizes, i, biases, self.activation, &norm);
        layer.mlp_norm = None;
        layer.residual = Residual::Parallel;
        if let Some(rope) = &mut layer.attention.rope {
            rope.shape.pairs = RopePairs::Neighbours;
        }
        layer
    }

    fn describe(
        &self,
        family: &'static str,
        config: &Config,
        layers: Vec<Layer>,
        theta: f64,
    ) -> Result<Description> {
        let sizes = &self.sizes;
        let rope = RopeFamily::new(theta, sizes.head_dim, sizes.context);
        let tied = config.bool_or("tie_word_embeddings", true)?;
        let ropes = vec![Rope::read(config, rope)?];
        let norm = self.norm("model.norm".to_owned());
        let mut description = llama_like(family, sizes, layers, norm, tied, ropes);
        let scale = config.positive_or_none("logit_scale", Some(0.0625))?;
        description.head.scale = scale.unwrap_or(1.0) as f32;
        Ok(description)
    }
}
