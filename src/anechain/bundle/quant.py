"""The only place where a weight is rounded: a matrix and a Scheme -> small integers and their scales, pure numpy.

A method is a choice of scales and a way of rounding to them; whichever it is, it returns a `Quantized`.
"""

from dataclasses import dataclass

import numpy as np

from anechain.bundle.recipe import Scheme
from anechain.errors import RecipeError

_MIN_SCALE = np.float16(2.0**-14)  # the smallest normal fp16: hardware may take anything smaller for zero
_MAX_SCALE = {8: np.float16(515.5), 4: np.float16(9352.0)}  # the largest whose `top` steps are still finite in fp16
_SLAB = 2**16  # elements that are worked on at a time: three float32 arrays of them fit into a second-level cache
_OVERFLOWS = np.float32(65520)  # the smallest number that fp16 rounds to infinity


@dataclass(frozen=True)
class Quantized:
    """A matrix as whole steps of a scale: row o, column i is `data[o, i] * scale[o, i // block]`.

    `data` [O, I] int8, of `bits` 8 or 4; `scale` [O, 1] (one per output channel) or [O, I / block] fp16, always normal
    and positive.
    """

    data: np.ndarray
    scale: np.ndarray
    bits: int = 8

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1]


def top(bits: int) -> int:
    """The largest step: 127 or 7. Not -128 or -8, so that the range is symmetric."""
    return int(2 ** (bits - 1) - 1)


def quantize(weight: np.ndarray, scheme: Scheme, name: str = "a matrix") -> Quantized:
    """Rounds to the nearest step; `weight` [O, I] of any float dtype, which is first rounded to fp16.

    Data and scales are those of `coremltools.optimize.coreml.linear_quantize_weights` (linear symmetric, int8 or int4,
    per channel or per block, of an fp16 weight) bit for bit wherever its scale is a normal fp16 number. Where that
    scale is subnormal or zero, this one is the smallest normal number, and 1 for rows (or blocks) of zeros; where it
    overflows (magnitudes above 32 752), this one does not.

    Raises RecipeError, with `name`, for a weight that is not finite in fp16, is no matrix or is not divided by the
    scheme's blocks, and for a scheme that is not linear.
    """
    rows, columns = matrix_shape(weight, name)
    block = _block_size(columns, scheme, name)
    data = np.empty((rows, columns), np.int8)
    scale = np.empty((rows, columns // block), np.float16)
    slab = max(1, _SLAB // columns)
    space = np.empty((3, min(slab, rows), columns), np.float32)  # reused: fresh memory costs more than the arithmetic
    for first in range(0, rows, slab):
        part = slice(first, min(first + slab, rows))
        values, magnitudes, spare = space[:, : part.stop - first]  # [rows, I] f32 each
        np.copyto(values, weight[part] if weight.dtype == np.float32 else finite(weight[part], name, first))
        largest = np.abs(values, out=magnitudes).reshape(-1, columns // block, block).max(axis=2)  # [rows, blocks]
        if not (largest < _OVERFLOWS).all():
            finite(weight[part], name, first)  # names the value
        _round_to_fp16(values, spare)
        _round_to_fp16(largest, np.empty_like(largest))  # rounding keeps the order, so this is the largest rounded one
        scale[part] = _scale_of(largest, scheme.bits)
        blocks = values.reshape(-1, columns // block, block)  # [rows, blocks, block]
        np.divide(blocks, scale[part, :, None].astype(np.float32), out=blocks)
        # The quotient is rounded to fp16 before it is rounded to a whole number: coremltools divides in the weight's
        # dtype.
        _round_to_fp16(values, spare)
        steps = np.clip(np.rint(values, out=values), -top(scheme.bits), top(scheme.bits), out=values)
        np.copyto(data[part], steps, casting="unsafe")
    return Quantized(data, scale, scheme.bits)


def _round_to_fp16(values: np.ndarray, spare: np.ndarray) -> None:
    """Rounds float32 below 65 520 in magnitude to what fp16 can hold, ties to even, in place; `spare` is overwritten.

    numpy converts to fp16 one number at a time, in ten times as long. Adding 1.5 * 2^(e + 13) to a number with the
    exponent e leaves of it what is at least 2^(e - 10), fp16's last place, and subtracting it again is exact; below
    2^-14 the last place is 2^-24, as for the smallest normal number.
    """
    lift = spare.view(np.uint32)
    np.bitwise_and(values.view(np.uint32), np.uint32(0xFF << 23), out=lift)
    np.maximum(lift, np.uint32(127 - 14 << 23), out=lift)
    np.add(lift, np.uint32((13 << 23) + (1 << 22)), out=lift)
    np.add(values, spare, out=values)
    np.subtract(values, spare, out=values)


def matrix_shape(weight: np.ndarray, name: str) -> tuple[int, int]:
    """(outputs, inputs) of `weight`; raises RecipeError, with `name`, when it is no matrix."""
    if weight.ndim != 2 or weight.size == 0:
        raise RecipeError(f"{name} cannot be quantised, because it has the shape {list(weight.shape)}: keep it fp16.")
    return weight.shape[0], weight.shape[1]


def dequantize(quantized: Quantized) -> np.ndarray:
    """[O, I] fp16: every element is its exact product, rounded once."""
    data, scale = quantized.data, quantized.scale
    rows, columns = data.shape
    weight = np.empty((rows, columns), np.float16)
    slab = max(1, _SLAB // columns)
    for first in range(0, rows, slab):
        part = slice(first, first + slab)
        blocks = data[part].reshape(-1, scale.shape[1], columns // scale.shape[1])  # [rows, blocks, block]
        weight[part] = (blocks * scale[part, :, None].astype(np.float32)).reshape(-1, columns)
    return weight


def _block_size(columns: int, scheme: Scheme, name: str) -> int:
    """How many inputs share a scale."""
    if scheme.kind != "linear" or scheme.bits not in _MAX_SCALE or scheme.granularity == "tensor":
        raise RecipeError(f"{name} cannot be quantised as {scheme}: use int8, int4 or one of them with -blockN.")
    if scheme.granularity == "channel":
        return columns
    if columns % scheme.block:
        raise RecipeError(
            f"{name} has {columns} inputs, which blocks of {scheme.block} do not divide: use a block that divides them."
        )
    return scheme.block


def finite(weight: np.ndarray, name: str, first: int = 0) -> np.ndarray:
    """`weight` rounded to fp16, as float32; raises RecipeError when that is not finite. Its first row is `first`."""
    with np.errstate(over="ignore"):
        half = weight.astype(np.float16)
    bad = np.argwhere(~np.isfinite(half))
    if len(bad):
        row, column = bad[0]
        value = weight[row, column]
        raise RecipeError(
            f"{name} cannot be quantised, because the value {value} at row {first + row}, column {column} "
            "is not finite in fp16: correct the checkpoint."
        )
    return half.astype(np.float32)


def _scale_of(largest: np.ndarray, bits: int) -> np.ndarray:
    """The largest magnitudes [rows, blocks] f32 -> scales [rows, blocks] fp16: the largest is the last step."""
    scale = np.clip((largest / np.float32(top(bits))).astype(np.float16), _MIN_SCALE, _MAX_SCALE[bits])
    return np.where(largest == 0, np.float16(1), scale)
