"""The whole program on the stand-in driver, a function a proof; each gives what is wrong.

A teacher is one of the fixtures; what must come out is known from transformers, from the CPU, or
from the program's own run under other circumstances.
"""

import json
import re
import signal
import tempfile
from pathlib import Path

import made_teachers
import parity
from build import OUT
from program import Failed, Program, hashes, manifests, until, write_corpus

# Compute capability, driver, streams, order of the emulator's threads: every pair of values that
# can meet does, and no cubin of the compiler's serves 100, so that PTX is loaded there.
SETTINGS = [
    (80, 12040, "eager", "forward"),
    (80, 13000, "lazy", "reverse"),
    (89, 12040, "hasty", "reverse"),
    (89, 13000, "eager", "forward"),
    (90, 12040, "lazy", "forward"),
    (90, 13000, "hasty", "forward"),
    (100, 13000, "eager", "reverse"),
    (100, 13000, "lazy", "reverse"),
    (100, 13000, "hasty", "forward"),
]
# A plain teacher, one with windows and caps, one with experts, and latent attention with experts.
VARIED = ("llama_tied", "gemma2", "gpt_oss", "deepseek_v3")
TEACHER = "qwen2"
STREAMS = "eager", "lazy", "hasty"


class Bench:
    """The program with the stand-in's folder and NVRTC on the loader's path."""

    def __init__(self, binary, driver, nvrtc, environment=None):
        kept = {"XDG_CACHE_HOME": str(OUT / "cache"), "RAYON_NUM_THREADS": "1"}
        paths = [str(path) for path in (driver, nvrtc) if path]
        kept["LD_LIBRARY_PATH"] = ":".join(paths)
        kept["STANDIN_LEAKS"] = "1"
        self.binary, self.driver, self.nvrtc = binary, driver, nvrtc
        self.program = Program(binary, {**kept, **(environment or {})})

    def under(self, setting):
        capability, driver, streams, order = setting
        return self.program.under(
            capability=capability, driver=driver, streams=streams, order=order
        )


def told(setting):
    return f"sm_{setting[0]}, driver {setting[1] // 1000}.{setting[1] % 1000 // 10}, {setting[2]}"


def problems_of(act):
    """What a proof found wrong, or how it failed."""
    try:
        return list(act())
    except (Failed, AssertionError) as error:
        return [str(error)]


def goldens(full):
    """(name, setting, dtype) of each run; by default every teacher once, settings in turn."""
    names = parity.names()
    if full:
        return [(n, s, d) for n in names for s in SETTINGS for d in ("bf16", "f32")]
    runs = [(n, SETTINGS[i % len(SETTINGS)], "bf16") for i, n in enumerate(names)]
    return runs + [(n, SETTINGS[i], "f32") for i, n in enumerate(VARIED)]


def golden(bench, run, all_figures):
    name, setting, dtype = run
    problems, figures = parity.check(bench.under(setting), name, dtype, "--token-budget", "1024")
    if figures and dtype == "bf16":
        all_figures.append(figures)
    return [f"{name} in {dtype}, {told(setting)}: {problem}" for problem in problems]


class Job:
    """A teacher, a corpus of many short shards, and where sets go."""

    def __init__(self, folder, name=TEACHER):
        self.folder, self.fixture = Path(folder), parity.Fixture(name)
        sequences = parity.sequences()
        self.corpus = write_corpus(self.folder / "corpus", sequences, self.fixture.vocab)

    def score(self, program, out, *more):
        program.score(self.fixture.folder, self.corpus, self.folder / out, *more)
        return hashes(self.folder / out)

    def fails(self, program, out, *more):
        """What a run that must end with an error says."""
        try:
            self.score(program, out, *more)
        except Failed as error:
            assert error.status == 2, f"status {error.status}, 2 is due: {error}"
            assert "panicked" not in error.said, str(error)
            return error.said
        raise AssertionError(f"{out}: a run that can't work ended well")

    def committed(self, out):
        return len(manifests(self.folder / out)) if (self.folder / out).is_dir() else 0


def with_job(act, name=TEACHER):
    """A part that gets a job of its own."""

    def part():
        with tempfile.TemporaryDirectory() as folder:
            return problems_of(lambda: act(Job(folder, name)))

    return part


def expect_words(said, *words):
    return [f"expected {w!r} in: {said[-600:]}" for w in words if not re.search(w, said)]


def memory_too_small(bench):
    """Less than the plan: refused before anything is scored, with both figures."""

    def act(job):
        said = job.fails(bench.program.under(memory=8 << 20), "out")
        yield from expect_words(said, r"\d+ (free )?bytes|[KMG]iB|MB", "token-budget|memory")
        assert not job.committed("out"), "something was committed"
        # It looks free when the plan is made, and somebody else has it when it is taken.
        said = job.fails(bench.program.under(memory=1 << 30, memory_taken=(1 << 30) - 4096), "out")
        yield from expect_words(said, "memory")

    return [with_job(act)]


def device_lost(bench):
    """In the middle of a run: an error that says so, and the next run makes the set whole."""

    def act(job):
        more = "--shard-tokens", 60
        whole = job.score(bench.program, "whole", *more)
        log = job.folder / "log"
        job.score(bench.program.under(log=log), "counted", *more)
        launches = log.read_text().count("\nlaunch ")
        said = job.fails(bench.program.under(break_at=launches * 3 // 4), "out", *more)
        yield from expect_words(said, "LAUNCH_FAILED|launch|cuda:0")
        assert job.committed("out") < len(manifests(job.folder / "whole")), "nothing was left"
        assert job.score(bench.program, "out", *more) == whole, "other bytes after a lost device"

    return [with_job(act)]


def nothing_there(bench):
    """No driver, no device, no library: an error where a device was asked for, else the CPU."""

    def act(job):
        bare = Bench(bench.binary, None, None).program
        yield from expect_words(job.fails(bare, "out"), "driver|libcuda")
        none = bench.program.under(devices=0)
        yield from expect_words(job.fails(none, "out"), "device")
        none.device = "auto"
        job.score(none, "auto")
        without = Bench(bench.binary, bench.driver, None, {"HOME": "/nonexistent", "PATH": ""})
        yield from expect_words(job.fails(without.program, "out"), "NVRTC", "pip install")
        old = bench.program.under(capability=75)
        yield from expect_words(job.fails(old, "out"), "compute capability 8.0", "7.5")
        old.device = "auto"
        job.score(old, "old")
        second = bench.program.under(devices=1)
        second.device = "cuda:1"
        yield from expect_words(job.fails(second, "out"), "cuda:1")

    return [with_job(act)]


def newer_library(bench):
    """cuBLASLt 13 is passed over on a driver of 12, and alone is an error that says why."""

    def act(job):
        job.score(bench.program.under(driver=12040), "both")
        facts = str(manifests(job.folder / "both")[0])
        yield from expect_words(facts, "cublaslt.{0,12}120")
        only = job.folder / "only"
        only.mkdir()
        for name in ("libcuda.so.1", "libcublasLt.so.13"):
            (only / name).symlink_to(bench.driver / name)
        alone = Bench(bench.binary, only, bench.nvrtc, {"HOME": "/nonexistent", "PATH": ""})
        said = job.fails(alone.program.under(driver=12040), "out")
        yield from expect_words(said, "cuBLASLt")

    return [with_job(act)]


def begun_by_nobody(bench):
    """A run that fails before its first batch leaves no set behind: the next may choose anew. A
    corpus without a token is a set, too."""

    def act(job):
        taken = bench.program.under(memory=1 << 30, memory_taken=(1 << 30) - 4096)
        job.fails(taken, "out")
        on_cpu = bench.program.under()
        on_cpu.device = "cpu"
        job.score(on_cpu, "out")
        job.corpus = write_corpus(job.folder / "empty", [([], [])], job.fixture.vocab)
        job.score(bench.program, "nothing")
        return []

    return [with_job(act)]


def killed(bench):
    """A kill in the middle, and a resume: the same bytes as without."""

    def act(job):
        more = "--shard-tokens", 30
        whole = job.score(bench.program, "whole", *more)
        arguments = bench.program.score_arguments(
            job.fixture.folder, job.corpus, job.folder / "out", *more
        )
        running = bench.program.start(*arguments)
        came = until(lambda: job.committed("out") or running.poll() is not None)
        running.send_signal(signal.SIGKILL)
        running.wait()
        assert came and job.committed("out"), "nothing was committed in time"
        left = len(manifests(job.folder / "whole")) - job.committed("out")
        assert left, "the kill came too late to tell anything"
        assert job.score(bench.program, "out", *more) == whole, "other bytes after a kill"
        return []

    return [with_job(act)]


def same_bytes(bench, full):
    """Whatever the token budget, the head chunk, the wait for streams, or which products cuBLASLt
    has to leave to the project's own."""
    cuts = [(1, 7), (90, 100), (4096, 1024)]
    names = VARIED if full else (*VARIED[:1], *VARIED[-1:])

    def act(algorithms):
        def part(job):
            seen = {}
            for i, (budget, chunk) in enumerate(cuts):
                streams = STREAMS[i % len(STREAMS)]
                program = bench.program.under(algorithms=algorithms, streams=streams)
                limits = "--token-budget", budget, "--head-chunk", chunk
                found = job.score(program, f"out-{i}", *limits)
                seen.setdefault(tuple(sorted(found.items())), []).append((budget, chunk))
            if len(seen) > 1:
                yield f"{job.fixture.name}, {algorithms}: bytes differ: {list(seen.values())}"

        return part

    modes = ("usual", "varying", "refusing", "absent")
    return [with_job(act(mode), name) for name in names for mode in modes]


def two_devices(bench):
    """Both work on the open shards, and their bytes are those of one."""

    def act(job):
        more = "--shard-tokens", 60
        one = job.score(bench.program, "one", *more)
        both = bench.program.under(devices=2)
        for device in ("cuda:0,cuda:1", "all"):
            both.device = device
            assert job.score(both, f"two-{device}", *more) == one, f"other bytes on {device}"
        return []

    return [with_job(act)]


def streams_of(lines, kind):
    """The streams that have such lines."""
    return {re.search(r" stream (\d+)", line).group(1) for line in lines if line.startswith(kind)}


def kept_fed(lines):
    """What keeps a device waiting in the log of batches that follow one another: `lines` start and
    end where a batch starts."""
    computes, up, down = [streams_of(lines, kind) for kind in ("launch", "upload", "download")]
    if [len(streams) for streams in (computes, up, down)] != [1, 1, 1]:
        yield f"streams of launches {computes}, uploads {up}, downloads {down}"
    elif len(computes | up | down) != 3:
        yield "copies share a stream with each other or with what is computed"
    begun = taken = 0
    before = None
    for line in lines:
        if line.startswith("launch embed"):
            begun += 1
        if line.startswith("synchronise"):
            taken += 1
            if line != "synchronise event" or not before.startswith("launch reduce_head"):
                yield f"a wait inside a batch: {line} after {before}"
            if begun <= taken:
                yield f"the rows of batch {taken} are waited for with no batch begun behind it"
        elif line.startswith(("launch", "product")):
            before = line
    if not taken:
        yield "no wait for rows was seen"


def overlapping(bench):
    """Uploads, work and downloads have streams of their own, the host waits for rows alone, and for
    those of a batch when the next has been asked for; without what the streams are told to wait
    for, the bytes are others."""

    def act(job):
        log = job.folder / "log"
        more = "--token-budget", 60, "--shard-tokens", 1 << 20
        whole = job.score(bench.program.under(log=log), "out", *more)
        lines = log.read_text(encoding="utf-8").splitlines()
        # The first is a rehearsal; the last is waited for with nothing behind it.
        at = [i for i, line in enumerate(lines) if line.startswith("launch embed")]
        assert len(at) > 4, "too few batches to tell"
        yield from kept_fed(lines[at[1] : at[-1]])
        for streams in STREAMS:
            assert job.score(bench.program.under(streams=streams), streams, *more) == whole, (
                f"other bytes on {streams} streams"
            )
        forgetful = bench.program.under(streams="lazy", forgets_waits=1)
        try:
            found = job.score(forgetful, "forgetful", *more)
        except Failed:
            return
        if found == whole:
            yield "nobody noticed that streams forgot what to wait for"

    return [with_job(act)]


def steady(bench):
    """While batches run nothing is allocated, and what is copied is pinned."""

    def act(job):
        log = job.folder / "log"
        job.score(bench.program.under(log=log), "out", "--token-budget", 60)
        lines = log.read_text(encoding="utf-8").splitlines()
        at = [i for i, line in enumerate(lines) if line.startswith("launch reduce_head")]
        assert len(at) > 2, "too few batches to tell"
        for line in lines[at[1] : at[-1]]:
            if line.startswith(("allocate", "pin", "load")):
                yield f"between batches: {line}"
        pageable = [line for line in lines if line.endswith("pageable")]
        if pageable:
            yield f"{len(pageable)} copies that aren't pinned, the first: {pageable[0]}"

    return [with_job(act)]


def launches(bench):
    """`plan --kernels` predicts exactly the launches of a batch."""

    def act(job):
        length, sequences = 20, 6
        counted = []
        for batches in (1, 2):
            count = batches * sequences
            kept = made_teachers.random_sequences(job.fixture.vocab, count, length)
            job.corpus = write_corpus(job.folder / f"even-{batches}", kept, job.fixture.vocab)
            log = job.folder / f"log-{batches}"
            limits = "--token-budget", sequences * length, "--head-chunk", 50
            job.score(bench.program.under(log=log), f"out-{batches}", *limits)
            counted.append(count_kernels(log.read_text(encoding="utf-8")))
        found = {k: n - counted[0].get(k, 0) for k, n in counted[1].items()}
        found = {k: n for k, n in found.items() if n}
        said = bench.program.run(
            "plan", "--teacher", job.fixture.folder, "--kernels", "--json", "--length", length,
            "--token-budget", sequences * length, "--head-chunk", 50,
        )  # fmt: skip
        predicted = {}
        for used in json.loads(said.stdout)["kernels"]:
            predicted[used["kernel"]] = predicted.get(used["kernel"], 0) + used["launches"]
        for kernel in sorted(found.keys() | predicted.keys()):
            if found.get(kernel) != predicted.get(kernel):
                yield (
                    f"{job.fixture.name}: {kernel} is launched {found.get(kernel, 0)} times, "
                    f"{predicted.get(kernel, 0)} are predicted"
                )

    return [with_job(act, name) for name in VARIED]


def count_kernels(log):
    """Launches of each kernel; a product by cuBLASLt counts as the project's own would."""
    counts = {}
    types = {"0": "f32", "14": "bf16"}
    for line in log.splitlines():
        words = line.split()
        if words[0] == "launch":
            name = words[1]
        elif words[0] == "product":
            name = f"matmul_{types[words[8]]}_{types[words[10]]}"
        elif words[0] == "copy":
            name = "copy"
        else:
            continue
        counts[name] = counts.get(name, 0) + 1
    return counts
