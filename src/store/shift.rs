//! The shift test: do the stored rows fit the tokens they stand beside better than the tokens
//! one step to either side?

use crate::corpus::CorpusShard;

use super::job::PlannedShard;
use super::rows::ScoredRows;

/// Fewer pairs than this, and the test says nothing.
pub const PAIRS_MIN: u64 = 1000;
/// A mean difference of fewer standard errors than this says nothing.
pub const ERRORS_MIN: f64 = 5.0;
/// Log-probs below this count as this, so that a handful of ruled-out tokens can't hide the rest.
const LOGP_LEAST: f64 = -50.0;

/// Paired differences: log-prob of the row's target minus that of a token one step aside.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Paired {
    pub pairs: u64,
    sum: f64,
    sum_of_squares: f64,
}

impl Paired {
    fn add(&mut self, difference: f64) {
        self.pairs += 1;
        self.sum += difference;
        self.sum_of_squares += difference * difference;
    }

    pub fn merge(&mut self, other: &Paired) {
        self.pairs += other.pairs;
        self.sum += other.sum;
        self.sum_of_squares += other.sum_of_squares;
    }

    /// Nats by which the target fits better.
    pub fn mean(&self) -> f64 {
        self.sum / self.pairs as f64
    }

    pub fn standard_error(&self) -> f64 {
        let pairs = self.pairs as f64;
        let variance = (self.sum_of_squares / pairs - self.mean().powi(2)).max(0.0);
        (variance / pairs).sqrt()
    }
}

/// What the shift test found, over both steps.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct ShiftTest {
    /// Against the token before the target.
    pub before: Paired,
    /// Against the token after it.
    pub after: Paired,
}

/// What the shift test says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Alignment {
    Aligned,
    /// Rows fit better the token this many steps from their target.
    Shifted(i8),
    CannotTell,
}

impl ShiftTest {
    /// Adds the rows of some sequences; `first_row` is the first one's first row.
    pub fn add_sequence(
        &mut self,
        rows: &ScoredRows,
        view: &CorpusShard,
        s: usize,
        first_row: usize,
    ) {
        let sequence = view.sequence(s);
        for (i, row) in sequence.rows().enumerate() {
            let logp = |token: i32| rows.logp_of(first_row + i, token).max(LOGP_LEAST);
            let here = logp(row.target);
            self.before.add(here - logp(sequence.tokens[row.position]));
            if let Some(&next) = sequence.tokens.get(row.position + 2) {
                self.after.add(here - logp(next));
            }
        }
    }

    /// Adds a whole scored shard.
    pub fn add_shard(
        &mut self,
        rows: &ScoredRows,
        view: &CorpusShard,
        planned: &PlannedShard,
        row_offsets: &[i64],
    ) {
        for (s, &first_row) in planned.range().zip(row_offsets) {
            self.add_sequence(rows, view, s, first_row as usize);
        }
    }

    pub fn merge(&mut self, other: &ShiftTest) {
        self.before.merge(&other.before);
        self.after.merge(&other.after);
    }

    pub fn alignment(&self) -> Alignment {
        let steps = [(-1, &self.before), (1, &self.after)];
        let told = |paired: &Paired| {
            let enough = paired.pairs >= PAIRS_MIN;
            enough && paired.mean().abs() > ERRORS_MIN * paired.standard_error()
        };
        if let Some((step, _)) = steps.iter().find(|(_, p)| told(p) && p.mean() < 0.0) {
            return Alignment::Shifted(*step);
        }
        match steps.iter().all(|(_, p)| told(p)) {
            true => Alignment::Aligned,
            false => Alignment::CannotTell,
        }
    }
}

#[cfg(test)]
impl Paired {
    /// Differences that lie `spread` to either side of `mean`.
    pub fn around(pairs: u64, mean: f64, spread: f64) -> Paired {
        let mut paired = Paired::default();
        for i in 0..pairs {
            let side = if i % 2 == 0 { spread } else { -spread };
            paired.add(mean + side);
        }
        paired
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn little_or_weak_evidence_says_nothing() {
        let strong = Paired::around(1000, 1.0, 0.5);
        let test = |before, after| ShiftTest { before, after }.alignment();
        assert_eq!(test(strong, strong), Alignment::Aligned);
        assert_eq!(
            test(strong, Paired::around(999, 1.0, 0.5)),
            Alignment::CannotTell
        );
        assert_eq!(
            test(Paired::around(1000, 0.1, 1.0), strong),
            Alignment::CannotTell
        );
        assert_eq!(
            test(Paired::around(1000, -1.0, 0.5), strong),
            Alignment::Shifted(-1)
        );
        assert_eq!(
            test(strong, Paired::around(1000, -1.0, 0.5)),
            Alignment::Shifted(1)
        );
        assert_eq!(ShiftTest::default().alignment(), Alignment::CannotTell);
    }
}
