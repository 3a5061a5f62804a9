"""Conditions of the rules on shapes, ranks and sizes (S)."""

import math
from collections.abc import Iterator

from anechain.bundle.interface import UNBOUNDED, Feature
from anechain.bundle.program import Op, Value
from anechain.judge.lint_view import LAYOUT, Hit, Package, View, at, on

ROW = 32  # fp16 elements of the 64 bytes that a row takes at least
WIDEST, MAX_DIM = 16384, 65536
LONG_ATTENTION = 2048
ABOUT_8192 = range(8000, 8400)  # reported of 8192 (written 8096 as well), and not of a head's wider pieces
_STATE_OPS = frozenset(("read_state", "coreml_update_state", "slice_update", "write_state"))
_TO_THE_SCORES = LAYOUT | {"add", "mul", "matmul", "real_div"}
_ATTENTION = ("softmax", "scaled_dot_product_attention")


def _ranged(view: View) -> Iterator[tuple[Value, str]]:
    """The inputs without fixed or enumerated shapes, and how each is described."""
    features = {f.name: f for f in view.interface.inputs}
    for value in view.function.inputs:
        feature = features.get(value.name)
        if feature is not None and feature.ranged:
            yield value, f"input {value.name} is [{', '.join(_size(*ends) for ends in feature.ranges)}]"
        elif UNBOUNDED in value.shape and not (feature is not None and feature.enumerated):
            yield value, f"input {value.name} has no fixed shape"


def _size(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {'any' if high == UNBOUNDED else high}"


def _enumerated(view: View) -> list[Feature]:
    return [f for f in view.interface.inputs if f.flexible and not f.ranged]


def range_input(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for value, detail in _ranged(view):
            yield on(view, value, detail)


def enumerated_misuse(package: Package) -> Iterator[Hit]:
    for view in package.views:
        enumerated, ranged = _enumerated(view), dict(_ranged(view))
        names = ", ".join(f.name for f in enumerated)
        if len(enumerated) > 1:
            yield Hit(f"inputs {names} have enumerated shapes", view, name=names)
        if enumerated and ranged:
            yield Hit(f"{names} has enumerated shapes, {next(iter(ranged)).name} a range", view, name=names)
        if enumerated and view.function.states:
            yield Hit(f"{names} has enumerated shapes, and the function has a state", view, name=names)


def enumerated_layer_norm(package: Package) -> Iterator[Hit]:
    for view in package.views:
        if enumerated := _enumerated(view):
            for op in view.of("layer_norm"):
                yield at(view, op, f"layer_norm in a function whose input {enumerated[0].name} has enumerated shapes")


def multifunction_range(package: Package) -> Iterator[Hit]:
    if len(package.views) > 1:
        for view in package.views:
            for value, detail in _ranged(view):
                yield on(view, value, f"{detail}, in a package of {len(package.views)} functions")


def _edges(view: View) -> tuple[Value, ...]:
    return (*view.function.inputs, *view.function.states)


def rank_over_5(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for value in _edges(view):
            if len(value.shape) > 5:
                yield on(view, value, f"{value.name} has rank {len(value.shape)}")
        for op in view.ops:
            if any(len(v.shape) > 5 for v in op.outputs):
                yield at(view, op, f"{op.type} of rank {max(len(v.shape) for v in op.outputs)}")


def rank_5_attention(package: Package) -> Iterator[Hit]:
    for view in package.views:
        found: dict[int, Op] = {}
        for op in view.of(*_ATTENTION):
            around = [op, *view.reading(op)]
            around += [o for n in _operands(op) for o in view.upstream(n, _TO_THE_SCORES)]
            around += [o for r in view.reading(op) for names in r.inputs.values() for n in names
                       for o in view.upstream(n, LAYOUT)]  # fmt: skip
            for near in around:
                shapes = [v.shape for v in (*near.outputs, *view.flowing(near))]
                if any(len(shape) == 5 for shape in shapes):
                    found[id(near)] = near
        for near in found.values():
            yield at(view, near, f"{near.type} with a tensor of rank 5 beside the attention")


def _operands(op: Op) -> list[str]:
    return [n for p in ("x", "query", "key", "value", "attn_mask") for n in op.inputs.get(p, ())]


def rank_0_input(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for value in view.function.inputs:
            if not value.shape:
                yield on(view, value, f"input {value.name} has no axis")


def ragged_rows(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for value in view.function.inputs:
            if value.dtype == "fp16" and (detail := _padding(value)):
                yield on(view, value, f"input {value.name}: {detail}")
        for op in view.ops:
            if op.type in _STATE_OPS or op.blocks:
                continue
            worst = max((v for v in op.outputs if v.dtype == "fp16"), key=_waste, default=None)
            if worst is not None and (detail := _padding(worst)):
                yield Hit(f"{op.type}: {detail}", view, op, op.name, worst.shape, worst.dtype)


def _waste(value: Value) -> float:
    last = value.shape[-1] if value.shape else ROW
    return math.ceil(last / ROW) * ROW / last if last > 0 else 1.0


def _padding(value: Value) -> str:
    waste = _waste(value)
    return f"a last axis of {value.shape[-1]} takes {waste:.3g} times its size" if waste > 1 else ""


def ragged_ports(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for value in (*view.function.inputs, *view.function.outputs):
            if value.dtype == "fp16" and value.shape and value.shape[-1] > 0 and value.shape[-1] % 64:
                yield on(view, value, f"{value.name} has rows of {value.shape[-1] * 2} bytes")


def wide_matrix(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for op, parameter, weight in view.matrices:
            outputs, inputs, _, _ = view.in_out(op, parameter, weight.shape)
            if max(outputs, inputs) > WIDEST:
                yield at(view, op, f"{op.type} from {inputs} to {outputs}")


def dim_over_65536(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for value in _edges(view):
            if max(value.shape, default=0) > MAX_DIM:
                yield on(view, value, f"{value.name} has an axis of {max(value.shape)}")
        matrices = {id(op): max(weight.shape) for op, _, weight in view.matrices}
        for op in view.ops:
            largest = max([matrices.get(id(op), 0), *(n for v in op.outputs for n in v.shape)], default=0)
            if largest > MAX_DIM:
                yield at(view, op, f"{op.type} with an axis of {largest}")


def _wide_compressed(package: Package, fused: bool) -> Iterator[Hit]:
    for view in package.views:
        if bool(view.of("scaled_dot_product_attention")) == fused:
            for op, _, weight in view.matrices:
                if weight.form in ("linear", "lut") and max(weight.shape) in ABOUT_8192:
                    yield at(view, op, f"{op.type} with a {weight.bits}-bit weight {list(weight.shape)}")


def wide_compressed_fused(package: Package) -> Iterator[Hit]:
    return _wide_compressed(package, True)


def wide_compressed_apart(package: Package) -> Iterator[Hit]:
    return _wide_compressed(package, False)


def dma_notch(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for op, parameter, weight in view.matrices:
            if weight.form != "plain" or weight.dtype != "fp16":
                continue
            outputs, inputs, kernel, _ = view.in_out(op, parameter, weight.shape)
            core_bytes = -(-outputs // 16) * inputs * kernel * 2
            steps = round(core_bytes / 2**20)
            if steps and abs(core_bytes - steps * 2**20) <= 2**14:
                yield at(view, op, f"{op.type} from {inputs} to {outputs}: {core_bytes} bytes for each of 16 cores")


def small_program(package: Package) -> Iterator[Hit]:
    for view in package.views:
        count = sum(bool(view.multiply_adds(op)) for op in view.ops)
        if 0 < count <= 2:
            yield Hit(f"{count} op{'s' * (count > 1)} with multiply-adds in the whole function", view)


def over_1400_mb(package: Package) -> Iterator[Hit]:
    if package.file_bytes > 1.4e9:
        beyond = ", beyond 2 GiB" if package.file_bytes >= 2**31 else ""
        yield Hit(f"{package.file_bytes / 1e6:.0f} MB of weights{beyond}")


def over_1000_mb(package: Package) -> Iterator[Hit]:
    if 1e9 < package.file_bytes <= 1.4e9:
        yield Hit(f"{package.file_bytes / 1e6:.0f} MB of weights")


def long_attention(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for op in view.of("softmax"):
            shape = op.outputs[0].shape
            axis = view.integer(op, "axis", -1)
            if shape and shape[axis] >= LONG_ATTENTION and _is_attention(view, op):
                yield at(view, op, f"attention over {shape[axis]} positions")
        for op in view.of("scaled_dot_product_attention"):
            key = view.dims(op.inputs["key"][0])
            if len(key) > 1 and key[-2] >= LONG_ATTENTION:
                yield at(view, op, f"attention over {key[-2]} positions")


def _is_attention(view: View, op: Op) -> bool:
    """Whether a softmax weighs something: its result is a factor of a matrix product."""
    return any(o.type in ("matmul", "einsum") for o in view.downstream(op, LAYOUT))
