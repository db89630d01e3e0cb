//! A teacher's weights where the backend computes, handed out one layer at a time. Resident now;
//! a source that streams layers would stand behind the same calls.

use anyhow::Result;

use super::description::{Norm, Projection};
use super::teacher::Teacher;
use crate::backend::Backend;

/// A projection ready to be applied.
#[derive(Debug)]
pub struct Linear<W> {
    pub weight: W,       // (N, K)
    pub bias: Option<W>, // (N)
}

/// One layer's weights; the same fields as `description::Layer`.
#[derive(Debug)]
pub struct LayerWeights<W> {
    pub attention_norm: W, // (H)
    pub q: Linear<W>,
    pub k: Linear<W>,
    pub v: Linear<W>,
    pub o: Linear<W>,
    pub mlp_norm: W, // (H)
    pub gate: Linear<W>,
    pub up: Linear<W>,
    pub down: Linear<W>,
}

/// All weights of a teacher.
#[derive(Debug)]
pub struct Weights<W> {
    pub embedding: W, // (V, H)
    layers: Vec<LayerWeights<W>>,
    pub final_norm: W, // (H)
    pub head: W,       // (vocab scored, H)
}

impl<W> Weights<W> {
    /// Makes every weight ready. Head rows from `vocab_scored` on are left out.
    pub fn load<B: Backend<Weight = W>>(
        backend: &B,
        teacher: &Teacher,
        vocab_scored: usize,
    ) -> Result<Weights<W>> {
        let norm = |norm: &Norm| backend.weight(&teacher.weight(&norm.weight.name));
        let linear = |projection: &Projection| -> Result<Linear<W>> {
            let bias = projection.bias.as_ref();
            Ok(Linear {
                weight: backend.weight(&teacher.weight(&projection.weight.name))?,
                bias: bias
                    .map(|spec| backend.weight(&teacher.weight(&spec.name)))
                    .transpose()?,
            })
        };
        let description = &teacher.description;
        let layers = description.layers.iter().map(|layer| {
            Ok(LayerWeights {
                attention_norm: norm(&layer.attention_norm)?,
                q: linear(&layer.q)?,
                k: linear(&layer.k)?,
                v: linear(&layer.v)?,
                o: linear(&layer.o)?,
                mlp_norm: norm(&layer.mlp_norm)?,
                gate: linear(&layer.gate)?,
                up: linear(&layer.up)?,
                down: linear(&layer.down)?,
            })
        });
        Ok(Weights {
            embedding: backend.weight(&teacher.embedding())?,
            layers: layers.collect::<Result<_>>()?,
            final_norm: norm(&description.final_norm)?,
            head: backend.weight(&teacher.head().slice_rows(0..vocab_scored))?,
        })
    }

    /// Layer `index`'s weights, for as long as the layer is computed.
    pub fn layer(&self, index: usize) -> &LayerWeights<W> {
        &self.layers[index]
    }
}
