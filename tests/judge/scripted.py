"""A chain double whose logits are written down, by context, and baselines for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from anechain.judge.baseline import Baseline, Profile, PromptIds
from anechain.judge.gate import Result, run_gate

CONTEXT, VOCAB, FINGERPRINT = 64, 40, "f" * 64


@dataclass
class Session:
    position: int = 0
    ids: tuple[int, ...] = ()


class Scripted:
    """A chain that answers the baseline's contexts with `logits` [T, V], any other with the token `beyond`, or NaN."""

    def __init__(
        self, baseline: Baseline, logits: np.ndarray, beyond: Callable[[tuple[int, ...]], int | None] = len
    ) -> None:
        spec = SimpleNamespace(vocab_size=VOCAB)
        self.bundle: Any = SimpleNamespace(fingerprint=FINGERPRINT, context=CONTEXT, path=Path("b"), spec=spec)
        self.engine = SimpleNamespace(name="scripted")
        self.head, self.stages, self.packages = None, [], []
        self.fed: list[tuple[int, ...]] = []
        self._beyond = beyond
        rows = iter(logits)
        self._said = {tuple(a.ids[: p + 1].tolist()): next(rows) for a in baseline.answers for p in a.positions}
        assert len(self._said) == len(logits), "two contexts are the same"

    def start(self) -> Session:
        return Session()

    def feed(self, session: Session, ids: Sequence[int]) -> np.ndarray:
        session.ids += tuple(int(i) for i in ids)
        session.position = len(session.ids)
        assert len(ids) and session.position <= CONTEXT and min(session.ids) >= 0
        self.fed.append(session.ids)
        if session.ids in self._said:
            return self._said[session.ids].copy()
        token = self._beyond(session.ids)
        return np.full(VOCAB, np.nan, np.float32) if token is None else np.eye(VOCAB, dtype=np.float32)[token]


def make_baseline(profile: Profile = "m8", prompts: int = 5, steps: int = 8) -> Baseline:
    """Logits of spread 3; the first token leads by 2, and no two prompts are alike."""
    rng = np.random.default_rng(2)
    ids = [PromptIds(f"p{i}", np.array([i, 7, 9], np.int32)[: 1 + i % 3], steps) for i in range(prompts)]
    logits = np.clip(3 * rng.standard_normal((prompts * steps, VOCAB)), -8, 8).astype(np.float32)
    tokens = rng.integers(0, VOCAB, len(logits)).astype(np.int32)
    logits[np.arange(len(logits)), tokens] = 10.0
    positions = np.concatenate([p.positions for p in ids])
    return Baseline(profile, FINGERPRINT, CONTEXT, tuple(ids), positions, tokens, logits)


def close_call(baseline: Baseline, row: int, first: float, second: float) -> Baseline:
    """The baseline with token 4 before token 30 in one row, and all others at least 3 logits behind."""
    logits, tokens = np.array(baseline.logits), np.array(baseline.tokens)
    logits[row] = np.minimum(logits[row], first - 3)
    logits[row, [4, 30]] = first, second
    tokens[row] = 4
    return replace(baseline, logits=logits, tokens=tokens)


def judged(baseline: Baseline, change: Callable[[np.ndarray], None] | None = None, **options: Any) -> Result:
    """The gate on a candidate whose logits are the baseline's, changed in place by `change`."""
    logits = np.array(baseline.logits)
    if change:
        change(logits)
    return run_gate(Scripted(baseline, logits, **options), baseline)  # type: ignore[arg-type]


def swap(row: int, a: int, b: int) -> Callable[[np.ndarray], None]:
    def change(logits: np.ndarray) -> None:
        logits[row, [a, b]] = logits[row, [b, a]]

    return change
