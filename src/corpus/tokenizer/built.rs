//! Classes of transformers 5 that take vocabulary and merges from tokenizer.json and build the rest
//! themselves.
//!
//! Tables from transformers 5.24: models/auto/tokenization_auto.py and the tokenization file of
//! each class. scripts/template_check compares the tokens with both generations.

use anyhow::{Result, anyhow, bail};
use serde_json::{Map, Value, json};
use tokenizers::{ModelWrapper, PostProcessorWrapper, Tokenizer};

/// Checkpoints that transformers 5 reads by their tokenizer.json, whatever class they name.
const READ_AS_THEY_ARE: [&str; 83] = [
    "arctic",
    "aria",
    "beam",
    "bigbird_pegasus",
    "camembertv2-base",
    "canary",
    "chatlm",
    "cohere_asr",
    "ernie4_5",
    "ernie4_5_moe",
    "flex_olmo",
    "fuyu",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "glm4v",
    "glm4v_moe",
    "glm_image",
    "glmasr",
    "got_ocr2",
    "gpt_bigcode",
    "gradium_phonon_tts",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "granitemoeshared",
    "h2ovl_chat",
    "hyperclovax",
    "hyperclovax_vlm",
    "internlm2",
    "internlm3",
    "iquestcoder",
    "jamba",
    "kimi_k25",
    "kimi_linear",
    "kosmos-2",
    "llava",
    "llava_next",
    "mimo_v2_flash",
    "minicpm3",
    "minicpm_ocr",
    "minicpmv",
    "minicpmv4_6",
    "minicpmv4_7",
    "minimax_m2",
    "ministral",
    "ministral3",
    "mistral",
    "mistral3",
    "mistral_large4",
    "mixtral",
    "modernbert",
    "modernbert-decoder",
    "molmo",
    "molmo2",
    "nemo_speechlm",
    "nemotron",
    "nvfp4",
    "nystromformer",
    "olmo2",
    "olmo3",
    "olmo_hybrid",
    "omniasr",
    "opencua",
    "openvla",
    "paddleocr_vl",
    "pegasus_x",
    "persimmon",
    "phi3",
    "phi3_v",
    "phimoe",
    "pix2struct",
    "pixtral",
    "pocket_tts",
    "smolvlm",
    "stablelm",
    "step3_vl",
    "umt5",
    "vipllava",
    "voxtral",
    "voxtral_realtime",
    "xlm-roberta-xl",
];
/// The classes of checkpoints that name none.
const OF_MODEL: [(&str, &[&str]); 8] = [
    ("CodeLlamaTokenizer", &["code_llama"]),
    ("CohereTokenizer", &["aya_vision", "cohere", "cohere2"]),
    (
        "GPT2Tokenizer",
        &[
            "blip-2",
            "codegen",
            "dbrx",
            "emu3",
            "gpt2",
            "gpt_neo",
            "gptj",
            "hyperclovax_vision_v2",
            "instructblip",
            "instructblipvideo",
            "jais2",
            "opt",
            "phi",
            "starcoder2",
        ],
    ),
    (
        "GPTNeoXTokenizer",
        &[
            "falcon_mamba",
            "gpt_neox",
            "mamba",
            "mamba2",
            "mpt",
            "olmo",
            "olmoe",
            "rwkv",
            "xlstm",
        ],
    ),
    (
        "GemmaTokenizer",
        &[
            "diffusion_gemma",
            "gemma",
            "gemma2",
            "gemma3",
            "gemma3_text",
            "gemma3n",
            "gemma3n_text",
            "recurrent_gemma",
            "shieldgemma2",
            "t5gemma",
            "zaya",
        ],
    ),
    ("LlamaTokenizer", &["idefics", "idefics2"]),
    (
        "Qwen2Tokenizer",
        &[
            "audioflamingo3",
            "colqwen2",
            "cosmos3_omni",
            "dots3_note",
            "fun_asr_nano",
            "hunyuan_vl",
            "internvl",
            "lighton_ocr",
            "moss_transcribe_diarize",
            "ovis2",
            "qianfan_ocr",
            "qwen2",
            "qwen2_5_omni",
            "qwen2_5_vl",
            "qwen2_audio",
            "qwen2_moe",
            "qwen2_vl",
            "qwen3",
            "qwen3_asr",
            "qwen3_moe",
            "qwen3_next",
            "qwen3_omni_moe",
            "qwen3_vl",
            "qwen3_vl_moe",
            "vibevoice",
        ],
    ),
    (
        "Qwen3_5Tokenizer",
        &[
            "qwen3_5",
            "qwen3_5_moe",
            "qwen3_5_moe_text",
            "qwen3_5_text",
            "qwen4_exp",
        ],
    ),
];
/// Checkpoints that get the class of their model even where they name another.
const ALWAYS_OF_MODEL: [&str; 6] = [
    "hyperclovax_vision_v2",
    "qwen2",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen4_exp",
];
/// Classes that read tokenizer.json as it is.
const GENERIC: [&str; 3] = ["PreTrainedTokenizer", "TokenizersBackend", "BloomTokenizer"];
/// Classes that build the steps too, and are not built here.
const NOT_BUILT: [&str; 10] = [
    "AlbertTokenizer",
    "BertTokenizer",
    "BigBirdTokenizer",
    "NllbTokenizer",
    "PegasusTokenizer",
    "ReformerTokenizer",
    "RobertaTokenizer",
    "T5Tokenizer",
    "XGLMTokenizer",
    "XLMRobertaTokenizer",
];

/// How the classes of Qwen split words.
const QWEN2_WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN3_5_WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// How a checkpoint's tokenizer comes to be.
#[derive(Clone, PartialEq, Debug)]
pub enum Make {
    /// As tokenizer.json says.
    File,
    /// By a class that transformers 5 builds.
    Built(Class),
    /// By a class that transformers 5 builds and this tool does not.
    Unknown(String),
}

/// What a class has of its own.
#[derive(Clone, PartialEq, Debug)]
pub struct Class {
    pub name: String,
    normalizer: Value,
    pre_tokenizer: Value,
    units: Units,
    ends: Ends,
    pub stripped: Stripped,
}

/// What a BPE does with characters it doesn't know.
#[derive(Clone, PartialEq, Debug)]
struct Units {
    unk_token: Option<String>,
    fuse_unk: bool,
    byte_fallback: bool,
}

/// Special tokens that lose the flags they are given.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stripped {
    None,
    /// Those without a name of their own, such as `bos_token`.
    Unnamed,
    /// All.
    Special,
}

/// What a class puts around a plain text.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Ends {
    /// What tokenizer.json says.
    File,
    Nothing,
    Bos,
}

/// How transformers 5 makes the tokenizer of this checkpoint.
///
/// `config` is tokenizer_config.json, `model` config.json.
pub fn make(
    tokenizer: &Tokenizer,
    config: &Map<String, Value>,
    model: &Map<String, Value>,
) -> Make {
    let model_type = name_in(model, "model_type").unwrap_or_default();
    // Code of the checkpoint's own is not run: a class that is known here is taken by its name.
    let of_code = match config.get("auto_map") {
        Some(Value::Object(map)) => map.contains_key("AutoTokenizer"),
        other => other.is_some_and(Value::is_array),
    };
    let by_name = name_in(config, "tokenizer_class");
    let name = match of_code {
        true => by_name,
        false if READ_AS_THEY_ARE.contains(&model_type.as_str()) => None,
        false if ALWAYS_OF_MODEL.contains(&model_type.as_str()) => of_model(&model_type),
        false => by_name
            .or_else(|| name_in(model, "tokenizer_class"))
            .or_else(|| of_model(&model_type)),
    };
    let Some(name) = name else {
        return Make::File;
    };
    let is_llama = name == "LlamaTokenizer" && !of_code;
    if GENERIC.contains(&name.as_str()) || (is_llama && is_byte_level(tokenizer)) {
        return Make::File;
    }
    match class(&name, config) {
        Some(class) if matches!(tokenizer.get_model(), ModelWrapper::BPE(_)) => Make::Built(class),
        Some(_) => Make::Unknown(name),
        None if NOT_BUILT.contains(&name.as_str()) => Make::Unknown(name),
        None => Make::File,
    }
}

/// A name in a configuration file; classes that are fast and those that aren't are one.
pub fn name_in(config: &Map<String, Value>, key: &str) -> Option<String> {
    let name = config.get(key)?.as_str()?;
    Some(name.strip_suffix("Fast").unwrap_or(name).to_owned())
}

/// The class of a model whose checkpoint names none.
pub fn of_model(model_type: &str) -> Option<String> {
    let of = |(_, models): &&(&str, &[&str])| models.contains(&model_type);
    let found = OF_MODEL.iter().find(of);
    found.map(|(class, _)| (*class).to_owned())
}

/// By the words transformers looks for.
fn is_byte_level(tokenizer: &Tokenizer) -> bool {
    let step = serde_json::to_value(tokenizer.get_pre_tokenizer());
    let decoder = serde_json::to_value(tokenizer.get_decoder());
    let says =
        |v: Result<Value, _>| v.is_ok_and(|v: Value| v.to_string().contains("\"ByteLevel\""));
    says(step) || says(decoder)
}

fn class(name: &str, config: &Map<String, Value>) -> Option<Class> {
    let (normalizer, pre_tokenizer) = steps(name, config)?;
    let pieces = matches!(
        name,
        "LlamaTokenizer" | "CodeLlamaTokenizer" | "GemmaTokenizer"
    );
    let unk = config
        .get("unk_token")
        .and_then(token_text)
        .unwrap_or("<unk>");
    Some(Class {
        name: name.to_owned(),
        normalizer,
        pre_tokenizer,
        units: Units {
            unk_token: (pieces && name != "LlamaTokenizer").then(|| unk.to_owned()),
            fuse_unk: pieces,
            byte_fallback: pieces,
        },
        ends: match name {
            "GPTNeoXTokenizer" => Ends::Nothing,
            "CodeLlamaTokenizer" => Ends::Bos,
            _ => Ends::File,
        },
        stripped: match name {
            "Qwen2Tokenizer" => Stripped::Special,
            "CohereTokenizer" => Stripped::Unnamed,
            _ => Stripped::None,
        },
    })
}

/// The normalizer and pre_tokenizer of a class.
fn steps(name: &str, config: &Map<String, Value>) -> Option<(Value, Value)> {
    let says = |key: &str| config.get(key).and_then(Value::as_bool);
    let space = says("add_prefix_space");
    let words = |use_regex: bool| {
        let space = space.unwrap_or(false);
        json!({"type": "ByteLevel", "add_prefix_space": space, "trim_offsets": true, "use_regex": use_regex})
    };
    let spaces = |scheme: &str| json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": false});
    let sequence = |steps: Value| json!({"type": "Sequence", "pretokenizers": steps});
    let split = |pattern: Value, behavior: &str| json!({"type": "Split", "pattern": pattern, "behavior": behavior, "invert": false});
    let nfc = json!({"type": "NFC"});
    Some(match name {
        "LlamaTokenizer" | "CodeLlamaTokenizer" => {
            let legacy = name == "LlamaTokenizer" && says("legacy") == Some(true);
            let scheme = match (space, legacy) {
                (Some(false), _) => "never",
                (_, true) => "always",
                (_, false) => "first",
            };
            (Value::Null, spaces(scheme))
        }
        "GPT2Tokenizer" | "CodeGenTokenizer" => (Value::Null, words(true)),
        "GPTNeoXTokenizer" => (nfc, words(true)),
        "CohereTokenizer" => {
            let digits = json!({"type": "Digits", "individual_digits": true});
            (nfc, sequence(json!([digits, words(true)])))
        }
        "Qwen2Tokenizer" | "Qwen3_5Tokenizer" => {
            let pattern = match name {
                "Qwen2Tokenizer" => QWEN2_WORDS,
                _ => QWEN3_5_WORDS,
            };
            let split = split(json!({"Regex": pattern}), "Isolated");
            (nfc, sequence(json!([split, words(false)])))
        }
        "GemmaTokenizer" => (
            json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"}),
            split(json!({"String": " "}), "MergedWithPrevious"),
        ),
        _ => return None,
    })
}

/// Special tokens of checkpoints that don't name them, by class.
pub fn named(class: &str) -> &'static [(&'static str, &'static str)] {
    match class {
        "LlamaTokenizer" => &[
            ("unk_token", "<unk>"),
            ("bos_token", "<s>"),
            ("eos_token", "</s>"),
        ],
        "CodeLlamaTokenizer" => &[
            ("unk_token", "<unk>"),
            ("bos_token", "<s>"),
            ("eos_token", "</s>"),
            ("prefix_token", "▁<PRE>"),
            ("middle_token", "▁<MID>"),
            ("suffix_token", "▁<SUF>"),
            ("eot_token", "▁<EOT>"),
            ("fill_token", "<FILL_ME>"),
        ],
        "GPT2Tokenizer" | "CodeGenTokenizer" => &[
            ("unk_token", "<|endoftext|>"),
            ("bos_token", "<|endoftext|>"),
            ("eos_token", "<|endoftext|>"),
        ],
        "BloomTokenizer" => &[
            ("unk_token", "<unk>"),
            ("bos_token", "<s>"),
            ("eos_token", "</s>"),
            ("pad_token", "<pad>"),
        ],
        "GPTNeoXTokenizer" => &[
            ("unk_token", "<|endoftext|>"),
            ("bos_token", "<|endoftext|>"),
            ("eos_token", "<|endoftext|>"),
            ("pad_token", "<|padding|>"),
        ],
        "CohereTokenizer" => &[
            ("unk_token", "<UNK>"),
            ("bos_token", "<BOS_TOKEN>"),
            ("eos_token", "<|END_OF_TURN_TOKEN|>"),
            ("pad_token", "<PAD>"),
            ("cls_token", "<CLS>"),
            ("sep_token", "<SEP>"),
            ("mask_token", "<MASK_TOKEN>"),
        ],
        "Qwen2Tokenizer" | "Qwen3_5Tokenizer" => &[
            ("unk_token", "<|endoftext|>"),
            ("eos_token", "<|endoftext|>"),
            ("pad_token", "<|endoftext|>"),
        ],
        "GemmaTokenizer" => &[
            ("unk_token", "<unk>"),
            ("bos_token", "<bos>"),
            ("eos_token", "<eos>"),
            ("pad_token", "<pad>"),
            ("mask_token", "<mask>"),
        ],
        _ => &[],
    }
}

/// A token given as its text, or with flags.
pub fn token_text(token: &Value) -> Option<&str> {
    token.as_str().or_else(|| token["content"].as_str())
}

impl Class {
    /// The tokenizer of this class over the vocabulary and merges of `file`, without added tokens.
    ///
    /// # Errors
    /// A file whose vocabulary is no BPE's.
    pub fn build(&self, file: &Tokenizer) -> Result<Tokenizer> {
        let ModelWrapper::BPE(model) = file.get_model() else {
            bail!(
                "expected a BPE for the class {}, found another model",
                self.name
            );
        };
        let mut model = model.clone();
        model.unk_token = self.units.unk_token.clone();
        model.fuse_unk = self.units.fuse_unk;
        model.byte_fallback = self.units.byte_fallback;
        model.ignore_merges = false;
        model.continuing_subword_prefix = None;
        model.end_of_word_suffix = None;
        let mut built = Tokenizer::new(model);
        let normalizer: Option<tokenizers::NormalizerWrapper> =
            serde_json::from_value(self.normalizer.clone())?;
        let pre_tokenizer: Option<tokenizers::PreTokenizerWrapper> =
            serde_json::from_value(self.pre_tokenizer.clone())?;
        built
            .with_normalizer(normalizer)
            .map_err(|e| anyhow!("{e}"))?;
        built.with_pre_tokenizer(pre_tokenizer);
        built.with_decoder(file.get_decoder().cloned());
        if self.ends == Ends::File {
            built.with_post_processor(file.get_post_processor().cloned());
        }
        Ok(built)
    }

    /// Puts the class's own BOS around plain texts, where it has one.
    ///
    /// # Errors
    /// A BOS that is no token.
    pub fn finish(&self, built: &mut Tokenizer, bos: Option<&str>) -> Result<()> {
        match (self.ends, bos) {
            (Ends::Bos, Some(bos)) => put_around(built, Some(bos), None),
            _ => Ok(()),
        }
    }

    /// Whether other steps than the file's are taken.
    ///
    /// # Errors
    /// Steps that can't be written down.
    pub fn differs(&self, file: &Tokenizer) -> Result<bool> {
        let ModelWrapper::BPE(model) = file.get_model() else {
            return Ok(true);
        };
        let normalizer = serde_json::to_value(file.get_normalizer())?;
        let pre_tokenizer = serde_json::to_value(file.get_pre_tokenizer())?;
        let same_steps = plain(&normalizer) == plain(&self.normalizer)
            && plain(&pre_tokenizer) == plain(&self.pre_tokenizer);
        let same_units = model.byte_fallback == self.units.byte_fallback && !model.ignore_merges;
        Ok(!same_steps || !same_units)
    }
}

/// Puts these tokens, and no others, around plain texts.
///
/// # Errors
/// A text that is no token.
pub fn put_around(tokenizer: &mut Tokenizer, bos: Option<&str>, eos: Option<&str>) -> Result<()> {
    let special = |text: &str| json!({"SpecialToken": {"id": text, "type_id": 0}});
    let sequence = |id: &str, type_id: u32| json!({"Sequence": {"id": id, "type_id": type_id}});
    let around = |inner: Vec<Value>| {
        let mut all: Vec<Value> = bos.map(special).into_iter().collect();
        all.extend(inner);
        all.extend(eos.map(special));
        all
    };
    let mut tokens = Map::new();
    for text in bos.into_iter().chain(eos) {
        let id = tokenizer.token_to_id(text);
        let id = id.ok_or_else(|| anyhow!("expected a token of tokenizer.json, found {text:?}"))?;
        tokens.insert(
            text.into(),
            json!({"id": text, "ids": [id], "tokens": [text]}),
        );
    }
    let template = json!({
        "type": "TemplateProcessing",
        "single": around(vec![sequence("A", 0)]),
        "pair": around(vec![sequence("A", 0), sequence("B", 1)]),
        "special_tokens": tokens,
    });
    let template: PostProcessorWrapper = serde_json::from_value(template)?;
    tokenizer.with_post_processor(Some(template));
    Ok(())
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

    /// How a tokenizer of two pieces with these steps is made under a class.
    fn made(class: &str, steps: Value, model_type: &str) -> (Make, bool) {
        let mut file = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "decoder": null, "post_processor": null,
            "normalizer": null, "pre_tokenizer": null, "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
        });
        let steps = steps.as_object().unwrap().clone();
        file.as_object_mut().unwrap().extend(steps);
        let file = Tokenizer::from_bytes(file.to_string()).unwrap();
        let config = json!({"tokenizer_class": class, "legacy": true});
        let model = json!({"model_type": model_type});
        let make = make(
            &file,
            config.as_object().unwrap(),
            model.as_object().unwrap(),
        );
        let differs = match &make {
            Make::Built(class) => class.differs(&file).unwrap(),
            _ => false,
        };
        (make, differs)
    }

    #[test]
    fn what_a_class_builds_otherwise_is_told() {
        let prepend = json!({"type": "Prepend", "prepend": "▁"});
        let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
        let pieces = json!({"normalizer": {"type": "Sequence", "normalizers": [prepend, replace]}});
        for class in ["LlamaTokenizer", "LlamaTokenizerFast"] {
            let (make, differs) = made(class, pieces.clone(), "llama");
            let Make::Built(built) = make else {
                panic!("{make:?}");
            };
            assert!(differs && built.normalizer.is_null());
            assert_eq!(built.pre_tokenizer["prepend_scheme"], "always");
        }
        assert_eq!(made("LlamaTokenizer", pieces.clone(), "phi3").0, Make::File);
        assert_eq!(
            made("PreTrainedTokenizerFast", pieces.clone(), "llama").0,
            Make::File
        );
        assert_eq!(
            made("T5Tokenizer", pieces, "t5").0,
            Make::Unknown("T5Tokenizer".into())
        );
        let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
        let bytes =
            json!({"normalizer": {"type": "Sequence", "normalizers": []}, "pre_tokenizer": bytes});
        assert!(matches!(
            made("GPT2TokenizerFast", bytes.clone(), "gpt2"),
            (Make::Built(_), false)
        ));
        assert_eq!(made("LlamaTokenizer", bytes.clone(), "llama").0, Make::File);
        assert!(made("GPTNeoXTokenizer", bytes.clone(), "gpt_neox").1);
        let (make, _) = made("GPT2Tokenizer", bytes, "qwen2");
        assert!(matches!(make, Make::Built(class) if class.name == "Qwen2Tokenizer"));
    }
}
