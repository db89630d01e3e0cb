"""Teachers with the shape of published ones and random weights, made on the spot: for timing, where
the numbers don't matter."""

import json
import struct
from pathlib import Path

import numpy as np

from device import to_bf16

LLAMA_3_8B = dict(
    model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=4096,
    intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128256, max_position_embeddings=8192, rope_theta=500000.0, rms_norm_eps=1e-5,
    tie_word_embeddings=False, torch_dtype="bfloat16", hidden_act="silu", bos_token_id=128000,
    eos_token_id=128001,
)  # fmt: skip
QWEN2_5_0_5B = dict(
    model_type="qwen2", architectures=["Qwen2ForCausalLM"], hidden_size=896,
    intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
    vocab_size=151936, max_position_embeddings=32768, rope_theta=1000000.0, rms_norm_eps=1e-6,
    tie_word_embeddings=True, torch_dtype="bfloat16", hidden_act="silu", bos_token_id=151643,
    eos_token_id=151643,
)  # fmt: skip
# For a machine without a GPU: what the big one has, small.
TINY = dict(
    LLAMA_3_8B, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=512,
)  # fmt: skip
BLOCK = 1 << 24  # random numbers that are made; larger weights repeat them
SPREAD = 0.02


def weights(config):
    """(name, shape) of every tensor of a Llama or Qwen2 checkpoint."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    width = hidden // config["num_attention_heads"]
    kv = width * config["num_key_value_heads"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (hidden,)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
        for name, rows in (("q_proj", hidden), ("k_proj", kv), ("v_proj", kv)):
            yield f"{at}.self_attn.{name}.weight", (rows, hidden)
            if config["model_type"] == "qwen2":
                yield f"{at}.self_attn.{name}.bias", (rows,)
        yield f"{at}.self_attn.o_proj.weight", (hidden, hidden)
        yield f"{at}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{at}.mlp.up_proj.weight", (inner, hidden)
        yield f"{at}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def make(folder, config):
    """A checkpoint in one safetensors file, bf16."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    rng = np.random.default_rng(11)
    block = to_bf16(rng.standard_normal(BLOCK, np.float32) * np.float32(SPREAD))
    ones = to_bf16(np.ones(config["hidden_size"]))
    header, end = {}, 0
    for name, shape in weights(config):
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for name, shape in weights(config):
            is_norm = "norm" in name
            left = int(np.prod(shape))
            while left:
                piece = (ones if is_norm else block)[:left]
                file.write(piece)
                left -= len(piece)
    return folder


def random_sequences(vocab, sequences, length):
    """(tokens, mask) each: random tokens, one more than `length`, so that there are `length`
    rows."""
    rng = np.random.default_rng(12)
    tokens = rng.integers(0, vocab, (sequences, length + 1))
    return [(row, np.ones(length + 1)) for row in tokens]
