"""Conditions of the rules on types (T), on the hand-off (R) and on versions (V)."""

from collections.abc import Iterator

from anechain.bundle.program import Op
from anechain.judge.lint_view import GATHERS, LAYOUT, Hit, Package, View, at, on

WIDE = frozenset(("fp32", "fp64"))
# What the converter appends to the name of an op that the source computed in fp32, and of a constant that it held so.
_WAS_FP32, _WAS_FP32_CONST = "_cast_fp16", "_to_fp16"
# The first that need specification version 9 (iOS 18, macOS 15).
IOS18_OPS = frozenset(
    (
        *("read_state", "coreml_update_state", "slice_update", "scaled_dot_product_attention"),
        *("constexpr_blockwise_shift_scale", "constexpr_sparse_blockwise_shift_scale", "constexpr_lut_to_sparse"),
    )
)


def _is_wide(view: View, op: Op) -> bool:
    """Whether `op` computes in fp32. A cast and a question for a shape compute nothing."""
    if op.type in ("cast", "shape") or op.blocks:
        return False
    return any(v.dtype in WIDE for v in op.outputs) or any(v.dtype in WIDE for v in view.flowing(op))


def fp32_compute(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for op in view.ops:
            if _is_wide(view, op):
                yield at(view, op, f"{op.type} in fp32")


def fp32_island(package: Package) -> Iterator[Hit]:
    for view in package.views:
        wide = sum(_is_wide(view, op) for op in view.ops)
        half = sum(any(v.dtype == "fp16" for v in op.outputs) for op in view.ops)
        if not 0 < wide < half:
            continue
        for op in view.of("cast"):
            reads = view.values.get(op.inputs["x"][0])
            readers = [r for r in view.reading(op) if _is_wide(view, r)]
            if op.outputs[0].dtype in WIDE and reads is not None and reads.dtype == "fp16" and readers:
                yield at(view, op, f"fp16 becomes fp32 for {readers[0].name} ({readers[0].type})")


def upcast_removed(package: Package) -> Iterator[Hit]:
    for view in package.views:
        halves = [
            op for op, p, w in view.matrices if w.dtype == "fp16" and _WAS_FP32_CONST not in op.inputs[p][0]
            and not op.name.endswith(_WAS_FP32)
        ]  # fmt: skip
        if not halves:
            continue
        for op in view.ops:
            if op.name.endswith(_WAS_FP32) and op.type not in LAYOUT and all(v.dtype == "fp16" for v in op.outputs):
                yield at(view, op, f"{op.type} was fp32 in the source, beside fp16 weights ({halves[0].name})")


def state_dtype(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for state in view.function.states:
            if state.dtype != "fp16":
                yield on(view, state, f"state {state.name} is {state.dtype}")


def int32_tensor(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for op in view.ops:
            tensors = [v for v in (*view.flowing(op), *op.outputs) if v.dtype in ("int32", "int64")]
            if tensors and not op.blocks:
                yield at(view, op, f"{op.type} with {tensors[0].name}, {tensors[0].dtype} {list(tensors[0].shape)}")


_LAST_ID = {"uint16": 65535, "int16": 32767}


def short_ids(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for op in view.of(*GATHERS):
            dtypes = [v.dtype for v in view.flowing(op) if v.dtype in _LAST_ID and v.name in op.inputs["indices"]]
            rows = view.dims(op.inputs["x"][0])
            axis = 0 if op.type == "gather_nd" else view.integer(op, "axis", 0)
            if dtypes and rows and rows[axis] > _LAST_ID[dtypes[0]] + 1:
                yield at(view, op, f"{dtypes[0]} ids of {rows[axis]} rows")
        for op in view.of("topk", "reduce_argmax", "reduce_argmin"):
            axis = view.integer(op, "axis", -1)
            sizes, ids = view.dims(op.inputs["x"][0]), op.outputs[-1].dtype
            if ids in _LAST_ID and sizes and sizes[axis] > _LAST_ID[ids] + 1:
                yield at(view, op, f"{ids} ids of {sizes[axis]} numbers")


def fp32_edge(package: Package) -> Iterator[Hit]:
    for view in package.views:
        arrays = {f.name for f in (*view.interface.inputs, *view.interface.outputs) if f.kind == "multiArray"}
        for value in view.function.inputs:
            casts = [op for op in view.readers.get(value.name, ()) if op.type == "cast"]
            if value.dtype == "fp32" and value.name in arrays and any(o.outputs[0].dtype == "fp16" for o in casts):
                yield on(view, value, f"input {value.name} comes as fp32 and is cast to fp16")
        for value in view.function.outputs:
            maker = view.maker(value.name)
            cast = maker if maker is not None and maker.type == "cast" else None
            halves = cast is not None and any(v.dtype == "fp16" for v in view.flowing(cast))
            if value.dtype == "fp32" and value.name in arrays and halves:
                yield on(view, value, f"output {value.name} is fp16 and leaves as fp32")


def output_without_backing(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for feature in view.interface.outputs:
            value = view.values.get(feature.name)
            if feature.kind != "multiArray" or value is None:
                continue
            if feature.dtype != "fp16":
                yield on(view, value, f"output {feature.name} is {feature.dtype}")
            elif feature.flexible or -1 in value.shape:
                yield on(view, value, f"output {feature.name} has no fixed shape")


def target_26(package: Package) -> Iterator[Hit]:
    if package.spec_version >= 10:
        yield Hit(f"specification version {package.spec_version}, for macOS 26 and iOS 26 on")


def target_18_without_need(package: Package) -> Iterator[Hit]:
    program = package.program
    if package.spec_version == 9 and set(program.functions) == {"main"} and not needs_ios18(package):
        yield Hit("specification version 9, and nothing in the program needs more than 8 (iOS 17, macOS 14)")


def needs_ios18(package: Package) -> bool:
    palettes = (v.dims(op.inputs["lut"][0]) for v in package.views for op in v.of("constexpr_lut_to_dense"))
    return (
        any(view.function.states or view.of(*IOS18_OPS) for view in package.views)
        or any(len(shape) > 1 for shape in palettes)
        or any(view.function.packed for view in package.views)
    )


def state_before_ios18(package: Package) -> Iterator[Hit]:
    if package.spec_version < 9:
        for view in package.views:
            for state in view.function.states:
                yield on(view, state, f"state {state.name}, and specification version {package.spec_version}")
