"""Ops between stored numbers and what they stand for: the compile-time constexpr ops, quantize and dequantize."""

from collections.abc import Callable

import numpy as np

from anechain.run.rounding import Rounding


def constexpr_blockwise_shift_scale(
    r: Rounding, data: np.ndarray, scale: np.ndarray, offset: np.ndarray | None = None
) -> np.ndarray:
    """scale * (data - offset), one scale and offset for a block; the shapes say how large a block is."""
    pairs = zip(data.shape, scale.shape, strict=True)
    split = [n for size, blocks in pairs for n in (blocks, size // blocks)]  # each axis as (blocks, inside)
    inner = tuple(range(1, 2 * data.ndim, 2))
    values: np.ndarray = data.reshape(split).astype(np.float32)
    if offset is not None:
        values -= np.expand_dims(offset, inner)
    values *= np.expand_dims(scale, inner)
    return values.reshape(data.shape)


def constexpr_lut_to_dense(
    r: Rounding,
    indices: np.ndarray,
    lut: np.ndarray,
    vector_axis: np.ndarray | None = None,
    shape: np.ndarray | None = None,
) -> np.ndarray:
    """Two forms: iOS 18 has one index an element and a table a block; iOS 16 has packed bits, `shape` and one table.

    lut [*blocks, entries, vector]; a vector of several values lies along `vector_axis` of the result.
    """
    if shape is not None:
        bits, count = (len(lut) - 1).bit_length(), int(np.prod(shape))
        flags = np.unpackbits(indices, count=count * bits, bitorder="little").reshape(count, bits)
        places = np.packbits(flags, axis=1, bitorder="little")[:, 0]
        return np.asarray(lut[places].reshape([int(n) for n in shape]))
    grid = np.ogrid[tuple(slice(n) for n in indices.shape)]
    tables = [at // (n // blocks) for at, n, blocks in zip(grid, indices.shape, lut.shape, strict=False)]
    dense: np.ndarray = lut[(*tables, indices)]  # [*indices, vector]
    axis = 0 if vector_axis is None else int(vector_axis) % indices.ndim
    result = [n * (dense.shape[-1] if i == axis else 1) for i, n in enumerate(indices.shape)]
    return np.moveaxis(dense, -1, axis + 1).reshape(result)


def _along(values: np.ndarray, axis: np.ndarray | None, rank: int) -> np.ndarray:
    """One value for all, or a vector along `axis`, in a shape that broadcasts against a tensor of `rank`."""
    if values.ndim == 0 or axis is None:
        return values
    return values.reshape([-1 if i == int(axis) % rank else 1 for i in range(rank)])


def quantize(
    r: Rounding,
    input: np.ndarray,
    scale: np.ndarray,
    output_dtype: np.ndarray,
    zero_point: np.ndarray | None = None,
    axis: np.ndarray | None = None,
) -> np.ndarray:
    """clip(round(input / scale) + zero_point), halves to even."""
    steps: np.ndarray = np.round(input / _along(scale, axis, input.ndim))
    if zero_point is not None:
        steps = steps + _along(zero_point, axis, input.ndim).astype(np.float32)
    limits = np.iinfo(r.dtype)
    return np.asarray(np.clip(steps, limits.min, limits.max))


def dequantize(
    r: Rounding,
    input: np.ndarray,
    scale: np.ndarray,
    zero_point: np.ndarray | None = None,
    axis: np.ndarray | None = None,
) -> np.ndarray:
    values = input.astype(np.float32)
    if zero_point is not None:
        values = values - _along(zero_point, axis, input.ndim).astype(np.float32)
    return np.asarray(_along(scale, axis, input.ndim) * values)


WEIGHTS: dict[str, Callable[..., np.ndarray]] = {
    f.__name__: f for f in (constexpr_blockwise_shift_scale, constexpr_lut_to_dense, quantize, dequantize)
}
