"""Every op of the reference engine against coremltools' own value inference; torch where Apple's ops have none."""

import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import Function as MilFunction
from coremltools.converters.mil.mil import types

from anechain.bundle.program import Function, Op, Program, Value
from anechain.run.ops import DTYPES
from anechain.run.reference import KNOWN_OPS, READ, UPDATE, ReferenceEngine
from tests.tolerances import OP_FP16_STEPS, OP_FP16_ULP, OP_FP32, OP_TORCH_FP32

Array = np.ndarray
FLOATS = (np.float16, np.float32)
UINT1, UINT4, INT4 = (types.nptype_from_builtin(t) for t in (types.uint1, types.uint4, types.int4))


@pytest.fixture(autouse=True)
def strict_warnings() -> Iterator[None]:
    """No warning of an overflow may leave the engine."""
    logging.getLogger("coremltools").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


class Draw:
    """Random inputs whose values are the same in every dtype, because all of them are fp16 numbers."""

    def __init__(self, dtype: type) -> None:
        self.dtype, self.random = dtype, np.random.default_rng(7)

    def __call__(self, *shape: int, low: float = -3.0, high: float = 3.0) -> Array:
        return self.random.uniform(low, high, shape).astype(np.float16).astype(self.dtype)

    def ints(self, *shape: int, low: int = -9, high: int = 9) -> Array:
        return self.random.integers(low, high, shape).astype(np.int32)

    def bools(self, *shape: int) -> Array:
        return self.random.integers(0, 2, shape).astype(bool)

    def number(self, value: float) -> Any:
        return self.dtype(value)


@dataclass(frozen=True)
class Case:
    """One op with inputs. `expected` stands in for ops that coremltools does not compute."""

    op: str
    build: Callable[[Draw], Any]
    expected: Callable[[Draw], list[Array]] | None = None


def mil(build: Callable[[], Any]) -> list[Any]:
    """The result variables of an op that the MIL Builder makes from constants."""
    with MilFunction({}, opset_version=ct.target.iOS18):
        made = build()
    return list(made) if isinstance(made, list | tuple) else [made]


def plain(value: Any) -> Array:
    array = np.asarray(value)
    return array.astype(np.int8 if array.dtype == INT4 else np.uint8) if array.dtype in (UINT1, UINT4, INT4) else array


def program_of(variables: list[Any], flowing: bool) -> tuple[Program, dict[str, Array]]:
    """One MIL op as a program; its tensors are inputs of the function (`flowing`) or constants, folded at load."""
    made = variables[0].op
    consts: dict[str, Array] = {}
    inputs: dict[str, Array] = {}
    names: dict[str, tuple[str, ...]] = {}
    for parameter, given in made.inputs.items():
        if given is None:
            continue
        several = given if isinstance(given, list | tuple) else [given]
        names[parameter] = tuple(f"{parameter}_{i}" for i in range(len(several)))
        spec = made.input_spec.input_types[parameter]
        into = inputs if flowing and not getattr(spec, "const", False) else consts
        into |= {name: plain(v.val) for name, v in zip(names[parameter], several, strict=True)}
    outputs = tuple(Value(v.name, tuple(v.shape), types.builtin_to_string(v.dtype)) for v in variables)
    words = {dtype: word for word, dtype in DTYPES.items()}
    ports = tuple(Value(name, x.shape, words[x.dtype]) for name, x in inputs.items())
    function = Function("main", ports, (), (Op(made.op_type, made.name, names, outputs),), outputs, consts)
    return Program(Path("case.mlpackage"), 9, {"main": function}), inputs


def run(program: Program, inputs: dict[str, Array]) -> list[Array]:
    outputs = {v.name: np.empty(v.shape, DTYPES[v.dtype]) for v in program.functions["main"].outputs}
    ReferenceEngine().load_programs([program]).step("main", inputs, None, outputs)
    return list(outputs.values())


def engine(variables: list[Any]) -> list[Array]:
    """The reference engine's results, the same whether they are computed at load or in a step."""
    folded, stepped = (run(*program_of(variables, flowing)) for flowing in (False, True))
    for a, b in zip(folded, stepped, strict=True):
        np.testing.assert_array_equal(a, b)
    return stepped


def inferred(variables: list[Any]) -> list[Array]:
    made = variables[0].op
    values = made.materialized_val_inference() if variables[0].val is None else [v.val for v in variables]
    return [np.asarray(v) for v in (values if isinstance(values, list | tuple) else [values])]


def ulps(a: Array, b: Array) -> float:
    """The largest distance in fp16 steps; two infinities of one sign, or two NaN, are 0 apart."""
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(all="ignore"):
        step = np.spacing(np.maximum(np.abs(a), np.abs(b)).astype(np.float16)).astype(np.float64)
        distance = np.where(same, 0.0, np.abs(a.astype(np.float64) - b.astype(np.float64)) / step)
    return float(np.max(distance, initial=0.0))


def torch_conv(x: Array, weight: Array, **options: Any) -> Array:
    function = {3: torch.nn.functional.conv1d, 4: torch.nn.functional.conv2d, 5: torch.nn.functional.conv3d}[x.ndim]
    bias, pad = options.pop("bias", None), options.pop("pad", [])
    x = np.pad(x, [(0, 0), (0, 0), *pad]) if pad else x
    tensors = [torch.from_numpy(np.asarray(a, np.float32)) for a in (x, weight)]
    if bias is not None:
        tensors.append(torch.from_numpy(bias.astype(np.float32)))
    return function(*tensors, **options).numpy()


def torch_silu(x: Array) -> Array:
    return torch.nn.functional.silu(torch.from_numpy(x.astype(np.float32))).numpy()


def unary(op: str, low: float = -3.0, high: float = 3.0, **parameters: Any) -> list[Case]:
    def build(d: Draw, shape: tuple[int, ...]) -> Any:
        given = {k: v if isinstance(v, str) else d.number(v) for k, v in parameters.items()}
        return getattr(mb, op)(x=d(*shape, low=low, high=high), **given)

    return [Case(op, lambda d, s=s: build(d, s)) for s in ((2, 3, 5), (7,))]


def binary(op: str, low: float = -3.0, high: float = 3.0) -> list[Case]:
    make = getattr(mb, op)
    pairs = [((2, 3), (2, 3)), ((3, 1, 5), (4, 1)), ((4,), ())]
    limits = {"low": low, "high": high}
    return [Case(op, lambda d, p=p: make(x=d(*p[0], **limits), y=d(*p[1], **limits))) for p in pairs]


def compared(op: str) -> list[Case]:
    make = getattr(mb, op)
    ties = np.array([[1.0, 2.0, 3.0]])
    return [*binary(op), Case(op, lambda d: make(x=ties.astype(d.dtype), y=ties.T.astype(d.dtype)))]


def integers(op: str) -> list[Case]:
    make = getattr(mb, op)
    return [Case(op, lambda d: make(x=d.ints(3, 4), y=d.ints(4, low=1)))]


def logical(op: str) -> list[Case]:
    make = getattr(mb, op)
    return [Case(op, lambda d: make(x=d.bools(3, 4), y=d.bools(4)))]


def reduction(op: str, low: float = -3.0) -> list[Case]:
    make = getattr(mb, op)
    choices: list[dict[str, Any]] = [
        {"axes": [1], "keep_dims": True},
        {"axes": [-1], "keep_dims": False},
        {"axes": [0, -2], "keep_dims": False},
        {"axes": [2, 0], "keep_dims": True},
        {"keep_dims": False},
    ]
    return [Case(op, lambda d, c=c: make(x=d(2, 5, 3, low=low), **c)) for c in choices]


def arg(op: str) -> list[Case]:
    make = getattr(mb, op)
    choices: list[dict[str, Any]] = [{"axis": 1, "keep_dims": True}, {"axis": -1}, {"axis": 0}]
    return [Case(op, lambda d, c=c: make(x=d(2, 5, 3), **c)) for c in choices]


def conv(
    shape: tuple[int, ...], kernel: tuple[int, ...], options: dict[str, Any], torchs: dict[str, Any], bias: bool = False
) -> Case:
    def tensors(d: Draw) -> dict[str, Array]:
        return {"x": d(*shape), "weight": d(*kernel)} | ({"bias": d(kernel[0])} if bias else {})

    return Case("conv", lambda d: mb.conv(**tensors(d), **options), lambda d: [torch_conv(**tensors(d), **torchs)])


MASK = np.eye(3, dtype=bool)


def sliced(op: str, update: tuple[int, ...] | None = None, **parameters: Any) -> Case:
    def build(d: Draw) -> Any:
        tensors = {"x": d(4, 5, 6)} | ({"update": d(*update)} if update else {})
        return getattr(mb, op)(**tensors, **parameters)

    return Case(op, build)


SHIFT_SCALE, LUT = "constexpr_blockwise_shift_scale", "constexpr_lut_to_dense"
BYTES = np.arange(-128, 128).astype(np.int8)
UNSIGNED = (np.uint8, UINT4)


def nibbles(dtype: type) -> Array:
    return np.random.default_rng(3).integers(0, 15, (4, 6)).astype(np.uint8).astype(dtype)


def shift_scale(data: Array, scale: Array, offset: Array | None = None) -> Any:
    given = {} if offset is None else {"offset": offset}
    return mb.constexpr_blockwise_shift_scale(data=data, scale=scale, **given)


def quantize_rows(d: Draw) -> Any:
    scale, zero = np.array([0.5, 1, 2], d.dtype), np.uint8([0, 20, 128])
    return mb.quantize(input=d(3, 4, low=-90, high=90), scale=scale, zero_point=zero, axis=-2, output_dtype="uint8")


def several(make: Callable[[str], list[Case]], *ops: str) -> list[Case]:
    return [case for op in ops for case in make(op)]


ELEMENTWISE = [
    *several(unary, "abs", "ceil", "cos", "erf", "exp", "floor", "relu", "round", "sigmoid", "sign", "sin", "square"),
    *unary("tanh"),
    *unary("sqrt", 0.0, 9.0),
    *unary("rsqrt", 0.01, 9.0),
    *unary("rsqrt", 0.0, 1.0, epsilon=0.25),
    *unary("inverse", 0.5, 9.0),
    *unary("inverse", 0.0, 9.0, epsilon=0.5),
    *unary("log", 0.01, 9.0),
    *unary("log", 0.0, 9.0, epsilon=0.5),
    *unary("clip", alpha=-1.25, beta=0.5),
    *unary("gelu"),
    *unary("gelu", mode="TANH_APPROXIMATION"),
    *unary("gelu", mode="SIGMOID_APPROXIMATION"),
    Case("abs", lambda d: mb.abs(x=d.ints(3, 4))),
    Case("square", lambda d: mb.square(x=d.ints(3, 4))),
    Case("round", lambda d: mb.round(x=np.array([-1.5, -0.5, 0.5, 1.5, 2.5], d.dtype))),
    Case("silu", lambda d: mb.silu(x=d(3, 5)), lambda d: [torch_silu(d(3, 5))]),
    Case("logical_not", lambda d: mb.logical_not(x=d.bools(3, 4))),
    *several(binary, "add", "sub", "mul", "maximum", "minimum"),
    *several(integers, "add", "sub", "mul", "maximum", "minimum", "floor_div", "mod"),
    *several(lambda op: binary(op, 0.5, 9.0), "real_div", "floor_div", "mod"),
    *binary("pow", 0.25, 2.0),
    Case("mod", lambda d: mb.mod(x=d(3, 4), y=d(4, low=0.5))),
    *several(compared, "equal", "not_equal", "less", "less_equal", "greater", "greater_equal"),
    *several(integers, "equal", "not_equal", "less", "less_equal", "greater", "greater_equal"),
    *several(logical, "logical_and", "logical_or", "logical_xor"),
]

SUMMED = [
    *several(reduction, "reduce_sum", "reduce_mean", "reduce_max", "reduce_min", "reduce_l1_norm", "reduce_l2_norm"),
    *several(reduction, "reduce_sum_square", "reduce_log_sum_exp"),
    *several(arg, "reduce_argmax", "reduce_argmin"),
    Case("reduce_sum", lambda d: mb.reduce_sum(x=d.ints(3, 4), axes=[0], keep_dims=True)),
    Case("matmul", lambda d: mb.matmul(x=d(3, 70), y=d(70, 5))),
    Case("matmul", lambda d: mb.matmul(x=d(2, 1, 70, 3), y=d(4, 5, 70), transpose_x=True, transpose_y=True)),
    Case("matmul", lambda d: mb.matmul(x=d(1, 3, 2, 8), y=d(1, 3, 6, 8), transpose_y=True)),
    Case("matmul", lambda d: mb.matmul(x=d(8, 2), y=d(3, 8, 4), transpose_x=True)),
    Case("matmul", lambda d: mb.matmul(x=d(8), y=d(8, 4))),
    Case("linear", lambda d: mb.linear(x=d(8), weight=d(5, 8))),
    Case("linear", lambda d: mb.linear(x=d(3, 8), weight=d(5, 8), bias=d(5))),
    Case("linear", lambda d: mb.linear(x=d(2, 3, 8), weight=d(5, 8), bias=d(5))),
    conv((1, 8, 1, 3), (5, 8, 1, 1), {}, {}),
    conv((2, 8, 3, 4), (5, 8, 1, 1), {}, {}, bias=True),
    conv((1, 6, 2, 3), (4, 3, 1, 1), {"groups": 2}, {"groups": 2}),
    conv(
        (2, 4, 7, 6),
        (6, 2, 3, 2),
        {"groups": 2, "strides": [2, 1], "pad_type": "custom", "pad": [1, 1, 2, 2]},
        {"groups": 2, "stride": (2, 1), "padding": (1, 2)},
        bias=True,
    ),
    conv((1, 3, 9, 8), (2, 3, 3, 3), {"dilations": [2, 1]}, {"dilation": (2, 1)}),
    conv((1, 3, 4, 5), (2, 3, 2, 2), {"pad_type": "custom", "pad": [1, 0, 0, 2]}, {"pad": [(1, 0), (0, 2)]}),
    conv((1, 3, 4), (2, 3, 1), {"pad_type": "custom", "pad": [2, 1]}, {"pad": [(2, 1)]}),
    conv((1, 3, 9), (2, 3, 3), {"pad_type": "same"}, {"padding": 1}),
    conv((1, 3, 9), (2, 3, 3), {"pad_type": "same_lower", "strides": [2]}, {"padding": 1, "stride": 2}),
    conv((1, 3, 4, 4), (2, 3, 1, 1), {"strides": [2, 2]}, {"stride": 2}),
    conv((1, 2, 4, 5, 3), (3, 2, 2, 1, 3), {}, {}, bias=True),
    Case("softmax", lambda d: mb.softmax(x=d(2, 5, 3))),
    Case("softmax", lambda d: mb.softmax(x=d(2, 5, 3), axis=1)),
    Case("softmax", lambda d: mb.softmax(x=d(2, 5, 3, low=-300, high=300), axis=-3)),
    Case("layer_norm", lambda d: mb.layer_norm(x=d(2, 5, 3), axes=[-1])),
    Case("layer_norm", lambda d: mb.layer_norm(x=d(2, 5, 3), axes=[-2, 2], gamma=d(5, 3), beta=d(5, 3))),
    Case("layer_norm", lambda d: mb.layer_norm(x=d(2, 5, 3), axes=[1], gamma=d(5), epsilon=d.number(0.5))),
]

MOVED = [
    Case("transpose", lambda d: mb.transpose(x=d(2, 3, 4, 5), perm=[0, 3, -3, 2])),
    Case("reshape", lambda d: mb.reshape(x=d(2, 3, 4), shape=[4, -1])),
    Case("reshape", lambda d: mb.reshape(x=d(2, 50), shape=[1, 0, -1, 0])),
    Case("expand_dims", lambda d: mb.expand_dims(x=d(2, 3), axes=[0, -1])),
    Case("expand_dims", lambda d: mb.expand_dims(x=d.ints(3), axes=[1, 2])),
    Case("squeeze", lambda d: mb.squeeze(x=d(1, 3, 1, 2), axes=[0, -2])),
    Case("squeeze", lambda d: mb.squeeze(x=d(1, 3, 1, 2))),
    Case("tile", lambda d: mb.tile(x=d(1, 3, 2), reps=[2, 1, 3])),
    Case("identity", lambda d: mb.identity(x=d(2, 3))),
    *(Case("cast", lambda d, t=t: mb.cast(x=d(3, 4), dtype=t)) for t in ("fp16", "fp32", "int32", "bool")),
    Case("cast", lambda d: mb.cast(x=d.ints(3), dtype="fp16")),
    Case("cast", lambda d: mb.cast(x=d.bools(9), dtype="int32")),
    Case("select", lambda d: mb.select(cond=d.bools(3, 1), a=d(3, 4), b=d(4))),
    Case("concat", lambda d: mb.concat(values=[d(2, 3), d(2, 1)], axis=1)),
    Case("concat", lambda d: mb.concat(values=[d(2, 3, 2), d(2, 5, 2), d(2, 1, 2)], axis=-2)),
    Case("concat", lambda d: mb.concat(values=[np.int32(3), np.int32(-1)], axis=0)),
    Case("stack", lambda d: mb.stack(values=[d(2, 3), d(2, 3)], axis=1)),
    Case("stack", lambda d: mb.stack(values=[d(2), d(2)], axis=-1)),
    Case("split", lambda d: mb.split(x=d(2, 6), num_splits=3, axis=1)),
    Case("split", lambda d: mb.split(x=d(2, 6, 3), split_sizes=[1, 3, 2], axis=-2)),
    Case("split", lambda d: mb.split(x=d(2, 6), num_splits=2, split_sizes=[4, 2], axis=1)),
    Case("gather", lambda d: mb.gather(x=d(5, 3), indices=np.int32([4, 0, -1]), axis=0)),
    Case("gather", lambda d: mb.gather(x=d(2, 5, 3), indices=np.int32([[4, 0], [1, 1]]), axis=-2)),
    Case("gather", lambda d: mb.gather(x=d(5, 3), indices=np.int32(2), axis=1)),
    sliced("slice_by_index", begin=[1, 0, 2], end=[3, 5, 3]),
    sliced("slice_by_index", begin=[1, 4, -3], end=[3, 0, -1], stride=[1, -2, 1]),
    sliced("slice_by_index", begin=[2, 1, 0], end=[3, 0, 4], begin_mask=MASK[0], end_mask=MASK[1], stride=[1, 2, 3]),
    sliced("slice_by_index", begin=[2, 1, -1], end=[3, 0, 0], end_mask=MASK[1], squeeze_mask=MASK[2]),
    sliced("slice_by_size", begin=[1, 0, -3], size=[2, -1, 3]),
    sliced("slice_update", (2, 3, 2), begin=[1, 2, 4], end=[3, 5, 6]),
    sliced("slice_update", (4, 2, 1), begin=[0, 1, -2], end=[4, 0, -1], stride=[1, 3, 1], end_mask=MASK[1]),
    sliced("slice_update", (3, 5), begin=[9, 0, 2], end=[3, 5, 0], begin_mask=MASK[0], squeeze_mask=MASK[2]),
]

STORED = [
    *(Case(SHIFT_SCALE, lambda d, t=t: shift_scale(nibbles(t), d(2, 3), nibbles(t)[:2, :3])) for t in UNSIGNED),
    Case(SHIFT_SCALE, lambda d: shift_scale(BYTES.reshape(8, 32, 1, 1), d(8, 1, 1, 1))),
    Case(SHIFT_SCALE, lambda d: shift_scale(BYTES.reshape(2, 128), d(2, 4), BYTES[::32].reshape(2, 4))),
    Case(SHIFT_SCALE, lambda d: shift_scale(BYTES[120:136].astype(INT4).reshape(2, 8), d(1, 4))),
    Case(LUT, lambda d: mb.constexpr_lut_to_dense(indices=nibbles(UINT4), lut=d(2, 1, 16, 1))),
    Case(LUT, lambda d: mb.constexpr_lut_to_dense(indices=nibbles(UINT4), lut=d(2, 3, 16, 2), vector_axis=0)),
    Case(LUT, lambda d: mb.constexpr_lut_to_dense(indices=nibbles(UINT4), lut=d(1, 2, 16, 3), vector_axis=-1)),
    Case("quantize", lambda d: mb.quantize(input=d(3, 4), scale=d.number(0.25), output_dtype="int8")),
    Case("quantize", lambda d: quantize_rows(d)),
    Case("dequantize", lambda d: mb.dequantize(input=BYTES.reshape(4, 64), scale=d.number(0.3))),
    Case(
        "dequantize",
        lambda d: mb.dequantize(
            input=BYTES.view(np.uint8).reshape(64, 4), scale=d(4), zero_point=np.uint8([0, 9, 12, 255]), axis=1
        ),
    ),
]

CASES = [*ELEMENTWISE, *SUMMED, *MOVED, *STORED]
INFERRED = [case for case in CASES if case.expected is None]
IDS = [f"{case.op}-{i}" for i, case in enumerate(CASES)]


def test_every_op_has_a_case() -> None:
    assert {case.op for case in CASES} == set(KNOWN_OPS) - {READ, UPDATE}
    assert len(KNOWN_OPS) > 70


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_fp32(case: Case) -> None:
    variables = mil(lambda: case.build(Draw(np.float32)))
    assert variables[0].op.op_type == case.op
    expected = inferred(variables) if case.expected is None else case.expected(Draw(np.float32))
    actual = engine(variables)
    tolerance = OP_FP32 if case.expected is None else OP_TORCH_FP32
    assert len(actual) == len(expected) > 0
    for a, e in zip(actual, expected, strict=True):
        assert a.size > 0
        assert a.shape == e.shape
        np.testing.assert_allclose(a.astype(np.float64), e.astype(np.float64), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_fp16_is_the_fp32_result_rounded_once(case: Case) -> None:
    variables = mil(lambda: case.build(Draw(np.float16)))
    wide = mil(lambda: case.build(Draw(np.float32)))
    expected = inferred(wide) if case.expected is None else case.expected(Draw(np.float32))
    actual = engine(variables)
    assert len(actual) == len(expected) > 0
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape
        assert ulps(a, e.astype(a.dtype)) <= OP_FP16_ULP


@pytest.mark.parametrize("case", INFERRED, ids=[f"{case.op}-{i}" for i, case in enumerate(INFERRED)])
def test_fp16_against_fp16(case: Case) -> None:
    variables = mil(lambda: case.build(Draw(np.float16)))
    for a, e in zip(engine(variables), inferred(variables), strict=True):
        scale = float(np.max(np.abs(e.astype(np.float64)), initial=1.0))
        np.testing.assert_allclose(a.astype(np.float64), e.astype(np.float64), rtol=0, atol=OP_FP16_STEPS * scale)
