//! Phi-3 and 4 (transformers models/phi3/configuration_phi3.py): Llama with queries, keys and
//! values in one tensor, gate and up in another, and LongRoPE whose original context stands
//! outside the rope's own keys.

use anyhow::Result;
use serde_json::json;

use super::common::{
    Biases, Defaults, Sizes, activation, eps, layer_name, llama_layer, llama_like,
    window_everywhere,
};
use crate::backend::Lines;
use crate::model::config::Config;
use crate::model::description::{Bias, DenseMlp, Description, Keys, Mlp, Norm, Projection, Query};
use crate::model::rope::{Rope, RopeFamily};

const DEFAULTS: Defaults = Defaults {
    hidden: 3072,
    vocab: 32_064,
    inner: 8192,
    layers: 32,
    heads: 32,
    kv_heads: None,
    head_dim: None,
    context: 4096,
};

pub fn describe(config: &Config) -> Result<Description> {
    config.must_be(&[
        ("attention_bias", json!(false)),
        ("mlp_bias", json!(false)),
        ("lm_head_bias", json!(false)),
        ("full_attn_mod", json!(1)),
        ("interpolate_factor", json!(1)),
    ])?;
    let sizes = Sizes::read(config, &DEFAULTS)?;
    let activation = activation(config, "hidden_act", "silu")?;
    let eps = eps(config, "rms_norm_eps", 1e-5)?;
    let norm = |name: String| Norm::rms(format!("{name}.weight"), eps, sizes.hidden);
    let mask = window_everywhere(config.usize_or_none("sliding_window", None)?);
    let (hidden, q, kv) = (sizes.hidden, sizes.q(), sizes.kv());
    let layers = (0..sizes.layers).map(|i| {
        let mut layer = llama_layer(&sizes, i, Biases::default(), activation, &norm);
        let name = layer_name(i, "self_attn.qkv_proj");
        let fused = Projection::new(&name, [q + 2 * kv, hidden], Bias::Absent);
        let part = |start, outputs| fused.clone().lines(Lines::from(start), outputs);
        layer.attention.query = Query::Full(part(0, q));
        layer.attention.keys = Keys::Full {
            k: part(q, kv),
            v: part(q + kv, kv),
        };
        layer.attention.shape.mask = mask;
        layer.mlp = Mlp::Dense(fused_gate_mlp(i, &sizes, activation));
        layer
    });
    let rope = RopeFamily {
        original: Some(config.usize_or("original_max_position_embeddings", 4096)?),
        ..RopeFamily::new(10_000.0, sizes.head_dim, sizes.context)
    };
    Ok(llama_like(
        "phi3",
        &sizes,
        layers.collect(),
        norm("model.norm".to_owned()),
        config.bool_or("tie_word_embeddings", false)?,
        vec![Rope::read(config, rope)?],
    ))
}

/// An MLP whose gate and up projections are the halves of one tensor.
pub fn fused_gate_mlp(i: usize, sizes: &Sizes, activation: crate::backend::Activation) -> DenseMlp {
    let (hidden, inner) = (sizes.hidden, sizes.inner);
    let name = layer_name(i, "mlp.gate_up_proj");
    let fused = Projection::new(&name, [2 * inner, hidden], Bias::Absent);
    let down = layer_name(i, "mlp.down_proj");
    DenseMlp {
        gate: Some(fused.clone().lines(Lines::from(0), inner)),
        up: fused.lines(Lines::from(inner), inner),
        down: Projection::new(&down, [hidden, inner], Bias::Absent),
        activation,
    }
}
