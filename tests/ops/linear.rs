//! Matrix products against f64, and a row's bits wherever it lies.

use kdscore::backend::cpu::Cpu;
use kdscore::backend::{Backend, HostWeight, Into, Linear, Precision};

use super::{bits, draws, tensor};

const INPUTS: [usize; 4] = [1, 7, 123, 576];
const OUTPUTS: [usize; 10] = [1, 2, 3, 7, 8, 31, 64, 191, 193, 400];
const ROWS: [usize; 5] = [1, 95, 96, 97, 200];

fn map<B: Backend>(b: &B, n: usize, k: usize) -> (Linear<B::Weight>, Vec<f32>, Vec<f32>) {
    let (weight, bias) = (draws(n as u64, n * k), draws(k as u64, n));
    let linear = Linear {
        weight: b
            .weight(&HostWeight::from_f32(&weight, vec![n, k]))
            .unwrap(),
        bias: Some(b.weight(&HostWeight::from_f32(&bias, vec![n])).unwrap()),
    };
    (linear, weight, bias)
}

fn apply<B: Backend>(b: &B, x: &[f32], linear: &Linear<B::Weight>, [n, k]: [usize; 2]) -> Vec<f32> {
    let x = tensor(b, x, k);
    let mut out = b.tensor(Precision::Single, 200, n).unwrap();
    b.linear(&x, linear, Into::Replace, &mut out);
    b.download(&out)
}

fn products_are_right_and_rows_keep_their_bits<B: Backend>(b: &B) {
    for k in INPUTS {
        for n in OUTPUTS {
            let (linear, weight, bias) = map(b, n, k);
            let x = draws(99, 200 * k);
            let all = apply(b, &x, &linear, [n, k]);
            check(&all, &x, &weight, &bias, [n, k]);
            for rows in ROWS {
                let some = apply(b, &x[..rows * k], &linear, [n, k]);
                assert_eq!(
                    bits(&some),
                    bits(&all[..rows * n]),
                    "{rows} rows, {n} x {k}"
                );
            }
            // A row somewhere else in the tile, among other rows.
            for shift in [1, 5, 50, 103] {
                let moved = apply(b, &x[shift * k..], &linear, [n, k]);
                assert_eq!(
                    bits(&moved),
                    bits(&all[shift * n..]),
                    "shift {shift}, {n} x {k}"
                );
            }
        }
    }
}

/// Every product within the rounding of a sum of k terms (Higham, Accuracy and Stability of
/// Numerical Algorithms, 3.1: |error| <= k u sum |x w|).
fn check(got: &[f32], x: &[f32], weight: &[f32], bias: &[f32], [n, k]: [usize; 2]) {
    let unit = f64::from(f32::EPSILON) / 2.0;
    for (row, x) in x.chunks(k).enumerate() {
        for (column, w) in weight.chunks(k).enumerate() {
            let terms = x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w));
            let (sum, size) = terms.fold((0.0, 0.0), |(s, a), t| (s + t, a + t.abs()));
            let exact = sum + f64::from(bias[column]);
            let bound = (k as f64 + 2.0) * unit * (size + exact.abs()) + 1e-30;
            let error = (f64::from(got[row * n + column]) - exact).abs();
            assert!(
                error <= bound,
                "row {row}, column {column}, {n} x {k}: {error:e} > {bound:e}"
            );
        }
    }
}

fn adding_is_adding<B: Backend>(b: &B) {
    let (n, k) = (193, 123);
    let (linear, ..) = map(b, n, k);
    let (x, before) = (draws(3, 97 * k), draws(4, 97 * n));
    let product = apply(b, &x, &linear, [n, k]);
    let mut out = tensor(b, &before, n);
    b.linear(&tensor(b, &x, k), &linear, Into::Add, &mut out);
    for ((sum, before), product) in b.download(&out).iter().zip(&before).zip(&product) {
        assert!((sum - (before + product)).abs() <= 1e-5 * (before.abs() + product.abs() + 1.0));
    }
}

#[test]
fn linear() {
    products_are_right_and_rows_keep_their_bits(&Cpu);
    adding_is_adding(&Cpu);
}

/// A product must not depend on how the weight is stored.
#[test]
fn sixteen_bit_weights_are_widened_exactly() {
    use half::{bf16, f16};
    use kdscore::backend::{Encoding, FloatDtype, HostBytes};
    let (n, k) = (193, 57);
    let x = draws(1, 100 * k);
    let values = draws(2, n * k);
    let narrow: [(FloatDtype, Vec<u8>, Vec<f32>); 2] = [
        (
            FloatDtype::F16,
            values
                .iter()
                .flat_map(|&v| f16::from_f32(v).to_le_bytes())
                .collect(),
            values.iter().map(|&v| f16::from_f32(v).to_f32()).collect(),
        ),
        (
            FloatDtype::Bf16,
            values
                .iter()
                .flat_map(|&v| bf16::from_f32(v).to_le_bytes())
                .collect(),
            values.iter().map(|&v| bf16::from_f32(v).to_f32()).collect(),
        ),
    ];
    for (dtype, bytes, widened) in narrow {
        let length = bytes.len();
        let owner = HostBytes::new(std::sync::Arc::new(bytes), 0..length);
        let stored = HostWeight::stored(owner, None, Encoding::Float(dtype), vec![n, k]);
        let plain = HostWeight::from_f32(&widened, vec![n, k]);
        let [a, b] = [stored, plain].map(|host| {
            let linear = Linear {
                weight: Cpu.weight(&host).unwrap(),
                bias: None,
            };
            bits(&apply(&Cpu, &x, &linear, [n, k]))
        });
        assert_eq!(a, b, "{dtype:?}");
    }
}
