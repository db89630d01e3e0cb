//! `verify`'s findings as a page, in the dress of the pilot's.

use serde_json::Value;

use super::text;
use crate::report::{Bar, Page, Tile};
use crate::store::ScoredSet;
use crate::store::shift::{ERRORS_MIN, PAIRS_MIN, Paired};
use crate::store::verify::Report;

/// Shards named one by one before the rest are only counted.
const NAMED_MAX: usize = 40;

/// `verdict` is the last line of the text, `leftovers` one line each.
pub fn page(set: &ScoredSet, report: &Report, verdict: &str, leftovers: &[String]) -> String {
    let lead = format!("{}: {}", set.place("").trim_end_matches('/'), verdict);
    let title = match report.is_sound() {
        true => "Verified",
        false => "Not verified",
    };
    let mut page = Page::new(title, &lead);
    page.tiles(&tiles(report));
    findings(report, &mut page);
    shift(report, &mut page);
    page.section("Made by");
    let columns = [("shards", true), ("device, libraries, build", false)];
    let rows = report
        .provenances
        .iter()
        .map(|(provenance, shards)| vec![text::count(*shards as u64), plain(provenance)]);
    page.table(&columns, &rows.collect::<Vec<_>>(), None);
    page.section("Beside the shards");
    match leftovers {
        [] => page.note("Nothing that no manifest names."),
        lines => lines
            .iter()
            .take(NAMED_MAX)
            .for_each(|line| page.text(line)),
    }
    page.section("Identity");
    let mut facts = vec![("identity".to_owned(), set.job().identity_sha256())];
    let identity = set.job().identity.iter();
    facts.extend(identity.map(|(key, value)| (key.clone(), plain(value))));
    page.facts(&facts);
    page.finish("kdscore verify")
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn tiles(report: &Report) -> Vec<Tile> {
    let figure = |value: Option<f64>| value.map_or("-".to_owned(), |v| format!("{v:.4}"));
    let tile = |label: &str, value: String, note: String| Tile {
        label: label.to_owned(),
        value,
        note,
    };
    vec![
        tile(
            "Sound shards",
            format!("{} of {}", report.sound, report.planned),
            format!(
                "{} missing, {} damaged",
                report.missing.len(),
                report.damaged_shards().len()
            ),
        ),
        tile(
            "Rows",
            text::count(report.rows),
            format!("of {} tokens", text::count(report.tokens)),
        ),
        tile(
            "Mean tail mass",
            figure(report.mean_tail),
            "outside the ids stored".to_owned(),
        ),
        tile(
            "Mean log-prob",
            figure(report.mean_target_logp),
            "of the targets".to_owned(),
        ),
    ]
}

fn findings(report: &Report, page: &mut Page) {
    page.section("Findings");
    let nothing =
        report.faults.is_empty() && report.damaged.is_empty() && report.missing.is_empty();
    if nothing {
        page.fine("Every shard of the plan is there, undamaged, from one job, and every target is the corpus's.");
    }
    for fault in report.faults.iter().take(NAMED_MAX) {
        page.alarm("fault", fault);
    }
    for damage in report.damaged.iter().take(NAMED_MAX) {
        page.alarm("damaged", &format!("{}: {}", damage.shard, damage.what));
    }
    let more = report.faults.len().max(report.damaged.len());
    if more > NAMED_MAX {
        page.note(&format!(
            "and {} more; the command's own output names all",
            more - NAMED_MAX
        ));
    }
    if !report.missing.is_empty() {
        let named: Vec<&str> = report
            .missing
            .iter()
            .take(NAMED_MAX)
            .map(String::as_str)
            .collect();
        let more = match report.missing.len() - named.len() {
            0 => String::new(),
            n => format!(" and {n} more"),
        };
        page.alarm("missing", &format!("{}{more}", named.join(", ")));
    }
}

fn shift(report: &Report, page: &mut Page) {
    page.section("Alignment");
    page.note(&format!(
        "Nats by which the stored rows fit their own target better than the token one step aside. It tells from {PAIRS_MIN} rows and {ERRORS_MIN} standard errors on."
    ));
    let sides = [
        ("against the token before", &report.shift.before),
        ("against the token after", &report.shift.after),
    ];
    let bars = sides.map(|(label, paired)| bar(label, paired));
    page.bars(&bars);
}

fn bar(label: &str, paired: &Paired) -> Bar {
    let (share, value) = match paired.pairs {
        0 => (0.0, "no row".to_owned()),
        pairs => (
            paired.mean().max(0.0),
            format!(
                "{:.3} ± {:.3}, {} rows",
                paired.mean(),
                paired.standard_error(),
                text::count(pairs)
            ),
        ),
    };
    Bar {
        label: label.to_owned(),
        share,
        value,
    }
}
