//! What must hold in every row of a scored shard, whatever the teacher.

use rayon::prelude::*;

use super::rows::ScoredRows;
use crate::products::Product;

/// What the probabilities may miss 1 by before they are rounded, and log-probs of one token by
/// between two products.
const SUM_SLACK: f64 = 1e-5;
/// Rows checked as one piece.
const PIECE_ROWS: usize = 1 << 14;

/// A row that can't be right: which array, and what is wrong in words.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BadRow {
    pub row: usize,
    pub product: Product,
    pub what: String,
}

/// The first row that can't be right.
pub fn first_bad_row(rows: &ScoredRows) -> Option<BadRow> {
    (0..rows.rows.div_ceil(PIECE_ROWS))
        .into_par_iter()
        .find_map_first(|piece| {
            let mut seen = Seen::new(rows.vocab());
            let end = ((piece + 1) * PIECE_ROWS).min(rows.rows);
            (piece * PIECE_ROWS..end).find_map(|row| {
                let bad = bad_base(rows, row, &mut seen).or_else(|| bad_extra(rows, row));
                bad.map(|(product, what)| BadRow { row, product, what })
            })
        })
}

type Bad = Option<(Product, String)>;

fn bad_base(rows: &ScoredRows, row: usize, seen: &mut Seen) -> Bad {
    bad_ids(rows, row, seen)
        .map(|what| (Product::Ids, what))
        .or_else(|| bad_logp(rows, row).map(|what| (Product::Logp, what)))
        .or_else(|| bad_tail(rows, row).map(|what| (Product::Tail, what)))
}

fn bad_ids(rows: &ScoredRows, row: usize, seen: &mut Seen) -> Option<String> {
    seen.next_row();
    for j in 0..rows.k {
        let id = rows.id(row, j);
        let Some(index) = usize::try_from(id).ok().filter(|&i| i < rows.vocab()) else {
            return Some(format!(
                "expected ids from 0 to below {}, found {id}",
                rows.vocab()
            ));
        };
        if !seen.is_new(index) {
            return Some(format!("expected each id once, found {id} twice"));
        }
    }
    None
}

fn bad_logp(rows: &ScoredRows, row: usize) -> Option<String> {
    let mut above = 0.0;
    for j in 0..rows.k {
        let logp = rows.logp(row, j);
        // Written so that NaN fails too.
        if !(logp <= above && logp.is_finite()) {
            let what = if j == 0 {
                "log-probs of at most"
            } else {
                "log-probs that never rise, after"
            };
            return Some(format!("expected {what} {above}, found {logp}"));
        }
        above = logp;
    }
    None
}

/// Top-k probabilities and tail sum to 1, up to what rounding each to its dtype may take.
fn bad_tail(rows: &ScoredRows, row: usize) -> Option<String> {
    let tail = rows.tail(row);
    if !(tail >= 0.0 && tail.is_finite()) {
        return Some(format!("expected a probability, found {tail}"));
    }
    let mut sum = f64::from(tail);
    let mut bound = SUM_SLACK + rows.tail_half_spacing(tail);
    for j in 0..rows.k {
        let logp = rows.logp(row, j);
        let p = f64::from(logp).exp();
        sum += p;
        bound += p * rows.logp_half_spacing(logp).exp_m1();
    }
    ((sum - 1.0).abs() > bound).then(|| {
        format!("expected top-k probabilities and tail to sum to 1 within {bound:.1e}, found {sum}")
    })
}

fn bad_extra(rows: &ScoredRows, row: usize) -> Bad {
    let target = rows.target(row);
    let rank = rows.rank(row, target);
    let value = |product: Product| rows.extra(product).map(|column| column.f32(row));
    let target_logp = value(Product::TargetLogp).and_then(|logp| {
        bad_target_logp(rows, row, rank, logp).map(|what| (Product::TargetLogp, what))
    });
    target_logp
        .or_else(|| {
            let stored = rows.extra(Product::TargetRank)?.i32(row);
            bad_rank(rows, rank, stored).map(|what| (Product::TargetRank, what))
        })
        .or_else(|| {
            let value = value(Product::Logsumexp).filter(|v| !v.is_finite())?;
            Some((
                Product::Logsumexp,
                format!("expected a finite value, found {value}"),
            ))
        })
        .or_else(|| {
            let entropy = value(Product::Entropy)?;
            let most = (rows.vocab() as f32).ln() * (1.0 + 1e-4);
            let fits = (-1e-4..=most).contains(&entropy);
            (!fits).then(|| {
                let what = format!("expected an entropy from 0 to {most}, found {entropy}");
                (Product::Entropy, what)
            })
        })
}

fn bad_target_logp(
    rows: &ScoredRows,
    row: usize,
    rank: Option<usize>,
    logp: f32,
) -> Option<String> {
    if !(logp <= 0.0 && logp.is_finite()) {
        return Some(format!("expected a log-prob of at most 0, found {logp}"));
    }
    let stored = rows.logp(row, rank.unwrap_or(rows.k - 1));
    let slack = SUM_SLACK + rows.logp_half_spacing(stored);
    let (logp, stored) = (f64::from(logp), f64::from(stored));
    match rank {
        Some(_) if (logp - stored).abs() > slack => Some(format!(
            "expected {stored}, the target's entry in logp, found {logp}"
        )),
        None if logp > stored + slack => Some(format!(
            "expected a target outside the top-k below its last entry {stored}, found {logp}"
        )),
        _ => None,
    }
}

fn bad_rank(rows: &ScoredRows, rank: Option<usize>, stored: i32) -> Option<String> {
    let fits = match (usize::try_from(stored), rank) {
        (Ok(stored), Some(rank)) => stored == rank,
        (Ok(stored), None) => (rows.k..rows.vocab()).contains(&stored),
        (Err(_), _) => false,
    };
    let expected = rank.map_or_else(
        || format!("a rank from {} to below {}", rows.k, rows.vocab()),
        |rank| format!("rank {rank}, the target's place among the ids"),
    );
    (!fits).then(|| format!("expected {expected}, found {stored}"))
}

/// Which ids the current row has had, without clearing between rows.
struct Seen {
    row: u32,
    last_row: Vec<u32>, // (V)
}

impl Seen {
    fn new(vocab: usize) -> Seen {
        Seen {
            row: 0,
            last_row: vec![0; vocab],
        }
    }

    fn next_row(&mut self) {
        self.row += 1;
    }

    fn is_new(&mut self, id: usize) -> bool {
        std::mem::replace(&mut self.last_row[id], self.row) != self.row
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::products::Dtype;
    use crate::store::job::Terms;
    use crate::store::rows::Column;

    /// What is wrong with one row of three ids out of five, given as f32.
    fn verdict(ids: [i32; 3], logp: [f32; 3], tail: f32) -> Option<Product> {
        let base = Product::BASE.map(|p| (p, p.dtype(Dtype::F32)));
        let terms = Terms {
            k: 3,
            vocab_scored: 5,
            products: base.to_vec(),
        };
        let ints = |values: &[i32]| values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let floats = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let bytes: [Vec<u8>; 4] = [ints(&[4]), ints(&ids), floats(&logp), floats(&[tail])];
        let rows = ScoredRows::new(&terms, 1, |product| {
            let at = Product::BASE.iter().position(|&p| p == product)?;
            Some(Column {
                dtype: base[at].1,
                bytes: &bytes[at],
            })
        });
        first_bad_row(&rows.unwrap()).map(|bad| bad.product)
    }

    #[test]
    fn each_thing_that_can_be_wrong_with_a_row_is_found() {
        let [half, quarter, eighth] = [0.5f32.ln(), 0.25f32.ln(), 0.125f32.ln()];
        let good = [half, quarter, eighth];
        assert_eq!(verdict([4, 0, 2], good, 0.125), None);
        for ids in [[4, 0, 4], [4, 5, 2], [-1, 0, 2]] {
            assert_eq!(verdict(ids, good, 0.125), Some(Product::Ids), "{ids:?}");
        }
        for logp in [
            [quarter, half, eighth],
            [half, eighth, quarter],
            [0.1, quarter, eighth],
            [half, f32::NAN, eighth],
            [half, quarter, f32::NEG_INFINITY],
        ] {
            let found = verdict([4, 0, 2], logp, 0.125);
            assert_eq!(found, Some(Product::Logp), "{logp:?}");
        }
        for tail in [0.12, 0.13, 0.0, -0.125, f32::NAN] {
            assert_eq!(
                verdict([4, 0, 2], good, tail),
                Some(Product::Tail),
                "{tail}"
            );
        }
    }
}
