//! Gemma 1, 2 and 3 (transformers models/gemma/configuration_gemma.py and models/gemma2, gemma3):
//! norm weights stored less one, embeddings scaled by sqrt(hidden), heads of their own width.
//! Gemma 2 adds norms behind attention and MLP, soft-caps, and a window in every other layer;
//! Gemma 3 norms on queries and keys, and a rope of its own for the layers that slide.

use anyhow::{Result, ensure};
use serde_json::json;

use super::common::{
    Biases, Defaults, Sees, Sizes, activation, eps, inverse_root, layer_name, layer_types,
    llama_layer, llama_like, mask, norm_each_head,
};
use crate::backend::Activation;
use crate::model::config::Config;
use crate::model::description::{Description, Layer, LayerRope, Norm};
use crate::model::rope::{Rope, RopeFamily};

const DEFAULTS1: Defaults = Defaults {
    hidden: 3072,
    vocab: 256_000,
    inner: 24_576,
    layers: 28,
    heads: 16,
    kv_heads: Some(16),
    head_dim: Some(256),
    context: 8192,
};

const DEFAULTS2: Defaults = Defaults {
    hidden: 2304,
    inner: 9216,
    layers: 26,
    heads: 8,
    kv_heads: Some(4),
    ..DEFAULTS1
};

const DEFAULTS3: Defaults = Defaults {
    vocab: 262_208,
    context: 131_072,
    ..DEFAULTS2
};

pub fn describe1(config: &Config) -> Result<Description> {
    let base = Base::read(config, &DEFAULTS1)?;
    // Early files say "gelu" and mean the tanh form; transformers reads them so.
    let activation = match activation(config, "hidden_act", "gelu_pytorch_tanh")? {
        Activation::Gelu => Activation::GeluTanh,
        other => other,
    };
    let same = match config.value("hidden_activation") {
        None => true,
        Some(_) => self::activation(config, "hidden_activation", "")? == activation,
    };
    ensure!(
        same,
        config.error(
            "hidden_activation",
            "expected the same as hidden_act, found another"
        )
    );
    let norm = base.norm();
    let layers = (0..base.sizes.layers)
        .map(|i| llama_layer(&base.sizes, i, base.biases, activation, &norm))
        .collect();
    let ropes = vec![Rope::read(config, base.rope(10_000.0))?];
    base.describe("gemma", config, layers, ropes)
}

pub fn describe2(config: &Config) -> Result<Description> {
    let window = config.usize_or_none("sliding_window", Some(4096))?;
    config.must_be(&[("sliding_window_size", json!(window))])?;
    let base = Base::read(config, &DEFAULTS2)?;
    let cap = config.positive_or_none("attn_logit_softcapping", Some(50.0))?;
    let slides = |i: usize| i.is_multiple_of(2);
    let mut layers = base.layers(config, slides)?;
    for (_, layer) in &mut layers {
        layer.attention.shape.cap = cap.map(|cap| cap as f32);
    }
    let layers = layers.into_iter().map(|(_, layer)| layer).collect();
    let ropes = vec![Rope::read(config, base.rope(10_000.0))?];
    let mut description = base.describe("gemma2", config, layers, ropes)?;
    let cap = config.positive_or_none("final_logit_softcapping", Some(30.0))?;
    description.head.cap = cap.map(|cap| cap as f32);
    Ok(description)
}

pub fn describe3(config: &Config) -> Result<Description> {
    let base = Base::read(config, &DEFAULTS3)?;
    // transformers reads it and never applies it (modeling_gemma3.py, Gemma3Attention).
    config.ignore(&["attn_logit_softcapping", "_sliding_window_pattern"]);
    let pattern = config.usize_or("sliding_window_pattern", 6)?;
    let slides = |i: usize| !(i + 1).is_multiple_of(pattern);
    let mut layers = base.layers(config, slides)?;
    for (i, (sees, layer)) in layers.iter_mut().enumerate() {
        norm_each_head(layer, i, base.eps, 1.0);
        let table = usize::from(*sees == Sees::Sliding);
        layer.attention.rope = layer.attention.rope.map(|rope| LayerRope { table, ..rope });
    }
    let layers = layers.into_iter().map(|(_, layer)| layer).collect();
    let ropes = ropes3(config, &base)?;
    let mut description = base.describe("gemma3_text", config, layers, ropes)?;
    let cap = config.positive_or_none("final_logit_softcapping", None)?;
    description.head.cap = cap.map(|cap| cap as f32);
    Ok(description)
}

/// The rope of full layers, then that of sliding ones. Older files scale the former alone.
fn ropes3(config: &Config, base: &Base) -> Result<Vec<Rope>> {
    if let Some(both) = config.object("rope_parameters")? {
        let of = |kind: &str, theta| {
            let own = both.object(kind)?;
            let own = own.unwrap_or(both.empty_object(kind));
            Rope::from_object(&own, base.rope(theta))
        };
        return Ok(vec![
            of("full_attention", 1_000_000.0)?,
            of("sliding_attention", 10_000.0)?,
        ]);
    }
    let local = config.positive_or("rope_local_base_freq", 10_000.0)?;
    let plain = config.empty_object("rope_local_base_freq");
    Ok(vec![
        Rope::read(config, base.rope(1_000_000.0))?,
        Rope::from_object(&plain, base.rope(local))?,
    ])
}

/// What the three have in common.
struct Base {
    sizes: Sizes,
    eps: f32,
    biases: Biases,
}

impl Base {
    fn read(config: &Config, defaults: &Defaults) -> Result<Base> {
        let bias = config.bool_or("attention_bias", false)?;
        ensure!(
            !config.bool_or("use_bidirectional_attention", false)?,
            config.error(
                "use_bidirectional_attention",
                "expected false, found true: kdscore scores causal models"
            )
        );
        Ok(Base {
            sizes: Sizes::read(config, defaults)?,
            eps: eps(config, "rms_norm_eps", 1e-6)?,
            biases: Biases {
                qkv: bias,
                o: bias,
                mlp: false,
            },
        })
    }

    fn norm(&self) -> impl Fn(String) -> Norm {
        let (eps, hidden) = (self.eps, self.sizes.hidden);
        move |name| Norm::rms(format!("{name}.weight"), eps, hidden).plus_one()
    }

    fn rope(&self, theta: f64) -> RopeFamily {
        RopeFamily::new(theta, self.sizes.head_dim, self.sizes.context)
    }

    /// Layers with norms on both sides of attention and of the MLP, some with a window.
    fn layers(
        &self,
        config: &Config,
        slides: impl Fn(usize) -> bool,
    ) -> Result<Vec<(Sees, Layer)>> {
        // Published files repeat the activation under the older name, which nothing reads.
        config.ignore(&["hidden_act"]);
        let activation = activation(config, "hidden_activation", "gelu_pytorch_tanh")?;
        let scale = inverse_root(config.positive_or("query_pre_attn_scalar", 256.0)?);
        let window = config.usize_or_none("sliding_window", Some(4096))?;
        let otherwise = |i| if slides(i) { Sees::Sliding } else { Sees::Full };
        let norm = self.norm();
        let layers = layer_types(config, self.sizes.layers, otherwise)?;
        let layers = layers.into_iter().enumerate().map(|(i, sees)| {
            let mut layer = llama_layer(&self.sizes, i, self.biases, activation, &norm);
            let after = |name: &str| Some(norm(layer_name(i, name)));
            layer.attention_post_norm = after("post_attention_layernorm");
            layer.mlp_norm = after("pre_feedforward_layernorm");
            layer.mlp_post_norm = after("post_feedforward_layernorm");
            layer.attention.shape.scale = scale;
            layer.attention.shape.mask = mask(config, sees, window)?;
            Ok((sees, layer))
        });
        layers.collect()
    }

    fn describe(
        &self,
        family: &'static str,
        config: &Config,
        layers: Vec<Layer>,
        ropes: Vec<Rope>,
    ) -> Result<Description> {
        let tied = config.bool_or("tie_word_embeddings", true)?;
        let final_norm = self.norm()("model.norm".to_owned());
        let mut description = llama_like(family, &self.sizes, layers, final_norm, tied, ropes);
        description.embedding_scale = (self.sizes.hidden as f64).sqrt() as f32;
        Ok(description)
    }
}
