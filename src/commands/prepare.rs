//! `prepare`: source rows to a token corpus.

use std::io::ErrorKind;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value, json};

use super::text::{self, count};
use super::{Interrupt, Outcome, Status};
use crate::canonical::{Seal, unseal};
use crate::config::PrepareSettings;
use crate::corpus::{
    self, ChatTemplate, CorpusMaker, CorpusPlan, Lint, Probes, SourceFile, Step, Summary,
    TextTokenizer,
};
use crate::progress::{Progress, ask};
use crate::store::{CorpusWriter, Created, OtherStaging};

const MANIFEST: &str = "corpus.json";

/// Makes the corpus, or finds that it is made already, of the same sources in the same way.
///
/// # Errors
/// Anything wrong with sources, tokenizer, template or settings; a folder that holds another
/// corpus. Nothing is left half-written.
pub fn prepare(settings: PrepareSettings, interrupt: &Interrupt) -> Result<Outcome> {
    let out = settings.out.clone();
    refuse_inside(&settings.data, &out)?;
    let maker = CorpusMaker::open(plan(settings))?;
    let probes = match (maker.tokenizer(), maker.template()) {
        (Some(tokenizer), Some(template)) => Some(Probes::render(tokenizer, template)),
        _ => None,
    };
    let facts = settled_facts(&maker, probes.as_ref());
    let files = maker.files().to_vec();
    if let Some(made) = read_manifest(&out)? {
        check_same(&out, &made, &facts, &hashes_of(&files)?)?;
        return Ok(already_prepared(&out, made));
    }
    let mut writer = CorpusWriter::create(&out)?;
    for other in writer.other_stagings() {
        ask(&told(&other));
    }
    write_tokenizer(&mut writer, &maker, probes.as_ref())?;
    let bytes = source_bytes(&files);
    let progress = Progress::new("preparing", "bytes", bytes, 0);
    let mut watch = watcher(&progress, interrupt);
    let made = maker.make(&mut watch, &mut |shard| writer.write_shard(&shard))?;
    drop(watch);
    progress.finish();
    let Some(summary) = made else {
        return Ok(interrupted(&out));
    };
    let hashes: Vec<_> = summary.sources.iter().map(|s| s.sha256.clone()).collect();
    let mut document = facts.clone();
    document.extend(counted_facts(&summary));
    let created = writer.finish(document)?;
    let made = read_manifest(&out)?
        .with_context(|| format!("{}: expected a new or empty folder, found one that was filled meanwhile; give another --out", out.display()))?;
    match created {
        Created::New => Ok(outcome(
            &out,
            "prepared",
            &format!("prepared {}", out.display()),
            made,
        )),
        Created::WasThere => {
            check_same(&out, &made, &facts, &hashes)?;
            Ok(already_prepared(&out, made))
        }
    }
}

/// A corpus among the source files would be read as source rows by the next run.
fn refuse_inside(data: &[PathBuf], out: &Path) -> Result<()> {
    match corpus::path_above(data, out) {
        None => Ok(()),
        Some(path) => bail!(
            "{}: expected a folder outside of --data, found one inside of {}, where the next run would read it; \
             give another --out",
            out.display(),
            path.display()
        ),
    }
}

/// What another run's staging folder means for this one.
fn told(other: &OtherStaging) -> String {
    let means = match other.is_at_work {
        Some(true) => {
            "another prepare is making this corpus now; the first to finish gives it its name"
        }
        Some(false) => "left by a run that was killed; remove it",
        None => "left by a run that was killed, or that is at work now; remove it if none is",
    };
    format!("{}: {means}", other.folder.display())
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
        "tokenizer_settings": maker.tokenizer().map(|t| t.settings()),
        "tokenizer_class": maker.tokenizer().and_then(TextTokenizer::class),
        "bos_token": maker.tokenizer().and_then(bos_text),
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
    let lengths = summary.lengths;
    let lengths = json!({"min": lengths.min, "median": lengths.median, "p90": lengths.p90, "p99": lengths.p99, "max": lengths.max});
    facts.insert("lengths".into(), lengths);
    let left_out = summary.left_out.iter().map(|(r, c)| (r.name(), &c.example));
    let lints = summary.lints.iter().map(|(l, c)| (l.name(), &c.example));
    let examples: Map<_, _> = left_out
        .chain(lints)
        .map(|(name, example)| (name.to_owned(), example.as_str().into()))
        .collect();
    facts.insert("first_examples".into(), examples.into());
    facts
}

/// The manifest of a corpus that is there already.
fn read_manifest(out: &Path) -> Result<Option<Map<String, Value>>> {
    let path = out.join(MANIFEST);
    let bytes = match std::fs::read(&path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        Err(e) if e.kind() == ErrorKind::NotADirectory => bail!(
            "{}: expected a new or empty folder, found a file; give another --out",
            out.display()
        ),
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
    now: &[String],
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
    let hash = |s: &Value| s["sha256"].as_str().unwrap_or_default().to_owned();
    let there = made.get("sources").and_then(Value::as_array);
    let there: Vec<String> = there.into_iter().flatten().map(hash).collect();
    if there != now {
        differs("sources of sha256", &short(&there), &short(now))?;
    }
    Ok(())
}

fn hashes_of(files: &[PathBuf]) -> Result<Vec<String>> {
    let files = corpus::hash_files(files)?;
    Ok(files.into_iter().map(|f| f.sha256).collect())
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
    for name in [
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
    ] {
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

fn source_bytes(data: &[PathBuf]) -> u64 {
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

fn already_prepared(out: &Path, made: Map<String, Value>) -> Outcome {
    let headline = format!(
        "{}: already prepared, of the same sources in the same way; nothing to do",
        out.display()
    );
    outcome(out, "already prepared", &headline, made)
}

/// What a manifest says about its corpus: the same facts however the corpus came to be there.
fn outcome(out: &Path, status: &str, headline: &str, mut facts: Map<String, Value>) -> Outcome {
    facts.shift_remove("self_sha256");
    let shards = facts.shift_remove("shards").unwrap_or_default();
    let shards = shards.as_array().map_or(&[][..], Vec::as_slice);
    let total = |key: &str| shards.iter().map(|s| number(&s[key])).sum::<u64>();
    for (key, value) in [
        ("status", status.into()),
        ("corpus", out.to_string_lossy().into()),
        ("shards", shards.len().into()),
        ("sequences", total("sequences").into()),
        ("tokens", total("tokens").into()),
        ("rows", total("rows").into()),
    ] {
        facts.insert(key.into(), value);
    }
    let facts = Value::Object(facts);
    Outcome {
        text: format!("{headline}\n\n{}", table(&facts)),
        json: facts,
        status: Status::Done,
    }
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_default()
}

fn table(facts: &Value) -> String {
    let word = |key: &str| facts[key].as_str().unwrap_or("none").to_owned();
    let figure = |key: &str| number(&facts[key]);
    let example = |name: &str| facts["first_examples"][name].as_str().unwrap_or_default();
    let left_out = facts["left_out"].as_object().into_iter().flatten();
    let left_out: Vec<_> = left_out.map(|(reason, n)| (reason, number(n))).collect();
    let share = 100.0 * figure("rows") as f64 / figure("tokens").max(1) as f64;
    let sequences = count(figure("sequences"));
    let shards = text::plural(figure("shards") as usize, "shard");
    let format = format!("{}, {}", word("format"), word("loss"));
    let mut lines = vec![
        ("format, loss", format),
        ("source rows", count(figure("source_rows"))),
        ("sequences", format!("{sequences} in {shards}")),
        ("left out", count(left_out.iter().map(|(_, n)| n).sum())),
    ];
    for (reason, n) in left_out {
        lines.push((
            "",
            format!("{} {reason}, first: {}", count(n), example(reason)),
        ));
    }
    lines.extend([
        ("tokens", count(figure("tokens"))),
        (
            "rows to score",
            format!("{} ({share:.1} % of the tokens)", count(figure("rows"))),
        ),
        ("length", length_line(&facts["lengths"])),
        ("vocabulary", vocabulary(facts)),
        ("BOS", bos_state(facts)),
    ]);
    for lint in Lint::ALL {
        let n = number(&facts["lint"][lint.name()]);
        if n > 0 {
            let (meaning, example) = (lint.meaning(), example(lint.name()));
            lines.push((
                "warning",
                format!("{} {meaning}; first: {example}", count(n)),
            ));
        }
    }
    text::facts(&lines)
}

fn length_line(lengths: &Value) -> String {
    let figures = ["min", "median", "p90", "p99", "max"];
    let figures = figures.map(|name| format!("{} {name}", count(number(&lengths[name]))));
    figures.join(", ")
}

fn vocabulary(facts: &Value) -> String {
    let size = count(number(&facts["vocab_size"]));
    match facts["tokenizer_class"].as_str() {
        None => size,
        Some(class) => format!(
            "{size}; tokenised as transformers 5's {class} does, which has steps of its own beside tokenizer.json \
             (--template-rules transformers-4 takes the file's)"
        ),
    }
}

fn bos_state(facts: &Value) -> String {
    let Some(bos) = facts["bos_token"].as_str() else {
        return "the tokenizer names none".to_owned();
    };
    match number(&facts["lint"][Lint::MissingBos.name()]) {
        0 => format!("{bos} starts every sequence"),
        missing if missing == number(&facts["sequences"]) => format!("{bos} starts no sequence"),
        missing => format!("{bos} starts all sequences but {}", count(missing)),
    }
}
