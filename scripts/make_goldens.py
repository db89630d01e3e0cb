#!/usr/bin/env python3
"""Make tests/fixtures/golden: what Hugging Face says about a small corpus under the embedded teacher.

    python scripts/make_goldens.py [--teacher tests/fixtures/teacher] [--out tests/fixtures/golden]

Needs numpy, torch and transformers. Nothing is drawn: the corpus is the first quickstart chats and a few edge cases.
The model runs in fp32 with eager attention, each sequence alone; everything after the logits is in float64.

    chats.jsonl          the source chats (the first CHATS lines of configs/quickstart.jsonl)
    rendered.json        per chat {"text", "ids", "assistant_mask"}: transformers' rendering, encoding and mask
    corpus.json          {"sequences": [{"tokens", "mask"}]}: those chats, then a sequence of one token, one of two, one
                         of about LONG_TOKENS tokens (chats laid end to end), and one whose mask is all zero
    rows.npy             int32   (R, 2)  sequence and position t; a row exists iff t + 1 < T and mask[t + 1]
    targets.npy          int32   (R)     token t + 1
    ids.npy              int32   (R, K)  top-k by descending logit, equal logits by lower id
    logp.npy             float32 (R, K)  their log-probs
    tail.npy             float32 (R)     probability outside the top-k, summed over the rest
    target_logp.npy      float32 (R)     log-prob of the target
    target_rank.npy      int32   (R)     how many ids come before the target in the order of ids.npy
    logsumexp.npy        float32 (R)     over the full vocabulary
    entropy.npy          float32 (R)     of the full distribution, in nats
    meta.json            k, counts, library versions
"""
import argparse
import json
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
CHATS, LONG_TOKENS, TOP_K = 12, 400, 32
DTYPES = dict(rows=np.int32, targets=np.int32, ids=np.int32, target_rank=np.int32)     # the rest is float32


def load_teacher(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def scored_positions(tokens, mask):
    """The positions t whose next token is one the student learns to predict."""
    return [t for t in range(len(tokens) - 1) if mask[t + 1]]


@torch.no_grad()
def score_sequence(model, tokens, positions, k):
    """All products at the given positions of one sequence, as float64 and int64 tensors."""
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0, positions].double()      # (R, V)
    targets = torch.tensor(tokens)[torch.tensor(positions) + 1]                                # (R)
    logsumexp = torch.logsumexp(logits, 1)
    logp = logits - logsumexp[:, None]
    ids = torch.sort(logits, dim=1, descending=True, stable=True).indices                      # stable: lower id first
    in_order = logp.gather(1, ids)
    p = logp.exp()
    return dict(
        targets=targets, ids=ids[:, :k], logp=in_order[:, :k], tail=in_order[:, k:].exp().sum(1),
        target_logp=logp.gather(1, targets[:, None])[:, 0],
        target_rank=(ids == targets[:, None]).int().argmax(1),
        logsumexp=logsumexp, entropy=-torch.special.xlogy(p, p).sum(1))


def score(model, sequences, k):
    """{product: array}, rows in corpus order."""
    parts = []
    for s, sequence in enumerate(sequences):
        positions = scored_positions(sequence["tokens"], sequence["mask"])
        if positions:
            products = score_sequence(model, sequence["tokens"], positions, k)
            parts.append(dict(products, rows=torch.tensor([(s, t) for t in positions])))
    return {name: torch.cat([p[name] for p in parts]).numpy().astype(DTYPES.get(name, np.float32)) for name in parts[0]}


def render(tokenizer, messages):
    """One chat as transformers renders, encodes and masks it."""
    encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    return {"text": tokenizer.apply_chat_template(messages, tokenize=False), "ids": list(encoded["input_ids"]),
            "assistant_mask": list(encoded["assistant_masks"])}


def as_sequence(rendered):
    return {"tokens": rendered["ids"], "mask": rendered["assistant_mask"]}


def edge_cases(rendered):
    """Sequences a scorer trips over: no row at all, a single row, many tokens, nothing to learn."""
    a_few = rendered[0]["ids"]
    long = {"tokens": [], "mask": []}
    for chat in rendered:
        if len(long["tokens"]) < LONG_TOKENS - 40:
            long["tokens"] += chat["ids"]
            long["mask"] += chat["assistant_mask"]
    return [{"tokens": a_few[:1], "mask": [1]}, {"tokens": a_few[:2], "mask": [0, 1]}, long,
            {"tokens": a_few, "mask": [0] * len(a_few)}]


def write_json(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, default=ROOT / "tests/fixtures/teacher")
    parser.add_argument("--out", type=Path, default=ROOT / "tests/fixtures/golden")
    args = parser.parse_args()
    torch.set_num_threads(2)
    args.out.mkdir(parents=True, exist_ok=True)

    lines = (ROOT / "configs/quickstart.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    tokenizer = AutoTokenizer.from_pretrained(args.teacher)
    rendered = [render(tokenizer, json.loads(line)["messages"]) for line in lines[:2 * CHATS]]
    sequences = [as_sequence(r) for r in rendered[:CHATS]] + edge_cases(rendered[CHATS:])

    (args.out / "chats.jsonl").write_text("".join(lines[:CHATS]), encoding="utf-8")
    write_json(args.out / "rendered.json", rendered[:CHATS])
    write_json(args.out / "corpus.json", {"sequences": sequences})
    products = score(load_teacher(args.teacher), sequences, TOP_K)
    for name, array in products.items():
        np.save(args.out / f"{name}.npy", array)
    meta = dict(k=TOP_K, sequences=len(sequences), tokens=sum(len(s["tokens"]) for s in sequences), rows=len(products["targets"]),
                torch=torch.__version__, transformers=transformers.__version__)
    write_json(args.out / "meta.json", meta)
    print(meta, "perplexity", round(float(np.exp(-products["target_logp"].mean())), 3),
          "entropy", round(float(products["entropy"].mean()), 3), "tail", float(products["tail"].mean()))


if __name__ == "__main__":
    main()
