"""Ops that move values and never change one: shapes, slices, choices. They take and give any dtype."""

from collections.abc import Callable
from typing import Any

import numpy as np


def transpose(x: np.ndarray, perm: np.ndarray) -> np.ndarray:
    return np.transpose(x, [int(p) for p in perm])


def reshape(x: np.ndarray, shape: np.ndarray) -> np.ndarray:
    """A 0 stands for the dimension of x at the same place counted from the right, or for 1 beyond its rank."""
    shift = x.ndim - len(shape)
    dims = [int(n) if n else (x.shape[i + shift] if i + shift >= 0 else 1) for i, n in enumerate(shape)]
    return x.reshape(dims)


def expand_dims(x: np.ndarray, axes: np.ndarray) -> np.ndarray:
    return np.expand_dims(x, tuple(int(a) for a in axes))


def squeeze(x: np.ndarray, axes: np.ndarray | None = None) -> np.ndarray:
    return np.squeeze(x, None if axes is None else tuple(int(a) for a in axes))


def tile(x: np.ndarray, reps: np.ndarray) -> np.ndarray:
    return np.tile(x, reps)


def identity(x: np.ndarray) -> np.ndarray:
    return x


def cast(x: np.ndarray, dtype: np.ndarray) -> np.ndarray:
    """The output's declared dtype, which every result is brought to, says the same as `dtype`."""
    return x


def select(cond: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where(cond, a, b)


def concat(values: list[np.ndarray], axis: np.ndarray, interleave: np.ndarray | None = None) -> np.ndarray:
    at = int(axis)
    if values[0].ndim == 0:
        return np.stack(values, at)
    if interleave is None or not interleave:
        return np.concatenate(values, at)
    at %= values[0].ndim
    shape = list(values[0].shape)
    shape[at] *= len(values)
    return np.stack(values, at + 1).reshape(shape)


def stack(values: list[np.ndarray], axis: np.ndarray) -> np.ndarray:
    return np.stack(values, int(axis))


def split(
    x: np.ndarray, axis: np.ndarray, num_splits: np.ndarray | None = None, split_sizes: np.ndarray | None = None
) -> list[np.ndarray]:
    if split_sizes is not None:
        return np.split(x, np.cumsum(split_sizes)[:-1], int(axis))
    if num_splits is None:
        raise ValueError("neither num_splits nor split_sizes is given")
    return np.split(x, int(num_splits), int(axis))


def gather(
    x: np.ndarray,
    indices: np.ndarray,
    axis: np.ndarray | int = 0,
    batch_dims: np.ndarray | int = 0,
    validate_indices: np.ndarray | bool = False,
) -> np.ndarray:
    """An index beyond the axis is always an error here, whatever `validate_indices` says."""
    if batch_dims:
        raise ValueError("batch_dims other than 0 is not supported")
    return np.take(x, indices, int(axis))


def _box(
    begin: np.ndarray,
    end: np.ndarray,
    stride: np.ndarray | None,
    begin_mask: np.ndarray | None,
    end_mask: np.ndarray | None,
    squeeze_mask: np.ndarray | None,
) -> tuple[slice | int, ...]:
    """The index that the parameters of slice_by_index and slice_update stand for."""
    none = np.zeros(len(begin), bool)
    from_start, to_end, single = (none if mask is None else mask for mask in (begin_mask, end_mask, squeeze_mask))
    steps = np.ones(len(begin), int) if stride is None else stride
    return tuple(
        int(begin[i])
        if single[i]
        else slice(None if from_start[i] else int(begin[i]), None if to_end[i] else int(end[i]), int(steps[i]))
        for i in range(len(begin))
    )


def slice_by_index(
    x: np.ndarray,
    begin: np.ndarray,
    end: np.ndarray,
    stride: np.ndarray | None = None,
    begin_mask: np.ndarray | None = None,
    end_mask: np.ndarray | None = None,
    squeeze_mask: np.ndarray | None = None,
) -> np.ndarray:
    return np.asarray(x[_box(begin, end, stride, begin_mask, end_mask, squeeze_mask)])


def slice_by_size(x: np.ndarray, begin: np.ndarray, size: np.ndarray) -> np.ndarray:
    """A size of -1 means up to the end; a negative begin counts from the end."""
    starts = [int(b) % n for b, n in zip(begin, x.shape, strict=True)]
    return x[tuple(slice(b, None if s == -1 else b + int(s)) for b, s in zip(starts, size, strict=True))]


def slice_update(
    x: np.ndarray,
    update: np.ndarray,
    begin: np.ndarray,
    end: np.ndarray,
    stride: np.ndarray | None = None,
    begin_mask: np.ndarray | None = None,
    end_mask: np.ndarray | None = None,
    squeeze_mask: np.ndarray | None = None,
) -> np.ndarray:
    """A box that leaves the tensor is an error: numpy would cut it off and write less than was meant."""
    box = _box(begin, end, stride, begin_mask, end_mask, squeeze_mask)
    result = x.copy()
    if result[box].shape != update.shape:
        raise ValueError(f"the box {begin} to {end} of {x.shape} holds {result[box].shape}, not {update.shape}")
    result[box] = update
    return result


LAYOUT: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        transpose, reshape, expand_dims, squeeze, tile, identity, cast, select, concat, stack, split, gather,
        slice_by_index, slice_by_size, slice_update,
    )
}  # fmt: skip
