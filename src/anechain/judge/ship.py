"""One verdict from all evidence: lint, gate, traces, fixtures and score against thresholds, a reason for each failure.

SHIP names the engine and the machine that it was measured on. What was not measured cannot pass: a part without its
evidence is a failed part.
"""

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from anechain.bundle.manifest import MANIFEST, Bundle, sha256_of
from anechain.errors import RequestError
from anechain.judge.ane import AneAnswer, ane_answer
from anechain.judge.evaluate import Comparison
from anechain.judge.gate import Result
from anechain.judge.lint import Report
from anechain.judge.machine import architecture
from anechain.judge.paired import mcnemar, paired_interval
from anechain.judge.record import Record
from anechain.judge.score import ScorePair

HISTORY = "history.jsonl"
LIMITS: dict[str, dict[str, type]] = {
    "lint": {"max_errors": int},
    "gate": {"profiles": list},
    "traces": {"min_valid": float},
    "fixtures": {"max_loss_pp": float, "min_pass_rate": float},
    "score": {"min_speed_ratio": float, "max_accuracy_loss_pp": float, "min_cost_ratio": float},
    "ane": {"min_share": float, "min_speed_ratio": float},
}
# Rates are ratios of whole numbers, so that a loss of exactly the threshold may come out a rounding above it.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Thresholds:
    """The table of `ship.toml`, and the hash of the file."""

    values: Mapping[str, Mapping[str, Any]]
    sha256: str

    @staticmethod
    def load(path: Path | None = None) -> "Thresholds":
        """From a file, or the ones that come with anechain. Raises RequestError with all that is missing or unknown."""
        name = str(path or "ship.toml")
        try:
            content = path.read_bytes() if path else files("anechain").joinpath("data", "ship.toml").read_bytes()
            values = tomllib.loads(content.decode())
        except (OSError, ValueError) as error:
            raise RequestError(f"--thresholds {name} cannot be read ({error}): correct it.") from None
        faults = []
        for table in {**LIMITS, **values}:
            known, given = LIMITS.get(table, {}), values.get(table, {})
            if table not in LIMITS or not isinstance(given, dict):
                faults.append(f"{table} is not a known table")
                continue
            faults += [f"{table}.{key} is not a known threshold" for key in given if key not in known]
            faults += [f"{table}.{key} is missing" for key in known if key not in given]
            faults += [
                f"{table}.{key} = {given[key]!r} is not a {'list' if kind is list else 'number'}"
                for key, kind in known.items()
                if key in given and not _is(given[key], kind)
            ]
        if faults:
            raise RequestError(f"--thresholds {name}: {'; '.join(faults)}; see docs/ship.md.")
        return Thresholds(values, hashlib.sha256(content).hexdigest())


def _is(value: Any, kind: type) -> bool:
    if kind is list:
        return isinstance(value, list) and bool(value) and all(p in ("m8", "strict") for p in value)
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class Evidence:
    """Everything that a verdict is made from; None for what could not be measured."""

    bundle: Bundle
    base: Bundle
    lint: Report | None
    gate: Sequence[Result]
    traces: Mapping[str, Any] | None
    fixtures: Comparison | None
    score: ScorePair | None
    record: Record | None = None  # made on a Mac


@dataclass(frozen=True)
class Part:
    """One part of the verdict; `reasons` are why it fails, empty when it passes."""

    name: str
    summary: str
    reasons: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.reasons


@dataclass(frozen=True)
class Verdict:
    """`engine` ran the fixtures and the score; the numerics are always the reference engine's."""

    parts: tuple[Part, ...]
    engine: str
    architecture: str
    override: str = ""
    ane: AneAnswer = field(default_factory=AneAnswer)

    @property
    def passed(self) -> bool:
        return all(part.passed for part in self.parts)

    @property
    def ships(self) -> bool:
        return self.passed or bool(self.override)

    @property
    def reasons(self) -> list[str]:
        return [f"{part.name}: {reason}" for part in self.parts for reason in part.reasons]

    @property
    def title(self) -> str:
        where = f"({self.engine}, {self.architecture})"
        if self.passed:
            return f"SHIP {where}"
        return f"SHIP {where}, OVERRIDDEN" if self.override else f"REVERT {where}"


def decide(evidence: Evidence, thresholds: Thresholds, engine: str, override: str = "") -> Verdict:
    """The verdict; `engine` is the short name that it carries ("cpu"). An `override` counts only where a part fails."""
    limits = thresholds.values
    parts = (
        _lint(evidence.lint, limits["lint"]),
        _gate(evidence.gate, limits["gate"]),
        _traces(evidence.traces, limits["traces"]),
        _fixtures(evidence.fixtures, limits["fixtures"]),
        _score(evidence.score, limits["score"]),
    )
    failed = [part.name for part in parts if not part.passed and part.name != "score"]
    ane = ane_answer(evidence.bundle, evidence.base, evidence.record, failed, limits["ane"])
    passed = all(part.passed for part in parts)
    return Verdict(parts, engine, architecture(), "" if passed else override, ane)


def _lint(report: Report | None, limits: Mapping[str, Any]) -> Part:
    if report is None:
        return Part("lint", "not run", ("it was not run",))
    errors = [f for f in report.findings if f.severity == "E"]
    summary = f"{len(errors)} findings of severity E, {len(report.findings) - len(errors)} others"
    if len(errors) <= limits["max_errors"] and not report.ignored:
        return Part("lint", summary)
    reasons = [f"{len(errors)} findings of severity E, first {errors[0].rule}: {errors[0].reason}"] if errors else []
    reasons += [f"the rule {rule} was ignored" for rule in report.ignored]
    return Part("lint", summary, tuple(reasons))


def _gate(results: Sequence[Result], limits: Mapping[str, Any]) -> Part:
    wanted = [(profile, engine) for profile in limits["profiles"] for engine in ("reference", "reference-stress")]
    found = {(r.profile, r.engine): r for r in results}
    reasons, words = [], []
    for profile, engine in wanted:
        result = found.get((profile, engine))
        if result is None:
            reasons.append(f"{profile} was not run on {engine}")
            continue
        words.append(f"{profile} on {engine}: {_gate_word(result)}")
        if not result.accepted:
            reasons.append(f"{profile} on {engine}: {'; '.join(result.reasons)}")
    return Part("gate", ", ".join(words) or "not run", tuple(reasons))


def _gate_word(result: Result) -> str:
    if result.passed:
        return "PASS"
    lowest = min(s.cosine for s in result.steps)
    words = f"accepted with {len(result.near_ties)} near-ties and a plain cosine of {lowest:.4f}"
    return words if result.accepted else "FAIL"


def _traces(record: Mapping[str, Any] | None, limits: Mapping[str, Any]) -> Part:
    if record is None:
        return Part("traces", "not run", ("they were not run",))
    summary = f"{record['valid']} of {record['n']} answers are whole and valid"
    if record["valid_rate"] >= limits["min_valid"]:
        return Part("traces", summary)
    first = record["broken"][0]
    return Part("traces", summary, (f"{summary}, first at fault {first['name']}: {'; '.join(first['faults'])}",))


def _fixtures(comparison: Comparison | None, limits: Mapping[str, Any]) -> Part:
    if comparison is None:
        return Part("fixtures", "not compared", ("they were not compared",))
    pairs, interval = comparison.pairs, paired_interval(comparison.pairs)
    mine, theirs = comparison.candidate.rate, comparison.other.rate
    summary = (
        f"{mine:.1%} against {theirs:.1%}, {pairs.lost} lost and {pairs.gained} gained of {pairs.n}: "
        f"{100 * pairs.difference:+.2f} pp (95% {100 * interval.low:+.2f} ... {100 * interval.high:+.2f}), "
        f"McNemar p = {mcnemar(pairs):.3g}; one fixture is {100 / pairs.n:.2f} pp"
    )
    reasons = []
    if comparison.loss_pp > limits["max_loss_pp"] + ROUNDING:
        reasons.append(f"{comparison.loss_pp:.2f} pp were lost, more than {limits['max_loss_pp']:g} pp")
    if mine < limits["min_pass_rate"]:
        reasons.append(f"{mine:.1%} pass, less than {limits['min_pass_rate']:.0%}")
    return Part("fixtures", summary, tuple(reasons))


def _score(pair: ScorePair | None, limits: Mapping[str, Any]) -> Part:
    if pair is None:
        return Part("score", "not measured", ("it was not measured",))
    summary = (
        f"speed {pair.speed_ratio:.2f}x, accuracy {0.0 - pair.accuracy_loss_pp:+.2f} pp, cost {pair.cost_ratio:.2f}x: "
        f"{pair.candidate.total:.3f} against {pair.other.total:.3f}"
    )
    reasons = []
    if not pair.speed_ratio >= limits["min_speed_ratio"]:
        reasons.append(f"speed is {pair.speed_ratio:.2f}x, below {limits['min_speed_ratio']:g}x")
    if not pair.accuracy_loss_pp <= limits["max_accuracy_loss_pp"] + ROUNDING:
        reasons.append(
            f"accuracy loses {pair.accuracy_loss_pp:.2f} pp, more than {limits['max_accuracy_loss_pp']:g} pp"
        )
    if not pair.cost_ratio >= limits["min_cost_ratio"]:
        reasons.append(f"cost is {pair.cost_ratio:.2f}x, below {limits['min_cost_ratio']:g}x")
    return Part("score", summary, tuple(reasons))


def card_data(evidence: Evidence, verdict: Verdict, thresholds: Thresholds, plots: Mapping[str, Any]) -> dict[str, Any]:
    """What card.json holds: the verdict and everything it was made from. `plots` are series that are only drawn."""
    return {
        "verdict": verdict.title, "ships": verdict.ships, "passed": verdict.passed, "override": verdict.override,
        "reasons": verdict.reasons, "engine": verdict.engine, "architecture": verdict.architecture,
        "numerics_engine": "reference", "ane": verdict.ane.to_json(),
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "thresholds": {"values": dict(thresholds.values), "sha256": thresholds.sha256},
        "parts": [{"name": p.name, "passed": p.passed, "summary": p.summary, "reasons": list(p.reasons)}
                  for p in verdict.parts],
        "bundle": _described(evidence.bundle), "base": _described(evidence.base),
        "gate": [r.to_json() for r in evidence.gate],
        "traces": None if evidence.traces is None else dict(evidence.traces),
        "eval": None if evidence.fixtures is None else evidence.fixtures.candidate.to_json()
        | {"against": evidence.fixtures.to_json()},
        "score": None if evidence.score is None else evidence.score.to_json(),
        "lint": None if evidence.lint is None else {
            "findings": len(evidence.lint.findings),
            "errors": [{"rule": f.rule, "package": f.package, "op": f.op, "reason": f.reason}
                       for f in evidence.lint.findings if f.severity == "E"],
        },
        "plots": dict(plots),
    }  # fmt: skip


def _described(bundle: Bundle) -> dict[str, Any]:
    return {
        "name": bundle.path.name, "source": _shown(bundle.source_ref), "family": bundle.spec.family,
        "layers": bundle.spec.n_layers, "hidden_size": bundle.spec.hidden_size, "vocab_size": bundle.spec.vocab_size,
        "recipe": bundle.recipe.name, "context": bundle.context, "prefill": bundle.prefill, "target": bundle.target,
        "packages": len(bundle.blocks) + 1, "manifest_sha256": sha256_of(bundle.path / MANIFEST), "key": bundle.key,
        "adapter_sha256": None if bundle.adapter is None else bundle.adapter.get("sha256"),
        "bytes": sum(r.bytes for r in bundle.files.values()), "tools": dict(bundle.tools),
    }  # fmt: skip


def _shown(ref: str) -> str:
    """A hub id or a name as it is, of a path only its last part: a card leaves the machine."""
    return Path(ref).name if Path(ref).is_absolute() or ref.startswith((".", "~")) or Path(ref).exists() else ref


def append_history(bundle: Bundle, card: Mapping[str, Any]) -> None:
    """One line in the bundle's folder for every verdict: when, what, against what, by which thresholds."""
    line = {key: card[key] for key in ("made", "verdict", "ships", "reasons", "override")} | {
        "base_manifest_sha256": card["base"]["manifest_sha256"],
        "manifest_sha256": card["bundle"]["manifest_sha256"],
        "thresholds_sha256": card["thresholds"]["sha256"],
        "evaluation_sha256": card["eval"]["sha256"] if card["eval"] else None,
    }
    with (bundle.path / HISTORY).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(line, ensure_ascii=False) + "\n")
