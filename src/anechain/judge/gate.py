"""The numerics gate: does the chain say what the original says? The candidate is fed the baseline's tokens.

Profile `m8` is the published bar: the same top token and a cosine of at least 0.999 at every step, and the canary.
Profile `strict` judges what matters to a user: centred cosine, KL divergence, and top tokens except at near-ties.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from anechain.errors import BundleError
from anechain.judge.baseline import Answer, Baseline
from anechain.judge.overflow import first_overflow
from anechain.run.chain import Chain

MIN_COSINE = 0.999  # m8: plain; strict: of logits less their mean
MAX_MEAN_KL = 1e-3  # strict, in nats
NEAR_TIE_LOGITS = 0.1  # strict: below this margin the baseline itself could have gone either way
NEAR_TIE_SHARE = 0.02  # strict: more near-ties than this share of the positions fail
NEAR_TIE_ULP = 4  # m8: a miss at a smaller margin, in fp16 units of the top logit, is a near-tie (and still fails)

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Step:
    """One position: what the baseline and the candidate say there."""

    prompt: str
    position: int
    cosine: float
    centred_cosine: float
    kl: float  # of the candidate from the baseline, nats
    wanted: int
    got: int
    margin: float  # between the baseline's first two logits
    ulp: float  # one fp16 unit of the baseline's top logit
    sound: bool  # finite on both sides, and not constant

    @property
    def miss(self) -> bool:
        return self.wanted != self.got

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt, "position": self.position, "cosine": self.cosine,
            "centred_cosine": self.centred_cosine, "kl": self.kl, "wanted": self.wanted, "got": self.got,
            "margin": self.margin, "margin_ulp": self.margin / self.ulp,
        }  # fmt: skip


@dataclass(frozen=True)
class Result:
    """What one run of the gate found."""

    profile: str
    engine: str
    steps: tuple[Step, ...]
    canary: bool
    reasons: tuple[str, ...]  # why it fails; empty when it passes
    free_running: dict[str, list[int]] = field(default_factory=dict)  # prompt -> the candidate's own greedy tokens

    @property
    def passed(self) -> bool:
        return not self.reasons

    @property
    def near_ties(self) -> tuple[Step, ...]:
        """The misses where the baseline's own margin is so small that either token is right."""
        return tuple(s for s in self.steps if s.miss and near_tie(s, self.profile))

    @property
    def accepted(self) -> bool:
        """The project's acceptance: passed, or an `m8` run where tokens differ at near-ties of under 4 fp16 ulp only.

        The plain cosine is not asked for, because a constant added to all logits moves it; the centred one is.
        """
        hard = [s for s in self.steps if s.miss and not near_tie(s, self.profile)]
        close = all(s.sound and s.centred_cosine >= MIN_COSINE for s in self.steps)
        return self.passed or (self.profile == "m8" and not hard and close and self.canary)

    def to_json(self) -> dict[str, Any]:
        kls = [s.kl for s in self.steps]
        return {
            "verdict": "pass" if self.passed else "fail",
            "profile": self.profile,
            "engine": self.engine,
            "min_cosine": min(s.cosine for s in self.steps),
            "min_centred_cosine": min(s.centred_cosine for s in self.steps),
            "mean_kl": float(np.mean(kls)),
            "max_kl": max(kls),
            "top1": sum(not s.miss for s in self.steps) / len(self.steps),
            "canary": self.canary,
            "positions": len(self.steps),
            "near_ties": [s.to_json() for s in self.near_ties],
            "misses": [s.to_json() for s in self.steps if s.miss],
            "accepted": self.accepted,
            "reasons": list(self.reasons),
            "free_running": self.free_running,
        }


def near_tie(step: Step, profile: str) -> bool:
    return step.margin < (NEAR_TIE_ULP * step.ulp if profile == "m8" else NEAR_TIE_LOGITS)


def run_gate(chain: Chain, baseline: Baseline, progress: Progress | None = None) -> Result:
    """Feeds the baseline's contexts to `chain` and judges every position.

    Raises BundleError when the baseline belongs to another model or needs another context than the bundle's.
    """
    bundle = chain.bundle
    baseline.check(bundle.fingerprint)
    if (baseline.context, baseline.vocab_size) != (bundle.context, bundle.spec.vocab_size):
        raise BundleError(
            f"the baseline is for a context of {baseline.context} and {baseline.vocab_size} logits, and {bundle.path} "
            f"has {bundle.context} and {bundle.spec.vocab_size}: bake again to write it anew."
        )
    steps: list[Step] = []
    free_running: dict[str, list[int]] = {}
    overflow = ""
    for answer in baseline.answers:
        session = chain.start()
        pieces = _pieces(answer)
        mine: list[int] = []
        for number, (ids, wanted) in enumerate(zip(pieces, answer.logits, strict=True)):
            logits = chain.feed(session, ids)
            steps.append(compare(answer.name, int(answer.positions[number]), wanted, logits))
            mine.append(steps[-1].got)
            if not overflow and not np.isfinite(logits).all():
                place = first_overflow(chain, pieces)
                overflow = place and f"the first result that is not finite is that of {place}, {_place(steps[-1])}"
            if progress:
                progress(len(steps), len(baseline.positions))
        if answer.kind == "greedy":
            free_running[answer.name] = _alone(chain, pieces[0], answer.tokens.tolist(), mine)
    found = judged(baseline, steps, chain.engine.name)
    return replace(found, reasons=(*found.reasons, overflow) if overflow else found.reasons, free_running=free_running)


def judged(baseline: Baseline, steps: Sequence[Step], engine: str) -> Result:
    """The verdict on every position of a baseline, whoever has computed them."""
    canary = steps[0].got == baseline.canary
    return Result(baseline.profile, engine, tuple(steps), canary, tuple(_reasons(baseline.profile, steps, canary)))


def _pieces(answer: Answer) -> list[np.ndarray]:
    """The answer's ids, cut after each judged position."""
    starts = [0, *(answer.positions + 1).tolist()]
    return [answer.ids[start:end] for start, end in pairwise(starts)]


def compare(prompt: str, position: int, wanted: np.ndarray, got: np.ndarray) -> Step:
    """The baseline's logits [V] against the candidate's, in float64.

    The cosine has a blind spot (a constant added to all logits moves it and no probability), hence the centred one.
    Anything not finite, on either side, and logits that are all alike are unsound whatever they equal.
    """
    a, b = wanted.astype(np.float64), got.astype(np.float64)
    sound = bool(np.isfinite(a).all() and np.isfinite(b).all() and np.ptp(a) > 0 and np.ptp(b) > 0)
    first, second = np.sort(wanted)[-1:-3:-1].astype(np.float64) if sound else (np.nan, np.nan)
    ulp = float(np.spacing(np.float16(np.abs(first)))) if sound else np.nan
    top = (int(np.argmax(wanted)), int(np.argmax(got))) if sound else (-1, -2)
    if not sound:
        return Step(prompt, position, 0.0, 0.0, np.inf, *top, np.nan, np.nan, False)
    log_p, log_q = _log_softmax(a), _log_softmax(b)
    kl = float(np.sum(np.exp(log_p) * (log_p - log_q)))
    return Step(
        prompt, position, _cosine(a, b), _cosine(a - a.mean(), b - b.mean()), kl, *top, float(first - second), ulp, True
    )


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


def _alone(chain: Chain, prompt: np.ndarray, wanted: list[int], mine: list[int]) -> list[int]:
    """What the candidate says when it is fed its own tokens: known up to and including its first miss, then run on.

    It ends before the first token that it cannot choose, because its logits are unsound.
    """
    miss = next((i for i, (a, b) in enumerate(zip(wanted, mine, strict=True)) if a != b), None)
    if miss is None:
        return mine
    if mine[miss] < 0:
        return mine[:miss]
    own = mine[: miss + 1]
    session = chain.start()
    fed = [*prompt.tolist(), *own]
    while len(own) < len(mine):
        logits = chain.feed(session, fed)
        if not np.isfinite(logits).all():
            break
        own.append(int(np.argmax(logits)))
        fed = own[-1:]
    return own


def _reasons(profile: str, steps: Sequence[Step], canary: bool) -> list[str]:
    """Why the run fails, a sentence each. Written so that a NaN fails: it is never below, or within, anything."""
    reasons = []
    sound = [s for s in steps if s.sound]
    misses = [s for s in sound if s.miss]
    if unsound := [s for s in steps if not s.sound]:
        reasons.append(
            f"{len(unsound)} positions have logits that are not finite or all alike, first {_place(unsound[0])}"
        )
    if profile == "m8":
        if not canary:
            reasons.append("the canary, the first token of the first prompt, is another one")
        low = [s for s in sound if not s.cosine >= MIN_COSINE]
        hard = misses
    else:
        low = [s for s in sound if not s.centred_cosine >= MIN_COSINE]
        hard = [s for s in misses if not near_tie(s, profile)]
        mean_kl = float(np.mean([s.kl for s in sound])) if sound else 0.0
        if not mean_kl <= MAX_MEAN_KL:
            reasons.append(f"the mean KL divergence is {mean_kl:.2e}, above {MAX_MEAN_KL:.0e}")
        if len(misses) - len(hard) > NEAR_TIE_SHARE * len(steps):
            reasons.append(f"{len(misses) - len(hard)} near-ties among {len(steps)} positions are more than 2%")
    if hard:
        ties = sum(near_tie(s, profile) for s in hard)
        note = f" ({ties} of them a near-tie)" if ties else ""
        reasons.append(f"{len(hard)} of {len(steps)} top tokens differ{note}, first {_place(hard[0])}")
    if low:
        kind = "cosine" if profile == "m8" else "centred cosine"
        worst = min(low, key=lambda s: s.cosine if profile == "m8" else s.centred_cosine)
        value = worst.cosine if profile == "m8" else worst.centred_cosine
        reasons.append(f"{len(low)} steps have a {kind} below {MIN_COSINE}, lowest {value:.5f} at {_place(worst)}")
    return reasons


def _place(step: Step) -> str:
    return f"{step.prompt} position {step.position}"
