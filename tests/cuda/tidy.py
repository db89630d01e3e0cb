"""Holds the kernels, the emulator and the checks to the house's rules."""

import re

from build import HERE, KERNELS, ROOT

FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
COLUMNS_MAX = 100


def files():
    found = [p for folder in (KERNELS, HERE) for p in sorted(folder.rglob("*"))]
    return [p for p in found if p.suffix in (".cu", ".cuh", ".h", ".cpp", ".py")]


def function_lengths(lines):
    """(line number, lines) of each function or method in C++ that is laid out as here."""
    for at, line in enumerate(lines):
        indent = line[: len(line) - len(line.lstrip())]
        other = line.lstrip().startswith(("struct ", "for ", "if ", "while ", "return "))
        other = other or re.search(r"\[[&=].*\{$", line)  # a lambda
        if len(indent) in (0, 4) and line.endswith("{") and "(" in line and not other:
            close = next((i for i, l in enumerate(lines[at:]) if l == indent + "}"), 0)
            yield at + 1, close + 1


def problems_of(path, text):
    lines = text.split("\n")
    if len(lines) > FILE_LINES_MAX:
        yield 1, f"{len(lines)} lines"
    if not lines[0].startswith(("//", '"""')):
        yield 1, "no line that says what it is for"
    for at, line in enumerate(lines):
        if len(line) > COLUMNS_MAX:
            yield at + 1, f"{len(line)} columns"
    if path.suffix != ".py":
        for at, length in function_lengths(lines):
            if length > FUNCTION_LINES_MAX:
                yield at, f"a function of {length} lines"
    if path.parent == KERNELS:
        yield from kernel_problems(path, text)


def kernel_problems(path, text):
    if path.name != "common.cuh" and re.search(r"\basm\b", text):
        yield 1, "PTX outside common.cuh, where its twins are"
    if "#include <" in text:
        yield 1, "a header that the compiler on a device's machine may not find"
    if path.suffix == ".cu":
        words = "KERNEL", "REGISTER_KERNEL"
        made, registered = [len(re.findall(rf"\b{word}\(", text)) for word in words]
        if made != registered:
            yield 1, f"{made} kernels, {registered} of them known to the emulator"


def check():
    found = []
    for path in files():
        for line, problem in problems_of(path, path.read_text(encoding="utf-8")):
            found.append(f"{path.relative_to(ROOT)}:{line}: {problem}")
    return found
