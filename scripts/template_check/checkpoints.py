"""Tokenizers as checkpoints ship them, and as they might: what transformers makes of each, in ids.

The published ones are taken as they are. The rest are a published tokenizer, or the small byte-level one of tests/fixtures,
with another class, model_type, flag or added token in their configuration files, drawn by a fixed seed.
"""
import copy
import json
import random
import shutil
from pathlib import Path

import oracle

FIXTURES = Path(__file__).resolve().parents[2] / "tests/fixtures"
BYTES = FIXTURES / "teacher/tokenizer.json"
PIECES = FIXTURES / "checkpoints/pieces.json"
CLASSES = [None, "PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "GemmaTokenizerFast",
           "GPT2Tokenizer", "GPT2TokenizerFast", "GPTNeoXTokenizerFast", "CohereTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast",
           "Qwen3_5Tokenizer", "CodeGenTokenizer"]
MODELS = [None, "llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "gemma2", "gemma3_text", "phi", "phi3", "olmo", "olmo2", "deepseek_v3", "gpt_oss",
          "granite", "cohere", "gpt_neox", "starcoder2", "smollm3"]
SPM_CLASSES = [None, "LlamaTokenizer", "LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "GemmaTokenizer", "PreTrainedTokenizerFast"]
TURN = {"content": "<|turn|>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
TEXTS = [
    "", " ", "  ", "\n", "\t\n", "Hello", " Hello", "  Hello  world ", "Hello world\n", "\nHello", "a  b   c    d", "don't I'LL we've", "1234567 12,345.67",
    "na\u00efve caf\u00e9", "nai\u0308ve cafe\u0301", "\u6771\u4eac \u30c6\u30b9\u30c8", "\U0001f642 \U0001f469\u200d\U0001f680", "\u2581x \u2581 y\u2581", "x\u00a0y\u2003z",
    "<s>", "<s>Hello", "<s> Hello</s>", "<s>[INST] Hi [/INST] Yes. </s><s>[INST] No? [/INST]", "a<unk>b", "a <unk> b", "</s>\n</s>",
    "a <|more|>b", "<|turn|>user\nHi<|turn|>\n", "a <|turn|> b", "a<|turn|>b", "  <|turn|>  x", "<|TURN|>", "<|im_start|>user\n 1 + 1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n",
    "<|endoftext|>a<|endoftext|>", "<bos><start_of_turn>user\nHi<end_of_turn>\n", "def f(x):\n    return x  # done\n\n\n", "\u0391\u03b1 \u0416\u0436 \u05d0 \u0627 \u0915\u094d\u0937",
    "A\u0301\u0323 \u1e69 \ufb01 \u00bd", "{\"a\": [1, 2.5e-3, null]}", "x" * 60, " " * 17 + "y",
]


def published(packages):
    """The packages' own checkpoints: a name and its files each."""
    for name, source in packages.items():
        yield {"name": name, "files": {file: read(source / file) for file in ("tokenizer.json", "tokenizer_config.json")}}


def variations(bases, count):
    """`count` checkpoints of each of the tokenizers `bases`, by name; `changes` are those to its tokenizer.json."""
    draw = random.Random(1)
    for number in range(count):
        for name, tokenizer in bases.items():
            changes, files = variation(draw, tokenizer, SPM_CLASSES if name == "pieces" else CLASSES)
            says = (files.get("tokenizer_config.json", {}).get("tokenizer_class"), files.get("config.json", {}).get("model_type"))
            yield {"name": f"{name} {number} ({says[0]}, {says[1]})", "base": name, "changes": changes, "files": files}


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def smaller(tokenizer):
    """The first tokens and their merges, so that many of it load quickly."""
    tokenizer = copy.deepcopy(tokenizer)
    vocab = dict(sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])[:3000])
    vocab.update({piece: i for i, piece in enumerate([p for p in tokenizer["model"]["vocab"] if len(p) == 1 and p not in vocab], len(vocab))})
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in tokenizer["model"]["merges"]]
    tokenizer["model"]["vocab"] = vocab
    tokenizer["model"]["merges"] = [m for m in merges if m[0] in vocab and m[1] in vocab and m[0] + m[1] in vocab]
    return tokenizer


def changed(tokenizer, changes):
    """tokenizer.json with other added tokens, post_processor and keys of its model."""
    return dict(tokenizer, **dict(changes, model=dict(tokenizer["model"], **changes["model"])))


def variation(draw, tokenizer, classes):
    tokenizer = dict(tokenizer, added_tokens=list(tokenizer["added_tokens"]))
    changes = {"model": {}}
    config = {"bos_token": tokenizer["added_tokens"][1]["content"], "eos_token": tokenizer["added_tokens"][2]["content"]}
    size = max(max(tokenizer["model"]["vocab"].values()), *(t["id"] for t in tokenizer["added_tokens"])) + 1
    turn = dict(TURN, **{flag: True for flag in ("single_word", "lstrip", "rstrip", "normalized") if draw.random() < 0.25})
    in_file = draw.random() < 0.6
    if in_file:
        tokenizer["added_tokens"].append(dict(turn, id=size))
        changes["added_tokens"] = tokenizer["added_tokens"]
    if draw.random() < 0.5:
        config["added_tokens_decoder"] = {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in tokenizer["added_tokens"]}
        if not in_file or draw.random() < 0.5:
            flag = draw.choice(["lstrip", "rstrip", "normalized", "special"])
            config["added_tokens_decoder"][str(size)] = dict(turn, **{flag: not turn[flag]})
        if draw.random() < 0.2:
            config["added_tokens_decoder"].popitem()
    if in_file and draw.random() < 0.3:
        config[draw.choice(["extra_special_tokens", "additional_special_tokens"])] = ["<|turn|>"]
    for key, values in (("legacy", [None, True, False]), ("add_prefix_space", [None, True, False]), ("add_bos_token", [True, False]), ("add_eos_token", [True, False])):
        if draw.random() < 0.5:
            config[key] = draw.choice(values)
    if draw.random() < 0.2:
        config["unk_token"] = tokenizer["added_tokens"][0]["content"]
    if draw.random() < 0.2:
        changes["model"]["ignore_merges"] = True
    if draw.random() < 0.2:
        changes["post_processor"] = None
    named = draw.choice(classes)
    if named:
        config["tokenizer_class"] = named
    files = {}
    if draw.random() < 0.3:
        names = {name: draw.choice(tokenizer["added_tokens"])["content"] for name in ("bos_token", "eos_token", "pad_token") if draw.random() < 0.5}
        if names and draw.random() < 0.3:
            name = draw.choice(list(names))
            names[name] = {"content": names[name], "lstrip": draw.random() < 0.5, "normalized": False, "rstrip": False, "single_word": False}
        files["special_tokens_map.json"] = names
    if draw.random() < 0.15:
        files["added_tokens.json"] = {"<|more|>": size + 1 if in_file else size}
    if draw.random() < 0.2:
        config[draw.choice(["bos_token", "eos_token"])] = None
    if draw.random() < 0.15:
        config["image_token"] = draw.choice(tokenizer["added_tokens"])["content"]
    if draw.random() < 0.15:
        config["extra_special_tokens"] = {"own_token": draw.choice(tokenizer["added_tokens"])["content"]}
    if draw.random() < 0.9:
        files["tokenizer_config.json"] = config
    model = draw.choice(MODELS)
    if model:
        files["config.json"] = {"model_type": model}
    return changes, files


def known_tokens(files):
    """A special token that neither file holds gets an id from transformers for which the model has no embedding."""
    file = files["tokenizer.json"]
    listed = files.get("tokenizer_config.json", {}).get("added_tokens_decoder", {})
    known = {(i, token) for token, i in [*file["model"]["vocab"].items(), *files.get("added_tokens.json", {}).items()]}
    return known | {(t["id"], t["content"]) for t in file["added_tokens"]} | {(int(i), t["content"]) for i, t in listed.items()}


def encode(place, files, case):
    """Writes the files to the folder `place`, and into `case` the ids of TEXTS (None where the model could not have them) or
    why transformers refuses the folder."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for file, content in files.items():
        (place / file).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    case["texts"] = TEXTS
    try:
        tokenizer = oracle.transformers.AutoTokenizer.from_pretrained(str(place), trust_remote_code=False)
        known = known_tokens(files)
        texts = {token for _, token in known}
        named = ((name, str(token)) for name, token in tokenizer.special_tokens_map.items() if not isinstance(token, (list, tuple)))
        case["named"] = {name: token for name, token in named if token in texts or name not in ("bos_token", "eos_token")}
        for kind, around in (("plain", True), ("rendered", False)):
            ids = [list(tokenizer(text, add_special_tokens=around)["input_ids"]) for text in TEXTS]
            case[kind] = [found if known.issuperset(zip(found, tokenizer.convert_ids_to_tokens(found))) else None for found in ids]
    except BaseException as error:  # the tokenizers package panics past Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        case["refused"] = f"{type(error).__name__}: {error}"


def encoded(packages, folder):
    """The published checkpoints and 120 variations of each kind, written under `folder` and encoded."""
    bases = {"bytes": read(BYTES), "pieces": smaller(read(packages["llama2"] / "tokenizer.json"))}
    for number, case in enumerate([*published(packages), *variations(bases, 120)]):
        files = case.pop("files")
        if "base" in case:
            files["tokenizer.json"] = changed(bases[case["base"]], case.pop("changes"))
        case["folder"] = str(folder / str(number))
        encode(folder / str(number), files, case)
        yield case


def goldens(folder):
    """16 variations of the project's own two tokenizers, by name, each with what makes it and its ids."""
    bases = {"bytes": read(BYTES), "pieces": read(PIECES)}
    for case in variations(bases, 16):
        encode(folder, dict(case["files"], **{"tokenizer.json": changed(bases[case["base"]], case["changes"])}), case)
        del case["texts"]
        yield case
