//! Mistral: Llama with a window in every layer (transformers
//! models/mistral/configuration_mistral.py). Its default of 4096 holds where the key is absent;
//! null, as later releases say, is no window.

use anyhow::Result;

use super::common::{
    Biases, Defaults, Sizes, activation, eps, llama_layer, llama_like, window_everywhere,
};
use crate::model::config::Config;
use crate::model::description::{Description, Norm};
use crate::model::rope::{Rope, RopeFamily};

const DEFAULTS: Defaults = Defaults {
    hidden: 4096,
    vocab: 32_000,
    inner: 14_336,
    layers: 32,
    heads: 32,
    kv_heads: Some(8),
    head_dim: None,
    context: 131_072,
};

pub fn describe(config: &Config) -> Result<Description> {
    let sizes = Sizes::read(config, &DEFAULTS)?;
    let activation = activation(config, "hidden_act", "silu")?;
    let eps = eps(config, "rms_norm_eps", 1e-6)?;
    let norm = |name: String| Norm::rms(format!("{name}.weight"), eps, sizes.hidden);
    let mask = window_everywhere(config.usize_or_none("sliding_window", Some(4096))?);
    let rope = RopeFamily::new(10_000.0, sizes.head_dim, sizes.context);
    let layers = (0..sizes.layers).map(|i| {
        let mut layer = llama_layer(&sizes, i, Biases::default(), activation, &norm);
        layer.attention.shape.mask = mask;
        layer
    });
    Ok(llama_like(
        "mistral",
        &sizes,
        layers.collect(),
        norm("model.norm".to_owned()),
        config.bool_or("tie_word_embeddings", false)?,
        vec![Rope::read(config, rope)?],
    ))
}
