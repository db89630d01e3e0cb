//! GPT-NeoX and Pythia (transformers models/gpt_neox/configuration_gpt_neox.py): LayerNorms with
//! bias, attention and MLP side by side each behind its own, a rope on part of each head, and one
//! tensor for queries, keys and values, laid out head by head.

use anyhow::Result;

use super::common::{
    Biases, Defaults, Sizes, activation, eps, llama_layer, llama_like, plain_mlp, shared_evenly,
};
use crate::backend::Lines;
use crate::model::config::Config;
use crate::model::description::{
    Bias, Description, Keys, Mlp, Norm, Projection, Query, Residual, WeightSpec,
};
use crate::model::rope::{Rope, RopeFamily};

const DEFAULTS: Defaults = Defaults {
    hidden: 6144,
    vocab: 50_432,
    inner: 24_576,
    layers: 44,
    heads: 64,
    kv_heads: None,
    head_dim: None,
    context: 2048,
};

pub fn describe(config: &Config) -> Result<Description> {
    let sizes = Sizes::read(config, &DEFAULTS)?;
    // Every head has keys of its own, whatever a config carries along.
    let sizes = Sizes {
        kv_heads: sizes.heads,
        head_dim: shared_evenly(config, sizes.hidden, sizes.heads)?,
        ..sizes
    };
    let activation = activation(config, "hidden_act", "gelu")?;
    let eps = eps(config, "layer_norm_eps", 1e-5)?;
    let name = |i: usize, part: &str| format!("gpt_neox.layers.{i}.{part}");
    let norm = |name: String| Norm::layer(&name, eps, sizes.hidden, Bias::Present);
    let bias = config.bool_or("attention_bias", true)?;
    let parallel = config.bool_or("use_parallel_residual", true)?;
    let (hidden, inner, head_dim) = (sizes.hidden, sizes.inner, sizes.head_dim);
    let layers = (0..sizes.layers).map(|i| {
        let mut layer = llama_layer(&sizes, i, Biases::default(), activation, &norm);
        layer.attention_norm = Some(norm(name(i, "input_layernorm")));
        layer.mlp_norm = Some(norm(name(i, "post_attention_layernorm")));
        let fused = name(i, "attention.query_key_value");
        let fused = Projection::new(&fused, [3 * hidden, hidden], bias.into());
        let third = |n: usize| {
            let lines = Lines {
                start: n * head_dim,
                group: head_dim,
                step: 3 * head_dim,
            };
            fused.clone().lines(lines, hidden)
        };
        layer.attention.query = Query::Full(third(0));
        layer.attention.keys = Keys::Full {
            k: third(1),
            v: third(2),
        };
        let out = name(i, "attention.dense");
        layer.attention.o = Projection::new(&out, [hidden, hidden], bias.into());
        let [up, down] = ["mlp.dense_h_to_4h", "mlp.dense_4h_to_h"].map(|part| name(i, part));
        layer.mlp = Mlp::Dense(plain_mlp([&up, &down], [hidden, inner], true, activation));
        if parallel {
            layer.residual = Residual::Parallel;
        }
        layer
    });
    let rope = RopeFamily {
        partial: config.positive_or("rotary_pct", 0.25)?,
        ..RopeFamily::new(
            config.positive_or("rotary_emb_base", 10_000.0)?,
            head_dim,
            sizes.context,
        )
    };
    let mut description = llama_like(
        "gpt_neox",
        &sizes,
        layers.collect(),
        norm("gpt_neox.final_layer_norm".to_owned()),
        config.bool_or("tie_word_embeddings", false)?,
        vec![Rope::read(config, rope)?],
    );
    let shape = [sizes.vocab, hidden];
    description.embedding = WeightSpec::new("gpt_neox.embed_in.weight", &shape);
    description.head.weight = WeightSpec::new("embed_out.weight", &shape);
    // The causal mask and frequencies, which older checkpoints stored.
    let unread = ["bias", "masked_bias", "rotary_emb.inv_freq"];
    let unread = unread.map(|part| format!("gpt_neox.layers.{{}}.attention.{part}"));
    description.names.unread = unread.to_vec();
    Ok(description)
}
