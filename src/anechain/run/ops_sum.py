"""Ops that add up: products, convolution, reductions and what is made of them. Sums are in float32, see Rounding."""

from collections.abc import Callable
from typing import Any

import numpy as np

from anechain.run.rounding import Rounding


def matmul(
    r: Rounding,
    x: np.ndarray,
    y: np.ndarray,
    transpose_x: np.ndarray | bool = False,
    transpose_y: np.ndarray | bool = False,
) -> np.ndarray:
    left = np.swapaxes(x, -1, -2) if transpose_x else x
    right = np.swapaxes(y, -1, -2) if transpose_y else y
    if x.ndim == 1:
        return r.product(left[None, :], right)[..., 0, :]
    return r.product(left, right)


def linear(r: Rounding, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    rows = x if x.ndim > 1 else x[None, :]  # [..., D_in]
    y = r.product(rows, weight.T).reshape(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias


def _padding(
    pad_type: str, pad: np.ndarray | None, x: tuple[int, ...], kernel: list[int], strides: list[int]
) -> list[tuple[int, int]]:
    """(before, after) of every spatial dimension. `kernel` counts the gaps that dilation makes."""
    if pad_type == "valid":
        return [(0, 0)] * len(x)
    if pad_type == "custom" and pad is not None:
        return [(int(pad[2 * i]), int(pad[2 * i + 1])) for i in range(len(x))]
    if pad_type in ("same", "same_lower"):
        wanted = [max(0, (-(-n // s) - 1) * s + k - n) for n, k, s in zip(x, kernel, strides, strict=True)]
        if not any(n % 2 for n in wanted):
            return [(n // 2, n // 2) for n in wanted]
        raise ValueError(f"pad_type {pad_type!r} with an odd padding is not supported: use custom")
    raise ValueError(f"pad_type {pad_type!r} is not known")


def conv(
    r: Rounding,
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    strides: np.ndarray | None = None,
    pad_type: np.ndarray | str = "valid",
    pad: np.ndarray | None = None,
    dilations: np.ndarray | None = None,
    groups: np.ndarray | int = 1,
) -> np.ndarray:
    """x [N, C, *D], weight [O, C / groups, *K]: a matrix of weights times one column of inputs for each place."""
    spatial, g = x.ndim - 2, int(groups)
    steps = [1] * spatial if strides is None else [int(s) for s in strides]
    gaps = [1] * spatial if dilations is None else [int(d) for d in dilations]
    reach = [(k - 1) * d + 1 for k, d in zip(weight.shape[2:], gaps, strict=True)]
    padding = _padding(str(pad_type), pad, x.shape[2:], reach, steps)
    if reach == steps == [1] * spatial and not any(map(any, padding)):
        places, columns = x.shape[2:], x.reshape(x.shape[0], g, x.shape[1] // g, -1)
    else:
        padded = np.pad(x, [(0, 0), (0, 0), *padding])
        windows = np.lib.stride_tricks.sliding_window_view(padded, reach, tuple(range(2, x.ndim)))
        every: tuple[Any, ...] = (..., *(slice(None, None, n) for n in (*steps, *gaps)))
        windows = windows[every]  # [N, C, *out, *K]
        places = windows.shape[2 : 2 + spatial]
        order = (0, 1, *range(2 + spatial, 2 + 2 * spatial), *range(2, 2 + spatial))
        columns = windows.transpose(order).reshape(x.shape[0], g, -1, int(np.prod(places)))
    matrix = weight.reshape(g, len(weight) // g, -1)  # [g, O / g, C / g * K]
    y = r.product(matrix, columns).reshape(x.shape[0], len(weight), *places)
    return y if bias is None else y + bias.reshape(-1, *([1] * spatial))


def _axes(x: np.ndarray, axes: np.ndarray | None) -> tuple[int, ...]:
    return tuple(range(x.ndim)) if axes is None else tuple(int(a) % x.ndim for a in axes)


def _reduction(inside: Callable[[Rounding, np.ndarray, tuple[int, ...]], np.ndarray]) -> Callable[..., np.ndarray]:
    """MIL's parameters around a function that keeps the reduced axes as dimensions of 1."""

    def reduce(
        r: Rounding, x: np.ndarray, axes: np.ndarray | None = None, keep_dims: np.ndarray | bool = False
    ) -> np.ndarray:
        over = _axes(x, axes)
        y = inside(r, x, over)
        return y if keep_dims else np.squeeze(y, over)

    return reduce


def _mean(r: Rounding, x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    return np.asarray(r.total(x, axes) / np.asarray(np.prod([x.shape[a] for a in axes]), x.dtype))


def _log_sum_exp(r: Rounding, x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    top = x.max(axes, keepdims=True)
    return np.asarray(r.step(np.log(r.total(r.step(np.exp(r.step(x - top))), axes))) + top)


def _arg(find: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def reduce(
        r: Rounding,
        x: np.ndarray,
        axis: np.ndarray | int = -1,
        keep_dims: np.ndarray | bool = False,
        output_dtype: np.ndarray | str = "int32",
    ) -> np.ndarray:
        return find(x, axis=int(axis), keepdims=bool(keep_dims))

    return reduce


def softmax(r: Rounding, x: np.ndarray, axis: np.ndarray | int = -1) -> np.ndarray:
    at = int(axis) % x.ndim
    powers = r.step(np.exp(r.step(x - x.max(at, keepdims=True))))
    return np.asarray(powers / r.total(powers, (at,)))


def layer_norm(
    r: Rounding,
    x: np.ndarray,
    axes: np.ndarray | None = None,
    gamma: np.ndarray | None = None,
    beta: np.ndarray | None = None,
    epsilon: np.ndarray | None = None,
) -> np.ndarray:
    over = _axes(x, axes)
    shape = [n if i in over else 1 for i, n in enumerate(x.shape)]
    centred = r.step(x - r.step(_mean(r, x, over)))
    variance = r.step(_mean(r, r.step(np.square(centred)), over))
    y: np.ndarray = centred * r.step(1 / np.sqrt(r.step(variance + (r.number(1e-5) if epsilon is None else epsilon))))
    y = y if gamma is None else r.step(y) * gamma.reshape(shape)
    return y if beta is None else r.step(y) + beta.reshape(shape)


SUMS: dict[str, Callable[..., np.ndarray]] = {
    "matmul": matmul,
    "linear": linear,
    "conv": conv,
    "softmax": softmax,
    "layer_norm": layer_norm,
    "reduce_sum": _reduction(lambda r, x, axes: r.total(x, axes)),
    "reduce_mean": _reduction(_mean),
    "reduce_max": _reduction(lambda r, x, axes: x.max(axes, keepdims=True)),
    "reduce_min": _reduction(lambda r, x, axes: x.min(axes, keepdims=True)),
    "reduce_l1_norm": _reduction(lambda r, x, axes: r.total(np.abs(x), axes)),
    "reduce_l2_norm": _reduction(lambda r, x, axes: np.sqrt(r.total(r.step(np.square(x)), axes))),
    "reduce_sum_square": _reduction(lambda r, x, axes: r.total(r.step(np.square(x)), axes)),
    "reduce_log_sum_exp": _reduction(_log_sum_exp),
    "reduce_argmax": _arg(np.argmax),
    "reduce_argmin": _arg(np.argmin),
}
