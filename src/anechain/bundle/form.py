"""The form of a package, beside its weights: for which system, how the state is written, what the hidden state is in.

Everything that has to agree on it (ports, graph, checks, chain) is given a Form, and decides nothing by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

StateUpdate = Literal["slice", "blend"]
STATE_UPDATES: tuple[StateUpdate, ...] = ("slice", "blend")
# The oldest system -> the version of Core ML's format that it reads: 9 is the first with states and several functions,
# 10 the first whose functions take and give int8 (coremltools makes them int32 below).
TARGETS = {"macOS15": 9, "iOS18": 9, "macOS26": 10, "iOS26": 10}
INT8_PORTS = 10
INT8_TOP = 127


@dataclass(frozen=True)
class Form:
    """`takes` and `gives` are the scales of the hidden states at the package's two ends, None where they are fp16.

    An int8 hidden state stands for itself times its scale, which is an fp16 number.
    """

    target: str = "macOS15"
    state_update: StateUpdate = "slice"
    takes: float | None = None
    gives: float | None = None

    @property
    def spec_version(self) -> int:
        return TARGETS[self.target]


def form_of(number: int, target: str, state_update: StateUpdate, scales: Sequence[float]) -> Form:
    """The form of package `number`; `scales` are those of the boundaries between packages, none for fp16."""
    inner = dict(enumerate(scales))
    return Form(target, state_update, inner.get(number - 1), inner.get(number))


def boundary_scale(largest: float) -> float:
    """The scale of a boundary whose values reach `largest`: the least fp16 number whose 127 steps hold it."""
    scale = np.float16(largest / INT8_TOP)
    if float(scale) * INT8_TOP < largest:
        scale = np.nextafter(scale, np.float16(np.inf))
    return float(max(scale, np.finfo(np.float16).smallest_normal))


def to_int8(hidden: np.ndarray, scale: float) -> np.ndarray:
    """What the op `quantize` makes of fp16: the nearest step, halves to even, cut off at -128 and 127."""
    steps: np.ndarray = np.rint(hidden.astype(np.float32) / np.float32(scale))
    return steps.clip(-128, 127).astype(np.int8)


def from_int8(hidden: np.ndarray, scale: float) -> np.ndarray:
    """What the op `dequantize` makes of int8, in fp16."""
    values: np.ndarray = hidden.astype(np.float32) * np.float32(scale)
    return values.astype(np.float16)
