//! Mixtral (transformers models/mixtral/configuration_mixtral.py): Mistral with experts in place
//! of the MLP, two of eight a token, their softmax weights brought to a sum of one.

use anyhow::Result;

use super::common::{
    Biases, Defaults, Sizes, activation, eps, layer_name, llama_layer, llama_like,
    window_everywhere,
};
use super::experts::{Counts, experts, softmax_rule};
use crate::backend::ExpertsRule;
use crate::model::config::Config;
use crate::model::description::{Bias, DenseMlp, Description, Mlp, Norm, Projection};
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
    let eps = eps(config, "rms_norm_eps", 1e-5)?;
    let norm = |name: String| Norm::rms(format!("{name}.weight"), eps, sizes.hidden);
    let mask = window_everywhere(config.usize_or_none("sliding_window", None)?);
    let defaults = Counts {
        experts: 8,
        chosen: 2,
    };
    let counts = Counts::read(config, &["num_experts", "num_local_experts"], defaults)?;
    let rule = ExpertsRule {
        router: softmax_rule(counts, true),
        activation,
    };
    let (hidden, inner) = (sizes.hidden, sizes.inner);
    let layers = (0..sizes.layers).map(|i| {
        let mut layer = llama_layer(&sizes, i, Biases::default(), activation, &norm);
        layer.attention.shape.mask = mask;
        let mlp = layer_name(i, "block_sparse_moe");
        let expert = |e: usize| {
            let project = |part: &str, shape| {
                let name = format!("{mlp}.experts.{e}.{part}");
                Projection::new(&name, shape, Bias::Absent)
            };
            DenseMlp {
                gate: Some(project("w1", [inner, hidden])),
                up: project("w3", [inner, hidden]),
                down: project("w2", [hidden, inner]),
                activation,
            }
        };
        let router = format!("{mlp}.gate");
        layer.mlp = Mlp::Experts(experts(&router, hidden, counts, rule, &expert));
        layer
    });
    let rope = RopeFamily::new(1_000_000.0, sizes.head_dim, sizes.context);
    Ok(llama_like(
        "mixtral",
        &sizes,
        layers.collect(),
        norm("model.norm".to_owned()),
        config.bool_or("tie_word_embeddings", false)?,
        vec![Rope::read(config, rope)?],
    ))
}
