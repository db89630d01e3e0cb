//! Causal attention, one sequence and one head at a time, over blocks of keys with a running
//! maximum and sum (Milakov and Gimelshein 2018, arXiv:1805.02867), so that no (T, T) matrix
//! exists. Tiles of queries and blocks of keys are counted from the sequence's own start, so a
//! row's bits depend on its own sequence alone.

use std::cell::RefCell;
use std::ops::Range;

use rayon::prelude::*;

use super::{Activations, math};
use crate::backend::{AttentionShape, Segment, Segments, Tensor};

/// Queries computed together.
const QUERY_TILE: usize = 64;
/// Keys read together.
const KEY_BLOCK: usize = 128;

/// f32 scratch of one thread for heads with values of `value_dim`.
pub fn scratch_elements(value_dim: usize) -> usize {
    QUERY_TILE * (KEY_BLOCK + value_dim + 2)
}

#[derive(Default)]
struct Scratch {
    scores: Vec<f32>, // (QUERY_TILE, KEY_BLOCK)
    sum: Vec<f32>,    // (QUERY_TILE, value_dim), unnormalised output
    max: Vec<f32>,    // (QUERY_TILE)
    weight: Vec<f32>, // (QUERY_TILE)
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Where the threads write; each task owns its own queries and head.
struct OutPointer(*mut f32);
// SAFETY: tasks write disjoint parts, see `Job::store`.
unsafe impl Sync for OutPointer {}

struct Job<'a> {
    shape: &'a AttentionShape,
    positions: &'a [u32],     // (Q)
    q: &'a [f32],             // (Q, heads * head_dim)
    k: &'a [f32],             // (T, kv_heads * head_dim)
    v: &'a [f32],             // (T, kv_heads * value_dim)
    sinks: Option<&'a [f32]>, // (heads)
    out: OutPointer,          // (Q, heads * value_dim)
}

/// See `Backend::attention`.
pub fn attention(
    shape: &AttentionShape,
    segments: &Segments,
    sinks: Option<&[f32]>,
    [q, k, v]: [&Activations; 3],
    out: &mut Activations,
) {
    assert_eq!(q.width, shape.heads * shape.head_dim, "attention: q");
    assert_eq!(k.width, shape.kv_heads * shape.head_dim, "attention: k");
    assert_eq!(v.width, shape.kv_heads * shape.value_dim, "attention: v");
    assert_eq!(k.rows, v.rows, "attention: keys and values");
    assert_eq!(segments.query_positions.len(), q.rows, "attention: queries");
    assert!(
        sinks.is_none_or(|s| s.len() == shape.heads),
        "attention: sinks"
    );
    out.set_shape(q.rows, shape.heads * shape.value_dim);
    let job = Job {
        shape,
        positions: &segments.query_positions,
        q: q.data(),
        k: k.data(),
        v: v.data(),
        sinks,
        out: OutPointer(out.data_mut().as_mut_ptr()),
    };
    let tiles: Vec<(&Segment, Range<usize>)> = segments
        .list
        .iter()
        .flat_map(|segment| query_tiles(segment).map(move |tile| (segment, tile)))
        .collect();
    let tasks = tiles.len() * shape.heads;
    (0..tasks).into_par_iter().for_each(|task| {
        let (segment, tile) = &tiles[task / shape.heads];
        SCRATCH.with_borrow_mut(|scratch| {
            job.tile(segment, tile.clone(), task % shape.heads, scratch);
        });
    });
}

fn query_tiles(segment: &Segment) -> impl Iterator<Item = Range<usize>> {
    let queries = segment.queries.clone();
    queries
        .clone()
        .step_by(QUERY_TILE)
        .map(move |start| start..(start + QUERY_TILE).min(queries.end))
}

impl Job<'_> {
    fn tile(&self, segment: &Segment, queries: Range<usize>, head: usize, scratch: &mut Scratch) {
        let m = queries.len();
        scratch.scores.resize(QUERY_TILE * KEY_BLOCK, 0.0);
        scratch.sum.clear();
        scratch.sum.resize(m * self.shape.value_dim, 0.0);
        // A sink is a score that was seen before the first key.
        let sink = self.sinks.map(|sinks| sinks[head]);
        scratch.max.clear();
        scratch.max.resize(m, sink.unwrap_or(f32::NEG_INFINITY));
        scratch.weight.clear();
        scratch
            .weight
            .resize(m, if sink.is_some() { 1.0 } else { 0.0 });
        let last = self.positions[queries.end - 1] as usize;
        // Positions rise within a tile, and with them the first key a query sees.
        let first = self
            .shape
            .mask
            .first_key(self.positions[queries.start] as usize);
        let first = first - first % KEY_BLOCK;
        for block in (first..=last).step_by(KEY_BLOCK) {
            let keys = block..(block + KEY_BLOCK).min(last + 1);
            self.block(segment, queries.clone(), keys, head, scratch);
        }
        self.store(queries, head, scratch);
    }

    /// Takes the keys at positions `keys` of the segment into the running softmax.
    fn block(
        &self,
        segment: &Segment,
        queries: Range<usize>,
        keys: Range<usize>,
        head: usize,
        scratch: &mut Scratch,
    ) {
        let AttentionShape {
            head_dim: d,
            value_dim,
            mask,
            ..
        } = *self.shape;
        let (m, n) = (queries.len(), keys.len());
        let kv_head = head / (self.shape.heads / self.shape.kv_heads);
        let (q_width, k_width) = (self.shape.heads * d, self.shape.kv_heads * d);
        let v_width = self.shape.kv_heads * value_dim;
        let key = segment.keys.start + keys.start;
        let scores = &mut scratch.scores[..m * n];
        product(
            [m, n, d],
            (&self.q[queries.start * q_width + head * d..], q_width, 1),
            (&self.k[key * k_width + kv_head * d..], 1, k_width),
            (scores, n),
            0.0,
        );
        let positions = &self.positions[queries];
        pulp::Arch::new().dispatch(|| {
            for (i, row) in scores.chunks_exact_mut(n).enumerate() {
                let position = positions[i] as usize;
                let inside = |key: usize| key.saturating_sub(keys.start).min(n);
                let seen = inside(mask.first_key(position))..inside(position + 1);
                softmax_step(
                    row,
                    seen,
                    self.shape,
                    &mut scratch.max[i],
                    &mut scratch.weight[i],
                    &mut scratch.sum[i * value_dim..(i + 1) * value_dim],
                );
            }
        });
        product(
            [m, value_dim, n],
            (scores, n, 1),
            (&self.v[key * v_width + kv_head * value_dim..], v_width, 1),
            (&mut scratch.sum, value_dim),
            1.0,
        );
    }

    fn store(&self, queries: Range<usize>, head: usize, scratch: &Scratch) {
        let d = self.shape.value_dim;
        let width = self.shape.heads * d;
        for (i, query) in queries.enumerate() {
            // SAFETY: query < Q and head < heads, so the span lies inside out; no other task has
            // the same query and head, and `attention` holds out exclusively while tasks run.
            let out = unsafe {
                std::slice::from_raw_parts_mut(self.out.0.add(query * width + head * d), d)
            };
            let sum = &scratch.sum[i * d..(i + 1) * d];
            let total = scratch.weight[i];
            out.iter_mut().zip(sum).for_each(|(o, s)| *o = s / total);
        }
    }
}

/// Turns the scores `seen` of a row into weights relative to the new running maximum, the rest
/// into 0, and rescales what was summed so far.
#[inline(always)]
fn softmax_step(
    row: &mut [f32],
    seen: Range<usize>,
    shape: &AttentionShape,
    max: &mut f32,
    weight: &mut f32,
    sum: &mut [f32],
) {
    row[..seen.start].fill(0.0);
    row[seen.end..].fill(0.0);
    let visible = &mut row[seen];
    if visible.is_empty() {
        return;
    }
    visible.iter_mut().for_each(|s| *s *= shape.scale);
    if let Some(cap) = shape.cap {
        visible
            .iter_mut()
            .for_each(|s| *s = math::soft_cap(*s, cap));
    }
    let new_max = max.max(math::max(visible));
    let shrink = math::exp(*max - new_max);
    visible
        .iter_mut()
        .for_each(|s| *s = math::exp(*s - new_max));
    *weight = *weight * shrink + math::sum_by(visible, |s| s);
    sum.iter_mut().for_each(|s| *s *= shrink);
    *max = new_max;
}

/// out (m, n) = keep · out + a (m, k) · b (k, n); each side with its row and column stride.
fn product(
    [m, n, k]: [usize; 3],
    (a, a_row, a_column): (&[f32], usize, usize),
    (b, b_row, b_column): (&[f32], usize, usize),
    (out, out_row): (&mut [f32], usize),
    keep: f32,
) {
    assert!(a.len() > (m - 1) * a_row + (k - 1) * a_column);
    assert!(b.len() > (k - 1) * b_row + (n - 1) * b_column);
    assert!(out.len() > (m - 1) * out_row + n - 1);
    // SAFETY: the last element of each side was just checked to lie inside its slice, and `out`
    // overlaps neither input, being a mutable borrow.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            out_row as isize,
            keep != 0.0,
            a.as_ptr(),
            a_column as isize,
            a_row as isize,
            b.as_ptr(),
            b_column as isize,
            b_row as isize,
            keep,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}
