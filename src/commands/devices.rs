//! What computes: opened as the user asked for it, with what it holds and what it reaches.

use anyhow::{Context, Result, anyhow, bail, ensure};

use super::{machine::KernelFolder, text};
use crate::backend::cuda::{self, Bytes, Cuda, Driver, Kind};
use crate::config::{BF16_NEEDS_CUDA, ComputeDtype, DeviceChoice, ScoreSettings};
use crate::cost::RunShape;
use crate::gpu::Gpu;
use crate::model::{Decoder, Limits, Teacher, Vocabulary};
use crate::progress;

/// Token budgets tried on a CUDA device where none is asked for; the first that fits is taken.
const BUDGETS: [usize; 6] = [16_384, 8192, 4096, 2048, 1024, 512];
/// Rows of a logits slice there.
pub const HEAD_CHUNK: usize = 1024;
/// Share of a device's memory that is left to the driver and the libraries.
const LEFT_SHARE: usize = 50;
const LEFT_BYTES_MAX: usize = 512 << 20;

/// What computes.
#[derive(Debug)]
pub enum Devices {
    Cpu,
    /// One or more, without memory yet.
    Cuda(Vec<Cuda>),
}

impl Devices {
    /// # Errors
    /// A device that was asked for and isn't there, or lacks a driver or library; a dtype that it
    /// doesn't compute in.
    pub fn open(settings: &ScoreSettings) -> Result<Devices> {
        let driver = || Driver::start(settings.cuda_libs.clone());
        let numbers = match &settings.device {
            DeviceChoice::Cpu => return Ok(Devices::Cpu),
            DeviceChoice::Auto => match first_device(&driver) {
                Ok(()) => vec![0],
                Err(reason) if settings.dtype == Some(ComputeDtype::Bf16) => {
                    bail!("{BF16_NEEDS_CUDA} ({reason:#})")
                }
                Err(reason) => {
                    progress::note(&format!("device: the CPU; {reason:#}"));
                    return Ok(Devices::Cpu);
                }
            },
            DeviceChoice::All => {
                let driver = driver().context("device all")?;
                let (served, others): (Vec<_>, Vec<_>) = (0..driver.devices()?)
                    .map(|number| (number, driver.expect_served(number)))
                    .partition(|(_, state)| state.is_ok());
                for (number, state) in others {
                    let reason = state.err().map_or(String::new(), |e| format!("{e:#}"));
                    progress::note(&format!("note: cuda:{number} is left out: {reason}"));
                }
                ensure!(
                    !served.is_empty(),
                    "device all: expected a CUDA device that is served, found none"
                );
                served.into_iter().map(|(number, _)| number).collect()
            }
            DeviceChoice::Cuda(numbers) => numbers.clone(),
        };
        let kind = match settings.dtype {
            Some(ComputeDtype::F32) => Kind::F32,
            Some(ComputeDtype::Bf16) | None => Kind::Bf16,
        };
        let open = |number| driver()?.open(number, kind, &KernelFolder::open());
        let devices = numbers.iter().map(|&number| {
            open(number).map_err(|error| {
                anyhow!("device cuda:{number}: {error:#}; --device cpu computes without a GPU")
            })
        });
        let devices: Vec<Cuda> = devices.collect::<Result<_>>()?;
        for device in &devices {
            progress::note(&format!("device: {}", device.described()));
        }
        Ok(Devices::Cuda(devices))
    }

    /// As it stands in the identity.
    pub fn compute_dtype(&self) -> &'static str {
        match self {
            Devices::Cpu => Kind::F32.name(),
            Devices::Cuda(devices) => devices.first().map_or(Kind::F32, Cuda::kind).name(),
        }
    }
}

/// Whether there is a CUDA device; the error says why not.
fn first_device(driver: &dyn Fn() -> Result<Driver>) -> Result<()> {
    ensure!(Driver::is_there(), "no NVIDIA driver is here");
    let driver = driver()?;
    ensure!(driver.devices()? > 0, "there is no CUDA device here");
    driver.expect_served(0).context("cuda:0 is not served")
}

/// Limits that fit every one of `devices` with so many logits slices, and what each takes for them.
///
/// # Errors
/// A teacher that doesn't fit: bytes needed and present.
pub fn plan(
    (devices, slices): (&[Cuda], usize),
    teacher: &Teacher,
    shape: &RunShape,
    settings: &ScoreSettings,
    [longest, tokenizer]: [usize; 2],
) -> Result<(Limits, Bytes)> {
    ensure!(
        shape.products.k <= cuda::K_MAX,
        "k: expected at most {} on a CUDA device, found {}",
        cuda::K_MAX,
        shape.products.k
    );
    let widest = shape.description.layers.iter();
    let widest = widest.map(|layer| &layer.attention.shape);
    let widest = widest.map(|a| a.head_dim.max(a.value_dim)).max();
    ensure!(
        widest <= Some(cuda::HEAD_DIM_MAX),
        "{}: expected heads of at most {} numbers on a CUDA device, found {}; --device cpu scores it",
        settings.teacher.display(),
        cuda::HEAD_DIM_MAX,
        widest.unwrap_or(0)
    );
    let budgets = settings
        .token_budget
        .map_or(BUDGETS.to_vec(), |budget| vec![budget]);
    let mut free = usize::MAX;
    for device in devices {
        let (left, all) = device.memory()?;
        free = free.min(left.saturating_sub((all / LEFT_SHARE).min(LEFT_BYTES_MAX)));
    }
    let vocabulary = Vocabulary {
        scored: shape.vocab_scored,
        tokenizer,
    };
    let mut least = Bytes::default();
    for budget in budgets {
        let tokens = budget.max(longest);
        let limits = Limits {
            tokens,
            sequence: longest,
            head_chunk: settings.head_chunk.unwrap_or(HEAD_CHUNK).min(tokens),
            wave: 1,
        };
        let planner = devices[0].planner();
        let decoder = Decoder::new(&planner, teacher, limits, vocabulary)?;
        let mut bytes =
            planner.planned(tokens, shape.products.k, shape.batch_table_numbers(&limits));
        drop(decoder);
        bytes.buffers += (slices - 1) * slice_bytes(&limits, shape.vocab_scored);
        if bytes.total() <= free {
            return Ok((limits, bytes));
        }
        least = bytes;
    }
    let bytes = |n: usize| text::bytes(n as u64);
    bail!(
        "{}: the teacher doesn't fit the device: expected {} of device memory (weights {}, buffers {}, batches {}), found {} free; a smaller --token-budget or --head-chunk needs less",
        settings.teacher.display(),
        bytes(least.total()),
        bytes(least.weights),
        bytes(least.buffers),
        bytes(least.batch),
        bytes(free)
    )
}

/// Device memory of a logits slice, and of as many reduced rows as ids can be kept of it.
fn slice_bytes(limits: &Limits, vocab: usize) -> usize {
    const ROW_BYTES: usize = 8 * 1024 + 32;
    (limits.head_chunk + cuda::TILE) * (vocab * size_of::<f32>() + ROW_BYTES)
}

/// The devices with the memory that was planned, and their FLOP/s at best together.
///
/// # Errors
/// Less memory than there was when it was planned.
pub fn with_memory(devices: &[Cuda], planned: Option<Bytes>) -> Result<(Vec<Cuda>, f64)> {
    let bytes = planned.context("device memory is planned before it is taken")?;
    let peaks = devices.iter().map(cuda_peak);
    let peak = peaks.sum::<Result<f64>>()?;
    let devices = devices.iter().map(|device| {
        let taken = device.with_memory(bytes);
        taken.context("somebody else took memory meanwhile; a smaller --token-budget or --head-chunk needs less")
    });
    Ok((devices.collect::<Result<_>>()?, peak))
}

/// FLOP/s of a device at best: its maker's figure for bf16 where it is known, or else what its
/// products reach now.
fn cuda_peak(device: &Cuda) -> Result<f64> {
    let known = Gpu::find(device.model()).and_then(|gpu| gpu.bf16_tflops);
    match (device.kind(), known) {
        (Kind::Bf16, Some(tflops)) => Ok(tflops * 1e12),
        _ => device.peak_flops(),
    }
}
