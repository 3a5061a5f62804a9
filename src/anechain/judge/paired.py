"""What n fixtures can say: intervals for a pass rate and for the difference of two that were judged on the same ones.

Exact where that is cheap. All of it is plain arithmetic; the tests hold it against scipy and statsmodels.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A confidence interval, both ends in fractions of 1."""

    low: float
    high: float


@dataclass(frozen=True)
class Pairs:
    """A 2x2 table of paired outcomes: how many fixtures both passed, one of the two passed, neither passed."""

    both: int
    gained: int  # the candidate passed, the other did not
    lost: int  # the other passed, the candidate did not
    neither: int

    @property
    def n(self) -> int:
        return self.both + self.gained + self.lost + self.neither

    @property
    def difference(self) -> float:
        """The candidate's pass rate less the other's, in fractions of 1; 0 when nothing was judged."""
        return (self.gained - self.lost) / self.n if self.n else 0.0


def pairs_of(candidate: Sequence[bool], other: Sequence[bool]) -> Pairs:
    """The table of two sequences of outcomes on the same fixtures, in the same order. Raises ValueError."""
    counts = {(a, b): 0 for a in (True, False) for b in (True, False)}
    for a, b in zip(candidate, other, strict=True):
        counts[bool(a), bool(b)] += 1
    return Pairs(counts[True, True], counts[True, False], counts[False, True], counts[False, False])


def normal_quantile(confidence: float) -> float:
    """The two-sided normal quantile: 1.96 for 0.95."""
    return NormalDist().inv_cdf((1 + confidence) / 2)


def wilson(passed: int, n: int, confidence: float = CONFIDENCE) -> Interval:
    """The score interval of a proportion (Wilson 1927); 0 ... 1 when nothing was judged."""
    if n == 0:
        return Interval(0.0, 1.0)
    z2 = normal_quantile(confidence) ** 2
    rate = passed / n
    centre = (rate + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * (rate * (1 - rate) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    # At the two ends the formula gives 0 and 1 but for a rounding.
    return Interval(0.0 if passed == 0 else centre - half, 1.0 if passed == n else centre + half)


def mcnemar(pairs: Pairs) -> float:
    """The exact two-sided p-value that gains and losses are equally likely (McNemar 1947): a binomial test of the
    discordant pairs against 1/2. 1 when there are none."""
    n, few = pairs.gained + pairs.lost, min(pairs.gained, pairs.lost)
    tail = sum(math.comb(n, k) for k in range(few + 1))
    return min(1.0, 2 * tail / 2**n)


def paired_interval(pairs: Pairs, confidence: float = CONFIDENCE) -> Interval:
    """The score interval of the difference of two paired proportions (Tango 1998, Statistics in Medicine 17, 891).

    All differences d that the score test does not reject. It holds its level for few or no discordant pairs, where
    Wald's interval has no width at all. -1 ... 1 when nothing was judged.
    """
    if pairs.n == 0:
        return Interval(-1.0, 1.0)
    z, estimate = normal_quantile(confidence), pairs.difference
    low = -1.0 if estimate == -1 else _root(lambda d: tango_score(pairs, d) - z, -1.0, estimate)
    high = 1.0 if estimate == 1 else _root(lambda d: tango_score(pairs, d) + z, estimate, 1.0)
    return Interval(low, high)


def tango_score(pairs: Pairs, d: float) -> float:
    """The score statistic of the hypothesis that the true difference is `d`; it falls as `d` grows."""
    n, gained, lost = pairs.n, pairs.gained, pairs.lost
    # The likeliest probability of a loss under the hypothesis is the larger root of a quadratic (Tango, eq. 2.4).
    a, b, c = 2 * n, -gained - lost + (2 * n - gained + lost) * d, -lost * d * (1 - d)
    losing = (math.sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)
    variance = n * (2 * losing + d * (1 - d))
    distance = gained - lost - n * d
    if variance <= 0:
        return math.copysign(math.inf, distance) if distance else 0.0
    return distance / math.sqrt(variance)


def _root(f: Callable[[float], float], low: float, high: float) -> float:
    """Where the falling function `f` crosses 0 between `low` and `high`, by bisection to the last bit."""
    while low < (middle := (low + high) / 2) < high:
        if f(middle) > 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2
