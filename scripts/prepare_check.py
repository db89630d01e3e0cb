#!/usr/bin/env python3
"""Hold prepare to its promises about memory, restarts and speed; exits 1 where one is broken.

    python scripts/prepare_check.py KDSCORE [memory] [line] [restarts] [speed] [--small MB] [--large MB]

KDSCORE is the binary; without a name of a check all but speed are run. Rows are made here from a fixed seed, in a
temporary folder.

    memory    peak RSS of --large input is at most 1.25 times and 64 MiB more than that of --small
    line      one line of 1 GB is refused, and within the same memory (a sparse file: it takes no room)
    restarts  killed at random moments and run again, the corpus has the bytes of an undisturbed run, whatever the threads
    speed     rows per second against one process of transformers (needs it) that renders, tokenises and masks the same
              rows, against as many processes as cores, and tokens per second against the tokenizers crate's own batch
              encoding through Python; and rows that share a system prompt against rows with one of their own. All in
              this one run, on these cores. Build KDSCORE with --release for it.
"""
import argparse
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEACHER = ROOT / "tests/fixtures/teacher"
WORDS = "the of and to in is it that was for on are as with they be at one have this from or had by hot word but what some we can out other were all there when up use your how said an each she".split()
FAILED = []


def check(name, holds, told):
    print(f"{'ok' if holds else 'BROKEN'}  {name}: {told}", flush=True)
    if not holds:
        FAILED.append(name)


def write_rows(path, megabytes, seed):
    """Chats of random words. Beyond the first 2 MB, each text is an earlier one with a number in front."""
    rng = random.Random(seed)
    lines, size = [], 0
    while size < min(megabytes, 2) << 20:
        text = lambda n: " ".join(rng.choices(WORDS, k=rng.randint(3, n))) + rng.choice([".", "?", " é🙂", "\n"])
        messages = [{"role": role, "content": text(80)} for _ in range(rng.randint(1, 3)) for role in ("user", "assistant")]
        lines.append(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
        size += len(lines[-1].encode())
    with open(path, "w", encoding="utf-8") as file:
        for copy in range(-(-(megabytes << 20) // size)):
            file.writelines(line.replace('"content": "', f'"content": "{copy} ') for line in lines)


def command(binary, data, out, *more):
    return [str(binary), "prepare", "--data", str(data), "--tokenizer", str(TEACHER), "--out", str(out), *more]


def peak_rss(arguments):
    """MiB, seconds and exit status of one run."""
    started = time.monotonic()
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    error = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_maxrss / 1024, time.monotonic() - started, process.returncode, error


def digest(folder):
    found = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        found.update(f"{path.relative_to(folder)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def peak_of(binary, folder, size):
    """MiB that prepare takes for rows of `size` MB."""
    data, out = folder / f"{size}.jsonl", folder / f"out{size}"
    write_rows(data, size, size)
    peak, seconds, status, error = peak_rss(command(binary, data, out))
    assert status == 0, error
    print(f"    {size} MB in {seconds:.1f} s, peak {peak:.0f} MiB", flush=True)
    data.unlink()
    shutil.rmtree(out)
    return peak


def memory(binary, folder, small, large):
    usual, most = (peak_of(binary, folder, size) for size in (small, large))
    check("memory", most < usual * 1.25 + 64, f"{small} MB: {usual:.0f} MiB, {large} MB: {most:.0f} MiB")


def long_line(binary, folder, small):
    usual = peak_of(binary, folder, small)
    data = folder / "line.jsonl"
    with open(data, "wb") as file:
        file.write(b'{"text": "')
        file.truncate(1 << 30)
    peak, seconds, status, error = peak_rss(command(binary, data, folder / "line"))
    check("line", status == 2 and "expected at most" in error and peak < usual + 192, f"refused in {seconds:.1f} s, peak {peak:.0f} MiB: {error.strip()[:120]}")


def restarts(binary, folder, tries, seed):
    rng = random.Random(seed)
    data = folder / "restart.jsonl"
    write_rows(data, 6, seed)
    _, whole, status, error = peak_rss(command(binary, data, folder / "whole", "--threads", "2"))
    assert status == 0, error
    expected = digest(folder / "whole")
    for number in range(tries):
        out = folder / "killed"
        shutil.rmtree(out, ignore_errors=True)
        process = subprocess.Popen(command(binary, data, out, "--threads", str(1 + number % 3)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(rng.uniform(0, whole))
        process.kill()
        process.wait()
        subprocess.run(command(binary, data, out, "--threads", str(1 + number % 2)), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if digest(out) != expected:
            check("restarts", False, f"try {number} made another corpus")
            return
    check("restarts", True, f"{tries} kills, always the same corpus")


def hugging_face(lines):
    """Renders, tokenises and masks with transformers; tokens made and seconds of the work itself."""
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    started = time.monotonic()
    tokens = 0
    for line in lines:
        found = tokenizer.apply_chat_template(json.loads(line)["messages"], return_dict=True, return_assistant_tokens_mask=True)
        tokens += len(found["input_ids"])
    return tokens, time.monotonic() - started


def speed(binary, folder):
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    data = folder / "speed.jsonl"
    write_rows(data, 24, 5)
    lines = data.read_text(encoding="utf-8").splitlines()
    cores = len(os.sched_getaffinity(0))
    rates = {}
    for threads in (1, cores):
        _, seconds, status, error = peak_rss(command(binary, data, folder / f"speed{threads}", "--threads", str(threads)))
        assert status == 0, error
        rates[threads] = len(lines) / seconds
    sample = lines[: len(lines) // 4]
    tokens, seconds = hugging_face(sample)
    one = len(sample) / seconds
    with multiprocessing.Pool(cores) as pool:
        parts = [sample[i::cores] for i in range(cores)]
        many = len(sample) / max(seconds for _, seconds in pool.map(hugging_face, parts))
    print(f"    kdscore {rates[1]:.0f} rows/s on 1 thread, {rates[cores]:.0f} on {cores}; transformers {one:.0f} in one process, {many:.0f} in {cores}")
    check("speed against one process", rates[cores] >= 3 * one, f"{rates[cores] / one:.1f} x on {cores} cores, {rates[1] / one:.1f} x on one")
    check("speed against one process per core", rates[cores] >= many, f"{rates[cores] / many:.1f} x")
    shared_prompt(binary, folder)
    encode_rate(binary, folder, data, lines, tokens / len(sample) * rates[cores])


def shared_prompt(binary, folder):
    """Rows with one system prompt, and the same rows with its words in an order of their own."""
    rng = random.Random(6)
    words = rng.choices(WORDS, k=450)
    rates = []
    for name in ("shared", "own"):
        data = folder / f"{name}.jsonl"
        with open(data, "w", encoding="utf-8") as file:
            for _ in range(3000):
                prompt = words if name == "shared" else rng.sample(words, k=len(words))
                question, answer = (" ".join(rng.choices(WORDS, k=30)) for _ in range(2))
                texts = {"system": " ".join(prompt), "user": question, "assistant": answer}
                file.write(json.dumps({"messages": [{"role": r, "content": t} for r, t in texts.items()]}) + "\n")
        _, seconds, status, error = peak_rss(command(binary, data, folder / name, "--threads", "1"))
        assert status == 0, error
        rates.append(3000 / seconds)
    check("speed with a shared prompt", rates[0] >= 2 * rates[1], f"{rates[0]:.0f} rows/s, {rates[1]:.0f} with prompts of their own: {rates[0] / rates[1]:.1f} x")


def encode_rate(binary, folder, data, lines, ours):
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    texts = [tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False) for line in lines[: len(lines) // 4]]
    started = time.monotonic()
    encoded = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    rate = sum(len(e) for e in encoded) / (time.monotonic() - started)
    check("speed against batch encoding", ours >= 0.8 * rate, f"{ours:.0f} of {rate:.0f} tokens/s: {ours / rate:.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", type=Path)
    parser.add_argument("checks", nargs="*", metavar="CHECK", help="memory, line, restarts, speed")
    parser.add_argument("--small", type=int, default=10, metavar="MB")
    parser.add_argument("--large", type=int, default=200, metavar="MB")
    parser.add_argument("--kills", type=int, default=8)
    args = parser.parse_args()
    binary, wanted = args.binary.resolve(), args.checks or ["memory", "line", "restarts"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        # Memory first: a child's peak counts what this process held when it was started.
        runs = {"memory": lambda: memory(binary, folder, args.small, args.large), "line": lambda: long_line(binary, folder, args.small),
                "restarts": lambda: restarts(binary, folder, args.kills, 3), "speed": lambda: speed(binary, folder)}
        for name in sorted(wanted, key=list(runs).index):
            runs[name]()
    return bool(FAILED)


if __name__ == "__main__":
    sys.exit(main())
