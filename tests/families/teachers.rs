//! The teachers under tests/fixtures.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::golden::{Golden, Sequences};

pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/teachers")
}

/// One teacher's folder, and what transformers says about it.
pub struct Fixture {
    pub name: String,
    pub folder: PathBuf,
    pub golden: Golden,
}

impl Fixture {
    pub fn open(name: &str) -> Fixture {
        let folder = root().join(name);
        Fixture {
            name: name.to_owned(),
            golden: Golden::read(&folder.join("golden")).unwrap(),
            folder,
        }
    }

    pub fn json(&self, file: &str) -> Value {
        serde_json::from_slice(&self.bytes(file)).unwrap()
    }

    pub fn bytes(&self, file: &str) -> Vec<u8> {
        std::fs::read(self.folder.join(file)).unwrap()
    }
}

pub fn all() -> Vec<Fixture> {
    let folders = std::fs::read_dir(root()).unwrap();
    let mut names: Vec<String> = folders
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| root().join(name).is_dir())
        .collect();
    names.sort();
    assert!(names.len() > 40, "expected every teacher, found {names:?}");
    names.iter().map(|name| Fixture::open(name)).collect()
}

pub fn corpus() -> Sequences {
    Sequences::read(&root().join("corpus.json")).unwrap()
}
