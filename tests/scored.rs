//! A scored set on a real disk: begun, added to, joined, refused.

mod support;

use kdscore::products::Dtype;
use kdscore::store::{Committed, CorpusReader, ScoredSet};
use serde_json::json;
use support::*;

const SHARDS: &[&[usize]] = &[&[40, 1, 0, 33], &[25, 60]];

#[test]
fn a_set_is_scored_once_and_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let corpus = CorpusReader::open(&make_corpus(folder.path(), SHARDS)).unwrap();
    let products = products(Dtype::F16);
    let job = job(&corpus, &products, Some(20));
    assert_eq!(job.plan.len(), 4);
    let out = folder.path().join("a/b/out");
    let set = ScoredSet::open_or_create(&out, &job).unwrap();
    assert_eq!(score_open(&set, &corpus, &products).unwrap(), 4);
    let again = ScoredSet::open_or_create(&out, &job).unwrap();
    assert_eq!(score_open(&again, &corpus, &products).unwrap(), 0);
    for (planned, manifest) in job.plan.iter().zip(again.manifests().unwrap()) {
        let manifest = manifest.unwrap();
        let files = corpus
            .shard(corpus.shard_index(&planned.corpus_shard).unwrap())
            .unwrap();
        let view = files.view().unwrap();
        let shard = again.shard(&manifest).unwrap();
        let (rows, offsets) = (shard.rows().unwrap(), shard.row_offsets().unwrap());
        assert_eq!(offsets.len() as u64, planned.sequences() + 1);
        let targets: Vec<i32> = (planned.first_sequence..planned.end_sequence)
            .flat_map(|s| view.sequence(s as usize).rows().map(|row| row.target))
            .collect();
        let stored: Vec<i32> = (0..rows.rows).map(|row| rows.target(row)).collect();
        assert_eq!(stored, targets);
        assert!(manifest.sums.mean_tail.unwrap() < 0.6);
    }
}

#[test]
fn another_job_is_refused_by_field() {
    let folder = tempfile::tempdir().unwrap();
    let corpus = CorpusReader::open(&make_corpus(folder.path(), SHARDS)).unwrap();
    let products = products(Dtype::F16);
    let first = job(&corpus, &products, None);
    let out = folder.path().join("out");
    ScoredSet::open_or_create(&out, &first).unwrap();
    let says = |job| format!("{:#}", ScoredSet::open_or_create(&out, &job).unwrap_err());
    let mut other = first.clone();
    other
        .identity
        .insert("teacher_fingerprint".into(), json!("another"));
    other.identity.insert("numerics".into(), json!(2));
    let words = says(other);
    assert!(
        words.contains(r#"teacher_fingerprint: it has "arithmetic", this run "another""#),
        "{words}"
    );
    assert!(
        words.contains("numerics: it has none, this run 2"),
        "{words}"
    );
    assert!(says(job(&corpus, &products, Some(10))).contains("shard plan: it has 2 shards"));
    let corpus_as_out = ScoredSet::open_or_create(&folder.path().join("corpus"), &first);
    assert!(
        corpus_as_out
            .unwrap_err()
            .to_string()
            .contains("found a token corpus")
    );
}

#[test]
fn what_is_wrong_is_never_committed() {
    let folder = tempfile::tempdir().unwrap();
    let corpus = CorpusReader::open(&make_corpus(folder.path(), SHARDS)).unwrap();
    let products = products(Dtype::F32);
    let job = job(&corpus, &products, None);
    let set = ScoredSet::open_or_create(&folder.path().join("out"), &job).unwrap();
    let files = corpus.shard(0).unwrap();
    let planned = &job.plan[0];
    let good = score(&files.view().unwrap(), planned, &products);
    let says = |array: usize, at: usize, bytes: [u8; 4]| {
        let mut arrays = good.clone();
        arrays[array].bytes[at..at + 4].copy_from_slice(&bytes);
        let error = set
            .commit(planned, &files, arrays, &provenance())
            .unwrap_err();
        format!("{error:#}")
    };
    assert!(says(0, 8, 22i32.to_le_bytes()).contains("shard-000000: targets: expected token"));
    let words = says(2, 4 * K * 4, f32::NAN.to_le_bytes());
    assert!(
        words.contains("logp: expected finite values, found NaN at row 4"),
        "{words}"
    );
    assert!(says(3, 8, f32::INFINITY.to_le_bytes()).contains("tail: expected finite"));
    let cut = set.commit(planned, &files, good[..3].to_vec(), &provenance());
    assert!(format!("{:#}", cut.unwrap_err()).contains("expected the products"));
    let wrong_files = corpus.shard(1).unwrap();
    assert!(
        set.commit(planned, &wrong_files, good.clone(), &provenance())
            .is_err()
    );
    assert_eq!(set.open_shards().unwrap().len(), 2, "nothing was committed");
    let commit = |arrays| set.commit(planned, &files, arrays, &provenance());
    assert_eq!(commit(good.clone()).unwrap(), Committed::Written);
    assert_eq!(commit(good.clone()).unwrap(), Committed::AlreadyThere);
    let mut other = good;
    other[2].bytes[0] ^= 1;
    let words = format!("{:#}", commit(other.clone()).unwrap_err());
    assert!(words.contains("found other bytes in logp"), "{words}");
    let elsewhere = json!({"device": "another"});
    let late = set.commit(planned, &files, other, &elsewhere).unwrap();
    assert_eq!(late, Committed::AlreadyThere);
}
