"""Compiles every kernel for the architectures that are served, and holds registers, spills and
instructions to a budget. No device and no toolkit: NVRTC and two tools come as Python wheels."""

import ctypes
import re
import subprocess
import tempfile
from pathlib import Path

from build import KERNELS

ARCHITECTURES = (80, 89, 90)
TOOLKIT = Path("/usr/local/cuda")
# Every template is compiled with these, by the program, too.
OPTIONS = ["--std=c++17", "--device-as-default-execution-space"]
# Registers a thread may take: what lets as many blocks of the kernel live on a multiprocessor
# (65,536 registers) as its work needs. The first pattern that matches counts.
REGISTERS_MAX = [
    (r"attention_f32", 128),  # 4 blocks of 128
    (r"attention_\d+", 255),  # 2 blocks of 128, by shared memory
    (r"reduce_head", 64),  # 2 blocks of 512
    (r"(expert_)?matmul_bf16", 128),  # 2 blocks of 256
    (r"(expert_)?matmul_f32", 80),  # 3 blocks of 256
    (r"(rms|layer)_norm", 64),  # 1 block of 1,024
    (r"", 64),  # 4 blocks of 256
]
# Instructions that must be there, at least so many; attention has as many of each as its unrolled
# loops say.
MMA = "HMMA.16816.F32.BF16"
INSTRUCTIONS_MIN = [
    (r"attention_\d+", {MMA: 64, "LDSM.16.M88.4": 8, "LDSM.16.MT88.4": 8, "LDGSTS": 3}),
    (r"(expert_)?matmul_bf16", {MMA: 32, "LDSM.16.M88.4": 12, "LDGSTS": 2}),
]
# Local memory, which a spill or an array indexed at run time would use.
FORBIDDEN = ("LDL", "STL")


def libraries_of(site_packages):
    """NVRTC and its own parts: of the newest major among Python packages, of a toolkit, or as the
    loader finds it."""
    packages = Path(site_packages) / "nvidia"
    folders = [packages / "cu13" / "lib", packages / "cuda_nvrtc" / "lib"]
    for folder in [*folders, TOOLKIT / "lib64"]:
        found = [p for p in folder.glob("libnvrtc.so.*") if "alt" not in p.name]
        if found:
            return str(found[0]), sorted(folder.glob("libnvrtc-builtins.so.*"))
    for name in ("libnvrtc.so.13", "libnvrtc.so.12"):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return name, []
    raise SystemExit(
        f"no NVRTC: neither in {packages}, nor in {TOOLKIT}, nor on the loader's path; "
        "pip install nvidia-cuda-nvrtc"
    )


class Nvrtc:
    def __init__(self, site_packages):
        path, builtins = libraries_of(site_packages)
        # NVRTC 13 looks its own part up by name, which is then there.
        for part in builtins:
            ctypes.CDLL(str(part))
        self.library = ctypes.CDLL(path)

    def version(self):
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.call("Version", ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def call(self, name, *arguments):
        return getattr(self.library, f"nvrtc{name}")(*arguments)

    def text(self, program, what):
        size = ctypes.c_size_t()
        self.call(f"Get{what}Size", program, ctypes.byref(size))
        out = ctypes.create_string_buffer(size.value)
        self.call(f"Get{what}", program, out)
        return out.raw

    def compile(self, source, architecture, form="CUBIN"):
        """The cubin of a file, or its PTX, and the compiler's log."""
        headers = sorted(KERNELS.glob("*.cuh"))
        strings = lambda items: (ctypes.c_char_p * len(items))(*items)
        names = strings([h.name.encode() for h in headers])
        texts = strings([h.read_bytes() for h in headers])
        program = ctypes.c_void_p()
        arguments = source.read_bytes(), source.name.encode(), len(headers), texts, names
        self.call("CreateProgram", ctypes.byref(program), *arguments)
        target = "sm" if form == "CUBIN" else "compute"
        options = [*OPTIONS, f"--gpu-architecture={target}_{architecture}", "--ptxas-options=-v"]
        encoded = strings([option.encode() for option in options])
        status = self.call("CompileProgram", program, len(options), encoded)
        log = self.text(program, "ProgramLog").decode(errors="replace")
        if status:
            raise SystemExit(f"{source.name} for sm_{architecture}:\n{log}")
        return self.text(program, form), log


def first_match(table, name):
    return next((value for pattern, value in table if re.match(pattern, name)), None)


def resources(log):
    """Kernel: registers, and bytes of stack, spill stores and spill loads."""
    found, name = {}, None
    for line in log.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)'", line):
            name = entry[1]
        elif "bytes stack frame" in line:
            memory = tuple(int(n) for n in re.findall(r"(\d+) bytes", line))
        elif used := re.search(r"Used (\d+) registers", line):
            found[name] = (int(used[1]), memory)
    return found


def instructions(cubin, tools):
    """Kernel: names of its instructions."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        environment = {"PATH": str(tools)}
        command = [tools / "cuobjdump", "-sass", file.name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    parts = re.split(r"Function : (\w+)", done.stdout)[1:]
    pattern = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][A-Z0-9_.]*)")
    return {name: pattern.findall(body) for name, body in zip(parts[::2], parts[1::2])}


def check_resources(architecture, log):
    problems, report = [], []
    for name, (registers, memory) in resources(log).items():
        report.append((architecture, name, registers))
        most = first_match(REGISTERS_MAX, name)
        if registers > most:
            problems.append(f"sm_{architecture} {name}: {registers} registers, {most} are the most")
        if any(memory):
            problems.append(f"sm_{architecture} {name}: stack, spill stores and loads are {memory}")
    if not report:
        problems.append("the compiler's log names no kernel")
    return problems, report


def check_instructions(architecture, cubin, tools):
    problems = []
    for name, found in instructions(cubin, tools).items():
        for wanted, least in (first_match(INSTRUCTIONS_MIN, name) or {}).items():
            count = sum(i.startswith(wanted) for i in found)
            if count < least:
                where = f"sm_{architecture} {name}"
                problems.append(f"{where}: {count} {wanted}, {least} are the least")
        for unwanted in FORBIDDEN:
            if any(i.split(".")[0] == unwanted for i in found):
                problems.append(f"sm_{architecture} {name}: uses local memory ({unwanted})")
    return problems


def check(site_packages, source, architecture):
    """Problems, and (architecture, kernel, registers) of each kernel of a file."""
    cubin, log = Nvrtc(site_packages).compile(source, architecture)
    problems, report = check_resources(architecture, log)
    tools = Path(site_packages) / "nvidia" / "cu13" / "bin"
    return problems + check_instructions(architecture, cubin, tools), report
