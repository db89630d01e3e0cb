//! What the mixtures share: a list of experts behind a router.

use anyhow::{Result, ensure};

use super::common::gated_mlp;
use crate::backend::{Activation, ExpertsRule, RouterRule, RouterScore, Weighs};
use crate::model::config::Config;
use crate::model::description::{Bias, DenseMlp, Experts, Projection};

/// Few enough that each of every layer may be described.
const EXPERTS_MAX: usize = 1024;

/// How many experts there are, and how many a token takes.
#[derive(Clone, Copy, Debug)]
pub struct Counts {
    pub experts: usize,
    pub chosen: usize,
}

impl Counts {
    /// The number of experts stands under one of `keys`.
    ///
    /// # Errors
    /// More chosen than there are.
    pub fn read(config: &Config, keys: &[&str], defaults: Counts) -> Result<Counts> {
        let mut experts = defaults.experts;
        for key in keys {
            experts = config.usize_or(key, experts)?;
        }
        ensure!(
            experts <= EXPERTS_MAX,
            config.error(
                keys[keys.len() - 1],
                &format!("expected at most {EXPERTS_MAX} experts, found {experts}")
            )
        );
        let chosen = config.usize_or("num_experts_per_tok", defaults.chosen)?;
        ensure!(
            chosen <= experts,
            config.error(
                "num_experts_per_tok",
                &format!("expected at most {experts}, the number of experts, found {chosen}")
            )
        );
        Ok(Counts { experts, chosen })
    }
}

/// The softmax over all experts weighs the chosen.
pub fn softmax_rule(counts: Counts, renormalise: bool) -> RouterRule {
    RouterRule {
        chosen: counts.chosen,
        score: RouterScore::Softmax,
        renormalise,
        groups: None,
        scale: 1.0,
        weighs: Weighs::Outputs,
    }
}

/// A router under `router` and experts made by `expert`.
pub fn experts(
    router: &str,
    hidden: usize,
    counts: Counts,
    rule: ExpertsRule,
    expert: &dyn Fn(usize) -> DenseMlp,
) -> Experts {
    Experts {
        router: Projection::new(router, [counts.experts, hidden], Bias::Absent),
        correction: None,
        rule,
        list: (0..counts.experts).map(expert).collect(),
        shared: None,
        shared_gate: None,
    }
}

/// Experts under `mlp`.experts.{e}, the router under `mlp`.gate.
pub fn gated_experts(
    mlp: &str,
    [hidden, inner]: [usize; 2],
    counts: Counts,
    router: RouterRule,
    activation: Activation,
) -> Experts {
    let rule = ExpertsRule { router, activation };
    let expert = |e: usize| {
        gated_mlp(
            &format!("{mlp}.experts.{e}"),
            [hidden, inner],
            false,
            activation,
        )
    };
    experts(&format!("{mlp}.gate"), hidden, counts, rule, &expert)
}
