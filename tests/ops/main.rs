//! The ops that a score stands or falls by, against plain f64 loops at awkward sizes, with
//! tolerances from the length of the sums; and a row's bits wherever it lies.
//!
//! Everything is written over the `Backend` trait: another backend joins by a line in each test.

mod attention;
mod head;
mod linear;

use kdscore::backend::{Backend, Precision};

/// Numbers in (-1, 1), the same everywhere, every 37th an outlier: without those a test means
/// little.
pub fn draws(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..count)
        .map(|i| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let value = (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
            if i % 37 == 11 { value * 6.0 } else { value }
        })
        .collect()
}

/// A tensor with these numbers in it.
pub fn tensor<B: Backend>(backend: &B, values: &[f32], width: usize) -> B::Tensor {
    let rows = values.len() / width;
    let mut tensor = backend.tensor(Precision::Single, rows, width).unwrap();
    backend.upload(values, &mut tensor);
    tensor
}

/// Bits, so that equality is equality.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}
