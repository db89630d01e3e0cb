"""Cases of programs that use the stand-in driver: each must pass, or be stopped with the right
words."""

import os
import subprocess
import sys

import host

CASES = {}


def case(stopped_by="", **knobs):
    """A case that must pass, or be stopped with these words, under these knobs."""

    def keep(function):
        environment = {f"STANDIN_{name.upper()}": str(value) for name, value in knobs.items()}
        CASES[function.__name__] = function, stopped_by, environment
        return function

    return keep


def mistake(stopped_by, **knobs):
    return case(stopped_by, **knobs)


def refused(status, act, *arguments, **named):
    try:
        act(*arguments, **named)
    except host.Refused as error:
        assert error.status == status, f"{error}, {status} is due"
    else:
        raise AssertionError(f"accepted, {status} is due")


def run_case(folder, name):
    """What is wrong with how a case ended: nothing, if it did as it should."""
    _, stopped_by, knobs = CASES[name]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("STANDIN_")}
    command = [sys.executable, sys.argv[0], folder, name]
    done = subprocess.run(command, env={**kept, **knobs}, capture_output=True, text=True)
    said = done.stderr[-1500:]
    if not stopped_by:
        return [f"{name}: status {done.returncode}\n{said}"] if done.returncode else []
    stopped = done.returncode != 0 and "stand-in driver:" in said and stopped_by in said
    return [] if stopped else [f"{name}: not stopped by {stopped_by!r}\n{said}"]


def main():
    """python MODULE FOLDER runs the module's cases, each in a process of its own; with a case's
    name behind, that case alone and in this process."""
    if len(sys.argv) > 2:
        CASES[sys.argv[2]][0](sys.argv[1])
    else:
        wrong = [problem for name in CASES for problem in run_case(sys.argv[1], name)]
        sys.exit("\n".join(wrong) or 0)
