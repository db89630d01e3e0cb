//! `plan` through the real program: the well-known worked case, and files as predicted.

use std::path::Path;

use serde_json::{Value, json};

use super::program::{fixture, refuse, succeed};

fn llama_70b(folder: &Path) {
    std::fs::create_dir_all(folder).unwrap();
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192,
        "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": false,
    });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
}

fn plan(folder: &Path, options: &[&str]) -> Value {
    let mut args = vec!["plan", "--json", "--teacher", "teacher"];
    args.extend(options);
    serde_json::from_str(&succeed(folder, &args)).unwrap()
}

/// `found` is `expected` to within `share` of it.
fn near(found: &Value, expected: f64, share: f64) {
    let found = found.as_f64().unwrap();
    let off = (found / expected - 1.0).abs();
    assert!(off <= share, "expected {expected}, found {found}");
}

#[test]
fn the_worked_case_of_a_70b_teacher_comes_out() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    llama_70b(&at.join("teacher"));
    let size = ["--tokens", "1000000000", "--rows", "600000000"];
    let mut options = size.to_vec();
    options.extend(["--gpu", "H100", "--price", "2", "-k", "32"]);
    let found = plan(at, &options);
    near(&found["parameters"], 70.55e9, 0.001);
    assert_eq!(found["parameters"], found["parameters_active"]);
    assert_eq!(found["bytes_per_row"], 198);
    near(&found["bytes"], 119e9, 0.005);
    near(&found["bytes_full_logits"], 154e12, 0.005);
    near(&found["flops"], 1.4e20, 0.01);
    let device = &found["devices"][0];
    near(&device["peak_flops"], 989e12, 0.001);
    near(&device["hours"], 98.0, 0.01);
    near(&device["cost"], 196.0, 0.01);
    assert_eq!(device["split"], 4, "141 GB of weights on 80 GB devices");

    options.extend(["--count", "8"]);
    near(&plan(at, &options)["devices"][0]["hours"], 98.0 / 8.0, 0.01);
    let all = plan(at, &size);
    assert!(all["devices"].as_array().unwrap().len() > 15);
    let lengths = [&size[..], &["--length", "32768", "--gpu", "H200"]].concat();
    let long = plan(at, &lengths);
    near(
        &long["flops_attention"],
        found["flops_attention"].as_f64().unwrap() * 16.0,
        0.01,
    );
}

#[test]
fn what_cannot_be_planned_is_refused_with_a_way_out() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    llama_70b(&at.join("teacher"));
    let cases = [
        (&["--tokens", "10", "--gpu", "H9000"][..], "H100 SXM"),
        (&["--tokens", "10", "--gpu", "V100"], "--peak-tflops"),
        (
            &["--tokens", "10", "--rows", "11"],
            "rows: expected at most",
        ),
        (&["--tokens", "10", "--mfu", "1.5"], "mfu: expected"),
        (&["--tokens", "0"], "tokens: expected at least 1"),
        (&["--tokens", "10", "--count", "0"], "count: expected"),
        (&["--tokens", "1e18"], "--shard-tokens"),
        (&["--tokens", "1e99"], "up to 1e18"),
        (
            &["--tokens", "10", "--length", "200000"],
            "length: expected",
        ),
        (&[], "--corpus"),
    ];
    for (options, expected) in cases {
        let mut args = vec!["plan", "--teacher", "teacher"];
        args.extend(options);
        let error = refuse(at, &args);
        assert!(error.contains(expected), "{options:?}: {error}");
    }
}

#[test]
fn files_are_as_large_as_predicted() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let teacher = fixture("teacher");
    let teacher = teacher.to_str().unwrap();
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/quickstart.jsonl");
    let data = data.to_str().unwrap();
    succeed(
        at,
        &[
            "prepare",
            "--data",
            data,
            "--tokenizer",
            teacher,
            "--out",
            "corpus",
        ],
    );
    let cases = [
        &["-k", "32"][..],
        &["-k", "3", "--shard-tokens", "2000"],
        &[
            "-k",
            "100",
            "--shard-tokens",
            "9000",
            "--logp-dtype",
            "f32",
            "--emit",
            "entropy,target_rank",
        ],
    ];
    for (i, options) in cases.into_iter().enumerate() {
        let mut args = vec![
            "plan",
            "--json",
            "--teacher",
            teacher,
            "--corpus",
            "corpus",
            "--gpu",
            "L4",
        ];
        args.extend(options);
        let planned: Value = serde_json::from_str(&succeed(at, &args)).unwrap();
        let out = format!("out-{i}");
        let mut args = vec![
            "score",
            "--json",
            "--teacher",
            teacher,
            "--corpus",
            "corpus",
            "--out",
            &out,
        ];
        args.extend(options);
        let scored: Value = serde_json::from_str(&succeed(at, &args)).unwrap();
        let files = super::program::tree(&at.join(&out));
        let files = files.iter().filter(|(name, _)| !name.starts_with("log/"));
        let bytes: usize = files.map(|(_, bytes)| bytes.len()).sum();
        near(&planned["bytes"], bytes as f64, 0.001);
        assert_eq!(scored["forecast"]["bytes"], bytes);
        near(&scored["forecast"]["bytes_predicted"], bytes as f64, 0.001);
        assert_eq!(planned["rows"], scored["rows"]);
        assert_eq!(planned["tokens_computed"], scored["tokens_computed"]);
    }
}
