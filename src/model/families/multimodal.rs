//! The text part of checkpoints that read images too: its config is nested under `text_config`
//! (or, in early Qwen2-VL files, lies among the other keys) and its tensors carry a prefix.
//! Without an image, each scores as its text family does.

use anyhow::{Result, ensure};

use super::{gemma, llama4, mistral, qwen};
use crate::model::config::Config;
use crate::model::description::Description;

/// As published with transformers 4, as transformers 5 names the modules, and without a prefix.
const SPELLINGS: &[&[(&str, &str)]] = &[
    &[
        ("model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
    ],
    &[("model.", "model.language_model.")],
    &[],
];

/// Keys about images and about where they go among the tokens.
const IMAGES: &[&str] = &[
    "boi_token_index",
    "boi_token_id",
    "eoi_token_index",
    "eoi_token_id",
    "image_token_index",
    "image_token_id",
    "mm_tokens_per_image",
    "multimodal_projector_bias",
    "projector_hidden_act",
    "spatial_merge_size",
    "video_token_id",
    "vision_config",
    "vision_end_token_id",
    "vision_feature_layer",
    "vision_start_token_id",
    "vision_token_id",
];

pub fn gemma3(config: &Config) -> Result<Description> {
    describe(config, "gemma3_text", true, gemma::describe3)
}

pub fn mistral3(config: &Config) -> Result<Description> {
    describe(config, "mistral", true, mistral::describe)
}

pub fn llama4(config: &Config) -> Result<Description> {
    describe(config, "llama4_text", false, llama4::describe)
}

pub fn qwen2_vl(config: &Config) -> Result<Description> {
    describe(config, "qwen2_vl_text", false, qwen::describe2_vl)
}

pub fn qwen2_5_vl(config: &Config) -> Result<Description> {
    describe(config, "qwen2_5_vl_text", false, qwen::describe2_vl)
}

pub fn qwen3_vl(config: &Config) -> Result<Description> {
    describe(config, "qwen3_vl_text", false, qwen::describe3_vl)
}

/// `tied`: whether the wrapper's class ties head and embedding by default.
fn describe(
    config: &Config,
    text_type: &str,
    tied: bool,
    text: fn(&Config) -> Result<Description>,
) -> Result<Description> {
    config.ignore(IMAGES);
    let nested = config.object("text_config")?;
    if let Some(nested) = &nested {
        let found = nested.str("model_type")?.unwrap_or(text_type);
        ensure!(
            found == text_type,
            nested.error(
                "model_type",
                &format!("expected {text_type:?}, found {found:?}, which is not supported here")
            )
        );
    }
    let text_config = nested.as_ref().unwrap_or(config);
    let mut description = text(text_config)?;
    let of_text = text_config.bool_or("tie_word_embeddings", false)?;
    description.head.tied = config.bool_or("tie_word_embeddings", tied)? || of_text;
    description.names.spellings = SPELLINGS;
    Ok(description)
}
