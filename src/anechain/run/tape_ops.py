"""How each MIL op becomes instructions: one function an op, with the parameters that MIL gives it."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from anechain.bundle.program import Function, Op, Program
from anechain.errors import EngineError
from anechain.run import tape_graph as kinds
from anechain.run.ops import DTYPES, rounded
from anechain.run.ops_weight import WEIGHTS
from anechain.run.tape_attention import attention
from anechain.run.tape_graph import Graph, Name
from anechain.run.tape_match import Match, Matcher, gate, norm, rotation
from anechain.run.tape_plan import ARENA, MAX_DIMS, Code, Ref, ref
from anechain.run.tape_view import Axis, Memory, View, joined, strides_of, transposed, whole
from anechain.run.tape_weights import Matrices, Stored

Make = Callable[..., "View | list[View] | None"]
# function, a slice_update, its result, the shape of what it writes -> where that goes, which only a step knows
Box = Callable[[Function, Op, View, tuple[int, ...]], View]


class Translation:
    """The values of a function that are wanted. Raises EngineError, naming the op, for one that it cannot translate."""

    def __init__(
        self,
        program: Program,
        function: Function,
        values: Mapping[str, View],
        matrices: Matrices,
        bits: tuple[int, int],
        box: Box,
    ) -> None:
        self.graph = Graph(function, values, matrices, bits)
        self._program, self._function, self._box = program, function, box

    def make(self, wanted: Sequence[str]) -> None:
        """Translates what these values need, in the order of the program; what PATTERNS finds is one instruction."""
        found = self._matches()
        makers = {value.name: op for op in self._function.ops for value in op.outputs}
        needed: set[str] = set()
        ask = [name for name in wanted if name in makers]
        while ask:
            op = makers[ask.pop()]
            if op.name not in needed:
                needed.add(op.name)
                sources = found[op.name].sources if op.name in found else _names(op)
                ask += [name for name in sources if name in makers]
        for op in self._function.ops:
            if op.name not in needed:
                continue
            if op.name in found:
                made = found[op.name].emit(self.graph)
                if made is not None:
                    self.graph.values[op.outputs[0].name] = made
                    continue
                for inner in found[op.name].inside:
                    self._translate(inner)
            self._translate(op)

    def _matches(self) -> dict[str, Match]:
        matcher, found = Matcher(self._function), {}
        for op in self._function.ops:
            for pattern in PATTERNS.get(op.type, ()):
                if (match := matcher.find(op, pattern)) is not None:
                    found[op.name] = match
                    break
        return found

    def _translate(self, op: Op) -> None:
        arguments = {p: list(names) if p == "values" else names[0] for p, names in op.inputs.items()}
        try:
            made = OPS[op.type](self.graph, op, self._box, **arguments)
            if made is None:
                return
            for value, view in zip(op.outputs, made if isinstance(made, list) else [made], strict=True):
                if view.shape != value.shape:
                    raise ValueError(f"it gives {view.shape} where the program declares {value.shape}")
                self.graph.values[value.name] = view
        except (ValueError, TypeError, LookupError) as error:
            raise EngineError(
                f"op {op.type} named {op.name!r} in function {self._function.name!r} of {self._program.path.name} "
                f"cannot be translated, because {str(error).rstrip('.')}: use --engine openvino, or check the "
                "package with `anechain lint`."
            ) from error


def _names(op: Op) -> list[str]:
    return [name for names in op.inputs.values() for name in names]


def _unary(kind: int) -> Make:
    def translated(g: Graph, op: Op, box: Box, x: str) -> View:
        return g.element(kind, g.view(x))

    return translated


def _binary(kind: int) -> Make:
    def translated(g: Graph, op: Op, box: Box, x: str, y: str) -> View:
        return g.element(kind, g.view(x), g.view(y))

    return translated


def _reduction(kind: int) -> Make:
    def translated(g: Graph, op: Op, box: Box, x: str, axes: Name = None, keep_dims: Name = None) -> View:
        view = g.single(g.view(x))
        over = [int(a) % len(view.axes) for a in g.const(axes, list(range(len(view.axes))))]
        kept = [a for a in range(len(view.axes)) if a not in over]
        inside = joined([f for a in over for f in view.axes[a]])
        outer = [f for a in kept for f in joined(view.axes[a])]
        if len(inside) > 2 or len(outer) > MAX_DIMS:
            view = g.copy(view)
            inside = joined([f for a in over for f in view.axes[a]])
            outer = [f for a in kept for f in joined(view.axes[a])]
        if len(inside) > 2 or len(outer) > MAX_DIMS:
            raise ValueError("the axes that it reduces lie too far apart for this engine")
        outer = outer or [(1, 0)]
        out = whole(Memory(math.prod(n for n, _ in outer) * 4, ARENA), [n for n, _ in outer])
        most = MAX_DIMS - len(outer)
        (m, sm), (n, sn) = [(1, 0)] * (2 - len(inside)) + list(inside)
        words: list[int | Ref] = [kind, len(outer), *(n for n, _ in outer), *[1] * most]
        words += [ref(out), *strides_of(out.shape), *[0] * most, ref(view), *(s for _, s in outer), *[0] * most]
        words += [m, n, sm, sn]
        size = math.prod(view.shape)
        g.emit(Code.REDUCE, words, [view.memory], [out.memory], size >= 1 << 14 and len(kept) > 0)
        return g.reshape(out, op.outputs[0].shape)

    return translated


def _identity(g: Graph, op: Op, box: Box, x: str) -> View:
    return g.view(x)


def _cast(g: Graph, op: Op, box: Box, x: str, dtype: Name = None) -> View:
    if op.outputs[0].dtype not in ("fp16", "fp32"):
        raise ValueError(f"this engine computes with floats alone, and casts none to {op.outputs[0].dtype}")
    return g.view(x)


def _gelu(g: Graph, op: Op, box: Box, x: str, mode: Name = None) -> View:
    names = {
        "EXACT": kinds.GELU_ERF,
        "TANH_APPROXIMATION": kinds.GELU_TANH,
        "SIGMOID_APPROXIMATION": kinds.GELU_SIGMOID,
    }
    return g.element(names[str(g.const(mode, "EXACT"))], g.view(x))


def _rsqrt(g: Graph, op: Op, box: Box, x: str, epsilon: Name = None) -> View:
    """MIL has the default in the op's dtype: 1e-12 is 0 in fp16."""
    least = float(g.const(epsilon, DTYPES[op.outputs[0].dtype].type(1e-12)))
    return g.element(kinds.RSQRT, g.view(x), parameter=least)


def _softmax(g: Graph, op: Op, box: Box, x: str, axis: Name = None) -> View:
    view = g.single(g.view(x))
    at = int(g.const(axis, -1)) % len(view.axes)
    order = [*(a for a in range(len(view.axes)) if a != at), at]
    last = joined(view.axes[at])
    outer = [f for a in order[:-1] for f in joined(view.axes[a])] or [(1, 0)]
    if len(last) != 1 or last[0][1] != 1 or len(outer) > MAX_DIMS:
        view = transposed(g.copy(transposed(view, order)), [order.index(a) for a in range(len(order))])
        outer = [f for a in order[:-1] for f in joined(view.axes[a])] or [(1, 0)]
    shape = [view.shape[a] for a in order]
    out = whole(Memory(math.prod(shape) * 4, ARENA), shape)
    counts = [n for n, _ in outer]
    most, n = MAX_DIMS - len(outer), shape[-1]
    words: list[int | Ref] = [len(outer), *counts, *[1] * most, ref(out), *(s * n for s in strides_of(counts))]
    words += [*[0] * most, ref(view), *(s for _, s in outer), *[0] * most, n]
    g.emit(Code.SOFTMAX, words, [view.memory], [out.memory], math.prod(shape) >= 1 << 12)
    return transposed(out, [order.index(a) for a in range(len(order))])


def _weight(g: Graph, name: str) -> "np.ndarray | Stored":
    return g.stored[name] if name in g.stored and name not in g.consts else g.const(name)


def _linear(g: Graph, op: Op, box: Box, x: str, weight: str, bias: Name = None) -> View:
    view = g.view(x)
    added = None if bias is None else g.const(bias)
    return g.linear(view, len(view.axes) - 1, g.matrices.get(_weight(g, weight)), added)


def _conv(
    g: Graph, op: Op, box: Box, x: str, weight: str, bias: Name = None, strides: Name = None, pad_type: Name = None,
    pad: Name = None, dilations: Name = None, groups: Name = None,
) -> View:  # fmt: skip
    stored = _weight(g, weight)
    kernel = stored.data if isinstance(stored, Stored) else stored
    padded = str(g.const(pad_type, "valid")) == "custom" and np.any(g.const(pad, 0))
    if max(kernel.shape[2:]) > 1 or np.any(g.const(strides, 1) != 1) or padded or g.const(groups, 1) != 1:
        raise ValueError("this engine knows only 1x1 convolutions without strides, padding and groups")
    return g.linear(g.view(x), 1, g.matrices.get(stored), None if bias is None else g.const(bias))


def _matmul(g: Graph, op: Op, box: Box, x: str, y: str, transpose_x: Name = None, transpose_y: Name = None) -> View:
    """[..., M, K] times [..., K, N]; a vector on the left is a row."""
    left, right, shape = g.view(x), g.view(y), op.outputs[0].shape
    if len(left.axes) < 2 or len(right.axes) < 2:
        left = left if len(left.axes) > 1 else g.reshape(left, (1, *left.shape))
        right = right if len(right.axes) > 1 else g.reshape(right, (*right.shape, 1))
    flags = (bool(g.const(transpose_x, False)), bool(g.const(transpose_y, False)))
    views = [_turned(v) if flag else v for v, flag in zip((left, right), flags, strict=True)]
    views = [v if all(len(joined(axis)) < 2 for axis in v.axes) else g.copy(v, v.half) for v in views]
    rank = max(len(v.axes) for v in views)
    batches = [1] * (rank - 2)
    strides: list[list[int]] = []
    for v in views:
        for i, n in enumerate(v.shape[:-2]):
            batches[rank - len(v.axes) + i] = max(n, batches[rank - len(v.axes) + i])
    for v in views:
        own = [0] * (rank - len(v.axes)) + [joined(axis)[0][1] if joined(axis) else 0 for axis in v.axes[:-2]]
        strides.append([*own, *[0] * (MAX_DIMS - len(own))])
    (m, k), n = views[0].shape[-2:], views[1].shape[-1]
    if views[1].shape[-2] != k:
        raise ValueError(f"{list(views[0].shape)} and {list(views[1].shape)} do not fit")
    out = whole(Memory(math.prod(batches) * m * n * 4, ARENA), [*batches, m, n])
    missing = [0] * (MAX_DIMS - len(batches))
    words: list[int | Ref] = [len(batches), *batches, *[1] * len(missing), m, n, k]
    words += [ref(out), *strides_of(out.shape)[:-2], *missing, n, 1]
    for v, own in zip(views, strides, strict=True):
        inner = [joined(axis)[0][1] if joined(axis) else 0 for axis in v.axes[-2:]]
        words += [ref(v), *own, *inner, int(v.half)]
    g.emit(Code.PRODUCT, words, [v.memory for v in views], [out.memory], math.prod(batches) * m * n * k > 1 << 14)
    return g.reshape(out, shape)


def _turned(view: View) -> View:
    rank = len(view.axes)
    return transposed(view, [*range(rank - 2), rank - 1, rank - 2])


def _transpose(g: Graph, op: Op, box: Box, x: str, perm: str) -> View:
    view = g.view(x)
    return transposed(view, [int(a) % len(view.axes) for a in g.const(perm)])


def _shape(g: Graph, op: Op, box: Box, x: str, shape: Name = None, axes: Name = None) -> View:
    """reshape, expand_dims and squeeze: the shape that the program declares for the result says it all."""
    return g.reshape(g.view(x), op.outputs[0].shape)


def _tile(g: Graph, op: Op, box: Box, x: str, reps: str) -> View:
    """An axis as often as `reps` says: one more factor, which stays where it is."""
    view = g.view(x)
    axes = [((int(n), 0), *axis) for n, axis in zip(g.const(reps), view.axes, strict=True)]
    return replace(view, axes=tuple(joined(axis) for axis in axes))


def _concat(g: Graph, op: Op, box: Box, values: list[str], axis: str, interleave: Name = None) -> View:
    if g.const(interleave, False):
        raise ValueError("interleave is not supported")
    views = [v if v.axes else g.reshape(v, [1]) for v in map(g.view, values)]
    return g.concat(views, int(g.const(axis)) % len(op.outputs[0].shape))


def _split(
    g: Graph, op: Op, box: Box, x: str, axis: str, num_splits: Name = None, split_sizes: Name = None
) -> list[View]:
    view, at = g.view(x), int(g.const(axis)) % len(op.outputs[0].shape)
    sizes = [value.shape[at] for value in op.outputs]
    return [g.part(view, at, sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def _slice_by_index(
    g: Graph, op: Op, box: Box, x: str, begin: str, end: str, stride: Name = None, begin_mask: Name = None,
    end_mask: Name = None, squeeze_mask: Name = None,
) -> View:  # fmt: skip
    view = g.view(x)
    rank = len(view.axes)
    fixed = [np.asarray(g.const(n, d)).tolist() for n, d in ((begin, None), (end, None), (stride, [1] * rank))]
    masks = [np.asarray(g.const(n, [False] * rank)).tolist() for n in (begin_mask, end_mask, squeeze_mask)]
    if any(len(joined(axis)) > 1 for axis in view.axes):
        view = g.copy(view, view.half)
    offset = view.offset
    axes: list[Axis] = []
    for i, n in enumerate(view.shape):
        step = joined(view.axes[i])[0][1] if joined(view.axes[i]) else 0
        if masks[2][i]:
            offset += fixed[0][i] % n * step
            axes.append(())
            continue
        first, last = (None if masks[j][i] else fixed[j][i] for j in range(2))
        place = range(*slice(first, last, fixed[2][i]).indices(n))
        offset += place.start * step if len(place) else 0
        axes.append(joined([(len(place), step * place.step)]))
    return g.reshape(replace(view, offset=offset, axes=tuple(axes)), op.outputs[0].shape)


def _slice_by_size(g: Graph, op: Op, box: Box, x: str, begin: str, size: str) -> View:
    view = g.view(x)
    for axis, (start, n) in enumerate(zip(g.const(begin).tolist(), op.outputs[0].shape, strict=True)):
        view = g.part(view, axis, start % view.shape[axis], n)
    return view


def _slice_update(g: Graph, op: Op, box: Box, x: str, update: str, **where: str) -> View:
    """The whole tensor copied, and the box written over that: `box` gives the slot that points to it in each step."""
    if np.any(g.const(where.get("squeeze_mask"), False)) or np.any(g.const(where.get("stride"), 1) != 1):
        raise ValueError("stride and squeeze_mask are not supported")
    view, new = g.view(x), g.view(update)
    known = {value.name for value in g.function.inputs} | set(g.consts)
    if not {where["begin"], where["end"]} <= known:
        raise ValueError("its box is computed, where this engine needs a constant or an input")
    result = g.copy(view, view.half)
    g.copy_into(box(g.function, op, result, new.shape), new, [result.memory])
    return result


def _blockwise(g: Graph, op: Op, box: Box, data: str, scale: str, offset: Name = None) -> None:
    g.stored[op.outputs[0].name] = Stored(g.const(data), g.const(scale), None if offset is None else g.const(offset))


def _table(g: Graph, op: Op, box: Box, indices: str, lut: str, vector_axis: Name = None, shape: Name = None) -> None:
    parts = {"indices": indices, "lut": lut, "vector_axis": vector_axis, "shape": shape}
    dense = WEIGHTS[op.type](None, **{part: g.const(name) for part, name in parts.items() if name is not None})
    g.consts[op.outputs[0].name] = rounded(dense, DTYPES[op.outputs[0].dtype])


def _read_state(g: Graph, op: Op, box: Box, input: str) -> View:
    return g.view(input)


def _update_state(g: Graph, op: Op, box: Box, state: str, value: str) -> View:
    return g.view(value)


OPS: dict[str, Make] = {
    "abs": _unary(kinds.ABS), "add": _binary(kinds.ADD), "cast": _cast, "concat": _concat,
    "constexpr_blockwise_shift_scale": _blockwise, "constexpr_lut_to_dense": _table, "conv": _conv,
    "coreml_update_state": _update_state, "exp": _unary(kinds.EXP), "expand_dims": _shape, "gelu": _gelu,
    "identity": _identity, "linear": _linear, "matmul": _matmul, "maximum": _binary(kinds.MAX),
    "minimum": _binary(kinds.MIN), "mul": _binary(kinds.MUL), "read_state": _read_state,
    "real_div": _binary(kinds.DIV), "reduce_max": _reduction(kinds.LARGEST), "reduce_mean": _reduction(kinds.MEAN),
    "reduce_sum": _reduction(kinds.SUM), "reshape": _shape, "rsqrt": _rsqrt, "sigmoid": _unary(kinds.SIGMOID),
    "silu": _unary(kinds.SILU), "slice_by_index": _slice_by_index, "slice_by_size": _slice_by_size,
    "slice_update": _slice_update, "softmax": _softmax, "split": _split, "sqrt": _unary(kinds.SQRT),
    "square": _unary(kinds.SQUARE), "squeeze": _shape, "sub": _binary(kinds.SUB), "tanh": _unary(kinds.TANH),
    "tile": _tile, "transpose": _transpose,
}  # fmt: skip
PARAMETERS = {name: tuple(inspect.signature(made).parameters)[3:] for name, made in OPS.items()}
PARAMETERS["slice_update"] = ("x", "update", "begin", "end", "stride", "begin_mask", "end_mask", "squeeze_mask")
PATTERNS = {"mul": (norm, rotation, gate), "add": (attention, rotation)}  # by the type of their last op
_FLOATS = ("fp16", "fp32")


def faults(program: Program) -> list[str]:
    """What in a program is not known: ops, parameters of known ops, dtypes; one entry a kind, with its first place."""
    places: dict[str, list[str]] = {}
    for function in program.functions.values():
        where = f"in function {function.name!r} of {program.path.name}"
        for op in function.ops:
            kinds_of = [f"op {op.type}"]
            if op.type in OPS:
                unknown = sorted(set(op.inputs) - set(PARAMETERS[op.type]))
                kinds_of = [f"parameter {name} of {op.type}" for name in unknown]
                dtypes = {value.dtype for value in op.outputs}
                kinds_of += [f"dtype {dtype} of {op.type}" for dtype in sorted(dtypes - set(_FLOATS))]
            for kind in kinds_of:
                places.setdefault(kind, []).append(f"{op.name!r} {where}")
        for state in function.states:
            if state.dtype != "fp16":
                places.setdefault(f"dtype {state.dtype} of a state", []).append(f"{state.name!r} {where}")
    return [f"{what} ({at[0]}{f' and {len(at) - 1} more' if at[1:] else ''})" for what, at in places.items()]
