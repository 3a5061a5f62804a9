"""The state update "blend", recognised in a program: past * (1 - m) + new * m is a write of a few rows in disguise.

The host makes the mask, so it knows which rows; an engine that holds its states itself can write those rows and leave
the rest alone. Everything is proven: the ops must be these, nothing else may read them, and the mask of every step must
be the one-hot rows of consecutive cells.
"""

from dataclasses import dataclass

import numpy as np

from anechain.bundle.program import Function, Op
from anechain.errors import EngineError


@dataclass(frozen=True)
class Blend:
    """The mask's port, the new rows, and the names of the ops on whole states that a write of rows replaces."""

    port: str
    fresh: str
    replaced: frozenset[str]


def blend_of(function: Function, state: str, value: str) -> Blend | None:
    """What `value`, which becomes the new `state`, is a blend of; None when it is anything else.

    For Q rows `write` [1, 1, Q, ctx]: m = reshape(reduce_sum(write over Q)), and matmul(write transposed, new) puts the
    new rows in their places; for one row m = reshape(write), and new * m does.
    """
    return _Matcher(function).blend(state, value)


def first_cell(mask: np.ndarray, port: str) -> int:
    """Where the rows of a mask [1, 1, Q, ctx] begin; EngineError unless row q is 1 at that cell + q and 0 elsewhere."""
    rows = mask[0, 0]
    first = int(np.argmax(rows[0] != 0))
    wanted = first + np.arange(len(rows))
    right = np.count_nonzero(rows) == len(rows) and wanted[-1] < rows.shape[1]
    if not right or not (rows[np.arange(len(rows)), wanted] == 1).all():
        raise EngineError(
            f"the input {port!r} does not say one cell for each row, one after another: the context is full, so start "
            "a new conversation, or bake with a larger --context."
        )
    return first


class _Matcher:
    def __init__(self, function: Function) -> None:
        self.function = function
        self.makers = {value.name: op for op in function.ops for value in op.outputs}
        self.readers: dict[str, list[Op]] = {}
        for op in function.ops:
            for name in {name for names in op.inputs.values() for name in names}:
                self.readers.setdefault(name, []).append(op)
        self.outputs = {value.name for value in function.outputs}

    def blend(self, state: str, value: str) -> Blend | None:
        replaced: list[str] = []
        name = self._through_cast(value, replaced)
        whole = self._op(name, "add", replaced)
        for kept, placed in self._both_ways(whole):
            ops = list(replaced)
            product = self._op(kept, "mul", ops)
            for past, keep in self._both_ways(product):
                cells = self._kept_where(keep)
                found = cells and self._reads(past, state) and self._placed(placed, cells, ops)
                if found:
                    return Blend(*found, frozenset(ops))
        return None

    def _op(self, name: str | None, kind: str, replaced: list[str]) -> Op | None:
        """The op of `kind` that makes a value which one op reads and no output shows."""
        op = self.makers.get(name) if name else None
        if op is None or op.type != kind or len(self.readers.get(str(name), [])) != 1 or name in self.outputs:
            return None
        replaced.append(op.name)
        return op

    def _both_ways(self, op: Op | None) -> list[tuple[str, str]]:
        if op is None:
            return []
        x, y = op.inputs["x"][0], op.inputs["y"][0]
        return [(x, y), (y, x)]

    def _through_cast(self, name: str, replaced: list[str]) -> str:
        """What is cast, where the program computes wider than its state is."""
        op = self._op(name, "cast", replaced)
        return op.inputs["x"][0] if op else name

    def _reads(self, name: str, state: str) -> bool:
        op = self.makers.get(name)
        if op and op.type == "cast":
            op = self.makers.get(op.inputs["x"][0])
        return op is not None and op.type == "read_state" and op.inputs["input"] == (state,)

    def _kept_where(self, name: str) -> str | None:
        """m, where `name` is 1 - m."""
        op = self.makers.get(name)
        if op is None or op.type != "sub":
            return None
        one = self.function.consts.get(op.inputs["x"][0])
        return op.inputs["y"][0] if one is not None and one.size == 1 and one.item() == 1 else None

    def _placed(self, name: str, cells: str, replaced: list[str]) -> tuple[str, str] | None:
        """(mask port, new rows), where `name` holds the new rows in their places and zeros elsewhere."""
        reshaped = self.makers.get(cells)
        if reshaped is None or reshaped.type != "reshape":
            return None
        at = self.makers.get(reshaped.inputs["x"][0])
        if at is not None and at.type == "reduce_sum":
            write, axes = at.inputs["x"][0], self.function.consts.get(at.inputs.get("axes", ("",))[0])
            op = self._op(name, "matmul", replaced)
            if op is None or op.inputs["x"] != (write,) or axes is None or axes.tolist() != [2]:
                return None
            flags = [int(self._number(op, p)) for p in ("transpose_x", "transpose_y")]
            fresh = op.inputs["y"][0] if flags == [1, 0] else None
        else:
            write = reshaped.inputs["x"][0]
            op = self._op(name, "mul", replaced)
            fresh = next((a for a, b in self._both_ways(op) if b == cells), None)
        port = self._port(write)
        query = self._shape(fresh)[-2] if fresh else 0
        context = reshaped.outputs[0].shape
        if port is None or fresh is None or context != (1, 1, self._shape(port)[-1], 1):
            return None
        return (port, fresh) if self._shape(port)[:3] == (1, 1, query) else None

    def _number(self, op: Op, parameter: str) -> np.ndarray:
        """A constant of an op, 0 where it is left out; nothing that is computed is one."""
        names = op.inputs.get(parameter)
        return self.function.consts.get(names[0], np.array(2)) if names else np.array(0)

    def _port(self, name: str) -> str | None:
        op = self.makers.get(name)
        name = op.inputs["x"][0] if op and op.type == "cast" else name
        return name if name in {value.name for value in self.function.inputs} else None

    def _shape(self, name: str) -> tuple[int, ...]:
        values = [*self.function.inputs, *(v for op in self.function.ops for v in op.outputs)]
        return next((v.shape for v in values if v.name == name), ())
