"""What a step of consecutive packages takes, gives and writes to their states: plain numpy, whatever computes it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from anechain.bundle.program import Function, Op, Program, Value
from anechain.errors import EngineError
from anechain.run.blend import Blend, blend_of, first_cell
from anechain.run.ops import DTYPES
from anechain.run.past_cells import CELLS, MASK, needs_visible_only, visible

HIDDEN, HIDDEN_OUT = "hidden", "hidden_out"
READ, UPDATE, SLICE_UPDATE = "read_state", "coreml_update_state", "slice_update"
ROOM = 128  # a state grows by so many cells: few enough to waste little, many enough to grow seldom

Arrays = Mapping[str, np.ndarray]
Box = tuple[slice, ...]


@dataclass(frozen=True)
class HeldState:
    """The states of every package of a stage, by name: arrays that a step writes to in place.

    Their axis CELLS may end before the context does: cells that are not there are zero, and were hidden by every mask.
    """

    packages: list[dict[str, np.ndarray]]
    plan: "StagePlan"

    def copy(self, tokens: int | None = None) -> "HeldState":
        """With `tokens`, no more cells than a state has that saw only these: its sums are the same, bit for bit."""
        cells = None if tokens is None or not self.plan.trims else max(1, -(-tokens // ROOM)) * ROOM
        copies = [{name: array[:, :, :cells].copy() for name, array in states.items()} for states in self.packages]
        return HeldState(copies, self.plan)

    def grow(self, cells: int) -> int:
        """Makes room for `cells`, and returns for how many there is room."""
        room = 0
        for states in self.packages:
            for name, array in states.items():
                before = array.shape[CELLS]
                if before < cells:
                    states[name] = np.zeros((*array.shape[:CELLS], cells, *array.shape[CELLS + 1 :]), array.dtype)
                    states[name][:, :, :before] = array
                room = int(states[name].shape[CELLS])
        return room


@dataclass(frozen=True)
class Write:
    """`value`, which the function computes, goes into a box of a state: where `place` says, or all over it (None)."""

    package: int
    state: Value
    value: str
    place: Op | Blend | None  # a slice_update, or a blend that is one
    consts: Arrays

    def box(self, inputs: Arrays, shape: Sequence[int]) -> Box:
        """Where it goes; EngineError when that does not have `shape`, because part of it lies outside of the state."""
        full = self.state.shape
        if self.place is None:
            return tuple(slice(0, n, 1) for n in full)
        if isinstance(self.place, Blend):
            first = first_cell(inputs[self.place.port], self.place.port)
            cells = slice(first, first + shape[CELLS], 1)
            return tuple(cells if axis == CELLS else slice(0, n, 1) for axis, n in enumerate(full))
        known = {**inputs, **self.consts}
        parts = {p: known[names[0]] for p, names in self.place.inputs.items() if p not in ("x", "update")}
        begin, end = parts["begin"].tolist(), parts["end"].tolist()
        from_start, to_end = (parts.get(mask, [False] * len(full)) for mask in ("begin_mask", "end_mask"))
        steps = parts["stride"].tolist() if "stride" in parts else [1] * len(full)
        box = tuple(
            slice(*slice(None if from_start[i] else begin[i], None if to_end[i] else end[i], steps[i]).indices(n))
            for i, n in enumerate(full)
        )
        if [len(range(s.start, s.stop, s.step)) for s in box] != list(shape):
            raise EngineError(
                f"{list(shape)} values do not fit into {begin} to {end} of the state {self.state.name!r} of "
                f"{list(full)}: start a new conversation, or bake with a larger --context."
            )
        return box


def _writes(package: int, function: Function) -> list[Write]:
    """What ends up in each state: the last update counts, back to the read_state that it started from.

    An update that starts from an older value than the one before it undoes that one: it is not among them.
    """
    makers = {value.name: op for op in function.ops for value in op.outputs}
    last = {op.inputs["state"][0]: op.inputs["value"][0] for op in function.ops if op.type == UPDATE}
    writes: list[Write] = []
    for state in function.states:
        if state.name not in last:
            continue
        blend = blend_of(function, state.name, last[state.name])
        if blend is not None:
            writes.append(Write(package, state, blend.fresh, blend, function.consts))
            continue
        chain: list[Op] = []
        maker = makers.get(last[state.name])
        while maker is not None and maker.type in (SLICE_UPDATE, UPDATE):
            chain += [maker] if maker.type == SLICE_UPDATE else []
            maker = makers.get(maker.inputs["x" if maker.type == SLICE_UPDATE else "value"][0])
        read = maker is not None and maker.type == READ and maker.inputs["input"] == (state.name,)
        if read and all(_is_known_before(function, op) for op in chain):
            writes += [Write(package, state, op.inputs["update"][0], op, function.consts) for op in reversed(chain)]
        else:
            writes.append(Write(package, state, last[state.name], None, function.consts))
    return writes


def _is_known_before(function: Function, op: Op) -> bool:
    """Whether the host knows, before the step, where a slice_update goes."""
    known = {value.name for value in function.inputs} | set(function.consts)
    given = {p: names[0] for p, names in op.inputs.items() if p not in ("x", "update")}
    squeezed = "squeeze_mask" in given and np.any(function.consts.get(given["squeeze_mask"], True))
    return set(given.values()) <= known and not squeezed


class StepPlan:
    """One function of a stage: its ports, without the hidden states between packages, and what it writes."""

    def __init__(self, programs: Sequence[Program], name: str) -> None:
        self.functions = [program.functions[name] for program in programs]
        self.inputs: dict[str, Value] = {}
        self.outputs: dict[str, Value] = {}
        faults: list[str] = []
        for i, (program, function) in enumerate(zip(programs, self.functions, strict=True)):
            takes, gives = ({v.name: v for v in values} for values in (function.inputs, function.outputs))
            if i > 0 and takes.pop(HIDDEN, None) is None:
                faults.append(f"{program.path.name} has no input {HIDDEN!r}")
            if i + 1 < len(programs) and gives.pop(HIDDEN_OUT, None) is None:
                faults.append(f"{program.path.name} has no output {HIDDEN_OUT!r}")
            faults += [f"{n!r} has two shapes" for n, port in takes.items() if self.inputs.setdefault(n, port) != port]
            self.outputs |= gives
        if faults:
            raise EngineError(
                f"the packages {', '.join(program.path.name for program in programs)} cannot follow each other in one "
                f"stage ({'; '.join(faults)}): load consecutive packages of one bundle, in order."
            )
        self.states = [{v.name: v for v in function.states} for function in self.functions]
        self.masks = [port for port in self.inputs if port.startswith(MASK)]
        self.writes = [write for i, function in enumerate(self.functions) for write in _writes(i, function)]

    def replaced(self, package: int) -> frozenset[str]:
        """The ops of a package's function that are not computed, because a write of rows stands for them."""
        blends = [w.place for w in self.writes if w.package == package and isinstance(w.place, Blend)]
        return frozenset().union(*(blend.replaced for blend in blends))

    def cells(self, inputs: Arrays, boxes: Sequence[Box]) -> int:
        """How many cells of the states a step sees or writes to, rounded up to ROOM; the context holds no more."""
        needed = max(1, *(visible(inputs[mask]) for mask in self.masks), *(box[CELLS].stop for box in boxes))
        context = min(self.inputs[mask].shape[-1] for mask in self.masks)
        return int(min(-(-needed // ROOM) * ROOM, context))


class StagePlan:
    """The functions that consecutive packages have in common, and the states of each package.

    `trims`: a state may be held and read without the cells at its end that every mask hides, and so may the masks.
    Raises EngineError for packages that cannot follow each other.
    """

    def __init__(self, programs: Sequence[Program]) -> None:
        self.where = where = ", ".join(program.path.name for program in programs)
        names = sorted(set.intersection(*(set(program.functions) for program in programs))) if programs else []
        if not names:
            raise EngineError(f"the packages {where} have no function in common: load them in separate stages.")
        self.steps = {name: StepPlan(programs, name) for name in names}
        self.states = self.steps[names[0]].states
        if any(step.states != self.states for step in self.steps.values()):
            raise EngineError(f"the functions of {where} have different states: bake the packages again.")
        self.trims = all(
            all(write.place for write in step.writes)
            and all(needs_visible_only(f, step.replaced(i)) for i, f in enumerate(step.functions))
            for step in self.steps.values()
        )

    def check(self, function: str, inputs: Arrays, state: object, outputs: Arrays) -> None:
        """Raises EngineError, with all faults, unless a step can be made of these."""
        if function not in self.steps:
            raise EngineError(f"{self.where} cannot run {function!r}: use one of {', '.join(self.steps)}.")
        step = self.steps[function]
        faults = [*mismatches("input", step.inputs, inputs), *mismatches("output", step.outputs, outputs)]
        faults += [f"output {name!r} is not known" for name in outputs if name not in step.outputs]
        if any(self.states) and not (isinstance(state, HeldState) and state.plan is self):
            faults.append("the state is not one of this stage's new_state()")
        if faults:
            what = f"{function!r} of {self.where} cannot run ({'; '.join(faults)})"
            raise EngineError(f"{what}: pass what its ports declare.")

    def new_state(self, dtype: np.dtype) -> HeldState | None:
        """All zeros, held as `dtype`; None for a stage without states."""
        if not any(self.states):
            return None

        def zeros(state: Value) -> np.ndarray:
            shape = list(state.shape)
            if self.trims:
                shape[CELLS] = min(shape[CELLS], ROOM)
            return np.zeros(shape, dtype)

        return HeldState([{n: zeros(v) for n, v in states.items()} for states in self.states], self)


def mismatches(kind: str, ports: Mapping[str, Value], arrays: Arrays, contiguous: bool = True) -> list[str]:
    """What is wrong with the arrays for some ports; an input that no port wants belongs to another stage."""
    faults = []
    for name, port in ports.items():
        array = arrays.get(name)
        if array is None:
            faults.append(f"{kind} {name!r} is missing")
        elif array.dtype != DTYPES[port.dtype] or array.shape != port.shape:
            faults.append(f"{kind} {name!r} is {array.dtype} {array.shape}, not {port.dtype} {port.shape}")
        elif contiguous and not array.flags.c_contiguous:
            faults.append(f"{kind} {name!r} is not contiguous")
    return faults
