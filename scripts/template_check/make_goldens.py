#!/usr/bin/env python3
"""Make the goldens of tests/templates: what transformers says about small expressions, chats and tokenizers.

    python scripts/template_check/make_goldens.py [--count N]     and again under transformers 4

The expressions are those of expressions.py, drawn by a fixed seed. Each is a list of two: the template, and what it
renders to, or null where transformers refuses it. chats.json holds what the project's own templates (*.jinja beside it)
make of the chats of chats.py. tests/fixtures/checkpoints holds the ids that each generation of transformers gives by a small
tokenizer of pieces and by the fixtures' teacher's, as checkpoints.py changes them; under transformers 4 nothing else is made.
"""
import argparse
import json
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

sys.path.insert(0, str(Path(__file__).parent))
import checkpoints
import oracle
from chats import chats
from expressions import expressions

FOLDER = Path(__file__).resolve().parents[2] / "tests/fixtures/templates"
SEED, COUNT = 20240726, 2500
CHAT = {"messages": [{"role": "user", "content": "a b", "items": 1, "n": 2}, {"role": "assistant", "content": "Hé's\n"}]}


def make_checkpoints():
    if not checkpoints.PIECES.exists():
        checkpoints.PIECES.parent.mkdir(exist_ok=True)
        checkpoints.PIECES.write_text(json.dumps(pieces(), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        cases = list(checkpoints.goldens(Path(folder) / "checkpoint"))
    lines = ",\n".join(json.dumps(case, ensure_ascii=False, separators=(",", ":")) for case in cases)
    texts = json.dumps(checkpoints.TEXTS)
    path = checkpoints.PIECES.parent / f"{oracle.RULES}.json"
    path.write_text(f'{{"rules": "{oracle.RULES}", "texts": {texts}, "checkpoints": [\n{lines}\n]}}\n', encoding="utf-8")
    print(len(cases), "tokenizers,", sum("refused" in case for case in cases), "of them refused")


def pieces():
    """A tokenizer as SentencePiece's are when converted: spaces as U+2581, bytes for characters it doesn't know."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    tokenizer.train([str(FOLDER.parents[2] / "README.md")], trainer)
    made = json.loads(tokenizer.to_str())
    vocab = sorted(made["model"]["vocab"], key=made["model"]["vocab"].get)
    vocab = special + [f"<0x{byte:02X}>" for byte in range(256)] + [piece for piece in vocab if piece not in special]
    made["model"]["vocab"] = {piece: i for i, piece in enumerate(vocab)}
    made["model"]["merges"] = [" ".join(merge) for merge in made["model"]["merges"]]
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    made["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, spaces]}
    made["pre_tokenizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(made))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    return json.loads(tokenizer.to_str())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--out", type=Path, default=FOLDER)
    args = parser.parse_args()
    make_checkpoints()
    if oracle.RULES != "transformers-5":
        return
    found = []
    for expression in expressions(SEED, args.count):
        text = oracle.render(expression, dict(CHAT, kwargs={"m": CHAT["messages"][0]})).get("text")
        # What names an object's place in memory, or is drawn at random, is no golden.
        if text is None or (" at 0x" not in text and "random" not in expression and "lipsum" not in expression):
            found.append([expression, text])
    lines = ",\n".join(json.dumps(f, ensure_ascii=False) for f in found)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "expressions.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    templates = []
    for path in sorted(args.out.glob("*.jinja")):
        source = path.read_bytes().decode("utf-8")
        templates.append({"name": path.stem, "source": source, "chats": [
            {"chat": chat, "expected": oracle.render(source, chat), "encoded": []} for chat in chats()]})
    document = {"rules": oracle.RULES, "date": oracle.DATE, "tokens": oracle.TOKENS, "tokenizers": {}, "templates": templates}
    (args.out / "chats.json").write_text(json.dumps(document, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
    print(len(found), "expressions,", sum(t is None for _, t in found), "of them refused;", len(templates), "templates")


if __name__ == "__main__":
    main()
