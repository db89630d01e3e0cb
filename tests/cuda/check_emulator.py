"""The emulator itself: layouts of the tensor-core wrappers as CUTLASS publishes them, and that
each misuse is stopped and sound kernels pass.

python check_emulator.py LIBRARY KIND runs all; with a kernel's name behind, that kernel alone.
"""

import subprocess
import sys

import numpy as np

import build
from device import Device, from_bf16, to_bf16

EVERY = ("plain", "asan", "tsan")
# Kernel, threads, dynamic shared bytes, and in which builds it must be stopped.
CASES = [
    ("exchange_with_barrier", 64, 0, ()),
    ("exchange_without_barrier", 64, 0, EVERY),
    ("exchange_by_shuffle", 32, 0, ("tsan",)),
    ("blocks_write_one_place", 32, 0, ("tsan",)),
    ("barriers_differ", 64, 0, EVERY),
    ("barrier_of_some", 64, 0, EVERY),
    ("shuffle_of_some", 32, 0, EVERY),
    ("copy_unaligned", 32, 0, EVERY),
    ("copy_not_waited_for", 32, 0, EVERY),
    ("shared_overrun", 32, 128, ("asan",)),
    ("global_overrun", 32, 0, ("asan",)),
]


def mma_matches_its_published_layout(device):
    """SM80_16x8x16 of CUTLASS' cute/atom/mma_traits_sm80.hpp: A ((4,8),(2,2,2)) with strides
    ((32,1),(16,8,128)) over m + 16 k, B ((4,8),(2,2)) with ((16,1),(8,64)) over n + 8 k, C
    ((4,8),(2,2)) with ((32,1),(16,8)) over m + 16 n."""
    rng = np.random.default_rng(1)
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


def ldmatrix_matches_its_description(device):
    """PTX ISA, ldmatrix: lane l takes of each matrix row l / 4, columns 2 (l % 4) and the next."""
    rows = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    out = [device.empty((32, 4), np.uint32) for _ in range(2)]
    device.launch("ldmatrix_fragments", (1,), (32,), *out, device.put(rows))
    for got, matrices in zip(out, (rows, rows.transpose(0, 2, 1))):
        pairs = np.ascontiguousarray(matrices).reshape(4, 32, 2).astype(np.uint32)
        expected = (pairs[..., 0] | pairs[..., 1] << 16).T
        assert (got.read() == expected).all(), "ldmatrix"


def run_case(device, name, block, shared):
    source = device.put(np.arange(132, dtype=np.float32))
    out = device.empty((block,))
    arguments = (out, source) if name.startswith("copy_") else (out,)
    blocks = 2 if name.startswith("blocks_") else 1
    device.launch(name, (blocks,), (block,), *arguments, shared=shared)
    swapped = name.startswith("exchange_with") and np.arange(block)[::-1]
    if swapped is not False and not (out.read() == swapped).all():
        sys.exit("wrong numbers")


def main():
    path, kind = sys.argv[1:3]
    device = Device(path)
    if len(sys.argv) > 3:
        [case] = [c for c in CASES if c[0] == sys.argv[3]]
        return run_case(device, *case[:3])
    mma_matches_its_published_layout(device)
    ldmatrix_matches_its_description(device)
    wrong = []
    for name, _, _, stopped_in in CASES:
        if kind == "tsan" and name.endswith("overrun"):
            continue  # it may or may not see what lies there
        command = [sys.executable, __file__, path, kind, name]
        environment = build.sanitizer_environment(kind)
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if (done.returncode != 0) != (kind in stopped_in):
            wrong.append(f"{name}: status {done.returncode} in {kind}\n{done.stderr[-600:]}")
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()
