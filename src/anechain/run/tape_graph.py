"""The values of one function while it becomes a tape, and the instructions that make them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from anechain.bundle.program import Function, Op
from anechain.run.tape_plan import ARENA, MAX_DIMS, Code, Instruction, Ref, ref
from anechain.run.tape_view import (
    Loop,
    Memory,
    View,
    common_loops,
    joined,
    merged,
    part,
    reshaped,
    transposed,
    whole,
)  # fmt: skip
from anechain.run.tape_weights import GROUP, PANEL, Matrices, Matrix, Stored, fixed

Name = str | None  # the value that a parameter of an op is given; None where it is left out
_WORTH_DIVIDING = 1 << 14  # elements: less than this is done by one thread sooner than two have begun
# Bits of an activation that meets an int8 matrix: of a single token, and of several. One token waits for the matrix to
# be read, and 15 bits cost it nothing.
BITS = {"exact": (15, 15), "fast": (15, 8)}
ONE, SEVERAL = 32, 128  # inputs that share a scale. To scale the sums of 32 inputs takes several tokens a third longer.
AT_ONCE = {8: 6, 15: 3}  # tokens that the kernel multiplies together: their rounded inputs lie side by side

# ELEMENT kinds, as in native/element.c.
ADD, SUB, MUL, DIV, MAX, MIN, ABS, EXP, SIGMOID, SQRT, TANH, SILU, SQUARE = range(13)
GELU_ERF, GELU_TANH, GELU_SIGMOID, RSQRT, SILU_MUL = range(13, 18)
LARGEST, SUM, MEAN = range(3)  # REDUCE kinds, as in native/sum.c


@dataclass(frozen=True)
class Rounded:
    """Activations as integers: x = scale * (128 * high + low), or scale * high."""

    high: Memory
    low: Memory
    scales: Memory
    starts: Memory
    tokens: int
    group: int


class Graph:
    """`values` are ports and states by name, and whatever was made of them so far."""

    def __init__(
        self, function: Function, values: Mapping[str, View], matrices: Matrices, bits: tuple[int, int]
    ) -> None:
        self.function, self.matrices, self.bits = function, matrices, bits
        self.consts = dict(function.consts)
        self.stored: dict[str, Stored] = {}
        self.values = dict(values)
        self.waiting: dict[str, Op] = {}  # ops whose values nobody has asked for yet
        self.instructions: list[Instruction] = []
        self.scratch_bytes = 64
        self._singles: dict[View, View] = {}
        self._rounded: dict[tuple[View, int, int], Rounded] = {}
        self._spans: dict[tuple[Memory, int, int, int, int], View] = {}

    # Values

    def const(self, name: Name, default: object = None) -> np.ndarray:
        """What the program fixes a parameter to."""
        if name is None:
            return np.asarray(default)
        if name in self.stored and name not in self.consts:
            self.consts[name] = self.stored[name].dense()
        if name not in self.consts:
            raise ValueError(f"{name} is computed, where this engine needs a constant")
        return self.consts[name]

    def view(self, name: str) -> View:
        if name not in self.values:
            array = self.const(name)
            if array.dtype.kind != "f":
                raise ValueError(f"{name} is {array.dtype}, where this engine computes with floats alone")
            single = np.ascontiguousarray(array, np.float32)
            self.values[name] = whole(fixed(single), array.shape)
        return self.values[name]

    def single(self, view: View) -> View:
        """The same in f32, lying as it lies: f16 is widened once, however often it is read."""
        if not view.half:
            return view
        if view not in self._singles:
            out, loops = self._laid(self.loops([view, view]), 0)
            self._element(Code.COPY, 0, 0, loops, out, view, view)
            self._singles[view] = out
        return self._singles[view]

    # Instructions

    def emit(
        self, code: Code, words: Sequence[int | Ref], reads: Sequence[Memory | None], writes: Sequence[Memory],
        parallel: bool = False,
    ) -> None:  # fmt: skip
        self.instructions.append(Instruction(code, words, [m for m in reads if m is not None], writes, parallel))

    def loops(self, views: Sequence[View]) -> list[list[Loop]]:
        """For each axis of the result of an element-wise op the loops over it; operands are broadcast as numpy does."""
        rank = max(len(view.axes) for view in views)
        made = []
        for axis in range(rank):
            there = [axis - rank + len(view.axes) for view in views]
            sizes = [view.shape[at] if at >= 0 else 1 for view, at in zip(views, there, strict=True)]
            size = max(sizes)
            if any(n not in (1, size) for n in sizes):
                raise ValueError(f"{' and '.join(str(list(view.shape)) for view in views)} cannot be broadcast")
            axes = [v.axes[at] if at >= 0 and n == size else None for v, at, n in zip(views, there, sizes, strict=True)]
            nested = common_loops(axes, size)
            if nested is None:
                raise _NotNestedError
            made.append(nested)
        return made

    def element(self, kind: int, left: View, right: View | None = None, parameter: float = 0.0) -> View:
        """An op of every element; the result lies as the larger operand does."""
        operands = [self.single(left), self.single(left if right is None else right)]
        try:
            axes = self.loops(operands)
        except _NotNestedError:
            operands = [self.copy(view) for view in operands]
            axes = self.loops(operands)
        lead = max(range(2), key=lambda i: (math.prod(operands[i].shape), i == 0))
        result, loops = self._laid(axes, lead)
        bits = int(np.float32(parameter).view(np.uint32))
        self._element(Code.ELEMENT, kind, bits, loops, result, *operands)
        return result

    def _laid(self, axes: Sequence[Sequence[Loop]], lead: int, half: bool = False) -> tuple[View, list[Loop]]:
        """A new tensor whose axes lie as the lead's do; its loops, with its strides first."""
        flat = [(axis, loop) for axis, loops in enumerate(axes) for loop in loops]
        order = list(range(len(flat)))
        if all(loop.strides[lead] for _, loop in flat):
            order.sort(key=lambda i: -flat[i][1].strides[lead])
        strides, stride = [0] * len(flat), 1
        for i in reversed(order):
            strides[i], stride = stride, stride * flat[i][1].count
        memory = Memory(stride * (2 if half else 4), ARENA)
        factors: list[list[tuple[int, int]]] = [[] for _ in axes]
        for (axis, loop), own in zip(flat, strides, strict=True):
            factors[axis].append((loop.count, own))
        result = View(memory, 0, tuple(joined(axis) for axis in factors), half)
        loops = [Loop(flat[i][1].count, (strides[i], *flat[i][1].strides)) for i in order]
        return result, merged(loops, 3)

    def _element(
        self, code: Code, kind: int, parameter: int, loops: Sequence[Loop], out: View, left: View, right: View
    ) -> None:
        if len(loops) > MAX_DIMS:
            raise ValueError(f"its operands lie in {len(loops)} nested pieces, and this engine knows {MAX_DIMS}")
        counts = [loop.count for loop in loops] + [1] * (MAX_DIMS - len(loops))
        words: list[int | Ref] = [kind, parameter, len(loops), *counts]
        for i, view in enumerate((out, left, right)):
            strides = [loop.strides[i] for loop in loops] + [0] * (MAX_DIMS - len(loops))
            words += [ref(view), *strides, int(view.half)]
        parallel = math.prod(counts) >= _WORTH_DIVIDING
        self.emit(code, words, [left.memory, right.memory], [out.memory], parallel)

    def copy(self, view: View, half: bool = False) -> View:
        """A new tensor with its axes in order."""
        result = whole(Memory(math.prod(view.shape) * (2 if half else 4), ARENA), view.shape, half)
        self.copy_into(result, view)
        return result

    def copy_into(self, out: View, view: View, also: Sequence[Memory] = ()) -> None:
        """Copies, and converts between f16 and f32. `also`: what is written to beside the memory of `out`."""
        axes = [common_loops((a, b), n) for a, b, n in zip(out.axes, view.axes, view.shape, strict=True)]
        flat = [Loop(1, (0, 0))]
        for axis in axes:
            if axis is None:
                raise ValueError("its elements lie in pieces that this engine cannot bring together")
            flat += axis
        if all(loop.strides[0] for loop in flat[1:]):
            flat.sort(key=lambda loop: -loop.strides[0])
        loops = [Loop(loop.count, (*loop.strides, loop.strides[1])) for loop in merged(flat, 2)]
        self._element(Code.COPY, 0, 0, loops, out, view, view)
        if also:
            made = self.instructions.pop()
            self.instructions.append(replace(made, writes=[*made.writes, *also]))

    def reshape(self, view: View, shape: Sequence[int]) -> View:
        made = reshaped(view, shape)
        if made is None:
            made = reshaped(self.copy(view, view.half), shape)
        assert made is not None
        return made

    def part(self, view: View, axis: int, begin: int, size: int) -> View:
        made = part(view, axis, begin, size)
        if made is None:
            made = part(self.copy(view, view.half), axis, begin, size)
        assert made is not None
        return made

    def concat(self, views: Sequence[View], axis: int) -> View:
        half = all(view.half for view in views)
        operands = list(views) if half else [self.single(view) for view in views]
        shape = list(operands[0].shape)
        shape[axis] = sum(view.shape[axis] for view in operands)
        lead = max(operands, key=lambda view: math.prod(view.shape))
        order = list(range(len(shape)))  # the axes lie as those of the largest part
        if all(len(joined(a)) < 2 for a in lead.axes):
            order.sort(key=lambda a: -(joined(lead.axes[a])[0][1] if joined(lead.axes[a]) else 1 << 62))
        laid = whole(Memory(math.prod(shape) * (2 if half else 4), ARENA), [shape[a] for a in order], half)
        out = transposed(laid, [order.index(a) for a in range(len(shape))])
        begin = 0
        for view in operands:
            self.copy_into(self.part(out, axis, begin, view.shape[axis]), view)
            begin += view.shape[axis]
        return out

    # Products with matrices

    def linear(self, x: View, axis: int, matrix: Matrix, bias: np.ndarray | None) -> View:
        """Every vector along `axis` times the matrix, plus the bias [O]."""
        x = self.single(x)
        others = [a for a in range(len(x.axes)) if a != axis]
        tokens = math.prod(x.shape[a] for a in others)
        rows, inside = joined([f for a in others for f in x.axes[a]]), joined(x.axes[axis])
        pieces = 2 if matrix.kind == "int8" else 1
        good = len(rows) < 2 and len(inside) <= pieces and inside[-1:] and inside[-1][1] == 1
        if len(inside) == 2 and (inside[1][0] % 16 or not good):
            good = False
        if not good:
            order = [*others, axis]
            x = transposed(self.copy(transposed(x, order)), [order.index(a) for a in range(len(order))])
            rows, inside = joined([f for a in others for f in x.axes[a]]), joined(x.axes[axis])
        out = Memory(tokens * matrix.rows * 4, ARENA)
        added = fixed(np.ascontiguousarray(bias, np.float32)) if bias is not None else None
        token_stride = rows[0][1] if rows else 0
        if matrix.kind == "int8":
            given = self._round(x, matrix, tokens, token_stride, inside)
            row_scales, part_scales = Ref(matrix.row_scales), Ref(matrix.part_scales)
            sources = (given.high, given.low, given.scales, given.starts)
            words: list[int | Ref] = [
                self.bits[tokens > 1] > 8,
                tokens,
                matrix.rows,
                matrix.padded,
                given.group,
                Ref(matrix.memory),
            ]
            words += [*map(Ref, sources), row_scales, part_scales, Ref(added), Ref(out), matrix.rows]
            self.emit(Code.LINEAR8, words, sources, [out], True)
            self.scratch_bytes = max(self.scratch_bytes, tokens * PANEL * 4)
        else:
            half = matrix.kind == "fp16"
            words = [half, tokens, matrix.rows, matrix.depth, Ref(matrix.memory), ref(x), token_stride, Ref(added)]
            self.emit(Code.LINEAR_FLOAT, [*words, Ref(out), matrix.rows], [x.memory], [out], True)
        axes: list[tuple[tuple[int, int], ...]] = [()] * len(x.axes)
        stride = matrix.rows
        for a in reversed(others):
            axes[a] = joined([(x.shape[a], stride)])
            stride *= x.shape[a]
        axes[axis] = ((matrix.rows, 1),)
        return View(out, 0, tuple(axes))

    def _round(
        self, x: View, matrix: Matrix, tokens: int, token_stride: int, inside: Sequence[tuple[int, int]]
    ) -> Rounded:
        bits, group = (self.bits[0], ONE) if tokens == 1 else (self.bits[1], SEVERAL)
        while matrix.padded % group:
            group //= 2
        group = GROUP if matrix.part_scales else group
        key = (x, matrix.padded, group)
        if key not in self._rounded:
            padded, at_once = tokens * matrix.padded, 1 if tokens == 1 else AT_ONCE[bits]
            size = -(-tokens // at_once) * at_once * matrix.padded
            high = Memory(size, ARENA)
            low = Memory(size, ARENA) if bits > 8 else high
            scales, starts = (Memory(padded // group * 4, ARENA) for _ in range(2))
            inner, outer = inside[-1][0], inside[0][1] if len(inside) == 2 else 0
            words = (bits > 8, tokens, matrix.depth, matrix.padded, group, ref(x), token_stride, inner, outer)
            made = (high, low, scales, starts)
            parallel = padded >= _WORTH_DIVIDING and tokens > 1
            self.emit(Code.QUANTISE, (*words, *map(Ref, made)), [x.memory], list(dict.fromkeys(made)), parallel)
            self._rounded[key] = Rounded(*made, tokens, group)
        return self._rounded[key]

    def span(self, mask: View, row_stride: int, rows: int, cells: int, hidden: float) -> View:
        """For each row of a mask the first cell that it shows and the one behind the last: i32 [rows, 2]."""
        key = (mask.memory, mask.offset, row_stride, rows, cells)
        if key not in self._spans:
            out = whole(Memory(rows * 8, ARENA), (rows, 2))
            bits = int(np.float32(hidden).view(np.uint32))
            words = (rows, cells, ref(mask), row_stride, int(mask.half), ref(out), bits)
            self.emit(Code.SPAN, words, [mask.memory], [out.memory])
            self._spans[key] = out
        return self._spans[key]


class _NotNestedError(Exception):
    """Two operands lie in pieces of which neither fits into the other."""
