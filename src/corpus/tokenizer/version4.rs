//! What transformers 4 sets in the tokenizer that it reads from tokenizer.json.
//!
//! Tables from transformers 4.57: models/auto/tokenization_auto.py and the tokenization file of
//! each class.

use anyhow::Result;
use serde_json::{Map, Value, json};
use tokenizers::{PreTokenizerWrapper, Tokenizer};

use super::built::{self, name_in, put_around};

/// Classes that set something, with the models that have them where the checkpoint names none.
const CLASSES: [(&str, &[&str]); 5] = [
    (
        "LlamaTokenizer",
        &[
            "arcee",
            "deepseek_v2",
            "deepseek_v3",
            "diffllama",
            "ernie4_5",
            "ernie4_5_moe",
            "jamba",
            "jetmoe",
            "llama",
            "llama4_text",
            "ministral",
            "mistral",
            "mixtral",
            "persimmon",
            "phi3",
            "phimoe",
            "zamba",
            "zamba2",
        ],
    ),
    ("CodeLlamaTokenizer", &["code_llama"]),
    (
        "GemmaTokenizer",
        &[
            "gemma",
            "gemma2",
            "gemma3",
            "gemma3_text",
            "gemma3n",
            "gemma3n_text",
            "recurrent_gemma",
        ],
    ),
    ("CohereTokenizer", &["cohere", "cohere2"]),
    (
        "GPTNeoXTokenizer",
        &[
            "falcon_mamba",
            "gpt_neox",
            "mamba",
            "mamba2",
            "mpt",
            "olmo",
            "olmo2",
            "olmoe",
            "rwkv",
            "stablelm",
            "xlstm",
        ],
    ),
];

/// The class of a checkpoint: the one it names, else that of its model.
pub fn class(config: &Map<String, Value>, model: &Map<String, Value>) -> String {
    let model_type = name_in(model, "model_type").unwrap_or_default();
    let of_model = || {
        let of = |(_, models): &&(&str, &[&str])| models.contains(&model_type.as_str());
        let found = CLASSES.iter().find(of);
        let found = found.map(|(class, _)| (*class).to_owned());
        found.or_else(|| built::of_model(&model_type))
    };
    name_in(config, "tokenizer_class")
        .or_else(|| name_in(model, "tokenizer_class"))
        .or_else(of_model)
        .unwrap_or_default()
}

/// Special tokens of checkpoints that don't name them, by class.
pub fn named(class: &str) -> &'static [(&'static str, &'static str)] {
    match (class, built::named(class)) {
        // These name more in transformers 5.
        ("GemmaTokenizer" | "GPTNeoXTokenizer", [named @ .., _]) => named,
        ("CohereTokenizer" | "CodeLlamaTokenizer", named) => &named[..3],
        (_, named) => named,
    }
}

/// Sets what the class and tokenizer_config.json say of spaces in front and of BOS and EOS.
///
/// # Errors
/// A BOS or EOS that is no token.
pub fn set(
    tokenizer: &mut Tokenizer,
    class: &str,
    config: &Map<String, Value>,
    special: &[(String, String)],
) -> Result<()> {
    let says = |key: &str| config.get(key).and_then(Value::as_bool);
    let space = says("add_prefix_space").unwrap_or(false);
    let given = serde_json::to_value(tokenizer.get_pre_tokenizer())?;
    let mut step = given.clone();
    if let Some(of_step) = step.get_mut("add_prefix_space") {
        *of_step = json!(space);
    }
    if class == "CohereTokenizer" && space {
        spaced(&mut step);
    }
    if step != given {
        let step: PreTokenizerWrapper = serde_json::from_value(step)?;
        tokenizer.with_pre_tokenizer(Some(step));
    }
    if !CLASSES.iter().any(|(known, _)| *known == class) {
        return Ok(());
    }
    let named = |name: &str, default: bool| {
        let adds = says(&format!("add_{name}")).unwrap_or(default);
        let token = special.iter().find(|(known, _)| known == name);
        token.filter(|_| adds).map(|(_, text)| text.as_str())
    };
    let bos = named("bos_token", class != "GPTNeoXTokenizer");
    put_around(tokenizer, bos, named("eos_token", false))
}

/// Sets `add_prefix_space` wherever a step has it.
fn spaced(step: &mut Value) {
    match step {
        Value::Object(step) => {
            if let Some(space) = step.get_mut("add_prefix_space") {
                *space = json!(true);
            }
            step.values_mut().for_each(spaced);
        }
        Value::Array(steps) => steps.iter_mut().for_each(spaced),
        _ => {}
    }
}
