//! How far apart two scored sets are.

use std::path::Path;

use serde_json::Value;

use super::program::{arrays, fixture, read_corpus, refuse, succeed, tree, write_corpus};

const VOCAB: usize = 160;

fn score(at: &Path, teacher: &str, out: &str, more: &[&str]) {
    let teacher = fixture(&format!("teachers/{teacher}"));
    let args = ["score", "--corpus", "corpus", "--logp-dtype", "f32"];
    let teacher = ["--teacher", teacher.to_str().unwrap(), "--out", out];
    succeed(at, &[&args[..], &teacher, more].concat());
}

fn diff(at: &Path, a: &str, b: &str) -> Value {
    serde_json::from_str(&succeed(at, &["diff", a, b, "--json"])).unwrap()
}

/// KL(a‖b) of every row, of sets that hold the whole vocabulary.
fn divergences(a: &Path, b: &Path) -> Vec<f64> {
    let by_id = |out: &Path| {
        let arrays = arrays(out);
        let rows = arrays["ids"]
            .chunks(VOCAB)
            .zip(arrays["logp"].chunks(VOCAB));
        let row = |(ids, logp): (&[f64], &[f64])| {
            let mut row = vec![f64::NEG_INFINITY; VOCAB];
            ids.iter()
                .zip(logp)
                .for_each(|(&id, &l)| row[id as usize] = l);
            row
        };
        rows.map(row).collect::<Vec<_>>()
    };
    let rows = by_id(a).into_iter().zip(by_id(b));
    rows.map(|(p, q)| p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum())
        .collect()
}

#[test]
fn two_teachers_are_as_far_apart_as_their_distributions() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    write_corpus(
        &at.join("corpus"),
        &read_corpus(&fixture("teachers/corpus.json")),
        VOCAB,
    );
    let whole = VOCAB.to_string();
    for (teacher, out) in [("llama_tied", "a"), ("llama_yarn", "b")] {
        score(
            at,
            teacher,
            out,
            &["-k", &whole, "--emit", "target_logp,entropy"],
        );
        score(
            at,
            teacher,
            &format!("{out}8"),
            &["-k", "8", "--shard-tokens", "64"],
        );
    }
    let rows = divergences(&at.join("a"), &at.join("b"));
    let mean = rows.iter().sum::<f64>() / rows.len() as f64;
    let found = diff(at, "a", "b");
    assert_eq!(found["rows"].as_u64().unwrap(), rows.len() as u64);
    let kl = found["kl"]["mean"].as_f64().unwrap();
    assert!((kl - mean).abs() < 1e-5 * mean, "{kl} for {mean}");
    let most = rows.iter().copied().fold(0.0, f64::max);
    assert!((found["kl"]["max"].as_f64().unwrap() - most).abs() < 1e-5 * most);
    assert_eq!(found["mass_of_shared"][0].as_f64().unwrap().round(), 1.0);
    assert!(found["differing"]["teacher_fingerprint"].is_array());
    assert!(found["entropy"][0].is_f64());
    // Sets of other k and other shards: less is known, and never more is said.
    for (a, b) in [("a8", "b"), ("a", "b8"), ("a8", "b8")] {
        let less = diff(at, a, b);
        assert_eq!(less["rows"], found["rows"]);
        let less = less["kl"]["mean"].as_f64().unwrap();
        assert!(0.0 < less && less <= kl * 1.000_001, "{less} for {kl}");
    }
    let back = diff(at, "b", "a")["kl_back"]["mean"].as_f64().unwrap();
    assert!((back - kl).abs() < 1e-9 * kl, "{back} for {kl}");
    let same = diff(at, "a8", "a8");
    assert_eq!(
        (&same["kl"]["max"], &same["same_first"]),
        (&Value::from(0.0), &Value::from(1.0))
    );
    let told = succeed(at, &["diff", "a", "b"]);
    for says in [
        "teacher_fingerprint",
        "same first choice",
        "farthest sequences",
        "mean entropy",
    ] {
        assert!(told.contains(says), "{told}");
    }
}

#[test]
fn sets_that_can_not_be_compared_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let mut corpus = read_corpus(&fixture("teachers/corpus.json"));
    write_corpus(&at.join("corpus"), &corpus, VOCAB);
    score(at, "llama_tied", "a", &["-k", "8"]);
    let error = refuse(at, &["diff", "a", "none"]);
    assert!(
        error.contains("none/job.json: expected a scored set"),
        "{error}"
    );
    score(at, "llama_tied", "damaged", &["-k", "8"]);
    for (array, says) in [
        ("targets.npy", "expected the same targets in both sets"),
        (
            "row_offsets.npy",
            "row_offsets: expected 8 offsets that rise from 0",
        ),
    ] {
        let names = tree(&at.join("damaged")).into_keys();
        let name = names.into_iter().find(|name| name.ends_with(array));
        let path = at.join("damaged").join(name.unwrap());
        let whole = std::fs::read(&path).unwrap();
        let mut bytes = whole.clone();
        *bytes.iter_mut().nth_back(3).unwrap() ^= 1;
        std::fs::write(&path, bytes).unwrap();
        let error = refuse(at, &["diff", "a", "damaged"]);
        assert!(error.contains(says), "{error}");
        std::fs::write(&path, whole).unwrap();
    }
    corpus.pop();
    write_corpus(&at.join("corpus"), &corpus, VOCAB);
    score(at, "llama_tied", "b", &["-k", "8"]);
    let error = refuse(at, &["diff", "a", "b"]);
    assert!(
        error.contains("expected two scored sets of one corpus"),
        "{error}"
    );
    let manifest = std::fs::read_dir(at.join("b"))
        .unwrap()
        .map(|e| e.unwrap().path());
    let manifest = manifest.filter(|p| p.to_string_lossy().ends_with(".manifest.json"));
    manifest.for_each(|path| std::fs::remove_file(path).unwrap());
    let error = refuse(at, &["diff", "b", "b"]);
    assert!(
        error.contains("expected rows that both sets have committed, found none"),
        "{error}"
    );
}
