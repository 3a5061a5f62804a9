"""The fast CPU engine: the packages of a stage become one OpenVINO model for each function, compiled once.

Two modes. "exact" computes in float32; it does not round between the ops of a package, where a program of fp16 ops
does, so it comes closer to the original than the reference engine, and cannot overflow where that does. "fast" computes
in bfloat16. In both, the ports of a stage and its logits are fp16, as the programs declare them; what one package of a
stage hands to the next is not rounded.

Weights stay as they are stored: OpenVINO is handed the mapped weight file, keeps int8 as int8 and, in exact mode, fp16
as fp16, and widens them inside its matrix product. A state is a numpy array that the compiled model reads in place;
what a program writes to it leaves the model as a small output and is copied into its box, so that no step copies a
cache. It holds its fp16 values as float32 in exact mode, because to convert all of them in every step took a third of
the attention's time, and as bfloat16 in fast mode; and it holds only the cells that a mask has shown so far
(past_cells.py).
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from anechain.bundle.program import Program, Value, read_program
from anechain.errors import EngineError
from anechain.run.engine import HostMemory, State
from anechain.run.openvino_graph import Node, writable
from anechain.run.openvino_ops import OPS, translate
from anechain.run.past_cells import CELLS
from anechain.run.stage_plan import HIDDEN, HIDDEN_OUT, Arrays, Box, HeldState, StagePlan

try:
    import openvino as ov
except ImportError:  # said when an engine is asked for
    ov = None

_NARROW_INTEGERS = ("int8", "int16", "int32", "uint8", "uint16", "uint32")
_KINDS = {"fp16": "f16", "fp32": "f32", "bool": "boolean"}  # MIL's dtypes in OpenVINO's words
_KINDS |= {name: name.replace("uint", "u").replace("int", "i") for name in _NARROW_INTEGERS}


@dataclass(frozen=True)
class _Mode:
    """How OpenVINO computes; as what states are held, and as what that which is written to them leaves the model.

    Each in OpenVINO's words and in numpy's, which has no dtype for bfloat16 and holds its bits.
    """

    config: Mapping[str, Any]
    held: str
    holder: np.dtype
    written: str
    writer: np.dtype


# OpenVINO would round activations to int8 where weights are int8: a prompt on SmolLM2 (int8-block32) took a fifth less
# time and a token none, and the divergence from the original was 2.6 times as large.
_UNQUANTISED = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
_F16, _F32, _BITS = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.uint16)
_MODES = {
    "exact": _Mode({"INFERENCE_PRECISION_HINT": "f32", **_UNQUANTISED}, "f32", _F32, "f16", _F16),
    "fast": _Mode({"INFERENCE_PRECISION_HINT": "bf16", **_UNQUANTISED}, "bf16", _BITS, "bf16", _BITS),
}


class CpuEngine(HostMemory):
    """OpenVINO on all cores. Raises EngineError where OpenVINO is not installed."""

    def __init__(self, mode: Literal["exact", "fast"]) -> None:
        if ov is None:
            raise EngineError("the cpu engine needs OpenVINO, which is not installed: pip install openvino.")
        self._mode, self._name, self._core = _MODES[mode], f"cpu-openvino-{mode}", ov.Core()

    @property
    def name(self) -> str:
        return self._name

    @property
    def stitches(self) -> bool:
        return True

    def load(self, packages: Sequence[Path]) -> "CpuStage":
        """Raises EngineError, listing all, for ops that are not known, and BundleError for an unreadable package."""
        return self.load_programs([read_program(package) for package in packages])

    def load_programs(self, programs: Sequence[Program]) -> "CpuStage":
        """The stage of programs that are read already."""
        faults = [fault for program in programs for fault in _faults(program)]
        if faults:
            raise EngineError(
                f"the {self.name} engine cannot run {'; '.join(faults)}: use another engine, or write the program with "
                f"the ops that it knows, {', '.join(sorted(OPS))}."
            )
        return CpuStage(self._core, self._mode, programs)


def _faults(program: Program) -> list[str]:
    """What in a program is not known: ops, parameters of known ops, dtypes; one entry a kind, with its first place."""
    places: dict[str, list[str]] = {}
    for function in program.functions.values():
        where = f"in function {function.name!r} of {program.path.name}"
        for op in function.ops:
            kinds = [f"op {op.type}"]
            if op.type in OPS:
                known = inspect.signature(OPS[op.type]).parameters
                kinds = [f"parameter {name} of {op.type}" for name in sorted(set(op.inputs) - set(known))]
                dtypes = {value.dtype for value in op.outputs}
                kinds += [f"dtype {dtype} of {op.type}" for dtype in sorted(dtypes - set(_KINDS))]
            for kind in kinds:
                places.setdefault(kind, []).append(f"{op.name!r} {where}")
        for state in function.states:
            if state.dtype != "fp16":
                places.setdefault(f"dtype {state.dtype} of a state", []).append(f"{state.name!r} {where}")
    return [f"{what} ({at[0]}{f' and {len(at) - 1} more' if at[1:] else ''})" for what, at in places.items()]


class CpuStage:
    """Consecutive packages, loaded and compiled."""

    def __init__(self, core: Any, mode: _Mode, programs: Sequence[Program]) -> None:
        self._mode, self._plan = mode, StagePlan(programs)
        self._models = {name: _Model(core, mode, programs, self._plan, name) for name in self._plan.steps}

    @property
    def functions(self) -> tuple[str, ...]:
        return tuple(self._models)

    def new_state(self) -> HeldState | None:
        """All zeros; None for a stage without states."""
        return self._plan.new_state(self._mode.holder)

    def step(self, function: str, inputs: Arrays, state: State | None, outputs: Arrays) -> None:
        self._plan.check(function, inputs, state, outputs)
        held = state if isinstance(state, HeldState) else HeldState([], self._plan)
        self._models[function].run(inputs, held, outputs)


class _Model:
    """One function of a stage, compiled: its one request, and the arrays that are bound to it."""

    def __init__(self, core: Any, mode: _Mode, programs: Sequence[Program], stage: StagePlan, name: str) -> None:
        self._plan, self._trims = stage.steps[name], stage.trims
        parameters: dict[str, Any] = {}
        results: dict[str, Node] = {}

        def parameter(key: str, value: Value, kind: str) -> Node:
            parameters[key] = ov.op.Parameter(getattr(ov.Type, kind), ov.Shape(value.shape))
            return _converted(parameters[key].output(0), "f32" if value.dtype.startswith("fp") else kind)

        ports = {v.name: parameter(v.name, v, _KINDS[v.dtype]) for v in self._plan.inputs.values()}
        for i, (program, function) in enumerate(zip(programs, self._plan.functions, strict=True)):
            states = {v.name: parameter(f"{i}/{v.name}", v, mode.held) for v in function.states}
            graph = translate(ov, program, function, {**ports, **states})
            given = {v.name: graph.node(v.name) for v in function.outputs}
            if i + 1 < len(programs):
                ports[HIDDEN] = given.pop(HIDDEN_OUT)
            results |= {n: _converted(node, _KINDS[self._plan.outputs[n].dtype]) for n, node in given.items()}
            own = {f"write {n}": write.value for n, write in enumerate(self._plan.writes) if write.package == i}
            results |= {key: _converted(graph.node(value), mode.written) for key, value in own.items()}
        outputs = [ov.opset16.result(node) for node in results.values()]
        model = ov.Model(outputs, [_language_model_mark()], list(parameters.values()), name)
        written = [tuple(results[f"write {n}"].get_shape()) for n in range(len(self._plan.writes))]
        self._fresh = [np.empty(shape, mode.writer) for shape in written]
        self._masks = {key: np.empty(0) for key in self._plan.masks}
        if self._trims:
            axes = {key: CELLS for key in parameters if "/" in key} | dict.fromkeys(self._plan.masks, -1)
            model.reshape({i: _open(parameters[key], axes[key]) for i, key in enumerate(parameters) if key in axes})
        config = {"PERFORMANCE_HINT": "LATENCY", **mode.config}
        try:
            self._request = core.compile_model(model, "CPU", config).create_infer_request()
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1].rstrip(".")
            raise EngineError(
                f"OpenVINO cannot compile {name!r} of {stage.where}, because {reason}: use the reference engine."
            ) from error
        self._inputs = {key: node.get_element_type() for key, node in parameters.items()}
        self._outputs = {key: node.get_element_type() for key, node in results.items()}
        self._bound: dict[str, np.ndarray] = {}

    def run(self, inputs: Arrays, state: HeldState, outputs: Arrays) -> None:
        """One step. Every box is checked before anything is computed, and written to after everything has been read."""
        boxes = [write.box(inputs, fresh.shape) for write, fresh in zip(self._plan.writes, self._fresh, strict=True)]
        arrays = {**inputs, **(self._trimmed(inputs, state, boxes) if self._trims else {})}
        arrays |= {f"{i}/{name}": array for i, states in enumerate(state.packages) for name, array in states.items()}
        for place, (key, kind) in enumerate(self._inputs.items()):
            self._bind(self._request.set_input_tensor, place, key, kind, arrays[key])
        arrays = {**outputs, **{f"write {n}": fresh for n, fresh in enumerate(self._fresh)}}
        for place, (key, kind) in enumerate(self._outputs.items()):
            self._bind(self._request.set_output_tensor, place, key, kind, arrays[key])
        self._request.infer()
        for write, box, fresh in zip(self._plan.writes, boxes, self._fresh, strict=True):
            state.packages[write.package][write.state.name][box] = fresh

    def _trimmed(self, inputs: Arrays, state: HeldState, boxes: Sequence[Box]) -> Arrays:
        """Makes room in the state for what the step sees and writes; the masks, as long as the state then is."""
        cells = state.grow(self._plan.cells(inputs, boxes))
        for key, mask in self._masks.items():
            if mask.shape[-1] != cells:
                self._masks[key] = np.empty((*inputs[key].shape[:-1], cells), inputs[key].dtype)
            self._masks[key][...] = inputs[key][..., :cells]
        return self._masks

    def _bind(self, setter: Callable[[int, Any], None], place: int, key: str, kind: Any, array: np.ndarray) -> None:
        """The request works in the caller's memory; a chain passes the same arrays in every step."""
        if self._bound.get(key) is not array:
            setter(place, ov.Tensor(writable(array), ov.Shape(array.shape), kind))
            self._bound[key] = array


def _converted(node: Node, kind: str) -> Node:
    return ov.opset16.convert(node, kind).output(0)


def _open(parameter: Any, axis: int) -> Any:
    """The shape of a parameter, with the length of one axis left to every step."""
    shape = list(parameter.get_output_shape(0))
    shape[axis] = -1
    return ov.PartialShape(shape)


def _language_model_mark() -> Any:
    """An attention op beside a variable: by that OpenVINO's CPU plugin knows a language model, and only there it keeps
    fp16 weights as they are. Elsewhere it widens them to float32 when it compiles: twice the memory, twice the time.
    """
    name, shape = "mark", [1, 1, 1, 16]
    zeros = ov.opset16.constant(np.zeros(shape, np.float32))
    held = ov.opset6.read_value(zeros, name, ov.Type.f32, ov.PartialShape(shape))
    return ov.opset6.assign(ov.opset16.scaled_dot_product_attention(held, held, held), name)
