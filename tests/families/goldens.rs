//! Scores against transformers', under each config file of a teacher.

use kdscore::model::{Teacher, Unknown, Vocabulary};
use kdscore::store::NpyFile;

use super::golden::{Cut, Golden, check, configs, distance, score_with};
use super::teachers::{Fixture, all, corpus, root};

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

/// A head may have more rows than the tokenizer has tokens. They are in the softmax, as they are in
/// transformers', and their probability is told; or they are left out.
#[test]
fn head_rows_beyond_the_tokenizer_count_unless_left_out() {
    const TOKENS: usize = 150;
    let (corpus, fixture) = (corpus(), Fixture::open("qwen2"));
    let teacher = Teacher::open(&fixture.folder, Unknown::Refuse).unwrap();
    let run = |scored| {
        let vocabulary = Vocabulary {
            scored,
            tokenizer: TOKENS,
        };
        score_with(&teacher, &corpus, 8, Cut::default(), vocabulary).unwrap()
    };
    let padded = NpyFile::open(&fixture.folder.join("golden/padded.npy")).unwrap();
    let padded: f64 = padded.f32s().unwrap().iter().map(|&p| f64::from(p)).sum();
    let all = run(teacher.description.vocab);
    assert!(distance(&fixture.golden, &all).unwrap().passes());
    assert!(all.ids.iter().any(|&id| id as usize >= TOKENS));
    assert!(padded > 1.0 && (all.padded_mass - padded).abs() < 1e-3 * padded);

    let limited = Golden::read(&fixture.folder.join("golden_limited")).unwrap();
    let some = run(TOKENS);
    let found = distance(&limited, &some).unwrap();
    assert!(found.passes(), "{found:?}");
    assert_eq!(some.padded_mass, 0.0);
    assert!(!distance(&limited, &all).unwrap().passes());
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
        assert!(
            covered.iter().any(|c| c == family),
            "no teacher of {family}"
        );
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
