"""Which programs need only the cells that masks show: those that a bake makes, and none that differs in one op."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from anechain.bundle.program import Function, Op, read_program
from anechain.bundle.spec import MASKED
from anechain.run.past_cells import needs_visible_only, visible
from tests.bundle_maker import SPECS, make_bundle, tiny_source
from tests.run.test_reference import op, program, value

CELLS, DIM, QUERY = 8, 4, 2
KV, MASK, SEEN = value("kv", 2, 1, CELLS, DIM), value("mask", 1, 1, QUERY, CELLS), value("seen", 1, 1, QUERY, CELLS)
ROWS, NOW = value("q", 1, 1, QUERY, DIM), value("now", 1, 1, QUERY, QUERY)
ALL = value("all", 1, 1, QUERY, CELLS + QUERY)


def attention() -> Function:
    """The past of one layer under a mask, with all that a block makes of it."""
    ops = [
        op("read_state", value("past", *KV.shape), input="kv"),
        op("cast", value("wide", *KV.shape), x="past", dtype="to"),
        op(
            "split",
            [value("k", 1, 1, CELLS, DIM), value("v", 1, 1, CELLS, DIM)],
            x="wide",
            num_splits="two",
            axis="zero",
        ),
        op("matmul", replace(SEEN, name="scores"), x="q", y="k", transpose_x="no", transpose_y="yes"),
        op("add", SEEN, x="scores", y="mask"),
        op("concat", ALL, values=("seen", "now"), axis="three", interleave="no"),
        op("softmax", replace(ALL, name="shares"), x="all", axis="three"),
        op(
            "split",
            [replace(SEEN, name="to_past"), replace(NOW, name="to_now")],
            x="shares",
            split_sizes="sizes",
            axis="three",
        ),
        op("matmul", value("out", 1, 1, QUERY, DIM), x="to_past", y="v", transpose_x="no", transpose_y="no"),
        op("slice_update", value("next", *KV.shape), x="past", update="fresh", begin="begin", end="end", **WHOLE),
        op("coreml_update_state", value("written", *KV.shape), state="kv", value="next"),
    ]
    inputs = [
        ROWS,
        MASK,
        NOW,
        value("fresh", 2, 1, QUERY, DIM),
        *(value(n, 4, dtype="int32") for n in ("begin", "end")),
    ]
    consts = {
        "zero": np.int32(0), "two": np.int32(2), "three": np.int32(3), "minus_one": np.int32(-1),
        "no": np.asarray(False), "yes": np.asarray(True), "to": np.asarray("fp16"), "sizes": np.int32([CELLS, QUERY]),
        "all_but_cells": np.array([True, True, False, True]), "none": np.zeros(4, bool),
    }  # fmt: skip
    return program(ops, inputs, [value("out", 1, 1, QUERY, DIM)], [KV], consts).functions["decode"]


WHOLE = {"begin_mask": "all_but_cells", "end_mask": "all_but_cells"}


def changed(function: Function, name: str, **inputs: str | tuple[str, ...]) -> Function:
    """The function with other inputs of the op that makes the value `name`; an empty one is left out."""
    ops = []
    for each in function.ops:
        if each.outputs[0].name == name:
            given = {p: (n,) if isinstance(n, str) else n for p, n in inputs.items()}
            names = {p: n for p, n in {**each.inputs, **given}.items() if n != ("",)}
            each = replace(each, inputs=names)
        ops.append(each)
    return replace(function, ops=tuple(ops))


def and_then(function: Function, more: Op) -> Function:
    return replace(function, ops=(*function.ops, more))


def without(function: Function, name: str) -> Function:
    return replace(function, ops=tuple(each for each in function.ops if each.outputs[0].name != name))


def swapped(function: Function, name: str, kind: str) -> Function:
    """The function with the op that makes the value `name` replaced by a unary one."""
    made = [
        op(kind, each.outputs[0], x=each.inputs["x"]) if each.outputs[0].name == name else each for each in function.ops
    ]
    return replace(function, ops=tuple(made))


SAME: dict[str, Callable[[Function], Function]] = {
    "as it is": lambda f: f,
    "the mask in front": lambda f: changed(f, "seen", x="mask", y="scores"),
    "an axis from the end": lambda f: changed(f, "shares", axis="minus_one"),
    "the weights of the past alone": lambda f: changed(
        without(without(changed(f, "shares", x="seen"), "all"), "to_past"), "out", x="shares"
    ),
    "written twice": lambda f: and_then(
        f, op("slice_update", value("more", *KV.shape), x="next", update="fresh", begin="begin", end="end", **WHOLE)
    ),
}
OTHER: dict[str, Callable[[Function], Function]] = {
    "no mask": lambda f: changed(without(f, "seen"), "all", values=("scores", "now")),
    "something else added": lambda f: changed(f, "seen", y="now"),
    "the mask twice": lambda f: changed(f, "seen", x="mask"),
    "no softmax": lambda f: changed(without(f, "shares"), "to_past", x="all"),
    "softmax over the tokens": lambda f: changed(f, "shares", axis="two"),
    "softmax before the mask": lambda f: changed(f, "shares", x="scores"),
    "the past behind": lambda f: changed(f, "all", values=("now", "seen")),
    "the past twice": lambda f: changed(f, "all", values=("seen", "seen")),
    "joined along the tokens": lambda f: changed(f, "all", axis="two"),
    "keys the other way round": lambda f: changed(f, "scores", transpose_y="no"),
    "values the other way round": lambda f: changed(f, "out", transpose_y="yes"),
    "weights the other way round": lambda f: changed(f, "out", transpose_x="yes"),
    "weights of all": lambda f: changed(f, "out", x="shares"),
    "cut elsewhere": lambda f: replace(
        f, ops=tuple(replace(o, outputs=o.outputs[::-1]) if o.outputs[0].name == "to_past" else o for o in f.ops)
    ),
    "the past cut along the cells": lambda f: changed(f, "k", axis="two"),
    "the past looked at": lambda f: and_then(f, op("reduce_sum", value("sum", 2, 1, 1, DIM), x="past")),
    "the past given away": lambda f: replace(f, outputs=(value("past", *KV.shape),)),
    "the next state given away": lambda f: replace(f, outputs=(value("written", *KV.shape),)),
    "the next state looked at": lambda f: and_then(f, op("abs", value("sum", *KV.shape), x="next")),
    "the mask looked at": lambda f: and_then(f, op("abs", value("sum", *MASK.shape), x="mask")),
    "weights looked at": lambda f: and_then(f, op("abs", value("sum", *SEEN.shape), x="to_past")),
    "written by heads": lambda f: changed(f, "next", end_mask="none"),
    "written without masks": lambda f: changed(f, "next", begin_mask="", end_mask=""),
    "written from the past": lambda f: changed(f, "next", update="past"),
    "scaled": lambda f: swapped(f, "wide", "square"),
    "a mask for another number of cells": lambda f: replace(
        f, inputs=(replace(MASK, shape=(1, 1, QUERY, 4)), *f.inputs)
    ),
    "a state of another rank": lambda f: replace(f, states=(KV, value("more", CELLS))),
    "no state": lambda f: replace(f, states=(), ops=()),
}


@pytest.mark.parametrize("change", SAME)
def test_the_pattern_is_found(change: str) -> None:
    assert needs_visible_only(SAME[change](attention()))


@pytest.mark.parametrize("change", OTHER)
def test_whatever_differs_is_not_taken_for_it(change: str) -> None:
    function = OTHER[change](attention())
    assert function != attention()
    assert not needs_visible_only(function)


@pytest.mark.parametrize("name", SPECS)
def test_a_bake_keeps_to_the_pattern(name: str, tmp_path: Path) -> None:
    recipe = "m8" if name == "qwen3" else "fp16"
    bundle = make_bundle(tiny_source(name), tmp_path / "bundle", recipe, cuts=(3,))
    functions = read_program(bundle.block_paths[0]).functions
    assert sorted(functions) == ["decode", "prefill"]
    assert all(needs_visible_only(function) for function in functions.values())
    assert not needs_visible_only(read_program(bundle.head_path).functions["decode"])


def test_visible_cells_are_counted_from_the_first() -> None:
    mask = np.full((1, 1, 3, 9), MASKED, np.float16)
    assert visible(mask) == 0
    mask[0, 0, 1, 4] = 0
    assert visible(mask) == 5
    mask[0, 0, 2, 6] = np.nextafter(np.float16(MASKED), np.float16(0))
    assert visible(mask) == 7
    mask[0, 0, 0, 8] = -np.inf
    assert visible(mask) == 7
