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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from anechain.bake.jobs import tools
from anechain.bake.source import Source
from anechain.bundle.footprint import footprint
from anechain.bundle.gptq import conditional_power, without_leading
from anechain.bundle.recipe import Calibration, Recipe, Rule, Scheme, parse_scheme
from anechain.bundle.rounded import Rounded, save_rounded
from anechain.bundle.spec import ModelSpec, head_pieces, matrices_of
from anechain.bundle.stored import Stored, compress, dense, storage_bytes
from anechain.judge.calibration import BEGINNINGS, QUESTIONS, calibration_text
from anechain.judge.gate import MAX_MEAN_KL, MIN_COSINE, NEAR_TIE_LOGITS, NEAR_TIE_SHARE, NEAR_TIE_ULP
from anechain.judge.prepare import cache_folder, kept_text
from anechain.judge.prompts import CHAT, M8, STRICT
from anechain.judge.rounding import ALGORITHM, round_model
from anechain.judge.search import ASKED, EXACT, LENGTH, SEED, SOME, STARTS, STEPS, Task, plan_of
from anechain.judge.search_pool import Kept, Progress, engine_verdicts, processes, run_all

INT8, LEVEL, FP16 = Scheme(8), Scheme(8, rank=1), Scheme(16)
PALETTE, TABLE = parse_scheme("palette8-group16"), parse_scheme("palette8-group4")
RANKS = (8, 16, 32)
METHODS = ("scales", "gptq", "drift", "level", "weigh")
TEXT_LENGTH = 128  # tokens of each of the model's own texts: many short ones teach more than few long ones
EIGHT_BITS = 0.9  # of the block weights, at least
RUNGS = (0.0, 0.015, 0.03, 0.037, 0.043, 0.065)  # bytes beyond plain int8, of the fp16 bytes
TABLE_SHARE = 0.5  # a table at both ends that holds more than this of all weights is tried at 8 bits, too
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
    plain = _plain(source.spec, calibration)
    plan_of(source, plain, context)  # what cannot be baked is found now, not at the end
    kept = Kept(_key(source, calibration, context))
    moved = _moved_file(source, calibration, kept.key, report)
    blocks = [name for name in matrices_of(source.spec) if name.startswith("layers.")]
    with processes(workers) as pool:
        tasks = [Task(source.ref, lora, context, name, str(moved)) for name in blocks]
        each = run_all(pool, kept, tasks, report)
        sensitivity = {name: each[name]["mean_kl"] for name in blocks}
        left = Rounded(moved).about["left"]
        if linear:
            left = {n: {s: share for s, share in mine.items() if "palette" not in s} for n, mine in left.items()}
        ladder, first = make_ladder(source.spec, plain, sensitivity, left), FIRST
        if not linear and (tables := _tables(source.spec)):
            rounded = replace(plain, name="tuned-table-0", rules=(*tables, *plain.rules))
            smaller = make_ladder(source.spec, rounded, sensitivity, left)
            ladder, first = smaller + ladder, min(FIRST, len(smaller) - 1)
        if not ane and all(inputs % 32 == 0 for _, inputs in (matrices_of(source.spec)[n] for n in blocks)):
            ladder.append(replace(plain, name="tuned-block32", rules=(Rule("layers.*", parse_scheme("int8-block32")),)))
            ladder.sort(key=lambda recipe: footprint(source.spec, recipe).bytes)
        judged: dict[int, Candidate] = {}

        def judge(places: Sequence[int]) -> None:
            tasks = [Task(source.ref, lora, context, recipe=ladder[i]) for i in places]
            found = run_all(pool, kept, tasks, report)
            for i, task in zip(places, tasks, strict=True):
                size = footprint(source.spec, ladder[i])
                judged[i] = Candidate(ladder[i], size.bytes, size.share, size.eight_bit_share, found[task.name])

        def ask(i: int) -> bool:
            task = Task(source.ref, lora, context, recipe=ladder[i])
            judged[i] = replace(judged[i], engine=engine_verdicts(pool, kept, source, task, workers, report))
            return judged[i].passes

        climb(len(ladder), workers, first, judge, lambda i: judged[i].promising, ask)
    candidates = tuple(judged[i] for i in sorted(judged))
    best = min((c for c in candidates if c.passes), key=lambda c: c.bytes, default=None)
    return Tuned(best, candidates, sensitivity, verdict(best, candidates, sensitivity))


def climb(
    count: int,
    at_once: int,
    first: int,
    judge: Callable[[Sequence[int]], None],
    promising: Callable[[int], bool],
    ask: Callable[[int], bool],
) -> None:
    """Bisects a ladder by what `ask` says of the places that are `promising` once they are judged.

    After each round it is asked of the lowest, and of the next only where it has said no.
    """
    passing: set[int] = set()

    def judge_and_ask(places: Sequence[int]) -> None:
        judge(places)
        passing.update(islice(filter(ask, filter(promising, sorted(places))), 1))

    bisect(count, at_once, judge_and_ask, passing.__contains__, first)


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


def _tables(spec: ModelSpec) -> tuple[Rule, ...]:
    """Rules that round the table of both ends, for a model that is mostly that (and where it makes it much smaller)."""
    matrices = {name: shape for name, shape in matrices_of(spec).items() if name != "head"}
    table, weights = matrices["embed"], sum(outputs * inputs for outputs, inputs in matrices.values())
    small = table[0] * table[1] <= TABLE_SHARE * weights
    if (
        not spec.tied
        or small
        or head_pieces(spec)[1] % TABLE.block
        or storage_bytes(table, TABLE) > 1.25 * np.prod(table)
    ):
        return ()
    return Rule("embed", TABLE), Rule("head", TABLE)


def _recipe(plain: Recipe, number: int, chosen: Mapping[str, Scheme]) -> Recipe:
    rules = [Rule(name, scheme) for name, scheme in sorted(chosen.items(), key=lambda c: (str(c[1]), c[0]))]
    return replace(plain, name=f"{plain.name.removesuffix('-0')}-{number}", rules=(*rules, *plain.rules))


def closest_of(candidates: Sequence[Candidate]) -> Candidate:
    """The candidate that got furthest: to the engine and refused by few of its runs, then by its worst mean KL."""

    def distance(c: Candidate) -> tuple[bool, int, float]:
        refused = sum(not run[name]["accepted"] for run in c.engine for name in ("strict", "m8"))
        return not c.promising, refused, max(c.found[name]["mean_kl"] for name in ("search", "strict"))

    return min(candidates, key=distance)


def verdict(best: Candidate | None, candidates: Sequence[Candidate], sensitivity: Mapping[str, float]) -> str:
    """One sentence: what passes; or that nothing does, how close it came, and what blocks."""
    if best is not None:
        return f"{best.recipe.name} passes with {best.share:.3f} of the fp16 bytes"
    closest = closest_of(candidates)
    judged = [(name, closest.found[name]) for name in ("search", "strict", "m8")]
    judged += [(f"{name} on {run[name]['engine']}", run[name]) for run in closest.engine for name in ("strict", "m8")]
    refused = [(where, found) for where, found in judged if not found["accepted"]]
    reasons = [f"{where}: {reason}" for where, found in refused for reason in found["reasons"]]
    if reasons and all("near-ties among" in reason for reason in reasons):  # what the gate says of too many of them
        ties = {(s["prompt"], s["position"]): s["margin"] for _, found in refused for s in found["near_ties"]}
        places = ", ".join(f"{prompt} position {at} (margin {m:.3f})" for (prompt, at), m in list(ties.items())[:5])
        return f"the baseline itself is unstable: nothing but near-ties stands in the way, at {places}"
    loud = ", ".join(sorted(sensitivity, key=lambda n: -sensitivity[n])[:3])
    return (
        f"no recipe passes; the closest, {closest.recipe.name} with {closest.share:.3f} of the fp16 bytes, fails in "
        f"{'; '.join(reasons)}; the matrices that cost most alone are {loud}"
    )


def _key(source: Source, calibration: Calibration, context: int) -> str:
    """Of everything that decides what a search measures."""
    gate = [MIN_COSINE, MAX_MEAN_KL, NEAR_TIE_LOGITS, NEAR_TIE_SHARE, NEAR_TIE_ULP]
    decided = [
        source.fingerprint, asdict(calibration), calibration_text(), tools(), ALGORITHM, context, gate,
        RANKS, str(PALETTE), SOME, SEED, LENGTH, STEPS, STARTS, ASKED, BEGINNINGS, QUESTIONS, M8, STRICT, CHAT,
        sorted((name, hashlib.sha256(text).hexdigest()) for name, text in source.text_files.items()),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()[:32]


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
