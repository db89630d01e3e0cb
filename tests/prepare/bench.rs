//! A folder to run prepare in, and a look at what it made.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use kdscore::corpus::CorpusShard;
use kdscore::store::CorpusReader;
use serde_json::{Value, json};
use tempfile::TempDir;

pub const TEACHER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/teacher");

/// ChatML without generation blocks: spans must come from prefix checks.
pub const PLAIN_CHATML: &str = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// A folder to work in.
pub struct Bench {
    pub folder: TempDir,
}

pub struct Ran {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Bench {
    pub fn new() -> Bench {
        Bench {
            folder: tempfile::tempdir().unwrap(),
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        path
    }

    pub fn write_rows(&self, name: &str, rows: &[Value]) -> PathBuf {
        let lines: Vec<_> = rows.iter().map(Value::to_string).collect();
        self.write(name, lines.join("\n") + "\n")
    }

    /// Runs prepare in the folder, with `--out out` unless another is given.
    pub fn prepare(&self, args: &[&str]) -> Ran {
        let out: &[&str] = match args.contains(&"--out") {
            true => &[],
            false => &["--out", "out"],
        };
        let output = Command::cargo_bin("kdscore")
            .unwrap()
            .current_dir(self.folder.path())
            .arg("prepare")
            .args(out)
            .args(args)
            .output()
            .unwrap();
        Ran {
            code: output.status.code().unwrap(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// Prepares `rows` with the fixture's tokenizer and returns the facts; it must succeed.
    pub fn prepared(&self, rows: &[Value], args: &[&str]) -> Value {
        self.write_rows("rows.jsonl", rows);
        let args = [
            &["--data", "rows.jsonl", "--tokenizer", TEACHER, "--json"],
            args,
        ]
        .concat();
        let ran = self.prepare(&args);
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        let facts: Value = serde_json::from_str(&ran.stdout).unwrap();
        let left_out = facts["left_out"].as_object().unwrap().values();
        let left_out: u64 = left_out.map(|c| c.as_u64().unwrap()).sum();
        let sequences = facts["sequences"].as_u64().unwrap();
        assert_eq!(facts["source_rows"], sequences + left_out);
        facts
    }

    /// Tokens and mask of every sequence in `out`.
    pub fn sequences(&self) -> Vec<(Vec<i32>, Vec<u8>)> {
        let mut found = Vec::new();
        self.each_shard(|shard| {
            for s in 0..shard.sequences() {
                let sequence = shard.sequence(s);
                found.push((sequence.tokens.to_vec(), sequence.loss_mask.to_vec()));
            }
        });
        found
    }

    pub fn each_shard(&self, mut look: impl FnMut(CorpusShard)) {
        let reader = CorpusReader::open(&self.path("out")).unwrap();
        for index in 0..reader.shards().len() {
            look(reader.shard(index).unwrap().view().unwrap());
        }
    }

    /// What the student learns of each sequence, decoded.
    pub fn trained(&self) -> Vec<String> {
        let decoder = kdscore::corpus::Decoder::load(Path::new(TEACHER)).unwrap();
        let trained = |(tokens, mask): (Vec<i32>, Vec<u8>)| {
            let ids: Vec<i32> = (tokens.iter().zip(&mask))
                .filter(|(_, flag)| **flag == 1)
                .map(|(id, _)| *id)
                .collect();
            decoder.text(&ids)
        };
        self.sequences().into_iter().map(trained).collect()
    }

    /// Every file under `out`, by relative path.
    pub fn files(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut found = BTreeMap::new();
        let mut folders = vec![self.path("out")];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else {
                    found.insert(path.clone(), fs::read(&path).unwrap());
                }
            }
        }
        found
    }
}

pub fn chat(turns: &[(&str, &str)]) -> Value {
    let messages = turns
        .iter()
        .map(|(role, content)| json!({"role": role, "content": content}));
    json!({"messages": messages.collect::<Vec<_>>()})
}

pub fn chats(count: usize) -> Vec<Value> {
    let one = |i: usize| {
        let (question, answer) = (
            format!("What is {i} + {i}? ünï 🙂"),
            format!("It is {}.\n", 2 * i),
        );
        chat(&[
            ("user", &question),
            ("assistant", &answer),
            ("user", "Thanks"),
            ("assistant", "Bye"),
        ])
    };
    (0..count).map(one).collect()
}
