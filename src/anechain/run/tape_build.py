"""A stage's programs become tapes: instructions, and the slots that each step points to its arrays."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from anechain.bundle.program import Function, Op, Program, Value
from anechain.run.stage_plan import HIDDEN, HIDDEN_OUT, StagePlan, Write
from anechain.run.tape_graph import Graph
from anechain.run.tape_ops import Translation
from anechain.run.tape_plan import FIRST_FREE, Code, Constants, Instruction, arranged, tape_of
from anechain.run.tape_view import Memory, View, joined, strides_of, whole
from anechain.run.tape_weights import Job, Matrices

SIZES = {"fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Place:
    """A slot that a step points into a state ("package/name") or into the arena (an offset), where `write` says."""

    slot: int
    of: str | int
    write: Write
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Tape:
    """One function of a stage: everything that running it needs but the packed matrices, whose place is a slot.

    `ports` are slots by what they point to: an input, "out " and an output, or a package, "/" and a state of it.
    `counted` are the words that count from the address of `constants`.
    """

    words: np.ndarray
    counted: np.ndarray
    constants: np.ndarray
    ports: dict[str, int]
    places: list[Place]
    slots: int
    arena_bytes: int
    scratch_bytes: int


class Builder:
    """One function of a stage while it becomes a tape."""

    def __init__(
        self, bits: tuple[int, int], programs: Sequence[Program], stage: StagePlan, name: str, matrices: Matrices
    ) -> None:
        self._plan = stage.steps[name]
        self._ports: dict[str, int] = {}
        self._boxes: list[tuple[int, Memory | str, Write, tuple[int, ...]]] = []
        self._instructions: list[Instruction] = []
        self._count = FIRST_FREE
        self.scratch_bytes = 64
        ports = {v.name: self._port(v.name, v) for v in self._plan.inputs.values() if v.dtype in SIZES}
        values: list[list[View]] = []  # for each write what lies side by side along the first axis
        for i, (program, function) in enumerate(zip(programs, self._plan.functions, strict=True)):
            states = {v.name: self._port(f"{i}/{v.name}", v) for v in function.states}
            pieces = [_pieces(function, write.value) for write in self._plan.writes if write.package == i]
            translation = Translation(program, function, {**ports, **states}, matrices, bits, self._box)
            translation.make([v.name for v in function.outputs] + [n for names in pieces for n in names])
            graph = translation.graph
            given = {v.name: graph.view(v.name) for v in function.outputs}
            if i + 1 < len(programs):
                ports[HIDDEN] = given.pop(HIDDEN_OUT)
            for output, view in given.items():
                graph.copy_into(self._port(f"out {output}", self._plan.outputs[output]), view)
            for names in pieces:  # a state is read as it was: what is written and lies in a slot is put aside first
                own = [graph.view(name) for name in names]
                values.append([graph.copy(v, True) if v.memory.slot >= FIRST_FREE else v for v in own])
            self._take(graph)
        self._instructions.append(Instruction(Code.BARRIER, (), (), (), True))
        graph = Graph(self._plan.functions[0], {}, matrices, bits)
        for write, views in zip(self._plan.writes, values, strict=True):
            memory, rows = Memory(int(np.prod(write.state.shape)) * 2, self._slot()), 0
            for view in views:
                place = _placed(memory, view.shape, write.state.shape)
                if rows:
                    place = replace(place, offset=rows * strides_of(write.state.shape)[0])
                graph.copy_into(place, view)
                rows += view.shape[0] if len(views) > 1 else 0
            shape = (rows, *views[0].shape[1:]) if rows else views[0].shape
            self._boxes.append((memory.slot, f"{write.package}/{write.state.name}", write, shape))
        self._take(graph)

    def _take(self, graph: Graph) -> None:
        self._instructions += graph.instructions
        self.scratch_bytes = max(self.scratch_bytes, graph.scratch_bytes)

    def _slot(self) -> int:
        self._count += 1
        return self._count - 1

    def _port(self, key: str, value: Value) -> View:
        self._ports[key] = self._slot()
        size = int(np.prod(value.shape)) * SIZES[value.dtype]
        return whole(Memory(size, self._ports[key]), value.shape, value.dtype == "fp16")

    def _box(self, function: Function, op: Op, target: View, shape: tuple[int, ...]) -> View:
        """Where a slice_update writes in its result `target`: a slot, because only a step knows."""
        state = Value(op.name, target.shape, "fp16" if target.half else "fp32")
        memory = Memory(target.memory.size, self._slot())
        self._boxes.append((memory.slot, target.memory, Write(0, state, op.name, op, function.consts), shape))
        return _placed(memory, shape, target.shape, target.half)

    def tape(self) -> Tape:
        """Plans the memory and writes everything down."""
        arena_bytes = arranged(self._instructions)
        constants = Constants()
        words, counted = tape_of(self._instructions, constants)
        boxes = [
            Place(slot, of if isinstance(of, str) else of.at, write, shape) for slot, of, write, shape in self._boxes
        ]
        block = constants.block()
        return Tape(words, counted, block, self._ports, boxes, self._count, arena_bytes, self.scratch_bytes)


def _pieces(function: Function, name: str) -> list[str]:
    """The values that a concat along the first axis puts side by side, which are written one by one; else the value."""
    for op in function.ops:
        if op.type == "concat" and op.outputs[0].name == name:
            axis, interleave = (function.consts.get(op.inputs.get(p, ("",))[0]) for p in ("axis", "interleave"))
            if axis is not None and int(axis) == 0 and not np.any(interleave):
                return list(op.inputs["values"])
    return [name]


def _placed(memory: Memory, shape: Sequence[int], of: Sequence[int], half: bool = True) -> View:
    """A box of `shape` in a tensor `of` another shape, from the place on that the memory begins at."""
    return View(memory, 0, tuple(joined([(n, s)]) for n, s in zip(shape, strides_of(of), strict=True)), half)


@dataclass(frozen=True)
class Compiled:
    """A stage but for its packed matrices. Of `programs` only ports and what is written to states is used."""

    programs: Sequence[Program]
    tapes: dict[str, Tape]
    jobs: Sequence[Job]
    packed_bytes: int


def compiled(programs: Sequence[Program], bits: tuple[int, int]) -> Compiled:
    plan, matrices = StagePlan(programs), Matrices()
    tapes = {name: Builder(bits, programs, plan, name, matrices).tape() for name in plan.steps}
    return Compiled(programs, tapes, matrices.jobs, matrices.size)
