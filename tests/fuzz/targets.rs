//! What is fuzzed: each reads bytes the way the program does.

use std::path::{Path, PathBuf};

use kdscore::backend::cpu::Cpu;
use kdscore::corpus::{
    Chat, ChatRules, ChatTemplate, CorpusShard, LossRule, TemplatePlan, TextTokenizer, encode_chat,
};
use kdscore::model::{Decoder, Limits, Teacher, Unknown, Vocabulary};
use kdscore::products::{Dtype, ProductPlan};
use kdscore::score::{Proceed, ShardJob, score_shard};
use serde_json::json;
use tempfile::TempDir;

pub trait Target {
    fn name(&self) -> &'static str;
    /// Inputs that are as they should be.
    fn good(&self) -> Vec<Vec<u8>>;
    /// Reads `input`. Any error is right; a panic is not.
    fn run(&self, input: &[u8]);
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

fn teacher_names() -> Vec<String> {
    let entries = std::fs::read_dir(fixtures().join("teachers")).unwrap();
    let entries = entries.map(|e| e.unwrap());
    let mut names: Vec<String> = entries
        .filter(|e| e.path().is_dir())
        .map(|e| e.file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn read(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap()
}

/// Opens a teacher and, where that works, scores a few tokens with it.
fn open_and_score(folder: &Path) {
    let Ok(teacher) = Teacher::open(folder, Unknown::Allow) else {
        return;
    };
    let vocab = teacher.description.vocab;
    let (tokens, offsets, mask) = ([0, 0, 0], [0, 3], [1, 1, 1]);
    let limits = Limits {
        tokens: 3,
        sequence: 3,
        head_chunk: 2,
        wave: 1,
    };
    let vocabulary = Vocabulary {
        scored: vocab,
        tokenizer: vocab,
    };
    let products = ProductPlan {
        k: 1,
        logp_dtype: Dtype::F32,
        extra: Vec::new(),
    };
    let job = ShardJob {
        shard: CorpusShard::new(&tokens, &offsets, &mask).unwrap(),
        sequences: 0..1,
        token_budget: 3,
        wave: 1,
        products: &products,
    };
    if let Ok(mut decoder) = Decoder::new(&Cpu, &teacher, limits, vocabulary) {
        let _ = score_shard(&mut decoder, &job, &mut |_| Proceed::Go);
    }
}

/// A file's name and what is in it.
type NamedFile = (String, Vec<u8>);

/// config.json beside the weights of the teacher it came from, as far as it tells.
pub struct Config {
    folder: TempDir,
    /// One teacher of each family: its `model_type` and its weight files.
    weights: Vec<(String, Vec<NamedFile>)>,
}

impl Config {
    pub fn new() -> Config {
        let weights = teacher_names().into_iter().map(|name| {
            let folder = fixtures().join("teachers").join(name);
            let config = read(&folder.join("config.json"));
            let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
            let files = std::fs::read_dir(&folder).unwrap();
            let files = files.map(|f| f.unwrap().path());
            let files = files.filter(|f| f.to_string_lossy().contains(".safetensors"));
            let named = files.map(|f| {
                let name = f.file_name().unwrap().to_string_lossy().into_owned();
                (name, read(&f))
            });
            let family = config["model_type"].as_str().unwrap().to_owned();
            (family, named.collect())
        });
        Config {
            folder: tempfile::tempdir().unwrap(),
            weights: weights.collect(),
        }
    }
}

impl Target for Config {
    fn name(&self) -> &'static str {
        "config"
    }

    fn good(&self) -> Vec<Vec<u8>> {
        let names = teacher_names().into_iter();
        let configs = names.flat_map(|name| {
            let folder = fixtures().join("teachers").join(name);
            ["config.json", "config_v4.json"].map(|file| read(&folder.join(file)))
        });
        configs.collect()
    }

    fn run(&self, input: &[u8]) {
        let folder = self.folder.path();
        let text = String::from_utf8_lossy(input).into_owned();
        let of = |family: &str| text.contains(&format!("\"{family}\""));
        let found = self.weights.iter().find(|(family, _)| of(family));
        let (_, files) = found.unwrap_or(&self.weights[0]);
        for entry in std::fs::read_dir(folder).unwrap() {
            std::fs::remove_file(entry.unwrap().path()).unwrap();
        }
        for (name, bytes) in files {
            std::fs::write(folder.join(name), bytes).unwrap();
        }
        std::fs::write(folder.join("config.json"), input).unwrap();
        open_and_score(folder);
    }
}

/// The header of a safetensors file, in front of the data it is about.
pub struct Header {
    folder: TempDir,
    data: Vec<u8>,
}

/// The teacher whose files are damaged.
fn small_teacher(name: &str) -> PathBuf {
    fixtures().join("teachers").join(name)
}

impl Header {
    pub fn new() -> Header {
        let folder = tempfile::tempdir().unwrap();
        let source = small_teacher("gpt_oss_mxfp4");
        std::fs::copy(
            source.join("config.json"),
            folder.path().join("config.json"),
        )
        .unwrap();
        let file = read(&source.join("model.safetensors"));
        let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        Header {
            folder,
            data: file[8 + length..].to_vec(),
        }
    }
}

impl Target for Header {
    fn name(&self) -> &'static str {
        "header"
    }

    fn good(&self) -> Vec<Vec<u8>> {
        let file = read(&small_teacher("gpt_oss_mxfp4").join("model.safetensors"));
        let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        vec![file[8..8 + length].to_vec()]
    }

    fn run(&self, input: &[u8]) {
        let mut file = (input.len() as u64).to_le_bytes().to_vec();
        file.extend(input);
        file.extend(&self.data);
        std::fs::write(self.folder.path().join("model.safetensors"), file).unwrap();
        open_and_score(self.folder.path());
    }
}

/// The index of a sharded checkpoint.
pub struct Index {
    folder: TempDir,
}

impl Index {
    pub fn new() -> Index {
        let folder = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(small_teacher("mixtral")).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() {
                std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
            }
        }
        Index { folder }
    }
}

impl Target for Index {
    fn name(&self) -> &'static str {
        "index"
    }

    fn good(&self) -> Vec<Vec<u8>> {
        vec![read(
            &small_teacher("mixtral").join("model.safetensors.index.json"),
        )]
    }

    fn run(&self, input: &[u8]) {
        let file = self.folder.path().join("model.safetensors.index.json");
        std::fs::write(file, input).unwrap();
        open_and_score(self.folder.path());
    }
}

/// tokenizer.json, and a text through it.
pub struct Tokenizer {
    folder: TempDir,
}

impl Tokenizer {
    pub fn new() -> Tokenizer {
        let folder = tempfile::tempdir().unwrap();
        let config = fixtures().join("teacher/tokenizer_config.json");
        std::fs::copy(config, folder.path().join("tokenizer_config.json")).unwrap();
        Tokenizer { folder }
    }
}

impl Target for Tokenizer {
    fn name(&self) -> &'static str {
        "tokenizer"
    }

    fn good(&self) -> Vec<Vec<u8>> {
        let full: serde_json::Value =
            serde_json::from_slice(&read(&fixtures().join("teacher/tokenizer.json"))).unwrap();
        let small = json!({
            "version": "1.0", "truncation": null, "padding": null,
            "added_tokens": [{"id": 3, "content": "<s>", "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true}],
            "normalizer": full["normalizer"], "pre_tokenizer": full["pre_tokenizer"],
            "post_processor": full["post_processor"], "decoder": full["decoder"],
            "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "<s>": 3}, "merges": [["a", "b"]],
                "unk_token": null, "byte_fallback": false, "fuse_unk": false, "ignore_merges": false},
        });
        vec![small.to_string().into_bytes()]
    }

    fn run(&self, input: &[u8]) {
        std::fs::write(self.folder.path().join("tokenizer.json"), input).unwrap();
        if let Ok(tokenizer) = TextTokenizer::load(self.folder.path()) {
            let _ = tokenizer.encode_plain("ab <s> åäö 🦀 aab");
        }
    }
}

/// A chat template, and a chat through it.
pub struct Template {
    folder: TempDir,
    tokenizer: TextTokenizer,
}

impl Template {
    pub fn new() -> Template {
        Template {
            folder: tempfile::tempdir().unwrap(),
            tokenizer: TextTokenizer::load(&fixtures().join("teacher")).unwrap(),
        }
    }
}

impl Target for Template {
    fn name(&self) -> &'static str {
        "template"
    }

    fn good(&self) -> Vec<Vec<u8>> {
        let config = read(&fixtures().join("teacher/tokenizer_config.json"));
        let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
        let own = config["chat_template"].as_str().unwrap_or("{{ messages }}");
        let others = [
            "{% for m in messages %}{{ m['role'] | upper }}: {{ m.content.strip()[:5] }}\n{% endfor %}",
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% generation %}{{ m.content }}{% endgeneration %}{{ ns.n }}{% endfor %}",
            "{% macro f(x) %}{{ x | tojson }}{% endmacro %}{{ f(messages) }}{{ raise_exception('no') if messages | length > 9 }}",
        ];
        let all = std::iter::once(own).chain(others);
        all.map(|text| text.as_bytes().to_vec()).collect()
    }

    fn run(&self, input: &[u8]) {
        let file = self.folder.path().join("template.jinja");
        std::fs::write(&file, input).unwrap();
        let plan = TemplatePlan {
            template: Some(file),
            ..TemplatePlan::default()
        };
        let Ok(template) = ChatTemplate::load(&self.tokenizer, &plan) else {
            return;
        };
        let messages = json!([
            {"role": "user", "content": "two and two?"},
            {"role": "assistant", "content": "four 🦀"},
        ]);
        let rules = ChatRules::new(LossRule::Assistant);
        if let Ok(chat) = Chat::new(messages) {
            let _ = encode_chat(&self.tokenizer, &template, None, &chat, rules);
        }
    }
}
