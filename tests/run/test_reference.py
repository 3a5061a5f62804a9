"""The reference engine's loop: states are values, stages chain, weights are held once, refusals say what and where."""

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anechain.bundle.program import Function, Op, Program, Value
from anechain.errors import EngineError
from anechain.run.engine import Engine, Stage
from anechain.run.reference import KNOWN_OPS, ReferenceEngine, ReferenceStage

Array = np.ndarray
F16 = np.float16


@pytest.fixture(autouse=True)
def strict_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def value(name: str, *shape: int, dtype: str = "fp16") -> Value:
    return Value(name, shape, dtype)


def half(*values: float) -> Array:
    return np.array(values, F16)


def op(kind: str, output: Value | Sequence[Value], **inputs: str | tuple[str, ...]) -> Op:
    outputs = (output,) if isinstance(output, Value) else tuple(output)
    names = {parameter: (n,) if isinstance(n, str) else n for parameter, n in inputs.items()}
    return Op(kind, f"{outputs[0].name}_op", names, outputs)


def program(
    ops: Sequence[Op],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    states: Sequence[Value] = (),
    consts: dict[str, Array] | None = None,
    package: str = "block-000.mlpackage",
    functions: Sequence[str] = ("decode",),
) -> Program:
    made = {n: Function(n, tuple(inputs), tuple(states), tuple(ops), tuple(outputs), consts or {}) for n in functions}
    return Program(Path("bundle") / package, 9, made)


def load(*programs: Program, stress: bool = False) -> ReferenceStage:
    return ReferenceEngine(stress).load_programs(programs)


def test_it_is_an_engine() -> None:
    engines: list[Engine] = [ReferenceEngine(), ReferenceEngine(stress=True)]
    assert [e.name for e in engines] == ["reference", "reference-stress"]
    assert not any(e.stitches for e in engines)


# -- states ------------------------------------------------------------------------------------------------------------

X, KV = value("x", 2), value("kv", 2, 2)
ROWS = {f"row{i}_begin": np.int32([i, 0]) for i in (0, 1)} | {f"row{i}_end": np.int32([i + 1, 2]) for i in (0, 1)}


def writing(row: int, onto: str, to: str) -> list[Op]:
    """x into one row of `onto`, and that into the state; the state is then called `to`."""
    box = {"begin": f"row{row}_begin", "end": f"row{row}_end"}
    return [
        op("slice_update", value(f"{to}_value", 2, 2), x=onto, update="x_row", **box),
        op("coreml_update_state", value(to, 2, 2), state="kv", value=f"{to}_value"),
    ]


def two_writes(second_onto: str) -> Program:
    ops = [
        op("reshape", value("x_row", 1, 2), x="x", shape="row"),
        op("read_state", value("before", 2, 2), input="kv"),
        *writing(0, "before", "first"),
        op("read_state", value("again", 2, 2), input="kv"),
        *writing(1, second_onto, "second"),
        op("reduce_sum", value("out", 2), x="again", axes="zero", keep_dims="no"),
    ]
    consts = {**ROWS, "row": np.int32([1, 2]), "zero": np.int32([0]), "no": np.asarray(False)}
    return program(ops, [X], [value("out", 2), value("second", 2, 2)], [KV], consts)


def step(stage: ReferenceStage, x: Sequence[float], state: Any, function: str = "decode") -> dict[str, Array]:
    outputs = {"out": np.empty(2, F16), "second": np.empty((2, 2), F16)}
    stage.step(function, {"x": np.array(x, F16)}, state, outputs)
    return outputs


def test_an_update_that_starts_from_the_previous_one_keeps_both() -> None:
    stage = load(two_writes(second_onto="first"))
    state = stage.new_state()
    assert step(stage, [1, 2], state)["second"].tolist() == [[1, 2], [1, 2]]
    assert step(stage, [3, 4], state)["second"].tolist() == [[3, 4], [3, 4]]


def test_an_update_that_starts_from_a_second_read_loses_the_first() -> None:
    stage = load(two_writes(second_onto="again"))
    state = stage.new_state()
    assert step(stage, [1, 2], state)["second"].tolist() == [[0, 0], [1, 2]]
    assert step(stage, [3, 4], state)["second"].tolist() == [[0, 0], [3, 4]]


def test_a_state_is_read_as_it_was_when_the_step_began() -> None:
    stage = load(two_writes(second_onto="first"))
    state = stage.new_state()
    assert step(stage, [1, 2], state)["out"].tolist() == [0, 0]
    assert step(stage, [3, 4], state)["out"].tolist() == [2, 4]


def test_states_are_values() -> None:
    stage = load(two_writes(second_onto="first"))
    one = stage.new_state()
    step(stage, [1, 2], one)
    two = one.copy()
    other = stage.new_state()
    step(stage, [5, 6], one)
    assert step(stage, [0, 0], two)["out"].tolist() == [2, 4]
    assert step(stage, [0, 0], one)["out"].tolist() == [10, 12]
    assert step(stage, [0, 0], other)["out"].tolist() == [0, 0]


def test_a_state_never_shares_memory_with_an_input() -> None:
    ops = [
        op("read_state", value("before", 2), input="kv"),
        op("identity", value("same", 2), x="x"),
        op("coreml_update_state", value("after", 2), state="kv", value="same"),
    ]
    stage = load(program(ops, [X], [value("before", 2)], [value("kv", 2)]))
    state, x, before = stage.new_state(), np.array([1, 2], F16), np.empty(2, F16)
    stage.step("decode", {"x": x}, state, {"before": before})
    x[:] = 9
    stage.step("decode", {"x": x}, state, {"before": before})
    assert before.tolist() == [1, 2]


def test_a_constant_becomes_a_state_in_its_own_dtype() -> None:
    """The engine holds a constant that is computed with as float32."""
    ops = [
        op("read_state", value("before", 2), input="kv"),
        op("add", value("sum", 2), x="before", y="fixed"),
        op("coreml_update_state", value("after", 2), state="kv", value="fixed"),
    ]
    consts = {"fixed": np.array([1, 2], F16)}
    stage = load(program(ops, [], [value("sum", 2)], [value("kv", 2)], consts))
    state, total = stage.new_state(), np.empty(2, F16)
    for expected in ([1, 2], [2, 4]):
        stage.step("decode", {}, state, {"sum": total})
        assert total.tolist() == expected
    assert {array.dtype for states in state.packages for array in states.values()} == {np.dtype(F16)}
    assert not any(array.flags.writeable for states in state.packages for array in states.values())


def test_a_state_that_is_not_written_stays() -> None:
    """Each function writes one of two states, which it may declare in any order."""
    states = {"decode": value("one", 2), "prefill": value("two", 2)}
    functions = {}
    for name, written in states.items():
        ops = [op("read_state", value(f"{s.name}_before", 2), input=s.name) for s in states.values()]
        ops += [
            op("add", value("sum", 2), x="one_before", y="two_before"),
            op("coreml_update_state", value("after", 2), state=written.name, value="x"),
        ]
        order = sorted(states.values(), key=lambda s: s.name != written.name)
        functions[name] = Function(name, (X,), tuple(order), tuple(ops), (value("sum", 2),), {})
    stage = load(Program(Path("two.mlpackage"), 9, functions))
    state, total = stage.new_state(), np.empty(2, F16)
    for function, x, expected in (("decode", 1, 0), ("prefill", 2, 1), ("decode", 4, 3), ("decode", 0, 6)):
        stage.step(function, {"x": half(x, x)}, state, {"sum": total})
        assert total.tolist() == [expected] * 2


def test_a_step_that_fails_changes_no_state() -> None:
    ops = [
        op("read_state", value("before", 2), input="kv"),
        op("coreml_update_state", value("after", 2), state="kv", value="x"),
        op("gather", value("out"), x="x", indices="at"),
    ]
    inputs = [X, value("at", dtype="int32")]
    stage = load(program(ops, inputs, [value("before", 2), value("out")], [value("kv", 2)]))
    state, outputs = stage.new_state(), {"before": np.empty(2, F16), "out": np.empty((), F16)}
    with pytest.raises(EngineError, match=r"op gather named 'out_op' in function 'decode' of block-000.mlpackage"):
        stage.step("decode", {"x": np.ones(2, F16), "at": np.asarray(2, np.int32)}, state, outputs)
    stage.step("decode", {"x": np.ones(2, F16), "at": np.asarray(1, np.int32)}, state, outputs)
    assert outputs["before"].tolist() == [0, 0]
    assert outputs["out"] == 1


# -- stages ------------------------------------------------------------------------------------------------------------

HIDDEN, HIDDEN_OUT = value("hidden", 1, 1, 1, 4), value("hidden_out", 1, 1, 1, 4)


def block(number: int, functions: Sequence[str] = ("decode", "prefill")) -> Program:
    """hidden_out = hidden * cos + (the count of its steps), which its state holds."""
    ops = [
        op("read_state", value("count"), input="kv"),
        op("add", value("more"), x="count", y="one"),
        op("coreml_update_state", value("counted"), state="kv", value="more"),
        op("mul", value("turned", 1, 1, 1, 4), x="hidden", y="cos"),
        op("add", HIDDEN_OUT, x="turned", y="counted"),
    ]
    inputs = [HIDDEN, value("cos", 1, 1, 1, 4)]
    name = f"block-{number:03}.mlpackage"
    return program(ops, inputs, [HIDDEN_OUT], [value("kv")], {"one": np.asarray(number, F16)}, name, functions)


def head() -> Program:
    outputs = [value("logits_0", 1, 1, 1, 4), value("logits_1", 1, 1, 1, 4)]
    ops = [op("abs", outputs[0], x="hidden"), op("square", outputs[1], x="hidden")]
    return program(ops, [HIDDEN], outputs, package="head.mlpackage")


def ones(scale: float = 1) -> Array:
    return np.full((1, 1, 1, 4), scale, F16)


def test_packages_of_a_stage_hand_on_the_hidden_state() -> None:
    stage = load(block(1), block(2), head())
    assert stage.functions == ("decode",)
    state, outputs = stage.new_state(), {"logits_0": ones(), "logits_1": ones()}
    for expected in ((-2 * 3 + 1) * 3 + 2, (-2 * 3 + 2) * 3 + 4):
        stage.step("decode", {"hidden": ones(-2), "cos": ones(3), "mask": ones()}, state, outputs)
        assert outputs["logits_0"].ravel().tolist() == [abs(expected)] * 4
        assert outputs["logits_1"].ravel().tolist() == [expected**2] * 4


def test_the_functions_of_a_package_share_its_state() -> None:
    stage = load(block(1), block(2))
    assert stage.functions == ("decode", "prefill")
    state, outputs = stage.new_state(), {"hidden_out": ones()}
    for function, expected in (("prefill", 3), ("decode", 6), ("prefill", 9)):
        stage.step(function, {"hidden": ones(0), "cos": ones(1)}, state, outputs)
        assert outputs["hidden_out"].ravel().tolist() == [expected] * 4


def test_watch_finds_the_first_op_that_is_not_finite() -> None:
    stage: ReferenceStage = load(block(1), head())
    seen: list[str] = []
    stage.watch = lambda operation, array: seen.append(operation.name) if not np.isfinite(array).all() else None
    outputs = {"logits_0": ones(), "logits_1": ones()}
    stage.step("decode", {"hidden": ones(300), "cos": ones(1)}, stage.new_state(), outputs)
    assert seen == ["logits_1_op"]
    assert np.isinf(outputs["logits_1"]).all()


def test_a_stage_without_states_has_no_state() -> None:
    stage: Stage = load(head())
    assert stage.new_state() is None
    outputs = {"logits_0": ones(), "logits_1": ones()}
    stage.step("decode", {"hidden": ones(2)}, None, outputs)
    assert outputs["logits_1"].ravel().tolist() == [4] * 4


def test_constants_that_look_alike_are_told_apart() -> None:
    """Alike in the first values; in place and shape, but not in strides; in content, but not in shape."""
    square = np.arange(100, dtype=F16).reshape(10, 10)
    consts = {"a": half(1, 2, 3), "b": half(1, 2, 4), "c": half(1, 2, 3)[None], "square": square, "turned": square.T}
    outputs = [value(f"{name}_abs", *array.shape) for name, array in consts.items()]
    ops = [op("abs", output, x=name) for name, output in zip(consts, outputs, strict=True)]
    outputs.append(value("b_square", 3))
    ops.append(op("square", outputs[-1], x="b"))
    results = {v.name: np.empty(v.shape, F16) for v in outputs}
    load(program(ops, [], outputs, consts=consts)).step("decode", {}, None, results)
    for name, array in consts.items():
        np.testing.assert_array_equal(results[f"{name}_abs"], array)
    assert results["b_square"].tolist() == [1, 4, 16]


def test_outputs_may_be_used_on_the_way_or_be_constants() -> None:
    fixed, middle, last = value("fixed", 2), value("middle", 2), value("last", 2)
    ops = [op("add", middle, x="x", y="fixed"), op("square", last, x="middle")]
    stage = load(program(ops, [X], [last, middle, fixed], consts={"fixed": half(1, 2)}))
    results = {name: np.empty(2, F16) for name in ("last", "middle", "fixed")}
    stage.step("decode", {"x": half(1, 1)}, None, results)
    assert {name: x.tolist() for name, x in results.items()} == {"last": [4, 9], "middle": [2, 3], "fixed": [1, 2]}


def test_a_dimension_that_is_not_fixed_takes_any_size() -> None:
    stage = load(program([op("abs", value("y", -1), x="x")], [value("x", -1)], [value("y", -1)]))
    for size in (1, 3):
        y = np.empty(size, F16)
        stage.step("decode", {"x": np.full(size, -2, F16)}, None, {"y": y})
        assert y.tolist() == [2] * size


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_unknown_ops_are_all_named_with_the_ops_that_are_known() -> None:
    ops = [
        op("lstm", value("a", 2), x="x"),
        op("lstm", value("b", 2), x="x"),
        op("topk", value("c", 2), x="x"),
        op("relu", value("d", 2), x="x", alpha="x"),
        op("cast", value("e", 2, dtype="fp64"), x="x", dtype="x"),
    ]
    with pytest.raises(EngineError) as caught:
        load(program(ops, [X], [X]), program(ops[:1], [X], [X], package="head.mlpackage"))
    assert str(caught.value) == (
        "the reference engine cannot run op lstm ('a_op' in function 'decode' of block-000.mlpackage and 1 more); "
        "op topk ('c_op' in function 'decode' of block-000.mlpackage); "
        "parameter alpha of relu ('d_op' in function 'decode' of block-000.mlpackage); "
        "dtype fp64 of cast ('e_op' in function 'decode' of block-000.mlpackage); "
        "op lstm ('a_op' in function 'decode' of head.mlpackage): "
        f"use another engine, or write the program with the ops that it knows, {', '.join(KNOWN_OPS)}."
    )


def test_a_result_of_another_shape_than_declared_is_refused() -> None:
    with pytest.raises(EngineError) as caught:
        load(program([op("abs", value("a", 3), x="c")], [X], [value("a", 3)], consts={"c": np.zeros(2, F16)}))
    assert str(caught.value) == (
        "op abs named 'a_op' in function 'decode' of block-000.mlpackage cannot be computed, because it gives (2,) "
        "where the program declares (3,): check the package with `anechain lint`."
    )


@pytest.mark.parametrize(
    ("packages", "message"),
    [
        ([block(1, ["decode"]), block(2, ["prefill"])], "have no function in common: load them in separate stages."),
        ([], "have no function in common"),
        ([head(), block(1)], r"\(head.mlpackage has no output 'hidden_out'\): load consecutive packages"),
        ([block(1), program([], [X], [X])], r"\(block-000.mlpackage has no input 'hidden'\): load consec"),
        (
            [block(1), program([], [HIDDEN, value("cos", 2)], [HIDDEN])],
            r"block-001.mlpackage, block-000.mlpackage cannot follow each other in one stage \('cos' has two shapes\)",
        ),
    ],
)
def test_packages_that_make_no_stage_are_refused(packages: list[Program], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        load(*packages)


def test_functions_with_different_states_are_refused() -> None:
    made = block(1)
    odd = Function("prefill", (HIDDEN,), (value("kv", 7),), (), (HIDDEN,), {})
    with pytest.raises(EngineError, match=r"functions of block-001.mlpackage have different states: bake the package"):
        load(Program(made.path, 9, {"decode": made.functions["decode"], "prefill": odd}))


def test_a_step_names_everything_that_is_wrong() -> None:
    stage = load(block(1))
    with pytest.raises(EngineError) as caught:
        outputs = {"hidden_out": np.zeros(4, F16), "logits": ones()}
        stage.step("decode", {"hidden": np.zeros((1, 1, 1, 4))}, None, outputs)
    assert str(caught.value) == (
        "'decode' of block-001.mlpackage cannot run (input 'hidden' is float64 (1, 1, 1, 4), not fp16 (1, 1, 1, 4); "
        "input 'cos' is missing; output 'hidden_out' is float16 (4,), not fp16 (1, 1, 1, 4); output 'logits' is not "
        "known; the state is not one of this stage's new_state()): pass what its ports declare."
    )
    with pytest.raises(EngineError, match=r"block-001.mlpackage cannot run 'main': use one of decode, prefill"):
        stage.step("main", {}, None, {})
