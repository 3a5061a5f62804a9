"""Patterns of ops that become one instruction. What they stand for is computed in full; a program that says it in other
ops is run op by op."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from anechain.bundle.program import Function, Op
from anechain.run.tape_graph import SILU_MUL, Graph
from anechain.run.tape_plan import ARENA, MAX_DIMS, Code, Ref, ref
from anechain.run.tape_view import Loop, Memory, View, common_loops, joined, merged
from anechain.run.tape_weights import fixed


class NoMatchError(Exception):
    """The ops are others than those of the pattern."""


@dataclass(frozen=True)
class Match:
    """The values that it needs, its ops but the last in the order of the program, and what makes its result.

    `emit` gives None for tensors that lie so that the instruction cannot read them.
    """

    sources: tuple[str, ...]
    inside: tuple[Op, ...]
    emit: Callable[[Graph], View | None]


class Matcher:
    """The ops of a function, for patterns that walk back from their last op."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self._makers = {value.name: op for op in function.ops for value in op.outputs}
        self._users: dict[str, set[str]] = {}
        for op in function.ops:
            for name in (n for names in op.inputs.values() for n in names):
                self._users.setdefault(name, set()).add(op.name)
        for value in function.outputs:
            self._users.setdefault(value.name, set()).add("")  # the caller
        self._passed: dict[str, Op] = {}

    def is_made_by(self, name: str, kind: str) -> bool:
        return name in self._makers and self._makers[name].type == kind

    def maker(self, name: str, kind: str) -> Op:
        """The op that makes a value, which is then inside of the pattern."""
        if not self.is_made_by(name, kind):
            raise NoMatchError
        op = self._passed[self._makers[name].name] = self._makers[name]
        return op

    def const(self, op: Op, parameter: str, default: object = None) -> np.ndarray:
        names = op.inputs.get(parameter)
        if names is None:
            return np.asarray(default)
        if names[0] not in self.function.consts:
            raise NoMatchError
        return self.function.consts[names[0]]

    def sides(self, op: Op, kind: str) -> tuple[str, str]:
        """Both operands, the one that an op of `kind` makes first."""
        x, y = op.inputs["x"][0], op.inputs["y"][0]
        return (x, y) if self.is_made_by(x, kind) else (y, x)

    def pair(self, op: Op) -> tuple[str, str]:
        """The two values that a concat puts side by side."""
        values = op.inputs["values"]
        if len(values) != 2:
            raise NoMatchError
        return values[0], values[1]

    def scalar(self, name: str) -> float:
        array = self.function.consts.get(name)
        if array is None or array.size != 1:
            raise NoMatchError
        return float(array.reshape(()))

    def find(self, last: Op, pattern: Callable[["Matcher", Op], Match]) -> Match | None:
        """None unless the ops before `last` are those of the pattern and are used by nothing else."""
        self._passed = {}
        try:
            found = pattern(self, last)
        except (NoMatchError, LookupError, ValueError, StopIteration):  # other numbers of operands, too
            return None
        inside = self._passed.keys() | {last.name}
        for op in self._passed.values():
            if any(not self._users.get(v.name, set()) <= inside for v in op.outputs):
                return None
        order = tuple(op for op in self.function.ops if op.name in self._passed)
        return Match(found.sources, order, found.emit)


def norm(m: Matcher, last: Op) -> Match:
    """x / k * rsqrt(mean((x / k)^2) + (epsilon / k)^2) * gain with k = max(max|x|, least), along one axis."""
    unit, gain = m.sides(last, "mul")
    y, root = m.sides(m.maker(unit, "mul"), "real_div")
    divided, rsqrt = m.maker(y, "real_div"), m.maker(root, "rsqrt")
    x, k = divided.inputs["x"][0], divided.inputs["y"][0]
    mean, squared = m.sides(m.maker(rsqrt.inputs["x"][0], "add"), "reduce_mean")
    averaged, epsilon = m.maker(mean, "reduce_mean"), m.maker(squared, "mul")
    square = m.maker(averaged.inputs["x"][0], "mul")
    ratio = m.maker(epsilon.inputs["x"][0], "real_div")
    top, least = m.sides(m.maker(k, "maximum"), "reduce_max")
    largest = m.maker(top, "reduce_max")
    size = m.maker(largest.inputs["x"][0], "abs")
    axes = [m.const(op, "axes").ravel().tolist() for op in (averaged, largest)]
    same = epsilon.inputs["x"] == epsilon.inputs["y"] and square.inputs["x"] == square.inputs["y"] == (y,)
    same = same and ratio.inputs["y"] == (k,) and size.inputs["x"] == (x,) and axes[0] == axes[1]
    kept = all(bool(m.const(op, "keep_dims", False)) for op in (averaged, largest))
    gains = m.function.consts.get(gain)
    if not same or not kept or len(axes[0]) != 1 or gains is None:
        raise NoMatchError
    rank = len(last.outputs[0].shape)
    axis, length = int(axes[0][0]) % rank, last.outputs[0].shape[int(axes[0][0])]
    if gains.size != length or gains.ndim > rank or gains.shape[axis - rank + gains.ndim] != length:
        raise NoMatchError
    added = float(m.const(rsqrt, "epsilon", 1e-12 if rsqrt.outputs[0].dtype == "fp32" else 0.0))
    numbers = (m.scalar(least), m.scalar(ratio.inputs["x"][0]), added)

    def emit(g: Graph) -> View | None:
        view = g.single(g.view(x))
        inner = joined(view.axes[axis])
        if len(inner) != 1 or inner[0][1] != 1:
            return None
        gain_memory = fixed(np.ascontiguousarray(gains, np.float32).ravel())
        rows = _rows(view, axis)
        if rows is None:
            return None
        out, words = rows
        bits = [int(np.float32(n).view(np.uint32)) for n in numbers]
        words += [length, Ref(gain_memory), *bits]
        g.emit(Code.NORM, words, [view.memory], [out.memory], math.prod(view.shape) >= _WORTH_DIVIDING)
        return out

    return Match((x,), (), emit)


_WORTH_DIVIDING = 1 << 14


def _rows(view: View, axis: int, *others: View) -> tuple[View, list["int | Ref"]] | None:
    """A result that lies as the view does, and the first words of an instruction that goes over its rows along `axis`.

    `others` are operands that are broadcast over it; None where there are more nested rows than an instruction takes.
    """
    flat: list[tuple[int, Loop]] = []
    for at in range(len(view.axes)):
        if at == axis:
            continue
        axes = [view.axes[at], *(o.axes[at] if o.shape[at] > 1 else None for o in others)]
        if any(o.shape[at] not in (1, view.shape[at]) for o in others):
            return None
        nested = common_loops(axes, view.shape[at])
        if nested is None:
            return None
        flat += [(at, loop) for loop in nested]
    order = sorted(range(len(flat)), key=lambda i: -flat[i][1].strides[0])
    length = view.shape[axis]
    strides, stride = [0] * len(flat), length
    for i in reversed(order):
        strides[i], stride = stride, stride * flat[i][1].count
    memory = Memory(stride * 4, ARENA)
    factors: list[list[tuple[int, int]]] = [[] for _ in view.axes]
    for (at, loop), own in zip(flat, strides, strict=True):
        factors[at].append((loop.count, own))
    factors[axis] = [(length, 1)]
    out = View(memory, 0, tuple(joined(f) for f in factors))
    loops = merged([Loop(flat[i][1].count, (strides[i], *flat[i][1].strides)) for i in order], 2 + len(others))
    if len(loops) > MAX_DIMS:
        return None
    missing = MAX_DIMS - len(loops)
    words: list[int | Ref] = [len(loops), *(loop.count for loop in loops), *[1] * missing]
    for i, operand in enumerate((out, view, *others)):
        words += [ref(operand), *(loop.strides[i] for loop in loops), *[0] * missing]
    return out, words


def rotation(m: Matcher, last: Op) -> Match:
    """factor * (x * cos + (-second half of x, first half of x) * sin) along the last axis."""
    factor, total = 1.0, last
    if last.type == "mul":
        rope, number = m.sides(last, "add")
        factor, total = m.scalar(number), m.maker(rope, "add")
    straight, crossed = (m.maker(total.inputs[p][0], "mul") for p in ("x", "y"))
    if not any(m.is_made_by(n, "concat") for names in crossed.inputs.values() for n in names):
        straight, crossed = crossed, straight
    turned, sine = m.sides(crossed, "concat")
    both = m.maker(turned, "concat")
    minus, first = m.pair(both)
    second, negative = m.sides(m.maker(minus, "mul"), "split")
    halves = m.maker(second, "split")
    x = halves.inputs["x"][0]
    cosine = next((n for p in ("x", "y") for n in straight.inputs[p] if n != x), x)
    rank = len(last.outputs[0].shape)
    fits = [v.name for v in halves.outputs] == [first, second] and m.scalar(negative) == -1
    fits = fits and len({v.shape for v in halves.outputs}) == 1 and x in (*straight.inputs["x"], *straight.inputs["y"])
    fits = fits and all(int(m.const(op, "axis").ravel()[0]) % rank == rank - 1 for op in (both, halves))
    if not fits or m.is_made_by(cosine, "const") or bool(m.const(both, "interleave", False)):
        raise NoMatchError

    def emit(g: Graph) -> View | None:
        view, cos, sin = (g.single(g.view(name)) for name in (x, cosine, sine))
        if any(len(v.axes) != rank or v.shape[-1] != view.shape[-1] or _step(v) != 1 for v in (view, cos, sin)):
            return None
        rows = _rows(view, rank - 1, cos, sin)
        if rows is None:
            return None
        out, words = rows
        words += [view.shape[-1] // 2, int(np.float32(factor).view(np.uint32))]
        reads = [view.memory, cos.memory, sin.memory]
        g.emit(Code.ROTATE, words, reads, [out.memory], math.prod(view.shape) >= _WORTH_DIVIDING)
        return out

    return Match((x, cosine, sine), (), emit)


def _step(view: View) -> int:
    """The stride of the last axis; 0 where it lies in pieces."""
    factors = joined(view.axes[-1])
    return factors[0][1] if len(factors) == 1 else 0


def gate(m: Matcher, last: Op) -> Match:
    """silu(x) * y"""
    activated, y = m.sides(last, "silu")
    x = m.maker(activated, "silu").inputs["x"][0]
    return Match((x, y), (), lambda g: g.element(SILU_MUL, g.view(x), g.view(y)))
