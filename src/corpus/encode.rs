//! A source row's tokens and loss mask.

use std::slice;

use super::Sequence;
use super::chat::{ChatRules, encode_chat};
use super::problem::{Finding, Lint, Reason, RowProblem, RowResult, quoted};
use super::remarks::{check_bos, note_end, note_straddlers};
use super::rows::{Segments, SourceRow, TokenRow};
use super::rules::{LossRule, Straddle};
use super::spans::{all_trained, span_mask};
use super::template::ChatTemplate;
use super::tokenizer::{Encoded, TextTokenizer};

/// A row as it goes into a corpus shard, with remarks.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TokenisedRow {
    pub tokens: Vec<i32>,   // (T)
    pub loss_mask: Vec<u8>, // (T), 0 or 1
    pub findings: Vec<Finding>,
}

/// Turns source rows into tokens, one at a time and from any thread.
#[derive(Debug)]
pub struct RowEncoder {
    /// `None`: pre-tokenised rows only.
    pub tokenizer: Option<TextTokenizer>,
    /// `None`: no rows that are chats.
    pub template: Option<ChatTemplate>,
    /// The same template with generation blocks, where the user gave one.
    pub mask_template: Option<ChatTemplate>,
    pub rules: ChatRules,
    pub vocab_size: usize,
    pub max_length: Option<usize>,
    /// A BOS is expected at the start of a row.
    pub is_bos_due: bool,
}

impl RowEncoder {
    /// # Errors
    /// Why the row can't be in the corpus.
    pub fn encode(&self, row: SourceRow) -> RowResult<TokenisedRow> {
        let is_text = !matches!(row, SourceRow::Tokens(_));
        let mut row = match row {
            SourceRow::Tokens(tokens) => self.tokens(tokens)?,
            SourceRow::Text(text) => self.text(&text, 0)?,
            SourceRow::PromptCompletion { prompt, completion } => {
                let trained_from = match self.rules.loss {
                    LossRule::All => 0,
                    _ => prompt.len(),
                };
                let is_empty = completion.trim().is_empty();
                let mut row = self.text(&(prompt + &completion), trained_from)?;
                if is_empty {
                    row.findings.push(Finding {
                        lint: Lint::EmptyAnswer,
                        count: 1,
                        example: "the completion".to_owned(),
                    });
                }
                row
            }
            SourceRow::Segments(segments) => self.segments(&segments)?,
            SourceRow::Chat(chat) => {
                let template = self
                    .template
                    .as_ref()
                    .expect("loaded for every run of chats");
                encode_chat(
                    self.tokenizer(),
                    template,
                    self.mask_template.as_ref(),
                    &chat,
                    self.rules,
                )?
            }
        };
        if is_text && let Some(how) = self.tokenizer().rebuilt() {
            row.findings.push(Finding {
                lint: Lint::RebuiltTokenizer,
                count: 1,
                example: how.to_owned(),
            });
        }
        self.check(&mut row)?;
        Ok(row)
    }

    fn tokenizer(&self) -> &TextTokenizer {
        self.tokenizer
            .as_ref()
            .expect("loaded for every run of rows that hold text")
    }

    fn tokens(&self, row: TokenRow) -> RowResult<TokenisedRow> {
        let loss_mask = match (row.loss_mask, self.rules.loss) {
            (Some(mask), LossRule::Given) => mask,
            (None, LossRule::All) => vec![1; row.ids.len()],
            (None, _) => {
                return Err(RowProblem::unusable(
                    "expected labels, loss_mask, completion_mask or assistant_masks beside input_ids, \
                     found none; --loss all trains every token",
                ));
            }
            (Some(_), _) => {
                return Err(RowProblem::unusable(
                    "expected input_ids alone with --loss all, found labels or a mask; leave --loss out to use it",
                ));
            }
        };
        let id = |(t, &id): (usize, &i64)| {
            i32::try_from(id).map_err(|_| outside(id, t, self.vocab_size))
        };
        let tokens = row
            .ids
            .iter()
            .enumerate()
            .map(id)
            .collect::<RowResult<_>>()?;
        Ok(TokenisedRow {
            tokens,
            loss_mask,
            findings: Vec::new(),
        })
    }

    /// A plain text, trained from byte `trained_from` on. The end of the text is the end of the
    /// document, so EOS stands behind it.
    fn text(&self, text: &str, trained_from: usize) -> RowResult<TokenisedRow> {
        let tokenizer = self.tokenizer();
        let mut findings = Vec::new();
        let encoded = self.with_one_bos(text)?;
        let masked = match trained_from {
            0 => all_trained(&encoded),
            from => span_mask(
                &encoded.offsets,
                slice::from_ref(&(from..text.len())),
                self.rules.straddle,
            ),
        };
        note_straddlers(&encoded, &masked, text, &mut findings);
        // An EOS of the prompt ends no completion.
        let last = encoded.offsets.last().copied().unwrap_or_default();
        let ends = tokenizer.eos().is_some()
            && encoded.ids.last().copied() == tokenizer.eos()
            && (last.0 >= trained_from || last.0 == last.1);
        let (mut tokens, mut loss_mask) = (encoded.ids, masked.loss_mask);
        match tokenizer.eos() {
            Some(_) if ends => {
                // The tokenizer's own EOS stands for no text, so no span holds it.
                *loss_mask.last_mut().expect("there is a last token") = 1;
            }
            Some(eos) => {
                tokens.push(eos);
                loss_mask.push(1);
            }
            None => findings.push(Finding {
                lint: Lint::MissingEos,
                count: 1,
                example: format!("ends with {}", quoted(tail(text))),
            }),
        }
        // A BOS or EOS the text brought itself is where it belongs.
        let inner = tokenizer.bos_text().and_then(|bos| text.strip_prefix(bos));
        let inner = inner.unwrap_or(text);
        let inner = tokenizer
            .special_tokens()
            .iter()
            .find(|(name, _)| name == "eos_token")
            .and_then(|(_, eos)| inner.strip_suffix(eos.as_str()))
            .unwrap_or(inner);
        if let Some(control) = tokenizer.control_token_in(inner) {
            findings.push(Finding {
                lint: Lint::ControlTokenInText,
                count: 1,
                example: control.to_owned(),
            });
        }
        Ok(TokenisedRow {
            tokens,
            loss_mask,
            findings,
        })
    }

    /// A text with the special tokens that the tokenizer puts around one; a BOS that it brings, as
    /// one that was rendered before does, is not put there again.
    fn with_one_bos(&self, text: &str) -> RowResult<Encoded> {
        let tokenizer = self.tokenizer();
        match tokenizer.bos_text() {
            Some(bos) if text.starts_with(bos) => tokenizer.encode_rendered(text),
            _ => tokenizer.encode_plain(text),
        }
    }

    /// A text whose segments say what is trained. It brings its own end.
    fn segments(&self, segments: &Segments) -> RowResult<TokenisedRow> {
        let encoded = self.with_one_bos(&segments.text)?;
        let masked = span_mask(&encoded.offsets, &segments.trained, self.rules.straddle);
        let mut findings = Vec::new();
        note_straddlers(&encoded, &masked, &segments.text, &mut findings);
        Ok(TokenisedRow {
            tokens: encoded.ids,
            loss_mask: masked.loss_mask,
            findings,
        })
    }

    /// What is said of a row without a trained token that has tokens trained in part.
    fn partly(&self, row: &TokenisedRow) -> &'static str {
        let partly = row.findings.iter().any(|f| f.lint == Lint::Straddler);
        match (partly, self.rules.straddle) {
            (true, Straddle::Exclude) => {
                ": a part of one or more is to be trained, which --straddle include takes for all of it"
            }
            _ => "",
        }
    }

    /// What must hold for a row of any format.
    fn check(&self, row: &mut TokenisedRow) -> RowResult<()> {
        let vocabulary = 0..self.vocab_size as i64;
        let outside_at = row
            .tokens
            .iter()
            .position(|&id| !vocabulary.contains(&i64::from(id)));
        if let Some(t) = outside_at {
            return Err(outside(i64::from(row.tokens[t]), t, self.vocab_size));
        }
        if let Some(tokenizer) = &self.tokenizer {
            check_bos(tokenizer, self.is_bos_due, row)?;
            // Where all is trained, the end of turn is, whatever the template puts behind it.
            if self.rules.loss != LossRule::All {
                note_end(tokenizer, row);
            }
        }
        let length = row.tokens.len();
        if let Some(max) = self.max_length.filter(|&max| length > max) {
            return Err(RowProblem::new(
                Reason::TooLong,
                format!("expected at most {max} tokens, found {length}"),
            ));
        }
        let sequence = Sequence {
            tokens: &row.tokens,
            loss_mask: &row.loss_mask,
        };
        if sequence.rows().next().is_none() {
            return Err(RowProblem::new(
                Reason::NoScoredPosition,
                format!(
                    "expected a trained token after the first one, found none in {length} tokens{}",
                    self.partly(row)
                ),
            ));
        }
        Ok(())
    }
}

/// The end of a text, as much as an example needs.
fn tail(text: &str) -> &str {
    let start = text.char_indices().rev().nth(29).map_or(0, |(at, _)| at);
    &text[start..]
}

fn outside(id: i64, t: usize, vocab_size: usize) -> RowProblem {
    RowProblem::new(
        Reason::IdOutsideVocabulary,
        format!(
            "expected token ids from 0 to {}, found {id} at token {t}",
            vocab_size - 1
        ),
    )
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::path::Path;
    use std::sync::LazyLock;

    use proptest::prelude::*;

    use super::super::decoder::byte_of;
    use super::*;

    static TEACHER: LazyLock<TextTokenizer> = LazyLock::new(|| {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/teacher");
        TextTokenizer::load(Path::new(folder)).unwrap()
    });

    /// The bytes each token stands for, from the vocabulary alone.
    fn true_offsets(ids: &[i32]) -> Vec<Range<usize>> {
        let mut end = 0;
        let advance = |&id: &i32| {
            let token = TEACHER.token(id).unwrap();
            let length = token.chars().filter_map(byte_of).count();
            end += length;
            end - length..end
        };
        ids.iter().map(advance).collect()
    }

    /// A token counts with the whole of the characters it has a part of.
    fn whole_characters(text: &str, bytes: &Range<usize>) -> Range<usize> {
        let start = (0..=bytes.start).rev().find(|&i| text.is_char_boundary(i));
        let end = (bytes.end..=text.len()).find(|&i| text.is_char_boundary(i));
        start.unwrap()..end.unwrap()
    }

    proptest! {
        #[test]
        fn masks_of_real_tokens_are_what_their_bytes_say(
            parts in prop::collection::vec("[ -;=-{}~\n\t é東🙂ñ\u{301}]{0,9}", 1..8),
        ) {
            let text = parts.concat();
            let mut spans = Vec::new();
            let mut at = 0;
            for (i, part) in parts.iter().enumerate() {
                if i % 2 == 1 {
                    spans.push(at..at + part.len());
                }
                at += part.len();
            }
            let encoded = TEACHER.encode_rendered(&text).unwrap();
            let found = span_mask(&encoded.offsets, &spans, Straddle::Exclude);
            let trained = |byte: usize| spans.iter().any(|s| s.contains(&byte));
            let expected: Vec<u8> = true_offsets(&encoded.ids)
                .iter()
                .map(|bytes| u8::from(whole_characters(&text, bytes).all(trained)))
                .collect();
            prop_assert_eq!(found.loss_mask, expected);
        }
    }
}
