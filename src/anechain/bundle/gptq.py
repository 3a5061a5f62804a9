"""Rounding that knows what flows in: the arithmetic of calibrated rounding, pure numpy.

Every function takes a matrix [O, I] and `moment` [I, I] f64, the mean of x x^T over the inputs x that enter it: the
error E of a rounded matrix then costs trace(E moment E^T), the mean square of what changes in its outputs.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from anechain.bundle.palette import Palettized, palettize
from anechain.bundle.quant import Quantized, quantize, top
from anechain.bundle.recipe import Scheme
from anechain.bundle.stored import Compressed, Corrected, corrected, dense

DAMPING = 0.01  # of the mean power of an input, added to all; Frantar et al. 2022, section 3.3
RIDGES = (0.1, 1.0, 6.0, 36.0)  # of each input's own power: of these `drift` takes what helps a text it has not seen
Halves = tuple[np.ndarray, np.ndarray]
_SPARE, _ITERATIONS = 8, 16
_COLUMNS = 128  # rounded before what they leave is handed on to all later ones
_CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5)


def loss(error: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """Mean square change of each output [O] f32 that `error` [O, I] causes."""
    cost: np.ndarray = np.einsum("oi,oi->o", error @ moment.astype(np.float32), error)
    return cost


def round_matrix(
    weight: np.ndarray,
    moment: np.ndarray,
    scheme: Scheme,
    methods: tuple[str, ...],
    name: str = "a matrix",
    level: np.ndarray | None = None,
) -> Compressed:
    """`weight` in the form of `scheme`, by those of the methods "clip" and "gptq" that are given, else to nearest.

    With a rank r the correction takes the r directions in which the inputs vary most (the first eigenvectors of
    `moment`), whatever the rounding does there: so rounding is free to push its errors into them. What remains for it
    is `moment` without these directions, and the factors follow by least squares. With a `level` [O], a direction of
    the outputs, one of the r channels takes back all that is left of the error along it. Raises RecipeError, with
    `name`.
    """
    if scheme.rank:
        down, seen, inner = _leading(moment, scheme.rank - (level is not None))
        base = round_matrix(weight, _rest(moment, seen, inner), replace(scheme, rank=0), methods, name)
        assert not isinstance(base, Corrected)
        error = weight - dense(base).astype(np.float32)
        up = error @ seen @ inner
        if level is not None:
            along = level @ (error - up @ down) / (level @ level)  # [I]
            up, down = np.column_stack([up, level]), np.vstack([down, along])
        return corrected(base, up, down)
    if scheme.kind == "palette":
        palettized = palettize(weight, scheme, name)
        return _gptq_palette(weight, moment, palettized) if "gptq" in methods else palettized
    quantized = quantize(weight, scheme, name)
    if "clip" in methods:
        quantized = clipped(weight, quantized, np.diag(moment))
    return _gptq_linear(weight, moment, quantized) if "gptq" in methods else quantized


def clipped(weight: np.ndarray, quantized: Quantized, power: np.ndarray) -> Quantized:
    """The same with the scales, at most those of `quantized`, that cost the least square error, each input weighed by
    its `power` [I]; larger weights saturate. (Sung et al. 2015 and many since: clipping by mean squared error.)
    """
    rows, blocks = quantized.scale.shape
    split = weight.astype(np.float16).astype(np.float32).reshape(rows, blocks, -1)  # [O, blocks, block]
    weigh = power.astype(np.float32).reshape(1, blocks, -1)
    limit = top(quantized.bits)
    least = np.full((rows, blocks), np.inf, np.float32)
    best_scale, best_data = quantized.scale.copy(), quantized.data.reshape(split.shape).copy()
    for ratio in _CLIPS:
        scale = np.maximum((quantized.scale * np.float32(ratio)).astype(np.float16), np.float16(2.0**-14))
        step = scale.astype(np.float32)[:, :, None]
        data = np.clip(np.rint(split / step), -limit, limit)
        cost = ((data * step - split) ** 2 * weigh).sum(axis=2)
        better = cost < least
        least[better], best_scale[better], best_data[better] = cost[better], scale[better], data[better]
    return Quantized(best_data.reshape(weight.shape), best_scale, quantized.bits)


def _gptq_linear(weight: np.ndarray, moment: np.ndarray, start: Quantized) -> Quantized:
    """GPTQ (Frantar et al. 2022, algorithm 1) to the scales of `start`."""
    block = weight.shape[1] // start.scale.shape[1]
    steps = np.ascontiguousarray(start.scale.astype(np.float32).T)  # [blocks, O]
    limit = top(start.bits)

    def steps_of(column: int, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scale = steps[column // block]
        whole = np.clip(np.rint(values / scale), -limit, limit)
        return whole, (whole * scale).astype(np.float16).astype(np.float32)

    return Quantized(_gptq(weight, moment, steps_of, np.int8), start.scale, start.bits)


def _gptq_palette(weight: np.ndarray, moment: np.ndarray, start: Palettized) -> Palettized:
    """The same to the tables of `start`."""
    groups, entries = start.table.shape
    tables = start.table.astype(np.float64)
    # All tables as one ascending line, each in a stretch of its own, so that one search finds every row's place.
    starts = np.arange(groups) * (2 * np.abs(tables).max() + 1)
    line = ((tables[:, 1:] + tables[:, :-1]) / 2 + starts[:, None]).ravel()

    def places_of(_: int, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        within = np.clip(values.reshape(groups, -1), tables[:, :1], tables[:, -1:])  # [groups, rows]
        places = np.searchsorted(line, within + starts[:, None]) - np.arange(groups)[:, None] * (entries - 1)
        return places.ravel(), np.take_along_axis(tables, places, axis=1).ravel().astype(np.float32)

    return Palettized(_gptq(weight, moment, places_of, np.uint8), start.table, start.bits)


def _gptq(
    weight: np.ndarray,
    moment: np.ndarray,
    code: Callable[[int, np.ndarray], tuple[np.ndarray, np.ndarray]],
    dtype: type[np.integer],
) -> np.ndarray:
    """Codes [O, I] for `weight`, column by column, the columns with the most power first ("act-order").

    `code(column, values [O])` gives a column's codes and what they stand for. What rounding a column changes is
    compensated by the columns that are still to come, as far as their inputs run along with its own.
    """
    columns = weight.shape[1]
    power = np.diag(moment)
    order = np.argsort(-power, kind="stable")
    damped = moment[np.ix_(order, order)] + (DAMPING * power.mean() + 1e-30) * np.eye(columns)
    inverse = np.linalg.cholesky(np.linalg.inv(damped)).T.astype(np.float32)  # upper triangle
    rest = np.ascontiguousarray(weight.astype(np.float16).astype(np.float32).T[order])  # [I, O]
    codes = np.empty(rest.shape, dtype)
    for left in range(0, columns, _COLUMNS):
        right = min(left + _COLUMNS, columns)
        block = rest[left:right]
        errors = np.empty_like(block)
        for at in range(right - left):
            here = left + at
            codes[here], values = code(int(order[here]), block[at])
            errors[at] = (block[at] - values) / inverse[here, here]
            block[at + 1 :] -= inverse[here, here + 1 : right, None] * errors[at]
        rest[right:] -= inverse[left:right, right:].T @ errors
    back = np.empty_like(codes)
    back[order] = codes
    return np.ascontiguousarray(back.T)


def drift(lacks: Halves, moments: Halves, cost: np.ndarray | None = None) -> np.ndarray:
    """What [X, I] to add to a matrix so that it makes up for what the chain before it has changed; zeros if it cannot.

    `lacks` [X, I] are sums of (what is lacking) x^T over inputs x, for two halves of the text, and `moments` [I, I]
    those of x x^T. (The step that asymmetric calibration adds to GPTQ: Li et al. 2025, GPTAQ; Zhang et al. 2025.)
    Plain least squares mostly learns what is peculiar to these tokens. So it is a ridge regression, every input's
    power raised by one of RIDGES times its own: that with which what one half teaches serves the other half best.
    `cost` [X, X] says what errors of what is lacking cost; None for all alike.
    """
    (learnt, unseen), (moment, test) = lacks, moments
    least, best = 0.0, None
    for ridge in RIDGES:
        added = _ridge(learnt, moment, ridge)
        costly = added if cost is None else cost @ added
        if (found := float(np.sum((added @ test) * costly) - 2 * np.sum(costly * unseen))) < least:
            least, best = found, ridge
    return np.zeros_like(learnt) if best is None else _ridge(learnt + unseen, moment + test, best)


def _ridge(lack: np.ndarray, moment: np.ndarray, ridge: float) -> np.ndarray:
    raised = moment + np.diag(np.float32(ridge) * np.diag(moment) + np.float32(1e-30))
    added: np.ndarray = np.linalg.solve(raised, lack.T).T
    return added


def conditional_power(moment: np.ndarray) -> np.ndarray:
    """What is left of each input's power [I] when the inputs of less power than its own are known.

    It is what an error in that column costs under `_gptq`, which compensates it by the columns after it.
    """
    power = np.diag(moment)
    order = np.argsort(-power, kind="stable")
    damped = moment[np.ix_(order, order)] + (DAMPING * power.mean() + 1e-30) * np.eye(len(power))
    left = np.empty(len(power))
    left[order[::-1]] = np.diag(np.linalg.cholesky(damped[::-1, ::-1])) ** 2
    return left


def without_leading(moment: np.ndarray, count: int) -> np.ndarray:
    """What is left of `moment` when the `count` directions in which the inputs vary most are known."""
    _, seen, inner = _leading(moment, count)
    return _rest(moment, seen, inner)


def _rest(moment: np.ndarray, seen: np.ndarray, inner: np.ndarray) -> np.ndarray:
    rest = moment - seen @ inner @ seen.T
    symmetric: np.ndarray = (rest + rest.T) / 2
    return symmetric


def _leading(moment: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The eigenvectors V [count, I] of the largest eigenvalues, moment V^T and (V moment V^T)^-1.

    By orthogonal iteration from the strongest inputs: a tenth of the time that all eigenvectors take.
    """
    width = min(len(moment), count + _SPARE)
    basis = np.eye(len(moment))[:, np.argsort(-np.diag(moment), kind="stable")[:width]]
    for _ in range(_ITERATIONS):
        basis, _ = np.linalg.qr(moment @ basis)
    _, turn = np.linalg.eigh(basis.T @ moment @ basis)  # ascending
    vectors = (basis @ turn[:, width - count :]).T  # [count, I]
    seen = moment @ vectors.T  # [I, count]
    inner = np.linalg.inv(vectors @ seen + (1e-9 * np.trace(moment) + 1e-30) * np.eye(count))
    return vectors, seen, inner
