//! `kdscore diff`: how far apart two scored sets of one corpus are.

use anyhow::{Result, bail, ensure};
use serde_json::{Map, Value, json};

use super::text::{self, Align, count, figure};
use super::{Interrupt, Outcome, Status};
use crate::cli::DiffArgs;
use crate::products::Product;
use crate::progress::Progress;
use crate::store::ScoredSet;
use crate::store::compare::{Difference, Spread, pairs};
use crate::store::job::identity;

/// Shares of rows whose divergence is told.
const QUANTILES: [(f64, &str); 3] = [(0.5, "median"), (0.9, "90 %"), (0.99, "99 %")];

/// # Errors
/// No scored set, sets of two corpora, damaged manifests or arrays, or nothing that both have
/// committed.
pub fn diff(args: &DiffArgs, interrupt: &Interrupt) -> Result<Outcome> {
    let (a, b) = (ScoredSet::open(&args.a)?, ScoredSet::open(&args.b)?);
    expect_one_corpus(&a, &b)?;
    let pairs = pairs(&a, &b)?;
    let progress = Progress::new("comparing", "shards", pairs.len() as u64, 0);
    let mut all = Difference::default();
    let mut stopped = false;
    for pair in &pairs {
        stopped = interrupt.is_raised();
        if stopped {
            break;
        }
        all.merge(&pair.compare(&a, &b)?);
        progress.add(1, "");
    }
    progress.finish();
    if all.rows == 0 {
        bail!(
            "{} and {}: expected rows that both sets have committed, found none",
            a.place(""),
            b.place("")
        );
    }
    Ok(Outcome {
        text: told(&a, &b, &all, stopped)?,
        json: json_of(&a, &b, &all, stopped)?,
        status: match stopped {
            true => Status::Unfinished,
            false => Status::Done,
        },
    })
}

fn expect_one_corpus(a: &ScoredSet, b: &ScoredSet) -> Result<()> {
    let corpus = |set: &ScoredSet| {
        let stated = set.job().identity_text(identity::CORPUS);
        stated.unwrap_or("none").to_owned()
    };
    let (of_a, of_b) = (corpus(a), corpus(b));
    ensure!(
        of_a == of_b,
        "expected two scored sets of one corpus, found {} of corpus {of_a} and {} of corpus {of_b}; \
         score one corpus with both teachers",
        a.place("job.json"),
        b.place("job.json")
    );
    Ok(())
}

/// Fields of the identity in which the two sets differ, with what each says.
fn differing(a: &ScoredSet, b: &ScoredSet) -> Vec<(String, Value, Value)> {
    let (of_a, of_b) = (&a.job().identity, &b.job().identity);
    let mut keys: Vec<&String> = of_a.keys().chain(of_b.keys()).collect();
    keys.sort();
    keys.dedup();
    let value = |of: &Map<String, Value>, key: &str| of.get(key).cloned().unwrap_or_default();
    let fields = keys.into_iter().map(|key| {
        let (of_a, of_b) = (value(of_a, key), value(of_b, key));
        (key.clone(), of_a, of_b)
    });
    fields.filter(|(_, of_a, of_b)| of_a != of_b).collect()
}

/// Committed rows of a set.
fn rows(set: &ScoredSet) -> Result<u64> {
    let manifests = set.manifests()?;
    Ok(manifests.iter().flatten().map(|m| m.rows).sum())
}

fn told(a: &ScoredSet, b: &ScoredSet, all: &Difference, stopped: bool) -> Result<String> {
    let share = |part: f64, whole: f64| format!("{:.2} %", 100.0 * part / whole.max(1e-300));
    let of_rows = all.rows as f64;
    let possible = all.rows * a.terms().k.min(b.terms().k) as u64;
    let mut lines = vec![
        (
            "rows compared",
            format!(
                "{} of {} in a and {} in b",
                count(all.rows),
                count(rows(a)?),
                count(rows(b)?)
            ),
        ),
        ("same first choice", share(all.same_first as f64, of_rows)),
        (
            "shared ids",
            format!(
                "{} of the shorter top-k; they hold {} of a's probability and {} of b's",
                share(all.shared as f64, possible as f64),
                share(all.mass.0, of_rows),
                share(all.mass.1, of_rows)
            ),
        ),
        (
            "their log-probs",
            format!(
                "differ by {} nats on average, {} at most",
                nats(all.logp_sum / all.shared.max(1) as f64),
                nats(all.logp_max)
            ),
        ),
        ("KL(a||b), nats", spread(&all.kl)),
        ("KL(b||a), nats", spread(&all.kl_back)),
        (
            "targets",
            format!(
                "mean log-prob {:.4} in a, {:.4} in b; perplexity {} and {}",
                all.target_logp.0 / of_rows,
                all.target_logp.1 / of_rows,
                figure((-all.target_logp.0 / of_rows).exp()),
                figure((-all.target_logp.1 / of_rows).exp())
            ),
        ),
    ];
    if let Some((of_a, of_b)) = all.entropy {
        let of_each = format!(
            "{:.4} nats in a, {:.4} in b",
            of_a / of_rows,
            of_b / of_rows
        );
        lines.push(("mean entropy", of_each));
    }
    let mut told = identity_table(a, b);
    told += &text::facts(&lines);
    told += "\nKL is at least what is said: of ids that only one of two rows holds, the other knows the tail alone\n";
    told += note(a, b);
    told += "\n";
    told += &farthest(all);
    if stopped {
        told += "\nstopped before all shards were compared\n";
    }
    Ok(told)
}

/// What log-probs of targets mean where a set has no array of them.
fn note(a: &ScoredSet, b: &ScoredSet) -> &'static str {
    let stored = |set: &ScoredSet| {
        let mut products = set.terms().products.iter();
        products.any(|(product, _)| *product == Product::TargetLogp)
    };
    match stored(a) && stored(b) {
        true => "",
        false => {
            "a target outside the top-k counts an even share of the tail; exact where both sets have --emit target_logp\n"
        }
    }
}

fn spread(kl: &Spread) -> String {
    let quantiles = QUANTILES.map(|(q, name)| format!("{name} {}", nats(kl.quantile(q))));
    format!(
        "at least {} on average; rows: {}, most {}",
        nats(kl.mean()),
        quantiles.join(", "),
        nats(kl.max)
    )
}

fn nats(value: f64) -> String {
    match value {
        v if v >= 1e-3 => format!("{v:.4}"),
        v => figure(v),
    }
}

fn identity_table(a: &ScoredSet, b: &ScoredSet) -> String {
    let fields = differing(a, b);
    if fields.is_empty() {
        return "a and b have one identity: the same teacher, options and corpus\n\n".to_owned();
    }
    let shown = |value: &Value| match value {
        Value::String(text) if text.len() == 64 => text[..12].to_owned(),
        Value::String(text) => text.clone(),
        Value::Null => "none".to_owned(),
        Value::Object(fields) => {
            let fields = fields
                .iter()
                .map(|(key, value)| format!("{key} {}", value.as_str().unwrap_or_default()));
            fields.collect::<Vec<_>>().join(", ")
        }
        other => other.to_string(),
    };
    let cells = fields
        .iter()
        .map(|(key, of_a, of_b)| vec![key.clone(), shown(of_a), shown(of_b)]);
    let columns = [
        ("they differ in", Align::Left),
        ("a", Align::Left),
        ("b", Align::Left),
    ];
    text::table(&columns, &cells.collect::<Vec<_>>()) + "\n"
}

fn farthest(all: &Difference) -> String {
    let cells = all
        .farthest
        .iter()
        .map(|far| vec![far.sequence.to_string(), count(far.rows), nats(far.mean)]);
    let columns = [
        ("farthest sequences", Align::Right),
        ("rows", Align::Right),
        ("mean KL(a||b)", Align::Right),
    ];
    text::table(&columns, &cells.collect::<Vec<_>>())
        + "`kdscore show OUT --sequence N` shows one of either set\n"
}

fn json_of(a: &ScoredSet, b: &ScoredSet, all: &Difference, stopped: bool) -> Result<Value> {
    let of_rows = all.rows as f64;
    let spread = |kl: &Spread| {
        json!({
            "mean": kl.mean(), "max": kl.max, "median": kl.quantile(0.5),
            "p90": kl.quantile(0.9), "p99": kl.quantile(0.99),
        })
    };
    let differing = differing(a, b).into_iter();
    let differing: Map<String, Value> = differing
        .map(|(key, of_a, of_b)| (key, json!([of_a, of_b])))
        .collect();
    let farthest = all
        .farthest
        .iter()
        .map(|far| json!({"sequence": far.sequence, "rows": far.rows, "kl": far.mean}));
    Ok(json!({
        "rows": all.rows,
        "rows_a": rows(a)?,
        "rows_b": rows(b)?,
        "differing": differing,
        "same_first": all.same_first as f64 / of_rows,
        "shared_ids": all.shared,
        "logp_difference": {"mean": all.logp_sum / all.shared.max(1) as f64, "max": all.logp_max},
        "mass_of_shared": [all.mass.0 / of_rows, all.mass.1 / of_rows],
        "kl": spread(&all.kl),
        "kl_back": spread(&all.kl_back),
        "target_logp": [all.target_logp.0 / of_rows, all.target_logp.1 / of_rows],
        "entropy": all.entropy.map(|(of_a, of_b)| [of_a / of_rows, of_b / of_rows]),
        "farthest": farthest.collect::<Value>(),
        "stopped": stopped,
    }))
}
