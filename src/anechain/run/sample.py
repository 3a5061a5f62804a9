"""Logits to the next id. Pure functions; `Sampler` is one sequence's choices, with the randomness that it owns.

The order is fixed, that of Hugging Face `generate`: logits are divided by the temperature, then all but the top k are
removed, then of the rest all but the smallest set that holds probability p (Holtzman et al. 2020), then one is drawn.
Logits that cannot be trusted are refused, never read as "id 0".
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from anechain.errors import EngineError, RequestError


@dataclass(frozen=True)
class Sampling:
    """How the next id is chosen; raises RequestError, naming all offenders, for a value out of range.

    `temperature` 0 is greedy: the highest logit, of equal ones the lowest id. `top_k` 0 and `top_p` 1 remove nothing.
    `seed` None draws differently every time. `bias` is added to the logits of some ids before anything else.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        faults = []
        if not _is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            faults.append(f"temperature {self.temperature!r} (a number from 0 up)")
        if not _is_whole(self.top_k) or self.top_k < 0:
            faults.append(f"top-k {self.top_k!r} (a whole number, 0 for all)")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            faults.append(f"top-p {self.top_p!r} (above 0, at most 1)")
        if self.seed is not None and (not _is_whole(self.seed) or self.seed < 0):
            faults.append(f"seed {self.seed!r} (a whole number from 0 up)")
        if faults:
            raise RequestError(f"sampling cannot use {', '.join(faults)}.")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_whole(value) or isinstance(value, float)


def trusted(logits: np.ndarray, n_ids: int) -> np.ndarray:
    """`logits` [V] as a fresh float64 array in which ids that the tokenizer does not have (from `n_ids` on) are -inf.

    Raises EngineError for NaN, for +inf, and when no id is left to choose.
    """
    if logits.ndim != 1:
        raise EngineError(f"the engine gave logits of shape {list(logits.shape)} instead of [V].")
    values = logits.astype(np.float64)  # [V] f64
    broken = np.flatnonzero(np.isnan(values) | np.isposinf(values))
    if broken.size:
        raise EngineError(
            f"the engine gave {broken.size} logits that are NaN or infinite, the first ({values[broken[0]]}) for id "
            f"{broken[0]}: run `anechain gate --by-package` to find the package."
        )
    values[n_ids:] = -np.inf
    if not np.isfinite(values).any():
        raise EngineError(f"all {values.size} logits are -inf, so there is no id to choose.")
    return values


def restricted(logits: np.ndarray, n_ids: int, allowed: np.ndarray | None) -> np.ndarray:
    """`trusted`, and then -inf for every id that `allowed` [n_ids] bool, if given, leaves out. Raises EngineError."""
    values = trusted(logits, n_ids)  # [V] f64
    if allowed is not None:
        values[:n_ids][~allowed[: values.size]] = -np.inf
        if not np.isfinite(values).any():
            raise EngineError("the logits of all ids that the grammar allows are -inf, so there is no id to choose.")
    return values


def log_probabilities(logits: np.ndarray, n_ids: int) -> np.ndarray:
    """What the model itself thinks, [V] f64: natural logarithms, at temperature 1. Raises EngineError."""
    values = trusted(logits, n_ids)  # [V] f64
    values -= values.max()
    shifted: np.ndarray = values - np.log(np.exp(values).sum())
    return shifted


def greedy(logits: np.ndarray, n_ids: int, allowed: np.ndarray | None = None) -> int:
    """The id of the highest of `logits` [V], the lowest such id on a tie. Raises EngineError."""
    return int(np.argmax(restricted(logits, n_ids, allowed)))


def probabilities(logits: np.ndarray, n_ids: int, sampling: Sampling, allowed: np.ndarray | None = None) -> np.ndarray:
    """The distribution [V] f64 that an id is drawn from at a temperature above 0. Raises EngineError.

    At the k-th place equal logits all stay; at the edge of p the lower id stays.
    """
    values = restricted(logits, n_ids, allowed)  # [V] f64
    values = (values - values.max()) / sampling.temperature  # the shift keeps a tiny temperature from overflowing
    if 0 < sampling.top_k < values.size:
        kth = np.partition(values, -sampling.top_k)[-sampling.top_k]
        values[values < kth] = -np.inf
    weights: np.ndarray = np.exp(values)
    weights /= weights.sum()
    if sampling.top_p < 1:
        order = np.argsort(-weights, kind="stable")  # [V], most probable first, lower id first
        before = np.cumsum(weights[order]) - weights[order]  # the probability of all that come earlier
        weights[order[before >= sampling.top_p]] = 0.0
        weights /= weights.sum()
    return weights


def sample(
    logits: np.ndarray, n_ids: int, sampling: Sampling, rng: np.random.Generator, allowed: np.ndarray | None = None
) -> int:
    """The next id from `logits` [V]: greedy at temperature 0, else drawn with `rng`. Raises EngineError."""
    if sampling.temperature == 0:
        return greedy(logits, n_ids, allowed)
    weights = probabilities(logits, n_ids, sampling, allowed)
    return int(rng.choice(weights.size, p=weights))


class Sampler:
    """The choices of one sequence: the same seed and the same logits give the same ids."""

    def __init__(self, sampling: Sampling, n_ids: int) -> None:
        """Raises RequestError for a bias on an id that the tokenizer does not have."""
        if unknown := sorted(i for i in sampling.bias if not 0 <= i < n_ids):
            raise RequestError(f"the bias names token ids that are not there ({unknown}): ids end at {n_ids - 1}.")
        self._sampling = sampling
        self.n_ids = n_ids
        self._rng = np.random.default_rng(sampling.seed)

    def choose(self, logits: np.ndarray, allowed: np.ndarray | None = None) -> int:
        """The next id from `logits` [V], of those that `allowed` [n_ids] bool names if given. Raises EngineError."""
        if self._sampling.bias:
            logits = logits.copy()
            logits[list(self._sampling.bias)] += np.array(list(self._sampling.bias.values()), logits.dtype)
        return sample(logits, self.n_ids, self._sampling, self._rng, allowed)
