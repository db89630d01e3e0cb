//! Llama 2 and 3, and everything published under `model_type` llama (transformers
//! models/llama/configuration_llama.py for keys and defaults).

use anyhow::{Result, ensure};

use crate::backend::{Activation, AttentionShape, NormKind};
use crate::model::config::Config;
use crate::model::description::{Bias, Description, Head, Layer, Norm, Projection, TensorSpec};
use crate::model::rope::Rope;

const COULD_USE: &[&str] = &[
    "lm_head.weight",
    "model.layers.{}.input_layernorm.weight",
    "model.layers.{}.post_attention_layernorm.weight",
    "model.layers.{}.self_attn.q_proj.weight",
    "model.layers.{}.self_attn.k_proj.weight",
    "model.layers.{}.self_attn.v_proj.weight",
    "model.layers.{}.self_attn.o_proj.weight",
    "model.layers.{}.self_attn.q_proj.bias",
    "model.layers.{}.self_attn.k_proj.bias",
    "model.layers.{}.self_attn.v_proj.bias",
    "model.layers.{}.self_attn.o_proj.bias",
    "model.layers.{}.mlp.gate_proj.weight",
    "model.layers.{}.mlp.up_proj.weight",
    "model.layers.{}.mlp.down_proj.weight",
    "model.layers.{}.mlp.gate_proj.bias",
    "model.layers.{}.mlp.up_proj.bias",
    "model.layers.{}.mlp.down_proj.bias",
];

pub fn describe(config: &Config) -> Result<Description> {
    let hidden = config.usize_or("hidden_size", 4096)?;
    let vocab = config.usize_or("vocab_size", 32_000)?;
    let inner = config.usize_or("intermediate_size", 11_008)?;
    let layers = config.layers("num_hidden_layers", 32)?;
    let attention = attention_shape(config, hidden)?;
    config.one_of("hidden_act", "silu", &["silu", "swish"])?;
    let eps = config.positive_or("rms_norm_eps", 1e-6)? as f32;
    let norm = |name: String| Norm {
        kind: NormKind::Rms { eps },
        weight: TensorSpec::new(name, &[hidden]),
    };
    let attention_bias = Bias::from(config.bool_or("attention_bias", false)?);
    let mlp_bias = Bias::from(config.bool_or("mlp_bias", false)?);
    let (q, kv) = (
        attention.heads * attention.head_dim,
        attention.kv_heads * attention.head_dim,
    );
    let layer = |i: usize| {
        let at = |name: &str| format!("model.layers.{i}.{name}");
        let attend = |name: &str, shape| Projection::new(&at(name), shape, attention_bias);
        let mlp = |name: &str, shape| Projection::new(&at(name), shape, mlp_bias);
        Layer {
            attention_norm: norm(at("input_layernorm.weight")),
            q: attend("self_attn.q_proj", [q, hidden]),
            k: attend("self_attn.k_proj", [kv, hidden]),
            v: attend("self_attn.v_proj", [kv, hidden]),
            o: attend("self_attn.o_proj", [hidden, q]),
            attention,
            rope: 0,
            mlp_norm: norm(at("post_attention_layernorm.weight")),
            gate: mlp("mlp.gate_proj", [inner, hidden]),
            up: mlp("mlp.up_proj", [inner, hidden]),
            down: mlp("mlp.down_proj", [hidden, inner]),
            activation: Activation::Silu,
        }
    };
    Ok(Description {
        family: "llama",
        hidden,
        vocab,
        context: config.usize_or("max_position_embeddings", 2048)?,
        embedding: TensorSpec::new("model.embed_tokens.weight", &[vocab, hidden]),
        layers: (0..layers).map(layer).collect(),
        final_norm: norm("model.norm.weight".to_owned()),
        head: Head {
            weight: TensorSpec::new("lm_head.weight", &[vocab, hidden]),
            tied: config.bool_or("tie_word_embeddings", false)?,
        },
        ropes: vec![Rope::read(config, attention.head_dim, 10_000.0)?],
        could_use: COULD_USE,
    })
}

fn attention_shape(config: &Config, hidden: usize) -> Result<AttentionShape> {
    let heads = config.usize_or("num_attention_heads", 32)?;
    let kv_heads = config.usize_or("num_key_value_heads", heads)?;
    ensure!(
        heads.is_multiple_of(kv_heads),
        config.error(
            "num_key_value_heads",
            &format!("expected a divisor of num_attention_heads {heads}, found {kv_heads}")
        )
    );
    let head_dim = match config.usize("head_dim")? {
        Some(head_dim) => head_dim,
        None => {
            ensure!(
                hidden.is_multiple_of(heads),
                config.error(
                    "num_attention_heads",
                    &format!("expected a divisor of hidden_size {hidden}, found {heads}")
                )
            );
            hidden / heads
        }
    };
    ensure!(
        head_dim.is_multiple_of(2),
        config.error(
            "head_dim",
            &format!("expected an even number, found {head_dim}")
        )
    );
    Ok(AttentionShape {
        heads,
        kv_heads,
        head_dim,
        scale: (head_dim as f64).powf(-0.5) as f32,
    })
}
