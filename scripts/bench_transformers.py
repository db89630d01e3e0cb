#!/usr/bin/env python3
"""kdscore against Hugging Face transformers on the same cores, in one run.

    cargo build --release
    python scripts/bench_transformers.py WORK [--rounds 3] [--threads N] [--sequences 64]

Needs torch, transformers and numpy. Makes, in WORK, a random teacher of SmolLM2-135M's shape
(bf16 weights) and a corpus of 64 sequences of 32 to 1,024 tokens, all positions scored. Then the
two programs score it in turn, each with the same number of threads:

- transformers, chunked: one sequence at a time, fp32, sdpa attention, the body once, then the
  head on slices of 1,024 rows, logsumexp and top-32;
- kdscore: `kdscore score -k 32` on the CPU, from tokens to committed shards.

Loading is left out of both. Prints tokens/s of each round, the ratio of each pair and its median,
and the mean target log-prob of both, which must agree.
"""
import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import numpy as np

K, HEAD_ROWS = 32, 1024
SHAPE = dict(
    hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, vocab_size=49152, max_position_embeddings=2048,
    tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
)


def make_teacher(folder):
    import torch
    import transformers

    torch.manual_seed(1)
    config = transformers.LlamaConfig(**SHAPE)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                gain = 3 if "embed" in name else 1
                weight.normal_(0, gain / math.sqrt(weight.shape[-1]))
    model.bfloat16().save_pretrained(folder)


def make_corpus(folder, sequences):
    rng = np.random.default_rng(64)
    lengths = np.exp(rng.uniform(math.log(32), math.log(1024), sequences)).round().astype(int)
    tokens = rng.integers(3, SHAPE["vocab_size"], lengths.sum()).astype(np.int32)
    shard = folder / "shard-000000"
    shard.mkdir(parents=True)
    np.save(shard / "tokens.npy", tokens)
    np.save(shard / "offsets.npy", np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    np.save(shard / "loss_mask.npy", np.ones(len(tokens), bool))
    manifest = {"format_version": 1, "shards": [{"id": "shard-000000"}], "vocab_size": SHAPE["vocab_size"]}
    (folder / "corpus.json").write_text(json.dumps(manifest))


def read_sequences(folder):
    shard = folder / "shard-000000"
    tokens, offsets = np.load(shard / "tokens.npy"), np.load(shard / "offsets.npy")
    return [tokens[a:b] for a, b in zip(offsets, offsets[1:])]


class Transformers:
    def __init__(self, teacher, threads):
        import torch
        import transformers

        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.torch = torch
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            teacher, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()

    def score(self, sequences):
        """tokens/s and mean target log-prob."""
        torch, head, total = self.torch, self.model.get_output_embeddings(), 0.0
        started = time.perf_counter()
        with torch.inference_mode():
            for tokens in sequences:
                ids = torch.from_numpy(tokens.astype(np.int64))[None]
                hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
                for at in range(0, len(hidden), HEAD_ROWS):
                    logits = head(hidden[at : at + HEAD_ROWS]).float()
                    lse = torch.logsumexp(logits, -1, keepdim=True)
                    top, _ = logits.topk(K, -1)
                    _tail = 1 - (top - lse).exp().sum(-1)
                    targets = ids[0, 1 + at : 1 + at + HEAD_ROWS, None]
                    total += float((logits.gather(1, targets) - lse).sum())
        seconds = time.perf_counter() - started
        count = sum(map(len, sequences))
        return count / seconds, total / (count - len(sequences))


def score_kdscore(binary, work, threads):
    """tokens/s and mean target log-prob, of a fresh scored set."""
    out = work / "scored"
    shutil.rmtree(out, ignore_errors=True)
    command = [
        str(binary), "score", "--teacher", str(work / "teacher"), "--corpus", str(work / "corpus"),
        "--out", str(out), "-k", str(K), "--emit", "target_logp", "--json", "--threads", str(threads),
    ]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    figures = json.loads(result.stdout)
    manifest = json.loads((out / "shard-000000.manifest.json").read_text())
    path = next(p["path"] for p in manifest["products"] if p["name"] == "target_logp")
    return figures["tokens_per_second"], float(np.load(out / path).astype(np.float64).mean())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--binary", type=Path, default=Path(__file__).parent.parent / "target/release/kdscore")
    args = parser.parse_args()
    if not (args.work / "teacher/config.json").exists():
        make_teacher(args.work / "teacher")
    shutil.rmtree(args.work / "corpus", ignore_errors=True)
    make_corpus(args.work / "corpus", args.sequences)
    sequences = read_sequences(args.work / "corpus")
    reference = Transformers(args.work / "teacher", args.threads)
    reference.score(sequences[:1])
    ratios = []
    for number in range(args.rounds):
        ours, our_mean = score_kdscore(args.binary, args.work, args.threads)
        theirs, their_mean = reference.score(sequences)
        ratios.append(ours / theirs)
        print(f"round {number}: kdscore {ours:.0f} tokens/s, transformers {theirs:.0f} tokens/s, ratio {ours / theirs:.2f}", flush=True)
        if abs(our_mean - their_mean) > 1e-3:
            sys.exit(f"mean target log-probs differ: {our_mean} and {their_mean}")
    print(f"median ratio {statistics.median(ratios):.2f} ({args.threads} threads, mean target log-prob {our_mean:.4f} and {their_mean:.4f})")


if __name__ == "__main__":
    main()
