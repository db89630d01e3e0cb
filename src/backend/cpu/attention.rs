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

/// f32 scratch of one thread for heads of `head_dim`.
pub fn scratch_elements(head_dim: usize) -> usize {
    QUERY_TILE * (KEY_BLOCK + head_dim + 2)
}

#[derive(Default)]
struct Scratch {
    scores: Vec<f32>, // (QUERY_TILE, KEY_BLOCK)
    sum: Vec<f32>,    // (QUERY_TILE, head_dim), unnormalised output
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
    positions: &'a [u32], // (Q)
    q: &'a [f32],         // (Q, heads * head_dim)
    k: &'a [f32],         // (T, kv_heads * head_dim)
    v: &'a [f32],         // (T, kv_heads * head_dim)
    out: OutPointer,      // (Q, heads * head_dim)
}

/// See `Backend::attention`.
pub fn attention(
    shape: &AttentionShape,
    segments: &Segments,
    q: &Activations,
    k: &Activations,
    v: &Activations,
    out: &mut Activations,
) {
    assert_eq!(q.width, shape.heads * shape.head_dim, "attention: q");
    assert_eq!(k.width, shape.kv_heads * shape.head_dim, "attention: k");
    assert_eq!(q.width, out.width, "attention: out");
    out.set_rows(q.rows);
    assert_eq!((k.rows, k.width), (v.rows, v.width), "attention: v");
    assert_eq!(segments.query_positions.len(), q.rows, "attention: queries");
    let job = Job {
        shape,
        positions: &segments.query_positions,
        q: q.data(),
        k: k.data(),
        v: v.data(),
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
        let d = self.shape.head_dim;
        let m = queries.len();
        scratch.scores.resize(QUERY_TILE * KEY_BLOCK, 0.0);
        scratch.sum.clear();
        scratch.sum.resize(m * d, 0.0);
        scratch.max.clear();
        scratch.max.resize(m, f32::NEG_INFINITY);
        scratch.weight.clear();
        scratch.weight.resize(m, 0.0);
        let last = self.positions[queries.end - 1] as usize;
        for block in (0..=last).step_by(KEY_BLOCK) {
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
        let (d, m, n) = (self.shape.head_dim, queries.len(), keys.len());
        let kv_head = head / (self.shape.heads / self.shape.kv_heads);
        let q_width = self.shape.heads * d;
        let kv_width = self.shape.kv_heads * d;
        let kv_at = (segment.keys.start + keys.start) * kv_width + kv_head * d;
        let scores = &mut scratch.scores[..m * n];
        product(
            [m, n, d],
            (&self.q[queries.start * q_width + head * d..], q_width, 1),
            (&self.k[kv_at..], 1, kv_width),
            (scores, n),
            0.0,
        );
        let positions = &self.positions[queries];
        pulp::Arch::new().dispatch(|| {
            for (i, row) in scores.chunks_exact_mut(n).enumerate() {
                let seen = (positions[i] as usize + 1)
                    .saturating_sub(keys.start)
                    .min(n);
                softmax_step(
                    row,
                    seen,
                    self.shape.scale,
                    &mut scratch.max[i],
                    &mut scratch.weight[i],
                    &mut scratch.sum[i * d..(i + 1) * d],
                );
            }
        });
        product(
            [m, d, n],
            (scores, n, 1),
            (&self.v[kv_at..], kv_width, 1),
            (&mut scratch.sum, d),
            1.0,
        );
    }

    fn store(&self, queries: Range<usize>, head: usize, scratch: &Scratch) {
        let d = self.shape.head_dim;
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

/// Turns the first `seen` scores of a row into weights relative to the new running maximum, the
/// rest into 0, and rescales what was summed so far.
#[inline(always)]
fn softmax_step(
    row: &mut [f32],
    seen: usize,
    scale: f32,
    max: &mut f32,
    weight: &mut f32,
    sum: &mut [f32],
) {
    let (visible, hidden) = row.split_at_mut(seen);
    hidden.fill(0.0);
    if visible.is_empty() {
        return;
    }
    visible.iter_mut().for_each(|s| *s *= scale);
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
