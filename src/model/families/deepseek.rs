//! DeepSeek-V3 and R1 (arXiv:2412.19437; transformers
//! models/deepseek_v3/configuration_deepseek_v3.py): keys and values through one narrow latent,
//! experts chosen by group behind a sigmoid router, a shared expert; published with 8-bit weights.

use anyhow::{Result, ensure};

use super::common::{
    Biases, Defaults, Sizes, activation, eps, gated_mlp, inverse_root, layer_name, llama_layer,
    llama_like,
};
use super::experts::{Counts, gated_experts};
use crate::backend::{
    Activation, AttentionShape, Lines, Mask, RopePairs, RopeShape, RouterGroups, RouterRule,
    RouterScore, Weighs,
};
use crate::model::config::Config;
use crate::model::description::{
    Attention, Bias, Description, Experts, Keys, LayerRope, Mlp, Norm, Projection, QkNormAt, Query,
    WeightSpec,
};
use crate::model::rope::{Rope, RopeFamily, yarn_mscale};

const DEFAULTS: Defaults = Defaults {
    hidden: 7168,
    vocab: 129_280,
    inner: 18_432,
    layers: 61,
    heads: 128,
    kv_heads: Some(128),
    head_dim: Some(64),
    context: 4096,
};

/// Norms of latents don't take the config's eps (modeling_deepseek_v3.py, DeepseekV3RMSNorm).
const LATENT_EPS: f32 = 1e-6;

pub fn describe(config: &Config) -> Result<Description> {
    config.ignore(&["qk_head_dim"]);
    let sizes = Sizes::read(config, &DEFAULTS)?;
    let activation = activation(config, "hidden_act", "silu")?;
    let eps = eps(config, "rms_norm_eps", 1e-6)?;
    let norm = |name: String| Norm::rms(format!("{name}.weight"), eps, sizes.hidden);
    let latent = Latent::read(config, &sizes)?;
    let mixture = Mixture::read(config, activation)?;
    let layers = (0..sizes.layers).map(|i| {
        let mut layer = llama_layer(&sizes, i, Biases::default(), activation, &norm);
        layer.attention = latent.attention(i);
        if i >= mixture.first {
            layer.mlp = Mlp::Experts(mixture.experts(i, sizes.hidden));
        }
        layer
    });
    let rope = RopeFamily::new(10_000.0, latent.rotated, sizes.context);
    let mut description = llama_like(
        "deepseek_v3",
        &sizes,
        layers.collect(),
        norm("model.norm".to_owned()),
        config.bool_or("tie_word_embeddings", false)?,
        vec![Rope::read(config, rope)?],
    );
    // Layers that guess further tokens; they stand behind those that decode.
    let extra = match config.count_or("num_nextn_predict_layers", 1)? {
        0 => 0,
        _ => config.layers("num_nextn_predict_layers", 1)?,
    };
    let extra = (0..extra).map(|n| format!("model.layers.{}.*", sizes.layers + n));
    description.names.unread.extend(extra);
    Ok(description)
}

/// Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).
struct Latent {
    hidden: usize,
    heads: usize,
    q_rank: Option<usize>,
    kv_rank: usize,
    plain: usize,
    rotated: usize,
    value: usize,
    bias: Bias,
    scale: f32,
    pairs: RopePairs,
}

impl Latent {
    fn read(config: &Config, sizes: &Sizes) -> Result<Latent> {
        ensure!(
            sizes.heads == sizes.kv_heads,
            config.error(
                "num_key_value_heads",
                &format!(
                    "expected num_attention_heads {}, found {}",
                    sizes.heads, sizes.kv_heads
                )
            )
        );
        let plain = config.usize_or("qk_nope_head_dim", 128)?;
        let rotated = config.usize_or("qk_rope_head_dim", 64)?;
        let mscale = mscale(config)?;
        Ok(Latent {
            hidden: sizes.hidden,
            heads: sizes.heads,
            q_rank: config.usize_or_none("q_lora_rank", Some(1536))?,
            kv_rank: config.usize_or("kv_lora_rank", 512)?,
            plain,
            rotated,
            value: config.usize_or("v_head_dim", 128)?,
            bias: config.bool_or("attention_bias", false)?.into(),
            scale: (f64::from(inverse_root((plain + rotated) as f64)) * mscale * mscale) as f32,
            pairs: match config.bool_or("rope_interleave", true)? {
                true => RopePairs::Neighbours,
                false => RopePairs::Halves,
            },
        })
    }

    fn attention(&self, i: usize) -> Attention {
        let name = |part: &str| layer_name(i, &format!("self_attn.{part}"));
        let head_dim = self.plain + self.rotated;
        let rope = RopeShape {
            head_dim,
            start: self.plain,
            pairs: self.pairs,
        };
        let out = [self.hidden, self.heads * self.value];
        Attention {
            query: self.query(&name, self.heads * head_dim),
            keys: self.keys(&name),
            o: Projection::new(&name("o_proj"), out, self.bias),
            shape: AttentionShape {
                heads: self.heads,
                kv_heads: self.heads,
                head_dim,
                value_dim: self.value,
                scale: self.scale,
                cap: None,
                mask: Mask::Causal,
            },
            q_norm: None,
            k_norm: None,
            qk_norm_at: QkNormAt::BeforeRope,
            clip: None,
            rope: Some(LayerRope {
                table: 0,
                shape: rope,
            }),
            sinks: None,
            tempered: false,
        }
    }

    fn query(&self, name: &dyn Fn(&str) -> String, width: usize) -> Query {
        let Some(rank) = self.q_rank else {
            return Query::Full(Projection::new(
                &name("q_proj"),
                [width, self.hidden],
                Bias::Absent,
            ));
        };
        Query::Latent {
            down: Projection::new(&name("q_a_proj"), [rank, self.hidden], self.bias),
            norm: Norm::rms(name("q_a_layernorm.weight"), LATENT_EPS, rank),
            up: Projection::new(&name("q_b_proj"), [width, rank], Bias::Absent),
        }
    }

    /// One tensor makes the latent and the rotated keys; another, head by head, makes of the
    /// latent what is left of the keys, then the values.
    fn keys(&self, name: &dyn Fn(&str) -> String) -> Keys {
        let rank = self.kv_rank;
        let down = [rank + self.rotated, self.hidden];
        let down = Projection::new(&name("kv_a_proj_with_mqa"), down, self.bias);
        let each = self.plain + self.value;
        let up = [self.heads * each, rank];
        let up = Projection::new(&name("kv_b_proj"), up, Bias::Absent);
        let of_each = |start, group| {
            let lines = Lines {
                start,
                group,
                step: each,
            };
            up.clone().lines(lines, self.heads * group)
        };
        Keys::Latent {
            norm: Norm::rms(name("kv_a_layernorm.weight"), LATENT_EPS, rank),
            k: of_each(0, self.plain),
            v: of_each(self.plain, self.value),
            rotated: down.clone().lines(Lines::from(rank), self.rotated),
            down: down.lines(Lines::from(0), rank),
        }
    }
}

/// What YaRN adds to the scale of the scores (modeling_deepseek_v3.py, yarn_apply_mscale).
fn mscale(config: &Config) -> Result<f64> {
    let older = config.object("rope_scaling")?;
    let Some(rope) = config.object("rope_parameters")?.or(older) else {
        return Ok(1.0);
    };
    let kind = rope.str("rope_type")?.or(rope.str("type")?);
    match (kind, rope.weight("mscale_all_dim")?) {
        (None | Some("default"), _) | (_, None) => Ok(1.0),
        (Some(_), Some(all)) => {
            let factor = rope.required("factor", rope.positive("factor")?)?;
            Ok(yarn_mscale(factor, all))
        }
    }
}

struct Mixture {
    /// The layers before it are dense.
    first: usize,
    inner: usize,
    counts: Counts,
    shared: usize,
    rule: RouterRule,
    activation: Activation,
}

impl Mixture {
    fn read(config: &Config, activation: Activation) -> Result<Mixture> {
        // Published files name the one way that transformers implements.
        config.one_of("topk_method", "noaux_tc", &["noaux_tc"])?;
        config.one_of("scoring_func", "sigmoid", &["sigmoid"])?;
        ensure!(
            config.usize_or("moe_layer_freq", 1)? == 1,
            config.error("moe_layer_freq", "expected 1, found another number")
        );
        let defaults = Counts {
            experts: 256,
            chosen: 8,
        };
        let keys = ["num_local_experts", "n_routed_experts"];
        let counts = Counts::read(config, &keys, defaults)?;
        let groups = RouterGroups {
            count: config.usize_or("n_group", 8)?,
            kept: config.usize_or("topk_group", 4)?,
        };
        check_groups(config, counts, groups)?;
        Ok(Mixture {
            first: config.count_or("first_k_dense_replace", 3)?,
            inner: config.usize_or("moe_intermediate_size", 2048)?,
            counts,
            shared: config.usize_or("n_shared_experts", 1)?,
            rule: RouterRule {
                chosen: counts.chosen,
                score: RouterScore::Sigmoid,
                renormalise: config.bool_or("norm_topk_prob", true)?,
                groups: Some(groups),
                scale: config.positive_or("routed_scaling_factor", 2.5)? as f32,
                weighs: Weighs::Outputs,
            },
            activation,
        })
    }

    fn experts(&self, i: usize, hidden: usize) -> Experts {
        let mlp = layer_name(i, "mlp");
        let shape = [hidden, self.inner];
        let experts = gated_experts(&mlp, shape, self.counts, self.rule, self.activation);
        let correction = format!("{mlp}.gate.e_score_correction_bias");
        let shared = format!("{mlp}.shared_experts");
        let inner = self.inner * self.shared;
        Experts {
            correction: Some(WeightSpec::new(correction, &[self.counts.experts])),
            shared: Some(gated_mlp(&shared, [hidden, inner], false, self.activation)),
            ..experts
        }
    }
}

/// Groups are of two experts or more, and those kept hold as many as a token takes.
fn check_groups(config: &Config, counts: Counts, groups: RouterGroups) -> Result<()> {
    let each = counts.experts / groups.count;
    ensure!(
        counts.experts.is_multiple_of(groups.count) && each >= 2,
        config.error(
            "n_group",
            &format!(
                "expected groups of equal size, two or more, of {} experts, found {} groups",
                counts.experts, groups.count
            )
        )
    );
    ensure!(
        groups.kept <= groups.count && groups.kept * each >= counts.chosen,
        config.error(
            "topk_group",
            &format!(
                "expected at most {} groups that hold {} experts together, found {}",
                groups.count, counts.chosen, groups.kept
            )
        )
    );
    Ok(())
}
