"""Speed x accuracy x cost, each measured, of two bundles that were run in turns on the same machine.

A bundle is loaded into a process of its own, so that its peak of resident memory is its own; the processes take turns,
one run each, and the other one waits meanwhile. A figure that could not be measured is an error, never a default.
"""

import hashlib
import multiprocessing
import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from anechain.bundle.manifest import MANIFEST, TOKENIZER, open_bundle, sha256_of
from anechain.errors import AnechainError, EngineError, RequestError
from anechain.judge.machine import this_machine, tools
from anechain.run.chain import Chain
from anechain.run.generate import generate
from anechain.run.sample import Sampling
from anechain.run.tokenizer import Tokenizer

RUNS, WARM_UPS = 5, 1
TOKENS = 48  # of every run's answer, whatever is in them: an answer that ends early would be timed on less
FIRST_TOKEN_MS, TOK_PER_S, GIB_OF_COST = 120.0, 50.0, 2.0  # where each factor is 1 (docs/score.md)
GIB = 2**30
PATIENCE_S = 600.0  # for one run, or for loading

OpenChain = Callable[[Path], Chain]  # must be importable by name: it goes to the process that measures
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Run:
    """One run: `first_token_ms` with the whole prompt, and the pace of the tokens after the first."""

    first_token_ms: float
    tok_per_s: float


@dataclass(frozen=True)
class Measurement:
    """What was measured of one bundle. `conditions` is what two measurements must share to be compared."""

    conditions: Mapping[str, Any]
    manifest_sha256: str
    runs: tuple[Run, ...]
    peak_rss_bytes: int  # of the process tree that held the bundle, from its loading to its last run
    disk_bytes: int

    @property
    def first_token_ms(self) -> float:
        return median(r.first_token_ms for r in self.runs)

    @property
    def tok_per_s(self) -> float:
        return median(r.tok_per_s for r in self.runs)

    @property
    def gib(self) -> float:
        return (self.disk_bytes + self.peak_rss_bytes) / GIB

    def to_json(self) -> dict[str, Any]:
        return {
            "first_token_ms": self.first_token_ms, "tok_per_s": self.tok_per_s,
            "first_token_ms_range": _range([r.first_token_ms for r in self.runs]),
            "tok_per_s_range": _range([r.tok_per_s for r in self.runs]),
            "runs": [{"first_token_ms": r.first_token_ms, "tok_per_s": r.tok_per_s} for r in self.runs],
            "peak_rss_bytes": self.peak_rss_bytes, "disk_bytes": self.disk_bytes,
            "manifest_sha256": self.manifest_sha256, "conditions": dict(self.conditions),
        }  # fmt: skip


def _range(values: Sequence[float]) -> list[float]:
    return [min(values), max(values)]


@dataclass(frozen=True)
class Score:
    """The design's formula: speed = (120 / first-token ms) x (tok/s / 50), accuracy = pass rate, cost = 2 / GiB."""

    measurement: Measurement
    accuracy: float

    def __post_init__(self) -> None:
        """Raises RequestError, naming all of them, for figures that were not measured."""
        m = self.measurement
        missing = [
            name
            for name, value in (
                ("first-token time", m.first_token_ms if m.runs else None), ("tok/s", m.tok_per_s if m.runs else None),
                ("peak memory", m.peak_rss_bytes), ("disk size", m.disk_bytes),
            )
            if value is None or not np.isfinite(value) or value <= 0
        ]  # fmt: skip
        if self.accuracy is None or not 0 <= self.accuracy <= 1:
            missing.append("pass rate")
        if missing:
            raise RequestError(f"there is no score without {', '.join(missing)}: measure again.")

    @property
    def speed(self) -> float:
        return (FIRST_TOKEN_MS / self.measurement.first_token_ms) * (self.measurement.tok_per_s / TOK_PER_S)

    @property
    def cost(self) -> float:
        """The higher the cheaper."""
        return GIB_OF_COST / self.measurement.gib

    @property
    def total(self) -> float:
        return self.speed * self.accuracy * self.cost

    def to_json(self) -> dict[str, Any]:
        return {
            "score": self.total, "speed": self.speed, "accuracy": self.accuracy, "cost": self.cost,
            **self.measurement.to_json(),
        }  # fmt: skip


@dataclass(frozen=True)
class ScorePair:
    """Two scores that may be compared."""

    candidate: Score
    other: Score

    @property
    def speed_ratio(self) -> float:
        return self.candidate.speed / self.other.speed

    @property
    def cost_ratio(self) -> float:
        return self.candidate.cost / self.other.cost

    @property
    def accuracy_loss_pp(self) -> float:
        return 100 * (self.other.accuracy - self.candidate.accuracy)

    def to_json(self) -> dict[str, Any]:
        return {
            "candidate": self.candidate.to_json(), "other": self.other.to_json(), "speed_ratio": self.speed_ratio,
            "accuracy_loss_pp": self.accuracy_loss_pp, "cost_ratio": self.cost_ratio,
            "score_ratio": self.candidate.total / self.other.total if self.other.total else None,
        }  # fmt: skip


CONDITIONS = {
    "suite_sha256": "the suite", "prompt_sha256": "the prompt", "engine": "the engine", "machine": "the machine",
    "tools": "the versions of the tools", "tokens": "the number of tokens",
}  # fmt: skip


def compared(candidate: Score, other: Score) -> ScorePair:
    """Raises RequestError, naming all that differs, unless both were measured under the same conditions."""
    mine, theirs = candidate.measurement.conditions, other.measurement.conditions
    differing = [
        f"{what} ({mine.get(key)} and {theirs.get(key)})"
        for key, what in CONDITIONS.items()
        if mine.get(key) != theirs.get(key)
    ]
    if differing:
        raise RequestError(f"the two cannot be compared: they differ in {'; '.join(differing)}.")
    return ScorePair(candidate, other)


def measure(
    bundles: Sequence[Path],
    open_chain: OpenChain,
    prompts: Sequence[Sequence[int]],
    suite_sha256: str,
    progress: Progress | None = None,
    runs: int = RUNS,
) -> list[Measurement]:
    """Measures the bundles in turns: a warm-up each, then `runs` rounds in which each has its turn, in changing order.

    `prompts` are the token ids that each bundle is fed. Raises whatever a bundle's process was refused with.
    """
    with ExitStack() as stack:
        workers = [
            stack.enter_context(_Worker(path, open_chain, ids)) for path, ids in zip(bundles, prompts, strict=True)
        ]
        done, total = 0, (WARM_UPS + runs + 1) * len(workers)

        def step(what: str) -> None:
            nonlocal done
            done += 1
            if progress:
                progress(done, total, what)

        engines = []
        for worker in workers:
            engines.append(worker.ask("load"))
            step(f"load {worker.path.name}")
        taken: list[list[Run]] = [[] for _ in workers]
        for number in range(WARM_UPS + runs):
            order = range(len(workers)) if number % 2 else reversed(range(len(workers)))
            for i in order:
                run = Run(*workers[i].ask("run"))
                if number >= WARM_UPS:
                    taken[i].append(run)
                step("warm-up" if number < WARM_UPS else f"run {number + 1 - WARM_UPS}")
        peaks = [worker.ask("peak") for worker in workers]
    return [
        Measurement(
            {
                "suite_sha256": suite_sha256, "engine": engines[i], "machine": this_machine(), "tools": tools(),
                "prompt_sha256": hashlib.sha256(np.asarray(prompts[i], np.int64).tobytes()).hexdigest(),
                "tokens": TOKENS, "prompt_tokens": len(prompts[i]),
            },
            sha256_of(path / MANIFEST), tuple(taken[i]), peaks[i], disk_bytes(path),
        )
        for i, path in enumerate(bundles)
    ]  # fmt: skip


def disk_bytes(path: Path) -> int:
    """Of the bundle's own files, its manifest included; cards and a history that were added later do not count."""
    return (path / MANIFEST).stat().st_size + sum(record.bytes for record in open_bundle(path).files.values())


class _Worker:
    """A process that holds one bundle and does one thing at a time."""

    def __init__(self, path: Path, open_chain: OpenChain, prompt: Sequence[int]) -> None:
        self.path = path
        context = multiprocessing.get_context("spawn")  # a fork would begin with this process's memory
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve_runs, args=(theirs, path, open_chain, list(prompt)), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()

    def ask(self, what: str) -> Any:
        try:
            self._pipe.send(what)
            if not self._pipe.poll(PATIENCE_S):
                raise EngineError(f"measuring {self.path} took more than {PATIENCE_S:.0f} s: it was given up.")
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise EngineError(f"the process that measured {self.path} ended: look for memory that ran out.") from None
        if isinstance(answer, AnechainError):
            raise answer
        return answer


def serve_runs(pipe: Connection, path: Path, open_chain: OpenChain, prompt: Sequence[int]) -> None:
    """The process of one bundle: "load" -> the engine's name, "run" -> (ms, tok/s), "peak" -> bytes."""
    chain: Chain | None = None
    tokenizer: Tokenizer | None = None
    while True:
        try:
            what = pipe.recv()
        except EOFError:
            return
        try:
            if chain is None or tokenizer is None:
                chain, tokenizer = open_chain(path), Tokenizer.load(path / TOKENIZER)
            if what == "load":
                pipe.send(chain.engine.name)
            elif what == "run":
                pipe.send(timed(chain, tokenizer, prompt))
            else:
                pipe.send(peak_rss_bytes())
        except AnechainError as error:
            pipe.send(error)


def timed(chain: Chain, tokenizer: Tokenizer, prompt: Sequence[int]) -> tuple[float, float]:
    """One run: (ms to the first token, the whole prompt included; tokens a second after it). Greedy, TOKENS long."""
    tokens = list(generate(chain, chain.start(), tokenizer, prompt, Sampling(), TOKENS, stop=frozenset()))
    return tokens[0].ms, 1e3 * (len(tokens) - 1) / sum(t.ms for t in tokens[1:])


def peak_rss_bytes() -> int:
    """The peak of resident memory of this process and of those that it started, alive or ended.

    Linux: VmHWM, the high-water mark of this program alone; `ru_maxrss` would begin with that of the process that
    started it. An ended child counts with the largest of them.
    """
    ended = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + ended
    return sum(_high_water_bytes(pid) for pid in [os.getpid(), *_descendants(os.getpid())]) + ended


def _high_water_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0  # it ended just now
    line = next((line for line in status.splitlines() if line.startswith("VmHWM:")), "")
    return int(line.split()[1]) * 1024 if line else 0


def _descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *_descendants(child)]
    return found
