"""Embedding, elementwise ops, activations, norms and rotary positions."""

import numpy as np

from device import BF16, F32, check, expect_close, expect_same, main, struct

Activation = struct("Activation", "kind:int alpha:float limit:float")
NormShape = struct(
    "NormShape", "width:int pieces:int count:int weight_step:int bias_step:int eps:float"
)
RopeShape = struct("RopeShape", "heads:int head_dim:int start:int half:int")
ALL = ((256,), (3,))  # block and grid of ops over a whole buffer


def put(device, dtype, x):
    return device.put(dtype.encode(x))


def over_all(device, name, *arguments):
    device.launch(name, ALL[1], ALL[0], *arguments)


def by_row(device, name, rows, *arguments):
    device.launch(name, (rows,), (128,), *arguments)


@check
def embeddings_replace_and_add(device, rng):
    for dtype in (BF16, F32):
        for width in (64, 507):
            table = dtype.round(rng.standard_normal((9, width)))
            rows = np.array([8, 0, 3, 3], np.uint32)
            before = rng.standard_normal((4, width)).astype(np.float32)
            out = device.empty((4, width))
            arguments = put(device, dtype, table), device.put(rows), width
            by_row(device, f"embed_replace_{dtype.name}", 4, out, *arguments)
            expect_same("embed", out.read(), table[rows])
            out.write(before)
            by_row(device, f"embed_add_{dtype.name}", 4, out, *arguments)
            expect_same("embed", out.read(), before + table[rows])


@check
def one_factor_a_buffer(device, rng):
    for dtype in (BF16, F32):
        for shape in ((3, 64), (5, 123), (1, 1)):
            x = dtype.round(rng.standard_normal(shape))
            count = x.size
            buffer = put(device, dtype, x)
            over_all(device, f"scale_{dtype.name}", buffer, count, 0.3)
            expect_same("scale", buffer.read(), dtype.encode(x * np.float32(0.3)))
            buffer = put(device, dtype, x)
            over_all(device, f"clip_{dtype.name}", buffer, count, 0.5)
            expect_same("clip", buffer.read(), dtype.encode(np.clip(x, -0.5, 0.5)))
            out = rng.standard_normal(shape).astype(np.float32)
            sum_ = device.put(out)
            over_all(device, f"add_scaled_{dtype.name}", sum_, put(device, dtype, x), count, 0.7)
            expect_same("add scaled", sum_.read(), out + x * np.float32(0.7))
            for to in (BF16, F32):
                copy = device.empty(shape, to.numpy)
                over_all(device, f"copy_{dtype.name}_{to.name}", copy, put(device, dtype, x), count)
                expect_same("copy", copy.read(), to.encode(x))


@check
def one_factor_a_row(device, rng):
    for dtype in (BF16, F32):
        for width in (64, 123):
            x = dtype.round(rng.standard_normal((4, width)))
            factors = rng.standard_normal(9).astype(np.float32)
            rows = np.array([8, 0, 3, 3], np.uint32)
            buffer = put(device, dtype, x)
            name = f"scale_rows_{dtype.name}"
            by_row(device, name, 4, buffer, device.put(factors), device.put(rows), width)
            expect_same("scale rows", buffer.read(), dtype.encode(x * factors[rows][:, None]))
            gate = dtype.round(rng.standard_normal(4))
            for name, gates in (
                (f"gate_rows_{dtype.name}", put(device, dtype, gate)),
                ("gate_rows_bf16_by_f32", device.put(gate.astype(np.float32))),
            ):
                if dtype is F32 and "by" in name:
                    continue
                buffer = put(device, dtype, x)
                by_row(device, name, 4, buffer, gates, width)
                exact = x / (1 + np.exp(-gate.astype(np.float64)))[:, None]
                got = dtype.decode(buffer.read())
                expect_close(name, got, exact, dtype.round(exact))


@check
def rows_are_gathered_and_heads_joined(device, rng):
    for dtype in (BF16, F32):
        for width in (64, 33):
            x = dtype.encode(rng.standard_normal((7, width)))
            rows = np.array([6, 6, 0], np.uint32)
            out = device.empty((3, width), dtype.numpy)
            by_row(device, f"gather_{dtype.name}", 3, out, device.put(x), device.put(rows), width)
            expect_same("gather", out.read(), x[rows])
        own = dtype.encode(rng.standard_normal((3, 4, 6)))
        shared = dtype.encode(rng.standard_normal((3, 5)))
        out = device.empty((3, 4, 11), dtype.numpy)
        name = f"join_heads_{dtype.name}"
        by_row(device, name, 3, out, device.put(own), device.put(shared), 4, 6, 5)
        repeated = np.repeat(shared[:, None, :], 4, axis=1)
        expect_same("join heads", out.read(), np.concatenate([own, repeated], axis=2))


def erf(x):
    from math import erf as scalar

    return np.vectorize(scalar)(x)


def activated(kind, x, up, number):
    """Activation `kind` in the number type `number`."""
    x, up, one = x.astype(number), None if up is None else up.astype(number), number(1)
    sigmoid = lambda v: one / (one + np.exp(-v))
    cubic = number(np.sqrt(2 / np.pi)) * (x + number(0.044715) * x**3)
    if kind == 5:
        gate = np.minimum(x, number(1.5))
        return gate * sigmoid(number(1.7) * gate) * (np.clip(up, number(-1.5), number(1.5)) + one)
    y = [
        lambda: x * sigmoid(x),
        lambda: number(0.5) * x * (one + erf(x / np.sqrt(number(2))).astype(number)),
        lambda: number(0.5) * x * (one + np.tanh(cubic)),
        lambda: np.maximum(x, 0),
        lambda: np.maximum(x, 0) ** 2,
    ][kind]()
    return y if up is None else y * up


@check
def activations_gated_and_plain(device, rng):
    for dtype in (BF16, F32):
        for kind in range(6):
            for gated in (True, False) if kind < 5 else (True,):
                x = dtype.round(rng.standard_normal((3, 67)) * 3)
                up = dtype.round(rng.standard_normal((3, 67)) * 2) if gated else None
                buffer = put(device, dtype, x)
                ups = None if up is None else put(device, dtype, up)
                rule = Activation(kind, 1.7, 1.5)
                over_all(device, f"activate_{dtype.name}", buffer, ups, x.size, rule)
                plain = dtype.round(activated(kind, x, up, np.float32))
                exact = activated(kind, x, up, np.float64)
                expect_close(f"activation {kind}", dtype.decode(buffer.read()), exact, plain)


def norm(x, weight, bias, width, centred, eps, number):
    """Norm of pieces in the number type `number`."""
    x = x.astype(number).reshape(len(x), -1, width)
    mean = x.mean(-1, keepdims=True) if centred else number(0)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    y = (x - mean) / np.sqrt(variance + number(eps))
    for vector, combine in ((weight, np.multiply), (bias, np.add)):
        if vector is not None:
            y = combine(y, vector.astype(number).reshape(-1, width))
    return y.reshape(len(x), -1)


def norm_threads(width):
    """blockDim of the norms, as norm.cu says."""
    return (32, 8) if width <= 1024 else (256, 1) if width <= 8192 else (1024, 1)


def run_norm(device, x, types, width, vectors, centred, in_place=False):
    rows, n = x.shape
    weight, bias = vectors
    steps = [0 if v is None or v.size == width else width for v in vectors]
    pieces = n // width
    shape = NormShape(width, pieces, rows * pieces, *steps, 1e-5)
    block = norm_threads(width)
    source = put(device, types[0], x)
    out = source if in_place else device.empty(x.shape, types[1].numpy)
    name = f"{'layer' if centred else 'rms'}_norm_{types[0].name}_{types[1].name}"
    put_vector = lambda v: None if v is None else device.put(v.astype(np.float32))
    grid = (-(-rows * pieces // block[1]),)
    device.launch(name, grid, block, out, source, put_vector(weight), put_vector(bias), shape)
    return out.read()


@check
def norms_of_rows_and_pieces(device, rng):
    cases = [(64, 1), (123, 1), (16, 5), (24, 2), (1032, 1)]
    cases += [] if device.is_small else [(2048, 2), (8200, 1)]
    for width, pieces in cases:
        for types in ((F32, F32), (F32, BF16), (BF16, BF16)):
            for centred in (False, True):
                n = width * pieces
                x = types[0].round(rng.standard_normal((3, n)) * 2 + 1)
                weight = rng.standard_normal(n if pieces == 2 else width)
                bias = rng.standard_normal(width) if centred else None
                vectors = (None if width == 16 else weight.astype(np.float32), bias)
                got = run_norm(device, x, types, width, vectors, centred)
                reference = lambda number: norm(x, *vectors, width, centred, 1e-5, number)
                plain = types[1].round(reference(np.float32))
                what = f"norm {width} x {pieces} {types[0].name}"
                expect_close(what, types[1].decode(got), reference(np.float64), plain)
                alone = run_norm(device, x[1:2], types, width, vectors, centred)
                expect_same("norm of a row alone", alone, got[1:2])
                if types[0] is types[1]:
                    again = run_norm(device, x, types, width, vectors, centred, in_place=True)
                    expect_same("norm in place", again, got)


def rotated(x, cos, sin, start, halves, number):
    x = x.astype(number).copy()
    half = cos.shape[1]
    if halves:
        low, high = slice(start, start + half), slice(start + half, start + 2 * half)
    else:
        low, high = slice(start, start + 2 * half, 2), slice(start + 1, start + 2 * half, 2)
    c, s = cos.astype(number)[:, None], sin.astype(number)[:, None]
    a, b = x[..., low].copy(), x[..., high].copy()
    x[..., low], x[..., high] = a * c - b * s, b * c + a * s
    return x


@check
def rotary_positions(device, rng):
    for dtype in (BF16, F32):
        for head_dim, start, half in ((64, 0, 32), (80, 0, 16), (24, 8, 8), (10, 3, 3)):
            for halves in (True, False):
                x = dtype.round(rng.standard_normal((4, 3, head_dim)))
                angles = rng.standard_normal((20, half))
                cos, sin = [f(angles).astype(np.float32) for f in (np.cos, np.sin)]
                positions = np.array([19, 0, 7, 7], np.uint32)
                buffer = put(device, dtype, x)
                name = f"rope_{'halves' if halves else 'neighbours'}_{dtype.name}"
                tables = [device.put(v) for v in (cos, sin, positions)]
                by_row(device, name, 4, buffer, *tables, RopeShape(3, head_dim, start, half))
                turn = lambda n: rotated(x, cos[positions], sin[positions], start, halves, n)
                plain = dtype.round(turn(np.float32))
                expect_close("rope", dtype.decode(buffer.read()), turn(np.float64), plain)


if __name__ == "__main__":
    main()
