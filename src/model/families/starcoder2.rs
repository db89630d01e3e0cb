//! StarCoder2 (transformers models/starcoder2/configuration_starcoder2.py): LayerNorms and
//! projections with bias, an MLP without a gate, a window in every layer where there is one.

use anyhow::Result;
use serde_json::json;

use super::common::{
    Biases, Defaults, Sizes, activation, eps, layer_name, llama_layer, llama_like, plain_mlp,
    window_everywhere,
};
use crate::model::config::Config;
use crate::model::description::{Bias, Description, Mlp, Norm};
use crate::model::rope::{Rope, RopeFamily};

const DEFAULTS: Defaults = Defaults {
    hidden: 3072,
    vocab: 49_152,
    inner: 12_288,
    layers: 30,
    heads: 24,
    kv_heads: Some(2),
    head_dim: None,
    context: 4096,
};

pub fn describe(config: &Config) -> Result<Description> {
    config.must_be(&[
        ("mlp_type", json!("default")),
        ("norm_type", json!("layer_norm")),
    ])?;
    let sizes = Sizes::read(config, &DEFAULTS)?;
    let activation = activation(config, "hidden_act", "gelu_pytorch_tanh")?;
    let eps = eps(config, "norm_epsilon", 1e-5)?;
    let norm = |name: String| Norm::layer(&name, eps, sizes.hidden, Bias::Present);
    let bias = config.bool_or("use_bias", true)?;
    let biases = Biases {
        qkv: bias,
        o: bias,
        mlp: bias,
    };
    let mask = window_everywhere(config.usize_or_none("sliding_window", None)?);
    let layers = (0..sizes.layers).map(|i| {
        let mut layer = llama_layer(&sizes, i, biases, activation, &norm);
        let [up, down] = ["mlp.c_fc", "mlp.c_proj"].map(|name| layer_name(i, name));
        let shape = [sizes.hidden, sizes.inner];
        layer.mlp = Mlp::Dense(plain_mlp([&up, &down], shape, bias, activation));
        layer.attention.shape.mask = mask;
        layer
    });
    let rope = RopeFamily::new(10_000.0, sizes.head_dim, sizes.context);
    Ok(llama_like(
        "starcoder2",
        &sizes,
        layers.collect(),
        norm("model.norm".to_owned()),
        config.bool_or("tie_word_embeddings", true)?,
        vec![Rope::read(config, rope)?],
    ))
}
