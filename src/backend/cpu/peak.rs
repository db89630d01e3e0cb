//! What the processor can do at best: square f32 products by the same gemm that the decoder uses,
//! one at a time on every thread.

use std::time::Instant;

use rayon::prelude::*;

/// Side of the matrices: 2 MiB each, so that a product is bound by arithmetic.
const SIDE: usize = 720;
/// Products of one thread in a round.
const PRODUCTS: usize = 2;
/// The fastest round counts: a slower one met something else on the machine.
const ROUNDS: usize = 4;

/// FLOP/s of all threads together.
pub fn gemm_peak_flops() -> f64 {
    let threads = rayon::current_num_threads();
    let side: Vec<f32> = (0..SIDE * SIDE).map(|i| (i % 7) as f32 - 3.0).collect();
    let mut outs = vec![vec![0.0f32; SIDE * SIDE]; threads];
    let flops = (2 * SIDE * SIDE * SIDE * PRODUCTS * threads) as f64;
    let round = || {
        let started = Instant::now();
        outs.par_iter_mut().with_max_len(1).for_each(|out| {
            for _ in 0..PRODUCTS {
                square_product(&side, out);
            }
        });
        started.elapsed().as_secs_f64()
    };
    let seconds = std::iter::repeat_with(round).take(ROUNDS);
    flops / seconds.fold(f64::INFINITY, f64::min)
}

/// out = a · a, all (SIDE, SIDE).
fn square_product(a: &[f32], out: &mut [f32]) {
    assert!(a.len() >= SIDE * SIDE && out.len() >= SIDE * SIDE);
    let stride = SIDE as isize;
    // SAFETY: the lengths were just checked against the strides given here, and `out` overlaps
    // `a` nowhere, being a mutable borrow.
    unsafe {
        gemm::gemm(
            SIDE,
            SIDE,
            SIDE,
            out.as_mut_ptr(),
            1,
            stride,
            false,
            a.as_ptr(),
            1,
            stride,
            a.as_ptr(),
            1,
            stride,
            0.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}
