"""Which cells of a state a step needs: those that its masks show. A proof, op by op, that the others cannot matter.

A block reads its past through a mask: scores against every cell of the state, plus the mask, softmax, then the values
of the cells weighted with that. Where the mask says MASKED the weight is exactly 0 in float32, so an engine may leave
out the hidden cells at the end: hold, read and multiply only the first part of a state. Early in a conversation that
saves nearly all of the attention's time and memory.
"""

from typing import Any

import numpy as np

from anechain.bundle.program import Function, Op
from anechain.bundle.spec import MASKED

MASK = "mask"  # what the names of the mask ports begin with
CELLS = 2  # the axis of a state [2k, n_kv, context, head_dim] that counts tokens
_ALL_BUT_CELLS = [True, True, False, True]


def visible(mask: np.ndarray) -> int:
    """How many cells, from the first one on, a mask port [1, 1, Q, context] shows to any of its rows."""
    shown = np.flatnonzero((mask > MASKED).any(axis=tuple(range(mask.ndim - 1))))
    return int(shown[-1]) + 1 if shown.size else 0


def needs_visible_only(function: Function, left_out: frozenset[str] = frozenset()) -> bool:
    """Whether hidden cells at the end of the states cannot change what the function computes.

    Every value that counts cells has a kind: "past" [.., cells, D], "written" (the same, for the next step), and with
    the cells on the last axis "mask", "scores", "masked" scores, "weights"; "joined" have more tokens behind the cells.
    `left_out` are ops that the engine does not compute, because it writes rows instead (blend.py).
    """
    masks = [value for value in function.inputs if value.name.startswith(MASK)]
    cells = {v.shape[CELLS] if len(v.shape) == CELLS + 2 else 0 for v in function.states} | {v.shape[-1] for v in masks}
    if not function.states or len(cells) != 1:
        return False
    kinds = {value.name: "state" for value in function.states} | {value.name: "mask" for value in masks}
    for op in function.ops:
        counting = [p for p, names in op.inputs.items() if kinds.keys() & set(names)]
        if op.name in left_out:
            kinds |= dict.fromkeys((value.name for value in op.outputs), "written")
            continue
        if counting:
            given = [(p, kinds.get(name, "")) for p in sorted(counting) for name in op.inputs[p]]
            results = _kinds_of_results(op, given, function, *cells)
            if results is None:
                return False
            kinds |= {value.name: kind for value, kind in zip(op.outputs, results, strict=True) if kind}
    return not kinds.keys() & {value.name for value in function.outputs}


def _kinds_of_results(op: Op, given: list[tuple[str, str]], function: Function, cells: int) -> list[str] | None:
    """The kind of every result, "" for one that counts no cells; None when the op does not keep to the pattern."""

    def fixed(name: str) -> list[Any]:
        values = function.consts.get(op.inputs[name][0]) if name in op.inputs else np.array(False)
        return [] if values is None else values.ravel().tolist()

    rank = len(op.outputs[0].shape)
    axis = int(fixed("axis")[0]) % rank if "axis" in op.inputs else 0
    on_cells_last = axis == rank - 1
    match op.type, given:
        case "read_state", [("input", "state")]:
            return ["past"]
        case "cast" | "identity", [("x", kind)]:
            return [kind]
        case "split", [("x", "past")] if axis < CELLS:
            return ["past"] * len(op.outputs)
        case "split", [("x", "joined weights")] if on_cells_last and op.outputs[0].shape[-1] == cells:
            return ["weights"] + [""] * (len(op.outputs) - 1)
        case "concat", [*values] if set(values) == {("values", "mask")} and not on_cells_last:
            return ["mask"]
        case "concat", [("values", "masked"), *others] if set(others) == {("values", "")} and on_cells_last:
            return ["joined"]
        case "matmul", [("y", "past")] if fixed("transpose_y") == [True]:
            return ["scores"]
        case "matmul", [("x", "weights"), ("y", "past")] if fixed("transpose_x") == fixed("transpose_y") == [False]:
            return [""]
        case "add", [("x", "scores"), ("y", "mask")] | [("x", "mask"), ("y", "scores")]:
            return ["masked"]
        case "softmax", [("x", "masked")] if on_cells_last:
            return ["weights"]
        case "softmax", [("x", "joined")] if on_cells_last:
            return ["joined weights"]
        case "slice_update", [("x", "past" | "written")] if fixed("begin_mask") == fixed("end_mask") == _ALL_BUT_CELLS:
            return ["written"]
        case "coreml_update_state", [("state", "state"), ("value", "written")]:
            return ["written"]
    return None
