//! `kdscore prepare` as a user runs it: the real binary on small files.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use kdscore::corpus::CorpusShard;
use kdscore::store::CorpusReader;
use serde_json::{Value, json};
use tempfile::TempDir;

const TEACHER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/teacher");
const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/golden");

// Ids of the fixture's tokenizer.
const BOS: i32 = 0;
const IM_START: i32 = 1;
const IM_END: i32 = 2;

/// ChatML without generation blocks: spans must come from prefix checks.
const PLAIN_CHATML: &str = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// A folder to work in.
struct Bench {
    folder: TempDir,
}

struct Ran {
    code: i32,
    stdout: String,
    stderr: String,
}

impl Bench {
    fn new() -> Bench {
        Bench {
            folder: tempfile::tempdir().unwrap(),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        path
    }

    fn write_rows(&self, name: &str, rows: &[Value]) -> PathBuf {
        let lines: Vec<_> = rows.iter().map(Value::to_string).collect();
        self.write(name, lines.join("\n") + "\n")
    }

    /// Runs prepare in the folder, with `--out out`.
    fn prepare(&self, args: &[&str]) -> Ran {
        let output = Command::cargo_bin("kdscore")
            .unwrap()
            .current_dir(self.folder.path())
            .args(["prepare", "--out", "out"])
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
    fn prepared(&self, rows: &[Value], args: &[&str]) -> Value {
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
    fn sequences(&self) -> Vec<(Vec<i32>, Vec<u8>)> {
        let mut found = Vec::new();
        self.each_shard(|shard| {
            for s in 0..shard.sequences() {
                let sequence = shard.sequence(s);
                found.push((sequence.tokens.to_vec(), sequence.loss_mask.to_vec()));
            }
        });
        found
    }

    fn each_shard(&self, mut look: impl FnMut(CorpusShard)) {
        let reader = CorpusReader::open(&self.path("out")).unwrap();
        for index in 0..reader.shards().len() {
            look(reader.shard(index).unwrap().view().unwrap());
        }
    }

    /// What the student learns of each sequence, decoded.
    fn trained(&self) -> Vec<String> {
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
    fn files(&self) -> BTreeMap<PathBuf, Vec<u8>> {
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

fn chat(turns: &[(&str, &str)]) -> Value {
    let messages = turns
        .iter()
        .map(|(role, content)| json!({"role": role, "content": content}));
    json!({"messages": messages.collect::<Vec<_>>()})
}

fn chats(count: usize) -> Vec<Value> {
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

#[test]
fn the_assistants_turns_are_trained_through_their_end_token() {
    let bench = Bench::new();
    let rows = [chat(&[
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", " Yo é\n"),
        ("user", "?"),
        ("assistant", "!"),
    ])];
    let facts = bench.prepared(&rows, &[]);
    assert_eq!(facts["format"], "messages");
    assert_eq!(facts["loss"], "assistant");
    assert_eq!(bench.trained(), [" Yo é↵<|im_end|>!<|im_end|>"]);
    let (tokens, _) = &bench.sequences()[0];
    assert_eq!(tokens[..2], [BOS, IM_START]);
}

#[test]
fn a_template_without_generation_blocks_trains_the_same_tokens() {
    let rows = chats(20);
    let marked = Bench::new();
    marked.prepared(&rows, &[]);
    let plain = Bench::new();
    plain.write("plain.jinja", PLAIN_CHATML);
    plain.prepared(&rows, &["--chat-template", "plain.jinja"]);
    assert_eq!(marked.sequences(), plain.sequences());
}

#[test]
fn a_template_that_is_not_prefix_preserving_is_refused() {
    let bench = Bench::new();
    bench.write_rows("rows.jsonl", &chats(1));
    // Only the last turn ends with the end token.
    bench.write("odd.jinja", "{% for m in messages %}{{ m.content }}{% if loop.last %}<|im_end|>{% endif %}\n{% endfor %}");
    let ran = bench.prepare(&[
        "--data",
        "rows.jsonl",
        "--tokenizer",
        TEACHER,
        "--chat-template",
        "odd.jinja",
    ]);
    assert_eq!(ran.code, 2);
    assert!(ran.stderr.contains("rows.jsonl:1: "), "{}", ran.stderr);
    assert!(
        ran.stderr.contains("needs generation blocks"),
        "{}",
        ran.stderr
    );
    assert!(!bench.path("out").exists());
}

#[test]
fn transformers_renders_encodes_and_masks_the_same() {
    let golden = Path::new(GOLDEN);
    let expected =
        fs::read(golden.join("rendered.json")).expect("the golden files are in the repository");
    let expected: Vec<Value> = serde_json::from_slice(&expected).unwrap();
    let bench = Bench::new();
    let data = golden.join("chats.jsonl");
    let ran = bench.prepare(&["--data", data.to_str().unwrap(), "--tokenizer", TEACHER]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let found = bench.sequences();
    assert_eq!(found.len(), expected.len());
    for ((tokens, mask), expected) in found.iter().zip(&expected) {
        assert_eq!(json!(tokens), expected["ids"]);
        assert_eq!(json!(mask), expected["assistant_mask"]);
    }
}

#[test]
fn loss_rules_choose_the_trained_tokens() {
    let rows = [chat(&[
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
        ("assistant", "d"),
    ])];
    for (rule, trained) in [
        ("assistant", "b<|im_end|>d<|im_end|>"),
        ("last-assistant", "d<|im_end|>"),
        (
            "all",
            "<|bos|><|im_start|>user↵a<|im_end|>↵<|im_start|>assistant↵b<|im_end|>↵<|im_start|>user↵c<|im_end|>↵<|im_start|>assistant↵d<|im_end|>↵",
        ),
    ] {
        for template in [None, Some(PLAIN_CHATML)] {
            let bench = Bench::new();
            let mut args = vec!["--loss", rule];
            if let Some(source) = template {
                bench.write("t.jinja", source);
                args.extend(["--chat-template", "t.jinja"]);
            }
            bench.prepared(&rows, &args);
            assert_eq!(bench.trained(), [trained], "{rule}");
        }
    }
}

#[test]
fn completions_are_trained_and_end() {
    let bench = Bench::new();
    let facts = bench.prepared(
        &[
            json!({"prompt": "Q: why?", "completion": "   Because é 🙂."}),
            json!({"prompt": "Q:\n", "completion": "so<|im_end|>"}),
        ],
        &[],
    );
    assert_eq!(facts["loss"], "completion");
    assert_eq!(
        bench.trained(),
        ["   Because é 🙂.<|im_end|>", "so<|im_end|>"]
    );
    let (tokens, _) = &bench.sequences()[1];
    assert_eq!(tokens.iter().filter(|&&t| t == IM_END).count(), 1);
    assert_eq!(tokens.iter().filter(|&&t| t == BOS).count(), 1);
}

#[test]
fn completions_given_as_messages_train_their_own_turns_only() {
    for template in [None, Some(PLAIN_CHATML)] {
        let bench = Bench::new();
        let mut args = Vec::new();
        if let Some(source) = template {
            bench.write("t.jinja", source);
            args.extend(["--chat-template", "t.jinja"]);
        }
        let prompt = chat(&[("user", "a"), ("assistant", "b"), ("user", "c")])["messages"].clone();
        let completion = chat(&[("assistant", "d")])["messages"].clone();
        bench.prepared(
            &[json!({"prompt": prompt, "completion": completion})],
            &args,
        );
        assert_eq!(bench.trained(), ["d<|im_end|>"]);
    }
}

#[test]
fn a_token_across_the_edge_is_counted_and_not_trained() {
    let bench = Bench::new();
    let facts = bench.prepared(
        &[json!({"prompt": "the answer is th", "completion": "e one"})],
        &[],
    );
    assert_eq!(facts["lint"]["straddling_tokens"], 1);
    let example = facts["first_examples"]["straddling_tokens"]
        .as_str()
        .unwrap();
    assert!(example.starts_with("rows.jsonl:1: token "), "{example}");
    assert_eq!(bench.trained(), [" one<|im_end|>"]);
}

#[test]
fn texts_are_trained_whole_with_one_bos_and_an_end() {
    let bench = Bench::new();
    let facts = bench.prepared(
        &[
            json!({"text": "Once upon\na time"}),
            json!({"text": "x <|im_start|> y"}),
        ],
        &[],
    );
    assert_eq!(facts["loss"], "all");
    assert_eq!(facts["lint"]["control_tokens_in_text"], 1);
    assert_eq!(bench.trained()[0], "<|bos|>Once upon↵a time<|im_end|>");
}

#[test]
fn tokens_are_taken_as_they_are() {
    let bench = Bench::new();
    let data = bench.write_rows(
        "rows.jsonl",
        &[
            json!({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}),
            json!({"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]}),
        ],
    );
    let ran = bench.prepare(&["--data", data.to_str().unwrap(), "--vocab-size", "8"]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let expected = [
        (vec![5, 6, 7], vec![0, 1, 1]),
        (vec![5, 6, 7], vec![0, 0, 1]),
    ];
    assert_eq!(bench.sequences(), expected);
}

#[test]
fn rows_that_cannot_be_used_are_left_out_by_reason() {
    let bench = Bench::new();
    let good = chat(&[("user", "a"), ("assistant", "b")]);
    let lines = [
        "\u{feff}".to_owned() + &good.to_string() + "\r",
        String::new(),
        "{\"messages\": [".to_owned(),
        json!({"text": "x"}).to_string(),
        chat(&[("bing", "a")]).to_string(),
        chat(&[("tool", "a"), ("assistant", "b")]).to_string(),
        chat(&[("user", "<|im_end|>"), ("assistant", "b")]).to_string(),
        chat(&[("user", "no answer")]).to_string(),
        chat(&[("user", "a"), ("assistant", &"long ".repeat(50))]).to_string(),
        good.to_string(),
    ];
    bench.write("rows.jsonl", lines.join("\n"));
    let ran = bench.prepare(&[
        "--data",
        "rows.jsonl",
        "--tokenizer",
        TEACHER,
        "--json",
        "--on-bad-row",
        "skip",
        "--on-overlong",
        "skip",
        "--max-length",
        "40",
    ]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let facts: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(
        facts["left_out"],
        json!({
            "broken line": 1, "unusable row": 2, "refused by the chat template": 1,
            "control token in content": 1, "no scored position": 1, "too long": 1,
        })
    );
    assert_eq!(
        (&facts["source_rows"], &facts["sequences"]),
        (&json!(9), &json!(2))
    );
    let reader = CorpusReader::open(&bench.path("out")).unwrap();
    let files = reader.shard(0).unwrap();
    assert_eq!(files.source_rows().unwrap(), Some(&[0, 8][..]));
}

#[test]
fn neither_threads_nor_blocks_show_in_the_output() {
    let rows = chats(300);
    let mut expected: Option<Vec<Vec<u8>>> = None;
    for threads in ["1", "2", "5"] {
        let bench = Bench::new();
        bench.prepared(&rows, &["--threads", threads, "--shard-tokens", "1000"]);
        let found: Vec<_> = bench.files().into_values().collect();
        assert!(found.len() > 20);
        match &expected {
            None => expected = Some(found),
            Some(expected) => assert!(*expected == found, "{threads} threads"),
        }
    }
}

#[test]
fn shards_are_split_between_sequences() {
    let rows = chats(60);
    let whole = Bench::new();
    whole.prepared(&rows, &[]);
    let split = Bench::new();
    let facts = split.prepared(&rows, &["--shard-tokens", "200"]);
    assert_eq!(whole.sequences(), split.sequences());
    let mut sizes = Vec::new();
    split.each_shard(|shard| sizes.push(shard.tokens().len()));
    assert_eq!(facts["shards"], sizes.len());
    assert!(sizes.iter().all(|&size| size <= 200), "{sizes:?}");
    let tiny = Bench::new();
    tiny.prepared(&rows, &["--shard-tokens", "1"]);
    assert_eq!(whole.sequences(), tiny.sequences());
}

#[test]
fn several_files_are_read_in_the_order_of_their_paths() {
    let bench = Bench::new();
    bench.write_rows("b.jsonl", &[json!({"text": "second"})]);
    bench.write_rows("a.jsonl", &[json!({"text": "first"})]);
    let ran = bench.prepare(&[
        "--data",
        "b.jsonl",
        "a.jsonl",
        "--tokenizer",
        TEACHER,
        "--json",
    ]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let facts: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(facts["sources"][0]["path"], "a.jsonl");
    assert_eq!(
        bench.trained(),
        ["<|bos|>first<|im_end|>", "<|bos|>second<|im_end|>"]
    );
}

#[test]
fn the_same_again_is_done_already_and_another_corpus_is_refused() {
    let bench = Bench::new();
    bench.prepared(&chats(3), &[]);
    let before = bench.files();
    let args = ["--data", "rows.jsonl", "--tokenizer", TEACHER];
    let again = bench.prepare(&args);
    assert_eq!(again.code, 0, "{}", again.stderr);
    assert!(
        again.stdout.contains("already prepared"),
        "{}",
        again.stdout
    );

    let other = bench.prepare(&[&args[..], &["--loss", "all"]].concat());
    assert_eq!(other.code, 2);
    assert!(
        other
            .stderr
            .contains("loss \"all\", found one with \"assistant\""),
        "{}",
        other.stderr
    );

    bench.write_rows("rows.jsonl", &chats(4));
    let other = bench.prepare(&args);
    assert_eq!(other.code, 2);
    assert!(
        other.stderr.contains("sources of sha256"),
        "{}",
        other.stderr
    );
    assert_eq!(bench.files(), before);
}

#[test]
fn a_resaved_tokenizer_keeps_its_fingerprint() {
    let bench = Bench::new();
    let text = fs::read_to_string(Path::new(TEACHER).join("tokenizer.json")).unwrap();
    let mut tokenizer: Value = serde_json::from_str(&text).unwrap();
    let fingerprint = |tokenizer: &Value| {
        bench.write(
            "other/tokenizer.json",
            serde_json::to_string_pretty(tokenizer).unwrap(),
        );
        kdscore::corpus::tokenizer_fingerprint(&bench.path("other")).unwrap()
    };
    let expected = kdscore::corpus::tokenizer_fingerprint(Path::new(TEACHER)).unwrap();
    tokenizer["version"] = json!("1.0");
    tokenizer["decoder"] = Value::Null;
    tokenizer["truncation"] =
        json!({"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0});
    tokenizer["added_tokens"][3]["special"] = json!(false);
    tokenizer["pre_tokenizer"]["pretokenizers"][1]["trim_offsets"] = json!(false);
    let merges = tokenizer["model"]["merges"].as_array_mut().unwrap();
    for merge in merges.iter_mut() {
        if let Some(pair) = merge.as_array() {
            *merge = json!(format!(
                "{} {}",
                pair[0].as_str().unwrap(),
                pair[1].as_str().unwrap()
            ));
        }
    }
    assert_eq!(fingerprint(&tokenizer), expected);
    tokenizer["model"]["merges"].as_array_mut().unwrap().pop();
    assert_ne!(fingerprint(&tokenizer), expected);
}

#[test]
fn the_template_fingerprint_follows_its_arguments() {
    let rows = chats(1);
    let fingerprint = |args: &[&str]| {
        let bench = Bench::new();
        bench.write("t.jinja", "{{ style }}".to_owned() + PLAIN_CHATML);
        let args = [&["--chat-template", "t.jinja"], args].concat();
        bench.prepared(&rows, &args)["template_fingerprint"].clone()
    };
    let plain = fingerprint(&[]);
    assert_eq!(plain, fingerprint(&[]));
    assert_eq!(plain, fingerprint(&["--template-arg", "unused=1"]));
    assert_ne!(plain, fingerprint(&["--template-arg", "style=terse"]));
}

/// A broken input, what it is given as, and what the one line on stderr must say.
struct Broken {
    rows: &'static str,
    args: &'static [&'static str],
    says: &'static str,
}

const CHAT: &str =
    r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#;

const BROKEN: &[Broken] = &[
    // JSON lines
    Broken {
        rows: "",
        args: &[],
        says: "expected at least one row of a known format",
    },
    Broken {
        rows: "{\"text\": \"a\"}\n{\"text\": \"a",
        args: &[],
        says: "rows.jsonl:2: expected a JSON object on one line",
    },
    Broken {
        rows: "{\"text\": \"a\"}\n{\"text\": \"a\", \"text\": \"b\"}",
        args: &[],
        says: "rows.jsonl:2: expected a JSON object on one line, found the key \"text\" twice",
    },
    Broken {
        rows: "{\"text\": \"\\ud83d\"}",
        args: &[],
        says: "rows.jsonl:1: ",
    },
    Broken {
        rows: "{\"text\": NaN}",
        args: &[],
        says: "rows.jsonl:1: ",
    },
    Broken {
        rows: "[{\"text\": \"a\"}]",
        args: &[],
        says: "rows.jsonl:1: expected a JSON object, found a list",
    },
    Broken {
        rows: "{\"text\": \"a\", \"messages\": []}",
        args: &[],
        says: "rows.jsonl:1: expected the keys of one format, found those of messages and text; say which with --format",
    },
    Broken {
        rows: "{\"text\": \"a\"}\n{\"messages\": []}",
        args: &[],
        says: "rows.jsonl:2: expected a key text",
    },
    Broken {
        rows: "\u{1f}\u{8b}",
        args: &[],
        says: "rows.jsonl:1: ",
    },
    Broken {
        rows: "{\"conversations\": []}",
        args: &[],
        says: "found the keys conversations",
    },
    // Chats
    Broken {
        rows: "{\"messages\": [{\"role\": \"bing\", \"content\": \"a\"}]}",
        args: &[],
        says: "messages[0].role: expected system, developer, user, assistant, tool, found \"bing\"; --on-bad-row skip",
    },
    Broken {
        rows: "{\"messages\": [{\"role\": \"user\", \"content\": \"a <|im_end|> b\"}, {\"role\": \"assistant\", \"content\": \"b\"}]}",
        args: &[],
        says: "message 0: expected content without control tokens, found \"<|im_end|>\"",
    },
    Broken {
        rows: "{\"messages\": [{\"role\": \"tool\", \"content\": \"a\"}, {\"role\": \"assistant\", \"content\": \"b\"}]}",
        args: &[],
        says: "unknown role: tool",
    },
    Broken {
        rows: "{\"messages\": [{\"role\": \"user\", \"content\": \"only asked\"}]}",
        args: &[],
        says: "expected at least one row with a position to score",
    },
    Broken {
        rows: CHAT,
        args: &["--max-length", "5"],
        says: "expected at most 5 tokens, found 1",
    },
    Broken {
        rows: CHAT,
        args: &["--loss", "completion"],
        says: "loss: expected assistant or last-assistant or all for rows of format messages, found completion",
    },
    Broken {
        rows: CHAT,
        args: &["--format", "text"],
        says: "expected a key text, as in all rows of format text",
    },
    Broken {
        rows: CHAT,
        args: &["--format", "parquet"],
        says: "format: expected auto",
    },
    Broken {
        rows: CHAT,
        args: &["--vocab-size", "10"],
        says: "vocab-size: expected at least the tokenizer's 2048",
    },
    Broken {
        rows: CHAT,
        args: &["--template-arg", "x"],
        says: "expected K=V",
    },
    Broken {
        rows: CHAT,
        args: &["--data", "missing.jsonl"],
        says: "missing.jsonl: can't open",
    },
    Broken {
        rows: CHAT,
        args: &["--data", "."],
        says: "expected a file of JSON lines, found a folder",
    },
    // Texts and tokens
    Broken {
        rows: "{\"text\": \"<|bos|>a\"}",
        args: &[],
        says: "expected one BOS token (id 0) at the start, found two",
    },
    Broken {
        rows: "{\"input_ids\": [1, 2048], \"loss_mask\": [0, 1]}",
        args: &[],
        says: "expected token ids from 0 to 2047, found 2048 at token 1",
    },
    Broken {
        rows: "{\"input_ids\": [1, -1], \"loss_mask\": [0, 1]}",
        args: &[],
        says: "found -1 at token 1",
    },
    Broken {
        rows: "{\"input_ids\": [1, 99999999999], \"loss_mask\": [0, 1]}",
        args: &[],
        says: "found 99999999999 at token 1",
    },
    Broken {
        rows: "{\"input_ids\": [1, 2]}",
        args: &[],
        says: "--loss all trains every token",
    },
    Broken {
        rows: "{\"input_ids\": [1, 2], \"labels\": [2, -100]}",
        args: &[],
        says: "labels must not be shifted",
    },
    // Templates and tokenizers
    Broken {
        rows: CHAT,
        args: &["--chat-template", "missing.jinja"],
        says: "missing.jinja: can't read the chat template",
    },
    Broken {
        rows: CHAT,
        args: &["--chat-template", "syntax.jinja"],
        says: "syntax.jinja: expected a chat template in Jinja",
    },
    Broken {
        rows: CHAT,
        args: &["--chat-template", "date.jinja"],
        says: "the template prints today's date",
    },
    Broken {
        rows: CHAT,
        args: &["--chat-template", "loop.jinja"],
        says: "more than 20000000 steps",
    },
    Broken {
        rows: CHAT,
        args: &["--chat-template", "open.jinja"],
        says: "expected endgeneration",
    },
    Broken {
        rows: CHAT,
        args: &["--tokenizer", "nowhere"],
        says: "tokenizer.json: can't read",
    },
    Broken {
        rows: CHAT,
        args: &["--tokenizer", "broken"],
        says: "tokenizer.json: expected a Hugging Face tokenizer",
    },
    Broken {
        rows: CHAT,
        args: &["--tokenizer", "bare"],
        says: "tokenizer_config.json: expected a chat_template, found none",
    },
    Broken {
        rows: CHAT,
        args: &["--tokenizer", "dropout"],
        says: "found dropout 0.1",
    },
    Broken {
        rows: CHAT,
        args: &["--tokenizer", "config"],
        says: "tokenizer_config.json: expected a JSON object",
    },
];

fn write_broken_folders(bench: &Bench) {
    bench.write("syntax.jinja", "{% if %}");
    bench.write("date.jinja", "{{ strftime_now('%d %b %Y') }}");
    bench.write(
        "loop.jinja",
        "{% for i in range(9000) %}{% for j in range(9000) %}{% endfor %}{% endfor %}",
    );
    bench.write("open.jinja", "{% generation %}");
    let text = fs::read_to_string(Path::new(TEACHER).join("tokenizer.json")).unwrap();
    bench.write("broken/tokenizer.json", &text[..text.len() / 2]);
    bench.write("bare/tokenizer.json", &text);
    bench.write("config/tokenizer.json", &text);
    bench.write("config/tokenizer_config.json", "[]");
    let mut tokenizer: Value = serde_json::from_str(&text).unwrap();
    tokenizer["model"]["dropout"] = json!(0.1);
    bench.write("dropout/tokenizer.json", tokenizer.to_string());
}

#[test]
fn broken_input_is_one_clear_line_and_leaves_nothing() {
    let bench = Bench::new();
    write_broken_folders(&bench);
    for broken in BROKEN {
        bench.write("rows.jsonl", broken.rows);
        let mut args = broken.args.to_vec();
        for (option, value) in [("--data", "rows.jsonl"), ("--tokenizer", TEACHER)] {
            if !broken.args.contains(&option) {
                args.extend([option, value]);
            }
        }
        let ran = bench.prepare(&args);
        let told = format!("{:?} {:?}: {}", broken.rows, broken.args, ran.stderr);
        assert_eq!(ran.code, 2, "{told}");
        assert_eq!(ran.stderr.lines().count(), 1, "{told}");
        assert!(ran.stderr.contains(broken.says), "{told}");
        assert!(!ran.stderr.contains("panicked"), "{told}");
        assert!(ran.stdout.is_empty(), "{told}");
        let left: Vec<_> = fs::read_dir(bench.folder.path())
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        assert!(
            left.iter()
                .all(|n| n != "out" && !n.to_string_lossy().starts_with(".out")),
            "{told}: {left:?}"
        );
    }
}

#[test]
fn compressed_files_are_named_for_what_they_are() {
    let bench = Bench::new();
    for (bytes, says) in [
        (&b"\x1f\x8b\x08\x00"[..], "gzip"),
        (b"PAR1abc", "Parquet"),
        (b"\x28\xb5\x2f\xfd", "zstd"),
    ] {
        bench.write("rows.jsonl", bytes);
        let ran = bench.prepare(&["--data", "rows.jsonl", "--tokenizer", TEACHER]);
        assert_eq!(ran.code, 2);
        assert!(ran.stderr.contains(says), "{}", ran.stderr);
    }
}
