"""How each MIL op is said in OpenVINO's ops: one function an op, with the parameters that MIL gives it."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from anechain.bundle.program import Function, Op, Program
from anechain.errors import EngineError
from anechain.run.openvino_graph import Graph, Node, Tensor
from anechain.run.ops import DTYPES, rounded
from anechain.run.ops_weight import WEIGHTS

Make = Callable[..., Any]
Name = str | None  # the value that a parameter of an op is given; None where it is left out


def translate(ov: Any, program: Program, function: Function, inputs: Mapping[str, Node]) -> Graph:
    """The graph with the values of all ops. Raises EngineError, naming the op, for one that it cannot translate."""
    graph = Graph(ov, function, inputs)
    for op in function.ops:
        arguments = {p: list(names) if p == "values" else names[0] for p, names in op.inputs.items()}
        try:
            made = OPS[op.type](graph, op, **arguments)
            for value, tensor in zip(op.outputs, made if isinstance(made, list) else [made], strict=True):
                if tensor is None:
                    continue
                if tuple(tensor.shape) != value.shape:
                    raise ValueError(f"it gives {tuple(tensor.shape)} where the program declares {value.shape}")
                graph.tensors[value.name] = tensor
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            reason = str(error).strip().splitlines()[-1].rstrip(".")
            raise EngineError(
                f"op {op.type} named {op.name!r} in function {function.name!r} of {program.path.name} cannot be "
                f"translated, because {reason}: use the reference engine, or check the package with `anechain lint`."
            ) from error
    return graph


def _unary(name: str) -> Make:
    def translated(g: Graph, op: Op, x: str) -> Tensor:
        return g.elementwise(getattr(g.ops, name), g.tensor(x))

    return translated


def _binary(name: str) -> Make:
    def translated(g: Graph, op: Op, x: str, y: str) -> Tensor:
        return g.elementwise(getattr(g.ops, name), g.tensor(x), g.tensor(y))

    return translated


def _reduction(name: str) -> Make:
    def translated(g: Graph, op: Op, x: str, axes: Name = None, keep_dims: Name = None) -> Tensor:
        t = g.tensor(x)
        places = np.array([t.place(int(a)) for a in g.const(axes, t.order)])
        return g.reshape(Tensor(getattr(g.ops, name)(t.node, places, True).output(0), t.order), op.outputs[0].shape)

    return translated


def _identity(g: Graph, op: Op, x: str) -> Tensor:
    return g.tensor(x)


def _square(g: Graph, op: Op, x: str) -> Tensor:
    return g.elementwise(lambda node: g.ops.multiply(node, node), g.tensor(x))


def _cast(g: Graph, op: Op, x: str, dtype: Name = None) -> Tensor:
    dtype_wanted = DTYPES[op.outputs[0].dtype]
    kind = np.float32 if dtype_wanted.kind == "f" else dtype_wanted.type
    return g.elementwise(lambda node: g.ops.convert(node, kind), g.tensor(x))


def _gelu(g: Graph, op: Op, x: str, mode: Name = None) -> Tensor:
    kind = str(g.const(mode, "EXACT"))
    if kind == "SIGMOID_APPROXIMATION":
        return g.elementwise(lambda node: g.ops.swish(node, np.float32(1.702)), g.tensor(x))
    form = {"EXACT": "erf", "TANH_APPROXIMATION": "tanh"}[kind]
    return g.elementwise(lambda node: g.ops.gelu(node, form), g.tensor(x))


def _epsilon(g: Graph, op: Op, name: Name, default: float) -> np.float32:
    """MIL has the default in the op's dtype: 1e-12 is 0 in fp16."""
    return np.float32(g.const(name, DTYPES[op.outputs[0].dtype].type(default)))


def _rsqrt(g: Graph, op: Op, x: str, epsilon: Name = None) -> Tensor:
    least = _epsilon(g, op, epsilon, 1e-12)
    return g.elementwise(lambda node: g.ops.divide(np.float32(1), g.ops.sqrt(g.ops.add(node, least))), g.tensor(x))


def _softmax(g: Graph, op: Op, x: str, axis: Name = None) -> Tensor:
    t = g.tensor(x)
    return Tensor(g.ops.softmax(t.node, t.place(int(g.const(axis, -1)))).output(0), t.order)


def _layer_norm(
    g: Graph, op: Op, x: str, axes: Name = None, gamma: Name = None, beta: Name = None, epsilon: Name = None
) -> Tensor:
    t = g.tensor(x)
    over = [int(a) % len(t.order) for a in g.const(axes, t.order)]
    places, least = g.ops.constant(np.array([t.place(a) for a in over])), float(_epsilon(g, op, epsilon, 1e-5))
    y = Tensor(g.ops.mvn(t.node, places, True, least, "inside_sqrt").output(0), t.order)
    for part, make in ((gamma, g.ops.multiply), (beta, g.ops.add)):
        if part is not None:
            shape = [n if i in over else 1 for i, n in enumerate(t.shape)]
            y = g.elementwise(make, y, g.reshape(g.tensor(part), shape))
    return y


def _linear(g: Graph, op: Op, x: str, weight: str, bias: Name = None, axis: int = -1) -> Tensor:
    """Every vector along `axis` times the matrix [O, I], plus the bias [O]."""
    t = g.tensor(x)
    last = axis % len(t.order)
    order = (*(a for a in t.order if a != last), last)
    node = g.ops.matmul(g.laid(t, order), g.matrix(weight), False, True)
    return Tensor((node if bias is None else g.ops.add(node, g.node(bias))).output(0), order)


def _conv(
    g: Graph, op: Op, x: str, weight: str, bias: Name = None, strides: Name = None, pad_type: Name = None,
    pad: Name = None, dilations: Name = None, groups: Name = None,
) -> Tensor:  # fmt: skip
    kernel = g.weights[weight]["data"] if weight in g.weights else g.const(weight)
    padded = str(g.const(pad_type, "valid")) == "custom" and np.any(g.const(pad, 0))
    if max(kernel.shape[2:]) > 1 or np.any(g.const(strides, 1) != 1) or padded or g.const(groups, 1) != 1:
        raise ValueError("this engine knows only 1x1 convolutions without strides, padding and groups")
    return _linear(g, op, x, weight, bias, axis=1)


def _matmul(g: Graph, op: Op, x: str, y: str, transpose_x: Name = None, transpose_y: Name = None) -> Tensor:
    flags = (bool(g.const(transpose_x, False)), bool(g.const(transpose_y, False)))
    return g.plain(g.ops.matmul(g.node(x), g.node(y), *flags).output(0))


def _transpose(g: Graph, op: Op, x: str, perm: str) -> Tensor:
    t = g.tensor(x)
    axes = [int(a) % len(t.order) for a in g.const(perm)]
    return Tensor(t.node, tuple(axes.index(axis) for axis in t.order))


def _shape(g: Graph, op: Op, x: str, shape: Name = None, axes: Name = None) -> Tensor:
    """reshape, expand_dims and squeeze: the shape that the program declares for the result says it all."""
    return g.reshape(g.tensor(x), op.outputs[0].shape)


def _tile(g: Graph, op: Op, x: str, reps: str) -> Tensor:
    return g.plain(g.ops.tile(g.node(x), g.node(reps)).output(0))


def _concat(g: Graph, op: Op, values: list[str], axis: str, interleave: Name = None) -> Tensor:
    if g.const(interleave, False):
        raise ValueError("interleave is not supported")
    tensors = [t if t.order else g.reshape(t, [1]) for t in map(g.tensor, values)]
    lead = max(tensors, key=lambda t: math.prod(t.shape))
    nodes = [g.laid(t, lead.order) for t in tensors]
    return Tensor(g.ops.concat(nodes, lead.place(int(g.const(axis)))).output(0), lead.order)


def _split(g: Graph, op: Op, x: str, axis: str, num_splits: Name = None, split_sizes: Name = None) -> list[Tensor]:
    t, at = g.tensor(x), int(g.const(axis))
    sizes = np.array([value.shape[at] for value in op.outputs])
    sizes[np.argmax(sizes)] = -1  # "the rest": the cells of a state may be fewer than its program declares
    return [Tensor(node, t.order) for node in g.ops.variadic_split(t.node, np.int64(t.place(at)), sizes).outputs()]


def _slice_by_index(
    g: Graph, op: Op, x: str, begin: str, end: str, stride: Name = None, begin_mask: Name = None,
    end_mask: Name = None, squeeze_mask: Name = None,
) -> Tensor:  # fmt: skip
    rank = len(g.tensor(x).order)
    starts, ends, single = (
        np.asarray(g.const(mask, [False] * rank), int).tolist() for mask in (begin_mask, end_mask, squeeze_mask)
    )
    steps = np.asarray(g.const(stride, [1] * rank), np.int32)
    sliced = g.ops.strided_slice(g.node(x), g.node(begin), g.node(end), steps, starts, ends, [], single)
    return g.plain(sliced.output(0))


def _slice_by_size(g: Graph, op: Op, x: str, begin: str, size: str) -> Tensor:
    shape = np.array(g.tensor(x).shape, np.int32)
    start = g.ops.floor_mod(g.node(begin), shape)  # a negative begin counts from the end
    stop = g.ops.add(start, np.array(op.outputs[0].shape, np.int32))
    return g.plain(g.ops.slice(g.node(x), start, stop, np.ones_like(shape)).output(0))


def _slice_update(
    g: Graph, op: Op, x: str, update: str, begin: str, end: str, stride: Name = None, begin_mask: Name = None,
    end_mask: Name = None, squeeze_mask: Name = None,
) -> None:  # fmt: skip
    shape, written = np.array(op.outputs[0].shape, np.int32), g.tensor(update).shape
    partly = [axis for axis, n in enumerate(written) if n != shape[axis]]
    fixed = begin in g.consts and end in g.consts
    if np.any(g.const(squeeze_mask, False)):
        raise ValueError("squeeze_mask is not supported")
    if not fixed and (len(partly) > 1 or np.any(g.const(stride, 1) != 1)):
        raise ValueError("a box that the program does not fix may cut one axis only, without a stride")

    def make() -> Tensor:
        if fixed:
            none, steps = np.zeros(len(shape), bool), np.asarray(g.const(stride, np.ones_like(shape)), np.int32)
            start = np.where(g.const(begin_mask, none), 0, g.const(begin)).astype(np.int32)
            stop = np.where(g.const(end_mask, none), shape, g.const(end)).astype(np.int32)
            axes = np.arange(len(shape), dtype=np.int32)
            return g.plain(g.ops.slice_scatter(g.node(x), g.node(update), start, stop, steps, axes).output(0))
        # OpenVINO 2026.4 crashes when it compiles a slice_scatter whose box is an input.
        node = g.node(update)
        for axis in partly:
            first = g.ops.gather(g.node(begin), np.array([axis]), np.int32(0))
            places = g.ops.add(g.ops.floor_mod(first, shape[axis]), np.arange(written[axis], dtype=np.int32))
            node = g.ops.scatter_update(g.node(x), places, node, np.int32(axis)).output(0)
        return g.plain(node)

    g.updates[op.outputs[0].name] = make


def _along(g: Graph, name: Name, axis: Name, rank: int) -> Tensor:
    """A scale or zero point (0 where it is left out) as f32: one for all, or a vector along `axis`."""
    array = g.const(name, 0).astype(np.float32)
    if array.ndim:
        at = int(g.const(axis)) % rank
        array = array.reshape([-1 if i == at else 1 for i in range(rank)])
    return g.plain(g.ops.constant(array).output(0))


def _quantize(
    g: Graph, op: Op, input: str, scale: str, output_dtype: Name = None, zero_point: Name = None, axis: Name = None
) -> Tensor:
    t, kind = g.tensor(input), DTYPES[op.outputs[0].dtype].type
    low, high = float(np.iinfo(kind).min), float(np.iinfo(kind).max)
    parts = (_along(g, name, axis, len(t.order)) for name in (scale, zero_point))

    def make(x: Node, scale: Node, zero: Node) -> Any:
        steps = g.ops.add(g.ops.round(g.ops.divide(x, scale), "half_to_even"), zero)
        return g.ops.convert(g.ops.clamp(steps, low, high), kind)

    return g.elementwise(make, t, *parts)


def _dequantize(g: Graph, op: Op, input: str, scale: str, zero_point: Name = None, axis: Name = None) -> Tensor:
    t = g.tensor(input)
    parts = (_along(g, name, axis, len(t.order)) for name in (scale, zero_point))
    return g.elementwise(lambda x, scale, zero: g.ops.multiply(g.ops.subtract(g.float(x), zero), scale), t, *parts)


def _blockwise(g: Graph, op: Op, data: str, scale: str, offset: Name = None) -> None:
    parts = {"data": data, "scale": scale, "offset": offset}
    g.weights[op.outputs[0].name] = {part: g.const(name) for part, name in parts.items() if name is not None}


def _table(g: Graph, op: Op, indices: str, lut: str, vector_axis: Name = None, shape: Name = None) -> None:
    parts = {"indices": indices, "lut": lut, "vector_axis": vector_axis, "shape": shape}
    dense = WEIGHTS[op.type](None, **{part: g.const(name) for part, name in parts.items() if name is not None})
    g.consts[op.outputs[0].name] = rounded(dense, DTYPES[op.outputs[0].dtype])


def _read_state(g: Graph, op: Op, input: str) -> Tensor:
    return g.tensor(input)


def _update_state(g: Graph, op: Op, state: str, value: str) -> None:
    g.updates[op.outputs[0].name] = lambda: g.tensor(value)


OPS: dict[str, Make] = {
    **{name: _unary(other) for name, other in {"abs": "absolute", "silu": "swish"}.items()},
    **{name: _unary(name) for name in ("exp", "sigmoid", "sqrt", "tanh")},
    **{name: _binary(name) for name in ("add", "maximum", "minimum")},
    **{name: _binary(other) for name, other in {"mul": "multiply", "real_div": "divide", "sub": "subtract"}.items()},
    **{name: _reduction(name) for name in ("reduce_max", "reduce_mean", "reduce_sum")},
    **{name: _shape for name in ("expand_dims", "reshape", "squeeze")},
    "cast": _cast, "concat": _concat, "constexpr_blockwise_shift_scale": _blockwise, "constexpr_lut_to_dense": _table,
    "conv": _conv, "coreml_update_state": _update_state, "dequantize": _dequantize, "gelu": _gelu,
    "identity": _identity, "layer_norm": _layer_norm, "linear": _linear, "matmul": _matmul, "quantize": _quantize,
    "read_state": _read_state, "rsqrt": _rsqrt, "slice_by_index": _slice_by_index, "slice_by_size": _slice_by_size,
    "slice_update": _slice_update, "softmax": _softmax, "split": _split, "square": _square, "tile": _tile,
    "transpose": _transpose,
}  # fmt: skip
