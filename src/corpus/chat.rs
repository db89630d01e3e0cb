//! A chat's tokens, and which of them are trained.
//!
//! What the assistant wrote is never found by searching for its text. It comes from the
//! template's generation blocks, or those of a mask template that renders the same text, or else
//! from rendering the chat up to and through each trained turn.

use std::ops::Range;

use serde_json::Value;

use super::encode::TokenisedRow;
use super::problem::{Reason, RowProblem, RowResult, quoted};
use super::remarks::{
    note_answers, note_arguments, note_completion, note_dropped, note_others, note_parts,
    note_straddlers,
};
use super::rows::Chat;
use super::rules::{LossRule, Straddle};
use super::spans::{all_trained, span_mask};
use super::template::{ChatTemplate, ChatValues, REFUSED_IN_WORDS, Rendered, Until, is_space};
use super::tokenizer::{Encoded, TextTokenizer};
use super::written::{Learnt, check_control_tokens};

/// Bytes of an answer that a header begins with only if the answer stands behind it again.
const NO_HEADER: usize = 24;

/// The user's choices about chats.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChatRules {
    pub loss: LossRule,
    pub straddle: Straddle,
    /// Control tokens written out in content become what they say.
    pub allow_control_tokens: bool,
}

impl ChatRules {
    pub fn new(loss: LossRule) -> ChatRules {
        ChatRules {
            loss,
            straddle: Straddle::Exclude,
            allow_control_tokens: false,
        }
    }
}

/// A trained turn and the bytes that are learnt of it.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Turn {
    message: usize,
    span: Range<usize>,
}

/// One chat on its way to a mask.
struct Rendering<'a> {
    tokenizer: &'a TextTokenizer,
    template: &'a ChatTemplate,
    chat: &'a Chat,
    values: ChatValues,
    whole: Rendered,
    encoded: Encoded,
    loss: LossRule,
}

/// A chat's tokens and loss mask.
///
/// # Errors
/// The template refuses the chat, a message holds a control token, what the assistant wrote
/// can't be told from what the template put there, or a part of it is not rendered.
pub fn encode_chat(
    tokenizer: &TextTokenizer,
    template: &ChatTemplate,
    mask_template: Option<&ChatTemplate>,
    chat: &Chat,
    rules: ChatRules,
) -> RowResult<TokenisedRow> {
    if !rules.allow_control_tokens {
        check_control_tokens(tokenizer, chat)?;
    }
    let values = template.values(chat)?;
    let whole = template.render(&values, Until::End);
    let mut whole = whole.map_err(|problem| with_hint(problem, chat))?;
    let encoded = tokenizer.encode_rendered(&whole.text)?;
    if whole.generated.is_none()
        && let Some(mask_template) = mask_template
    {
        whole.generated = generated_by(mask_template, chat, &whole.text)?;
    }
    let rendering = Rendering {
        tokenizer,
        template,
        chat,
        values,
        whole,
        encoded,
        loss: rules.loss,
    };
    let trained = trained_turns(chat, rules.loss)?;
    let mut findings = Vec::new();
    let masked = match rules.loss {
        LossRule::All => {
            let turn = Turn {
                message: 0,
                span: 0..rendering.whole.text.len(),
            };
            rendering.check_written(&trained, &[turn], true)?;
            all_trained(&rendering.encoded)
        }
        _ => {
            let spans = rendering.trained_spans(&trained, rules.loss)?;
            if rendering.whole.generated.is_some() {
                note_others(template, chat, &rendering.whole, &spans, &mut findings);
            }
            span_mask(&rendering.encoded.offsets, &spans, rules.straddle)
        }
    };
    note_straddlers(
        &rendering.encoded,
        &masked,
        &rendering.whole.text,
        &mut findings,
    );
    note_dropped(chat, &rendering.whole.text, &mut findings);
    note_answers(chat, &trained, &mut findings);
    note_arguments(chat, &rendering.whole.text, &mut findings);
    note_parts(template, chat, &rendering.whole.text, &mut findings);
    if rules.loss == LossRule::Completion {
        note_completion(chat, &mut findings);
    }
    Ok(TokenisedRow {
        tokens: rendering.encoded.ids,
        loss_mask: masked.loss_mask,
        findings,
    })
}

/// Says what most often is wrong with a chat that a template fails on. One that refuses it in
/// words of its own has said so itself.
fn with_hint(mut problem: RowProblem, chat: &Chat) -> RowProblem {
    if problem.message.contains(REFUSED_IN_WORDS) {
        return problem;
    }
    let calls = |m: &Value| m["tool_calls"].is_array();
    let mute = |m: &Value| calls(m) && m.get("content").is_none();
    if let Some(i) = chat.messages.iter().position(mute) {
        problem.message.push_str(&format!(
            "; message {i} has tool calls and no content, which many templates can't print: \
             write \"content\": \"\" beside them, or, for a template that asks whether content is none, \
             null, which --template-rules transformers-4 keeps"
        ));
    }
    if chat.messages.iter().any(calls) {
        problem.message.push_str(
            "; for a template that wants the arguments of tool calls as JSON text, \
             write them so and give --tool-arguments as-given",
        );
    }
    problem
}

/// Where two texts part, what the first and what the second goes on with.
pub fn apart(first: &str, second: &str) -> (String, String) {
    let same = first.bytes().zip(second.bytes());
    let mut at = same.take_while(|(a, b)| a == b).count();
    while !first.is_char_boundary(at) || !second.is_char_boundary(at) {
        at -= 1;
    }
    (quoted(&first[at..]), quoted(&second[at..]))
}

fn generated_by(
    mask_template: &ChatTemplate,
    chat: &Chat,
    text: &str,
) -> RowResult<Option<Vec<Range<usize>>>> {
    let found = mask_template.render(&mask_template.values(chat)?, Until::End)?;
    if found.text == text {
        return Ok(found.generated);
    }
    let (theirs, ours) = apart(&found.text, text);
    Err(RowProblem::new(
        Reason::TemplateRefusal,
        format!(
            "expected the mask template to render what the chat template does, {ours}, found {theirs}; \
             one that is to print another text is a --chat-template of its own"
        ),
    ))
}

/// Messages the student learns, by the rule and what the messages say themselves.
///
/// # Errors
/// A chat without an answer, or flags where everything is trained.
fn trained_turns(chat: &Chat, loss: LossRule) -> RowResult<Vec<usize>> {
    let role = |i: usize| chat.messages[i]["role"].as_str().unwrap_or_default();
    let last = chat.messages.len() - 1;
    if role(last) == "user" {
        return Err(RowProblem::new(
            Reason::NoScoredPosition,
            match chat.assistant_turns().next() {
                None => "expected an answer of the assistant, found none",
                Some(_) => {
                    "expected the assistant's answer last, found a user's message; \
                     take the messages behind the last answer out of the row, for nothing is learnt there"
                }
            },
        ));
    }
    let mut turns: Vec<usize> = chat.assistant_turns().collect();
    let flagged = |i: &usize| {
        chat.flags[*i].trained == Some(false) || chat.flags[*i].parts.iter().any(|p| !p.trained)
    };
    if loss == LossRule::All {
        return match turns.iter().find(|i| flagged(i)) {
            None => Ok(turns),
            Some(i) => Err(RowProblem::unusable(format!(
                "message {i}: expected no flags against training with --loss all, found one; leave --loss out to follow it"
            ))),
        };
    }
    let from = match (loss, chat.completion) {
        (LossRule::Completion, Some(first)) => first,
        _ => 0,
    };
    turns.retain(|&i| i >= from);
    if loss == LossRule::LastAssistant {
        turns.drain(..turns.len().saturating_sub(1));
    }
    turns.retain(|&i| chat.flags[i].trained != Some(false));
    let contradicts = |i: &usize| {
        chat.flags[*i].trained == Some(false) && chat.flags[*i].parts.iter().any(|p| p.trained)
    };
    if let Some(i) = chat.assistant_turns().find(contradicts) {
        return Err(RowProblem::unusable(format!(
            "message {i}: expected its parts to follow its own flag, found a trained part in an untrained message"
        )));
    }
    if turns.is_empty() {
        return Err(RowProblem::new(
            Reason::NoScoredPosition,
            "expected a message to train, found none: the flags leave all out, or there is no answer",
        ));
    }
    Ok(turns)
}

impl Rendering<'_> {
    fn trained_spans(&self, trained: &[usize], loss: LossRule) -> RowResult<Vec<Range<usize>>> {
        let answers = self.chat.assistant_turns().count();
        let mut shared = false;
        let turns = match &self.whole.generated {
            Some(blocks) => {
                shared = blocks.len() != answers;
                self.turns_of_blocks(blocks, trained, loss)?
            }
            None => {
                let turn = |&i: &usize| {
                    Ok(Turn {
                        message: i,
                        span: self.turn_by_prefix(i)?,
                    })
                };
                trained.iter().map(turn).collect::<RowResult<Vec<_>>>()?
            }
        };
        self.check_written(trained, &turns, shared)?;
        let mut spans = Vec::new();
        for turn in turns {
            self.without_parts(turn, &mut spans)?;
        }
        Ok(spans)
    }

    /// `shared`: the turns stand for all answers alike.
    fn check_written(&self, trained: &[usize], turns: &[Turn], shared: bool) -> RowResult<()> {
        let spans: Vec<_> = turns.iter().map(|t| (t.message, t.span.clone())).collect();
        let learnt = Learnt {
            template: self.template,
            chat: self.chat,
            whole: &self.whole,
            trained,
            spans: &spans,
            shared,
        };
        learnt.check()
    }

    /// One block is one answer where there are as many of them. Where there are not, the blocks
    /// still say what was generated, as long as no answer is to be left out.
    fn turns_of_blocks(
        &self,
        blocks: &[Range<usize>],
        trained: &[usize],
        loss: LossRule,
    ) -> RowResult<Vec<Turn>> {
        let answers: Vec<usize> = self.chat.assistant_turns().collect();
        let one_to_one = answers.len() == blocks.len();
        if one_to_one {
            let turns = answers
                .iter()
                .zip(blocks)
                .filter(|(i, _)| trained.contains(i));
            return Ok(turns
                .map(|(&message, span)| Turn {
                    message,
                    span: span.clone(),
                })
                .collect());
        }
        let last = *trained.last().unwrap_or(&0);
        let whole = |span: &Range<usize>| Turn {
            message: last,
            span: span.clone(),
        };
        let flagged = trained
            .iter()
            .any(|&i| !self.chat.flags[i].parts.is_empty());
        if trained == answers && !flagged {
            return Ok(blocks.iter().map(whole).collect());
        }
        if let (LossRule::Completion, Some(first), false) = (loss, self.chat.completion, flagged) {
            let from = self.prefix_length(Until::Before(first))?;
            let clipped = blocks
                .iter()
                .map(|b| b.start.max(from)..b.end)
                .filter(|b| !b.is_empty());
            return Ok(clipped.map(|span| whole(&span)).collect());
        }
        Err(RowProblem::new(
            Reason::TemplateRefusal,
            format!(
                "expected one generation block for each of {} answers, to train some of them, found {} blocks",
                answers.len(),
                blocks.len()
            ),
        ))
    }

    /// What lies between the render up to an answer and the render through it.
    fn turn_by_prefix(&self, turn: usize) -> RowResult<Range<usize>> {
        let start = match (turn, self.prefix_length(Until::Before(turn))) {
            (0, Err(_)) => self.start_of_first()?,
            (_, start) => {
                let start = start?;
                self.check_header(turn, start)?;
                start
            }
        };
        let end = match self.prefix_length(Until::First(turn + 1)) {
            Ok(end) => self.ended_at_control(start..end.max(start)).end,
            Err(problem) => self.end_by_place(turn).ok_or(problem)?,
        };
        if start >= end {
            return Err(RowProblem::new(
                Reason::TemplateRefusal,
                format!(
                    "message {turn}: expected the chat template to render it, found nothing of it"
                ),
            ));
        }
        Ok(start..end)
    }

    /// Where a template treats the last answer in another way, the render through an earlier one
    /// is no beginning of the whole. The place where its content ends, and the token right behind it
    /// at which the model stops, still are its end.
    fn end_by_place(&self, turn: usize) -> Option<usize> {
        let message = &self.chat.messages[turn];
        let content = message["content"].as_str()?.trim_end_matches(is_space);
        if content.is_empty() || message["tool_calls"].is_array() {
            return None;
        }
        let places = self
            .template
            .places(self.chat, turn, &[content.len()], &self.whole);
        let place = *places.ok()?.first()?;
        let tokens = self.encoded.ids.iter().zip(&self.encoded.offsets);
        let mut behind = tokens.filter(|(_, (start, _))| *start >= place);
        let (id, &(start, end)) = behind.find(|(id, span)| self.is_control(**id, span))?;
        // Another control token may as well begin the next turn.
        let ends = self.tokenizer.stops().contains(id);
        (ends && is_blank(self.whole.text.get(place..start))).then_some(end)
    }

    /// Many templates can't be rendered before the first message. A chat that begins with the
    /// assistant is told apart by the header of another answer, which must stand right before the
    /// content of the first.
    fn start_of_first(&self) -> RowResult<usize> {
        let start = || -> Option<usize> {
            let another = self.chat.assistant_turns().find(|&i| i > 0)?;
            let render = |until| Some(self.template.render(&self.values, until).ok()?.text);
            let (before, without) = (
                render(Until::Before(another))?,
                render(Until::First(another))?,
            );
            let header = before.strip_prefix(&without).filter(|h| !h.is_empty())?;
            let (_, text) = self.chat.texts().find(|(i, _)| *i == 0)?;
            let blank = text.len() - text.trim_start_matches(is_space).len();
            if blank == text.len() || self.chat.messages[0]["content"].as_str() != Some(text) {
                return None;
            }
            let places = self.template.places(self.chat, 0, &[blank], &self.whole);
            let place = *places.ok()?.first()?;
            let end = self.whole.text[..place].rfind(header)? + header.len();
            is_blank(self.whole.text.get(end..place)).then_some(end)
        };
        start().ok_or_else(|| {
            RowProblem::new(
                Reason::TemplateRefusal,
                "message 0: expected a system or user message first, for this chat template can't be rendered before it, \
                 found the assistant's; put a system message in front, leave this one untrained (weight 0), or give a copy \
                 with generation blocks with --mask-template",
            )
        })
    }

    /// A template that prints no header when asked for the answer's would have it trained.
    fn check_header(&self, turn: usize, start: usize) -> RowResult<()> {
        let first = self.chat.texts().find(|(i, _)| *i == turn);
        let first = first.map_or("", |(_, text)| text);
        let rest = self.whole.text[start..].trim_start_matches(is_space);
        let bare = first.trim_matches(is_space);
        let begins = rest.starts_with(bare);
        // Most answers begin right there, and that costs no render. A short one, or one that stands
        // there once more, may only look like the beginning of a header.
        if begins && bare.len() >= NO_HEADER && !rest[bare.len()..].contains(bare) {
            return Ok(());
        }
        let without = self.template.render(&self.values, Until::First(turn))?;
        if !without.text.starts_with(&self.whole.text[..start]) {
            return Ok(());
        }
        if begins && self.content_begins(turn, first, start) {
            return Ok(());
        }
        Err(RowProblem::new(
            Reason::TemplateRefusal,
            format!(
                "message {turn}: expected the answer right behind what the chat template prints for add_generation_prompt, \
                 found {}: either nothing is printed for it, so the header would be trained, or the template changes the answer; \
                 give a copy with generation blocks with --mask-template",
                quoted(rest)
            ),
        ))
    }

    /// Whether nothing stands between `start` and the content of a message, whose text begins
    /// with `first`.
    fn content_begins(&self, turn: usize, first: &str, start: usize) -> bool {
        let content = self.chat.messages[turn]["content"].as_str();
        if first.trim_matches(is_space).is_empty() || content != Some(first) {
            return false;
        }
        let blank = first.len() - first.trim_start_matches(is_space).len();
        let places = self.template.places(self.chat, turn, &[blank], &self.whole);
        let place = places.ok().and_then(|places| places.first().copied());
        place.is_some_and(|place| is_blank(self.whole.text.get(start..place)))
    }

    /// Bytes of the partial render, which must be the beginning of the whole one.
    fn prefix_length(&self, until: Until) -> RowResult<usize> {
        if until == Until::First(self.values.len()) {
            return Ok(self.whole.text.len());
        }
        let part = self.template.render(&self.values, until)?.text;
        if self.whole.text.starts_with(&part) {
            return Ok(part.len());
        }
        let place = match until {
            Until::Before(i) => format!("before message {i}"),
            Until::First(count) => format!("through message {}", count - 1),
            Until::End => "as a whole".to_owned(),
        };
        let (part, whole) = apart(&part, &self.whole.text);
        let or =
            match self.loss == LossRule::LastAssistant || self.chat.assistant_turns().count() < 2 {
                true => "",
                false => ", or train the last answer alone with --loss last-assistant",
            };
        Err(RowProblem::new(
            Reason::TemplateRefusal,
            format!(
                "expected the chat rendered {place} to be the beginning of the whole chat, {whole}, found {part}: \
                 this template needs generation blocks to say what the assistant wrote; \
                 give a copy that has them with --mask-template{or}"
            ),
        ))
    }

    /// An added token that stands for more than spaces; Gemma has line ends among them.
    fn is_control(&self, id: i32, &(start, end): &(usize, usize)) -> bool {
        self.tokenizer.is_added(id) && !is_blank(self.whole.text.get(start..end))
    }

    /// Ends a span behind the last added token of its turn where only whitespace follows: the
    /// student learns the end-of-turn token, not the line break the template puts behind it.
    fn ended_at_control(&self, span: Range<usize>) -> Range<usize> {
        let tokens = self.encoded.ids.iter().zip(&self.encoded.offsets).rev();
        let mut inside =
            tokens.filter(|(_, (start, end))| span.start <= *start && *end <= span.end);
        match inside.find(|(id, span)| self.is_control(**id, span)) {
            Some((_, &(_, end))) if is_blank(self.whole.text.get(end..span.end)) => span.start..end,
            _ => span,
        }
    }

    /// The ranges of a `train_detail`, as they stand in what is rendered, and the end of the turn.
    fn details(&self, turn: &Turn, spans: &mut Vec<Range<usize>>) -> RowResult<()> {
        let message = &self.chat.messages[turn.message];
        let content = message["content"].as_str().unwrap_or_default();
        let parts = self.chat.flags[turn.message].parts.iter();
        let trained = parts.filter(|p| p.trained).map(|p| &p.span);
        let edges = trained.clone().flat_map(|s| [s.start, s.end]);
        let edges: Vec<usize> = edges.chain([content.len()]).collect();
        let places = self.edges(turn.message, content, &edges)?;
        for place in places.chunks_exact(2) {
            let (start, end) = (place[0].max(turn.span.start), place[1].min(turn.span.end));
            if start < end {
                spans.push(start..end);
            }
        }
        let behind = places[places.len() - 1].max(turn.span.start);
        let tokens = self.encoded.ids.iter().zip(&self.encoded.offsets);
        let mut ends = tokens
            .filter(|(_, (start, end))| behind <= *start && *end <= turn.span.end)
            .filter(|(id, span)| self.is_control(**id, span))
            .map(|(_, (start, _))| *start);
        let end = match message["tool_calls"].is_array() {
            true => ends.next_back().unwrap_or(turn.span.end),
            false => ends.next().unwrap_or(behind),
        };
        if end < turn.span.end {
            spans.push(end..turn.span.end);
        }
        Ok(())
    }

    /// Where bytes of a message's content stand in what is rendered, whether or not the template
    /// takes off the white space around it.
    fn edges(&self, message: usize, content: &str, edges: &[usize]) -> RowResult<Vec<usize>> {
        let last = content.trim_end_matches(is_space).len();
        let first = last - content[..last].trim_start_matches(is_space).len();
        let mut at: Vec<usize> = edges.iter().map(|&edge| edge.clamp(first, last)).collect();
        at.sort_unstable();
        at.dedup();
        let places = self.template.places(self.chat, message, &at, &self.whole)?;
        let place = |&edge: &usize| {
            let inner = edge.clamp(first, last);
            let place = places[at.partition_point(|&a| a < inner)];
            let text = &self.whole.text;
            let kept = match edge < inner {
                true => text[..place].ends_with(&content[..first]),
                false => text[place..].starts_with(&content[last..]),
            };
            match kept {
                true => place + edge - inner,
                false => place,
            }
        };
        Ok(edges.iter().map(place).collect())
    }

    /// The turn's span without the parts of its content that are not trained. An untrained last
    /// part takes the end of the turn with it.
    fn without_parts(&self, turn: Turn, spans: &mut Vec<Range<usize>>) -> RowResult<()> {
        let flags = &self.chat.flags[turn.message];
        if flags.detailed {
            return self.details(&turn, spans);
        }
        let parts = &flags.parts;
        if parts.iter().all(|p| p.trained) {
            spans.push(turn.span);
            return Ok(());
        }
        let content = self.chat.messages[turn.message]["content"]
            .as_str()
            .unwrap_or_default();
        let untrained = parts.iter().filter(|p| !p.trained && !p.span.is_empty());
        let untrained: Vec<Range<usize>> = untrained.map(|p| p.span.clone()).collect();
        // Edges of the content need no mark: what stands outside it goes with its neighbour.
        let inner = |at: &usize| *at > 0 && *at < content.len();
        let mut at: Vec<usize> = untrained
            .iter()
            .flat_map(|s| [s.start, s.end])
            .filter(inner)
            .collect();
        at.dedup();
        let places = self
            .template
            .places(self.chat, turn.message, &at, &self.whole)?;
        let place = |edge: usize, outer: usize| {
            at.iter()
                .position(|&a| a == edge)
                .map_or(outer, |i| places[i])
        };
        let mut from = turn.span.start;
        for part in untrained {
            let start = place(part.start, turn.span.start);
            if from < start {
                spans.push(from..start);
            }
            from = place(part.end, turn.span.end);
        }
        if from < turn.span.end {
            spans.push(from..turn.span.end);
        }
        Ok(())
    }
}

fn is_blank(text: Option<&str>) -> bool {
    text.is_some_and(|t| t.chars().all(is_space))
}
