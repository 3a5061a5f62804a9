"""What is asserted of every package after it was written, from the files alone: nothing is believed for being meant."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from anechain.bundle.form import Form
from anechain.bundle.program import Function, Op, Program, read_program
from anechain.bundle.recipe import Recipe
from anechain.bundle.spec import DECODE, FORM, PREFILL, WRITE, ModelSpec, Ports, head_ports, ports_of
from anechain.bundle.stored import Corrected, Palettized, Quantized, Stored, expanded
from anechain.errors import BundleError

# Every op that graph.py writes. Another one means that something rewrote the program.
ALLOWED = frozenset(
    (
        *("abs", "add", "cast", "concat", "constexpr_blockwise_shift_scale", "constexpr_lut_to_dense", "conv"),
        *("coreml_update_state",),
        *("dequantize", "gelu", "matmul", "maximum", "mul", "quantize", "read_state", "real_div", "reduce_max"),
        *("reduce_mean", "reduce_sum", "reshape", "rsqrt", "silu", "slice_update", "softmax", "split", "sub"),
        "transpose",
    )
)
# Those that only one form has: where the state is updated, and where hidden states are int8.
ONLY = {
    "slice_update": "slice", "reduce_sum": "blend", "sub": "blend", "quantize": "gives", "dequantize": "takes",
}  # fmt: skip
# Above the largest form (q/k norms, sandwich norms, int8: 123 ops a layer, 26 a function), which the tests count.
OPS_PER_LAYER, OPS_PER_FUNCTION = 125, 30
OPS_PER_CORRECTION = 3
# Results that are fp16 in a program that computes in fp32: its edges.
EDGES = frozenset(("cast", "read_state", "slice_update", "coreml_update_state"))

Weights = Mapping[str, Stored]


def check_block(
    path: Path,
    spec: ModelSpec,
    recipe: Recipe,
    layers: range,
    context: int,
    prefill: int,
    weights: Weights,
    form: Form = FORM,
) -> None:
    """Raises BundleError, naming every fault, unless the package at `path` is what graph.py was asked for."""
    wanted = {DECODE: ports_of(spec, 1, context, layers, form)}
    if prefill:
        wanted[PREFILL] = ports_of(spec, prefill, context, layers, form)
    _check(path, wanted, recipe, weights, form, OPS_PER_LAYER * len(layers) + OPS_PER_FUNCTION)


def check_head(path: Path, spec: ModelSpec, recipe: Recipe, weights: Weights, form: Form = FORM) -> None:
    """The same for the head package."""
    _check(path, {DECODE: head_ports(spec)}, recipe, weights, form, OPS_PER_LAYER)


def _check(path: Path, wanted: Mapping[str, Ports], recipe: Recipe, weights: Weights, form: Form, ceiling: int) -> None:
    program = read_program(path)
    functions = program.functions
    ceiling += OPS_PER_CORRECTION * sum(isinstance(weight, Corrected) for weight in weights.values())
    faults = [] if set(functions) == set(wanted) else [f"its functions are {', '.join(sorted(functions))}"]
    where: dict[str, list[str]] = {}
    for name, ports in wanted.items():
        if name in functions:
            for fault in (
                *_op_faults(functions[name], recipe, form, ceiling),
                *_port_faults(functions[name], ports),
                *_promise_faults(program, name, ports),
                *_edge_faults(functions[name], recipe, form, ports),
                *_state_faults(functions[name], form, ports),
                *_weight_faults(functions[name], recipe, weights),
            ):
                where.setdefault(fault, []).append(name)
    if program.spec_version != form.spec_version:
        faults.append(f"its specification version is {program.spec_version}, not {form.spec_version}")
    faults += [f"{' and '.join(names)}: {fault}" for fault, names in where.items()]
    if faults:
        raise BundleError(
            f"{path.name} was not written as meant ({'; '.join(faults)}): report this, and do not use it."
        )


def _port_faults(function: Function, ports: Ports) -> list[str]:
    faults = []
    state = () if ports.state is None else (ports.state,)
    for kind, values, wanted in (
        ("inputs", function.inputs, ports.inputs),
        ("outputs", function.outputs, ports.outputs),
        ("states", function.states, state),
    ):
        got = {(v.name, v.shape, v.dtype) for v in values}
        if got != {(p.name, p.shape, p.dtype) for p in wanted}:
            faults.append(
                f"its {kind} are {', '.join(f'{n} {list(shape)} {dtype}' for n, shape, dtype in sorted(got))}"
            )
    return faults


def _promise_faults(program: Program, name: str, ports: Ports) -> list[str]:
    """What the description promises an app; it is written apart from the program, where int8 may become int32."""
    promised = program.interfaces[name]
    state = () if ports.state is None else (ports.state,)
    faults = []
    for kind, features, wanted in (
        ("inputs", promised.inputs, ports.inputs),
        ("outputs", promised.outputs, ports.outputs),
        ("states", promised.states, state),
    ):
        got = {(f.name, f.shape, f.dtype) for f in features}
        if got != {(p.name, p.shape, p.dtype) for p in wanted} or any(f.flexible for f in features):
            said = ", ".join(f"{n} {list(shape)} {dtype}" for n, shape, dtype in sorted(got))
            faults.append(f"its description promises the {kind} {said}")
    return faults


def _edge_faults(function: Function, recipe: Recipe, form: Form, ports: Ports) -> list[str]:
    """int8 hidden states are read by one dequantize and written by one quantize, with the calibrated scales."""
    faults = []
    hidden, leaving = ports.inputs[0].name, ports.outputs[0].name
    wide = np.float16 if recipe.compute == "fp16" else np.float32
    for kind, scale, edge in (("dequantize", form.takes, hidden), ("quantize", form.gives, leaving)):
        ops = [op for op in function.ops if op.type == kind]
        at = [op.inputs.get("input", ("",))[0] if kind == "dequantize" else op.outputs[0].name for op in ops]
        wanted = [] if scale is None else [edge]
        if at != wanted:
            faults.append(f"{len(ops)} {kind} ops, not {len(wanted)} at its edge")
        for op in ops:
            stored = _argument(function, op, "scale")
            if scale is None or stored is None or stored.dtype != wide or stored.tolist() != float(wide(scale)):
                faults.append(f"the scale of {op.name} is not {scale}")
            if more := sorted(set(op.inputs) - {"input", "scale", "output_dtype"}):
                faults.append(f"{op.name} has {', '.join(more)}")
    return faults


def _op_faults(function: Function, recipe: Recipe, form: Form, ceiling: int) -> list[str]:
    faults = []
    parts = {form.state_update} | {part for part in ("takes", "gives") if getattr(form, part) is not None}
    allowed = ALLOWED | ({"layer_norm"} if recipe.norm == "layer_norm" else set())
    allowed -= {kind for kind, part in ONLY.items() if part not in parts}
    if strange := sorted({op.type for op in function.ops} - allowed):
        faults.append(f"ops that a chain does not use: {', '.join(strange)}")
    if len(function.ops) > ceiling:
        faults.append(f"{len(function.ops)} ops, more than {ceiling}")
    for op in function.ops:
        dtypes = {v.dtype for v in op.outputs}
        edge = recipe.compute == "fp32" and op.type in EDGES
        narrow = {"int8"} if op.type == "quantize" else {recipe.compute, "fp16" if edge else recipe.compute}
        if not dtypes <= narrow:
            faults.append(f"{op.name} gives {', '.join(sorted(dtypes))} in a program of {recipe.compute}")
    for name, value in function.consts.items():
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            faults.append(f"constant {name} is not finite")
    return faults


def _weight_faults(function: Function, recipe: Recipe, weights: Weights) -> list[str]:
    """Every weight of the recipe is in the file bit for bit, and feeds the one op that it is for."""
    expressions = {op.outputs[0].name: op for op in function.ops if op.type.startswith("constexpr")}
    readers: dict[str, list[str]] = {}
    for op in function.ops:
        for parameter, names in op.inputs.items():
            for name in names:
                readers.setdefault(name, []).append(f"{parameter} of the {op.type} {op.name}")
    faults = []
    wide = np.float16 if recipe.compute == "fp16" else np.float32
    for name, wanted in expanded(weights).items():
        stem = name.replace(".", "_")
        if not isinstance(wanted, np.ndarray):
            stem += "_dense"
            expression = expressions.get(stem)
            meanings = _arguments(wanted, wide)
            parts = [(p, _argument(function, expression, p), w) for p, w in meanings.items()]
            if expression and (more := sorted(set(expression.inputs) - set(meanings))):
                faults.append(f"{name} has {', '.join(more)} beside {' and '.join(meanings)}")
            if expression and (packed := _packing(function, expression)) != wanted.bits:
                faults.append(f"{name} is stored in {packed} bits, not {wanted.bits}")
        else:
            parts = [("value", function.consts.get(stem), wanted)]
        for part, stored, meant in parts:
            if stored is None:
                faults.append(f"{name} ({part}) is not stored")
            elif stored.dtype != meant.dtype:
                faults.append(f"{name} ({part}) is stored as {stored.dtype}, not {meant.dtype}")
            elif stored.size != meant.size or not np.array_equal(stored.reshape(meant.shape), meant):
                faults.append(f"{name} ({part}) has other values than it was given")
        place = (
            "y of the mul" if name.endswith("norm") else f"{'bias' if name.endswith('bias') else 'weight'} of the conv"
        )
        reader = f"{place} {name.removesuffix('_bias').replace('.', '_')}_out"
        if readers.get(stem, []) != [reader] and all(stored is not None for _, stored, _ in parts):
            faults.append(f"{name} is {', '.join(readers.get(stem, ['read by no op']))}, not the {reader}")
    return faults


def _arguments(weight: Quantized | Palettized, wide: type[np.floating]) -> dict[str, np.ndarray]:
    """What the op that spells out a compressed weight is given."""
    if isinstance(weight, Palettized):
        return {"indices": weight.indices, "lut": weight.table.astype(wide)}
    return {"data": weight.data, "scale": weight.scale.astype(wide)}


def _packing(function: Function, op: Op) -> int:
    """Bits that each element of a compressed weight takes in the file."""
    name = op.inputs["indices" if op.type == "constexpr_lut_to_dense" else "data"][0]
    return int(function.packed[name].lstrip("uint")) if name in function.packed else 8


def _argument(function: Function, op: Op | None, parameter: str) -> np.ndarray | None:
    names = op.inputs.get(parameter, ()) if op else ()
    return function.consts.get(names[0]) if names else None


def _state_faults(function: Function, form: Form, ports: Ports) -> list[str]:
    """One read, one update; what is updated is that read, written over once: no write can be lost."""
    counts = Counter(op.type for op in function.ops)
    once = 1 if ports.state else 0
    sliced = 1 if ports.state and form.state_update == "slice" else 0
    wanted = {"read_state": once, "slice_update": sliced, "coreml_update_state": once}
    if any(counts[kind] != count for kind, count in wanted.items()):
        meant = "none" if not once else "one each" if sliced else "one, none and one"
        return [
            f"{counts['read_state']} reads, {counts['slice_update']} slice updates and {counts['coreml_update_state']} "
            f"updates of the state, not {meant}"
        ]
    if not once:
        return []
    makers = _makers(function)
    (read,) = (op.outputs[0].name for op in function.ops if op.type == "read_state")
    (update,) = (op.inputs["value"][0] for op in function.ops if op.type == "coreml_update_state")
    if form.state_update == "blend":
        found = _spelled(function, update)
        return [] if found == _blended(read, ports) else [f"the state becomes {found}"]
    if makers[update].type != "slice_update" or makers[update].inputs["x"] != (read,):
        return ["the state's update does not start from its read"]
    return []


def _blended(read: str, ports: Ports) -> str:
    """What a blend writes, as `_spelled` says it."""
    query = ports.inputs[0].shape[2]
    cells = f"reshape({WRITE})" if query == 1 else f"reshape(reduce_sum({WRITE}))"
    placed = f"mul(fresh, {cells})" if query == 1 else f"matmul({WRITE}, fresh)"
    return f"add(mul({read}, sub(1, {cells})), {placed})"


def _makers(function: Function) -> dict[str, Op]:
    return {value.name: op for op in function.ops for value in op.outputs}


def _spelled(function: Function, name: str) -> str:
    """How a value is computed, down to inputs, numbers, the read state and the `fresh` rows; casts are not spelled."""
    op = _makers(function).get(name)
    if name in function.consts and function.consts[name].size == 1:
        return f"{function.consts[name].item():g}"
    if op is None or op.type in ("read_state", "concat"):
        return name
    names = [op.inputs[p][0] for p in ("x", "y") if p in op.inputs]
    if op.type == "cast":
        return _spelled(function, names[0])
    return f"{op.type}({', '.join(_spelled(function, n) for n in names)})"
