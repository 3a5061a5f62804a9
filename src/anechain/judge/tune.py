"""The search for the smallest recipe that passes: where are bytes worth most, and how many does it take?

1. One pass over a third of the calibration text rounds every matrix to int8, one scale per output channel.
2. For every matrix: the KL divergence on the logits when it alone is rounded (judge/search.py), and by how much a
   table for every 16 rows, or a correction of rank 8, 16 or 32, or both would lessen what it costs.
3. Upgrades (to one of these, or fp16) in the order of what they save per byte make a ladder of recipes.
4. The rungs are rounded as wholes and judged, by bisection, on the search's texts; what passes there sits the exam,
   the gate's `strict` and `m8`, whose prompts decide nothing but pass or fail: first in float32 arithmetic, then, as
   the bundle that would ship, on the reference engine, plain and under stress.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from anechain.bake.jobs import PREFILL, make_plan, tools
from anechain.bake.source import Source
from anechain.bundle.footprint import footprint
from anechain.bundle.gptq import conditional_power, without_leading
from anechain.bundle.recipe import Calibration, Recipe, Rule, Scheme, parse_scheme
from anechain.bundle.rounded import Rounded, save_rounded
from anechain.bundle.spec import ModelSpec, matrices_of
from anechain.bundle.stored import Stored, compress, dense, storage_bytes
from anechain.judge.calibration import BEGINNINGS, QUESTIONS, calibration_text
from anechain.judge.gate import MAX_MEAN_KL, MIN_COSINE, NEAR_TIE_LOGITS, NEAR_TIE_SHARE, NEAR_TIE_ULP
from anechain.judge.prepare import bake_with_baselines, cache_folder, kept_text
from anechain.judge.rounding import ALGORITHM, round_model
from anechain.judge.search import EXACT, LENGTH, SEED, SOME, STEPS, Task, measure

Progress = Callable[[int, int, str], None]

INT8, LEVEL, FP16 = Scheme(8), Scheme(8, rank=1), Scheme(16)
PALETTE = parse_scheme("palette8-group16")
RANKS = (8, 16, 32)
METHODS = ("scales", "gptq", "drift", "level", "weigh")
TEXT_LENGTH = 128  # tokens of each of the model's own texts: many short ones teach more than few long ones
EIGHT_BITS = 0.9  # of the block weights, at least
RUNGS = (0.0, 0.015, 0.03, 0.037, 0.043, 0.065)  # bytes beyond plain int8, of the fp16 bytes
FIRST = 3  # of the rungs is judged at first, with those just below it: where a small model has come to pass


@dataclass(frozen=True)
class Candidate:
    """A recipe that was judged, and what was found.

    `found` holds figures by `search`, `strict` and `m8` in float32 arithmetic; `engine`, where those were good, by
    `strict` and `m8` for each run on the reference engine: plain, and under stress.
    """

    recipe: Recipe
    bytes: int
    share: float
    eight_bit_share: float
    found: Mapping[str, Any]
    engine: tuple[Mapping[str, Any], ...] = ()

    @property
    def promising(self) -> bool:
        return all(self.found[name]["accepted"] for name in ("search", "strict", "m8"))

    @property
    def passes(self) -> bool:
        runs = [run[name]["accepted"] for run in self.engine for name in ("strict", "m8")]
        return self.promising and bool(runs) and all(runs)

    @property
    def outright(self) -> bool:
        """Passes `m8` itself, not only what this project accepts of it, wherever it was judged."""
        return all(found["m8"]["verdict"] == "pass" for found in (self.found, *self.engine))


@dataclass(frozen=True)
class Tuned:
    """The outcome of a search. `best` is None when nothing passed; then `verdict` says how close it came and why."""

    best: Candidate | None
    candidates: tuple[Candidate, ...]  # by bytes
    sensitivity: Mapping[str, float]  # mean KL when one matrix alone is int8
    verdict: str


def tune(
    source: Source,
    lora: str | None,
    calibration: Calibration,
    context: int,
    workers: int,
    ane: bool,
    linear: bool,
    progress: Progress | None = None,
) -> Tuned:
    """Searches; whatever was measured before, in this process or another one that was stopped, is not measured again.

    With `ane` only forms that lint has no E finding for; without, also one scale per 32 inputs; `linear`: no palettes.
    """
    report = progress or (lambda done, total, what: None)
    kept = _Kept(source, calibration, context)
    moved = _moved_file(source, calibration, kept.key, report)
    plain = _plain(source.spec, calibration)
    blocks = [name for name in matrices_of(source.spec) if name.startswith("layers.")]
    with _pool(workers) as pool:
        tasks = [Task(source.ref, lora, context, name, str(moved)) for name in blocks]
        each = _all(pool, kept, tasks, report)
        sensitivity = {name: each[name]["mean_kl"] for name in blocks}
        left = Rounded(moved).about["left"]
        if linear:
            left = {n: {s: share for s, share in mine.items() if "palette" not in s} for n, mine in left.items()}
        ladder = make_ladder(source.spec, plain, sensitivity, left)
        if not ane and all(inputs % 32 == 0 for _, inputs in (matrices_of(source.spec)[n] for n in blocks)):
            ladder.append(replace(plain, name="tuned-block32", rules=(Rule("layers.*", parse_scheme("int8-block32")),)))
            ladder.sort(key=lambda recipe: footprint(source.spec, recipe).bytes)
        judged: dict[int, Candidate] = {}

        def judge(places: Sequence[int]) -> None:
            tasks = [Task(source.ref, lora, context, recipe=ladder[i]) for i in places]
            found = _all(pool, kept, tasks, report)
            for i, task in zip(places, tasks, strict=True):
                size = footprint(source.spec, ladder[i])
                judged[i] = Candidate(ladder[i], size.bytes, size.share, size.eight_bit_share, found[task.name])
            for i in (i for i in sorted(places) if judged[i].promising):
                task = Task(source.ref, lora, context, recipe=ladder[i])
                engine = _engine_verdicts(pool, kept, source, task, workers, report)
                judged[i] = replace(judged[i], engine=engine)
                if judged[i].passes:
                    break  # those above it need not

        bisect(len(ladder), workers, judge, lambda i: judged[i].passes, FIRST)
    candidates = tuple(judged[i] for i in sorted(judged))
    best = min((c for c in candidates if c.passes), key=lambda c: c.bytes, default=None)
    return Tuned(best, candidates, sensitivity, verdict(best, candidates, sensitivity))


def bisect(
    count: int, at_once: int, judge: Callable[[Sequence[int]], None], passes: Callable[[int], bool], first: int
) -> None:
    """Judges places of a ladder, `at_once` at a time, until the lowest that passes stands beside one that fails.

    It begins at `first` and those just below. More bytes are taken to be better; the lowest that passes is right when
    they are not, and may not be the lowest.
    """
    low, high = -1, count  # fails, passes (as far as is known)
    top = min(first, count - 1)
    places = list(range(max(top - at_once + 1, 0), top + 1))
    while places:
        judge(places)
        passing = [i for i in places if passes(i)]
        if passing:
            high = passing[0]
        low = max([low, *(i for i in places if i < high)])
        points = np.linspace(low, high, min(at_once, high - low - 1) + 2)[1:-1]
        places = sorted({min(max(round(float(p)), low + 1), high - 1) for p in points})


def make_ladder(
    spec: ModelSpec, plain: Recipe, sensitivity: Mapping[str, float], left: Mapping[str, Mapping[str, float]]
) -> list[Recipe]:
    """Recipes of more and more bytes. `left[matrix]` is what share of its cost as int8 each other scheme leaves.

    Upgrades of a matrix are taken in the order of KL saved per byte, those of one matrix one after another.
    """
    shapes = matrices_of(spec)
    upgrades: list[tuple[float, str, Scheme, int]] = []
    for name, kl in sensitivity.items():
        begin = plain.scheme_for(name, shapes[name][0] * shapes[name][1])
        now, rate = (storage_bytes(shapes[name], begin), kl), np.inf
        options = [(parse_scheme(scheme), kl * share) for scheme, share in left[name].items()]
        # What has a channel for the level of the logits keeps one.
        options = [(replace(s, rank=max(s.rank, begin.rank)), k) for s, k in options] + [(FP16, 0.0)]
        while options := [(s, k) for s, k in options if storage_bytes(shapes[name], s) > now[0] and k < now[1]]:
            # along the lower hull of bytes and KL
            rates = [(now[1] - k) / (storage_bytes(shapes[name], s) - now[0]) for s, k in options]
            pick = int(np.argmax(rates))
            scheme, kl_then = options[pick]
            size = storage_bytes(shapes[name], scheme)
            rate = min(rates[pick], rate)  # a hull falls; rounding must not say otherwise
            upgrades.append((rate, name, scheme, size - now[0]))
            now = (size, kl_then)
    upgrades.sort(key=lambda u: -u[0])  # stable: those of one matrix stay in their order
    whole = footprint(spec, plain)
    chosen: dict[str, Scheme] = {}
    full: set[str] = set()  # matrices whose next upgrade would leave too few weights at 8 bits
    spent, ladder, following = 0, [], iter(upgrades)
    upgrade = next(following, None)
    for number, rung in enumerate(RUNGS):
        while upgrade is not None and spent + upgrade[3] <= rung * whole.fp16_bytes:
            _, name, scheme, size = upgrade
            trial = {**chosen, name: scheme}
            if name not in full and footprint(spec, _recipe(plain, number, trial)).eight_bit_share >= EIGHT_BITS:
                chosen, spent = trial, spent + size
            else:
                full.add(name)
            upgrade = next(following, None)
        recipe = _recipe(plain, number, chosen)
        if not ladder or recipe.rules != ladder[-1].rules:
            ladder.append(recipe)
    return ladder


def _plain(spec: ModelSpec, calibration: Calibration) -> Recipe:
    """int8 everywhere; what writes to the stream has the one channel that keeps the level of the logits."""
    rules = [Rule("layers.*", INT8)]
    if "level" in calibration.methods and not spec.sandwich_norms:
        rules = [Rule("layers.*.o", LEVEL), Rule("layers.*.down", LEVEL), *rules]
    return Recipe("tuned-0", "fp16", tuple(rules), calibration=calibration)


def _recipe(plain: Recipe, number: int, chosen: Mapping[str, Scheme]) -> Recipe:
    rules = [Rule(name, scheme) for name, scheme in sorted(chosen.items(), key=lambda c: (str(c[1]), c[0]))]
    return replace(plain, name=f"tuned-{number}", rules=(*rules, *plain.rules))


def closest_of(candidates: Sequence[Candidate]) -> Candidate:
    """The candidate with the least mean KL on the texts where it is worst."""
    return min(candidates, key=lambda c: max(c.found[name]["mean_kl"] for name in ("search", "strict")))


def verdict(best: Candidate | None, candidates: Sequence[Candidate], sensitivity: Mapping[str, float]) -> str:
    """One sentence: what passes; or that nothing does, how close it came, and what blocks."""
    if best is not None:
        return f"{best.recipe.name} passes with {best.share:.3f} of the fp16 bytes"
    closest = closest_of(candidates)
    reasons = [f"{name}: {reason}" for name in ("search", "strict", "m8") for reason in _reasons(closest.found[name])]
    for run in closest.engine:
        reasons += [f"{name} on {run[name]['engine']}: {r}" for name in ("strict", "m8") for r in _reasons(run[name])]
    ties = [tie for found in (closest.found, *closest.engine) for tie in found["strict"]["near_ties"]]
    if reasons and all("near-tie" in reason for reason in reasons):
        places = ", ".join(f"{s['prompt']} position {s['position']} (margin {s['margin']:.3f})" for s in ties[:5])
        return f"the baseline itself is unstable: nothing but near-ties stands in the way, at {places}"
    loud = ", ".join(sorted(sensitivity, key=lambda n: -sensitivity[n])[:3])
    return (
        f"no recipe passes; the closest, {closest.recipe.name} with {closest.share:.3f} of the fp16 bytes, fails in "
        f"{'; '.join(reasons)}; the matrices that cost most alone are {loud}"
    )


def _reasons(found: Mapping[str, Any]) -> list[str]:
    return [] if found["accepted"] else list(found["reasons"])


class _Kept:
    """Measurements by name, in a file of the cache that belongs to this model, text and version."""

    def __init__(self, source: Source, calibration: Calibration, context: int) -> None:
        gate = [MIN_COSINE, MAX_MEAN_KL, NEAR_TIE_LOGITS, NEAR_TIE_SHARE, NEAR_TIE_ULP]
        decided = [
            source.fingerprint, asdict(calibration), calibration_text(), tools(), ALGORITHM, context, gate,
            RANKS, str(PALETTE), SOME, SEED, LENGTH, STEPS, BEGINNINGS, QUESTIONS,
            sorted((name, hashlib.sha256(text).hexdigest()) for name, text in source.text_files.items()),
        ]  # fmt: skip
        self.key = hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()[:32]
        self._path = cache_folder("tune") / f"{self.key}.jsonl"
        self._found: dict[str, dict[str, Any]] = {}
        if self._path.exists():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                try:
                    entry = json.loads(line)
                    self._found[entry["task"]] = entry["found"]
                except (ValueError, LookupError, TypeError):
                    continue  # the line that was being written when the search was stopped

    def get(self, task: Task) -> dict[str, Any] | None:
        return self._found.get(self._name(task))

    def add(self, task: Task, found: dict[str, Any]) -> None:
        self._found[self._name(task)] = found
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"task": self._name(task), "found": found}) + "\n")

    def _name(self, task: Task) -> str:
        if task.recipe is None:
            return task.matrix
        rules = {**task.recipe.to_json(), "name": ""}
        kind = "recipe" if not task.bundle else "stressed bundle" if task.stress else "bundle"
        return f"{kind} {hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()}"


def _engine_verdicts(
    pool: Executor, kept: _Kept, source: Source, task: Task, workers: int, report: Progress
) -> tuple[Mapping[str, Any], ...]:
    """What the gate says of the task's recipe, baked, on the reference engine: plain, and under stress."""
    assert task.recipe is not None
    tasks = [replace(task, bundle="to be baked", stress=stress) for stress in (False, True)]
    with TemporaryDirectory(dir=cache_folder("tune")) as folder:
        if any(kept.get(t) is None for t in tasks):
            path = Path(folder) / "bundle"
            prefill = PREFILL if task.context % PREFILL == 0 else 0
            plan = make_plan(source, task.recipe, task.context, prefill, "macOS15", None)
            bake_with_baselines(source, plan, path, workers, progress=lambda d, t, _: report(d, t, "packages"))
            tasks = [replace(t, bundle=str(path)) for t in tasks]
        found = _all(pool, kept, tasks, report)
    return tuple(found[t.name] for t in tasks)


def _all(pool: Executor, kept: _Kept, tasks: Sequence[Task], report: Progress) -> dict[str, dict[str, Any]]:
    """What each task found, by its name; those that are kept are not run."""
    results = {task.name: found for task in tasks if (found := kept.get(task)) is not None}
    running: dict[Future[dict[str, Any]], Task] = {
        pool.submit(measure, task): task for task in tasks if task.name not in results
    }
    try:
        while running:
            done = wait(running, return_when=FIRST_COMPLETED).done
            # What is finished is kept before a failure ends the search.
            for future in sorted(done, key=lambda future: future.exception() is not None):
                task = running.pop(future)
                results[task.name] = future.result()
                kept.add(task, results[task.name])
                report(len(results), len(tasks), task.name)
    finally:
        for future in running:
            future.cancel()
    return results


@contextmanager
def _pool(workers: int) -> Iterator[Executor]:
    """Fresh processes that share the processors evenly."""
    threads = str(max(1, (os.cpu_count() or 1) // workers))
    before = {name: os.environ.get(name) for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")}
    os.environ |= {name: value or threads for name, value in before.items()}
    pool = ProcessPoolExecutor(workers, get_context("spawn"))
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)


class _Seen:
    """Every matrix as it was moved, not rounded, and what share of its cost as int8 every other scheme leaves."""

    def __init__(self) -> None:
        self.exact: dict[str, Stored] = {}
        self.left: dict[str, dict[str, float]] = {}
        self._moment: np.ndarray | None = None
        self._power = np.zeros(0)
        self._shares: dict[int, float] = {}  # what a correction of a rank leaves

    def matrix(self, name: str, weight: np.ndarray, moment: np.ndarray) -> None:
        self.exact[EXACT + name] = weight.astype(np.float16)
        if self._moment is not moment:  # matrices that read the same have the same
            self._power, self._moment = conditional_power(moment), moment
            ranks = [rank for rank in RANKS if rank < len(moment) // 2]
            rests = [conditional_power(without_leading(moment, rank)).sum() for rank in ranks]
            self._shares = {rank: float(rest / self._power.sum()) for rank, rest in zip(ranks, rests, strict=True)}
        shares = {rank: share for rank, share in self._shares.items() if rank < len(weight) // 2}
        self.left[name] = {str(replace(INT8, rank=rank)): share for rank, share in shares.items()}
        if len(weight) % PALETTE.block == 0:
            # Under GPTQ an error in a column costs what the later columns leave of its power.
            costs = [(dense(compress(weight, s)) - weight) ** 2 @ self._power for s in (PALETTE, INT8)]  # [O] each
            palette = float(costs[0].sum() / max(costs[1].sum(), 1e-30))
            left = {str(replace(PALETTE, rank=rank)): palette * share for rank, share in shares.items()}
            self.left[name] |= {str(PALETTE): palette, **left}

    def rows(self, name: str, factors: np.ndarray) -> None:
        exact = self.exact[EXACT + name]
        assert isinstance(exact, np.ndarray)
        self.exact[EXACT + name] = (exact.astype(np.float32) / factors[:, None]).astype(np.float16)


def _moved_file(source: Source, calibration: Calibration, key: str, report: Progress) -> Path:
    """Every matrix moved and rounded to int8, the same unrounded, and what a correction would leave of its cost."""
    path = cache_folder("tune") / f"{key}.npz"
    if path.exists():
        return path
    tokens = kept_text(source, calibration, lambda done, total: report(done, total, "calibration text"))
    seen = _Seen()
    # Without drift: what makes up for earlier rounding would not be the original when nothing is rounded.
    methods = tuple(m for m in calibration.methods if m != "drift")
    plain = _plain(source.spec, replace(calibration, methods=methods))
    some = tokens.tokens[::SOME]
    tensors = round_model(source, source.spec, plain, some, lambda d, t: report(d, t, "rounding"), seen)
    save_rounded(path, {**tensors, **seen.exact}, {"left": seen.left, "tokens_sha256": tokens.sha256})
    return path
