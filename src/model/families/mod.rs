//! The families kdscore knows: for each, a function from config.json to a [`Description`].
//!
//! # Adding a family
//!
//! One small file here and one golden. Granite, in `granite.rs`, is a good example: it is Llama
//! but for four factors.
//!
//! 1. Read transformers' `configuration_NAME.py` for the keys and their defaults, and
//!    `modeling_NAME.py` for what is done with them. Write the defaults down as `DEFAULTS`: a key
//!    that is absent takes the class' default, not Llama's.
//! 2. Take what is shared from `common.rs` (`Sizes::read`, `llama_layer`, `llama_like`) and change
//!    what differs, as data: Granite sets `layer.residual_scale`, `attention.shape.scale`,
//!    `embedding_scale` and `head.scale`. If the data can't say it, add a field to the
//!    description, what it does to the decoder, and an op to the backend if none does it yet;
//!    never a branch on a family's name below this folder.
//! 3. Read every key that could change a number, by a method of [`Config`] that checks it. A key
//!    that nothing reads is an error to the user, unless it is in [`HARMLESS`] or the family says
//!    `config.ignore` and why.
//! 4. Add a line to `FAMILIES`: `model_type`, the architecture's name, the function.
//! 5. Add a tiny teacher to `TEACHERS` in `scripts/make_teachers.py`, with the changes to its
//!    config that must change the scores, and run the script for it (`--only NAME`). Then
//!    `cargo test --test families` compares the scores under each of its configs, switches every
//!    feature off in turn, and mutates every key and tensor. Absent keys that change the scores
//!    need what transformers says of them: `scripts/make_drops.py`.

mod cohere;
mod common;
mod deepseek;
mod exaone4;
mod experts;
mod gemma;
mod glm4;
mod gpt2;
mod gpt_neox;
mod gpt_oss;
mod granite;
mod llama;
mod llama4;
mod mistral;
mod mixtral;
mod multimodal;
mod nemotron;
mod olmo;
mod olmoe;
mod phi;
mod phi3;
mod qwen;
mod qwen_moe;
mod smollm3;
mod stablelm;
mod starcoder2;

use anyhow::{Result, bail};

use super::config::Config;
use super::description::Description;

/// Keys that change no score: names, token numbers, training, generation, storage.
pub const HARMLESS: &[&str] = &[
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "auto_map",
    "aux_loss_alpha",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "cla_share_factor",
    "classifier_dropout",
    "dtype",
    "embd_pdrop",
    "embedding_dropout",
    "eos_token_id",
    "ep_size",
    "finetuning_task",
    "hidden_dropout",
    "hidden_dropout_prob",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_encoder_decoder",
    "is_llama_config",
    "keys_to_ignore_at_inference",
    "label2id",
    "license",
    "max_length",
    "max_sequence_length",
    "model_type",
    "num_labels",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "resid_pdrop",
    "residual_dropout",
    "return_dict",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "sep_token_id",
    "seq_aux",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "task_specific_params",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
];

struct Family {
    /// `model_type` in config.json.
    model_type: &'static str,
    /// What `architectures` must name, where it is given.
    architecture: &'static str,
    describe: fn(&Config) -> Result<Description>,
}

const fn family(
    model_type: &'static str,
    architecture: &'static str,
    describe: fn(&Config) -> Result<Description>,
) -> Family {
    Family {
        model_type,
        architecture,
        describe,
    }
}

const FAMILIES: &[Family] = &[
    family("llama", "LlamaForCausalLM", llama::describe),
    family("mistral", "MistralForCausalLM", mistral::describe),
    family("qwen2", "Qwen2ForCausalLM", qwen::describe2),
    family("qwen3", "Qwen3ForCausalLM", qwen::describe3),
    family("gemma", "GemmaForCausalLM", gemma::describe1),
    family("gemma2", "Gemma2ForCausalLM", gemma::describe2),
    family("gemma3_text", "Gemma3ForCausalLM", gemma::describe3),
    family("phi", "PhiForCausalLM", phi::describe),
    family("phi3", "Phi3ForCausalLM", phi3::describe),
    family("olmo2", "Olmo2ForCausalLM", olmo::describe2),
    family("olmo3", "Olmo3ForCausalLM", olmo::describe3),
    family("granite", "GraniteForCausalLM", granite::describe),
    family("cohere", "CohereForCausalLM", cohere::describe1),
    family("cohere2", "Cohere2ForCausalLM", cohere::describe2),
    family("gpt2", "GPT2LMHeadModel", gpt2::describe),
    family("gpt_neox", "GPTNeoXForCausalLM", gpt_neox::describe),
    family("stablelm", "StableLmForCausalLM", stablelm::describe),
    family("starcoder2", "Starcoder2ForCausalLM", starcoder2::describe),
    family("smollm3", "SmolLM3ForCausalLM", smollm3::describe),
    family("glm4", "Glm4ForCausalLM", glm4::describe),
    family("nemotron", "NemotronForCausalLM", nemotron::describe),
    family("exaone4", "Exaone4ForCausalLM", exaone4::describe),
    family("mixtral", "MixtralForCausalLM", mixtral::describe),
    family("qwen2_moe", "Qwen2MoeForCausalLM", qwen_moe::describe2),
    family("qwen3_moe", "Qwen3MoeForCausalLM", qwen_moe::describe3),
    family("olmoe", "OlmoeForCausalLM", olmoe::describe),
    family("gpt_oss", "GptOssForCausalLM", gpt_oss::describe),
    family("deepseek_v3", "DeepseekV3ForCausalLM", deepseek::describe),
    family("llama4_text", "Llama4ForCausalLM", llama4::describe),
    family(
        "gemma3",
        "Gemma3ForConditionalGeneration",
        multimodal::gemma3,
    ),
    family(
        "mistral3",
        "Mistral3ForConditionalGeneration",
        multimodal::mistral3,
    ),
    family(
        "llama4",
        "Llama4ForConditionalGeneration",
        multimodal::llama4,
    ),
    family(
        "qwen2_vl",
        "Qwen2VLForConditionalGeneration",
        multimodal::qwen2_vl,
    ),
    family(
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        multimodal::qwen2_5_vl,
    ),
    family(
        "qwen3_vl",
        "Qwen3VLForConditionalGeneration",
        multimodal::qwen3_vl,
    ),
];

/// # Errors
/// An architecture that is not supported, by name and with the list of those that are; or a key
/// that can't be honoured.
pub fn describe(config: &Config) -> Result<Description> {
    let supported = || {
        let names: Vec<_> = FAMILIES.iter().map(|f| f.model_type).collect();
        format!("supported: {}", names.join(", "))
    };
    let found = config.str("model_type")?.unwrap_or_default();
    let Some(family) = FAMILIES.iter().find(|f| f.model_type == found) else {
        bail!(config.error(
            "model_type",
            &format!(
                "expected a supported architecture, found {found:?}; {}",
                supported()
            )
        ));
    };
    let architectures = config.strings("architectures")?.unwrap_or_default();
    if !architectures.is_empty() && !architectures.contains(&family.architecture) {
        bail!(config.error(
            "architectures",
            &format!(
                "expected {} for model_type {:?}, found {architectures:?}: not a causal language model of that family; {}",
                family.architecture,
                family.model_type,
                supported()
            )
        ));
    }
    let fp8_block = quantisation(config, family.model_type)?;
    let description = (family.describe)(config)?;
    // Where each kind of layer has a rope of its own, max_position_embeddings holds.
    let reach = match description.ropes.as_slice() {
        [only] => only.reach,
        _ => 0,
    };
    Ok(Description {
        fp8_block,
        context: description.context.max(reach),
        ..description
    })
}

/// The block of 8-bit weights, where the checkpoint has them. What can't be decoded exactly is
/// refused by name.
fn quantisation(config: &Config, model_type: &str) -> Result<Option<usize>> {
    let Some(quantised) = config.object("quantization_config")? else {
        return Ok(None);
    };
    // What was left alone shows in the tensors themselves; activations stay f32.
    quantised.ignore(&["modules_to_not_convert", "activation_scheme", "dequantize"]);
    match quantised.str("quant_method")?.unwrap_or_default() {
        "mxfp4" if model_type == "gpt_oss" => Ok(None),
        "fp8" => {
            quantised.one_of("fmt", "e4m3", &["e4m3"])?;
            let block = quantised.numbers("weight_block_size")?.unwrap_or_default();
            match block.as_slice() {
                [lines, columns] if lines == columns && *lines >= 1.0 && lines.fract() == 0.0 => {
                    Ok(Some(*lines as usize))
                }
                other => bail!(quantised.error(
                    "weight_block_size",
                    &format!("expected two equal sizes, such as [128, 128], found {other:?}")
                )),
            }
        }
        other => bail!(quantised.error(
            "quant_method",
            &format!(
                "expected mxfp4 (gpt_oss) or fp8 in blocks, found {other:?}, which is not supported; use the checkpoint with bf16, f16 or f32 weights"
            )
        )),
    }
}
