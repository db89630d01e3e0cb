//! Tells the program which commit it was built from; nothing where there is no checkout.

use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=src");
    println!("cargo::rerun-if-changed=.git/logs/HEAD");
    let described = Command::new("git")
        .args(["describe", "--always", "--dirty", "--abbrev=12"])
        .output();
    if let Ok(output) = described
        && output.status.success()
        && let Ok(commit) = String::from_utf8(output.stdout)
    {
        println!("cargo::rustc-env=KDSCORE_COMMIT={}", commit.trim());
    }
}
