//! Llama 2 and 3, and everything published under `model_type` llama (transformers
//! models/llama/configuration_llama.py for keys and defaults).

use anyhow::Result;
use serde_json::json;

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
    config.must_be(&[("rope_interleaved", json!(false))])?;
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
    let rope = RopeFamily::new(10_000.0, sizes.head_dim, sizes.context);
    let layers = (0..sizes.layers)
        .map(|i| llama_layer(&sizes, i, biases, activation, &norm))
        .collect();
    Ok(llama_like(
        "llama",
        &sizes,
        layers,
        norm("model.norm".to_owned()),
        config.bool_or("tie_word_embeddings", false)?,
        vec![Rope::read(config, rope)?],
    ))
}
