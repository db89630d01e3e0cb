//! Input mutated at random from a fixed seed: whatever comes, prepare makes a corpus that adds up
//! or says why not, without a panic and without leaving anything.

use std::fs;
use std::path::Path;

use clap::Parser;
use kdscore::cli::Cli;
use kdscore::commands::{Interrupt, execute};
use serde_json::{Value, json};

use crate::bench::{Bench, TEACHER, chats};

const ROUNDS: u64 = 150;

/// xorshift64*: small, and the same everywhere.
struct Rng(u64);

impl Rng {
    fn next(&mut self, below: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % below.max(1)
    }
}

/// Changes a few bytes: flips, cuts, doubles, and splices of what JSON and templates are made of.
fn mutated(bytes: &[u8], rng: &mut Rng) -> Vec<u8> {
    const PIECES: [&[u8]; 13] = [
        b"\"",
        b"{",
        b"]",
        b"null",
        b"1e999",
        b"NaN",
        b"\\ud800",
        b"\xff",
        b"{%",
        b"}}",
        b",\"role\":\"x\"",
        b"<|im_end|>",
        b"\0",
    ];
    let mut out = bytes.to_vec();
    for _ in 0..=rng.next(3) {
        let at = rng.next(out.len());
        let to = (at + rng.next(40)).min(out.len());
        match rng.next(5) {
            0 if !out.is_empty() => out[at] ^= 1 << rng.next(8),
            1 => {
                out.drain(at..to);
            }
            2 => {
                let copy = out[at..to].to_vec();
                out.splice(at..at, copy);
            }
            3 => out.truncate(at),
            _ => {
                out.splice(at..at, PIECES[rng.next(PIECES.len())].iter().copied());
            }
        }
    }
    out
}

/// One run in this process, so that a panic fails the test; the facts where it made a corpus.
fn run(bench: &Bench, data: &str, args: &[&str]) -> Option<Value> {
    let (data, out) = (bench.path(data), bench.path("out"));
    let fixed = ["kdscore", "prepare", "--tokenizer", TEACHER, "--data"];
    let paths = [data.to_str().unwrap(), "--out", out.to_str().unwrap()];
    let cli = Cli::parse_from([&fixed[..], &paths, args].concat());
    let outcome = execute(cli, &Interrupt::new());
    let left = fs::read_dir(bench.path(""))
        .unwrap()
        .map(|e| e.unwrap().file_name());
    let staging = left
        .filter(|n| n.to_string_lossy().starts_with(".out"))
        .count();
    assert_eq!(staging, 0, "a run leaves no staging folder");
    let made = outcome.as_ref().ok().map(|o| o.json.clone());
    assert_eq!(made.is_some(), out.exists());
    if let Some(facts) = &made {
        let left_out = facts["left_out"].as_object().unwrap().values();
        let left_out: u64 = left_out.map(|c| c.as_u64().unwrap()).sum();
        assert_eq!(
            facts["source_rows"].as_u64(),
            facts["sequences"].as_u64().map(|s| s + left_out)
        );
        fs::remove_dir_all(out).unwrap();
    }
    made
}

#[test]
fn mutated_rows_never_panic() {
    let bench = Bench::new();
    let mut rows = chats(2);
    rows[0]["messages"][1]["weight"] = json!(1);
    let families = [
        json!({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}),
        json!({"instruction": "a", "input": "b", "output": "c", "history": [["d", "e"]]}),
        json!({"prompt": "a", "completion": "b"}),
        json!({"segments": [{"label": true, "text": "a b"}]}),
        json!({"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}),
        json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "é"}]}, {"role": "assistant", "content": "ab", "train_detail": [{"begin_offset": 0, "end_offset": 0, "train": true}]}]}),
        json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}], "tools": "[{}]"}),
    ];
    let mut sources: Vec<Vec<u8>> = vec![
        rows.iter()
            .map(|r| format!("{r}\n"))
            .collect::<String>()
            .into_bytes(),
    ];
    sources.extend(
        families
            .iter()
            .map(|row| format!("{row}\n{row}\n").into_bytes()),
    );
    let mut rng = Rng(0x6b64_7363_6f72_6501);
    let mut made = 0;
    for round in 0..ROUNDS {
        let source = &sources[rng.next(sources.len())];
        let name = if round % 4 == 0 {
            "rows.json"
        } else {
            "rows.jsonl"
        };
        bench.write(name, mutated(source, &mut rng));
        let policy = if round % 2 == 0 { "skip" } else { "error" };
        made += u32::from(run(&bench, name, &["--on-bad-row", policy]).is_some());
    }
    assert!(made > 10, "some mutations leave good rows: {made}");
}

#[test]
fn mutated_files_of_columns_never_panic() {
    let data = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/data"));
    let bench = Bench::new();
    let mut rng = Rng(0x6b64_7363_6f72_6502);
    for file in [
        "chats.parquet",
        "json.parquet",
        "wide.parquet",
        "padded.parquet",
        "saved/data-00000-of-00002.arrow",
        "file.arrow",
    ] {
        let bytes = fs::read(data.join(file)).unwrap();
        for _ in 0..ROUNDS / 6 {
            bench.write("rows.bin", mutated(&bytes, &mut rng));
            run(&bench, "rows.bin", &["--on-bad-row", "skip"]);
        }
    }
}

#[test]
fn mutated_templates_never_panic() {
    let folder = Path::new(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/fixtures/templates"
    ));
    let bench = Bench::new();
    bench.write_rows("rows.jsonl", &chats(1));
    let mut rng = Rng(0x6b64_7363_6f72_6503);
    for name in ["generation", "tools", "plain", "text"] {
        let bytes = fs::read(folder.join(format!("{name}.jinja"))).unwrap();
        for _ in 0..ROUNDS / 4 {
            let file = bench.write("t.jinja", mutated(&bytes, &mut rng));
            run(
                &bench,
                "rows.jsonl",
                &["--chat-template", file.to_str().unwrap(), "--loss", "all"],
            );
        }
    }
}
