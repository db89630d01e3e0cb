//! Rotary position embeddings: which angle each pair of a head turns by at each position.
//!
//! Frequencies and angles are formed in f32 as transformers forms them (modeling_rope_utils.py):
//! an angle is the f32 product of position and frequency, so that a scorer stays close to the
//! reference at long contexts.

use std::f64::consts::PI;

use anyhow::{Result, ensure};

use super::config::Config;
use super::decoder::Limits;

/// A frequency is kept for every pair of a head.
const HEAD_DIM_MAX: usize = 1 << 16;

/// Inverse frequencies of one kind of layer, and the factor on cos and sin.
#[derive(Clone, PartialEq, Debug)]
pub struct Rope {
    pub inverse_frequencies: Vec<f32>, // (width / 2)
    pub attention_factor: f32,
    pub stretch: Stretch,
    /// Positions that its scaling reaches, where the config's context is what scaling starts
    /// from; else 0.
    pub reach: usize,
}

/// What changes for a sequence that is longer than the rope's original context. It is decided by
/// the sequence's own length, all of its tokens counted, whatever else is in the batch.
#[derive(Clone, PartialEq, Debug)]
pub enum Stretch {
    None,
    /// Other frequencies (LongRoPE, arXiv:2402.13753).
    Longer {
        original: usize,
        inverse_frequencies: Vec<f32>,
    },
    /// A base that grows with the length n ("dynamic NTK"), of d numbers rotated:
    /// theta · (factor · n / original - (factor - 1))^(d / (d - 2)).
    Dynamic {
        original: usize,
        theta: f64,
        factor: f64,
    },
}

/// cos and sin, each (positions, width / 2).
#[derive(Clone, PartialEq, Debug)]
pub struct RopeTable {
    pub cos: Vec<f32>,
    pub sin: Vec<f32>,
}

/// What a family brings to its rope; the config may say otherwise of the first two.
#[derive(Clone, Copy, Debug)]
pub struct RopeFamily {
    pub theta: f64,
    /// Share of a head that is rotated.
    pub partial: f64,
    pub head_dim: usize,
    /// `max_position_embeddings`.
    pub context: usize,
    /// Where the family keeps the context that scaling starts from outside the rope's own keys.
    pub original: Option<usize>,
}

impl RopeFamily {
    pub fn new(theta: f64, head_dim: usize, context: usize) -> RopeFamily {
        RopeFamily {
            theta,
            partial: 1.0,
            head_dim,
            context,
            original: None,
        }
    }
}

impl Rope {
    /// Reads `rope_parameters` (transformers 5) or `rope_theta`, `partial_rotary_factor` and
    /// `rope_scaling` (transformers 4).
    ///
    /// # Errors
    /// An unknown rope type, or a key of the wrong kind or missing.
    pub fn read(config: &Config, family: RopeFamily) -> Result<Rope> {
        let parameters = config.object("rope_parameters")?;
        let scaling = config.object("rope_scaling")?;
        ensure!(
            parameters.is_none() || scaling.is_none(),
            config.error(
                "rope_scaling",
                "expected either rope_parameters or rope_scaling, found both; remove one",
            )
        );
        let family = RopeFamily {
            theta: config.positive_or("rope_theta", family.theta)?,
            partial: config.positive_or("partial_rotary_factor", family.partial)?,
            ..family
        };
        let empty = config.empty_object("rope_parameters");
        Rope::from_object(&parameters.or(scaling).unwrap_or(empty), family)
    }

    /// Reads one rope's own object.
    ///
    /// # Errors
    /// As `read`.
    pub fn from_object(rope: &Config, family: RopeFamily) -> Result<Rope> {
        ensure!(
            family.head_dim <= HEAD_DIM_MAX,
            rope.error(
                "head_dim",
                &format!("expected at most {HEAD_DIM_MAX}, found {}", family.head_dim)
            )
        );
        let theta = rope.positive_or("rope_theta", family.theta)?;
        let partial = rope.positive_or("partial_rotary_factor", family.partial)?;
        let width = (family.head_dim as f64 * partial) as usize;
        ensure!(
            partial <= 1.0 && width >= 2 && width.is_multiple_of(2),
            rope.error(
                "partial_rotary_factor",
                &format!(
                    "expected a share of head_dim {} that is an even number, found {partial}",
                    family.head_dim
                )
            )
        );
        // How the axes of an image share the head: text is on all of them at once.
        rope.ignore(&["mrope_section", "mrope_interleaved"]);
        let older = rope.str("type")?;
        let kind = rope.str("rope_type")?.or(older).unwrap_or("default");
        let read = Reader {
            rope,
            family,
            theta,
            width,
        };
        let plain = frequencies(theta, width);
        match kind {
            "default" => Ok(Rope::plain(plain)),
            // Three axes that text moves along together: the plain rope (Qwen2-VL,
            // arXiv:2409.12191).
            "mrope" => Ok(Rope::plain(plain)),
            "linear" => {
                let factor = read.number("factor")?;
                let divided = plain.iter().map(|f| f / factor as f32).collect();
                Ok(Rope {
                    reach: grown(family.context, factor),
                    ..Rope::plain(divided)
                })
            }
            "llama3" => read.llama3(plain).map(Rope::plain),
            "yarn" => read.yarn(),
            "longrope" | "su" => read.longrope(),
            "dynamic" => read.dynamic(plain),
            other => Err(rope.error(
                "rope_type",
                &format!(
                    "expected default, linear, dynamic, llama3, yarn or longrope, found {other:?}, which is not supported"
                ),
            )),
        }
    }

    fn plain(inverse_frequencies: Vec<f32>) -> Rope {
        Rope {
            inverse_frequencies,
            attention_factor: 1.0,
            stretch: Stretch::None,
            reach: 0,
        }
    }

    /// Whether a sequence of `length` tokens turns by other angles than a short one.
    pub fn is_stretched(&self, length: usize) -> bool {
        match self.stretch {
            Stretch::None => false,
            Stretch::Longer { original, .. } | Stretch::Dynamic { original, .. } => {
                length > original
            }
        }
    }

    /// The table for positions 0 to `positions` - 1 of a short sequence, and where long ones all
    /// have the same other angles, of those too, one part after the other.
    pub fn table(&self, positions: usize) -> RopeTable {
        let mut table = self.turned(&self.inverse_frequencies, positions);
        if let Stretch::Longer {
            inverse_frequencies,
            ..
        } = &self.stretch
        {
            let longer = self.turned(inverse_frequencies, positions);
            table.cos.extend(longer.cos);
            table.sin.extend(longer.sin);
        }
        table
    }

    /// The table for the first `positions` of a sequence of `length` tokens.
    pub fn table_for(&self, length: usize, positions: usize) -> RopeTable {
        match &self.stretch {
            Stretch::Longer {
                inverse_frequencies,
                ..
            } if self.is_stretched(length) => self.turned(inverse_frequencies, positions),
            Stretch::Dynamic {
                original,
                theta,
                factor,
            } if self.is_stretched(length) => {
                let width = 2 * self.inverse_frequencies.len();
                let exponent = width as f64 / (width as f64 - 2.0);
                let growth = factor * length as f64 / *original as f64 - (factor - 1.0);
                let stretched = frequencies(theta * growth.powf(exponent), width);
                self.turned(&stretched, positions)
            }
            _ => self.turned(&self.inverse_frequencies, positions),
        }
    }

    fn turned(&self, inverse_frequencies: &[f32], positions: usize) -> RopeTable {
        let angles = (0..positions).flat_map(|position| {
            let position = position as f32;
            let frequencies = inverse_frequencies.iter();
            frequencies.map(move |frequency| f64::from(position * frequency))
        });
        let factor = self.attention_factor;
        let (cos, sin) = angles
            .map(|angle| (angle.cos() as f32 * factor, angle.sin() as f32 * factor))
            .unzip();
        RopeTable { cos, sin }
    }

    /// Rows of all tables of this rope that a pass within `limits` may hold.
    pub fn table_rows_max(&self, limits: &Limits) -> usize {
        match self.stretch {
            Stretch::None => limits.sequence,
            Stretch::Longer { .. } => 2 * limits.sequence,
            // Each batch of a wave may have a table of its own besides.
            Stretch::Dynamic { .. } => {
                limits.sequence + limits.wave * (limits.sequence + limits.tokens)
            }
        }
    }
}

/// `positions`, scaled by `factor`.
fn grown(positions: usize, factor: f64) -> usize {
    (positions as f64 * factor) as usize
}

/// theta^(-2i / d) for i < d/2.
fn frequencies(theta: f64, width: usize) -> Vec<f32> {
    powers(theta, width).iter().map(|p| 1.0 / p).collect()
}

/// theta^(2i / d) in f32, the exponent rounded to f32 first, as torch does.
fn powers(theta: f64, width: usize) -> Vec<f32> {
    let exponents = (0..width).step_by(2).map(|i| i as f32 / width as f32);
    exponents
        .map(|e| f64::from(theta as f32).powf(f64::from(e)) as f32)
        .collect()
}

/// YaRN's temperature for a context grown by `scale` (arXiv:2309.00071, equation 22, with
/// DeepSeek-V2's factor `m`).
pub fn yarn_mscale(scale: f64, m: f64) -> f64 {
    if scale <= 1.0 {
        1.0
    } else {
        0.1 * m * scale.ln() + 1.0
    }
}

/// The keys of a scaled rope.
struct Reader<'a> {
    rope: &'a Config,
    family: RopeFamily,
    theta: f64,
    width: usize,
}

impl Reader<'_> {
    fn number(&self, key: &str) -> Result<f64> {
        self.rope.required(key, self.rope.positive(key)?)
    }

    /// The context that scaling starts from.
    fn original(&self) -> Result<usize> {
        let own = self.rope.usize("original_max_position_embeddings")?;
        Ok(self.family.original.or(own).unwrap_or(self.family.context))
    }

    /// How much longer the context became, where the keys don't say.
    fn factor(&self, original: usize) -> Result<f64> {
        let given = self.rope.positive("factor")?;
        Ok(given.unwrap_or(self.family.context as f64 / original as f64))
    }

    /// Llama 3.1's scaling: long wavelengths are divided by the factor, short ones kept, those
    /// between blended.
    fn llama3(&self, plain: Vec<f32>) -> Result<Vec<f32>> {
        let factor = self.number("factor")? as f32;
        let low = self.number("low_freq_factor")?;
        let high = self.number("high_freq_factor")?;
        let original = self.original()? as f64;
        ensure!(
            low < high,
            self.rope.error(
                "high_freq_factor",
                &format!("expected more than low_freq_factor {low}, found {high}"),
            )
        );
        let scaled = plain.into_iter().map(|frequency| {
            let wavelength = (2.0 * PI) as f32 / frequency;
            if wavelength < (original / high) as f32 {
                frequency
            } else if wavelength > (original / low) as f32 {
                frequency / factor
            } else {
                let smooth = (original as f32 / wavelength - low as f32) / (high - low) as f32;
                (1.0 - smooth) * frequency / factor + smooth * frequency
            }
        });
        Ok(scaled.collect())
    }

    /// YaRN (Peng et al. 2023, arXiv:2309.00071), with the attention factor on cos and sin.
    fn yarn(&self) -> Result<Rope> {
        let (rope, theta) = (self.rope, self.theta);
        let original = self.original()?;
        let factor = self.number("factor")?;
        ensure!(
            theta != 1.0,
            rope.error("rope_theta", "expected a base other than 1 for yarn")
        );
        let given = rope.positive("attention_factor")?;
        let mscales = [rope.weight("mscale")?, rope.weight("mscale_all_dim")?];
        let attention_factor = match (given, mscales) {
            (Some(given), _) => given,
            (None, [Some(m), Some(all)]) => yarn_mscale(factor, m) / yarn_mscale(factor, all),
            _ => yarn_mscale(factor, 1.0),
        };
        let dim = self.width as f64;
        let correction = |rotations: f64| {
            dim * (original as f64 / (rotations * 2.0 * PI)).ln() / (2.0 * theta.ln())
        };
        let mut low = correction(rope.positive_or("beta_fast", 32.0)?);
        let mut high = correction(rope.positive_or("beta_slow", 1.0)?);
        if rope.bool_or("truncate", true)? {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, mut high) = (low.max(0.0), high.min(dim - 1.0));
        if low == high {
            high += 0.001;
        }
        let pairs = powers(theta, self.width).into_iter().enumerate();
        let blended = pairs.map(|(i, power)| {
            let ramp = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
            let keep = 1.0 - ramp;
            1.0 / (factor as f32 * power) * (1.0 - keep) + 1.0 / power * keep
        });
        Ok(Rope {
            inverse_frequencies: blended.collect(),
            attention_factor: attention_factor as f32,
            stretch: Stretch::None,
            reach: grown(original, factor),
        })
    }

    /// LongRoPE (Ding et al. 2024, arXiv:2402.13753) as Phi-3 uses it: each frequency has a
    /// factor, another one for sequences beyond the original context.
    fn longrope(&self) -> Result<Rope> {
        let original = self.original()?;
        ensure!(
            original > 1,
            self.rope.error(
                "original_max_position_embeddings",
                "expected more than 1 for longrope, found 1"
            )
        );
        let factor = self.factor(original)?;
        let attention_factor = match self.rope.positive("attention_factor")? {
            Some(given) => given,
            None if factor <= 1.0 => 1.0,
            None => (1.0 + factor.ln() / (original as f64).ln()).sqrt(),
        };
        let scaled = |key: &str| -> Result<Vec<f32>> {
            let factors = self.rope.required(key, self.rope.numbers(key)?)?;
            let expected = self.width / 2;
            ensure!(
                factors.len() == expected && factors.iter().all(|&f| f > 0.0),
                self.rope.error(
                    key,
                    &format!(
                        "expected {expected} numbers above 0, one for each pair, found {}",
                        factors.len()
                    )
                )
            );
            let powers = powers(self.theta, self.width).into_iter();
            let each = powers.zip(factors);
            Ok(each.map(|(p, f)| 1.0 / (f as f32 * p)).collect())
        };
        Ok(Rope {
            inverse_frequencies: scaled("short_factor")?,
            attention_factor: attention_factor as f32,
            stretch: Stretch::Longer {
                original,
                inverse_frequencies: scaled("long_factor")?,
            },
            reach: 0,
        })
    }

    fn dynamic(&self, plain: Vec<f32>) -> Result<Rope> {
        ensure!(
            self.width > 2,
            self.rope.error(
                "rope_type",
                "expected more than 2 rotated numbers for dynamic"
            )
        );
        let (original, factor) = (self.family.context, self.number("factor")?);
        Ok(Rope {
            stretch: Stretch::Dynamic {
                original,
                theta: self.theta,
                factor,
            },
            reach: grown(original, factor),
            ..Rope::plain(plain)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_pair_turns_by_one_radian_a_position() {
        let table = Rope::plain(frequencies(10_000.0, 8)).table(3);
        assert_eq!(table.cos.len(), 3 * 4);
        assert_eq!(table.cos[0], 1.0);
        assert_eq!(table.sin[4], 1f64.sin() as f32);
        assert_eq!(table.sin[8], 2f64.sin() as f32);
    }

    #[test]
    fn a_dynamic_rope_stretches_by_the_sequences_own_length() {
        let rope = Rope {
            stretch: Stretch::Dynamic {
                original: 16,
                theta: 10_000.0,
                factor: 2.0,
            },
            ..Rope::plain(frequencies(10_000.0, 8))
        };
        assert_eq!(rope.table_for(16, 5), rope.table(5));
        let base = 10_000.0 * (2.0f64 * 40.0 / 16.0 - 1.0).powf(8.0 / 6.0);
        let expected = Rope::plain(frequencies(base, 8)).table(5);
        assert_eq!(rope.table_for(40, 5), expected);
    }
}
