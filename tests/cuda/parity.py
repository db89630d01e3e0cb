"""What the program scores on a device, against what transformers says of the same teachers: fp32
by the rule of the goldens; bf16 at most 1.1 times as far from fp32 as transformers' own bf16 path
(the worse of its eager and sdpa attentions, where one row's choice of an expert can decide), in the
mean of each teacher and in the top-1 flips of all of them together, of which one teacher
has too few to tell.

python parity.py BINARY [--device cuda:0] [--dtype bf16] [NAME ...]: a line a teacher.
"""

import argparse
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from program import TEACHERS, Failed, Program, arrays, write_corpus

# As in tests/support/golden.rs: what fp32 may be off by, and when ids count as tied.
MEAN_MAX, DELTA_MAX, TIE = 5e-5, 1e-3, 1e-3
# How much further than transformers' own bf16 path a bf16 path may be.
BF16_SHARE = 1.1
MARGIN = 0.05


class Fixture:
    """A tiny teacher and what transformers says of it."""

    def __init__(self, name):
        self.name, self.folder = name, TEACHERS / name
        golden = self.folder / "golden"
        load = lambda array: np.load(golden / f"{array}.npy")
        self.targets, self.ids, self.logp = load("targets"), load("ids"), load("logp")
        self.bf16 = json.loads((golden / "bf16.json").read_text(encoding="utf-8"))
        theirs = [self.bf16[a] for a in ("eager", "sdpa") if a in self.bf16]
        self.bf16_mean = max(by["mean_abs_delta_logp"] for by in theirs)
        self.bf16_flips = max(by["top1_flips"] for by in theirs) * self.bf16["rows_over_margin"]
        config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        self.vocab = config.get("text_config", config)["vocab_size"]


def names():
    return sorted(path.name for path in TEACHERS.iterdir() if path.is_dir())


def sequences():
    """The corpus that all goldens are of: (tokens, mask) each."""
    kept = json.loads((TEACHERS / "corpus.json").read_text(encoding="utf-8"))["sequences"]
    return [(s["tokens"], s["mask"]) for s in kept]


def score(program, fixture, folder, dtype, *more):
    """log-probs of every id (R, V) and ids best first, as the program stored them."""
    folder = Path(folder)
    corpus = write_corpus(folder / "corpus", sequences(), fixture.vocab)
    wanted = "-k", fixture.vocab, "--dtype", dtype, "--logp-dtype", "f32"
    program.score(fixture.folder, corpus, folder / "out", *wanted, *more)
    found = arrays(folder / "out")
    assert (found["targets"] == fixture.targets).all(), "targets differ"
    logp = np.empty_like(found["logp"])
    np.put_along_axis(logp, found["ids"], found["logp"], axis=1)
    return logp, found["ids"]


class Figures:
    """Of one teacher: mean and worst |delta|, top-1 flips, and transformers' own in bf16."""

    def __init__(self, mean, worst, flips, flips_theirs):
        self.mean, self.worst, self.flips, self.flips_theirs = mean, worst, flips, flips_theirs

    def __str__(self):
        return f"{self.mean:9.1e} {self.worst:9.1e} {self.flips:5}"


def judge(fixture, dtype, logp, ids):
    """What is wrong, and the figures."""
    delta = np.abs(np.take_along_axis(logp, fixture.ids, axis=1) - fixture.logp)
    sure = fixture.logp[:, 0] - fixture.logp[:, 1] > MARGIN
    flips = (ids[:, 0] != fixture.ids[:, 0])[sure].sum()
    theirs = round(fixture.bf16_flips)
    figures = Figures(float(delta.mean()), float(delta.max()), int(flips), theirs)
    problems = []
    if not np.isfinite(delta).all():
        problems.append("not all finite")
    if dtype == "f32":
        # The k-th best of ours may be another id only where the two are tied.
        ours = np.take_along_axis(logp, ids[:, : fixture.ids.shape[1]], axis=1)
        untied = np.abs(ours - fixture.logp).max()
        if figures.mean >= MEAN_MAX or figures.worst >= DELTA_MAX or untied > TIE:
            problems.append(f"{figures}, in order {untied:.1e}")
    elif figures.mean > BF16_SHARE * fixture.bf16_mean:
        problems.append(f"{figures}, {fixture.bf16_mean:.1e} is transformers'")
    return problems, figures


def judge_flips(all_figures):
    """The same of bf16's flips, over all teachers."""
    ours = sum(f.flips for f in all_figures)
    theirs = sum(f.flips_theirs for f in all_figures)
    return [f"{ours} top-1 flips, transformers {theirs}"] if ours > BF16_SHARE * theirs + 1 else []


def check(program, name, dtype, *more):
    """(what is wrong, figures) of one teacher."""
    fixture = Fixture(name)
    with tempfile.TemporaryDirectory() as folder:
        try:
            return judge(fixture, dtype, *score(program, fixture, folder, dtype, *more))
        except (Failed, AssertionError) as error:
            return [str(error)], None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("binary")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "f32"))
    parser.add_argument("--workers", type=int, default=1, help="teachers at a time")
    parser.add_argument("names", nargs="*")
    options = parser.parse_intermixed_args()
    program, failed, all_figures = Program(options.binary, device=options.device), 0, []
    print(f"{'teacher':28} {'mean':>9} {'worst':>9} flips")
    chosen = options.names or names()
    with ThreadPoolExecutor(options.workers) as pool:
        results = pool.map(lambda name: check(program, name, options.dtype), chosen)
    for name, (problems, figures) in zip(chosen, results):
        failed += bool(problems)
        all_figures += [figures] if figures else []
        print(f"{name:28} {figures or ''}  {'; '.join(problems) or 'ok'}", flush=True)
    for problem in judge_flips(all_figures) if options.dtype == "bf16" else []:
        failed += 1
        print(problem)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
