//! Chat templates: the Jinja of Hugging Face checkpoints, rendered as transformers 5 does.

mod generation;
mod python;

use std::ops::Range;

use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, UndefinedBehavior};
use serde_json::Value as Json;

use super::problem::{Reason, RowProblem, RowResult};
use super::rows::Chat;
use super::tokenizer::TextTokenizer;

/// Steps a template may take for one chat; a runaway loop ends here instead of never.
const FUEL: u64 = 20_000_000;
const NAME: &str = "chat_template";

/// A compiled chat template with its variables.
#[derive(Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    source: String,
    variables: Vec<(String, Value)>,
    marks_generation: bool,
}

/// A chat as text.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rendered {
    pub text: String,
    /// Byte ranges of the template's generation blocks, rising; `None` when it has no such blocks.
    pub generated: Option<Vec<Range<usize>>>,
}

/// A chat's messages and tools in the template engine's own values, converted once.
#[derive(Debug)]
pub struct ChatValues {
    messages: Vec<Value>,
    tools: Value,
}

impl ChatValues {
    /// # Errors
    /// A text that holds one of the two characters that mark generation blocks here.
    pub fn new(chat: &Chat) -> RowResult<ChatValues> {
        let messages = chat.messages.iter().map(python::to_value);
        Ok(ChatValues {
            messages: messages.collect::<RowResult<_>>()?,
            tools: chat
                .tools
                .as_ref()
                .map_or(Ok(Value::from(())), python::to_value)?,
        })
    }

    pub fn len(&self) -> usize {
        self.messages.len()
    }

    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }
}

/// How much of a chat to render.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Until {
    /// All messages.
    End,
    /// The messages before this one, and the header that asks the model for it.
    Before(usize),
    /// The messages through this one.
    Through(usize),
}

impl ChatTemplate {
    /// The template of a checkpoint: `file` where one is given, else the folder's
    /// chat_template.jinja, else `chat_template` of its tokenizer_config.json.
    ///
    /// # Errors
    /// No template in any of these places, or one that doesn't parse.
    pub fn load(
        tokenizer: &TextTokenizer,
        file: Option<&Path>,
        args: &[(String, Json)],
    ) -> Result<ChatTemplate> {
        let (place, source) = find_source(tokenizer, file)?;
        ChatTemplate::new(&source, tokenizer.special_tokens(), args).context(place)
    }

    /// The template as it was read.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Compiles `source`. Variables are the special tokens by name (`bos_token`), overridden by
    /// the user's arguments.
    ///
    /// # Errors
    /// A template that doesn't parse.
    pub fn new(
        source: &str,
        special_tokens: &[(String, String)],
        args: &[(String, Json)],
    ) -> Result<ChatTemplate> {
        let rewritten = generation::rewrite(source)?;
        let mut env = environment();
        env.add_template_owned(NAME, rewritten.text)
            .map_err(|e| anyhow!("expected a chat template in Jinja, found {e}"))?;
        let tokens = special_tokens.iter();
        let mut variables: Vec<_> = tokens
            .map(|(name, text)| (name.clone(), Value::from(text.as_str())))
            .collect();
        for (name, value) in args {
            let value = python::to_value(value)
                .map_err(|p| anyhow!("template-arg {name}: {}", p.message))?;
            variables.push((name.clone(), value));
        }
        Ok(ChatTemplate {
            env,
            source: source.to_owned(),
            variables,
            marks_generation: rewritten.marks_generation,
        })
    }

    /// Renders the chat or the first part of it.
    ///
    /// # Errors
    /// The template refuses the chat or fails on it.
    pub fn render(&self, chat: &ChatValues, until: Until) -> RowResult<Rendered> {
        let (messages, prompt) = match until {
            Until::End => (&chat.messages[..], false),
            Until::Before(i) => (&chat.messages[..i.min(chat.len())], true),
            Until::Through(i) => (&chat.messages[..chat.len().min(i + 1)], false),
        };
        let fixed = [
            ("messages", messages.iter().cloned().collect::<Value>()),
            ("tools", chat.tools.clone()),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(prompt)),
        ];
        let fixed = fixed.into_iter().map(|(k, v)| (k.to_owned(), v));
        let context = Value::from_pairs(fixed.chain(self.variables.iter().cloned()));
        let template = self.env.get_template(NAME).map_err(|e| refusal(&e))?;
        let marked = template.render(context).map_err(|e| refusal(&e))?;
        if !self.marks_generation {
            return Ok(Rendered {
                text: marked,
                generated: None,
            });
        }
        generation::take_marks(&marked)
    }
}

/// Where the template was found, and its text.
fn find_source(tokenizer: &TextTokenizer, file: Option<&Path>) -> Result<(String, String)> {
    let read = |path: &Path| {
        std::fs::read_to_string(path)
            .map(|source| (path.display().to_string(), source))
            .with_context(|| format!("{}: can't read the chat template", path.display()))
    };
    if let Some(file) = file {
        return read(file);
    }
    let beside = tokenizer.folder().join("chat_template.jinja");
    if beside.exists() {
        return read(&beside);
    }
    let config = tokenizer.folder().join("tokenizer_config.json");
    let config = config.display();
    match tokenizer.config_template() {
        Some(Json::String(source)) => Ok((format!("{config}: chat_template"), source.clone())),
        Some(Json::Array(_)) => bail!(
            "{config}: expected one chat_template, found a list of several; give one with --chat-template"
        ),
        _ => bail!(
            "{config}: expected a chat_template, found none, and no chat_template.jinja beside it; \
             give one with --chat-template"
        ),
    }
}

fn environment() -> Environment<'static> {
    let mut env = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build();
    env.set_syntax(syntax.expect("the default delimiters are valid"));
    env.set_undefined_behavior(UndefinedBehavior::Lenient);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_fuel(Some(FUEL));
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    env.add_filter("tojson", python::tojson);
    env.add_test("iterable", python::is_iterable);
    env.add_test("sequence", python::is_sequence);
    env.add_function("raise_exception", raise_exception);
    env.add_function("strftime_now", refuse_clock);
    env
}

fn raise_exception(message: &str) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.to_owned()))
}

/// A corpus that depends on the day it was made can't be made again.
fn refuse_clock(_format: &str) -> Result<Value, Error> {
    Err(Error::new(
        ErrorKind::InvalidOperation,
        "the template prints today's date; fix it with --template-arg, for most templates \
         date_string='26 Jul 2024'",
    ))
}

fn refusal(error: &Error) -> RowProblem {
    let found = match error.kind() {
        ErrorKind::OutOfFuel => format!("more than {FUEL} steps"),
        _ => error.detail().unwrap_or("a failure").to_owned(),
    };
    let line = error
        .line()
        .map_or(String::new(), |l| format!(" at its line {l}"));
    RowProblem::new(
        Reason::TemplateRefusal,
        format!(
            "expected a chat that the chat template takes, found{line}: {}",
            found.trim()
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn render(source: &str, messages: Json) -> Result<Rendered, String> {
        let template = ChatTemplate::new(source, &[("bos_token".into(), "<s>".into())], &[])
            .map_err(|e| e.to_string())?;
        let values = ChatValues::new(&Chat::new(messages).unwrap()).unwrap();
        template.render(&values, Until::End).map_err(|p| p.message)
    }

    fn hi() -> Json {
        json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}])
    }

    #[test]
    fn blocks_are_trimmed_as_transformers_does() {
        let source = "{{ bos_token }}\r\n{% for m in messages %}\n  {% if true %}\n[{{ m.role }}] {{ m['content'].strip() }}\n  {% endif %}\n{% endfor %}\n";
        let found = render(source, hi()).unwrap();
        assert_eq!(found.text, "<s>\n[user] Hi\n[assistant] Yo\n");
        assert_eq!(found.generated, None);
    }

    #[test]
    fn generation_blocks_become_ranges() {
        let source = "{% for m in messages %}{% if m.role == 'assistant' %}A:\
            {%- generation -%}\n {{ m.content }}<e>\n{%- endgeneration %}\n{% else %}U:{{ m.content }}\n{% endif %}{% endfor %}";
        let found = render(source, hi()).unwrap();
        assert_eq!(found.text, "U:Hi\nA:Yo<e>");
        assert_eq!(
            found.generated.as_deref(),
            Some(std::slice::from_ref(&(7..12)))
        );
    }

    #[test]
    fn a_generation_block_can_assign_an_outer_namespace() {
        let source = "{% set ns = namespace(n=0) %}{% for m in messages %}{% generation %}\
            {% set ns.n = ns.n + 1 %}{% set inner = 1 %}{{ ns.n }}{% endgeneration %}{% endfor %}{{ ns.n }}{{ inner is defined }}";
        let found = render(source, hi()).unwrap();
        assert_eq!(found.generated, Some(vec![0..1, 1..2]));
        assert_eq!(found.text.to_lowercase(), "122false");
    }

    #[test]
    fn refusals_are_told_in_the_templates_words() {
        for (source, says) in [
            ("{{ raise_exception('no system here') }}", "no system here"),
            ("{{ strftime_now('%d') }}", "--template-arg"),
            (
                "{% for i in range(10000) %}{% for j in range(10000) %}{% endfor %}{% endfor %}",
                "more than 20000000 steps",
            ),
            ("{{ messages[0].content.nope() }}", "nope"),
            ("{{ missing.attribute.deeper }}", "found at its line 1"),
        ] {
            let message = render(source, hi()).unwrap_err();
            assert!(message.contains(says), "{source}: {message}");
        }
        assert!(ChatTemplate::new("{% if %}", &[], &[]).is_err());
        assert!(ChatTemplate::new("{% generation %}", &[], &[]).is_err());
    }

    #[test]
    fn arguments_override_special_tokens() {
        let args = [
            ("bos_token".to_owned(), json!("X")),
            ("date_string".to_owned(), json!("1 May")),
        ];
        let template = ChatTemplate::new(
            "{{ bos_token }} {{ date_string }}{{ tools is none }}",
            &[("bos_token".into(), "<s>".into())],
            &args,
        )
        .unwrap();
        let values = ChatValues::new(&Chat::new(hi()).unwrap()).unwrap();
        let text = template.render(&values, Until::End).unwrap().text;
        assert_eq!(text, "X 1 MayTrue");
    }
}
