//! EXAONE 4 (transformers models/exaone4/configuration_exaone4.py): norms behind attention and
//! MLP instead of before them, and on each head's queries and keys. Where there is a window, only
//! the layers that slide have a rope.

use anyhow::Result;

use super::common::{
    Biases, Defaults, Sees, Sizes, activation, eps, layer_name, layer_types, llama_layer,
    llama_like, mask, norm_each_head,
};
use crate::model::config::Config;
use crate::model::description::{Description, Norm};
use crate::model::rope::{Rope, RopeFamily};

const DEFAULTS: Defaults = Defaults {
    hidden: 4096,
    vocab: 102_400,
    inner: 16_384,
    layers: 32,
    heads: 32,
    kv_heads: Some(32),
    head_dim: None,
    context: 2048,
};

pub fn describe(config: &Config) -> Result<Description> {
    let sizes = Sizes::read(config, &DEFAULTS)?;
    let activation = activation(config, "hidden_act", "silu")?;
    let eps = eps(config, "rms_norm_eps", 1e-5)?;
    let norm = |name: String| Norm::rms(format!("{name}.weight"), eps, sizes.hidden);
    let window = config.usize_or_none("sliding_window", Some(4096))?;
    let layers = types(config, sizes.layers, window)?;
    let layers = layers.into_iter().enumerate().map(|(i, sees)| {
        let mut layer = llama_layer(&sizes, i, Biases::default(), activation, &norm);
        layer.attention_norm = None;
        layer.attention_post_norm = Some(norm(layer_name(i, "post_attention_layernorm")));
        layer.mlp_norm = None;
        layer.mlp_post_norm = Some(norm(layer_name(i, "post_feedforward_layernorm")));
        norm_each_head(&mut layer, i, eps, 0.0);
        layer.attention.shape.mask = mask(config, sees, window)?;
        if window.is_some() && sees == Sees::Full {
            layer.attention.rope = None;
        }
        Ok(layer)
    });
    let rope = RopeFamily::new(10_000.0, sizes.head_dim, sizes.context);
    Ok(llama_like(
        "exaone4",
        &sizes,
        layers.collect::<Result<_>>()?,
        norm("model.norm".to_owned()),
        config.bool_or("tie_word_embeddings", false)?,
        vec![Rope::read(config, rope)?],
    ))
}

/// The pattern counts only where `layer_types` is absent; published files write it as letters
/// beside the list.
fn types(config: &Config, layers: usize, window: Option<usize>) -> Result<Vec<Sees>> {
    if config.value("layer_types").is_some() {
        config.ignore(&["sliding_window_pattern"]);
        return layer_types(config, layers, |_| Sees::Full);
    }
    let pattern = config.usize_or("sliding_window_pattern", 4)?;
    let slides = |i: usize| window.is_some() && !(i + 1).is_multiple_of(pattern);
    let types = (0..layers).map(|i| if slides(i) { Sees::Sliding } else { Sees::Full });
    Ok(types.collect())
}
