//! The families kdscore knows: for each, a function from config.json to a [`Description`].

mod llama;

use anyhow::{Result, bail};

use super::config::Config;
use super::description::Description;

struct Family {
    /// `model_type` in config.json.
    model_type: &'static str,
    /// What `architectures` must name, where it is given.
    architecture: &'static str,
    describe: fn(&Config) -> Result<Description>,
}

const FAMILIES: &[Family] = &[Family {
    model_type: "llama",
    architecture: "LlamaForCausalLM",
    describe: llama::describe,
}];

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
