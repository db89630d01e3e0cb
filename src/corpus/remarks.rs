//! What is noticed about a row on its way into the corpus.

use std::ops::Range;

use serde_json::Value;

use super::chat::apart;
use super::encode::TokenisedRow;
use super::problem::{Finding, Lint, Reason, RowProblem, RowResult, quoted};
use super::rows::Chat;
use super::spans::SpanMask;
use super::template::{ChatTemplate, Rendered, Until, is_space};
use super::tokenizer::{Encoded, TextTokenizer};
use super::written::holds;

/// Shortest answer, in characters, whose end says anything about its having been cut.
const CUT_CHARS_MIN: usize = 200;

/// # Errors
/// Two BOS tokens at the start.
pub fn check_bos(tokenizer: &TextTokenizer, is_due: bool, row: &mut TokenisedRow) -> RowResult<()> {
    let Some(bos) = tokenizer.bos() else {
        return Ok(());
    };
    match row.tokens[..] {
        [first, second, ..] if first == bos && second == bos => Err(RowProblem::new(
            Reason::DoubleBos,
            format!(
                "expected one BOS token (id {bos}) at the start, found two; \
                 take one out of the row, or out of the chat template"
            ),
        )),
        [first, ..] if first == bos => Ok(()),
        _ if !is_due => Ok(()),
        _ => {
            let first = row.tokens.first().map(|&id| named(tokenizer, id));
            row.findings.push(Finding {
                lint: Lint::MissingBos,
                count: 1,
                example: first.map_or("holds no token".to_owned(), |t| format!("starts with {t}")),
            });
            Ok(())
        }
    }
}

pub fn note_end(tokenizer: &TextTokenizer, row: &mut TokenisedRow) {
    let Some(last) = row.loss_mask.iter().rposition(|&flag| flag == 1) else {
        return;
    };
    let id = row.tokens[last];
    if tokenizer.stops().is_empty() || tokenizer.stops().contains(&id) {
        return;
    }
    let stops: Vec<String> = tokenizer.stops().iter().map(i32::to_string).collect();
    row.findings.push(Finding {
        lint: Lint::EndNotTrained,
        count: 1,
        example: format!(
            "ends with {}, stops at id {}",
            named(tokenizer, id),
            stops.join(" or ")
        ),
    });
}

/// A token, for people.
fn named(tokenizer: &TextTokenizer, id: i32) -> String {
    let text = tokenizer.token(id).unwrap_or_default();
    format!("{} (id {id})", quoted(&text))
}

/// Messages of others inside generation blocks: what the template marks as the model's is learnt,
/// whoever wrote it.
pub fn note_others(
    template: &ChatTemplate,
    chat: &Chat,
    whole: &Rendered,
    learnt: &[Range<usize>],
    findings: &mut Vec<Finding>,
) {
    let mark = |(i, m): (usize, &Value)| {
        let content = m["content"].as_str().filter(|_| m["role"] != "assistant")?;
        let text = content.trim_start_matches(is_space);
        let text_only = text.trim_end_matches(is_space);
        // Only what stands in the learnt text at all is worth a render.
        let stands = |span: &Range<usize>| whole.text[span.clone()].contains(text_only);
        let stands = !text.is_empty() && learnt.iter().any(stands);
        stands.then_some((i, content.len() - text.len()))
    };
    let marks: Vec<_> = chat.messages.iter().enumerate().filter_map(mark).collect();
    if marks.is_empty() {
        return;
    }
    let places = template.marked(chat, &marks, whole).ok().flatten();
    let mut places = places.unwrap_or_default();
    places.retain(|at| learnt.iter().any(|span| span.contains(at)));
    if let Some(&first) = places.first() {
        findings.push(Finding {
            lint: Lint::OthersTrained,
            count: places.len() as u64,
            example: quoted(&whole.text[first..]),
        });
    }
}

pub fn note_straddlers(
    encoded: &Encoded,
    masked: &SpanMask,
    text: &str,
    findings: &mut Vec<Finding>,
) {
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

/// Texts the student sees but does not learn that the template leaves out.
pub fn note_dropped(chat: &Chat, rendered: &str, findings: &mut Vec<Finding>) {
    note_tools(chat, rendered, findings);
    let mut from = 0;
    for (i, text) in chat.texts() {
        let text = text.trim_matches(is_space);
        let here = rendered[from..].find(text).map(|at| from + at);
        match here.or_else(|| rendered.find(text)) {
            // Tool results may be printed in another form.
            None if chat.messages[i]["role"] != "tool" && !holds(rendered, text) => {
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

/// Messages given as parts, which are joined here, where the template makes another text of the
/// parts themselves, as transformers hands them.
pub fn note_parts(
    template: &ChatTemplate,
    chat: &Chat,
    rendered: &str,
    findings: &mut Vec<Finding>,
) {
    if chat.parts.is_empty() {
        return;
    }
    let mut given = chat.clone();
    for (message, parts) in &chat.parts {
        given.messages[*message]["content"] = parts.clone();
    }
    let text = template
        .values(&given)
        .and_then(|values| template.render(&values, Until::End));
    let example = match text {
        Ok(found) if found.text == rendered => return,
        Ok(found) => format!("of the parts it prints {}", apart(&found.text, rendered).0),
        Err(_) => "it fails on the parts".to_owned(),
    };
    findings.push(Finding {
        lint: Lint::PartsJoined,
        count: chat.parts.len() as u64,
        example,
    });
}

/// Messages of a completion that TRL trains, and this tool does not.
pub fn note_completion(chat: &Chat, findings: &mut Vec<Finding>) {
    let Some(from) = chat.completion else {
        return;
    };
    let behind = chat.messages.iter().enumerate().skip(from);
    let mut others = behind.filter(|(_, m)| m["role"] != "assistant");
    if let Some((i, first)) = others.next() {
        findings.push(Finding {
            lint: Lint::OthersInCompletion,
            count: 1 + others.count() as u64,
            example: format!(
                "message {i} of role {}",
                first["role"].as_str().unwrap_or_default()
            ),
        });
    }
}

/// Arguments that the template would print in the form they are given in, if it were given it.
pub fn note_arguments(chat: &Chat, rendered: &str, findings: &mut Vec<Finding>) {
    let printed = |(given, printed): &&(String, String)| {
        rendered.contains(printed) && !rendered.contains(given)
    };
    let mut found = chat.reprinted.iter().filter(printed);
    if let Some((given, _)) = found.next() {
        findings.push(Finding {
            lint: Lint::ArgumentsReprinted,
            count: 1 + found.count() as u64,
            example: quoted(given),
        });
    }
}

/// Tools whose name, even, stands nowhere in what was rendered.
fn note_tools(chat: &Chat, rendered: &str, findings: &mut Vec<Finding>) {
    let tools = chat.tools.as_ref().and_then(Value::as_array);
    let name = |tool: &Value| {
        let named = tool.pointer("/function/name").or_else(|| tool.get("name"));
        named.and_then(Value::as_str).map(str::to_owned)
    };
    let names: Vec<String> = tools.into_iter().flatten().filter_map(name).collect();
    if let Some(first) = names
        .iter()
        .find(|n| !n.is_empty() && !rendered.contains(*n))
    {
        findings.push(Finding {
            lint: Lint::ToolsDropped,
            count: 1,
            example: format!("the tool {}", quoted(first)),
        });
    }
}

/// Trained answers that are empty or look cut.
pub fn note_answers(chat: &Chat, trained: &[usize], findings: &mut Vec<Finding>) {
    let text = |i: usize| {
        chat.messages[i]["content"]
            .as_str()
            .unwrap_or_default()
            .trim_matches(is_space)
    };
    let mut note = |lint, turns: Vec<usize>, example: &dyn Fn(usize) -> String| {
        if let Some(&first) = turns.first() {
            findings.push(Finding {
                lint,
                count: turns.len() as u64,
                example: example(first),
            });
        }
    };
    let calls = |i: usize| chat.messages[i]["tool_calls"].is_array();
    let empty = trained.iter().filter(|&&i| text(i).is_empty() && !calls(i));
    note(Lint::EmptyAnswer, empty.copied().collect(), &|i| {
        format!("message {i}")
    });
    let cut = trained.iter().filter(|&&i| looks_cut(text(i)));
    note(Lint::LooksTruncated, cut.copied().collect(), &|i| {
        let end: Vec<char> = text(i).chars().rev().take(30).collect();
        format!(
            "message {i} ends {}",
            quoted(&end.iter().rev().collect::<String>())
        )
    });
}

/// A long answer that ends in a comma, an open bracket, inside a code block, or on a letter
/// although it holds whole sentences.
fn looks_cut(text: &str) -> bool {
    if text.chars().count() < CUT_CHARS_MIN {
        return false;
    }
    let open_block = text.matches("```").count() % 2 == 1;
    let last = text.chars().next_back().unwrap_or('.');
    let last_line = text.lines().next_back().unwrap_or_default();
    let in_sentence = last.is_ascii_lowercase() && last_line.contains(". ");
    open_block || matches!(last, ',' | '(' | '[' | '{' | '-' | ';') || in_sentence
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn tools_that_are_not_printed_are_told() {
        let tool = json!({"type": "function", "function": {"name": "rain"}});
        let chat = Chat {
            tools: Some(json!([tool])),
            ..Chat::default()
        };
        for (rendered, count) in [("no tool here", 1), ("a tool: rain", 0)] {
            let mut findings = Vec::new();
            note_dropped(&chat, rendered, &mut findings);
            assert_eq!(findings.len(), count, "{rendered}");
        }
    }

    #[test]
    fn cut_answers_are_told_from_short_and_finished_ones() {
        let long = "All is well here. ".repeat(20);
        assert!(!looks_cut(&long));
        assert!(looks_cut(&(long.clone() + "and th")));
        assert!(looks_cut(&(long.clone() + "one, two,")));
        assert!(looks_cut(&(long.clone() + "```\nlet x = 1;")));
        assert!(!looks_cut(&(long + "\n- a list")));
        assert!(!looks_cut("a, b,"));
    }
}
