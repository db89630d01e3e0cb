"""Seeded bugs: each is put into a copy of a kernel, and the checks must notice."""

import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import build


class Mutation:
    """`old` becomes `new`, at its first place, in `file`. Noticed by check_`module` in the build
    `kind` under the schedule `order`."""

    def __init__(self, what, file, old, new, module, kind="plain", order="forward"):
        self.what, self.file, self.old, self.new = what, file, old, new
        self.module, self.kind, self.order = module, kind, order


BARRIER = "__syncthreads();  // this step has arrived, and nobody reads the one before any more"
KEYS_BARRIER = "__syncthreads();  // the keys are there, and nobody reads the values any more"
VALUES_BARRIER = "__syncthreads();  // the values are there, and nobody reads the keys any more"

MUTATIONS = [
    Mutation("missing barrier before a block is read", "attention.cu", KEYS_BARRIER, "",
             "attention"),
    Mutation("missing barrier before keys are overwritten", "attention.cu", VALUES_BARRIER, "",
             "attention", "tsan"),
    Mutation("wait for one group too few", "matmul.cuh", "cp_async_wait<STAGES - 2>();",
             "cp_async_wait<STAGES - 1>();", "matmul"),
    Mutation("missing barrier between pipeline steps", "matmul.cuh", BARRIER, "", "matmul",
             "tsan"),
    Mutation("the window is one key too wide", "attention.cuh",
             "position + 1 > s.mask_size ? position + 1 - s.mask_size",
             "position > s.mask_size ? position - s.mask_size", "attention"),
    Mutation("the diagonal is masked", "attention.cu", "key > last", "key >= last", "attention"),
    Mutation("mask skipped for one block too many", "attention.cu",
             "block + B <= keys.end_common", "block <= keys.end_common", "attention"),
    Mutation("values past the end aren't zeroed", "attention.cu",
             "at, i * APART >= there);", "at, false);",
             "attention", "asan"),
    Mutation("key blocks counted from the tile's first key", "attention.cu",
             "keys.first / B * B", "keys.first", "attention"),
    Mutation("running sum isn't rescaled", "attention.cu", "total[m][half] *= shrink;", "",
             "attention"),
    Mutation("halves of a fragment swapped", "attention.cu", "lane / 16 * 8 + lane % 8",
             "(1 - lane / 16) * 8 + lane % 8", "attention"),
    Mutation("ties go to the higher id", "keys.cuh", "(unsigned)~id", "(unsigned)id", "head"),
    Mutation("a crowd of ties overflows the buffer", "head.cu",
             "if (found.chosen > CANDIDATES) {", "if (false) {", "head"),
    Mutation("k-th largest off by one", "head.cu", "select(s, rule.k - 1, 64",
             "select(s, rule.k - 2, 64", "head"),
    Mutation("rejected candidates missing in the tail", "head.cu",
             "(i < rule.k ? top : rest) += e;", "top += i < rule.k ? e : 0;", "head"),
    Mutation("rank counts ties behind the target", "head.cu", "at < target ? target_logit : above",
             "at > target ? target_logit : above", "head"),
    Mutation("the target's own piece counts whole", "head.cu", "piece < target)", "false)", "head"),
    Mutation("the sample may hold no k logits", "head.cu",
             "if (every > 1 && least == NEGATIVE_INFINITY) continue;", "", "head"),
    Mutation("missing barrier in the sort", "head.cu",
             "            }\n            __syncthreads();", "            }", "head", "tsan"),
    Mutation("first tile row off by one", "matmul.cu", "s.m - p.first_row",
             "s.m - p.first_row - 1", "matmul"),
    Mutation("unaligned copy", "matmul.cuh", "x[i] + at, in_x", "x[i] + at + 1, in_x",
             "matmul"),
    Mutation("the row's sum depends on its neighbours", "norm.cu", "int index = blockIdx",
             "int index = (blockIdx.x * blockDim.y + threadIdx.y) / 2 * 2 + 0 * blockIdx",
             "elementwise"),
    Mutation("swapped weight and bias", "norm.cu", "norm<true>(y, x, weight, bias, shape);",
             "norm<true>(y, x, bias, weight, shape);", "elementwise"),
    Mutation("sine and cosine swapped", "rope.cu", "rotate_halves<8>(row, cos + angles, sin",
             "rotate_halves<8>(row, sin + angles, cos", "elementwise"),
    Mutation("a choice's place counted twice", "experts.cu", "place += all;",
             "place += all + 1;", "matmul"),
    Mutation("missing barrier between counts of warps", "experts.cu",
             "        all += warp_sums[w];\n    }\n    __syncthreads();",
             "        all += warp_sums[w];\n    }", "matmul", "tsan"),
    Mutation("results added without their weights", "experts.cu",
             "const float weight = weights ? weights[first + slot] : 1.0f;",
             "const float weight = 1.0f;", "matmul"),
]
# One of each kind, for a quick run.
PAIRWISE = MUTATIONS[::2]


def sources_of(mutation, folder):
    """The files a check needs, which is quicker than all."""
    files = {
        "attention": ["attention.cu", "attention_f32.cu"],
        "head": ["head.cu"],
        "matmul": ["matmul.cu", "experts.cu"],
        "elementwise": ["elementwise.cu", "embedding.cu", "activation.cu", "norm.cu", "rope.cu"],
    }
    return [folder / name for name in files[mutation.module]]


def survives(mutation):
    """Whether the checks pass in spite of the bug; None where it can't be put in."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        for source in build.KERNELS.iterdir():
            shutil.copy(source, folder)
        target = folder / mutation.file
        text = target.read_text(encoding="utf-8")
        if mutation.old not in text:
            return None
        target.write_text(text.replace(mutation.old, mutation.new, 1), encoding="utf-8")
        name = f"mutant-{threading.get_ident()}"
        sources = sources_of(mutation, folder)
        library = build.library(mutation.kind, sources, folder, name)
        module = build.HERE / f"check_{mutation.module}.py"
        command = [sys.executable, module, library, mutation.order, "0xFF", "small"]
        environment = build.sanitizer_environment(mutation.kind)
        done = subprocess.run(command, env=environment, capture_output=True)
        library.unlink()
        return done.returncode == 0


def controls(mutations):
    """The same without a bug: the checks must pass, or noticing would mean nothing."""
    kinds = sorted({(m.module, m.kind) for m in mutations})
    return [Mutation("no bug", "common.cuh", "#pragma once", "#pragma once", *k) for k in kinds]


def check_control(control):
    passed = survives(control)
    return [] if passed else [f"{control.module} in {control.kind} fails without a bug"]


def check(mutation):
    """What is wrong about this one: nothing, if it was noticed."""
    survived = survives(mutation)
    if survived is None:
        return [f"{mutation.what}: {mutation.file} has no {mutation.old!r}"]
    return [f"{mutation.what}: no check noticed"] if survived else []
