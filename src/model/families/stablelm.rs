//! StableLM 1.6B, 2 and 3B (transformers models/stablelm/configuration_stablelm.py): LayerNorms
//! with bias, a rope on part of each head; the 12B has LayerNorms on each head's queries and keys,
//! every head with one of its own, and attention and MLP side by side.

use anyhow::Result;
use serde_json::json;

use super::common::{
    Biases, Defaults, Sizes, activation, eps, layer_name, llama_layer, llama_like,
};
use crate::model::config::Config;
use crate::model::description::{Bias, Description, Norm, Residual, WeightSpec};
use crate::model::rope::{Rope, RopeFamily};

const DEFAULTS: Defaults = Defaults {
    hidden: 2560,
    vocab: 50_304,
    inner: 6912,
    layers: 32,
    heads: 32,
    kv_heads: Some(32),
    head_dim: None,
    context: 4096,
};

pub fn describe(config: &Config) -> Result<Description> {
    // Norms have a bias in any case (modeling_stablelm.py, StableLmDecoderLayer).
    config.ignore(&["use_norm_bias"]);
    config.must_be(&[("rotary_scaling_factor", json!(1.0))])?;
    let sizes = Sizes::read(config, &DEFAULTS)?;
    let activation = activation(config, "hidden_act", "silu")?;
    let eps = eps(config, "layer_norm_eps", 1e-5)?;
    let norm = |name: String| Norm::layer(&name, eps, sizes.hidden, Bias::Present);
    let biases = Biases {
        qkv: config.bool_or("use_qkv_bias", false)?,
        ..Biases::default()
    };
    let qk_norm = config.bool_or("qk_layernorm", false)?;
    let parallel = config.bool_or("use_parallel_residual", false)?;
    let per_head = |i: usize, name: &str, heads: usize| {
        let name = layer_name(i, name);
        let mut norm = Norm::layer(&name, eps, sizes.head_dim, Bias::Absent);
        norm.weights = (0..heads)
            .map(|h| WeightSpec::new(format!("{name}.norms.{h}.weight"), &[sizes.head_dim]))
            .collect();
        norm
    };
    let layers = (0..sizes.layers).map(|i| {
        let mut layer = llama_layer(&sizes, i, biases, activation, &norm);
        if qk_norm {
            let of = |name, heads| Some(per_head(i, name, heads));
            layer.attention.q_norm = of("self_attn.q_layernorm", sizes.heads);
            layer.attention.k_norm = of("self_attn.k_layernorm", sizes.kv_heads);
        }
        if parallel {
            layer.residual = Residual::Parallel;
            layer.mlp_norm = None;
        }
        layer
    });
    let rope = RopeFamily {
        partial: 0.25,
        ..RopeFamily::new(10_000.0, sizes.head_dim, sizes.context)
    };
    Ok(llama_like(
        "stablelm",
        &sizes,
        layers.collect(),
        norm("model.norm".to_owned()),
        config.bool_or("tie_word_embeddings", false)?,
        vec![Rope::read(config, rope)?],
    ))
}
