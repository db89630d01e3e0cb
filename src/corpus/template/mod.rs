//! Chat templates: the Jinja of Hugging Face checkpoints, rendered as transformers does.

mod date;
mod engine;
mod held;
mod load;
mod methods;
mod numbers;
mod print;
mod python;
mod range;
mod rewrite;

use std::ops::Range;
use std::panic::resume_unwind;
use std::path::PathBuf;

use anyhow::{Context, Result, anyhow, bail, ensure};
use minijinja::value::Value;
use minijinja::{Environment, Error, ErrorKind};
use serde_json::{Map, Value as Json};

use super::problem::{Reason, RowProblem, RowResult, quoted};
use super::rows::Chat;
use super::rules::TemplateRules;
use super::tokenizer::TextTokenizer;
pub use date::TemplateDate;
pub use load::NamedSource;
pub use methods::is_space;
use numbers::{OddNumber, check_printed, odd_numbers};
pub use print::float_text;

/// Variables that the chat itself gives; a row or user may not.
const FIXED: [&str; 6] = [
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    // Not variables, but arguments of transformers that render another chat.
    "continue_final_message",
    "chat_template",
];
/// Names a message's reasoning goes by. Templates read the first; gpt-oss reads the second.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];
/// The template for chats with tools, where a checkpoint has several, and the one for the rest.
const WITH_TOOLS: &str = "tool_use";
const DEFAULT: &str = "default";
/// Stands in a text at a place to be found again in what is rendered.
const PLACE: char = rewrite::PLACE;
/// Bytes of a template, a few times those of the longest published: the engine takes seconds for
/// the worst of this length, and four times as many for one twice as long.
const SOURCE_MAX: usize = 1 << 16;
/// Bytes of stack that compiling takes, whatever the template, and at most for each byte of it.
const STACK_MIN: usize = 1 << 20;
const STACK_OF_BYTE: usize = 4096;

/// Stands before the words with which a template itself refuses a chat.
pub const REFUSED_IN_WORDS: &str = "its own refusal: ";

/// Which template, and how it is rendered.
#[derive(Clone, Debug, Default)]
pub struct TemplatePlan {
    /// A Jinja file, or the name of one of the checkpoint's several templates.
    pub template: Option<PathBuf>,
    pub args: Vec<(String, Json)>,
    pub date: Option<TemplateDate>,
    pub rules: TemplateRules,
}

/// The compiled chat templates of a checkpoint, most often one, with their variables.
#[derive(Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    templates: Vec<Compiled>,
    variables: Vec<(String, Value)>,
    rules: TemplateRules,
}

#[derive(Debug)]
struct Compiled {
    source: NamedSource,
    marks_generation: bool,
}

/// A chat as text.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rendered {
    pub text: String,
    /// Byte ranges of the template's generation blocks, rising; `None` when it has no such blocks.
    pub generated: Option<Vec<Range<usize>>>,
}

/// A chat's messages, tools and variables in the template engine's own values, converted once.
#[derive(Debug)]
pub struct ChatValues {
    messages: Vec<Value>,
    tools: Value,
    variables: Vec<(String, Value)>,
    odd: Vec<OddNumber>,
}

impl ChatValues {
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
    /// So many messages.
    First(usize),
}

impl ChatTemplate {
    /// The template of a checkpoint, by transformers' order: the one the plan names, else the
    /// folder's chat_template.jinja and additional_chat_templates, else `chat_template` of its
    /// tokenizer_config.json.
    ///
    /// # Errors
    /// No template in any of these places, or one that doesn't parse.
    pub fn load(tokenizer: &TextTokenizer, plan: &TemplatePlan) -> Result<ChatTemplate> {
        let sources = load::sources(tokenizer, plan.template.as_deref())?;
        ChatTemplate::new(sources, tokenizer.special_tokens(), plan)
    }

    /// Compiles the templates. Variables are the special tokens by name (`bos_token`), overridden
    /// by the user's arguments.
    ///
    /// # Errors
    /// A template that doesn't parse, or an argument that only the chat can give.
    pub fn new(
        sources: Vec<NamedSource>,
        special_tokens: &[(String, String)],
        plan: &TemplatePlan,
    ) -> Result<ChatTemplate> {
        let mut env = engine::environment(plan.date);
        let mut templates = Vec::new();
        for source in sources {
            let rewritten = rewrite::rewrite(&source.text).with_context(|| source.place.clone())?;
            let broken = |found: &str| {
                anyhow!(
                    "{}: expected a chat template in Jinja, found {found}",
                    source.place
                )
            };
            ensure!(
                rewritten.text.len() <= SOURCE_MAX,
                broken(&format!("one of more than {SOURCE_MAX} bytes"))
            );
            compile(&mut env, &source.name, rewritten.text)?.map_err(|e| broken(&syntax(&e)))?;
            templates.push(Compiled {
                source,
                marks_generation: rewritten.marks_generation,
            });
        }
        let tokens = special_tokens.iter();
        let mut variables: Vec<_> = tokens
            .map(|(name, text)| (name.clone(), Value::from(text.as_str())))
            .collect();
        for (name, value) in &plan.args {
            if FIXED.contains(&name.as_str()) {
                bail!(
                    "template-arg: expected a variable of the template, found {name}, which the rows give"
                );
            }
            let value = python::to_value(value)
                .map_err(|p| anyhow!("template-arg {name}: {}", p.message))?;
            variables.push((name.clone(), value));
        }
        Ok(ChatTemplate {
            env,
            templates,
            variables,
            rules: plan.rules,
        })
    }

    /// Whether every template says what the model generates.
    pub fn marks_generation(&self) -> bool {
        self.templates.iter().all(|t| t.marks_generation)
    }

    /// The templates as they were read, by name.
    pub fn sources(&self) -> impl Iterator<Item = &NamedSource> {
        self.templates.iter().map(|t| &t.source)
    }

    /// The chat as values, with what this generation of transformers adds and drops.
    ///
    /// # Errors
    /// A text with a character that has a meaning here, or a variable that only the chat may give.
    pub fn values(&self, chat: &Chat) -> RowResult<ChatValues> {
        let message = |m: &Json| python::to_value(&self.as_seen(m));
        let mut variables = Vec::new();
        for (name, value) in &chat.template_kwargs {
            if FIXED.contains(&name.as_str()) {
                return Err(RowProblem::unusable(format!(
                    "chat_template_kwargs: expected variables of the template, found {name}, which the chat gives"
                )));
            }
            variables.push((name.clone(), python::to_value(value)?));
        }
        let kwargs = chat.template_kwargs.iter().map(|(_, value)| value);
        let parts = chat.messages.iter().chain(&chat.tools).chain(kwargs);
        Ok(ChatValues {
            odd: odd_numbers(parts),
            messages: chat
                .messages
                .iter()
                .map(message)
                .collect::<RowResult<_>>()?,
            tools: chat
                .tools
                .as_ref()
                .map_or(Ok(Value::from(())), python::to_value)?,
            variables,
        })
    }

    /// The message as this generation of transformers hands it to the template.
    fn as_seen(&self, message: &Json) -> Json {
        let Json::Object(message) = message else {
            return message.clone();
        };
        if self.rules == TemplateRules::Transformers4 {
            return Json::Object(message.clone());
        }
        let mut message = message.clone();
        message.retain(|_, v| !v.is_null());
        let reasoning = REASONING.iter().find_map(|key| message.get(*key)).cloned();
        let Some(reasoning) = reasoning else {
            return Json::Object(message);
        };
        let mut seen = Map::new();
        seen.insert("thinking".into(), reasoning.clone());
        seen.extend(message);
        seen.insert("reasoning_content".into(), reasoning);
        Json::Object(seen)
    }

    /// Renders the chat or the first part of it.
    ///
    /// # Errors
    /// The template refuses the chat or fails on it.
    pub fn render(&self, chat: &ChatValues, until: Until) -> RowResult<Rendered> {
        let (messages, prompt) = match until {
            Until::End => (&chat.messages[..], false),
            Until::Before(i) => (&chat.messages[..i.min(chat.len())], true),
            Until::First(count) => (&chat.messages[..count.min(chat.len())], false),
        };
        let chosen = self.chosen(chat)?;
        let fixed = [
            ("messages", messages.iter().cloned().collect::<Value>()),
            ("tools", chat.tools.clone()),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(prompt)),
        ];
        let fixed = fixed.into_iter().map(|(k, v)| (k.to_owned(), v));
        let variables = self.variables.iter().chain(&chat.variables).cloned();
        let context = Value::from_pairs(fixed.chain(variables));
        let refused = |e: Error| refusal(&chosen.source, &e);
        let template = self
            .env
            .get_template(&chosen.source.name)
            .map_err(refused)?;
        let marked = template.render(context).map_err(refused)?;
        check_printed(&marked, &chat.odd)?;
        if !chosen.marks_generation {
            return Ok(Rendered {
                text: marked,
                generated: None,
            });
        }
        rewrite::take_marks(&marked)
    }

    /// Where the byte positions `at` of the content of message `turn` stand in `whole`, the chat
    /// rendered to its end: rendered once more with a mark at each, which must change nothing
    /// else. Nothing is ever found by searching for text.
    ///
    /// # Errors
    /// A template that changes the content, so that a place in it means nothing.
    pub fn places(
        &self,
        chat: &Chat,
        turn: usize,
        at: &[usize],
        whole: &Rendered,
    ) -> RowResult<Vec<usize>> {
        let marks: Vec<_> = at.iter().map(|&at| (turn, at)).collect();
        match self.marked(chat, &marks, whole)? {
            Some(places) if places.len() == at.len() => Ok(places),
            _ => Err(RowProblem::new(
                Reason::TemplateRefusal,
                format!(
                    "expected a chat template that prints the content of message {turn} as it is, found one that changes it, so parts of it can't be trained apart"
                ),
            )),
        }
    }

    /// The same for bytes of several messages' contents, `(message, byte)` rising, in the order in
    /// which they are rendered; a message that is not rendered has no place. `None` for a template
    /// that renders something else with the marks.
    ///
    /// # Errors
    /// A template that fails on a text with marks.
    pub fn marked(
        &self,
        chat: &Chat,
        marks: &[(usize, usize)],
        whole: &Rendered,
    ) -> RowResult<Option<Vec<usize>>> {
        let mut marked = chat.clone();
        // The last first: a mark moves what stands behind it.
        for &(message, at) in marks.iter().rev() {
            if let Json::String(content) = &mut marked.messages[message]["content"] {
                content.insert(at, PLACE);
            }
        }
        let values = self.values(&marked)?;
        let found = self.render(&values, Until::End)?.text;
        let mut places = Vec::new();
        let mut plain = String::with_capacity(found.len());
        for piece in found.split_inclusive(PLACE) {
            let bare = piece.trim_end_matches(PLACE);
            plain.push_str(bare);
            if bare.len() < piece.len() {
                places.push(plain.len());
            }
        }
        Ok((plain == whole.text).then_some(places))
    }

    fn chosen(&self, chat: &ChatValues) -> RowResult<&Compiled> {
        let named = |name: &str| self.templates.iter().find(|t| t.source.name == name);
        let with_tools = named(WITH_TOOLS).filter(|_| !chat.tools.is_none());
        with_tools.or_else(|| named(DEFAULT)).ok_or_else(|| {
            let names: Vec<_> = self.sources().map(|s| s.name.as_str()).collect();
            RowProblem::new(
                Reason::TemplateRefusal,
                format!(
                    "expected a chat template named {DEFAULT} for a chat without tools, found {}; \
                     choose one with --chat-template NAME",
                    names.join(", ")
                ),
            )
        })
    }
}

/// Compiles with room to descend once for each byte: the engine does so for chains of operators,
/// and limits the depth of brackets and blocks alone.
fn compile(
    env: &mut Environment<'static>,
    name: &str,
    text: String,
) -> Result<std::result::Result<(), Error>> {
    let stack = STACK_MIN + text.len() * STACK_OF_BYTE;
    std::thread::scope(|scope| {
        let work = || env.add_template_owned(name.to_owned(), text);
        let thread = std::thread::Builder::new().stack_size(stack);
        let thread = thread
            .spawn_scoped(scope, work)
            .with_context(|| format!("can't start a thread with {stack} bytes of stack"))?;
        Ok(thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
    })
}

/// What the engine says about a template that doesn't parse, on one line.
fn syntax(error: &Error) -> String {
    let line = error
        .line()
        .map_or(String::new(), |l| format!("at its line {l}: "));
    format!(
        "{line}{}",
        error
            .detail()
            .map_or_else(|| error.kind().to_string(), str::to_owned)
    )
}

fn refusal(source: &NamedSource, error: &Error) -> RowProblem {
    let found = match error.kind() {
        ErrorKind::OutOfFuel => format!(
            "more than {} steps, 64 bytes of text taken for one",
            engine::FUEL
        ),
        kind => error
            .detail()
            .map_or_else(|| kind.to_string(), str::to_owned),
    };
    let place = error.line().map_or(String::new(), |line| {
        let text = source.text.lines().nth(line - 1).unwrap_or_default().trim();
        // What stands on the line is the construct; a raised exception speaks for itself.
        let shown = match error.detail() {
            Some(_) if text.contains("raise_exception") => String::new(),
            _ => format!(" {}", quoted(text)),
        };
        format!(" at its line {line}{shown}")
    });
    RowProblem::new(
        Reason::TemplateRefusal,
        format!(
            "expected a chat that the chat template takes, found{place}: {}{}",
            if engine::is_raised(error) {
                REFUSED_IN_WORDS
            } else {
                ""
            },
            found.trim()
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn render(source: &str, messages: Json) -> Result<Rendered, String> {
        let template = compiled(source, &TemplatePlan::default()).map_err(|e| e.to_string())?;
        let values = template.values(&Chat::new(messages).unwrap()).unwrap();
        template.render(&values, Until::End).map_err(|p| p.message)
    }

    fn compiled(source: &str, plan: &TemplatePlan) -> Result<ChatTemplate> {
        let source = NamedSource::single("t", source);
        ChatTemplate::new(vec![source], &[("bos_token".into(), "<s>".into())], plan)
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
            ("{{ strftime_now('%d') }}", "--template-date"),
            (
                "{% for i in range(10000) %}{% for j in range(10000) %}{% endfor %}{% endfor %}",
                "more than 5000000 steps",
            ),
            (
                "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
                "64 bytes of text",
            ),
            (
                "{% set n = namespace(s=['x']) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}",
                "more than 5000000 steps",
            ),
            (
                "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
                "more than 5000000 steps",
            ),
            (
                "{{ '{:>1000000000}'.format('a') }}",
                "widths of at most 65536",
            ),
            (
                "{% macro f(x, n) %}{% if n %}{{ f(x + x, n - 1) }}{% endif %}{% endmacro %}{{ f(['x'], 60) }}",
                "more than 5000000 steps",
            ),
            (
                "{% set n = namespace(s=[]) %}{% for i in range(100000) %}{% set n.s = [n.s] %}{% endfor %}",
                "nested at most 256 deep",
            ),
            (
                "{% set n = namespace(s={}) %}{% for i in range(1000) %}{% set n.s = {'a': n.s} %}{% endfor %}",
                "nested at most 256 deep",
            ),
            (
                "{{ ([['x'] * 1000000] * 1000000)|tojson }}",
                "more than 5000000 steps",
            ),
            ("{{ (['x'] * 90000000)|list }}", "more than 5000000 steps"),
            (
                "{{ ','.join(['x' * 1000000] * 90000000) }}",
                "more than 5000000 steps",
            ),
            (
                "{{ (['x' * 1000000] * 90000000)|join }}",
                "more than 5000000 steps",
            ),
            (
                "{% set x = 'x' * 100000000 %}{{ x.replace('', new=x) }}",
                "more than 5000000 steps",
            ),
            ("{{ messages[0].content.nope() }}", "nope"),
            ("{{ missing.attribute.deeper }}", "found at its line 1"),
        ] {
            let message = render(source, hi()).unwrap_err();
            assert!(message.contains(says), "{source}: {message}");
        }
        assert!(compiled("{% if %}", &TemplatePlan::default()).is_err());
        assert!(compiled("{% generation %}", &TemplatePlan::default()).is_err());
    }

    /// What the engine's parser and compiler descend into without a limit of their own.
    #[test]
    fn chains_are_compiled_or_refused_whatever_their_length() {
        let chain = |link: &str| link.repeat((SOURCE_MAX / 4) / link.len());
        let branches = chain("{%elif a%}");
        let sources = [
            format!("{{{{ {} a }}}}", chain("not ")),
            format!("{{{{ {} 1 }}}}", chain("-")),
            format!("{{{{ 1 {} }}}}", chain("+1")),
            format!("{{{{ a {} }}}}", chain("~a")),
            format!("{{{{ a{} }}}}", chain(".a")),
            format!("{{{{ a{} }}}}", chain("[0]")),
            format!("{{{{ a{} }}}}", chain("()")),
            format!("{{{{ a{} }}}}", chain("|e")),
            format!("{{{{ a {} }}}}", chain("is e ")),
            format!("{{{{ a {} }}}}", chain("if a else a ")),
            format!("{{{{ {} }}}}", chain("(")),
            format!("{{% if a %}}{branches}{{% endif %}}"),
            chain("{%if a%}"),
            format!("{{{{ {}", chain("not ")),
        ];
        for source in sources {
            let _ = compiled(&source, &TemplatePlan::default());
        }
        let longer = "a".repeat(SOURCE_MAX + 1);
        let error = compiled(&longer, &TemplatePlan::default()).unwrap_err();
        assert!(error.to_string().contains("more than 65536 bytes"));
    }

    #[test]
    fn arguments_override_special_tokens() {
        let plan = TemplatePlan {
            args: vec![
                ("bos_token".to_owned(), json!("X")),
                ("date_string".to_owned(), json!("1 May")),
            ],
            ..TemplatePlan::default()
        };
        let template = compiled(
            "{{ bos_token }} {{ date_string }}{{ tools is none }}",
            &plan,
        )
        .unwrap();
        let values = template.values(&Chat::new(hi()).unwrap()).unwrap();
        let text = template.render(&values, Until::End).unwrap().text;
        assert_eq!(text, "X 1 MayTrue");
        for name in ["continue_final_message", "chat_template"] {
            let mut chat = Chat::new(hi()).unwrap();
            chat.template_kwargs = vec![(name.to_owned(), json!(true))];
            let problem = template.values(&chat).unwrap_err();
            assert!(problem.message.contains(name), "{}", problem.message);
        }
    }
}
