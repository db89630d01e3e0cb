//! What `plan` is asked, resolved.

use anyhow::{Result, anyhow, ensure};

use super::{ScoreSettings, at_least_one, within};
use crate::cli::{PlanArgs, ScoreArgs};
use crate::gpu::{self, Gpu};

/// Which devices to plan for.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum GpuChoice {
    /// Every one that is known.
    Any,
    /// This machine's processor.
    Cpu,
    Named(&'static Gpu),
}

/// Everything `plan` needs, resolved.
#[derive(Clone, Debug)]
pub struct PlanSettings {
    /// Its corpus is empty where `has_corpus` is false, its out always.
    pub score: ScoreSettings,
    pub has_corpus: bool,
    pub tokens: Option<u64>,
    pub rows: Option<u64>,
    pub length: Option<usize>,
    pub gpu: GpuChoice,
    pub peak_tflops: Option<f64>,
    /// `None`: assumed.
    pub mfu: Option<f64>,
    pub price: Option<f64>,
    pub count: u64,
    pub reclaim_per_hour: f64,
    pub commit_seconds: f64,
    /// One batch by kernel, instead of the bill.
    pub kernels: bool,
}

impl PlanSettings {
    pub fn resolve(mut score: ScoreArgs, args: PlanArgs) -> Result<PlanSettings> {
        let has_corpus = score.corpus.is_some();
        score.corpus.get_or_insert_default();
        score.out.get_or_insert_default();
        ensure!(
            args.rows
                .is_none_or(|rows| args.tokens.is_some_and(|tokens| rows <= tokens)),
            "rows: expected at most --tokens, found {}",
            args.rows.unwrap_or_default()
        );
        for (option, given) in [("tokens", args.tokens), ("count", args.count)] {
            ensure!(given != Some(0), "{option}: expected at least 1, found 0");
        }
        ensure!(
            !has_corpus || args.tokens.is_none(),
            "tokens: expected --corpus or --tokens, found both"
        );
        Ok(PlanSettings {
            score: ScoreSettings::resolve(score)?,
            has_corpus,
            tokens: args.tokens,
            rows: args.rows,
            length: at_least_one(args.length, "length")?,
            gpu: match args.gpu.as_deref() {
                None => GpuChoice::Any,
                Some(name) if name.eq_ignore_ascii_case("cpu") => GpuChoice::Cpu,
                Some(name) => GpuChoice::Named(named_gpu(name)?),
            },
            peak_tflops: within(args.peak_tflops, "peak-tflops", f64::MAX)?,
            mfu: within(args.mfu, "mfu", 1.0)?,
            price: within(args.price, "price", f64::MAX)?,
            count: args.count.unwrap_or(1),
            reclaim_per_hour: args.reclaim_per_hour.unwrap_or(0.05),
            commit_seconds: within(args.commit_seconds, "commit-seconds", f64::MAX)?.unwrap_or(2.0),
            kernels: args.kernels.unwrap_or(false),
        })
    }
}

fn named_gpu(name: &str) -> Result<&'static Gpu> {
    Gpu::find(name).ok_or_else(|| {
        let names: Vec<_> = gpu::TABLE.iter().map(|gpu| gpu.name).collect();
        anyhow!(
            "gpu: expected cpu, {}, found {name:?}; for another device give --peak-tflops without --gpu",
            names.join(", ")
        )
    })
}
