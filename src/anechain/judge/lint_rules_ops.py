"""Conditions of the rules on ops and the patterns that they form (O)."""

from collections.abc import Iterator

import numpy as np

from anechain.bundle.program import Op
from anechain.judge.lint_view import GATHERS, LAYOUT, Hit, Package, View, at

_KEEP = frozenset(("cast", "identity"))
_MEANS = ("reduce_mean", "reduce_sum")
_STEPS = frozenset(("add", "maximum", "cast", "identity"))
_ROOTS = frozenset(("rsqrt", "sqrt", "pow", "inverse"))
_PRODUCTS = frozenset(("mul", "real_div"))
_TO_THE_MAX = frozenset(("maximum", "add", "mul", "real_div", "inverse", "abs", "cast", "identity", "clip"))


def _squared(view: View, name: str) -> str | None:
    """What a value is the square of, if it is one."""
    op = view.source(name, _KEEP)
    if op is None:
        return None
    if op.type == "square" or (op.type == "pow" and view.scalar(op, "y") == 2):
        return op.inputs["x"][0]
    return op.inputs["x"][0] if op.type == "mul" and op.inputs["x"] == op.inputs["y"] else None


def _divided_by_its_maximum(view: View, name: str) -> bool:
    op = view.source(name, _KEEP)
    if op is None or op.type not in ("real_div", "mul"):
        return False
    divisors = op.inputs["y"] if op.type == "real_div" else (*op.inputs["x"], *op.inputs["y"])
    return any(o.type == "reduce_max" for n in divisors for o in view.upstream(n, _TO_THE_MAX))


def _minus_its_mean(view: View, name: str) -> bool:
    op = view.source(name, _KEEP)
    mean = view.source(op.inputs["y"][0], _KEEP) if op is not None and op.type == "sub" else None
    return mean is not None and mean.type == "reduce_mean"


def _means_of_squares(view: View) -> Iterator[tuple[Op, str]]:
    """Each reduction that sums squares, and what is squared."""
    for op in view.of(*_MEANS):
        base = _squared(view, op.inputs["x"][0])
        if base is not None:
            yield op, base
    for op in view.of("reduce_sum_square", "reduce_l2_norm"):
        yield op, op.inputs["x"][0]


def plain_rms_norm(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for op, base in _means_of_squares(view):
            if op.outputs[0].dtype != "fp16" or _divided_by_its_maximum(view, base) or _minus_its_mean(view, base):
                continue
            rooted = op.type == "reduce_l2_norm" or any(
                o.type in _ROOTS for o in view.downstream(op, _STEPS | _PRODUCTS)
            )
            if rooted and (op.type == "reduce_mean" or _is_averaged(view, op)):
                yield at(view, op, f"{op.type} of the squares of {base} in fp16")


def _is_averaged(view: View, op: Op) -> bool:
    """Whether a sum of squares is made a mean by a constant factor, or what it divides by it has a gain of its own.

    A length that does neither is an L2 norm, of embeddings for example, and no RMSNorm.
    """

    def factors(through: frozenset[str]) -> Iterator[np.ndarray]:
        for near in view.downstream(op, through):
            if near.type in _PRODUCTS:
                yield from (v for p in ("x", "y") if (v := view.const(near, p)) is not None)

    scaled = any(value.size == 1 for value in factors(_STEPS | _ROOTS))
    return scaled or any(value.size > 1 for value in factors(_STEPS | _ROOTS | _PRODUCTS))


def layer_norm_as_rms(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for op in view.of("layer_norm"):
            if "beta" not in op.inputs and not _is_doubled(view, op.inputs["x"][0]):
                yield at(view, op, "layer_norm without beta of something else than [x, -x]")


def _is_doubled(view: View, name: str) -> bool:
    """Whether a value is the concatenation of a tensor and its negative, whose mean is 0 whatever it holds."""
    op = view.source(name, LAYOUT - {"concat"})
    if op is None or op.type != "concat" or len(op.inputs["values"]) != 2:
        return False
    return any(_negated(view, a) == b for a, b in (op.inputs["values"], op.inputs["values"][::-1]))


def _negated(view: View, name: str) -> str | None:
    op = view.source(name, _KEEP)
    if op is None:
        return None
    if op.type in ("mul", "real_div") and view.scalar(op, "y") == -1:
        return op.inputs["x"][0]
    if op.type == "mul" and view.scalar(op, "x") == -1:
        return op.inputs["y"][0]
    return op.inputs["y"][0] if op.type == "sub" and view.scalar(op, "x") == 0 else None


def unfused_layer_norm(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for op, base in _means_of_squares(view):
            dividing = {id(o) for o in view.downstream(op, _STEPS | _ROOTS | _PRODUCTS) if o.type in _PRODUCTS}
            divided = any(id(reader) in dividing for reader in view.readers.get(base, ()))
            if op.type == "reduce_mean" and _minus_its_mean(view, base) and divided:
                yield at(view, op, "mean, difference, square, mean: a norm in single ops")


def infinite_mask(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for op in view.of("add", "sub", "select", "where", "maximum", "minimum", "mul", "scaled_dot_product_attention"):
            for names in op.inputs.values():
                value = view.consts.get(names[0]) if len(names) == 1 else None
                if value is not None and value.dtype.kind == "f" and np.isneginf(value).any():
                    yield at(view, op, f"{op.type} with -inf in {names[0]}")


def fused_attention(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for op in view.of("scaled_dot_product_attention"):
            yield at(view, op, "scaled_dot_product_attention")


def repeated_heads(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for op in view.of("tile"):
            reps = view.const(op, "reps")
            if reps is None or not (reps > 1).any():
                continue
            into = [o for o in view.downstream(op, LAYOUT) if o.type in ("matmul", "scaled_dot_product_attention")]
            if into:
                yield at(view, op, f"tile by {reps.tolist()} before {into[0].name} ({into[0].type})")


def linear_layers(package: Package) -> Iterator[Hit]:
    for view in package.views:
        if found := view.of("linear"):
            yield Hit(f"{len(found)} linear ops, such as {found[0].name}", view)


def depthwise_conv(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for op in view.of("conv"):
            groups, channels = view.integer(op, "groups", 1), view.dims(op.inputs["x"][0])
            if len(channels) > 1 and groups == channels[1] > 1:
                yield at(view, op, f"conv of {groups} groups on {channels[1]} channels")


def off_the_engine(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for op in view.of("conv", "conv_transpose"):
            if len(view.dims(op.inputs["x"][0])) == 5:
                yield at(view, op, "a convolution over three axes")
        for op in view.of(*GATHERS):
            table, ids = op.inputs["x"][0], op.inputs["indices"][0]
            if not view.is_fixed(table) and not view.is_fixed(ids):
                yield at(view, op, f"{op.type} from {table} at places that are computed")
        for op in view.of(*CHOOSERS):
            yield at(view, op, op.type)


CHOOSERS = ("topk", "reduce_argmax", "reduce_argmin")


def choosing(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for op in view.of(*CHOOSERS):
            yield at(view, op, op.type)


def softplus(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for op in view.of("softplus", "softplus_parametric"):
            tanh = [o for o in view.reading(op) if o.type == "tanh"]
            yield at(view, op, "mish, x * tanh(softplus(x))" if tanh else op.type)


def _tables(view: View) -> Iterator[tuple[Op, bool]]:
    """Each gather from a constant table at places that are computed, and whether the table is one of cos or sin."""
    for op in view.of(*GATHERS):
        name = op.inputs["x"][0]
        if view.is_fixed(name) and not view.is_fixed(op.inputs["indices"][0]):
            table = view.consts.get(name)
            yield op, table is not None and _is_rotary(table)


def _is_rotary(table: np.ndarray) -> bool:
    """Whether rows 0, 1 and 2 are cos or sin of 0, a and 2a: (1, c, 2c^2 - 1) or (0, s, 2s * sqrt(1 - s^2))."""
    rows = table.reshape(-1, table.shape[-1]) if table.ndim > 1 and table.dtype.kind == "f" else table[:0]
    if len(rows) < 3 or np.abs(rows[:3]).max() > 1.001 or (rows[0] != rows[0][0]).any():
        return False
    first, once, twice = rows[0][0], rows[1].astype(np.float64).clip(-1, 1), rows[2].astype(np.float64)
    wanted = 2 * once**2 - 1 if first == 1 else 2 * once * np.sqrt(1 - once**2)
    return first in (0, 1) and bool((rows[1] != first).any()) and bool(np.abs(wanted - twice).max() < 0.01)


def rotary_gather(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for op, rotary in _tables(view):
            if rotary:
                yield at(view, op, f"{op.type} from the table {op.inputs['x'][0]} of cosines or sines")


def embedding_gather(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for op, rotary in _tables(view):
            if not rotary:
                yield at(view, op, f"{op.type} from the table {op.inputs['x'][0]} {list(view.dims(op.inputs['x'][0]))}")


def flat_conv(package: Package) -> Iterator[Hit]:
    for view in package.views:
        flat = [
            op for op, _, w in view.matrices
            if op.type == "conv" and w.shape[2:] == (1, 1) and (x := view.dims(op.inputs["x"][0]))[2:3] == (1,)
            and x[-1] >= 64 and x[-1] % 64 == 0
        ]  # fmt: skip
        if flat:
            yield Hit(f"{len(flat)} 1x1 convolutions on [1, C, 1, S], such as {flat[0].name}", view)
