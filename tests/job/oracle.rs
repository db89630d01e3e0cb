//! Alignment by an oracle: a teacher whose logits say which sequence, position and token they
//! came from. Its checkpoint goes through the whole program; every stored row must decode to
//! itself.
//!
//! Tokens are one-hot in the hidden state. Each sequence starts with a marker of its own. One
//! attention layer with q = k = 0 looks at all positions evenly and copies the marker's
//! dimensions, so at position t the marker stands there with 1/(t+1) of its strength. The head
//! reads the dimensions back: the token's logit against the rest says which token, the marker's
//! which sequence, and their ratio which position.

use serde_json::json;

use super::checkpoint::{self, Tensors};
use super::program::{Tokens, arrays, succeed, write_corpus};

const MARKERS: usize = 24;
const VOCAB: usize = 96;
const HIDDEN: usize = VOCAB;
/// Of the head's rows, so that log-probs are far apart.
const HEAD_SCALE: f32 = 3.0;

fn teacher(folder: &std::path::Path) {
    let mut tensors = Tensors::new();
    let mut put = |name: &str, shape: [usize; 2], value: &dyn Fn(usize, usize) -> f32| {
        let (rows, columns) = (shape[0], shape[1]);
        let values = (0..rows * columns).map(|i| value(i / columns, i % columns));
        tensors.insert(name.to_owned(), (shape.to_vec(), values.collect()));
    };
    let eye = |r: usize, c: usize| f32::from(u8::from(r == c));
    let zero = |_: usize, _: usize| 0.0;
    put("model.embed_tokens.weight", [VOCAB, HIDDEN], &eye);
    put("lm_head.weight", [VOCAB, HIDDEN], &|r, c| {
        HEAD_SCALE * eye(r, c)
    });
    let layer = |name: &str| format!("model.layers.0.{name}.weight");
    put(&layer("self_attn.q_proj"), [MARKERS, HIDDEN], &zero);
    put(&layer("self_attn.k_proj"), [MARKERS, HIDDEN], &zero);
    put(&layer("self_attn.v_proj"), [MARKERS, HIDDEN], &eye);
    put(&layer("self_attn.o_proj"), [HIDDEN, MARKERS], &eye);
    put(&layer("mlp.gate_proj"), [8, HIDDEN], &zero);
    put(&layer("mlp.up_proj"), [8, HIDDEN], &zero);
    put(&layer("mlp.down_proj"), [HIDDEN, 8], &zero);
    for name in [
        "model.norm.weight".to_owned(),
        layer("input_layernorm"),
        layer("post_attention_layernorm"),
    ] {
        tensors.insert(name, (vec![HIDDEN], vec![1.0; HIDDEN]));
    }
    let config = json!({
        "model_type": "llama", "hidden_size": HIDDEN, "vocab_size": VOCAB, "intermediate_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
        "head_dim": MARKERS, "max_position_embeddings": 512, "rms_norm_eps": 1e-12,
    });
    checkpoint::write(folder, &config, &tensors);
}

/// Sequences of every kind of length, each with its own marker first and a mask of its own.
fn corpus() -> Vec<Tokens> {
    let mut seed = 7u64;
    let mut draw = |below: u64| {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % below
    };
    let lengths = [
        1, 2, 3, 95, 96, 97, 5, 200, 64, 65, 128, 129, 8, 31, 300, 12, 77, 40, 9, 150, 2, 33, 18,
        26,
    ];
    lengths
        .iter()
        .enumerate()
        .map(|(s, &length)| {
            let content = MARKERS as u64..VOCAB as u64;
            let mut tokens = vec![s as i32];
            tokens.extend(
                (1..length).map(|_| (content.start + draw(content.end - content.start)) as i32),
            );
            let mask = (0..length).map(|_| u8::from(draw(3) > 0)).collect();
            (tokens, mask)
        })
        .collect()
}

/// What the top three of a row say: token, sequence and position.
fn decode(ids: &[f64], logp: &[f64]) -> (i32, i32, usize) {
    let floor = logp[2]; // an id that nothing points at: its logit is 0
    // In front of position 0 token and marker are the same dimension.
    if logp[1] - floor < 1e-3 {
        return (ids[0] as i32, ids[0] as i32, 0);
    }
    let first_is_marker = (ids[0] as usize) < MARKERS;
    let (token, marker) = if first_is_marker { (1, 0) } else { (0, 1) };
    // x = e_token + sqrt(H) / (t + 1) · e_marker, and the norm scales both alike.
    let ratio = (logp[marker] - floor) / (logp[token] - floor);
    let position = (HIDDEN as f64).sqrt() / ratio - 1.0;
    (
        ids[token] as i32,
        ids[marker] as i32,
        position.round() as usize,
    )
}

#[test]
fn every_row_decodes_to_itself() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    teacher(&at.join("teacher"));
    let sequences = corpus();
    write_corpus(&at.join("corpus"), &sequences, VOCAB);
    for (budget, chunk, shard_tokens) in [
        ("1", "1", "1"),
        ("256", "7", "300"),
        ("100000", "480", "100000"),
    ] {
        let out = format!("out-{budget}");
        succeed(
            at,
            &[
                "score",
                "--teacher",
                "teacher",
                "--corpus",
                "corpus",
                "--out",
                &out,
                "-k",
                "3",
                "--logp-dtype",
                "f32",
                "--token-budget",
                budget,
                "--head-chunk",
                chunk,
                "--shard-tokens",
                shard_tokens,
            ],
        );
        let got = arrays(&at.join(&out));
        let mut row = 0;
        for (s, (tokens, mask)) in sequences.iter().enumerate() {
            for next in 1..tokens.len() {
                if mask[next] == 0 {
                    continue;
                }
                let span = row * 3..row * 3 + 3;
                let found = decode(&got["ids"][span.clone()], &got["logp"][span]);
                let position = next - 1;
                assert_eq!(found, (tokens[position], s as i32, position), "row {row}");
                assert_eq!(got["targets"][row], f64::from(tokens[next]), "row {row}");
                row += 1;
            }
        }
        assert_eq!(got["targets"].len(), row, "rows");
        assert!(row > 900, "{row} rows are too few to prove much");
    }
}
