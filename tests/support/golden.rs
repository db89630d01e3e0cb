//! Teachers scored through the real code and compared with what Hugging Face transformers says.
//!
//! A teacher is a checkpoint folder that may hold further configs beside config.json; each must
//! score the same. The goldens are corpus.json ({"sequences": [{"tokens", "mask"?}]}) and for each
//! teacher a folder with rows, targets, ids, logp, tail and actual_logp (.npy).

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use kdscore::backend::cpu::Cpu;
use kdscore::corpus::CorpusShard;
use kdscore::model::{Decoder, Limits, Teacher, Unknown, Vocabulary};
use kdscore::products::{Dtype, Product, ProductArray, ProductPlan};
use kdscore::score::{Proceed, ShardJob, score_shard};
use kdscore::store::NpyFile;
use serde_json::Value;

/// The files that may describe a teacher, as they lie beside its weights.
pub const CONFIGS: [&str; 3] = ["config.json", "config_v4.json", "config_min.json"];

/// What f32 may be off by (the reference is fp32 too), and when ids count as tied.
pub const MEAN_MAX: f64 = 5e-5;
pub const DELTA_MAX: f64 = 1e-3;
pub const TIE: f64 = 1e-3;

/// A corpus as arrays.
#[derive(Clone, Default)]
pub struct Sequences {
    pub tokens: Vec<i32>,
    pub offsets: Vec<i64>,
    pub mask: Vec<u8>,
}

impl Sequences {
    pub fn read(path: &Path) -> Result<Sequences> {
        let text = fs::read(path).with_context(|| path.display().to_string())?;
        let value: Value = serde_json::from_slice(&text)?;
        let list = value["sequences"].as_array().context("sequences")?;
        let mut out = Sequences {
            offsets: vec![0],
            ..Sequences::default()
        };
        for sequence in list {
            let numbers = |key: &str| -> Option<Vec<i64>> {
                let list = sequence[key].as_array()?;
                list.iter()
                    .map(|v| v.as_i64().or(v.as_bool().map(i64::from)))
                    .collect()
            };
            let tokens = numbers("tokens").context("tokens")?;
            let mask = numbers("mask").unwrap_or_else(|| vec![1; tokens.len()]);
            out.push(
                tokens.iter().map(|&t| t as i32),
                mask.iter().map(|&m| m as u8),
            );
        }
        Ok(out)
    }

    pub fn push(&mut self, tokens: impl Iterator<Item = i32>, mask: impl Iterator<Item = u8>) {
        self.tokens.extend(tokens);
        self.mask.extend(mask);
        self.offsets.push(self.tokens.len() as i64);
    }

    pub fn count(&self) -> usize {
        self.offsets.len() - 1
    }

    pub fn longest(&self) -> usize {
        let lengths = self.offsets.windows(2).map(|w| (w[1] - w[0]) as usize);
        lengths.max().unwrap_or(0)
    }

    pub fn shard(&self) -> CorpusShard<'_> {
        CorpusShard::new(&self.tokens, &self.offsets, &self.mask).expect("a sound corpus")
    }
}

/// The rows of a corpus, as scored.
pub struct Scored {
    pub k: usize,
    pub targets: Vec<i32>,
    pub ids: Vec<i32>,
    pub logp: Vec<f32>,
    pub tail: Vec<f32>,
    pub target_logp: Vec<f32>,
    /// Probability on head rows beyond the tokenizer, summed over rows.
    pub padded_mass: f64,
    /// As stored, for comparisons of bits.
    pub arrays: Vec<ProductArray>,
}

/// How a pass is cut. None of it may change a bit.
#[derive(Clone, Copy)]
pub struct Cut {
    pub token_budget: usize,
    pub head_chunk: usize,
    pub wave: usize,
}

impl Default for Cut {
    fn default() -> Cut {
        Cut {
            token_budget: 450,
            head_chunk: 100,
            wave: 1,
        }
    }
}

/// Scores with a tokenizer that has a token for every row of the head.
pub fn score(teacher: &Teacher, corpus: &Sequences, k: usize, cut: Cut) -> Result<Scored> {
    let vocab = teacher.description.vocab;
    let vocabulary = Vocabulary {
        scored: vocab,
        tokenizer: vocab,
    };
    score_with(teacher, corpus, k, cut, vocabulary)
}

pub fn score_with(
    teacher: &Teacher,
    corpus: &Sequences,
    k: usize,
    cut: Cut,
    vocabulary: Vocabulary,
) -> Result<Scored> {
    let limits = Limits {
        tokens: cut.token_budget.max(corpus.longest()),
        sequence: corpus.longest().max(1),
        head_chunk: cut.head_chunk,
        wave: cut.wave,
    };
    let products = ProductPlan {
        k,
        logp_dtype: Dtype::F32,
        extra: vec![Product::TargetLogp],
    };
    let job = ShardJob {
        shard: corpus.shard(),
        sequences: 0..corpus.count(),
        token_budget: cut.token_budget,
        wave: cut.wave,
        products: &products,
    };
    let backend = Cpu;
    let mut decoder = Decoder::new(&backend, teacher, limits, vocabulary)?;
    let scored = score_shard(&mut decoder, &job, &mut |_| Proceed::Go)?.context("not stopped")?;
    let of = |product: Product| -> Vec<[u8; 4]> {
        let array = scored.arrays.iter().find(|a| a.product == product);
        array.map_or(Vec::new(), |a| a.bytes.as_chunks::<4>().0.to_vec())
    };
    let ints = |product| of(product).into_iter().map(i32::from_le_bytes).collect();
    let floats = |product| of(product).into_iter().map(f32::from_le_bytes).collect();
    Ok(Scored {
        k,
        targets: ints(Product::Targets),
        ids: ints(Product::Ids),
        logp: floats(Product::Logp),
        tail: floats(Product::Tail),
        target_logp: floats(Product::TargetLogp),
        padded_mass: scored.padded_mass,
        arrays: scored.arrays,
    })
}

/// What transformers says.
pub struct Golden {
    pub k: usize,
    pub targets: Vec<i32>,
    pub ids: Vec<i32>,
    pub logp: Vec<f32>,
    pub tail: Vec<f32>,
    pub target_logp: Vec<f32>,
}

impl Golden {
    pub fn read(folder: &Path) -> Result<Golden> {
        let open = |name: &str| NpyFile::open(&folder.join(format!("{name}.npy")));
        let ids = open("ids")?;
        Ok(Golden {
            k: ids.shape()[1],
            targets: open("targets")?.i32s()?.to_vec(),
            ids: ids.i32s()?.to_vec(),
            logp: open("logp")?.f32s()?.to_vec(),
            tail: open("tail")?.f32s()?.to_vec(),
            target_logp: open("actual_logp")?.f32s()?.to_vec(),
        })
    }
}

/// How far scores are from a golden.
#[derive(Clone, Copy, Debug, Default)]
pub struct Distance {
    pub rows: usize,
    pub mean: f64,
    pub max: f64,
    /// Ids that only one side lists though they clearly belong.
    pub ids_wrong: usize,
}

impl Distance {
    pub fn passes(&self) -> bool {
        self.mean < MEAN_MAX && self.max < DELTA_MAX && self.ids_wrong == 0
    }
}

/// Compares log-probs of the listed ids and of the targets, and the tail.
pub fn distance(golden: &Golden, scored: &Scored) -> Result<Distance> {
    ensure!(golden.targets == scored.targets, "targets differ");
    let (k, rows) = (golden.k, golden.targets.len());
    ensure!(k == scored.k, "another k");
    let mut out = Distance {
        rows,
        ..Distance::default()
    };
    let (mut sum, mut count) = (0.0, 0);
    let mut delta = |a: f32, b: f32| {
        let delta = (f64::from(a) - f64::from(b)).abs();
        sum += delta;
        count += 1;
        out.max = if delta.is_nan() {
            f64::INFINITY
        } else {
            out.max.max(delta)
        };
    };
    for row in 0..rows {
        let list = |ids: &[i32], logp: &[f32]| -> Vec<(i32, f32)> {
            let span = row * k..(row + 1) * k;
            ids[span.clone()]
                .iter()
                .copied()
                .zip(logp[span].iter().copied())
                .collect()
        };
        let ours = list(&scored.ids, &scored.logp);
        let theirs = list(&golden.ids, &golden.logp);
        let lowest = |list: &[(i32, f32)]| list.last().map_or(0.0, |l| f64::from(l.1));
        for (one, other) in [(&theirs, &ours), (&ours, &theirs)] {
            for &(id, logp) in one {
                match other.iter().find(|(i, _)| *i == id) {
                    Some(&(_, found)) => delta(logp, found),
                    None if f64::from(logp) > lowest(other) + 2.0 * TIE => out.ids_wrong += 1,
                    None => {}
                }
            }
        }
        delta(golden.target_logp[row], scored.target_logp[row]);
        delta(golden.tail[row], scored.tail[row]);
    }
    out.mean = sum / f64::from(count.max(1));
    Ok(out)
}

/// A copy of a teacher's folder with another config in place of config.json.
pub fn with_config(folder: &Path, config: &[u8]) -> Result<tempfile::TempDir> {
    let copy = tempfile::tempdir()?;
    for entry in fs::read_dir(folder)? {
        let path: PathBuf = entry?.path();
        let name = path.file_name().unwrap_or_default();
        if !name.to_string_lossy().starts_with("config") {
            std::os::unix::fs::symlink(path.canonicalize()?, copy.path().join(name))?;
        }
    }
    fs::write(copy.path().join("config.json"), config)?;
    Ok(copy)
}

/// The configs of a teacher that are there, by name.
pub fn configs(folder: &Path) -> Vec<&'static str> {
    let there = CONFIGS.into_iter();
    there.filter(|name| folder.join(name).is_file()).collect()
}

/// Scores a teacher under one of its configs and compares.
pub fn check(
    folder: &Path,
    config: &[u8],
    corpus: &Sequences,
    golden: &Golden,
) -> Result<Distance> {
    let copy = with_config(folder, config)?;
    let teacher = Teacher::open(copy.path(), Unknown::Refuse)?;
    distance(golden, &score(&teacher, corpus, golden.k, Cut::default())?)
}
