"""The only place where a weight is rounded: a matrix and a Scheme -> small integers and their scales, pure numpy.

A method is a choice of scales and a way of rounding to them; whichever it is, it returns a `Quantized`.
"""

from dataclasses import dataclass

import numpy as np

from anechain.bundle.recipe import Scheme
from anechain.errors import RecipeError

_TOP = 127  # int8 without -128, so that the range is symmetric
_MIN_SCALE = np.float16(2.0**-14)  # the smallest normal fp16: hardware may take anything smaller for zero
_MAX_SCALE = np.float16(515.5)  # the largest whose 127 steps are still finite in fp16
_SLAB = 2**22  # elements that are widened to float32 at a time; a vocabulary would take 600 MB at once


@dataclass(frozen=True)
class Quantized:
    """A matrix as whole steps of a scale: row o, column i is `data[o, i] * scale[o, i // block]`.

    `data` [O, I] int8; `scale` [O, 1] (one per output channel) or [O, I / block] fp16, always normal and positive.
    """

    data: np.ndarray
    scale: np.ndarray


def quantize(weight: np.ndarray, scheme: Scheme, name: str = "a matrix") -> Quantized:
    """Rounds to the nearest step; `weight` [O, I] of any float dtype, which is first rounded to fp16.

    Data and scales are those of `coremltools.optimize.coreml.linear_quantize_weights` (linear symmetric, int8, per
    channel or per block, of an fp16 weight) bit for bit wherever its scale is a normal fp16 number. Where that scale is
    subnormal or zero, this one is the smallest normal number, and 1 for rows (or blocks) of zeros; where it overflows
    (magnitudes above 32 752), this one does not.

    Raises RecipeError, with `name`, for a weight that is not finite in fp16, is no matrix or is not divided by the
    scheme's blocks, and for a scheme that is not int8.
    """
    if weight.ndim != 2 or weight.size == 0:
        raise RecipeError(f"{name} cannot be quantised, because it has the shape {list(weight.shape)}: keep it fp16.")
    rows, columns = weight.shape
    block = _block_size(columns, scheme, name)
    data = np.empty((rows, columns), np.int8)
    scale = np.empty((rows, columns // block), np.float16)
    slab = max(1, _SLAB // columns)
    for top in range(0, rows, slab):
        part = slice(top, top + slab)
        blocks = _finite(weight[part], name, top).reshape(-1, columns // block, block)  # [rows, blocks, block] f32
        scale[part] = _scale_of(blocks)
        data[part] = _nearest(blocks, scale[part]).reshape(-1, columns)
    return Quantized(data, scale)


def dequantize(quantized: Quantized) -> np.ndarray:
    """[O, I] fp16: every element is its exact product, rounded once."""
    data, scale = quantized.data, quantized.scale
    rows, columns = data.shape
    weight = np.empty((rows, columns), np.float16)
    slab = max(1, _SLAB // columns)
    for top in range(0, rows, slab):
        part = slice(top, top + slab)
        blocks = data[part].reshape(-1, scale.shape[1], columns // scale.shape[1])  # [rows, blocks, block]
        weight[part] = (blocks * scale[part, :, None].astype(np.float32)).reshape(-1, columns)
    return weight


def storage_bytes(shape: tuple[int, int], scheme: Scheme) -> int:
    """Bytes that a matrix [O, I] and its scales take in the weight file of a program that computes in fp16."""
    rows, columns = shape
    if scheme.bits == 16:
        return 2 * rows * columns
    return rows * columns + 2 * rows * (columns // _block_size(columns, scheme, "a matrix"))


def _block_size(columns: int, scheme: Scheme, name: str) -> int:
    """How many inputs share a scale."""
    if scheme.bits != 8 or scheme.granularity == "tensor":
        raise RecipeError(f"{name} cannot be quantised as {scheme.granularity} {scheme}: use int8 or int8-blockN.")
    if scheme.granularity == "channel":
        return columns
    if columns % scheme.block:
        raise RecipeError(
            f"{name} has {columns} inputs, which blocks of {scheme.block} do not divide: use a block that divides them."
        )
    return scheme.block


def _finite(weight: np.ndarray, name: str, top: int) -> np.ndarray:
    """`weight` rounded to fp16, as float32; raises RecipeError when that is not finite. Its first row is row `top`."""
    with np.errstate(over="ignore"):
        half = weight.astype(np.float16)
    bad = np.argwhere(~np.isfinite(half))
    if len(bad):
        row, column = bad[0]
        value = weight[row, column]
        raise RecipeError(
            f"{name} cannot be quantised, because the value {value} at row {top + row}, column {column} "
            "is not finite in fp16: correct the checkpoint."
        )
    return half.astype(np.float32)


def _scale_of(blocks: np.ndarray) -> np.ndarray:
    """[rows, blocks, block] f32 -> [rows, blocks] fp16: the largest magnitude is the 127th step."""
    largest = np.abs(blocks).max(axis=2)  # [rows, blocks] f32
    scale = np.clip((largest / np.float32(_TOP)).astype(np.float16), _MIN_SCALE, _MAX_SCALE)
    return np.where(largest == 0, np.float16(1), scale)


def _nearest(blocks: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """[rows, blocks, block] f32 and [rows, blocks] fp16 -> int8 steps, ties to even.

    The quotient is rounded to fp16 before it is rounded to a whole number: coremltools divides in the weight's dtype.
    """
    quotient = (blocks / scale[:, :, None].astype(np.float32)).astype(np.float16)
    return np.clip(np.rint(quotient), -_TOP, _TOP).astype(np.int8)
