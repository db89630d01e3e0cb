"""Everything a first GPU is asked, one step after another, each with a time limit; a table last.
See scripts/gpu_check."""

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import made_teachers
import speed
from build import HERE, ROOT
from host import DRIVER, Host
from program import Program, arrays, hashes, write_corpus

TOTAL_SECONDS = 235
STAND_IN_PATIENCE = 20  # times as long, where kernels run on a CPU
TOP_K = 32


class Skipped(Exception):
    """A step that has nothing to run on; says why."""


class Sizes:
    """Of the batches that are timed."""

    def __init__(self, length, sequences, batches):
        self.length, self.sequences, self.batches = length, sequences, batches
        self.tokens = sequences * length


class Run:
    """What all steps share."""

    def __init__(self, options, folder):
        self.folder, self.library = Path(folder), options.library
        self.program = Program(options.binary)
        folder = Path(self.library).parent if "/" in self.library else None
        self.device = Host(folder).name()
        self.is_real = not self.device.startswith(speed.STAND_IN)
        # The stand-in has no speed: there a small teacher proves that the figures are found.
        self.sizes = Sizes(512, 32, 4) if self.is_real else Sizes(24, 2, 2)
        self.started, self.facts = time.time(), {}

    def python(self, module, *arguments, limit):
        """The output of a module here."""
        return self.command([sys.executable, HERE / f"{module}.py", *arguments], limit)

    def command(self, words, limit):
        done = subprocess.run(
            list(map(str, words)), capture_output=True, text=True, timeout=limit
        )
        if done.returncode:
            raise AssertionError((done.stdout + done.stderr)[-1500:].strip())
        return done.stdout

    def need_real(self, what):
        if not self.is_real:
            raise Skipped(f"{what}: there is no GPU here, {self.device} has no speed")

    def config(self, config):
        return config if self.is_real else made_teachers.TINY

    def need_torch(self):
        if not importlib.util.find_spec("torch") or not importlib.util.find_spec("transformers"):
            raise Skipped("torch and transformers aren't installed here")


def wrappers(run, limit):
    run.python("check_wrappers", run.library, "-", "0xFF", "all", limit=limit)


def kernels(run, limit):
    for module in ("elementwise", "attention", "head", "matmul"):
        run.python(f"check_{module}", run.library, "-", "0xFF", "small", limit=limit)


def sanitizer(run, limit):
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(found).exists():
        raise Skipped("compute-sanitizer isn't installed here")
    run.need_real("compute-sanitizer")
    for tool in ("memcheck", "racecheck"):
        for module in ("wrappers", "head", "matmul"):
            words = [found, "--tool", tool, "--error-exitcode", "9", sys.executable]
            words += [HERE / f"check_{module}.py", run.library, "-", "0xFF", "small"]
            run.command(words, limit)


def parity(dtype, names):
    def step(run, limit):
        arguments = run.program.binary, "--dtype", dtype, "--workers", "8", *names
        run.python("parity", *arguments, limit=limit)

    return step


def bytes_stay(run, limit):
    """The same rows whatever the batch, the chunk and the shards."""
    teacher = made_teachers.make(run.folder / "tiny", made_teachers.TINY)
    vocab = made_teachers.TINY["vocab_size"]
    sequences = made_teachers.random_sequences(vocab, 12, 40)
    sequences += made_teachers.random_sequences(vocab, 3, 130)
    corpus = write_corpus(run.folder / "bytes", sequences, vocab)
    seen = set()
    for budget, chunk in ((64, 7), (300, 100), (4096, 1024)):
        out = run.folder / f"bytes-{budget}"
        limits = "--token-budget", budget, "--head-chunk", chunk
        run.program.score(teacher, corpus, out, *limits)
        seen.add(tuple(sorted(hashes(out).items())))
    assert len(seen) == 1, "bytes differ between token budgets"


def score_speed(name, config):
    """Scores a few batches of a made teacher, once as users do and once with each op timed."""

    def step(run, limit):
        sizes, made = run.sizes, run.config(config)
        teacher = made_teachers.make(run.folder / name, made)
        vocab, count = made["vocab_size"], sizes.sequences * sizes.batches
        sequences = made_teachers.random_sequences(vocab, count, sizes.length)
        corpus = write_corpus(run.folder / f"{name}-corpus", sequences, vocab)
        wanted = "--token-budget", sizes.tokens, "-k", TOP_K, "--json"
        out = run.folder / f"{name}-out"
        done = run.program.score(teacher, corpus, out, *wanted)
        rows = sum(sum(mask[1:]) for _, mask in sequences)
        assert len(arrays(out)["tail"]) == rows, "rows are missing"
        pilot = run.program.score_arguments(teacher, corpus, run.folder / f"{name}-pilot", *wanted)
        timed = run.program.run("pilot", *pilot[1:], "--fraction", 1, "--sweep-seconds", 0)
        asked = "--teacher", teacher, "--kernels", "--length", sizes.length, "--json"
        predicted = run.program.run("plan", *asked)
        run.facts[name] = [json.loads(said.stdout) for said in (done, timed, predicted)]

    return step


def torch_speed(name, config):
    def step(run, limit):
        run.need_torch()
        sizes, device = run.sizes, "cuda" if run.is_real else "cpu"
        words = run.folder / name, sizes.sequences, sizes.length, "--device", device
        said = run.python("torch_side", *words, limit=limit)
        run.facts[f"{name}-torch"] = json.loads(said.strip().split("\n")[-1])

    return step


def kernel_speed(run, limit):
    said = run.python("speed", run.library, "--json", limit=limit)
    if run.is_real:
        run.facts["kernels"] = json.loads(said)


FAMILIES = "llama_tied gemma2 gpt_oss deepseek_v3 qwen2_moe phi gpt2 cohere llama4_text".split()
# Name, limit in seconds, what it does: what others stand on comes first.
STEPS = [
    ("PTX wrappers", 20, wrappers),
    ("kernels", 40, kernels),
    ("goldens in fp32", 40, parity("f32", FAMILIES)),
    ("goldens in bf16, all families", 60, parity("bf16", ())),
    ("compute-sanitizer", 40, sanitizer),
    ("bytes whatever the batch", 20, bytes_stay),
    ("kernels' speed", 30, kernel_speed),
    ("0.5B shape", 30, score_speed("0.5B", made_teachers.QWEN2_5_0_5B)),
    ("0.5B shape in PyTorch", 30, torch_speed("0.5B", made_teachers.QWEN2_5_0_5B)),
    ("8B shape", 60, score_speed("8B", made_teachers.LLAMA_3_8B)),
    ("8B shape in PyTorch", 45, torch_speed("8B", made_teachers.LLAMA_3_8B)),
]


def attempt(run, name, limit, step):
    """(passed, failed or skipped; what there is to say)."""
    patience = 1 if run.is_real else STAND_IN_PATIENCE
    left = patience * TOTAL_SECONDS - (time.time() - run.started)
    limit *= patience
    if left < 5:
        return "skipped", "no time left"
    try:
        step(run, min(limit, left))
        return "passed", ""
    except Skipped as reason:
        return "skipped", str(reason)
    except subprocess.TimeoutExpired:
        return "FAILED", f"not done after {min(limit, left):.0f} s"
    except Exception as error:  # whatever it is, the next step still has something to tell
        return "FAILED", str(error)


def phase_lines(timed, predicted, batches):
    """Seconds a batch by phase: as measured, and as predicted for each device."""
    names = [device["name"] for device in predicted["devices"]]
    yield f"  {'ms a batch':22}{'measured':>10}" + "".join(f"{name:>16}" for name in names)
    for phase, seconds in timed["phases"].items():
        of_phase = [k for k in predicted["kernels"] if k["phase"] == phase]
        line = f"  {phase:22}{1e3 * seconds / batches:10.2f}"
        for name in names:
            line += f"{1e3 * sum(k['seconds'][name] for k in of_phase):16.2f}"
        yield line


def speed_lines(run):
    """The table of speeds, of what ran on a real device."""
    lines = []
    for name in ("0.5B", "8B"):
        if name not in run.facts:
            continue
        scored, timed, predicted = run.facts[name]
        batch = f"{run.sizes.sequences} x {run.sizes.length} tokens a batch"
        lines.append(f"{name} shape, {batch}, on {run.device}:")
        rate, peak = scored["tokens_per_second"], timed["peak_flops"]
        model_flops = predicted["model_flops"] / predicted["tokens"]
        share = 100 * model_flops * rate / peak
        of_peak = f"{share:.0f} % of {peak / 1e12:.0f} TFLOP/s"
        lines.append(f"  kdscore {rate:12,.0f} tokens/s, {of_peak}")
        if torch := run.facts.get(f"{name}-torch"):
            rate = torch["tokens"] / torch["seconds"]
            lines.append(f"  PyTorch {rate:12,.0f} tokens/s ({torch['torch']})")
            for length, seconds in torch["attention_seconds"].items():
                lines.append(f"  PyTorch's sdpa, {length} tokens: {1e3 * seconds:.3f} ms a layer")
        lines += phase_lines(timed, predicted, run.sizes.batches)
    if kernels := run.facts.get("kernels"):
        timings = [speed.Timing(*k.values()) for k in kernels]
        copied = timings[0].bytes / timings[0].milliseconds * 1e3
        lines += [speed.told(timing, copied) for timing in timings]
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", default=ROOT / "target" / "release" / "kdscore")
    parser.add_argument("--library", default=DRIVER, help="the driver, where not the loader's")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=ROOT / "target") as folder:
        run, failed = Run(options, folder), 0
        print(f"device: {run.device}", flush=True)
        for name, limit, step in STEPS:
            started = time.time()
            state, said = attempt(run, name, limit, step)
            failed += state == "FAILED"
            print(f"{state:8} {name} ({time.time() - started:.0f} s)  {said}", flush=True)
        lines = speed_lines(run)
        if run.is_real:
            print("\n" + ("\n".join(lines) or "no speed was measured"))
        else:
            print("\nno GPU took part: this proves the check, and no device; no figure is shown")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
