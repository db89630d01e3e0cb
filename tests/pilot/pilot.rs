//! `pilot` through the real program, on the teacher that comes with kdscore.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::program::{fixture, refuse, succeed, tree, write_corpus};

/// A folder with the quickstart's corpus.
fn prepared() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/quickstart.jsonl");
    let (data, teacher) = (data.to_str().unwrap(), teacher());
    let teacher = teacher.to_str().unwrap();
    let args = [
        "prepare",
        "--data",
        data,
        "--tokenizer",
        teacher,
        "--out",
        "corpus",
    ];
    succeed(folder.path(), &args);
    folder
}

fn teacher() -> PathBuf {
    fixture("teacher")
}

fn job<'a>(command: &'a str, teacher: &'a str, out: &'a str, options: &[&'a str]) -> Vec<&'a str> {
    let mut args = vec![
        command,
        "--json",
        "--teacher",
        teacher,
        "--corpus",
        "corpus",
        "--out",
        out,
    ];
    args.extend(["--shard-tokens", "3000"]);
    args.extend(options);
    args
}

fn json(folder: &Path, args: &[&str]) -> Value {
    serde_json::from_str(&succeed(folder, args)).unwrap()
}

fn number(value: &Value) -> f64 {
    value
        .as_f64()
        .unwrap_or_else(|| panic!("expected a number, found {value}"))
}

/// What must hold among the figures of any pilot at $3 an hour.
fn check_figures(found: &Value) {
    let scored = found["shards"].as_array().unwrap();
    // Phases, waits included, make up the wall time.
    let phases = found["phases"].as_object().unwrap().values();
    let sum: f64 = phases.map(number).sum();
    let wall = number(&found["wall_seconds"]);
    assert!((sum / wall - 1.0).abs() < 0.03, "{sum} of {wall}");
    assert!(found["overlapped"].as_object().unwrap().is_empty());
    for phase in [
        "projections and MLP",
        "attention",
        "head",
        "reduction",
        "write",
    ] {
        assert!(number(&found["phases"][phase]) > 0.0, "{phase}");
    }
    // MFU by hand: FLOPs of the shards over their seconds over the peak.
    let sum = |key: &str| scored.iter().map(|s| number(&s[key])).sum::<f64>();
    let mfu = sum("flops") / sum("seconds") / number(&found["peak_flops"]);
    assert!((number(&found["mfu"]) / mfu - 1.0).abs() < 1e-9);
    let whole = &found["whole_job"]["seconds"];
    assert!(number(&whole["error"]) > 0.0);
    let cost = number(&found["whole_job"]["cost"]) / number(&whole["value"]) * 3600.0;
    assert!((cost - 3.0).abs() < 1e-9);
    let (seen, planned) = (
        number(&found["memory_seen_bytes"]),
        number(&found["memory_planned_bytes"]),
    );
    assert!(seen < planned * 1.1 + 64e6, "{seen} of {planned}");
}

#[test]
fn a_pilot_counts_toward_the_run_and_tells_what_the_run_takes() {
    let folder = prepared();
    let at = folder.path();
    let teacher = teacher();
    let teacher = teacher.to_str().unwrap();
    let options = [
        "--fraction",
        "0.25",
        "--price",
        "3",
        "--report",
        "pilot.html",
    ];
    let found = json(at, &job("pilot", teacher, "out", &options));
    let scored = found["shards"].as_array().unwrap();
    assert_eq!(
        (scored.len(), &found["shards_planned"]),
        (4, &Value::from(12))
    );

    check_figures(&found);

    // The page is whole and asks nothing of the network.
    let page = std::fs::read_to_string(at.join("pilot.html")).unwrap();
    assert!(page.ends_with("</html>\n") && !page.contains("http"));
    assert!(page.contains("What the full run costs") && page.matches("<svg").count() >= 5);

    // The run takes the pilot's shards as they are, and ends as a run without a pilot would.
    let before = tree(&at.join("out"));
    let run = json(at, &job("score", teacher, "out", &[]));
    assert_eq!(run["shards_scored_now"], 8);
    assert_eq!(run["forecast"]["source"], "the pilot");
    assert!(number(&run["forecast"]["seconds_predicted"]) > 0.0);
    let after = tree(&at.join("out"));
    let kept = before.iter().filter(|(name, _)| !name.starts_with("log/"));
    for (name, bytes) in kept {
        assert!(after[name] == *bytes, "{name} was changed");
    }
    json(at, &job("score", teacher, "plain", &[]));
    let arrays = |out: &str| -> Vec<(String, Vec<u8>)> {
        let files = tree(&at.join(out)).into_iter();
        files.filter(|(name, _)| name.ends_with(".npy")).collect()
    };
    assert!(arrays("out") == arrays("plain"));
    let error = refuse(at, &job("pilot", teacher, "out", &[]));
    assert!(error.contains("another --out"), "{error}");

    // What would be written over is refused before anything is scored.
    for option in ["--report", "--events", "--metrics"] {
        let error = refuse(at, &job("pilot", teacher, "out", &[option, "out/job.json"]));
        assert!(error.contains("expected a file outside"), "{error}");
        let error = refuse(at, &job("pilot", teacher, "new", &[option, "/dev/null"]));
        assert!(error.contains("a device or a pipe"), "{error}");
    }
    assert!(!at.join("new").exists());
}

#[test]
fn the_curve_of_tails_is_what_runs_with_other_k_store() {
    let folder = prepared();
    let at = folder.path();
    let teacher = teacher();
    let teacher = teacher.to_str().unwrap();
    let all = ["--fraction", "1", "--sweep-seconds", "0"];
    let found = json(at, &job("pilot", teacher, "out", &all));
    assert!(found["token_budget_recommended"].is_null());
    for k in [1usize, 7, 32] {
        let (out, text) = (format!("out-{k}"), k.to_string());
        let options = ["-k", &text, "--logp-dtype", "f32"];
        let run = json(at, &job("score", teacher, &out, &options));
        let (curve, stored) = (&found["tail_by_k"][k - 1], number(&run["mean_tail"]));
        assert!(
            (number(&curve["value"]) - stored).abs() < 1e-6,
            "k = {k}: {curve}, {stored}"
        );
        assert_eq!(number(&curve["error"]), 0.0, "nothing is left to chance");
    }
    // The recommendation is the first below the bound, and says what it costs.
    let advised = found["k_recommended"].as_u64().unwrap() as usize;
    let tail = |k: usize| number(&found["tail_by_k"][k - 1]["value"]);
    assert!(tail(advised) < 0.01 && tail(advised - 1) >= 0.01);
    let rescoring = found["rescoring"].as_str().unwrap();
    assert!(rescoring.contains("scores them again") && rescoring.contains("--k-max"));
    let costs = found["k_costs"].as_array().unwrap();
    let at_32 = costs.iter().find(|c| c["k"] == 32).unwrap();
    assert_eq!(at_32["bytes_per_row"], 198);
}

#[test]
fn a_wide_pilot_stores_wide_once() {
    let folder = prepared();
    let at = folder.path();
    let teacher = teacher();
    let teacher = teacher.to_str().unwrap();
    let wide = [
        "--k-max",
        "64",
        "--tail-below",
        "0.05",
        "--sweep-seconds",
        "0",
    ];
    let found = json(at, &job("pilot", teacher, "out", &wide));
    assert_eq!(found["k"], 64);
    assert!(number(&found["k_recommended"]) < 64.0);
    assert!(found["rescoring"].as_str().unwrap().contains("first"));
    let manifest = &super::program::manifests(&at.join("out"))[0];
    let ids = manifest["products"].as_array().unwrap();
    let ids = ids.iter().find(|p| p["name"] == "ids").unwrap();
    assert_eq!(ids["shape"][1], 64);
    let run = json(at, &job("score", teacher, "out", &["-k", "64"]));
    assert_eq!(run["shards_scored_now"], 8);
}

#[test]
fn the_same_seed_scores_the_same_shards() {
    let folder = prepared();
    let at = folder.path();
    let teacher = teacher();
    let teacher = teacher.to_str().unwrap();
    let ids = |out: &str, seed: &str| -> Vec<String> {
        let options = ["--seed", seed, "--sweep-seconds", "0"];
        let found = json(at, &job("pilot", teacher, out, &options));
        let shards = found["shards"].as_array().unwrap().iter();
        shards
            .map(|s| s["id"].as_str().unwrap().to_owned())
            .collect()
    };
    let first = ids("a", "1");
    assert_eq!(first, ids("b", "1"));
    let others: Vec<_> = ["2", "3", "4"].iter().map(|s| ids(s, s)).collect();
    assert!(others.iter().any(|other| *other != first));
}

fn alarms(found: &Value) -> Vec<&str> {
    let alarms = found["alarms"].as_array().unwrap().iter();
    alarms.map(|a| a["name"].as_str().unwrap()).collect()
}

/// Sequences without a first token, and many of one greatest length with no stop at their end.
fn cut_corpus(folder: &Path) {
    let sequence = |s: i32, length: i32| {
        let tokens = (0..length).map(|t| 300 + (s * 977 + t * 31) % 1500);
        (tokens.collect(), vec![1; length as usize])
    };
    let sequences: Vec<_> = (0..60)
        .map(|s| sequence(s, if s % 3 == 0 { 64 } else { 20 + s % 40 }))
        .collect();
    write_corpus(folder, &sequences, 2048);
}

#[test]
fn alarms_are_raised_by_what_is_wrong_and_by_nothing_else() {
    let folder = prepared();
    let at = folder.path();
    let teacher = teacher();
    let teacher = teacher.to_str().unwrap();
    let brief = ["--sweep-seconds", "0"];
    let sound = json(at, &job("pilot", teacher, "sound", &brief));
    assert!(alarms(&sound).is_empty(), "{}", sound["alarms"]);

    let other = tempfile::tempdir().unwrap();
    cut_corpus(&other.path().join("corpus"));
    super::golden_tokenizer(teacher, &other.path().join("corpus/tokenizer"));
    let options = ["--sweep-seconds", "0", "--trust-tokens=true"];
    let found = json(other.path(), &job("pilot", teacher, "out", &options));
    let names = alarms(&found);
    for expected in ["missing first token", "truncated-looking sequences"] {
        assert!(names.contains(&expected), "{names:?}");
    }
}
