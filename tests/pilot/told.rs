//! What a pass tells machines: events, metrics, and nothing at all where it is asked to be quiet.

use std::path::Path;

use serde_json::Value;

use super::program::{fixture, golden_corpus, run, write_corpus};

#[test]
fn events_and_metrics_tell_what_the_result_says() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    write_corpus(&at.join("corpus"), &golden_corpus(), 2048);
    let teacher = fixture("teacher");
    let teacher = teacher.to_str().unwrap();
    let mut args = vec![
        "score",
        "--json",
        "--quiet",
        "--trust-tokens=true",
        "--teacher",
        teacher,
    ];
    args.extend([
        "--corpus",
        "corpus",
        "--out",
        "out",
        "--shard-tokens",
        "200",
    ]);
    args.extend(["--events", "events.jsonl", "--metrics", "kdscore.prom"]);
    let output = run(at, &args);
    assert!(output.status.success());
    assert!(
        output.stderr.is_empty(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();

    let text = std::fs::read_to_string(at.join("events.jsonl")).unwrap();
    let events: Vec<Value> = text
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    let of = |kind: &'static str| events.iter().filter(move |e| e["event"] == kind);
    let rows = |kind| of(kind).map(|e| e["rows"].as_u64().unwrap()).sum::<u64>();
    assert_eq!(of("shard_start").count(), of("shard_done").count());
    assert_eq!(rows("wave"), result["rows"]);
    assert_eq!(rows("shard_done"), result["rows"]);
    assert_eq!(events.last().unwrap()["event"], "end");
    let seconds: Vec<f64> = events
        .iter()
        .map(|e| e["seconds"].as_f64().unwrap())
        .collect();
    assert!(seconds.is_sorted(), "{seconds:?}");

    check_metrics(&at.join("kdscore.prom"), &result);
}

fn check_metrics(file: &Path, result: &Value) {
    let metrics = std::fs::read_to_string(file).unwrap();
    let figure = |name: &str| -> f64 {
        let line = metrics
            .lines()
            .find_map(|l| l.strip_prefix(&format!("{name} ")));
        line.unwrap_or_else(|| panic!("{name}: {metrics}"))
            .parse()
            .unwrap()
    };
    assert_eq!(
        figure("kdscore_rows_total"),
        result["rows"].as_f64().unwrap()
    );
    assert_eq!(
        figure("kdscore_tokens_total"),
        result["tokens_computed"].as_f64().unwrap()
    );
    assert_eq!(
        figure("kdscore_shards_committed_total"),
        figure("kdscore_shards_planned")
    );
    assert!(figure("kdscore_tokens_per_second") > 0.0 && figure("kdscore_mfu_ratio") > 0.0);
}
