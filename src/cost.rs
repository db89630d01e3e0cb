//! Memory and work, by pure arithmetic on a description: nothing here looks at a machine.

pub mod bill;
pub mod device;
pub mod kernels;
pub mod spread;

use crate::model::{Description, Limits};
use crate::products::ProductPlan;

/// A head chunk no larger than this fills every core; beyond it a slice only takes memory.
const HEAD_CHUNK_MAX: usize = 5 * TILE;
/// A token budget beyond which products get no faster.
const TOKEN_BUDGET_MAX: usize = 42 * TILE;
/// Rows and tokens come in tiles of this on the CPU; a smaller limit would be padded up anyway.
const TILE: usize = 96;
/// Bytes of a logits slice that is chosen, not asked for.
const LOGITS_BYTES_MAX: usize = 128 << 20;

/// Bytes a run will hold, by what they are for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MemoryPlan {
    /// Mapped from the checkpoint's files; shared with the system's cache.
    pub weights: u64,
    pub activations: u64,
    pub logits: u64,
    /// The rows of one shard until it is committed.
    pub rows: u64,
    /// What the backend's ops need besides.
    pub scratch: u64,
}

impl MemoryPlan {
    /// Bytes that belong to the process alone.
    pub fn anonymous(&self) -> u64 {
        self.activations + self.logits + self.rows + self.scratch
    }

    pub fn total(&self) -> u64 {
        self.weights + self.anonymous()
    }
}

/// The shape of a run, as far as memory goes.
#[derive(Clone, Copy, Debug)]
pub struct RunShape<'a> {
    pub description: &'a Description,
    pub products: &'a ProductPlan,
    /// Head rows that take part in the softmax.
    pub vocab_scored: usize,
    /// Bytes of all tensors.
    pub weights: u64,
    /// Rows and sequences of the largest shard.
    pub rows_max: u64,
    pub sequences_max: u64,
    /// Bytes of scratch that the backend tells of.
    pub scratch: u64,
}

/// Row offsets, order, and where batches end, while a shard is packed and committed.
const SEQUENCE_BYTES: u64 = 48;

/// Pinned memory between the host and one device.
const DEVICE_STAGING: usize = 32 << 20;

const F32: usize = size_of::<f32>();

impl RunShape<'_> {
    pub fn memory(&self, limits: &Limits) -> MemoryPlan {
        let head_row = self.vocab_scored + 2 * self.description.hidden;
        MemoryPlan {
            weights: self.weights,
            activations: (limits.tokens * self.token_bytes(limits.wave)) as u64
                + self.table_bytes(limits),
            logits: (limits.head_chunk * head_row * F32) as u64,
            rows: self.rows_max * self.row_bytes() + self.sequences_max * SEQUENCE_BYTES,
            scratch: self.scratch,
        }
    }

    /// Host memory where `devices` other devices compute: batches, their rows, and what travels.
    pub fn host_memory(&self, limits: &Limits, devices: u64) -> MemoryPlan {
        // One wave computes, one is put in its place, and their rows lie in pinned memory.
        let each = 4 * limits.tokens * self.host_bytes(limits.wave) + DEVICE_STAGING;
        MemoryPlan {
            activations: 0,
            logits: 0,
            rows: self.memory(limits).rows * devices,
            scratch: each as u64 * devices,
            ..self.memory(limits)
        }
    }

    /// Token budget and head chunk that fit `bytes_free` with room to spare, for sequences up to
    /// `longest`; what the user asked for is kept.
    pub fn limits(
        &self,
        token_budget: Option<usize>,
        head_chunk: Option<usize>,
        longest: usize,
        bytes_free: u64,
    ) -> Limits {
        let share = usize::try_from(bytes_free / 4).unwrap_or(usize::MAX);
        let fits = |each: usize, most: usize| {
            let n = (share / each.max(1)).clamp(TILE, most);
            n - n % TILE
        };
        let budget = token_budget.unwrap_or_else(|| fits(self.token_bytes(1), TOKEN_BUDGET_MAX));
        let slice_max = (LOGITS_BYTES_MAX / (self.vocab_scored * F32)).clamp(TILE, HEAD_CHUNK_MAX);
        let chunk = head_chunk.unwrap_or_else(|| fits(self.vocab_scored * F32, slice_max));
        Limits {
            tokens: budget.max(longest),
            sequence: longest,
            head_chunk: chunk,
            wave: 1,
        }
    }

    /// Bytes a token takes in every buffer of a pass, with `wave` batches held.
    fn token_bytes(&self, wave: usize) -> usize {
        let d = self.description;
        let activations = (wave + 2) * d.hidden + d.widths().numbers_per_token();
        activations * F32 + self.host_bytes(wave)
    }

    /// Of those, the batch itself and the rows that come back, whose number the tokens bound.
    fn host_bytes(&self, wave: usize) -> usize {
        wave * (64 + self.products.k * 8)
    }

    fn row_bytes(&self) -> u64 {
        self.products.bytes_per_row() as u64 + 1
    }

    /// Numbers of the rope tables that a batch may have of its own.
    pub fn batch_table_numbers(&self, limits: &Limits) -> usize {
        let ropes = self.description.ropes.iter();
        let own = ropes
            .map(|r| (r.table_rows_max(limits) - limits.sequence) * r.inverse_frequencies.len());
        own.sum::<usize>() * 2
    }

    fn table_bytes(&self, limits: &Limits) -> u64 {
        let ropes = self.description.ropes.iter();
        let numbers = ropes.map(|r| r.table_rows_max(limits) * r.inverse_frequencies.len());
        let temperature = self.description.temperature.map_or(0, |_| limits.sequence);
        // The tables are made in host memory before they go where the backend computes.
        ((numbers.sum::<usize>() * 2 + temperature) * F32 * 2) as u64
    }
}

/// What every logit of every row would take in bf16.
pub fn full_logits_bytes(rows: u64, vocab: usize) -> u64 {
    rows * vocab as u64 * 2
}
