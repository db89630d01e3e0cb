//! A teacher's weights where the backend computes, handed out one layer at a time. Resident now;
//! a source that streams layers would stand behind the same calls.

use anyhow::Result;

use super::description::{self as spec, Keys, Query, WeightSpec};
use super::teacher::WeightSource;
use crate::backend::{Backend, Experts, HostWeight, Linear, Mlp, Norm};

/// One layer's weights; the same fields as `description::Layer`.
pub struct LayerWeights<B: Backend> {
    pub attention_norm: Option<Norm<B::Weight>>,
    pub query: QueryWeights<B>,
    pub keys: KeyWeights<B>,
    pub q_norm: Option<Norm<B::Weight>>,
    pub k_norm: Option<Norm<B::Weight>>,
    pub sinks: Option<B::Weight>,
    pub o: Linear<B::Weight>,
    pub attention_post_norm: Option<Norm<B::Weight>>,
    pub mlp_norm: Option<Norm<B::Weight>>,
    pub mlp: MlpWeights<B>,
    pub mlp_post_norm: Option<Norm<B::Weight>>,
}

pub enum QueryWeights<B: Backend> {
    Full(Linear<B::Weight>),
    Latent {
        down: Linear<B::Weight>,
        norm: Norm<B::Weight>,
        up: Linear<B::Weight>,
    },
}

pub enum KeyWeights<B: Backend> {
    Full {
        k: Linear<B::Weight>,
        v: Linear<B::Weight>,
    },
    Latent {
        down: Linear<B::Weight>,
        norm: Norm<B::Weight>,
        k: Linear<B::Weight>,
        v: Linear<B::Weight>,
        rotated: Linear<B::Weight>,
    },
}

pub enum MlpWeights<B: Backend> {
    Dense(Mlp<B::Weight>),
    Experts {
        router: Linear<B::Weight>, // (E, H)
        experts: B::Experts,
        shared: Option<Mlp<B::Weight>>,
        shared_gate: Option<Linear<B::Weight>>,
    },
}

/// All weights of a teacher.
pub struct Weights<B: Backend> {
    /// `None`: the head's, of which it is the same matrix.
    own_embedding: Option<B::Weight>, // (V, H)
    pub positions: Option<B::Weight>, // (context, H)
    layers: Vec<LayerWeights<B>>,
    pub final_norm: Norm<B::Weight>,
    pub head: Linear<B::Weight>, // (vocab scored, H)
}

impl<B: Backend> Weights<B> {
    /// Makes every weight ready. Head rows from `vocab_scored` on are left out.
    pub fn load(
        backend: &B,
        teacher: &impl WeightSource,
        vocab_scored: usize,
    ) -> Result<Weights<B>> {
        let load = Loader { backend, teacher };
        let description = teacher.description();
        let layers = description.layers.iter();
        let scored = |weight: HostWeight| backend.weight(&weight.slice_rows(0..vocab_scored));
        let bias = description.head.bias.as_ref();
        let embedding = teacher.embedding();
        let is_head = teacher.is_tied() && embedding.rows() == vocab_scored;
        let own = (!is_head).then(|| backend.weight(&embedding));
        Ok(Weights {
            own_embedding: own.transpose()?,
            positions: load.maybe(&description.positions)?,
            layers: layers.map(|l| load.layer(l)).collect::<Result<_>>()?,
            final_norm: load.norm(&description.final_norm)?,
            head: Linear {
                weight: scored(teacher.head())?,
                bias: bias.map(|b| scored(teacher.weight(b))).transpose()?,
            },
        })
    }

    pub fn embedding(&self) -> &B::Weight {
        self.own_embedding.as_ref().unwrap_or(&self.head.weight)
    }

    /// Layer `index`'s weights, for as long as the layer is computed.
    pub fn layer(&self, index: usize) -> &LayerWeights<B> {
        &self.layers[index]
    }
}

struct Loader<'a, B, S> {
    backend: &'a B,
    teacher: &'a S,
}

impl<B: Backend, S: WeightSource> Loader<'_, B, S> {
    fn layer(&self, layer: &spec::Layer) -> Result<LayerWeights<B>> {
        let attention = &layer.attention;
        Ok(LayerWeights {
            attention_norm: self.maybe_norm(&layer.attention_norm)?,
            query: self.query(&attention.query)?,
            keys: self.keys(&attention.keys)?,
            q_norm: self.maybe_norm(&attention.q_norm)?,
            k_norm: self.maybe_norm(&attention.k_norm)?,
            sinks: self.maybe(&attention.sinks)?,
            o: self.linear(&attention.o)?,
            attention_post_norm: self.maybe_norm(&layer.attention_post_norm)?,
            mlp_norm: self.maybe_norm(&layer.mlp_norm)?,
            mlp: match &layer.mlp {
                spec::Mlp::Dense(dense) => MlpWeights::Dense(self.dense(dense)?),
                spec::Mlp::Experts(experts) => self.experts(experts)?,
            },
            mlp_post_norm: self.maybe_norm(&layer.mlp_post_norm)?,
        })
    }

    fn query(&self, query: &Query) -> Result<QueryWeights<B>> {
        Ok(match query {
            Query::Full(q) => QueryWeights::Full(self.linear(q)?),
            Query::Latent { down, norm, up } => QueryWeights::Latent {
                down: self.linear(down)?,
                norm: self.norm(norm)?,
                up: self.linear(up)?,
            },
        })
    }

    fn keys(&self, keys: &Keys) -> Result<KeyWeights<B>> {
        Ok(match keys {
            Keys::Full { k, v } => KeyWeights::Full {
                k: self.linear(k)?,
                v: self.linear(v)?,
            },
            Keys::Latent {
                down,
                norm,
                k,
                v,
                rotated,
            } => KeyWeights::Latent {
                down: self.linear(down)?,
                norm: self.norm(norm)?,
                k: self.linear(k)?,
                v: self.linear(v)?,
                rotated: self.linear(rotated)?,
            },
        })
    }

    fn experts(&self, experts: &spec::Experts) -> Result<MlpWeights<B>> {
        let list = experts.list.iter().map(|mlp| self.dense(mlp));
        let shared = experts.shared.as_ref();
        let gate = experts.shared_gate.as_ref();
        Ok(MlpWeights::Experts {
            router: self.linear(&experts.router)?,
            experts: self.backend.experts_of(Experts {
                correction: self.maybe(&experts.correction)?,
                list: list.collect::<Result<_>>()?,
            })?,
            shared: shared.map(|mlp| self.dense(mlp)).transpose()?,
            shared_gate: gate.map(|p| self.linear(p)).transpose()?,
        })
    }

    fn dense(&self, mlp: &spec::DenseMlp) -> Result<Mlp<B::Weight>> {
        let gate = mlp.gate.as_ref();
        Ok(Mlp {
            gate: gate.map(|p| self.linear(p)).transpose()?,
            up: self.linear(&mlp.up)?,
            down: self.linear(&mlp.down)?,
        })
    }

    fn linear(&self, projection: &spec::Projection) -> Result<Linear<B::Weight>> {
        Ok(Linear {
            weight: self.weight(&projection.weight)?,
            bias: self.maybe(&projection.bias)?,
        })
    }

    /// The weight is small, so it is put together in f32: pieces joined, the offset added.
    fn norm(&self, norm: &spec::Norm) -> Result<Norm<B::Weight>> {
        let pieces = norm.weights.iter();
        let mut weight: Vec<f32> = pieces
            .flat_map(|spec| self.teacher.weight(spec).values())
            .collect();
        weight.iter_mut().for_each(|w| *w += norm.offset);
        let host = |values: &[f32]| HostWeight::from_f32(values, vec![values.len()]);
        let present = !weight.is_empty();
        let weight = present.then(|| self.backend.weight(&host(&weight)));
        Ok(Norm {
            shape: norm.shape,
            weight: weight.transpose()?,
            bias: self.maybe(&norm.bias)?,
        })
    }

    fn maybe_norm(&self, norm: &Option<spec::Norm>) -> Result<Option<Norm<B::Weight>>> {
        norm.as_ref().map(|norm| self.norm(norm)).transpose()
    }

    fn maybe(&self, spec: &Option<WeightSpec>) -> Result<Option<B::Weight>> {
        spec.as_ref().map(|spec| self.weight(spec)).transpose()
    }

    fn weight(&self, spec: &WeightSpec) -> Result<B::Weight> {
        self.backend.weight(&self.teacher.weight(spec))
    }
}
