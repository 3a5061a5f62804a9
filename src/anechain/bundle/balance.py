"""Moving scale: which factor to move from a matrix' input channels into what produces them, before rounding."""

from collections.abc import Callable

import numpy as np

_ROUNDS, _RATE = 120, 0.15
_SHARP = 4.0, 32.0  # at first and at last: how nearly a row's largest weight alone counts
_LIMIT = 64.0  # so that what is moved keeps its distance to the ends of fp16
_ROWS = 1024  # of a matrix that are looked at, evenly spaced
_FLOOR = 1e-5  # of a share: a channel that decides no row's scale is not moved without end


Tie = Callable[[np.ndarray], np.ndarray]


def balanced(weight: np.ndarray, power: np.ndarray, tie: Tie | None = None) -> np.ndarray:
    """Factors t [I] f32, between 1/64 and 64: column i of `weight` [O, I] times t_i, its inputs divided by it.

    With one scale for a row, rounding `weight * t` costs about sum_o max_i (w_oi t_i)^2 times sum_i p_i / t_i^2, where
    p is the `power` of what an error in column i meets. The idea of moving scale is that of Xiao et al. 2022
    (SmoothQuant) and Lin et al. 2023 (AWQ), who choose t as a power of the inputs' magnitude. The logarithm of that
    product is a convex function of log t^2, so it is minimised here instead: step by step towards the point where every
    column has the same share in both sums. `tie` makes log factors alike that have to be.
    """
    some = weight[:: -(-len(weight) // _ROWS)]
    squares = np.log(some.astype(np.float32) ** 2 + 1e-30)  # [rows, I]
    logs = np.zeros(weight.shape[1], np.float32)
    costs = (power / max(power.max(), 1e-30)).astype(np.float32) + np.float32(1e-30)
    least, best = np.inf, logs
    for number in range(_ROUNDS):
        moved = squares + logs
        largest = moved.max(axis=1, keepdims=True)  # [O, 1]
        rows, inputs = np.exp(largest[:, 0]), costs * np.exp(-logs)
        if (cost := float(np.log(rows.sum()) + np.log(inputs.sum()))) < least:
            least, best = cost, logs
        sharpness = np.float32(_SHARP[0] + (_SHARP[1] - _SHARP[0]) * number / _ROUNDS)
        shares = np.exp(sharpness * (moved - largest))
        deciding = rows @ (shares / shares.sum(axis=1, keepdims=True))  # [I]
        gap = np.log(inputs / inputs.sum() + _FLOOR) - np.log(deciding / deciding.sum() + _FLOOR)
        logs = logs + np.float32(_RATE * (1 - number / _ROUNDS)) * np.clip(gap, -1, 1)
        if tie is not None:
            logs = tie(logs)
    factors: np.ndarray = np.clip(np.exp(best / 2), 1 / _LIMIT, _LIMIT).astype(np.float32)
    return factors
