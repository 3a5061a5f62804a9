"""A package as the rules see it: who makes a value and who reads it, what is a weight, what an op multiplies."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from anechain.bundle.interface import Interface
from anechain.bundle.program import Function, Op, Program, Value

_NAMES = {"float16": "fp16", "float32": "fp32", "float64": "fp64"}
_BITS = {"int4": 4, "uint4": 4, "uint3": 3, "uint2": 2, "uint1": 1, "uint6": 6}
# Ops that only move elements: what comes out is what went in, in another order or shape, or some of it.
LAYOUT = frozenset(
    (
        *("reshape", "reshape_like", "transpose", "expand_dims", "squeeze", "tile", "concat", "split", "stack"),
        *("slice_by_index", "slice_by_size", "identity", "cast", "flatten2d", "reverse", "sliding_windows", "pad"),
    )
)
GATHERS = frozenset(("gather", "gather_nd", "gather_along_axis"))


@dataclass(frozen=True)
class Weight:
    """What a program holds of one constant operand, plain or behind constexpr ops.

    `bits` are those of one stored element; `form` is "plain", "linear" (scales), "lut" (palette), or "other".
    `parts` maps each stored array, by a key that equals where two functions share it, to its bytes in the file.
    """

    shape: tuple[int, ...]
    dtype: str  # as the op reads it
    bits: int
    form: str
    parts: Mapping[object, int]


@dataclass(frozen=True)
class View:
    """One function. Values are looked up by name; those of nested blocks (cond, while_loop) are among them."""

    function: Function
    interface: Interface

    @property
    def name(self) -> str:
        return self.function.name

    @cached_property
    def _blocks(self) -> tuple[Function, ...]:
        def walk(block: Function) -> Iterator[Function]:
            yield block
            for op in block.ops:
                for inner in op.blocks:
                    yield from walk(inner)

        return tuple(walk(self.function))

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """Every op, nested ones included, without those that only spell out a weight."""
        return tuple(op for op in self.all_ops if not op.type.startswith("constexpr"))

    @cached_property
    def all_ops(self) -> tuple[Op, ...]:
        return tuple(op for block in self._blocks for op in block.ops)

    @cached_property
    def by_type(self) -> Mapping[str, tuple[Op, ...]]:
        found: dict[str, list[Op]] = {}
        for op in self.all_ops:
            found.setdefault(op.type, []).append(op)
        return {kind: tuple(ops) for kind, ops in found.items()}

    def of(self, *kinds: str) -> tuple[Op, ...]:
        """The ops of these types."""
        return tuple(op for kind in kinds for op in self.by_type.get(kind, ()))

    @cached_property
    def consts(self) -> Mapping[str, np.ndarray]:
        return {name: value for block in self._blocks for name, value in block.consts.items()}

    @cached_property
    def makers(self) -> Mapping[str, Op]:
        return {value.name: op for op in self.all_ops for value in op.outputs}

    @cached_property
    def readers(self) -> Mapping[str, tuple[Op, ...]]:
        found: dict[str, list[Op]] = {}
        for op in self.all_ops:
            for name in {name for names in op.inputs.values() for name in names}:
                found.setdefault(name, []).append(op)
        return {name: tuple(ops) for name, ops in found.items()}

    @cached_property
    def values(self) -> Mapping[str, Value]:
        """Everything that flows: inputs, states, results. Constants are not in it."""
        known = {v.name: v for block in self._blocks for v in (*block.inputs, *block.states)}
        return known | {v.name: v for op in self.all_ops for v in op.outputs}

    def maker(self, name: str) -> Op | None:
        return self.makers.get(name)

    def reading(self, op: Op) -> tuple[Op, ...]:
        """The ops that read a result of `op`."""
        return tuple(reader for value in op.outputs for reader in self.readers.get(value.name, ()))

    def const(self, op: Op, parameter: str) -> np.ndarray | None:
        """The constant that `op` is given for `parameter`; None where there is none, or a value that flows."""
        names = op.inputs.get(parameter, ())
        return self.consts.get(names[0]) if len(names) == 1 else None

    def scalar(self, op: Op, parameter: str) -> float | None:
        value = self.const(op, parameter)
        if value is None or value.size != 1 or value.dtype.kind not in "fiub":
            return None
        return float(value.reshape(-1)[0])

    def integer(self, op: Op, parameter: str, default: int) -> int:
        value = self.scalar(op, parameter)
        return default if value is None else int(value)

    def is_fixed(self, name: str) -> bool:
        """Whether a value is the same in every call: a constant, or spelled out of constants."""
        if name in self.consts:
            return True
        op = self.makers.get(name)
        return op is not None and op.type.startswith("constexpr")

    def flowing(self, op: Op) -> tuple[Value, ...]:
        """The tensors that `op` reads and that may differ from call to call."""
        names = (name for names in op.inputs.values() for name in names if not self.is_fixed(name))
        return tuple(self.values[name] for name in names if name in self.values)

    def source(self, name: str, through: frozenset[str] = frozenset(("cast", "identity"))) -> Op | None:
        """The op that makes a value, looking through ops of the types `through` (along their `x`)."""
        op = self.makers.get(name)
        while op is not None and op.type in through and len(op.inputs.get("x", ())) == 1:
            op = self.makers.get(op.inputs["x"][0])
        return op

    def upstream(self, name: str, through: frozenset[str]) -> Iterator[Op]:
        """The ops behind a value: its maker, and further back as long as the types are among `through`."""
        waiting, seen = [name], set[int]()
        while waiting:
            op = self.makers.get(waiting.pop())
            if op is None or id(op) in seen:
                continue
            seen.add(id(op))
            yield op
            if op.type in through:
                waiting += [n for names in op.inputs.values() for n in names]

    def downstream(self, op: Op, through: frozenset[str]) -> Iterator[Op]:
        """The ops that read a result of `op`, and further on as long as the types are among `through`."""
        waiting, seen = [op], set[int]()
        while waiting:
            for reader in self.reading(waiting.pop()):
                if id(reader) not in seen:
                    seen.add(id(reader))
                    yield reader
                    if reader.type in through:
                        waiting.append(reader)

    def weight(self, name: str) -> Weight | None:
        """The constant operand behind a name, None for a value that flows."""
        if name in self.consts:
            value = self.consts[name]
            dtype = self.function.packed.get(name, _NAMES.get(value.dtype.name, value.dtype.name))
            bits = _BITS.get(dtype, value.dtype.itemsize * 8)
            # What is unpacked lies at another address in each function: its name has to do.
            key: object = ("packed", name) if name in self.function.packed else value.__array_interface__["data"][0]
            parts = {key: -(-value.size * bits // 8)} if value.dtype.kind in "fiub" else {}
            return Weight(value.shape, dtype, bits, "plain", parts)
        op = self.makers.get(name)
        if op is None or not op.type.startswith("constexpr"):
            return None
        inner = {p: self.weight(names[0]) for p, names in op.inputs.items()}
        parts = {k: v for w in inner.values() if w for k, v in w.parts.items()}
        out = op.outputs[0]
        data = next((w for p in ("indices", "data", "quantized_data") if (w := inner.get(p))), None)
        if op.type in ("constexpr_lut_to_dense", "constexpr_lut_to_sparse"):
            lut = inner.get("lut")
            return Weight(out.shape, out.dtype, palette_bits(lut.shape) if lut else 0, "lut", parts)
        linear = op.type in ("constexpr_blockwise_shift_scale", "constexpr_affine_dequantize")
        bits = data.bits if data else 16
        form = "linear" if linear else data.form if op.type == "constexpr_cast" and data else "other"
        return Weight(out.shape, out.dtype, bits, form, parts)

    def weights(self, op: Op) -> dict[str, Weight]:
        """The constant operands of `op` that are tensors of at least ten numbers, by parameter (biases among them)."""
        found = {}
        for parameter, names in op.inputs.items():
            for name in names:
                weight = self.weight(name)
                if weight is not None and weight.parts and math.prod(weight.shape) >= 10:
                    found[parameter] = weight
        return found

    @cached_property
    def matrices(self) -> tuple[tuple[Op, str, Weight], ...]:
        """(op, parameter, weight) of every matrix that is multiplied with: conv, linear, matmul with a constant."""
        return tuple(
            (op, p, weight)
            for op in self.of("conv", "conv_transpose", "linear", "matmul")
            for p, weight in self.weights(op).items()
            if p in ("weight", "x", "y")
        )

    def in_out(self, op: Op, parameter: str, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
        """(outputs, inputs, elements of the kernel, axis of the outputs) of a matrix of this shape in this place."""
        kernel = math.prod(shape[2:])
        if op.type == "conv":
            return shape[0], shape[1], kernel, 0
        if op.type == "conv_transpose":
            return shape[1], shape[0], kernel, 1
        if op.type == "linear" or len(shape) < 2:
            return shape[0], shape[-1], 1, 0
        turned = bool(self.scalar(op, f"transpose_{parameter}"))
        last, before = len(shape) - 1, len(shape) - 2
        outputs = before if turned == (parameter == "y") else last
        return shape[outputs], shape[last + before - outputs], 1, outputs

    def multiply_adds(self, op: Op) -> int:
        """Of one call, for the ops that have them to speak of; a size that is not fixed counts as 1."""
        shape = _sizes(op.outputs[0].shape) if op.outputs else ()
        if op.type in ("conv", "conv_transpose", "linear"):
            kernel = math.prod(self.dims(op.inputs["weight"][0])[1:])
            if op.type == "conv_transpose":  # every input meets the whole kernel of its group
                return math.prod(self.dims(op.inputs["x"][0])) * kernel
            return math.prod(shape) * kernel
        if op.type == "matmul":
            dims = self.dims(op.inputs["x"][0])
            if not dims:
                return 0
            inner = dims[-1] if len(dims) == 1 or not self.scalar(op, "transpose_x") else dims[-2]
            return math.prod(shape) * inner
        if op.type == "scaled_dot_product_attention":
            query, key = self.dims(op.inputs["query"][0]), self.dims(op.inputs["key"][0])
            return math.prod(query[:-1]) * key[-2] * (query[-1] + shape[-1]) if len(key) > 1 and query else 0
        if op.type in ("lstm", "gru", "rnn"):  # x [steps, batch, inputs]
            matrices = [math.prod(self.dims(names[0])) for p, names in op.inputs.items() if p.startswith("weight_")]
            return math.prod(self.dims(op.inputs["x"][0])[:2]) * sum(matrices)
        if op.type == "einsum":
            equation = str(self.consts[op.inputs["equation"][0]]).replace(" ", "").partition("->")[0]
            operands = zip(equation.split(","), op.inputs["values"], strict=True)
            sizes = {axis: size for axes, n in operands for axis, size in zip(axes, self.dims(n), strict=True)}
            return math.prod(sizes.values())
        return 0

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a constant or of what flows; -1 for a size that is not fixed, () for a name that is neither."""
        weight = self.weight(name)
        return weight.shape if weight else self.values[name].shape if name in self.values else ()

    def dims(self, name: str) -> tuple[int, ...]:
        """The same, with 1 for a size that is not fixed."""
        return _sizes(self.shape(name))


def _sizes(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(max(size, 1) for size in shape)


def palette_bits(lut: tuple[int, ...]) -> int:
    """Bits of an index into a palette: [..., entries, width of an entry] since iOS 18, [entries] before."""
    entries = lut[-2] if len(lut) > 2 else lut[0] if lut else 1
    return max(entries - 1, 1).bit_length()


@dataclass
class Together:
    """What is known of all packages that are judged together."""

    weights: int = 0  # numbers in their matrices
    compressed: bool = False  # whether any of them stores a matrix in fewer bits than it computes in


@dataclass(frozen=True)
class Package:
    """One package; `coremltools` is the version that wrote it, "" where nothing says so."""

    name: str
    program: Program
    file_bytes: int  # of its weight files
    coremltools: str = ""
    together: Together = field(default_factory=Together)

    @cached_property
    def views(self) -> tuple[View, ...]:
        interfaces = self.program.interfaces
        return tuple(View(f, interfaces.get(name, Interface())) for name, f in self.program.functions.items())

    @property
    def spec_version(self) -> int:
        return self.program.spec_version


@dataclass(frozen=True)
class Hit:
    """One place where a rule's condition holds, and what was seen there.

    With an op it concerns that op; with a view alone the whole function; with neither the whole package. `name` says
    which feature it is where it is no op.
    """

    detail: str
    view: View | None = None
    op: Op | None = None
    name: str = ""
    shape: tuple[int, ...] | None = None
    dtype: str = ""


def at(view: View, op: Op, detail: str) -> Hit:
    """A hit on an op, with the shape and dtype of its first result."""
    out = op.outputs[0] if op.outputs else None
    return Hit(detail, view, op, op.name, out.shape if out else None, out.dtype if out else "")


def on(view: View, value: Value, detail: str) -> Hit:
    """A hit on an input, output or state, which concerns the whole function."""
    return Hit(detail, view, None, value.name, value.shape, value.dtype)
