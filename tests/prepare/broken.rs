//! Broken input: exit 2, one clear line, nothing half-written.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::bench::{Bench, TEACHER};

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
        says: "conversations: expected a list of messages, found an empty list",
    },
    // Chats
    Broken {
        rows: "{\"messages\": [{\"role\": \"bing\", \"content\": \"a\"}]}",
        args: &[],
        says: "messages[0].role: expected system, developer, user, assistant, tool, found \"bing\"; --roles NAME=ROLE says what it means; --on-bad-row skip",
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
        says: "rows.jsonl:1: expected an answer of the assistant, found none",
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
        args: &["--data", "empty"],
        says: "empty: expected files ending in jsonl",
    },
    // Texts and tokens
    Broken {
        rows: "{\"text\": \"<|bos|><|bos|>a\"}",
        args: &[],
        says: "expected one BOS token (id 0) at the start, found two; take one out of the row",
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
        says: "more than 5000000 steps",
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
        args: &["--tokenizer", "pieces"],
        says: "pieces: expected a tokenizer.json, found tokenizer.model alone; convert it once with transformers",
    },
    Broken {
        rows: CHAT,
        args: &["--template-date", "2024-13-01"],
        says: "template-date: expected YYYY-MM-DD, found \"2024-13-01\"",
    },
    Broken {
        rows: CHAT,
        args: &["--map", "role"],
        says: "map: expected NAME=NAME, found \"role\"",
    },
    Broken {
        rows: CHAT,
        args: &["--template-arg", "messages=1"],
        says: "expected a variable of the template, found messages, which the rows give",
    },
    Broken {
        rows: CHAT,
        args: &["--chat-template", "method.jinja"],
        says: "found items, a method that is not called, at line 2",
    },
    Broken {
        rows: CHAT,
        args: &["--chat-template", "filter.jinja"],
        says: "found at its line 1 \"{{ messages | wordcount }}\": filter wordcount is unknown",
    },
    Broken {
        rows: CHAT,
        args: &[
            "--chat-template",
            "plain.jinja",
            "--mask-template",
            "plain.jinja",
        ],
        says: "plain.jinja: expected a template with generation blocks, found one without",
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
    bench.write("method.jinja", "\n{{ messages[0].items }}");
    bench.write("filter.jinja", "{{ messages | wordcount }}");
    bench.write("plain.jinja", "{{ messages[0].content }}");
    bench.write("pieces/tokenizer.model", "\0");
    bench.write("open.jinja", "{% generation %}");
    let text = fs::read_to_string(Path::new(TEACHER).join("tokenizer.json")).unwrap();
    bench.write("broken/tokenizer.json", &text[..text.len() / 2]);
    bench.write("empty/README.md", "no rows");
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
fn rows_of_text_ask_for_a_tokenizer() {
    let bench = Bench::new();
    for rows in [
        CHAT,
        "{\"text\": \"a\"}",
        "{\"prompt\": \"a\", \"completion\": \"b\"}",
    ] {
        bench.write("rows.jsonl", rows);
        let ran = bench.prepare(&["--data", "rows.jsonl"]);
        assert_eq!(ran.code, 2, "{}", ran.stdout);
        let says = "found none; give --tokenizer with the teacher's folder, or rows with input_ids";
        assert!(ran.stderr.contains(says), "{}", ran.stderr);
    }
}
