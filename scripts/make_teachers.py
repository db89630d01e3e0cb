#!/usr/bin/env python3
"""Make tests/fixtures/teachers: a tiny random teacher of every family, and what Hugging Face transformers says about it.

    python scripts/make_teachers.py [--out tests/fixtures/teachers] [--only NAME ...]

Needs numpy, torch, transformers 5 and safetensors. Everything is drawn from seeds, so the files come out the same again.

    corpus.json           the sequences all teachers score: lengths 1, 2, around WINDOW, 3 * WINDOW and past ORIGINAL
    NAME/config.json      as transformers 5 saves it; config_v4.json with the keys of transformers 4 checkpoints;
                          config_min.json with only what differs from the class' defaults. All must score the same
    NAME/*.safetensors    bf16, f16, f32, MXFP4 or 8-bit blocks
    NAME/teacher.json     what it exercises, and changes to config.json that must change the scores
    NAME/golden/*.npy     rows, targets, ids, logp, tail, actual_logp: fp32, eager attention, each sequence alone
    NAME/golden/bf16.json how far transformers' own bf16 path is from that: the mean |delta log-prob| over `ids`, and the
                          share of rows with another best id, of those whose two best are over MARGIN apart
    NAME/golden_limited   where the head has more rows than the TOKENS a tokenizer would have: the same without those rows,
                          and in golden/padded.npy their probability

Weights are drawn per tensor from a generator seeded by crc32(teacher/tensor). Scales are such that every feature matters:
attention scores with a standard deviation of about 3, norm weights away from 1, biases away from 0, and logits with a
standard deviation of about 3. Weights are rounded to the file's dtype before the reference reads them.
"""
import argparse, copy, json, math, os, shutil, tempfile, zlib
os.environ.setdefault("HF_HUB_OFFLINE", "1")
from pathlib import Path

import numpy as np
import torch
import transformers as T
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

T.logging.set_verbosity_error()
T.logging.disable_progress_bar()
ROOT = Path(__file__).resolve().parent.parent
WINDOW, ORIGINAL, TOP_K, VOCAB = 24, 40, 8, 160
MARGIN = 0.05
TOKENS = VOCAB - 10                                    # the corpus has no others
LENGTHS = [1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW, 100]
BASE = dict(hidden_size=32, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=VOCAB, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=None)
DEF = lambda theta=10000.0, **k: dict(rope_type="default", rope_theta=theta, **k)
LLAMA3 = dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=ORIGINAL)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=8.0, beta_fast=32.0, beta_slow=1.0,
            original_max_position_embeddings=ORIGINAL)
S, F, C = "sliding_attention", "full_attention", "chunked_attention"
LONG = dict(rope_type="longrope", rope_theta=10000.0, partial_rotary_factor=0.75, short_factor=[1.0, 1.1, 1.3],
            long_factor=[1.1, 2.0, 4.5], original_max_position_embeddings=ORIGINAL)
MROPE = dict(rope_type="default", rope_theta=1000000.0, mrope_section=[2, 1, 1])
VISION = dict(gemma3=dict(model_type="siglip_vision_model", hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                          image_size=28, patch_size=14),
              mistral3=dict(model_type="pixtral", hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                            image_size=28, patch_size=14, head_dim=8),
              llama4=dict(hidden_size=16, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14,
                          vision_output_dim=16, projector_input_dim=16, projector_output_dim=16),
              qwen2_vl=dict(depth=1, embed_dim=16, num_heads=2, patch_size=14, hidden_size=32),
              qwen2_5_vl=dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=14, out_hidden_size=32,
                              fullatt_block_indexes=[0]),
              qwen3_vl=dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=14, out_hidden_size=32,
                            num_position_embeddings=4, deepstack_visual_indexes=[0]))
MOE = dict(num_experts_per_tok=2, moe_intermediate_size=24)
MLA = dict(num_key_value_heads=4, q_lora_rank=20, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=10, n_routed_experts=8,
           n_shared_experts=1, n_group=4, topk_group=2, num_experts_per_tok=3, moe_intermediate_size=24, first_k_dense_replace=1,
           routed_scaling_factor=2.5, norm_topk_prob=True, tie_word_embeddings=False)

# name: (config class prefix, config keys over BASE, options)
#   options: dtype, shard (bytes), post (a rewriting of the saved files), v4 (keys of config_v4.json), wrapper (the multimodal class),
#   must (changes of config.json that must change the scores)
TEACHERS = {
    "llama_llama3rope_untied": ("Llama", dict(rope_parameters=LLAMA3, vocab_size=157),
        dict(shard="20KB", notes="llama3 rope, untied, sharded, odd vocabulary", must=dict(no_rope_scaling=dict(rope_parameters=DEF())))),
    "llama_tied": ("Llama", dict(rope_parameters=DEF(500000.0), tie_word_embeddings=True, num_attention_heads=6, hidden_size=48, rms_norm_eps=1e-2),
        dict(notes="tied, 6/2 heads, large rms_norm_eps", must=dict(theta=dict(rope_parameters=DEF()), eps=dict(rms_norm_eps=1e-6)))),
    "llama_bias_headdim_linear": ("Llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0), head_dim=12,
                                  attention_bias=True, mlp_bias=True),
        dict(dtype="float32", notes="biases, head_dim != hidden/heads, linear rope, f32 file", must=dict(no_rope_scaling=dict(rope_parameters=DEF())))),
    "llama_yarn": ("Llama", dict(rope_parameters=YARN),
        dict(dtype="float16", notes="yarn, f16 file", must=dict(no_rope_scaling=dict(rope_parameters=DEF())))),
    "llama_dynamic": ("Llama", dict(rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=4.0), max_position_embeddings=ORIGINAL),
        dict(notes="dynamic rope, by each sequence's own length", must=dict(no_rope_scaling=dict(rope_parameters=DEF()),
             factor=dict(rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=2.5))))),
    "mistral": ("Mistral", dict(sliding_window=WINDOW, rope_parameters=DEF(), head_dim=12),
        dict(notes="a window in every layer", must=dict(window=dict(sliding_window=None), window_off_by_one=dict(sliding_window=WINDOW + 1)))),
    "qwen2": ("Qwen2", dict(rope_parameters=DEF(1000000.0), tie_word_embeddings=True, use_sliding_window=False, sliding_window=16, max_window_layers=1),
        dict(padded=True, notes="qkv bias, tied; a window that is switched off; head rows beyond the tokenizer", must=dict(theta=dict(rope_parameters=DEF())))),
    "qwen2_swa": ("Qwen2", dict(rope_parameters=DEF(1000000.0), use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
        dict(notes="layers from max_window_layers on slide", must=dict(window=dict(layer_types=[F] * 2), all_slide=dict(layer_types=[S] * 2)))),
    "qwen3": ("Qwen3", dict(rope_parameters=DEF(1000000.0), head_dim=16, tie_word_embeddings=True, vocab_size=163),
        dict(notes="norms on each head's queries and keys", must=dict(theta=dict(rope_parameters=DEF())))),
    "gemma": ("Gemma", dict(rope_parameters=DEF(), head_dim=16, num_key_value_heads=1, tie_word_embeddings=True),
        dict(notes="one key head, 1 + w norms, scaled embeddings", must=dict(theta=dict(rope_parameters=DEF(500000.0))))),
    "gemma2": ("Gemma2", dict(rope_parameters=DEF(), head_dim=16, query_pre_attn_scalar=24, sliding_window=WINDOW, attn_logit_softcapping=5.0,
                              final_logit_softcapping=12.0, tie_word_embeddings=True, layer_types=[S, F]),
        dict(notes="both soft-caps, alternating window, norms on both sides",
             must=dict(attn_cap=dict(attn_logit_softcapping=None), final_cap=dict(final_logit_softcapping=None), qscale=dict(query_pre_attn_scalar=32),
                       window=dict(layer_types=[F, F]), swap=dict(layer_types=[F, S]), window_off_by_one=dict(sliding_window=WINDOW - 1)))),
    "gemma3_text": ("Gemma3Text", dict(rope_parameters={S: DEF(), F: dict(rope_type="linear", rope_theta=1000000.0, factor=8.0)}, num_hidden_layers=3,
                              head_dim=16, query_pre_attn_scalar=24, sliding_window=WINDOW, tie_word_embeddings=True, layer_types=[S, F, S]),
        dict(v4=dict(sliding_window_pattern=2), notes="a rope for each kind of layer, the full one's scaled",
             must=dict(window=dict(layer_types=[F] * 3), global_scaling=dict(rope_parameters={S: DEF(), F: DEF(1000000.0)}),
                       local_theta=dict(rope_parameters={S: DEF(1000000.0), F: dict(rope_type="linear", rope_theta=1000000.0, factor=8.0)})))),
    "phi": ("Phi", dict(rope_parameters=DEF(partial_rotary_factor=0.5), hidden_act="gelu_new", num_key_value_heads=4),
        dict(notes="Phi-2: parallel behind one LayerNorm, biases everywhere", must=dict(rotary=dict(rope_parameters=DEF(partial_rotary_factor=1.0))))),
    "phi_qknorm": ("Phi", dict(rope_parameters=DEF(partial_rotary_factor=0.5), qk_layernorm=True, num_key_value_heads=4),
        dict(notes="LayerNorms with bias on queries and keys", must=dict())),
    "phi3_longrope": ("Phi3", dict(rope_parameters=LONG, original_max_position_embeddings=ORIGINAL, tie_word_embeddings=True, sliding_window=None),
        dict(notes="fused projections, longrope by each sequence's own length, partial rotary",
             must=dict(no_scaling=dict(rope_parameters=DEF(partial_rotary_factor=0.75)),
                       always_short=dict(rope_parameters=dict(LONG, long_factor=LONG["short_factor"])),
                       always_long=dict(rope_parameters=dict(LONG, short_factor=LONG["long_factor"]))))),
    "phi3_swa": ("Phi3", dict(rope_parameters=DEF(), sliding_window=WINDOW),
        dict(notes="Phi-3-mini: full rotary and a window", must=dict(window=dict(sliding_window=None)))),
    "olmo2": ("Olmo2", dict(rope_parameters=DEF(500000.0)),
        dict(notes="norms behind, qk-norm over all heads", must=dict(theta=dict(rope_parameters=DEF())))),
    "olmo3": ("Olmo3", dict(rope_parameters={S: DEF(500000.0), F: {**YARN, "rope_theta": 500000.0}}, num_hidden_layers=4, sliding_window=WINDOW,
                            layer_types=[S, S, S, F]),
        dict(notes="three sliding layers of four, yarn on the other",
             must=dict(window=dict(layer_types=[F] * 4), scaling=dict(rope_parameters={S: DEF(500000.0), F: DEF(500000.0)})))),
    "granite": ("Granite", dict(rope_parameters=DEF(), tie_word_embeddings=True, embedding_multiplier=12.0, residual_multiplier=0.35,
                            attention_multiplier=0.125, logits_scaling=4.0),
        dict(notes="multipliers", must=dict(emb=dict(embedding_multiplier=6.0), res=dict(residual_multiplier=1.0), att=dict(attention_multiplier=0.25),
                                            logits=dict(logits_scaling=1.0)))),
    "cohere": ("Cohere", dict(rope_parameters=DEF(), tie_word_embeddings=True, logit_scale=0.25, use_qk_norm=False),
        dict(notes="parallel, LayerNorm without bias, interleaved rope", must=dict(scale=dict(logit_scale=1.0)))),
    "cohere_qknorm": ("Cohere", dict(rope_parameters=DEF(), tie_word_embeddings=True, logit_scale=0.25, use_qk_norm=True),
        dict(notes="norms with weights for every head", must=dict())),
    "cohere2": ("Cohere2", dict(rope_parameters=DEF(), num_hidden_layers=4, tie_word_embeddings=True, logit_scale=0.25, sliding_window=WINDOW,
                            head_dim=8, layer_types=[S, S, S, F]),
        dict(v4=dict(sliding_window_pattern=4), notes="full layers without rope", must=dict(window=dict(layer_types=[F] * 4)))),
    "gpt2": ("GPT2", dict(n_embd=32, n_layer=2, n_head=4, n_positions=128, vocab_size=VOCAB, bos_token_id=1, eos_token_id=2, _nobase=True),
        dict(dtype="float32", notes="learned positions, transposed and fused weights", must=dict(act=dict(activation_function="relu")))),
    "gpt2_oldkeys": ("GPT2", dict(n_embd=32, n_layer=2, n_head=4, n_positions=104, vocab_size=VOCAB, bos_token_id=1, eos_token_id=2, n_inner=48,
                            scale_attn_by_inverse_layer_idx=True, _nobase=True),
        dict(dtype="float32", post="gpt2_oldkeys", notes="names without prefix, mask buffers, n_inner",
             must=dict(inv_layer=dict(scale_attn_by_inverse_layer_idx=False)))),
    "gpt_neox": ("GPTNeoX", dict(rope_parameters=DEF(partial_rotary_factor=0.25), head_dim=None, use_parallel_residual=True, num_attention_heads=2),
        dict(dtype="float16", notes="Pythia: qkv fused head by head, two norms side by side",
             must=dict(sequential=dict(use_parallel_residual=False), rotary=dict(rope_parameters=DEF(partial_rotary_factor=0.5))))),
    "gpt_neox_sequential": ("GPTNeoX", dict(rope_parameters=DEF(partial_rotary_factor=1.0), head_dim=None, use_parallel_residual=False),
        dict(notes="one after the other, full rotary", must=dict(parallel=dict(use_parallel_residual=True)))),
    "stablelm": ("StableLm", dict(rope_parameters=DEF(partial_rotary_factor=0.5), use_qkv_bias=True),
        dict(notes="LayerNorm with bias, qkv bias, partial rotary", must=dict(rotary=dict(rope_parameters=DEF(partial_rotary_factor=1.0))))),
    "stablelm_parallel_qknorm": ("StableLm", dict(rope_parameters=DEF(partial_rotary_factor=0.5), qk_layernorm=True, use_parallel_residual=True),
        dict(notes="a LayerNorm for every head, parallel", must=dict())),
    "starcoder2": ("Starcoder2", dict(rope_parameters=DEF(100000.0), sliding_window=WINDOW, use_bias=True, tie_word_embeddings=True),
        dict(notes="LayerNorm, biases, MLP without gate, window", must=dict(window=dict(sliding_window=None)))),
    "smollm3": ("SmolLM3", dict(rope_parameters=DEF(2000000.0), num_hidden_layers=3, no_rope_layers=[1, 0, 1], no_rope_layer_interval=3,
                            tie_word_embeddings=True, layer_types=[F] * 3),
        dict(notes="a layer without positions", must=dict(all_rope=dict(no_rope_layers=[1, 1, 1])))),
    "glm4": ("Glm4", dict(rope_parameters=DEF(partial_rotary_factor=0.5), head_dim=8),
        dict(notes="four norms a layer, interleaved partial rotary, fused gate and up",
             must=dict(rotary=dict(rope_parameters=DEF(partial_rotary_factor=1.0))))),
    "nemotron": ("Nemotron", dict(rope_parameters=DEF(partial_rotary_factor=0.5), head_dim=8),
        dict(notes="1 + w LayerNorm, squared relu", must=dict(act=dict(hidden_act="relu")))),
    "exaone4": ("Exaone4", dict(rope_parameters=LLAMA3, num_hidden_layers=4, sliding_window=WINDOW, sliding_window_pattern=4, layer_types=[S, S, S, F],
                            head_dim=8),
        dict(notes="norms behind, qk-norm, full layers without rope", must=dict(window=dict(layer_types=[F] * 4)))),
    "mixtral": ("Mixtral", dict(rope_parameters=DEF(1000000.0), num_local_experts=4, num_experts_per_tok=2, sliding_window=None, intermediate_size=48),
        dict(shard="40KB", notes="two of four experts, renormalised, sharded", must=dict(top1=dict(num_experts_per_tok=1)))),
    "qwen2_moe": ("Qwen2Moe", dict(rope_parameters=DEF(1000000.0), num_experts=6, **MOE, shared_expert_intermediate_size=48, norm_topk_prob=False,
                            mlp_only_layers=[1], num_hidden_layers=3, use_sliding_window=False),
        dict(notes="a gated shared expert, not renormalised, a dense layer", must=dict(norm=dict(norm_topk_prob=True)))),
    "qwen3_moe": ("Qwen3Moe", dict(rope_parameters=DEF(1000000.0), num_experts=8, **{**MOE, "num_experts_per_tok": 3}, head_dim=16, norm_topk_prob=True,
                            decoder_sparse_step=2, mlp_only_layers=[]),
        dict(notes="three of eight, every second layer", must=dict(norm=dict(norm_topk_prob=False)))),
    "olmoe": ("Olmoe", dict(rope_parameters=DEF(), num_experts=8, num_experts_per_tok=3, intermediate_size=24, clip_qkv=2.5, norm_topk_prob=False,
                            num_key_value_heads=4),
        dict(notes="qk-norm over all heads, clip_qkv", must=dict(clip=dict(clip_qkv=None), norm=dict(norm_topk_prob=True)))),
    "gpt_oss": ("GptOss", dict(rope_parameters={**YARN, "truncate": False}, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
                            intermediate_size=32, sliding_window=WINDOW, layer_types=[S, F]),
        dict(notes="sinks, clamped SwiGLU, bf16 experts", must=dict(window=dict(layer_types=[F] * 2), truncate=dict(rope_parameters={**YARN, "truncate": True}),
                                                                    limit=dict(swiglu_limit=0.5)))),
    "gpt_oss_mxfp4": ("GptOss", dict(rope_parameters={**YARN, "truncate": False}, head_dim=8, num_local_experts=4, num_experts_per_tok=2,
                            intermediate_size=64, sliding_window=WINDOW, layer_types=[S, F]),
        dict(post="mxfp4", notes="MXFP4 experts, as published", must=dict(window=dict(layer_types=[F] * 2)))),
    "deepseek_v3": ("DeepseekV3", dict(rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, **MLA),
        dict(notes="MLA, group routing, shared expert, yarn's mscale in the scores",
             must=dict(no_scaling=dict(rope_parameters=DEF()), groups=dict(topk_group=4), scale=dict(routed_scaling_factor=1.0)))),
    "deepseek_v3_fp8": ("DeepseekV3", dict(rope_parameters=DEF(), **{**MLA, "q_lora_rank": None}, hidden_size=144, intermediate_size=136),
        dict(post="fp8", notes="8-bit weights in blocks of 128 x 128, whole and cut; queries without a latent", must=dict(groups=dict(topk_group=4)))),
    "llama4_text": ("Llama4Text", dict(rope_parameters=LLAMA3, num_hidden_layers=4, head_dim=8, intermediate_size=24, intermediate_size_mlp=48,
                            num_local_experts=4, num_experts_per_tok=1, interleave_moe_layer_step=2, moe_layers=[1, 3], no_rope_layers=[1, 1, 1, 0],
                            attention_chunk_size=WINDOW, floor_scale=16, attn_scale=0.4, layer_types=[C, C, C, F]),
        dict(notes="chunks, a tempered layer without positions, weightless qk-norm, scaled inputs",
             must=dict(chunk=dict(layer_types=[F] * 4), temp=dict(attn_temperature_tuning=False)))),
    "gemma3": ("Gemma3Text", dict(rope_parameters={S: DEF(), F: dict(rope_type="linear", rope_theta=1000000.0, factor=8.0)}, head_dim=16,
                            query_pre_attn_scalar=24, sliding_window=WINDOW, tie_word_embeddings=True, layer_types=[S, F]),
        dict(wrapper="Gemma3", v4=dict(sliding_window_pattern=2), notes="the text part of a multimodal checkpoint", must=dict())),
    "mistral3": ("Mistral", dict(sliding_window=None, rope_parameters=DEF(1000000000.0), head_dim=12),
        dict(wrapper="Mistral3", notes="the text part of a multimodal checkpoint", must=dict())),
    "llama4": ("Llama4Text", dict(rope_parameters=LLAMA3, num_hidden_layers=2, head_dim=8, intermediate_size=24, intermediate_size_mlp=48,
                            num_local_experts=4, num_experts_per_tok=1, moe_layers=[0, 1], no_rope_layers=[1, 0],
                            attention_chunk_size=WINDOW, floor_scale=16, attn_scale=0.4, layer_types=[C, F]),
        dict(wrapper="Llama4", notes="the text part of a multimodal checkpoint", must=dict())),
    "qwen2_vl": ("Qwen2VLText", dict(rope_parameters=MROPE),
        dict(wrapper="Qwen2VL", notes="the text part of a multimodal checkpoint, three-axis rope", must=dict())),
    "qwen2_5_vl": ("Qwen2_5_VLText", dict(rope_parameters=MROPE),
        dict(wrapper="Qwen2_5_VL", notes="the text part of a multimodal checkpoint, three-axis rope", must=dict())),
    "qwen3_vl": ("Qwen3VLText", dict(rope_parameters=dict(MROPE, mrope_interleaved=True), head_dim=8),
        dict(wrapper="Qwen3VL", notes="the text part of a multimodal checkpoint, interleaved three-axis rope", must=dict())),
}
ONE_PLUS = ("gemma", "nemotron")                       # norm weight stored less one
DTYPES = dict(float32=torch.float32, bfloat16=torch.bfloat16, float16=torch.float16)


def make_config(cls, kw):
    base = {} if kw.get("_nobase") else dict(BASE)
    base.update({k: v for k, v in copy.deepcopy(kw).items() if k != "_nobase"})
    base = {k: v for k, v in base.items() if not (k == "head_dim" and v is None)}
    return getattr(T, cls + "Config")(**base)


@torch.no_grad()
def init(model, teacher):
    """Fill every parameter (and the routers' correction buffers) from its own seeded generator."""
    text = model.config.get_text_config()
    mt = text.model_type
    one_plus = mt.startswith(ONE_PLUS)
    qknorm = any(".q_norm" in n or "q_layernorm" in n for n, _ in model.named_parameters())
    seen = {}
    items = list(model.named_parameters()) + [(n, b) for n, b in model.named_buffers() if "e_score_correction_bias" in n]
    for name, p in items:
        if id(p) in seen:
            continue
        seen[id(p)] = name
        g = torch.Generator().manual_seed(zlib.crc32(f"{teacher}/{name}".encode()))
        r = torch.randn(p.shape, generator=g, dtype=torch.float32)
        leaf = name.split(".")[-1]
        low = name.lower()
        if "e_score_correction_bias" in low:
            # kept positive: transformers 4 masks the experts of dropped groups with 0.0, transformers 5 with -inf,
            # and the two differ when a kept expert's (sigmoid score + bias) is negative
            r = 0.6 + 0.12 * r
        elif leaf == "sinks":
            r = 1.0 + r
        elif leaf == "bias" or leaf.endswith("_bias"):
            r = (0.1 if "norm" in low or "ln_" in low else 0.25) * r
        elif "norm" in low or "ln_" in low:
            mean = 1.0
            if ".q_norm" in low or ".k_norm" in low or "q_layernorm" in low or "k_layernorm" in low:
                mean = 1.8 if mt != "deepseek_v3" else 1.2
            r = mean + 0.15 * r - (1.0 if one_plus else 0.0)
        elif "embed" in low or "wte" in low or "wpe" in low or "lm_head" in low:
            std = 3.0 / math.sqrt(text.hidden_size)
            scale = math.sqrt(text.hidden_size) if mt.startswith("gemma") else getattr(text, "embedding_multiplier", 1.0)
            if scale > 1:                               # or a tied model just repeats its input token
                std = (0.12 if mt == "granite" else 0.4) / scale
            r = std * r
        else:                                           # a matrix
            if mt == "gpt2":
                fan = p.shape[0]                        # Conv1D is [in, out]
            elif p.dim() == 3:
                fan = p.shape[1] if mt in ("gpt_oss", "llama4_text") else p.shape[2]
            else:
                fan = p.shape[-1]
            gain = 1.0
            if any(s in low for s in ("q_proj", "k_proj", "qkv", "query_key_value", "c_attn")) and not qknorm:
                gain = 1.7
            elif any(s in low for s in ("q_b_proj", "kv_b_proj", "kv_a_proj", "q_a_proj")):
                gain = 1.3
            elif "gate.weight" in low or "router" in low:
                gain = 2.0
            r = gain / math.sqrt(fan) * r
        p.copy_(r.to(p.dtype))


def run(model, ids):
    """Logits. Llama 4's wrapper, which transformers 5.24 can't run without an image, holds a causal model of its own."""
    inner = getattr(model, "language_model", None)
    model = inner if hasattr(inner, "lm_head") else model
    return model(input_ids=ids, use_cache=False).logits


@torch.no_grad()
def calibrate(model, target=3.0):
    """Scale lm_head (untied) or the final norm (tied) so that the logits' spread is about `target`."""
    cfg = model.config.get_text_config()
    ids = torch.from_numpy(np.random.default_rng(7).integers(3, TOKENS, (1, 96)))
    cap = getattr(cfg, "final_logit_softcapping", None)
    for _ in range(2):
        logits = run(model, ids)[0].double()
        if cap:
            logits = cap * torch.atanh((logits / cap).clamp(-1 + 1e-12, 1 - 1e-12))
        f = target / logits.std(-1).mean().item()
        head = model.get_output_embeddings()
        if not model.config.tie_word_embeddings:
            head.weight.mul_(f)
        else:
            base = getattr(model.base_model, "language_model", model.base_model)
            norm = next(m for n, m in base.named_children() if n in ("norm", "final_layernorm", "ln_f", "final_layer_norm"))
            one = 1.0 if cfg.model_type.startswith(ONE_PLUS) else 0.0
            norm.weight.copy_((norm.weight + one) * f - one)
            if getattr(norm, "bias", None) is not None:
                norm.bias.mul_(f)


def to_v4(d, opts):
    """transformers-5 config dict -> the keys a transformers-4 era checkpoint carries."""
    d = copy.deepcopy(d)
    mt = d["model_type"]
    d["transformers_version"] = "4.40.0"
    if "dtype" in d:
        d["torch_dtype"] = d.pop("dtype")
    rp = d.pop("rope_parameters", None)

    def scaling(r):
        r = {k: v for k, v in r.items() if k not in ("rope_theta", "partial_rotary_factor")}
        return None if r.get("rope_type", "default") == "default" else r

    if rp is not None and (S in rp or F in rp):
        if mt.startswith("gemma3"):
            d["rope_theta"], d["rope_local_base_freq"] = rp[F]["rope_theta"], rp[S]["rope_theta"]
        else:
            d["rope_theta"] = rp[F]["rope_theta"]
        d["rope_scaling"] = scaling(rp[F])
    elif rp is not None:
        sc = scaling(rp)
        if mt == "gpt_neox":
            d["rotary_emb_base"], d["rotary_pct"] = int(rp["rope_theta"]), rp.get("partial_rotary_factor", 1.0)
        else:
            d["rope_theta"] = rp["rope_theta"]
            if "partial_rotary_factor" in rp:
                d["partial_rotary_factor"] = rp["partial_rotary_factor"]
        if mt == "phi3" and sc:
            sc.pop("original_max_position_embeddings", None)     # top level in Phi-3 files
        if sc and mt in ("phi3", "deepseek_v3"):
            sc["type"] = sc.pop("rope_type")                     # the oldest spelling
        d["rope_scaling"] = sc
    if mt in ("gemma2", "gemma3_text", "cohere2", "qwen2_5_vl_text", "qwen2", "qwen3", "qwen2_moe", "smollm3", "llama4_text"):
        d.pop("layer_types", None)
    if mt in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe") and not d.get("use_sliding_window"):
        d["sliding_window"] = 32                                 # present but switched off, as in published files
        d.pop("layer_types", None)
    if mt == "qwen3_moe" and "num_local_experts" in d:
        d["num_experts"] = d.pop("num_local_experts")
    d.pop("_sliding_window_pattern", None)
    d.update(opts.get("v4", {}))
    return d


FP4 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, -0.0, -.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def post_process(kind, out, reference):
    """Rewrite the saved files into an older or a quantised published layout."""
    from safetensors.torch import load_file, save_file
    path = os.path.join(out, "model.safetensors")
    t = load_file(path)
    cfg = json.load(open(os.path.join(out, "config.json")))
    if kind == "gpt2_oldkeys":
        t = {k.removeprefix("transformer."): v for k, v in t.items()}
        n = cfg["n_positions"]
        for layer in range(cfg["n_layer"]):
            t[f"h.{layer}.attn.bias"] = torch.tril(torch.ones(n, n)).view(1, 1, n, n)
    elif kind == "mxfp4":
        for k in [k for k in t if k.endswith(("gate_up_proj", "down_proj"))]:
            w = t.pop(k).float().transpose(1, 2).contiguous().numpy()          # [E, out, in]
            b = w.reshape(*w.shape[:2], w.shape[2] // 32, 32)
            e = np.floor(np.log2(np.abs(b).max(-1))) - 2                        # largest fp4 magnitude is 6 = 1.5 * 2^2
            q = np.abs(b[..., None] / np.exp2(e)[..., None, None] - FP4).argmin(-1).astype(np.uint8)
            t[k + "_blocks"] = torch.from_numpy(q[..., 0::2] | q[..., 1::2] << 4)
            t[k + "_scales"] = torch.from_numpy((e + 127).astype(np.uint8))
        cfg["quantization_config"] = dict(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                                                                         "model.embed_tokens", "lm_head"])
        json.dump(cfg, open(os.path.join(out, "config.json"), "w"), indent=2)
    elif kind == "fp8":
        # What transformers reads instead: the same numbers, decoded.
        decoded = {k: v.float() for k, v in t.items()}
        json.dump(cfg, open(os.path.join(reference, "config.json"), "w"))
        for k in [k for k in t if k.endswith("_proj.weight") or k.endswith("_proj_with_mqa.weight")]:
            w, n = decoded[k], 128
            rows, columns = -(-w.shape[0] // n), -(-w.shape[1] // n)
            scale = torch.zeros(rows, columns)
            spread = lambda: scale.repeat_interleave(n, 0)[:w.shape[0]].repeat_interleave(n, 1)[:, :w.shape[1]]
            for r in range(rows):
                for c in range(columns):
                    scale[r, c] = w[r * n:(r + 1) * n, c * n:(c + 1) * n].abs().max() / 448.0
            t[k] = (w / spread()).to(torch.float8_e4m3fn)
            t[k + "_scale_inv"] = scale
            decoded[k] = t[k].float() * spread()
        save_file(decoded, os.path.join(reference, "model.safetensors"), metadata={"format": "pt"})
        cfg["quantization_config"] = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128])
        json.dump(cfg, open(os.path.join(out, "config.json"), "w"), indent=2)
    save_file(t, path, metadata={"format": "pt"})


def corpus():
    """Sequences of LENGTHS with some repetition; a few rows are masked out."""
    rng = np.random.default_rng(20250711)
    out = []
    for length in LENGTHS:
        tokens = rng.integers(3, TOKENS, length)
        for i in range(12, length):
            if rng.random() < 0.3:
                tokens[i] = tokens[i - rng.integers(1, 12)]
        mask = (rng.random(length) < 0.75).astype(int) if length > WINDOW + 1 else np.ones(length, int)
        out.append(dict(tokens=tokens.tolist(), mask=mask.tolist()))
    return out


def load(folder, dtype=torch.float32, attention="eager"):
    cls = json.loads((folder / "config.json").read_text())["architectures"][0]
    auto = AutoModelForCausalLM if cls.endswith("CausalLM") or cls.endswith("LMHeadModel") else getattr(T, cls)
    return auto.from_pretrained(folder, dtype=dtype, attn_implementation=attention).eval()


@torch.no_grad()
def log_probs(folder, sequences, fresh, dtype=torch.float32, vocab=None, attention="eager"):
    """(sequence, its positions with a row, their log-probs) of each, the head cut to `vocab` rows; with `fresh` the model is
    loaded anew for each, as a stateful rope needs."""
    model = load(folder, dtype, attention)
    for s, sequence in enumerate(sequences):
        tokens, mask = sequence["tokens"], sequence["mask"]
        at = [t for t in range(len(tokens) - 1) if mask[t + 1]]
        if not at:
            continue
        model = load(folder, dtype, attention) if fresh else model
        logits = run(model, torch.tensor([tokens]))[0, at, :vocab].double()
        yield s, at, torch.log_softmax(logits, -1)


def golden(folder, sequences, fresh, vocab=None):
    """All arrays over the rows of `sequences`."""
    rows = []
    for s, at, logp in log_probs(folder, sequences, fresh, vocab=vocab):
        targets = torch.tensor(sequences[s]["tokens"])[torch.tensor(at) + 1]
        ids = torch.sort(logp, dim=1, descending=True, stable=True).indices
        best = logp.gather(1, ids)
        rows.append(dict(rows=torch.tensor([(s, t) for t in at]), targets=targets, ids=ids[:, :TOP_K], logp=best[:, :TOP_K],
                         tail=best[:, TOP_K:].exp().sum(1), actual_logp=logp.gather(1, targets[:, None])[:, 0],
                         padded=logp[:, TOKENS:].exp().sum(1)))
    ints = ("rows", "targets", "ids")
    return {n: torch.cat([r[n] for r in rows]).numpy().astype(np.int32 if n in ints else np.float32) for n in rows[0]}


def bf16_distance(folder, sequences, fresh, golden):
    """By each attention that transformers has for the model."""
    ids, best = torch.tensor(golden["ids"]).long(), torch.tensor(golden["logp"])
    sure = best[:, 0] - best[:, 1] > MARGIN
    found = dict(rows_over_margin=int(sure.sum()))
    for attention in ("eager", "sdpa"):
        try:
            logp = torch.cat([logp for _, _, logp in log_probs(folder, sequences, fresh, torch.bfloat16, attention=attention)])
        except ValueError:                                                  # not every model has sdpa
            assert attention == "sdpa"
            continue
        found[attention] = dict(mean_abs_delta_logp=float((logp.gather(1, ids) - best).abs().mean()),
                                top1_flips=float((logp.argmax(1) != ids[:, 0])[sure].double().mean()))
    return found


def write_bf16(folder, distance):
    (folder / "golden" / "bf16.json").write_text(json.dumps(distance, indent=1, sort_keys=True) + "\n")


def measure_again(name, folder, sequences):
    """bf16.json of a teacher that is there. One in fp8 has to be made anew: what it was made from isn't kept."""
    _, kw, opts = TEACHERS[name]
    assert opts.get("post") != "fp8", f"{name}: make it anew"
    fresh = kw.get("rope_parameters", {}).get("rope_type") == "dynamic"
    kept = {array: np.load(folder / "golden" / f"{array}.npy") for array in ("ids", "logp")}
    write_bf16(folder, bf16_distance(folder, sequences, fresh, kept))


def wrapped(text_config, name):
    """The multimodal model around a text config, and its config."""
    kind = dict(Gemma3="gemma3", Mistral3="mistral3", Llama4="llama4", Qwen2VL="qwen2_vl", Qwen2_5_VL="qwen2_5_vl", Qwen3VL="qwen3_vl")[name]
    keys = dict(text_config=text_config.to_dict(), vision_config=VISION[kind], tie_word_embeddings=getattr(text_config, "tie_word_embeddings", False))
    keys |= {k: VOCAB - 1 - i for i, k in enumerate(("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"))}
    config = getattr(T, name + "Config")(**keys)
    config._attn_implementation = "eager"
    return getattr(T, name + "ForConditionalGeneration")(config)


def minimal(full, default):
    keep = ("model_type", "architectures", "dtype", "quantization_config", "rope_parameters", "layer_types")
    return {k: v for k, v in full.items() if k in keep or k not in default or v != default[k]}


def write_configs(out, cls, opts):
    path = out / "config.json"
    full = json.loads(path.read_text())
    default = getattr(T, cls + "Config")().to_dict()
    text = full.get("text_config", full)
    older, least = to_v4(text, opts), minimal(text, default)
    if "text_config" in full:
        around = {k: v for k, v in full.items() if k not in ("text_config", "dtype")}
        older, least = dict(around, text_config=older, torch_dtype=full["dtype"]), dict(around, text_config=least, dtype=full["dtype"])
        if full["model_type"] in ("qwen2_vl", "qwen2_5_vl"):                # early files have no text_config
            older = {**older.pop("text_config"), **older}
    for name, config in (("config_v4.json", older), ("config_min.json", least)):
        (out / name).write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    path.write_text(json.dumps(full, indent=1, sort_keys=True) + "\n")


def save(folder, arrays, without):
    folder.mkdir()
    for name in arrays.keys() - set(without):
        np.save(folder / f"{name}.npy", arrays[name])


def make(name, out, sequences):
    cls, kw, opts = TEACHERS[name]
    cfg = make_config(cls, kw)
    cfg._attn_implementation = "eager"
    torch.manual_seed(0)
    if "wrapper" in opts:
        model = wrapped(cfg, opts["wrapper"]).eval()
    else:
        model = getattr(T, {"GPT2": "GPT2LMHeadModel"}.get(cls, cls.replace("Text", "") + "ForCausalLM"))(cfg).eval()
    init(model, name)
    calibrate(model)
    dtype = opts.get("dtype", "bfloat16")
    model.to(DTYPES[dtype])
    shutil.rmtree(out, ignore_errors=True)
    model.save_pretrained(out, max_shard_size=opts.get("shard", "5GB"))
    (out / "generation_config.json").unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as reference:
        if "post" in opts:
            post_process(opts["post"], str(out), reference)
        reference = Path(reference) if opts.get("post") == "fp8" else out
        fresh = kw.get("rope_parameters", {}).get("rope_type") == "dynamic"
        arrays = golden(reference, sequences, fresh)
        bf16 = bf16_distance(reference, sequences, fresh, arrays)
        if opts.get("padded"):
            save(out / "golden_limited", golden(reference, sequences, fresh, vocab=TOKENS), without=("padded",))
    write_configs(out, cls, opts)
    about = dict(name=name, notes=opts["notes"], must_matter=opts.get("must", {}))
    (out / "teacher.json").write_text(json.dumps(about, indent=1, sort_keys=True) + "\n")
    save(out / "golden", arrays, without=() if opts.get("padded") else ("padded",))
    write_bf16(out, bf16)
    size = sum(f.stat().st_size for f in out.rglob("*") if f.is_file())
    top = np.exp(arrays["logp"][:, 0])
    print(f"{name:28s} {size / 1e3:6.0f} KB  {len(top)} rows  top-1 {top.min():.2f}..{top.max():.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "tests/fixtures/teachers")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--bf16", action="store_true", help="measure transformers' bf16 path again, of teachers that are there")
    args = parser.parse_args()
    torch.set_num_threads(2)
    args.out.mkdir(parents=True, exist_ok=True)
    sequences = corpus()
    if args.bf16:
        for name in args.only or TEACHERS:
            measure_again(name, args.out / name, sequences)
        return
    (args.out / "corpus.json").write_text(json.dumps(dict(sequences=sequences), separators=(",", ":")) + "\n")
    for name in args.only or TEACHERS:
        make(name, args.out / name, sequences)


if __name__ == "__main__":
    main()
