"""What the search for a recipe measures: a plain callable on picklable tasks, so that any executor can run them.

Sensitivity is measured on the logits of the whole model: the KL divergence from the original, over texts of the
search's own, when one matrix alone is rounded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from anechain.bake.jobs import PREFILL, Plan, make_plan
from anechain.bake.lora import open_merged
from anechain.bake.source import Source
from anechain.bundle.manifest import open_bundle
from anechain.bundle.recipe import Recipe
from anechain.bundle.rounded import Rounded
from anechain.bundle.spec import matrices_of
from anechain.bundle.stored import Stored, compress, dense
from anechain.judge.baseline import Answer, Baseline, PromptIds, build_baseline
from anechain.judge.calibration import BEGINNINGS, QUESTIONS, own_words
from anechain.judge.gate import Step, compare, judged, run_gate
from anechain.judge.oracle import Oracle
from anechain.judge.prepare import (
    PROFILES,
    chat_encoder,
    exam_baseline,
    kept_baseline,
    tokenizer_of,
    with_rounding,
    with_stream_scale,
)
from anechain.judge.rounding import RoundedSource
from anechain.run.chain import Chain
from anechain.run.reference import ReferenceEngine

SEED, LENGTH, STEPS = 90210, 80, 16  # the search's own texts, none of which is calibrated on
STARTS, ASKED = BEGINNINGS[1::4], QUESTIONS[1::2]  # how they begin
SOME = 3  # every third text is enough to tell one matrix from another
EXACT = "exact|"  # in front of a matrix that was moved and not rounded, in a file of both


@dataclass(frozen=True)
class Task:
    """One measurement. With a `matrix`: what it does when it alone is rounded, as in `rounded_file`. With a `recipe`:
    what the whole recipe does, to the search's texts and, as an exam, to those of the gate's profiles, in float32
    arithmetic; with a `bundle`, too, which was baked by the recipe: the gate's verdicts on the reference engine.
    """

    ref: str
    lora: str | None
    context: int
    matrix: str = ""
    rounded_file: str = ""
    recipe: Recipe | None = None
    bundle: str = ""
    stress: bool = False  # of the reference engine

    @property
    def name(self) -> str:
        how = f" on reference{' under stress' if self.stress else ''}" if self.bundle else ""
        return f"{self.recipe.name}{how}" if self.recipe else self.matrix


def measure(task: Task) -> dict[str, Any]:
    """Runs one task in this process; the result can be written as JSON."""
    if task.recipe is None:
        return _measure_matrix(task)
    return _measure_bundle(task) if task.bundle else _measure_recipe(task, task.recipe)


class _TablesKept:
    """A source that keeps its embedding and head, which every measurement reads."""

    def __init__(self, source: Source) -> None:
        self._source, self._tables = source, dict[str, np.ndarray]()
        self.spec, self.ref = source.spec, source.ref
        self.fingerprint, self.text_files = source.fingerprint, source.text_files

    def tensor(self, name: str) -> np.ndarray:
        if name not in ("embed", "head"):
            return self._source.tensor(name)
        if name not in self._tables:
            self._tables[name] = self._source.tensor(name).view()
            self._tables[name].flags.writeable = False
        return self._tables[name]


@cache
def _source(ref: str, lora: str | None) -> Source:
    return open_merged(ref, lora)


@cache
def _with_tables(ref: str, lora: str | None) -> Source:
    return _TablesKept(_source(ref, lora))


@cache
def _search(ref: str, lora: str | None) -> Baseline:
    name = f"search {SEED} {LENGTH} {STEPS} {' '.join(map(repr, (*STARTS, *ASKED)))}"
    return kept_baseline(_source(ref, lora), name, search_baseline)


def search_baseline(source: Source) -> Baseline:
    """The original's greedy steps after texts of its own: beginnings that no profile has, drawn on to LENGTH tokens."""
    tokenizer = tokenizer_of(source)
    starts = [np.array(tokenizer.encode(words), np.int32) for words in STARTS]
    if (chat := chat_encoder(tokenizer)) is not None:
        starts += [np.array(chat(words), np.int32) for words in ASKED]
    length = min(LENGTH, source.spec.max_context - STEPS)
    texts = own_words(source, starts, length, SEED, tokenizer.n_ids, None)
    prompts = [PromptIds(f"search-{i:02d}", ids, STEPS) for i, ids in enumerate(texts)]
    return build_baseline(Oracle(source), prompts, "strict", length + STEPS)


def steps_of(oracle: Oracle, answers: Sequence[Answer], hidden: list[np.ndarray] | None = None) -> list[Step]:
    """Every position of the answers, teacher-forced, in float32; `hidden` is what leaves the last layer, if known."""
    if hidden is None:
        hidden = oracle.forward([a.ids for a in answers])
    return [
        compare(a.name, int(p), wanted, got)
        for a, rows in zip(answers, hidden, strict=True)
        for p, wanted, got in zip(a.positions, a.logits, oracle.logits(rows[a.positions]), strict=True)
    ]


@cache
def _moved(ref: str, lora: str | None, rounded_file: str) -> tuple[dict[str, Stored], list[list[np.ndarray]]]:
    """The model with everything moved and nothing rounded, and what enters each of its layers on the search's texts."""
    rounded = Rounded(Path(rounded_file))
    names = [name for name in sorted(rounded.names) if not name.startswith(EXACT)]
    exact = {name: rounded.tensor(EXACT + name if EXACT + name in rounded else name) for name in names}
    source = _source(ref, lora)
    entering: list[list[np.ndarray]] = []
    oracle = Oracle(RoundedSource(source, source.spec, exact), keep_bytes=0)
    oracle.forward([a.ids for a in _search(ref, lora).answers[::SOME]], record=lambda _, rows: entering.append(rows))
    return exact, entering


def _measure_matrix(task: Task) -> dict[str, Any]:
    source, baseline = _with_tables(task.ref, task.lora), _search(task.ref, task.lora)
    exact, entering = _moved(task.ref, task.lora, task.rounded_file)
    swapped = {**exact, task.matrix: Rounded(Path(task.rounded_file)).tensor(task.matrix)}
    oracle = Oracle(RoundedSource(source, source.spec, swapped), keep_bytes=0)
    layer = int(task.matrix.split(".")[1])
    steps = steps_of(oracle, baseline.answers[::SOME], oracle.resumed(layer, entering[layer]))
    return {"mean_kl": float(np.mean([s.kl for s in steps]))}


def plan_of(source: Source, recipe: Recipe, context: int) -> Plan:
    """The plan by which `anechain bake` bakes the recipe, with all else at its default (no prefill where 64 does not
    divide the context). Raises RequestError for a context that cannot be baked.
    """
    return make_plan(source, recipe, context, PREFILL if context % PREFILL == 0 else 0, "macOS15", None)


def rounded_plan(source: Source, recipe: Recipe, context: int) -> Plan:
    """The same with its weights rounded, or taken from what is kept of that."""
    return with_rounding(with_stream_scale(plan_of(source, recipe, context), source), source)


def _measure_recipe(task: Task, recipe: Recipe) -> dict[str, Any]:
    """Rounds the whole model, or takes what is kept of that, which is also what a bake of this recipe will take."""
    source = _source(task.ref, task.lora)
    plan = rounded_plan(source, recipe, task.context)
    assert plan.rounded_file is not None
    rounded = Rounded(Path(plan.rounded_file))
    tensors = {name: rounded.tensor(name) for name in rounded.names} | _table(source, recipe)
    oracle = Oracle(RoundedSource(_with_tables(task.ref, task.lora), plan.spec, tensors))
    found: dict[str, Any] = {}
    baselines = {"search": _search(task.ref, task.lora)}
    baselines |= {profile: exam_baseline(source, profile, task.context) for profile in PROFILES}
    for name, baseline in baselines.items():
        found[name] = judged(baseline, steps_of(oracle, baseline.answers), "float32").to_json()
        del found[name]["free_running"]
    return found


def _table(source: Source, recipe: Recipe) -> dict[str, Stored]:
    """The table of both ends where the recipe rounds it (to nearest; rounded weights that are kept do not have it)."""
    outputs, inputs = matrices_of(source.spec)["embed"]
    ends = [recipe.scheme_for(name, outputs * inputs) for name in ("embed", "head")]
    if not source.spec.tied or ends[0] != ends[1] or ends[0].bits == 16:
        return {}
    return {"embed": dense(compress(source.tensor("embed"), ends[0], "embed"))}


def _measure_bundle(task: Task) -> dict[str, Any]:
    source, bundle = _source(task.ref, task.lora), open_bundle(Path(task.bundle))
    found: dict[str, Any] = {}
    for profile in PROFILES:
        chain = Chain(bundle, ReferenceEngine(task.stress))
        found[profile] = run_gate(chain, exam_baseline(source, profile, task.context)).to_json()
        del found[profile]["free_running"]
    return found
