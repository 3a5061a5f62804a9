"""The values of a MIL function while it becomes an OpenVINO model: where their axes lie, how weights are handed over.

OpenVINO is imported in openvino.py alone and comes in as `Graph.ov` and `Graph.ops`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anechain.bundle.program import Function
from anechain.run.ops_weight import WEIGHTS

Node = Any  # an output of an OpenVINO op: its package has no types that mypy could check
Make = Callable[..., Any]
Name = str | None  # the value that a parameter of an op is given; None where it is left out


@dataclass(frozen=True)
class Tensor:
    """A value of the program: a node, and which axis of the value each axis of the node is.

    So a transpose is only noted, and done when an op needs the axes elsewhere: a 1x1 convolution wants the channels
    last and leaves them there, and for a single token nothing ever moves.
    """

    node: Node
    order: tuple[int, ...]

    @property
    def shape(self) -> list[int]:
        return [n for _, n in sorted(zip(self.order, self.node.get_shape(), strict=True))]

    def place(self, axis: int) -> int:
        """Where in the node an axis of the value is."""
        return self.order.index(axis % len(self.order))


def _atoms(old: Sequence[int], new: Sequence[int]) -> list[tuple[int, int, int]] | None:
    """A reshape as factors (size, old axis, new axis); None if an axis is cut where no factor ends."""
    sides = [[[axis, n] for axis, n in enumerate(shape) if n != 1] for shape in (old, new)]
    atoms = []
    while sides[0] and sides[1]:
        (was, m), (becomes, n) = sides[0][0], sides[1][0]
        size = min(m, n)
        if size == 0 or m % size or n % size:
            return None
        atoms.append((size, was, becomes))
        for side in sides:
            side[0][1] //= size
            if side[0][1] == 1:
                side.pop(0)
    return atoms


class Graph:
    """The values of one function, by name; `inputs` are its ports and states. In the nodes fp16 is f32."""

    def __init__(self, ov: Any, function: Function, inputs: Mapping[str, Node]) -> None:
        self.ov, self.ops = ov, ov.opset16
        self.consts = dict(function.consts)
        self.tensors = {name: self.plain(node) for name, node in inputs.items()}
        self.weights: dict[str, dict[str, np.ndarray]] = {}  # the arguments of constexpr_blockwise_shift_scale
        self.updates: dict[str, Callable[[], Tensor]] = {}  # slice_updates, for when the program reads one

    # Values by name

    def const(self, name: Name, default: Any = None) -> np.ndarray:
        """What the program fixes a parameter to."""
        if name is None:
            return np.asarray(default)
        if name in self.weights and name not in self.consts:
            self.consts[name] = WEIGHTS["constexpr_blockwise_shift_scale"](None, **self.weights[name])
        if name not in self.consts:
            raise ValueError(f"{name} is computed, where this engine needs a constant")
        return self.consts[name]

    def tensor(self, name: str) -> Tensor:
        if name in self.updates:
            self.tensors[name] = self.updates.pop(name)()
        if name not in self.tensors:
            array = self.const(name)
            node = self.ops.constant(array).output(0)
            self.tensors[name] = self.plain(self.float(node) if array.dtype == np.float16 else node)
        return self.tensors[name]

    def node(self, name: str) -> Node:
        """A value with its axes in their own order."""
        return self.natural(self.tensor(name))

    def matrix(self, name: str) -> Node:
        """A weight [O, I, 1, 1] or [O, I] as f32 [O, I], in a form that OpenVINO's matrix product takes compressed."""
        if name not in self.weights:
            array = self.const(name)
            node = self._stored(array.reshape(len(array), -1))
            if array.dtype != np.float16:
                return node
            wide = self.ops.convert(node, "f32")
            wide.get_rt_info()["decompression_0"] = ""  # OpenVINO's mark for "do not widen this while compiling"
            return wide.output(0)
        parts = self.weights[name]
        rows, columns = shape = parts["data"].reshape(len(parts["data"]), -1).shape
        blocks = parts["scale"].size // len(parts["scale"])
        split = (rows, columns) if blocks == 1 else (rows, blocks, columns // blocks)
        node = self.float(self._stored(parts["data"].reshape(split)))
        for part, make in (("offset", self.ops.subtract), ("scale", self.ops.multiply)):
            if part in parts:
                part_rows = parts[part].reshape(-1, blocks)
                every = np.repeat(part_rows, rows // len(part_rows), axis=0).reshape(*split[:-1], 1)
                node = make(node, self.float(self.ops.constant(every))).output(0)
        return self._reshaped(node, shape)

    def _stored(self, array: np.ndarray) -> Node:
        """A constant that is the array itself, in the mapped file: no copy."""
        return self.ov.op.Constant(writable(np.ascontiguousarray(array)), shared_memory=True).output(0)

    # Axes

    def plain(self, node: Node) -> Tensor:
        return Tensor(node, tuple(range(len(node.get_shape()))))

    def float(self, node: Node) -> Node:
        return self.ops.convert(node, "f32").output(0)

    def _reshaped(self, node: Node, shape: Sequence[int]) -> Node:
        if list(node.get_shape()) == list(shape):
            return node
        return self.ops.reshape(node, np.array(shape, np.int64), False).output(0)

    def laid(self, t: Tensor, order: tuple[int, ...]) -> Node:
        """The node with its axes in another order: a transpose, or a reshape when only axes of 1 move."""
        places = [t.order.index(axis) for axis in order]
        shape = [t.node.get_shape()[place] for place in places]
        moved = [place for place, n in zip(places, shape, strict=True) if n > 1]
        if moved == sorted(moved):
            return self._reshaped(t.node, shape)
        return self.ops.transpose(t.node, np.array(places)).output(0)

    def natural(self, t: Tensor) -> Node:
        return self.laid(t, tuple(range(len(t.order))))

    def reshape(self, t: Tensor, shape: Sequence[int]) -> Tensor:
        """Splits axes where they are, and moves axes that merge to where the innermost of them is."""
        atoms = _atoms(t.shape, shape)
        if atoms is None:
            return self.plain(self._reshaped(self.natural(t), shape))
        there = [atom for axis in t.order for atom in atoms if atom[1] == axis]
        innermost = {atom[2]: place for place, atom in enumerate(there)}
        axes = sorted(innermost, key=lambda axis: innermost[axis])
        wanted = [atom for axis in axes for atom in atoms if atom[2] == axis]
        node = t.node
        if wanted != there:
            split = self._reshaped(node, [size for size, _, _ in there])
            node = self.ops.transpose(split, np.array([there.index(atom) for atom in wanted])).output(0)
        order = (*(axis for axis in range(len(shape)) if axis not in innermost), *axes)
        return Tensor(self._reshaped(node, [shape[axis] for axis in order]), order)

    def elementwise(self, make: Make, *tensors: Tensor) -> Tensor:
        """An op of every element, with the axes in the order of the largest operand."""
        lead = max(tensors, key=lambda t: (len(t.order), math.prod(t.shape)))
        nodes = []
        for t in tensors:
            if missing := [1] * (len(lead.order) - len(t.order)):
                t = self.plain(self._reshaped(self.natural(t), [*missing, *t.shape]))
            nodes.append(self.laid(t, lead.order))
        return Tensor(make(*nodes).output(0), lead.order)


class _Writable:
    """A read-only array that says it is writable, which OpenVINO insists on though it only reads."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array  # kept alive
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def writable(array: np.ndarray) -> np.ndarray:
    return array if array.flags.writeable else np.asarray(_Writable(array))
