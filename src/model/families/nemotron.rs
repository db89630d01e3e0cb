//! Nemotron 4 and Minitron (transformers models/nemotron/configuration_nemotron.py): LayerNorms
//! whose weight is stored less one, an MLP without a gate and with squared ReLU, a rope on half of
//! each head.

use anyhow::Result;

use super::common::{
    Biases, Defaults, Sizes, activation, eps, layer_name, llama_layer, llama_like, plain_mlp,
};
use crate::model::config::Config;
use crate::model::description::{Bias, Description, Mlp, Norm};
use crate::model::rope::{Rope, RopeFamily};

const DEFAULTS: Defaults = Defaults {
    hidden: 6144,
    vocab: 256_000,
    inner: 24_576,
    layers: 32,
    heads: 48,
    kv_heads: None,
    head_dim: None,
    context: 4096,
};

pub fn describe(config: &Config) -> Result<Description> {
    let sizes = Sizes::read(config, &DEFAULTS)?;
    // Older names of keys that are there too.
    config.ignore(&["kv_channels", "rope_percent"]);
    let activation = activation(config, "hidden_act", "relu2")?;
    let eps = eps(config, "norm_eps", 1e-5)?;
    let norm = |name: String| Norm::layer(&name, eps, sizes.hidden, Bias::Present).plus_one();
    let attention_bias = config.bool_or("attention_bias", false)?;
    let mlp_bias = config.bool_or("mlp_bias", false)?;
    let biases = Biases {
        qkv: attention_bias,
        o: attention_bias,
        mlp: mlp_bias,
    };
    let layers = (0..sizes.layers).map(|i| {
        let mut layer = llama_layer(&sizes, i, biases, activation, &norm);
        let [up, down] = ["mlp.up_proj", "mlp.down_proj"].map(|name| layer_name(i, name));
        let shape = [sizes.hidden, sizes.inner];
        layer.mlp = Mlp::Dense(plain_mlp([&up, &down], shape, mlp_bias, activation));
        layer
    });
    let rope = RopeFamily {
        partial: 0.5,
        ..RopeFamily::new(10_000.0, sizes.head_dim, sizes.context)
    };
    Ok(llama_like(
        "nemotron",
        &sizes,
        layers.collect(),
        norm("model.norm".to_owned()),
        config.bool_or("tie_word_embeddings", false)?,
        vec![Rope::read(config, rope)?],
    ))
}
