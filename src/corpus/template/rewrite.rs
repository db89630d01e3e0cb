//! Templates made fit for the engine, line by line.
//!
//! Generation blocks are the parts of a template that say what the model wrote. The engine has no
//! such tag, so `{% generation %}…{% endgeneration %}` is rewritten to
//! `{% with %}`, a start mark, `{% if true %}…{% endif %}`, an end mark, `{% endwith %}`: `with`
//! keeps the block's scope, and the inner `if` gives the outer tags' whitespace control a place
//! on either side of the marks. The marks are private-use characters and are taken out again.
//!
//! Loops get their values through a filter, because the engine loops over None and not over
//! strings, and Python the other way round. Whatever else gets a name goes through one that charges
//! for it: the values of `set` and `with`, and what macros and recursive loops are called with.

use std::ops::Range;

use anyhow::{Result, bail, ensure};

use super::Rendered;
use super::engine::LOOPED;
use super::held::HELD;
use crate::corpus::problem::{Reason, RowProblem, RowResult};

const START: char = '\u{10fff0}';
const END: char = '\u{10fff1}';
/// Marks a place in a text that is to be found again, see [`super::ChatTemplate::places`].
pub const PLACE: char = '\u{10fff2}';

/// A template the engine can compile.
#[derive(Debug)]
pub struct Rewritten {
    pub text: String,
    pub marks_generation: bool,
}

/// Whether `text` holds one of the marks, which must not come from data.
pub fn has_mark(text: &str) -> bool {
    // Both marks start with this byte, and nothing else that is common does.
    text.as_bytes().contains(&0xf4) && text.contains([START, END])
}

/// Rewrites generation blocks and line ends.
///
/// # Errors
/// A template that holds the marks itself, or blocks that don't pair up.
pub fn rewrite(source: &str) -> Result<Rewritten> {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    ensure!(
        !has_mark(&source),
        "expected a chat template without U+10FFF0 and U+10FFF1, which mark generation blocks here, found one"
    );
    refuse_constructs(&source)?;
    let mut text = String::with_capacity(source.len());
    let (mut copied, mut depth, mut marks_generation) = (0, 0_usize, false);
    for tag in tags(&source) {
        let opens = match tag.name(&source) {
            "generation" => true,
            "endgeneration" => false,
            name => {
                let at = name.as_ptr() as usize - source.as_ptr() as usize;
                for (value, filter) in named_values(name) {
                    let (start, end) = (at + value.start, at + value.end);
                    let value = &source[start..end];
                    text.push_str(&source[copied..start]);
                    text.push_str(&format!("({value})|{filter}"));
                    copied = end;
                }
                if let Some(names) = called_names(name) {
                    let (_, right) = tag.trims(&source);
                    text.push_str(&source[copied..tag.span.end - 2 - right.len()]);
                    text.push_str(&format!("%}}{{% set {HELD} = [{names}]|{HELD} {right}%}}"));
                    copied = tag.span.end;
                }
                continue;
            }
        };
        let (left, right) = tag.trims(&source);
        text.push_str(&source[copied..tag.span.start]);
        if opens {
            depth += 1;
            text.push_str(&format!("{{%{left} with %}}{START}{{% if true {right}%}}"));
        } else {
            ensure!(
                depth > 0,
                "expected a generation block before endgeneration, found none"
            );
            depth -= 1;
            text.push_str(&format!("{{%{left} endif %}}{END}{{% endwith {right}%}}"));
        }
        marks_generation = true;
        copied = tag.span.end;
    }
    if depth > 0 {
        bail!("expected endgeneration after every generation block, found the template's end");
    }
    text.push_str(&source[copied..]);
    Ok(Rewritten {
        text,
        marks_generation,
    })
}

/// Names the engine would take for undefined variables, and dict methods that it would take for
/// keys when they are not called: both would change what is rendered without a word.
///
/// # Errors
/// The first of them, with its line.
fn refuse_constructs(source: &str) -> Result<()> {
    const NAMES: [&str; 3] = ["varargs", "kwargs", "self"];
    const METHODS: [&str; 9] = [
        "clear",
        "copy",
        "get",
        "items",
        "keys",
        "pop",
        "popitem",
        "setdefault",
        "values",
    ];
    for (at, word) in words(source) {
        let before = source[..at].trim_end();
        let after = source[at + word.len()..].trim_start();
        let is_attribute = before.ends_with('.');
        let is_key = after.starts_with('=') && !after.starts_with("==");
        if word == "**" {
            let line = source[..at].matches('\n').count() + 1;
            bail!("expected constructs that render alike here, found ** at line {line}");
        }
        let unknown = NAMES.contains(&word) && !is_attribute && !is_key;
        let uncalled = METHODS.contains(&word) && is_attribute && !after.starts_with('(');
        // A namespace may have attributes of any name.
        let in_namespace = source.contains(&format!("ns.{word}")) && before.ends_with("ns.");
        if unknown || (uncalled && !in_namespace) {
            let line = source[..at].matches('\n').count() + 1;
            let what = if unknown {
                "a variable of macros"
            } else {
                "a method that is not called"
            };
            bail!(
                "expected constructs that render alike here, found {word}, {what}, at line {line}"
            );
        }
    }
    Ok(())
}

/// Every word, and every `**`, in the tags and expressions of a template, outside strings.
fn words(source: &str) -> Vec<(usize, &str)> {
    let bytes = source.as_bytes();
    let mut found = Vec::new();
    for span in code(source) {
        let (mut at, mut quote) = (span.start, None);
        while at < span.end {
            match (bytes[at], quote) {
                (b'\\', Some(_)) => at += 1,
                (b, Some(q)) if b == q => quote = None,
                (_, Some(_)) => {}
                (b'\'' | b'"', None) => quote = Some(bytes[at]),
                // The engine raises after it negates, and Jinja before.
                (b'*', None) if bytes[at + 1] == b'*' => {
                    found.push((at, &source[at..at + 2]));
                    at += 1;
                }
                (b, None) if is_word(b) => {
                    let end = (at..span.end)
                        .find(|&i| !is_word(bytes[i]))
                        .unwrap_or(span.end);
                    found.push((at, &source[at..end]));
                    at = end;
                    continue;
                }
                _ => {}
            }
            at += 1;
        }
    }
    found
}

/// Where in a tag the values stand that get a name, and the filter they get it through.
fn named_values(tag: &str) -> Vec<(Range<usize>, &'static str)> {
    let parts = parts(tag);
    let is = |part: &Range<usize>, what: &str| &tag[part.clone()] == what;
    let Some((keyword, rest)) = parts.split_first() else {
        return Vec::new();
    };
    let behind = |from: usize, ends: &dyn Fn(usize) -> bool| {
        let end = (from..rest.len()).find(|&i| ends(i));
        end.map_or(tag.len(), |i| rest[i].start)
    };
    let mut found = Vec::new();
    match &tag[keyword.clone()] {
        "for" => {
            if let Some(at) = rest.iter().position(|p| is(p, "in")) {
                let ends = |i: usize| is(&rest[i], "if") || is(&rest[i], "recursive");
                found.push((rest[at].end..behind(at + 1, &ends), LOOPED));
            }
        }
        "set" => {
            if let Some(at) = rest.iter().position(|p| is(p, "=")) {
                found.push((rest[at].end..tag.len(), HELD));
            }
        }
        "with" => {
            let begins = |i: usize| rest.get(i).is_some_and(|p| is(p, "="));
            for at in (0..rest.len()).filter(|&i| begins(i)) {
                let ends = |i: usize| is(&rest[i], ",");
                found.push((rest[at].end..behind(at + 1, &ends), HELD));
            }
        }
        _ => {}
    }
    let trimmed = |(span, filter)| Some((trimmed(tag, span)?, filter));
    found.into_iter().filter_map(trimmed).collect()
}

/// The names that a macro or a recursive loop gives what it is called with, in commas.
fn called_names(tag: &str) -> Option<String> {
    let parts = parts(tag);
    let word = |i: usize| parts.get(i).map(|p| &tag[p.clone()]);
    let names = match word(0)? {
        "macro" => {
            let (open, close) = (tag.find('(')? + 1, tag.rfind(')')?);
            let inner = tag.get(open..close)?;
            let parts = self::parts(inner);
            let begins = |i: &usize| *i == 0 || &inner[parts[i - 1].clone()] == ",";
            let names = (0..parts.len()).filter(begins);
            names.map(|i| inner[parts[i].clone()].to_owned()).collect()
        }
        "for" if word(parts.len() - 1) == Some("recursive") => {
            let targets = (1..parts.len()).take_while(|&i| word(i) != Some("in"));
            let targets = targets.filter_map(word).filter(|w| *w != ",");
            targets.map(str::to_owned).collect::<Vec<_>>()
        }
        _ => return None,
    };
    let plain = |name: &String| name.bytes().all(is_word);
    (!names.is_empty() && names.iter().all(plain)).then(|| names.join(", "))
}

/// The words and signs of a tag outside strings and brackets; a comparison is one sign.
fn parts(tag: &str) -> Vec<Range<usize>> {
    let bytes = tag.as_bytes();
    let (mut found, mut depth, mut quote, mut at) = (Vec::new(), 0_usize, None, 0);
    while at < bytes.len() {
        let mut end = at + 1;
        match (bytes[at], quote) {
            (b'\\', Some(_)) => end += 1,
            (b, Some(q)) if b == q => quote = None,
            (_, Some(_)) => {}
            (b'\'' | b'"', None) => quote = Some(bytes[at]),
            (b'(' | b'[' | b'{', None) => depth += 1,
            (b')' | b']' | b'}', None) => depth = depth.saturating_sub(1),
            (b, None) if is_word(b) => {
                let word = (at..bytes.len()).find(|&i| !is_word(bytes[i]));
                end = word.unwrap_or(bytes.len());
                if depth == 0 {
                    found.push(at..end);
                }
            }
            (b'=' | b'!' | b'<' | b'>', None) if bytes.get(at + 1) == Some(&b'=') => end += 1,
            (b'=' | b',', None) if depth == 0 => found.push(at..end),
            _ => {}
        }
        at = end;
    }
    found
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte >= 0x80
}

fn trimmed(text: &str, span: Range<usize>) -> Option<Range<usize>> {
    let inner = &text[span.clone()];
    let start = span.start + inner.len() - inner.trim_start().len();
    let end = span.start + inner.trim_end().len();
    (start < end).then_some(start..end)
}

/// Takes the marks out of a rendered text and says where they stood.
///
/// # Errors
/// Marks that don't pair up, as when a template cuts or doubles what a block rendered.
pub fn take_marks(marked: &str) -> RowResult<Rendered> {
    let mut text = String::with_capacity(marked.len());
    let mut generated: Vec<Range<usize>> = Vec::new();
    let (mut depth, mut start) = (0_usize, 0);
    let mut balanced = true;
    for piece in marked.split_inclusive([START, END]) {
        let Some(mark) = piece
            .chars()
            .next_back()
            .filter(|c| [START, END].contains(c))
        else {
            text.push_str(piece);
            continue;
        };
        text.push_str(&piece[..piece.len() - mark.len_utf8()]);
        if mark == START {
            if depth == 0 {
                start = text.len();
            }
            depth += 1;
        } else if depth == 0 {
            balanced = false;
        } else {
            depth -= 1;
            if depth == 0 {
                generated.push(start..text.len());
            }
        }
    }
    if balanced && depth == 0 {
        return Ok(Rendered {
            text,
            generated: Some(generated),
        });
    }
    Err(RowProblem::new(
        Reason::TemplateRefusal,
        "expected whole generation blocks in what the chat template renders, found one cut in two",
    ))
}

/// A `{% … %}` of a template.
struct Tag {
    span: Range<usize>,
}

impl Tag {
    fn inner<'a>(&self, source: &'a str) -> &'a str {
        &source[self.span.start + 2..self.span.end - 2]
    }

    fn name<'a>(&self, source: &'a str) -> &'a str {
        let inner = self.inner(source);
        inner
            .trim_start_matches(['-', '+'])
            .trim_end_matches(['-', '+'])
            .trim()
    }

    /// The whitespace control at the tag's outer edges.
    fn trims<'a>(&self, source: &'a str) -> (&'a str, &'a str) {
        let inner = self.inner(source);
        let left = inner.len() - inner.trim_start_matches(['-', '+']).len();
        let right = inner.trim_end_matches(['-', '+']).len();
        (&inner[..left], &inner[right..])
    }
}

/// Every block tag outside comments, expressions and raw blocks.
fn tags(source: &str) -> Vec<Tag> {
    let is_tag = |span: &Range<usize>| source[span.start..].starts_with("{%");
    code(source)
        .into_iter()
        .filter(is_tag)
        .map(|span| Tag { span })
        .collect()
}

/// Every tag and expression outside comments and raw blocks. An unclosed one ends the list; the
/// engine reports it better than this scan could.
fn code(source: &str) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let mut at = 0;
    let mut raw = false;
    while let Some(open) = source[at..].find('{').map(|i| at + i) {
        let rest = &source[open..];
        let end = if rest.starts_with("{%") {
            expression_end(source, open + 2, "%}")
        } else if raw {
            Some(open + 1)
        } else if rest.starts_with("{#") {
            rest.find("#}").map(|i| open + i + 2)
        } else if rest.starts_with("{{") {
            expression_end(source, open + 2, "}}")
        } else {
            Some(open + 1)
        };
        let Some(end) = end else { break };
        at = end;
        if !rest.starts_with("{%") {
            if rest.starts_with("{{") && !raw {
                found.push(open..end);
            }
            continue;
        }
        let tag = Tag { span: open..end };
        match tag.name(source) {
            "endraw" => raw = false,
            "raw" => raw = true,
            _ if raw => at = open + 2,
            _ => found.push(open..end),
        }
    }
    found
}

/// The end of an expression: `close` outside strings and braces.
fn expression_end(source: &str, from: usize, close: &str) -> Option<usize> {
    let bytes = source.as_bytes();
    let (mut at, mut depth) = (from, 0_usize);
    let mut quote = None;
    while at < bytes.len() {
        match (bytes[at], quote) {
            (b'\\', Some(_)) => at += 1,
            (b, Some(q)) if b == q => quote = None,
            (_, Some(_)) => {}
            (b'\'' | b'"', None) => quote = Some(bytes[at]),
            (b'{', None) => depth += 1,
            (b'}', None) if depth > 0 => depth -= 1,
            _ if depth == 0 && bytes[at..].starts_with(close.as_bytes()) => {
                return Some(at + close.len());
            }
            _ => {}
        }
        at += 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_real_tags_are_rewritten() {
        let quiet = [
            "{# {% generation %} #}",
            "{% raw %}{% generation %}{{ x }}{% endraw %}",
            "{{ '{% generation %}' }}",
            "{{ {'a': {'b': '}}'}} }}{% if x == '%}' %}",
            "{ {% if a %}}}{% endif %}",
        ];
        for source in quiet {
            let found = rewrite(source).unwrap();
            assert_eq!(
                (found.text.as_str(), found.marks_generation),
                (source, false)
            );
        }
        let found = rewrite("a {%- generation +%}x{% endgeneration -%} b").unwrap();
        assert_eq!(
            found.text,
            format!("a {{%- with %}}{START}{{% if true +%}}x{{% endif %}}{END}{{% endwith -%}} b")
        );
    }

    #[test]
    fn what_gets_a_name_goes_through_the_filter() {
        for (source, expected) in [
            (
                "{%- set a.b = c == d if e -%}",
                "{%- set a.b = (c == d if e)|kdscore_held -%}",
            ),
            (
                "{% set a, b = c, 'x=1' %}{% set a | f(x=1) %}{% endset %}",
                "{% set a, b = (c, 'x=1')|kdscore_held %}{% set a | f(x=1) %}{% endset %}",
            ),
            (
                "{% with a = f(b, c=d), e = '=,' %}",
                "{% with a = (f(b, c=d))|kdscore_held, e = ('=,')|kdscore_held %}",
            ),
            (
                "{%- macro f(a, b=g(1, 2), c=none) -%} x",
                "{%- macro f(a, b=g(1, 2), c=none) %}{% set kdscore_held = [a, b, c]|kdscore_held -%} x",
            ),
            ("{% macro f() %}", "{% macro f() %}"),
        ] {
            assert_eq!(rewrite(source).unwrap().text, expected);
        }
    }

    #[test]
    fn loops_get_their_values_through_the_filter() {
        for (source, expected) in [
            ("{%- for a in b -%}", "{%- for a in (b)|kdscore_looped -%}"),
            (
                "{% for k, v in x['if'](1 if y else 2).items() if v in w recursive %}",
                "{% for k, v in (x['if'](1 if y else 2).items())|kdscore_looped if v in w recursive %}{% set kdscore_held = [k, v]|kdscore_held %}",
            ),
            (
                "{% for a in 'in if' recursive %}",
                "{% for a in ('in if')|kdscore_looped recursive %}{% set kdscore_held = [a]|kdscore_held %}",
            ),
            (
                "{% format in x %}{{ for a in b }}",
                "{% format in x %}{{ for a in b }}",
            ),
        ] {
            assert_eq!(rewrite(source).unwrap().text, expected);
        }
    }

    #[test]
    fn constructs_that_would_change_silently_are_refused() {
        for (source, says) in [
            (
                "a\n{{ m.items }}",
                "found items, a method that is not called, at line 2",
            ),
            (
                "{% macro f() %}{{ kwargs }}{% endmacro %}",
                "found kwargs, a variable of macros, at line 1",
            ),
        ] {
            let found = rewrite(source).unwrap_err().to_string();
            assert!(found.contains(says), "{found}");
        }
        for source in [
            "{{ m.items() }}",
            "{{ m['items'] }} self {{ 'self' }}",
            "{% set ns.items = 1 %}{{ ns.items }}",
            "{{ f(kwargs=1) }}",
        ] {
            assert!(rewrite(source).is_ok(), "{source}");
        }
    }

    #[test]
    fn marks_come_out_as_ranges() {
        let marked = format!("é{START}ab{START}c{END}{END}d{START}{END}{START}e{END}");
        let found = take_marks(&marked).unwrap();
        assert_eq!(found.text, "éabcde");
        assert_eq!(found.generated, Some(vec![2..5, 6..6, 6..7]));
        for cut in [
            format!("{START}a"),
            format!("a{END}"),
            format!("{END}a{START}"),
        ] {
            assert!(take_marks(&cut).is_err());
        }
    }
}
