//! A golden proves a feature only if it fails without it. Each feature is switched off in turn, by
//! a change of config.json that the teacher lists, or in the description itself.

use kdscore::backend::{Mask, RopePairs, RouterScore, Weighs};
use kdscore::model::{Description, Teacher, Unknown};

use super::golden::{Cut, distance, score, with_config};
use super::teachers::{Fixture, all, corpus};

#[test]
fn every_listed_config_change_fails_the_golden() {
    let corpus = corpus();
    let mut problems = Vec::new();
    for fixture in all() {
        let changes = fixture.json("teacher.json")["must_matter"].clone();
        for (label, change) in changes.as_object().unwrap() {
            let mut config = fixture.json("config.json");
            for (key, value) in change.as_object().unwrap() {
                config[key] = value.clone();
            }
            let folder = with_config(&fixture.folder, config.to_string().as_bytes()).unwrap();
            let teacher = match Teacher::open(folder.path(), Unknown::Refuse) {
                Ok(teacher) => teacher,
                // What the tensors contradict can't be scored at all.
                Err(error) if error.to_string().contains("  tensor ") => continue,
                Err(error) => panic!("{} without {label}: {error:#}", fixture.name),
            };
            let scored = score(&teacher, &corpus, fixture.golden.k, Cut::default()).unwrap();
            let found = distance(&fixture.golden, &scored).unwrap();
            if found.passes() {
                problems.push(format!("{} without {label}: {found:?}", fixture.name));
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// Takes a feature out of a description; says whether it was in.
type Knockout = (&'static str, fn(&mut Description) -> bool);

/// Replaces a value; says whether it was another one.
fn put<T: PartialEq>(place: &mut T, value: T) -> bool {
    let differs = *place != value;
    *place = value;
    differs
}

macro_rules! each_layer {
    ($layer:ident => $change:expr) => {
        |d| {
            let mut changed = false;
            for $layer in &mut d.layers {
                changed |= $change;
            }
            changed
        }
    };
}

macro_rules! each_mixture {
    ($experts:ident => $change:expr) => {
        |d| {
            let mut changed = false;
            for layer in &mut d.layers {
                if let Some($experts) = layer.mlp.experts_mut() {
                    changed |= $change;
                }
            }
            changed
        }
    };
}

const KNOCKOUTS: &[Knockout] = &[
    ("embedding scale", |d| put(&mut d.embedding_scale, 1.0)),
    ("learned positions", |d| put(&mut d.positions, None)),
    ("logit scale", |d| put(&mut d.head.scale, 1.0)),
    ("logit cap", |d| put(&mut d.head.cap, None)),
    ("head bias", |d| put(&mut d.head.bias, None)),
    ("final norm's offset", |d| {
        put(&mut d.final_norm.offset, 0.0)
    }),
    ("final norm's bias", |d| put(&mut d.final_norm.bias, None)),
    (
        "norm before attention",
        each_layer!(l => put(&mut l.attention_norm, None)),
    ),
    (
        "norm before the MLP",
        each_layer!(l => put(&mut l.mlp_norm, None)),
    ),
    (
        "norm behind attention",
        each_layer!(l => put(&mut l.attention_post_norm, None)),
    ),
    (
        "norm behind the MLP",
        each_layer!(l => put(&mut l.mlp_post_norm, None)),
    ),
    (
        "residual scale",
        each_layer!(l => put(&mut l.residual_scale, 1.0)),
    ),
    (
        "score cap",
        each_layer!(l => put(&mut l.attention.shape.cap, None)),
    ),
    (
        "window",
        each_layer!(l => put(&mut l.attention.shape.mask, Mask::Causal)),
    ),
    (
        "window's last key",
        each_layer!(l => match &mut l.attention.shape.mask {
            Mask::Window(w) | Mask::Chunk(w) => put(w, *w + 1),
            Mask::Causal => false,
        }),
    ),
    (
        "norm of queries",
        each_layer!(l => put(&mut l.attention.q_norm, None)),
    ),
    (
        "norm of keys",
        each_layer!(l => put(&mut l.attention.k_norm, None)),
    ),
    ("clip", each_layer!(l => put(&mut l.attention.clip, None))),
    ("sinks", each_layer!(l => put(&mut l.attention.sinks, None))),
    (
        "temperature",
        each_layer!(l => put(&mut l.attention.tempered, false)),
    ),
    ("rope", each_layer!(l => put(&mut l.attention.rope, None))),
    (
        "pairs of the rope",
        each_layer!(l => l.attention.rope.as_mut().is_some_and(|rope| {
            let other = match rope.shape.pairs {
                RopePairs::Halves => RopePairs::Neighbours,
                RopePairs::Neighbours => RopePairs::Halves,
            };
            put(&mut rope.shape.pairs, other)
        })),
    ),
    ("rope's attention factor", |d| {
        let ropes = d.ropes.iter_mut();
        let changed: Vec<bool> = ropes.map(|r| put(&mut r.attention_factor, 1.0)).collect();
        changed.contains(&true)
    }),
    (
        "output bias",
        each_layer!(l => put(&mut l.attention.o.bias, None)),
    ),
    (
        "renormalised weights",
        each_mixture!(e => {
            let flipped = !e.rule.router.renormalise;
            // Of one expert or of a softmax over the chosen it is 1 anyway.
            let counts = matches!(e.rule.router.score, RouterScore::Softmax | RouterScore::Sigmoid);
            counts && put(&mut e.rule.router.renormalise, flipped)
        }),
    ),
    (
        "expert groups",
        each_mixture!(e => put(&mut e.rule.router.groups, None)),
    ),
    (
        "router's scale",
        each_mixture!(e => put(&mut e.rule.router.scale, 1.0)),
    ),
    (
        "correction of the choice",
        each_mixture!(e => put(&mut e.correction, None)),
    ),
    (
        "scaled inputs",
        each_mixture!(e => put(&mut e.rule.router.weighs, Weighs::Outputs)),
    ),
    (
        "shared expert",
        each_mixture!(e => put(&mut e.shared, None)),
    ),
    (
        "shared expert's gate",
        each_mixture!(e => put(&mut e.shared_gate, None)),
    ),
    (
        "router bias",
        each_mixture!(e => put(&mut e.router.bias, None)),
    ),
];

#[test]
fn every_feature_of_a_description_counts() {
    let corpus = corpus();
    let mut problems = Vec::new();
    let mut seen = vec![false; KNOCKOUTS.len()];
    for fixture in all() {
        for (knockout, seen) in KNOCKOUTS.iter().zip(&mut seen) {
            let Some(line) = without(&fixture, &corpus, knockout) else {
                continue;
            };
            *seen = true;
            problems.extend(line);
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    for ((label, _), seen) in KNOCKOUTS.iter().zip(seen) {
        assert!(seen, "no teacher has: {label}");
    }
}

/// `None` where the teacher doesn't have the feature; else what is wrong, if the golden passes
/// without it.
fn without(
    fixture: &Fixture,
    corpus: &super::golden::Sequences,
    (label, knock_out): &Knockout,
) -> Option<Option<String>> {
    let mut teacher = Teacher::open(&fixture.folder, Unknown::Refuse).unwrap();
    if !knock_out(&mut teacher.description) {
        return None;
    }
    let scored = score(&teacher, corpus, fixture.golden.k, Cut::default()).unwrap();
    let found = distance(&fixture.golden, &scored).unwrap();
    let problem = found.passes();
    Some(problem.then(|| format!("{} without {label}: {found:?}", fixture.name)))
}
