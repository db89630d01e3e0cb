//! The text part of Llama 4 (transformers models/llama4/configuration_llama4.py): attention
//! within chunks, and every fourth layer over everything, without positions but with queries
//! tempered by theirs; weightless norms of queries and keys behind the rope; one expert a token,
//! its input scaled by a sigmoid, beside a shared one.

use anyhow::Result;
use serde_json::Value;

use super::common::{
    Biases, Defaults, Sees, Sizes, activation, eps, gated_mlp, layer_name, layer_types,
    llama_layer, llama_like, mask,
};
use super::experts::{Counts, experts};
use super::smollm3::rope_layers;
use crate::backend::{
    Activation, ExpertsRule, Lines, Mask, NormKind, NormShape, RopePairs, RouterRule, RouterScore,
    Weighs,
};
use crate::model::config::Config;
use crate::model::description::{
    DenseMlp, Description, Experts, Mlp, Norm, Projection, QkNormAt, Temperature, WeightSpec,
};
use crate::model::rope::{Rope, RopeFamily};

const DEFAULTS: Defaults = Defaults {
    hidden: 5120,
    vocab: 202_048,
    inner: 8192,
    layers: 48,
    heads: 40,
    kv_heads: Some(8),
    head_dim: Some(128),
    context: 131_072,
};

pub fn describe(config: &Config) -> Result<Description> {
    config.ignore(&["for_llm_compressor"]);
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
    let turned = rope_layers(config, sizes.layers)?;
    let qk_norm = config.bool_or("use_qk_norm", true)?;
    let tempered = is_tempered(config)?;
    let mixture = Mixture::read(config, &sizes, activation)?;
    let layers = masks(config, &turned)?
        .into_iter()
        .enumerate()
        .map(|(i, mask)| {
            let mut layer = llama_layer(&sizes, i, biases, activation, &norm);
            let attention = &mut layer.attention;
            attention.shape.mask = mask;
            if let Some(rope) = &mut attention.rope {
                rope.shape.pairs = RopePairs::Neighbours;
            }
            attention.rope = attention.rope.filter(|_| turned[i]);
            attention.tempered = tempered && !turned[i];
            if qk_norm && turned[i] {
                attention.qk_norm_at = QkNormAt::AfterRope;
                attention.q_norm = Some(weightless(eps, sizes.head_dim));
                attention.k_norm = Some(weightless(eps, sizes.head_dim));
            }
            layer.mlp = mixture.mlp(i);
            layer
        });
    let rope = RopeFamily::new(500_000.0, sizes.head_dim, sizes.context);
    let mut description = llama_like(
        "llama4_text",
        &sizes,
        layers.collect(),
        norm("model.norm".to_owned()),
        config.bool_or("tie_word_embeddings", false)?,
        vec![Rope::read(config, rope)?],
    );
    description.temperature = Some(Temperature {
        floor: config.positive_or("floor_scale", 8192.0)? as f32,
        scale: config.positive_or("attn_scale", 0.1)? as f32,
    });
    Ok(description)
}

fn weightless(eps: f32, width: usize) -> Norm {
    Norm {
        shape: NormShape {
            kind: NormKind::Rms,
            eps,
            width,
        },
        weights: Vec::new(),
        offset: 0.0,
        bias: None,
    }
}

/// The first release gave a number.
fn is_tempered(config: &Config) -> Result<bool> {
    match config
        .value("attn_temperature_tuning")
        .and_then(Value::as_u64)
    {
        Some(number) => Ok(number > 0),
        None => config.bool_or("attn_temperature_tuning", true),
    }
}

/// Layers with a rope see their chunk, unless `layer_types` says otherwise.
fn masks(config: &Config, turned: &[bool]) -> Result<Vec<Mask>> {
    let chunk = config.usize_or_none("attention_chunk_size", Some(8192))?;
    let otherwise = |i: usize| match turned[i] && chunk.is_some() {
        true => Sees::Chunked,
        false => Sees::Full,
    };
    let types = layer_types(config, turned.len(), otherwise)?;
    let masks = types.into_iter().map(|sees| match (sees, chunk) {
        (Sees::Chunked, Some(chunk)) => Ok(Mask::Chunk(chunk)),
        (Sees::Chunked, None) => Err(config.error(
            "attention_chunk_size",
            "expected a size for the layers that attend in chunks, found none",
        )),
        _ => mask(config, sees, None),
    });
    masks.collect()
}

struct Mixture {
    hidden: usize,
    inner: usize,
    inner_dense: usize,
    counts: Counts,
    sparse: Vec<usize>,
    rule: ExpertsRule,
}

impl Mixture {
    fn read(config: &Config, sizes: &Sizes, activation: Activation) -> Result<Mixture> {
        let defaults = Counts {
            experts: 16,
            chosen: 1,
        };
        let counts = Counts::read(config, &["num_local_experts"], defaults)?;
        let step = config.usize_or("interleave_moe_layer_step", 1)?;
        let sparse = config.layer_numbers("moe_layers", sizes.layers)?;
        let by_step = || (step - 1..sizes.layers).step_by(step).collect();
        Ok(Mixture {
            hidden: sizes.hidden,
            inner: sizes.inner,
            inner_dense: config.usize_or("intermediate_size_mlp", 16_384)?,
            counts,
            sparse: sparse.unwrap_or_else(by_step),
            rule: ExpertsRule {
                router: RouterRule {
                    chosen: counts.chosen,
                    score: RouterScore::SigmoidOfChosen,
                    renormalise: false,
                    groups: None,
                    scale: 1.0,
                    weighs: Weighs::Inputs,
                },
                activation,
            },
        })
    }

    fn mlp(&self, i: usize) -> Mlp {
        let name = layer_name(i, "feed_forward");
        let activation = self.rule.activation;
        if !self.sparse.contains(&i) {
            let shape = [self.hidden, self.inner_dense];
            return Mlp::Dense(gated_mlp(&name, shape, false, activation));
        }
        let router = format!("{name}.router");
        let expert = |e: usize| self.expert(&name, e);
        let routed = experts(&router, self.hidden, self.counts, self.rule, &expert);
        let shared = format!("{name}.shared_expert");
        let shape = [self.hidden, self.inner];
        Mlp::Experts(Experts {
            shared: Some(gated_mlp(&shared, shape, false, activation)),
            ..routed
        })
    }

    /// One expert's entry of the stacked tensors, all (E, inputs, outputs).
    fn expert(&self, name: &str, e: usize) -> DenseMlp {
        let (hidden, inner) = (self.hidden, self.inner);
        let stacked = |part: &str, shape: [usize; 2]| {
            let weight = WeightSpec::new(format!("{name}.experts.{part}"), &shape);
            weight.transposed().stacked(e, self.counts.experts)
        };
        let fused = stacked("gate_up_proj", [2 * inner, hidden]);
        let without_bias = |weight| Projection { weight, bias: None };
        DenseMlp {
            gate: Some(without_bias(fused.clone().lines(Lines::from(0), inner))),
            up: without_bias(fused.lines(Lines::from(inner), inner)),
            down: without_bias(stacked("down_proj", [hidden, inner])),
            activation: self.rule.activation,
        }
    }
}
