"""The Core ML engine: the packages on a Mac, on the Neural Engine as far as Core ML puts them there.

Whether any of it has run on Apple hardware stands in docs/status.md. It speaks to Core ML through the port of
coreml_port.py alone, so that a double of that port can take the engine through all that is here; a double proves the
protocol, not Core ML.

- A package is compiled once into a cache folder named by what is in it, and tried out in a process of its own: Core ML
  is published to end the process when the Neural Engine's compiler fails, and so that becomes a sentence (`probe`).
- Every output has a backing: memory that the next package reads where it lies. Core ML may refuse one and return an
  array of its own, silently; so every returned array is compared with its backing, by the address of its memory, and
  copied where it is another. `handoff` counts both.
"""

import hashlib
import multiprocessing
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from anechain.bundle.cache import cache_directory
from anechain.bundle.manifest import record_files, write_atomically
from anechain.bundle.program import Program, read_program
from anechain.errors import AnechainError, EngineError
from anechain.run.coreml_port import COMPUTE_UNITS, AppleCoreML, Buffer, Placed, Port
from anechain.run.engine import State
from anechain.run.ops import DTYPES
from anechain.run.stage_plan import StagePlan, mismatches

PROBE_TIMEOUT_S = 1800.0  # the first compilation for the Neural Engine may take minutes
_DONE, _REFUSED = "done", "refused"

MakePort = Callable[[], Port]
Say = Callable[[str], None]


class Handoff:
    """What became of what all stages took and gave: how many arrays there were, and how many copied, where and why."""

    def __init__(self) -> None:
        self.checked = 0
        self.copied: Counter[tuple[str, str]] = Counter()  # (package, reason)
        self._lock = threading.Lock()

    def note(self, package: str, checked: int, reasons: Sequence[str]) -> None:
        with self._lock:
            self.checked += checked
            self.copied.update((package, reason) for reason in reasons)

    def __str__(self) -> str:
        if self.copied:
            worst = "; ".join(f"{package}: {reason}, {n} times" for (package, reason), n in self.copied.most_common(3))
            return f"copied {self.copied.total()} of {self.checked} ({worst})"
        return f"zero-copy ({self.checked} arrays)" if self.checked else "not measured: nothing was predicted"


class CoreMLEngine:
    """One package a stage. `units` is one of COMPUTE_UNITS; `make_port` is also called in the process that probes.

    Raises EngineError where there is no Core ML. `load` raises it for a package that Core ML does not take or that ends
    the process, BundleError for one that cannot be read.
    """

    name, stitches = "coreml", False

    def __init__(
        self, units: str = COMPUTE_UNITS[0], make_port: MakePort = AppleCoreML, cache: Path | None = None
    ) -> None:
        if units not in COMPUTE_UNITS:
            raise EngineError(f"--compute-units {units} is not known: use {', '.join(COMPUTE_UNITS)}.")
        self.units, self._make_port, self._port = units, make_port, make_port()
        self._cache, self._handoff = cache or cache_directory() / "coreml", Handoff()
        self._buffers: dict[int, Buffer] = {}  # by the id of the array, which the buffer keeps alive
        self.loaders = min(8, os.cpu_count() or 1)

    @property
    def handoff(self) -> str:
        return str(self._handoff)

    def buffer(self, shape: Sequence[int], dtype: DTypeLike) -> np.ndarray:
        """Lives as long as the engine. Its rows may be apart."""
        buffer = self._port.buffer(shape, dtype)
        self._buffers[id(buffer.array)] = buffer
        return buffer.array

    def load(self, packages: Sequence[Path]) -> "CoreMLStage":
        if len(packages) != 1:
            raise EngineError("the coreml engine runs one package a stage: load each alone.")
        program = read_program(packages[0])
        place = self._probed(packages[0])
        return CoreMLStage(self._port, place, program, self.units, self._buffers, self._handoff)

    def plan(self, package: Path) -> dict[str, dict[str, Placed]]:
        """function -> op -> where Core ML means to run it. Raises what `load` raises."""
        functions = read_program(package).functions
        compiled = self._probed(package).compiled(self._port)
        return {name: dict(self._port.plan(compiled, name, self.units)) for name in functions}

    def _probed(self, package: Path) -> "_Place":
        """Where a package lies that was tried out, now or before."""
        place = _Place(package, self._cache, self._port.system())
        if not place.was_probed(self.units):
            fault = probe([package], self.units, self._make_port, self._cache)
            if fault:
                raise EngineError(fault)
            place.set_probed(self.units)
        return place


class _Place:
    """Where the compiled form of a package lies, by a hash of its content and of the system that compiled it."""

    def __init__(self, package: Path, cache: Path, system: str) -> None:
        digest = hashlib.sha256(system.encode())
        for name, record in record_files(package, package).items():
            digest.update(f"\n{name} {record.sha256}".encode())
        self.package, self._folder = package, cache / digest.hexdigest()[:32]

    def compiled(self, port: Port) -> Path:
        """The compiled model, made if it is not there: moved to its name when it is whole."""
        path = self._folder / f"{self.package.stem}.mlmodelc"
        if not path.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            made = port.compile(self.package)
            own = self._folder / f".{os.getpid()}-{threading.get_ident()}.mlmodelc"
            shutil.move(made, own)
            try:
                own.rename(path)
            except OSError:  # another process was first
                shutil.rmtree(own)
                if not path.exists():
                    raise
        return path

    def was_probed(self, units: str) -> bool:
        return (self._folder / f"probed-{units}").exists()

    def set_probed(self, units: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._folder / f"probed-{units}", b"")


class CoreMLState:
    """The states of one conversation in one package: one MLState, which both functions use."""

    def __init__(self, stage: "CoreMLStage", handle: Any) -> None:
        self.stage, self.handle = stage, handle

    def copy(self, tokens: int | None = None) -> "CoreMLState":
        """All of it, whatever `tokens`: a state of Core ML has one size."""
        return self.stage.copy_of(self)


class CoreMLStage:
    """One package, loaded: a model for each of its functions. One prediction at a time, so none overlap on a state."""

    def __init__(
        self,
        port: Port,
        place: _Place,
        program: Program,
        units: str,
        buffers: Mapping[int, Buffer],
        handoff: Handoff,
        say: Say = lambda doing: None,
    ) -> None:
        self._lock = threading.Lock()
        self._port, self._name, self._own, self._handoff = port, place.package.name, buffers, handoff
        self._plan = StagePlan([program])
        self._shapes = {
            name: {v.name: v.shape for op in function.ops for v in op.outputs}
            for name, function in program.functions.items()
        }
        self.functions: tuple[str, ...] = tuple(sorted(program.functions))
        say("was compiled")
        compiled = place.compiled(port)
        self._models = {}
        for function in self.functions:
            say(f"loaded {function!r}")
            self._models[function] = port.load(compiled, function, units)
        self._states = tuple(self._plan.states[0].values())
        self._requests: dict[tuple[str, tuple[Buffer, ...]], Any] = {}
        self._staged: dict[tuple[str, str], Buffer] = {}

    def new_state(self) -> CoreMLState | None:
        """All zeros, written by us: nothing that an earlier conversation left may be seen."""
        if not self._states:
            return None

        def clear(array: np.ndarray) -> None:
            array[...] = 0

        with self._port.pool():
            state = CoreMLState(self, self._port.new_state(self._models[self.functions[0]]))
            for value in self._states:
                self._port.visit_state(state.handle, value.name, clear)
        return state

    def copy_of(self, state: CoreMLState) -> CoreMLState:
        """Core ML has no copy of a state: it is read out, and written into a new one."""
        with self._lock, self._port.pool():
            copy = CoreMLState(self, self._port.new_state(self._models[self.functions[0]]))
            for value in self._states:
                seen = self._contents(state, value.name)

                def write(array: np.ndarray, seen: np.ndarray = seen) -> None:
                    np.copyto(array, seen)

                self._port.visit_state(copy.handle, value.name, write)
        return copy

    def _contents(self, state: CoreMLState, name: str) -> np.ndarray:
        seen: list[np.ndarray] = []
        self._port.visit_state(state.handle, name, lambda array: seen.append(array.copy()))
        return seen[0]

    def step(
        self, function: str, inputs: Mapping[str, np.ndarray], state: State | None, outputs: Mapping[str, np.ndarray]
    ) -> None:
        own = self._check(function, inputs, state, outputs)
        ports = self._plan.steps[function]
        reasons = []
        with self._lock, self._port.pool():
            given = {name: self._shared(function, name, inputs[name]) for name in ports.inputs}
            backings = {name: self._shared(function, name, outputs[name]) for name in ports.outputs}
            buffers = (*given.values(), *backings.values())
            for name, buffer in given.items():
                if buffer.array is not inputs[name]:
                    np.copyto(buffer.array, inputs[name])
                    reasons.append(f"{function} {name} is not one of this engine's buffers")
            key = function, buffers
            if key not in self._requests:
                self._requests[key] = self._port.prepare(self._models[function], given, backings)
            self._port.lend(buffers)
            try:
                returned = self._port.predict(self._requests[key], own and own.handle)
            except EngineError as error:
                raise EngineError(f"{self._name}, function {function!r}: {error}") from error
            finally:
                self._port.take_back(buffers)
            for name, backing in backings.items():
                if not backing.address or returned[name].address != backing.address:
                    returned[name].copy_to(backing.array)
                    reasons.append(f"{function} {name} is not in its backing")
                if backing.array is not outputs[name]:
                    np.copyto(outputs[name], backing.array)
                    reasons.append(f"{function} {name} is not one of this engine's buffers")
            self._handoff.note(self._name, len(buffers), reasons)

    def _shared(self, function: str, name: str, array: np.ndarray) -> Buffer:
        """The buffer that an array is the host's view of; for any other array one to copy from and to."""
        if id(array) in self._own:
            return self._own[id(array)]
        if (function, name) not in self._staged:
            self._staged[function, name] = self._port.buffer(array.shape, array.dtype)
        return self._staged[function, name]

    def _check(
        self, function: str, inputs: Mapping[str, np.ndarray], state: State | None, outputs: Mapping[str, np.ndarray]
    ) -> CoreMLState | None:
        """Raises EngineError, with all faults, unless a step can be made of these; the state, as our own."""
        if function not in self.functions:
            raise EngineError(f"{self._name} cannot run {function!r}: use one of {', '.join(self.functions)}.")
        step = self._plan.steps[function]
        faults = [*mismatches("input", step.inputs, inputs, False), *mismatches("output", step.outputs, outputs, False)]
        faults += [f"output {name!r} is not known" for name in outputs if name not in step.outputs]
        own = state if isinstance(state, CoreMLState) and state.stage is self else None
        if self._states and own is None:
            faults.append("the state is not one of this stage's new_state()")
        if faults:
            what = f"{function!r} of {self._name} cannot run ({'; '.join(faults)})"
            raise EngineError(f"{what}: pass what its ports declare.")
        for write in step.writes:
            write.box(inputs, self._shapes[function][write.value])
        return own

    def try_out(self, say: Say) -> None:
        """One prediction of each function, of zeros, on a state of its own."""
        state = self.new_state()
        for function in self.functions:
            say(f"predicted with {function!r}")
            step = self._plan.steps[function]
            inputs = {name: np.zeros(port.shape, DTYPES[port.dtype]) for name, port in step.inputs.items()}
            for write in step.writes:  # the box at the beginning
                length = self._shapes[function][write.value][2]
                inputs |= {"end": np.full(4, length, np.int32)} if "end" in inputs else {}
            outputs = {name: np.zeros(port.shape, DTYPES[port.dtype]) for name, port in step.outputs.items()}
            self.step(function, inputs, state, outputs)


def probe(packages: Sequence[Path], units: str, make_port: MakePort, cache: Path) -> str | None:
    """Compiles, loads and runs `packages`, all at once, in a process of their own; what went wrong, as a sentence."""
    context = multiprocessing.get_context("spawn")  # Core ML does not survive a fork
    ours, theirs = context.Pipe(duplex=False)
    worker = context.Process(target=_try_out, args=(list(packages), units, make_port, cache, theirs), daemon=True)
    worker.start()
    theirs.close()
    doing, fault = f"{packages[0].name} was looked at", ""
    answered = False
    try:
        while ours.poll(PROBE_TIMEOUT_S):
            kind, text = ours.recv()
            if kind in (_DONE, _REFUSED):
                answered, fault = True, text
                break
            doing = text
        else:
            return f"nothing happened for {PROBE_TIMEOUT_S:.0f} s while {doing}: try other --compute-units."
    except EOFError:
        pass
    finally:
        if not answered and worker.is_alive():
            worker.join(1)
            worker.kill()
        worker.join()
    if answered:
        return fault or None
    return (
        f"the process in which {doing} {_ended(worker.exitcode or 0)}: find the layer with `anechain plan BUNDLE "
        "--bisect`, or try other --compute-units."
    )


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was ended by {signal.Signals(-code).name}"


def _try_out(packages: list[Path], units: str, make_port: MakePort, cache: Path, pipe: Connection) -> None:
    """The worker's part: says what it is about to do, so that its end can be told apart."""
    doing = "the process began"
    try:
        port = make_port()
        stages = []
        for package in packages:

            def say(what: str, name: str = package.name) -> None:
                nonlocal doing
                doing = f"{name} {what}"
                pipe.send(("doing", doing))

            place = _Place(package, cache, port.system())
            stages.append(CoreMLStage(port, place, read_program(package), units, {}, Handoff(), say))
            stages[-1].try_out(say)
    except AnechainError as error:
        pipe.send((_REFUSED, str(error)))
    except Exception as error:  # an exception of Objective-C comes as PyObjC's own
        pipe.send((_REFUSED, f"while {doing}: {type(error).__name__}: {error}."))
    else:
        pipe.send((_DONE, ""))
