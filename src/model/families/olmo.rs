//! OLMo 2 and 3 (transformers models/olmo2/configuration_olmo2.py and models/olmo3): norms behind
//! attention and MLP instead of before them, and on all heads' queries and keys together. OLMo 3
//! adds a window to three layers of four, and scales the rope of the others alone.

use anyhow::Result;

use super::common::{
    Biases, Defaults, Sees, Sizes, activation, eps, layer_name, layer_types, llama_layer,
    llama_like, mask, norm_all_heads,
};
use crate::model::config::Config;
use crate::model::description::{Description, LayerRope, Norm};
use crate::model::rope::{Rope, RopeFamily};

const DEFAULTS: Defaults = Defaults {
    hidden: 4096,
    vocab: 50_304,
    inner: 11_008,
    layers: 32,
    heads: 32,
    kv_heads: None,
    head_dim: None,
    context: 2048,
};

pub fn describe2(config: &Config) -> Result<Description> {
    let sizes = Sizes::read(config, &DEFAULTS)?;
    let rope = RopeFamily::new(10_000.0, sizes.head_dim, sizes.context);
    let positions = Positions {
        types: vec![Sees::Full; sizes.layers],
        window: None,
        ropes: vec![Rope::read(config, rope)?],
    };
    describe(config, "olmo2", &sizes, positions)
}

pub fn describe3(config: &Config) -> Result<Description> {
    let sizes = Sizes::read(config, &DEFAULTS)?;
    let otherwise = |i: usize| match (i + 1).is_multiple_of(4) {
        true => Sees::Full,
        false => Sees::Sliding,
    };
    let positions = Positions {
        types: layer_types(config, sizes.layers, otherwise)?,
        window: config.usize_or_none("sliding_window", Some(4096))?,
        ropes: ropes3(config, &sizes)?,
    };
    describe(config, "olmo3", &sizes, positions)
}

/// What layers see and how they are turned: full ones by the first rope, sliding ones by the
/// second.
struct Positions {
    types: Vec<Sees>,
    window: Option<usize>,
    ropes: Vec<Rope>,
}

/// The rope of full layers, then that of sliding ones.
fn ropes3(config: &Config, sizes: &Sizes) -> Result<Vec<Rope>> {
    let family = RopeFamily::new(500_000.0, sizes.head_dim, sizes.context);
    if let Some(both) = config.object("rope_parameters")? {
        let of = |kind: &str| {
            let own = both.object(kind)?;
            Rope::from_object(&own.unwrap_or(both.empty_object(kind)), family)
        };
        return Ok(vec![of("full_attention")?, of("sliding_attention")?]);
    }
    let theta = config.positive_or("rope_theta", family.theta)?;
    let plain = config.empty_object("rope_theta");
    Ok(vec![
        Rope::read(config, family)?,
        Rope::from_object(&plain, RopeFamily { theta, ..family })?,
    ])
}

fn describe(
    config: &Config,
    family: &'static str,
    sizes: &Sizes,
    positions: Positions,
) -> Result<Description> {
    let activation = activation(config, "hidden_act", "silu")?;
    let eps = eps(config, "rms_norm_eps", 1e-5)?;
    let norm = |name: String| Norm::rms(format!("{name}.weight"), eps, sizes.hidden);
    let bias = config.bool_or("attention_bias", false)?;
    let biases = Biases {
        qkv: bias,
        o: bias,
        mlp: false,
    };
    let layers = positions.types.into_iter().enumerate().map(|(i, sees)| {
        let mut layer = llama_layer(sizes, i, biases, activation, &norm);
        let after = |name: &str| Some(norm(layer_name(i, name)));
        layer.attention_norm = None;
        layer.attention_post_norm = after("post_attention_layernorm");
        layer.mlp_norm = None;
        layer.mlp_post_norm = after("post_feedforward_layernorm");
        norm_all_heads(&mut layer, sizes, i, eps);
        let table = usize::from(sees == Sees::Sliding);
        layer.attention.rope = layer.attention.rope.map(|rope| LayerRope { table, ..rope });
        layer.attention.shape.mask = mask(config, sees, positions.window)?;
        Ok(layer)
    });
    Ok(llama_like(
        family,
        sizes,
        layers.collect::<Result<_>>()?,
        norm("model.norm".to_owned()),
        config.bool_or("tie_word_embeddings", false)?,
        positions.ropes,
    ))
}
