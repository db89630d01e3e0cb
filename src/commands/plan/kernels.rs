//! `plan --kernels`: what one batch takes, by kernel, and how long that should be on a device.

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use crate::backend::HeadRows;
use crate::backend::priced::{Cost, Costs, KernelUse, Priced};
use crate::batch::{BatchRow, PackedBatch, PackedSequence};
use crate::commands::text::{self, Align};
use crate::commands::{Outcome, Status};
use crate::config::PlanSettings;
use crate::cost::bill::mfu;
use crate::cost::kernels::{Phase, Roof, phases};
use crate::model::{Decoder, Demand, Description, Limits, Vocabulary, describe};

use super::{GPU_HEAD_CHUNK, GPU_TOKENS};

/// Tokens of a sequence where nothing is said.
const LENGTH: usize = 512;

/// A batch of sequences of one length, every token a row.
struct Even {
    sequences: usize,
    length: usize,
}

impl Even {
    fn tokens(&self) -> usize {
        self.sequences * self.length
    }

    fn packed(&self) -> PackedBatch {
        let spans = (0..self.sequences).map(|s| s * self.length..(s + 1) * self.length);
        let tokens = 0..self.tokens() as u32;
        PackedBatch {
            tokens: vec![0; self.tokens()],
            positions: tokens.clone().map(|t| t % self.length as u32).collect(),
            sequences: spans
                .enumerate()
                .map(|(sequence, span)| PackedSequence {
                    sequence,
                    length: self.length,
                    tokens: span.clone(),
                    rows: span,
                })
                .collect(),
            rows: tokens
                .map(|token| BatchRow {
                    token,
                    row: token as usize,
                    target: 0,
                })
                .collect(),
        }
    }
}

/// The costs of a batch: the decoder is run on a backend that only notes them.
fn costs(
    description: &Description,
    batch: &Even,
    limits: Limits,
    vocab: usize,
    k: usize,
) -> Result<Costs> {
    let backend = Priced::default();
    let vocabulary = Vocabulary {
        scored: vocab,
        tokenizer: vocab,
    };
    let mut decoder = Decoder::new(&backend, description, limits, vocabulary)?;
    backend.take();
    decoder.score(&[batch.packed()], &mut [HeadRows::with_capacity(0, k)])?;
    Ok(backend.take())
}

/// # Errors
/// A config that can't be honoured.
pub fn kernels(settings: &PlanSettings) -> Result<Outcome> {
    let score = &settings.score;
    let description = describe(&score.teacher)?;
    let length = settings.length.unwrap_or(LENGTH.min(description.context));
    ensure!(
        length <= description.context,
        "length: expected at most {}, the teacher's max_position_embeddings, found {length}",
        description.context
    );
    let budget = score.token_budget.unwrap_or(GPU_TOKENS);
    let batch = Even {
        sequences: (budget / length).max(1),
        length,
    };
    let vocab = score.vocab_limit.unwrap_or(description.vocab);
    let limits = Limits {
        tokens: batch.tokens(),
        sequence: length,
        head_chunk: score.head_chunk.unwrap_or(GPU_HEAD_CHUNK),
        wave: 1,
    };
    let costs = costs(&description, &batch, limits, vocab, score.products.k)?;
    let tokens = batch.tokens() as u64;
    let demand = Demand::even(&description, tokens, tokens, length);
    let forecast = Forecast {
        phases: phases(&costs),
        roofs: Roof::all(),
        flops: description.work(&demand, vocab).flops(),
        tokens,
    };
    Ok(Outcome {
        text: format!(
            "one batch: {} sequences of {length} tokens, each a row, in bf16; peaks by their makers, shares of them assumed: nothing here was measured\n\n{}\n{}",
            batch.sequences,
            forecast.table(),
            forecast.kernel_table(),
        ),
        json: forecast.json(&batch),
        status: Status::Done,
    })
}

struct Forecast<'a> {
    phases: Vec<Phase<'a>>,
    roofs: Vec<Roof>,
    /// Of the model, as MFU counts them.
    flops: f64,
    tokens: u64,
}

fn milliseconds(seconds: f64) -> String {
    format!("{:.2}", 1e3 * seconds)
}

impl Forecast<'_> {
    fn phase_seconds(roof: &Roof, phase: &Phase) -> f64 {
        phase
            .kernels
            .iter()
            .map(|(_, cost)| roof.seconds(cost))
            .sum()
    }

    fn total_seconds(&self, roof: &Roof) -> f64 {
        let phases = self.phases.iter();
        phases.map(|phase| Self::phase_seconds(roof, phase)).sum()
    }

    fn mfu(&self, roof: &Roof) -> f64 {
        mfu(self.flops, self.total_seconds(roof), roof.peak_flops)
    }

    /// Columns of a table whose last ones are milliseconds on each device.
    fn columns<'a>(
        &'a self,
        first: &[(&'a str, Align)],
        names: &'a [String],
    ) -> Vec<(&'a str, Align)> {
        let devices = names.iter().map(|name| (name.as_str(), Align::Right));
        first.iter().copied().chain(devices).collect()
    }

    fn device_names(&self) -> Vec<String> {
        let roofs = self.roofs.iter();
        roofs.map(|roof| format!("{} ms", roof.gpu.name)).collect()
    }

    fn table(&self) -> String {
        let names = self.device_names();
        let first = [
            ("phase", Align::Left),
            ("FLOPs", Align::Right),
            ("bytes", Align::Right),
        ];
        let row = |name: &str, flops: f64, bytes: f64, each: &dyn Fn(&Roof) -> String| {
            let amounts = [(flops, "FLOP"), (bytes, "B")].map(|(amount, unit)| match amount {
                0.0 => String::new(),
                amount => text::si(amount, unit),
            });
            let cells = [name.to_owned()].into_iter().chain(amounts);
            cells.chain(self.roofs.iter().map(each)).collect::<Vec<_>>()
        };
        let mut rows: Vec<Vec<String>> = Vec::new();
        let (mut flops_all, mut bytes_all) = (0.0, 0.0);
        for phase in &self.phases {
            let sum = |of: fn(&Cost) -> u64| phase.kernels.iter().map(|(_, c)| of(c) as f64).sum();
            let (flops, bytes): (f64, f64) = (sum(|c| c.flops), sum(|c| c.bytes));
            (flops_all, bytes_all) = (flops_all + flops, bytes_all + bytes);
            let each = |roof: &Roof| milliseconds(Self::phase_seconds(roof, phase));
            rows.push(row(phase.class.name(), flops, bytes, &each));
        }
        rows.push(row("all", flops_all, bytes_all, &|roof| {
            milliseconds(self.total_seconds(roof))
        }));
        let rate = |roof: &Roof| text::si(self.tokens as f64 / self.total_seconds(roof), "");
        rows.push(row("tokens a second", 0.0, 0.0, &rate));
        rows.push(row("MFU", self.flops, 0.0, &|roof| {
            format!("{:.0} %", 100.0 * self.mfu(roof))
        }));
        text::table(&self.columns(&first, &names), &rows)
    }

    fn kernel_table(&self) -> String {
        let names = self.device_names();
        let first = [
            ("kernel", Align::Left),
            ("launches", Align::Right),
            ("FLOPs", Align::Right),
            ("bytes", Align::Right),
        ];
        let kernels = self.phases.iter().flat_map(|phase| &phase.kernels);
        let rows: Vec<Vec<String>> = kernels
            .map(|(used, cost)| {
                let flops = match cost.flops {
                    0 => String::new(),
                    flops => text::si(flops as f64, "FLOP"),
                };
                let known = [
                    name_of(used),
                    text::count(cost.launches),
                    flops,
                    text::si(cost.bytes as f64, "B"),
                ];
                let each = self
                    .roofs
                    .iter()
                    .map(|roof| milliseconds(roof.seconds(cost)));
                known.into_iter().chain(each).collect()
            })
            .collect();
        text::table(&self.columns(&first, &names), &rows)
    }

    fn json(&self, batch: &Even) -> Value {
        let kernels = self.phases.iter().flat_map(|phase| &phase.kernels);
        let each = kernels.map(|(used, cost)| {
            let seconds: Value = self
                .roofs
                .iter()
                .map(|roof| (roof.gpu.name.to_owned(), json!(roof.seconds(cost))))
                .collect();
            json!({
                "phase": used.class().name(),
                "kernel": used.kernel,
                "inputs": used.shape.map(|shape| shape.0),
                "outputs": used.shape.map(|shape| shape.1),
                "launches": cost.launches,
                "bytes": cost.bytes,
                "flops": cost.flops,
                "seconds": seconds,
            })
        });
        let devices = self.roofs.iter().map(|roof| {
            json!({
                "name": roof.gpu.name,
                "peak_flops": roof.peak_flops,
                "reach_library": roof.reach.library,
                "reach_own": roof.reach.own,
                "reach_memory": roof.reach.memory,
                "seconds": self.total_seconds(roof),
                "tokens_per_second": self.tokens as f64 / self.total_seconds(roof),
                "mfu": self.mfu(roof),
            })
        });
        json!({
            "sequences": batch.sequences,
            "length": batch.length,
            "tokens": self.tokens,
            "model_flops": self.flops,
            "kernels": each.collect::<Value>(),
            "devices": devices.collect::<Value>(),
        })
    }
}

fn name_of(used: &KernelUse) -> String {
    match used.shape {
        Some((inputs, outputs)) => format!("{} {inputs} to {outputs}", used.kernel),
        None => used.kernel.clone(),
    }
}
