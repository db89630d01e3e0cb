#!/usr/bin/env python3
"""Make tests/fixtures/templates/expressions.json: what Jinja under transformers says about small expressions.

    python scripts/template_check/make_goldens.py [--count N]

The expressions are those of expressions.py, drawn by a fixed seed. Each is a list of two: the template, and what it
renders to, or null where transformers refuses it. chats.json holds what the project's own templates (*.jinja beside it)
make of the chats of chats.py. Needs transformers.
"""
import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import oracle
from chats import chats
from expressions import expressions

FOLDER = Path(__file__).resolve().parents[2] / "tests/fixtures/templates"
SEED, COUNT = 20240726, 3000
CHAT = {"messages": [{"role": "user", "content": "a b", "items": 1, "n": 2}, {"role": "assistant", "content": "Hé's\n"}]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--out", type=Path, default=FOLDER)
    args = parser.parse_args()
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
