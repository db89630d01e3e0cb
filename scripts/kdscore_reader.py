#!/usr/bin/env python3
"""Read a scored set and its token corpus with numpy alone.

    from kdscore_reader import ScoredSet
    scored = ScoredSet("OUT", "CORPUS")                 # "CORPUS" may be left out: job.json notes where it was
    for seq in scored:
        seq.tokens, seq.loss_mask                       # (T)   the sequence as it was scored
        seq.positions, seq.targets                      # (R)   logits at positions predict targets = tokens[positions + 1]
        seq.ids, seq.logp, seq.tail                     # (R, K), (R, K), (R)   the teacher's top-k and what it left out
        seq.extra["entropy"]                            # (R)   further products, where they were stored

Arrays are views of memory-mapped files; nothing is read before it is used. Opening checks the seal of every manifest, that
all manifests are of one job, and each array's size, dtype and shape; `check_hashes()` reads everything and compares sha256.

Before training, make sure that the student sees the same tokens:

    scored.expect_tokenizer(fingerprint)                # the corpus's tokenizer fingerprint
    scored.expect_template(tokenizer)                   # the student's transformers tokenizer, tried on the corpus's probe chats
    scored.expect_template(render)                      # or any render(messages, add_generation_prompt) -> (text, ids)
    scored.expect_tokens(17, ids)                       # the student's own ids of sequence 17

    python3 kdscore_reader.py OUT [CORPUS] [--hashes]   # opens, checks, and prints what is there
"""
import argparse
import hashlib
import json
import re
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import numpy as np

FORMAT_VERSION = 1
DTYPES = {"bool": "|b1", "uint8": "|u1", "int32": "<i4", "int64": "<i8", "float16": "<f2", "float32": "<f4"}
BASE = ("targets", "ids", "logp", "tail", "row_offsets")
# What a corpus.json made by hand, without a seal, may say. A damaged seal's key is none of it.
HAND_MADE = {"format_version", "left_out", "loss", "shards", "sources", "template_args", "template_fingerprint",
             "tokenizer_fingerprint", "vocab_size"}
_SEAL = re.compile(rb'"self_sha256":"([0-9a-f]{64})"')


class Damaged(Exception):
    """A file is not what it must be. The message names it."""


class Mismatch(Exception):
    """The student's tokens or template are not those that were scored."""


# ---- files -----------------------------------------------------------------------------------------------------


def sha256_of(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _sha256(file)


def _sha256(file):
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def canonical(value):
    """The bytes that stand for a value without floats: sorted keys, no insignificant space."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def read_document(path, seal_required=True):
    """A JSON object whose seal is checked: the hash of its own bytes without the seal."""
    try:
        raw = Path(path).read_bytes()
        document = json.loads(raw)
    except FileNotFoundError:
        raise Damaged(f"{path}: expected a file, found none") from None
    except ValueError as error:
        raise Damaged(f"{path}: expected JSON: {error}") from None
    if not isinstance(document, dict):
        raise Damaged(f"{path}: expected a JSON object")
    if "self_sha256" not in document and not seal_required:
        if unknown := sorted(document.keys() - HAND_MADE):
            raise Damaged(f"{path}: expected only {', '.join(sorted(HAND_MADE))} without a seal, found {unknown[0]!r}")
        return _expect_version(path, document)
    body = raw.removesuffix(b"\n")
    if not any(_without(body, m) for m in _SEAL.finditer(body)):
        raise Damaged(f"{path}: expected self_sha256 to match the document: it was edited or damaged")
    return _expect_version(path, document)


def _expect_version(path, document):
    if document.get("format_version") != FORMAT_VERSION:
        raise Damaged(f"{path}: expected format_version {FORMAT_VERSION}, found {document.get('format_version')}")
    return document


def _without(body, match):
    """Whether the document without this seal has the hash that the seal states."""
    start, end = match.span()
    if body[end : end + 1] == b",":
        end += 1
    elif body[start - 1 : start] == b",":
        start -= 1
    return hashlib.sha256(body[:start] + body[end:]).hexdigest() == match[1].decode()


def open_array(path, dtype=None, shape=None, size=None):
    """A memory-mapped array, held against what its manifest says."""
    path = Path(path)
    try:
        found = path.stat().st_size
        if size is not None and found != size:
            raise Damaged(f"{path}: expected {size} bytes, found {found}")
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise Damaged(f"{path}: expected an array, found no such file") from None
    except ValueError as error:
        raise Damaged(f"{path}: expected a numpy array: {error}") from None
    if dtype is not None and array.dtype.str not in dtype:
        raise Damaged(f"{path}: expected dtype {' or '.join(dtype)}, found {array.dtype.str}")
    if shape is not None and array.shape != tuple(shape):
        raise Damaged(f"{path}: expected shape {tuple(shape)}, found {array.shape}")
    return array


def inside(folder, name):
    """The path of a name that a file states: below the folder, or refused."""
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or PurePosixPath(name).is_absolute():
        raise Damaged(f"{folder}: expected a path inside it, found {name!r}")
    return Path(folder, *parts)


# ---- the student's tokenizer -----------------------------------------------------------------------------------


def render_with(tokenizer, facts):
    """render(messages, add_generation_prompt) -> (text, ids) of a transformers tokenizer, with the template arguments and
    the date that corpus.json states."""
    def render(messages, add_generation_prompt):
        with fixed_date(facts.get("template_date")):
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt,
                                                 **(facts.get("template_args") or {}))
        return text, tokenizer(text, add_special_tokens=False)["input_ids"]
    return render


@contextmanager
def fixed_date(date):
    """Templates that print today's date print this one."""
    if date is None:
        yield
        return
    from transformers.utils import chat_template_utils as utils
    real = utils.datetime

    class Fixed(real):
        @classmethod
        def now(cls, tz=None):
            return cls.fromisoformat(date)

    utils.datetime = Fixed
    try:
        yield
    finally:
        utils.datetime = real


def template_fingerprint(probes, render):
    """The template fingerprint of whoever renders: equal to corpus.json's template_fingerprint exactly where `render`
    gives the text and ids of every probe chat. A chat that the template refuses counts as refused."""
    found = []
    for probe in probes:
        chat = {"messages": probe["messages"], "add_generation_prompt": probe["add_generation_prompt"]}
        try:
            text, ids = render(chat["messages"], chat["add_generation_prompt"])
            found.append(dict(chat, text=text, ids=list(ids)))
        except Exception:
            found.append(dict(chat, refused=True))
    return hashlib.sha256(canonical(found)).hexdigest()


# ---- the token corpus ------------------------------------------------------------------------------------------


class Corpus:
    """A token corpus. `facts` is corpus.json; sequences are numbered over all shards."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.facts = read_document(self.folder / "corpus.json", seal_required=False)
        self.shards = {shard["id"]: shard for shard in self.facts["shards"]}
        self._open = {}
        self.first = {}
        total = 0
        for shard_id in self.shards:
            self.first[shard_id] = total
            total += len(self.arrays(shard_id)["offsets"]) - 1
        self.sequences = total

    def __len__(self):
        return self.sequences

    def arrays(self, shard_id):
        """tokens (T), offsets (S+1), loss_mask (T), and source_rows (S) where it was noted."""
        if shard_id not in self._open:
            stated = self.shards[shard_id].get("arrays", {})
            arrays = {}
            for name, dtype in (("tokens", "int32"), ("offsets", "int64"), ("loss_mask", "bool"), ("source_rows", "int64")):
                path = inside(self.folder, f"{shard_id}/{name}.npy")
                if name == "source_rows" and not path.exists():
                    continue
                dtypes = (DTYPES[dtype],) if name != "loss_mask" else (DTYPES["bool"], DTYPES["uint8"])
                arrays[name] = open_array(path, dtypes, size=stated.get(name, {}).get("bytes"))
            offsets, tokens = arrays["offsets"], arrays["tokens"]
            if len(offsets) < 1 or offsets[0] != 0 or offsets[-1] != len(tokens) or len(arrays["loss_mask"]) != len(tokens):
                raise Damaged(f"{self.folder}/{shard_id}: expected offsets and a mask that fit {len(tokens)} tokens")
            self._open[shard_id] = arrays
        return self._open[shard_id]

    def sequence(self, shard_id, s):
        """(tokens, loss_mask) of sequence s of a shard."""
        arrays = self.arrays(shard_id)
        first, end = arrays["offsets"][s], arrays["offsets"][s + 1]
        return arrays["tokens"][first:end], arrays["loss_mask"][first:end].view(bool)

    def check_hashes(self):
        for shard_id, shard in self.shards.items():
            for name, stated in shard.get("arrays", {}).items():
                _expect_hash(inside(self.folder, f"{shard_id}/{name}.npy"), stated["sha256"])


def _expect_hash(path, stated):
    found = sha256_of(path)
    if found != stated:
        raise Damaged(f"{path}: expected sha256 {stated}, found {found}: the file was changed or damaged")


# ---- the scored set --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sequence:
    """One sequence and its rows. T tokens, R rows, K ids a row."""

    index: int  # counted over the corpus
    tokens: np.ndarray  # (T) int32
    loss_mask: np.ndarray  # (T) bool
    positions: np.ndarray  # (R) logits at these positions predict the targets
    targets: np.ndarray  # (R) int32
    ids: np.ndarray  # (R, K) int32, best first
    logp: np.ndarray  # (R, K) float16 or float32
    tail: np.ndarray  # (R) probability outside the top-k
    extra: dict = field(default_factory=dict)  # name -> (R)


class ScoredSet:
    """A scored set beside its corpus. Iterating gives every sequence in corpus order."""

    def __init__(self, out, corpus=None, allow_missing=False):
        self.folder = Path(out)
        self.job = read_document(self.folder / "job.json")
        self.identity = self.job["identity"]
        self.corpus = Corpus(corpus or self.job["corpus_path"])
        self._expect_same_facts()
        self.manifests = {}
        missing = []
        for planned in self.job["plan"]:
            path = self.folder / f"{planned['id']}.manifest.json"
            if path.exists():
                self.manifests[planned["id"]] = self._manifest(path, planned)
            else:
                missing.append(planned["id"])
        if missing and not allow_missing:
            raise Damaged(f"{self.folder}: expected every shard, found {len(missing)} missing, first {missing[0]}; score again")
        self._open = {}

    @property
    def k(self):
        return self.identity["k"]

    @property
    def rows(self):
        return sum(m["rows"] for m in self.manifests.values())

    def __len__(self):
        return sum(p["end_sequence"] - p["first_sequence"] for p in self.job["plan"] if p["id"] in self.manifests)

    def __iter__(self):
        for planned in self.job["plan"]:
            if planned["id"] in self.manifests:
                for s in range(planned["first_sequence"], planned["end_sequence"]):
                    yield self._sequence(planned, s)

    def __getitem__(self, index):
        """The sequence with this number in the corpus."""
        for planned in self.job["plan"]:
            s = index - self.corpus.first[planned["corpus_shard"]]
            if planned["first_sequence"] <= s < planned["end_sequence"]:
                if planned["id"] not in self.manifests:
                    raise IndexError(f"sequence {index} is in {planned['id']}, which is not scored yet")
                return self._sequence(planned, s)
        raise IndexError(f"expected a sequence below {len(self.corpus)}, found {index}")

    def arrays(self, shard_id):
        """Every stored array of a scored shard, by name."""
        if shard_id not in self._open:
            arrays = {}
            for p in self.manifests[shard_id]["products"]:
                path = inside(self.folder, p["path"])
                arrays[p["name"]] = open_array(path, (DTYPES[p["dtype"]],), p["shape"], p["bytes"])
            self._open[shard_id] = arrays
        return self._open[shard_id]

    def check_hashes(self):
        """Reads every array of the set and the corpus and compares it with its manifest."""
        self.corpus.check_hashes()
        for manifest in self.manifests.values():
            for product in manifest["products"]:
                _expect_hash(inside(self.folder, product["path"]), product["sha256"])

    # -- is it the student's text? --

    def expect_tokenizer(self, fingerprint):
        stated = self.identity.get("tokenizer_fingerprint")
        if stated != fingerprint:
            raise Mismatch(f"expected the tokenizer {stated} that was scored, found the student's {fingerprint}")

    def expect_template(self, template):
        """`template` is the student's fingerprint, its transformers tokenizer, or its render(messages,
        add_generation_prompt) -> (text, ids); the last two are tried on the corpus's probe chats."""
        stated = self.identity.get("template_fingerprint")
        if isinstance(template, str) or template is None:
            if stated != template:
                raise Mismatch(f"expected the template {stated} that was scored, found the student's {template}")
            return
        path = self.corpus.folder / "probes.json"
        probes = read_document(path)["probes"]
        if hashlib.sha256(canonical(probes)).hexdigest() != stated:
            raise Damaged(f"{path}: expected the probe chats of the template {stated}, found others")
        if hasattr(template, "apply_chat_template"):
            template = render_with(template, self.corpus.facts)
        for number, probe in enumerate(p for p in probes if not p.get("refused")):
            text, ids = template(probe["messages"], probe["add_generation_prompt"])
            if text != probe["text"]:
                raise Mismatch(f"probe chat {number}: expected the text {probe['text']!r}, found the student's {text!r}")
            if list(ids) != probe["ids"]:
                raise Mismatch(f"probe chat {number}: expected the ids {probe['ids']}, found the student's {list(ids)}")

    def expect_tokens(self, index, student_ids):
        """The student's own ids of a sequence must be those that were scored."""
        tokens = self[index].tokens
        student = np.asarray(student_ids)
        if len(student) != len(tokens):
            raise Mismatch(f"sequence {index}: expected {len(tokens)} tokens, found the student's {len(student)}")
        differ = np.flatnonzero(student != tokens)
        if len(differ):
            t = int(differ[0])
            raise Mismatch(f"sequence {index}: expected token {tokens[t]} at position {t}, found the student's {student[t]}")

    # -- inside --

    def _manifest(self, path, planned):
        manifest = read_document(path)
        if manifest["shard"] != planned:
            raise Damaged(f"{path}: expected the shard {planned} of job.json, found {manifest['shard']}")
        if manifest["identity_sha256"] != self.job["identity_sha256"]:
            raise Damaged(f"{path}: expected the identity of job.json, found another: the shard belongs to another job")
        for p in manifest["products"]:
            if p["layout"] != "fixed" or p["dtype"] not in DTYPES:
                raise Damaged(f"{path}: {p['name']}: expected a fixed layout of {', '.join(DTYPES)}")
            file = inside(self.folder, p["path"])
            if not file.is_file() or file.stat().st_size != p["bytes"]:
                raise Damaged(f"{file}: expected a file of {p['bytes']} bytes, as {path.name} says")
        return manifest

    def _expect_same_facts(self):
        for key in ("tokenizer_fingerprint", "template_fingerprint"):
            stated, found = self.identity.get(key), self.corpus.facts.get(key)
            if stated is not None and found is not None and stated != found:
                raise Damaged(f"{self.corpus.folder}: expected the {key} {stated} that was scored, found {found}")

    def _sequence(self, planned, s):
        arrays = self.arrays(planned["id"])
        tokens, loss_mask = self.corpus.sequence(planned["corpus_shard"], s)
        offsets = arrays["row_offsets"]
        i = s - planned["first_sequence"]
        rows = slice(int(offsets[i]), int(offsets[i + 1]))
        positions = np.flatnonzero(loss_mask[1:])  # a row for t exists iff t+1 < T and loss_mask[t+1]
        targets = arrays["targets"][rows]
        if len(positions) != len(targets) or not np.array_equal(tokens[positions + 1], targets):
            raise Damaged(f"{self.folder}: {planned['id']}: expected the targets of sequence {s} of {planned['corpus_shard']}")
        return Sequence(
            index=self.corpus.first[planned["corpus_shard"]] + s,
            tokens=tokens,
            loss_mask=loss_mask,
            positions=positions,
            targets=targets,
            ids=arrays["ids"][rows],
            logp=arrays["logp"][rows],
            tail=arrays["tail"][rows],
            extra={name: array[rows] for name, array in arrays.items() if name not in BASE},
        )


def main():
    parser = argparse.ArgumentParser(description="Open a scored set, check it, and print what is there.")
    parser.add_argument("out", metavar="OUT")
    parser.add_argument("corpus", metavar="CORPUS", nargs="?")
    parser.add_argument("--hashes", action="store_true", help="read everything and compare sha256")
    args = parser.parse_args()
    try:
        scored = ScoredSet(args.out, args.corpus)
        if args.hashes:
            scored.check_hashes()
        rows = sum(len(seq.targets) for seq in scored)
    except Damaged as error:
        sys.exit(f"error: {error}")
    print(f"{len(scored)} sequences, {rows} rows, k = {scored.k}, {len(scored.manifests)} shards")


if __name__ == "__main__":
    main()
