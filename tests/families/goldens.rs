//! Scores against transformers', under each config file of a teacher.

use kdscore::model::{Teacher, Unknown};

use super::golden::{check, configs};
use super::teachers::{all, corpus, root};

#[test]
fn every_teacher_scores_as_transformers_does() {
    let corpus = corpus();
    let mut problems = Vec::new();
    for fixture in all() {
        for name in configs(&fixture.folder) {
            let config = fixture.bytes(name);
            match check(&fixture.folder, &config, &corpus, &fixture.golden) {
                Ok(distance) if distance.passes() => {}
                other => problems.push(format!("{} under {name}: {other:?}", fixture.name)),
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// The goldens are of every family that config.json may name.
#[test]
fn every_family_has_a_teacher() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(
        folder.path().join("config.json"),
        r#"{"model_type": "mamba"}"#,
    )
    .unwrap();
    let error = format!("{:#}", kdscore::model::describe(folder.path()).unwrap_err());
    let (_, list) = error.split_once("supported: ").unwrap();
    let mut covered: Vec<String> = all()
        .iter()
        .map(|f| {
            f.json("config.json")["model_type"]
                .as_str()
                .unwrap()
                .to_owned()
        })
        .collect();
    covered.sort();
    covered.dedup();
    for family in list.split(", ") {
        let twin = match family {
            // Wrappers whose text part and spelling another teacher has.
            "llama4" => "llama4_text",
            "qwen2_vl" => "qwen2_5_vl",
            own => own,
        };
        assert!(covered.iter().any(|c| c == twin), "no teacher of {family}");
    }
}

#[test]
fn tensors_beside_the_decoder_are_noted_and_not_used() {
    let teacher = Teacher::open(&root().join("gemma3"), Unknown::Refuse).unwrap();
    let notes = teacher.notes.join("\n");
    assert!(
        notes.contains("tensors not used: ") && notes.contains("vision_tower."),
        "{notes}"
    );
}
