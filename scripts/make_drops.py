#!/usr/bin/env python3
"""What transformers scores when a key of a teacher's config is absent: tests/fixtures/teachers/NAME/drops.json.

    KDSCORE_DROPS_LIST=list.txt cargo test --test families absent_key      # lists the absences that change kdscore's scores
    python scripts/make_drops.py list.txt

Each line of the list is "TEACHER CONFIG KEY.PATH". Written per config and key: the log-prob of every tenth row's target, or null
where transformers can't load or run the teacher. Needs what make_teachers.py needs.
"""
import json, shutil, sys, tempfile
from collections import defaultdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import make_teachers as M

TEACHERS = M.ROOT / "tests/fixtures/teachers"


def decoded(folder, config):
    """8-bit weights as float32, for a transformers that has no kernel for them here."""
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_scale_inv")]:
        scale, weight = tensors.pop(name), name.removesuffix("_scale_inv")
        rows, columns = tensors[weight].shape
        spread = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        tensors[weight] = tensors[weight].float() * spread
    (folder / "model.safetensors").unlink()
    save_file({k: v.float() for k, v in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    config.pop("quantization_config")


def without(name, file, path, sequences):
    config = json.loads((TEACHERS / name / file).read_text())
    holder = config
    for key in path[:-1]:
        holder = holder[key]
    holder.pop(path[-1])
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        for f in (TEACHERS / name).glob("*.safetensors*"):
            shutil.copy(f, folder)
        if config.get("quantization_config", {}).get("quant_method") == "fp8":
            decoded(folder, config)
        (folder / "config.json").write_text(json.dumps(config))
        try:
            values = M.golden(folder, sequences, fresh="dynamic" in name)["actual_logp"][::10]
        except Exception as error:
            print(f"{name} {file} without {'.'.join(path)}: {type(error).__name__}: {str(error)[:120]}", flush=True)
            return None
    return [round(float(v), 6) for v in values]


def main():
    torch.set_num_threads(2)
    sequences = json.loads((TEACHERS / "corpus.json").read_text())["sequences"]
    drops = defaultdict(lambda: defaultdict(dict))
    for line in Path(sys.argv[1]).read_text().splitlines():
        name, file, place = line.split(" ")
        drops[name][file][place] = without(name, file, place.split("."), sequences)
    for name, found in drops.items():
        text = json.dumps(found, sort_keys=True, separators=(",", ":"))
        (TEACHERS / name / "drops.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
