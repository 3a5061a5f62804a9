"""Conditions of the rules on compressed weights (Q)."""

import re
from collections.abc import Iterator

import numpy as np

from anechain.bundle.program import Op
from anechain.judge.lint_view import GATHERS, Hit, Package, View, Weight, at, palette_bits

SMALL_MODEL = 1_000_000_000
_SCALED = ("constexpr_blockwise_shift_scale", "constexpr_affine_dequantize")


def _scales_a_palette(view: View, op: Op) -> bool:
    return any(reader.type.startswith("constexpr_lut") for reader in view.reading(op))


def _output_axes(view: View, op: Op) -> set[int]:
    """Which axis of a weight holds the outputs of the ops that read it; empty where none of them tells."""
    name, axes = op.outputs[0].name, set()
    for reader in view.readers.get(name, ()):
        parameter = next(p for p, names in reader.inputs.items() if name in names)
        if reader.type in ("conv", "conv_transpose", "linear", "matmul"):
            axes.add(view.in_out(reader, parameter, op.outputs[0].shape)[3])
        elif reader.type in GATHERS:
            axes.add(0)
    return axes


def per_block(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for op in view.of("constexpr_blockwise_shift_scale"):
            scale, data = view.weight(op.inputs["scale"][0]), view.weight(op.inputs["data"][0])
            if scale is None or data is None or _scales_a_palette(view, op):
                continue
            several = [axis for axis, size in enumerate(scale.shape) if size > 1]
            allowed = _output_axes(view, op) or set(several[:1])
            whole = all(axis in allowed and scale.shape[axis] == data.shape[axis] for axis in several)
            if len(several) > 1 or not whole:
                blocks = [d // s for d, s in zip(data.shape, scale.shape, strict=True)]
                yield at(view, op, f"one {data.dtype} scale for each {blocks} of {list(data.shape)}")
        for op in view.of("constexpr_lut_to_dense"):
            lut = view.dims(op.inputs["lut"][0])
            groups = [size for size in lut[:-2] if size > 1]
            if len(groups) > 1 and not _scaled_palette(view, op):
                yield at(view, op, f"palettes for {' x '.join(map(str, groups))} groups of rows and columns")


def _scaled_palette(view: View, op: Op) -> bool:
    maker = view.maker(op.inputs["lut"][0])
    return maker is not None and maker.type in _SCALED


def _matrices(view: View, form: str, *bits: int) -> list[tuple[Op, Weight]]:
    return [(op, w) for op, _, w in view.matrices if w.form == form and (not bits or w.bits in bits)]


def int8_channel(package: Package) -> Iterator[Hit]:
    for view in package.views:
        blocks = {hit.name for hit in per_block(package) if hit.view is view}
        names = {n for op, _ in _matrices(view, "linear", 8) for names in op.inputs.values() for n in names}
        dense = [op for op in view.of(*_SCALED) if op.outputs[0].name in names and op.name not in blocks]
        if dense:
            yield Hit(f"{len(dense)} int8 matrices, such as {dense[0].name}", view)


def palettised(package: Package) -> Iterator[Hit]:
    for view in package.views:
        ops = view.of("constexpr_lut_to_dense")
        luts = [view.dims(op.inputs["lut"][0]) for op in ops]
        groups = [int(np.prod([1, *lut[:-2]])) for lut in luts]
        if ops and all(sum(size > 1 for size in lut[:-2]) <= 1 for lut in luts):
            bits = sorted({palette_bits(lut) for lut in luts})
            what = f"{len(ops)} palettised weights of {' and '.join(map(str, bits))} bits"
            yield Hit(f"{what}, at most {max(groups)} palettes in one", view)


def scaled_palette(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for op in view.of("constexpr_lut_to_dense"):
            if _scaled_palette(view, op) or any(r.type in _SCALED for r in view.reading(op)):
                yield at(view, op, "a palette and a scale for each channel")


def quantized_activation(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for op in view.of("quantize", "dequantize"):
            if view.flowing(op):
                yield at(view, op, f"{op.type} of what flows")


def dead_scale(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for op in view.of(*_SCALED):
            scale = view.const(op, "scale")
            if scale is None or scale.dtype.kind != "f":
                continue
            dead = int(scale.size - np.count_nonzero(np.isfinite(scale) & (scale != 0)))
            if dead:
                yield at(view, op, f"{dead} of {scale.size} scales are 0 or not a number")


def unlike_functions(package: Package) -> Iterator[Hit]:
    """The same matrices, in order, compressed in one function and stored in another form in the next."""
    if not package.views:
        return
    first = package.views[0]
    for view in package.views[1:]:
        pairs = list(zip(first.matrices, view.matrices, strict=False))
        alike = len(first.matrices) == len(view.matrices) and all(a[2].shape == b[2].shape for a, b in pairs)
        for a, b in pairs if alike else []:
            if (a[2].form, a[2].bits) != (b[2].form, b[2].bits):
                what = f"{b[2].bits}-bit {b[2].form} here, {a[2].bits}-bit {a[2].form} in {first.name}"
                yield at(view, b[0], f"{b[0].name} is {what}")


def palettised_4bit_state(package: Package) -> Iterator[Hit]:
    for view in package.views:
        if view.function.states and (found := _matrices(view, "lut", 4)):
            yield Hit(f"{len(found)} 4-bit palettised matrices, such as that of {found[0][0].name}, and a state", view)


def compressed_before_ios18(package: Package) -> Iterator[Hit]:
    if package.spec_version >= 9:
        return
    for view in package.views:
        ops = [op for op in view.all_ops if op.type.startswith("constexpr")]
        for op in ops:
            packed = any(n in view.function.packed for names in op.inputs.values() for n in names)
            lut = view.dims(op.inputs["lut"][0]) if "lut" in op.inputs else ()
            if packed or len(lut) > 1 or op.type == "constexpr_blockwise_shift_scale":
                yield at(view, op, f"{op.type} in a package of specification version {package.spec_version}")


def int8_at_all(package: Package) -> Iterator[Hit]:
    count = sum(len(_matrices(view, "linear", 8)) for view in package.views)
    if count:
        yield Hit(f"{count} int8 matrices")


def small_model_4bit(package: Package) -> Iterator[Hit]:
    for view in package.views:
        found = [(op, w) for op, _, w in view.matrices if w.form in ("linear", "lut") and w.bits <= 4]
        if found and package.together.weights < SMALL_MODEL:
            what = f"{len(found)} matrices of {found[0][1].bits} bits"
            yield Hit(f"{what} in a model of {package.together.weights / 1e6:.0f} M weights", view)


# int8, w4a16, q4, lut6, 4-bit, quantized, palettised: at the start of a word, and not "not quantized".
_CLAIM = re.compile(
    r"(?<![a-z0-9])(?<!not )(int[2-8]|w[2-8](a8|a16)?|q[2-8]|lut[2-8]|[2-8]-?bits?|(quanti|paletti)[sz]ed)(?![a-z0-9])"
)


_ABOUT_WEIGHTS = re.compile(r"quanti|compress|palett|weight|precision|dtype|bits|descri")  # keys of the metadata


def claim_without_compression(package: Package) -> Iterator[Hit]:
    if package.together.compressed:
        return
    metadata = package.program.metadata.items()
    said = [package.program.path.stem, *(text for key, text in metadata if _ABOUT_WEIGHTS.search(key.lower()))]
    found = next((match.group() for text in said if (match := _CLAIM.search(text.lower()))), None)
    if found is not None and any(view.matrices for view in package.views):
        yield Hit(f"its name or metadata say {found!r}, and every matrix is stored as it is computed with")
