//! Tells the program which commit it was built from, where there is a checkout, and which version
//! of the matrix-product library is in it: both are provenance of every shard.

use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=src");
    println!("cargo::rerun-if-changed=Cargo.lock");
    println!("cargo::rerun-if-changed=.git/logs/HEAD");
    if let Some(commit) = commit() {
        println!("cargo::rustc-env=KDSCORE_COMMIT={commit}");
    }
    if let Some(version) = locked_version("gemm") {
        println!("cargo::rustc-env=KDSCORE_GEMM={version}");
    }
}

fn commit() -> Option<String> {
    let described = Command::new("git")
        .args(["describe", "--always", "--dirty", "--abbrev=12"])
        .output()
        .ok()?;
    let commit = String::from_utf8(described.stdout).ok()?;
    described.status.success().then(|| commit.trim().to_owned())
}

/// The version of a package in Cargo.lock, where name and version stand on lines of their own.
fn locked_version(package: &str) -> Option<String> {
    let lock = std::fs::read_to_string("Cargo.lock").ok()?;
    let entry = format!("name = \"{package}\"\nversion = \"");
    let (_, rest) = lock.split_once(&entry)?;
    Some(rest.split_once('"')?.0.to_owned())
}
