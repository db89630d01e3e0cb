//! SmolLM3 (transformers models/smollm3/configuration_smollm3.py): Llama with layers that have no
//! positions at all, one of four unless `no_rope_layers` says otherwise (1 is a layer with rope).

use anyhow::Result;

use super::common::{
    Biases, Defaults, Sees, Sizes, activation, eps, layer_types, llama_layer, llama_like, mask,
};
use crate::model::config::Config;
use crate::model::description::{Description, Norm};
use crate::model::rope::{Rope, RopeFamily};

const DEFAULTS: Defaults = Defaults {
    hidden: 2048,
    vocab: 128_256,
    inner: 11_008,
    layers: 36,
    heads: 16,
    kv_heads: Some(4),
    head_dim: None,
    context: 32_768,
};

pub fn describe(config: &Config) -> Result<Description> {
    // Which layers slide follows from those without a rope.
    config.ignore(&["max_window_layers"]);
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
    let turned = rope_layers(config, sizes.layers)?;
    let window = config.usize_or_none("sliding_window", None)?;
    let slides = config.bool_or("use_sliding_window", false)?;
    let window = window.filter(|_| slides);
    let otherwise = |i: usize| match window.is_some() && !turned[i] {
        true => Sees::Sliding,
        false => Sees::Full,
    };
    let layers = layer_types(config, sizes.layers, otherwise)?;
    let layers = layers.into_iter().enumerate().map(|(i, sees)| {
        let mut layer = llama_layer(&sizes, i, biases, activation, &norm);
        layer.attention.shape.mask = mask(config, sees, window)?;
        layer.attention.rope = layer.attention.rope.filter(|_| turned[i]);
        Ok(layer)
    });
    let rope = RopeFamily::new(2_000_000.0, sizes.head_dim, sizes.context);
    Ok(llama_like(
        "smollm3",
        &sizes,
        layers.collect::<Result<_>>()?,
        norm("model.norm".to_owned()),
        config.bool_or("tie_word_embeddings", true)?,
        vec![Rope::read(config, rope)?],
    ))
}

/// For each layer, whether it has a rope.
pub fn rope_layers(config: &Config, layers: usize) -> Result<Vec<bool>> {
    let interval = config.usize_or("no_rope_layer_interval", 4)?;
    let given = config.layer_flags("no_rope_layers", layers)?;
    let by_interval = || {
        (0..layers)
            .map(|i| !(i + 1).is_multiple_of(interval))
            .collect()
    };
    Ok(given.unwrap_or_else(by_interval))
}
