//! The transformer, once, over the backend's ops: layers outside, the batches of a wave inside.
//!
//! Architecture invariant: nothing here asks which family or which device it runs; the
//! description says what to compute, the backend how.

use anyhow::Result;

use super::buffers::{AttentionWork, Tables, Upload, Workspace};
use super::description::{Attention, Description, Layer, Mlp, QkNormAt, Residual};
use super::teacher::WeightSource;
use super::weights::{KeyWeights, LayerWeights, MlpWeights, QueryWeights, Weights};
use crate::backend::{
    self, Activation, Backend, HeadRows, Into, Linear, LogitRule, MlpWork, Norm, Precision, Tensor,
};
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

/// Which rows of the head count, and how many tokens the tokenizer has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Vocabulary {
    /// Head rows in the softmax; those beyond are as if they were not there.
    pub scored: usize,
    pub tokenizer: usize,
}

/// A wave on its way.
pub struct Begun<B: Backend>(Vec<B::Rows>);

/// A teacher on a backend, with every buffer it will need.
pub struct Decoder<'a, B: Backend> {
    pub backend: &'a B,
    description: &'a Description,
    weights: Weights<B>,
    tables: Tables<B>,
    residuals: Vec<B::Tensor>, // one (T, H) for each batch of a wave
    pub(super) work: Workspace<B>,
    pub(super) limits: Limits,
    pub(super) rule: LogitRule,
}

impl<'a, B: Backend> Decoder<'a, B> {
    /// Loads the weights and allocates all buffers.
    pub fn new(
        backend: &'a B,
        teacher: &'a impl WeightSource,
        limits: Limits,
        vocabulary: Vocabulary,
    ) -> Result<Decoder<'a, B>> {
        let description = teacher.description();
        Ok(Decoder {
            backend,
            description,
            weights: Weights::load(backend, teacher, vocabulary.scored)?,
            tables: Tables::new(backend, description, limits.sequence)?,
            residuals: (0..limits.wave)
                .map(|_| backend.tensor(Precision::Single, limits.tokens, description.hidden))
                .collect::<Result<_>>()?,
            work: Workspace::new(backend, description, limits, vocabulary.scored)?,
            limits,
            rule: LogitRule {
                vocab: vocabulary.scored,
                vocab_real: vocabulary.tokenizer,
                scale: description.head.scale,
                cap: description.head.cap,
            },
        })
    }

    /// Scores the rows of a wave: entry i of result b is row i of `wave[b].rows`.
    ///
    /// # Panics
    /// When the wave or one of its batches is over the limits.
    pub fn score(&mut self, wave: &[PackedBatch], out: &mut [HeadRows]) -> Result<()> {
        let k = out.first().map_or(0, |rows| rows.k);
        let begun = self.begin(wave, k)?;
        self.finish(begun, out)
    }

    /// Asks for all that scoring a wave takes, with `k` ids a row, and waits for none of it where
    /// the backend runs behind. Waves are finished in the order they were begun.
    ///
    /// # Panics
    /// When the wave or one of its batches is over the limits.
    pub fn begin(&mut self, wave: &[PackedBatch], k: usize) -> Result<Begun<B>> {
        let (b, d) = (self.backend, self.description);
        let uploads = wave
            .iter()
            .map(|batch| Upload::new(b, d, batch, self.limits.sequence));
        let uploads: Vec<Upload<B>> = uploads.collect::<Result<_>>()?;
        for (upload, residual) in uploads.iter().zip(&mut self.residuals) {
            let weights = &self.weights;
            b.embed(weights.embedding(), &upload.tokens, Into::Replace, residual);
            if d.embedding_scale != 1.0 {
                b.scale(residual, d.embedding_scale);
            }
            if let Some(table) = &weights.positions {
                b.embed(table, &upload.positions, Into::Add, residual);
            }
        }
        let last = d.layers.len() - 1;
        for index in 0..=last {
            for (slot, upload) in uploads.iter().enumerate() {
                self.layer(index, slot, upload, index == last);
            }
        }
        // What went up is free again when the rows are there.
        drop(uploads);
        let batches = wave.iter().enumerate();
        let rows = batches.map(|(slot, batch)| self.head(batch, slot, k));
        rows.collect::<Result<_>>().map(Begun)
    }

    /// The rows of a wave that was begun.
    pub fn finish(&self, begun: Begun<B>, out: &mut [HeadRows]) -> Result<()> {
        let mut pairs = begun.0.into_iter().zip(out);
        pairs.try_for_each(|(rows, out)| self.backend.take_rows(rows, out))
    }

    /// One layer over one batch of the wave. The last layer goes on with the scored rows alone.
    fn layer(&mut self, index: usize, slot: usize, batch: &Upload<B>, is_last: bool) {
        let layer = &self.description.layers[index];
        let weights = self.weights.layer(index);
        let (b, w, x) = (self.backend, &mut self.work, &mut self.residuals[slot]);
        let attend = Attend {
            b,
            attention: &layer.attention,
            weights,
            tables: &self.tables,
            batch,
        };

        norm_or_copy(b, x, weights.attention_norm.as_ref(), &mut w.normed);
        attend.keys_and_values(&w.normed, &mut w.attention);
        if is_last {
            b.gather(x, &batch.rows.index, &mut w.narrow);
            std::mem::swap(x, &mut w.narrow);
            norm_or_copy(b, x, weights.attention_norm.as_ref(), &mut w.normed);
        }
        attend.queries(&w.normed, is_last, &mut w.attention);
        attend.attend(is_last, &mut w.attention);
        if let (Residual::Parallel, Some(norm)) = (layer.residual, &weights.mlp_norm) {
            b.norm(x, norm, &mut w.normed);
        }
        let branch = Branch {
            b,
            scale: layer.residual_scale,
            post_norm: weights.attention_post_norm.as_ref(),
        };
        branch.project(&w.attention.attended, &weights.o, x, &mut w.branch);
        if layer.residual == Residual::Sequential {
            norm_or_copy(b, x, weights.mlp_norm.as_ref(), &mut w.normed);
        }
        mlp(b, layer, weights, x, w);
    }

    /// Rows reach the head in chunks, so that logits never exist whole.
    fn head(&mut self, batch: &PackedBatch, slot: usize, k: usize) -> Result<B::Rows> {
        let (b, w) = (self.backend, &mut self.work);
        let targets: Vec<i32> = batch.rows.iter().map(|row| row.target).collect();
        let mut scored = b.rows(targets.len(), k)?;
        let mut first = 0;
        for targets in targets.chunks(self.limits.head_chunk) {
            let rows = first..first + targets.len();
            first = rows.end;
            b.slice(&self.residuals[slot], rows, &mut w.chunk);
            b.norm(&w.chunk, &self.weights.final_norm, &mut w.chunk_normed);
            let head = &self.weights.head;
            b.linear(&w.chunk_normed, head, Into::Replace, &mut w.logits);
            b.reduce_head(&mut w.logits, &self.rule, targets, &mut scored);
        }
        b.send_rows(&mut scored);
        Ok(scored)
    }
}

/// Attention of one layer over one batch.
struct Attend<'a, B: Backend> {
    b: &'a B,
    attention: &'a Attention,
    weights: &'a LayerWeights<B>,
    tables: &'a Tables<B>,
    batch: &'a Upload<B>,
}

impl<B: Backend> Attend<'_, B> {
    /// Keys and values of every token of x (T, H).
    fn keys_and_values(&self, x: &B::Tensor, w: &mut AttentionWork<B>) {
        let b = self.b;
        match &self.weights.keys {
            KeyWeights::Full { k, v } => {
                b.linear(x, k, Into::Replace, &mut w.k);
                b.linear(x, v, Into::Replace, &mut w.v);
                self.shape_heads(&mut w.k, self.weights.k_norm.as_ref(), false);
                if let Some(bound) = self.attention.clip {
                    b.clip(&mut w.v, bound);
                }
            }
            KeyWeights::Latent {
                down,
                norm,
                k,
                v,
                rotated,
            } => {
                b.linear(x, down, Into::Replace, &mut w.latent);
                b.norm_in_place(&mut w.latent, norm);
                b.linear(&w.latent, k, Into::Replace, &mut w.own_keys);
                b.linear(&w.latent, v, Into::Replace, &mut w.v);
                b.linear(x, rotated, Into::Replace, &mut w.rotated);
                self.rotate_shared(&mut w.rotated);
                let heads = self.attention.shape.kv_heads;
                b.join_heads(&w.own_keys, &w.rotated, heads, &mut w.k);
            }
        }
    }

    /// Queries of the rows of x: all tokens, or the scored ones.
    fn queries(&self, x: &B::Tensor, rows_only: bool, w: &mut AttentionWork<B>) {
        let b = self.b;
        match &self.weights.query {
            QueryWeights::Full(q) => b.linear(x, q, Into::Replace, &mut w.q),
            QueryWeights::Latent { down, norm, up } => {
                b.linear(x, down, Into::Replace, &mut w.latent);
                b.norm_in_place(&mut w.latent, norm);
                b.linear(&w.latent, up, Into::Replace, &mut w.q);
            }
        }
        self.shape_heads(&mut w.q, self.weights.q_norm.as_ref(), rows_only);
        if let (true, Some(factors)) = (self.attention.tempered, &self.tables.temperature) {
            b.scale_rows(&mut w.q, factors, self.batch.positions(rows_only));
        }
    }

    /// What happens to queries or keys between the projection and the scores.
    fn shape_heads(&self, x: &mut B::Tensor, norm: Option<&Norm<B::Weight>>, rows_only: bool) {
        let b = self.b;
        let norm_at = |place, x: &mut B::Tensor| {
            if let (true, Some(norm)) = (self.attention.qk_norm_at == place, norm) {
                b.norm_in_place(x, norm);
            }
        };
        norm_at(QkNormAt::BeforeRope, x);
        if let Some(bound) = self.attention.clip {
            b.clip(x, bound);
        }
        if let Some(rope) = &self.attention.rope {
            let (cos, sin) = self.batch.table(rope.table, self.tables);
            let positions = self.batch.rope_positions(rope.table, rows_only);
            b.rope(x, &rope.shape, cos, sin, positions);
        }
        norm_at(QkNormAt::AfterRope, x);
    }

    /// Rotates the part of the keys that all heads share, whole.
    fn rotate_shared(&self, x: &mut B::Tensor) {
        let Some(rope) = &self.attention.rope else {
            return;
        };
        let shape = backend::RopeShape {
            head_dim: x.width(),
            start: 0,
            ..rope.shape
        };
        let (cos, sin) = self.batch.table(rope.table, self.tables);
        let positions = self.batch.rope_positions(rope.table, false);
        self.b.rope(x, &shape, cos, sin, positions);
    }

    fn attend(&self, rows_only: bool, w: &mut AttentionWork<B>) {
        self.b.attention(
            &self.attention.shape,
            self.batch.segments(rows_only),
            self.weights.sinks.as_ref(),
            [&w.q, &w.k, &w.v],
            &mut w.attended,
        );
    }
}

/// How what a layer computes comes to the residual.
struct Branch<'a, B: Backend> {
    b: &'a B,
    scale: f32,
    post_norm: Option<&'a Norm<B::Weight>>,
}

impl<B: Backend> Branch<'_, B> {
    /// x += scale · norm(linear(y)).
    fn project(
        &self,
        y: &B::Tensor,
        linear: &Linear<B::Weight>,
        x: &mut B::Tensor,
        spare: &mut B::Tensor,
    ) {
        if self.post_norm.is_none() && self.scale == 1.0 {
            self.b.linear(y, linear, Into::Add, x);
        } else {
            self.b.linear(y, linear, Into::Replace, spare);
            self.add(spare, x);
        }
    }

    /// x += scale · norm(y); y is used up.
    fn add(&self, y: &mut B::Tensor, x: &mut B::Tensor) {
        if let Some(norm) = self.post_norm {
            self.b.norm_in_place(y, norm);
        }
        self.b.add_scaled(y, self.scale, x);
    }
}

/// x (T, H) += the MLP of `normed` (T, H).
fn mlp<B: Backend>(
    b: &B,
    layer: &Layer,
    weights: &LayerWeights<B>,
    x: &mut B::Tensor,
    w: &mut Workspace<B>,
) {
    let branch = Branch {
        b,
        scale: layer.residual_scale,
        post_norm: weights.mlp_post_norm.as_ref(),
    };
    match (&layer.mlp, &weights.mlp) {
        (Mlp::Dense(dense), MlpWeights::Dense(mlp)) => {
            hidden(b, dense.activation, mlp, &w.normed, &mut w.mlp);
            branch.project(&w.mlp.gate, &mlp.down, x, &mut w.branch);
        }
        (
            Mlp::Experts(spec),
            MlpWeights::Experts {
                router,
                experts,
                shared,
                shared_gate,
            },
        ) => {
            b.linear(&w.normed, router, Into::Replace, &mut w.router);
            let (rule, out) = (&spec.rule, &mut w.branch);
            b.experts(&w.normed, &w.router, rule, experts, &mut w.mlp, out);
            if let Some(mlp) = shared {
                hidden(b, spec.rule.activation, mlp, &w.normed, &mut w.mlp);
                if let Some(gate) = shared_gate {
                    b.linear(&w.normed, gate, Into::Replace, &mut w.row_gate);
                    b.gate_rows(&mut w.mlp.gate, &w.row_gate);
                }
                b.linear(&w.mlp.gate, &mlp.down, Into::Add, out);
            }
            branch.add(out, x);
        }
        _ => unreachable!("weights are loaded from the description"),
    }
}

/// `work.gate` (T, I) = what the down projection of `mlp` reads, for x (T, H).
fn hidden<B: Backend>(
    b: &B,
    activation: Activation,
    mlp: &backend::Mlp<B::Weight>,
    x: &B::Tensor,
    work: &mut MlpWork<B::Tensor, B::Routing>,
) {
    match &mlp.gate {
        Some(gate) => {
            b.linear(x, gate, Into::Replace, &mut work.gate);
            b.linear(x, &mlp.up, Into::Replace, &mut work.up);
            b.activate(activation, &mut work.gate, Some(&work.up));
        }
        None => {
            b.linear(x, &mlp.up, Into::Replace, &mut work.gate);
            b.activate(activation, &mut work.gate, None);
        }
    }
}

fn norm_or_copy<B: Backend>(
    b: &B,
    x: &B::Tensor,
    norm: Option<&Norm<B::Weight>>,
    out: &mut B::Tensor,
) {
    match norm {
        Some(norm) => b.norm(x, norm, out),
        None => b.copy(x, out),
    }
}
