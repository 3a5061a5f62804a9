"""A program in MIL, Core ML's intermediate language, while it is built: every op with its shape and dtype, in order.

The functions here take what coremltools' MIL Builder takes and leave the same ops, names and constants, so that
`graph.py` reads as if it were written for it; a test builds every form with both and compares the files byte for byte
(docs/decisions/0025-our-own-writer.md). An argument that is no Var becomes a constant of its own, named
`<op>_<parameter>_<n>`. What does not fit together is an error here, before anything is written.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import numpy as np

Shape = tuple[int, ...]


@dataclass(eq=False, slots=True)
class Var:
    """A value that flows, or a constant; `op` is what gives it, None for an input of the function."""

    name: str
    shape: Shape
    dtype: str
    op: "Op | None" = None
    is_state: bool = False


Argument = Var | list[Var]


@dataclass(eq=False, slots=True)
class Op:
    """One operation. A `const` has a `value`; two of them with the same `weight_id` are stored once."""

    kind: str
    name: str
    inputs: dict[str, Argument]
    outputs: list[Var] = field(default_factory=list)
    value: np.ndarray | str | None = None
    weight_id: str | None = None


class Function:
    """A function's inputs, ops and outputs. Inside `with`, ops are added to it."""

    def __init__(self, inputs: Mapping[str, Var]) -> None:
        self.inputs, self.outputs, self.ops = dict(inputs), list[Var](), list[Op]()
        self._names: Counter[str] = Counter()  # how often a name has been asked for
        for name, var in self.inputs.items():
            var.name = name

    def __enter__(self) -> Self:
        _building.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _building.pop()

    def set_outputs(self, outputs: Sequence[Var]) -> None:
        self.outputs = list(outputs)

    def free_name(self, name: str) -> str:
        """`name` with a number behind it that makes it new."""
        self._names[name] += 1
        return f"{name}_{self._names[name] - 1}"


@dataclass(frozen=True)
class Program:
    """Functions by name; the first is the default."""

    functions: Mapping[str, Function]


_building: list[Function] = []


def placeholder(shape: Shape, dtype: str) -> Var:
    """An input of a function; the function names it."""
    return Var("", tuple(shape), dtype)


def state_placeholder(shape: Shape) -> Var:
    """A state of a function: Core ML knows fp16 ones only."""
    return Var("", tuple(shape), "fp16", is_state=True)


def const(val: Any, name: str, dtype: str | None = None, weight_id: str | None = None) -> Var:
    """A constant; `dtype` says how its elements are stored where numpy has no word for it: int4, uint6 or uint4."""
    value: np.ndarray | str = val if isinstance(val, str) else np.asarray(val)
    if isinstance(value, np.ndarray) and value.dtype == np.int64:
        value = value.astype(np.int32)  # Python's whole numbers
    op = Op("const", name, {}, value=value, weight_id=weight_id)
    return _append(op, _shape(value), dtype or _dtype(value))


def _shape(value: np.ndarray | str) -> Shape:
    return () if isinstance(value, str) else value.shape


def _dtype(value: np.ndarray | str) -> str:
    return "string" if isinstance(value, str) else _NAMES[value.dtype.name]


_NAMES = {
    "bool": "bool", "float16": "fp16", "float32": "fp32", "int8": "int8", "int32": "int32", "uint8": "uint8",
}  # fmt: skip


def op(
    kind: str, given: Mapping[str, Any], result: Shape | Sequence[Shape], dtype: str, name: str | None, **defaults: Any
) -> Any:
    """Adds an op and returns its result, or the list of them for a list of shapes.

    `given` are its arguments in the order in which their constants are made; those of `defaults` that are not given
    come after them. None is an argument that is left out.
    """
    function = _building[-1]
    name = function.free_name(kind) if name is None else name
    inputs: dict[str, Argument] = {}
    left = {parameter: value for parameter, value in defaults.items() if given.get(parameter) is None}
    for parameter, value in (*given.items(), *left.items()):
        if isinstance(value, Var) or (isinstance(value, list) and all(isinstance(v, Var) for v in value)):
            inputs[parameter] = value
        elif value is not None:
            inputs[parameter] = const(value, function.free_name(f"{name}_{parameter}"))
    made = Op(kind, name, inputs)
    if isinstance(result, tuple):
        return _append(made, result, dtype)
    made.outputs = [Var(f"{name}_{i}", shape, dtype, made) for i, shape in enumerate(result)]
    function.ops.append(made)
    return made.outputs


def _append(made: Op, shape: Shape, dtype: str) -> Var:
    made.outputs = [Var(made.name, shape, dtype, made)]
    _building[-1].ops.append(made)
    return made.outputs[0]


# Ops of one result that has the shape of what goes in, or of both together


def _binary(kind: str, x: Any, y: Any, name: str | None) -> Var:
    shapes = [v.shape if isinstance(v, Var) else np.shape(v) for v in (x, y)]
    dtypes = [v.dtype if isinstance(v, Var) else _dtype(np.asarray(v)) for v in (x, y)]
    assert dtypes[0] == dtypes[1], (kind, name, dtypes)
    made: Var = op(kind, {"x": x, "y": y}, np.broadcast_shapes(*shapes), dtypes[0], name)
    return made


def add(*, x: Any, y: Any, name: str | None = None) -> Var:
    return _binary("add", x, y, name)


def sub(*, x: Any, y: Any, name: str | None = None) -> Var:
    return _binary("sub", x, y, name)


def mul(*, x: Any, y: Any, name: str | None = None) -> Var:
    return _binary("mul", x, y, name)


def real_div(*, x: Any, y: Any, name: str | None = None) -> Var:
    return _binary("real_div", x, y, name)


def maximum(*, x: Any, y: Any, name: str | None = None) -> Var:
    return _binary("maximum", x, y, name)


def _unary(kind: str, x: Var, name: str | None, **arguments: Any) -> Var:
    made: Var = op(kind, {"x": x, **arguments}, x.shape, x.dtype, name)
    return made


def abs(*, x: Var, name: str | None = None) -> Var:
    return _unary("abs", x, name)


def silu(*, x: Var, name: str | None = None) -> Var:
    return _unary("silu", x, name)


def gelu(*, x: Var, mode: str, name: str | None = None) -> Var:
    return _unary("gelu", x, name, mode=mode)


def rsqrt(*, x: Var, epsilon: Any, name: str | None = None) -> Var:
    return _unary("rsqrt", x, name, epsilon=epsilon)


def softmax(*, x: Var, axis: int, name: str | None = None) -> Var:
    return _unary("softmax", x, name, axis=axis)


def layer_norm(*, x: Var, axes: list[int], epsilon: Any, name: str | None = None) -> Var:
    return _unary("layer_norm", x, name, axes=axes, epsilon=epsilon)


def cast(*, x: Var, dtype: str, name: str | None = None) -> Var:
    made: Var = op("cast", {"x": x, "dtype": dtype}, x.shape, dtype, name)
    return made


def quantize(*, input: Var, scale: Any, output_dtype: str, name: str | None = None) -> Var:
    given = {"input": input, "scale": scale, "output_dtype": output_dtype}
    made: Var = op("quantize", given, input.shape, output_dtype, name)
    return made


def dequantize(*, input: Var, scale: Any, name: str | None = None) -> Var:
    made: Var = op("dequantize", {"input": input, "scale": scale}, input.shape, _dtype(np.asarray(scale)), name)
    return made


# Shapes


def reshape(*, x: Var, shape: list[int], name: str | None = None) -> Var:
    assert math.prod(shape) == math.prod(x.shape), (name, x.shape, shape)
    made: Var = op("reshape", {"x": x, "shape": shape}, tuple(shape), x.dtype, name)
    return made


def transpose(*, x: Var, perm: list[int], name: str | None = None) -> Var:
    assert sorted(perm) == list(range(len(x.shape))), (name, x.shape, perm)
    made: Var = op("transpose", {"x": x, "perm": perm}, tuple(x.shape[axis] for axis in perm), x.dtype, name)
    return made


def concat(*, values: list[Var], axis: int, name: str | None = None) -> Var:
    rests = {(v.shape[:axis], v.shape[axis + 1 :], v.dtype) for v in values}
    assert len(rests) == 1, (name, [(v.shape, v.dtype) for v in values])
    ((before, after, dtype),) = rests
    shape = (*before, sum(v.shape[axis] for v in values), *after)
    made: Var = op("concat", {"values": list(values), "axis": axis}, shape, dtype, name, interleave=False)
    return made


def split(
    *, x: Var, axis: int, num_splits: int | None = None, split_sizes: list[int] | None = None, name: str | None = None
) -> list[Var]:
    whole = x.shape[axis]
    sizes = split_sizes or [whole // (num_splits or 1)] * (num_splits or 1)
    assert sum(sizes) == whole, (name, x.shape, sizes)
    shapes = [(*x.shape[:axis], size, *x.shape[axis + 1 :]) for size in sizes]
    given = {"x": x, "num_splits": num_splits, "split_sizes": split_sizes, "axis": axis}
    made: list[Var] = op("split", given, shapes, x.dtype, name)
    return made


# Sums


def _reduce(kind: str, x: Var, axes: list[int], keep_dims: bool, name: str | None) -> Var:
    assert keep_dims, name
    shape = tuple(1 if axis in axes else size for axis, size in enumerate(x.shape))
    made: Var = op(kind, {"x": x, "axes": axes, "keep_dims": keep_dims}, shape, x.dtype, name)
    return made


def reduce_max(*, x: Var, axes: list[int], keep_dims: bool, name: str | None = None) -> Var:
    return _reduce("reduce_max", x, axes, keep_dims, name)


def reduce_mean(*, x: Var, axes: list[int], keep_dims: bool, name: str | None = None) -> Var:
    return _reduce("reduce_mean", x, axes, keep_dims, name)


def reduce_sum(*, x: Var, axes: list[int], keep_dims: bool, name: str | None = None) -> Var:
    return _reduce("reduce_sum", x, axes, keep_dims, name)


def matmul(
    *, x: Var, y: Var, transpose_x: bool | None = None, transpose_y: bool | None = None, name: str | None = None
) -> Var:
    rows, inner = x.shape[-2:][:: -1 if transpose_x else 1]
    other, columns = y.shape[-2:][:: -1 if transpose_y else 1]
    assert inner == other and x.dtype == y.dtype, (name, x.shape, y.shape, x.dtype, y.dtype)
    shape = (*np.broadcast_shapes(x.shape[:-2], y.shape[:-2]), rows, columns)
    given = {"x": x, "y": y, "transpose_x": transpose_x, "transpose_y": transpose_y}
    made: Var = op("matmul", given, shape, x.dtype, name, transpose_x=False, transpose_y=False)
    return made


def conv(*, x: Var, weight: Var, pad_type: str, bias: Var | None = None, name: str | None = None) -> Var:
    """A 1x1 convolution of one stride: x [1, I, 1, Q], weight [O, I, 1, 1], bias [O] -> [1, O, 1, Q]."""
    outputs, inputs, *window = weight.shape
    assert inputs == x.shape[1] and window == [1, 1] and x.dtype == weight.dtype, (name, x.shape, weight.shape)
    assert bias is None or (bias.shape, bias.dtype) == ((outputs,), x.dtype), (name, bias)
    given = {"x": x, "weight": weight, "bias": bias, "pad_type": pad_type}
    shape = (x.shape[0], outputs, *x.shape[2:])
    defaults = {"strides": [1, 1], "pad": [0, 0, 0, 0], "dilations": [1, 1], "groups": 1}
    made: Var = op("conv", given, shape, x.dtype, name, **defaults)
    return made


# Weights


def constexpr_blockwise_shift_scale(*, data: Var, scale: Var, name: str) -> Var:
    """data [O, I, 1, 1] times scale [O, blocks, 1, 1]."""
    assert all(n % m == 0 for n, m in zip(data.shape, scale.shape, strict=True)), (name, data.shape, scale.shape)
    made: Var = op("constexpr_blockwise_shift_scale", {"data": data, "scale": scale}, data.shape, scale.dtype, name)
    return made


def constexpr_lut_to_dense(*, indices: Var, lut: Var, name: str) -> Var:
    """The entries of lut [G, 1, 1, 1, entries, 1] at indices [O, I, 1, 1]."""
    assert all(n % m == 0 for n, m in zip(indices.shape, lut.shape[:-2], strict=True)), (indices.shape, lut.shape)
    made: Var = op("constexpr_lut_to_dense", {"indices": indices, "lut": lut}, indices.shape, lut.dtype, name)
    return made


# State


def read_state(*, input: Var, name: str | None = None) -> Var:
    made: Var = op("read_state", {"input": input}, input.shape, input.dtype, name)
    return made


def coreml_update_state(*, state: Var, value: Var, name: str | None = None) -> Var:
    assert state.is_state and (value.shape, value.dtype) == (state.shape, state.dtype), (name, value.shape, value.dtype)
    made: Var = op("coreml_update_state", {"state": state, "value": value}, state.shape, state.dtype, name)
    return made


def slice_update(
    *,
    x: Var,
    update: Var,
    begin: Var,
    end: Var,
    begin_mask: list[bool] | None = None,
    end_mask: list[bool] | None = None,
    name: str | None = None,
) -> Var:
    assert len(update.shape) == len(x.shape) and update.dtype == x.dtype, (name, x.shape, update.shape)
    given = {"x": x, "update": update, "begin": begin, "end": end, "begin_mask": begin_mask, "end_mask": end_mask}
    made: Var = op("slice_update", given, x.shape, x.dtype, name)
    return made
