"""The reference engine: a loop over the ops of a program, one numpy function each. It is the definition of right."""

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from anechain.bundle.program import Function, Op, Program, Value, read_program
from anechain.errors import EngineError
from anechain.run.engine import HostMemory, State
from anechain.run.ops import ARITHMETIC, DTYPES, LAYOUT, rounded, widened
from anechain.run.rounding import Rounding

HIDDEN, HIDDEN_OUT = "hidden", "hidden_out"
READ, UPDATE = "read_state", "coreml_update_state"
KNOWN_OPS = tuple(sorted({*ARITHMETIC, *LAYOUT, READ, UPDATE}))
_LISTS = ("values",)  # parameters that take several values
_SMALL = 64  # elements: constants up to here are recognised by what is in them, larger ones by where they lie

Values = dict[str, np.ndarray]
Watch = Callable[[Op, np.ndarray], None]


@dataclass(frozen=True)
class ReferenceState:
    """State name -> array, for every package of the stage. The arrays are read-only: a step replaces them."""

    packages: list[Values]

    def copy(self, tokens: int | None = None) -> "ReferenceState":
        return ReferenceState([dict(states) for states in self.packages])


class ReferenceEngine(HostMemory):
    """Runs packages op by op: every op's result is rounded to its declared dtype, sums are in float32 (see Rounding).

    With `stress`, what happens inside an op of dtype fp16 is rounded to fp16, too. `load` raises EngineError, listing
    all of them, for ops that are not known, and BundleError for a package that cannot be read.
    """

    def __init__(self, stress: bool = False) -> None:
        self.stress = stress

    @property
    def name(self) -> str:
        return "reference-stress" if self.stress else "reference"

    @property
    def stitches(self) -> bool:
        return False

    def load(self, packages: Sequence[Path]) -> "ReferenceStage":
        return self.load_programs([read_program(package) for package in packages])

    def load_programs(self, programs: Sequence[Program]) -> "ReferenceStage":
        """The stage of programs that are read already."""
        faults = [fault for program in programs for fault in _faults(program)]
        if faults:
            raise EngineError(
                f"the {self.name} engine cannot run {'; '.join(faults)}: use another engine, or write the program with "
                f"the ops that it knows, {', '.join(KNOWN_OPS)}."
            )
        return ReferenceStage(programs, self.stress)


def _faults(program: Program) -> list[str]:
    """What in a program is not known: ops, parameters of known ops, dtypes; one entry a kind, with its first place."""
    places: dict[str, list[str]] = {}
    for function in program.functions.values():
        for op in function.ops:
            where = f"{op.name!r} in function {function.name!r} of {program.path.name}"
            if op.type not in KNOWN_OPS:
                places.setdefault(f"op {op.type}", []).append(where)
                continue
            known = {"input", "state", "value"}
            if op.type in ARITHMETIC or op.type in LAYOUT:
                known = set(inspect.signature(ARITHMETIC.get(op.type) or LAYOUT[op.type]).parameters)
            for parameter in sorted(set(op.inputs) - known):
                places.setdefault(f"parameter {parameter} of {op.type}", []).append(where)
            for dtype in sorted({value.dtype for value in op.outputs} - set(DTYPES)):
                places.setdefault(f"dtype {dtype} of {op.type}", []).append(where)
    return [f"{what} ({at[0]}{f' and {len(at) - 1} more' if at[1:] else ''})" for what, at in places.items()]


def _arguments(op: Op, values: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return {p: [values[n] for n in names] if p in _LISTS else values[names[0]] for p, names in op.inputs.items()}


def _key(array: np.ndarray) -> Hashable:
    """Equal for two views of the same place in a weight file, and for two equal small constants."""
    content = array.tobytes() if array.size <= _SMALL else array.__array_interface__["data"][0]
    return array.dtype.str, array.shape, array.strides, content


class _Shared:
    """What follows from the constants of one package: computed once, though several functions use it."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Any, object]] = {}

    def get(self, key: Hashable, sources: object, compute: Callable[[], Any]) -> Any:
        """What is under `key`. The `sources` are kept beside it, so that the addresses in the key stay theirs."""
        if key not in self._known:
            self._known[key] = compute(), sources
        return self._known[key][0]


def _names(op: Op) -> list[str]:
    return [name for names in op.inputs.values() for name in names]


class _PreparedFunction:
    """One function of one package: all that follows from constants is computed, the other ops are left to do."""

    def __init__(self, program: Program, function: Function, stress: bool, shared: _Shared) -> None:
        self.function, self.package, self.stress = function, program.path.name, stress
        consts: Values = dict(function.consts)
        left: list[Op] = []
        for op in function.ops:
            if op.type in (READ, UPDATE) or any(name not in consts for name in _names(op)):
                left.append(op)
                continue
            inputs = tuple((parameter, *(_key(consts[n]) for n in names)) for parameter, names in op.inputs.items())
            arguments = _arguments(op, consts)
            results = shared.get((op.type, inputs), arguments, partial(self._compute, op, arguments))
            consts |= {v.name: array for v, array in zip(op.outputs, results, strict=True)}
        results_wanted = {v.name for v in function.outputs}
        widened_often = {name for op in left if op.type in ARITHMETIC for name in _names(op)}
        self.constants: Values = {}
        for name in ({name for op in left for name in _names(op)} | results_wanted) & set(consts):
            array = consts[name]
            if name in widened_often:
                array = shared.get(("widened", _key(array)), array, partial(widened, array))
            self.constants[name] = array
        last_use = {name: at for at, op in enumerate(left) for name in _names(op) if name not in results_wanted}
        self.calls = [(op, [n for n in set(_names(op)) if last_use.get(n) == at]) for at, op in enumerate(left)]

    def _compute(self, op: Op, arguments: Mapping[str, Any]) -> list[np.ndarray]:
        """The results of one op in its declared dtypes; EngineError, naming the op, when they cannot be computed."""
        try:
            with np.errstate(all="ignore"):
                if op.type in LAYOUT:
                    result = LAYOUT[op.type](**arguments)
                else:
                    rounding = Rounding(DTYPES[op.outputs[0].dtype], self.stress)
                    result = ARITHMETIC[op.type](rounding, **{p: widened(x) for p, x in arguments.items()})
                results = result if isinstance(result, list) else [result]
                arrays = [rounded(x, DTYPES[v.dtype]) for x, v in zip(results, op.outputs, strict=True)]
            for array, value in zip(arrays, op.outputs, strict=True):
                if array.shape != value.shape and -1 not in value.shape:
                    raise ValueError(f"it gives {array.shape} where the program declares {value.shape}")
        except (ValueError, TypeError, LookupError) as error:
            raise EngineError(
                f"op {op.type} named {op.name!r} in function {self.function.name!r} of {self.package} cannot be "
                f"computed, because {error}: check the package with `anechain lint`."
            ) from error
        return arrays

    def run(self, inputs: Mapping[str, np.ndarray], states: Values, watch: Watch | None) -> tuple[Values, Values]:
        """inputs, states -> outputs, new states. A state is read as it was before, however often it is written."""
        values: Values = {**self.constants, **inputs}
        written: Values = {}
        for op, dead in self.calls:
            if op.type == READ:
                results = [states[op.inputs["input"][0]]]
            elif op.type == UPDATE:
                results = [rounded(values[op.inputs["value"][0]], DTYPES[op.outputs[0].dtype])]
                written[op.inputs["state"][0]] = results[0]
            else:
                results = self._compute(op, _arguments(op, values))
            for value, array in zip(op.outputs, results, strict=True):
                values[value.name] = array
                if watch is not None:
                    watch(op, array)
            for name in dead:
                values.pop(name, None)  # a state's name is not among the values
        outputs = {v.name: rounded(values[v.name], DTYPES[v.dtype]) for v in self.function.outputs}
        return outputs, {**states, **{name: _frozen(array, inputs) for name, array in written.items()}}


def _frozen(array: np.ndarray, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """A read-only array that nobody else holds: what a program writes may be a view of a caller's input."""
    own = array if array.flags.owndata and not any(array is x for x in inputs.values()) else array.copy()
    own.flags.writeable = False
    return own


class ReferenceStage:
    """Consecutive packages, loaded. `watch`, when set, sees every op and each of its results as they are computed."""

    def __init__(self, programs: Sequence[Program], stress: bool) -> None:
        self.watch: Watch | None = None
        self._paths = [program.path for program in programs]
        names = [set(program.functions) for program in programs]
        self.functions: tuple[str, ...] = tuple(sorted(set.intersection(*names))) if names else ()
        if not self.functions:
            raise EngineError(f"the packages {self._where()} have no function in common: load them in separate stages.")
        prepared = [self._prepare(program, stress) for program in programs]
        self._chain = {name: [functions[name] for functions in prepared] for name in self.functions}
        self._states = [self._states_of(program) for program in programs]
        self._inputs, self._outputs = {}, {}
        for name in self.functions:
            self._inputs[name], self._outputs[name] = self._ports(name)

    def _prepare(self, program: Program, stress: bool) -> dict[str, _PreparedFunction]:
        shared = _Shared()
        return {name: _PreparedFunction(program, program.functions[name], stress, shared) for name in self.functions}

    def _where(self) -> str:
        return ", ".join(path.name for path in self._paths)

    def _states_of(self, program: Program) -> tuple[Value, ...]:
        kinds = {tuple(sorted(program.functions[name].states, key=lambda v: v.name)) for name in self.functions}
        if len(kinds) > 1:
            raise EngineError(f"the functions of {program.path.name} have different states: bake the package again.")
        return kinds.pop()

    def _ports(self, name: str) -> tuple[dict[str, Value], dict[str, Value]]:
        """What a step of the whole stage takes and gives: all ports but the hidden states between its packages."""
        functions = [prepared.function for prepared in self._chain[name]]
        inputs: dict[str, Value] = {}
        outputs: dict[str, Value] = {}
        faults: list[str] = []
        for i, function in enumerate(functions):
            takes, gives = ({v.name: v for v in values} for values in (function.inputs, function.outputs))
            if i > 0 and takes.pop(HIDDEN, None) is None:
                faults.append(f"{self._paths[i].name} has no input {HIDDEN!r}")
            if i + 1 < len(functions) and gives.pop(HIDDEN_OUT, None) is None:
                faults.append(f"{self._paths[i].name} has no output {HIDDEN_OUT!r}")
            faults += [f"{n!r} has two shapes" for n, port in takes.items() if inputs.setdefault(n, port) != port]
            outputs |= gives
        if faults:
            raise EngineError(
                f"the packages {self._where()} cannot follow each other in one stage ({'; '.join(faults)}): load "
                "consecutive packages of one bundle, in order."
            )
        return inputs, outputs

    def new_state(self) -> ReferenceState | None:
        """All zeros; None for a stage without states."""
        if not any(self._states):
            return None
        packages = [{v.name: np.zeros(v.shape, DTYPES[v.dtype]) for v in values} for values in self._states]
        for states in packages:
            for array in states.values():
                array.flags.writeable = False
        return ReferenceState(packages)

    def step(
        self, function: str, inputs: Mapping[str, np.ndarray], state: State | None, outputs: Mapping[str, np.ndarray]
    ) -> None:
        if function not in self.functions:
            raise EngineError(f"{self._where()} cannot run {function!r}: use one of {', '.join(self.functions)}.")
        faults = [*_mismatches("input", self._inputs[function], inputs)]
        faults += _mismatches("output", self._outputs[function], outputs)
        faults += [f"output {name!r} is not known" for name in outputs if name not in self._outputs[function]]
        if any(self._states) and not isinstance(state, ReferenceState):
            faults.append("the state is not one of this stage's new_state()")
        if faults:
            what = f"{function!r} of {self._where()} cannot run ({'; '.join(faults)})"
            raise EngineError(f"{what}: pass what its ports declare.")
        before = state.packages if isinstance(state, ReferenceState) else [{} for _ in self._paths]
        after: list[Values] = []
        results: Values = {}
        for i, prepared in enumerate(self._chain[function]):
            feed = {v.name: inputs[v.name] for v in prepared.function.inputs if i == 0 or v.name != HIDDEN}
            if i > 0:
                feed[HIDDEN] = results.pop(HIDDEN_OUT)
            given, written = prepared.run(feed, before[i], self.watch)
            results |= given
            after.append(written)
        for name, array in results.items():
            np.copyto(outputs[name], array, casting="no")
        if isinstance(state, ReferenceState):
            state.packages[:] = after


def _mismatches(kind: str, ports: Mapping[str, Value], arrays: Mapping[str, np.ndarray]) -> list[str]:
    """What is wrong with the arrays for some ports; an input that no port wants belongs to another stage."""
    faults = []
    for name, port in ports.items():
        array = arrays.get(name)
        if array is None:
            faults.append(f"{kind} {name!r} is missing")
        elif array.dtype != DTYPES[port.dtype] or (array.shape != port.shape and -1 not in port.shape):
            faults.append(f"{kind} {name!r} is {array.dtype} {array.shape}, not {port.dtype} {port.shape}")
    return faults
