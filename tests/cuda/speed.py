"""How fast each kernel runs alone on a real device: milliseconds, the share of what the device
copies, and FLOP/s.

python speed.py [LIBRARY]: a line a kernel. On the stand-in everything runs once, small, and no
figure is printed, for there is no device to have one.
"""

import json
import sys

import numpy as np

import check_attention as attention
import check_elementwise as elementwise
import check_head as head
import check_matmul as matmul
from device import BF16, pointer, to_bf16
from gpu import Gpu
from host import DRIVER

REPEATS = 5
STAND_IN = "stand-in"  # begins its name


class Shape:
    """Sizes of what is timed: those of an 8B teacher, or small ones."""

    def __init__(self, is_small):
        self.tokens, self.hidden, self.inner = (64, 64, 160) if is_small else (16384, 4096, 14336)
        self.heads, self.kv_heads, self.head_dim = (4, 2, 64) if is_small else (32, 8, 128)
        self.vocab, self.rows, self.k = (512, 4, 8) if is_small else (128256, 1024, 32)
        self.lengths = (32,) if is_small else (512, 4096)
        self.copied = 1 << (12 if is_small else 31)


class Timing:
    """One kernel: what it moves and computes, and how long it took."""

    def __init__(self, name, milliseconds, bytes=0, flops=0):
        self.name, self.milliseconds, self.bytes, self.flops = name, milliseconds, bytes, flops

    def as_dict(self):
        return dict(
            kernel=self.name, milliseconds=self.milliseconds, bytes=self.bytes, flops=self.flops
        )


def timed(gpu, name, work, bytes=0, flops=0):
    """The best of a few runs, after one that doesn't count."""
    work()
    each = [gpu.host.milliseconds(gpu.stream, work) for _ in range(REPEATS)]
    return Timing(name, min(each), bytes, flops)


def numbers(gpu, *shape):
    """Random bf16, one block of them over and over."""
    block = to_bf16(np.random.default_rng(5).standard_normal(1 << 16))
    count = int(np.prod(shape))
    return gpu.put(np.resize(block, count).reshape(shape))


def copies(gpu, s):
    a, b = [gpu.empty((s.copied,), np.uint8) for _ in range(2)]
    work = lambda: gpu.host.copy(b.address, a.address, s.copied, gpu.stream)
    return [timed(gpu, "copy on the device", work, bytes=2 * s.copied)]


def attentions(gpu, s):
    shape = attention.Shape(
        s.heads, s.kv_heads, s.head_dim, s.head_dim, s.head_dim**-0.5, 0, attention.CAUSAL, 0
    )
    name, rows, shared = attention.kernel_for(BF16, shape)
    q = numbers(gpu, s.tokens, s.heads * s.head_dim)
    k, v = [numbers(gpu, s.tokens, s.kv_heads * s.head_dim) for _ in range(2)]
    out = gpu.empty((s.tokens, s.heads * s.head_dim), np.uint16)
    for length in s.lengths:
        starts = range(0, s.tokens, length)
        sequences = [attention.Sequence.whole(start, length) for start in starts]
        tiles, spans = attention.work_list(sequences, shape, rows)
        positions = np.tile(np.arange(length, dtype=np.int32), len(sequences))
        kept = [gpu.put(x) for x in (tiles, positions, spans)]
        data = attention.Data(*[pointer(x) for x in (out, q, k, v, kept[1], kept[2], None)])
        grid = len(tiles), s.kv_heads
        work = lambda: gpu.submit(name, grid, (128,), shape, kept[0], data, shared=shared)
        pairs = len(sequences) * length * (length + 1) // 2
        flops = 4 * pairs * s.heads * s.head_dim
        yield timed(gpu, f"{name}, {length} tokens", work, flops=flops)


def head_reduction(gpu, s):
    logits = gpu.put(np.random.default_rng(6).standard_normal((s.rows, s.vocab), np.float32))
    targets = gpu.put(np.zeros(s.rows, np.int32))
    rule = head.Rule(s.vocab, s.vocab, s.vocab, 1.0, 0.0, s.k)
    types = {"ids": np.int32, "target_rank": np.int32, "bad": np.uint8}
    out = [gpu.empty((s.rows, s.k), types.get(name, np.float32)) for name in head.NAMES]
    rows = head.HeadRows(*[pointer(x) for x in out])
    work = lambda: gpu.submit("reduce_head", (s.rows,), (512,), logits, targets, rule, rows)
    # As if a row were read once: a sample of it is read twice.
    return [timed(gpu, f"reduce_head, k {s.k}", work, bytes=4 * s.rows * s.vocab)]


def small_kernels(gpu, s):
    residual = gpu.put(np.ones((s.tokens, s.hidden), np.float32))
    normed, weight = numbers(gpu, s.tokens, s.hidden), gpu.put(np.ones(s.hidden, np.float32))
    shape = elementwise.NormShape(s.hidden, 1, s.tokens, 0, 0, 1e-5)
    block = (256, 1) if s.hidden > 1024 else (32, 8)
    grid = (-(-s.tokens // block[1]),)
    work = lambda: gpu.submit(
        "rms_norm_f32_bf16", grid, block, normed, residual, weight, None, shape
    )
    yield timed(gpu, "rms_norm_f32_bf16", work, bytes=6 * s.tokens * s.hidden)
    gate, up = [numbers(gpu, s.tokens, s.inner) for _ in range(2)]
    silu, count = elementwise.Activation(0, 0, 0), s.tokens * s.inner
    grid = (min(-(-count // 2048), 4096),)
    work = lambda: gpu.submit("activate_bf16", grid, (256,), gate, up, count, silu)
    yield timed(gpu, "activate_bf16", work, bytes=6 * count)
    turned = numbers(gpu, s.tokens, s.heads * s.head_dim)
    tables = [gpu.put(np.ones((s.tokens, s.head_dim // 2), np.float32)) for _ in range(2)]
    positions = gpu.put(np.arange(s.tokens, dtype=np.uint32))
    rope = elementwise.RopeShape(s.heads, s.head_dim, 0, s.head_dim // 2)
    work = lambda: gpu.submit(
        "rope_halves_bf16", (s.tokens,), (128,), turned, *tables, positions, rope
    )
    moved = 4 * s.tokens * s.heads * s.head_dim + 4 * s.tokens * s.head_dim
    yield timed(gpu, "rope_halves_bf16", work, bytes=moved)


def own_product(gpu, s):
    x, w = numbers(gpu, s.tokens, s.hidden), numbers(gpu, s.hidden, s.hidden)
    out = gpu.empty((s.tokens, s.hidden), np.uint16)
    shape = matmul.LinearShape(s.tokens, s.hidden, s.hidden, 0)
    grid = -(-s.tokens // 128), -(-s.hidden // 128)
    work = lambda: gpu.submit(
        "matmul_bf16_bf16", grid, (256,), out, x, w, None, shape, shared=61440
    )
    return [timed(gpu, "matmul_bf16_bf16", work, flops=2 * s.tokens * s.hidden**2)]


def measure(gpu):
    """(is there a device, timings)."""
    is_stand_in = gpu.host.name().startswith(STAND_IN)
    shape = Shape(is_stand_in)
    parts = copies, small_kernels, attentions, head_reduction, own_product
    return not is_stand_in, [timing for part in parts for timing in part(gpu, shape)]


def told(timing, copied):
    """A line; `copied` bytes a second are what the device copies."""
    line = f"{timing.name:28} {timing.milliseconds:9.3f} ms"
    seconds = timing.milliseconds / 1e3
    if timing.bytes:
        rate = timing.bytes / seconds
        line += f"  {rate / 1e9:7.0f} GB/s  {100 * rate / copied:3.0f} % of a copy"
    if timing.flops:
        line += f"  {timing.flops / seconds / 1e12:7.1f} TFLOP/s"
    return line


def main():
    is_json = "--json" in sys.argv
    libraries = [a for a in sys.argv[1:] if a != "--json"]
    is_real, timings = measure(Gpu(libraries[0] if libraries else DRIVER))
    if not is_real:
        print(f"{len(timings)} kernels ran; no GPU here, so no figure")
    elif is_json:
        print(json.dumps([timing.as_dict() for timing in timings]))
    else:
        copied = timings[0].bytes / timings[0].milliseconds * 1e3
        print("\n".join(told(timing, copied) for timing in timings))


if __name__ == "__main__":
    main()
