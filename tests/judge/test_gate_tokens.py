"""The gate's verdicts on top tokens: misses, near-ties, the canary; what it refuses; what it says on its own."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from anechain.errors import BundleError
from anechain.judge.gate import run_gate
from tests.judge.scripted import CONTEXT, VOCAB, Scripted, close_call, judged, make_baseline, swap

# The top logit, the second, the margin in units of the top one's fp16 step: 2^-7 from 8 to 16, 2^-6 from 16 to 32,
# 2^-9 from 2 to 4, whatever the sign.
ULP = [
    (10.0, 9.96875, 4.0),
    (10.0, 9.9765625, 3.0),
    (10.0, 9.97, 3.84),
    (15.99, 15.96, 3.84),
    (16.0, 15.95, 3.2),
    (16.0, 15.93, 4.48),
    (-3.0, -3.007, 3.584),
    (-3.0, -3.008, 4.096),
]


@pytest.mark.parametrize(("first", "second", "ulp"), ULP)
def test_a_miss_under_4_ulp_fails_m8_and_is_accepted(first: float, second: float, ulp: float) -> None:
    baseline = close_call(make_baseline(), 17, first, second)
    result = judged(baseline, swap(17, 4, 30))
    found = result.to_json()
    tie = ulp < 4
    note = " (1 of them a near-tie)" if tie else ""
    assert result.reasons == (f"1 of 40 top tokens differ{note}, first p2 position 3",)
    assert found["misses"][0]["margin_ulp"] == pytest.approx(ulp, rel=1e-3)
    assert (found["misses"][0]["wanted"], found["misses"][0]["got"]) == (4, 30)
    assert found["near_ties"] == (found["misses"] if tie else [])
    assert found["top1"] == 39 / 40 and not result.passed and result.accepted is tie


def test_the_margin_is_the_originals() -> None:
    """However sure the candidate is, and however torn."""
    for margin, ahead, tie in ((0.02, 0.3, True), (0.3, 0.02, False)):

        def change(logits: np.ndarray, ahead: float = ahead) -> None:
            logits[17, 30] = 10 + ahead

        result = judged(close_call(make_baseline(), 17, 10.0, 10 - margin), change)
        (miss,) = (s for s in result.steps if s.miss)
        assert miss.margin == pytest.approx(margin, abs=1e-6) and miss.kl > 0.001
        assert (len(result.near_ties), result.accepted) == (int(tie), tie)


def test_one_real_miss_among_near_ties_is_not_accepted() -> None:
    baseline = close_call(close_call(make_baseline(), 17, 10.0, 9.99), 25, 10.0, 9.5)

    def change(logits: np.ndarray) -> None:
        swap(17, 4, 30)(logits)
        swap(25, 4, 30)(logits)

    result = judged(baseline, change)
    assert result.reasons == ("2 of 40 top tokens differ (1 of them a near-tie), first p2 position 3",)
    assert len(result.near_ties) == 1 and not result.accepted


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_near_tie_beside_a_low_cosine_is_accepted_only_where_all_logits_are_off_alike(everywhere: bool) -> None:
    baseline = close_call(make_baseline(), 17, 10.0, 9.99)

    def change(logits: np.ndarray) -> None:
        swap(17, 4, 30)(logits)
        logits[3, slice(None) if everywhere else slice(0, None, 2)] += 1

    result = judged(baseline, change)
    assert len(result.reasons) == 2 and len(result.near_ties) == 1 and "cosine below 0.999" in result.reasons[1]
    assert not result.passed and result.accepted is everywhere


@pytest.mark.parametrize(("ties", "passes"), [(2, True), (3, False)])
def test_near_ties_of_strict_are_at_most_two_in_a_hundred(ties: int, passes: bool) -> None:
    baseline = make_baseline("strict", 10, 10)
    rows = [5, 44, 81][:ties]
    for row in rows:
        baseline = close_call(baseline, row, 10.0, 9.901)

    def change(logits: np.ndarray) -> None:
        for row in rows:
            swap(row, 4, 30)(logits)

    result = judged(baseline, change)
    assert len(result.steps) == 100 and result.passed is result.accepted is passes
    assert result.reasons == (() if passes else ("3 near-ties among 100 positions are more than 2%",))
    assert [s.position for s in result.near_ties] == [int(baseline.positions[row]) for row in rows]
    assert all(0.0989 < s.margin < 0.0991 for s in result.near_ties)


def test_a_margin_above_a_tenth_is_no_near_tie_in_strict() -> None:
    baseline = close_call(make_baseline("strict", 10, 10), 44, 10.0, 9.899)
    result = judged(baseline, swap(44, 4, 30))
    assert result.reasons == ("1 of 100 top tokens differ, first p4 position 5",) and result.near_ties == ()
    m8 = judged(replace(baseline, profile="m8"), swap(44, 4, 30))
    assert m8.reasons == result.reasons, "101 thousandths are 13 fp16 steps of 10"


@pytest.mark.parametrize("row", [0, 8])
def test_the_canary_is_the_first_token_of_the_first_prompt(row: int) -> None:
    """Also where it is a near-tie: then nothing else is wrong, and the run is not accepted all the same."""
    result = judged(close_call(make_baseline(), row, 10.0, 9.99), swap(row, 4, 30))
    lost = ("the canary, the first token of the first prompt, is another one",) if row == 0 else ()
    place = "p1 position 1" if row else "p0 position 0"
    assert result.reasons == (*lost, f"1 of 40 top tokens differ (1 of them a near-tie), first {place}")
    assert result.canary is result.to_json()["canary"] is result.accepted is (row > 0)


def test_strict_knows_no_canary_but_shows_it() -> None:
    """Its first token is a token like the others: a near-tie there is one of the 2%."""
    baseline = close_call(make_baseline("strict", 10, 10), 0, 10.0, 9.95)
    result = judged(baseline, swap(0, 4, 30))
    assert result.passed and not result.canary and len(result.near_ties) == 1
    assert not judged(replace(baseline, profile="m8"), swap(0, 4, 30)).accepted


def test_a_strict_run_that_fails_is_not_accepted() -> None:
    """Whatever its plain cosines are."""
    baseline = make_baseline("strict")

    def flatten(logits: np.ndarray) -> None:
        logits[np.arange(40), baseline.tokens] -= 0.2

    result = judged(baseline, flatten)
    assert result.reasons and result.reasons[0].startswith("the mean KL divergence is")
    assert min(s.cosine for s in result.steps) > 0.999 and not result.accepted


# -- what it is compared with ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"fingerprint": "0" * 64},
            r"^the baseline was made from another source \(fingerprint 000000000000, the bundle",
        ),
        ({"context": 32}, r"^the baseline is for a context of 32 and 40 logits, and b has 64 and 40: bake again"),
        ({"logits": np.zeros((40, 39), np.float32)}, r"^the baseline is for a context of 64 and 39 logits, and b has"),
    ],
    ids=["source", "context", "vocabulary"],
)
def test_a_baseline_of_something_else_is_refused(change: dict[str, Any], message: str) -> None:
    baseline = make_baseline()
    chain = Scripted(baseline, baseline.logits)
    with pytest.raises(BundleError, match=message):
        run_gate(chain, replace(baseline, **change))  # type: ignore[arg-type]
    assert chain.fed == []


# -- its own way -------------------------------------------------------------------------------------------------------


def test_after_a_miss_the_candidate_goes_its_own_way() -> None:
    baseline = make_baseline()
    right = baseline.tokens.reshape(5, 8).tolist()
    wrong = (right[1][2] + 1) % VOCAB

    def change(logits: np.ndarray) -> None:
        logits[10, wrong] = 11

    result = judged(baseline, change)
    # Fed with the baseline's tokens it goes on as the baseline; with its own it says how many tokens it was fed.
    assert sum(s.miss for s in result.steps) == 1
    assert result.free_running == {
        "p0": right[0], "p1": [*right[1][:2], wrong, 5, 6, 7, 8, 9], "p2": right[2], "p3": right[3], "p4": right[4],
    }  # fmt: skip
    stopped = judged(baseline, change, beyond=lambda ids: 33 if len(ids) < 6 else None)
    assert stopped.free_running["p1"] == [*right[1][:2], wrong, 33]


def test_a_miss_in_the_last_place_of_the_context() -> None:
    """There is no room to feed the candidate's own token, and no need."""
    baseline = make_baseline(prompts=1)
    ids = np.arange(CONTEXT - 7, dtype=np.int32) % VOCAB
    prompt = replace(baseline.prompts[0], ids=ids)
    baseline = replace(baseline, prompts=(prompt,), positions=prompt.positions)
    assert baseline.positions[-1] == CONTEXT - 1
    token = int(baseline.tokens[7])
    result = judged(baseline, swap(7, token, (token + 1) % VOCAB))
    assert result.free_running["p0"] == [*baseline.tokens[:7].tolist(), (token + 1) % VOCAB]
