"""A double of Core ML: the engine's port, driven by the reference engine, with the manners that are reported of it.

It proves the protocol, not Core ML.
"""

import os
import shutil
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from anechain.bundle.program import read_program
from anechain.errors import EngineError
from anechain.run.coreml_port import Buffer, Placed, row_strides
from anechain.run.reference import ReferenceEngine, ReferenceStage, ReferenceState

JUST_READ = 2  # a buffer that one of so many predictions before read is refused as a backing


@dataclass(frozen=True)
class Manners:
    """How it behaves. `dies` and `fails` name packages by the start of their file's name, with what they do there."""

    refuses: frozenset[str] = frozenset()  # outputs whose backing is never taken
    fails: Mapping[str, str] = field(
        default_factory=dict
    )  # package -> "compile", "load decode", "predict prefill", ...
    dies: Mapping[str, tuple[str, int]] = field(default_factory=dict)  # package -> (the same, signal or -exit code)
    throws: frozenset[str] = frozenset()  # those of `fails` that do it with an exception of their own
    row_alignment: int = 64  # bytes
    own_strides: bool = False  # the arrays that it allocates itself have gaps between their rows
    predict_s: float = 0.0


@dataclass
class _Model:
    stage: ReferenceStage
    name: str
    function: str


class _State:
    """Core ML says nothing of what is in a new state; neither does this."""

    def __init__(self, stage: ReferenceStage) -> None:
        self.held = stage.new_state()
        assert isinstance(self.held, ReferenceState)
        for states in self.held.packages:
            for name, array in states.items():
                states[name] = np.full_like(array, np.nan)
        self.busy = False


@dataclass(frozen=True)
class _Output:
    array: np.ndarray
    address: int

    def copy_to(self, array: np.ndarray) -> None:
        np.copyto(array, self.array, casting="no")


class Double:
    """The port. `events` is what it was asked to do, in order."""

    def __init__(self, manners: Manners = Manners()) -> None:
        self.manners = manners
        self.events: list[tuple[str, ...]] = []
        self.faults: list[str] = []  # what Core ML would not survive
        self.lent: set[int] = set()
        self.pools = 0
        self._read: deque[set[int]] = deque(maxlen=JUST_READ)
        self._stages: dict[Path, ReferenceStage] = {}
        self._lock = threading.Lock()

    def system(self) -> str:
        return "macOS of the double"

    def pool(self) -> AbstractContextManager[object]:
        self.pools += 1
        return nullcontext()

    def compile(self, package: Path) -> Path:
        self._act(package.stem, "compile")
        made = Path(tempfile.mkdtemp()) / f"{package.stem}.mlmodelc"
        shutil.copytree(package, made)
        return made

    def load(self, compiled: Path, function: str, units: str) -> _Model:
        self._act(compiled.stem, f"load {function}")
        with self._lock:
            if compiled not in self._stages:
                self._stages[compiled] = ReferenceEngine().load([compiled])
        return _Model(self._stages[compiled], compiled.stem, function)

    def plan(self, compiled: Path, function: str, units: str) -> dict[str, Placed]:
        """Matrix products on the Neural Engine, the rest on the CPU; every op costs the same."""
        self._act(compiled.stem, f"plan {function}")
        ops = read_program(compiled).functions[function].ops
        return {op.outputs[0].name: Placed("NE" if op.type == "conv" else "CPU", 1 / len(ops)) for op in ops}

    def buffer(self, shape: Sequence[int], dtype: DTypeLike) -> Buffer:
        self.events.append(("buffer",))
        kind = np.dtype(dtype)
        if kind == np.int32:
            plain = np.zeros(shape, kind)
            return Buffer(plain, plain, None, 0)
        row = -(-shape[-1] * kind.itemsize // self.manners.row_alignment) * self.manners.row_alignment
        memory = np.full(row * int(np.prod(shape[:-1])), 0xFF, np.uint8)
        array: np.ndarray = np.ndarray(shape, kind, memory, 0, row_strides(shape, kind, row))
        array[...] = 0
        address = memory.__array_interface__["data"][0]
        return Buffer(array, array, memory, address)

    def lend(self, buffers: Sequence[Buffer]) -> None:
        self.lent |= {id(b) for b in buffers}

    def take_back(self, buffers: Sequence[Buffer]) -> None:
        self.lent -= {id(b) for b in buffers}

    def new_state(self, model: _Model) -> _State:
        self.events.append(("new_state", model.name))
        return _State(model.stage)

    def visit_state(self, state: _State, name: str, visit: Callable[[np.ndarray], None]) -> None:
        states = state.held.packages[0]
        array = states[name].copy()
        visit(array)
        states[name] = array.copy()  # what the visitor kept is not the state
        array[...] = np.nan

    def prepare(self, model: _Model, inputs: Mapping[str, Buffer], backings: Mapping[str, Buffer]) -> Any:
        self.events.append(("prepare", model.name, model.function))
        return model, dict(inputs), dict(backings)

    def predict(self, request: Any, state: _State | None) -> dict[str, _Output]:
        model, inputs, backings = request
        self._act(model.name, f"predict {model.function}")
        for buffer in (*inputs.values(), *backings.values()):
            if buffer.pixels is not None and id(buffer) not in self.lent:
                self.faults.append(f"a locked buffer in {model.name}")
        if state is not None:
            if state.busy:
                self.faults.append(f"two predictions on one state of {model.name}")
            state.busy = True
        time.sleep(self.manners.predict_s)
        values = {name: np.ascontiguousarray(b.handle) for name, b in inputs.items()}
        results = {name: np.zeros(b.handle.shape, b.handle.dtype) for name, b in backings.items()}
        model.stage.step(model.function, values, None if state is None else state.held, results)
        if state is not None:
            state.busy = False
        read = {b.address for b in inputs.values()}
        outputs = {}
        for name, backing in backings.items():
            just_read = any(backing.address in before for before in (*self._read, read))
            if name in self.manners.refuses or just_read:
                self.events.append(("refused", model.name, name))
                outputs[name] = self._own(results[name])
            else:
                np.copyto(backing.handle, results[name])
                outputs[name] = _Output(backing.handle, backing.address)
        self._read.append(read)
        self.events.append(("predict", model.name, model.function))
        return outputs

    def _own(self, result: np.ndarray) -> _Output:
        if self.manners.own_strides:
            wide = np.full((*result.shape[:-1], result.shape[-1] + 7), np.nan, result.dtype)
            wide[..., : result.shape[-1]] = result
            result = wide[..., : result.shape[-1]]
        return _Output(result, result.__array_interface__["data"][0])

    def _act(self, name: str, doing: str) -> None:
        self.events.append((*doing.split(), name))
        for start, (when, code) in self.manners.dies.items():
            if name.startswith(start) and when == doing:
                if code > 0:
                    os.kill(os.getpid(), signal.Signals(code))
                os._exit(-code)
        for start, when in self.manners.fails.items():
            if name.startswith(start) and when == doing:
                if start in self.manners.throws:
                    raise ValueError("NSInvalidArgumentException - no")
                raise EngineError(f"Core ML cannot {doing}: it said that it will not.")


class SameDouble:
    """Makes one double in this process and gives it to the engine, and an equal one to the process that probes."""

    def __init__(self, manners: Manners = Manners()) -> None:
        self.manners, self.double = manners, Double(manners)

    def __call__(self) -> Double:
        return self.double

    def __reduce__(self) -> Any:
        return partial, (Double, self.manners)
