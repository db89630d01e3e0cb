//! gpt-oss (transformers models/gpt_oss/configuration_gpt_oss.py): experts with biases and a
//! clamped SwiGLU, gate and up rows taking turns in one tensor, a sink in every head's softmax, a
//! window in every other layer. Published files keep the experts in MXFP4.

use anyhow::{Result, ensure};

use super::common::{
    Biases, Defaults, Sees, Sizes, eps, layer_name, layer_types, llama_layer, llama_like, mask,
};
use super::experts::Counts;
use crate::backend::{Activation, ExpertsRule, Lines, MX_BLOCK, RouterRule, RouterScore, Weighs};
use crate::model::config::Config;
use crate::model::description::{
    Bias, DenseMlp, Description, Experts, Mlp, Norm, Projection, WeightSpec,
};
use crate::model::rope::{Rope, RopeFamily};

const DEFAULTS: Defaults = Defaults {
    hidden: 2880,
    vocab: 201_088,
    inner: 2880,
    layers: 36,
    heads: 64,
    kv_heads: Some(8),
    head_dim: Some(64),
    context: 131_072,
};

pub fn describe(config: &Config) -> Result<Description> {
    // Older names of keys that are there too.
    config.ignore(&["experts_per_token", "initial_context_length"]);
    // The experts' own activation is the only one (modeling_gpt_oss.py, GptOssExperts).
    config.one_of("hidden_act", "silu", &["silu"])?;
    let sizes = Sizes::read(config, &DEFAULTS)?;
    let eps = eps(config, "rms_norm_eps", 1e-5)?;
    let norm = |name: String| Norm::rms(format!("{name}.weight"), eps, sizes.hidden);
    let bias = config.bool_or("attention_bias", true)?;
    let biases = Biases {
        qkv: bias,
        o: bias,
        mlp: false,
    };
    let window = config.usize_or_none("sliding_window", Some(128))?;
    let otherwise = |i: usize| match i.is_multiple_of(2) {
        true => Sees::Sliding,
        false => Sees::Full,
    };
    let mixture = Mixture::read(config, &sizes)?;
    let activation = mixture.rule.activation;
    let layers = layer_types(config, sizes.layers, otherwise)?;
    let layers = layers.into_iter().enumerate().map(|(i, sees)| {
        let mut layer = llama_layer(&sizes, i, biases, activation, &norm);
        layer.attention.shape.mask = mask(config, sees, window)?;
        let sinks = layer_name(i, "self_attn.sinks");
        layer.attention.sinks = Some(WeightSpec::new(sinks, &[sizes.heads]));
        layer.mlp = Mlp::Experts(mixture.experts(i));
        Ok(layer)
    });
    Ok(llama_like(
        "gpt_oss",
        &sizes,
        layers.collect::<Result<_>>()?,
        norm("model.norm".to_owned()),
        config.bool_or("tie_word_embeddings", false)?,
        vec![rope(config, &sizes)?],
    ))
}

/// Where the config is silent the rope is YaRN's.
fn rope(config: &Config, sizes: &Sizes) -> Result<Rope> {
    let family = RopeFamily::new(150_000.0, sizes.head_dim, sizes.context);
    let silent = ["rope_parameters", "rope_scaling"]
        .iter()
        .all(|key| config.value(key).is_none());
    if !silent {
        return Rope::read(config, family);
    }
    let theta = config.positive_or("rope_theta", family.theta)?;
    let default = config.object_of(
        "rope_parameters",
        serde_json::json!({
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": false,
            "original_max_position_embeddings": 4096,
        }),
    );
    Rope::from_object(&default, RopeFamily { theta, ..family })
}

struct Mixture {
    hidden: usize,
    inner: usize,
    counts: Counts,
    rule: ExpertsRule,
    is_mxfp4: bool,
}

impl Mixture {
    fn read(config: &Config, sizes: &Sizes) -> Result<Mixture> {
        let defaults = Counts {
            experts: 128,
            chosen: 4,
        };
        let keys = ["num_experts", "num_local_experts"];
        let counts = Counts::read(config, &keys, defaults)?;
        let quantised = config.object("quantization_config")?;
        let is_mxfp4 = match quantised {
            Some(quantised) => quantised.str("quant_method")? == Some("mxfp4"),
            None => false,
        };
        ensure!(
            !is_mxfp4
                || [sizes.hidden, sizes.inner]
                    .iter()
                    .all(|n| n.is_multiple_of(MX_BLOCK)),
            config.error(
                "hidden_size",
                "expected multiples of 32 for hidden_size and intermediate_size with mxfp4 experts",
            )
        );
        Ok(Mixture {
            hidden: sizes.hidden,
            inner: sizes.inner,
            counts,
            rule: ExpertsRule {
                router: RouterRule {
                    chosen: counts.chosen,
                    score: RouterScore::SoftmaxOfChosen,
                    renormalise: false,
                    groups: None,
                    scale: 1.0,
                    weighs: Weighs::Outputs,
                },
                activation: Activation::ClampedSwiglu {
                    alpha: config.positive_or("swiglu_alpha", 1.702)? as f32,
                    limit: config.positive_or("swiglu_limit", 7.0)? as f32,
                },
            },
            is_mxfp4,
        })
    }

    fn experts(&self, i: usize) -> Experts {
        let router = layer_name(i, "mlp.router");
        Experts {
            router: Projection::new(&router, [self.counts.experts, self.hidden], Bias::Present),
            correction: None,
            rule: self.rule,
            list: (0..self.counts.experts)
                .map(|e| self.expert(i, e))
                .collect(),
            shared: None,
            shared_gate: None,
        }
    }

    fn expert(&self, i: usize, e: usize) -> DenseMlp {
        let (hidden, inner) = (self.hidden, self.inner);
        let fused = self.projection(i, e, "gate_up_proj", [2 * inner, hidden]);
        let turn = |start| {
            let lines = Lines {
                start,
                group: 1,
                step: 2,
            };
            fused.clone().lines(lines, inner)
        };
        DenseMlp {
            gate: Some(turn(0)),
            up: turn(1),
            down: self.projection(i, e, "down_proj", [hidden, inner]),
            activation: self.rule.activation,
        }
    }

    /// One expert's entry of a stacked projection: (E, inputs, outputs), or blocks of
    /// (E, outputs, inputs).
    fn projection(&self, i: usize, e: usize, part: &str, shape: [usize; 2]) -> Projection {
        let name = layer_name(i, &format!("mlp.experts.{part}"));
        let weight = match self.is_mxfp4 {
            true => WeightSpec::mxfp4(&name, shape),
            false => WeightSpec::new(&name, &shape).transposed(),
        };
        let bias = WeightSpec::new(format!("{name}_bias"), &[shape[0]]);
        Projection {
            weight: weight.stacked(e, self.counts.experts),
            bias: Some(bias.stacked(e, self.counts.experts)),
        }
    }
}
