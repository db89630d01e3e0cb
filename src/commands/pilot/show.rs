//! A pilot's findings as a table and as JSON.

use serde_json::{Value, json};

use super::findings::{Findings, Time};
use crate::backend::observed::OpClass;
use crate::commands::text::{self, Align};
use crate::cost::spread::Estimate;

/// A time with its error and its cost.
pub fn time(time: &Time) -> String {
    let error = match time.seconds.error {
        Some(error) => format!(" ± {}", text::duration(error)),
        None => ", error unknown (one shard)".to_owned(),
    };
    let cost = time
        .cost
        .map_or(String::new(), |cost| format!(", ${cost:.2}"));
    format!("{}{error}{cost}", text::duration(time.seconds.value))
}

pub fn percent(share: f64) -> String {
    match share {
        0.0 => "0 %".to_owned(),
        s if s < 1e-4 => "under 0.01 %".to_owned(),
        s if s < 0.1 => format!("{:.2} %", 100.0 * s),
        s => format!("{:.1} %", 100.0 * s),
    }
}

pub fn tail(estimate: &Estimate) -> String {
    match estimate.error {
        Some(error) => format!("{} ± {}", percent(estimate.value), percent(error)),
        None => percent(estimate.value),
    }
}

/// The advice on k in one line.
pub fn k_advice(f: &Findings) -> String {
    match f.k_advised {
        Some(k) => format!("{k}, {}", k_reason(f)),
        None => format!("none: {}", k_reason(f)),
    }
}

pub fn k_reason(f: &Findings) -> String {
    let bound = percent(f.inputs.settings.tail_below);
    match f.k_advised {
        Some(_) => format!("the smallest with a mean tail below {bound}{}", k_error(f)),
        None => format!(
            "k = {} leaves {}, above {bound}",
            f.tails.len(),
            f.tails.last().map_or("-".to_owned(), tail)
        ),
    }
}

/// How far the advice on k may be off.
fn k_error(f: &Findings) -> String {
    let said = |k: Option<usize>| k.map_or(format!("over {}", f.tails.len()), |k| k.to_string());
    match f.k_between {
        _ if f.tails.iter().all(|tail| tail.error.is_none()) => String::new(),
        [from, to] if from == to => String::new(),
        [from, to] => format!(
            "; {} to {} by the spread between these shards (95 %)",
            said(from),
            said(to)
        ),
    }
}

/// That nothing looks wrong, and what could not be looked at.
pub fn no_alarm(f: &Findings) -> String {
    match f.inputs.not_judged.as_slice() {
        [] => "no alarm: entropy, alignment, first tokens, padded vocabulary and sequence ends look sound".to_owned(),
        unknown => format!("no alarm; not judged: {}", unknown.join(", ")),
    }
}

pub fn text(f: &Findings) -> String {
    let mut shown = text::facts(&facts(f));
    shown += "\n";
    shown += &k_table(f);
    shown += "\n";
    shown += &phase_table(f);
    for alarm in &f.inputs.alarms {
        shown += &format!("\nalarm: {}: {}\n", alarm.name, alarm.text);
    }
    if f.inputs.alarms.is_empty() {
        shown += &format!("\n{}\n", no_alarm(f));
    }
    if let Some(rescoring) = f.rescoring() {
        shown += &format!("{rescoring}\n");
    }
    shown
}

fn facts(f: &Findings) -> Vec<(&'static str, String)> {
    let extent = &f.inputs.extent;
    let mut facts = vec![
        (
            "pilot",
            format!(
                "{} of {} shards, {} of {} rows, {}",
                f.inputs.measured.shards.len(),
                extent.shards,
                text::count(f.rows()),
                text::count(extent.rows),
                text::duration(f.seconds())
            ),
        ),
        ("the whole job", time(&f.whole)),
        ("left of it", time(&f.left)),
        ("storage", storage(f)),
        ("recommended k", k_advice(f)),
        ("token budget", budget(f)),
        (
            "speed",
            format!(
                "{} tokens/s, {}, MFU {} of {} (products measured in this run)",
                text::figure(f.tokens() as f64 / f.seconds()),
                text::si(f.achieved, "FLOP/s"),
                percent(f.mfu()),
                text::si(f.peak, "FLOP/s")
            ),
        ),
        (
            "teacher",
            format!(
                "mean log-prob of the targets {:.4}, perplexity {}, entropy {:.3} nats",
                -f.mean_nll(),
                text::figure(f.mean_nll().exp()),
                f.mean_entropy()
            ),
        ),
    ];
    facts.extend([
        ("memory", memory(f)),
        ("batches", packing(f)),
        (
            "stalls",
            format!(
                "{} waiting for the disk; nothing overlaps",
                text::duration(f.stalls())
            ),
        ),
    ]);
    facts
}

pub fn storage(f: &Findings) -> String {
    let of = |k: usize| f.k_costs.iter().find(|cost| cost.k == k);
    let say = |k: usize| of(k).map(|c| format!("{} at k = {k}", text::si(c.bytes as f64, "B")));
    let advised = f.k_advised.filter(|k| *k != f.k_stored).and_then(say);
    let all: Vec<String> = say(f.k_stored).into_iter().chain(advised).collect();
    all.join(", ")
}

pub fn budget(f: &Findings) -> String {
    match f.budget_advised {
        None => format!(
            "{} tokens, as it ran; others were not tried long enough to tell (--sweep-seconds gives them more)",
            text::count(f.budget() as u64)
        ),
        Some(advised) => {
            let each = f
                .inputs
                .sweep
                .iter()
                .map(|p| format!("{}: {}", p.token_budget, text::figure(p.tokens_per_second)));
            format!(
                "{advised} recommended, {} as it ran (tokens/s by budget: {})",
                f.budget(),
                each.collect::<Vec<_>>().join(", ")
            )
        }
    }
}

pub fn memory(f: &Findings) -> String {
    format!(
        "{} planned, {} seen at most, weights apart",
        text::si(f.inputs.setup.memory.anonymous() as f64, "B"),
        text::si(f.inputs.measured.memory_seen as f64, "B")
    )
}

pub fn packing(f: &Findings) -> String {
    format!(
        "{} batches, {} full; sequences of {} tokens in the mean, {} at most",
        text::count(f.inputs.measured.batches),
        percent(f.packing()),
        text::figure(f.inputs.lengths.mean),
        text::count(f.inputs.lengths.longest as u64)
    )
}

/// Cells of the table of k, and which row is the recommended one.
pub fn k_rows(f: &Findings) -> (Vec<Vec<String>>, Option<usize>) {
    let rows = f.k_costs.iter().map(|cost| {
        vec![
            cost.k.to_string(),
            text::count(cost.bytes_per_row as u64),
            text::si(cost.bytes as f64, "B"),
            tail(&cost.tail),
        ]
    });
    let chosen = f
        .k_costs
        .iter()
        .position(|cost| Some(cost.k) == f.k_advised);
    (rows.collect(), chosen)
}

fn k_table(f: &Findings) -> String {
    let columns = [
        ("k", Align::Right),
        ("bytes a row", Align::Right),
        ("whole set", Align::Right),
        ("mean tail mass", Align::Right),
    ];
    text::table(&columns, &k_rows(f).0)
}

fn phase_table(f: &Findings) -> String {
    let phases = f.inputs.measured.phases.list();
    let shown = phases.into_iter().filter(|(_, seconds)| *seconds > 0.0);
    let all = shown.chain([("not in any phase", f.unaccounted())]);
    let rows: Vec<Vec<String>> = all
        .map(|(name, seconds)| {
            vec![
                name.to_owned(),
                format!("{seconds:.3}"),
                percent((seconds / f.inputs.wall_seconds).max(0.0)),
            ]
        })
        .collect();
    let columns = [
        ("phase", Align::Left),
        ("seconds", Align::Right),
        ("share", Align::Right),
    ];
    text::table(&columns, &rows)
}

fn estimate(estimate: &Estimate) -> Value {
    json!({"value": estimate.value, "error": estimate.error})
}

fn time_json(time: &Time) -> Value {
    json!({"seconds": estimate(&time.seconds), "cost": time.cost})
}

pub fn json(f: &Findings) -> Value {
    let extent = &f.inputs.extent;
    let parts = [
        json!({
            "shards_planned": extent.shards,
            "shards_open": extent.shards_open,
            "rows": f.rows(),
            "tokens": f.tokens(),
            "whole_job": time_json(&f.whole),
            "left": time_json(&f.left),
            "shards": f.inputs.measured.shards.iter().map(|s| json!({
                "id": s.id, "tokens": s.tokens, "rows": s.rows, "flops": s.flops,
                "seconds": s.seconds,
            })).collect::<Value>(),
            "not_judged": f.inputs.not_judged,
            "recommended_k_between": f.k_between,
            "alarms": f.inputs.alarms.iter().map(|a| json!({
                "name": a.name, "text": a.text,
            })).collect::<Value>(),
        }),
        speed_json(f),
        k_json(f),
        corpus_json(f),
    ];
    let keys = parts.into_iter().filter_map(|part| match part {
        Value::Object(keys) => Some(keys),
        _ => None,
    });
    Value::Object(keys.flatten().collect())
}

fn speed_json(f: &Findings) -> Value {
    let phases = f.inputs.measured.phases.list().into_iter();
    let phases: serde_json::Map<String, Value> = phases
        .map(|(name, seconds)| (name.to_owned(), seconds.into()))
        .collect();
    json!({
        "seconds": f.seconds(),
        "tokens_per_second": f.tokens() as f64 / f.seconds(),
        "flops_per_second": f.achieved,
        "flops_per_second_ceiling": f.ceiling,
        "attention_flops_per_second": attention_rate(f),
        "peak_flops": f.peak,
        "mfu": f.mfu(),
        "wall_seconds": f.inputs.wall_seconds,
        "phases": phases,
        "overlapped": {},
        "unaccounted_seconds": f.unaccounted(),
        "stall_seconds": f.stalls(),
        "commit_seconds": f.commit_seconds(),
        "memory_planned_bytes": f.inputs.setup.memory.anonymous(),
        "memory_seen_bytes": f.inputs.measured.memory_seen,
        "token_budget": f.budget(),
        "token_budget_recommended": f.budget_advised,
        "sweep": f.inputs.sweep.iter().map(|p| json!({
            "token_budget": p.token_budget, "tokens_per_second": p.tokens_per_second,
        })).collect::<Value>(),
    })
}

fn k_json(f: &Findings) -> Value {
    json!({
        "k": f.k_stored,
        "k_recommended": f.k_advised,
        "k_costs": f.k_costs.iter().map(|c| json!({
            "k": c.k, "bytes_per_row": c.bytes_per_row, "bytes": c.bytes,
            "tail": estimate(&c.tail),
        })).collect::<Value>(),
        "rescoring": f.rescoring(),
        "tail_by_k": f.tails.iter().map(estimate).collect::<Value>(),
    })
}

fn corpus_json(f: &Findings) -> Value {
    let lengths = &f.inputs.lengths;
    json!({
        "mean_target_logp": -f.mean_nll(),
        "perplexity": f.mean_nll().exp(),
        "mean_entropy": f.mean_entropy(),
        "padded_mass": f.padded_mass(),
        "batches": f.inputs.measured.batches,
        "packing": f.packing(),
        "lengths": {
            "sequences": lengths.sequences, "mean": lengths.mean, "p50": lengths.half,
            "p95": lengths.most_95, "longest": lengths.longest,
        },
    })
}

fn attention_rate(f: &Findings) -> Option<f64> {
    let setup = f.inputs.setup;
    let shards = &f.inputs.measured.shards;
    let scored = setup
        .shards()
        .filter(|(p, _)| shards.iter().any(|s| s.id == p.id));
    let flops: f64 = scored
        .map(|(_, d)| 2.0 * setup.work_of(d).attention as f64)
        .sum();
    let seconds = f.inputs.measured.phases.of(OpClass::Attention);
    (seconds > 0.0).then(|| flops / seconds)
}
