//! `prepare`: source rows to a token corpus.

use std::ops::ControlFlow;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value, json};

use super::text::{self, count};
use super::{Interrupt, Outcome, Status};
use crate::canonical::{Seal, unseal};
use crate::config::PrepareSettings;
use crate::corpus::{
    self, ChatTemplate, CorpusMaker, CorpusPlan, Lengths, Lint, Probes, SourceFile, Step, Summary,
    TextTokenizer,
};
use crate::progress::{Progress, note};
use crate::store::CorpusWriter;

const MANIFEST: &str = "corpus.json";

/// Makes the corpus, or finds that it is made already, of the same sources in the same way.
///
/// # Errors
/// Anything wrong with sources, tokenizer, template or settings; a folder that holds another
/// corpus. Nothing is left half-written.
pub fn prepare(settings: PrepareSettings, interrupt: &Interrupt) -> Result<Outcome> {
    let out = settings.out.clone();
    let maker = CorpusMaker::open(plan(settings))?;
    let probes = match (maker.tokenizer(), maker.template()) {
        (Some(tokenizer), Some(template)) => Some(Probes::render(tokenizer, template)),
        _ => None,
    };
    let mut facts = settled_facts(&maker, probes.as_ref());
    if let Some(made) = read_manifest(&out)? {
        check_same(&out, &made, &facts, maker.files())?;
        return Ok(already_prepared(&out, made));
    }
    let mut writer = CorpusWriter::create(&out)?;
    for folder in writer.other_staging_folders() {
        note(&format!(
            "{}: left by a run that was killed, or that is at work now; remove it if none is",
            folder.display()
        ));
    }
    write_tokenizer(&mut writer, &maker, probes.as_ref())?;
    let bos = maker.tokenizer().and_then(bos_text);
    let bytes = source_bytes(maker.files());
    let progress = Progress::new("preparing", "bytes", bytes, 0);
    let mut watch = watcher(&progress, interrupt);
    let mut shards = 0_u64;
    let made = maker.make(&mut watch, &mut |shard| {
        shards += 1;
        writer.write_shard(&shard)
    })?;
    drop(watch);
    progress.finish();
    let Some(summary) = made else {
        return Ok(interrupted(&out));
    };
    facts.extend(counted_facts(&summary));
    writer.finish(facts.clone())?;
    Ok(finished(&out, facts, &summary, shards, bos.as_deref()))
}

fn plan(settings: PrepareSettings) -> CorpusPlan {
    CorpusPlan {
        data: settings.data,
        split: settings.split,
        tokenizer: settings.tokenizer,
        format: settings.format,
        loss: settings.loss,
        template: settings.template,
        mask_template: settings.mask_template,
        straddle: settings.straddle,
        allow_control_tokens: settings.allow_control_tokens,
        row_rules: settings.row_rules,
        null_fields: settings.null_fields,
        max_length: settings.max_length,
        on_overlong: settings.on_overlong,
        on_bad_row: settings.on_bad_row,
        shard_tokens: settings.shard_tokens,
        vocab_size: settings.vocab_size,
    }
}

/// Facts known before the first row is read: what the corpus is made from, and how.
fn settled_facts(maker: &CorpusMaker, probes: Option<&Probes>) -> Map<String, Value> {
    let plan = maker.plan();
    let facts = json!({
        "vocab_size": maker.vocab_size(),
        "tokenizer_fingerprint": maker.tokenizer().map(|t| t.fingerprint()),
        "template_fingerprint": probes.map(Probes::fingerprint),
        "template_args": plan.template.args.iter().cloned().collect::<Map<_, _>>(),
        "template_date": plan.template.date.map(|d| d.to_string()),
        "template_rules": probes.map(|_| plan.template.rules.name()),
        "mask_source": maker.mask_source(),
        "straddle": plan.straddle.name(),
        "allow_control_tokens": plan.allow_control_tokens,
        "null_fields": plan.null_fields.name(),
        "map": pairs(&plan.row_rules.map),
        "roles": pairs(&plan.row_rules.roles),
        "ignored_keys": plan.row_rules.ignored_keys,
        "tool_arguments": if plan.row_rules.arguments_as_given { "as-given" } else { "object" },
        "loss": maker.loss().name(),
        "format": maker.format(),
        "max_length": plan.max_length,
        "on_overlong": plan.on_overlong.name(),
        "on_bad_row": plan.on_bad_row.name(),
        "shard_tokens": plan.shard_tokens,
    });
    match facts {
        Value::Object(facts) => facts,
        _ => unreachable!("the facts are written as an object above"),
    }
}

fn pairs(pairs: &[(String, String)]) -> Value {
    let pair = |(name, value): &(String, String)| (name.clone(), Value::from(value.as_str()));
    pairs.iter().map(pair).collect::<Map<_, _>>().into()
}

/// Facts that reading every row gives.
fn counted_facts(summary: &Summary) -> Map<String, Value> {
    let source = |s: &SourceFile| json!({"path": s.path.to_string_lossy(), "bytes": s.bytes, "sha256": s.sha256});
    let left_out = summary.left_out.iter();
    let left_out: Map<_, _> = left_out
        .map(|(reason, c)| (reason.name().to_owned(), c.count.into()))
        .collect();
    let noticed = |lint: &Lint| summary.lints.get(lint).map_or(0, |c| c.count);
    let lint: Map<_, _> = Lint::ALL
        .iter()
        .map(|l| (l.name().to_owned(), noticed(l).into()))
        .collect();
    let mut facts = Map::new();
    facts.insert(
        "sources".into(),
        summary.sources.iter().map(source).collect(),
    );
    facts.insert("source_rows".into(), summary.source_rows.into());
    facts.insert("left_out".into(), left_out.into());
    facts.insert("lint".into(), lint.into());
    facts
}

/// The manifest of a corpus that is there already.
fn read_manifest(out: &Path) -> Result<Option<Map<String, Value>>> {
    let path = out.join(MANIFEST);
    let bytes = match std::fs::read(&path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e).with_context(|| format!("{}: can't read", path.display())),
    };
    let manifest = unseal(&bytes, Seal::Optional);
    manifest
        .map(Some)
        .with_context(|| path.display().to_string())
}

/// # Errors
/// The first fact in which the corpus differs from what would be made now, with both values.
fn check_same(
    out: &Path,
    made: &Map<String, Value>,
    facts: &Map<String, Value>,
    data: &[std::path::PathBuf],
) -> Result<()> {
    let differs = |field: &str, there: &str, now: &str| -> Result<()> {
        bail!(
            "{}: expected a corpus with {field} {now}, found one with {there}; \
             give another --out, or remove the folder to make it anew",
            out.display()
        )
    };
    for (field, now) in facts {
        let there = made.get(field).unwrap_or(&Value::Null);
        if there != now {
            differs(field, &there.to_string(), &now.to_string())?;
        }
    }
    let hashes = |sources: &Value| -> Vec<String> {
        let sources = sources.as_array().cloned().unwrap_or_default();
        let hash = |s: &Value| s["sha256"].as_str().unwrap_or_default().to_owned();
        sources.iter().map(hash).collect()
    };
    let there = hashes(made.get("sources").unwrap_or(&Value::Null));
    let now: Vec<_> = corpus::hash_files(data)?
        .into_iter()
        .map(|s| s.sha256)
        .collect();
    if there != now {
        differs("sources of sha256", &short(&there), &short(&now))?;
    }
    Ok(())
}

fn short(hashes: &[String]) -> String {
    let short = hashes.iter().map(|h| h.get(..12).unwrap_or(h));
    short.collect::<Vec<_>>().join(", ")
}

/// The tokenizer as it was, and the probe chats, for whoever reads the corpus.
fn write_tokenizer(
    writer: &mut CorpusWriter,
    maker: &CorpusMaker,
    probes: Option<&Probes>,
) -> Result<()> {
    let Some(tokenizer) = maker.tokenizer() else {
        return Ok(());
    };
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        let path = tokenizer.folder().join(name);
        if path.exists() {
            let bytes =
                std::fs::read(&path).with_context(|| format!("{}: can't read", path.display()))?;
            writer.write_file(&format!("tokenizer/{name}"), &bytes)?;
        }
    }
    for template in maker.template().into_iter().flat_map(ChatTemplate::sources) {
        let name = match template.name.as_str() {
            "default" => "tokenizer/chat_template.jinja".to_owned(),
            other => format!(
                "tokenizer/additional_chat_templates/{}.jinja",
                file_name(other)
            ),
        };
        writer.write_file(&name, template.text.as_bytes())?;
    }
    if let Some(probes) = probes {
        writer.write_file("probes.json", &probes.document())?;
    }
    Ok(())
}

/// A template's name, which a checkpoint chose, as the name of a file.
fn file_name(name: &str) -> String {
    let plain = |c: char| {
        if c.is_alphanumeric() || "-_.".contains(c) {
            c
        } else {
            '_'
        }
    };
    name.chars()
        .map(plain)
        .collect::<String>()
        .trim_start_matches('.')
        .to_owned()
}

fn bos_text(tokenizer: &TextTokenizer) -> Option<String> {
    tokenizer.token(tokenizer.bos()?)
}

fn source_bytes(data: &[std::path::PathBuf]) -> u64 {
    let bytes = |path| std::fs::metadata(path).map_or(0, |m| m.len());
    data.iter().map(bytes).sum()
}

fn watcher<'a>(
    progress: &'a Progress,
    interrupt: &'a Interrupt,
) -> impl FnMut(Step) -> ControlFlow<()> + 'a {
    let (started, mut tokens) = (Instant::now(), 0);
    move |step: Step| {
        tokens += step.tokens;
        let rate = tokens as f64 / started.elapsed().as_secs_f64().max(1e-3);
        progress.add(step.bytes, &format!("{} tokens/s", count(rate as u64)));
        if interrupt.is_raised() {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    }
}

fn interrupted(out: &Path) -> Outcome {
    Outcome {
        text: format!(
            "interrupted: nothing was written to {}; run the same command again to start over",
            out.display()
        ),
        json: json!({"status": "interrupted", "corpus": out.to_string_lossy()}),
        status: Status::Unfinished,
    }
}

fn already_prepared(out: &Path, mut made: Map<String, Value>) -> Outcome {
    made.retain(|key, _| key != "shards" && key != "self_sha256");
    made.insert("status".into(), "already prepared".into());
    made.insert("corpus".into(), out.to_string_lossy().into());
    Outcome {
        text: format!(
            "{}: already prepared, of the same sources in the same way; nothing to do",
            out.display()
        ),
        json: made.into(),
        status: Status::Done,
    }
}

fn finished(
    out: &Path,
    facts: Map<String, Value>,
    summary: &Summary,
    shards: u64,
    bos: Option<&str>,
) -> Outcome {
    let mut json = facts;
    let lengths = summary.lengths;
    let examples =
        |(name, example): (&str, &String)| (name.to_owned(), Value::from(example.as_str()));
    let left_out = summary.left_out.iter().map(|(r, c)| (r.name(), &c.example));
    let lints = summary.lints.iter().map(|(l, c)| (l.name(), &c.example));
    let examples: Map<_, _> = left_out.chain(lints).map(examples).collect();
    for (key, value) in [
        ("status", "prepared".into()),
        ("corpus", out.to_string_lossy().into()),
        ("shards", shards.into()),
        ("sequences", summary.sequences.into()),
        ("tokens", summary.tokens.into()),
        ("rows", summary.rows.into()),
        (
            "lengths",
            json!({"min": lengths.min, "median": lengths.median, "p90": lengths.p90, "p99": lengths.p99, "max": lengths.max}),
        ),
        ("first_examples", examples.into()),
    ] {
        json.insert(key.into(), value);
    }
    Outcome {
        text: table(out, &json, summary, shards, bos),
        json: json.into(),
        status: Status::Done,
    }
}

fn table(
    out: &Path,
    facts: &Map<String, Value>,
    summary: &Summary,
    shards: u64,
    bos: Option<&str>,
) -> String {
    let word = |key: &str| facts[key].as_str().unwrap_or("none").to_owned();
    let left_out: u64 = summary.left_out.values().map(|c| c.count).sum();
    let share = 100.0 * summary.rows as f64 / summary.tokens.max(1) as f64;
    let mut lines = vec![
        (
            "format, loss",
            format!("{}, {}", word("format"), word("loss")),
        ),
        ("source rows", count(summary.source_rows)),
        (
            "sequences",
            format!(
                "{} in {} shard{}",
                count(summary.sequences),
                count(shards),
                if shards == 1 { "" } else { "s" }
            ),
        ),
        ("left out", count(left_out)),
    ];
    for (reason, c) in &summary.left_out {
        lines.push((
            "",
            format!("{} {}, first: {}", count(c.count), reason.name(), c.example),
        ));
    }
    lines.extend([
        ("tokens", count(summary.tokens)),
        (
            "rows to score",
            format!("{} ({share:.1} % of the tokens)", count(summary.rows)),
        ),
        ("length", length_line(&summary.lengths)),
        (
            "vocabulary",
            count(facts["vocab_size"].as_u64().unwrap_or_default()),
        ),
        ("BOS", bos_state(summary, bos)),
    ]);
    for (lint, c) in &summary.lints {
        lines.push((
            "warning",
            format!(
                "{} {}; first: {}",
                count(c.count),
                lint.meaning(),
                c.example
            ),
        ));
    }
    format!("prepared {}\n\n{}", out.display(), text::facts(&lines))
}

fn length_line(lengths: &Lengths) -> String {
    let figures = [
        lengths.min,
        lengths.median,
        lengths.p90,
        lengths.p99,
        lengths.max,
    ];
    let [min, median, p90, p99, max] = figures.map(|l| count(l as u64));
    format!("{min} min, {median} median, {p90} p90, {p99} p99, {max} max")
}

fn bos_state(summary: &Summary, bos: Option<&str>) -> String {
    let Some(bos) = bos else {
        return "the tokenizer names none".to_owned();
    };
    match summary.lints.get(&Lint::MissingBos).map_or(0, |c| c.count) {
        0 => format!("{bos} starts every sequence"),
        missing if missing == summary.sequences => format!("{bos} starts no sequence"),
        missing => format!("{bos} starts all sequences but {}", count(missing)),
    }
}
