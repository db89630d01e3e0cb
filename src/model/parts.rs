//! What a description is made of, listed: every weight it needs, and the widths that buffers
//! must have for it.

use crate::backend::{ExpertSizes, Weighs};

use super::description::{
    Attention, DenseMlp, Description, Experts, Keys, Layer, Mlp, Norm, Projection, Query,
    WeightSpec,
};

impl Description {
    /// Every weight that must be there, the embedding and the head apart: whether the latter
    /// exists decides whether it is tied.
    pub fn body_weights(&self) -> Vec<&WeightSpec> {
        let mut out = Vec::new();
        out.extend(&self.positions);
        self.layers.iter().for_each(|layer| layer.weights(&mut out));
        self.final_norm.weights_into(&mut out);
        out.extend(&self.head.bias);
        out
    }

    /// Largest inner size of any product.
    pub fn inner_max(&self) -> usize {
        let mut weights = self.body_weights();
        weights.push(&self.embedding);
        let inner = weights.iter().filter_map(|spec| spec.shape.get(1));
        inner.copied().max().unwrap_or(0)
    }

    /// Widest values of any head.
    pub fn value_dim_max(&self) -> usize {
        self.widest(|l| l.attention.shape.value_dim)
    }

    fn expert_sizes(&self) -> Option<ExpertSizes> {
        let of =
            |number: &dyn Fn(&Experts) -> usize| self.widest(|l| l.mlp.experts().map_or(0, number));
        let weighs_inputs = |e: &Experts| usize::from(e.rule.router.weighs == Weighs::Inputs);
        let sizes = ExpertSizes {
            count: of(&|e| e.list.len()),
            chosen: of(&|e| e.rule.router.chosen),
            hidden: of(&|e| e.router.inputs()),
            inner: of(&|e| e.list.iter().map(|mlp| mlp.up.outputs()).max().unwrap_or(0)),
            weighs_inputs: of(&weighs_inputs) > 0,
        };
        (sizes.count > 0).then_some(sizes)
    }

    pub fn widths(&self) -> Widths {
        let of = |width: &dyn Fn(&Layer) -> usize| self.widest(width);
        Widths {
            q: of(&|l| l.attention.shape.heads * l.attention.shape.head_dim),
            k: of(&|l| l.attention.shape.kv_heads * l.attention.shape.head_dim),
            v: of(&|l| l.attention.shape.kv_heads * l.attention.shape.value_dim),
            attended: of(&|l| l.attention.shape.heads * l.attention.shape.value_dim),
            latent: of(&|l| l.attention.latent_width()),
            own_keys: of(&|l| l.attention.own_keys_width()),
            rotated: of(&|l| l.attention.rotated_width()),
            inner: of(&|l| l.mlp.inner_width()),
            experts: self.expert_sizes(),
            branch: of(&|l| if l.adds_directly() { 0 } else { self.hidden }),
        }
    }
}

/// Widths of the buffers of one layer, the most over all layers; 0 where none needs one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Widths {
    pub q: usize,
    pub k: usize,
    pub v: usize,
    pub attended: usize,
    pub latent: usize,
    pub own_keys: usize,
    pub rotated: usize,
    /// Of MLPs that every token passes.
    pub inner: usize,
    pub experts: Option<ExpertSizes>,
    /// What a branch adds to the residual, where it can't be added at once.
    pub branch: usize,
}

impl Widths {
    /// Numbers a token takes in all of them together, besides two copies of the residual.
    pub fn numbers_per_token(&self) -> usize {
        let attention = self.q + self.k + self.v + self.attended;
        let latents = 2 * self.latent + self.own_keys + self.rotated;
        let experts = self.experts.as_ref();
        let inner = self.inner.max(experts.map_or(0, |e| e.inner));
        let routed = experts.map_or(0, |e| e.count + 2 * e.hidden);
        attention + latents + 2 * inner + 1 + routed + self.branch
    }
}

impl Layer {
    fn weights<'a>(&'a self, out: &mut Vec<&'a WeightSpec>) {
        let norms = [
            &self.attention_norm,
            &self.attention_post_norm,
            &self.mlp_norm,
            &self.mlp_post_norm,
        ];
        let norms = norms.into_iter().flatten();
        norms.for_each(|norm| norm.weights_into(out));
        self.attention.weights(out);
        match &self.mlp {
            Mlp::Dense(dense) => dense.weights(out),
            Mlp::Experts(experts) => experts.weights(out),
        }
    }

    /// Whether both branches go straight to the residual.
    pub fn adds_directly(&self) -> bool {
        let post_norms = [&self.attention_post_norm, &self.mlp_post_norm];
        let plain = post_norms.iter().all(|norm| norm.is_none()) && self.residual_scale == 1.0;
        plain && self.mlp.experts().is_none()
    }
}

impl Attention {
    fn weights<'a>(&'a self, out: &mut Vec<&'a WeightSpec>) {
        match &self.query {
            Query::Full(q) => q.weights(out),
            Query::Latent { down, norm, up } => {
                [down, up].into_iter().for_each(|p| p.weights(out));
                norm.weights_into(out);
            }
        }
        match &self.keys {
            Keys::Full { k, v } => [k, v].into_iter().for_each(|p| p.weights(out)),
            Keys::Latent {
                down,
                norm,
                k,
                v,
                rotated,
            } => {
                let each = [down, k, v, rotated].into_iter();
                each.for_each(|p| p.weights(out));
                norm.weights_into(out);
            }
        }
        self.o.weights(out);
        let norms = [&self.q_norm, &self.k_norm].into_iter().flatten();
        norms.for_each(|norm| norm.weights_into(out));
        out.extend(&self.sinks);
    }

    fn latent_width(&self) -> usize {
        let of_query = match &self.query {
            Query::Full(_) => 0,
            Query::Latent { down, .. } => down.outputs(),
        };
        match &self.keys {
            Keys::Full { .. } => of_query,
            Keys::Latent { down, .. } => of_query.max(down.outputs()),
        }
    }

    fn own_keys_width(&self) -> usize {
        match &self.keys {
            Keys::Full { .. } => 0,
            Keys::Latent { k, .. } => k.outputs(),
        }
    }

    fn rotated_width(&self) -> usize {
        match &self.keys {
            Keys::Full { .. } => 0,
            Keys::Latent { rotated, .. } => rotated.outputs(),
        }
    }
}

impl Mlp {
    pub fn experts(&self) -> Option<&Experts> {
        match self {
            Mlp::Dense(_) => None,
            Mlp::Experts(experts) => Some(experts),
        }
    }

    pub fn experts_mut(&mut self) -> Option<&mut Experts> {
        match self {
            Mlp::Dense(_) => None,
            Mlp::Experts(experts) => Some(experts),
        }
    }

    fn inner_width(&self) -> usize {
        match self {
            Mlp::Dense(dense) => dense.up.outputs(),
            Mlp::Experts(experts) => experts.shared.as_ref().map_or(0, |mlp| mlp.up.outputs()),
        }
    }
}

impl Experts {
    fn weights<'a>(&'a self, out: &mut Vec<&'a WeightSpec>) {
        self.router.weights(out);
        out.extend(&self.correction);
        let each = self.list.iter().chain(&self.shared);
        each.for_each(|mlp| mlp.weights(out));
        if let Some(gate) = &self.shared_gate {
            gate.weights(out);
        }
    }
}

impl DenseMlp {
    fn weights<'a>(&'a self, out: &mut Vec<&'a WeightSpec>) {
        let each = self.gate.iter().chain([&self.up, &self.down]);
        each.for_each(|p| p.weights(out));
    }
}

impl Norm {
    fn weights_into<'a>(&'a self, out: &mut Vec<&'a WeightSpec>) {
        out.extend(&self.weights);
        out.extend(&self.bias);
    }
}

impl Projection {
    fn weights<'a>(&'a self, out: &mut Vec<&'a WeightSpec>) {
        out.push(&self.weight);
        out.extend(&self.bias);
    }
}
