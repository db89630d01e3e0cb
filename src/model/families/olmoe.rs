//! OLMoE (transformers models/olmoe/configuration_olmoe.py): Llama with experts in every layer,
//! norms on all heads' queries and keys together, and queries, keys and values brought within
//! `clip_qkv`.

use anyhow::Result;

use super::common::{
    Biases, Defaults, Sizes, activation, eps, layer_name, llama_layer, llama_like, norm_all_heads,
};
use super::experts::{Counts, gated_experts, softmax_rule};
use crate::model::config::Config;
use crate::model::description::{Description, Mlp, Norm};
use crate::model::rope::{Rope, RopeFamily};

const DEFAULTS: Defaults = Defaults {
    hidden: 2048,
    vocab: 50_304,
    inner: 2048,
    layers: 16,
    heads: 16,
    kv_heads: None,
    head_dim: None,
    context: 4096,
};

pub fn describe(config: &Config) -> Result<Description> {
    let sizes = Sizes::read(config, &DEFAULTS)?;
    let activation = activation(config, "hidden_act", "silu")?;
    let eps = eps(config, "rms_norm_eps", 1e-5)?;
    let norm = |name: String| Norm::rms(format!("{name}.weight"), eps, sizes.hidden);
    let bias = config.bool_or("attention_bias", false)?;
    let biases = Biases {
        qkv: bias,
        o: bias,
        mlp: false,
    };
    let defaults = Counts {
        experts: 64,
        chosen: 8,
    };
    let counts = Counts::read(config, &["num_local_experts", "num_experts"], defaults)?;
    let rule = softmax_rule(counts, config.bool_or("norm_topk_prob", false)?);
    let clip = config.positive_or_none("clip_qkv", None)?;
    let layers = (0..sizes.layers).map(|i| {
        let mut layer = llama_layer(&sizes, i, biases, activation, &norm);
        norm_all_heads(&mut layer, &sizes, i, eps);
        layer.attention.clip = clip.map(|clip| clip as f32);
        let shape = [sizes.hidden, sizes.inner];
        let mlp = layer_name(i, "mlp");
        layer.mlp = Mlp::Experts(gated_experts(&mlp, shape, counts, rule, activation));
        layer
    });
    let rope = RopeFamily::new(10_000.0, sizes.head_dim, sizes.context);
    Ok(llama_like(
        "olmoe",
        &sizes,
        layers.collect(),
        norm("model.norm".to_owned()),
        config.bool_or("tie_word_embeddings", false)?,
        vec![Rope::read(config, rope)?],
    ))
}
