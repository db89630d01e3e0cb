//! Source files in, corpus shards out: read a block, tokenise it on all cores, append the results
//! in order. Memory holds a block and a shard, whatever the size of the corpus, and where blocks
//! and shards end depends on the files alone, so thread count never shows in the output.

use std::ops::ControlFlow;
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use rayon::prelude::*;
use serde_json::Value;

use super::ShardArrays;
use super::encode::{RowEncoder, TokenisedRow};
use super::json::parse_object;
use super::problem::{Reason, RowProblem, RowResult};
use super::rows::{Family, SourceRow};
use super::rules::{Format, LossRule, OnProblem};
use super::source::{Block, SourceReader};
use super::summary::{Summary, Tally};
use super::template::ChatTemplate;
use super::tokenizer::TextTokenizer;

/// What a corpus is made from, and how.
#[derive(Clone, Debug)]
pub struct CorpusPlan {
    /// In the order in which source rows are counted.
    pub data: Vec<PathBuf>,
    pub tokenizer: Option<PathBuf>,
    pub format: Format,
    /// `None`: the format's own rule.
    pub loss: Option<LossRule>,
    pub chat_template: Option<PathBuf>,
    pub template_args: Vec<(String, Value)>,
    pub max_length: Option<usize>,
    pub on_overlong: OnProblem,
    pub on_bad_row: OnProblem,
    pub shard_tokens: usize,
    pub vocab_size: Option<usize>,
}

/// A plan with its files opened and its format known: all that can be refused before the first
/// row is tokenised has been.
#[derive(Debug)]
pub struct CorpusMaker {
    plan: CorpusPlan,
    reader: SourceReader,
    /// Blocks read to find out the format.
    ahead: Vec<Block>,
    family: Family,
    encoder: RowEncoder,
}

/// Work done since the last report.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Step {
    /// Bytes of source files.
    pub bytes: u64,
    /// Tokens that go into the corpus.
    pub tokens: u64,
}

/// Takes each finished shard.
pub type Sink<'a> = dyn FnMut(ShardArrays) -> Result<()> + 'a;
/// Hears of progress, and may break the work off.
pub type Watch<'a> = dyn FnMut(Step) -> ControlFlow<()> + 'a;

impl CorpusMaker {
    /// # Errors
    /// Files, tokenizer or template that can't be read; settings that don't fit the rows' format.
    pub fn open(plan: CorpusPlan) -> Result<CorpusMaker> {
        let mut reader = SourceReader::new(&plan.data)?;
        let tokenizer = plan
            .tokenizer
            .as_deref()
            .map(TextTokenizer::load)
            .transpose()?;
        let mut ahead = Vec::new();
        let family = match plan.format {
            Format::Messages => Family::Messages,
            Format::PromptCompletion => Family::PromptCompletion,
            Format::Text => Family::Text,
            Format::Tokens => Family::Tokens,
            Format::Auto => detect(&mut reader, &mut ahead, plan.on_bad_row)?,
        };
        let loss = loss_rule(family, plan.loss)?;
        let vocab_size = vocab_size(plan.vocab_size, tokenizer.as_ref())?;
        ensure!(
            tokenizer.is_some() || family == Family::Tokens,
            "tokenizer: expected a folder for rows of format {}, found none; give --tokenizer",
            family.name()
        );
        let template = match (family, &tokenizer) {
            (Family::Messages, Some(tokenizer)) => Some(load_template(&plan, tokenizer)?),
            // Prompts and completions may be strings or chats; only chats need a template.
            (Family::PromptCompletion, Some(tokenizer)) => match load_template(&plan, tokenizer) {
                Err(error) if plan.chat_template.is_some() => return Err(error),
                found => found.ok(),
            },
            _ => None,
        };
        Ok(CorpusMaker {
            encoder: RowEncoder {
                tokenizer,
                template,
                loss,
                vocab_size,
                max_length: plan.max_length,
            },
            plan,
            reader,
            ahead,
            family,
        })
    }

    pub fn plan(&self) -> &CorpusPlan {
        &self.plan
    }

    /// The format of the rows, resolved.
    pub fn format(&self) -> &'static str {
        self.family.name()
    }

    /// The loss rule, resolved.
    pub fn loss(&self) -> LossRule {
        self.encoder.loss
    }

    pub fn vocab_size(&self) -> usize {
        self.encoder.vocab_size
    }

    pub fn tokenizer(&self) -> Option<&TextTokenizer> {
        self.encoder.tokenizer.as_ref()
    }

    pub fn template(&self) -> Option<&ChatTemplate> {
        self.encoder.template.as_ref()
    }

    /// Tokenises every source row. `None` when `watch` broke the work off.
    ///
    /// # Errors
    /// The first row, in order, that can't be used and may not be left out; whatever `sink` says;
    /// a corpus without any row to score.
    pub fn make(mut self, watch: &mut Watch, sink: &mut Sink) -> Result<Option<Summary>> {
        let mut tally = Tally::default();
        let mut shard = ShardArrays::default();
        let mut ahead = std::mem::take(&mut self.ahead).into_iter();
        loop {
            let block = match ahead.next() {
                Some(block) => block,
                None => match self.reader.next_block()? {
                    Some(block) => block,
                    None => break,
                },
            };
            let tokens_before = tally.tokens();
            for (index, row) in self.tokenise(&block).into_iter().enumerate() {
                let source_row = tally.source_row();
                let place = || self.reader.line(&block, index).place();
                match row {
                    Ok(row) => {
                        tally.keep(&row, place);
                        self.append(source_row, row, &mut shard, sink)?;
                    }
                    Err(problem) => {
                        self.settle(&problem).with_context(place)?;
                        tally.leave_out(&problem, place);
                    }
                }
            }
            let step = Step {
                bytes: block.bytes_read,
                tokens: tally.tokens() - tokens_before,
            };
            if watch(step).is_break() {
                return Ok(None);
            }
        }
        if !shard.source_rows.is_empty() {
            sink(shard)?;
        }
        tally.finish(self.reader.into_read()).map(Some)
    }

    fn tokenise(&self, block: &Block) -> Vec<RowResult<TokenisedRow>> {
        let rows = (0..block.rows()).into_par_iter();
        rows.map(|index| self.row(block, index)).collect()
    }

    fn row(&self, block: &Block, index: usize) -> RowResult<TokenisedRow> {
        let row = parse_object(self.reader.line(block, index).text)?;
        if self.plan.format == Format::Auto {
            Family::detect(&row)?;
        }
        let row = self.family.parse(row)?;
        if matches!(row, SourceRow::Chat(_)) && self.encoder.template.is_none() {
            return Err(RowProblem::unusable(
                "expected a chat template for a chat, found none in the tokenizer's folder; \
                 give one with --chat-template",
            ));
        }
        self.encoder.encode(row)
    }

    /// Appends a sequence, after handing on the shard if the sequence would make it too large.
    fn append(
        &self,
        source_row: u64,
        row: TokenisedRow,
        shard: &mut ShardArrays,
        sink: &mut Sink,
    ) -> Result<()> {
        let full = shard.tokens.len() + row.tokens.len() > self.plan.shard_tokens;
        if full && !shard.source_rows.is_empty() {
            sink(std::mem::take(shard))?;
        }
        if shard.offsets.is_empty() {
            shard.offsets.push(0);
        }
        shard.tokens.extend(row.tokens);
        shard.loss_mask.extend(row.loss_mask);
        shard.offsets.push(shard.tokens.len() as i64);
        shard.source_rows.push(source_row as i64);
        Ok(())
    }

    /// Ok where the row may be left out and counted.
    fn settle(&self, problem: &RowProblem) -> Result<()> {
        let (policy, option) = match problem.reason {
            // Such a row is right, there is only nothing to learn from it.
            Reason::NoScoredPosition => return Ok(()),
            Reason::TooLong => (self.plan.on_overlong, "--on-overlong"),
            _ => (self.plan.on_bad_row, "--on-bad-row"),
        };
        match policy {
            OnProblem::Skip => Ok(()),
            OnProblem::Error => bail!(
                "{}; {option} skip leaves such rows out and counts them",
                problem.message
            ),
        }
    }
}

/// The format of the first row; with bad rows to be left out, of the first good one.
fn detect(
    reader: &mut SourceReader,
    ahead: &mut Vec<Block>,
    on_bad_row: OnProblem,
) -> Result<Family> {
    while let Some(block) = reader.next_block()? {
        ahead.push(block);
        let block = ahead.last().expect("just pushed");
        for index in 0..block.rows() {
            let line = reader.line(block, index);
            match parse_object(line.text).and_then(|row| Family::detect(&row)) {
                Ok(family) => return Ok(family),
                Err(problem) if on_bad_row == OnProblem::Error => {
                    bail!("{}: {}", line.place(), problem.message)
                }
                Err(_) => {}
            }
        }
        // Nothing usable so far: a file of another kind, not one with a bad row here and there.
        ensure!(
            ahead.len() < 16,
            "data: expected rows of a known format, found none in the first 64 MiB; give --format"
        );
    }
    bail!("data: expected at least one row of a known format, found none")
}

fn loss_rule(family: Family, asked: Option<LossRule>) -> Result<LossRule> {
    use LossRule::{All, Assistant, Completion, Given, LastAssistant};
    let choices: &[LossRule] = match family {
        Family::Messages => &[Assistant, LastAssistant, All],
        Family::PromptCompletion => &[Completion, All],
        Family::Text => &[All],
        Family::Tokens => &[Given, All],
    };
    let rule = asked.unwrap_or(choices[0]);
    let names: Vec<_> = choices.iter().map(|r| r.name()).collect();
    ensure!(
        choices.contains(&rule),
        "loss: expected {} for rows of format {}, found {}",
        names.join(" or "),
        family.name(),
        rule.name()
    );
    Ok(rule)
}

fn vocab_size(asked: Option<usize>, tokenizer: Option<&TextTokenizer>) -> Result<usize> {
    let own = tokenizer.map_or(0, TextTokenizer::vocab_size);
    match asked {
        Some(size) if size >= own && i32::try_from(size).is_ok() => Ok(size),
        Some(size) => bail!(
            "vocab-size: expected at least the tokenizer's {own} and at most {}, found {size}",
            i32::MAX
        ),
        None if own > 0 => Ok(own),
        None => bail!(
            "vocab-size: expected a size for rows without a tokenizer, found none; \
             give --tokenizer or --vocab-size"
        ),
    }
}

fn load_template(plan: &CorpusPlan, tokenizer: &TextTokenizer) -> Result<ChatTemplate> {
    ChatTemplate::load(
        tokenizer,
        plan.chat_template.as_deref(),
        &plan.template_args,
    )
}
