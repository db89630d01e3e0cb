//! Source files in, corpus shards out: read a block, tokenise it on all cores, append the results
//! in order. Memory holds a block and a shard, whatever the size of the corpus, and where blocks
//! and shards end depends on the files alone, so thread count never shows in the output.

use std::ops::ControlFlow;
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use rayon::prelude::*;

use super::ShardArrays;
use super::chat::ChatRules;
use super::encode::{RowEncoder, TokenisedRow};
use super::problem::{Reason, RowProblem, RowResult};
use super::rows::{Family, SourceRow, renamed};
use super::rules::{Format, LossRule, NullFields, OnProblem, RowRules, Straddle, TemplateRules};
use super::source::{Block, SourceReader, expanded};
use super::summary::{Summary, Tally};
use super::template::{ChatTemplate, TemplatePlan};
use super::tokenizer::TextTokenizer;

/// What a corpus is made from, and how.
#[derive(Clone, Debug)]
pub struct CorpusPlan {
    /// Files, folders and patterns.
    pub data: Vec<PathBuf>,
    /// Which split of a folder that holds several.
    pub split: Option<String>,
    pub tokenizer: Option<PathBuf>,
    pub format: Format,
    /// `None`: the format's own rule.
    pub loss: Option<LossRule>,
    pub template: TemplatePlan,
    /// A template of the same text with generation blocks.
    pub mask_template: Option<PathBuf>,
    pub straddle: Straddle,
    pub allow_control_tokens: bool,
    pub row_rules: RowRules,
    pub null_fields: NullFields,
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
    /// In the order in which source rows are counted.
    files: Vec<PathBuf>,
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
    pub fn open(mut plan: CorpusPlan) -> Result<CorpusMaker> {
        plan.row_rules.null_keys = plan.template.rules == TemplateRules::Transformers4;
        let files = expanded(&plan.data, plan.split.as_deref())?;
        let mut reader = SourceReader::new(&files, plan.null_fields)?;
        let tokenizer = plan
            .tokenizer
            .as_deref()
            .map(|folder| TextTokenizer::load_as(folder, plan.template.rules))
            .transpose()?;
        let mut ahead = Vec::new();
        let family = match Family::of_format(plan.format) {
            Some(family) => family,
            None => detect(&mut reader, &mut ahead, &plan)?,
        };
        let loss = loss_rule(family, plan.loss)?;
        ensure!(
            tokenizer.is_some() || family == Family::Tokens,
            "tokenizer: expected a folder for rows of format {}, found none; \
             give --tokenizer with the teacher's folder, or rows with input_ids",
            family.name()
        );
        let vocab_size = vocab_size(plan.vocab_size, tokenizer.as_ref())?;
        let (template, mask_template) = match &tokenizer {
            Some(tokenizer) => templates(&plan, family, tokenizer)?,
            None => (None, None),
        };
        let names_bos = |t: &ChatTemplate| t.sources().any(|s| s.text.contains("bos_token"));
        let is_bos_due = tokenizer.as_ref().is_some_and(TextTokenizer::adds_bos)
            || template.as_ref().is_some_and(names_bos);
        Ok(CorpusMaker {
            encoder: RowEncoder {
                is_bos_due,
                tokenizer,
                template,
                mask_template,
                rules: ChatRules {
                    loss,
                    straddle: plan.straddle,
                    allow_control_tokens: plan.allow_control_tokens,
                },
                vocab_size,
                max_length: plan.max_length,
            },
            plan,
            files,
            reader,
            ahead,
            family,
        })
    }

    /// The source files, in the order in which their rows count.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// Where the spans of trained text come from.
    pub fn mask_source(&self) -> Option<&'static str> {
        let template = self.encoder.template.as_ref()?;
        Some(
            match (template.marks_generation(), &self.encoder.mask_template) {
                (true, _) => "generation blocks",
                (false, Some(_)) => "mask template",
                (false, None) => "renders of each turn",
            },
        )
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
        self.encoder.rules.loss
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
                let place = || self.reader.place(&block, index);
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
        let row = self.reader.object(block, index)?;
        let row = renamed(row, &self.plan.row_rules)?;
        if self.plan.format == Format::Auto {
            Family::detect(&row)?;
        }
        let row = self.family.parse(row, &self.plan.row_rules)?;
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
fn detect(reader: &mut SourceReader, ahead: &mut Vec<Block>, plan: &CorpusPlan) -> Result<Family> {
    while let Some(block) = reader.next_block()? {
        ahead.push(block);
        let block = ahead.last().expect("just pushed");
        for index in 0..block.rows() {
            let row = reader.object(block, index);
            let row = row.and_then(|row| renamed(row, &plan.row_rules));
            match row.and_then(|row| Family::detect(&row)) {
                Ok(family) => return Ok(family),
                Err(problem) if plan.on_bad_row == OnProblem::Error => {
                    bail!("{}: {}", reader.place(block, index), problem.message)
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

/// The chat template and the mask template, where the rows need one.
fn templates(
    plan: &CorpusPlan,
    family: Family,
    tokenizer: &TextTokenizer,
) -> Result<(Option<ChatTemplate>, Option<ChatTemplate>)> {
    let found = ChatTemplate::load(tokenizer, &plan.template);
    let template = match (family, found) {
        (family, found) if family.is_chat() => Some(found?),
        // Prompts and completions may be strings or chats; only chats need a template.
        (Family::PromptCompletion, Err(error)) if plan.template.template.is_some() => {
            return Err(error);
        }
        (Family::PromptCompletion, found) => found.ok(),
        _ => None,
    };
    let Some(file) = plan.mask_template.as_ref().filter(|_| template.is_some()) else {
        return Ok((template, None));
    };
    let mask_plan = TemplatePlan {
        template: Some(file.clone()),
        ..plan.template.clone()
    };
    let mask_template = ChatTemplate::load(tokenizer, &mask_plan)?;
    ensure!(
        mask_template.marks_generation(),
        "{}: expected a template with generation blocks, found one without",
        file.display()
    );
    Ok((template, Some(mask_template)))
}

fn loss_rule(family: Family, asked: Option<LossRule>) -> Result<LossRule> {
    use LossRule::{All, Assistant, Completion, Given, LastAssistant};
    let choices: &[LossRule] = match family {
        family if family.is_chat() => &[Assistant, LastAssistant, All],
        Family::PromptCompletion => &[Completion, All],
        Family::Text => &[All],
        Family::Segments => &[Given],
        _ => &[Given, All],
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
