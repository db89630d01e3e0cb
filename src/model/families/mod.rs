//! The families kdscore knows: for each, a function from config.json to a [`Description`].

mod cohere;
mod common;
mod exaone4;
mod gemma;
mod glm4;
mod gpt2;
mod gpt_neox;
mod granite;
mod llama;
mod mistral;
mod nemotron;
mod olmo;
mod phi;
mod phi3;
mod qwen;
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
    "chunk_size_feed_forward",
    "classifier_dropout",
    "cla_share_factor",
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
    "seq_aux",
    "sep_token_id",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "task_specific_params",
    "torch_dtype",
    "torchscript",
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
    let architectures = config.strings("architectures")?;
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
    if config.value("quantization_config").is_some() {
        bail!(config.error(
            "quantization_config",
            "expected bf16, f16 or f32 weights, found quantised ones, which are not supported"
        ));
    }
    (family.describe)(config)
}
