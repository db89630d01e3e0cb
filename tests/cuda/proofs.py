"""Proves the CUDA kernels without a device, a line a proof. See scripts/cuda_check."""

import argparse
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import build
import compile
import mutations
import parity
import tidy
import whole

MODULES = ("elementwise", "attention", "head", "matmul")
# Build, order of threads, poison, and sizes: every pair of build, order and poison that matters
# meets in one of them.
PAIRWISE = [
    ("plain", "forward", "0xFF", "all"),
    ("plain", "reverse", "0x3F", "all"),
    ("asan", "random", "0xFF", "small"),
    ("tsan", "forward", "0x3F", "small"),
]
FULL = [
    (kind, order, poison, "small" if kind == "tsan" else "all")
    for kind in build.SANITIZERS
    for order in ("forward", "reverse", "random")
    for poison in ("0xFF", "0x3F")
]
WORKERS = 2


class Proofs:
    """Runs proofs and tells of each; several at a time, told in order."""

    def __init__(self):
        self.pool, self.failed, self.count = ThreadPoolExecutor(WORKERS), 0, 0

    def prove(self, name, parts):
        """`parts`: functions that return what is wrong."""
        started = time.time()
        results = list(self.pool.map(lambda part: part(), parts))
        problems = [problem for found in results for problem in found]
        self.count += 1
        self.failed += bool(problems)
        state = "FAILED" if problems else "proved"
        print(f"{state}  {name}  ({time.time() - started:.0f} s)", flush=True)
        for problem in problems:
            print(f"        {problem}", flush=True)


def run_checks(command, kind, environment=None):
    """What a process of checks found wrong."""
    environment = environment or build.sanitizer_environment(kind)
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True
    )
    if done.returncode == 0:
        return []
    said = (done.stdout + done.stderr[-3000:]).strip()
    return [f"{' '.join(map(str, command))}: status {done.returncode}\n{said}"]


def compiled(architecture):
    """Each file for one architecture."""
    packages = sysconfig.get_path("purelib")
    reports = []

    def part(source):
        problems, report = compile.check(packages, source, architecture)
        reports.extend(report)
        return problems

    # The largest first, so that no worker waits long for another.
    sources = sorted(build.KERNELS.glob("*.cu"), key=lambda s: -s.stat().st_size)
    parts = [lambda s=s: part(s) for s in sources]
    return parts, reports


def print_resources(reports):
    print(f"\n{'kernel':32}" + "".join(f"  sm_{a}" for a in compile.ARCHITECTURES) + "  most")
    kernels = sorted({name for _, name, _ in reports})
    of = {(architecture, name): registers for architecture, name, registers in reports}
    for name in kernels:
        used = "".join(f"{of.get((a, name), '-'):7}" for a in compile.ARCHITECTURES)
        print(f"{name:32}{used}{compile.first_match(compile.REGISTERS_MAX, name):6}")


def misuse(kind):
    source = build.HERE / "misuse" / "misuse.cu"
    library = build.library(kind, [source], name="misuse")
    return run_checks([build.HERE / "check_emulator.py", library, kind], kind)


def wrappers(kind):
    library = build.library(kind, [build.WRAPPERS], name="wrappers")
    command = [build.HERE / "check_wrappers.py", library, "forward", "0xFF", "all"]
    return run_checks(command, kind)


def stand_in(kind="plain"):
    folder = build.driver(kind)
    command = lambda module: [build.HERE / f"check_{module}.py", folder]
    return [lambda m=m: run_checks(command(m), kind) for m in ("driver", "blaslt")]


def through_a_driver():
    """The checks as a real device runs them: compiled by NVRTC, loaded and launched by a driver."""
    library = build.driver() / "libcuda.so.1"
    command = lambda module: [build.HERE / f"check_{module}.py", library, "-", "0xFF", "small"]
    modules = ("wrappers", *MODULES)
    return [lambda m=m: run_checks(command(m), "plain") for m in modules]


class Whole:
    """The proofs of the whole program, where it has been built."""

    def __init__(self, binary):
        nvrtc, _ = compile.libraries_of(sysconfig.get_path("purelib"))
        self.bench = whole.Bench(binary, build.driver(), Path(nvrtc).parent)

    def gpu_check(self):
        """What a first GPU is asked, asked of the stand-in."""
        driver = self.bench.driver / "libcuda.so.1"
        command = [build.HERE / "on_gpu.py", "--binary", self.bench.binary, "--library", driver]
        return run_checks(command, "plain", self.bench.program.environment)

    def prove(self, proofs, full):
        bench, figures = self.bench, []
        runs = whole.goldens(full)
        parts = [lambda r=r: whole.golden(bench, r, figures) for r in runs]
        proofs.prove(f"{len(runs)} goldens of all families on the stand-in", parts)
        flips = lambda: parity.judge_flips(figures)
        proofs.prove("bf16 flips no more best ids than transformers' own", [flips])
        for name, parts in (
            ("too little memory, in planning and after", whole.memory_too_small(bench)),
            ("a device lost in mid-run; the next run ends it", whole.device_lost(bench)),
            ("no driver, no device, no library", whole.nothing_there(bench)),
            ("a library newer than the driver is passed over", whole.newer_library(bench)),
            ("a kill and a resume", whole.killed(bench)),
            ("a set is begun when its first batch can be", whole.begun_by_nobody(bench)),
            ("bytes whatever the batch, the chunk and the algorithms",
             whole.same_bytes(bench, full)),
            ("two devices at work on one set", whole.two_devices(bench)),
            ("nothing is allocated between batches, copies are pinned", whole.steady(bench)),
            ("the device is kept fed, on three streams that wait for each other",
             whole.overlapping(bench)),
            ("a batch's launches are those predicted", whole.launches(bench)),
        ):  # fmt: skip
            proofs.prove(name, parts)


def kernels(setting):
    kind, order, poison, size = setting
    library = build.library(kind)
    command = lambda module: [build.HERE / f"check_{module}.py", library, order, poison, size]
    return [lambda m=m: run_checks(command(m), kind) for m in MODULES]


def prove_kernels(proofs, full):
    """All that needs no program; what the compiler reports."""
    reports = []
    proofs.prove("files keep to the house's rules", [tidy.check])
    for architecture in compile.ARCHITECTURES:
        parts, found = compiled(architecture)
        proofs.prove(f"kernels compile for sm_{architecture}, within budget, no spills", parts)
        reports += found
    kinds = list(build.SANITIZERS)
    proofs.prove("the emulator stops misuse", [lambda k=k: misuse(k) for k in kinds])
    proofs.prove("the twins of PTX do as documented", [lambda k=k: wrappers(k) for k in kinds])
    proofs.prove("the stand-in driver stops mistakes of programs", stand_in())
    proofs.prove("the checks run through a driver, as on a device", through_a_driver())
    for setting in FULL if full else PAIRWISE:
        proofs.prove(f"kernels compute: {', '.join(setting)}", kernels(setting))
    seeded = mutations.MUTATIONS if full else mutations.PAIRWISE
    parts = [lambda m=m: mutations.check(m) for m in seeded]
    controls = mutations.controls(seeded)
    parts += [lambda c=c: mutations.check_control(c) for c in controls]
    proofs.prove(f"{len(seeded)} seeded bugs are noticed", parts)
    return reports


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="every combination, every mutation")
    parser.add_argument("--binary", help="kdscore, for the proofs of the whole program")
    parser.add_argument("--only-whole", action="store_true", help="no proofs of kernels")
    options = parser.parse_args()
    full, started, proofs = options.full, time.time(), Proofs()
    reports = [] if options.only_whole else prove_kernels(proofs, full)
    if options.binary:
        whole_program = Whole(options.binary)
        whole_program.prove(proofs, full)
        if full:
            proofs.prove("scripts/gpu_check runs to its end", [whole_program.gpu_check])
    if reports:
        print_resources(reports)
    proved = proofs.count - proofs.failed
    print(f"\n{proved} of {proofs.count} proofs, {time.time() - started:.0f} s")
    if not options.binary:
        print("the whole program was not proved: no --binary was given")
    sys.exit(1 if proofs.failed else 0)


if __name__ == "__main__":
    main()
