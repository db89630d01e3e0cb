//! The store on a real disk, and what the program says about broken documents and arrays.

mod support;

use std::path::{Path, PathBuf};

use assert_cmd::Command;
use kdscore::canonical;
use kdscore::products::Dtype;
use kdscore::store::{CorpusReader, Created, FileParts, LocalDisk, ScoredSet, Store};
use serde_json::{Value, json};
use support::*;

fn put(disk: &LocalDisk, name: &str, bytes: &[u8]) {
    let (first, last) = bytes.split_at(bytes.len() / 2);
    let parts = [first, last];
    disk.put(&[FileParts {
        name,
        parts: &parts,
    }])
    .unwrap();
}

fn names(disk: &LocalDisk) -> Vec<String> {
    disk.list().unwrap().into_iter().map(|e| e.name).collect()
}

#[test]
fn a_local_disk_does_what_a_store_promises() {
    let folder = tempfile::tempdir().unwrap();
    let disk = LocalDisk::new(&folder.path().join("not/yet/there"));
    assert_eq!(names(&disk), [""; 0]);
    put(&disk, "a/b/one", b"first");
    put(&disk, "a/b/one", b"second");
    assert_eq!(&*disk.read("a/b/one").unwrap().unwrap(), b"second");
    assert!(disk.read("a/b/two").unwrap().is_none());
    assert!(disk.read("a/b/one/below").unwrap().is_none());
    assert_eq!(disk.read_range("a/b/one", 1..4).unwrap(), b"eco");
    assert!(disk.read_range("a/b/one", 1..9).is_err());
    assert_eq!(disk.create("two", b"2").unwrap(), Created::New);
    assert_eq!(disk.create("two", b"3").unwrap(), Created::WasThere);
    assert_eq!(&*disk.read("two").unwrap().unwrap(), b"2");
    put(&disk, "empty", b"");
    assert_eq!(&*disk.read("empty").unwrap().unwrap(), b"");
    assert_eq!(
        names(&disk),
        ["a/b/one", "empty", "two"],
        "no temporary file stays"
    );
    disk.append("log/x", b"1\n").unwrap();
    disk.append("log/x", b"2\n").unwrap();
    disk.move_aside("a", "aside/n/a").unwrap();
    assert_eq!(names(&disk), ["aside/n/a/b/one", "empty", "log/x", "two"]);
    disk.remove("aside/n/a/b/one").unwrap();
    disk.remove("aside/n/a/b/one").unwrap();
    assert_eq!(
        names(&disk),
        ["empty", "log/x", "two"],
        "empty folders go too"
    );
    std::fs::create_dir(folder.path().join("not/yet/there/hollow")).unwrap();
    assert_eq!(names(&disk), ["empty", "hollow/", "log/x", "two"]);
    disk.remove("hollow/").unwrap();
    assert_eq!(names(&disk), ["empty", "log/x", "two"]);
}

#[test]
fn names_that_lead_elsewhere_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let disk = LocalDisk::new(&folder.path().join("root"));
    for name in ["", "..", "../x", "a/../../x", "/etc/passwd"] {
        assert!(disk.read(name).is_err(), "{name:?}");
        assert!(disk.create(name, b"").is_err(), "{name:?}");
        assert!(disk.remove(name).is_err(), "{name:?}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn many_threads_create_one_name_once() {
    let folder = tempfile::tempdir().unwrap();
    let disk = LocalDisk::new(folder.path());
    let created: Vec<Created> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8u8)
            .map(|i| {
                scope.spawn({
                    let disk = &disk;
                    move || disk.create("one", &[i; 1000]).unwrap()
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(created.iter().filter(|c| **c == Created::New).count(), 1);
    let bytes = disk.read("one").unwrap().unwrap();
    assert!(bytes.len() == 1000 && bytes.iter().all(|b| *b == bytes[0]));
    assert_eq!(names(&disk), ["one"]);
}

/// A corpus and its scored set, to break.
struct Case {
    folder: tempfile::TempDir,
}

impl Case {
    fn new() -> Case {
        let folder = tempfile::tempdir().unwrap();
        let path = make_corpus(folder.path(), &[&[9, 0, 14], &[5]]);
        let corpus = CorpusReader::open(&path).unwrap();
        let products = products(Dtype::F16);
        let job = job(&corpus, &products, None);
        let set = ScoredSet::open_or_create(&folder.path().join("out"), &job).unwrap();
        score_open(&set, &corpus, &products).unwrap();
        Case { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Exit status and all that `verify` prints.
    fn verify(&self) -> (i32, String) {
        let mut command = Command::cargo_bin("kdscore").unwrap();
        let output = command
            .arg("verify")
            .arg(self.path("out"))
            .output()
            .unwrap();
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8(text).unwrap();
        (output.status.code().expect("no signal ended it"), text)
    }

    /// Breaks a file, checks what `verify` says, and mends it.
    fn expect(&self, name: &str, broken: &[u8], status: i32, words: &str) {
        let path = self.path(name);
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, broken).unwrap();
        let (found, text) = self.verify();
        assert!(found == status, "{name}: status {found}: {text}");
        let place = path.display().to_string();
        let lines: Vec<_> = text.lines().filter(|l| l.contains(words)).collect();
        assert!(!lines.is_empty(), "{name}: no {words:?} in {text}");
        assert!(text.contains(&place), "{name} is not named in {text}");
        assert!(!text.contains("panicked"), "{text}");
        std::fs::write(&path, whole).unwrap();
    }

    /// The document with a change to it, sealed anew.
    fn changed(&self, name: &str, change: impl FnOnce(&mut Value)) -> Vec<u8> {
        let bytes = std::fs::read(self.path(name)).unwrap();
        let mut document: Value = serde_json::from_slice(&bytes).unwrap();
        change(&mut document);
        canonical::seal(&document)
    }
}

#[test]
fn a_broken_job_or_corpus_file_ends_in_one_error() {
    let case = Case::new();
    assert_eq!(case.verify().0, 0);
    for name in ["out/job.json", "corpus/corpus.json"] {
        case.expect(name, b"", 2, "expected a JSON document");
        case.expect(
            name,
            b"{\"format_version\":1",
            2,
            "expected a JSON document",
        );
        case.expect(name, b"[1]", 2, "expected a JSON object");
        case.expect(name, &[0xff; 100], 2, "expected a JSON document");
        let nested = "[".repeat(100_000);
        case.expect(name, nested.as_bytes(), 2, "expected a JSON document");
        let version = case.changed(name, |d| d["format_version"] = json!(9));
        case.expect(name, &version, 2, "expected 1, found 9");
    }
    let job = |change: fn(&mut Value)| case.changed("out/job.json", change);
    let table: [(Vec<u8>, &str); 7] = [
        (
            job(|d| d["identity"]["k"] = json!(0)),
            "expected k, a number from 1",
        ),
        (
            job(|d| d["identity"]["vocab_scored"] = json!("many")),
            "expected vocab_scored",
        ),
        (
            job(|d| d["identity"]["products"]["logp"] = json!("float64")),
            "expected a dtype of logp",
        ),
        (
            job(|d| d["identity"]["products"]["x"] = json!("int32")),
            "expected known products",
        ),
        (
            job(|d| d["plan"][1]["id"] = json!("shard-000000")),
            "expected each shard once",
        ),
        (
            job(|d| d["plan"][0]["id"] = json!("../x")),
            "shard id: expected letters",
        ),
        (
            job(|d| d["plan"][0]["first_sequence"] = json!(7)),
            "expected first_sequence <= end_sequence",
        ),
    ];
    for (bytes, words) in &table {
        case.expect("out/job.json", bytes, 2, words);
    }
    let corpus = case.changed("corpus/corpus.json", |d| d["vocab_size"] = json!(0));
    case.expect(
        "corpus/corpus.json",
        &corpus,
        2,
        "vocab_size: expected 1 to",
    );
}

#[test]
fn a_broken_manifest_is_damage_of_its_shard() {
    let case = Case::new();
    let name = "out/shard-000001.manifest.json";
    case.expect(name, b"", 1, "damaged    shard-000001");
    case.expect(name, b"{}", 1, "the document is incomplete");
    let changed = |change: fn(&mut Value)| case.changed(name, change);
    let table: [(Vec<u8>, &str); 9] = [
        (
            changed(|d| d["format_version"] = json!(2)),
            "expected 1, found 2",
        ),
        (
            changed(|d| d["identity_sha256"] = json!("0")),
            "belongs to another job",
        ),
        (
            changed(|d| d["shard"]["end_sequence"] = json!(9)),
            "as job.json says",
        ),
        (changed(|d| d["rows"] = json!(u64::MAX)), "expected shape"),
        (changed(|d| d["rows"] = json!(-1)), "invalid value"),
        (
            changed(|d| d["products"][2]["path"] = json!("../../etc/passwd")),
            "expected a path like",
        ),
        (
            changed(|d| d["products"][2]["path"] = json!("shard-000001/../../x")),
            "expected a path like",
        ),
        (
            changed(|d| d["products"] = json!([])),
            "expected [\"targets\"",
        ),
        (
            changed(|d| d["sums"]["mean_tail"] = json!(0.5)),
            "expected mean_tail",
        ),
    ];
    for (bytes, words) in &table {
        case.expect(name, bytes, 1, words);
    }
    let first = std::fs::read(case.path("out/shard-000000.manifest.json")).unwrap();
    case.expect(name, &first, 1, "as job.json says, found shard-000000");
}

#[test]
fn a_broken_array_is_damage_of_its_shard() {
    let case = Case::new();
    let manifest = std::fs::read(case.path("out/shard-000000.manifest.json")).unwrap();
    let manifest: Value = serde_json::from_slice(&manifest).unwrap();
    let path = manifest["products"][2]["path"].as_str().unwrap();
    let name = format!("out/{path}");
    let whole = std::fs::read(case.path(&name)).unwrap();
    case.expect(&name, b"", 1, "expected");
    case.expect(&name, &whole[..whole.len() - 1], 1, "as its manifest says");
    let header = |shape: &str, descr: &str| {
        let text = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}");
        let mut bytes = whole.clone();
        let field = &mut bytes[10..127];
        field.fill(b' ');
        field[..text.len()].copy_from_slice(text.as_bytes());
        bytes
    };
    case.expect(
        &name,
        &header("(99999999999, 4)", "<f2"),
        1,
        "the file is cut or damaged",
    );
    case.expect(
        &name,
        &header("(18446744073709551615, 4)", "<f2"),
        1,
        "fits in memory",
    );
    case.expect(&name, &header("(4,)", "|O"), 1, "pickled objects");
    let elements = (whole.len() - 128) / 2;
    case.expect(
        &name,
        &header(&format!("({elements},)"), "<f2"),
        1,
        "as its manifest says",
    );
}

#[test]
fn a_broken_corpus_array_is_a_fault_that_scoring_does_not_cure() {
    let case = Case::new();
    for (array, words) in [
        ("tokens", "expected sha256"),
        ("offsets", "expected sha256"),
        ("loss_mask", "expected sha256"),
        ("source_rows", "expected sha256"),
    ] {
        let name = format!("corpus/shard-000000/{array}.npy");
        let mut bytes = std::fs::read(case.path(&name)).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 0x40;
        case.expect(&name, &bytes, 1, words);
        case.expect(&name, b"PK\x03\x04", 1, "expected");
    }
    let (_, text) = case.verify();
    assert!(text.contains("verified: 2 shards"), "{text}");
}

#[test]
fn paths_that_hold_nothing_are_said_so() {
    let folder = tempfile::tempdir().unwrap();
    let says = |args: &[&str]| {
        let mut command = Command::cargo_bin("kdscore").unwrap();
        let output = command
            .current_dir(folder.path())
            .args(args)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    for command in ["verify", "status"] {
        let words = says(&[command, "nowhere"]);
        assert!(
            words.contains("nowhere/job.json: expected a scored set"),
            "{words}"
        );
        assert_eq!(words.lines().count(), 1, "{words}");
    }
    assert!(!Path::new(&folder.path().join("nowhere")).exists());
}
