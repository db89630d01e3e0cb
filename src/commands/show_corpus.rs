//! `show --corpus`: a sequence as the student meets it, what is learnt told from what is not.

use std::io::IsTerminal;
use std::path::Path;

use anyhow::Result;
use serde_json::{Value, json};

use super::text::{self, count};
use super::{Outcome, Status};
use crate::corpus::{Decoder, Sequence};
use crate::store::CorpusReader;

/// Learnt text on a terminal that takes colours: black on green.
const COLOURS: (&str, &str) = ("\u{1b}[30;42m", "\u{1b}[0m");
/// Learnt text elsewhere.
const MARKS: (&str, &str) = ("⟦", "⟧");

/// Tokens in a row that are all learnt, or all not.
struct Run {
    learnt: bool,
    text: String,
    tokens: usize,
}

/// # Errors
/// No corpus, or no such sequence.
pub fn show_corpus(folder: &Path, number: u64) -> Result<Outcome> {
    let corpus = CorpusReader::open(folder)?;
    let (shard, local) = corpus.locate(number)?;
    let files = corpus.shard(shard)?;
    let sequence = files.view()?.sequence(local);
    let tokenizer = folder.join("tokenizer");
    let decoder = tokenizer
        .is_dir()
        .then(|| Decoder::load(&tokenizer))
        .transpose()?;
    let runs = runs(&sequence, decoder.as_ref());
    let source_row = files.source_rows()?.map(|rows| rows[local]);
    let rows = sequence.rows().count();
    let facts = text::facts(&[
        (
            "sequence",
            format!("{} of {}", count(number), count(corpus.sequences())),
        ),
        (
            "source row",
            source_row.map_or("unknown".to_owned(), |row| count(row as u64)),
        ),
        ("tokens", count(sequence.tokens.len() as u64)),
        ("rows to score", count(rows as u64)),
    ]);
    let colours = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let listed = runs
        .iter()
        .map(|run| json!({"learnt": run.learnt, "text": run.text, "tokens": run.tokens}));
    Ok(Outcome {
        text: format!(
            "{facts}\n{}\n",
            painted(&runs, if colours { COLOURS } else { MARKS })
        ),
        json: json!({
            "sequence": number,
            "source_row": source_row,
            "tokens": sequence.tokens.len(),
            "rows": rows,
            "runs": listed.collect::<Value>(),
        }),
        status: Status::Done,
    })
}

fn runs(sequence: &Sequence, decoder: Option<&Decoder>) -> Vec<Run> {
    let mut found = Vec::new();
    let mut start = 0;
    for same in sequence.loss_mask.chunk_by(|a, b| a == b) {
        let ids = &sequence.tokens[start..start + same.len()];
        let text = match decoder {
            Some(decoder) => decoder.text(ids),
            None => ids.iter().map(|id| format!("{id} ")).collect(),
        };
        found.push(Run {
            learnt: same[0] != 0,
            text,
            tokens: same.len(),
        });
        start += same.len();
    }
    found
}

/// Line ends are shown and made; a run's mark is closed before each and opened again behind it.
fn painted(runs: &[Run], (open, close): (&str, &str)) -> String {
    let mut out = String::new();
    for run in runs {
        let broken = run.text.replace('↵', "↵\n");
        for line in broken.split_inclusive('\n') {
            let (shown, end) = line
                .strip_suffix('\n')
                .map_or((line, ""), |shown| (shown, "\n"));
            match run.learnt {
                true => out.push_str(&format!("{open}{shown}{close}{end}")),
                false => out.push_str(line),
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn learnt_text_is_marked_line_by_line() {
        let run = |learnt, text: &str| Run {
            learnt,
            text: text.to_owned(),
            tokens: 1,
        };
        let runs = [run(false, "user↵a"), run(true, "b↵c")];
        assert_eq!(painted(&runs, MARKS), "user↵\na⟦b↵⟧\n⟦c⟧");
    }
}
