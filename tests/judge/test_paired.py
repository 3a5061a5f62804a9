"""Intervals and the exact test, against scipy and statsmodels on random tables."""

import math

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from statsmodels.stats.contingency_tables import mcnemar as their_mcnemar
from statsmodels.stats.proportion import proportion_confint

from anechain.judge.paired import Pairs, mcnemar, normal_quantile, paired_interval, pairs_of, tango_score, wilson
from tests.tolerances import SCORE_NUMERIC, STATISTIC

RNG = np.random.default_rng(11)
TABLES = [Pairs(*map(int, RNG.integers(0, high, 4))) for high in (4, 12, 60, 400) for _ in range(8)]
TABLES = [p for p in TABLES if p.n]


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
def test_wilson_is_that_of_statsmodels(confidence: float) -> None:
    compared = 0
    for n in (1, 2, 7, 50, 150, 1000):
        for passed in {0, 1, n // 3, n - 1, n}:
            theirs = proportion_confint(passed, n, alpha=1 - confidence, method="wilson")
            mine = wilson(passed, n, confidence)
            assert (mine.low, mine.high) == pytest.approx(theirs, abs=STATISTIC)
            assert 0 <= mine.low <= passed / n <= mine.high <= 1
            compared += 1
    assert compared > 20


def test_the_exact_p_value_is_that_of_statsmodels() -> None:
    values = []
    for pairs in TABLES:
        table = [[pairs.both, pairs.gained], [pairs.lost, pairs.neither]]
        if pairs.gained + pairs.lost:  # statsmodels has no answer for none
            assert mcnemar(pairs) == pytest.approx(their_mcnemar(table, exact=True).pvalue, rel=STATISTIC)
            values.append(mcnemar(pairs))
    assert len(values) > 25 and min(values) < 0.05 < max(values)
    assert mcnemar(Pairs(90, 0, 0, 10)) == 1.0
    assert mcnemar(Pairs(0, 3, 0, 0)) == 0.25


def test_the_score_at_no_difference_is_mcnemars_statistic() -> None:
    for pairs in TABLES:
        if pairs.gained + pairs.lost:
            table = [[pairs.both, pairs.gained], [pairs.lost, pairs.neither]]
            theirs = their_mcnemar(table, exact=False, correction=False).statistic
            assert tango_score(pairs, 0.0) ** 2 == pytest.approx(theirs, rel=STATISTIC)


def numeric_score(pairs: Pairs, d: float) -> float:
    """The score statistic with the likelihood maximised by scipy instead of by a formula."""

    def surprise(losing: float) -> float:
        cells = ((pairs.gained, losing + d), (pairs.lost, losing), (pairs.both + pairs.neither, 1 - d - 2 * losing))
        return -sum(count * math.log(max(p, 1e-300)) for count, p in cells if count)

    losing = minimize_scalar(
        surprise, bounds=(max(0.0, -d), (1 - d) / 2), method="bounded", options={"xatol": 1e-14}
    ).x  # fmt: skip
    return (pairs.gained - pairs.lost - pairs.n * d) / math.sqrt(pairs.n * (2 * losing + d - d * d))


def test_the_ends_of_the_paired_interval_are_where_the_score_test_begins_to_reject() -> None:
    z, compared = normal_quantile(0.95), 0
    for pairs in TABLES:
        interval = paired_interval(pairs)
        assert -1 <= interval.low <= pairs.difference <= interval.high <= 1
        for end, wanted in ((interval.low, z), (interval.high, -z)):
            if abs(end) < 1:
                assert numeric_score(pairs, end) == pytest.approx(wanted, abs=SCORE_NUMERIC)
                compared += 1
    assert compared > 50


def test_the_interval_has_a_width_when_nothing_differs() -> None:
    """z^2 / (n + z^2) on either side, where Wald's interval is a point."""
    interval = paired_interval(Pairs(50, 0, 0, 0))
    half = normal_quantile(0.95) ** 2 / (50 + normal_quantile(0.95) ** 2)
    assert (interval.low, interval.high) == pytest.approx((-half, half), abs=STATISTIC)


def test_gains_and_losses_are_not_mixed_up() -> None:
    passed, other = [True, True, False, False, True], [True, False, True, True, True]
    pairs = pairs_of(passed, other)
    assert (pairs.both, pairs.gained, pairs.lost, pairs.neither) == (2, 1, 2, 0)
    assert pairs.difference == pytest.approx(-0.2)
    assert paired_interval(pairs).low == pytest.approx(-paired_interval(pairs_of(other, passed)).high)
    with pytest.raises(ValueError):
        pairs_of([True], [])


def test_nothing_judged_says_nothing() -> None:
    empty = Pairs(0, 0, 0, 0)
    assert (wilson(0, 0).low, wilson(0, 0).high) == (0, 1)
    assert (paired_interval(empty).low, paired_interval(empty).high, empty.difference) == (-1, 1, 0)
