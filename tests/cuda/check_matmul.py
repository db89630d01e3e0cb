"""The project's own product, and the mixture of experts from router to combination."""

import numpy as np

from device import BF16, F32, check, expect_close, expect_same, main, rounded, struct

LinearShape = struct("LinearShape", "m:int n:int k:int adds:int")
Rule = struct(
    "Rule",
    "experts:int chosen:int score:int renormalise:int groups:int groups_kept:int scale:float",
)
SOFTMAX, SOFTMAX_OF_CHOSEN, SIGMOID, SIGMOID_OF_CHOSEN = range(4)
# As in matmul.cuh: rows and columns of a tile, and bytes of dynamic shared memory.
TILE = {BF16: (128, 3 * 2 * 128 * 40 * 2), F32: (64, 0)}


def linear(device, types, x, w, bias=None, out=None):
    dtype, to = types
    (m, k), n = x.shape, len(w)
    tile, shared = TILE[dtype]
    target = device.empty((m, n), to.numpy)
    if out is not None:
        target.write(to.encode(out))
    grid = (-(-m // tile), -(-n // tile))
    buffers = [device.put(dtype.encode(v)) for v in (x, w)]
    buffers.append(None if bias is None else device.put(bias.astype(np.float32)))
    shape = LinearShape(m, n, k, int(out is not None))
    name = f"matmul_{dtype.name}_{to.name}"
    device.launch(name, grid, (256,), target, *buffers, shape, shared=shared)
    return target.read()


@check
def products_of_all_edges(device, rng):
    cases = [(1, 64, 32), (130, 129, 40), (3, 507, 123), (65, 1, 64)]
    cases += [] if device.is_small else [(257, 130, 200), (1, 1, 1), (128, 128, 96)]
    for m, n, k in cases:
        for types in ((BF16, BF16), (BF16, F32), (F32, F32)):
            x, w = [rounded(rng.standard_normal(s)) for s in ((m, k), (n, k))]
            x[:, 0] *= 16
            bias = rng.standard_normal(n).astype(np.float32)
            before = types[1].round(rng.standard_normal((m, n)))
            for b, out in ((None, None), (bias, None), (bias, before)):
                got = types[1].decode(linear(device, types, x, w, b, out))
                rest = (0 if b is None else b) + (0 if out is None else out)
                exact = x.astype(np.float64) @ w.T.astype(np.float64) + rest
                plain = types[1].round(x @ w.T + np.float32(rest))
                expect_close(f"{m} x {n} x {k} {types[1].name}", got, exact, plain)


@check
def a_row_of_a_product_keeps_its_bits(device, rng):
    for types in ((BF16, F32), (F32, F32)):
        x, w = rounded(rng.standard_normal((150, 72))), rounded(rng.standard_normal((40, 72)))
        together = linear(device, types, x, w)
        for row in (0, 64, 149):
            alone = linear(device, types, x[row : row + 1], w)
            expect_same(f"row {row} alone", alone[0], together[row])
        expect_same("turned about", linear(device, types, x[::-1], w)[::-1], together)


def best(keys, count):
    """The `count` greatest, equal ones by lower index; a NaN comes last."""
    keys = np.where(np.isnan(keys), -np.inf, keys)
    return np.argsort(-keys, kind="stable")[:count]


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def choices(logits, correction, rule):
    """Experts, rising, and weights of one row."""
    logits = logits.astype(np.float32)
    sigmoid = lambda v: 1 / (1 + np.exp(-v.astype(np.float64)))
    scores = {SOFTMAX: softmax, SIGMOID: sigmoid}.get(rule.score, lambda v: v)(logits)
    keys = np.float32(scores) + (0 if correction is None else correction.astype(np.float32))
    if rule.groups:
        of_groups = keys.reshape(rule.groups, -1)
        strength = [g[best(g, 2)].sum() for g in of_groups]
        dropped = np.setdiff1d(np.arange(rule.groups), best(np.array(strength), rule.groups_kept))
        of_groups[dropped] = -np.inf
    experts = best(keys, rule.chosen)
    weights = scores[experts]
    if rule.score == SOFTMAX_OF_CHOSEN:
        weights = softmax(weights.astype(np.float64))
    if rule.score == SIGMOID_OF_CHOSEN:
        weights = sigmoid(weights)
    if rule.renormalise:
        weights = weights / (weights.sum() + 1e-20)
    order = np.argsort(experts)
    return experts[order], weights[order] * rule.scale


def route(device, logits, correction, rule):
    rows = len(logits)
    experts = device.empty((rows, rule.chosen), np.int32)
    weights = device.empty((rows, rule.chosen))
    buffers = [device.put(logits.astype(np.float32))]
    buffers.append(None if correction is None else device.put(correction.astype(np.float32)))
    grid, shared = (-(-rows // 4),), 4 * rule.experts * 16
    device.launch("route", grid, (128,), experts, weights, *buffers, rows, rule, shared=shared)
    return experts, weights


@check
def routers_choose_and_weigh(device, rng):
    cases = [(SOFTMAX, 1, 0, 0), (SOFTMAX, 0, 0, 0), (SOFTMAX_OF_CHOSEN, 0, 0, 0)]
    cases += [(SIGMOID, 1, 4, 2), (SIGMOID, 0, 16, 5), (SIGMOID_OF_CHOSEN, 0, 0, 0)]
    for score, renormalise, groups, kept in cases:
        for experts, chosen in ((16, 3), (48, 8), (48, 1)):
            rule = Rule(experts, chosen, score, renormalise, groups, kept, 2.5)
            if groups and groups > 0 and experts // groups * kept < chosen:
                continue
            # Few values, so that equal scores meet at the boundary.
            logits = rng.integers(-2, 3, (9, experts)) / 2.0
            logits[0] = rng.standard_normal(experts)
            logits[1] = 1.0
            correction = rng.integers(0, 2, experts) / 4.0 if score == SIGMOID else None
            buffers = route(device, logits, correction, rule)
            got_experts, got_weights = [b.read() for b in buffers]
            for row in range(9):
                what = f"score {score}, {groups} groups, row {row}"
                expected, weights = choices(logits[row], correction, rule)
                expect_same(f"{what}: experts", got_experts[row], expected.astype(np.int32))
                expect_close(what, got_weights[row], weights, weights.astype(np.float32))


def place(device, experts, count, tile):
    """Places, sources and tiles of choices."""
    total = int(np.prod(experts.shape))
    tiles_max = total // tile + count
    counts = device.empty((count,), np.int32)
    places, sources = [device.empty((total,), np.uint32) for _ in range(2)]
    tiles = device.empty((tiles_max, 3), np.int32)
    device.launch("count_choices", (count,), (256,), counts, experts, total)
    arguments = places, sources, tiles, experts, counts, total, tile, tiles_max
    device.launch("place_choices", (count,), (256,), *arguments)
    return places, sources, tiles


@check
def choices_lie_by_expert_then_row(device, rng):
    for choices_, count in ((24, 5), (9000, 3)):
        experts = rng.integers(0, count, choices_).astype(np.int32)
        experts[experts == 1] = 2  # one that nobody takes
        places, sources, tiles = place(device, device.put(experts), count, 128)
        order = np.argsort(experts, kind="stable").astype(np.uint32)
        expect_same("sources", sources.read(), order)
        expect_same("places", places.read()[order], np.arange(choices_, dtype=np.uint32))
        expected, first = [], 0
        for expert in range(count):
            left = int((experts == expert).sum())
            while left > 0:
                expected.append((expert, first, min(left, 128)))
                first, left = first + min(left, 128), left - 128
        expected += [(0, 0, 0)] * (len(tiles.read()) - len(expected))
        expect_same("tiles", tiles.read(), np.array(expected, np.int32))


def pointers(device, buffers):
    return device.put(np.array([b.address for b in buffers], np.uint64))


def mixture(device, dtype, x, logits, rule, mlps, weigh_inputs=False):
    """out (T, H) f32 of experts with one matrix and a bias each: relu(w x + b)."""
    (rows, width), (count, inner) = x.shape, (len(mlps), len(mlps[0][0]))
    tile, shared = TILE[dtype]
    experts, weights = route(device, logits, None, rule)
    places, sources, tiles = place(device, experts, count, tile)
    total = rows * rule.chosen
    source = device.put(dtype.encode(x))
    kept = [[device.put(dtype.encode(w)), device.put(b.astype(np.float32))] for w, b in mlps]
    tables = [pointers(device, column) for column in zip(*kept)]
    results = device.empty((total, inner), dtype.numpy)
    by_source = sources
    if weigh_inputs:
        inputs = device.empty((total, width), dtype.numpy)
        name = f"weigh_inputs_{dtype.name}"
        arguments = inputs, source, sources, weights, rule.chosen, width
        device.launch(name, (total,), (128,), *arguments)
        source, by_source = inputs, None
    grid = (-(-inner // tile), len(tiles.read()))
    arguments = results, source, by_source, rule.chosen, *tables, tiles, inner, width
    device.launch(f"expert_matmul_{dtype.name}", grid, (256,), *arguments, shared=shared)
    out = device.empty((rows, inner))
    outer = None if weigh_inputs else weights
    arguments = out, results, places, outer, rule.chosen, inner
    device.launch(f"combine_{dtype.name}", (rows,), (128,), *arguments)
    return out.read()


def mixture_reference(dtype, x, logits, rule, mlps, weigh_inputs, number):
    plain = number is np.float32
    pass_ = dtype.round if plain else lambda v: v
    out = np.zeros((len(x), len(mlps[0][0])), number)
    for row in range(len(x)):
        for expert, weight in zip(*choices(logits[row], None, rule)):
            w, b = [v.astype(number) for v in mlps[expert]]
            inner, outer = (number(weight), 1) if weigh_inputs else (1, number(weight))
            out[row] += pass_(pass_(x[row].astype(number) * inner) @ w.T + b) * outer
    return out


@check
def a_mixture_from_end_to_end(device, rng):
    rule = Rule(6, 2, SOFTMAX, 1, 0, 0, 1.0)
    for dtype in (BF16, F32):
        for rows in (1, 5) if device.is_small else (1, 5, 150):
            x = rounded(rng.standard_normal((rows, 40)))
            logits = rng.standard_normal((rows, 6))
            mlps = []
            for _ in range(6):
                w = rounded(rng.standard_normal((72, 40)))
                mlps.append((w, rng.standard_normal(72).astype(np.float32)))
            for weighs in (False, True):
                arguments = dtype, x, logits, rule, mlps, weighs
                got = mixture(device, *arguments)
                exact, plain = [mixture_reference(*arguments, n) for n in (np.float64, np.float32)]
                expect_close(f"mixture of {rows} rows {dtype.name}", got, exact, plain)
            if rows > 1:
                last = slice(rows - 1, rows)
                alone = mixture(device, dtype, x[last], logits[last], rule, mlps)
                together = mixture(device, dtype, x, logits, rule, mlps)
                expect_same("a row alone", alone, together[last])


if __name__ == "__main__":
    main()
