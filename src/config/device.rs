//! What a user may ask to compute on, and in.

use anyhow::{Result, anyhow, bail};

use super::Named;

/// What computes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum DeviceChoice {
    /// The first CUDA device, or else the CPU.
    #[default]
    Auto,
    Cpu,
    /// CUDA devices by number.
    Cuda(Vec<usize>),
    /// Every CUDA device.
    All,
}

impl DeviceChoice {
    pub(super) fn parse(text: &str) -> Result<DeviceChoice> {
        let cuda = || -> Option<Vec<usize>> {
            let parts = text.split(',');
            let numbers = parts.map(|part| part.trim().strip_prefix("cuda:")?.parse().ok());
            numbers.collect()
        };
        Ok(match text {
            "auto" => DeviceChoice::Auto,
            "cpu" => DeviceChoice::Cpu,
            "all" => DeviceChoice::All,
            "cuda" => DeviceChoice::Cuda(vec![0]),
            _ => {
                let numbers = cuda().ok_or_else(|| {
                    anyhow!(
                        "device: expected auto, cpu, all, cuda:N or cuda:N,cuda:M, found {text:?}"
                    )
                })?;
                let twice = (1..numbers.len()).find(|&i| numbers[..i].contains(&numbers[i]));
                if let Some(i) = twice {
                    bail!(
                        "device: expected each device once, found cuda:{} twice",
                        numbers[i]
                    );
                }
                DeviceChoice::Cuda(numbers)
            }
        })
    }
}

/// What numbers are computed in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ComputeDtype {
    F32,
    Bf16,
}

impl Named for ComputeDtype {
    const OPTION: &'static str = "dtype";
    const CHOICES: &'static [(&'static str, Self)] =
        &[("f32", ComputeDtype::F32), ("bf16", ComputeDtype::Bf16)];
}

/// What is said of bf16 where no CUDA device computes.
pub const BF16_NEEDS_CUDA: &str =
    "dtype: bf16 compute needs a CUDA device; on the CPU use auto or f32";

/// Both options; a dtype that no device asked for computes in is refused.
pub(super) fn resolve(
    device: Option<&str>,
    dtype: Option<&str>,
) -> Result<(DeviceChoice, Option<ComputeDtype>)> {
    let device = device.map(DeviceChoice::parse).transpose()?;
    let device = device.unwrap_or_default();
    let dtype = dtype.filter(|name| *name != "auto");
    let dtype = dtype.map(ComputeDtype::parse).transpose()?;
    if device == DeviceChoice::Cpu && dtype == Some(ComputeDtype::Bf16) {
        bail!("{BF16_NEEDS_CUDA}");
    }
    Ok((device, dtype))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_once_each() {
        let parsed = |text| DeviceChoice::parse(text).unwrap();
        assert_eq!(parsed("auto"), DeviceChoice::Auto);
        assert_eq!(parsed("cuda:1"), DeviceChoice::Cuda(vec![1]));
        assert_eq!(parsed("cuda:2, cuda:0"), DeviceChoice::Cuda(vec![2, 0]));
        for wrong in ["gpu", "cuda:", "cuda:x", "cuda:0,1", "cuda:0,cpu", ""] {
            let error = DeviceChoice::parse(wrong).unwrap_err().to_string();
            assert!(error.contains("cuda:N"), "{error}");
        }
        let twice = DeviceChoice::parse("cuda:1,cuda:1")
            .unwrap_err()
            .to_string();
        assert!(twice.contains("twice"), "{twice}");
    }
}
