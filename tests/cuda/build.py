"""Builds the kernels for the CPU, with the emulator, and with a sanitizer where asked."""

import hashlib
import os
import re
import subprocess
import threading
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
FLAGS = "-std=c++17 -O2 -march=x86-64-v3 -ffp-contract=off -fPIC -Wall -Wextra".split()


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stderr[-4000:]}")


def digest(paths, flags):
    total = hashlib.sha256(" ".join(flags).encode())
    for path in paths:
        total.update(path.read_bytes())
    return total.hexdigest()[:16]


def compiled(source, flags, headers):
    """The object of a source, made anew when it, a header or a flag has changed."""
    # Where the headers lie doesn't matter, only what they say.
    kept = [flag for flag in flags if not flag.startswith("-I")]
    name = f"{source.stem}-{digest([source, *headers], kept)}.o"
    target = OUT / "objects" / name
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        run(["g++", *FLAGS, *flags, "-x", "c++", "-c", source, "-o", partial])
        partial.rename(target)
    return target


def engine_objects(kind):
    """The emulator itself knows the race detector but isn't instrumented by it."""
    flags = {"tsan": ["-DEMULATOR_TSAN", "-fno-tree-loop-distribute-patterns"]}
    chosen = flags.get(kind, SANITIZERS[kind])
    headers = sorted(EMULATOR.glob("*.h"))
    return [compiled(source, chosen, headers) for source in sorted(EMULATOR.glob("*.cpp"))]


def headers_of(source, folder):
    """The headers of `folder` that a kernel includes, directly or not."""
    found, left = set(), [source]
    while left:
        for name in re.findall(r'#include "(\w+\.cuh)"', left.pop().read_text(encoding="utf-8")):
            if folder / name not in found:
                found.add(folder / name)
                left.append(folder / name)
    return sorted(found)


def library(kind, sources=None, folder=KERNELS, name="kernels"):
    """A shared library of kernels on the emulator: all of them, or `sources` of `folder`."""
    sources = sorted(folder.glob("*.cu")) if sources is None else sources
    emulator = sorted(EMULATOR.glob("*.h"))
    strict = ["-Werror"] if folder == KERNELS else []  # a seeded bug may leave something unused
    flags = [*strict, "-DKDSCORE_EMULATOR", f"-I{EMULATOR}", f"-I{folder}", *SANITIZERS[kind]]
    objects = [compiled(s, flags, headers_of(s, folder) + emulator) for s in sources]
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
