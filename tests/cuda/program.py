"""The whole program as a user runs it: corpora by hand, `kdscore score`, and what it stored."""

import json
import os
import subprocess
import time
from pathlib import Path

import numpy as np

from build import ROOT

TEACHERS = ROOT / "tests" / "fixtures" / "teachers"


class Failed(Exception):
    """A run that didn't end with status 0."""

    def __init__(self, command, done):
        said = done.stderr[-1200:].strip()
        super().__init__(f"{' '.join(map(str, command))}: status {done.returncode}\n{said}")
        self.status, self.said = done.returncode, done.stderr


class Program:
    """The binary, with an environment of its own."""

    def __init__(self, binary, environment=None, device="cuda:0"):
        kept = {k: v for k, v in os.environ.items() if not k.startswith("STANDIN_")}
        self.binary, self.device = Path(binary), device
        self.environment = {**kept, **(environment or {})}

    def under(self, **knobs):
        """The same with knobs of the stand-in driver set."""
        named = {f"STANDIN_{name.upper()}": str(value) for name, value in knobs.items()}
        return Program(self.binary, {**self.environment, **named}, self.device)

    def run(self, *arguments):
        command = [self.binary, *map(str, arguments)]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        if done.returncode:
            raise Failed(command, done)
        return done

    def start(self, *arguments):
        command = [self.binary, *map(str, arguments)]
        return subprocess.Popen(
            command, env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def score(self, teacher, corpus, out, *more):
        return self.run(*self.score_arguments(teacher, corpus, out, *more))

    def score_arguments(self, teacher, corpus, out, *more):
        paths = "--teacher", teacher, "--corpus", corpus, "--out", out
        return "score", *paths, "--device", self.device, "--trust-tokens", *more


def write_corpus(folder, sequences, vocab):
    """A corpus of one shard; sequences are (tokens, mask)."""
    shard = Path(folder) / "shard-000000"
    shard.mkdir(parents=True, exist_ok=True)
    join = lambda parts, dtype: np.concatenate([np.asarray(p, dtype) for p in parts])
    np.save(shard / "tokens.npy", join([t for t, _ in sequences], np.int32))
    np.save(shard / "loss_mask.npy", join([m for _, m in sequences], np.uint8))
    offsets = np.cumsum([0] + [len(t) for t, _ in sequences])
    np.save(shard / "offsets.npy", offsets.astype(np.int64))
    manifest = {"format_version": 1, "shards": [{"id": "shard-000000"}], "vocab_size": vocab}
    (Path(folder) / "corpus.json").write_text(json.dumps(manifest), encoding="utf-8")
    return Path(folder)


def manifests(out):
    found = sorted(Path(out).glob("*.manifest.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in found]


def arrays(out):
    """Each product's array over all shards."""
    parts = {}
    for manifest in manifests(out):
        for product in manifest["products"]:
            parts.setdefault(product["name"], []).append(np.load(Path(out) / product["path"]))
    return {name: np.concatenate(found) for name, found in parts.items()}


def hashes(out):
    """What each array's bytes hash to, by shard and name."""
    return {
        (manifest["shard"]["id"], product["name"]): product["sha256"]
        for manifest in manifests(out)
        for product in manifest["products"]
    }


def until(condition, seconds=60):
    """Waits for it; whether it came."""
    end = time.time() + seconds
    while time.time() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False
