//! GPT-2 (transformers models/gpt2/configuration_gpt2.py): learned positions, LayerNorms with
//! bias, queries, keys and values in one tensor, and all matrices stored (inputs, outputs).

use anyhow::{Result, ensure};

use super::common::{Sizes, activation, attention_shape, eps};
use crate::backend::Lines;
use crate::model::config::Config;
use crate::model::description::{
    Attention, Bias, DenseMlp, Description, Head, Keys, Layer, Mlp, Names, Norm, Projection,
    QkNormAt, Query, Residual, WeightSpec,
};

pub fn describe(config: &Config) -> Result<Description> {
    ensure!(
        !config.bool_or("add_cross_attention", false)?,
        config.error(
            "add_cross_attention",
            "expected false, found true: nothing would be attended to"
        )
    );
    // The order of operations, and what it was trained at: the numbers are the same.
    config.ignore(&["reorder_and_upcast_attn", "n_ctx"]);
    let sizes = sizes(config)?;
    let eps = eps(config, "layer_norm_epsilon", 1e-5)?;
    let layers = (0..sizes.layers).map(|i| layer(config, &sizes, i, eps));
    let (vocab, hidden) = (sizes.vocab, sizes.hidden);
    let unread = ["attn.bias", "attn.masked_bias"];
    Ok(Description {
        family: "gpt2",
        hidden,
        vocab,
        context: sizes.context,
        embedding: WeightSpec::new("transformer.wte.weight", &[vocab, hidden]),
        embedding_scale: 1.0,
        positions: Some(WeightSpec::new(
            "transformer.wpe.weight",
            &[sizes.context, hidden],
        )),
        layers: layers.collect::<Result<_>>()?,
        final_norm: Norm::layer("transformer.ln_f", eps, hidden, Bias::Present),
        head: Head {
            weight: WeightSpec::new("lm_head.weight", &[vocab, hidden]),
            bias: None,
            tied: config.bool_or("tie_word_embeddings", true)?,
            scale: 1.0,
            cap: None,
        },
        ropes: Vec::new(),
        temperature: None,
        names: Names {
            // The first releases have no prefix.
            spellings: &[&[], &[("transformer.", "")]],
            // The causal mask, which older checkpoints stored.
            unread: unread
                .map(|name| format!("transformer.h.{{}}.{name}"))
                .to_vec(),
        },
        fp8_block: None,
    })
}

fn sizes(config: &Config) -> Result<Sizes> {
    let hidden = config.usize_or("n_embd", 768)?;
    let heads = config.usize_or("n_head", 12)?;
    ensure!(
        hidden.is_multiple_of(heads),
        config.error(
            "n_head",
            &format!("expected a divisor of n_embd {hidden}, found {heads}")
        )
    );
    Ok(Sizes {
        hidden,
        vocab: config.usize_or("vocab_size", 50_257)?,
        inner: config.usize_or("n_inner", 4 * hidden)?,
        layers: config.layers("n_layer", 12)?,
        heads,
        kv_heads: heads,
        head_dim: hidden / heads,
        context: config.usize_or("n_positions", 1024)?,
    })
}

fn layer(config: &Config, sizes: &Sizes, i: usize, eps: f32) -> Result<Layer> {
    let (hidden, inner) = (sizes.hidden, sizes.inner);
    let name = |part: &str| format!("transformer.h.{i}.{part}");
    let stored =
        |part: &str, shape| Projection::new(&name(part), shape, Bias::Present).transposed();
    let norm = |part: &str| Some(Norm::layer(&name(part), eps, hidden, Bias::Present));
    let fused = stored("attn.c_attn", [3 * hidden, hidden]);
    let third = |n: usize| fused.clone().lines(Lines::from(n * hidden), hidden);
    let mut shape = attention_shape(sizes);
    if !config.bool_or("scale_attn_weights", true)? {
        shape.scale = 1.0;
    }
    if config.bool_or("scale_attn_by_inverse_layer_idx", false)? {
        shape.scale /= (i + 1) as f32;
    }
    Ok(Layer {
        attention_norm: norm("ln_1"),
        attention: Attention {
            query: Query::Full(third(0)),
            keys: Keys::Full {
                k: third(1),
                v: third(2),
            },
            o: stored("attn.c_proj", [hidden, hidden]),
            shape,
            q_norm: None,
            k_norm: None,
            qk_norm_at: QkNormAt::BeforeRope,
            clip: None,
            rope: None,
            sinks: None,
            tempered: false,
        },
        attention_post_norm: None,
        mlp_norm: norm("ln_2"),
        mlp: Mlp::Dense(DenseMlp {
            gate: None,
            up: stored("mlp.c_fc", [inner, hidden]),
            down: stored("mlp.c_proj", [hidden, inner]),
            activation: activation(config, "activation_function", "gelu_new")?,
        }),
        mlp_post_norm: None,
        residual: Residual::Sequential,
        residual_scale: 1.0,
    })
}
