//! Documents of cases, made with transformers, compared with what is rendered, encoded and masked
//! here.

use std::collections::BTreeMap;
use std::path::Path;

use kdscore::corpus::{
    Chat, ChatRules, ChatTemplate, LossRule, NamedSource, Straddle, TemplateDate, TemplatePlan,
    TemplateRules, TextTokenizer, Until, encode_chat,
};
use serde_json::{Value, json};

pub const DATE: &str = "2024-07-26";
/// Shown of each kind of difference.
const SHOWN: usize = 40;

pub fn read(path: &Path) -> Value {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_slice(&bytes).unwrap()
}

/// The generation of transformers that made the document.
pub fn rules(document: &Value) -> TemplateRules {
    match document["rules"].as_str() {
        Some("transformers-4") => TemplateRules::Transformers4,
        _ => TemplateRules::Transformers5,
    }
}

pub fn tokens() -> Vec<(String, String)> {
    let tokens = [
        ("bos_token", "<s>"),
        ("eos_token", "</s>"),
        ("unk_token", "<unk>"),
        ("pad_token", "<pad>"),
    ];
    tokens.map(|(k, v)| (k.to_owned(), v.to_owned())).to_vec()
}

pub fn plan(rules: TemplateRules) -> TemplatePlan {
    TemplatePlan {
        date: TemplateDate::parse(DATE),
        rules,
        ..TemplatePlan::default()
    }
}

pub fn compiled(source: &str, plan: &TemplatePlan) -> Result<ChatTemplate, String> {
    let source = NamedSource::single("template", source);
    ChatTemplate::new(vec![source], &tokens(), plan).map_err(|e| format!("{e:#}"))
}

/// How two sides compare.
#[derive(Default)]
pub struct Compared {
    pub equal: usize,
    pub both_refuse: usize,
    pub only_we_refuse: Vec<String>,
    pub only_they_refuse: Vec<String>,
    pub differ: Vec<String>,
}

impl Compared {
    pub fn add(&mut self, name: &str, ours: Result<String, String>, theirs: Option<&str>) {
        match (ours, theirs) {
            (Ok(ours), Some(theirs)) if ours == theirs => self.equal += 1,
            (Ok(ours), Some(theirs)) => {
                self.differ
                    .push(format!("{name}\n   ours   {ours:?}\n   theirs {theirs:?}"));
            }
            (Err(_), None) => self.both_refuse += 1,
            (Err(why), Some(_)) => self.only_we_refuse.push(format!("{name}: {why}")),
            (Ok(ours), None) => self.only_they_refuse.push(format!("{name} -> {ours:?}")),
        }
    }

    pub fn counts(&self) -> String {
        format!(
            "{} equal, {} refused by both, {} refused by us alone, {} by transformers alone, {} differ",
            self.equal,
            self.both_refuse,
            self.only_we_refuse.len(),
            self.only_they_refuse.len(),
            self.differ.len()
        )
    }

    pub fn show(&self) {
        let lists = [
            ("differs", &self.differ),
            ("only they refuse", &self.only_they_refuse),
            ("only we refuse", &self.only_we_refuse),
        ];
        for (kind, list) in lists {
            for line in list.iter().take(SHOWN) {
                println!("{kind}: {line}");
            }
        }
    }
}

/// Text, spans, ids and masks of one document of cases.
pub struct Cases {
    rules: TemplateRules,
    tokenizers: BTreeMap<String, TextTokenizer>,
    pub texts: Compared,
    pub spans: Compared,
    pub ids: Compared,
    pub masks: Compared,
}

impl Cases {
    fn new(document: &Value) -> Cases {
        let tokenizers = document["tokenizers"].as_object().unwrap().iter();
        let used = |name: &str| {
            let mut chats = document["templates"]
                .as_array()
                .into_iter()
                .flatten()
                .flat_map(|t| t["chats"].as_array().unwrap());
            chats.any(|c| {
                c["encoded"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .any(|e| e["tokenizer"] == name)
            })
        };
        Cases {
            rules: rules(document),
            tokenizers: tokenizers
                .filter(|(name, _)| used(name))
                .map(|(name, folder)| {
                    let folder = Path::new(folder.as_str().unwrap());
                    let tokenizer = TextTokenizer::load_as(folder, rules(document)).unwrap();
                    (name.clone(), tokenizer)
                })
                .collect(),
            texts: Compared::default(),
            spans: Compared::default(),
            ids: Compared::default(),
            masks: Compared::default(),
        }
    }

    fn template(&mut self, template: &Value) {
        let source = template["source"].as_str().unwrap();
        let compiled_template = compiled(source, &plan(self.rules));
        for (i, case) in template["chats"].as_array().unwrap().iter().enumerate() {
            let name = format!("{} chat {i}", template["name"].as_str().unwrap());
            let mut chat = Chat::new(case["chat"]["messages"].clone())
                .unwrap_or_else(|p| panic!("{name}: {}", p.message));
            if self.rules == TemplateRules::Transformers4 {
                chat.messages = case["chat"]["messages"].as_array().unwrap().clone();
            }
            chat.tools = case["chat"].get("tools").cloned();
            let kwargs = case["chat"]["kwargs"]
                .as_object()
                .cloned()
                .unwrap_or_default();
            chat.template_kwargs = kwargs.into_iter().collect();
            let until = match case["chat"]["prompt"] == true {
                true => Until::Before(chat.messages.len()),
                false => Until::End,
            };
            let rendered = compiled_template
                .as_ref()
                .map_err(Clone::clone)
                .and_then(|template| {
                    let values = template.values(&chat).map_err(|p| p.message)?;
                    template.render(&values, until).map_err(|p| p.message)
                });
            let expected = &case["expected"];
            self.texts.add(
                &name,
                rendered.clone().map(|r| r.text),
                expected["text"].as_str(),
            );
            if let (Ok(rendered), Some(spans)) = (&rendered, expected["spans"].as_array()) {
                let whole = |s: &&Value| s[0] != s[1];
                let theirs = spans
                    .iter()
                    .filter(whole)
                    .cloned()
                    .collect::<Value>()
                    .to_string();
                let ours = rendered.generated.iter().flatten();
                let ours: Value = ours
                    .filter(|s| !s.is_empty())
                    .map(|s| json!([s.start, s.end]))
                    .collect();
                self.spans.add(&name, Ok(ours.to_string()), Some(&theirs));
            }
            for encoded in case["encoded"].as_array().unwrap() {
                self.encoded(&name, source, &chat, until, encoded);
            }
        }
    }

    fn encoded(&mut self, name: &str, source: &str, chat: &Chat, until: Until, expected: &Value) {
        let tokenizer = &self.tokenizers[expected["tokenizer"].as_str().unwrap()];
        let source = NamedSource::single("template", source);
        let template =
            ChatTemplate::new(vec![source], tokenizer.special_tokens(), &plan(self.rules));
        let encode = || -> Result<Vec<i32>, String> {
            let template = template.as_ref().map_err(|e| format!("{e:#}"))?;
            let values = template.values(chat).map_err(|p| p.message)?;
            let text = template.render(&values, until).map_err(|p| p.message)?.text;
            Ok(tokenizer.encode_rendered(&text).map_err(|p| p.message)?.ids)
        };
        self.ids.add(
            name,
            encode().map(|ids| json!(ids).to_string()),
            Some(&expected["ids"].to_string()),
        );
        let (true, Until::End) = (expected["mask"].is_array(), until) else {
            return;
        };
        let rules = ChatRules {
            straddle: Straddle::Include,
            ..ChatRules::new(LossRule::Assistant)
        };
        let masked = encode_chat(tokenizer, template.as_ref().unwrap(), None, chat, rules);
        let masked = masked
            .map(|row| json!(row.loss_mask).to_string())
            .map_err(|p| p.message);
        self.masks
            .add(name, masked, Some(&expected["mask"].to_string()));
    }

    pub fn print(&self) {
        for (what, compared) in [
            ("texts", &self.texts),
            ("generation spans", &self.spans),
            ("ids", &self.ids),
            ("masks", &self.masks),
        ] {
            println!("{what}: {}", compared.counts());
            compared.show();
        }
    }
}

pub fn compare(document: &Value) -> Cases {
    let mut cases = Cases::new(document);
    for template in document["templates"].as_array().unwrap() {
        cases.template(template);
    }
    cases
}
