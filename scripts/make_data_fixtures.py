#!/usr/bin/env python3
"""Make tests/fixtures/data: the same few rows as pyarrow and datasets store them.

    python scripts/make_data_fixtures.py [--out tests/fixtures/data]

Needs pyarrow and datasets (4.7 or later, for columns of JSON). Nothing is drawn.

    chats.parquet        messages as a list of structs, with the null padding that structs bring
    padded.parquet       tool calls whose arguments are structs padded with nulls
    json.parquet         message content stored as arrow.json, tools as JSON text
    lz4.parquet, brotli.parquet   texts, compressed so
    wide.parquet         the types a column may have, beside a text; dictionary and large strings
    saved/               datasets.save_to_disk, two data files listed out of order in state.json
    splits/              a DatasetDict with train and test
    file.arrow           an Arrow file (not stream)
"""
import argparse
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, DatasetDict, disable_progress_bars

ROOT = Path(__file__).resolve().parent.parent


def chat(question, answer, **more):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **more}]


def write_parquet(out):
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    pq.write_table(pa.table({
        "id": [1, 2, 3], "messages": [chat("a", "b", name="bot"), chat("c", "d", weight=0) + chat("e", "f", weight=1), chat("é", "ü\n")],
        "text": pa.array([None, None, None], pa.string())}), out / "chats.parquet", row_group_size=2)
    padded = [{"id": "1", "type": "function", "function": {"name": "g", "arguments": {"b": None, "a": 2}}},
              {"id": "2", "type": "function", "function": {"name": "g", "arguments": {"b": "x", "a": 3}}}]
    pq.write_table(pa.table({"messages": [chat("go", "went", tool_calls=calls), chat("go", "went", tool_calls=padded)]}), out / "padded.parquet")
    content = pa.ExtensionArray.from_storage(pa.json_(pa.string()), pa.array(['"quoted \\"s\\""', '"plain"']))
    messages = pa.ListArray.from_arrays([0, 2], pa.StructArray.from_arrays([pa.array(["user", "assistant"]), content], ["role", "content"]))
    pq.write_table(pa.table({"messages": messages, "tools": ['[{"type": "function", "function": {"name": "f", "parameters": "{}"}}]']}), out / "json.parquet", compression="zstd")
    pq.write_table(pa.table({
        "text": pa.array(["one", "two", "one"]).dictionary_encode(), "n": pa.array([1, None, 3], pa.int8()), "f": pa.array([1.5, 2.5, None], pa.float32()),
        "when": pa.array([0, 1, 2], pa.timestamp("us")), "raw": pa.array([b"x", None, b"z"]), "l": pa.array([["a"], [], None], pa.large_list(pa.large_string()))}), out / "wide.parquet", compression="gzip")
    for compression in ("lz4", "brotli"):
        pq.write_table(pa.table({"text": [f"compressed with {compression}"]}), out / f"{compression}.parquet", compression=compression)


def write_arrow(out):
    rows = [{"prompt": f"{i}?", "completion": f"{i}!"} for i in range(4)]
    saved = out / "saved"
    shutil.rmtree(saved, ignore_errors=True)
    Dataset.from_list(rows).save_to_disk(str(saved), num_shards=2)
    state = json.loads((saved / "state.json").read_text())
    state["_data_files"].reverse()
    (saved / "state.json").write_text(json.dumps(state, indent=2))
    splits = out / "splits"
    shutil.rmtree(splits, ignore_errors=True)
    DatasetDict(train=Dataset.from_list(rows[:2]), test=Dataset.from_list(rows[2:])).save_to_disk(str(splits))
    table = pa.table({"text": ["in an arrow file", "and another"]})
    with pa.OSFile(str(out / "file.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "tests/fixtures/data")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    disable_progress_bars()
    write_parquet(args.out)
    write_arrow(args.out)
    print(sorted(str(p.relative_to(args.out)) for p in args.out.rglob("*") if p.is_file()))


if __name__ == "__main__":
    main()
