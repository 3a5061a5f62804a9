"""How the inside of an op is rounded: not at all, or (stress) to fp16 after every step, with sums in blocks."""

from dataclasses import dataclass

import numpy as np

SUM_BLOCK = 64  # inputs that a stressed sum adds up in float32 before it rounds to fp16


@dataclass(frozen=True)
class Rounding:
    """The rounding inside one op whose result has `dtype`. The op's result itself is rounded by whoever called it.

    Arithmetic is in float32. With `stress`, and only for an op of dtype fp16, `step` rounds what is inside a composite
    op, and `total` and `product` keep a running sum in fp16 over blocks of SUM_BLOCK inputs.
    """

    dtype: np.dtype
    stress: bool = False

    @property
    def rounds(self) -> bool:
        return self.stress and self.dtype == np.float16

    def step(self, x: np.ndarray) -> np.ndarray:
        """An intermediate result, as the next step inside the op sees it."""
        return x.astype(np.float16).astype(np.float32) if self.rounds else x

    def number(self, value: float) -> np.ndarray:
        """A parameter's default, in the op's dtype as MIL has it: an epsilon of 1e-12 is 0 in fp16."""
        return np.asarray(value, self.dtype).astype(np.float32)

    def total(self, x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
        """Sum over `axes`, which stay as dimensions of 1."""
        if not self.rounds:
            return np.asarray(x.sum(axis=axes, keepdims=True))
        last = tuple(range(x.ndim - len(axes), x.ndim))
        flat = np.moveaxis(x, axes, last).reshape(*(n for i, n in enumerate(x.shape) if i not in axes), -1)
        running: np.ndarray = np.zeros(flat.shape[:-1], np.float32)
        for start in range(0, flat.shape[-1], SUM_BLOCK):
            running = self.step(running + self.step(flat[..., start : start + SUM_BLOCK].sum(axis=-1)))
        return np.expand_dims(running, axes)

    def product(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """x [..., M, K] @ y [..., K, N] -> [..., M, N]; the dimensions in front broadcast."""
        if not self.rounds:
            return np.asarray(np.matmul(x, y))
        running: np.ndarray = np.zeros((), np.float32)
        for start in range(0, x.shape[-1], SUM_BLOCK):
            block = slice(start, start + SUM_BLOCK)
            running = self.step(running + self.step(np.matmul(x[..., block], y[..., block, :])))
        return running
