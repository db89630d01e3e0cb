#!/usr/bin/env python3
"""Test the reader on a corpus and a scored set that numpy itself wrote, byte formats as kdscore's.

    python3 scripts/test_kdscore_reader.py                       # needs numpy; without it, says so and is skipped
    KDSCORE_OUT=OUT python3 scripts/test_kdscore_reader.py       # also reads a set that kdscore made
"""
import hashlib
import json
import os
import sys
import tempfile
import unittest
from pathlib import Path

try:
    import numpy as np
except ImportError:
    np = None
    print("SKIPPED: the reader was not tested, because numpy is missing; install numpy and run again", file=sys.stderr)

if np is not None:
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import kdscore_reader as reader

K, VOCAB = 3, 11


def seal(document):
    body = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    document = dict(document, self_sha256=hashlib.sha256(body.encode()).hexdigest())
    return (json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n").encode()


def save(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, array)
    data = path.read_bytes()
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def make_corpus(folder, rng, lengths_of_shards):
    shards = []
    for number, lengths in enumerate(lengths_of_shards):
        shard = f"shard-{number:06}"
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        arrays = {
            "tokens": rng.integers(0, VOCAB, offsets[-1]).astype(np.int32),
            "offsets": offsets,
            "loss_mask": rng.random(offsets[-1]) < 0.6,
            "source_rows": np.arange(len(lengths), dtype=np.int64),
        }
        facts = {name: save(folder / shard / f"{name}.npy", array) for name, array in arrays.items()}
        shards.append({"id": shard, "sequences": len(lengths), "tokens": int(offsets[-1]), "arrays": facts})
    probes = [
        {"messages": [{"role": "user", "content": "naïve\t🙂"}], "add_generation_prompt": True, "text": "<naïve\t🙂>", "ids": [1, 2]},
        {"messages": [], "add_generation_prompt": False, "refused": True},
    ]
    template = hashlib.sha256(reader.canonical(probes)).hexdigest()
    (folder / "probes.json").write_bytes(seal({"format_version": 1, "probes": probes}))
    facts = {"tokenizer_fingerprint": "tok", "template_fingerprint": template, "vocab_size": VOCAB}
    (folder / "corpus.json").write_bytes(seal({"format_version": 1, "shards": shards, **facts}))
    return shards, facts


def make_set(out, corpus, shards, facts, rng):
    plan, first_manifest = [], None
    for shard in shards:
        plan.append({"id": shard["id"], "corpus_shard": shard["id"], "first_sequence": 0, "end_sequence": shard["sequences"]})
    identity = {"k": K, "vocab_scored": VOCAB, **facts}
    identity_sha256 = hashlib.sha256(reader.canonical(identity)).hexdigest()
    job = {"format_version": 1, "identity": identity, "identity_sha256": identity_sha256, "plan": plan, "corpus_path": str(corpus)}
    out.mkdir()
    (out / "job.json").write_bytes(seal(job))
    for planned in plan:
        arrays = score(corpus / planned["id"], rng)
        products = []
        for name, array in arrays.items():
            path = f"{planned['id']}/0123456789abcdef/{name}.npy"
            facts = save(out / path, array)
            products.append({"name": name, "path": path, "dtype": array.dtype.name, "shape": list(array.shape), "layout": "fixed", **facts})
        manifest = {"format_version": 1, "shard": planned, "rows": len(arrays["targets"]), "products": products,
                    "identity_sha256": identity_sha256, "provenance": {}, "sums": {"mean_tail": 0.25, "mean_target_logp": -1.5}}
        (out / f"{planned['id']}.manifest.json").write_bytes(seal(manifest))


def score(folder, rng):
    tokens, offsets, mask = (np.load(folder / f"{n}.npy") for n in ("tokens", "offsets", "loss_mask"))
    targets, row_offsets = [], [0]
    for s in range(len(offsets) - 1):
        for t in range(offsets[s], offsets[s + 1] - 1):
            if mask[t + 1]:
                targets.append(tokens[t + 1])
        row_offsets.append(len(targets))
    rows = len(targets)
    return {
        "targets": np.array(targets, np.int32),
        "ids": rng.integers(0, VOCAB, (rows, K)).astype(np.int32),
        "logp": -rng.random((rows, K)).astype(np.float16),
        "tail": rng.random(rows).astype(np.float16),
        "entropy": rng.random(rows).astype(np.float32),
        "row_offsets": np.array(row_offsets, np.int64),
    }


@unittest.skipIf(np is None, "numpy is missing")
class ReaderTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.corpus, self.out = Path(folder.name, "corpus"), Path(folder.name, "out")
        rng = np.random.default_rng(7)
        shards, facts = make_corpus(self.corpus, rng, [[5, 0, 1, 9], [1], [6, 4]])
        make_set(self.out, self.corpus, shards, facts, rng)

    def test_every_sequence_comes_with_its_rows(self):
        scored = reader.ScoredSet(self.out)
        scored.check_hashes()
        sequences = list(scored)
        self.assertEqual(([s.index for s in sequences], len(scored)), (list(range(7)), 7))
        self.assertEqual([len(s.tokens) for s in sequences], [5, 0, 1, 9, 1, 6, 4])
        self.assertEqual(sum(len(s.targets) for s in sequences), scored.rows)
        for s in sequences:
            rows = [t for t in range(len(s.tokens) - 1) if s.loss_mask[t + 1]]
            self.assertEqual(s.positions.tolist(), rows)
            self.assertEqual(s.targets.tolist(), [int(s.tokens[t + 1]) for t in rows])
            self.assertEqual((s.ids.shape, s.logp.shape, s.tail.shape), ((len(rows), K), (len(rows), K), (len(rows),)))
            self.assertEqual(s.extra["entropy"].shape, (len(rows),))
        last = scored[6]
        self.assertTrue(np.array_equal(last.logp, sequences[6].logp) and last.index == 6)
        self.assertIsInstance(last.logp.base, np.memmap)
        with self.assertRaises(IndexError):
            scored[7]

    def test_the_student_must_see_the_same_text(self):
        scored = reader.ScoredSet(self.out)
        scored.expect_tokenizer("tok")
        scored.expect_template(scored.identity["template_fingerprint"])
        scored.expect_template(lambda messages, ask: (f"<{messages[0]['content']}>", [1, 2]))
        ids = scored[3].tokens.tolist()
        scored.expect_tokens(3, ids)
        wrong = ids[:4] + [ids[4] + 1] + ids[5:]
        for expect, words in (
            (lambda: scored.expect_tokenizer("other"), "expected the tokenizer tok"),
            (lambda: scored.expect_template("other"), "found the student's other"),
            (lambda: scored.expect_template(lambda m, ask: ("", [1, 2])), "probe chat 0: expected the text"),
            (lambda: scored.expect_template(lambda m, ask: ("<naïve\t🙂>", [1])), "probe chat 0: expected the ids"),
            (lambda: scored.expect_tokens(3, ids[1:]), "sequence 3: expected 9 tokens"),
            (lambda: scored.expect_tokens(3, wrong), "at position 4"),
        ):
            with self.assertRaisesRegex(reader.Mismatch, words):
                expect()

    def test_damage_is_named(self):
        def flip(path, at):
            data = bytearray(path.read_bytes())
            data[at] ^= 1
            path.write_bytes(bytes(data))

        for path in [self.out / "job.json", self.out / "shard-000001.manifest.json", self.corpus / "corpus.json"]:
            whole = path.read_bytes()
            for at in range(0, len(whole), 1 if path.name == "corpus.json" else 5):
                flip(path, at)
                with self.assertRaises(reader.Damaged, msg=f"{path.name} byte {at}"):
                    reader.ScoredSet(self.out, self.corpus)
                path.write_bytes(whole)
        array = self.out / "shard-000000/0123456789abcdef/logp.npy"
        flip(array, array.stat().st_size - 1)
        with self.assertRaisesRegex(reader.Damaged, "logp.npy: expected sha256"):
            reader.ScoredSet(self.out).check_hashes()
        array.write_bytes(array.read_bytes()[:-1])
        with self.assertRaisesRegex(reader.Damaged, "logp.npy: expected a file of"):
            reader.ScoredSet(self.out)
        (self.out / "shard-000000.manifest.json").unlink()
        with self.assertRaisesRegex(reader.Damaged, "1 missing, first shard-000000"):
            reader.ScoredSet(self.out)
        self.assertEqual([s.index for s in reader.ScoredSet(self.out, allow_missing=True)], [4, 5, 6])

    def test_other_targets_are_never_handed_out(self):
        folder = self.corpus / "shard-000000"
        tokens = np.load(folder / "tokens.npy")
        save(folder / "tokens.npy", (tokens + 1) % VOCAB)
        with self.assertRaisesRegex(reader.Damaged, "expected the targets of sequence"):
            list(reader.ScoredSet(self.out))

    @unittest.skipUnless(os.environ.get("KDSCORE_OUT"), "KDSCORE_OUT names no set that kdscore made")
    def test_a_set_that_kdscore_made(self):
        scored = reader.ScoredSet(os.environ["KDSCORE_OUT"], os.environ.get("KDSCORE_CORPUS"))
        scored.check_hashes()
        rows = 0
        for s in scored:
            rows += len(s.targets)
            total = np.exp(s.logp.astype(np.float64)).sum(1) + s.tail
            self.assertTrue(np.all(np.abs(total - 1) < 0.01))
        self.assertEqual(rows, scored.rows)
        self.assertGreater(rows, 0)

    @unittest.skipUnless(os.environ.get("KDSCORE_PREPARED"), "KDSCORE_PREPARED names no corpus of chats that kdscore prepared")
    def test_a_students_tokenizer_on_the_probe_chats(self):
        """Needs transformers: the tokenizer kept with the corpus gives the corpus's template fingerprint."""
        from transformers import AutoTokenizer
        corpus = reader.Corpus(os.environ["KDSCORE_PREPARED"])
        tokenizer = AutoTokenizer.from_pretrained(str(corpus.folder / "tokenizer"))
        probes = reader.read_document(corpus.folder / "probes.json")["probes"]
        render = reader.render_with(tokenizer, corpus.facts)
        self.assertEqual(reader.template_fingerprint(probes, render), corpus.facts["template_fingerprint"])
        tokenizer.chat_template = "x" + tokenizer.chat_template
        self.assertNotEqual(reader.template_fingerprint(probes, render), corpus.facts["template_fingerprint"])


if __name__ == "__main__":
    unittest.main()
