"""Attention in a program, found by its shape: the ops of one soft maximum over past and present become one instruction.

A block multiplies its queries with the past keys and with the present ones, adds masks, takes one soft maximum of both
side by side, and mixes the values with what comes out. Programs that say it otherwise are run op by op.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from anechain.bundle.program import Function, Op
from anechain.bundle.spec import MASKED
from anechain.run.tape_graph import Graph
from anechain.run.tape_plan import ARENA, FIRST_FREE, Code, Ref, ref
from anechain.run.tape_view import Axis, Memory, View, cut, joined
from anechain.run.tape_weights import fixed

_TILE = 64  # as in native/attention.c


@dataclass(frozen=True)
class Attention:
    """The names of its values, and the ops between them in the order of the program."""

    q: str
    past_key: str
    past_value: str
    mask: str
    key: str
    value: str
    new_mask: str | None
    inside: tuple[Op, ...]

    @property
    def sources(self) -> list[str]:
        names = [self.q, self.past_key, self.past_value, self.mask, self.key, self.value]
        return names if self.new_mask is None else [*names, self.new_mask]


class _NoMatchError(Exception):
    """The ops are others than those of an attention."""


class _Finder:
    """Walks back from the sum of two mixes; what it passes must be used nowhere else."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._makers = {value.name: op for op in function.ops for value in op.outputs}
        self._uses: dict[str, int] = {value.name: 1 for value in function.outputs}
        for op in function.ops:
            for name in (n for names in op.inputs.values() for n in names):
                self._uses[name] = self._uses.get(name, 0) + 1
        self._passed: dict[str, Op] = {}

    def _maker(self, name: str, kind: str) -> Op:
        op = self._makers.get(name)
        if op is None or op.type != kind or self._uses[name] != 1:
            raise _NoMatchError
        self._passed[op.name] = op
        return op

    def _fixed(self, op: Op, parameter: str) -> object:
        names = op.inputs.get(parameter)
        return False if names is None else self._function.consts[names[0]].ravel().tolist()[0]

    def _product(self, name: str, turned: bool) -> tuple[str, str]:
        op = self._maker(name, "matmul")
        if bool(self._fixed(op, "transpose_x")) or bool(self._fixed(op, "transpose_y")) != turned:
            raise _NoMatchError
        return op.inputs["x"][0], op.inputs["y"][0]

    def _is(self, name: str, kind: str) -> bool:
        return name in self._makers and self._makers[name].type == kind

    def _masked(self, name: str) -> tuple[str, str]:
        """An add of scores and a mask, in either order -> the two names."""
        op = self._maker(name, "add")
        sides = (op.inputs["x"][0], op.inputs["y"][0])
        return sides if self._is(sides[0], "matmul") else sides[::-1]

    def attention(self, mix: Op) -> Attention:
        self._passed = {}
        left, right = mix.inputs["x"][0], mix.inputs["y"][0]
        (past_weights, past_value), (new_weights, value) = self._product(left, False), self._product(right, False)
        split = self._maker(past_weights, "split")
        last = len(mix.outputs[0].shape) - 1
        if self._maker(new_weights, "split") is not split or self._fixed(split, "axis") not in (-1, last):
            raise _NoMatchError
        if [v.name for v in split.outputs] != [past_weights, new_weights]:
            raise _NoMatchError
        soft = self._maker(split.inputs["x"][0], "softmax")
        both = self._maker(soft.inputs["x"][0], "concat")
        axes = [self._fixed(op, "axis") if "axis" in op.inputs else -1 for op in (soft, both)]
        if any(axis not in (-1, last) for axis in axes) or self._fixed(both, "interleave"):
            raise _NoMatchError
        if len(both.inputs["values"]) != 2:
            raise _NoMatchError
        before, now = both.inputs["values"]
        scores, mask = self._masked(before)
        q, past_key = self._product(scores, True)
        new_mask = None
        if self._is(now, "add"):
            now, new_mask = self._masked(now)
        q_again, key = self._product(now, True)
        if q_again != q:
            raise _NoMatchError
        inside = tuple(op for op in self._function.ops if op.name in self._passed)
        return Attention(q, past_key, past_value, mask, key, value, new_mask, inside)


def attentions(function: Function) -> Mapping[str, Attention]:
    """By the name of the op that ends it: the sum of what comes from the past and from the present."""
    finder, found = _Finder(function), {}
    for op in function.ops:
        if op.type == "add" and len(op.outputs[0].shape) == 4:
            try:
                found[op.name] = finder.attention(op)
            except (_NoMatchError, KeyError):
                continue
    return found


def _stride(axis: Axis) -> int | None:
    """From one place of an axis to the next; None for one that lies in pieces."""
    factors = joined(axis)
    return None if len(factors) > 1 else factors[0][1] if factors else 0


def _strided(g: Graph, view: View) -> View:
    """The same with one stride for each axis, and 1 along the last."""
    plain = all(_stride(axis) is not None for axis in view.axes) and _stride(view.axes[-1]) in (0, 1)
    return view if plain else g.copy(view, view.half)


def fused(g: Graph, found: Attention) -> View | None:
    """The result [1, n_kv, G * Q, D] of one instruction; None for what it does not know."""
    past = [g.view(found.past_key), g.view(found.past_value)]
    fresh = [_strided(g, g.single(g.view(name))) for name in (found.key, found.value)]
    mask, q = g.view(found.mask), g.single(g.view(found.q))
    if any(len(v.axes) != 4 or v.shape[0] != 1 for v in (*past, *fresh, mask, q)):
        return None
    _, heads, rows, depth = q.shape
    query, cells = fresh[0].shape[2], past[0].shape[2]
    fits = all(v.shape == (1, heads, cells, depth) and v.half and v.memory.slot >= FIRST_FREE for v in past)
    fits = fits and all(v.shape == (1, heads, query, depth) for v in fresh) and rows % query == 0
    fits = fits and mask.shape[1:] in ((1, rows, cells), (1, 1, cells))
    strides = [[_stride(axis) for axis in v.axes] for v in past]
    if not fits or any(None in s or s[3] not in (0, 1) for s in strides):
        return None
    new_mask = None
    if found.new_mask is not None:
        if found.new_mask not in g.consts or g.const(found.new_mask).shape not in ((1, 1, rows, query), (1, 1, 1, query)):
            return None
        new_mask = np.ascontiguousarray(g.const(found.new_mask), np.float32).reshape(-1, query)
        if (new_mask.max(axis=1) <= MASKED).any():
            return None  # a row that sees nothing of the present: then hidden cells of the past would count
    group = rows // query
    parts = cut(joined(q.axes[2]), (group, query))
    if parts is None or any(_stride(a) is None for a in (*parts, q.axes[1])) or _stride(q.axes[3]) not in (0, 1):
        q = g.copy(q)
        parts = cut(joined(q.axes[2]), (group, query))
    assert parts is not None
    mask = _strided(g, mask)
    mask_row = _stride(mask.axes[2]) or 0
    span = g.span(mask, mask_row, mask.shape[2], cells, MASKED)
    shown = _shown(new_mask) if new_mask is not None else None
    new_masks = fixed(new_mask) if new_mask is not None else None
    new_spans = fixed(shown) if shown is not None else None
    out = Memory(heads * rows * depth * 4, ARENA)
    token = heads * group * depth  # the results of a token lie together, ready for the matrix that follows
    words: list[int | Ref | None] = [heads, group, query, depth, cells]
    words += [ref(q), _stride(q.axes[1]), _stride(parts[0]), _stride(parts[1])]
    for view, own in zip(past, strides, strict=True):
        words += [ref(view), own[1], own[2]]
    words += [ref(mask), mask_row, int(mask.half), ref(span), int(mask.shape[2] > 1)]
    for view in fresh:
        words += [ref(view), _stride(view.axes[1]), _stride(view.axes[2])]
    several = new_mask is not None and len(new_mask) > 1
    words += [Ref(new_masks), query if several else 0, Ref(new_spans), int(several)]
    words += [Ref(out), group * depth, depth, token]
    reads = [q.memory, *(v.memory for v in (*past, *fresh)), mask.memory, span.memory]
    g.emit(Code.ATTENTION, [w if w is not None else 0 for w in words], reads, [out], True)
    g.scratch_bytes = max(g.scratch_bytes, _scratch_bytes(rows, query, depth, cells))
    axes: tuple[Axis, ...] = ((), ((heads, group * depth),), ((group, depth), (query, token)), ((depth, 1),))
    return View(out, 0, tuple(joined(axis) for axis in axes))


def _shown(mask: np.ndarray) -> np.ndarray:
    """As Graph.span, of a constant [rows, Q]: i32 [rows, 2]."""
    seen = ~(mask <= MASKED)
    first, end = seen.argmax(axis=1), mask.shape[1] - seen[:, ::-1].argmax(axis=1)
    return np.ascontiguousarray(np.stack([first, end], axis=1), np.int32)


def _scratch_bytes(rows: int, query: int, depth: int, cells: int) -> int:
    if query == 1:
        return 4 * 4 * (cells + 1) + 64
    width = math.ceil(depth / 64) * 64
    return 4 * (rows * (depth + width) + (depth + width) * _TILE + 6 * _TILE + 2 * rows) + 8 * rows + 128
