//! Checkpoints' tokenizers, with the ids that transformers gives them.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use kdscore::corpus::TextTokenizer;
use serde_json::{Value, json};

use crate::cases::{Compared, read, rules};

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures");

/// Ids of plain texts and of rendered ones, and the names of special tokens, of every checkpoint of
/// the document.
pub fn compare_checkpoints(document: &Value) -> [(&'static str, Compared); 3] {
    let made = tempfile::tempdir().unwrap();
    let (mut plain, mut rendered) = (Compared::default(), Compared::default());
    let mut named = Compared::default();
    for checkpoint in document["checkpoints"].as_array().into_iter().flatten() {
        let name = checkpoint["name"].as_str().unwrap();
        let folder = match checkpoint["folder"].as_str() {
            Some(folder) => Cow::from(Path::new(folder)),
            None => {
                write(checkpoint, made.path());
                Cow::from(made.path())
            }
        };
        let loaded = TextTokenizer::load_as(&folder, rules(document));
        let tokenizer = match (loaded, checkpoint["refused"].is_string()) {
            (Ok(_), true) => continue,
            (Ok(tokenizer), false) => tokenizer,
            (Err(why), is_refused) => {
                plain.add(
                    name,
                    Err(format!("{why:#}")),
                    (!is_refused).then_some("ids"),
                );
                continue;
            }
        };
        let names = tokenizer.special_tokens().iter().cloned();
        let names: BTreeMap<String, String> = names.collect();
        let theirs = &checkpoint["named"];
        named.add(name, Ok(json!(names).to_string()), Some(&sorted(theirs)));
        let texts = checkpoint.get("texts").unwrap_or(&document["texts"]);
        let kinds = [(&mut plain, "plain"), (&mut rendered, "rendered")];
        for (compared, kind) in kinds {
            let theirs = checkpoint[kind].as_array().unwrap();
            for (text, theirs) in texts.as_array().unwrap().iter().zip(theirs) {
                // An id without an embedding is nobody's.
                if theirs.is_null() {
                    continue;
                }
                let text = text.as_str().unwrap();
                let ours = match kind {
                    "plain" => tokenizer.encode_plain(text),
                    _ => tokenizer.encode_rendered(text),
                };
                let ours = ours
                    .map(|e| json!(e.ids).to_string())
                    .map_err(|p| p.message);
                let case = format!("{name} {} {text:?}", folder.display());
                compared.add(&case, ours, Some(&theirs.to_string()));
            }
        }
    }
    [
        ("ids of plain texts", plain),
        ("ids of rendered texts", rendered),
        ("special tokens by name", named),
    ]
}

fn sorted(names: &Value) -> String {
    let names = names.as_object().unwrap().iter();
    json!(names.collect::<BTreeMap<_, _>>()).to_string()
}

/// Shows all and demands that all are equal.
pub fn expect_equal(compared: &[(&'static str, Compared)]) {
    for (what, compared) in compared {
        println!("{what}: {}", compared.counts());
        compared.show();
    }
    for (what, compared) in compared {
        assert!(
            compared.equal > 0 && compared.differ.is_empty() && compared.only_we_refuse.is_empty(),
            "{what}: {}",
            compared.counts()
        );
    }
}

/// The files of a checkpoint that is one of the fixtures' tokenizers, changed.
fn write(checkpoint: &Value, folder: &Path) {
    let base = match checkpoint["base"].as_str() {
        Some("pieces") => "checkpoints/pieces.json",
        _ => "teacher/tokenizer.json",
    };
    let mut tokenizer = read(&Path::new(FIXTURES).join(base));
    for (key, value) in checkpoint["changes"].as_object().unwrap() {
        match value {
            Value::Object(model) if key == "model" => {
                let ours = tokenizer["model"].as_object_mut().unwrap();
                ours.extend(model.clone());
            }
            other => tokenizer[key] = other.clone(),
        }
    }
    for file in fs::read_dir(folder).unwrap() {
        fs::remove_file(file.unwrap().path()).unwrap();
    }
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    for (name, content) in checkpoint["files"].as_object().unwrap() {
        fs::write(folder.join(name), content.to_string()).unwrap();
    }
}
