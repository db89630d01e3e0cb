//! The README's first command, on a copy of its folder: what it ends with, and that a second run
//! does nothing.

use super::checkpoint::copy_folder;
use super::program::{fixture, run, succeed, tree};

#[test]
fn the_quickstart_ends_with_rows_worth_a_look_and_a_second_run_does_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let configs = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("configs");
    copy_folder(&configs, &at.join("configs"));
    copy_folder(&fixture("teacher"), &at.join("tests/fixtures/teacher"));
    let output = run(at, &["run", "configs/quickstart.toml"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    for expected in [
        "tokens/s",
        "mean tail mass",
        "verified: ",
        " rows, aligned",
        "log-prob",
        "tail",
    ] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    let shown = text
        .lines()
        .filter(|l| l.contains('›') && l.contains('%'))
        .count();
    assert_eq!(shown, 3, "{text}");

    let before = tree(&at.join("target/quickstart"));
    let again = succeed(at, &["run", "configs/quickstart.toml"]);
    assert!(again.contains("nothing to do"), "{again}");
    assert!(tree(&at.join("target/quickstart")) == before);
}

#[test]
fn the_command_line_wins_over_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let teacher = fixture("teacher");
    let data = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/quickstart.jsonl");
    let job = format!(
        "[prepare]\ndata = [{data:?}]\nout = \"corpus\"\n[score]\nteacher = {teacher:?}\nout = \"out\"\nk = 4\n"
    );
    std::fs::write(at.join("job.toml"), job).unwrap();
    succeed(
        at,
        &[
            "run",
            "job.toml",
            "--set",
            "score.k=7",
            "--set",
            "score.emit=[\"entropy\"]",
        ],
    );
    let manifest = &super::program::manifests(&at.join("out"))[0];
    let products = manifest["products"].as_array().unwrap();
    let names: Vec<_> = products
        .iter()
        .map(|p| p["name"].as_str().unwrap())
        .collect();
    assert!(names.contains(&"entropy"), "{names:?}");
    let ids = products.iter().find(|p| p["name"] == "ids").unwrap();
    assert_eq!(ids["shape"][1], 7);
    // The same table serves the single command; the option typed there wins, and a set made
    // with k = 7 is refused to a run with k = 5.
    let error = super::program::refuse(
        at,
        &[
            "score", "--config", "job.toml", "--corpus", "corpus", "-k", "5",
        ],
    );
    assert!(
        error.contains('7') && error.contains('5') && error.contains('k'),
        "{error}"
    );
}
