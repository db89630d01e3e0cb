//! What a pass holds besides the weights: tables, activations, and the batch as the backend sees
//! it. Everything that can be is allocated once, for the limits.

use anyhow::Result;

use super::decoder::Limits;
use super::description::{Description, Temperature};
use super::rope::{Rope, RopeTable, Stretch};
use crate::backend::{Backend, MlpSizes, MlpWork, Precision, Segment, Segments};
use crate::batch::{PackedBatch, PackedSequence};

/// Activations of the one layer that is being computed, and of the head.
pub struct Workspace<B: Backend> {
    pub narrow: B::Tensor, // (T, H), what the last layer keeps of a buffer
    pub normed: B::Tensor, // (T, H)
    pub attention: AttentionWork<B>,
    pub branch: B::Tensor, // (T, H), where a branch can't be added at once
    pub mlp: MlpWork<B::Tensor, B::Routing>,
    pub router: B::Tensor,       // (T, E)
    pub row_gate: B::Tensor,     // (T, 1)
    pub chunk: B::Tensor,        // (C, H)
    pub chunk_normed: B::Tensor, // (C, H)
    pub logits: B::Tensor,       // (C, vocab scored)
}

pub struct AttentionWork<B: Backend> {
    pub q: B::Tensor,        // (T, heads * head_dim)
    pub k: B::Tensor,        // (T, kv_heads * head_dim)
    pub v: B::Tensor,        // (T, kv_heads * value_dim)
    pub attended: B::Tensor, // (T, heads * value_dim)
    pub latent: B::Tensor,   // (T, rank)
    pub own_keys: B::Tensor, // (T, heads * plain)
    pub rotated: B::Tensor,  // (T, rotated)
}

impl<B: Backend> Workspace<B> {
    pub fn new(b: &B, description: &Description, limits: Limits, vocab: usize) -> Result<Self> {
        let h = description.hidden;
        let widths = description.widths();
        let tokens = |width| b.tensor(Precision::Compute, limits.tokens, width);
        let exact = |width| b.tensor(Precision::Single, limits.tokens, width);
        let chunk = |precision, width| b.tensor(precision, limits.head_chunk, width);
        Ok(Workspace {
            narrow: exact(h)?,
            normed: tokens(h)?,
            attention: AttentionWork {
                q: tokens(widths.q)?,
                k: tokens(widths.k)?,
                v: tokens(widths.v)?,
                attended: tokens(widths.attended)?,
                latent: tokens(widths.latent)?,
                own_keys: tokens(widths.own_keys)?,
                rotated: tokens(widths.rotated)?,
            },
            branch: exact(widths.branch)?,
            mlp: b.mlp_work(&MlpSizes {
                rows_max: limits.tokens,
                inner: widths.inner,
                experts: widths.experts,
            })?,
            router: exact(widths.experts.map_or(0, |experts| experts.count))?,
            row_gate: exact(1)?,
            chunk: chunk(Precision::Single, h)?,
            chunk_normed: chunk(Precision::Compute, h)?,
            logits: chunk(Precision::Single, vocab)?,
        })
    }
}

/// cos and sin, each (P, width / 2).
type Turn<B> = (<B as Backend>::Tensor, <B as Backend>::Tensor);

/// What depends on positions alone.
pub struct Tables<B: Backend> {
    ropes: Vec<Turn<B>>,
    pub temperature: Option<B::Tensor>, // (sequence, 1)
}

impl<B: Backend> Tables<B> {
    pub fn new(b: &B, description: &Description, sequence: usize) -> Result<Self> {
        let ropes = description.ropes.iter();
        let ropes = ropes.map(|rope| upload_table(b, rope, &rope.table(sequence)));
        let factors = description.temperature.map(|t| temperatures(t, sequence));
        let temperature = factors.map(|factors| -> Result<B::Tensor> {
            let mut tensor = b.tensor(Precision::Single, sequence, 1)?;
            b.upload(&factors, &mut tensor);
            Ok(tensor)
        });
        Ok(Tables {
            ropes: ropes.collect::<Result<_>>()?,
            temperature: temperature.transpose()?,
        })
    }
}

fn upload_table<B: Backend>(b: &B, rope: &Rope, table: &RopeTable) -> Result<Turn<B>> {
    let width = rope.inverse_frequencies.len();
    let tensor = |values: &[f32]| -> Result<B::Tensor> {
        let mut tensor = b.tensor(Precision::Single, values.len() / width, width)?;
        b.upload(values, &mut tensor);
        Ok(tensor)
    };
    Ok((tensor(&table.cos)?, tensor(&table.sin)?))
}

fn temperatures(t: Temperature, sequence: usize) -> Vec<f32> {
    let at = |position: usize| ((position as f32 + 1.0) / t.floor).floor().ln_1p() * t.scale + 1.0;
    (0..sequence).map(at).collect()
}

/// A packed batch as the backend sees it.
pub struct Upload<B: Backend> {
    pub tokens: B::Index,    // (T)
    pub positions: B::Index, // (T)
    pub rows: Rows<B>,
    ropes: Vec<RopeRows<B>>,
    every_token: B::Segments, // T queries
    rows_only: B::Segments,   // R queries
}

/// The scored tokens of a batch.
pub struct Rows<B: Backend> {
    pub index: B::Index, // (R), each row's token
    positions: B::Index, // (R)
}

/// Where in a rope's table each token and each row finds its angles.
struct RopeRows<B: Backend> {
    tokens: B::Index, // (T)
    rows: B::Index,   // (R)
    /// A table of this batch's own, where the angles depend on a sequence's length.
    own: Option<Turn<B>>,
}

impl<B: Backend> Upload<B> {
    pub fn new(
        b: &B,
        description: &Description,
        batch: &PackedBatch,
        sequence_max: usize,
    ) -> Result<Self> {
        let rows: Vec<u32> = batch.rows.iter().map(|row| row.token).collect();
        let of_rows = |values: &[u32]| -> Vec<u32> {
            let at = |&token: &u32| values[token as usize];
            rows.iter().map(at).collect()
        };
        let segments = |queries: fn(&PackedSequence) -> std::ops::Range<usize>| {
            let list = batch.sequences.iter().map(|sequence| Segment {
                keys: sequence.tokens.clone(),
                queries: queries(sequence),
            });
            list.collect()
        };
        let ropes = description.ropes.iter().map(|rope| {
            let tokens = rope_rows(rope, batch, sequence_max);
            Ok(RopeRows {
                rows: b.index(&of_rows(&tokens))?,
                tokens: b.index(&tokens)?,
                own: own_table(b, rope, batch, sequence_max)?,
            })
        });
        let row_positions = of_rows(&batch.positions);
        Ok(Upload {
            tokens: b.index(&batch.tokens)?,
            positions: b.index(&batch.positions)?,
            every_token: b.segments(Segments {
                list: segments(|sequence| sequence.tokens.clone()),
                query_positions: batch.positions.clone(),
            })?,
            rows_only: b.segments(Segments {
                list: segments(|sequence| sequence.rows.clone()),
                query_positions: row_positions.clone(),
            })?,
            ropes: ropes.collect::<Result<_>>()?,
            rows: Rows {
                index: b.index(&rows)?,
                positions: b.index(&row_positions)?,
            },
        })
    }

    pub fn positions(&self, rows_only: bool) -> &B::Index {
        if rows_only {
            &self.rows.positions
        } else {
            &self.positions
        }
    }

    pub fn rope_positions(&self, table: usize, rows_only: bool) -> &B::Index {
        let rope = &self.ropes[table];
        if rows_only { &rope.rows } else { &rope.tokens }
    }

    pub fn table<'a>(
        &'a self,
        table: usize,
        tables: &'a Tables<B>,
    ) -> (&'a B::Tensor, &'a B::Tensor) {
        let (cos, sin) = self.ropes[table]
            .own
            .as_ref()
            .unwrap_or(&tables.ropes[table]);
        (cos, sin)
    }

    pub fn segments(&self, rows_only: bool) -> &B::Segments {
        if rows_only {
            &self.rows_only
        } else {
            &self.every_token
        }
    }
}

/// The row of the rope's table for every token of the batch. A sequence longer than the rope's
/// original context has its angles further down: all such sequences share the second part of a
/// table, or each has a part of its own, laid out as the batch is.
fn rope_rows(rope: &Rope, batch: &PackedBatch, sequence_max: usize) -> Vec<u32> {
    let sequences = batch.sequences.iter();
    let first = |sequence: &PackedSequence| match &rope.stretch {
        _ if !rope.is_stretched(sequence.length) => 0,
        Stretch::None => 0,
        Stretch::Longer { .. } => sequence_max,
        Stretch::Dynamic { .. } => sequence_max + sequence.tokens.start,
    };
    sequences
        .flat_map(|s| {
            let first = first(s);
            (first..first + s.tokens.len()).map(|row| row as u32)
        })
        .collect()
}

/// The table with a part for each sequence of the batch, where its length decides the angles.
fn own_table<B: Backend>(
    b: &B,
    rope: &Rope,
    batch: &PackedBatch,
    sequence_max: usize,
) -> Result<Option<Turn<B>>> {
    let stretched = |s: &PackedSequence| rope.is_stretched(s.length);
    let dynamic = matches!(rope.stretch, Stretch::Dynamic { .. });
    if !dynamic || !batch.sequences.iter().any(stretched) {
        return Ok(None);
    }
    let mut table = rope.table(sequence_max);
    for sequence in &batch.sequences {
        let part = rope.table_for(sequence.length, sequence.tokens.len());
        table.cos.extend(part.cos);
        table.sin.extend(part.sin);
    }
    Ok(Some(upload_table(b, rope, &table)?))
}
