//! NVIDIA's devices: hand-written kernels, and cuBLASLt for large products.
//!
//! | file | what it holds |
//! |---|---|
//! | `driver` | the driver's functions behind handles that give back what they hold |
//! | `libraries` | where NVRTC and cuBLASLt are found |
//! | `compile` | kernels from source to image, kept between runs |
//! | `kernels`, `parameters` | one typed launch of every kernel, and the structs it takes |
//! | `arena` | all device memory, planned and taken once |
//! | `tensor`, `weights`, `attention`, `experts`, `rows` | what lies in it |
//! | `staging` | to and from the device through pinned memory |
//! | `gemm`, `products` | one algorithm for each shape of weight, chosen by rule and tried |
//! | `ops` | the backend's ops, by all of these |
//!
//! Numbers are bf16 with sums, residual stream and logits in fp32, or all fp32 (`Kind`). What is
//! computed runs on one stream in the order it is asked for; what goes up and what comes down have
//! a stream each, so that a batch arrives and the rows of another leave while a third computes. The
//! host goes on; `take_rows` waits for the rows of one batch while the next one computes, and only
//! `download` and `wait` wait for all. An op that fails leaves its error behind and all later ones
//! do nothing; whoever takes the rows gets it.
//!
//! Architecture invariant: nothing is allocated once the first batch has started, and a row's bits
//! depend on its own sequence alone: blocks by widths, products on whole tiles by one algorithm,
//! sums in one order.

mod arena;
pub(super) mod attention;
mod compile;
mod driver;
mod experts;
mod gemm;
mod kernels;
mod libraries;
mod ops;
mod parameters;
mod products;
mod rows;
mod staging;
mod tensor;
mod weights;

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use anyhow::{Context, Error, Result, bail, ensure};
use half::bf16;
use rayon::prelude::*;
use serde_json::{Value, json};

pub use self::arena::Bytes;
pub use self::attention::HEAD_DIM_MAX;
pub use self::compile::KernelCache;
pub use self::kernels::K_MAX;
pub use self::tensor::{Kind, TILE};

use self::arena::{Arena, Room, Use};
use self::compile::Images;
use self::driver::{Device, Stream, Version};
use self::gemm::Gemm;
use self::kernels::Kernels;
use self::libraries::Places;
use self::rows::{RowLayout, Seats};
use self::staging::Staging;
use super::HostWeight;

/// Bytes of a batch's own besides its rows, for each of its tokens, at most: token ids, positions,
/// places in rope tables, spans and tiles of as many sequences as tokens.
const BATCH_BYTES_PER_TOKEN: usize = 2048;
/// The same for a batch of any size, the least room of its own rope tables included.
const BATCH_BYTES: usize = 8 << 20;
/// Least room for rows: a rehearsal may keep more ids than the run does.
const ROWS_BYTES_LEAST: usize = 4096;

/// The driver of this machine, and where libraries are looked for.
#[derive(Debug)]
pub struct Driver {
    version: Version,
    places: Places,
}

impl Driver {
    /// Whether NVIDIA's driver is installed.
    pub fn is_there() -> bool {
        driver::is_there()
    }

    /// # Errors
    /// No driver, or none that is served: what to install.
    pub fn start(cuda_libs: Option<PathBuf>) -> Result<Driver> {
        if let Some(folder) = cuda_libs.as_deref().filter(|folder| !folder.is_dir()) {
            bail!(
                "--cuda-libs {}: expected a folder that holds NVRTC or cuBLASLt, found none",
                folder.display()
            );
        }
        Ok(Driver {
            version: driver::start()?,
            places: Places::new(cuda_libs),
        })
    }

    /// Devices there are.
    pub fn devices(&self) -> Result<usize> {
        driver::device_count()
    }

    /// # Errors
    /// No such device, or one that is too old.
    pub fn expect_served(&self, ordinal: usize) -> Result<()> {
        Device::open(ordinal, self.version)?.expect_served()
    }

    /// A device, ready to plan with: kernels compiled and loaded, cuBLASLt found. Its memory is
    /// taken by [`Cuda::with_memory`].
    ///
    /// # Errors
    /// No such device, a missing library, a kernel that doesn't compile.
    pub fn open(&self, ordinal: usize, kind: Kind, cache: &dyn KernelCache) -> Result<Cuda> {
        let there = self.devices()?;
        ensure!(
            ordinal < there,
            "expected a device below {there}, the number of CUDA devices here, found cuda:{ordinal}"
        );
        let device = Device::open(ordinal, self.version)?;
        device.expect_served()?;
        let images = Images::make(device.arch, self.version, &self.places, cache)?;
        let stream = Stream::new(&device)?;
        let gemm = Gemm::new(&self.places, self.version, &stream)?;
        let libraries = format!(
            "driver for CUDA {}, NVRTC {} ({}), cuBLASLt {} ({})",
            self.version,
            images.nvrtc,
            images.nvrtc_path.display(),
            gemm.version(),
            gemm.path().display()
        );
        let made = Made {
            libraries,
            kernels: Kernels::load(&device, &images)?,
            facts: json!({
                "backend": "cuda",
                "device": device.name,
                "compute_capability": format!("{}.{}", device.arch / 10, device.arch % 10),
                "multiprocessors": device.multiprocessors,
                "driver": device.driver.to_string(),
                "nvrtc": images.nvrtc.to_string(),
                "kernels": images.target.name(),
                "kernels_sha256": images.sha256,
                "cublaslt": gemm.version(),
            }),
            staging: Staging::new(&device)?,
            failure: Mutex::new(None),
            stream,
            gemm,
            device,
            kind,
        };
        Ok(Cuda {
            made: Arc::new(made),
            arena: Arena::dry(),
            workspace: None,
            seats: Seats::default(),
        })
    }
}

/// What stays the same however much memory is planned. Fields are dropped in order: the stream
/// waits for its work before anything it uses goes.
#[derive(Debug)]
struct Made {
    stream: Stream,
    staging: Staging,
    kernels: Kernels,
    gemm: Gemm,
    /// For provenance.
    facts: Value,
    /// Which libraries were found where.
    libraries: String,
    failure: Mutex<Option<Error>>,
    kind: Kind,
    device: Arc<Device>,
}

/// A device with its memory.
#[derive(Debug)]
pub struct Cuda {
    made: Arc<Made>,
    arena: Arc<Arena>,
    /// Of cuBLASLt; `None` while memory is planned.
    workspace: Option<Room>,
    seats: Seats,
}

impl Cuda {
    /// The same device without memory: whatever is asked for is counted and nothing is computed.
    pub fn planner(&self) -> Cuda {
        Cuda {
            made: self.made.clone(),
            arena: Arena::dry(),
            workspace: None,
            seats: Seats::default(),
        }
    }

    /// What the planner was asked for, and what batches of up to `tokens` tokens with rows of `k`
    /// ids need besides, `table_numbers` those of their own rope tables.
    pub fn planned(&self, tokens: usize, k: usize, table_numbers: usize) -> Bytes {
        let held = self.arena.held();
        let rows_max = tokens;
        let slot = RowLayout { rows_max, k }.bytes().max(ROWS_BYTES_LEAST);
        let batch = 2 * (tokens * BATCH_BYTES_PER_TOKEN + BATCH_BYTES + slot);
        Bytes {
            buffers: held.buffers + gemm::WORKSPACE_BYTES,
            batch: held.batch + batch + 2 * table_numbers * Kind::F32.size(),
            slot,
            ..held
        }
    }

    /// Bytes that are free, and bytes there are.
    pub fn memory(&self) -> Result<(usize, usize)> {
        self.made.device.memory()
    }

    /// The device with so much memory, taken now.
    ///
    /// # Errors
    /// Less is free.
    pub fn with_memory(&self, bytes: Bytes) -> Result<Cuda> {
        let (free, _) = self.memory()?;
        let arena = Arena::new(&self.made.device, bytes.total()).with_context(|| {
            format!(
                "cuda:{}: expected {} free bytes of device memory, of {free} that looked free",
                self.made.device.ordinal,
                bytes.total()
            )
        })?;
        let workspace = Some(arena.take(gemm::WORKSPACE_BYTES, Use::Buffers)?);
        let cuda = Cuda {
            made: self.made.clone(),
            arena,
            workspace,
            seats: Seats::default(),
        };
        if bytes.slot > 0 {
            cuda.make_seats(2, bytes.slot)?;
        }
        Ok(cuda)
    }

    fn name(&self) -> String {
        format!(
            "cuda:{} {}",
            self.made.device.ordinal, self.made.device.name
        )
    }

    /// The device's model.
    pub fn model(&self) -> &str {
        &self.made.device.name
    }

    /// What it computes in.
    pub fn kind(&self) -> Kind {
        self.made.kind
    }

    /// Device and libraries, for people.
    pub fn described(&self) -> String {
        format!("{}, {}", self.name(), self.made.libraries)
    }

    /// FLOP/s that large products reach, measured now on memory taken for it.
    ///
    /// # Errors
    /// A product that fails.
    pub fn peak_flops(&self) -> Result<f64> {
        products::peak_flops(self)
            .with_context(|| format!("{}: measuring what its products reach", self.name()))
    }

    /// Does what an op asks for, unless one before it failed or nothing is computed.
    fn run(&self, op: &str, work: impl FnOnce(&Stream) -> Result<()>) {
        let mut failure = self.made.failure.lock().expect("no thread panics with it");
        if failure.is_some() || self.arena.is_dry() {
            return;
        }
        if let Err(error) = work(&self.made.stream) {
            *failure = Some(error.context(format!("{}: {op}", self.name())));
        }
    }

    /// The first error since this was last asked.
    fn take_failure(&self) -> Result<()> {
        let mut failure = self.made.failure.lock().expect("no thread panics with it");
        match failure.take() {
            None => Ok(()),
            Some(error) => Err(error.context(
                "a device failed; what is committed stays, and the same command goes on behind it (--device says on which devices)",
            )),
        }
    }

    /// Room with these bytes in it.
    fn sent(&self, bytes: &[u8], what: Use) -> Result<Room> {
        let room = self.arena.take(bytes.len(), what)?;
        if !self.arena.is_dry() {
            let (stream, sizes) = (&self.made.stream, [bytes.len(), 1]);
            let fill = |piece: &mut [u8], from: usize| {
                piece.copy_from_slice(&bytes[from..from + piece.len()]);
            };
            self.made
                .staging
                .upload(stream, room.address(), sizes, fill)?;
        }
        Ok(room)
    }

    /// Puts other bytes where work that was asked for may still read or write.
    fn overwrite(&self, to: u64, bytes: &[u8]) -> Result<()> {
        self.settled()?;
        let fill = |piece: &mut [u8], from: usize| {
            piece.copy_from_slice(&bytes[from..from + piece.len()]);
        };
        let (stream, staging) = (&self.made.stream, &self.made.staging);
        staging.upload(stream, to, [bytes.len(), 1], fill)
    }

    fn read(&self, from: u64, bytes: usize) -> Result<Vec<u8>> {
        let mut out = vec![0; bytes];
        if !self.arena.is_dry() {
            self.settled()?;
            let staging = &self.made.staging;
            staging.download(&self.made.stream, from, &mut out)?;
        }
        Ok(out)
    }

    /// Waits until all that was computed is done.
    fn settled(&self) -> Result<()> {
        let point = self.arena.given();
        self.made.stream.wait()?;
        self.arena.settle(point);
        Ok(())
    }

    /// A matrix in `kind`, decoded on the way up.
    fn matrix(&self, host: &HostWeight, kind: Kind) -> Result<Room> {
        let (rows, width) = (host.rows(), host.width());
        let row_bytes = width * kind.size();
        let room = self.arena.take(rows * row_bytes, Use::Weights)?;
        if self.arena.is_dry() {
            return Ok(room);
        }
        let fill = |piece: &mut [u8], from: usize| {
            let first = from / row_bytes;
            let rows = piece.par_chunks_mut(row_bytes).enumerate();
            rows.for_each_with(vec![0f32; width], |values, (row, out)| {
                host.read(first + row, 0, values);
                encode(values, kind, out);
            });
        };
        let sizes = [rows * row_bytes, row_bytes.max(1)];
        let (stream, staging) = (&self.made.stream, &self.made.staging);
        staging.upload(stream, room.address(), sizes, fill)?;
        Ok(room)
    }
}

/// Numbers as the device keeps them.
fn encode(values: &[f32], kind: Kind, out: &mut [u8]) {
    match kind {
        Kind::F32 => {
            let (out, _) = out.as_chunks_mut::<4>();
            out.iter_mut()
                .zip(values)
                .for_each(|(o, v)| *o = v.to_le_bytes());
        }
        Kind::Bf16 => {
            let (out, _) = out.as_chunks_mut::<2>();
            let rounded = values.iter().map(|&v| bf16::from_f32(v).to_le_bytes());
            out.iter_mut().zip(rounded).for_each(|(o, v)| *o = v);
        }
    }
}

fn int_bytes(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn word_bytes(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}
