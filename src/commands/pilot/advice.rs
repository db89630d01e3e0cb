//! What a pilot recommends, as pure functions of what it measured.

use crate::cost::spread::Estimate;

/// A token budget and the rate it gave.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SweepPoint {
    pub token_budget: usize,
    pub tokens_per_second: f64,
}

/// A budget this close to the fastest is as good, and smaller ones hold less memory.
const AS_GOOD: f64 = 0.98;

/// The smallest budget that is as good as the fastest. `None` where larger ones than were tried
/// might be faster: none so large as most of `own`, the run's, was, and the rate still rose within
/// the last two.
pub fn token_budget(sweep: &[SweepPoint], own: usize) -> Option<usize> {
    let rates = sweep.iter().map(|point| point.tokens_per_second);
    let best = rates.fold(0.0, f64::max);
    let good = sweep
        .iter()
        .filter(|p| p.tokens_per_second >= AS_GOOD * best);
    let smallest = good.map(|point| point.token_budget).min()?;
    let largest = sweep.iter().map(|point| point.token_budget).max()?;
    (largest >= own / 2 || 2 * smallest < largest).then_some(smallest)
}

/// The smallest k whose mean tail mass is below the bound. `tails[k - 1]` is that of k.
pub fn smallest_k(tails: &[f64], tail_below: f64) -> Option<usize> {
    Some(tails.iter().position(|&tail| tail < tail_below)? + 1)
}

/// Seconds a FLOP, with the spread between shards and the drift of the machine's own speed
/// between the pilot's start and end in its error.
pub fn with_drift(rate: Estimate, peaks: [f64; 2]) -> Estimate {
    let drift = (peaks[0] / peaks[1]).ln().abs() * rate.value;
    Estimate {
        value: rate.value,
        error: rate.error.map(|error| error.hypot(drift)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_budget_within_two_percent_is_advised() {
        let point = |token_budget, tokens_per_second| SweepPoint {
            token_budget,
            tokens_per_second,
        };
        let sweep = [point(480, 90.0), point(960, 99.0), point(1920, 100.0)];
        assert_eq!(token_budget(&sweep, 2000), Some(960));
        assert_eq!(token_budget(&sweep[..1], 480), Some(480));
        assert_eq!(token_budget(&sweep, 8000), None, "still rising");
        let level = [sweep[0], sweep[1], sweep[2], point(3840, 100.0)];
        assert_eq!(token_budget(&level, 8000), Some(960));
        assert_eq!(token_budget(&[], 480), None);
    }

    #[test]
    fn k_is_the_first_below_the_bound() {
        let tails = [0.5, 0.1, 0.01, 0.009];
        assert_eq!(smallest_k(&tails, 0.2), Some(2));
        assert_eq!(smallest_k(&tails, 0.01), Some(4));
        assert_eq!(smallest_k(&tails, 1e-4), None);
    }

    #[test]
    fn a_machine_that_slowed_down_widens_the_error() {
        let rate = Estimate {
            value: 2.0,
            error: Some(0.3),
        };
        assert_eq!(with_drift(rate, [5.0, 5.0]).error, Some(0.3));
        let wider = with_drift(rate, [5.0, 4.0]).error.unwrap();
        assert!((wider - (0.09 + (2.0 * 1.25f64.ln()).powi(2)).sqrt()).abs() < 1e-12);
    }
}
