"""Attention, bf16 and fp32: masks, caps, sinks, packing, widths, spans, and a row's bits."""

import numpy as np

from device import BF16, F32, check, expect_close, expect_same, main, pointer, rounded, struct

Shape = struct(
    "Shape",
    "heads:int kv_heads:int head_dim:int value_dim:int scale:float cap:float mask:int "
    "mask_size:int",
)
Data = struct(
    "Data",
    "out:pointer q:pointer k:pointer v:pointer positions:pointer spans:pointer "
    "sinks:pointer",
)
CAUSAL, WINDOW, CHUNK = 0, 1, 2
SKEW = 8
# As in attention.cu: name, widths of keys and values, rows of a tile, keys of a block.
KERNELS = [
    ("attention_64", 64, 64, 128, 64),
    ("attention_80", 80, 80, 128, 64),
    ("attention_96", 96, 96, 128, 64),
    ("attention_128", 128, 128, 128, 48),
    ("attention_192_128", 192, 128, 128, 48),
    ("attention_256", 256, 256, 64, 64),
]


class Sequence:
    """Queries at some positions of a sequence, whose keys lie in spans of rows."""

    def __init__(self, queries, spans):
        self.queries, self.spans = queries, spans  # positions; [(first row, keys)]

    @staticmethod
    def whole(start, length):
        return Sequence(np.arange(length), [(start, length)])


def kernel_for(dtype, shape):
    """Name, rows of a tile, bytes of shared memory."""
    if dtype is F32:
        d, dv = shape.head_dim, shape.value_dim
        return "attention_f32", 16, 4 * (16 * d + 32 * (d + 1) + 32 * dv)
    for name, d, dv, rows, keys in KERNELS:
        if d >= shape.head_dim and dv >= shape.value_dim:
            return name, rows, 2 * ((rows + keys) * (d + SKEW) + keys * (dv + SKEW))
    raise AssertionError("no kernel is that wide")


def work_list(sequences, shape, rows):
    """Tiles (first query, queries, first packed row, first span), longest first, and spans."""
    tiles, spans, query = [], [], 0
    group = shape.heads // shape.kv_heads
    for s in sequences:
        count = len(s.queries)
        for first in range(0, count * group, rows):
            last = min(first + rows, count * group) - 1
            tiles.append((s.queries[last // group], (query, count, first, len(spans))))
        position = 0
        for start, length in s.spans:
            spans.append((position + length, start - position))
            position += length
        query += count
    tiles.sort(key=lambda tile: -tile[0])
    return [np.array(x, np.int32) for x in ([t[1] for t in tiles], spans)]


def run(device, dtype, shape, sequences, qkv, sinks=None):
    q, k, v = qkv
    name, rows, shared = kernel_for(dtype, shape)
    tiles, spans = work_list(sequences, shape, rows)
    positions = np.concatenate([s.queries for s in sequences]).astype(np.int32)
    out = device.empty((len(q), shape.heads, shape.value_dim), dtype.numpy)
    buffers = [out] + [device.put(dtype.encode(x)) for x in qkv]
    buffers += [device.put(positions), device.put(spans)]
    buffers.append(None if sinks is None else device.put(sinks.astype(np.float32)))
    data = Data(*[pointer(b) for b in buffers])
    threads = (128,)
    grid = (len(tiles), shape.kv_heads)
    device.launch(name, grid, threads, shape, device.put(tiles), data, shared=shared)
    return out.read()


def sees(shape, queries, keys):
    """(Q, K): whether a query sees a key."""
    p, j = queries[:, None], np.arange(keys)[None]
    if shape.mask == WINDOW:
        return (j <= p) & (j > p - shape.mask_size)
    if shape.mask == CHUNK:
        return (j <= p) & (j >= p // shape.mask_size * shape.mask_size)
    return j <= p


def reference(shape, sequences, qkv, sinks, number, weight=lambda x: x):
    """Attention in a number type, its weights through `weight` before they meet values."""
    q, k, v = [x.astype(number) for x in qkv]
    group = shape.heads // shape.kv_heads
    out, query = np.empty((len(q), shape.heads, shape.value_dim), number), 0
    for s in sequences:
        rows = np.concatenate([np.arange(a, a + n) for a, n in s.spans])
        mine = slice(query, query + len(s.queries))
        query = mine.stop
        for head in range(shape.heads):
            keys, values = k[rows, head // group], v[rows, head // group]
            scores = q[mine, head] @ keys.T * number(shape.scale)
            if shape.cap:
                scores = number(shape.cap) * np.tanh(scores / number(shape.cap))
            scores = np.where(sees(shape, s.queries, len(rows)), scores, -np.inf)
            highest = scores.max(-1, keepdims=True)
            p = np.exp(scores - highest)
            total = p.sum(-1, keepdims=True)
            if sinks is not None:
                total = total + np.exp(number(sinks[head]) - highest)
            out[mine, head] = weight(p) @ values / total
    return out


def tokens(rng, shape, queries, keys):
    """q, k, v in bf16's numbers, with a few outliers as real activations have."""
    make = lambda n, heads, width: rng.standard_normal((n, heads, width))
    q = make(queries, shape.heads, shape.head_dim)
    k = make(keys, shape.kv_heads, shape.head_dim)
    v = make(keys, shape.kv_heads, shape.value_dim)
    k[:, :, 0] *= 4
    v[keys // 2] *= 8
    return [rounded(x) for x in (q, k, v)]


def shape_of(heads, kv_heads, d, dv=None, cap=0.0, mask=CAUSAL, size=0):
    return Shape(heads, kv_heads, d, dv or d, d**-0.5, cap, mask, size)


def compare(device, rng, dtype, shape, sequences, what, sinks=None):
    queries = sum(len(s.queries) for s in sequences)
    keys = max(a + n for s in sequences for a, n in s.spans)
    qkv = tokens(rng, shape, queries, keys)
    got = run(device, dtype, shape, sequences, qkv, sinks)
    exact = reference(shape, sequences, qkv, sinks, np.float64)
    weight = rounded if dtype is BF16 else lambda x: x
    plain = dtype.round(reference(shape, sequences, qkv, sinks, np.float32, weight))
    expect_close(f"{dtype.name} {what}", dtype.decode(got), exact, plain)
    return qkv, got


@check
def every_width(device, rng):
    widths = [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)]
    widths += [(16, 16), (20, 12), (72, 40), (7, 9)]
    for d, dv in widths[::2] if device.is_small else widths:
        for dtype in (BF16, F32):
            sequences = [Sequence.whole(0, 1), Sequence.whole(1, 70)]
            compare(device, rng, dtype, shape_of(2, 1, d, dv), sequences, f"width {d}, {dv}")


@check
def masks_at_and_across_tiles(device, rng):
    kinds = [(WINDOW, 1), (WINDOW, 16), (WINDOW, 64), (WINDOW, 65), (CHUNK, 64), (CHUNK, 50)]
    for mask, size in kinds[::3] if device.is_small else kinds:
        for dtype in (BF16, F32):
            shape = shape_of(1, 1, 32, mask=mask, size=size)
            sequences = [Sequence.whole(0, 3), Sequence.whole(3, 150)]
            compare(device, rng, dtype, shape, sequences, f"mask {mask} of {size}")


@check
def caps_and_sinks(device, rng):
    for dtype in (BF16, F32):
        sequences = [Sequence.whole(0, 40), Sequence.whole(40, 1)]
        sinks = np.array([3.0, -40.0, 0.5, 30.0])
        compare(device, rng, dtype, shape_of(4, 2, 64, cap=5.0), sequences, "cap")
        compare(device, rng, dtype, shape_of(4, 2, 64), sequences, "sinks", sinks)
        both = shape_of(4, 2, 64, cap=2.0, mask=WINDOW, size=8)
        compare(device, rng, dtype, both, sequences, "cap, sinks and window", sinks)


@check
def heads_that_share_keys(device, rng):
    groups = [(7, 1), (14, 2)] if device.is_small else [(7, 1), (14, 2), (8, 8), (71, 1), (140, 1)]
    for heads, kv_heads in groups:
        for dtype in (BF16, F32):
            sequences = [Sequence.whole(0, 37), Sequence.whole(37, 2)]
            what = f"{heads} heads on {kv_heads}"
            compare(device, rng, dtype, shape_of(heads, kv_heads, 16), sequences, what)


@check
def scored_rows_alone(device, rng):
    """The last layer brings queries of some positions only, and of some sequences none."""
    for dtype in (BF16, F32):
        picked = np.array([0, 5, 6, 7, 63, 64, 99])
        sequences = [Sequence(picked, [(0, 100)]), Sequence(np.array([2]), [(100, 3)])]
        for mask, size in ((CAUSAL, 0), (WINDOW, 8)):
            shape = shape_of(4, 2, 64, mask=mask, size=size)
            compare(device, rng, dtype, shape, sequences, "scored rows")


@check
def a_row_keeps_its_bits(device, rng):
    """Alone, in a batch behind other sequences, among fewer queries, beside noise or NaN."""
    for dtype in (BF16, F32):
        shape = shape_of(6, 2, 64, mask=WINDOW, size=70)
        length, before = 90, 33
        q, k, v = tokens(rng, shape, length, length)
        alone = run(device, dtype, shape, [Sequence.whole(0, length)], [q, k, v])
        noise = tokens(rng, shape, before, before)
        for name, other in (("noise", noise), ("NaN", [x * np.nan for x in noise])):
            packed = [np.concatenate([a, b, a]) for a, b in zip(other, (q, k, v))]
            parts = [(0, before), (before, length), (before + length, before)]
            sequences = [Sequence.whole(*part) for part in parts]
            got = run(device, dtype, shape, sequences, packed)
            expect_same(f"beside {name}", got[before : before + length], alone)
        picked = np.array([1, 40, 89])
        fewer = run(device, dtype, shape, [Sequence(picked, [(0, length)])], [q[picked], k, v])
        expect_same("fewer queries", fewer, alone[picked])


@check
def keys_in_several_spans(device, rng):
    """A prefix that two sequences share gives the bits of one copied into each."""
    for dtype in (BF16, F32):
        shape = shape_of(2, 1, 64)
        prefix, own = 37, 20
        q, k, v = tokens(rng, shape, 2 * own, prefix + 2 * own)
        queries = prefix + np.arange(own)
        spans = [[(0, prefix), (prefix + i * own, own)] for i in range(2)]
        shared = [Sequence(queries, s) for s in spans]
        got = run(device, dtype, shape, shared, [q, k, v])
        rows = [np.concatenate([np.arange(a, a + n) for a, n in s]) for s in spans]
        copied = [np.concatenate([x[r] for r in rows]) for x in (k, v)]
        starts = (0, prefix + own)
        apart = [Sequence(queries, [(start, prefix + own)]) for start in starts]
        expect_same("spans", got, run(device, dtype, shape, apart, [q, *copied]))


if __name__ == "__main__":
    main()
