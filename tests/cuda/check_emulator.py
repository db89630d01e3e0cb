"""The emulator itself: each misuse is stopped and sound kernels pass.

python check_emulator.py LIBRARY KIND runs all; with a kernel's name behind, that kernel alone.
"""

import subprocess
import sys

import numpy as np

import build
from device import Device

EVERY = ("plain", "asan", "tsan")
# Kernel, threads, dynamic shared bytes, and in which builds it must be stopped.
CASES = [
    ("exchange_with_barrier", 64, 0, ()),
    ("exchange_without_barrier", 64, 0, EVERY),
    ("exchange_by_shuffle", 32, 0, ("tsan",)),
    ("blocks_write_one_place", 32, 0, ("tsan",)),
    ("barriers_differ", 64, 0, EVERY),
    ("barrier_of_some", 64, 0, EVERY),
    ("shuffle_of_some", 32, 0, EVERY),
    ("copy_unaligned", 32, 0, EVERY),
    ("copy_not_waited_for", 32, 0, EVERY),
    ("shared_overrun", 32, 128, ("asan",)),
    ("global_overrun", 32, 0, ("asan",)),
]


def run_case(device, name, block, shared):
    source = device.put(np.arange(132, dtype=np.float32))
    out = device.empty((block,))
    arguments = (out, source) if name.startswith("copy_") else (out,)
    blocks = 2 if name.startswith("blocks_") else 1
    device.launch(name, (blocks,), (block,), *arguments, shared=shared)
    swapped = name.startswith("exchange_with") and np.arange(block)[::-1]
    if swapped is not False and not (out.read() == swapped).all():
        sys.exit("wrong numbers")


def main():
    path, kind = sys.argv[1:3]
    device = Device(path)
    if len(sys.argv) > 3:
        [case] = [c for c in CASES if c[0] == sys.argv[3]]
        return run_case(device, *case[:3])
    wrong = []
    for name, _, _, stopped_in in CASES:
        if kind == "tsan" and name.endswith("overrun"):
            continue  # it may or may not see what lies there
        command = [sys.executable, __file__, path, kind, name]
        environment = build.sanitizer_environment(kind)
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if (done.returncode != 0) != (kind in stopped_in):
            wrong.append(f"{name}: status {done.returncode} in {kind}\n{done.stderr[-600:]}")
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()
