//! A wrong config or tensor is an error that names it, or takes the default that transformers
//! takes, or changes nothing. It never gives other numbers.

use std::collections::BTreeSet;
use std::path::Path;

use kdscore::model::{Teacher, Unknown};
use serde_json::{Map, Value, json};

use super::golden::{Cut, Scored, Sequences, configs, distance, score, with_config};
use super::teachers::{Fixture, all, corpus};

/// What became of a changed teacher.
enum Outcome {
    Refused(String),
    /// Logits that are not finite, which no run gets past.
    Overflow,
    /// The golden's numbers.
    Same,
    Other(Scored),
}

fn outcome(folder: &Path, fixture: &Fixture, corpus: &Sequences) -> Outcome {
    let teacher = match Teacher::open(folder, Unknown::Refuse) {
        Ok(teacher) => teacher,
        Err(error) => return Outcome::Refused(format!("{error:#}")),
    };
    if teacher.description.vocab < fixture.golden.k {
        return Outcome::Refused("vocab_size".to_owned());
    }
    // Numbers so far off that the logits overflow are refused too.
    let scored = match score(&teacher, corpus, fixture.golden.k, Cut::default()) {
        Ok(scored) => scored,
        Err(_) => return Outcome::Overflow,
    };
    match distance(&fixture.golden, &scored) {
        Ok(found) if found.passes() => Outcome::Same,
        _ => Outcome::Other(scored),
    }
}

/// Every key of a config, those of objects inside it too, as a path.
fn paths(value: &Map<String, Value>, before: &[String]) -> Vec<Vec<String>> {
    let mut out = Vec::new();
    for (key, value) in value {
        let mut path = before.to_vec();
        path.push(key.clone());
        if let (Value::Object(inner), true) = (value, key != "vision_config") {
            out.extend(paths(inner, &path));
        }
        out.push(path);
    }
    out
}

/// The object that holds the last key of `path`.
fn holder<'a>(config: &'a mut Value, path: &[String]) -> &'a mut Map<String, Value> {
    let mut at = config;
    for key in &path[..path.len() - 1] {
        at = &mut at[key];
    }
    at.as_object_mut().unwrap()
}

/// Values of another kind, and values of the right kind that no teacher can have.
fn wrong_values(value: &Value) -> Vec<Value> {
    match value {
        Value::Number(_) => vec![json!("7"), json!([]), json!(-1), json!(true)],
        Value::Bool(_) => vec![json!("yes"), json!(2)],
        Value::String(_) => vec![json!(3), json!("no-such-thing"), json!({})],
        Value::Array(_) => vec![
            json!("full"),
            json!([{}]),
            json!(["no-such-thing"]),
            json!(1),
        ],
        Value::Object(_) => vec![json!("object"), json!(1), json!([])],
        Value::Null => vec![json!("7"), json!({"a": 1})],
    }
}

#[test]
fn a_wrong_value_is_named_or_changes_nothing() {
    let corpus = corpus();
    let mut problems = Vec::new();
    for fixture in all() {
        let mut seen = BTreeSet::new();
        for file in configs(&fixture.folder) {
            let good = fixture.json(file);
            // A key is read the same way whatever file it stands in.
            let paths = paths(good.as_object().unwrap(), &[]).into_iter();
            for path in paths
                .filter(|path| seen.insert(path.clone()))
                .collect::<Vec<_>>()
            {
                let key = path.last().unwrap().clone();
                let value = holder(&mut good.clone(), &path)[&key].clone();
                for wrong in wrong_values(&value) {
                    let mut config = good.clone();
                    holder(&mut config, &path).insert(key.clone(), wrong.clone());
                    let text = config.to_string();
                    let folder = with_config(&fixture.folder, text.as_bytes()).unwrap();
                    let at = || format!("{} {file} {path:?} = {wrong}", fixture.name);
                    match outcome(folder.path(), &fixture, &corpus) {
                        Outcome::Same | Outcome::Overflow => {}
                        Outcome::Refused(error) if error.contains(&key) => {}
                        Outcome::Refused(error) => problems.push(format!("{}: {error}", at())),
                        Outcome::Other(_) => problems.push(format!("{}: other numbers", at())),
                    }
                }
            }
        }
    }
    assert!(
        problems.is_empty(),
        "{} problems:\n{}",
        problems.len(),
        problems.join("\n")
    );
}

/// Without a key a teacher takes its class' default; drops.json holds what transformers scores
/// then, where it isn't the golden: the log-probs of some targets.
#[test]
fn an_absent_key_takes_the_default_of_transformers() {
    let corpus = corpus();
    let (mut problems, mut changed) = (Vec::new(), Vec::new());
    for fixture in all() {
        let drops = match fixture.folder.join("drops.json").is_file() {
            true => fixture.json("drops.json"),
            false => json!({}),
        };
        for file in configs(&fixture.folder) {
            let good = fixture.json(file);
            for path in paths(good.as_object().unwrap(), &[]) {
                let mut config = good.clone();
                holder(&mut config, &path).remove(path.last().unwrap());
                let folder = with_config(&fixture.folder, config.to_string().as_bytes()).unwrap();
                let place = path.join(".");
                let scored = match outcome(folder.path(), &fixture, &corpus) {
                    Outcome::Other(scored) => scored,
                    Outcome::Refused(error) if !error.contains(path.last().unwrap()) => {
                        problems.push(format!("{} {file} without {place}: {error}", fixture.name));
                        continue;
                    }
                    _ => continue,
                };
                changed.push(format!("{} {file} {place}", fixture.name));
                let expected = &drops[file][&place];
                if let Some(problem) = differs(expected, &scored) {
                    problems.push(format!(
                        "{} {file} without {place}: {problem}",
                        fixture.name
                    ));
                }
            }
        }
    }
    if let Some(list) = std::env::var_os("KDSCORE_DROPS_LIST") {
        std::fs::write(list, changed.join("\n") + "\n").unwrap();
    }
    assert!(
        problems.is_empty(),
        "{} problems:\n{}",
        problems.len(),
        problems.join("\n")
    );
}

/// How far the targets' log-probs are from those of every tenth row that transformers gave.
fn differs(expected: &Value, scored: &Scored) -> Option<String> {
    let Some(expected) = expected.as_array() else {
        return Some(format!("numbers where transformers says {expected}"));
    };
    let ours = scored.target_logp.iter().step_by(10);
    let pairs = ours.zip(expected.iter().map(|v| v.as_f64().unwrap()));
    let worst = pairs
        .map(|(a, b)| (f64::from(*a) - b).abs())
        .fold(0.0, f64::max);
    (worst >= 1e-3).then(|| format!("off by {worst}"))
}

/// The tensors of a file: its header, and the bytes behind it.
fn split(file: &[u8]) -> (Map<String, Value>, &[u8]) {
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header = serde_json::from_slice(&file[8..8 + length]).unwrap();
    (header, &file[8 + length..])
}

fn joined(header: &Map<String, Value>, data: &[u8]) -> Vec<u8> {
    let header = Value::Object(header.clone()).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(data);
    file
}

/// A copy of a teacher in which one of its files is another.
fn with_file(fixture: &Fixture, name: &str, bytes: &[u8]) -> tempfile::TempDir {
    let folder = with_config(&fixture.folder, &fixture.bytes("config.json")).unwrap();
    std::fs::remove_file(folder.path().join(name)).unwrap();
    std::fs::write(folder.path().join(name), bytes).unwrap();
    folder
}

fn weight_files(fixture: &Fixture) -> Vec<String> {
    let entries = std::fs::read_dir(&fixture.folder).unwrap();
    let names = entries.map(|e| e.unwrap().file_name().into_string().unwrap());
    names.filter(|n| n.ends_with(".safetensors")).collect()
}

/// Shapes of as many numbers as a tensor has, that are not its own.
fn wrong_shape(shape: &Value) -> Value {
    let shape: Vec<u64> = shape
        .as_array()
        .unwrap()
        .iter()
        .map(|n| n.as_u64().unwrap())
        .collect();
    let mut turned = shape.clone();
    turned.reverse();
    match turned == shape {
        true => json!([1, shape.iter().product::<u64>()]),
        false => json!(turned),
    }
}

#[test]
fn a_wrong_or_absent_tensor_is_named_or_not_used() {
    let corpus = corpus();
    let mut problems = Vec::new();
    for fixture in all() {
        for file in weight_files(&fixture) {
            let bytes = fixture.bytes(&file);
            let (header, data) = split(&bytes);
            for name in header.keys().filter(|name| *name != "__metadata__") {
                let (mut dropped, mut turned) = (header.clone(), header.clone());
                let entry = dropped.remove(name).unwrap();
                // The bytes must belong to something.
                dropped.insert(format!("{name}.renamed"), entry);
                turned[name]["shape"] = wrong_shape(&header[name]["shape"]);
                for changed in [dropped, turned] {
                    let folder = with_file(&fixture, &file, &joined(&changed, data));
                    let at = || format!("{} {name}", fixture.name);
                    match outcome(folder.path(), &fixture, &corpus) {
                        Outcome::Same | Outcome::Overflow => {}
                        Outcome::Refused(error) if error.contains(name.as_str()) => {}
                        Outcome::Refused(error) => problems.push(format!("{}: {error}", at())),
                        Outcome::Other(_) => problems.push(format!("{}: other numbers", at())),
                    }
                }
            }
        }
    }
    assert!(
        problems.is_empty(),
        "{} problems:\n{}",
        problems.len(),
        problems.join("\n")
    );
}
