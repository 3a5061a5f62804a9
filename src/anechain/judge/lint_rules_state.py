"""Conditions of the rules on states and their updates (K)."""

import math
from collections.abc import Iterator

from anechain.bundle.program import Op
from anechain.judge.lint_view import LAYOUT, Hit, Package, View, at, on

STATE_AXIS = 32  # what a state's width is published to have to be a multiple of
LONG_STATE = 1024
LONG_UPDATE = 32
_RESHAPES = frozenset(("reshape", "transpose", "expand_dims", "squeeze"))
_STATE = frozenset(("read_state", "coreml_update_state"))
_THROUGH = frozenset(("cast", "identity", "slice_update"))


def many_states(package: Package) -> Iterator[Hit]:
    for view in package.views:
        if len(view.function.states) > 2:
            names = ", ".join(s.name for s in view.function.states)
            yield Hit(f"{len(view.function.states)} states: {names}", view, name=names)


def unlike_states(package: Package) -> Iterator[Hit]:
    for view in package.views:
        kinds = {(s.shape, s.dtype): s for s in view.function.states}
        if len(kinds) > 1:
            what = "; ".join(f"{s.name} {s.dtype} {list(s.shape)}" for s in kinds.values())
            yield Hit(f"states of {len(kinds)} forms: {what}", view, name=", ".join(s.name for s in kinds.values()))


def shifted_cache(package: Package) -> Iterator[Hit]:
    """concat(part of the state, what is new) written back, in a package whose embedding table is a matrix as well."""
    for view in package.views:
        tables = {k for op in view.of("gather") if (w := view.weight(op.inputs["x"][0])) for k in w.parts}
        tied = any(k in tables for _, _, w in view.matrices for k in w.parts)
        for op in view.of("coreml_update_state"):
            made = view.source(op.inputs["value"][0], _RESHAPES | {"cast", "identity"})
            if not tied or made is None or made.type != "concat":
                continue
            behind = [o for name in made.inputs["values"] for o in view.upstream(name, LAYOUT)]
            if any(o.type in _STATE and _state_of(o) == op.inputs["state"][0] for o in behind):
                yield at(view, op, f"{made.name} shifts the state {op.inputs['state'][0]} by concatenation")


def _state_of(op: Op) -> str:
    return op.inputs["input" if op.type == "read_state" else "state"][0]


def _moving(view: View) -> Iterator[tuple[Op, float]]:
    """The slice_updates whose place comes from outside, and the most cells along one axis that they write."""
    for op in view.of("slice_update"):
        if any(not view.is_fixed(n) for p in ("begin", "end") for n in op.inputs.get(p, ())):
            whole, part = (view.shape(op.inputs[p][0]) for p in ("x", "update"))
            cut = [math.inf if b < 0 else b for a, b in zip(whole, part, strict=False) if a != b]
            yield op, max(cut, default=0)


def _cells(count: float) -> str:
    return "a varying number of cells" if math.isinf(count) else f"{count} cell{'s' * (count != 1)}"


def moving_update(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for op, cells in _moving(view):
            yield at(view, op, f"slice_update of {_cells(cells)} whose place is an input")


def long_moving_update(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for op, cells in _moving(view):
            if cells > LONG_UPDATE:
                yield at(view, op, f"slice_update of {_cells(cells)} whose place is an input")


def reshaped_update(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for op in view.of("coreml_update_state"):
            made = view.maker(op.inputs["value"][0])
            if made is not None and made.type in _RESHAPES and _from_state(view, op):
                yield at(view, op, f"{made.type} of the state before it is written")
        for op in view.of("slice_update"):
            start = view.source(op.inputs["x"][0], _THROUGH)
            if start is not None and start.type in _RESHAPES and _touches_state(view, op):
                yield at(view, op, f"slice_update of a state after its {start.type}")
            written = any(o.type == "coreml_update_state" for o in view.downstream(op, _THROUGH | _RESHAPES))
            if not written:
                yield at(view, op, "slice_update whose result is not written to a state")


def _from_state(view: View, op: Op) -> bool:
    behind = view.upstream(op.inputs["value"][0], _RESHAPES | _THROUGH)
    return any(o.type in _STATE for o in behind)


def _touches_state(view: View, op: Op) -> bool:
    return any(o.type in _STATE for o in view.upstream(op.inputs["x"][0], _RESHAPES | _THROUGH))


def flexible_state(package: Package) -> Iterator[Hit]:
    for view in package.views:
        features = {f.name: f for f in view.interface.states}
        for state in view.function.states:
            feature = features.get(state.name)
            if -1 in state.shape or (feature is not None and feature.flexible):
                yield on(view, state, f"state {state.name} has no fixed shape")


def state_width(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for state in view.function.states:
            if state.shape and state.shape[-1] > 0 and state.shape[-1] % STATE_AXIS:
                yield on(view, state, f"state {state.name} has a last axis of {state.shape[-1]}")


def state_height(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for state in view.function.states:
            if len(state.shape) > 1 and state.shape[-2] > STATE_AXIS and state.shape[-2] % STATE_AXIS:
                yield on(view, state, f"state {state.name} has a last axis but one of {state.shape[-2]}")


def long_state(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for state in view.function.states:
            if len(state.shape) > 3 and max(state.shape[-2:]) > LONG_STATE:
                yield on(view, state, f"state {state.name} holds {max(state.shape[-2:])} positions")
