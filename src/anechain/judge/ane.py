"""What a verdict may say of the ANE: nothing, without a record that was made on a Mac of bundles of this very form.

A record holds trials of forms (recipe, layers a package, target ...), not of one bundle's weights. So it can say where
the programs ran and how fast; whether the answers are right is still for the gate and the fixtures to say.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anechain.bundle.manifest import Bundle
from anechain.judge.measured import configuration_of, same_form
from anechain.judge.record import Record, Trial
from anechain.judge.score import FIRST_TOKEN_MS, TOK_PER_S

NOT_MEASURED = "not measured"
_SPEED = ("first_token_ms", "decode_tok_per_s")


@dataclass(frozen=True)
class AneAnswer:
    """`title` is "not measured", or a verdict: "SHIP (ane, macOS 26.0.1, M5 Pro)". `figures` are the record's."""

    title: str = NOT_MEASURED
    reasons: tuple[str, ...] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"verdict": self.title, "reasons": list(self.reasons), "figures": dict(self.figures)}


def ane_answer(
    candidate: Bundle, base: Bundle, record: Record | None, failed: Sequence[str], limits: Mapping[str, Any]
) -> AneAnswer:
    """`failed` names the parts of the verdict that failed and that a record cannot overrule: all but the score.

    `limits` are `min_share`, of the plan's cost that has to be on the ANE, and `min_speed_ratio`.
    """
    if record is None:
        return AneAnswer()
    reasons = [f"{part} failed" for part in failed]
    mine, theirs = (trial_of(record, bundle) for bundle in (candidate, base))
    for trial, bundle in ((mine, candidate), (theirs, base)):
        name = bundle.path.name
        if trial is None:
            reasons.append(
                f"the record has no trial of {name}'s form with packages of coremltools "
                f"{bundle.tools.get('coremltools', '?')} and the model {_model(bundle)}"
            )
        elif missing := [key for key in _SPEED if not (trial.bench.get(key) or 0) > 0]:
            reasons.append(f"the record has no {', '.join(missing)} of {name}'s form")
    figures: dict[str, Any] = {"os": record.os, "chip": record.chip, "coremltools": record.coremltools}
    if mine is not None:
        share = engine_share(mine)
        figures |= {"engine_share": share, "bench": dict(mine.bench), "handoff": mine.handoff}
        if mine.diverged:
            reasons.append(f"the form diverged there: {mine.diverged}")
        if mine.gate is None or mine.gate.verdict != "pass":
            reasons.append("the form did not pass the gate there")
        if share is None:
            reasons.append("the record has no compute plan of the form")
        elif share < limits["min_share"]:
            reasons.append(f"{share:.1%} of the plan's cost is on the ANE, less than {limits['min_share']:.0%}")
    if mine is not None and theirs is not None and not any("has no" in reason for reason in reasons):
        ratio = _speed(mine) / _speed(theirs)
        figures["speed_ratio"] = ratio
        if not ratio >= limits["min_speed_ratio"]:
            reasons.append(f"speed there is {ratio:.2f}x, below {limits['min_speed_ratio']:g}x")
    word = "REVERT" if reasons else "SHIP"
    return AneAnswer(f"{word} (ane, {record.os}, {record.chip})", tuple(reasons), figures)


def trial_of(record: Record, bundle: Bundle) -> Trial | None:
    """The worst trial of this bundle's form, model and context: one that diverged before one that did not."""
    if record.coremltools != bundle.tools.get("coremltools"):
        return None
    tried = [
        trial
        for trial in record.trials
        if same_form(trial.configuration, configuration_of(bundle))
        and (trial.configuration.model, trial.configuration.context) == (_model(bundle), bundle.context)
    ]
    return min(tried, key=lambda trial: ("broken", "unknown", "works").index(trial.status), default=None)


def engine_share(trial: Trial) -> float | None:
    """The share of the plan's cost, over all packages and functions, that Core ML puts on the ANE; None without one."""
    placed = [
        device
        for functions in trial.plan.values()
        for ops in functions.values()
        for device in ops.values()
        if device.cost is not None
    ]
    total = sum(device.cost or 0.0 for device in placed)
    return sum(device.cost or 0.0 for device in placed if device.device == "NE") / total if total else None


def _model(bundle: Bundle) -> str:
    """As records write it: a name, never a path."""
    return Path(bundle.source_ref).name


def _speed(trial: Trial) -> float:
    """The score's own formula (docs/score.md)."""
    first, pace = (float(trial.bench[key] or 0.0) for key in _SPEED)
    return (FIRST_TOKEN_MS / first) * (pace / TOK_PER_S)
