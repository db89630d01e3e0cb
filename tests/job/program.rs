//! Runs the real binary and reads what it wrote.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use kdscore::products::Dtype;
use kdscore::store::NpyFile;
use serde_json::{Value, json};

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

pub fn kdscore(folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kdscore"));
    command.current_dir(folder);
    command.env("XDG_CACHE_HOME", folder.join("cache"));
    // What is expected is the CPU's, whatever the machine has.
    command.env("CUDA_VISIBLE_DEVICES", "");
    command
}

pub fn run(folder: &Path, args: &[&str]) -> Output {
    kdscore(folder).args(args).output().unwrap()
}

/// Runs, expects exit 0 and gives stdout.
pub fn succeed(folder: &Path, args: &[&str]) -> String {
    let output = run(folder, args);
    assert!(
        output.status.success(),
        "{args:?}: {}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

/// Runs, expects exit 2, a single error without a panic, and gives it.
pub fn refuse(folder: &Path, args: &[&str]) -> String {
    let output = run(folder, args);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{args:?}: {stderr}");
    assert!(!stderr.contains("panicked"), "{args:?}: {stderr}");
    let errors = stderr.lines().filter(|l| l.starts_with("error: ")).count();
    assert_eq!(errors, 1, "{args:?}: {stderr}");
    assert!(output.stdout.is_empty(), "{args:?}");
    stderr
}

/// Tokens and loss mask of one sequence.
pub type Tokens = (Vec<i32>, Vec<u8>);

/// A hand-made corpus, as anybody could write it with numpy: one shard, no seal.
pub fn write_corpus(folder: &Path, sequences: &[Tokens], vocab: usize) {
    let shard = folder.join("shard-000000");
    std::fs::create_dir_all(&shard).unwrap();
    let mut offsets = vec![0i64];
    for (tokens, _) in sequences {
        offsets.push(offsets[offsets.len() - 1] + tokens.len() as i64);
    }
    let tokens = sequences.iter().flat_map(|s| &s.0);
    let tokens: Vec<u8> = tokens.flat_map(|t| t.to_le_bytes()).collect();
    let mask: Vec<u8> = sequences.iter().flat_map(|s| s.1.clone()).collect();
    let offset_bytes: Vec<u8> = offsets.iter().flat_map(|o| o.to_le_bytes()).collect();
    write_npy(&shard.join("tokens.npy"), "<i4", tokens.len() / 4, &tokens);
    write_npy(&shard.join("loss_mask.npy"), "|u1", mask.len(), &mask);
    write_npy(
        &shard.join("offsets.npy"),
        "<i8",
        offsets.len(),
        &offset_bytes,
    );
    let manifest = json!({
        "format_version": 1,
        "shards": [{"id": "shard-000000"}],
        "vocab_size": vocab,
    });
    std::fs::write(folder.join("corpus.json"), manifest.to_string()).unwrap();
}

fn write_npy(path: &Path, descr: &str, length: usize, data: &[u8]) {
    let mut header =
        format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({length},), }}");
    while (10 + header.len() + 1) % 64 != 0 {
        header.push(' ');
    }
    header.push('\n');
    let mut file = b"\x93NUMPY\x01\x00".to_vec();
    file.extend((header.len() as u16).to_le_bytes());
    file.extend(header.as_bytes());
    file.extend(data);
    std::fs::write(path, file).unwrap();
}

/// The arrays of every shard of a scored set, end to end, as f64.
pub fn arrays(out: &Path) -> BTreeMap<String, Vec<f64>> {
    let mut found = BTreeMap::<String, Vec<f64>>::new();
    for manifest in manifests(out) {
        for product in manifest["products"].as_array().unwrap() {
            let name = product["name"].as_str().unwrap().to_owned();
            let path = out.join(product["path"].as_str().unwrap());
            found.entry(name).or_default().extend(read_npy(&path));
        }
    }
    found
}

/// The manifests in shard order.
pub fn manifests(out: &Path) -> Vec<Value> {
    let mut names: Vec<PathBuf> = std::fs::read_dir(out)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.to_string_lossy().ends_with(".manifest.json"))
        .collect();
    names.sort();
    let read = |path: &PathBuf| serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    names.iter().map(read).collect()
}

pub fn read_npy(path: &Path) -> Vec<f64> {
    let file = NpyFile::open(path).unwrap();
    match file.dtype() {
        Dtype::I32 => file.i32s().unwrap().iter().map(|&v| f64::from(v)).collect(),
        Dtype::I64 => file.i64s().unwrap().iter().map(|&v| v as f64).collect(),
        Dtype::F32 => file.f32s().unwrap().iter().map(|&v| f64::from(v)).collect(),
        Dtype::F16 => file.f16s().unwrap().iter().map(|v| v.to_f64()).collect(),
        Dtype::Bool | Dtype::U8 => file.u8s().unwrap().iter().map(|&v| f64::from(v)).collect(),
    }
}

/// Every file below `folder` but the log, by name: the bytes that must not differ.
pub fn tree(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(&next).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(folder).unwrap();
            let name = name.to_string_lossy().into_owned();
            if path.is_dir() && name != "log" {
                folders.push(path);
            } else if path.is_file() {
                files.insert(name, std::fs::read(&path).unwrap());
            }
        }
    }
    files
}

/// The golden corpus: mixed chats, one token, two tokens, a long one and one without rows.
pub fn golden_corpus() -> Vec<Tokens> {
    read_corpus(&fixture("golden/corpus.json"))
}

/// Sequences as goldens keep them.
pub fn read_corpus(path: &Path) -> Vec<Tokens> {
    let text = std::fs::read_to_string(path).unwrap();
    let corpus: Value = serde_json::from_str(&text).unwrap();
    let numbers = |v: &Value| -> Vec<i64> {
        let list = v.as_array().unwrap().iter();
        list.map(|n| n.as_i64().unwrap()).collect()
    };
    let sequences = corpus["sequences"].as_array().unwrap().iter();
    sequences
        .map(|s| {
            let tokens = numbers(&s["tokens"]).iter().map(|&t| t as i32).collect();
            let mask = numbers(&s["mask"]).iter().map(|&m| m as u8).collect();
            (tokens, mask)
        })
        .collect()
}
