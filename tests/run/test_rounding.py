"""Where the reference engine rounds: at the ends of fp16, inside ops in stress mode, and nowhere else."""

import math
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import scipy.special

from anechain.run.ops import ARITHMETIC, LAYOUT, rounded, widened
from anechain.run.rounding import Rounding
from tests.tolerances import GELU_OTHER_HALF, STRESS_OP, STRESS_SUM

Array = np.ndarray
F16, F32 = np.float16, np.float32
INF, NAN, TOP = np.inf, np.nan, 65504.0


@pytest.fixture(autouse=True)
def strict_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def compute(op: str, *, dtype: type = F16, stress: bool = False, **arguments: Any) -> Array:
    """One op from the table, its result in `dtype`."""
    with np.errstate(all="ignore"):
        if op in LAYOUT:
            return np.asarray(LAYOUT[op](**arguments))
        wide = {k: widened(np.asarray(v)) for k, v in arguments.items()}
        return rounded(ARITHMETIC[op](Rounding(np.dtype(dtype), stress), **wide), np.dtype(dtype))


def half(*values: float) -> Array:
    return np.array(values, F16)


def to_half(x: Any) -> Any:
    """A float32 that has been through fp16."""
    with np.errstate(over="ignore"):
        return np.asarray(x, F32).astype(F16).astype(F32)


# op, arguments, result: what leaves fp16 becomes infinite, what is infinite stays so, what has no value is NaN
ENDS = [
    ("add", {"x": half(TOP, TOP, -TOP, INF, INF), "y": half(15, 16, -16, -TOP, -INF)}, [TOP, INF, -INF, INF, NAN]),
    ("mul", {"x": half(256, 257, -257, INF, INF), "y": half(255, 257, 257, -2, 0)}, [65280, INF, -INF, -INF, NAN]),
    ("square", {"x": half(255, 257, -INF, 2**-12, 2**-13)}, [65024, INF, INF, 2**-24, 0]),
    ("real_div", {"x": half(1, -1, 0, TOP, 2**-24), "y": half(0, 0, 0, 0.5, 2)}, [INF, -INF, NAN, INF, 0]),
    ("exp", {"x": half(11.0859375, 11.09375, -17, -18, -INF)}, [65248, INF, 2**-24, 0, 0]),
    ("rsqrt", {"x": half(0, 2**-24, TOP, INF, -1)}, [INF, 4096, 1 / 256, 0, NAN]),
    ("inverse", {"x": half(0, 4, INF), "epsilon": half(0)}, [INF, 0.25, 0]),
    ("inverse", {"x": half(0, 4, -INF)}, [10000, 0.25, 0]),  # the default epsilon is 1e-4
    ("log", {"x": half(0, 1, INF, -1)}, [-INF, 0, INF, NAN]),  # the default epsilon, 1e-45, is 0 in fp16
    ("sqrt", {"x": half(0, 2**-24, INF, -1)}, [0, 2**-12, INF, NAN]),
    ("sigmoid", {"x": half(-INF, -TOP, TOP, INF)}, [0, 0, 1, 1]),
    ("silu", {"x": half(-TOP, TOP, INF)}, [0, TOP, INF]),
    ("gelu", {"x": half(-TOP, TOP, INF), "mode": "TANH_APPROXIMATION"}, [0, TOP, INF]),
    ("tanh", {"x": half(-INF, -TOP, TOP, INF)}, [-1, -1, 1, 1]),
    ("softmax", {"x": half(TOP, -TOP, -40000, -INF)}, [1, 0, 0, 0]),
    ("softmax", {"x": half(-40000, -40000, -TOP, -INF)}, [0.5, 0.5, 0, 0]),
    ("reduce_sum", {"x": half(TOP, TOP, -TOP)}, TOP),
    ("reduce_sum", {"x": half(TOP, TOP)}, INF),
    ("reduce_mean", {"x": half(TOP, TOP, TOP, TOP)}, TOP),
    ("reduce_max", {"x": half(-INF, TOP, NAN)}, NAN),
    ("matmul", {"x": half(TOP, TOP)[None], "y": half(2, -1)[:, None]}, [[TOP]]),
    ("matmul", {"x": half(TOP, TOP)[None], "y": half(2, 1)[:, None]}, [[INF]]),
    ("conv", {"x": half(TOP, TOP).reshape(1, 2, 1, 1), "weight": half(2, -1).reshape(1, 2, 1, 1)}, [[[[TOP]]]]),
    ("layer_norm", {"x": half(TOP, -TOP), "axes": np.int32([0])}, [1, -1]),
    ("layer_norm", {"x": half(2**-8, -(2**-8))}, [0.777, -0.777]),  # sqrt(2^-16 / (2^-16 + 1e-5))
    ("maximum", {"x": half(NAN, -INF, 0), "y": half(0, TOP, -0.0)}, [NAN, TOP, 0]),
    ("clip", {"x": half(-INF, INF, 1), "alpha": half(-2)[0], "beta": half(2)[0]}, [-2, 2, 1]),
]  # fmt: skip


@pytest.mark.parametrize(("op", "arguments", "expected"), ENDS, ids=[f"{e[0]}-{i}" for i, e in enumerate(ENDS)])
def test_the_ends_of_fp16(op: str, arguments: dict[str, Array], expected: Any) -> None:
    result = compute(op, **arguments)
    assert result.dtype == F16
    np.testing.assert_array_equal(result, np.asarray(expected, F16))


def test_a_result_is_rounded_to_nearest_even() -> None:
    x = np.array([2049, 2051, 65519, 65520, 2**-25, 2**-25 * 1.001], F32)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(rounded(x, np.dtype(F16)), half(2048, 2052, TOP, INF, 0, 2**-24))


def stressed(op: str, **arguments: Any) -> tuple[float, float]:
    """The only value of the result: plainly, and with stress."""
    return compute(op, **arguments).item(), compute(op, stress=True, **arguments).item()


# 64 inputs make up 2048, every later block of 64 adds one half, which 2048 in fp16 does not notice.
SLOW = np.concatenate([np.full(64, 32), np.full(16 * 64, 2**-7)]).astype(F16)
# One block holds 2048 and 63 halves: in float32 that is 2079.5, and only then rounds to a multiple of 2.
BLOCK = np.concatenate([[2048], np.full(63, 0.5)]).astype(F16)
ONE = np.int32([0])


@pytest.mark.parametrize(("x", "plain", "stress"), [(SLOW, 2056, 2048), (BLOCK, 2080, 2080)])
def test_stress_rounds_running_sums_in_blocks(x: Array, plain: float, stress: float) -> None:
    ones = np.ones_like(x)
    assert stressed("reduce_sum", x=x, axes=ONE) == (plain, stress)
    assert stressed("matmul", x=x[None], y=ones[:, None]) == (plain, stress)
    assert stressed("matmul", x=x[:, None], y=ones[None], transpose_x=True, transpose_y=True) == (plain, stress)
    assert stressed("linear", x=x, weight=ones[None]) == (plain, stress)
    assert stressed("conv", x=x.reshape(1, -1, 1, 1), weight=ones.reshape(1, -1, 1, 1)) == (plain, stress)
    assert stressed("reduce_mean", x=x, axes=ONE) == (F16(x.sum(dtype=F32) / x.size), F16(stress / x.size))
    assert stressed("reduce_l1_norm", x=-x, axes=ONE) == (plain, stress)


def test_stress_sums_the_right_axes() -> None:
    ramp = np.array([1, 3, 9])[:, None, None, None] * np.array([1, 2])[:, None]
    x = (np.random.default_rng(5).uniform(0.1, 0.2, (3, 70, 2, 130)) * ramp).astype(F16)
    for axes in ([1], [3], [1, -1], [0, 2], [3, -3, 0]):
        at = np.int32(axes)
        plain, stress = (compute("reduce_sum", x=x, axes=at, keep_dims=True, stress=s) for s in (False, True))
        assert plain.shape == stress.shape
        np.testing.assert_allclose(plain.astype(F32), stress.astype(F32), rtol=STRESS_SUM)


def row_sums(x: Array) -> Array:
    """[rows, n] -> [rows, 1]: an fp16 running sum over blocks of 64."""
    total = np.zeros((len(x), 1), F32)
    for start in range(0, x.shape[1], 64):
        total = to_half(total + to_half(x[:, start : start + 64].sum(axis=1, keepdims=True)))
    return total


def layer_norm_by_steps(x: Array, gamma: Array, epsilon: Array) -> Array:
    n = F32(x.shape[1])
    centred = to_half(x - to_half(row_sums(x) / n))
    variance = to_half(row_sums(to_half(centred * centred)) / n)
    return to_half(to_half(centred * to_half(1 / np.sqrt(to_half(variance + epsilon)))) * gamma)


def log_sum_exp_by_steps(x: Array) -> Array:
    top = x.max(axis=1, keepdims=True)
    return to_half(np.log(row_sums(to_half(np.exp(to_half(x - top)))))) + top


def softmax_by_steps(x: Array) -> Array:
    powers = to_half(np.exp(to_half(x - x.max(axis=1, keepdims=True))))
    return powers / row_sums(powers)


AXIS, MANY = {"axes": np.int32([-1]), "keep_dims": np.True_}, np.random.default_rng(8).uniform(-3, 9, (300, 150))
GAMMA, EPSILON = MANY[0, :].astype(F16), half(0.01)[0]
NORM = {"axes": np.int32([-1]), "gamma": GAMMA, "epsilon": EPSILON}
STEPS: list[tuple[str, dict[str, Any], Any]] = [
    ("softmax", {}, softmax_by_steps),
    ("layer_norm", NORM, layer_norm_by_steps),
    ("reduce_log_sum_exp", AXIS, log_sum_exp_by_steps),
    ("reduce_sum_square", AXIS, lambda x: row_sums(to_half(x * x))),
    ("reduce_l2_norm", AXIS, lambda x: np.sqrt(row_sums(to_half(x * x)))),
    ("reduce_mean", AXIS, lambda x: row_sums(x) / F32(150)),
]


@pytest.mark.parametrize(("op", "given", "by_steps"), STEPS, ids=[s[0] for s in STEPS])
def test_stress_rounds_every_step_inside(op: str, given: dict[str, Any], by_steps: Any) -> None:
    x = MANY.astype(F16)
    wide = {name: value.astype(F32) for name, value in given.items() if name in ("gamma", "epsilon")}
    expected = by_steps(x.astype(F32), **wide).astype(F16)
    np.testing.assert_array_equal(compute(op, x=x, **given, stress=True), expected)
    assert np.any(expected != compute(op, x=x, **given))


def test_stress_rounds_inside_rsqrt() -> None:
    x = np.abs(MANY).astype(F16)
    expected = (1 / to_half(np.sqrt(to_half(x.astype(F32) + F32(EPSILON))))).astype(F16)
    np.testing.assert_array_equal(compute("rsqrt", x=x, epsilon=EPSILON, stress=True), expected)


def test_stress_rounds_the_differences_inside_log_sum_exp() -> None:
    """Three values a row, below one, so that the result's own rounding does not hide them."""
    x = ((MANY.reshape(-1, 3) - 9) / 4 + 0.9).astype(F16)
    expected = log_sum_exp_by_steps(x.astype(F32)).astype(F16)
    np.testing.assert_array_equal(compute("reduce_log_sum_exp", x=x, **AXIS, stress=True), expected)


def test_stress_rounds_before_a_norm_is_shifted() -> None:
    x, beta = MANY.astype(F16), GAMMA[::-1]
    given = {"x": x, "axes": np.int32([1]), "gamma": GAMMA, "stress": True}
    scaled, shifted = compute("layer_norm", **given), compute("layer_norm", **given, beta=beta)
    np.testing.assert_array_equal(shifted, (scaled.astype(F32) + beta.astype(F32)).astype(F16))


def test_the_norms_that_fp16_breaks_inside() -> None:
    """A row with one large value: its squares overflow inside the op, and only stress shows it."""
    x = half(20000, *np.linspace(-1, 1, 31))
    plain, stress = (compute("layer_norm", x=x, axes=ONE, stress=s) for s in (False, True))
    assert plain[0] > 5
    assert stress[0] == 0
    assert np.isfinite(compute("reduce_mean", x=half(*[TOP] * 4)))
    assert np.isinf(compute("reduce_mean", x=half(*[TOP] * 4), stress=True))


NEAR_ZERO = {"epsilon": EPSILON}
ROWS = {"axes": np.int32([1])}
REDUCTIONS = ("sum", "mean", "l1_norm", "l2_norm", "sum_square", "log_sum_exp")
COMPOSITES: dict[str, dict[str, Any]] = {
    **{"silu": {}, "softmax": {}, "gelu": {"mode": "EXACT"}, "layer_norm": ROWS},
    **{"rsqrt": NEAR_ZERO, "inverse": NEAR_ZERO, "log": NEAR_ZERO},
    **{f"reduce_{name}": ROWS for name in REDUCTIONS},
}
X = np.random.default_rng(2).uniform(0.1, 4, (16, 700)).astype(F16)
SIMPLE = ("abs", "ceil", "cos", "erf", "exp", "floor", "round", "sigmoid", "sign", "sqrt", "square", "tanh")


@pytest.mark.parametrize("op", COMPOSITES)
def test_stress_changes_composite_ops_of_fp16_only(op: str) -> None:
    given = {"x": X, **COMPOSITES[op]}
    plain, stress = compute(op, **given), compute(op, **given, stress=True)
    assert np.any(plain != stress)
    np.testing.assert_allclose(plain.astype(F32), stress.astype(F32), rtol=STRESS_OP, atol=STRESS_OP)
    wide = {k: v.astype(F32) if isinstance(v, np.ndarray | np.generic) else v for k, v in given.items()}
    np.testing.assert_array_equal(compute(op, dtype=F32, **wide), compute(op, dtype=F32, **wide, stress=True))


def gelu_by_steps(x: Array, mode: str) -> Array:
    if mode == "SIGMOID_APPROXIMATION":
        return x * to_half(1 / (1 + np.exp(-to_half(F32(1.702) * x))))
    if mode == "EXACT":
        inner = scipy.special.erf(x / F32(math.sqrt(2)))
    else:
        inner = np.tanh(to_half(F32(math.sqrt(2 / math.pi)) * (x + F32(0.044715) * x**3)))
    return F32(0.5) * x * to_half(1 + to_half(inner))


@pytest.mark.parametrize("mode", ["EXACT", "TANH_APPROXIMATION", "SIGMOID_APPROXIMATION"])
def test_stress_rounds_inside_every_gelu(mode: str) -> None:
    x = (MANY - 3).astype(F16)
    stress = compute("gelu", x=x, mode=mode, stress=True)
    # Another erf, and x**3 for x * x * x, fall on the other side of a half here and there.
    assert np.mean(stress != gelu_by_steps(x.astype(F32), mode).astype(F16)) < GELU_OTHER_HALF
    assert np.mean(stress != compute("gelu", x=x, mode=mode)) > 10 * GELU_OTHER_HALF


def test_stress_rounds_every_block_of_a_product() -> None:
    x, y = MANY[:20].astype(F16), MANY[100:130].T.astype(F16)
    wide_x, wide_y = x.astype(F32), y.astype(F32)
    expected = np.zeros((20, 30), F32)
    for block in (slice(0, 64), slice(64, 128), slice(128, 150)):
        expected = to_half(expected + to_half(wide_x[:, block] @ wide_y[block]))
    np.testing.assert_array_equal(compute("matmul", x=x, y=y, stress=True), expected.astype(F16))
    assert np.any(expected != compute("matmul", x=x, y=y))


@pytest.mark.parametrize("op", [*SIMPLE, "reduce_max", "reduce_min"])
def test_stress_leaves_simple_ops_alone(op: str) -> None:
    np.testing.assert_array_equal(compute(op, x=X), compute(op, x=X, stress=True))


def test_concat_interleaved() -> None:
    """The example of MIL's own definition, and the same along the other axis."""
    a, b = np.array([[1, 2], [3, 4], [5, 6]]), np.array([[7, 8], [9, 10], [11, 12]])
    yes = np.True_
    rows = compute("concat", values=[a, b], axis=np.int32(0), interleave=yes)
    np.testing.assert_array_equal(rows, [[1, 2], [7, 8], [3, 4], [9, 10], [5, 6], [11, 12]])
    columns = compute("concat", values=[a, b], axis=np.int32(-1), interleave=yes)
    np.testing.assert_array_equal(columns, [[1, 7, 2, 8], [3, 9, 4, 10], [5, 11, 6, 12]])


@pytest.mark.parametrize("bits", [1, 2, 4, 6, 8])
def test_the_older_form_of_a_lookup_table(bits: int) -> None:
    """iOS 16: packed indices, one table, the shape as a third parameter."""
    from coremltools.converters.mil.mil.ops.defs.iOS16 import constexpr_lut_to_dense
    from coremltools.optimize._utils import pack_elements_into_bits

    random = np.random.default_rng(bits)
    lut, shape = random.normal(size=2**bits).astype(F16), np.uint32([3, 5])
    indices = pack_elements_into_bits(random.integers(0, 2**bits, 15).astype(np.uint8), bits)
    expected = constexpr_lut_to_dense.decompress(lut, indices, shape)
    assert expected.shape == (3, 5)
    np.testing.assert_array_equal(compute("constexpr_lut_to_dense", indices=indices, lut=lut, shape=shape), expected)


REFUSED = [
    ("gelu", {"x": half(1), "mode": "FAST"}, "mode 'FAST' is not known"),
    ("gather", {"x": half(1, 2), "indices": np.int32(0), "batch_dims": np.int32(1)}, "batch_dims other than 0"),
    ("gather", {"x": half(1, 2), "indices": np.int32(2)}, "out of bounds"),
    ("split", {"x": half(1, 2), "axis": np.int32(0)}, "neither num_splits nor split_sizes"),
    ("slice_update", {"x": half(1, 2, 3), "update": half(9, 9), "begin": [2], "end": [4]}, r"holds \(1,\), not \(2,\)"),
    ("conv", {"x": half(1, 2)[None, None], "weight": half(1)[None, None], "pad_type": "full"}, "'full' is not known"),
    ("conv", {"x": half(1, 2)[None, None], "weight": half(1, 1)[None, None], "pad_type": "same"}, "odd padding"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "arguments", "reason"), REFUSED)
def test_what_is_not_defined_is_refused(op: str, arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises((ValueError, IndexError), match=reason):
        compute(op, **arguments)
