"""The native CPU engine: the packages of a stage become one tape of instructions, which a small C library runs.

Weights stay int8 or fp16, repacked once; results lie in one arena, planned when a stage is loaded; a step allocates
nothing. What is not a matrix is computed in float32, and nothing is rounded between the ops of a package. The two modes
differ where an int8 matrix meets activations: "exact" rounds them to 15 bits and "fast" to 8, with one scale for
a few inputs (tape_graph.GROUPS). fp16 and fp32 matrices meet float32 activations in both.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from anechain.bundle.program import Function, Op, Program, Value, read_program
from anechain.errors import EngineError
from anechain.run.engine import HostMemory, State
from anechain.run.native import Library, library
from anechain.run.past_cells import CELLS
from anechain.run.stage_plan import HIDDEN, HIDDEN_OUT, Arrays, HeldState, StagePlan, Write
from anechain.run.tape_graph import BITS, Graph
from anechain.run.tape_ops import OPS, Translation, faults
from anechain.run.tape_plan import ARENA, FIRST_FREE, FIXED, WEIGHTS, Code, Instruction, Ref, arranged, tape_of
from anechain.run.tape_view import Memory, View, joined, strides_of, whole
from anechain.run.tape_weights import Matrices, huge

_SIZES = {"fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class CellState(HeldState):
    """The states of a stage at full length, of which memory holds the pages that were written to."""

    used: list[int]  # how many cells hold anything

    def copy(self, tokens: int | None = None) -> "CellState":
        used = self.used if tokens is None else [min(cells, tokens) for cells in self.used]
        made = [{name: _zeros(array.shape) for name, array in states.items()} for states in self.packages]
        for old, new in zip(self.packages, made, strict=True):
            for name, array in old.items():
                box = (slice(None), slice(None), slice(used[0])) if array.ndim > CELLS else (...,)
                new[name][box] = array[box]
        return CellState(made, self.plan, list(used))


def _zeros(shape: Sequence[int]) -> np.ndarray:
    """f16, in pages that take no memory until they are written to."""
    size = int(np.prod(shape)) * 2
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), np.float16, int(np.prod(shape))).reshape(shape)


class TapeEngine(HostMemory):
    """All cores. Raises EngineError where the native library is not built or the processor lacks what it needs."""

    def __init__(self, mode: Literal["exact", "fast"], threads: int | None = None) -> None:
        self._mode, self._library = mode, library(threads)

    @property
    def name(self) -> str:
        return f"cpu-native-{self._mode}"

    @property
    def stitches(self) -> bool:
        return True

    def load(self, packages: Sequence[Path]) -> "TapeStage":
        """Raises EngineError, listing all, for ops that are not known, and BundleError for an unreadable package."""
        return self.load_programs([read_program(package) for package in packages])

    def load_programs(self, programs: Sequence[Program]) -> "TapeStage":
        """The stage of programs that are read already."""
        found = [fault for program in programs for fault in faults(program)]
        if found:
            raise EngineError(
                f"the {self.name} engine cannot run {'; '.join(found)}: use --engine openvino, or write the program "
                f"with the ops that it knows, {', '.join(sorted(OPS))}."
            )
        return TapeStage(self._library, BITS[self._mode], programs)


class TapeStage:
    """Consecutive packages, loaded."""

    def __init__(self, native: Library, bits: int, programs: Sequence[Program]) -> None:
        self._plan, matrices = StagePlan(programs), Matrices()
        self._tapes = {name: _Tape(native, bits, programs, self._plan, name, matrices) for name in self._plan.steps}
        native.prepare(max(tape.scratch_bytes for tape in self._tapes.values()))
        begin, self._held = matrices.pack(native.run)
        for tape in self._tapes.values():
            tape.finish(begin)

    @property
    def functions(self) -> tuple[str, ...]:
        return tuple(self._tapes)

    def new_state(self) -> CellState | None:
        """All zeros; None for a stage without states."""
        if not any(self._plan.states):
            return None
        packages = [{n: _zeros(v.shape) for n, v in states.items()} for states in self._plan.states]
        return CellState(packages, self._plan, [0])

    def step(self, function: str, inputs: Arrays, state: State | None, outputs: Arrays) -> None:
        self._plan.check(function, inputs, state, outputs)
        held = state if isinstance(state, CellState) else CellState([], self._plan, [0])
        self._tapes[function].run(inputs, held, outputs)


class _Tape:
    """One function of a stage: its instructions, and the slots that each step points to its arrays."""

    def __init__(
        self, native: Library, bits: int, programs: Sequence[Program], stage: StagePlan, name: str, matrices: Matrices
    ) -> None:
        self._native, self._plan = native, stage.steps[name]
        self._ports: dict[str, int] = {}  # what a slot points to: an input, "out " an output, "0/" a state of a package
        self._boxes: list[tuple[int, Memory | str, Write, tuple[int, ...]]] = []  # slot, of what, where, its shape
        self._instructions: list[Instruction] = []
        self._count = FIRST_FREE
        self.scratch_bytes = 64
        ports = {v.name: self._port(v.name, v) for v in self._plan.inputs.values() if v.dtype in _SIZES}
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
        size = int(np.prod(value.shape)) * _SIZES[value.dtype]
        return whole(Memory(size, self._ports[key]), value.shape, value.dtype == "fp16")

    def _box(self, function: Function, op: Op, target: View, shape: tuple[int, ...]) -> View:
        """Where a slice_update writes in its result `target`: a slot, because only a step knows."""
        state = Value(op.name, target.shape, "fp16" if target.half else "fp32")
        memory = Memory(target.memory.size, self._slot())
        self._boxes.append((memory.slot, target.memory, Write(0, state, op.name, op, function.consts), shape))
        return _placed(memory, shape, target.shape, target.half)

    def finish(self, weights: int) -> None:
        """Plans the memory; `weights`: the address of the packed matrices."""
        size = arranged(self._instructions)
        begin, self._arena = huge(size)
        self._tape = tape_of(self._instructions, self._native.threads)
        operands = [word.memory for made in self._instructions for word in made.words if isinstance(word, Ref)]
        self._constants = [memory.owner for memory in operands if memory is not None and memory.slot == FIXED]
        self._instructions = []
        self._slots = np.zeros(self._count, np.uint64)
        self._slots[[ARENA, WEIGHTS]] = begin, weights
        self._bound: dict[str, np.ndarray] = {}
        self.times: np.ndarray | None = None

    def run(self, inputs: Arrays, state: CellState, outputs: Arrays) -> None:
        """One step. Every box is checked before anything is computed."""
        boxes = [write.box(inputs, shape) for _, _, write, shape in self._boxes]
        arrays = {**inputs, **{f"out {name}": array for name, array in outputs.items()}}
        arrays |= {f"{i}/{name}": array for i, states in enumerate(state.packages) for name, array in states.items()}
        for key, slot in self._ports.items():
            if self._bound.get(key) is not arrays[key]:
                self._bound[key] = arrays[key]
                self._slots[slot] = _address(arrays[key])
        for (slot, of, write, _), box in zip(self._boxes, boxes, strict=True):
            size = _SIZES[write.state.dtype]
            offset = sum(s.start * n for s, n in zip(box, strides_of(write.state.shape), strict=True)) * size
            if isinstance(of, str):
                self._slots[slot] = int(self._slots[self._ports[of]]) + offset
                state.used[0] = max(state.used[0], box[CELLS].stop if len(box) > CELLS else 0)
            else:
                self._slots[slot] = int(self._slots[ARENA]) + of.at + offset
        self._native.run(self._tape, self._slots, self.times)


def _pieces(function: Function, name: str) -> list[str]:
    """The values that a concat along the first axis puts side by side, which are written one by one; else the value."""
    for op in function.ops:
        if op.type == "concat" and op.outputs[0].name == name:
            axis, interleave = (function.consts.get(op.inputs.get(p, ("",))[0]) for p in ("axis", "interleave"))
            if axis is not None and int(axis) == 0 and not np.any(interleave):
                return list(op.inputs["values"])
    return [name]


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def _placed(memory: Memory, shape: Sequence[int], of: Sequence[int], half: bool = True) -> View:
    """A box of `shape` in a tensor `of` another shape, from the place on that the memory begins at."""
    return View(memory, 0, tuple(joined([(n, s)]) for n, s in zip(shape, strides_of(of), strict=True)), half)
