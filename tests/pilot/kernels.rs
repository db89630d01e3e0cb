//! `plan --kernels` against arithmetic by hand: 32 sequences of 512 tokens under the shapes of
//! Llama-3-8B and Qwen2.5-0.5B. That the launches are those of a real batch is proved on the
//! stand-in driver (`tests/cuda`).

use std::path::Path;

use serde_json::{Value, json};

use super::program::{refuse, succeed};

const TOKENS: f64 = 16_384.0;

fn llama_8b() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
        "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": false,
    })
}

fn qwen_half_b() -> Value {
    json!({
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896,
        "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "vocab_size": 151_936, "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0, "tie_word_embeddings": true,
    })
}

fn forecast(config: &Value, options: &[&str]) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let teacher = folder.path().join("teacher");
    std::fs::create_dir(&teacher).unwrap();
    std::fs::write(teacher.join("config.json"), config.to_string()).unwrap();
    let args = [
        &["plan", "--json", "--teacher", "teacher", "--kernels"][..],
        options,
    ]
    .concat();
    serde_json::from_str(&succeed(folder.path(), &args)).unwrap()
}

/// The sum of `field` over the kernels that `is` takes.
fn sum(found: &Value, field: &str, is: impl Fn(&Value) -> bool) -> f64 {
    let kernels = found["kernels"].as_array().unwrap().iter();
    kernels
        .filter(|k| is(k))
        .map(|k| k[field].as_f64().unwrap())
        .sum()
}

fn named<'a>(name: &'a str) -> impl Fn(&Value) -> bool + 'a {
    move |kernel| kernel["kernel"] == name
}

fn shaped(inputs: u64, outputs: u64) -> impl Fn(&Value) -> bool {
    move |kernel| kernel["inputs"] == inputs && kernel["outputs"] == outputs
}

fn near(found: f64, expected: f64, share: f64) {
    let off = (found / expected - 1.0).abs();
    assert!(off <= share, "expected {expected:e}, found {found:e}");
}

#[test]
fn an_8b_batch_takes_what_arithmetic_says() {
    let found = forecast(&llama_8b(), &[]);
    assert_eq!(
        (&found["sequences"], &found["tokens"]),
        (&json!(32), &json!(16_384))
    );
    let product = |inputs: f64, outputs: f64| 2.0 * TOKENS * inputs * outputs * 32.0;
    near(
        sum(&found, "flops", shaped(4096, 1024)),
        product(4096.0, 2048.0),
        0.0,
    );
    // Queries and the output projection have one shape and two kernels.
    near(
        sum(&found, "flops", shaped(4096, 4096)),
        2.0 * product(4096.0, 4096.0),
        0.0,
    );
    near(
        sum(&found, "flops", shaped(4096, 14_336)),
        2.0 * product(4096.0, 14_336.0),
        0.0,
    );
    near(
        sum(&found, "flops", shaped(14_336, 4096)),
        product(14_336.0, 4096.0),
        0.0,
    );
    near(sum(&found, "flops", shaped(4096, 128_256)), 17.2e12, 0.01);
    near(sum(&found, "bytes", named("activate_bf16")), 45.1e9, 0.01);
    // Two norms a layer from fp32 to bf16, the last layer's first one again, and the head's.
    let norms = 66.0 * TOKENS * 4096.0 * 6.0;
    near(sum(&found, "bytes", named("rms_norm_f32_bf16")), norms, 0.0);
    // Queries and keys there and back, and each row's angles.
    let turned = TOKENS * (5120.0 * 4.0 + 2.0 * 129.0 * 4.0) * 32.0;
    near(sum(&found, "bytes", named("rope_halves_bf16")), turned, 0.0);
    // Both passes of the reduction over 16,384 rows of fp32 logits.
    near(sum(&found, "bytes", named("reduce_head")), 16.8e9, 0.01);
    assert_eq!(sum(&found, "launches", named("reduce_head")), 16.0);
    assert_eq!(sum(&found, "launches", named("attention_128")), 32.0);
    // Tiles and masked blocks cost more than the triangle of pairs, but not twice.
    let triangle = 32.0 * 32.0 * 4.0 * 32.0 * 128.0 * (512.0 * 513.0 / 2.0);
    let covered = sum(&found, "flops", named("attention_128")) / triangle;
    assert!((1.0..1.4).contains(&covered), "{covered}");
}

#[test]
fn model_flops_leave_out_what_padding_computes() {
    for (config, model_tflop) in [(llama_8b(), 248.0), (qwen_half_b(), 16.5)] {
        let found = forecast(&config, &[]);
        near(
            found["model_flops"].as_f64().unwrap(),
            model_tflop * 1e12,
            0.02,
        );
        let computed = sum(&found, "flops", |_| true);
        assert!(computed > found["model_flops"].as_f64().unwrap());
        for device in found["devices"].as_array().unwrap() {
            let mfu = device["mfu"].as_f64().unwrap();
            assert!((0.2..0.8).contains(&mfu), "{device}");
            let seconds = device["seconds"].as_f64().unwrap();
            near(
                device["tokens_per_second"].as_f64().unwrap(),
                TOKENS / seconds,
                1e-9,
            );
        }
    }
}

#[test]
fn a_tied_head_and_biases_are_priced_as_they_are_used() {
    let found = forecast(
        &qwen_half_b(),
        &["--length", "128", "--head-chunk", "16384"],
    );
    assert_eq!(found["sequences"], 128);
    near(
        sum(&found, "flops", shaped(896, 151_936)),
        2.0 * TOKENS * 896.0 * 151_936.0,
        0.0,
    );
    assert_eq!(sum(&found, "launches", named("reduce_head")), 1.0);
    assert_eq!(sum(&found, "launches", named("attention_64")), 24.0);
}

#[test]
fn a_length_beyond_the_context_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let teacher = folder.path().join("teacher");
    std::fs::create_dir(&teacher).unwrap();
    std::fs::write(
        Path::new(&teacher).join("config.json"),
        llama_8b().to_string(),
    )
    .unwrap();
    let said = refuse(
        folder.path(),
        &[
            "plan",
            "--teacher",
            "teacher",
            "--kernels",
            "--length",
            "8193",
        ],
    );
    assert!(said.contains("8192"), "{said}");
}
