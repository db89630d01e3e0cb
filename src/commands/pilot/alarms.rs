//! What looks wrong with a teacher or a corpus, judged from a pilot's figures.

use crate::store::shift::{Alignment, PAIRS_MIN, ShiftTest};

/// A teacher that spreads its probability this evenly, of ln V, has hardly learnt a thing.
const UNIFORM_SHARE: f64 = 0.8;
/// Sequences that begin with the token the tokenizer puts first.
const BOS_SHARE: f64 = 0.5;
/// Mass on head rows that are no tokens.
const PADDED_MASS: f64 = 1e-3;
/// Sequences of exactly the greatest length: so many, and such a share, look cut.
const CUT_COUNT: u64 = 5;
const CUT_SHARE: f64 = 0.01;

/// The figures alarms are judged by.
#[derive(Clone, Copy, Debug)]
pub struct Signs {
    pub rows: u64,
    pub mean_entropy: f64,
    /// Mean of the negative log-prob of the targets, in nats.
    pub mean_nll: f64,
    pub vocab: usize,
    /// Mean probability on head rows beyond the tokenizer.
    pub padded_mass: f64,
    pub sequences: u64,
    /// Sequences that begin with the token the tokenizer puts before every text; `None`: it puts
    /// none, or there is no tokenizer.
    pub with_bos: Option<u64>,
    pub longest: usize,
    /// Sequences of that length, and those among them that end in a stop token.
    pub at_longest: u64,
    /// `None`: no stop token is known.
    pub at_longest_stopped: Option<u64>,
    pub shift: ShiftTest,
}

/// Something that a person should look at before paying.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Alarm {
    pub name: &'static str,
    pub text: String,
}

/// All that the signs raise, worst first.
pub fn alarms(signs: &Signs) -> Vec<Alarm> {
    let judged = [
        near_uniform(signs),
        worse_than_chance(signs),
        shifted(signs),
        missing_bos(signs),
        padded(signs),
        truncated(signs),
    ];
    judged.into_iter().flatten().collect()
}

fn near_uniform(s: &Signs) -> Option<Alarm> {
    let most = (s.vocab as f64).ln();
    (s.rows > 0 && s.mean_entropy > UNIFORM_SHARE * most).then(|| Alarm {
        name: "near-uniform teacher",
        text: format!(
            "mean entropy {:.2} of at most {most:.2} nats: the teacher hardly prefers any token; are its weights trained, whole and of this architecture?",
            s.mean_entropy
        ),
    })
}

fn worse_than_chance(s: &Signs) -> Option<Alarm> {
    let chance = (s.vocab as f64).ln();
    (s.rows > 0 && s.mean_nll > chance).then(|| Alarm {
        name: "targets less likely than by chance",
        text: format!(
            "mean log-prob of the targets {:.2}, where guessing among all tokens gives {:.2}: were the tokens made with another tokenizer, or shuffled?",
            -s.mean_nll, -chance
        ),
    })
}

/// What could not be judged, and why.
pub fn not_judged(s: &Signs) -> Vec<String> {
    let mut unknown = Vec::new();
    if s.shift.alignment() == Alignment::CannotTell {
        unknown.push(format!(
            "alignment (the shift test takes {PAIRS_MIN} rows and a clear difference)"
        ));
    }
    if s.with_bos.is_none() {
        unknown.push("first tokens (the corpus has no tokenizer that puts one)".to_owned());
    }
    if s.at_longest_stopped.is_none() {
        unknown.push("sequence ends (no stop token is known)".to_owned());
    }
    unknown
}

fn shifted(s: &Signs) -> Option<Alarm> {
    let Alignment::Shifted(step) = s.shift.alignment() else {
        return None;
    };
    Some(Alarm {
        name: "shifted rows",
        text: format!(
            "rows fit the token {step:+} from their target better than the target: the tokens are shifted, or the teacher only repeats its input"
        ),
    })
}

fn missing_bos(s: &Signs) -> Option<Alarm> {
    let with = s.with_bos?;
    let share = with as f64 / s.sequences.max(1) as f64;
    (s.sequences > 0 && share < BOS_SHARE).then(|| Alarm {
        name: "missing first token",
        text: format!(
            "the tokenizer puts a first token before every text, but {:.0} % of the sequences begin with it: a teacher that was trained with it scores worse without",
            100.0 * share
        ),
    })
}

fn padded(s: &Signs) -> Option<Alarm> {
    (s.rows > 0 && s.padded_mass > PADDED_MASS).then(|| Alarm {
        name: "mass on padded vocabulary",
        text: format!(
            "{:.2} % of the probability lies on head rows beyond the tokenizer; --vocab-limit leaves them out of the softmax",
            100.0 * s.padded_mass
        ),
    })
}

fn truncated(s: &Signs) -> Option<Alarm> {
    let open = s.at_longest - s.at_longest_stopped?;
    let share = open as f64 / s.sequences.max(1) as f64;
    (open >= CUT_COUNT && share > CUT_SHARE).then(|| Alarm {
        name: "truncated-looking sequences",
        text: format!(
            "{open} sequences ({:.1} %) have exactly {} tokens, the most of any, and don't end in a stop token: they look cut",
            100.0 * share,
            s.longest
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::shift::Paired;

    fn sound() -> Signs {
        Signs {
            rows: 1000,
            mean_entropy: 2.0,
            mean_nll: 2.1,
            vocab: 1000,
            padded_mass: 1e-5,
            sequences: 100,
            with_bos: Some(100),
            longest: 512,
            at_longest: 1,
            at_longest_stopped: Some(0),
            shift: ShiftTest {
                before: Paired::around(1000, 1.0, 0.5),
                after: Paired::around(1000, 1.0, 0.5),
            },
        }
    }

    fn names(signs: Signs) -> Vec<&'static str> {
        alarms(&signs).iter().map(|alarm| alarm.name).collect()
    }

    #[test]
    fn a_sound_pilot_raises_none_and_each_sign_raises_its_own() {
        assert!(names(sound()).is_empty());
        let none = names(Signs {
            with_bos: None,
            ..sound()
        });
        assert!(none.is_empty(), "a tokenizer without a first token");
        let cases = [
            (
                "targets less likely than by chance",
                Signs {
                    mean_nll: 7.0,
                    ..sound()
                },
            ),
            (
                "shifted rows",
                Signs {
                    shift: ShiftTest {
                        before: Paired::around(1000, -1.0, 0.5),
                        after: Paired::around(1000, 1.0, 0.5),
                    },
                    ..sound()
                },
            ),
            (
                "near-uniform teacher",
                Signs {
                    mean_entropy: 6.5,
                    ..sound()
                },
            ),
            (
                "missing first token",
                Signs {
                    with_bos: Some(3),
                    ..sound()
                },
            ),
            (
                "mass on padded vocabulary",
                Signs {
                    padded_mass: 0.01,
                    ..sound()
                },
            ),
            (
                "truncated-looking sequences",
                Signs {
                    at_longest: 9,
                    ..sound()
                },
            ),
        ];
        for (name, signs) in cases {
            assert_eq!(names(signs), [name]);
        }
    }

    #[test]
    fn what_is_not_known_alarms_nobody_and_is_said() {
        let ended = Signs {
            at_longest: 9,
            at_longest_stopped: Some(9),
            ..sound()
        };
        assert!(names(ended).is_empty(), "they end as they should");
        assert!(not_judged(&sound()).is_empty());
        let blind = Signs {
            at_longest: 9,
            at_longest_stopped: None,
            with_bos: None,
            shift: ShiftTest::default(),
            ..sound()
        };
        assert!(names(blind).is_empty(), "nothing known, nothing alarming");
        assert_eq!(not_judged(&blind).len(), 3);
    }
}
