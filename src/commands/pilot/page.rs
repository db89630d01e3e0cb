//! A pilot's findings as a page for the person who pays.

use anyhow::{Context, Result};
use serde_json::Value;

use super::findings::Findings;
use super::measure::UncertainRow;
use super::show;
use super::sweep::BUDGET_FIRST;
use crate::commands::score::setup::Setup;
use crate::commands::show::quoted;
use crate::commands::text;
use crate::corpus::Decoder as TokenDecoder;
use crate::report::plot::{Axes, Curve, curve, histogram, steps};
use crate::report::{Bar, DecodedRow, Page, Tile};

const TITLE: &str = "kdscore pilot";
/// Tokens decoded before an uncertain row.
const CONTEXT_TOKENS: usize = 48;

/// # Errors
/// A plot that can't be drawn, or a corpus that can't be read any more.
pub fn page(f: &Findings, tokenizer: Option<&TokenDecoder>) -> Result<String> {
    let setup = f.inputs.setup;
    let teacher = setup
        .teacher
        .teacher
        .checkpoint
        .folder
        .display()
        .to_string();
    let lead = format!(
        "{} ({} parameters) on {}: {} of {} shards scored, {} rows",
        last_of(&teacher),
        text::billions(setup.teacher.description().parameters().total),
        last_of(&setup.job.corpus_path),
        f.inputs.measured.shards.len(),
        f.inputs.extent.shards,
        text::count(f.rows())
    );
    let mut page = Page::new("What the full run costs", &lead);
    page.tiles(&bill(f));
    for alarm in &f.inputs.alarms {
        page.alarm(alarm.name, &alarm.text);
    }
    if f.inputs.alarms.is_empty() {
        page.fine(&show::no_alarm(f));
    }
    which_k(f, &mut page)?;
    speed(f, &mut page);
    teacher_and_corpus(f, &mut page)?;
    page.section("Where the teacher is least sure");
    page.note("The rows of highest entropy, from different sequences. The marked token is the one that follows in the corpus.");
    let rows = f.inputs.measured.uncertain.iter();
    let rows: Vec<DecodedRow> = rows
        .map(|row| decoded(row, setup, tokenizer))
        .collect::<Result<_>>()?;
    page.rows(&rows);
    page.section("Settings and fingerprints");
    page.facts(&settings(f));
    Ok(page.finish(TITLE))
}

fn last_of(path: &str) -> &str {
    path.rsplit('/')
        .find(|part| !part.is_empty())
        .unwrap_or(path)
}

fn tile(label: &str, value: String, note: String) -> Tile {
    Tile {
        label: label.to_owned(),
        value,
        note,
    }
}

fn bill(f: &Findings) -> Vec<Tile> {
    let error = |error: Option<f64>| match error {
        Some(error) => format!("± {} (95 %)", text::duration(error)),
        None => "error unknown: one shard".to_owned(),
    };
    let whole = &f.whole;
    let mut tiles = vec![
        tile(
            "Time, whole job",
            text::duration(whole.seconds.value),
            format!(
                "{}; {} left",
                error(whole.seconds.error),
                text::duration(f.left.seconds.value)
            ),
        ),
        tile(
            "Recommended k",
            f.k_advised.map_or("none".to_owned(), |k| k.to_string()),
            show::k_reason(f),
        ),
        tile(
            "Storage",
            f.k_costs
                .iter()
                .find(|cost| cost.k == f.k_advised.unwrap_or(f.k_stored))
                .map_or("-".to_owned(), |cost| text::si(cost.bytes as f64, "B")),
            show::storage(f),
        ),
        tile(
            "MFU",
            show::percent(f.mfu()),
            format!(
                "{} of {}, products measured in this run",
                text::si(f.achieved, "FLOP/s"),
                text::si(f.peak, "FLOP/s")
            ),
        ),
    ];
    if let (Some(cost), Some(price)) = (whole.cost, f.inputs.settings.price) {
        let cost_error = whole.seconds.error.map(|e| e * price / 3600.0);
        let bar = cost_error.map_or(String::new(), |e| format!("± ${e:.2}, "));
        let note = format!("{bar}at ${price} an hour");
        tiles.insert(1, tile("Cost, whole job", format!("${cost:.2}"), note));
    }
    tiles
}

fn which_k(f: &Findings, page: &mut Page) -> Result<()> {
    page.section("Which k");
    let points: Vec<(f64, f64)> = (1..)
        .zip(&f.tails)
        .map(|(k, tail)| (f64::from(k), tail.value))
        .filter(|(_, tail)| *tail > 0.0)
        .collect();
    let axes = Axes {
        x: "k, ids kept per row",
        y: "mean tail mass",
        x_format: |v| format!("{v:.0}"),
        y_format: |v| share(*v),
    };
    let chosen = f.k_advised.and_then(|k| {
        let at = points.iter().find(|p| p.0 == k as f64)?;
        Some((*at, format!("k = {k}")))
    });
    let by_k = curve(&Curve {
        axes,
        points: &points,
        chosen,
        bound: Some((
            f.inputs.settings.tail_below,
            format!("{} asked for", share(f.inputs.settings.tail_below)),
        )),
    })?;
    let costs: Vec<(f64, f64)> = f
        .k_costs
        .iter()
        .filter(|c| c.tail.value > 0.0)
        .map(|c| (c.bytes_per_row as f64, c.tail.value))
        .collect();
    let chosen = f.k_costs.iter().find(|c| Some(c.k) == f.k_advised);
    let by_bytes = curve(&Curve {
        axes: Axes {
            x: "bytes a row",
            ..axes
        },
        points: &costs,
        chosen: chosen.map(|c| {
            let text = format!("{} bytes", c.bytes_per_row);
            ((c.bytes_per_row as f64, c.tail.value), text)
        }),
        bound: None,
    })?;
    page.figures(&[
        (
            by_k,
            "Probability outside the k best, mean over rows, by k".to_owned(),
        ),
        (by_bytes, "The same by what a row takes on disk".to_owned()),
    ]);
    let columns = [
        ("k", true),
        ("bytes a row", true),
        ("whole set", true),
        ("mean tail mass", true),
    ];
    let (rows, chosen) = show::k_rows(f);
    page.table(&columns, &rows, chosen);
    if let Some(rescoring) = f.rescoring() {
        page.note(&rescoring);
    }
    Ok(())
}

/// 0.012 as "1.2 %", small ones by powers of ten.
fn share(value: f64) -> String {
    match value {
        v if v >= 0.001 => format!("{} %", (v * 1e4).round() / 100.0),
        v => format!("{v:.0e}"),
    }
}

fn speed(f: &Findings, page: &mut Page) {
    page.section("Where the time goes");
    let keys = [
        format!(
            "reached {} ({})",
            text::si(f.achieved, "FLOP/s"),
            show::percent(f.mfu())
        ),
        format!(
            "ceiling {}: the products alone, if nothing else took time",
            text::si(f.ceiling, "FLOP/s")
        ),
        format!(
            "peak {}: plain products, nothing else",
            text::si(f.peak, "FLOP/s")
        ),
    ];
    page.gauge(
        [f.achieved / f.peak, f.ceiling / f.peak],
        [&keys[0], &keys[1], &keys[2]],
    );
    let phases = f.inputs.measured.phases.list().into_iter();
    let bars: Vec<Bar> = phases
        .filter(|(_, seconds)| *seconds > 0.0)
        .map(|(name, seconds)| Bar {
            label: name.to_owned(),
            share: seconds,
            value: format!(
                "{} ({})",
                text::duration(seconds),
                show::percent(seconds / f.inputs.wall_seconds)
            ),
        })
        .collect();
    page.bars(&bars);
    page.note(&format!(
        "Wall time {}; {} of it in no phase. Nothing runs beside these phases; the disk was waited for {}.",
        text::duration(f.inputs.wall_seconds),
        show::percent((f.unaccounted() / f.inputs.wall_seconds).max(0.0)),
        text::duration(f.stalls())
    ));
}

fn teacher_and_corpus(f: &Findings, page: &mut Page) -> Result<()> {
    page.section("Teacher and corpus");
    page.tiles(&[
        tile(
            "Perplexity",
            text::figure(f.mean_nll().exp()),
            format!("mean log-prob of the targets {:.4}", -f.mean_nll()),
        ),
        tile(
            "Entropy",
            format!("{:.2} nats", f.mean_entropy()),
            format!(
                "of at most {:.2}",
                (f.inputs.setup.vocab.scored as f64).ln()
            ),
        ),
        tile(
            "Batches",
            format!("{} full", show::percent(f.packing())),
            show::packing(f),
        ),
        tile(
            "Memory",
            text::si(f.inputs.measured.memory_seen as f64, "B"),
            show::memory(f),
        ),
    ]);
    page.figures(&distributions(f)?);
    Ok(())
}

/// A count on an axis.
fn counted(v: &f64) -> String {
    match *v {
        v if v < 10_000.0 => text::count(v as u64),
        v => text::si(v, ""),
    }
}

/// Plots of rows, sequences and budgets, each with what it shows.
fn distributions(f: &Findings) -> Result<Vec<(String, String)>> {
    let measured = f.inputs.measured;
    let axes = |x, x_format| Axes {
        x,
        y: "rows",
        x_format,
        y_format: counted,
    };
    let entropy = &measured.entropy;
    let tail = &measured.tail;
    let lengths = &f.inputs.lengths;
    let length_axes = Axes {
        y: "sequences",
        ..axes("tokens", |v| format!("{v:.0}"))
    };
    let mut figures = vec![
        (
            histogram(
                &axes("entropy, nats", |v| format!("{v:.0}")),
                (entropy.from, entropy.to),
                &entropy.counts,
            )?,
            "How unsure the teacher is, by row".to_owned(),
        ),
        (
            histogram(
                &axes("tail mass, by powers of ten", |v| format!("{v:.0}")),
                (tail.from, tail.to),
                &tail.counts,
            )?,
            format!("Probability outside the {} ids stored, by row", f.k_stored),
        ),
        (
            histogram(&length_axes, (0.0, lengths.longest as f64), &lengths.bins)?,
            "Lengths of the sequences".to_owned(),
        ),
    ];
    if f.inputs.sweep.len() > 1 {
        figures.push(budgets(f)?);
    }
    Ok(figures)
}

fn budgets(f: &Findings) -> Result<(String, String)> {
    let doubled = |budget: usize| (budget as f64 / BUDGET_FIRST as f64).log2();
    let points = f.inputs.sweep.iter();
    let points: Vec<(f64, f64)> = points
        .map(|p| (doubled(p.token_budget), p.tokens_per_second))
        .collect();
    let axes = Axes {
        x: "token budget of a batch",
        y: "tokens/s",
        x_format: |v| match v.fract() == 0.0 {
            true => text::count((BUDGET_FIRST << *v as usize) as u64),
            false => String::new(),
        },
        y_format: counted,
    };
    let said = show::budget(f);
    let said = said.split(" (").next().unwrap_or_default();
    Ok((
        steps(&axes, &points, f.budget_advised.map(doubled))?,
        format!("Speed by token budget; {said}"),
    ))
}

fn decoded(
    row: &UncertainRow,
    setup: &Setup,
    tokenizer: Option<&TokenDecoder>,
) -> Result<DecodedRow> {
    let index = setup
        .corpus
        .shard_index(&row.corpus_shard)
        .with_context(|| format!("expected corpus shard {}", row.corpus_shard))?;
    let files = setup.corpus.shard(index)?;
    let tokens = files.view()?.sequence(row.sequence).tokens;
    let from = (row.position + 1).saturating_sub(CONTEXT_TOKENS);
    let text = |ids: &[i32]| match tokenizer {
        Some(tokenizer) => tokenizer.text(ids),
        None => ids.iter().map(|id| format!("{id} ")).collect(),
    };
    let best = row.best.iter().map(|&(id, logp)| Bar {
        label: quoted(&text(&[id])),
        share: f64::from(logp).exp(),
        value: show::percent(f64::from(logp).exp()),
    });
    Ok(DecodedRow {
        title: format!("{:.2} nats", row.entropy),
        context: text(&tokens[from..row.position + 1]),
        target: text(&[row.target]),
        best: best.collect(),
        note: format!(
            "{} sequence {}, position {}; the target has {}",
            row.corpus_shard,
            row.sequence,
            row.position,
            show::percent(f64::from(row.target_logp).exp())
        ),
    })
}

fn settings(f: &Findings) -> Vec<(String, String)> {
    let s = f.inputs.settings;
    let plain = |value: &Value| match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let mut facts: Vec<(String, String)> = Vec::new();
    let mut say = |name: &str, value: String| facts.push((name.to_owned(), value));
    say("teacher", s.score.teacher.display().to_string());
    say("corpus", f.inputs.setup.job.corpus_path.clone());
    say("scored set", s.score.out.display().to_string());
    say("fraction, seed", format!("{}, {}", s.fraction, s.seed));
    say("tail-below", s.tail_below.to_string());
    say(
        "shards scored",
        f.inputs
            .measured
            .shards
            .iter()
            .map(|s| s.id.as_str())
            .collect::<Vec<_>>()
            .join(", "),
    );
    say(
        "commit",
        format!("{} a shard", text::duration(f.commit_seconds())),
    );
    say("mass on padded vocabulary", show::percent(f.padded_mass()));
    say("identity", f.inputs.setup.job.identity_sha256());
    for (key, value) in &f.inputs.setup.job.identity {
        say(key, plain(value));
    }
    if let Value::Object(provenance) = f.inputs.provenance {
        for (key, value) in provenance {
            say(key, plain(value));
        }
    }
    facts
}
