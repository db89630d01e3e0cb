//! Qwen2 and 2.5, with a bias on queries, keys and values; Qwen3, with norms on each head's
//! queries and keys instead (transformers models/qwen2/configuration_qwen2.py and
//! models/qwen3/configuration_qwen3.py). Layers from `max_window_layers` on slide, but only with
//! `use_sliding_window`: published files carry a window that must be ignored.

use anyhow::Result;

use super::common::{
    Biases, Defaults, Sees, Sizes, activation, eps, layer_types, llama_layer, llama_like, mask,
    norm_each_head,
};
use crate::model::config::Config;
use crate::model::description::{Description, Norm};
use crate::model::rope::{Rope, RopeFamily};

const DEFAULTS: Defaults = Defaults {
    hidden: 4096,
    vocab: 151_936,
    inner: 22_016,
    layers: 32,
    heads: 32,
    kv_heads: Some(32),
    head_dim: None,
    context: 32_768,
};

pub fn describe2(config: &Config) -> Result<Description> {
    let biases = Biases {
        qkv: true,
        ..Biases::default()
    };
    describe(config, "qwen2", DEFAULTS, biases)
}

pub fn describe3(config: &Config) -> Result<Description> {
    let bias = config.bool_or("attention_bias", false)?;
    let biases = Biases {
        qkv: bias,
        o: bias,
        mlp: false,
    };
    let defaults = Defaults {
        head_dim: Some(128),
        ..DEFAULTS
    };
    let mut description = describe(config, "qwen3", defaults, biases)?;
    let eps = eps(config, "rms_norm_eps", 1e-6)?;
    for (i, layer) in description.layers.iter_mut().enumerate() {
        norm_each_head(layer, i, eps, 0.0);
    }
    Ok(description)
}

fn describe(
    config: &Config,
    family: &'static str,
    defaults: Defaults,
    biases: Biases,
) -> Result<Description> {
    let sizes = Sizes::read(config, &defaults)?;
    let activation = activation(config, "hidden_act", "silu")?;
    let eps = eps(config, "rms_norm_eps", 1e-6)?;
    let norm = |name: String| Norm::rms(format!("{name}.weight"), eps, sizes.hidden);
    let window = window(config)?;
    let from = config.count_or("max_window_layers", 28)?;
    let slides = |i| window.is_some() && i >= from;
    let otherwise = |i| if slides(i) { Sees::Sliding } else { Sees::Full };
    let rope = RopeFamily::new(10_000.0, sizes.head_dim, sizes.context);
    let layers = layer_types(config, sizes.layers, otherwise)?;
    let layers = layers.into_iter().enumerate().map(|(i, sees)| {
        let mut layer = llama_layer(&sizes, i, biases, activation, &norm);
        layer.attention.shape.mask = mask(config, sees, window)?;
        Ok(layer)
    });
    Ok(llama_like(
        family,
        &sizes,
        layers.collect::<Result<_>>()?,
        norm("model.norm".to_owned()),
        config.bool_or("tie_word_embeddings", false)?,
        vec![Rope::read(config, rope)?],
    ))
}

/// The window, where `use_sliding_window` says that it is one.
pub fn window(config: &Config) -> Result<Option<usize>> {
    let window = config.usize_or_none("sliding_window", Some(4096))?;
    let in_use = config.bool_or("use_sliding_window", false)?;
    Ok(window.filter(|_| in_use))
}
