//! `show`: rows as a person reads them, from a scored set or from a text scored on the spot.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::text::{self, Align};
use super::{Outcome, Status};
use crate::cli::ShowArgs;
use crate::corpus::{Decoder as TokenDecoder, Sequence};
use crate::store::{CorpusReader, PlannedShard, ScoredRows, ScoredSet};

/// Columns of text before a row that are shown.
const CONTEXT_WIDTH: usize = 36;
/// Ids of a row that are shown.
const SHOWN_K: usize = 5;
/// Tokens decoded to make the context of a row.
const CONTEXT_TOKENS: usize = 24;

/// # Errors
/// No scored set, no such sequence, or a shard that is not committed yet.
pub fn show(args: &ShowArgs) -> Result<Outcome> {
    if let Some(teacher) = &args.teacher {
        return super::try_teacher::score_text(teacher, args);
    }
    if let (None, Some(corpus)) = (&args.out, &args.corpus) {
        return super::show_corpus::show_corpus(corpus, args.sequence);
    }
    let out = args.out.as_deref().context("expected a scored set")?;
    let viewer = Viewer::open(out, args.corpus.as_deref())?;
    viewer.sequence(args.sequence, args.from, args.rows)
}

/// A scored set beside its corpus.
#[derive(Debug)]
pub struct Viewer {
    set: ScoredSet,
    corpus: CorpusReader,
    decoder: Option<TokenDecoder>,
}

/// One row, decoded.
struct ShownRow {
    position: usize,
    context: String,
    target: String,
    target_id: i32,
    target_logp: Option<f32>,
    /// Lowest stored log-prob: a target outside the top-k is below it.
    lowest: f32,
    best: Vec<(String, f32)>,
    best_ids: Vec<i32>,
    tail: f32,
}

impl Viewer {
    /// # Errors
    /// No scored set, or no corpus where job.json or `corpus` says.
    pub fn open(out: &Path, corpus: Option<&Path>) -> Result<Viewer> {
        let set = ScoredSet::open(out)?;
        let folder = match corpus {
            Some(folder) => folder.to_path_buf(),
            None => PathBuf::from(&set.job().corpus_path),
        };
        let corpus = CorpusReader::open(&folder).with_context(|| {
            format!(
                "the set's corpus can't be opened at {}; if it has moved, give --corpus",
                folder.display()
            )
        })?;
        let tokenizer = folder.join("tokenizer");
        let decoder = tokenizer.is_dir().then(|| TokenDecoder::load(&tokenizer));
        Ok(Viewer {
            set,
            corpus,
            decoder: decoder.transpose()?,
        })
    }

    fn sequence(&self, number: u64, from: usize, rows_max: usize) -> Result<Outcome> {
        let (shown, total) = self.rows_of(number, |rows| {
            rows.into_iter().skip(from).take(rows_max).collect()
        })?;
        ensure!(
            from < total.max(1),
            "from: expected less than {total}, the rows of sequence {number}, found {from}"
        );
        let text = if total == 0 {
            format!("sequence {number} has no scored position\n")
        } else {
            let end = from + shown.len();
            format!(
                "sequence {number}: rows {from} to {end} of {total}\n\n{}",
                table_of(&shown)
            )
        };
        let rows: Vec<Value> = shown.iter().map(ShownRow::json).collect();
        Ok(Outcome {
            text,
            json: json!({"sequence": number, "rows_total": total, "rows": rows}),
            status: Status::Done,
        })
    }

    /// `count` rows worth a look, from different sequences: of each the one where the teacher is
    /// least sure, among those where the target is one of its first choices.
    ///
    /// # Errors
    /// As for opening; a set with a shard that is not committed.
    pub fn highlights(&self, count: usize) -> Result<(String, Value)> {
        let sequences = self.corpus.sequences();
        let mut shown = Vec::new();
        for pick in 0..count as u64 {
            let number = (sequences * (2 * pick + 1)) / (2 * count as u64);
            let (row, _) = self.rows_of(number.min(sequences.saturating_sub(1)), |rows| {
                let first = |r: &ShownRow| r.best.first().map_or(0.0, |b| b.1);
                let unsure = rows.into_iter().min_by(|a, b| {
                    (!a.is_expected(), first(a))
                        .partial_cmp(&(!b.is_expected(), first(b)))
                        .unwrap_or(std::cmp::Ordering::Equal)
                });
                unsure.into_iter().collect()
            })?;
            shown.extend(row);
        }
        let rows = shown.iter().map(ShownRow::json).collect();
        Ok((table_of(&shown), rows))
    }

    /// The rows of a sequence that `choose` keeps, and how many there are.
    fn rows_of(
        &self,
        number: u64,
        choose: impl FnOnce(Vec<ShownRow>) -> Vec<ShownRow>,
    ) -> Result<(Vec<ShownRow>, usize)> {
        let (shard, local) = self.corpus.locate(number)?;
        let planned = self.planned(shard, local)?;
        let manifest = self
            .set
            .manifest(planned)?
            .with_context(|| format!("{}: not committed yet; score goes on with it", planned.id))?;
        let files = self.corpus.shard(shard)?;
        let sequence = files.view()?.sequence(local);
        let scored = self.set.shard(&manifest)?;
        let offsets = scored.row_offsets()?;
        let at = local - planned.first_sequence as usize;
        let span = offsets[at] as usize..offsets[at + 1] as usize;
        let rows = scored.rows()?;
        let positions = sequence.rows();
        let mut shown = Vec::with_capacity(span.len());
        for (row, position) in span.zip(positions) {
            ensure!(
                rows.target(row) == position.target,
                "{} row {row}: expected target {}, the corpus's, found {}; run verify",
                planned.id,
                position.target,
                rows.target(row)
            );
            shown.push(self.row(&rows, row, &sequence, position.position));
        }
        let total = shown.len();
        Ok((choose(shown), total))
    }

    fn planned(&self, shard: usize, local: usize) -> Result<&PlannedShard> {
        let id = &self.corpus.shards()[shard].id;
        let plan = &self.set.job().plan;
        let holds = |p: &&PlannedShard| p.corpus_shard == *id && p.range().contains(&local);
        plan.iter()
            .find(holds)
            .with_context(|| format!("expected {id} sequence {local} in the shard plan, found none; is this the set's corpus?"))
    }

    fn row(&self, rows: &ScoredRows, row: usize, sequence: &Sequence, position: usize) -> ShownRow {
        let target = rows.target(row);
        let best = (0..rows.k.min(SHOWN_K)).map(|j| {
            let id = rows.id(row, j);
            (self.piece(id), rows.logp(row, j))
        });
        let before = position.saturating_sub(CONTEXT_TOKENS - 1)..position + 1;
        ShownRow {
            position,
            context: self.text(&sequence.tokens[before]),
            target: self.piece(target),
            target_id: target,
            best_ids: (0..rows.k.min(SHOWN_K)).map(|j| rows.id(row, j)).collect(),
            target_logp: rows.rank(row, target).map(|j| rows.logp(row, j)),
            lowest: rows.logp(row, rows.k - 1),
            best: best.collect(),
            tail: rows.tail(row),
        }
    }

    fn piece(&self, id: i32) -> String {
        match &self.decoder {
            Some(decoder) => decoder.piece(id),
            None => id.to_string(),
        }
    }

    fn text(&self, ids: &[i32]) -> String {
        match &self.decoder {
            Some(decoder) => decoder.text(ids),
            None => ids.iter().map(|id| format!("{id} ")).collect(),
        }
    }
}

impl ShownRow {
    /// Whether the target is among the choices shown.
    fn is_expected(&self) -> bool {
        let lowest_shown = self.best.last().map_or(0.0, |b| b.1);
        self.target_logp.is_some_and(|logp| logp >= lowest_shown)
    }

    fn json(&self) -> Value {
        let best = self.best.iter().zip(&self.best_ids);
        json!({
            "position": self.position,
            "context": self.context,
            "target": self.target,
            "target_id": self.target_id,
            "target_logp": self.target_logp,
            "top": best.map(|((token, logp), id)| json!({"token": token, "id": id, "logp": logp})).collect::<Value>(),
            "tail": self.tail,
        })
    }

    fn cells(&self) -> Vec<String> {
        let logp = match self.target_logp {
            Some(logp) => format!("{logp:.2}"),
            None => format!("below {:.2}", self.lowest),
        };
        let best = self.best.iter();
        let best: Vec<String> = best
            .map(|(token, logp)| format!("{} {:.1}%", quoted(token), logp.exp() * 100.0))
            .collect();
        vec![
            self.position.to_string(),
            text::tail_of(&self.context, CONTEXT_WIDTH),
            quoted(&self.target),
            logp,
            best.join("  "),
            format!("{:.2e}", self.tail),
        ]
    }
}

fn table_of(rows: &[ShownRow]) -> String {
    let columns = [
        ("position", Align::Right),
        ("context", Align::Right),
        ("next", Align::Left),
        ("log-prob", Align::Right),
        ("the teacher's first choices", Align::Left),
        ("tail", Align::Right),
    ];
    let cells: Vec<_> = rows.iter().map(ShownRow::cells).collect();
    text::table(&columns, &cells)
}

/// A token in marks that show its spaces.
pub fn quoted(token: &str) -> String {
    format!("‹{token}›")
}
