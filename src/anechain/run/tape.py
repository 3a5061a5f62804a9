"""The native CPU engine: the packages of a stage become one tape of instructions, which a small C library runs.

Weights stay int8 or fp16, repacked once; results lie in one arena, planned when a stage is loaded; a step allocates
nothing. What is not a matrix is computed in float32, and nothing is rounded between the ops of a package. Where an int8
matrix meets activations they are rounded to 15 bits, with one scale for 32 or 128 inputs; "fast" takes 8 bits where
there are several tokens, that is for a prompt. fp16 and fp32 matrices meet float32 activations.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from anechain.bundle.program import Program, read_program
from anechain.errors import EngineError
from anechain.run.engine import HostMemory, State
from anechain.run.native import Library, library
from anechain.run.past_cells import CELLS
from anechain.run.stage_plan import Arrays, HeldState, StagePlan, StepPlan
from anechain.run.tape_build import SIZES, Compiled, Tape, compiled
from anechain.run.tape_cache import cleared, keep, kept, key_of, packed_path
from anechain.run.tape_graph import BITS
from anechain.run.tape_ops import OPS, faults
from anechain.run.tape_packed import mapped, store
from anechain.run.tape_plan import ARENA, WEIGHTS, codes_of
from anechain.run.tape_view import strides_of
from anechain.run.tape_weights import pack, private


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
    count = int(np.prod(shape))
    return np.frombuffer(private(max(2 * count, 1)), np.float16, count).reshape(shape)


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
        key = key_of(packages, BITS[self._mode])
        made = kept(key, packages) if key else None
        if key and made is not None:
            there = mapped(packed_path(key), made.packed_bytes)
            return TapeStage(self._library, made, there or pack(made.jobs, made.packed_bytes, self._library.run))
        made = self._compiled([read_program(package) for package in packages])
        begin, held = pack(made.jobs, made.packed_bytes, self._library.run)
        if key and keep(key, made, packages):
            store(packed_path(key), begin, made.packed_bytes, held, cleared)
        return TapeStage(self._library, made, (begin, held))

    def load_programs(self, programs: Sequence[Program]) -> "TapeStage":
        """The stage of programs that are read already."""
        made = self._compiled(programs)
        return TapeStage(self._library, made, pack(made.jobs, made.packed_bytes, self._library.run))

    def _compiled(self, programs: Sequence[Program]) -> Compiled:
        found = [fault for program in programs for fault in faults(program)]
        if found:
            raise EngineError(
                f"the {self.name} engine cannot run {'; '.join(found)}: use --engine openvino, or write the program "
                f"with the ops that it knows, {', '.join(sorted(OPS))}."
            )
        return compiled(programs, BITS[self._mode])


class TapeStage:
    """Consecutive packages, loaded. `packed`: where their matrices begin, and what keeps them."""

    def __init__(self, native: Library, made: Compiled, packed: tuple[int, mmap.mmap]) -> None:
        self._plan = StagePlan(made.programs)
        native.prepare(max(tape.scratch_bytes for tape in made.tapes.values()))
        begin, self._held = packed
        self._tapes = {name: _Running(native, self._plan.steps[name], tape, begin) for name, tape in made.tapes.items()}

    @property
    def functions(self) -> tuple[str, ...]:
        return tuple(self._tapes)

    def new_state(self) -> CellState | None:
        """All zeros; None for a stage without states."""
        if not any(self._plan.states):
            return None
        packages = [{n: _zeros(v.shape) for n, v in states.items()} for states in self._plan.states]
        return CellState(packages, self._plan, [0])

    def watch(self, function: str) -> None:
        """Begins to take the time of every instruction, anew."""
        tape = self._tapes[function]
        tape.times = np.zeros(len(codes_of(tape.tape)), np.int64)

    def watched(self, function: str) -> dict[str, float]:
        """Seconds on the first thread since `watch`, by kind of instruction ("linear8", "attention", "barrier" ...)."""
        tape = self._tapes[function]
        spent: dict[str, float] = {}
        if tape.times is not None:
            for code, nanoseconds in zip(codes_of(tape.tape), tape.times.tolist(), strict=True):
                spent[code.name.lower()] = spent.get(code.name.lower(), 0.0) + nanoseconds * 1e-9
        tape.times = None
        return spent

    def step(self, function: str, inputs: Arrays, state: State | None, outputs: Arrays) -> None:
        self._plan.check(function, inputs, state, outputs)
        held = state if isinstance(state, CellState) else CellState([], self._plan, [0])
        self._tapes[function].run(inputs, held, outputs)


class _Running:
    """A tape with what a step changes: the slots."""

    def __init__(self, native: Library, plan: StepPlan, made: Tape, weights: int) -> None:
        self._native, self._plan = native, plan
        self._ports, self._places, self._arena_bytes = made.ports, made.places, made.arena_bytes
        self._constants = made.constants  # kept: the tape holds its address
        self.tape = made.words.copy()
        self.tape[made.counted] += _address(made.constants)
        self._slots = np.zeros(made.slots, np.uint64)
        self._slots[WEIGHTS] = weights
        self._bound: dict[str, np.ndarray] = {}
        self.times: np.ndarray | None = None

    def run(self, inputs: Arrays, state: CellState, outputs: Arrays) -> None:
        """One step. Every box is checked before anything is computed."""
        boxes = [place.write.box(inputs, place.shape) for place in self._places]
        arrays = {**inputs, **{f"out {name}": array for name, array in outputs.items()}}
        arrays |= {f"{i}/{name}": array for i, states in enumerate(state.packages) for name, array in states.items()}
        for key, slot in self._ports.items():
            if self._bound.get(key) is not arrays[key]:
                self._bound[key] = arrays[key]
                self._slots[slot] = _address(arrays[key])
        self._slots[ARENA] = self._native.arena(self._arena_bytes)
        for place, box in zip(self._places, boxes, strict=True):
            shape, size = place.write.state.shape, SIZES[place.write.state.dtype]
            offset = sum(s.start * n for s, n in zip(box, strides_of(shape), strict=True)) * size
            if isinstance(place.of, str):
                self._slots[place.slot] = int(self._slots[self._ports[place.of]]) + offset
                state.used[0] = max(state.used[0], box[CELLS].stop if len(box) > CELLS else 0)
            else:
                self._slots[place.slot] = int(self._slots[ARENA]) + place.of + offset
        self._native.run(self.tape, self._slots, self.times)


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])
