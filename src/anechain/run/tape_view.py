"""The values of a program while it becomes a tape: where their elements lie. A view moves nothing and costs nothing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

Factor = tuple[int, int]  # (how many, how many elements from one to the next)
Axis = tuple[Factor, ...]  # an axis may lie in several pieces: heads and their rows, merged by a reshape


class Memory:
    """Some bytes: of the arena that all results share, of the packed weights, at an address, or in a slot of a step."""

    def __init__(self, size: int, slot: int, at: int = 0, owner: object = None) -> None:
        self.size, self.slot, self.at, self.owner = size, slot, at, owner


@dataclass(frozen=True)
class View:
    """A tensor in a memory: for each axis its factors, from the outermost to the innermost. `half`: f16, else f32."""

    memory: Memory
    offset: int  # in elements
    axes: tuple[Axis, ...]
    half: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(n for n, _ in axis) for axis in self.axes)

    @property
    def bytes_in(self) -> int:
        return self.offset * (2 if self.half else 4)


def strides_of(shape: Sequence[int]) -> list[int]:
    """Of a tensor whose elements lie one after another."""
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def whole(memory: Memory, shape: Sequence[int], half: bool = False) -> View:
    """A tensor that fills its memory, its axes in order."""
    return View(memory, 0, tuple(((n, s),) for n, s in zip(shape, strides_of(shape), strict=True)), half)


def joined(factors: Sequence[Factor]) -> Axis:
    """The same elements with as few factors as can be."""
    made: list[Factor] = []
    for n, stride in factors:
        if n == 1:
            continue
        if made and made[-1][1] == n * stride:
            made[-1] = (made[-1][0] * n, stride)
        else:
            made.append((n, stride))
    return tuple(made)


def cut(factors: Sequence[Factor], sizes: Sequence[int]) -> list[Axis] | None:
    """The factors dealt out to axes of `sizes`; None where a factor would have to be cut in the middle."""
    left = [f for f in factors if f[0] != 1]
    axes: list[Axis] = []
    for size in reversed(sizes):
        axis: list[Factor] = []
        while size > 1:
            if not left:
                return None
            n, stride = left.pop()
            if size % n == 0:
                axis.insert(0, (n, stride))
                size //= n
            elif n % size == 0:
                axis.insert(0, (size, stride))
                left.append((n // size, stride * size))
                size = 1
            else:
                return None
        axes.insert(0, joined(axis))
    return axes if not left else None


def reshaped(view: View, shape: Sequence[int]) -> View | None:
    """None where the elements lie so that only a copy helps."""
    axes = cut(joined([f for axis in view.axes for f in axis]), shape)
    return None if axes is None else replace(view, axes=tuple(axes))


def transposed(view: View, perm: Sequence[int]) -> View:
    return replace(view, axes=tuple(view.axes[p] for p in perm))


def part(view: View, axis: int, begin: int, size: int) -> View | None:
    """`size` places of an axis from `begin` on; None where the axis lies in pieces that this does not keep whole."""
    factors = joined(view.axes[axis])
    if not factors:
        return view
    inner = math.prod(n for n, _ in factors[1:])
    if begin % inner or size % inner:
        return None
    (_, stride), rest = factors[0], factors[1:]
    axes = (*view.axes[:axis], joined([(size // inner, stride), *rest]), *view.axes[axis + 1 :])
    return replace(view, offset=view.offset + begin // inner * stride, axes=axes)


@dataclass(frozen=True)
class Loop:
    """Nested loops over the elements of several tensors at once: how often, and the stride of each tensor."""

    count: int
    strides: tuple[int, ...]


def common_loops(axes: Sequence[Axis | None], size: int) -> list[Loop] | None:
    """One axis of several tensors, None for one that it is broadcast over; None where their factors do not nest."""
    left = [None if axis is None else list(joined(axis)) for axis in axes]
    loops: list[Loop] = []
    while size > 1:
        inner = [side[-1][0] for side in left if side]
        count = min(inner)
        if any(n % count for n in inner):
            return None
        strides = []
        for side in left:
            if side is None:
                strides.append(0)
                continue
            n, stride = side.pop()
            strides.append(stride)
            if n > count:
                side.append((n // count, stride * count))
        loops.insert(0, Loop(count, tuple(strides)))
        size //= count
    return loops


def merged(loops: Sequence[Loop], tensors: int) -> list[Loop]:
    """The same loops with as few of them as can be; at least one."""
    made: list[Loop] = []
    for loop in loops:
        if loop.count == 1:
            continue
        if made and all(o == loop.count * i for o, i in zip(made[-1].strides, loop.strides, strict=True)):
            made[-1] = Loop(made[-1].count * loop.count, loop.strides)
        else:
            made.append(loop)
    return made or [Loop(1, (0,) * tensors)]
