#!/usr/bin/env python3
"""Train the small chat model in tests/fixtures/teacher, the teacher that tests and the quickstart run on.

    python scripts/train_teacher.py --gsm8k DIR [--out tests/fixtures/teacher] [--steps 2600]

DIR holds gsm8k_train.jsonl and gsm8k_test.jsonl (question, answer; MIT). Needs torch, transformers and tokenizers;
about a quarter of an hour on two CPU cores. Everything is drawn from SEED; the bits still depend on the libraries and
the CPU, so a retrained teacher needs new goldens (scripts/make_goldens.py).

Made, all under the names Hugging Face uses:
    tokenizer.json, tokenizer_config.json    byte-level BPE, ChatML-like template with generation blocks
    config.json, generation_config.json      Llama: grouped-query attention, tied embeddings, plain RoPE
    model.safetensors                        bf16
    README.md                                the model card, with the held-out perplexities measured here

Trained on GSM8K's training split and on chats from scripts/make_quickstart.py with another seed; never on the
quickstart's chats (a chat with the same opening user turn is dropped) nor on GSM8K's test split.
"""
import argparse
import json
import math
import re
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from make_quickstart import QUICKSTART_COUNT, QUICKSTART_SEED, make_chats

SEED = 7
OWN_CHATS = (1001, 6000)                   # generator seed, count
VOCAB = 2048
BOS, TURN_START, TURN_END, PAD = "<|bos|>", "<|im_start|>", "<|im_end|>", "<|pad|>"     # ids 0 to 3
CONTEXT = 1024
WINDOW, BATCH = 512, 4                     # tokens per training window, windows per step
LEARNING_RATE, WARMUP_STEPS, WEIGHT_DECAY = 3e-3, 100, 0.1

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('unknown role: ' + message['role']) }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- message['content'] + '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- message['content'] + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

CARD = """\
---
license: apache-2.0
language: en
---
# The embedded teacher

A {parameters:,} parameter Llama-architecture chat model ({layers} layers, hidden {hidden}, {heads} heads over {kv_heads} key/value heads, tied
embeddings, byte-level BPE of {vocab:,} tokens, context {context}, bf16). It makes kdscore's tests and quickstart run on real
text without a download. It writes short worked solutions in good form; its arithmetic is not to be trusted.

**Chat format.** `<|bos|>` once, then `<|im_start|>role`, a newline, the content, `<|im_end|>` and a newline per turn. Roles: system
(never added by itself), user, assistant. The template marks assistant content and its `<|im_end|>` as generated.

**Data.** GSM8K's training split ({gsm8k_chats:,} problems; MIT, Cobbe et al. 2021), calculator annotations removed, and {own_chats:,} chats from
`scripts/make_quickstart.py` with seed {own_seed} (Apache-2.0), less those that open like a quickstart chat. {train_tokens:,} tokens,
{steps:,} steps of {step_tokens:,} (about {epochs:.1f} passes), all tokens in the loss.

**Perplexity per token** of the bf16 weights, held-out chats scored one by one:

| held-out text | tokens | this model | unigram | uniform |
|---|---|---|---|---|
{table}
The first line of each pair counts every token after `<|bos|>`, the second the assistant's only. The unigram is that of the training tokens.

**Retrain.** `python scripts/train_teacher.py --gsm8k DIR` (seeded), then `python scripts/make_goldens.py`.

**Licence.** The model and our chats: Apache-2.0. GSM8K: MIT; none of its text is in this repository.
"""


# ---- data ----------------------------------------------------------------------------------------------------------

def gsm8k_chats(path):
    """One chat per problem, without the <<48/2=24>> calculator annotations."""
    chats = []
    for line in open(path, encoding="utf-8"):
        row = json.loads(line)
        answer = re.sub(r"<<[^>]*>>", "", row["answer"])
        chats.append([{"role": "user", "content": row["question"]}, {"role": "assistant", "content": answer}])
    return chats


def opening(chat):
    return next(m["content"] for m in chat if m["role"] == "user")


def training_chats(gsm8k_dir, held_out):
    barred = {opening(c) for c in held_out}
    own = [c for c in make_chats(*OWN_CHATS) if opening(c) not in barred]
    return gsm8k_chats(gsm8k_dir / "gsm8k_train.jsonl"), own


# ---- tokenizer -----------------------------------------------------------------------------------------------------

def write_tokenizer(texts, out):
    """Byte-level BPE with single digits; plain text gets one BOS from the post-processor, templated text from the template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[BOS, TURN_START, TURN_END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, 0)])
    tokenizer.save(str(out / "tokenizer.json"))
    write_json(out / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": TURN_END, "pad_token": PAD,
        "model_max_length": CONTEXT, "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE})
    return AutoTokenizer.from_pretrained(out)


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def encode(tokenizer, chats):
    """[(ids, assistant mask)] per chat, as transformers renders and masks it."""
    encoded = tokenizer.apply_chat_template(chats, return_dict=True, return_assistant_tokens_mask=True)
    return list(zip(encoded["input_ids"], encoded["assistant_masks"]))


# ---- model ---------------------------------------------------------------------------------------------------------

def new_model():
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=192, intermediate_size=384, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, bos_token_id=0, eos_token_id=2, pad_token_id=3))


def windows_forever(sequences, generator):
    """Batches (BATCH, WINDOW + 1): every pass shuffles the chats, lays them end to end and cuts windows."""
    while True:
        order = torch.randperm(len(sequences), generator=generator).tolist()
        stream = torch.tensor([i for s in order for i in sequences[s]])
        count = (len(stream) - 1) // WINDOW
        for start in range(0, count - BATCH + 1, BATCH):
            yield torch.stack([stream[w * WINDOW:w * WINDOW + WINDOW + 1] for w in range(start, start + BATCH)])


def learning_rate(step, steps):
    """Linear warm-up, then a cosine down to a twentieth."""
    if step < WARMUP_STEPS:
        return LEARNING_RATE * (step + 1) / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return LEARNING_RATE * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


def train(model, sequences, steps):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}],
                                  betas=(0.9, 0.95))
    batches, began = windows_forever(sequences, torch.Generator().manual_seed(SEED)), time.time()
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        batch = next(batches)                                                          # (B, W + 1)
        logits = model(batch[:, :-1], use_cache=False).logits                          # (B, W, V)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step:5}  loss {loss.item():.3f}  {time.time() - began:.0f} s", flush=True)


def save_bf16(model, out):
    """The weights under their Hugging Face names; the tied head is not stored twice."""
    weights = {n: p.detach().to(torch.bfloat16).contiguous() for n, p in model.named_parameters() if n != "lm_head.weight"}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    config = model.config.to_dict()
    keep = ("model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
            "hidden_act max_position_embeddings rms_norm_eps tie_word_embeddings attention_bias mlp_bias bos_token_id "
            "eos_token_id pad_token_id").split()
    write_json(out / "config.json", {"architectures": ["LlamaForCausalLM"], **{k: config[k] for k in keep},
                                     "rope_theta": 10000.0, "rope_scaling": None, "torch_dtype": "bfloat16"})
    write_json(out / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 3})


# ---- what it is worth ----------------------------------------------------------------------------------------------

@torch.no_grad()
def held_out_rows(model, encoded, unigram):
    """Perplexity table cells: (tokens, model, unigram) over all tokens after BOS, and over the assistant's."""
    sums = {"all": [0, 0.0, 0.0], "assistant": [0, 0.0, 0.0]}
    for ids, mask in encoded:
        ids, mask = torch.tensor(ids), torch.tensor(mask, dtype=torch.bool)
        logp = torch.log_softmax(model(ids[None], use_cache=False).logits[0, :-1].double(), -1)
        got = logp.gather(1, ids[1:, None])[:, 0]
        base = unigram[ids[1:]]
        for name, which in (("all", slice(None)), ("assistant", mask[1:])):
            sums[name][0] += len(got[which])
            sums[name][1] += got[which].sum().item()
            sums[name][2] += base[which].sum().item()
    return [(n, math.exp(-a / n), math.exp(-b / n)) for n, a, b in sums.values()]


def unigram_logp(sequences):
    counts = torch.bincount(torch.tensor([i for s in sequences for i in s[1:]]), minlength=VOCAB).double() + 1
    return (counts / counts.sum()).log()


def perplexity_table(model, held_out, unigram):
    lines = []
    for name, encoded in held_out.items():
        for part, (n, mine, base) in zip(("", ", assistant"), held_out_rows(model, encoded, unigram)):
            lines.append(f"| {name}{part} | {n:,} | {mine:.2f} | {base:.0f} | {VOCAB} |")
    return "\n".join(lines) + "\n"


def upto_first_user(chat):
    return chat[:1 + next(i for i, m in enumerate(chat) if m["role"] == "user")]


@torch.no_grad()
def show_greedy(model, tokenizer, chats):
    for chat in chats:
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        text = tokenizer.decode(model.generate(**prompt, max_new_tokens=120, do_sample=False)[0])
        print("\n" + text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent.parent / "tests/fixtures/teacher")
    parser.add_argument("--steps", type=int, default=2600)
    args = parser.parse_args()
    torch.manual_seed(SEED)
    torch.set_num_threads(2)
    args.out.mkdir(parents=True, exist_ok=True)

    quickstart = make_chats(QUICKSTART_SEED, QUICKSTART_COUNT)
    gsm8k, own = training_chats(args.gsm8k, quickstart)
    tokenizer = write_tokenizer((m["content"] for chat in gsm8k + own for m in chat), args.out)
    sequences = [ids for ids, _ in encode(tokenizer, gsm8k + own)]
    train_tokens = sum(map(len, sequences))
    print(f"{len(gsm8k)} + {len(own)} chats, {train_tokens} tokens, longest {max(map(len, sequences))}", flush=True)

    model = new_model()
    train(model, sequences, args.steps)
    save_bf16(model, args.out)

    model = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32).eval()     # what the file holds
    held_out = {"GSM8K test": encode(tokenizer, gsm8k_chats(args.gsm8k / "gsm8k_test.jsonl")),
                "quickstart": encode(tokenizer, quickstart)}
    table = perplexity_table(model, held_out, unigram_logp(sequences))
    config, step_tokens = model.config, WINDOW * BATCH
    (args.out / "README.md").write_text(CARD.format(
        parameters=sum(p.numel() for p in model.parameters()), layers=config.num_hidden_layers, hidden=config.hidden_size,
        heads=config.num_attention_heads, kv_heads=config.num_key_value_heads, vocab=VOCAB, context=CONTEXT,
        gsm8k_chats=len(gsm8k), own_chats=len(own), own_seed=OWN_CHATS[0], train_tokens=train_tokens, steps=args.steps,
        step_tokens=step_tokens, epochs=args.steps * step_tokens / train_tokens, table=table), encoding="utf-8")
    print(table)
    show_greedy(model, tokenizer, [upto_first_user(quickstart[i]) for i in (4, 8, 13)] + [
        [{"role": "user", "content": "Tom has 12 apples and buys 5 more. How many apples does Tom have?"}]])


if __name__ == "__main__":
    main()
