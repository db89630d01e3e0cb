//! `kdscore verify`: the proof, in words.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::written::{self, write_page};
use super::{Interrupt, Outcome, Status, verify_page};
use crate::config::VerifySettings;
use crate::progress::{self, Progress};
use crate::store::job::identity;
use crate::store::leftovers::Besides;
use crate::store::shift::{Alignment, ERRORS_MIN, PAIRS_MIN, Paired};
use crate::store::verify::{Report, Watch, verify as verify_set};
use crate::store::{CorpusReader, ScoredSet};

/// Verifies a scored set, and cleans or repairs it as asked. `fingerprint_teacher` is called only
/// for `--teacher`.
pub fn verify(
    settings: &VerifySettings,
    fingerprint_teacher: &dyn Fn(&Path) -> Result<String>,
    interrupt: &Interrupt,
) -> Result<Outcome> {
    let set = ScoredSet::open(&settings.out)?;
    let files = [("report", settings.report.as_deref())];
    written::check(&files, &[&settings.out])?;
    let corpus = open_corpus(&set, settings)?;
    let watch = Watched {
        progress: Progress::new("verifying", "shards", set.job().plan.len() as u64, 0),
        interrupt,
    };
    let mut report = verify_set(&set, &corpus, &watch);
    watch.progress.finish();
    if let Some(teacher) = &settings.teacher {
        let found = fingerprint_teacher(teacher)?;
        report.faults.extend(other_teacher(&set, teacher, &found));
    }
    let mut done = Vec::new();
    if settings.discard_damaged && !report.stopped {
        for shard in report.damaged_shards() {
            done.push(format!(
                "discarded  {shard}, now in {}",
                set.discard(shard)?
            ));
        }
    }
    if settings.clean && !report.stopped {
        let besides = set.besides()?;
        set.clean(&besides)?;
        let removed = besides.leftovers.iter().filter(|l| l.removable);
        done.extend(removed.map(|l| format!("removed    {}", set.place(&l.name))));
    }
    let outcome = outcome(&set, settings, &report, &done)?;
    if let Some(path) = &settings.report {
        let besides = set.besides()?;
        let verdict = verdict(settings, &report);
        let leftovers = leftover_lines(&set, &besides);
        write_page(
            path,
            &verify_page::page(&set, &report, &verdict, &leftovers),
        )?;
        progress::note(&format!("report: {}", path.display()));
    }
    Ok(outcome)
}

fn open_corpus(set: &ScoredSet, settings: &VerifySettings) -> Result<CorpusReader> {
    let noted = PathBuf::from(&set.job().corpus_path);
    let path = settings.corpus.as_ref().unwrap_or(&noted);
    CorpusReader::open(path).with_context(|| match settings.corpus {
        Some(_) => "corpus".to_owned(),
        None => format!(
            "the corpus noted in {} can't be opened; if it has moved, give --corpus",
            set.place("job.json")
        ),
    })
}

struct Watched<'a> {
    progress: Progress,
    interrupt: &'a Interrupt,
}

impl Watch for Watched<'_> {
    fn shard_done(&self, _rows: u64) {
        self.progress.add(1, "");
    }

    fn stopped(&self) -> bool {
        self.interrupt.is_raised()
    }
}

fn other_teacher(set: &ScoredSet, teacher: &Path, found: &str) -> Option<String> {
    let stated = set.job().identity_text(identity::TEACHER);
    (stated != Some(found)).then(|| {
        format!(
            "{}: expected the teacher {} of job.json, found {found}: it is another teacher",
            teacher.display(),
            stated.unwrap_or("none")
        )
    })
}

fn outcome(
    set: &ScoredSet,
    settings: &VerifySettings,
    report: &Report,
    done: &[String],
) -> Result<Outcome> {
    let besides = set.besides()?;
    let mut lines = facts(set, report);
    lines.extend(done.iter().cloned());
    lines.extend(leftover_lines(set, &besides));
    lines.extend(
        report
            .faults
            .iter()
            .map(|what| format!("fault      {what}")),
    );
    lines.extend(
        report
            .damaged
            .iter()
            .map(|d| format!("damaged    {}: {}", d.shard, d.what)),
    );
    lines.extend(missing_line(report));
    lines.push(verdict(settings, report));
    Ok(Outcome {
        text: lines.join("\n"),
        json: as_json(set, report, &besides, done),
        status: if report.is_sound() {
            Status::Done
        } else {
            Status::Unfinished
        },
    })
}

fn facts(set: &ScoredSet, report: &Report) -> Vec<String> {
    let terms = set.terms();
    let mut lines = vec![
        format!(
            "identity   {} (k {}, {} ids)",
            set.job().identity_sha256(),
            terms.k,
            terms.vocab_scored
        ),
        format!(
            "shards     {} of {} sound: {} rows, {} tokens",
            report.sound, report.planned, report.rows, report.tokens
        ),
    ];
    if let (Some(logp), Some(tail)) = (report.mean_target_logp, report.mean_tail) {
        let note = super::text::target_logp_note(terms);
        lines.push(format!(
            "mean       target log-prob {logp:.4}{note}, tail {tail:.4}"
        ));
    }
    for (provenance, shards) in &report.provenances {
        let text = named_values(provenance).join(", ");
        lines.push(format!("made by    {text} ({})", shards_text(*shards)));
    }
    if set.job().identity.get("trust_tokens") == Some(&Value::Bool(true)) {
        lines.push(
            "trusted    --trust-tokens: that the corpus's tokenizer is the teacher's was not checked"
                .to_owned(),
        );
    }
    for (step, paired) in [
        ("before", report.shift.before),
        ("after", report.shift.after),
    ] {
        if paired.pairs > 0 {
            lines.push(shift_line(step, &paired));
        }
    }
    lines
}

/// The values of a document, each behind its own key, nesting left out.
fn named_values(document: &Value) -> Vec<String> {
    let Some(object) = document.as_object() else {
        return vec![document.to_string()];
    };
    let named = object.iter().flat_map(|(key, value)| match value {
        Value::Object(_) => named_values(value),
        Value::String(text) => vec![format!("{key} {text}")],
        other => vec![format!("{key} {other}")],
    });
    named.collect()
}

fn shards_text(shards: usize) -> String {
    match shards {
        1 => "1 shard".to_owned(),
        n => format!("{n} shards"),
    }
}

fn shift_line(step: &str, paired: &Paired) -> String {
    let how = if paired.mean() < 0.0 {
        "worse"
    } else {
        "better"
    };
    format!(
        "shift      targets fit {:.4} nats {how} than the token {step} them (standard error {:.4}, {} rows)",
        paired.mean().abs(),
        paired.standard_error(),
        paired.pairs
    )
}

/// One line for each leftover, and one for what was moved aside.
pub(super) fn leftover_lines(set: &ScoredSet, besides: &Besides) -> Vec<String> {
    let mut lines: Vec<String> = besides
        .leftovers
        .iter()
        .map(|l| {
            let note = if l.removable {
                "; --clean removes it"
            } else {
                ""
            };
            format!(
                "leftover   {} ({} bytes{note})",
                set.place(&l.name),
                l.bytes
            )
        })
        .collect();
    if besides.discarded_bytes > 0 {
        lines.push(format!(
            "aside      {} ({} bytes); yours to remove",
            set.place("discarded"),
            besides.discarded_bytes
        ));
    }
    lines
}

fn missing_line(report: &Report) -> Option<String> {
    const NAMED_MAX: usize = 8;
    if report.missing.is_empty() {
        return None;
    }
    let named: Vec<_> = report.missing.iter().take(NAMED_MAX).cloned().collect();
    let more = match report.missing.len().saturating_sub(NAMED_MAX) {
        0 => String::new(),
        n => format!(" and {n} more"),
    };
    Some(format!("missing    {}{more}", named.join(", ")))
}

/// The last line.
fn verdict(settings: &VerifySettings, report: &Report) -> String {
    let alignment = report.shift.alignment();
    if report.stopped {
        return "interrupted: not all shards were looked at; run verify again".to_owned();
    }
    if !report.faults.is_empty() {
        return "not verified: see each fault above; scoring again does not cure them".to_owned();
    }
    if !report.damaged.is_empty() {
        let shards = shards_text(report.damaged_shards().len());
        return match settings.discard_damaged {
            true => {
                format!("damaged: {shards}, moved aside; run the same score command again")
            }
            false => format!(
                "damaged: {shards}; `kdscore verify --discard-damaged` moves them aside, then the same score command makes them again"
            ),
        };
    }
    if !report.missing.is_empty() {
        return format!(
            "unfinished: {} of {} shards missing; run the same score command again",
            report.missing.len(),
            report.planned
        );
    }
    let proved = format!(
        "verified: {}, {} rows",
        shards_text(report.sound),
        report.rows
    );
    match alignment {
        Alignment::Aligned => format!("{proved}, aligned"),
        Alignment::CannotTell => format!(
            "{proved}, every target the corpus's; the shift test can't tell from {}: it needs {PAIRS_MIN} rows and a difference of {ERRORS_MIN} standard errors",
            report.shift.before.pairs
        ),
        Alignment::Shifted(step) => format!(
            "misaligned: {} rows fit the token {step:+} from their target better than the target; the scores are shifted, or the teacher only repeats its input",
            report.rows
        ),
    }
}

fn as_json(set: &ScoredSet, report: &Report, besides: &Besides, done: &[String]) -> Value {
    let paired = |p: &Paired| match p.pairs {
        0 => Value::Null,
        _ => json!({"pairs": p.pairs, "mean": p.mean(), "standard_error": p.standard_error()}),
    };
    let damaged = report.damaged.iter();
    let damaged: Vec<Value> = damaged
        .map(|d| json!({"shard": d.shard, "what": d.what}))
        .collect();
    let provenances = report.provenances.iter();
    let provenances: Vec<Value> = provenances
        .map(|(provenance, shards)| json!({"provenance": provenance, "shards": shards}))
        .collect();
    json!({
        "sound": report.is_sound(),
        "identity_sha256": set.job().identity_sha256(),
        "shards": report.planned,
        "sound_shards": report.sound,
        "rows": report.rows,
        "tokens": report.tokens,
        "missing": report.missing,
        "damaged": damaged,
        "faults": report.faults,
        "alignment": match report.shift.alignment() {
            Alignment::Aligned => "aligned",
            Alignment::Shifted(_) => "misaligned",
            Alignment::CannotTell => "can't tell",
        },
        "shift_before": paired(&report.shift.before),
        "shift_after": paired(&report.shift.after),
        "mean_target_logp": report.mean_target_logp,
        "mean_tail": report.mean_tail,
        "provenances": provenances,
        "leftovers": leftovers_json(besides),
        "discarded_bytes": besides.discarded_bytes,
        "stopped": report.stopped,
        "done": done,
    })
}

pub(super) fn leftovers_json(besides: &Besides) -> Vec<Value> {
    let leftovers = besides.leftovers.iter();
    leftovers
        .map(|l| json!({"name": l.name, "bytes": l.bytes, "removable": l.removable}))
        .collect()
}
