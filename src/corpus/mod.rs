//! From source rows to corpus shards, and the view of a shard that everything else reads.
//!
//! # What the loss covers
//!
//! | rows | here | elsewhere, and the flag for it |
//! |---|---|---|
//! | `messages` | every answer of the assistant, through its end token | axolotl, ms-swift and verl the same; TRL everything unless `assistant_only_loss`: `--loss all`; TRL's GKD and NeMo RL the last answer: `--loss last-assistant` |
//! | `conversations` (ShareGPT) | every `gpt` and `function_call` turn | LLaMA-Factory the same |
//! | `instruction`, `input`, `output`, `history` (alpaca) | the output and the answers of `history` | LLaMA-Factory the same, with `mask_history` the output alone: `--loss last-assistant`; axolotl prints the Alpaca prompt and encodes prompt and answer apart: write such rows as `prompt` and `completion` |
//! | `conversation` of `human`, `assistant`; `query`, `response` | every answer | ms-swift the same |
//! | `prompt`, `completion` | the completion and an EOS; of messages, its answers | TRL the same, but of messages all behind the prompt, other roles, headers and the line end behind the last end token too; the prompt too: `--loss all` |
//! | `text` | everything; BOS by the tokenizer where the text brings none, an EOS behind it | TRL, axolotl and LLaMA-Factory the same |
//! | `segments` (axolotl input_output) | segments with `label: true`; BOS by the tokenizer where the text brings none, no EOS that isn't written | axolotl adds no BOS and encodes segments apart: other ids at their edges |
//! | `input_ids` with `labels`, `loss_mask`, `completion_mask`, `assistant_masks` | as given | TRL the same; no labels: `--loss all` |
//! | `weight`, `train`, `loss`, `loss_scale` of a message; `weight`, `train` of a part | as given, of the assistant's messages; a part without a flag follows its message | axolotl, ms-swift, OpenAI the same, other roles' messages too, which are refused here; fractions are refused |
//! | `train_detail` | ranges with `train` true and the end of the turn; of other text nothing, of an empty list no end either | axolotl the same, tokens partly inside too: `--straddle include` |
//! | a token partly inside | not trained, counted | transformers 5 trains it: `--straddle include` |
//! | reasoning | with its answer, and only if the template prints it there | TRL and ms-swift train what is left when the template drops it: set `weight` 0 for such turns |
//!
//! Architecture invariant: nothing here writes a file, draws, or knows a model. What is read and
//! tokenised is handed on as values; `store` puts it on disk.

mod chat;
mod decoder;
mod encode;
mod guard;
mod json;
mod pieces;
mod pipeline;
mod probes;
mod problem;
mod remarks;
mod rows;
mod rules;
mod source;
mod spans;
mod summary;
mod template;
mod tokenizer;
mod written;

use anyhow::{Result, ensure};

pub use chat::{ChatRules, encode_chat};
pub use decoder::Decoder;
pub use encode::TokenisedRow;
pub use pipeline::{CorpusMaker, CorpusPlan, Sink, Step, Watch};
pub use probes::Probes;
pub use problem::{Finding, Lint, Reason, RowProblem, RowResult};
pub use rows::Chat;
pub use rules::{Format, LossRule, NullFields, OnProblem, RowRules, Straddle, TemplateRules};
pub use source::{SourceFile, hash_files, path_above};
pub use summary::{Counted, Lengths, Summary};
pub use template::{
    ChatTemplate, ChatValues, NamedSource, Rendered, TemplateDate, TemplatePlan, Until,
};
pub use tokenizer::{Encoded, TextTokenizer, tokenizer_fingerprint};

/// The arrays of one corpus shard, sequences laid end to end.
#[derive(Clone, Copy, Debug)]
pub struct CorpusShard<'a> {
    tokens: &'a [i32],   // (T)
    offsets: &'a [i64],  // (S+1)
    loss_mask: &'a [u8], // (T), 0 or 1
}

/// One tokenised conversation or document.
#[derive(Clone, Copy, Debug)]
pub struct Sequence<'a> {
    pub tokens: &'a [i32],   // (T)
    pub loss_mask: &'a [u8], // (T)
}

/// A scored position: the logits at `position` predict `target`, which stands at `position + 1`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Row {
    pub position: usize,
    pub target: i32,
}

/// The arrays of a corpus shard just made, on their way to the store.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ShardArrays {
    pub tokens: Vec<i32>,      // (T)
    pub offsets: Vec<i64>,     // (S+1), or empty while nothing is in it
    pub loss_mask: Vec<u8>,    // (T), 0 or 1
    pub source_rows: Vec<i64>, // (S)
}

fn shown(offset: Option<&i64>) -> String {
    offset.map_or("none".to_owned(), i64::to_string)
}

impl<'a> CorpusShard<'a> {
    /// # Errors
    /// Offsets that are not `0 = o[0] <= o[1] <= … <= T`, a mask of another length, or a mask
    /// value other than 0 and 1. The message names the array and the place in it.
    pub fn new(
        tokens: &'a [i32],
        offsets: &'a [i64],
        loss_mask: &'a [u8],
    ) -> Result<CorpusShard<'a>> {
        ensure!(
            loss_mask.len() == tokens.len(),
            "loss_mask.npy: expected {} flags, one per token, found {}",
            tokens.len(),
            loss_mask.len()
        );
        ensure!(
            offsets.first() == Some(&0),
            "offsets.npy: expected a first offset of 0, found {}",
            shown(offsets.first())
        );
        ensure!(
            offsets.last().copied() == i64::try_from(tokens.len()).ok(),
            "offsets.npy: expected a last offset of {}, the number of tokens, found {}",
            tokens.len(),
            shown(offsets.last())
        );
        if let Some(s) = offsets.windows(2).position(|pair| pair[0] > pair[1]) {
            anyhow::bail!(
                "offsets.npy: expected offsets that never fall, found {} after {} at sequence {s}",
                offsets[s + 1],
                offsets[s]
            );
        }
        if let Some(t) = loss_mask.iter().position(|&flag| flag > 1) {
            anyhow::bail!(
                "loss_mask.npy: expected 0 or 1, found {} at token {t}",
                loss_mask[t]
            );
        }
        Ok(CorpusShard {
            tokens,
            offsets,
            loss_mask,
        })
    }

    /// S
    pub fn sequences(&self) -> usize {
        self.offsets.len() - 1
    }

    /// All sequences end to end, (T).
    pub fn tokens(&self) -> &'a [i32] {
        self.tokens
    }

    /// (T), 0 or 1.
    pub fn loss_mask(&self) -> &'a [u8] {
        self.loss_mask
    }

    /// (S+1)
    pub fn offsets(&self) -> &'a [i64] {
        self.offsets
    }

    /// Sequence `s`, 0 <= s < S.
    pub fn sequence(&self, s: usize) -> Sequence<'a> {
        let span = self.offsets[s] as usize..self.offsets[s + 1] as usize;
        Sequence {
            tokens: &self.tokens[span.clone()],
            loss_mask: &self.loss_mask[span],
        }
    }
}

impl<'a> Sequence<'a> {
    /// The rows of this sequence, by rising position. This is the one place where the shift from
    /// token to prediction happens: a row for t exists iff t+1 < T and loss_mask[t+1].
    pub fn rows(self) -> impl Iterator<Item = Row> + 'a {
        (1..self.tokens.len())
            .filter(move |&next| self.loss_mask[next] != 0)
            .map(move |next| Row {
                position: next - 1,
                target: self.tokens[next],
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_follow_the_mask_of_the_next_token() {
        let sequence = Sequence {
            tokens: &[7, 8, 9, 10],
            loss_mask: &[1, 0, 1, 1],
        };
        let rows: Vec<_> = sequence.rows().collect();
        assert_eq!(
            rows,
            [
                Row {
                    position: 1,
                    target: 9
                },
                Row {
                    position: 2,
                    target: 10
                }
            ]
        );
    }

    #[test]
    fn sequences_of_no_or_one_token_have_no_row() {
        for tokens in [&[][..], &[5][..]] {
            let mask = vec![1; tokens.len()];
            let sequence = Sequence {
                tokens,
                loss_mask: &mask,
            };
            assert_eq!(sequence.rows().count(), 0);
        }
    }

    #[test]
    fn broken_arrays_are_named() {
        let says = |tokens: &[i32], offsets: &[i64], mask: &[u8]| {
            CorpusShard::new(tokens, offsets, mask)
                .unwrap_err()
                .to_string()
        };
        assert!(says(&[1, 2], &[0, 2], &[1]).starts_with("loss_mask.npy: expected 2 flags"));
        assert!(says(&[1, 2], &[0, 1], &[1, 0]).contains("last offset of 2"));
        assert!(says(&[1, 2], &[1, 2], &[1, 0]).contains("first offset of 0"));
        assert!(says(&[1, 2], &[0, 2, 1, 2], &[1, 0]).contains("found 1 after 2 at sequence 1"));
        assert!(says(&[1, 2], &[0, 2], &[1, 2]).contains("found 2 at token 1"));
    }
}
