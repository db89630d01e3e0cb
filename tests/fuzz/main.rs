//! Damaged inputs: whatever the bytes, an error or a result, never a panic.
//!
//! Every target starts from the kept inputs in `tests/fixtures/fuzz/TARGET` and from good ones, and
//! mutates them from a fixed seed. A few hundred rounds run with the other tests;
//! `scripts/fuzz SECONDS` runs each target for that long and keeps what panics, so that it is tried
//! first ever after.

mod mutate;
mod targets;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mutate::Random;
use targets::Target;

/// Rounds that every run of the tests does.
const ROUNDS: usize = 300;

fn kept(target: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    root.join("tests/fixtures/fuzz").join(target)
}

/// The inputs to start from: the kept ones in order of name, then the target's own.
fn corpus(target: &dyn Target) -> Vec<Vec<u8>> {
    let entries = std::fs::read_dir(kept(target.name()));
    let mut files: Vec<PathBuf> = entries
        .into_iter()
        .flatten()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    let mut inputs: Vec<Vec<u8>> = files.iter().map(|f| std::fs::read(f).unwrap()).collect();
    inputs.extend(target.good());
    inputs
}

fn fuzz(target: &dyn Target) {
    let seconds = std::env::var("KDSCORE_FUZZ_SECONDS").ok();
    let seconds = seconds
        .and_then(|s| s.parse().ok())
        .map(Duration::from_secs);
    let inputs = corpus(target);
    for input in &inputs {
        attempt(target, input);
    }
    let (started, mut random) = (Instant::now(), Random::new(target.name()));
    let mut round = 0;
    loop {
        match seconds {
            None if round >= ROUNDS => break,
            Some(limit) if started.elapsed() > limit => break,
            _ => {}
        }
        let input = random.pick(&inputs);
        let other = random.pick(&inputs);
        attempt(target, &random.mutate(input, other));
        round += 1;
    }
    println!(
        "{}: {round} rounds from {} inputs",
        target.name(),
        inputs.len()
    );
}

/// Keeps an input that panics before it fails the test.
fn attempt(target: &dyn Target, input: &[u8]) {
    let result = catch_unwind(AssertUnwindSafe(|| target.run(input)));
    if result.is_err() {
        let folder = kept(target.name());
        std::fs::create_dir_all(&folder).unwrap();
        let hash = kdscore::canonical::sha256_hex(input);
        let file = folder.join(&hash[..16]);
        std::fs::write(&file, input).unwrap();
        panic!(
            "{}: a panic; the input is kept in {}",
            target.name(),
            file.display()
        );
    }
}

#[test]
fn config() {
    fuzz(&targets::Config::new());
}

#[test]
fn safetensors_header() {
    fuzz(&targets::Header::new());
}

#[test]
fn index() {
    fuzz(&targets::Index::new());
}

#[test]
fn tokenizer() {
    fuzz(&targets::Tokenizer::new());
}

#[test]
fn template() {
    fuzz(&targets::Template::new());
}
