"""Builds the kernels for the CPU, with the emulator, and with a sanitizer where asked."""

import hashlib
import os
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
KERNELS = ROOT / "cuda"
EMULATOR = HERE / "emulator"
OUT = ROOT / "target" / "cuda"

SANITIZERS = {
    "plain": [],
    "asan": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g1"],
    "tsan": ["-fsanitize=thread", "-g1"],
}
# -march: bf16 twins use fused multiply-adds where the kernels do, and only there.
FLAGS = "-std=c++17 -O2 -march=x86-64-v3 -ffp-contract=off -fPIC -Wall -Wextra -Werror".split()


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stderr[-4000:]}")


def digest(paths, flags):
    total = hashlib.sha256(" ".join(flags).encode())
    for path in paths:
        total.update(path.read_bytes())
    return total.hexdigest()[:16]


def compiled(source, flags, headers):
    """The object of a source, made anew when it, a header or a flag has changed."""
    name = f"{source.stem}-{digest([source, *headers], flags)}.o"
    target = OUT / "objects" / name
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}")
        run(["g++", *FLAGS, *flags, "-x", "c++", "-c", source, "-o", partial])
        partial.rename(target)
    return target


def engine_objects(kind):
    """The emulator itself knows the race detector but isn't instrumented by it."""
    flags = {"tsan": ["-DEMULATOR_TSAN", "-fno-tree-loop-distribute-patterns"]}
    chosen = flags.get(kind, SANITIZERS[kind])
    headers = sorted(EMULATOR.glob("*.h"))
    return [compiled(source, chosen, headers) for source in sorted(EMULATOR.glob("*.cpp"))]


def library(kind, sources=None, folder=KERNELS, name="kernels"):
    """A shared library of kernels on the emulator: all of them, or `sources` of `folder`."""
    sources = sorted(folder.glob("*.cu")) if sources is None else sources
    headers = sorted(folder.glob("*.cuh")) + sorted(EMULATOR.glob("*.h"))
    flags = ["-DKDSCORE_EMULATOR", f"-I{EMULATOR}", f"-I{folder}", *SANITIZERS[kind]]
    objects = [compiled(source, flags, headers) for source in sources]
    target = OUT / f"lib{name}-{kind}.so"
    link = ["g++", "-shared", *SANITIZERS[kind], *engine_objects(kind), *objects, "-o", target]
    run(link)
    return target


def sanitizer_environment(kind):
    """What a Python process that loads such a library needs around it."""
    environment = dict(os.environ, PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
    environment["OPENBLAS_NUM_THREADS"] = "1"
    runtime = {"asan": "libasan.so", "tsan": "libtsan.so"}.get(kind)
    if runtime:
        found = subprocess.run(
            ["g++", f"-print-file-name={runtime}"], capture_output=True, text=True
        )
        environment["LD_PRELOAD"] = found.stdout.strip()
    environment["ASAN_OPTIONS"] = "detect_leaks=0"
    environment["TSAN_OPTIONS"] = "halt_on_error=1 report_signal_unsafe=0"
    return environment
