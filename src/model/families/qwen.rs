//! Qwen2 and 2.5, with a bias on queries, keys and values; Qwen3, with norms on each head's
//! queries and keys instead (transformers models/qwen2/configuration_qwen2.py and
//! models/qwen3/configuration_qwen3.py). Layers from `max_window_layers` on slide, but only with
//! `use_sliding_window`: published files carry a window that must be ignored.

use anyhow::Result;
use serde_json::json;

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

const DEFAULTS_2_VL: Defaults = Defaults {
    hidden: 8192,
    vocab: 152_064,
    inner: 29_568,
    layers: 80,
    heads: 64,
    kv_heads: Some(8),
    ..DEFAULTS
};

/// What the classes of these differ in where a config is silent.
struct Class {
    family: &'static str,
    defaults: Defaults,
    eps: f64,
    theta: f64,
    max_window_layers: usize,
}

const QWEN2: Class = Class {
    family: "qwen2",
    defaults: DEFAULTS,
    eps: 1e-6,
    theta: 10_000.0,
    max_window_layers: 28,
};

pub fn describe2(config: &Config) -> Result<Description> {
    describe(config, &QWEN2, QKV_BIAS)
}

/// The text part of Qwen2-VL and Qwen2.5-VL.
pub fn describe2_vl(config: &Config) -> Result<Description> {
    let class = Class {
        family: "qwen2_vl_text",
        defaults: DEFAULTS_2_VL,
        eps: 1e-5,
        theta: 1_000_000.0,
        max_window_layers: 80,
    };
    describe(config, &class, QKV_BIAS)
}

pub fn describe3(config: &Config) -> Result<Description> {
    let class = Class {
        family: "qwen3",
        defaults: Defaults {
            head_dim: Some(128),
            ..DEFAULTS
        },
        ..QWEN2
    };
    with_qk_norm(config, &class)
}

/// The text part of Qwen3-VL.
pub fn describe3_vl(config: &Config) -> Result<Description> {
    let class = Class {
        family: "qwen3_vl_text",
        defaults: Defaults {
            head_dim: Some(128),
            context: 128_000,
            ..DEFAULTS
        },
        theta: 500_000.0,
        ..QWEN2
    };
    with_qk_norm(config, &class)
}

const QKV_BIAS: Biases = Biases {
    qkv: true,
    o: false,
    mlp: false,
};

fn with_qk_norm(config: &Config, class: &Class) -> Result<Description> {
    let bias = config.bool_or("attention_bias", false)?;
    let biases = Biases {
        qkv: bias,
        o: bias,
        mlp: false,
    };
    let mut description = describe(config, class, biases)?;
    let eps = eps(config, "rms_norm_eps", class.eps)?;
    for (i, layer) in description.layers.iter_mut().enumerate() {
        norm_each_head(layer, i, eps, 0.0);
    }
    Ok(description)
}

fn describe(config: &Config, class: &Class, biases: Biases) -> Result<Description> {
    config.must_be(&[("use_mrope", json!(false))])?;
    let sizes = Sizes::read(config, &class.defaults)?;
    let activation = activation(config, "hidden_act", "silu")?;
    let eps = eps(config, "rms_norm_eps", class.eps)?;
    let norm = |name: String| Norm::rms(format!("{name}.weight"), eps, sizes.hidden);
    let window = window(config)?;
    let from = config.count_or("max_window_layers", class.max_window_layers)?;
    let slides = |i| window.is_some() && i >= from;
    let otherwise = |i| if slides(i) { Sees::Sliding } else { Sees::Full };
    let rope = RopeFamily::new(class.theta, sizes.head_dim, sizes.context);
    let layers = layer_types(config, sizes.layers, otherwise)?;
    let layers = layers.into_iter().enumerate().map(|(i, sees)| {
        let mut layer = llama_layer(&sizes, i, biases, activation, &norm);
        layer.attention.shape.mask = mask(config, sees, window)?;
        Ok(layer)
    });
    Ok(llama_like(
        class.family,
        &sizes,
        layers.collect::<Result<_>>()?,
        norm("model.norm".to_owned()),
        config.bool_or("tie_word_embeddings", false)?,
        vec![Rope::read(config, rope)?],
    ))
}

/// The window, where `use_sliding_window` says that it is one.
pub fn window(config: &Config) -> Result<Option<usize>> {
    if config.bool_or("use_sliding_window", false)? {
        return config.usize_or_none("sliding_window", Some(4096));
    }
    // Of the right kind even where it is not in use; some classes save 0.
    config.count_or("sliding_window", 0)?;
    Ok(None)
}
