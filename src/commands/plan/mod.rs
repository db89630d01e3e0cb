//! `plan`: the bill from config.json and the corpus's lengths, before a weight is loaded.

mod kernels;
mod show;
mod size;

use anyhow::{Result, anyhow, ensure};
use serde_json::json;

use self::show::offers_table;
use self::size::Size;
use super::score::forecast::MFU_ASSUMED;
use super::score::setup::stand_in_identity;
use super::text;
use super::{Outcome, Status, machine};
use crate::backend::Backend;
use crate::backend::cpu::Cpu;
use crate::config::{GpuChoice, PlanSettings};
use crate::cost::RunShape;
use crate::cost::bill::{Bill, Devices, shard_advice};
use crate::cost::device::{DeviceFit, fit};
use crate::gpu::{Gpu, TABLE};
use crate::model::{Description, Limits, Parameters, Work, describe};
use crate::store::size::{SetBytes, ShardCounts};
use crate::store::{Job, PlannedShard};

/// Most tokens of a batch, and most rows of a logits slice, on a GPU.
const GPU_TOKENS: usize = 16_384;
const GPU_HEAD_CHUNK: usize = 1024;

/// # Errors
/// A config that can't be honoured, a corpus that can't be read, or no size to plan for.
pub fn plan(settings: &PlanSettings) -> Result<Outcome> {
    if settings.kernels {
        return kernels::kernels(settings);
    }
    let description = describe(&settings.score.teacher)?;
    let size = Size::of(settings, &description)?;
    let vocab = settings.score.vocab_limit.unwrap_or(description.vocab);
    ensure!(
        vocab <= description.vocab && settings.score.products.k <= vocab,
        "expected k {} <= vocab-limit {vocab} <= {}, the rows of the teacher's head",
        settings.score.products.k,
        description.vocab
    );
    let provenance = json!({
        "device": Cpu.provenance(), "kdscore": machine::build(),
        "token_budget": GPU_TOKENS, "head_chunk": GPU_HEAD_CHUNK,
    });
    let job = Job {
        identity: stand_in_identity(&settings.score.products, [vocab, description.vocab]),
        plan: size.plan.clone(),
        corpus_path: settings.score.corpus.to_string_lossy().into_owned(),
    };
    let planned = Planned {
        settings,
        parameters: description.parameters(),
        work: description.work(&size.demand, vocab),
        bytes: job.predicted_bytes(&size.counts, &provenance)?,
        vocab,
        description: &description,
        size,
    };
    planned.outcome()
}

/// Everything a plan says that doesn't depend on the device.
struct Planned<'a> {
    settings: &'a PlanSettings,
    description: &'a Description,
    parameters: Parameters,
    size: Size,
    work: Work,
    bytes: SetBytes,
    vocab: usize,
}

/// One kind of device, and what the job costs on it.
struct Offer {
    name: String,
    devices: Devices,
    fit: DeviceFit,
    memory: u64,
    limits: Limits,
    bill: Bill,
    source: String,
}

impl Planned<'_> {
    fn outcome(&self) -> Result<Outcome> {
        let offers = self.offers()?;
        let chosen = (offers.len() == 1).then(|| &offers[0]);
        let advice = chosen.and_then(|offer| {
            let settings = self.settings;
            shard_advice(settings.reclaim_per_hour, settings.commit_seconds)
                .map(|advice| (advice, offer))
        });
        let mut text = text::facts(&self.facts());
        text += "\n";
        text += &offers_table(&offers);
        if let Some(offer) = chosen {
            text += &format!("\n{}", text::facts(&self.offer_facts(offer)));
        }
        if let Some((advice, offer)) = advice {
            text += &self.advice_text(&advice, offer);
        }
        Ok(Outcome {
            text,
            json: self.json(
                &offers,
                advice.map(|(advice, offer)| self.advice_json(&advice, offer)),
            ),
            status: Status::Done,
        })
    }

    fn offers(&self) -> Result<Vec<Offer>> {
        let settings = self.settings;
        match (&settings.gpu, settings.peak_tflops) {
            (GpuChoice::Any, None) => {
                let known = TABLE.iter().filter_map(|gpu| Some((gpu, gpu.bf16_tflops?)));
                Ok(known.map(|(gpu, peak)| self.offer_of(gpu, peak)).collect())
            }
            (GpuChoice::Any, Some(peak)) => {
                let peak = peak * 1e12;
                Ok(vec![self.offer("the device", peak, 0, 2, "--peak-tflops")])
            }
            (GpuChoice::Cpu, peak) => {
                let (peak, source) = match peak {
                    Some(peak) => (peak * 1e12, "--peak-tflops"),
                    None => (Cpu::peak_flops(), "f32 products, measured now"),
                };
                let memory = machine::memory_available().unwrap_or(0);
                Ok(vec![self.offer("this CPU", peak, memory, 4, source)])
            }
            (GpuChoice::Named(gpu), peak) => {
                if let Some(peak) = peak {
                    let memory = gpu.memory_bytes();
                    return Ok(vec![self.offer(
                        gpu.name,
                        peak * 1e12,
                        memory,
                        2,
                        "--peak-tflops",
                    )]);
                }
                let peak = gpu.bf16_tflops.ok_or_else(|| {
                    anyhow!(
                        "gpu: {}: expected a device with bf16 products, found none ({}); --peak-tflops sets a peak",
                        gpu.name,
                        gpu.source
                    )
                })?;
                Ok(vec![self.offer_of(gpu, peak)])
            }
        }
    }

    fn offer_of(&self, gpu: &Gpu, peak_tflops: f64) -> Offer {
        self.offer(
            gpu.name,
            peak_tflops * 1e12,
            gpu.memory_bytes(),
            2,
            gpu.source,
        )
    }

    fn offer(&self, name: &str, peak: f64, memory: u64, number_bytes: u64, source: &str) -> Offer {
        let devices = Devices {
            peak_flops: peak,
            mfu: self.settings.mfu.unwrap_or(MFU_ASSUMED),
            count: self.settings.count,
            price: self.settings.price,
        };
        let score = &self.settings.score;
        let most = |of: fn(&ShardCounts) -> u64| self.size.counts.iter().map(of).max();
        let shape = RunShape {
            description: self.description,
            products: &score.products,
            vocab_scored: self.vocab,
            weights: self.parameters.total * number_bytes.min(2),
            rows_max: most(|c| c.rows).unwrap_or(0),
            sequences_max: self
                .size
                .plan
                .iter()
                .map(PlannedShard::sequences)
                .max()
                .unwrap_or(0),
            scratch: 0,
        };
        let limits = match number_bytes {
            4 => {
                let room = memory.saturating_sub(shape.weights);
                let (budget, chunk) = (score.token_budget, score.head_chunk);
                shape.limits(budget, chunk, self.size.longest, room)
            }
            _ => Limits {
                tokens: score
                    .token_budget
                    .unwrap_or(GPU_TOKENS)
                    .max(self.size.longest),
                sequence: self.size.longest,
                head_chunk: score.head_chunk.unwrap_or(GPU_HEAD_CHUNK),
                wave: 1,
            },
        };
        Offer {
            name: name.to_owned(),
            bill: devices.bill(self.work.flops()),
            devices,
            fit: fit(&shape.memory(&limits), number_bytes, memory),
            limits,
            memory,
            source: source.to_owned(),
        }
    }
}
