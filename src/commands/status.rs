//! `kdscore status`: how far a scored set is, without reading its arrays.

use std::path::Path;

use anyhow::Result;
use serde_json::json;

use super::verify::{leftover_lines, leftovers_json};
use super::{Outcome, Status};
use crate::store::ScoredSet;
use crate::store::leftovers::stored_bytes;
use crate::store::manifest::Manifest;

pub fn status(out: &Path) -> Result<Outcome> {
    let set = ScoredSet::open(out)?;
    let plan = &set.job().plan;
    let found: Vec<Result<Option<Manifest>>> = plan.iter().map(|p| set.manifest(p)).collect();
    let mut damaged: Vec<String> = found
        .iter()
        .filter_map(|m| m.as_ref().err().map(|e| format!("{e:#}")))
        .collect();
    let done: Vec<&Manifest> = found.iter().flatten().flatten().collect();
    let missing = set.missing_arrays(&done)?;
    damaged.extend(missing);
    let left = plan.len() - done.len();
    let rows: u64 = done.iter().map(|m| m.rows).sum();
    let tokens: u64 = done.iter().map(|m| m.tokens).sum();
    let bytes: u64 = done.iter().map(|m| stored_bytes(m)).sum();
    let besides = set.besides()?;
    let mut lines = vec![
        format!("corpus     {}", set.job().corpus_path),
        format!(
            "shards     {} of {} committed, {left} left",
            done.len(),
            plan.len()
        ),
        format!("rows       {rows} ({tokens} tokens, {bytes} bytes)"),
    ];
    lines.extend(damaged.iter().map(|what| format!("damaged    {what}")));
    lines.extend(leftover_lines(&set, &besides));
    lines.push(match (left, damaged.len()) {
        (0, 0) => "all shards are committed; `kdscore verify` proves them".to_owned(),
        (_, 0) => "run the same score command again to go on".to_owned(),
        _ => "move damaged shards aside with `kdscore verify --discard-damaged`, then score again"
            .to_owned(),
    });
    Ok(Outcome {
        text: lines.join("\n"),
        json: json!({
            "corpus": set.job().corpus_path,
            "shards": plan.len(),
            "committed": done.len(),
            "left": left,
            "rows": rows,
            "tokens": tokens,
            "bytes": bytes,
            "damaged": damaged,
            "leftovers": leftovers_json(&besides),
            "discarded_bytes": besides.discarded_bytes,
        }),
        status: if left == 0 && damaged.is_empty() {
            Status::Done
        } else {
            Status::Unfinished
        },
    })
}
