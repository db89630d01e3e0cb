//! Rotary position embeddings: which angle each pair of a head turns by at each position.
//!
//! Frequencies and angles are formed in f32 as transformers forms them (modeling_rope_utils.py):
//! an angle is the f32 product of position and frequency, so that a scorer stays close to the
//! reference at long contexts.

use std::f64::consts::PI;

use anyhow::Result;

use super::config::Config;

/// Inverse frequencies of one kind of layer, and the factor on cos and sin.
#[derive(Clone, PartialEq, Debug)]
pub struct Rope {
    pub inverse_frequencies: Vec<f32>, // (head_dim / 2)
    pub attention_factor: f32,
}

/// cos and sin, each (positions, head_dim / 2).
#[derive(Clone, PartialEq, Debug)]
pub struct RopeTable {
    pub cos: Vec<f32>,
    pub sin: Vec<f32>,
}

impl Rope {
    /// Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`
    /// (transformers 4). `head_dim` is the width of what is rotated.
    ///
    /// # Errors
    /// An unknown rope type, or a key of the wrong kind or missing.
    pub fn read(config: &Config, head_dim: usize, theta: f64) -> Result<Rope> {
        let parameters = config.object("rope_parameters")?;
        let scaling = config.object("rope_scaling")?;
        if let (Some(_), Some(_)) = (&parameters, &scaling) {
            return Err(config.error(
                "rope_scaling",
                "expected either rope_parameters or rope_scaling, found both; remove one",
            ));
        }
        let theta = config.positive_or("rope_theta", theta)?;
        let Some(rope) = parameters.or(scaling) else {
            return Ok(Rope::plain(frequencies(theta, head_dim)));
        };
        let theta = rope.positive_or("rope_theta", theta)?;
        let context = config.usize("max_position_embeddings")?;
        let kind = match rope.str("rope_type")? {
            Some(kind) => kind,
            None => rope.str("type")?.unwrap_or("default"),
        };
        let plain = frequencies(theta, head_dim);
        match kind {
            "default" => Ok(Rope::plain(plain)),
            "linear" => {
                let factor = rope.required("factor", rope.positive("factor")?)?;
                Ok(Rope::plain(
                    plain.iter().map(|f| f / factor as f32).collect(),
                ))
            }
            "llama3" => llama3(&rope, plain, context).map(Rope::plain),
            "yarn" => yarn(&rope, theta, head_dim, context),
            other => Err(rope.error(
                "rope_type",
                &format!("expected default, linear, llama3 or yarn, found {other:?}, which is not supported"),
            )),
        }
    }

    fn plain(inverse_frequencies: Vec<f32>) -> Rope {
        Rope {
            inverse_frequencies,
            attention_factor: 1.0,
        }
    }

    /// The table for positions 0 to `positions` - 1.
    pub fn table(&self, positions: usize) -> RopeTable {
        let angles = (0..positions).flat_map(|position| {
            let position = position as f32;
            self.inverse_frequencies
                .iter()
                .map(move |frequency| f64::from(position * frequency))
        });
        let factor = self.attention_factor;
        let (cos, sin) = angles
            .map(|angle| (angle.cos() as f32 * factor, angle.sin() as f32 * factor))
            .unzip();
        RopeTable { cos, sin }
    }
}

/// theta^(-2i / d) for i < d/2.
fn frequencies(theta: f64, head_dim: usize) -> Vec<f32> {
    powers(theta, head_dim).iter().map(|p| 1.0 / p).collect()
}

/// theta^(2i / d) in f32, the exponent rounded to f32 first, as torch does.
fn powers(theta: f64, head_dim: usize) -> Vec<f32> {
    let exponents = (0..head_dim).step_by(2).map(|i| i as f32 / head_dim as f32);
    exponents
        .map(|e| f64::from(theta as f32).powf(f64::from(e)) as f32)
        .collect()
}

/// Llama 3.1's scaling: long wavelengths are divided by the factor, short ones kept, those
/// between blended.
fn llama3(rope: &Config, plain: Vec<f32>, context: Option<usize>) -> Result<Vec<f32>> {
    let number = |key: &str| rope.required(key, rope.positive(key)?);
    let factor = number("factor")? as f32;
    let low = number("low_freq_factor")?;
    let high = number("high_freq_factor")?;
    let original = original_context(rope, context)?;
    if low >= high {
        return Err(rope.error(
            "high_freq_factor",
            &format!("expected more than low_freq_factor {low}, found {high}"),
        ));
    }
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
fn yarn(rope: &Config, theta: f64, head_dim: usize, context: Option<usize>) -> Result<Rope> {
    let original = original_context(rope, context)?;
    let factor = match (rope.positive("factor")?, context) {
        (Some(factor), _) => factor,
        (None, Some(context)) => context as f64 / original,
        (None, None) => rope.required("factor", None)?,
    };
    let mscale = |scale: f64, m: f64| {
        if scale <= 1.0 {
            1.0
        } else {
            0.1 * m * scale.ln() + 1.0
        }
    };
    let given = rope.positive("attention_factor")?;
    let attention_factor = match (
        given,
        rope.positive("mscale")?,
        rope.positive("mscale_all_dim")?,
    ) {
        (Some(given), _, _) => given,
        (None, Some(m), Some(all)) => mscale(factor, m) / mscale(factor, all),
        _ => mscale(factor, 1.0),
    };
    let dim = head_dim as f64;
    let correction =
        |rotations: f64| dim * (original / (rotations * 2.0 * PI)).ln() / (2.0 * theta.ln());
    let mut low = correction(rope.positive_or("beta_fast", 32.0)?);
    let mut high = correction(rope.positive_or("beta_slow", 1.0)?);
    if rope.bool_or("truncate", true)? {
        (low, high) = (low.floor(), high.ceil());
    }
    let (low, mut high) = (low.max(0.0), high.min(dim - 1.0));
    if low == high {
        high += 0.001;
    }
    let pairs = powers(theta, head_dim).into_iter().enumerate();
    let blended = pairs.map(|(i, power)| {
        let ramp = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
        let keep = 1.0 - ramp;
        1.0 / (factor as f32 * power) * (1.0 - keep) + 1.0 / power * keep
    });
    Ok(Rope {
        inverse_frequencies: blended.collect(),
        attention_factor: attention_factor as f32,
    })
}

fn original_context(rope: &Config, context: Option<usize>) -> Result<f64> {
    let key = "original_max_position_embeddings";
    let original = rope.usize(key)?.or(context);
    Ok(rope.required(key, original)? as f64)
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
}
