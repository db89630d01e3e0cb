//! GLM-4-0414 (transformers models/glm4/configuration_glm4.py): norms on both sides of attention
//! and of the MLP, neighbours rotated against each other in half of each head, gate and up
//! projections in one tensor.

use anyhow::Result;

use super::common::{
    Biases, Defaults, Sizes, activation, eps, layer_name, llama_layer, llama_like,
};
use super::phi3::fused_gate_mlp;
use crate::backend::RopePairs;
use crate::model::config::Config;
use crate::model::description::{Description, Mlp, Norm};
use crate::model::rope::{Rope, RopeFamily};

const DEFAULTS: Defaults = Defaults {
    hidden: 4096,
    vocab: 151_552,
    inner: 13_696,
    layers: 40,
    heads: 32,
    kv_heads: Some(2),
    head_dim: Some(128),
    context: 131_072,
};

pub fn describe(config: &Config) -> Result<Description> {
    let sizes = Sizes::read(config, &DEFAULTS)?;
    let activation = activation(config, "hidden_act", "silu")?;
    let eps = eps(config, "rms_norm_eps", 1.5625e-7)?;
    let norm = |name: String| Norm::rms(format!("{name}.weight"), eps, sizes.hidden);
    let biases = Biases {
        qkv: config.bool_or("attention_bias", true)?,
        ..Biases::default()
    };
    let layers = (0..sizes.layers).map(|i| {
        let mut layer = llama_layer(&sizes, i, biases, activation, &norm);
        layer.attention_post_norm = Some(norm(layer_name(i, "post_self_attn_layernorm")));
        layer.mlp_post_norm = Some(norm(layer_name(i, "post_mlp_layernorm")));
        layer.mlp = Mlp::Dense(fused_gate_mlp(i, &sizes, activation));
        if let Some(rope) = &mut layer.attention.rope {
            rope.shape.pairs = RopePairs::Neighbours;
        }
        layer
    });
    let rope = RopeFamily {
        partial: 0.5,
        ..RopeFamily::new(10_000.0, sizes.head_dim, sizes.context)
    };
    Ok(llama_like(
        "glm4",
        &sizes,
        layers.collect(),
        norm("model.norm".to_owned()),
        config.bool_or("tie_word_embeddings", false)?,
        vec![Rope::read(config, rope)?],
    ))
}
