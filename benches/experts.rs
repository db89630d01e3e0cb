//! A Mixtral-shaped model against a dense one of its active size: experts should cost what their
//! products cost. Each batch is checked before it is timed.

use std::path::Path;
use std::time::Instant;

use kdscore::backend::cpu::Cpu;
use kdscore::corpus::CorpusShard;
use kdscore::model::{Decoder, Limits, Teacher, Unknown, Vocabulary};
use kdscore::products::{Dtype, ProductPlan};
use kdscore::score::{Proceed, ShardJob, score_shard};
use serde_json::{Map, Value, json};

const HIDDEN: usize = 512;
const INNER: usize = 896;
const LAYERS: usize = 4;
const VOCAB: usize = 512;
const EXPERTS: usize = 8;
const CHOSEN: usize = 2;
const TOKENS: usize = 4032;
const SEQUENCE: usize = 252;

fn main() {
    let is_test = std::env::args().any(|arg| arg == "--test");
    let folder = std::env::temp_dir().join(format!("kdscore-experts-{}", std::process::id()));
    let mixture = make(&folder.join("mixture"), true);
    let dense = make(&folder.join("dense"), false);
    let rounds = if is_test { 1 } else { 7 };
    // Taking turns, so that both see the same machine.
    let (mut of_mixture, mut of_dense) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        of_mixture.push(tokens_per_second(&mixture));
        of_dense.push(tokens_per_second(&dense));
    }
    let (mixture_rate, dense_rate) = (median(of_mixture), median(of_dense));
    let predicted = dense_rate * flops(false) / flops(true);
    println!("mixture {mixture_rate:.0} tokens/s, {CHOSEN} of {EXPERTS} experts");
    println!("dense   {dense_rate:.0} tokens/s, an MLP of their size together");
    println!(
        "the mixture takes {:.2}x of what its active FLOPs predict (at most 1.3x wanted)",
        predicted / mixture_rate
    );
    std::fs::remove_dir_all(&folder).unwrap();
}

/// Multiplications and additions a token needs in the layers' products.
fn flops(is_mixture: bool) -> f64 {
    let attention = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN / 4;
    let mlp = 3 * HIDDEN * INNER * CHOSEN;
    let router = if is_mixture { HIDDEN * EXPERTS } else { 0 };
    (2 * LAYERS * (attention + mlp + router) + 2 * HIDDEN * VOCAB / 4) as f64
}

fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}

/// Scores all tokens once; a quarter of them have a row.
fn tokens_per_second(teacher: &Teacher) -> f64 {
    let tokens: Vec<i32> = (0..TOKENS).map(|i| (i * 7919 % VOCAB) as i32).collect();
    let offsets: Vec<i64> = (0..=TOKENS).step_by(SEQUENCE).map(|o| o as i64).collect();
    let mask: Vec<u8> = (0..TOKENS).map(|i| u8::from(i % 4 == 3)).collect();
    let limits = Limits {
        tokens: TOKENS,
        sequence: SEQUENCE,
        head_chunk: 480,
        wave: 1,
    };
    let vocabulary = Vocabulary {
        scored: VOCAB,
        tokenizer: VOCAB,
    };
    let products = ProductPlan {
        k: 8,
        logp_dtype: Dtype::F32,
        extra: Vec::new(),
    };
    let job = ShardJob {
        shard: CorpusShard::new(&tokens, &offsets, &mask).unwrap(),
        sequences: 0..TOKENS / SEQUENCE,
        token_budget: TOKENS,
        wave: 1,
        products: &products,
    };
    let mut decoder = Decoder::new(&Cpu, teacher, limits, vocabulary).unwrap();
    let started = Instant::now();
    let scored = score_shard(&mut decoder, &job, &mut |_| Proceed::Go).unwrap();
    let seconds = started.elapsed().as_secs_f64();
    // The last token of a sequence predicts nothing and is not computed.
    assert_eq!(scored.unwrap().tokens, TOKENS - TOKENS / SEQUENCE);
    TOKENS as f64 / seconds
}

/// A teacher of random bf16 weights.
fn make(folder: &Path, is_mixture: bool) -> Teacher {
    std::fs::create_dir_all(folder).unwrap();
    let kind = if is_mixture { "mixtral" } else { "mistral" };
    let inner = if is_mixture { INNER } else { INNER * CHOSEN };
    let config = json!({
        "model_type": kind, "hidden_size": HIDDEN, "intermediate_size": inner, "vocab_size": VOCAB,
        "num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 2,
        "num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "sliding_window": null,
    });
    let mut names = vec![
        ("model.embed_tokens.weight".to_owned(), vec![VOCAB, HIDDEN]),
        ("lm_head.weight".to_owned(), vec![VOCAB, HIDDEN]),
        ("model.norm.weight".to_owned(), vec![HIDDEN]),
    ];
    for layer in 0..LAYERS {
        let mut put = |name: String, shape: &[usize]| {
            names.push((
                format!("model.layers.{layer}.{name}.weight"),
                shape.to_vec(),
            ));
        };
        for (name, rows) in [
            ("q", HIDDEN),
            ("k", HIDDEN / 4),
            ("v", HIDDEN / 4),
            ("o", HIDDEN),
        ] {
            put(format!("self_attn.{name}_proj"), &[rows, HIDDEN]);
        }
        put("input_layernorm".to_owned(), &[HIDDEN]);
        put("post_attention_layernorm".to_owned(), &[HIDDEN]);
        if is_mixture {
            put("block_sparse_moe.gate".to_owned(), &[EXPERTS, HIDDEN]);
        }
        for (old, new, shape) in [
            ("w1", "gate_proj", [inner, HIDDEN]),
            ("w3", "up_proj", [inner, HIDDEN]),
            ("w2", "down_proj", [HIDDEN, inner]),
        ] {
            match is_mixture {
                true => (0..EXPERTS)
                    .for_each(|e| put(format!("block_sparse_moe.experts.{e}.{old}"), &shape)),
                false => put(format!("mlp.{new}"), &shape),
            }
        }
    }
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    std::fs::write(folder.join("model.safetensors"), safetensors(&names)).unwrap();
    Teacher::open(folder, Unknown::Allow).unwrap()
}

/// Numbers with a standard deviation of 1 / sqrt(width), as bf16.
fn safetensors(names: &[(String, Vec<usize>)]) -> Vec<u8> {
    let (mut header, mut data, mut state) = (Map::new(), Vec::<u8>::new(), 1u64);
    for (name, shape) in names {
        let start = data.len();
        let width = shape[shape.len() - 1] as f32;
        for _ in 0..shape.iter().product::<usize>() {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let uniform = (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
            let value = if shape.len() == 1 {
                1.0
            } else {
                uniform * 3.46 / width.sqrt()
            };
            data.extend(&value.to_le_bytes()[2..]);
        }
        let entry = json!({"dtype": "BF16", "shape": shape, "data_offsets": [start, data.len()]});
        header.insert(name.clone(), entry);
    }
    let header = Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(data);
    file
}
