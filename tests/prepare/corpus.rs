//! The corpus as a whole: what is left out, order, shards, fingerprints, the same command again.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use clap::Parser;
use kdscore::cli::Cli;
use kdscore::commands::{Interrupt, Status, execute};
use kdscore::store::CorpusReader;
use serde_json::{Value, json};

use crate::bench::{Bench, PLAIN_CHATML, TEACHER, chat, chats};

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

#[test]
fn what_looks_wrong_is_counted_with_a_first_example() {
    let bench = Bench::new();
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        let content = fs::read(Path::new(TEACHER).join(file)).unwrap();
        bench.write(&format!("stops/{file}"), content);
    }
    bench.write(
        "stops/generation_config.json",
        r#"{"eos_token_id": [3, 0]}"#,
    );
    // No BOS, and the system message is not rendered.
    bench.write(
        "t.jinja",
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
         {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    );
    let rows = [
        chat(&[("user", "a"), ("assistant", "b")]),
        chat(&[("system", "Be brief."), ("user", "a"), ("assistant", "b")]),
    ];
    bench.write_rows("rows.jsonl", &rows);
    let args = [
        "--data",
        "rows.jsonl",
        "--tokenizer",
        "stops",
        "--chat-template",
        "t.jinja",
    ];
    let ran = bench.prepare(&args);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    for says in [
        "2 sequences start without the tokenizer's BOS token; first: rows.jsonl:1: starts with \"<|im_start|>\" (id 1)\n",
        "1 rows hold text that the chat template leaves out; first: rows.jsonl:2: message 0: \"Be brief.\"",
        "2 sequences train a last token that the model does not stop at (eos_token_id); first: rows.jsonl:1: ends with \"<|im_end|>\" (id 2), stops at id 0 or 3",
        "<|bos|> starts no sequence",
    ] {
        assert!(ran.stdout.contains(says), "{says}: {}", ran.stdout);
    }
}

#[test]
fn an_interrupted_run_leaves_nothing() {
    let bench = Bench::new();
    let (data, out) = (bench.write_rows("rows.jsonl", &chats(5)), bench.path("out"));
    let cli = || {
        let (data, out) = (data.to_str().unwrap(), out.to_str().unwrap());
        Cli::parse_from([
            "kdscore",
            "prepare",
            "--tokenizer",
            TEACHER,
            "--data",
            data,
            "--out",
            out,
        ])
    };
    let interrupt = Interrupt::new();
    interrupt.raise();
    let outcome = execute(cli(), &interrupt).unwrap();
    assert_eq!(outcome.status, Status::Unfinished);
    assert_eq!(fs::read_dir(bench.path("")).unwrap().count(), 1);
    let outcome = execute(cli(), &Interrupt::new()).unwrap();
    assert_eq!(outcome.status, Status::Done);
}

#[test]
fn what_a_killed_run_left_is_named() {
    for more in [&[][..], &["--quiet"]] {
        let bench = Bench::new();
        bench.write(".out.1.staging/shard-000000/tokens.npy", "");
        bench.write_rows("rows.jsonl", &chats(1));
        let args = ["--data", "rows.jsonl", "--tokenizer", TEACHER];
        let ran = bench.prepare(&[&args[..], more].concat());
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        let says = ".out.1.staging: left by a run that was killed; remove it";
        assert!(ran.stderr.contains(says), "{}", ran.stderr);
    }
}

/// A prepare of standard input that is at work until it gets its rows.
fn waiting(bench: &Bench) -> Child {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin("kdscore"));
    let args = "prepare --format text --data - --out out --json --tokenizer";
    let child = command
        .args(args.split(' '))
        .arg(TEACHER)
        .current_dir(bench.path(""))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let child = child.spawn().unwrap();
    let start = format!(".out.{:x}-", child.id());
    let staged = |e: fs::DirEntry| e.file_name().to_string_lossy().starts_with(&start);
    while !fs::read_dir(bench.path(""))
        .unwrap()
        .any(|e| staged(e.unwrap()))
    {
        std::thread::sleep(Duration::from_millis(5));
    }
    child
}

fn given(mut child: Child, rows: &str) -> Output {
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(rows.as_bytes()).unwrap();
    drop(stdin);
    child.wait_with_output().unwrap()
}

#[test]
fn of_two_runs_at_once_the_second_finds_the_work_done() {
    let bench = Bench::new();
    let first = waiting(&bench);
    let (second, third) = (waiting(&bench), waiting(&bench));
    let first = given(first, "{\"text\": \"a\"}\n");
    assert_eq!(first.status.code(), Some(0));
    let made = bench.files();

    let second = given(second, "{\"text\": \"a\"}\n");
    assert_eq!(second.status.code(), Some(0));
    let told = String::from_utf8(second.stderr).unwrap();
    assert!(
        told.contains("staging: another prepare is making this corpus now; the first to finish"),
        "{told}"
    );
    let facts: Value = serde_json::from_slice(&second.stdout).unwrap();
    assert_eq!(facts["status"], "already prepared");

    let third = given(third, "{\"text\": \"b\"}\n");
    assert_eq!(third.status.code(), Some(2));
    let told = String::from_utf8(third.stderr).unwrap();
    assert!(
        told.contains("out: expected a corpus with sources of sha256"),
        "{told}"
    );
    assert_eq!(bench.files(), made);
    assert_eq!(fs::read_dir(bench.path("")).unwrap().count(), 1);
}

#[test]
fn a_corpus_that_is_there_is_told_as_when_it_was_made() {
    let bench = Bench::new();
    let rows = [&chats(5)[..], &[chat(&[("bing", "a")])]].concat();
    let args = ["--on-bad-row", "skip", "--shard-tokens", "100"];
    let mut made = bench.prepared(&rows, &args);
    let mut again = bench.prepared(&rows, &args);
    assert_eq!(made["status"].take(), "prepared");
    assert_eq!(again["status"].take(), "already prepared");
    assert_eq!(made, again);
    assert!(made["shards"].as_u64() > Some(1) && made["lengths"]["median"].as_u64() > Some(0));
    let example = made["first_examples"]["unusable row"].as_str().unwrap();
    assert!(example.starts_with("rows.jsonl:6: "), "{example}");
}

#[test]
fn a_sequence_is_shown_with_what_is_learnt_of_it() {
    let bench = Bench::new();
    bench.prepared(&[chat(&[("user", "Hi"), ("assistant", "Yo")])], &[]);
    let show = |args: &[&str]| {
        let mut command = assert_cmd::Command::cargo_bin("kdscore").unwrap();
        let command = command.current_dir(bench.path("")).arg("show");
        command
            .args(["--corpus", "out"])
            .args(args)
            .output()
            .unwrap()
    };
    let shown = String::from_utf8(show(&["--sequence", "0"]).stdout).unwrap();
    assert!(shown.contains("assistant↵\n⟦Yo<|im_end|>⟧"), "{shown}");
    assert_eq!(show(&["--sequence", "1"]).status.code(), Some(2));
}
