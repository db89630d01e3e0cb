//! Qwen's mixtures (transformers models/qwen2_moe/configuration_qwen2_moe.py and models/qwen3_moe):
//! Qwen2 and Qwen3 with experts in some layers. Qwen2's have a further MLP that every token takes,
//! gated by a sigmoid of its own.

use anyhow::Result;

use super::common::{
    Biases, Defaults, Sees, Sizes, activation, eps, gated_mlp, layer_name, layer_types,
    llama_layer, llama_like, mask, norm_each_head, window_everywhere,
};
use super::experts::{Counts, gated_experts, softmax_rule};
use super::qwen::window;
use crate::backend::Activation;
use crate::model::config::Config;
use crate::model::description::{Bias, Description, Experts, Layer, Mlp, Norm, Projection};
use crate::model::rope::{Rope, RopeFamily};

const DEFAULTS2: Defaults = Defaults {
    hidden: 2048,
    vocab: 151_936,
    inner: 5632,
    layers: 24,
    heads: 16,
    kv_heads: Some(16),
    head_dim: None,
    context: 32_768,
};

const DEFAULTS3: Defaults = Defaults {
    inner: 6144,
    heads: 32,
    kv_heads: Some(4),
    ..DEFAULTS2
};

pub fn describe2(config: &Config) -> Result<Description> {
    let bias = config.bool_or("qkv_bias", true)?;
    let base = Base::read(config, &DEFAULTS2, [bias, false])?;
    let window = window(config)?;
    let until = config.count_or("max_window_layers", 28)?;
    let otherwise = |i: usize| match window.is_some() && i.is_multiple_of(2) && i < until {
        true => Sees::Sliding,
        false => Sees::Full,
    };
    let counts = Counts {
        experts: 60,
        chosen: 4,
    };
    let mixture = Mixture::read(config, &["num_experts"], counts, 1408, &base)?;
    let shared = config.usize_or("shared_expert_intermediate_size", 5632)?;
    let layers = layer_types(config, base.sizes.layers, otherwise)?;
    let layers = layers.into_iter().enumerate().map(|(i, sees)| {
        let mut layer = base.layer(i);
        layer.attention.shape.mask = mask(config, sees, window)?;
        if mixture.sparse[i] {
            let mlp = layer_name(i, "mlp");
            let hidden = base.sizes.hidden;
            let mut experts = mixture.experts(i, &base);
            let name = format!("{mlp}.shared_expert");
            experts.shared = Some(gated_mlp(&name, [hidden, shared], false, base.activation));
            let gate = format!("{mlp}.shared_expert_gate");
            experts.shared_gate = Some(Projection::new(&gate, [1, hidden], Bias::Absent));
            layer.mlp = Mlp::Experts(experts);
        }
        Ok(layer)
    });
    base.describe("qwen2_moe", config, layers.collect::<Result<_>>()?)
}

pub fn describe3(config: &Config) -> Result<Description> {
    let bias = config.bool_or("attention_bias", false)?;
    let base = Base::read(config, &DEFAULTS3, [bias, bias])?;
    // Its window, where in use, is that of every layer.
    config.ignore(&["max_window_layers"]);
    let mask = window_everywhere(window(config)?);
    let counts = Counts {
        experts: 128,
        chosen: 8,
    };
    let keys = ["num_experts", "num_local_experts"];
    let mixture = Mixture::read(config, &keys, counts, 768, &base)?;
    let layers = (0..base.sizes.layers).map(|i| {
        let mut layer = base.layer(i);
        layer.attention.shape.mask = mask;
        norm_each_head(&mut layer, i, base.eps, 0.0);
        if mixture.sparse[i] {
            layer.mlp = Mlp::Experts(mixture.experts(i, &base));
        }
        layer
    });
    base.describe("qwen3_moe", config, layers.collect())
}

struct Base {
    sizes: Sizes,
    eps: f32,
    biases: Biases,
    activation: Activation,
}

impl Base {
    fn read(config: &Config, defaults: &Defaults, [qkv, o]: [bool; 2]) -> Result<Base> {
        Ok(Base {
            sizes: Sizes::read(config, defaults)?,
            eps: eps(config, "rms_norm_eps", 1e-6)?,
            biases: Biases { qkv, o, mlp: false },
            activation: activation(config, "hidden_act", "silu")?,
        })
    }

    fn norm(&self, name: String) -> Norm {
        Norm::rms(format!("{name}.weight"), self.eps, self.sizes.hidden)
    }

    fn layer(&self, i: usize) -> Layer {
        let norm = |name: String| self.norm(name);
        llama_layer(&self.sizes, i, self.biases, self.activation, &norm)
    }

    fn describe(
        &self,
        family: &'static str,
        config: &Config,
        layers: Vec<Layer>,
    ) -> Result<Description> {
        let sizes = &self.sizes;
        let rope = RopeFamily::new(10_000.0, sizes.head_dim, sizes.context);
        let tied = config.bool_or("tie_word_embeddings", false)?;
        let ropes = vec![Rope::read(config, rope)?];
        let norm = self.norm("model.norm".to_owned());
        Ok(llama_like(family, sizes, layers, norm, tied, ropes))
    }
}

/// Which layers have experts, and what those are.
struct Mixture {
    sparse: Vec<bool>,
    counts: Counts,
    inner: usize,
    renormalise: bool,
}

impl Mixture {
    fn read(
        config: &Config,
        keys: &[&str],
        defaults: Counts,
        inner: usize,
        base: &Base,
    ) -> Result<Mixture> {
        let layers = base.sizes.layers;
        let step = config.usize_or("decoder_sparse_step", 1)?;
        let dense = config.layer_numbers("mlp_only_layers", layers)?;
        let dense = dense.unwrap_or_default();
        let sparse = |i: usize| (i + 1).is_multiple_of(step) && !dense.contains(&i);
        Ok(Mixture {
            sparse: (0..layers).map(sparse).collect(),
            counts: Counts::read(config, keys, defaults)?,
            inner: config.usize_or("moe_intermediate_size", inner)?,
            renormalise: config.bool_or("norm_topk_prob", false)?,
        })
    }

    fn experts(&self, i: usize, base: &Base) -> Experts {
        let shape = [base.sizes.hidden, self.inner];
        let rule = softmax_rule(self.counts, self.renormalise);
        let mlp = layer_name(i, "mlp");
        gated_experts(&mlp, shape, self.counts, rule, base.activation)
    }
}
