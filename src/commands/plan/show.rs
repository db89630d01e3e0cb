//! A plan as a table and as JSON.

use serde_json::{Value, json};

use super::{Offer, Planned};
use crate::commands::score::forecast::MFU_ASSUMED;
use crate::commands::text::{self, Align};
use crate::cost::bill::ShardAdvice;
use crate::cost::full_logits_bytes;

impl Planned<'_> {
    pub fn facts(&self) -> Vec<(&'static str, String)> {
        let Planned {
            description: d,
            parameters: p,
            size,
            work,
            bytes,
            ..
        } = self;
        let per_token = work.flops() / size.demand.tokens.max(1) as f64;
        let full = full_logits_bytes(size.demand.rows, self.vocab);
        vec![
            (
                "teacher",
                format!(
                    "{}: {} parameters, {} active, {} head rows, context {}",
                    d.family,
                    text::billions(p.total),
                    text::billions(p.active),
                    text::count(self.vocab as u64),
                    text::count(d.context as u64)
                ),
            ),
            (
                "corpus",
                format!(
                    "{} tokens, {} rows, {}",
                    text::count(size.tokens),
                    text::count(size.demand.rows),
                    size.source
                ),
            ),
            (
                "work",
                format!(
                    "{:.2e} FLOPs ({} a token): body {:.2e}, attention {:.2e}, head {:.2e}",
                    work.flops(),
                    text::si(per_token, "FLOPs"),
                    2.0 * work.body as f64,
                    2.0 * work.attention as f64,
                    2.0 * work.head as f64
                ),
            ),
            (
                "storage",
                format!(
                    "{} in {} shards: {} bytes a row ({}), records {}",
                    text::si(bytes.total() as f64, "B"),
                    text::count(size.plan.len() as u64),
                    self.settings.score.products.bytes_per_row(),
                    self.row_bytes_text(),
                    text::si(bytes.records as f64, "B"),
                ),
            ),
            (
                "full logits",
                format!(
                    "{} in bf16, {:.0} times as much",
                    text::si(full as f64, "B"),
                    full as f64 / bytes.total().max(1) as f64
                ),
            ),
        ]
    }

    fn row_bytes_text(&self) -> String {
        let products = &self.settings.score.products;
        let each = products.products();
        let each = each.map(|p| format!("{} {}", p.name(), products.row_bytes(p)));
        each.collect::<Vec<_>>().join(", ")
    }

    pub fn offer_facts(&self, offer: &Offer) -> Vec<(&'static str, String)> {
        let fit = &offer.fit;
        let held = format!(
            "{} of memory: weights {}, activations {} for {} tokens, logits slice {} for {} rows",
            text::si(fit.needed() as f64, "B"),
            text::si(fit.weights as f64, "B"),
            text::si(fit.activations as f64, "B"),
            text::count(offer.limits.tokens as u64),
            text::si(fit.logits as f64, "B"),
            text::count(offer.limits.head_chunk as u64),
        );
        vec![
            (
                "peak",
                format!(
                    "{} ({})",
                    text::si(offer.devices.peak_flops, "FLOP/s"),
                    offer.source
                ),
            ),
            ("MFU", self.mfu_text()),
            ("memory", held),
            ("fits", offer.fit_text()),
        ]
    }

    fn mfu_text(&self) -> String {
        match self.settings.mfu {
            Some(mfu) => format!("{:.0} %", 100.0 * mfu),
            None => format!(
                "{:.0} %, assumed; `kdscore pilot` measures it",
                100.0 * MFU_ASSUMED
            ),
        }
    }

    /// The tokens of the shard that wastes least, within what the job allows: a sequence at least,
    /// and a shard for every device; and what shards of that size waste.
    fn shard_size(&self, best: &ShardAdvice, offer: &Offer) -> (u64, ShardAdvice) {
        let seconds_a_token = offer.bill.device_hours * 3600.0 / self.size.tokens.max(1) as f64;
        let most = self.size.tokens.div_ceil(offer.devices.count);
        let least = (self.size.longest as u64).max(1);
        let tokens = ((best.seconds / seconds_a_token) as u64)
            .min(most)
            .max(least);
        let seconds = tokens as f64 * seconds_a_token;
        let (reclaims, commit) = (self.settings.reclaim_per_hour, self.settings.commit_seconds);
        (tokens, ShardAdvice::of(seconds, reclaims, commit))
    }

    pub fn advice_text(&self, best: &ShardAdvice, offer: &Offer) -> String {
        let (tokens, advice) = self.shard_size(best, offer);
        format!(
            "shard size  --shard-tokens {tokens} ({}): a reclaim loses {} in the mean, {:.1} % of all time goes on commits of {} s and on work done twice, at {} reclaims an hour\n",
            text::duration(advice.seconds),
            text::duration(advice.lost_seconds),
            100.0 * advice.overhead,
            self.settings.commit_seconds,
            self.settings.reclaim_per_hour,
        )
    }

    pub fn advice_json(&self, best: &ShardAdvice, offer: &Offer) -> Value {
        let (tokens, advice) = self.shard_size(best, offer);
        json!({
            "shard_tokens": tokens,
            "shard_seconds": advice.seconds,
            "lost_seconds": advice.lost_seconds,
            "overhead": advice.overhead,
        })
    }

    pub fn json(&self, offers: &[Offer], advice: Option<Value>) -> Value {
        let work = &self.work;
        let double = |n: u128| 2.0 * n as f64;
        json!({
            "family": self.description.family,
            "parameters": self.parameters.total,
            "parameters_active": self.parameters.active,
            "tokens": self.size.tokens,
            "tokens_computed": self.size.demand.tokens,
            "rows": self.size.demand.rows,
            "flops": work.flops(),
            "flops_body": double(work.body),
            "flops_attention": double(work.attention),
            "flops_head": double(work.head),
            "bytes_per_row": self.settings.score.products.bytes_per_row(),
            "bytes": self.bytes.total(),
            "bytes_records": self.bytes.records,
            "bytes_full_logits": full_logits_bytes(self.size.demand.rows, self.vocab),
            "shards": self.size.plan.len(),
            "mfu": self.settings.mfu.unwrap_or(MFU_ASSUMED),
            "mfu_assumed": self.settings.mfu.is_none(),
            "shard_advice": advice,
            "devices": offers.iter().map(Offer::json).collect::<Value>(),
        })
    }
}

impl Offer {
    fn fit_text(&self) -> String {
        match (self.memory, self.fit.split) {
            (0, _) => "not known: no memory is stated".to_owned(),
            (_, Some(1)) => "yes, whole on each device".to_owned(),
            (_, Some(n)) => format!(
                "no: its weights would have to be split over {n} devices; device hours and cost stay, hours are those of a --count that {n} divides"
            ),
            (_, None) => {
                "no: not even its activations fit; a smaller --token-budget needs less".to_owned()
            }
        }
    }

    fn json(&self) -> Value {
        json!({
            "name": self.name,
            "peak_flops": self.devices.peak_flops,
            "peak_source": self.source,
            "memory_bytes": self.memory,
            "memory_needed_bytes": self.fit.needed(),
            "memory_weights_bytes": self.fit.weights,
            "memory_activations_bytes": self.fit.activations,
            "memory_logits_bytes": self.fit.logits,
            "split": self.fit.split,
            "count": self.devices.count,
            "hours": self.bill.hours,
            "device_hours": self.bill.device_hours,
            "cost": self.bill.cost,
        })
    }
}

pub fn offers_table(offers: &[Offer]) -> String {
    let columns = [
        ("device", Align::Left),
        ("peak", Align::Right),
        ("memory", Align::Right),
        ("needed", Align::Right),
        ("fits on", Align::Right),
        ("count", Align::Right),
        ("hours", Align::Right),
        ("cost", Align::Right),
    ];
    let rows: Vec<Vec<String>> = offers
        .iter()
        .map(|offer| {
            vec![
                offer.name.clone(),
                text::si(offer.devices.peak_flops, "FLOP/s"),
                match offer.memory {
                    0 => "-".to_owned(),
                    memory => text::si(memory as f64, "B"),
                },
                text::si(offer.fit.needed() as f64, "B"),
                match (offer.memory, offer.fit.split) {
                    (0, _) => "-".to_owned(),
                    (_, None) => "none".to_owned(),
                    (_, Some(n)) => n.to_string(),
                },
                text::count(offer.devices.count),
                text::figure(offer.bill.hours),
                offer
                    .bill
                    .cost
                    .map_or("-".to_owned(), |cost| format!("${cost:.2}")),
            ]
        })
        .collect();
    text::table(&columns, &rows)
}
