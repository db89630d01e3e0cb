//! What attention's kernels are told: which of them serves a shape, and the tiles of a batch.

use std::collections::HashMap;
use std::sync::Mutex;

use super::arena::Room;
use super::driver::{Argument, count};
use super::tensor::Kind;
use crate::backend::{AttentionShape, Mask, Segments};

/// As in attention.cu: numbers between the rows of a shared matrix, over its width.
const SKEW: usize = 8;
/// As in attention_f32.cu: packed rows of a tile, and keys of a block.
const F32_ROWS: usize = 16;
const F32_KEYS: usize = 32;
/// Widest heads of any kernel.
pub const HEAD_DIM_MAX: usize = 256;
/// What attention_f32 takes for the widest.
pub const F32_SHARED_BYTES_MAX: u32 =
    4 * (F32_ROWS * HEAD_DIM_MAX + F32_KEYS * (HEAD_DIM_MAX + 1) + F32_KEYS * HEAD_DIM_MAX) as u32;

/// A kernel, by the widest keys and values it takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AttentionKernel {
    pub name: &'static str,
    pub head_dim: usize,
    pub value_dim: usize,
    /// Packed rows of a tile.
    pub rows: usize,
    /// Of a block.
    pub keys: usize,
}

const fn kernel(name: &'static str, dims: [usize; 2], rows: usize, keys: usize) -> AttentionKernel {
    AttentionKernel {
        name,
        head_dim: dims[0],
        value_dim: dims[1],
        rows,
        keys,
    }
}

/// Those of attention.cu, narrow to wide.
pub const KERNELS: [AttentionKernel; 6] = [
    kernel("attention_64", [64, 64], 128, 64),
    kernel("attention_80", [80, 80], 128, 64),
    kernel("attention_96", [96, 96], 128, 64),
    kernel("attention_128", [128, 128], 128, 48),
    kernel("attention_192_128", [192, 128], 128, 48),
    kernel("attention_256", [256, 256], 64, 64),
];

const F32_KERNEL: AttentionKernel = kernel("attention_f32", [HEAD_DIM_MAX; 2], F32_ROWS, F32_KEYS);

impl AttentionKernel {
    /// The kernel for a shape; `None` where heads are wider than any takes.
    pub fn of(kind: Kind, shape: &AttentionShape) -> Option<AttentionKernel> {
        let serves = |kernel: &&AttentionKernel| {
            kernel.head_dim >= shape.head_dim && kernel.value_dim >= shape.value_dim
        };
        let list: &[AttentionKernel] = match kind {
            Kind::Bf16 => &KERNELS,
            Kind::F32 => &[F32_KERNEL],
        };
        list.iter().find(serves).copied()
    }

    /// Of a bf16 kernel: what each of its launches takes.
    pub fn shared_bytes(&self) -> u32 {
        let queries_and_keys = (self.rows + self.keys) * (self.head_dim + SKEW);
        count((queries_and_keys + self.keys * (self.value_dim + SKEW)) * 2)
    }

    pub fn shared_bytes_for(&self, shape: &AttentionShape) -> u32 {
        if *self != F32_KERNEL {
            return self.shared_bytes();
        }
        let (d, dv) = (shape.head_dim, shape.value_dim);
        count(4 * (F32_ROWS * d + F32_KEYS * (d + 1) + F32_KEYS * dv))
    }
}

/// AttentionShape of attention.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DeviceShape {
    heads: i32,
    kv_heads: i32,
    head_dim: i32,
    value_dim: i32,
    scale: f32,
    cap: f32,
    mask: i32,
    mask_size: i32,
}
// SAFETY: eight numbers of four bytes, as in attention.cuh.
unsafe impl Argument for DeviceShape {}

impl From<&AttentionShape> for DeviceShape {
    fn from(shape: &AttentionShape) -> DeviceShape {
        // A window as long as any sequence hides nothing.
        let size = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
        let (mask, mask_size) = match shape.mask {
            Mask::Causal => (0, 0),
            Mask::Window(n) => (1, size(n)),
            Mask::Chunk(n) => (2, size(n)),
        };
        DeviceShape {
            heads: count(shape.heads),
            kv_heads: count(shape.kv_heads),
            head_dim: count(shape.head_dim),
            value_dim: count(shape.value_dim),
            scale: shape.scale,
            cap: shape.cap.unwrap_or(0.0),
            mask,
            mask_size,
        }
    }
}

/// AttentionData of attention.cu and attention_f32.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DeviceAttention {
    pub out: u64,
    pub q: u64,
    pub k: u64,
    pub v: u64,
    pub positions: u64,
    pub spans: u64,
    pub sinks: u64,
}
// SAFETY: seven pointers, as in the kernels.
unsafe impl Argument for DeviceAttention {}

/// AttentionTile of attention.cuh: first query, queries of the segment, first packed row, first
/// span.
pub type Tile = [i32; 4];
/// KeySpan of attention.cuh: end, shift.
pub type Span = [i32; 2];

/// Segments on the device, and the tiles that were cut of them.
#[derive(Debug)]
pub struct DeviceSegments {
    pub host: Segments,
    pub positions: Room,
    pub spans: Room,
    /// By heads that share a kv head, and rows of a tile.
    pub tiles: Mutex<HashMap<(usize, usize), (Room, usize)>>,
}

/// One span a segment: where its keys lie.
pub fn spans(segments: &Segments) -> Vec<Span> {
    let spans = segments.list.iter();
    spans
        .map(|segment| [count(segment.keys.len()), count(segment.keys.start)])
        .collect()
}

/// Tiles of `rows` packed rows, those with the most keys first; their order changes no bit.
pub fn tiles(segments: &Segments, group: usize, rows: usize) -> Vec<Tile> {
    let mut tiles = Vec::new();
    for (span, segment) in segments.list.iter().enumerate() {
        let queries = segment.queries.len();
        for first in (0..queries * group).step_by(rows) {
            let last = (first + rows).min(queries * group) - 1;
            let last_query = segment.queries.start + last / group;
            let tile: Tile = [segment.queries.start, queries, first, span].map(count);
            tiles.push((segments.query_positions[last_query], tile));
        }
    }
    tiles.sort_by_key(|(position, _)| std::cmp::Reverse(*position));
    tiles.into_iter().map(|(_, tile)| tile).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Segment;

    fn shape(head_dim: usize, value_dim: usize) -> AttentionShape {
        AttentionShape {
            heads: 4,
            kv_heads: 2,
            head_dim,
            value_dim,
            scale: 1.0,
            cap: None,
            mask: Mask::Causal,
        }
    }

    #[test]
    fn the_narrowest_kernel_that_fits_is_taken() {
        let name = |d, dv| AttentionKernel::of(Kind::Bf16, &shape(d, dv)).map(|k| k.name);
        assert_eq!(name(16, 16), Some("attention_64"));
        assert_eq!(name(72, 40), Some("attention_80"));
        assert_eq!(name(192, 128), Some("attention_192_128"));
        assert_eq!(name(256, 256), Some("attention_256"));
        assert_eq!(name(257, 64), None);
        let f32 = AttentionKernel::of(Kind::F32, &shape(128, 128)).unwrap();
        assert_eq!(
            f32.shared_bytes_for(&shape(128, 128)),
            4 * (2048 + 4128 + 4096)
        );
        assert!(AttentionKernel::of(Kind::F32, &shape(300, 300)).is_none());
    }

    /// The figures of the table in attention.cu.
    #[test]
    fn shared_memory_is_what_the_kernels_say() {
        let bytes: Vec<u32> = KERNELS.iter().map(AttentionKernel::shared_bytes).collect();
        assert_eq!(bytes, [36864, 45056, 53248, 60928, 83456, 101_376]);
    }

    #[test]
    fn tiles_cover_every_query_of_every_head_once() {
        let lengths = [1usize, 40, 3];
        let (mut start, mut list, mut positions) = (0, Vec::new(), Vec::new());
        for length in lengths {
            list.push(Segment {
                keys: start..start + length,
                queries: start..start + length,
            });
            positions.extend(0..length as u32);
            start += length;
        }
        let segments = Segments {
            list,
            query_positions: positions,
        };
        let (group, rows) = (3, 16);
        let tiles = tiles(&segments, group, rows);
        let mut seen = vec![0; start * group];
        let mut before = i32::MAX;
        for [query, queries, first, span] in &tiles {
            let left = (queries * group as i32 - first).min(rows as i32);
            let last = (first + left - 1) / group as i32;
            assert!(last <= before, "longest first");
            before = last;
            assert_eq!(segments.list[*span as usize].queries.start, *query as usize);
            (0..left).for_each(|row| seen[(query * group as i32 + first + row) as usize] += 1);
        }
        assert!(seen.iter().all(|&n| n == 1));
        assert_eq!(spans(&segments), [[1, 0], [40, 1], [3, 41]]);
    }
}
