//! Error bars from the spread between shards.

/// A figure, and how far the true one may be with 95 % confidence. `None`: not known.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Estimate {
    pub value: f64,
    pub error: Option<f64>,
}

/// The 97.5 % points of Student's t for 1 to 30 degrees of freedom; any table of it.
const STUDENT: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
];

fn student(degrees: usize) -> f64 {
    match degrees {
        0 => f64::INFINITY,
        n => STUDENT.get(n - 1).copied().unwrap_or(1.96),
    }
}

/// sum(y) / sum(x) of a sample of `drawn.len()` out of `all` units, with the spread of the units
/// about that ratio (Cochran, Sampling Techniques, 3rd edition, 6.4, ratio estimate). A sample of
/// everything has no error; one unit tells none.
pub fn ratio(drawn: &[(f64, f64)], all: usize) -> Estimate {
    let (x, y) = drawn
        .iter()
        .fold((0.0, 0.0), |sum, (x, y)| (sum.0 + x, sum.1 + y));
    let value = y / x;
    let n = drawn.len();
    if n >= all {
        return Estimate {
            value,
            error: Some(0.0),
        };
    }
    if n < 2 {
        return Estimate { value, error: None };
    }
    let squares: f64 = drawn.iter().map(|(x, y)| (y - value * x).powi(2)).sum();
    let left = 1.0 - n as f64 / all as f64;
    let variance = left * squares / (n - 1) as f64 / n as f64;
    let error = student(n - 1) * variance.sqrt() / (x / n as f64);
    Estimate {
        value,
        error: Some(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_and_its_error_by_hand() {
        // 1 in 10 and 3 in 10 make 0.2; each is 1 off; variance (1 - 2/4) x 2 / 1 / 2 = 0.5.
        let found = ratio(&[(10.0, 1.0), (10.0, 3.0)], 4);
        assert_eq!(found.value, 0.2);
        assert!((found.error.unwrap() - 12.706 * 0.5f64.sqrt() / 10.0).abs() < 1e-12);
        assert_eq!(ratio(&[(10.0, 1.0)], 4).error, None);
        assert_eq!(ratio(&[(10.0, 1.0)], 1).error, Some(0.0));
        // Units of any size at one rate have no spread.
        let even = ratio(&[(1.0, 2.0), (10.0, 20.0), (5.0, 10.0)], 9);
        assert!(even.error.unwrap() < 1e-12);
    }
}
