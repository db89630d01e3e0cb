//! Whatever is damaged is found and named, moved aside when asked, and made again.

mod support;

use std::path::{Path, PathBuf};

use kdscore::commands::{Interrupt, Outcome, Status, status, verify};
use kdscore::config::VerifySettings;
use kdscore::products::Dtype;
use kdscore::store::{CorpusReader, ScoredSet};
use support::*;

const SHARDS: &[&[usize]] = &[&[40, 1, 0, 33], &[25, 60]];
/// Enough rows for the shift test.
const MANY: &[&[usize]] = &[&[900, 300], &[700]];

struct Case {
    _folder: tempfile::TempDir,
    corpus: PathBuf,
    out: PathBuf,
}

/// A corpus and its finished scored set.
fn scored(shards: &[&[usize]], logp_dtype: Dtype) -> Case {
    let folder = tempfile::tempdir().unwrap();
    let corpus = make_corpus(folder.path(), shards);
    let out = folder.path().join("out");
    score_all(&corpus, &out, logp_dtype);
    Case {
        _folder: folder,
        corpus,
        out,
    }
}

fn score_all(corpus: &Path, out: &Path, logp_dtype: Dtype) -> usize {
    let corpus = CorpusReader::open(corpus).unwrap();
    let products = products(logp_dtype);
    let job = job(&corpus, &products, None);
    let set = ScoredSet::open_or_create(out, &job).unwrap();
    score_open(&set, &corpus, &products).unwrap()
}

fn settings(out: &Path) -> VerifySettings {
    VerifySettings {
        out: out.to_owned(),
        corpus: None,
        teacher: None,
        clean: false,
        discard_damaged: false,
        report: None,
    }
}

fn run(settings: &VerifySettings) -> anyhow::Result<Outcome> {
    verify::verify(settings, &|_| Ok("arithmetic".into()), &Interrupt::new())
}

/// What `verify` says about damage: its text, or its error.
fn complaint(out: &Path) -> Option<String> {
    match run(&settings(out)) {
        Ok(outcome) if outcome.status == Status::Done => None,
        Ok(outcome) => Some(outcome.text),
        Err(error) => Some(format!("{error:#}")),
    }
}

fn files_below(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => files.extend(files_below(&path)),
            false => files.push(path),
        }
    }
    files.sort();
    files
}

fn damage(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = std::fs::read(path).unwrap();
    change(&mut bytes);
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn a_sound_set_is_verified_and_aligned() {
    for dtype in [Dtype::F16, Dtype::F32] {
        let case = scored(MANY, dtype);
        let outcome = run(&settings(&case.out)).unwrap();
        let last = outcome.text.lines().last().unwrap();
        let rows = outcome.json["rows"].as_u64().unwrap();
        assert_eq!(last, format!("verified: 2 shards, {rows} rows, aligned"));
        assert_eq!(outcome.status, Status::Done);
        let status = status::status(&case.out).unwrap();
        assert_eq!(
            (status.status, &status.json["left"]),
            (Status::Done, &0.into())
        );
    }
    let few = scored(SHARDS, Dtype::F16);
    let outcome = run(&settings(&few.out)).unwrap();
    assert_eq!(outcome.json["alignment"], "can't tell");
    assert_eq!(outcome.status, Status::Done);
}

#[test]
fn every_flipped_bit_is_found() {
    let case = scored(&[&[9, 0, 14]], Dtype::F16);
    assert_eq!(complaint(&case.out), None);
    let mut files = files_below(&case.out);
    files.extend(files_below(&case.corpus));
    files.retain(|path| !path.ends_with("tokenizer/tokenizer.json"));
    assert_eq!(files.len(), 1 + (1 + 9) + 1 + 4);
    for (f, path) in files.iter().enumerate() {
        let whole = std::fs::read(path).unwrap();
        let is_array = path.extension().is_some_and(|e| e == "npy");
        // Every byte of headers and documents, a sample of the arrays' bodies; some bit of it.
        let bytes = (0..whole.len()).filter(|at| !is_array || *at < 128 || at % 41 == f % 41);
        for at in bytes {
            let bit = mix((f << 32 | at) as u64) % 8;
            damage(path, |bytes| bytes[at] ^= 1 << bit);
            let found = complaint(&case.out);
            assert!(found.is_some(), "{}: byte {at}, bit {bit}", path.display());
            std::fs::write(path, &whole).unwrap();
        }
    }
    assert_eq!(complaint(&case.out), None);
}

#[test]
fn damage_is_named_moved_aside_and_made_again() {
    let case = scored(SHARDS, Dtype::F16);
    let before: Vec<_> = read_all(&case.out);
    let files = files_below(&case.out);
    let arrays: Vec<_> = files
        .iter()
        .filter(|path| path.to_string_lossy().contains("shard-000001"))
        .collect();
    type Change = fn(&Path);
    let changes: [Change; 3] = [
        |path| damage(path, |bytes| bytes[70] ^= 1),
        |path| damage(path, |bytes| bytes.truncate(90)),
        |path| std::fs::remove_file(path).unwrap(),
    ];
    for path in arrays {
        for change in changes {
            change(path);
            let is_manifest = path.extension().is_some_and(|e| e == "json");
            let words = complaint(&case.out).unwrap();
            if is_manifest && !path.exists() {
                assert!(words.contains("missing    shard-000001"), "{words}");
            } else {
                let place = path.display().to_string();
                assert!(
                    words.contains("damaged    shard-000001: ") && words.contains(&place),
                    "{words}"
                );
            }
            let mut settings = settings(&case.out);
            settings.discard_damaged = true;
            assert_eq!(run(&settings).unwrap().status, Status::Unfinished);
            assert_eq!(score_all(&case.corpus, &case.out, Dtype::F16), 1);
            std::fs::remove_dir_all(case.out.join("discarded")).unwrap_or_default();
            assert_eq!(complaint(&case.out), None);
            assert!(read_all(&case.out) == before, "repaired to the same bytes");
        }
    }
}

fn read_all(out: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let files = files_below(out).into_iter();
    files
        .map(|path| (path.clone(), std::fs::read(path).unwrap()))
        .collect()
}

#[test]
fn score_says_how_to_get_past_a_damaged_manifest() {
    let case = scored(SHARDS, Dtype::F16);
    damage(&case.out.join("shard-000000.manifest.json"), |bytes| {
        bytes[40] ^= 1
    });
    let set = ScoredSet::open(&case.out).unwrap();
    let words = format!("{:#}", set.open_shards().unwrap_err());
    assert!(
        words.contains("--discard-damaged") && words.contains("shard-000000.manifest.json"),
        "{words}"
    );
}

#[test]
fn a_lost_job_file_is_written_again_by_the_same_command() {
    let case = scored(SHARDS, Dtype::F16);
    let before = read_all(&case.out);
    std::fs::remove_file(case.out.join("job.json")).unwrap();
    assert!(
        complaint(&case.out)
            .unwrap()
            .contains("expected a scored set")
    );
    assert_eq!(score_all(&case.corpus, &case.out, Dtype::F16), 0);
    assert!(read_all(&case.out) == before);
}

#[test]
fn leftovers_are_named_and_cleaned_only_where_a_manifest_stands() {
    let case = scored(SHARDS, Dtype::F16);
    let before = read_all(&case.out);
    let put = |name: &str| {
        let path = case.out.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, b"x").unwrap();
    };
    put("shard-000000/0123456789abcdef/ids.npy");
    put("shard-000000/.ids.npy.1-2-3.tmp");
    put(".shard-000000.manifest.json.1-2-3.tmp");
    put(".job.json.1-2-3.tmp");
    put("log/worker.jsonl");
    put("notes.txt");
    std::fs::create_dir(case.out.join("shard-000000/empty")).unwrap();
    std::fs::remove_file(case.out.join("shard-000001.manifest.json")).unwrap();
    let mut settings = settings(&case.out);
    let outcome = run(&settings).unwrap();
    assert_eq!(outcome.json["leftovers"].as_array().unwrap().len(), 6 + 9);
    assert!(outcome.text.contains("leftover"));
    settings.clean = true;
    run(&settings).unwrap();
    let left = files_below(&case.out);
    assert!(
        left.contains(&case.out.join("notes.txt")),
        "what is not ours stays"
    );
    assert!(left.contains(&case.out.join("log/worker.jsonl")));
    let in_first = |p: &&PathBuf| p.to_string_lossy().contains("shard-000000");
    assert_eq!(left.iter().filter(in_first).count(), 10);
    assert!(!case.out.join("shard-000000/empty").exists());
    let in_second = |p: &&PathBuf| p.to_string_lossy().contains("shard-000001");
    assert_eq!(
        left.iter().filter(in_second).count(),
        9,
        "an open shard is left alone"
    );
    assert_eq!(score_all(&case.corpus, &case.out, Dtype::F16), 1);
    for name in ["notes.txt", "log/worker.jsonl"] {
        std::fs::remove_file(case.out.join(name)).unwrap();
    }
    assert!(read_all(&case.out) == before);
}

#[test]
fn another_teacher_or_corpus_is_a_fault() {
    let case = scored(SHARDS, Dtype::F16);
    let mut with_teacher = settings(&case.out);
    with_teacher.teacher = Some("teacher".into());
    assert_eq!(run(&with_teacher).unwrap().status, Status::Done);
    let other = verify::verify(&with_teacher, &|_| Ok("other".into()), &Interrupt::new()).unwrap();
    assert_eq!(other.status, Status::Unfinished);
    assert!(other.text.contains("it is another teacher"));
    let elsewhere = tempfile::tempdir().unwrap();
    let mut with_corpus = settings(&case.out);
    with_corpus.corpus = Some(make_corpus(elsewhere.path(), &[&[40, 1, 0, 33], &[25, 61]]));
    let other = run(&with_corpus).unwrap();
    assert!(
        other.text.contains("it is another corpus"),
        "{}",
        other.text
    );
    std::fs::rename(&case.corpus, elsewhere.path().join("moved")).unwrap();
    let words = format!("{:#}", run(&settings(&case.out)).unwrap_err());
    assert!(words.contains("give --corpus"), "{words}");
    let mut moved = settings(&case.out);
    moved.corpus = Some(elsewhere.path().join("moved"));
    assert_eq!(run(&moved).unwrap().status, Status::Done);
}

#[test]
fn rows_of_the_neighbouring_position_are_found_misaligned() {
    let folder = tempfile::tempdir().unwrap();
    let corpus = CorpusReader::open(&make_corpus(folder.path(), MANY)).unwrap();
    let mut products = products(Dtype::F16);
    products.extra.clear();
    let job = job(&corpus, &products, None);
    let out = folder.path().join("out");
    let set = ScoredSet::open_or_create(&out, &job).unwrap();
    for planned in &job.plan {
        let files = corpus
            .shard(corpus.shard_index(&planned.corpus_shard).unwrap())
            .unwrap();
        let view = files.view().unwrap();
        // The scores of a teacher that is one token late: made for the corpus shifted by one.
        let mut late = view.tokens().to_vec();
        late.rotate_right(1);
        let shifted =
            kdscore::corpus::CorpusShard::new(&late, view.offsets(), view.loss_mask()).unwrap();
        let mut arrays = score(&shifted, planned, &products);
        arrays[0] = score(&view, planned, &products)[0].clone();
        set.commit(planned, &files, arrays, &provenance()).unwrap();
    }
    let outcome = run(&settings(&out)).unwrap();
    assert_eq!(outcome.status, Status::Unfinished);
    let last = outcome.text.lines().last().unwrap();
    assert!(
        last.starts_with("misaligned") && last.contains("-1 from their target"),
        "{last}"
    );
}
