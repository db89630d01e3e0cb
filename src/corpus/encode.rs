//! A source row's tokens and loss mask.

use std::ops::Range;
use std::slice;

use super::Sequence;
use super::problem::{Finding, Lint, Reason, RowProblem, RowResult, quoted};
use super::rows::{Chat, SourceRow, TokenRow};
use super::rules::LossRule;
use super::spans::{SpanMask, span_mask};
use super::template::{ChatTemplate, ChatValues, Rendered, Until};
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
    pub loss: LossRule,
    pub vocab_size: usize,
    pub max_length: Option<usize>,
}

impl RowEncoder {
    /// # Errors
    /// Why the row can't be in the corpus.
    pub fn encode(&self, row: SourceRow) -> RowResult<TokenisedRow> {
        let mut row = match row {
            SourceRow::Tokens(tokens) => self.tokens(tokens)?,
            SourceRow::Text(text) => self.text(&text, 0)?,
            SourceRow::PromptCompletion { prompt, completion } => {
                let trained_from = match self.loss {
                    LossRule::All => 0,
                    _ => prompt.len(),
                };
                self.text(&(prompt + &completion), trained_from)?
            }
            SourceRow::Chat(chat) => {
                let template = self
                    .template
                    .as_ref()
                    .expect("loaded for every run of chats");
                encode_chat(self.tokenizer(), template, &chat, self.loss)?
            }
        };
        self.check(&mut row)?;
        Ok(row)
    }

    fn tokenizer(&self) -> &TextTokenizer {
        self.tokenizer
            .as_ref()
            .expect("loaded for every run of rows that hold text")
    }

    fn tokens(&self, row: TokenRow) -> RowResult<TokenisedRow> {
        let loss_mask = match (row.loss_mask, self.loss) {
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
        let encoded = tokenizer.encode_plain(text)?;
        let masked = match trained_from {
            0 => all_trained(&encoded),
            from => span_mask(&encoded.offsets, slice::from_ref(&(from..text.len()))),
        };
        note_straddlers(&encoded, &masked, text, &mut findings);
        let (mut tokens, mut loss_mask) = (encoded.ids, masked.loss_mask);
        let ends = tokens.last().copied() == tokenizer.eos() && !tokens.is_empty();
        match tokenizer.eos() {
            Some(_) if ends => {
                // The tokenizer's own EOS stands for no text, so no span holds it.
                *loss_mask.last_mut().expect("there is a last token") = 1;
            }
            Some(eos) => {
                tokens.push(eos);
                loss_mask.push(1);
            }
            None => {}
        }
        // An EOS the text brought itself is where it belongs.
        let inner = tokenizer
            .special_tokens()
            .iter()
            .find(|(name, _)| name == "eos_token")
            .map_or(text, |(_, eos)| {
                text.strip_suffix(eos.as_str()).unwrap_or(text)
            });
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
            check_bos(tokenizer, row)?;
            // Where all is trained, the end of turn is, whatever the template puts behind it.
            if self.loss != LossRule::All {
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
                    "expected a trained token after the first one, found none in {length} tokens"
                ),
            ));
        }
        Ok(())
    }
}

/// A chat's tokens, and the loss mask by `loss`.
///
/// # Errors
/// The template refuses the chat, a message holds a control token, or what the assistant wrote
/// can't be told from what the template put there.
pub fn encode_chat(
    tokenizer: &TextTokenizer,
    template: &ChatTemplate,
    chat: &Chat,
    loss: LossRule,
) -> RowResult<TokenisedRow> {
    for (i, text) in chat.texts() {
        if let Some(control) = tokenizer.control_token_in(text) {
            return Err(RowProblem::new(
                Reason::ControlTokenInContent,
                format!(
                    "message {i}: expected content without control tokens, found {}, which would end or start a turn",
                    quoted(control)
                ),
            ));
        }
    }
    let values = ChatValues::new(chat)?;
    let rendered = template.render(&values, Until::End)?;
    let encoded = tokenizer.encode_rendered(&rendered.text)?;
    let masked = match loss {
        LossRule::All => all_trained(&encoded),
        _ => {
            let spans = trained_spans(template, chat, &values, &rendered, loss)?;
            let spans = match rendered.generated {
                Some(_) => spans,
                None => ended_at_control(tokenizer, &encoded, &rendered.text, spans),
            };
            span_mask(&encoded.offsets, &spans)
        }
    };
    let mut findings = Vec::new();
    note_straddlers(&encoded, &masked, &rendered.text, &mut findings);
    note_dropped(chat, &rendered.text, &mut findings);
    Ok(TokenisedRow {
        tokens: encoded.ids,
        loss_mask: masked.loss_mask,
        findings,
    })
}

/// The byte ranges the student learns: generation blocks, or else what lies between the render
/// up to an assistant's turn and the render through it.
fn trained_spans(
    template: &ChatTemplate,
    chat: &Chat,
    values: &ChatValues,
    rendered: &Rendered,
    loss: LossRule,
) -> RowResult<Vec<Range<usize>>> {
    let completion = match (loss, chat.completion) {
        (LossRule::Completion, Some(first)) => Some(first),
        _ => None,
    };
    let mut spans = match &rendered.generated {
        Some(blocks) => {
            let from = match completion {
                Some(first) => prefix_length(template, values, rendered, Until::Before(first))?,
                None => 0,
            };
            let clipped = blocks.iter().map(|b| b.start.max(from)..b.end);
            clipped.filter(|b| !b.is_empty()).collect::<Vec<_>>()
        }
        None => {
            let mut spans = Vec::new();
            let mut turns: Vec<_> = chat.assistant_turns().collect();
            turns.retain(|&i| i >= completion.unwrap_or(0));
            if loss == LossRule::LastAssistant {
                turns.drain(..turns.len().saturating_sub(1));
            }
            for i in turns {
                let start = prefix_length(template, values, rendered, Until::Before(i))?;
                let end = prefix_length(template, values, rendered, Until::Through(i))?;
                spans.push(start..end.max(start));
            }
            spans
        }
    };
    if loss == LossRule::LastAssistant {
        spans.drain(..spans.len().saturating_sub(1));
    }
    Ok(spans)
}

/// Bytes of the partial render, which must be the beginning of the whole one.
fn prefix_length(
    template: &ChatTemplate,
    values: &ChatValues,
    whole: &Rendered,
    until: Until,
) -> RowResult<usize> {
    let part = template.render(values, until)?.text;
    if whole.text.starts_with(&part) {
        return Ok(part.len());
    }
    let place = match until {
        Until::Before(i) => format!("before message {i}"),
        Until::Through(i) => format!("through message {i}"),
        Until::End => "as a whole".to_owned(),
    };
    Err(RowProblem::new(
        Reason::TemplateRefusal,
        format!(
            "expected the chat rendered {place} to be the beginning of the whole chat, found another text: \
             this template needs generation blocks to say what the assistant wrote; \
             give one that has them with --chat-template"
        ),
    ))
}

/// Ends each span behind the last added token of its turn where only whitespace follows: the
/// student learns the end-of-turn token, not the line break the template puts behind it.
fn ended_at_control(
    tokenizer: &TextTokenizer,
    encoded: &Encoded,
    text: &str,
    spans: Vec<Range<usize>>,
) -> Vec<Range<usize>> {
    let ends: Vec<(usize, usize)> = (encoded.ids.iter().zip(&encoded.offsets))
        .filter(|(id, _)| tokenizer.is_added(**id))
        .map(|(_, &offsets)| offsets)
        .collect();
    let ended = |span: Range<usize>| {
        let inside = |(start, end): &&(usize, usize)| span.start <= *start && *end <= span.end;
        match ends.iter().rev().find(inside) {
            Some(&(_, end)) if is_blank(text.get(end..span.end)) => span.start..end,
            _ => span,
        }
    };
    spans.into_iter().map(ended).collect()
}

fn is_blank(text: Option<&str>) -> bool {
    text.is_some_and(|t| t.trim().is_empty())
}

fn all_trained(encoded: &Encoded) -> SpanMask {
    SpanMask {
        loss_mask: vec![1; encoded.ids.len()],
        straddlers: Vec::new(),
    }
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

fn check_bos(tokenizer: &TextTokenizer, row: &mut TokenisedRow) -> RowResult<()> {
    let Some(bos) = tokenizer.bos() else {
        return Ok(());
    };
    match row.tokens[..] {
        [first, second, ..] if first == bos && second == bos => Err(RowProblem::new(
            Reason::DoubleBos,
            format!(
                "expected one BOS token (id {bos}) at the start, found two: \
                 one comes from the text or template, one from the tokenizer"
            ),
        )),
        [first, ..] if first == bos => Ok(()),
        _ => {
            row.findings.push(Finding {
                lint: Lint::MissingBos,
                count: 1,
                example: format!("starts with id {:?}", row.tokens.first()),
            });
            Ok(())
        }
    }
}

fn note_end(tokenizer: &TextTokenizer, row: &mut TokenisedRow) {
    let Some(last) = row.loss_mask.iter().rposition(|&flag| flag == 1) else {
        return;
    };
    let id = row.tokens[last];
    if tokenizer.stops().is_empty() || tokenizer.stops().contains(&id) {
        return;
    }
    let text = tokenizer.token(id).unwrap_or_default();
    row.findings.push(Finding {
        lint: Lint::EndNotTrained,
        count: 1,
        example: format!(
            "ends with {} (id {id}), stops at {:?}",
            quoted(&text),
            tokenizer.stops()
        ),
    });
}

fn note_straddlers(encoded: &Encoded, masked: &SpanMask, text: &str, findings: &mut Vec<Finding>) {
    let Some(&first) = masked.straddlers.first() else {
        return;
    };
    let (start, end) = encoded.offsets[first];
    findings.push(Finding {
        lint: Lint::Straddler,
        count: masked.straddlers.len() as u64,
        example: format!(
            "token {first} stands for {}",
            quoted(text.get(start..end).unwrap_or_default())
        ),
    });
}

fn note_dropped(chat: &Chat, rendered: &str, findings: &mut Vec<Finding>) {
    let mut from = 0;
    for (i, text) in chat.texts() {
        let text = text.trim();
        let here = rendered[from..].find(text).map(|at| from + at);
        match here.or_else(|| rendered.find(text)) {
            // Tool results may be printed in another form.
            None if chat.messages[i]["role"] != "tool" => {
                findings.push(Finding {
                    lint: Lint::DroppedByTemplate,
                    count: 1,
                    example: format!("message {i}: {}", quoted(text)),
                });
                return;
            }
            None => {}
            Some(at) => from = at,
        }
    }
}

#[cfg(test)]
mod tests {
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
            let found = span_mask(&encoded.offsets, &spans);
            let trained = |byte: usize| spans.iter().any(|s| s.contains(&byte));
            let expected: Vec<u8> = true_offsets(&encoded.ids)
                .iter()
                .map(|bytes| u8::from(whole_characters(&text, bytes).all(trained)))
                .collect();
            prop_assert_eq!(found.loss_mask, expected);
        }
    }
}
