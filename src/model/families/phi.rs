//! Phi-1.5 and 2 (transformers models/phi/configuration_phi.py): attention and MLP side by side
//! behind one LayerNorm, biases everywhere, the head included, and a rope on part of each head.

use anyhow::Result;

use super::common::{
    Biases, Defaults, Sizes, activation, eps, layer_name, llama_layer, llama_like, plain_mlp,
};
use crate::model::config::Config;
use crate::model::description::{Bias, Description, Mlp, Norm, Projection, Residual, WeightSpec};
use crate::model::rope::{Rope, RopeFamily};

const DEFAULTS: Defaults = Defaults {
    hidden: 2048,
    vocab: 51_200,
    inner: 8192,
    layers: 24,
    heads: 32,
    kv_heads: None,
    head_dim: None,
    context: 2048,
};

pub fn describe(config: &Config) -> Result<Description> {
    let sizes = Sizes::read(config, &DEFAULTS)?;
    let activation = activation(config, "hidden_act", "gelu_new")?;
    let eps = eps(config, "layer_norm_eps", 1e-5)?;
    let norm = |name: String| Norm::layer(&name, eps, sizes.hidden, Bias::Present);
    let biases = Biases {
        qkv: true,
        o: true,
        mlp: true,
    };
    let qk_norm = config.bool_or("qk_layernorm", false)?;
    let layers = (0..sizes.layers).map(|i| {
        let mut layer = llama_layer(&sizes, i, biases, activation, &norm);
        let [up, down] = ["mlp.fc1", "mlp.fc2"].map(|name| layer_name(i, name));
        let shape = [sizes.hidden, sizes.inner];
        layer.mlp = Mlp::Dense(plain_mlp([&up, &down], shape, true, activation));
        layer.mlp_norm = None;
        layer.residual = Residual::Parallel;
        let attention = &mut layer.attention;
        let out = [sizes.hidden, sizes.q()];
        attention.o = Projection::new(&layer_name(i, "self_attn.dense"), out, Bias::Present);
        if qk_norm {
            let norm = |name| Norm::layer(&layer_name(i, name), eps, sizes.head_dim, Bias::Present);
            attention.q_norm = Some(norm("self_attn.q_layernorm"));
            attention.k_norm = Some(norm("self_attn.k_layernorm"));
        }
        layer
    });
    let rope = RopeFamily {
        partial: 0.5,
        ..RopeFamily::new(10_000.0, sizes.head_dim, sizes.context)
    };
    let mut description = llama_like(
        "phi",
        &sizes,
        layers.collect(),
        norm("model.final_layernorm".to_owned()),
        config.bool_or("tie_word_embeddings", false)?,
        vec![Rope::read(config, rope)?],
    );
    description.head.bias = Some(WeightSpec::new("lm_head.bias", &[sizes.vocab]));
    Ok(description)
}
