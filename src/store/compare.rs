//! Two scored sets of one corpus, row by row: how far one teacher is from another.
//!
//! A row knows the tokens of its top-k and, of all others, only their mass together. What two rows
//! both tell apart are the ids that both hold; the rest of the vocabulary is one lump. The
//! divergence of the two lumped distributions is a lower bound of the true one, for joining
//! outcomes never raises it (Cover and Thomas, Elements of Information Theory, 2.7 and 2.8), and
//! comes near it where both tails are small.

use std::collections::HashMap;

use anyhow::{Result, ensure};
use rayon::prelude::*;

use super::ScoredSet;
use super::job::PlannedShard;
use super::manifest::Manifest;
use super::rows::ScoredRows;
use crate::products::Product;

/// Rows compared as one piece. Part of what a sum means: pieces are added in order.
const PIECE_ROWS: i64 = 1 << 14;
/// Sequences named for their difference.
const WORST: usize = 5;
/// Buckets of a [`Spread`] for each doubling, and the least value told from 0.
const PER_DOUBLING: f64 = 16.0;
const LEAST: f64 = 1e-9;
const BUCKETS: usize = 1024;

/// How far two rows are from each other.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct RowDifference {
    pub same_first: bool,
    /// Ids in both top-ks.
    pub shared: usize,
    /// Over the shared ids, in nats.
    pub logp_sum: f64,
    pub logp_max: f64,
    /// At least this is KL(a‖b), in nats.
    pub kl: f64,
    /// At least this is KL(b‖a), in nats.
    pub kl_back: f64,
    /// What a and b give to the shared ids.
    pub mass: (f64, f64),
}

/// Values of which the mean, the maximum and, within 5 %, any quantile are known.
#[derive(Clone, Debug)]
pub struct Spread {
    pub count: u64,
    sum: f64,
    pub max: f64,
    buckets: Vec<u64>,
}

/// A sequence, counted over the corpus, with its mean of KL(a‖b).
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct FarSequence {
    pub sequence: u64,
    pub rows: u64,
    pub mean: f64,
}

/// What was found over all rows that both sets hold.
#[derive(Clone, Debug, Default)]
pub struct Difference {
    pub rows: u64,
    pub same_first: u64,
    pub shared: u64,
    pub logp_sum: f64,
    pub logp_max: f64,
    pub kl: Spread,
    pub kl_back: Spread,
    pub mass: (f64, f64),
    /// Sums of the targets' log-probs, in nats.
    pub target_logp: (f64, f64),
    /// Sums of the entropies, in nats, where both sets hold them.
    pub entropy: Option<(f64, f64)>,
    pub farthest: Vec<FarSequence>,
}

impl Default for Spread {
    fn default() -> Spread {
        Spread {
            count: 0,
            sum: 0.0,
            max: 0.0,
            buckets: vec![0; BUCKETS],
        }
    }
}

impl Spread {
    fn add(&mut self, value: f64) {
        let doublings = (value / LEAST).max(1.0).log2();
        let bucket = (doublings * PER_DOUBLING).ceil() as usize;
        self.buckets[bucket.min(BUCKETS - 1)] += 1;
        self.count += 1;
        self.sum += value;
        self.max = self.max.max(value);
    }

    fn merge(&mut self, other: &Spread) {
        for (ours, theirs) in self.buckets.iter_mut().zip(&other.buckets) {
            *ours += theirs;
        }
        self.count += other.count;
        self.sum += other.sum;
        self.max = self.max.max(other.max);
    }

    pub fn mean(&self) -> f64 {
        self.sum / self.count.max(1) as f64
    }

    /// The value that a share `q` of all values does not exceed, at most 5 % too high.
    pub fn quantile(&self, q: f64) -> f64 {
        let wanted = (q * self.count as f64).ceil() as u64;
        let mut seen = 0;
        for (bucket, count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen >= wanted.max(1) {
                let edge = LEAST * (bucket as f64 / PER_DOUBLING).exp2();
                return match bucket {
                    0 => 0.0,
                    _ => edge.min(self.max),
                };
            }
        }
        self.max
    }
}

/// Where each id of a row's top-k stands.
struct Places {
    place: Vec<u32>,
    /// The row that wrote it.
    stamp: Vec<u32>,
    now: u32,
}

impl Places {
    fn new(vocab: usize) -> Places {
        Places {
            place: vec![0; vocab],
            stamp: vec![0; vocab],
            now: 0,
        }
    }

    fn fill(&mut self, rows: &ScoredRows, row: usize) {
        self.now += 1;
        for j in 0..rows.k {
            let id = rows.id(row, j) as usize;
            if let Some(stamp) = self.stamp.get_mut(id) {
                *stamp = self.now;
                self.place[id] = j as u32;
            }
        }
    }

    fn find(&self, id: i32) -> Option<usize> {
        let id = usize::try_from(id).ok()?;
        let known = *self.stamp.get(id)? == self.now;
        known.then(|| self.place[id] as usize)
    }
}

fn difference(
    a: &ScoredRows,
    row_a: usize,
    b: &ScoredRows,
    row_b: usize,
    places: &mut Places,
) -> RowDifference {
    places.fill(b, row_b);
    let mut found = RowDifference {
        same_first: a.id(row_a, 0) == b.id(row_b, 0),
        ..RowDifference::default()
    };
    let mut rest = (a.tail_at_most(row_a), b.tail_at_most(row_b));
    for j in 0..a.k {
        let logp_a = f64::from(a.logp(row_a, j));
        let Some(at) = places.find(a.id(row_a, j)) else {
            rest.0 += logp_a.exp();
            continue;
        };
        let logp_b = f64::from(b.logp(row_b, at));
        let (p, q) = (logp_a.exp(), logp_b.exp());
        found.shared += 1;
        found.logp_sum += (logp_a - logp_b).abs();
        found.logp_max = found.logp_max.max((logp_a - logp_b).abs());
        found.mass.0 += p;
        found.mass.1 += q;
        // Each term is at least 0, for what is stored adds up to 1 only up to rounding.
        found.kl += p * (logp_a - logp_b) - p + q;
        found.kl_back += q * (logp_b - logp_a) - q + p;
    }
    let all_b: f64 = (0..b.k).map(|j| f64::from(b.logp(row_b, j)).exp()).sum();
    rest.1 += (all_b - found.mass.1).max(0.0);
    if rest.0 > 0.0 && rest.1 > 0.0 {
        found.kl += rest.0 * (rest.0 / rest.1).ln() - rest.0 + rest.1;
        found.kl_back += rest.1 * (rest.1 / rest.0).ln() - rest.1 + rest.0;
    }
    found
}

/// Sequences that both sets have committed.
#[derive(Clone, Debug)]
pub struct Pair {
    a: (PlannedShard, Manifest),
    b: (PlannedShard, Manifest),
    /// Counted inside the corpus shard.
    sequences: std::ops::Range<u64>,
    /// Sequences before the corpus shard.
    before: u64,
}

/// Everything that both sets have committed, in corpus order.
///
/// # Errors
/// A damaged manifest.
pub fn pairs(a: &ScoredSet, b: &ScoredSet) -> Result<Vec<Pair>> {
    let mut of_b: HashMap<String, Vec<(PlannedShard, Manifest)>> = HashMap::new();
    for (planned, manifest) in committed(b)? {
        let shard = of_b.entry(planned.corpus_shard.clone()).or_default();
        shard.push((planned, manifest));
    }
    let mut starts = HashMap::new();
    let mut total = 0;
    for planned in &a.job().plan {
        starts.entry(planned.corpus_shard.clone()).or_insert(total);
        total += planned.sequences();
    }
    let mut pairs = Vec::new();
    for (planned, manifest) in committed(a)? {
        for other in of_b.get(&planned.corpus_shard).into_iter().flatten() {
            let first = planned.first_sequence.max(other.0.first_sequence);
            let end = planned.end_sequence.min(other.0.end_sequence);
            if first < end {
                pairs.push(Pair {
                    before: starts[&planned.corpus_shard],
                    a: (planned.clone(), manifest.clone()),
                    b: other.clone(),
                    sequences: first..end,
                });
            }
        }
    }
    Ok(pairs)
}

fn committed(set: &ScoredSet) -> Result<Vec<(PlannedShard, Manifest)>> {
    let plan = set.job().plan.iter().cloned();
    let manifests = set.manifests()?;
    let both = plan.zip(manifests);
    Ok(both.filter_map(|(p, m)| Some((p, m?))).collect())
}

impl Pair {
    /// The rows of both, compared.
    ///
    /// # Errors
    /// Arrays that can't be read or don't hold the same targets.
    pub fn compare(&self, a: &ScoredSet, b: &ScoredSet) -> Result<Difference> {
        let (files_a, files_b) = (a.shard(&self.a.1)?, b.shard(&self.b.1)?);
        let side_a = Side::new(&files_a.rows()?, files_a.row_offsets()?, &self.a.0)?;
        let side_b = Side::new(&files_b.rows()?, files_b.row_offsets()?, &self.b.0)?;
        let pieces = side_a.pieces(&self.sequences);
        let pieces: Vec<Difference> = pieces
            .into_par_iter()
            .map(|piece| self.piece(&side_a, &side_b, piece))
            .collect::<Result<_>>()?;
        let mut all = Difference::default();
        pieces.iter().for_each(|piece| all.merge(piece));
        Ok(all)
    }

    fn piece(&self, a: &Side, b: &Side, sequences: std::ops::Range<u64>) -> Result<Difference> {
        let mut places = Places::new(b.rows.vocab());
        let mut all = Difference::default();
        for sequence in sequences {
            let (rows_a, rows_b) = (a.rows_of(sequence), b.rows_of(sequence));
            let place = || {
                format!(
                    "{} and {}: sequence {sequence} of {}",
                    self.a.0.id, self.b.0.id, self.a.0.corpus_shard
                )
            };
            ensure!(
                rows_a.len() == rows_b.len(),
                "{}: expected as many rows in both sets, found {} and {}; verify says which is damaged",
                place(),
                rows_a.len(),
                rows_b.len()
            );
            let mut sum = 0.0;
            let count = rows_a.len() as u64;
            for (row_a, row_b) in rows_a.zip(rows_b) {
                let targets = (a.rows.target(row_a), b.rows.target(row_b));
                ensure!(
                    targets.0 == targets.1,
                    "{}: expected the same targets in both sets, found {} and {}; verify says which is damaged",
                    place(),
                    targets.0,
                    targets.1
                );
                let found = difference(&a.rows, row_a, &b.rows, row_b, &mut places);
                sum += found.kl;
                all.add(&found);
                all.target_logp.0 += target_logp(&a.rows, row_a);
                all.target_logp.1 += target_logp(&b.rows, row_b);
                if let (Some(of_a), Some(of_b)) = (
                    a.rows.extra(Product::Entropy),
                    b.rows.extra(Product::Entropy),
                ) {
                    let sums = all.entropy.get_or_insert_default();
                    sums.0 += f64::from(of_a.f32(row_a));
                    sums.1 += f64::from(of_b.f32(row_b));
                }
            }
            if count > 0 {
                all.note_far(FarSequence {
                    sequence: self.before + sequence,
                    rows: count,
                    mean: sum / count as f64,
                });
            }
        }
        Ok(all)
    }
}

/// One set's rows of a planned shard.
struct Side<'a> {
    rows: ScoredRows<'a>,
    offsets: &'a [i64],
    first: u64,
}

impl<'a> Side<'a> {
    /// # Errors
    /// Offsets that are not those of the sequences and rows.
    fn new(rows: &ScoredRows<'a>, offsets: &'a [i64], planned: &PlannedShard) -> Result<Side<'a>> {
        let fits = offsets.len() as u64 == planned.sequences() + 1
            && offsets.first() == Some(&0)
            && offsets.last() == Some(&(rows.rows as i64))
            && offsets.is_sorted();
        ensure!(
            fits,
            "{}: row_offsets: expected {} offsets that rise from 0 to {}, found others; verify says what is damaged",
            planned.id,
            planned.sequences() + 1,
            rows.rows
        );
        Ok(Side {
            rows: rows.clone(),
            offsets,
            first: planned.first_sequence,
        })
    }

    fn rows_of(&self, sequence: u64) -> std::ops::Range<usize> {
        let at = (sequence - self.first) as usize;
        self.offsets[at] as usize..self.offsets[at + 1] as usize
    }

    /// The sequences in pieces of about as many rows.
    fn pieces(&self, sequences: &std::ops::Range<u64>) -> Vec<std::ops::Range<u64>> {
        let (mut pieces, mut first) = (Vec::new(), sequences.start);
        for sequence in sequences.clone() {
            let rows = self.rows_of(sequence).end - self.rows_of(first).start;
            if rows as i64 >= PIECE_ROWS || sequence + 1 == sequences.end {
                pieces.push(first..sequence + 1);
                first = sequence + 1;
            }
        }
        pieces
    }
}

/// As the manifest's sums count it.
fn target_logp(rows: &ScoredRows, row: usize) -> f64 {
    match rows.extra(Product::TargetLogp) {
        Some(column) => f64::from(column.f32(row)),
        None => rows.logp_of(row, rows.target(row)),
    }
}

impl Difference {
    fn add(&mut self, row: &RowDifference) {
        self.rows += 1;
        self.same_first += u64::from(row.same_first);
        self.shared += row.shared as u64;
        self.logp_sum += row.logp_sum;
        self.logp_max = self.logp_max.max(row.logp_max);
        self.kl.add(row.kl.max(0.0));
        self.kl_back.add(row.kl_back.max(0.0));
        self.mass.0 += row.mass.0;
        self.mass.1 += row.mass.1;
    }

    /// Adds what was found in other rows.
    pub fn merge(&mut self, other: &Difference) {
        self.rows += other.rows;
        self.same_first += other.same_first;
        self.shared += other.shared;
        self.logp_sum += other.logp_sum;
        self.logp_max = self.logp_max.max(other.logp_max);
        self.kl.merge(&other.kl);
        self.kl_back.merge(&other.kl_back);
        self.mass.0 += other.mass.0;
        self.mass.1 += other.mass.1;
        self.target_logp.0 += other.target_logp.0;
        self.target_logp.1 += other.target_logp.1;
        if let Some(theirs) = other.entropy {
            let sums = self.entropy.get_or_insert_default();
            sums.0 += theirs.0;
            sums.1 += theirs.1;
        }
        other.farthest.iter().for_each(|&far| self.note_far(far));
    }

    fn note_far(&mut self, far: FarSequence) {
        let at = self
            .farthest
            .partition_point(|known| known.mean >= far.mean);
        self.farthest.insert(at, far);
        self.farthest.truncate(WORST);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::job::Terms;
    use super::super::rows::Column;
    use super::*;
    use crate::products::Dtype;

    /// What a row of the `k` most probable ids keeps of a distribution, by ids, log-probs and tail.
    fn kept(p: &[f64], k: usize) -> (Vec<i32>, Vec<f32>, f32) {
        let mut ids: Vec<usize> = (0..p.len()).collect();
        ids.sort_by(|&i, &j| p[j].total_cmp(&p[i]).then(i.cmp(&j)));
        let tail: f64 = ids[k..].iter().map(|&i| p[i]).sum();
        let logp = ids[..k].iter().map(|&i| p[i].ln() as f32);
        let logp = logp.collect();
        let ids = ids[..k].iter().map(|&i| i as i32);
        (ids.collect(), logp, tail as f32)
    }

    fn compared(p: &[f64], k_a: usize, q: &[f64], k_b: usize) -> RowDifference {
        let bytes = [(p, k_a), (q, k_b)].map(|(p, k)| {
            let (ids, logp, tail) = kept(p, k);
            let ints = |values: &[i32]| -> Vec<u8> {
                values.iter().flat_map(|v| v.to_le_bytes()).collect()
            };
            let floats = |values: &[f32]| -> Vec<u8> {
                values.iter().flat_map(|v| v.to_le_bytes()).collect()
            };
            let columns = [ints(&[0]), ints(&ids), floats(&logp), floats(&[tail])];
            let base = Product::BASE.map(|p| (p, p.dtype(Dtype::F32)));
            let terms = Terms {
                k,
                vocab_scored: p.len(),
                products: base.to_vec(),
            };
            (columns, terms)
        });
        let rows = bytes.each_ref().map(|(columns, terms)| {
            ScoredRows::new(terms, 1, |product| {
                let at = Product::BASE.iter().position(|&p| p == product)?;
                let (dtype, bytes) = (terms.products[at].1, &columns[at][..]);
                Some(Column { dtype, bytes })
            })
            .unwrap()
        });
        difference(&rows[0], 0, &rows[1], 0, &mut Places::new(q.len()))
    }

    fn divergence(p: &[f64], q: &[f64]) -> f64 {
        p.iter().zip(q).map(|(p, q)| p * (p / q).ln()).sum()
    }

    fn distribution() -> impl Strategy<Value = Vec<f64>> {
        prop::collection::vec(-8.0..8.0_f64, 12).prop_map(|logits| {
            let sum: f64 = logits.iter().map(|l| l.exp()).sum();
            logits.iter().map(|l| l.exp() / sum).collect()
        })
    }

    proptest! {
        #[test]
        fn divergences_are_bounded_from_below_and_exact_where_all_is_known(
            p in distribution(),
            q in distribution(),
            k_a in 1_usize..=12,
            k_b in 1_usize..=12,
        ) {
            let found = compared(&p, k_a, &q, k_b);
            let back = compared(&q, k_b, &p, k_a);
            prop_assert!((found.kl - back.kl_back).abs() < 1e-6);
            prop_assert!((found.kl_back - back.kl).abs() < 1e-6);
            prop_assert!(found.kl >= -1e-6 && found.kl <= divergence(&p, &q) + 1e-5);
            prop_assert!(found.kl_back <= divergence(&q, &p) + 1e-5);
            let (of_a, of_b) = (kept(&p, k_a).0, kept(&q, k_b).0);
            prop_assert_eq!(found.shared, of_a.iter().filter(|id| of_b.contains(id)).count());
            prop_assert_eq!(found.same_first, of_a[0] == of_b[0]);
            let exact = compared(&p, 12, &q, 12);
            prop_assert!((exact.kl - divergence(&p, &q)).abs() < 1e-5);
            prop_assert!((exact.kl_back - divergence(&q, &p)).abs() < 1e-5);
            // More ids known, more of the divergence.
            prop_assert!(found.kl <= exact.kl + 1e-6);
        }

        #[test]
        fn quantiles_are_within_five_percent(mut values in prop::collection::vec(1e-7..40.0_f64, 1..200), q in 0.0..=1.0_f64) {
            let mut spread = Spread::default();
            values.iter().for_each(|&v| spread.add(v));
            values.sort_by(f64::total_cmp);
            let at = ((q * values.len() as f64).ceil() as usize).max(1) - 1;
            let found = spread.quantile(q);
            prop_assert!(found >= values[at] * 0.9999 && found <= values[at] * 1.05, "{found} for {}", values[at]);
        }
    }
}
