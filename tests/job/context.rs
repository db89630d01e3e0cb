//! How long a sequence may be.

use super::program::{arrays, fixture, read_corpus, read_npy, refuse, succeed, write_corpus};

/// `max_position_embeddings` of a dynamic rope is where its stretching starts. The teacher has 40
/// and a factor of 4, the corpus sequences of up to 100 tokens.
#[test]
fn a_dynamic_rope_takes_what_it_is_scaled_to() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let teacher = fixture("teachers/llama_dynamic");
    let mut args = vec!["score", "--teacher", teacher.to_str().unwrap()];
    args.extend(["--corpus", "corpus", "--out", "out", "-k", "8"]);
    args.extend(["--logp-dtype", "f32"]);
    let mut corpus = read_corpus(&fixture("teachers/corpus.json"));
    write_corpus(&at.join("corpus"), &corpus, 160);
    succeed(at, &args);
    let found = &arrays(&at.join("out"))["logp"];
    let golden = read_npy(&teacher.join("golden/logp.npy"));
    assert_eq!(found.len(), golden.len());
    let deltas = found.iter().zip(&golden).map(|(a, b)| (a - b).abs());
    let worst = deltas.fold(0.0, f64::max);
    assert!(worst < 1e-3, "off by {worst}");

    corpus.push((vec![5; 161], vec![1; 161]));
    write_corpus(&at.join("corpus"), &corpus, 160);
    let error = refuse(at, &args);
    assert!(
        error.contains("sequence 7: expected at most 160 tokens") && error.contains("found 161"),
        "{error}"
    );
}
