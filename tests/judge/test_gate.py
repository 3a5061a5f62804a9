"""The gate's verdicts on logits that are written down: what passes, what is no number, the cosines, the divergence."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from anechain.cli.console import print_json
from anechain.judge.baseline import Profile, PromptIds
from anechain.judge.gate import Result, run_gate
from tests.judge.scripted import CONTEXT, VOCAB, Scripted, judged, make_baseline


def as_json(result: Result, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What the command line prints; a NaN or an infinity in it would be no JSON."""

    def refuse(text: str) -> None:
        raise ValueError(f"{text} is not JSON")

    print_json(result.to_json())
    return json.loads(capsys.readouterr().out, parse_constant=refuse)


PROFILES: tuple[Profile, ...] = ("m8", "strict")
both = pytest.mark.parametrize("profile", PROFILES)

# -- a pass ------------------------------------------------------------------------------------------------------------


@both
def test_the_same_logits_pass(profile: Profile, capsys: pytest.CaptureFixture[str]) -> None:
    baseline = make_baseline(profile)
    result = judged(baseline)
    assert result.passed and result.accepted and not result.reasons
    found = as_json(result, capsys)
    expected = {
        "verdict": "pass", "profile": profile, "engine": "scripted", "min_cosine": 1.0, "min_centred_cosine": 1.0,
        "mean_kl": 0.0, "max_kl": 0.0, "top1": 1.0, "canary": True, "positions": 40, "near_ties": [], "misses": [],
        "accepted": True, "reasons": [],
        "free_running": {f"p{i}": baseline.tokens[8 * i : 8 * i + 8].tolist() for i in range(5)},
    }  # fmt: skip
    assert found == {k: pytest.approx(v, abs=1e-12) if isinstance(v, float) else v for k, v in expected.items()}


def test_every_position_is_fed_once_and_in_order() -> None:
    baseline = make_baseline()
    chain = Scripted(baseline, baseline.logits)
    seen: list[tuple[int, int]] = []
    run_gate(chain, baseline, lambda done, total: seen.append((done, total)))  # type: ignore[arg-type]
    assert seen == [(n, 40) for n in range(1, 41)]
    assert [len(ids) for ids in chain.fed] == [n for i in range(5) for n in range(1 + i % 3, 9 + i % 3)]


def test_a_sequence_is_fed_up_to_each_judged_position() -> None:
    baseline = make_baseline("strict", 1, 3)
    ids = np.arange(CONTEXT, dtype=np.int32) % VOCAB
    long = PromptIds("long", ids, 18, "forced")  # 32, and the last 17
    assert long.positions.tolist() == [32, *range(47, 64)]
    both = replace(
        baseline, prompts=(*baseline.prompts, long), positions=np.concatenate([baseline.positions, long.positions]),
        tokens=np.full(21, 1, np.int32), logits=np.tile(np.eye(VOCAB, dtype=np.float32)[1], (21, 1)),
    )  # fmt: skip
    chain = Scripted(both, both.logits)
    result = run_gate(chain, both)  # type: ignore[arg-type]
    assert result.passed and len(result.steps) == 21 and list(result.free_running) == ["p0"]
    assert [len(fed) for fed in chain.fed[3:]] == [33, *range(48, 65)]


# -- what is no number -------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["candidate", "baseline", "both"])
def test_what_is_not_finite_fails(
    side: str, value: float, profile: Profile, capsys: pytest.CaptureFixture[str]
) -> None:
    baseline = make_baseline(profile)
    spoilt = np.array(baseline.logits)
    spoilt[11, 3] = value
    wanted = replace(baseline, logits=baseline.logits if side == "candidate" else spoilt)
    chain = Scripted(baseline, baseline.logits if side == "baseline" else spoilt)
    result = run_gate(chain, wanted)  # type: ignore[arg-type]
    assert not result.passed and not result.accepted
    assert result.reasons == ("1 positions have logits that are not finite or all alike, first p1 position 4",)
    found = as_json(result, capsys)
    assert (found["verdict"], found["min_cosine"], found["max_kl"], found["top1"]) == ("fail", 0.0, None, 39 / 40)
    assert found["misses"][0]["margin"] is None and found["near_ties"] == []
    assert found["free_running"]["p1"] == baseline.tokens[8:11].tolist(), "it cannot choose a fourth token"


@both
def test_logits_that_are_all_alike_fail(profile: Profile) -> None:
    """On either side, and on both, and when they are zeros."""
    baseline = make_baseline(profile)
    for value in (0.0, 3.5):
        flat = np.array(baseline.logits)
        flat[39] = value
        for wanted, got in ((baseline.logits, flat), (flat, baseline.logits), (flat, flat)):
            result = run_gate(Scripted(baseline, got), replace(baseline, logits=wanted))  # type: ignore[arg-type]
            assert [r.partition(",")[0] for r in result.reasons] == [
                "1 positions have logits that are not finite or all alike"
            ]
    everywhere = run_gate(Scripted(baseline, 0 * baseline.logits), baseline)  # type: ignore[arg-type]
    assert everywhere.reasons[0].startswith("40 positions have logits") and not everywhere.canary
    assert all(tokens == [] for tokens in everywhere.free_running.values())


# -- cosines -----------------------------------------------------------------------------------------------------------


def test_a_constant_moves_the_cosine_and_not_the_centred_one() -> None:
    def lift(logits: np.ndarray) -> None:
        logits[13] += 6

    m8, strict = judged(make_baseline("m8"), lift), judged(make_baseline("strict"), lift)
    step = m8.steps[13]
    assert step.cosine < 0.9 and step.centred_cosine == pytest.approx(1, abs=1e-9) and step.kl < 1e-9
    assert m8.reasons == (
        f"1 steps have a cosine below 0.999, lowest {step.cosine:.5f} at {step.prompt} position {step.position}",
    )
    assert not m8.passed and m8.accepted and strict.passed and strict.to_json()["min_cosine"] == step.cosine


def leaning(logits: np.ndarray, row: int, cosine: float, centred: bool) -> np.ndarray:
    """A row with the same first token and just this cosine (of values less their mean) with the given one."""
    a = logits[row].astype(np.float64)
    mean = a.mean() if centred else 0.0
    a = a - mean
    noise = np.random.default_rng(row).standard_normal(VOCAB)
    noise -= noise.mean() if centred else 0.0
    noise[a.argmax()] = 0
    noise -= noise.mean() * centred
    noise -= a * (noise @ a) / (a @ a)
    leaned = a + noise * np.linalg.norm(a) / np.linalg.norm(noise) * np.tan(np.arccos(cosine))
    return (leaned + mean).astype(np.float32)


@both
@pytest.mark.parametrize(("cosine", "passes"), [(0.99902, True), (0.99898, False)])
def test_the_bar_is_0_999(profile: Profile, cosine: float, passes: bool) -> None:
    """On one step in forty; the mean KL divergence stays small."""
    baseline = make_baseline(profile)

    def lean(logits: np.ndarray) -> None:
        logits[21] = leaning(logits, 21, cosine, centred=profile == "strict")

    result = judged(baseline, lean)
    step = result.steps[21]
    found = step.cosine if profile == "m8" else step.centred_cosine
    assert found == pytest.approx(cosine, abs=2e-6) and not step.miss
    kind = "cosine" if profile == "m8" else "centred cosine"
    assert result.passed is passes
    if not passes:
        assert result.reasons == (f"1 steps have a {kind} below 0.999, lowest {cosine:.5f} at p2 position 7",)


@pytest.mark.parametrize(("mean_kl", "passes"), [(0.00099, True), (0.00101, False)])
def test_the_mean_divergence_of_strict(mean_kl: float, passes: bool) -> None:
    """Every step takes probability from its first token until KL(baseline, candidate) is this, by the definition."""
    baseline = make_baseline("strict")

    def divergence(a: np.ndarray, b: np.ndarray) -> float:
        p, q = (np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum() for x in (a, b))
        return float((p * np.log(p / q)).sum())

    def shift(logits: np.ndarray) -> None:
        for row, token in zip(logits, baseline.tokens, strict=True):
            low, high, right = 0.0, 1.0, row.copy()
            for _ in range(40):
                row[token] = right[token] - (low + high) / 2
                low, high = ((low + high) / 2, high) if divergence(right, row) < mean_kl else (low, (low + high) / 2)

    for profile in PROFILES:
        result = judged(replace(baseline, profile=profile), shift)
        assert min(s.centred_cosine for s in result.steps) > 0.999 and not any(s.miss for s in result.steps)
        assert result.to_json()["mean_kl"] == pytest.approx(mean_kl, rel=1e-3)
        assert result.passed is (passes or profile == "m8")
        if not result.passed:
            assert result.reasons == (f"the mean KL divergence is {mean_kl:.2e}, above 1e-03",)
