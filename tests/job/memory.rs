//! What the process holds stays within the printed plan plus 10 % and 64 MB.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Stdio};

use super::checkpoint::{self, Tensors};
use super::program::{Tokens, kdscore, write_corpus};
use serde_json::json;

const SLACK: f64 = 64.0 * 1e6;

/// A random teacher wide enough that its buffers are what fills the memory.
fn teacher(folder: &Path) {
    let (hidden, inner, vocab, layers) = (256, 1024, 32_000, 2);
    let mut tensors = Tensors::new();
    let mut seed = 1u32;
    let mut put = |name: String, shape: Vec<usize>| {
        let values = (0..shape.iter().product::<usize>()).map(|_| {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 8) as f32 / (1 << 24) as f32 * 0.1 - 0.05
        });
        tensors.insert(name, (shape, values.collect()));
    };
    put("model.embed_tokens.weight".into(), vec![vocab, hidden]);
    put("model.norm.weight".into(), vec![hidden]);
    for i in 0..layers {
        let at = |name: &str| format!("model.layers.{i}.{name}.weight");
        put(at("input_layernorm"), vec![hidden]);
        put(at("post_attention_layernorm"), vec![hidden]);
        for name in ["q_proj", "k_proj", "v_proj", "o_proj"] {
            put(at(&format!("self_attn.{name}")), vec![hidden, hidden]);
        }
        put(at("mlp.gate_proj"), vec![inner, hidden]);
        put(at("mlp.up_proj"), vec![inner, hidden]);
        put(at("mlp.down_proj"), vec![hidden, inner]);
    }
    let config = json!({
        "model_type": "llama", "hidden_size": hidden, "vocab_size": vocab,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": 4,
        "max_position_embeddings": 4096, "tie_word_embeddings": true,
    });
    checkpoint::write(folder, &config, &tensors);
}

#[test]
fn anonymous_memory_stays_within_the_plan() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    teacher(&at.join("teacher"));
    let sequences: Vec<Tokens> = (0..24)
        .map(|s| {
            let length = 200 + s * 37;
            let tokens = (0..length).map(|t| ((s * 977 + t * 31) % 32_000) as i32);
            (tokens.collect(), vec![1; length])
        })
        .collect();
    write_corpus(&at.join("corpus"), &sequences, 32_000);
    for (budget, chunk) in [("4032", "480"), ("16000", "96"), ("1000", "1200")] {
        let out = format!("out-{budget}");
        let mut command = kdscore(at);
        command.args([
            "score",
            "--teacher",
            "teacher",
            "--corpus",
            "corpus",
            "--out",
            &out,
            "--token-budget",
            budget,
            "--head-chunk",
            chunk,
        ]);
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let peak = watch_anonymous(&mut child);
        assert!(child.wait().unwrap().success());
        let planned = planned_bytes(&at.join(&out));
        assert!(
            peak <= planned * 1.1 + SLACK,
            "budget {budget}, chunk {chunk}: planned {planned:.0} bytes, seen {peak:.0}"
        );
        assert!(
            peak > planned * 0.3,
            "the plan must not be made of air: {planned:.0}, {peak:.0}"
        );
    }
}

/// Highest anonymous resident memory until stderr closes, in bytes.
fn watch_anonymous(child: &mut Child) -> f64 {
    let status = format!("/proc/{}/status", child.id());
    let stderr = child.stderr.take().unwrap();
    let drain = std::thread::spawn(move || BufReader::new(stderr).lines().count());
    let mut peak = 0.0f64;
    while !drain.is_finished() {
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find_map(|l| l.strip_prefix("RssAnon:"));
        let kib = line.and_then(|l| l.trim().trim_end_matches(" kB").parse::<f64>().ok());
        peak = peak.max(kib.unwrap_or(0.0) * 1024.0);
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    peak
}

/// The plan as the run noted it in its log.
fn planned_bytes(out: &Path) -> f64 {
    let log = std::fs::read_dir(out.join("log")).unwrap().next().unwrap();
    let text = std::fs::read_to_string(log.unwrap().path()).unwrap();
    let line: serde_json::Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    line["memory_planned_bytes"].as_f64().unwrap()
}
