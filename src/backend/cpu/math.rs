//! Scalar functions and sums whose bits are the same on every instruction set: plain multiplies
//! and adds in a fixed order, in lanes that a compiler can vectorise.

/// Lanes of a sum. Fixed, so the order of additions never depends on the machine.
pub const LANES: usize = 16;

/// e^x, within 2 ulp for the results that are normal numbers; 0 below -87.3.
///
/// Range reduction by ln 2 in two parts and the degree-6 minimax polynomial of Cephes' `expf`
/// (Moshier, netlib cephes/single).
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LOG2E: f32 = std::f32::consts::LOG2_E;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to an integer
    const MIN: f32 = -87.3;
    const MAX: f32 = 88.3;
    let clamped = if x < MIN { MIN } else { x };
    let clamped = if clamped > MAX { MAX } else { clamped };
    let n = (clamped * LOG2E + ROUND) - ROUND;
    let r = (clamped - n * LN2_HIGH) - n * LN2_LOW;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    p = p * (r * r) + r + 1.0;
    let scale = f32::from_bits((((n as i32) + 127) << 23) as u32);
    if x < MIN { 0.0 } else { p * scale }
}

/// x * sigmoid(x).
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// 1 / (1 + e^-x).
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// tanh x, within 2e-7 of it.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    1.0 - 2.0 / (1.0 + exp(2.0 * x))
}

/// cap * tanh(x / cap): x within -cap and cap, smoothly.
#[inline(always)]
pub fn soft_cap(x: f32, cap: f32) -> f32 {
    cap * tanh(x / cap)
}

/// The error function, within 4e-7 of it: the rational approximation on [-4, 4] of Eigen
/// (MathFunctionsImpl.h, generic_fast_erf_float) and XLA.
#[inline(always)]
pub fn erf(x: f32) -> f32 {
    let x = x.clamp(-4.0, 4.0);
    let x2 = x * x;
    let mut p = -2.726_142_3e-10;
    p = p * x2 + 2.770_681_5e-8;
    p = p * x2 - 2.101_024e-6;
    p = p * x2 - 5.692_506_3e-5;
    p = p * x2 - 7.349_906_5e-4;
    p = p * x2 - 2.954_6e-3;
    p = p * x2 - 1.609_603_3e-2;
    let mut q = -1.456_607_1e-5;
    q = q * x2 - 2.133_740_6e-4;
    q = q * x2 - 1.682_827e-3;
    q = q * x2 - 7.373_329e-3;
    q = q * x2 - 1.426_473_9e-2;
    x * p / q
}

/// Sum of f(x) over the values: lanes first, then the lanes in order.
#[inline(always)]
pub fn sum_by(values: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let chunks = values.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, &v) in lanes.iter_mut().zip(chunk) {
            *lane += f(v);
        }
    }
    for (lane, &v) in lanes.iter_mut().zip(rest) {
        *lane += f(v);
    }
    lanes.iter().sum()
}

/// Largest value; -inf for none. A NaN is passed over: callers that care look for it.
#[inline(always)]
pub fn max(values: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = values.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, &v) in lanes.iter_mut().zip(chunk) {
            *lane = if v > *lane { v } else { *lane };
        }
    }
    let lanes_max = lanes.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
    rest.iter().fold(lanes_max, |a, &b| a.max(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_ulp() {
        let mut worst = 0.0f64;
        for i in 0..2_000_000 {
            let x = -87.2 + i as f32 * (87.2 + 20.0) / 2_000_000.0;
            let exact = f64::from(x).exp();
            let ulp = f64::from((exact as f32).next_up()) - f64::from(exact as f32);
            worst = worst.max((f64::from(exp(x)) - exact).abs() / ulp);
        }
        assert!(worst < 2.0, "{worst} ulp");
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-100.0), 0.0);
    }

    /// erf by its Taylor series (|x| < 3) in f64.
    fn exact_erf(x: f64) -> f64 {
        let mut term = x;
        let mut sum = x;
        for n in 1..200 {
            term *= -x * x / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        sum * 2.0 / std::f64::consts::PI.sqrt()
    }

    #[test]
    fn erf_and_tanh_are_close_everywhere() {
        for i in -3000..=3000 {
            let x = i as f32 / 1000.0;
            let e = f64::from(erf(x)) - exact_erf(f64::from(x));
            assert!(e.abs() < 4e-7, "erf({x}) is off by {e}");
            let t = f64::from(tanh(x)) - f64::from(x).tanh();
            assert!(t.abs() < 2e-7, "tanh({x}) is off by {t}");
        }
        assert!((erf(9.0) - 1.0).abs() < 4e-7 && (erf(-9.0) + 1.0).abs() < 4e-7);
        assert_eq!((tanh(60.0), tanh(-60.0)), (1.0, -1.0));
        assert!((soft_cap(1e9, 30.0) - 30.0).abs() < 1e-5);
    }

    #[test]
    fn sums_and_maxima_cover_every_length() {
        for n in 0..70usize {
            let values: Vec<f32> = (0..n).map(|i| (i as f32 * 37.0) % 11.0 - 5.0).collect();
            let exact: f32 = values.iter().map(|v| v * v).sum();
            assert!((sum_by(&values, |v| v * v) - exact).abs() < 1e-3);
            let largest = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert_eq!(max(&values), largest);
        }
    }
}
