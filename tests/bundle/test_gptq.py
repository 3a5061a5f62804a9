"""The arithmetic of calibrated rounding against plainer forms of the same and against scipy and numpy's solvers."""

import numpy as np
import pytest
from scipy.optimize import minimize

from anechain.bundle import gptq
from anechain.bundle.balance import balanced
from anechain.bundle.gptq import clipped, conditional_power, drift, loss, round_matrix
from anechain.bundle.palette import Palettized
from anechain.bundle.quant import Quantized, quantize
from anechain.bundle.recipe import Scheme, parse_scheme
from anechain.bundle.stored import Corrected, compress, dense
from tests.tolerances import BALANCE_COST, DRIFT_RELATIVE, LOSS_RELATIVE

RNG = np.random.default_rng(3)
INPUTS = 48
# Inputs that run along with each other and differ in power by a factor of a hundred, as activations do.
X = RNG.standard_normal((600, 12)) @ RNG.standard_normal((12, INPUTS)) + 0.3 * RNG.standard_normal((600, INPUTS))
X *= np.exp(RNG.uniform(-2.3, 2.3, INPUTS))
MOMENT = X.T @ X / len(X)
WEIGHT = RNG.standard_normal((40, INPUTS)).astype(np.float32) * 0.1
INT8 = Scheme(8)


def cost(stored: np.ndarray, weight: np.ndarray = WEIGHT) -> float:
    """Straight from the inputs: the mean square change of all outputs."""
    return float((((stored.astype(np.float64) - weight) @ X.T) ** 2).mean(axis=1).sum())


def obq(weight: np.ndarray, moment: np.ndarray, scale: np.ndarray, top: int) -> np.ndarray:
    """Optimal brain quantisation in a fixed order, the inverse updated by elimination (Frantar & Alistarh 2022)."""
    power = np.diag(moment)
    inverse = np.linalg.inv(moment + gptq.DAMPING * power.mean() * np.eye(len(moment)))
    rest, codes = weight.astype(np.float16).astype(np.float64), np.zeros(weight.shape, int)
    for j in np.argsort(-power, kind="stable"):
        codes[:, j] = np.clip(np.rint(rest[:, j] / scale[:, j]), -top, top)
        value = (codes[:, j] * scale[:, j]).astype(np.float16).astype(np.float64)
        rest -= np.outer((rest[:, j] - value) / inverse[j, j], inverse[j])
        inverse = inverse - np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
        inverse[j, j] = 1.0  # it is done with, and never looked at again
    return codes


@pytest.mark.parametrize("columns", [128, 7])
@pytest.mark.parametrize("text", ["int8", "int8-block16", "int4"])
def test_gptq_is_optimal_brain_quantisation(text: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gptq, "_COLUMNS", columns)
    scheme = parse_scheme(text)
    ours = round_matrix(WEIGHT, MOMENT, scheme, ("gptq",))
    nearest = quantize(WEIGHT, scheme)
    assert isinstance(ours, Quantized) and np.array_equal(ours.scale, nearest.scale) and ours.bits == scheme.bits
    scale = np.repeat(nearest.scale.astype(np.float64), INPUTS // nearest.scale.shape[1], axis=1)
    theirs = obq(WEIGHT, MOMENT, scale, 2 ** (scheme.bits - 1) - 1)
    assert (ours.data == theirs).mean() > 0.99  # float32 here, float64 there: a value half way may fall otherwise
    assert cost(dense(ours)) < 0.5 * cost(dense(nearest))


def test_gptq_on_palettes_takes_the_nearest_entry_of_the_groups_own_table() -> None:
    """Inputs that know nothing of each other: GPTQ is rounding to nearest, table by table."""
    alone = np.diag(np.exp(RNG.uniform(-1, 1, INPUTS)))
    for weight in (WEIGHT, WEIGHT * np.repeat([1e-3, 1, 50, 1, 7], 8)[:, None].astype(np.float32)):
        start = compress(weight, parse_scheme("palette8-group8"))
        ours = round_matrix(weight, alone, parse_scheme("palette8-group8"), ("gptq",))
        assert isinstance(ours, Palettized) and isinstance(start, Palettized)
        np.testing.assert_array_equal(dense(ours), dense(start))


def test_gptq_on_a_palette() -> None:
    scheme = parse_scheme("palette4-group8")
    nearest, ours = compress(WEIGHT, scheme), round_matrix(WEIGHT, MOMENT, scheme, ("gptq",))
    assert isinstance(ours, Palettized) and isinstance(nearest, Palettized)
    np.testing.assert_array_equal(ours.table, nearest.table)
    assert cost(dense(ours)) < 0.6 * cost(dense(nearest))


def test_without_a_method_it_is_to_nearest() -> None:
    for text in ("int8", "int4-block16", "palette6"):
        ours, nearest = round_matrix(WEIGHT, MOMENT, parse_scheme(text), ()), compress(WEIGHT, parse_scheme(text))
        np.testing.assert_array_equal(dense(ours), dense(nearest))


def test_loss_is_what_the_outputs_change() -> None:
    error = RNG.standard_normal((5, INPUTS)).astype(np.float32)
    expected = ((error.astype(np.float64) @ X.T) ** 2).mean(axis=1)
    np.testing.assert_allclose(loss(error, MOMENT), expected, rtol=LOSS_RELATIVE)


def test_inputs_that_never_come_cost_nothing_and_break_nothing() -> None:
    moment = MOMENT.copy()
    moment[5:9], moment[:, 5:9] = 0, 0
    for dead in (moment, np.zeros_like(moment)):
        for text in ("int8", "int8+rank3"):
            assert np.isfinite(dense(round_matrix(WEIGHT, dead, parse_scheme(text), ("clip", "gptq")))).all()
        assert np.isfinite(conditional_power(dead)).all()
        assert np.isfinite(balanced(WEIGHT, conditional_power(dead))).all()
        lacks, halves = ((m.astype(np.float32), m.astype(np.float32)) for m in (WEIGHT @ dead, dead))
        assert np.isfinite(drift(lacks, halves)).all()


def test_clipping_saves_error_and_never_costs_any() -> None:
    weight = WEIGHT.copy()
    weight[::2, 3] = 0.9  # an outlier where little flows
    power = np.ones(INPUTS)
    power[3] = 1e-4
    nearest = quantize(weight, Scheme(4))
    ours = clipped(weight, nearest, power)
    errors = [((dense(q).astype(np.float32) - weight) ** 2 * power).sum(axis=1) for q in (ours, nearest)]
    assert (
        np.all(errors[0] <= errors[1] * LOSS_RELATIVE + errors[1]) and errors[0][::2].sum() < 0.5 * errors[1][::2].sum()
    )
    assert np.all(ours.scale[::2] < nearest.scale[::2]) and np.abs(ours.data).max() == 7
    assert np.all(np.abs(ours.data[::2, 3]) == 7)


# -- a correction of low rank ------------------------------------------------------------------------------------------


def test_correction_without_inputs_is_the_truncated_svd_of_the_error() -> None:
    stored = compress(WEIGHT, parse_scheme("int4+rank3"))
    assert isinstance(stored, Corrected)
    error = WEIGHT - dense(stored.base).astype(np.float32)
    u, s, v = np.linalg.svd(error.astype(np.float64), full_matrices=False)
    expected = (u[:, :3] * s[:3]) @ v[:3]
    np.testing.assert_allclose(dense(stored) - dense(stored.base), expected, atol=2e-3 * s[0])
    assert stored.up.dtype == stored.down.dtype == np.float16


@pytest.mark.parametrize("text", ["int8+rank4", "int4-block16+rank4", "palette4+rank4"])
def test_correction_takes_the_strongest_inputs_and_fits_them_best(text: str) -> None:
    scheme = parse_scheme(text)
    ours = round_matrix(WEIGHT, MOMENT, scheme, ("gptq",))
    plain = round_matrix(WEIGHT, MOMENT, parse_scheme(text.partition("+")[0]), ("gptq",))
    assert isinstance(ours, Corrected) and ours.up.shape == (40, 4) and ours.down.shape == (4, INPUTS)
    assert cost(dense(ours)) < 0.75 * cost(dense(plain))
    _, vectors = np.linalg.eigh(MOMENT)
    inside = np.linalg.lstsq(vectors[:, -4:], ours.down.T.astype(np.float64), rcond=None)[0]
    away = ours.down.T - vectors[:, -4:] @ inside
    assert np.abs(away).max() < 2e-3 * np.abs(ours.down).max()
    # The other factor is the least squares fit of what rounding left, on those directions.
    error = WEIGHT - dense(ours.base).astype(np.float32)
    fit = np.linalg.lstsq(X @ ours.down.T, X @ error.T, rcond=None)[0].T
    best = dense(ours.base) + fit @ ours.down
    assert cost(dense(ours)) <= cost(best) * (1 + 1e-3)


def test_level_takes_back_all_that_is_left_along_a_direction() -> None:
    level = RNG.standard_normal(40)
    for rank in (1, 4):
        scheme = parse_scheme(f"int8+rank{rank}")
        ours = round_matrix(WEIGHT, MOMENT, scheme, ("gptq",), level=level)
        other = round_matrix(WEIGHT, MOMENT, parse_scheme("int8" if rank == 1 else "int8+rank3"), ("gptq",))
        assert isinstance(ours, Corrected) and ours.down.shape == (rank, INPUTS)
        along = [np.abs(level @ (dense(stored).astype(np.float64) - WEIGHT)).max() for stored in (ours, other)]
        assert along[0] < 0.02 * along[1]
        assert cost(dense(ours)) < cost(dense(other))


# -- moving scale, and drift -------------------------------------------------------------------------------------------


def bound(factors: np.ndarray, weight: np.ndarray, power: np.ndarray) -> float:
    return float((np.abs(weight * factors).max(axis=1) ** 2).sum() * (power / factors**2).sum())


def test_factors_lie_where_scipy_finds_the_least_cost() -> None:
    weight = RNG.standard_normal((24, 10)) * np.exp(RNG.uniform(-1, 1, 10))
    power = np.exp(RNG.uniform(-3, 3, 10))
    ours = bound(balanced(weight.astype(np.float32), power), weight, power)
    found = [
        minimize(lambda v: np.log(bound(np.exp(v), weight, power)), start, method="Powell", options={"maxiter": 20000})
        for start in (np.zeros(10), RNG.standard_normal(10))
    ]
    theirs = min(np.exp(f.fun) for f in found)
    assert ours < bound(np.ones(10), weight, power) * 0.7
    assert ours < BALANCE_COST * theirs


def test_factors_that_are_tied_are_alike_and_rows_left_out_change_little() -> None:
    tied = balanced(WEIGHT, np.diag(MOMENT), lambda logs: np.repeat(logs.reshape(-1, 4).mean(axis=1), 4))
    np.testing.assert_array_equal(tied.reshape(-1, 4), np.repeat(tied[::4], 4).reshape(-1, 4))
    assert np.ptp(tied) > 0.1 and tied.dtype == np.float32


def test_gptq_costs_less_after_moving_scale() -> None:
    factors = balanced(WEIGHT, conditional_power(MOMENT))
    moved = round_matrix(WEIGHT * factors, MOMENT / np.outer(factors, factors), INT8, ("gptq",))
    assert cost(dense(moved) / factors) < 0.8 * cost(dense(round_matrix(WEIGHT, MOMENT, INT8, ("gptq",))))


def test_conditional_power_is_the_residual_of_a_regression_on_the_weaker_inputs() -> None:
    power = np.diag(MOMENT)
    order = np.argsort(-power)
    damped = np.concatenate([X, np.sqrt(gptq.DAMPING * power.mean() * len(X)) * np.eye(INPUTS)])
    ours = conditional_power(MOMENT)
    for place in (0, 7, INPUTS - 1):
        here, weaker = order[place], order[place + 1 :]
        rest = damped[:, here]
        if len(weaker):
            rest = rest - damped[:, weaker] @ np.linalg.lstsq(damped[:, weaker], rest, rcond=None)[0]
        np.testing.assert_allclose(ours[here], (rest**2).sum() / len(X), rtol=1e-6)


def sums(inputs: np.ndarray, lacking: np.ndarray) -> tuple[gptq.Halves, gptq.Halves]:
    """(y x^T, x x^T) over every other row and over the rest."""
    halves = [(lacking[i::2].T @ inputs[i::2], inputs[i::2].T @ inputs[i::2]) for i in (0, 1)]
    lacks, moments = (tuple(np.asarray(half, np.float32) for half in pair) for pair in zip(*halves, strict=True))
    return lacks, moments


def regressed(inputs: np.ndarray, lacking: np.ndarray, share: float) -> np.ndarray:
    """Ridge regression as least squares of a taller system, [X, I]."""
    ridge = np.sqrt(share * (inputs**2).sum(axis=0)) * np.eye(inputs.shape[1])
    taller = np.concatenate([inputs, ridge]), np.concatenate([lacking, np.zeros((len(ridge), lacking.shape[1]))])
    return np.linalg.lstsq(*taller, rcond=None)[0].T


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("noise", [0.1, 30.0])
def test_drift_is_the_ridge_regression_that_serves_the_other_half_best(noise: float, weighed: bool) -> None:
    lacking = X @ RNG.standard_normal((INPUTS, 6)) * 0.1 + noise * RNG.standard_normal((len(X), 6))
    root = RNG.standard_normal((6, 6)) if weighed else np.eye(6)
    ours = drift(*sums(X, lacking), (root.T @ root).astype(np.float32) if weighed else None)
    unseen = {
        share: float((((X[1::2] @ regressed(X[::2], lacking[::2], share).T - lacking[1::2]) @ root.T) ** 2).sum())
        for share in gptq.RIDGES
    }
    best = min(unseen, key=lambda share: unseen[share])
    assert (best == gptq.RIDGES[0]) == (noise < 1)
    expected = regressed(X, lacking, best)
    np.testing.assert_allclose(ours, expected, rtol=DRIFT_RELATIVE, atol=DRIFT_RELATIVE * np.abs(expected).max())


def test_drift_adds_nothing_where_what_is_learnt_does_not_serve_the_other_half() -> None:
    lacking = X @ RNG.standard_normal((INPUTS, 6))
    lacking[1::2] *= -1
    assert not drift(*sums(X, lacking)).any()
    half = sums(X, lacking)
    nothing = np.zeros_like(half[1][1])
    assert not drift((half[0][0], half[0][1] * 0), (half[1][0], nothing)).any(), "one text has no other half"
