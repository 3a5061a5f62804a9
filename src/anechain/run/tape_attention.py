"""Attention in a program, found by its shape: the ops of one soft maximum over past and present become one instruction.

A block multiplies its queries with the past keys and with the present ones, adds masks, takes one soft maximum of both
side by side, and mixes the values with what comes out. Programs that say it otherwise are run op by op.
"""

import math
from dataclasses import dataclass

import numpy as np

from anechain.bundle.program import Op
from anechain.bundle.spec import MASKED
from anechain.run.tape_graph import Graph
from anechain.run.tape_match import Match, Matcher, NoMatchError
from anechain.run.tape_plan import ARENA, FIRST_FREE, Code, Ref, ref
from anechain.run.tape_view import Axis, Memory, View, cut, joined
from anechain.run.tape_weights import fixed

_TILE = 64  # as in native/attention.c


def attention(m: Matcher, last: Op) -> Match:
    """The mixes of the past and of the present, added, with one soft maximum over both behind their weights."""
    if len(last.outputs[0].shape) != 4:
        raise NoMatchError
    sides = [_product(m, last.inputs[p][0], False) for p in ("x", "y")]
    (past_weights, past_value), (new_weights, value) = sides
    split = m.maker(past_weights, "split")
    if [v.name for v in split.outputs] != [past_weights, new_weights]:
        raise NoMatchError
    soft = m.maker(split.inputs["x"][0], "softmax")
    both = m.maker(soft.inputs["x"][0], "concat")
    if any(int(m.const(op, "axis", -1)) not in (-1, 3) for op in (split, soft, both)) or m.const(
        both, "interleave", False
    ):
        raise NoMatchError
    before, now = both.inputs["values"]
    scores, mask = m.sides(m.maker(before, "add"), "matmul")
    q, past_key = _product(m, scores, True)
    new_mask = None
    if m.is_made_by(now, "add"):
        now, new_mask = m.sides(m.maker(now, "add"), "matmul")
    q_again, key = _product(m, now, True)
    if q_again != q:
        raise NoMatchError
    names = Names(q, past_key, past_value, mask, key, value, new_mask)
    sources = (q, past_key, past_value, mask, key, value) + ((new_mask,) if new_mask else ())
    return Match(sources, (), lambda g: _emit(g, names))


def _product(m: Matcher, name: str, turned: bool) -> tuple[str, str]:
    op = m.maker(name, "matmul")
    if bool(m.const(op, "transpose_x", False)) or bool(m.const(op, "transpose_y", False)) != turned:
        raise NoMatchError
    return op.inputs["x"][0], op.inputs["y"][0]


@dataclass(frozen=True)
class Names:
    """What an attention reads."""

    q: str
    past_key: str
    past_value: str
    mask: str
    key: str
    value: str
    new_mask: str | None


def _stride(axis: Axis) -> int | None:
    """From one place of an axis to the next; None for one that lies in pieces."""
    factors = joined(axis)
    return None if len(factors) > 1 else factors[0][1] if factors else 0


def _strided(g: Graph, view: View) -> View:
    """The same with one stride for each axis, and 1 along the last."""
    plain = all(_stride(axis) is not None for axis in view.axes) and _stride(view.axes[-1]) in (0, 1)
    return view if plain else g.copy(view, view.half)


def _emit(g: Graph, found: Names) -> View | None:
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
        if found.new_mask not in g.consts or g.const(found.new_mask).shape not in (
            (1, 1, rows, query),
            (1, 1, 1, query),
        ):
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
