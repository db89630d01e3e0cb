//! Classes for which transformers 5 takes vocabulary and merges from tokenizer.json and builds
//! the rest itself, so that a file of another make gives other tokens there.
//!
//! What the file says is what is done here. This only says where the two differ.

use serde_json::{Map, Value, json};

/// Checkpoints that transformers 5 reads by their tokenizer.json, whatever class they name.
const READ_AS_THEY_ARE: [&str; 49] = [
    "arctic",
    "chatlm",
    "ernie4_5",
    "ernie4_5_moe",
    "flex_olmo",
    "fuyu",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_bigcode",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "granitemoeshared",
    "h2ovl_chat",
    "hyperclovax",
    "internlm2",
    "internlm3",
    "iquestcoder",
    "jamba",
    "kimi_k25",
    "kimi_linear",
    "llava",
    "llava_next",
    "mimo_v2_flash",
    "minicpm3",
    "minicpmv",
    "minimax_m2",
    "ministral",
    "ministral3",
    "mistral",
    "mistral3",
    "mixtral",
    "modernbert",
    "molmo",
    "molmo2",
    "nemotron",
    "olmo2",
    "olmo3",
    "olmo_hybrid",
    "opencua",
    "persimmon",
    "phi3",
    "phi3_v",
    "phimoe",
    "pixtral",
    "stablelm",
    "vipllava",
];
/// How Qwen2's class splits words.
const QWEN2_WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// What transformers 5 would build instead of the normalizer and pre_tokenizer of `tokenizer`, by
/// the class in tokenizer_config.json and the model_type in config.json; nothing where both are
/// the same or the class is none of those.
pub fn rebuilt(
    tokenizer: &Value,
    config: &Map<String, Value>,
    model_type: Option<&str>,
) -> Option<String> {
    if model_type.is_some_and(|m| READ_AS_THEY_ARE.contains(&m)) || config.contains_key("auto_map")
    {
        return None;
    }
    let named = config.get("tokenizer_class")?.as_str()?;
    let class = named.strip_suffix("Fast").unwrap_or(named);
    let is_byte_level = [&tokenizer["pre_tokenizer"], &tokenizer["decoder"]]
        .iter()
        .any(|v| v.to_string().contains("\"ByteLevel\""));
    if class == "LlamaTokenizer" && is_byte_level {
        return None;
    }
    let (normalizer, pre_tokenizer) = built(class, config)?;
    let same = |key: &str, built: &Value| plain(&tokenizer[key]) == plain(built);
    if same("normalizer", &normalizer) && same("pre_tokenizer", &pre_tokenizer) {
        return None;
    }
    Some(format!(
        "transformers 5 leaves the normalizer and pre_tokenizer of tokenizer.json out for the tokenizer_class {named} \
         and builds {} and {}",
        plain(&normalizer),
        plain(&pre_tokenizer)
    ))
}

/// The normalizer and pre_tokenizer of a class.
fn built(class: &str, config: &Map<String, Value>) -> Option<(Value, Value)> {
    let says = |key: &str| config.get(key).and_then(Value::as_bool);
    let space = says("add_prefix_space").unwrap_or(false);
    let words = |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": space, "use_regex": use_regex});
    Some(match class {
        "LlamaTokenizer" => {
            let scheme = match (says("add_prefix_space"), says("legacy")) {
                (Some(false), _) => "never",
                (_, Some(true)) => "always",
                _ => "first",
            };
            let spaces = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": false});
            (Value::Null, spaces)
        }
        "GPT2Tokenizer" => (Value::Null, words(true)),
        "GPTNeoXTokenizer" => (json!({"type": "NFC"}), words(true)),
        "CohereTokenizer" => {
            let digits = json!({"type": "Digits", "individual_digits": true});
            let both = json!({"type": "Sequence", "pretokenizers": [digits, words(true)]});
            (json!({"type": "NFC"}), both)
        }
        "Qwen2Tokenizer" => {
            let split = json!({"type": "Split", "pattern": {"Regex": QWEN2_WORDS}, "behavior": "Isolated", "invert": false});
            let both = json!({"type": "Sequence", "pretokenizers": [split, words(false)]});
            (json!({"type": "NFC"}), both)
        }
        "GemmaTokenizer" => (
            json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"}),
            json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false}),
        ),
        _ => return None,
    })
}

/// A step without what changes no token, and sequences of no or one step as what they do.
fn plain(step: &Value) -> Value {
    let Value::Object(step) = step else {
        return step.clone();
    };
    let mut step = step.clone();
    step.remove("trim_offsets");
    let list = ["normalizers", "pretokenizers"]
        .into_iter()
        .find_map(|key| Some((key, step.get(key)?.as_array()?.clone())));
    match list {
        None => step.into(),
        Some((_, steps)) if steps.is_empty() => Value::Null,
        Some((_, steps)) if steps.len() == 1 => plain(&steps[0]),
        Some((key, steps)) => {
            let steps: Vec<Value> = steps.iter().map(plain).collect();
            step.insert(key.into(), steps.into());
            step.into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(class: &str, tokenizer: Value, model_type: Option<&str>) -> Option<String> {
        let config = json!({"tokenizer_class": class, "legacy": true});
        rebuilt(&tokenizer, config.as_object().unwrap(), model_type)
    }

    #[test]
    fn what_transformers_builds_itself_is_told_where_it_differs() {
        let prepend = json!({"type": "Prepend", "prepend": "▁"});
        let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
        let llama = json!({"normalizer": {"type": "Sequence", "normalizers": [prepend, replace]}, "pre_tokenizer": null, "decoder": null});
        for class in ["LlamaTokenizer", "LlamaTokenizerFast"] {
            let told = found(class, llama.clone(), Some("llama")).unwrap();
            assert!(
                told.contains(&format!("tokenizer_class {class} and builds null and")),
                "{told}"
            );
            assert!(told.contains(r#""prepend_scheme":"always""#), "{told}");
        }
        assert_eq!(found("LlamaTokenizer", llama.clone(), Some("phi3")), None);
        assert_eq!(found("PreTrainedTokenizerFast", llama, None), None);
        let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
        let gpt2 = json!({"normalizer": {"type": "Sequence", "normalizers": []}, "pre_tokenizer": bytes, "decoder": null});
        assert_eq!(found("GPT2TokenizerFast", gpt2.clone(), None), None);
        assert_eq!(found("LlamaTokenizer", gpt2.clone(), None), None);
        assert!(found("GPTNeoXTokenizer", gpt2.clone(), None).is_some());
        assert!(found("Qwen2Tokenizer", gpt2, None).is_some());
    }
}
