//! The embedded teacher against Hugging Face transformers in fp32 (scripts/make_goldens.py), with
//! the tolerances of the project's contract: mean |delta logp| < 5e-5, max < 1e-3, the same ids
//! up to ties within 1e-3.

use super::program::{self, arrays, fixture, golden_corpus, read_npy, succeed, write_corpus};

const TIE: f64 = 1e-3;

#[test]
fn scores_what_transformers_scores() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    write_corpus(&at.join("corpus"), &golden_corpus(), 2048);
    let teacher = fixture("teacher");
    succeed(
        at,
        &[
            "score",
            "--teacher",
            teacher.to_str().unwrap(),
            "--corpus",
            "corpus",
            "--out",
            "out",
            "--logp-dtype",
            "f32",
            "--emit",
            "target_logp,target_rank,logsumexp,entropy",
        ],
    );
    let got = arrays(&at.join("out"));
    let golden = |name: &str| read_npy(&fixture("golden").join(format!("{name}.npy")));

    assert_eq!(got["targets"], golden("targets"), "targets");
    compare("logp", &got["logp"], &golden("logp"));
    for name in ["tail", "target_logp", "logsumexp", "entropy"] {
        compare(name, &got[name], &golden(name));
    }
    same_ids(&got["ids"], &golden("ids"), &got["logp"], &golden("logp"));
    let ranks = got["target_rank"].iter().zip(golden("target_rank"));
    let moved = ranks.filter(|(a, b)| **a != *b).count();
    assert!(
        moved * 100 <= got["target_rank"].len(),
        "{moved} target ranks differ"
    );
}

fn compare(name: &str, got: &[f64], golden: &[f64]) {
    assert_eq!(got.len(), golden.len(), "{name}");
    let deltas: Vec<f64> = got.iter().zip(golden).map(|(a, b)| (a - b).abs()).collect();
    let mean = deltas.iter().sum::<f64>() / deltas.len() as f64;
    let max = deltas.iter().copied().fold(0.0, f64::max);
    assert!(
        mean < 5e-5 && max < 1e-3,
        "{name}: mean {mean:.1e}, max {max:.1e}"
    );
}

/// Where ids differ, their log-probs must be a tie.
fn same_ids(got: &[f64], golden: &[f64], got_logp: &[f64], golden_logp: &[f64]) {
    assert_eq!(got.len(), golden.len());
    for i in 0..got.len() {
        let tie = (got_logp[i] - golden_logp[i]).abs() < TIE;
        assert!(
            got[i] == golden[i] || tie,
            "id {i}: {} and {}",
            got[i],
            golden[i]
        );
    }
}

/// The golden test must be able to fail: with a teacher that is off by a little, it does.
#[test]
fn another_rope_would_be_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let teacher = at.join("teacher");
    super::checkpoint::copy_folder(&fixture("teacher"), &teacher);
    let config = std::fs::read_to_string(teacher.join("config.json")).unwrap();
    let changed = config.replace("10000.0", "11000.0");
    assert_ne!(config, changed);
    std::fs::write(teacher.join("config.json"), changed).unwrap();
    write_corpus(&at.join("corpus"), &golden_corpus(), 2048);
    let args = [
        "score",
        "--teacher",
        "teacher",
        "--corpus",
        "corpus",
        "--out",
        "out",
        "--logp-dtype",
        "f32",
    ];
    succeed(at, &args);
    let got = &program::arrays(&at.join("out"))["logp"];
    let golden = read_npy(&fixture("golden/logp.npy"));
    let deltas = got.iter().zip(&golden).map(|(a, b)| (a - b).abs());
    assert!(deltas.fold(0.0, f64::max) > 1e-3);
}
