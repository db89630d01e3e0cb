//! Keys that published files carry beside those a family's class reads: older names, and names for
//! what the family does anyway. They change nothing; one that says otherwise is refused.

use kdscore::model::{Description, Teacher, Unknown};
use serde_json::{Value, json};

use super::golden::with_config;
use super::teachers::Fixture;

fn open(fixture: &Fixture, extra: &Value) -> Result<Description, String> {
    let mut config = fixture.json("config.json");
    for (key, value) in extra.as_object().unwrap() {
        config[key] = value.clone();
    }
    let folder = with_config(&fixture.folder, config.to_string().as_bytes()).unwrap();
    let teacher = Teacher::open(folder.path(), Unknown::Refuse);
    teacher.map(|t| t.description).map_err(|e| e.to_string())
}

/// By teacher: keys as published, and values that the family can't honour.
fn published() -> Vec<(&'static str, Value, Value)> {
    vec![
        (
            "llama_tied",
            json!({"rope_interleaved": false, "is_llama_config": true, "max_sequence_length": 128,
                "transformers.js_config": {"dtype": "q4"}}),
            json!({"rope_interleaved": true}),
        ),
        (
            "qwen2",
            json!({"use_mrope": false}),
            json!({"use_mrope": true}),
        ),
        (
            "phi3_longrope",
            json!({"attention_bias": false, "mlp_bias": false, "lm_head_bias": false,
                "full_attn_mod": 1, "interpolate_factor": 1}),
            json!({"attention_bias": true, "mlp_bias": true, "lm_head_bias": true,
                "full_attn_mod": 2, "interpolate_factor": 4}),
        ),
        (
            "gemma2",
            json!({"cache_implementation": "hybrid", "sliding_window_size": 24}),
            json!({"sliding_window_size": 25}),
        ),
        (
            "cohere2",
            json!({"cache_implementation": "hybrid", "layer_switch": 4,
                "order_of_interleaved_layers": "local_attn_first", "rotary_pct": 1,
                "position_embedding_type": "rope_gptj", "use_embedding_sharing": true,
                "use_gated_activation": true, "use_parallel_block": true,
                "use_parallel_embedding": true, "use_qk_norm": false}),
            json!({"layer_switch": 3, "order_of_interleaved_layers": "global_attn_first",
                "rotary_pct": 0.5, "position_embedding_type": "alibi",
                "use_embedding_sharing": false, "use_gated_activation": false,
                "use_parallel_block": false, "use_qk_norm": true}),
        ),
        (
            "starcoder2",
            json!({"mlp_type": "default", "norm_type": "layer_norm"}),
            json!({"mlp_type": "gated", "norm_type": "rms_norm"}),
        ),
        (
            "stablelm",
            json!({"use_norm_bias": false, "rotary_scaling_factor": 1.0}),
            json!({"rotary_scaling_factor": 2.0}),
        ),
        (
            "smollm3",
            json!({"max_window_layers": 28, "use_sliding_window": false}),
            json!({}),
        ),
        (
            "nemotron",
            json!({"kv_channels": 8, "rope_percent": 0.5}),
            json!({}),
        ),
        // A number, where the class has a flag.
        (
            "llama4_text",
            json!({"attn_temperature_tuning": 4, "for_llm_compressor": false}),
            json!({"attn_temperature_tuning": "4"}),
        ),
        // No list, where the class makes one: here it is the same.
        ("llama4_text", json!({"no_rope_layers": []}), json!({})),
    ]
}

#[test]
fn keys_as_published_change_nothing() {
    for (name, extra, _) in published() {
        let fixture = Fixture::open(name);
        let expected = open(&fixture, &json!({})).unwrap();
        assert_eq!(open(&fixture, &extra).unwrap(), expected, "{name} {extra}");
    }
}

#[test]
fn a_key_that_the_family_cannot_honour_is_named() {
    for (name, _, wrong) in published() {
        let fixture = Fixture::open(name);
        for (key, value) in wrong.as_object().unwrap() {
            let error = open(&fixture, &json!({key: value})).unwrap_err();
            assert!(
                error.contains(&format!("{key}: expected")),
                "{name}: {error}"
            );
        }
    }
}

/// Command R began with a shorter context than it has.
#[test]
fn a_context_under_its_own_key_counts() {
    let fixture = Fixture::open("cohere");
    let context = |extra: &Value| open(&fixture, extra).unwrap().context;
    assert_eq!(context(&json!({})), 128);
    assert_eq!(context(&json!({"model_max_length": 1000})), 1000);
    assert_eq!(context(&json!({"model_max_length": 100})), 128);
}
