"""Tiny models with what the gate needs to judge them: a bundle, and baselines of healthy margins for both profiles.

And ways of spoiling one: programs that are not what is on disk.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from anechain.bundle.manifest import Bundle
from anechain.bundle.program import Function, read_program
from anechain.bundle.spec import ModelSpec
from anechain.judge.baseline import Baseline, Profile, PromptIds, build_baseline, long_positions
from anechain.judge.oracle import Oracle
from anechain.run.chain import Chain
from anechain.run.reference import ReferenceEngine, ReferenceStage
from tests.bundle_maker import TensorSource, make_bundle, tiny_source

CONTEXT, PREFILL = 128, 32
MARGIN = 0.15  # logits between the original's first two tokens: several times what fp16 moves them
CANDIDATES = 48

# Lengths of the greedy prompts: decode alone, a chunk with padding, a full chunk, chunks and what comes after.
LENGTHS: dict[Profile, tuple[int, ...]] = {"m8": (1, 5, 20, 33, 45), "strict": (3, 9, 31, 32, 64)}
STEPS: dict[Profile, int] = {"m8": 3, "strict": 2}


@dataclass(frozen=True)
class Case:
    """A source, its bundle in packages of two layers and one, and what the original says, by profile."""

    source: TensorSource
    bundle: Bundle
    baselines: dict[Profile, Baseline]


def make_case(spec: ModelSpec | str, folder: Path) -> Case:
    source = tiny_source(spec)
    n_layers = source.spec.n_layers
    bundle = make_bundle(source, folder, "fp16", CONTEXT, PREFILL, (2, n_layers - 2) if n_layers > 2 else None)
    return Case(source, bundle, {"m8": make_baseline(source, "m8"), "strict": make_baseline(source, "strict")})


def make_baseline(source: TensorSource, profile: Profile) -> Baseline:
    """Of prompts of random tokens, the first of each length whose margins are MARGIN at least at every position."""
    rng = np.random.default_rng(3)
    vocab = source.spec.vocab_size

    def candidates(length: int, prompt: Callable[[str, np.ndarray], PromptIds]) -> list[PromptIds]:
        ids = rng.integers(0, vocab, (CANDIDATES, length)).astype(np.int32)
        return [prompt(f"{profile}-{length}-{i}", row) for i, row in enumerate(ids)]

    groups = [candidates(n, lambda name, ids: PromptIds(name, ids, STEPS[profile])) for n in LENGTHS[profile]]
    if profile == "strict":
        judged = len(long_positions(CONTEXT))
        groups.append(candidates(CONTEXT, lambda name, ids: PromptIds(name, ids, judged, "forced")))
    oracle = Oracle(source)
    chosen = []
    for group in groups:
        answers = build_baseline(oracle, group, profile, CONTEXT).answers
        chosen.append(next(p for p, a in zip(group, answers, strict=True) if margins(a.logits).min() >= MARGIN))
    return build_baseline(oracle, chosen, profile, CONTEXT)


def margins(logits: np.ndarray) -> np.ndarray:
    """Between the first two of each row [n, V]."""
    top = np.sort(logits, axis=1)[:, -2:]
    return top[:, 1] - top[:, 0]


Mutate = Callable[[Bundle], Chain]
Change = Callable[[Function], Function]


class Altered(ReferenceEngine):
    """The reference engine on programs that are not what is on disk."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self._change = change

    def load(self, packages: Sequence[Path]) -> ReferenceStage:
        programs = [read_program(package) for package in packages]
        return self.load_programs(
            [replace(p, functions={name: self._change(f) for name, f in p.functions.items()}) for p in programs]
        )


def program(change: Change) -> Mutate:
    return lambda bundle: Chain(bundle, Altered(change))


def weight(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Mutate:
    """The constant `name` changed, in every function that has it."""

    def alter(function: Function) -> Function:
        if name not in function.consts:
            return function
        changed = np.ascontiguousarray(change(function.consts[name])).astype(function.consts[name].dtype)
        return replace(function, consts={**function.consts, name: changed})

    return program(alter)
