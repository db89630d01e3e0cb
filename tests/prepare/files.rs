//! Every kind of file the same rows may come in, whole and torn.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::bench::{Bench, TEACHER, chats};

const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/data");

fn prepared(bench: &Bench, data: &str, args: &[&str]) -> Value {
    let ran = bench.prepare(&[&["--data", data, "--tokenizer", TEACHER, "--json"], args].concat());
    assert_eq!(ran.code, 0, "{data}: {}", ran.stderr);
    serde_json::from_str(&ran.stdout).unwrap()
}

fn refused(data: &str, args: &[&str]) -> String {
    let bench = Bench::new();
    refused_in(&bench, data, args)
}

fn refused_in(bench: &Bench, data: &str, args: &[&str]) -> String {
    let ran = bench.prepare(&[&["--data", data, "--tokenizer", TEACHER], args].concat());
    assert_eq!(ran.code, 2, "{data}: {}", ran.stdout);
    assert_eq!(ran.stderr.lines().count(), 1, "{}", ran.stderr);
    assert!(!bench.path("out").exists());
    ran.stderr
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packed.write_all(bytes).unwrap();
    packed.finish().unwrap()
}

#[test]
fn json_lists_and_packed_files_hold_the_same_rows_as_lines() {
    let rows = chats(40);
    let lines = Bench::new();
    lines.prepared(&rows, &[]);
    let text = fs::read(lines.path("rows.jsonl")).unwrap();
    let list = serde_json::to_vec_pretty(&Value::from(rows)).unwrap();
    let two = [gzip(&text[..100]), gzip(&text[100..])].concat();
    for (name, bytes) in [
        ("rows.json", list.clone()),
        ("rows.json.gz", gzip(&list)),
        ("rows.jsonl.gz", two),
        ("rows.jsonl.zst", zstd::encode_all(&text[..], 1).unwrap()),
        ("rows.ndjson", [b"\xef\xbb\xbf", &text[..]].concat()),
    ] {
        let bench = Bench::new();
        bench.write(name, bytes);
        prepared(&bench, name, &[]);
        assert_eq!(bench.sequences(), lines.sequences(), "{name}");
    }
}

#[test]
fn torn_files_are_refused_by_name() {
    let text = fs::read_to_string(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/fixtures/golden/chats.jsonl"
    ))
    .unwrap();
    let packed = gzip(text.as_bytes());
    let zst = zstd::encode_all(text.as_bytes(), 1).unwrap();
    let parquet = fs::read(Path::new(DATA).join("chats.parquet")).unwrap();
    let stream = fs::read(Path::new(DATA).join("saved/data-00000-of-00002.arrow")).unwrap();
    let mut swapped = parquet.clone();
    swapped[200..260].fill(0xee);
    for (name, bytes, says) in [
        ("a.jsonl.gz", &packed[..packed.len() - 9], "a.jsonl.gz"),
        ("b.jsonl.zst", &zst[..zst.len() - 9], "b.jsonl.zst"),
        (
            "c.parquet",
            &parquet[..parquet.len() - 20],
            "c.parquet: expected a whole Parquet file",
        ),
        ("d.arrow", &stream[..stream.len() / 2], "d.arrow"),
        (
            "k.arrow",
            &stream[..stream.len() - 8],
            "expected the marker that ends a stream, found none: it is cut off",
        ),
        (
            "e.json",
            b"[{\"text\": \"a\"}, {\"text\": ",
            "e.json: item 2: expected its end, found the file's: it is cut off",
        ),
        ("f.json", b"[{\"text\": \"a\"},", "it is cut off"),
        (
            "g.json",
            b"[{\"text\": \"a\"} {\"text\": \"b\"}]",
            "g.json: item 1: expected a JSON object",
        ),
        (
            "h.json",
            b"[{\"text\": \"a\"}] x",
            "expected nothing behind the list",
        ),
        (
            "i.json",
            b"[{\"text\": \"a\"}, 3]",
            "i.json: item 2: expected a JSON object, found a number",
        ),
        ("j.parquet", &swapped[..], "j.parquet"),
    ] {
        let bench = Bench::new();
        bench.write(name, bytes);
        let message = refused_in(&bench, name, &[]);
        assert!(message.contains(says), "{message}");
        assert!(!message.contains("thread"), "{message}");
    }
}

#[test]
fn parquet_rows_lose_their_padding_and_keep_their_flags() {
    let bench = Bench::new();
    let facts = prepared(&bench, &format!("{DATA}/chats.parquet"), &[]);
    assert_eq!(facts["format"], "messages");
    assert_eq!(
        bench.trained(),
        ["b<|im_end|>", "f<|im_end|>", "ü↵<|im_end|>"]
    );
}

#[test]
fn parquet_is_read_however_it_is_compressed() {
    for compression in ["lz4", "brotli"] {
        let bench = Bench::new();
        prepared(&bench, &format!("{DATA}/{compression}.parquet"), &[]);
        let text = format!("<|bos|>compressed with {compression}<|im_end|>");
        assert_eq!(bench.trained(), [text]);
    }
}

#[test]
fn case_12_columns_of_json_are_decoded() {
    let bench = Bench::new();
    bench.write("t.jinja", "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endfor %}{{ tools[0].function.parameters is mapping }}");
    prepared(
        &bench,
        &format!("{DATA}/json.parquet"),
        &["--chat-template", "t.jinja", "--loss", "all"],
    );
    let trained = bench.trained().concat();
    assert!(
        trained.contains("quoted \"s\"<|im_end|>") && trained.ends_with("True"),
        "{trained}"
    );
}

#[test]
fn other_columns_are_in_nobodys_way() {
    let bench = Bench::new();
    let facts = prepared(&bench, &format!("{DATA}/wide.parquet"), &[]);
    assert_eq!(
        (&facts["format"], &facts["lint"]["duplicates"]),
        (&json!("text"), &json!(1))
    );
    assert_eq!(bench.trained()[1], "<|bos|>two<|im_end|>");
}

#[test]
fn case_11_nulls_in_arguments_are_the_users_to_decide() {
    let data = format!("{DATA}/padded.parquet");
    let message = refused(&data, &[]);
    assert!(
        message.contains("padded.parquet: row 1: messages: expected no nulls"),
        "{message}"
    );
    assert!(
        message.contains("found one under b") && message.contains("--null-fields"),
        "{message}"
    );
    for (choice, text) in [("drop", "{\"a\": 2}"), ("keep", "{\"a\": 2, \"b\": null}")] {
        let bench = Bench::new();
        bench.write("t.jinja", "{% for m in messages %}<|im_start|>{% generation %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endgeneration %}{% endfor %}");
        prepared(
            &bench,
            &data,
            &[
                "--chat-template",
                "t.jinja",
                "--null-fields",
                choice,
                "--loss",
                "all",
            ],
        );
        assert!(bench.trained()[1].contains(text), "{:?}", bench.trained());
    }
}

#[test]
fn nulls_in_arguments_of_json_lines_are_values_unless_they_are_to_be_dropped() {
    let call = json!({"function": {"name": "f", "arguments": {"a": 2, "b": null}}});
    let rows = json!({"messages": [
        {"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": [call]},
    ]});
    let template = "{% for m in messages %}<|im_start|>{% generation %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endgeneration %}{% endfor %}";
    for (args, text) in [
        (&[][..], "gof{\"a\": 2, \"b\": null}"),
        (&["--null-fields", "drop"], "gof{\"a\": 2}"),
    ] {
        let bench = Bench::new();
        bench.write("t.jinja", template);
        bench.write_rows("rows.jsonl", std::slice::from_ref(&rows));
        let args = [&["--chat-template", "t.jinja"], args].concat();
        prepared(&bench, "rows.jsonl", &args);
        assert_eq!(bench.trained(), [text]);
    }
}

#[test]
fn saved_datasets_are_read_in_the_order_of_their_state() {
    let bench = Bench::new();
    prepared(&bench, &format!("{DATA}/saved"), &[]);
    assert_eq!(
        bench.trained(),
        ["2!", "3!", "0!", "1!"].map(|t| t.to_owned() + "<|im_end|>")
    );
    let message = refused(&format!("{DATA}/splits"), &[]);
    assert!(
        message.contains("--split with one of train, test"),
        "{message}"
    );
    let bench = Bench::new();
    prepared(&bench, &format!("{DATA}/splits"), &["--split", "test"]);
    assert_eq!(
        bench.trained(),
        ["2!", "3!"].map(|t| t.to_owned() + "<|im_end|>")
    );
    let bench = Bench::new();
    prepared(&bench, &format!("{DATA}/file.arrow"), &[]);
    assert_eq!(bench.sequences().len(), 2);
}

#[test]
fn folders_patterns_and_standard_input_are_read() {
    let bench = Bench::new();
    for (name, text) in [
        ("snap/data/train-1.jsonl", "b"),
        ("snap/data/train-0.jsonl", "a"),
        ("snap/data/test-0.jsonl", "t"),
    ] {
        bench.write_rows(name, &[json!({"text": text})]);
    }
    bench.write("snap/README.md", "no rows");
    let message = refused_in(&bench, "snap", &[]);
    assert!(
        message.contains("expected --split, found files of test, train"),
        "{message}"
    );
    prepared(&bench, "snap", &["--split", "train"]);
    assert_eq!(
        bench.trained(),
        ["<|bos|>a<|im_end|>", "<|bos|>b<|im_end|>"]
    );
    fs::remove_dir_all(bench.path("out")).unwrap();
    prepared(&bench, "snap/data/t*-0.jsonl", &[]);
    assert_eq!(
        bench.trained(),
        ["<|bos|>t<|im_end|>", "<|bos|>a<|im_end|>"]
    );
    fs::remove_dir_all(bench.path("out")).unwrap();

    let mut child = Command::new(assert_cmd::cargo::cargo_bin("kdscore"))
        .args([
            "prepare",
            "--data",
            "-",
            "--tokenizer",
            TEACHER,
            "--out",
            "out",
        ])
        .current_dir(bench.path(""))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(b"{\"text\": \"piped\"}\n")
        .unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(bench.trained(), ["<|bos|>piped<|im_end|>"]);
    assert!(refused_in_existing(&bench).contains("standard input can't be compared"));
}

#[test]
fn links_that_lead_back_give_no_file_twice() {
    let bench = Bench::new();
    bench.write_rows("blobs/1", &[json!({"text": "a"})]);
    fs::create_dir_all(bench.path("snap/sub")).unwrap();
    let link = |to: &str, name: &str| std::os::unix::fs::symlink(to, bench.path(name)).unwrap();
    link("../blobs/1", "snap/train.jsonl");
    link("..", "snap/sub/up");
    link("sub", "snap/self");
    prepared(&bench, "snap", &[]);
    assert_eq!(bench.trained(), ["<|bos|>a<|im_end|>"]);
    link("gone", "snap/other.jsonl");
    fs::remove_dir_all(bench.path("out")).unwrap();
    assert!(refused_in(&bench, "snap", &[]).contains("snap/other.jsonl: can't open"));
}

#[test]
fn what_is_neither_file_nor_folder_is_named() {
    assert!(refused("/dev/null", &[]).contains("found a pipe or device; --data - reads"));
    let bench = Bench::new();
    bench.write("out", "a file");
    bench.write_rows("rows.jsonl", &chats(1));
    let told = bench
        .prepare(&["--data", "rows.jsonl", "--tokenizer", TEACHER])
        .stderr;
    assert!(
        told.contains("out: expected a new or empty folder, found a file"),
        "{told}"
    );
}

fn refused_in_existing(bench: &Bench) -> String {
    bench
        .prepare(&["--data", "-", "--tokenizer", TEACHER, "--format", "text"])
        .stderr
}

#[test]
fn neither_threads_nor_batches_show_in_what_columns_become() {
    let mut expected = None;
    for threads in ["1", "3"] {
        let bench = Bench::new();
        prepared(
            &bench,
            &format!("{DATA}/chats.parquet"),
            &["--threads", threads],
        );
        let found: Vec<_> = bench.files().into_values().collect();
        assert!(expected.get_or_insert_with(|| found.clone()) == &found);
    }
}
