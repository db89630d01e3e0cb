//! Probe chats: what a chat template and tokenizer make of a fixed set of chats.
//!
//! The rendered texts and ids are the template's fingerprint, so arguments and dates count, and a
//! student's loader can render the same chats and compare.

use serde_json::{Value, json};

use super::rows::Chat;
use super::template::{ChatTemplate, Until};
use super::tokenizer::TextTokenizer;
use crate::canonical;

/// What the probe chats became.
#[derive(Clone, PartialEq, Debug)]
pub struct Probes {
    probes: Value,
}

impl Probes {
    pub fn render(tokenizer: &TextTokenizer, template: &ChatTemplate) -> Probes {
        let probe = |messages: Value| {
            let asks = messages
                .as_array()
                .and_then(|m| m.last())
                .is_some_and(|m| m["role"] == "user");
            match rendered(tokenizer, template, &messages, asks) {
                Some((text, ids)) => json!({
                    "messages": messages, "add_generation_prompt": asks, "text": text, "ids": ids,
                }),
                None => json!({
                    "messages": messages, "add_generation_prompt": asks, "refused": true,
                }),
            }
        };
        Probes {
            probes: chats().into_iter().map(probe).collect(),
        }
    }

    /// The template fingerprint.
    pub fn fingerprint(&self) -> String {
        canonical::fingerprint(&self.probes)
    }

    /// The content of probes.json.
    pub fn document(&self) -> Vec<u8> {
        canonical::seal(&json!({"format_version": 1, "probes": self.probes}))
    }
}

fn rendered(
    tokenizer: &TextTokenizer,
    template: &ChatTemplate,
    messages: &Value,
    asks: bool,
) -> Option<(String, Vec<i32>)> {
    let chat = Chat::new(messages.clone()).ok()?;
    let values = template.values(&chat).ok()?;
    let until = if asks {
        Until::Before(values.len())
    } else {
        Until::End
    };
    let text = template.render(&values, until).ok()?.text;
    let ids = tokenizer.encode_rendered(&text).ok()?.ids;
    Some((text, ids))
}

fn chats() -> Vec<Value> {
    let user = |text: &str| json!({"role": "user", "content": text});
    let assistant = |text: &str| json!({"role": "assistant", "content": text});
    let system = |text: &str| json!({"role": "system", "content": text});
    vec![
        json!([user("What is 2 + 3?"), assistant("2 + 3 = 5.")]),
        json!([
            system("Answer in one word."),
            user("Capital of France?"),
            assistant("Paris")
        ]),
        json!([
            user("Hi"),
            assistant("Hello!"),
            user("Again?"),
            assistant("Hello again!")
        ]),
        json!([user("Say something.")]),
        json!([system("Be brief."), user("Why?")]),
        json!([
            user("  spaces, a tab\t and\n\nlines \n"),
            assistant("\n kept? \n")
        ]),
        json!([user("naïve café — 東京 🙂"), assistant("ÅÄÖ ½ 👩‍🚀")]),
        json!([
            user("Think."),
            assistant("<think>\nFirst.\n</think>\n\nDone.")
        ]),
        json!([
            user("Think again."),
            {"role": "assistant", "content": "Done.", "reasoning_content": "Second."}
        ]),
    ]
}
