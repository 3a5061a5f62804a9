"""What each part of a verdict passes and fails by, where a whole run would only reach it by chance."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anechain.judge.compatibility import Machine
from anechain.judge.gate import Result, Step
from anechain.judge.lint import Report
from anechain.judge.ship import Evidence, Part, Thresholds, decide

LIMITS = Thresholds.load()
CLEAN = Report(Path("b"), Machine(), (), {}, (), (), {}, (), (), None)
STEP = Step("p", 0, 1.0, 1.0, 0.0, 5, 5, 9.0, 0.01, True)
NEAR = replace(STEP, got=6, margin=0.039)  # a miss under 4 ulp
RUNS = [(profile, engine) for profile in ("m8", "strict") for engine in ("reference", "reference-stress")]


def result(profile: str, engine: str, *reasons: str, steps: tuple[Step, ...] = (STEP,)) -> Result:
    return Result(profile, engine, steps, True, reasons)


def part(name: str, **evidence: Any) -> Part:
    nothing: dict[str, Any] = dict.fromkeys(("bundle", "base", "lint", "traces", "fixtures", "score"))
    verdict = decide(Evidence(**(nothing | {"gate": ()} | evidence)), LIMITS, "cpu")
    assert not verdict.passed, "most of it was not measured"
    return next(p for p in verdict.parts if p.name == name)


def test_nothing_passes_that_was_not_measured() -> None:
    nothing: dict[str, Any] = dict.fromkeys(("bundle", "base", "lint", "traces", "fixtures", "score"))
    verdict = decide(Evidence(**nothing, gate=()), LIMITS, "cpu")
    assert not any(p.passed for p in verdict.parts) and not verdict.ships and verdict.title.startswith("REVERT (cpu, ")
    assert len(verdict.reasons) == 4 + len(RUNS)


def test_the_gate_is_two_profiles_on_two_engines() -> None:
    assert part("gate", gate=[result(*run) for run in RUNS]).passed
    for i, (profile, engine) in enumerate(RUNS):
        results = [result(*run) for run in RUNS]
        missing = part("gate", gate=results[:i] + results[i + 1 :])
        assert missing.reasons == (f"{profile} was not run on {engine}",)
        far = replace(STEP, got=6)
        results[i] = result(profile, engine, "a top token differs", steps=(far,))
        assert part("gate", gate=results).reasons == (f"{profile} on {engine}: a top token differs",)


@pytest.mark.parametrize("profile", ["m8", "strict"])
def test_near_ties_are_let_pass_of_m8_alone(profile: str) -> None:
    results = [result(*run, *(["1 near-tie"] if run[0] == profile else []), steps=(NEAR,)) for run in RUNS]
    found = part("gate", gate=results)
    assert found.passed == (profile == "m8")
    assert ("m8 on reference: accepted with 1 near-ties" in found.summary) == (profile == "m8")


def test_a_rule_of_lint_that_was_ignored_is_a_reason() -> None:
    assert part("lint", lint=CLEAN).passed
    assert part("lint", lint=replace(CLEAN, ignored={"T5": 0})).reasons == ("the rule T5 was ignored",)
