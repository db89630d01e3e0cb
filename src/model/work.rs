//! How much arithmetic a description asks for, in multiply-adds of its products: two of the
//! 2N FLOPs that a token is usually said to cost (Kaplan et al. 2020, arXiv:2001.08361, section
//! 2.1), counted where the decoder computes them. The body runs on every token up to the last row
//! of its sequence, the last layer's queries and MLP and the head on rows alone; looking up an
//! embedding costs nothing, and neither do norms, rotations and activations.

use super::description::{
    Attention, DenseMlp, Description, Experts, Keys, Layer, Mlp, Projection, Query,
};
use crate::backend::Mask;

/// Weights of a teacher, in numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Parameters {
    pub total: u64,
    /// Those a token passes: all but the experts it doesn't take.
    pub active: u64,
}

/// What there is to score, in the totals that work depends on.
#[derive(Clone, PartialEq, Debug)]
pub struct Demand {
    /// Tokens computed: those behind a sequence's last row are not.
    pub tokens: u64,
    pub rows: u64,
    /// For each mask of the description, once.
    pub pairs: Vec<Pairs>,
}

/// Query-key pairs under a mask.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Pairs {
    pub mask: Mask,
    /// Every token a query.
    pub of_tokens: u128,
    /// Only rows are queries, as in the last layer.
    pub of_rows: u128,
}

/// Multiply-adds by what they are for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Work {
    /// Projections, MLPs and experts of all layers.
    pub body: u128,
    /// Scores and their sums over values.
    pub attention: u128,
    pub head: u128,
}

impl Work {
    /// Floating-point operations: a multiplication and an addition each.
    pub fn flops(&self) -> f64 {
        2.0 * (self.body + self.attention + self.head) as f64
    }
}

impl Demand {
    pub fn none(description: &Description) -> Demand {
        let mut demand = Demand {
            tokens: 0,
            rows: 0,
            pairs: Vec::new(),
        };
        for layer in &description.layers {
            let mask = layer.attention.shape.mask;
            if demand.pairs.iter().all(|pairs| pairs.mask != mask) {
                demand.pairs.push(Pairs {
                    mask,
                    of_tokens: 0,
                    of_rows: 0,
                });
            }
        }
        demand
    }

    /// `tokens` and `rows` in sequences of one length, rows spread evenly.
    pub fn even(description: &Description, tokens: u64, rows: u64, length: usize) -> Demand {
        let mut demand = Demand::none(description);
        (demand.tokens, demand.rows) = (tokens, rows);
        let sequences = tokens as f64 / length.max(1) as f64;
        for pairs in &mut demand.pairs {
            let of_tokens = sequences * pairs_of_length(pairs.mask, length) as f64;
            pairs.of_tokens = of_tokens as u128;
            pairs.of_rows = (of_tokens * rows as f64 / tokens.max(1) as f64) as u128;
        }
        demand
    }

    /// Adds a sequence by the positions of its rows, rising.
    pub fn add(&mut self, row_positions: impl Iterator<Item = usize> + Clone) {
        let (mut rows, mut tokens) = (0, 0);
        for position in row_positions.clone() {
            (rows, tokens) = (rows + 1, position + 1);
        }
        (self.rows, self.tokens) = (self.rows + rows, self.tokens + tokens as u64);
        for pairs in &mut self.pairs {
            let seen = |position: usize| position + 1 - pairs.mask.first_key(position);
            pairs.of_tokens += pairs_of_length(pairs.mask, tokens);
            pairs.of_rows += row_positions.clone().map(|p| seen(p) as u128).sum::<u128>();
        }
    }

    pub fn merge(&mut self, other: &Demand) {
        (self.tokens, self.rows) = (self.tokens + other.tokens, self.rows + other.rows);
        for (pairs, other) in self.pairs.iter_mut().zip(&other.pairs) {
            pairs.of_tokens += other.of_tokens;
            pairs.of_rows += other.of_rows;
        }
    }

    fn pairs_under(&self, mask: Mask, rows_only: bool) -> u128 {
        let found = self.pairs.iter().find(|pairs| pairs.mask == mask);
        found.map_or(0, |pairs| match rows_only {
            true => pairs.of_rows,
            false => pairs.of_tokens,
        })
    }
}

/// Pairs of a sequence of `length` tokens, each a query.
fn pairs_of_length(mask: Mask, length: usize) -> u128 {
    let triangle = |n: usize| n as u128 * (n as u128 + 1) / 2;
    match mask {
        Mask::Causal => triangle(length),
        Mask::Window(w) => triangle(length.min(w)) + (length.saturating_sub(w) * w) as u128,
        Mask::Chunk(c) => (length / c) as u128 * triangle(c) + triangle(length % c),
    }
}

impl Description {
    pub fn parameters(&self) -> Parameters {
        let numbers = |shape: &[usize]| shape.iter().map(|&n| n as u64).product::<u64>();
        let weights = self.body_weights();
        let body: u64 = weights.iter().map(|spec| numbers(&spec.shape)).sum();
        let head = match self.head.tied {
            true => 0,
            false => numbers(&self.head.weight.shape),
        };
        let total = body + numbers(&self.embedding.shape) + head;
        let experts = self.layers.iter().filter_map(|layer| layer.mlp.experts());
        let idle: u64 = experts.map(idle_parameters).sum();
        Parameters {
            total,
            active: total - idle,
        }
    }

    /// Multiply-adds of scoring `demand` with `vocab_scored` head rows.
    pub fn work(&self, demand: &Demand, vocab_scored: usize) -> Work {
        let (tokens, rows) = (u128::from(demand.tokens), u128::from(demand.rows));
        let last = self.layers.len().saturating_sub(1);
        let mut work = Work {
            head: rows * (vocab_scored * self.hidden) as u128,
            ..Work::default()
        };
        for (index, layer) in self.layers.iter().enumerate() {
            let rows_only = index == last;
            let queries = if rows_only { rows } else { tokens };
            let attention = &layer.attention;
            work.body += tokens * attention.key_products() + queries * layer.query_products();
            let shape = &attention.shape;
            work.attention += demand.pairs_under(shape.mask, rows_only)
                * (shape.heads * (shape.head_dim + shape.value_dim)) as u128;
        }
        work
    }
}

/// Parameters of the experts that a token doesn't take.
fn idle_parameters(experts: &Experts) -> u64 {
    let chosen = experts.rule.router.chosen.min(experts.list.len());
    let idle = experts.list.iter().skip(chosen);
    idle.map(|mlp| {
        let biases = mlp.projections().filter_map(|p| p.bias.as_ref());
        mlp.products() as u64 + biases.map(|b| b.shape[0] as u64).sum::<u64>()
    })
    .sum()
}

impl Layer {
    /// Multiply-adds of a token that is a query: its own projections and the MLP.
    fn query_products(&self) -> u128 {
        let attention = self.attention.query_products() + products(&self.attention.o);
        attention
            + match &self.mlp {
                Mlp::Dense(dense) => dense.products(),
                Mlp::Experts(experts) => experts.products(),
            }
    }
}

impl Attention {
    fn query_products(&self) -> u128 {
        match &self.query {
            Query::Full(q) => products(q),
            Query::Latent { down, up, .. } => products(down) + products(up),
        }
    }

    fn key_products(&self) -> u128 {
        match &self.keys {
            Keys::Full { k, v } => products(k) + products(v),
            Keys::Latent {
                down,
                k,
                v,
                rotated,
                ..
            } => [down, k, v, rotated].into_iter().map(products).sum(),
        }
    }
}

impl Experts {
    fn products(&self) -> u128 {
        let each = self.list.first().map_or(0, DenseMlp::products);
        let shared = self.shared.as_ref().map_or(0, DenseMlp::products);
        let gate = self.shared_gate.as_ref().map_or(0, products);
        products(&self.router) + self.rule.router.chosen as u128 * each + shared + gate
    }
}

impl DenseMlp {
    fn projections(&self) -> impl Iterator<Item = &Projection> {
        self.gate.iter().chain([&self.up, &self.down])
    }

    fn products(&self) -> u128 {
        self.projections().map(products).sum()
    }
}

fn products(projection: &Projection) -> u128 {
    (projection.outputs() * projection.inputs()) as u128
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_in_closed_form_are_the_pairs_counted() {
        for mask in [
            Mask::Causal,
            Mask::Window(1),
            Mask::Window(5),
            Mask::Chunk(4),
        ] {
            for length in 0..30 {
                let seen = (0..length).map(|p| (p + 1 - mask.first_key(p)) as u128);
                assert_eq!(
                    pairs_of_length(mask, length),
                    seen.sum(),
                    "{mask:?} {length}"
                );
            }
        }
    }
}
