//! The transformer, once, over the backend's ops: layers outside, the batches of a wave inside.
//!
//! Architecture invariant: nothing here asks which family or which device it runs; the
//! description says what to compute, the backend how.

use anyhow::Result;

use super::description::{Description, Norm};
use super::rope::RopeTable;
use super::teacher::Teacher;
use super::weights::{Linear, Weights};
use crate::backend::{Backend, HeadRows, Into, LogitRule, Segment, Segments};
use crate::batch::PackedBatch;

/// The most that one pass may hold. All memory is allocated for it before the first batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Tokens of a packed batch: the token budget, or the longest sequence if that is longer.
    pub tokens: usize,
    /// Tokens of the longest sequence.
    pub sequence: usize,
    /// Rows of a logits slice.
    pub head_chunk: usize,
    /// Batches that pass a layer before the next layer starts: 1 when all weights are resident.
    pub wave: usize,
}

/// A teacher on a backend, with every buffer it will need.
pub struct Decoder<'a, B: Backend> {
    backend: &'a B,
    description: &'a Description,
    weights: Weights<B::Weight>,
    ropes: Vec<(B::Tensor, B::Tensor)>, // cos and sin, each (sequence, head_dim / 2)
    residuals: Vec<B::Tensor>,          // one (T, H) for each batch of a wave
    work: Workspace<B>,
    limits: Limits,
    rule: LogitRule,
}

/// Activations of the one layer that is being computed, and of the head.
struct Workspace<B: Backend> {
    narrow: B::Tensor,       // (T, H), what the last layer keeps of a buffer
    normed: B::Tensor,       // (T, H)
    q: B::Tensor,            // (T, heads * head_dim)
    k: B::Tensor,            // (T, kv_heads * head_dim)
    v: B::Tensor,            // (T, kv_heads * head_dim)
    attended: B::Tensor,     // (T, heads * head_dim)
    gate: B::Tensor,         // (T, I)
    up: B::Tensor,           // (T, I)
    chunk: B::Tensor,        // (C, H)
    chunk_normed: B::Tensor, // (C, H)
    logits: B::Tensor,       // (C, vocab scored)
}

/// A packed batch as the backend sees it.
struct Upload<B: Backend> {
    tokens: B::Index,        // (T)
    positions: B::Index,     // (T)
    rows: B::Index,          // (R), index of each row's token
    row_positions: B::Index, // (R)
    every_token: Segments,   // T queries
    rows_only: Segments,     // R queries
}

impl<'a, B: Backend> Decoder<'a, B> {
    /// Loads the weights and allocates all buffers.
    pub fn new(
        backend: &'a B,
        teacher: &'a Teacher,
        limits: Limits,
        rule: LogitRule,
    ) -> Result<Decoder<'a, B>> {
        let description = &teacher.description;
        let ropes = description.ropes.iter().map(|rope| {
            let RopeTable { cos, sin } = rope.table(limits.sequence);
            let width = rope.inverse_frequencies.len();
            let table = |values: &[f32]| -> Result<B::Tensor> {
                let mut tensor = backend.tensor(limits.sequence, width)?;
                backend.upload(values, &mut tensor);
                Ok(tensor)
            };
            Ok((table(&cos)?, table(&sin)?))
        });
        Ok(Decoder {
            backend,
            description,
            weights: Weights::load(backend, teacher, rule.vocab)?,
            ropes: ropes.collect::<Result<_>>()?,
            residuals: (0..limits.wave)
                .map(|_| backend.tensor(limits.tokens, description.hidden))
                .collect::<Result<_>>()?,
            work: Workspace::new(backend, description, limits, rule.vocab)?,
            limits,
            rule,
        })
    }

    /// Scores the rows of a wave: entry i of result b is row i of `wave[b].rows`.
    ///
    /// # Panics
    /// When the wave or one of its batches is over the limits.
    pub fn score(&mut self, wave: &[PackedBatch], out: &mut [HeadRows]) -> Result<()> {
        let b = self.backend;
        let uploads = wave.iter().map(|batch| Upload::new(b, batch));
        let uploads: Vec<Upload<B>> = uploads.collect::<Result<_>>()?;
        for (upload, residual) in uploads.iter().zip(&mut self.residuals) {
            b.embed(&self.weights.embedding, &upload.tokens, residual);
        }
        let last = self.description.layers.len() - 1;
        for index in 0..=last {
            for (slot, upload) in uploads.iter().enumerate() {
                self.layer(index, slot, upload, index == last);
            }
        }
        for (slot, (batch, out)) in wave.iter().zip(out).enumerate() {
            self.head(batch, slot, out)?;
        }
        Ok(())
    }

    /// One layer over one batch of the wave. The last layer goes on with the scored rows alone.
    fn layer(&mut self, index: usize, slot: usize, batch: &Upload<B>, is_last: bool) {
        let layer = &self.description.layers[index];
        let weights = self.weights.layer(index);
        let (cos, sin) = &self.ropes[layer.rope];
        let head_dim = layer.attention.head_dim;
        let (b, w, x) = (self.backend, &mut self.work, &mut self.residuals[slot]);

        norm(
            b,
            x,
            &layer.attention_norm,
            &weights.attention_norm,
            &mut w.normed,
        );
        linear(b, &w.normed, &weights.k, Into::Replace, &mut w.k);
        linear(b, &w.normed, &weights.v, Into::Replace, &mut w.v);
        b.rope(&mut w.k, head_dim, cos, sin, &batch.positions);
        let (segments, positions) = if is_last {
            keep_rows(b, &batch.rows, x, &mut w.narrow);
            keep_rows(b, &batch.rows, &mut w.normed, &mut w.narrow);
            (&batch.rows_only, &batch.row_positions)
        } else {
            (&batch.every_token, &batch.positions)
        };
        linear(b, &w.normed, &weights.q, Into::Replace, &mut w.q);
        b.rope(&mut w.q, head_dim, cos, sin, positions);
        b.attention(
            &layer.attention,
            segments,
            &w.q,
            &w.k,
            &w.v,
            &mut w.attended,
        );
        linear(b, &w.attended, &weights.o, Into::Add, x);

        norm(b, x, &layer.mlp_norm, &weights.mlp_norm, &mut w.normed);
        linear(b, &w.normed, &weights.gate, Into::Replace, &mut w.gate);
        linear(b, &w.normed, &weights.up, Into::Replace, &mut w.up);
        b.gate(layer.activation, &mut w.gate, &w.up);
        linear(b, &w.gate, &weights.down, Into::Add, x);
    }

    /// Rows reach the head in chunks, so that logits never exist whole.
    fn head(&mut self, batch: &PackedBatch, slot: usize, out: &mut HeadRows) -> Result<()> {
        let (b, w) = (self.backend, &mut self.work);
        let rows: Vec<u32> = (0..batch.rows.len() as u32).collect();
        let targets: Vec<i32> = batch.rows.iter().map(|row| row.target).collect();
        let chunk = self.limits.head_chunk;
        for (rows, targets) in rows.chunks(chunk).zip(targets.chunks(chunk)) {
            b.gather(&self.residuals[slot], &b.index(rows)?, &mut w.chunk);
            let final_norm = &self.description.final_norm;
            norm(
                b,
                &w.chunk,
                final_norm,
                &self.weights.final_norm,
                &mut w.chunk_normed,
            );
            b.linear(
                &w.chunk_normed,
                &self.weights.head,
                None,
                Into::Replace,
                &mut w.logits,
            );
            b.reduce_head(&mut w.logits, &self.rule, targets, out);
        }
        Ok(())
    }
}

fn norm<B: Backend>(b: &B, x: &B::Tensor, norm: &Norm, weight: &B::Weight, out: &mut B::Tensor) {
    b.norm(x, norm.kind, weight, out);
}

fn linear<B: Backend>(
    b: &B,
    x: &B::Tensor,
    linear: &Linear<B::Weight>,
    into: Into,
    out: &mut B::Tensor,
) {
    b.linear(x, &linear.weight, linear.bias.as_ref(), into, out);
}

/// Leaves only `rows` of `x`.
fn keep_rows<B: Backend>(b: &B, rows: &B::Index, x: &mut B::Tensor, spare: &mut B::Tensor) {
    b.gather(x, rows, spare);
    std::mem::swap(x, spare);
}

impl<B: Backend> Workspace<B> {
    fn new(b: &B, description: &Description, limits: Limits, vocab: usize) -> Result<Self> {
        let h = description.hidden;
        let q = description.widest(|l| l.q.outputs());
        let kv = description.widest(|l| l.k.outputs());
        let inner = description.widest(|l| l.gate.outputs());
        let tokens = |width| b.tensor(limits.tokens, width);
        let chunk = |width| b.tensor(limits.head_chunk, width);
        Ok(Workspace {
            narrow: tokens(h)?,
            normed: tokens(h)?,
            q: tokens(q)?,
            k: tokens(kv)?,
            v: tokens(kv)?,
            attended: tokens(q)?,
            gate: tokens(inner)?,
            up: tokens(inner)?,
            chunk: chunk(h)?,
            chunk_normed: chunk(h)?,
            logits: chunk(vocab)?,
        })
    }
}

impl<B: Backend> Upload<B> {
    fn new(b: &B, batch: &PackedBatch) -> Result<Self> {
        let rows: Vec<u32> = batch.rows.iter().map(|row| row.token).collect();
        let at = |token: &u32| batch.positions[*token as usize];
        let row_positions: Vec<u32> = rows.iter().map(at).collect();
        let segments = |queries: fn(&crate::batch::PackedSequence) -> std::ops::Range<usize>| {
            let list = batch.sequences.iter().map(|sequence| Segment {
                keys: sequence.tokens.clone(),
                queries: queries(sequence),
            });
            list.collect()
        };
        Ok(Upload {
            tokens: b.index(&batch.tokens)?,
            positions: b.index(&batch.positions)?,
            every_token: Segments {
                list: segments(|sequence| sequence.tokens.clone()),
                query_positions: batch.positions.clone(),
            },
            rows_only: Segments {
                list: segments(|sequence| sequence.rows.clone()),
                query_positions: row_positions.clone(),
            },
            rows: b.index(&rows)?,
            row_positions: b.index(&row_positions)?,
        })
    }
}
