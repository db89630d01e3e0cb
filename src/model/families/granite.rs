//! Granite (transformers models/granite/configuration_granite.py): Llama with a factor on the
//! embeddings, on what every branch adds to the residual, on attention scores, and a divisor of
//! the logits.

use anyhow::Result;

use super::common::{Biases, Defaults, Sizes, activation, eps, llama_layer, llama_like};
use crate::model::config::Config;
use crate::model::description::{Description, Norm};
use crate::model::rope::{Rope, RopeFamily};

const DEFAULTS: Defaults = Defaults {
    hidden: 4096,
    vocab: 32_000,
    inner: 11_008,
    layers: 32,
    heads: 32,
    kv_heads: None,
    head_dim: None,
    context: 2048,
};

pub fn describe(config: &Config) -> Result<Description> {
    let sizes = Sizes::read(config, &DEFAULTS)?;
    let activation = activation(config, "hidden_act", "silu")?;
    let eps = eps(config, "rms_norm_eps", 1e-6)?;
    let norm = |name: String| Norm::rms(format!("{name}.weight"), eps, sizes.hidden);
    let attention_bias = config.bool_or("attention_bias", false)?;
    let biases = Biases {
        qkv: attention_bias,
        o: attention_bias,
        mlp: config.bool_or("mlp_bias", false)?,
    };
    let residual_scale = config.positive_or("residual_multiplier", 1.0)? as f32;
    let attention_scale = config.positive_or("attention_multiplier", 1.0)? as f32;
    let layers = (0..sizes.layers).map(|i| {
        let mut layer = llama_layer(&sizes, i, biases, activation, &norm);
        layer.residual_scale = residual_scale;
        layer.attention.shape.scale = attention_scale;
        layer
    });
    let rope = RopeFamily::new(10_000.0, sizes.head_dim, sizes.context);
    let mut description = llama_like(
        "granite",
        &sizes,
        layers.collect(),
        norm("model.norm".to_owned()),
        config.bool_or("tie_word_embeddings", false)?,
        vec![Rope::read(config, rope)?],
    );
    description.embedding_scale = config.positive_or("embedding_multiplier", 1.0)? as f32;
    description.head.scale = (1.0 / config.positive_or("logits_scaling", 1.0)?) as f32;
    Ok(description)
}
