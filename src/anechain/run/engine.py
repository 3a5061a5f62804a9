"""Engine: runs the packages on disk. Three implementations, one protocol, one set of conformance tests."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import DTypeLike


class State(Protocol):
    """The keys and values that one conversation has in one stage. Made by `Stage.new_state`, owned by the chain.

    A step reads the state as it was when the step began, whatever the program writes meanwhile: states are values.
    """

    def copy(self, tokens: int | None = None) -> "State":
        """Another one of the same content; with `tokens`, as it was before the chain saw more than so many."""


class Stage(Protocol):
    """One or several consecutive packages, loaded.

    `functions` are the names that `step` takes ("decode", "prefill"). `inputs` holds one array for every port of the
    first package, and for the other ports of all packages (same name, same array); arrays are C-contiguous with the
    port's dtype. Results are written into the arrays of `outputs` (port name -> array), which the caller owns and
    which may never overlap an input. `state` (None for a stage without one) is updated.
    An array from the engine's own `buffer` is taken as it is, whatever its strides; another may cost a copy.
    """

    @property
    def functions(self) -> tuple[str, ...]: ...
    def new_state(self) -> State | None: ...
    def step(
        self, function: str, inputs: Mapping[str, np.ndarray], state: State | None, outputs: Mapping[str, np.ndarray]
    ) -> None: ...


class Engine(Protocol):
    """`name` is what reports print ("reference", "reference-stress", "cpu-native-exact", "cpu-native-fast",
    "cpu-openvino-exact", "cpu-openvino-fast", "coreml").

    `load` takes the packages of one stage in order; `stitches` says whether several packages in one stage is what this
    engine prefers, `loaders` how many stages may be loaded at once. Raises EngineError for a program that it cannot
    run, naming the op and the ops that it knows.
    `buffer` makes an array that stages exchange, all zeros, in memory that this engine likes. `handoff` says what has
    become of those arrays so far, for reports.
    """

    @property
    def name(self) -> str: ...
    @property
    def stitches(self) -> bool: ...
    @property
    def loaders(self) -> int: ...
    @property
    def handoff(self) -> str: ...
    def load(self, packages: Sequence[Path]) -> Stage: ...
    def buffer(self, shape: Sequence[int], dtype: DTypeLike) -> np.ndarray: ...


class HostMemory:
    """The part of Engine that is the same for all engines that compute where numpy's arrays lie."""

    loaders = 1
    handoff = "host memory"

    def buffer(self, shape: Sequence[int], dtype: DTypeLike) -> np.ndarray:
        return np.zeros(shape, dtype)
