"""The head reduction against fp64 and a stable sort."""

import numpy as np

from device import F32, check, expect_close, expect_same, main, pointer, struct

Rule = struct("Rule", "width:int vocab:int vocab_real:int scale:float cap:float k:int")
NAMES = "ids logp tail target_logp target_rank logsumexp entropy padded_mass bad".split()
HeadRows = struct("HeadRows", " ".join(f"{name}:pointer" for name in NAMES))
CANDIDATES = 2048
BIG = CANDIDATES * 2 + 77  # a vocabulary of which more may tie than the buffer holds


def rule(width, k, vocab=None, real=None, scale=1.0, cap=0.0):
    vocab = vocab or width
    return Rule(width, vocab, real or vocab, scale, cap, k)


def run(device, logits, targets, r):
    rows = len(logits)
    types = {"ids": np.int32, "target_rank": np.int32, "bad": np.uint8}
    shapes = {"ids": (rows, r.k), "logp": (rows, r.k)}
    out = {n: device.empty(shapes.get(n, (rows,)), types.get(n, np.float32)) for n in NAMES}
    buffers = device.put(logits.astype(np.float32)), device.put(np.array(targets, np.int32))
    address = HeadRows(*[pointer(out[name]) for name in NAMES])
    device.launch("reduce_head", (rows,), (512,), *buffers, r, address)
    return {name: buffer.read() for name, buffer in out.items()}


def finished(logits, r, number):
    z = logits[:, : r.vocab].astype(number) * number(r.scale)
    if r.cap:
        z = np.where(np.isfinite(z), number(r.cap) * np.tanh(z / number(r.cap)), z)
    return z


def reference(logits, targets, r, number, ids):
    """All products in a number type, for the given order of ids."""
    z = finished(logits, r, number)
    rows = np.arange(len(z))
    d = np.maximum(z - z.max(1, keepdims=True), number(-200))
    e = np.exp(d)
    total = e.sum(1)
    top = np.zeros_like(e, bool)
    np.put_along_axis(top, ids, True, 1)
    logp = z - z.max(1, keepdims=True) - np.log(total)[:, None]
    return {
        "logp": np.take_along_axis(logp, ids, 1),
        "tail": np.where(top, 0, e).sum(1) / total,
        "target_logp": logp[rows, targets],
        "logsumexp": z.max(1) + np.log(total),
        "entropy": np.log(total) - (e * d).sum(1) / total,
        "padded_mass": e[:, r.vocab_real :].sum(1) / total,
    }


def compare(device, logits, targets, r, what):
    logits = logits.astype(np.float32)
    got = run(device, logits, targets, r)
    # Caps round, so the order is that of the capped fp32 numbers, which the kernel's are near.
    z = finished(logits, r, np.float32)
    order = np.argsort(-z, axis=1, kind="stable")[:, : r.k].astype(np.int32)
    target = np.take_along_axis(z, np.array(targets)[:, None], 1)
    lower = np.arange(r.vocab)[None] < np.array(targets)[:, None]
    rank = ((z > target) | ((z == target) & lower)).sum(1).astype(np.int32)
    if not r.cap:
        expect_same(f"{what}: ids", got["ids"], order)
        expect_same(f"{what}: rank", got["target_rank"], rank)
    assert not got["bad"].any(), f"{what}: bad rows"
    exact = reference(logits, targets, r, np.float64, got["ids"])
    plain = reference(logits, targets, r, np.float32, got["ids"])
    for name in exact:
        finite = np.isfinite(exact[name])
        expect_same(f"{what}: {name} where finite", np.isfinite(got[name]), finite)
        if finite.any():
            three = [x[name][finite] for x in (got, exact, plain)]
            # Probabilities are compared with 1, as verify does.
            expect_close(f"{what}: {name}", *[np.append(x, 1.0) for x in three])
    together = np.exp(got["logp"].astype(np.float64)).sum(1) + got["tail"]
    assert np.abs(together - 1).max() < 2e-6, f"{what}: top-k and tail come to {together}"
    return got


@check
def widths_and_k(device, rng):
    cases = [(507, 1), (507, 32), (507, 507), (1000, 100), (4100, 256)]
    cases += [] if device.is_small else [(BIG, 1024), (128256, 32), (6001, 1000)]
    for width, k in cases:
        logits = rng.standard_normal((2, width)) * 4
        compare(device, logits, [0, width - 1], rule(width, k), f"V {width} k {k}")


@check
def ties_at_the_boundary(device, rng):
    """Eight values only: the k-th is one of many equal ones, and the lower ids of them count."""
    logits = rng.integers(0, 8, (2, 507)) / 2.0
    logits[0, 5] = -0.0
    logits[0, 9] = 0.0
    compare(device, logits, [9, 400], rule(507, 100), "ties")


@check
def more_ties_than_the_buffer_holds(device, rng):
    logits = rng.standard_normal((2, BIG)) - 10
    logits[0] = np.where(np.arange(BIG) % 7 < 6, 1.0, logits[0])
    logits[0, [3, 700, BIG - 1]] = 2.0
    logits[1] = 0.25  # all equal
    compare(device, logits, [5, BIG - 1], rule(BIG, 300), "a crowd of ties")


@check
def rows_of_minus_infinity(device, rng):
    logits = np.full((3, BIG), -np.inf)
    logits[0, 77] = 3.0
    logits[1, ::2] = rng.standard_normal((BIG + 1) // 2)
    logits[2, 100:140] = 1.0
    compare(device, logits, [77, 1, 0], rule(BIG, 64), "masked vocabulary")
    narrow = np.where(np.arange(507) % 50 == 0, 2.0, -np.inf)[None]
    compare(device, narrow, [3], rule(507, 32), "k beyond what is finite")
    for target in 504, 505, 506:
        compare(device, narrow, [target], rule(507, 32), f"target {target}, of no probability")


@check
def columns_that_no_sample_sees(device, rng):
    """So wide that the threshold comes from every second run of 2,048 columns, or fewer."""
    width = 40003
    logits = rng.standard_normal((5, width))
    logits[0].sort()  # what comes is higher than what was sampled
    for run_of_columns in (0, 8):
        first = run_of_columns * 2048
        logits[1, first : first + 2048] -= 50
    logits[2] = np.round(logits[2] * 2) / 2  # crowds of ties
    logits[3] = -np.inf
    logits[3, 5000:5040] = 1.0
    logits[4] = 0.0
    targets = [5, width - 1, 20001, 5001, 20002]
    for k in (1, 32) if device.is_small else (1, 7, 32, 64, 300):
        compare(device, logits, targets, rule(width, k), f"V {width} k {k}")
    for target in (20000, 20001, 20002, 20003, 0, 3, width - 1):
        compare(device, logits[2:3], [target], rule(width, 8), f"ties, target {target}")
    bad = logits[:3].copy()
    bad[0, 5000], bad[1, 5000], bad[2, 5000] = np.inf, np.nan, -np.inf
    got = run(device, bad, [1, 1, 1], rule(width, 32))
    assert got["bad"].tolist() == [1, 1, 0], f"bad rows: {got['bad']}"


@check
def limits_padding_scale_and_cap(device, rng):
    for width, vocab in ((512, 512), (520, 507), (509, 300)):
        logits = rng.standard_normal((2, width)) * 5
        logits[:, vocab:] = 1e9  # beyond the limit: as if they were not there
        for scale, cap in ((1.0, 0.0), (0.5, 0.0), (0.75, 8.0)):
            r = rule(width, 20, vocab, vocab - 100, scale, cap)
            compare(device, logits, [0, vocab - 1], r, f"V {vocab} of {width}, {scale}, {cap}")


@check
def bad_rows_are_named(device, rng):
    logits = rng.standard_normal((5, 507)).astype(np.float32)
    logits[0, 500], logits[1, 3], logits[2] = np.nan, np.inf, -np.inf
    logits[4, 506] = np.nan  # outside the limit of 506
    r = rule(507, 8, 506)
    got = run(device, logits, [0, 3, 2, 1, 0], r)
    assert got["bad"].tolist() == [1, 1, 1, 0, 0], f"bad rows: {got['bad']}"
    assert all(np.isfinite(got[name]).all() for name in NAMES), "a bad row left something behind"
    r = rule(507, 8, 506, cap=4.0)
    assert run(device, logits, [0] * 5, r)["bad"].tolist() == [1, 1, 1, 0, 0], "behind a cap"


@check
def a_row_keeps_its_bits(device, rng):
    logits = rng.standard_normal((4, 1207)) * 3
    logits[2] = np.round(logits[2])
    targets = [3, 1206, 50, 9]
    together = run(device, logits, targets, rule(1207, 50))
    for row in range(4):
        alone = run(device, logits[row : row + 1], targets[row : row + 1], rule(1207, 50))
        for name in NAMES:
            expect_same(f"row {row} alone: {name}", alone[name], together[name][row : row + 1])


if __name__ == "__main__":
    main()
