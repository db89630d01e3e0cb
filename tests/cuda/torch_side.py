"""The same work in PyTorch, for comparison on the same device: a teacher's forward pass in bf16
with sdpa, the head in chunks, top-k and logsumexp in fp32; and flash attention alone.

python torch_side.py TEACHER SEQUENCES LENGTH [--device cuda]: one JSON object. Needs torch and
transformers.
"""

import argparse
import json
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, AutoModelForCausalLM

CHUNK, TOP_K, REPEATS = 1024, 32, 3


def clock(device, work):
    """Seconds of the best of a few runs, after one that doesn't count."""
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    best = float("inf")
    for run in range(REPEATS + 1):
        wait()
        started = time.perf_counter()
        work()
        wait()
        if run:
            best = min(best, time.perf_counter() - started)
    return best


def made(teacher, device):
    """The model with random weights, which take as long as any."""
    config = AutoConfig.from_pretrained(teacher)
    config._attn_implementation = "sdpa"
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@torch.no_grad()
def score(model, tokens):
    """Rows' best ids, their log-probs and the logsumexp, as a scorer keeps them."""
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    hidden = hidden.reshape(-1, hidden.shape[-1])
    kept = []
    for chunk in hidden.split(CHUNK):
        logits = model.lm_head(chunk).float()
        best, ids = logits.topk(TOP_K)
        logsumexp = logits.logsumexp(-1, keepdim=True)
        kept.append((ids, best - logsumexp, logsumexp))
    return kept


@torch.no_grad()
def head_only(model, rows):
    for chunk in rows.split(CHUNK):
        model.lm_head(chunk)


@torch.no_grad()
def attention(config, tokens, length, device):
    """Seconds of causal attention over `tokens` tokens in sequences of `length`, by flash
    attention's kernels: cuDNN's use instructions of Hopper's own."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    width = config.hidden_size // heads
    q = torch.randn(tokens // length, heads, length, width, device=device, dtype=torch.bfloat16)
    k, v = [torch.randn_like(q[:, :kv_heads]) for _ in range(2)]
    call = torch.nn.functional.scaled_dot_product_attention
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
        return clock(device, lambda: call(q, k, v, is_causal=True, enable_gqa=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("teacher")
    parser.add_argument("sequences", type=int)
    parser.add_argument("length", type=int)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    device = options.device
    model = made(options.teacher, device)
    vocab, hidden = model.config.vocab_size, model.config.hidden_size
    tokens = torch.randint(vocab, (options.sequences, options.length), device=device)
    count = options.sequences * options.length
    rows = torch.randn(count, hidden, device=device, dtype=torch.bfloat16)
    lengths = [n for n in (512, 4096) if n <= count] or [options.length]
    found = {
        "tokens": count,
        "seconds": clock(device, lambda: score(model, tokens)),
        "head_seconds": clock(device, lambda: head_only(model, rows)),
        "attention_seconds": {n: attention(model.config, count, n, device) for n in lengths},
        "torch": torch.__version__,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
