//! Most positions a teacher takes, by what its config says of the rope.

use kdscore::model::describe;
use serde_json::{Value, json};

fn context(config: &Value) -> usize {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    describe(folder.path()).unwrap().context
}

fn llama(positions: usize, scaling: &Value) -> usize {
    context(&json!({
        "model_type": "llama", "max_position_embeddings": positions, "rope_scaling": scaling,
    }))
}

#[test]
fn a_rope_that_is_scaled_reaches_further() {
    let of = |kind: &str, factor: f64, original: usize| {
        json!({
            "rope_type": kind, "factor": factor, "original_max_position_embeddings": original,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        })
    };
    let plain = |kind: &str, factor: f64| json!({"type": kind, "factor": factor});
    for (positions, scaling, expected) in [
        (4096, json!(null), 4096),
        (4096, plain("linear", 4.0), 16_384),
        (4096, plain("dynamic", 2.0), 8192),
        // Some raise the context beside the scaling, some leave it.
        (32_768, of("yarn", 4.0, 32_768), 131_072),
        (163_840, of("yarn", 40.0, 4096), 163_840),
        (32_768, plain("yarn", 4.0), 131_072),
        (131_072, of("llama3", 8.0, 8192), 131_072),
        (4096, plain("linear", 0.5), 4096),
    ] {
        assert_eq!(llama(positions, &scaling), expected, "{scaling}");
    }
}

#[test]
fn a_rope_for_some_layers_alone_does_not_move_the_context() {
    let scaling = json!({"rope_type": "linear", "factor": 8.0});
    let config = json!({
        "model_type": "gemma3_text", "max_position_embeddings": 131_072, "rope_scaling": scaling,
    });
    assert_eq!(context(&config), 131_072);
}
