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
DRIVER = HERE / "driver"
WRAPPERS = HERE / "misuse" / "wrappers.cu"
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


def kernel_objects(kind, sources, folder):
    emulator = sorted(EMULATOR.glob("*.h"))
    strict = ["-Werror"] if folder == KERNELS else []  # a seeded bug may leave something unused
    flags = [*strict, "-DKDSCORE_EMULATOR", f"-I{EMULATOR}", f"-I{folder}", *SANITIZERS[kind]]
    return [compiled(s, flags, headers_of(s, folder) + emulator) for s in sources]


def library(kind, sources=None, folder=KERNELS, name="kernels"):
    """A shared library of kernels on the emulator: all of them, or `sources` of `folder`."""
    sources = sorted(folder.glob("*.cu")) if sources is None else sources
    objects = kernel_objects(kind, sources, folder)
    target = OUT / f"lib{name}-{kind}.so"
    link = ["g++", "-shared", *SANITIZERS[kind], *engine_objects(kind), *objects, "-o", target]
    run(link)
    return target


def driver(kind="plain", name="driver", kernels=KERNELS):
    """The folder that stands in for NVIDIA's: a driver that runs the kernels on the emulator, and
    cuBLASLt of two majors."""
    folder = OUT / (name if kind == "plain" else f"{name}-{kind}")
    folder.mkdir(parents=True, exist_ok=True)
    flags = ["-fvisibility=hidden", "-Werror", f"-I{DRIVER}", *SANITIZERS[kind]]
    headers = sorted(DRIVER.glob("*.h"))
    fast = [*flags, "-O3"]  # sums side by side, each in its own order
    of_blas = [DRIVER / "blaslt.cpp", DRIVER / "algorithm.cpp"]
    own = [s for s in sorted(DRIVER.glob("*.cpp")) if s not in of_blas]
    sources = [*sorted(kernels.glob("*.cu")), WRAPPERS]
    objects = engine_objects(kind) + kernel_objects(kind, sources, kernels)
    objects += [compiled(source, flags, headers) for source in own]
    link = ["g++", "-shared", *SANITIZERS[kind], "-Wl,-Bsymbolic"]
    replaced(folder / "libcuda.so.1", [*link, "-Wl,-soname,libcuda.so.1", *objects])
    for major in (12, 13):
        versioned = [*fast, f"-DLIBRARY_VERSION={major}0000"]
        soname = f"libcublasLt.so.{major}"
        parts = [compiled(source, versioned, headers) for source in of_blas]
        parts += [f"-L{folder}", "-l:libcuda.so.1", "-Wl,-rpath,$ORIGIN"]
        replaced(folder / soname, [*link, f"-Wl,-soname,{soname}", *parts])
    return folder


def replaced(target, link):
    """Links a library beside its place and puts it there whole: somebody may be using the old."""
    partial = target.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    run([*link, "-o", partial])
    partial.rename(target)


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


if __name__ == "__main__":
    print(driver())
