"""One numpy function per MIL op, named as MIL names it; semantics are those of Apple's op definitions.

A function of ARITHMETIC takes a Rounding and the op's parameters by name, fp16 widened to float32, and gives a result
that is not rounded yet. A function of LAYOUT takes the parameters alone, in any dtype. Both leave the last step, to
the dtype that the program declares for the output, to `rounded`.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from anechain.run.ops_layout import LAYOUT
from anechain.run.ops_sum import SUMS
from anechain.run.ops_weight import WEIGHTS
from anechain.run.rounding import Rounding

__all__ = ["ARITHMETIC", "DTYPES", "LAYOUT", "rounded", "widened"]

_NUMPY_NAMES = ("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32")
DTYPES: dict[str, np.dtype] = {
    "fp16": np.dtype(np.float16),
    "fp32": np.dtype(np.float32),
    **{name: np.dtype(name) for name in _NUMPY_NAMES},
}


def widened(x: np.ndarray) -> np.ndarray:
    """fp16 as float32, which holds all of its values; everything else as it is."""
    return x.astype(np.float32) if x.dtype == np.float16 else x


def rounded(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A result in the declared dtype: to nearest even for floats (too large becomes infinite), cut off for integers."""
    return np.asarray(x).astype(dtype, copy=False)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-x)))


def _erf(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.vectorize(math.erf, otypes=[np.float64])(x)).astype(np.float32)


def silu(r: Rounding, x: np.ndarray) -> np.ndarray:
    return np.asarray(x * r.step(_sigmoid(x)))


def gelu(r: Rounding, x: np.ndarray, mode: np.ndarray | str = "EXACT") -> np.ndarray:
    """The three formulas of MIL's `gelu`; the tanh one is Hendrycks & Gimpel 2016, section 2."""
    if str(mode) == "TANH_APPROXIMATION":
        inner = r.step(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x))
        return np.asarray(np.float32(0.5) * x * r.step(1 + r.step(np.tanh(inner))))
    if str(mode) == "SIGMOID_APPROXIMATION":
        return np.asarray(x * r.step(_sigmoid(r.step(np.float32(1.702) * x))))
    if str(mode) == "EXACT":
        return np.asarray(np.float32(0.5) * x * r.step(1 + r.step(_erf(x / np.float32(math.sqrt(2))))))
    raise ValueError(f"mode {str(mode)!r} is not known")


def rsqrt(r: Rounding, x: np.ndarray, epsilon: np.ndarray | None = None) -> np.ndarray:
    return np.asarray(1 / r.step(np.sqrt(r.step(x + (r.number(1e-12) if epsilon is None else epsilon)))))


def inverse(r: Rounding, x: np.ndarray, epsilon: np.ndarray | None = None) -> np.ndarray:
    return np.asarray(1 / r.step(x + (r.number(1e-4) if epsilon is None else epsilon)))


def log(r: Rounding, x: np.ndarray, epsilon: np.ndarray | None = None) -> np.ndarray:
    return np.asarray(np.log(r.step(x + (r.number(1e-45) if epsilon is None else epsilon))))


def clip(r: Rounding, x: np.ndarray, alpha: np.ndarray, beta: np.ndarray) -> np.ndarray:
    return np.asarray(np.minimum(np.maximum(x, alpha), beta))


def _unary(function: Callable[[np.ndarray], np.ndarray]) -> Callable[..., np.ndarray]:
    def op(r: Rounding, x: np.ndarray) -> np.ndarray:
        return np.asarray(function(x))

    return op


def _binary(function: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[..., np.ndarray]:
    def op(r: Rounding, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.asarray(function(x, y))

    return op


_UNARY: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "abs": np.abs, "ceil": np.ceil, "cos": np.cos, "erf": _erf, "exp": np.exp, "floor": np.floor,
    "logical_not": np.logical_not, "relu": lambda x: np.maximum(x, 0), "round": np.round, "sigmoid": _sigmoid,
    "sign": np.sign, "sin": np.sin, "sqrt": np.sqrt, "square": np.square, "tanh": np.tanh,
}  # fmt: skip
_BINARY: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": np.add, "equal": np.equal, "floor_div": np.floor_divide, "greater": np.greater,
    "greater_equal": np.greater_equal, "less": np.less, "less_equal": np.less_equal, "logical_and": np.logical_and,
    "logical_or": np.logical_or, "logical_xor": np.logical_xor, "maximum": np.maximum, "minimum": np.minimum,
    "mod": np.mod, "mul": np.multiply, "not_equal": np.not_equal, "pow": np.power, "real_div": np.true_divide,
    "sub": np.subtract,
}  # fmt: skip

ARITHMETIC: dict[str, Callable[..., Any]] = {
    **{name: _unary(function) for name, function in _UNARY.items()},
    **{name: _binary(function) for name, function in _BINARY.items()},
    **{f.__name__: f for f in (silu, gelu, rsqrt, inverse, log, clip)},
    **SUMS,
    **WEIGHTS,
}
