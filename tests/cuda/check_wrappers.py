"""The wrappers of PTX in common.cuh, each alone, by what its instruction is documented to do."""

import numpy as np

from device import check, from_bf16, main, to_bf16


@check
def mma_matches_its_published_layout(device, rng):
    """SM80_16x8x16 of CUTLASS' cute/atom/mma_traits_sm80.hpp: A ((4,8),(2,2,2)) with strides
    ((32,1),(16,8,128)) over m + 16 k, B ((4,8),(2,2)) with ((16,1),(8,64)) over n + 8 k, C
    ((4,8),(2,2)) with ((32,1),(16,8)) over m + 16 n."""
    a, b = to_bf16(rng.standard_normal((16, 16))), to_bf16(rng.standard_normal((8, 16)))
    c = rng.standard_normal((16, 8)).astype(np.float32)
    lane = np.arange(32)[:, None]
    t, g = lane % 4, lane // 4
    i, j = np.arange(8)[None], np.arange(4)[None]
    at_a = t * 32 + g + i % 2 * 16 + i // 2 % 2 * 8 + i // 4 * 128
    at_b = t * 16 + g + j % 2 * 8 + j // 2 * 64
    at_c = t * 32 + g + j % 2 * 16 + j // 2 * 8
    left = device.put(np.ascontiguousarray(a[at_a % 16, at_a // 16]))
    right = device.put(np.ascontiguousarray(b[at_b % 8, at_b // 8]))
    sums = device.put(np.ascontiguousarray(c[at_c % 16, at_c // 16]))
    device.launch("mma_fragments", (1,), (32,), left, right, sums)
    got = np.zeros((16, 8))
    got[at_c % 16, at_c // 16] = sums.read()
    exact = from_bf16(a).astype(np.float64) @ from_bf16(b).T.astype(np.float64) + c
    assert np.abs(got - exact).max() < 1e-5, "mma"


@check
def ldmatrix_matches_its_description(device, rng):
    """PTX ISA, ldmatrix: lane l takes of each matrix row l / 4, columns 2 (l % 4) and the next."""
    rows = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    out = [device.empty((32, 4), np.uint32) for _ in range(2)]
    device.launch("ldmatrix_fragments", (1,), (32,), *out, device.put(rows))
    for got, matrices in zip(out, (rows, rows.transpose(0, 2, 1))):
        pairs = np.ascontiguousarray(matrices).reshape(4, 32, 2).astype(np.uint32)
        expected = (pairs[..., 0] | pairs[..., 1] << 16).T
        assert (got.read() == expected).all(), "ldmatrix"


@check
def copies_arrive_and_zeros_where_asked(device, rng):
    rows = rng.integers(1, 1 << 32, (32, 4), dtype=np.uint32)
    out = device.empty((32, 4), np.uint32)
    device.launch("copied_rows", (1,), (32,), out, device.put(rows))
    rows[1::2] = 0
    assert (out.read() == rows[::-1]).all(), "cp.async"


@check
def conversions_round_to_even_and_functions_are_near(device, rng):
    x = rng.standard_normal(1000).astype(np.float32)
    x[:7] = 0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, -126, 127, -130, np.inf
    types = np.uint16, np.uint32, np.float32, np.float32
    outs = [device.empty((1000,), dtype) for dtype in types]
    device.launch("converted", (4,), (256,), *outs, device.put(x), 1000)
    rounded, packed, powers, inverses = [out.read() for out in outs]
    assert (rounded == to_bf16(x)).all(), "cvt.rn.bf16"
    assert (packed & 0xFFFF == to_bf16(x)).all() and (packed >> 16 == to_bf16(-x)).all(), "bf16x2"
    is_finite = np.isfinite(x)
    exact = np.exp2(x[is_finite].astype(np.float64))
    exact[x[is_finite] < -126] = 0
    assert (np.abs(powers[is_finite] - exact) <= 2.0**-22 * exact).all(), "ex2"
    with np.errstate(divide="ignore"):
        exact = 1 / x.astype(np.float64)
    assert inverses[0] == np.inf and inverses[6] == 0, "rcp of 0 and infinity"
    off = np.abs(inverses[1:] - exact[1:])
    assert (off <= 2.0**-22 * np.abs(exact[1:])).all(), "rcp"


if __name__ == "__main__":
    main()
