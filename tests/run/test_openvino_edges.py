"""The edges of the fast CPU engine: arrays of the caller, memory that weights take, and everything that it refuses."""

import gc
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anechain.bundle.program import Program
from anechain.errors import EngineError
from anechain.run import openvino
from anechain.run.openvino import CpuEngine
from anechain.run.openvino_ops import OPS
from tests.run.test_reference import HIDDEN, KV, X, block, head, ones, op, program, value

F16 = np.float16
ENVIRONMENT = {"PYTHONPATH": str(Path(openvino.__file__).parents[2]), "PATH": ""}


def load(*programs: Program) -> Any:
    return CpuEngine("exact").load_programs(programs)


# -- arrays ------------------------------------------------------------------------------------------------------------


def test_results_are_written_into_the_arrays_that_are_given_and_inputs_stay_as_they_are() -> None:
    stage = load(block(1), head())
    state, inputs = stage.new_state(), {"hidden": ones(-2), "cos": ones(3), "mask": ones(7)}
    for array in inputs.values():
        array.flags.writeable = False
    results = [{"logits_0": ones(0), "logits_1": ones(0)} for _ in range(2)]
    for outputs in results:
        stage.step("decode", inputs, state, outputs)
    assert [r["logits_0"].ravel().tolist() for r in results] == [[5.0] * 4, [4.0] * 4]
    assert [r["logits_1"].ravel().tolist() for r in results] == [[25.0] * 4, [16.0] * 4]
    assert [array.ravel()[0] for array in inputs.values()] == [-2, 3, 7]


def test_a_stage_without_states_has_no_state() -> None:
    stage = load(head())
    assert stage.new_state() is None
    outputs = {"logits_0": ones(), "logits_1": ones()}
    stage.step("decode", {"hidden": ones(-2)}, None, outputs)
    assert outputs["logits_1"].ravel().tolist() == [4] * 4


def test_a_table_of_weights_is_unpacked_and_outlives_its_program() -> None:
    table, indices = np.arange(16, dtype=F16).reshape(1, 1, 16, 1), np.arange(16, dtype=np.uint8).reshape(4, 4)
    dense = op("constexpr_lut_to_dense", value("w", 4, 4), indices="indices", lut="table")
    product, consts = op("linear", value("y", 1, 4), x="x", weight="w"), {"table": table, "indices": indices}
    made = program([dense, product], [value("x", 1, 4)], [value("y", 1, 4)], consts=consts)
    stage = load(made)
    del made, consts, table, indices
    gc.collect()
    y = np.empty((1, 4), F16)
    stage.step("decode", {"x": np.array([[1, 0, 0, 2]], F16)}, None, {"y": y})
    assert y.tolist() == [[6, 18, 30, 42]]


KEPT = """
import sys
import numpy as np
from pathlib import Path
from anechain.bundle.program import Function, Op, Program, Value
from anechain.run.openvino import CpuEngine

def anonymous_bytes():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    return int(lines["RssAnon"].split()[0]) * 1024

kind, layers, width = sys.argv[1], 8, 2048
rng = np.random.default_rng(0)
first = Value("x", (1, width), "fp16")
x, ops, consts = first, [], {}
for i in range(layers):
    weight = Value(f"w{i}", (width, width), "fp16")
    if kind == "fp16":
        consts[weight.name] = rng.standard_normal(weight.shape, np.float32).astype(np.float16)
    else:
        blocks = width // 32 if kind == "int8-block32" else 1
        consts[f"d{i}"] = rng.integers(-127, 128, weight.shape).astype(np.int8)
        consts[f"s{i}"] = np.ones((width, blocks), np.float16)
        parts = {"data": (f"d{i}",), "scale": (f"s{i}",)}
        ops.append(Op("constexpr_blockwise_shift_scale", f"dense{i}", parts, (weight,)))
    y = Value(f"y{i}", first.shape, "fp16")
    ops.append(Op("linear", f"linear{i}", {"x": (x.name,), "weight": (weight.name,)}, (y,)))
    x = y
engine = CpuEngine("exact")
def stage(ops, y, consts):
    function = Function("main", (first,), (), tuple(ops), (y,), consts)
    return engine.load_programs([Program(Path("case.mlpackage"), 9, {"main": function})])
warm = stage([Op("abs", "abs", {"x": ("x",)}, (y,))], y, {})
before = anonymous_bytes()
stage = stage(ops, y, consts)
stage.step("main", {"x": np.ones(first.shape, np.float16)}, None, {y.name: np.empty(y.shape, np.float16)})
print((anonymous_bytes() - before) / (layers * width * width))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("kind", "most"), [("int8", 1.5), ("int8-block32", 1.8), ("fp16", 2.5)])
def test_weights_stay_compressed(kind: str, most: float) -> None:
    """Bytes of memory that a weight takes beside the file: 4 if OpenVINO had widened it."""
    made = subprocess.run([sys.executable, "-c", KEPT, kind], capture_output=True, text=True, env=ENVIRONMENT)
    assert made.returncode == 0, made.stderr
    assert 1 < float(made.stdout) < most


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_what_is_not_known_is_all_named_with_the_ops_that_are_known() -> None:
    ops = [
        op("lstm", value("a", 2), x="x"),
        op("lstm", value("b", 2), x="x"),
        op("softmax", value("c", 2), x="x", alpha="x"),
        op("cast", value("d", 2, dtype="fp64"), x="x", dtype="x"),
    ]
    with pytest.raises(EngineError) as caught:
        wide = [value("kv", 2, dtype="fp32")]
        load(program(ops, [X], [X], wide), program(ops[:1], [X], [X], package="head.mlpackage"))
    assert str(caught.value) == (
        "the cpu-openvino-exact engine cannot run op lstm "
        "('a_op' in function 'decode' of block-000.mlpackage and 1 more); "
        "parameter alpha of softmax ('c_op' in function 'decode' of block-000.mlpackage); "
        "dtype fp64 of cast ('d_op' in function 'decode' of block-000.mlpackage); "
        "dtype fp32 of a state ('kv' in function 'decode' of block-000.mlpackage); "
        "op lstm ('a_op' in function 'decode' of head.mlpackage): "
        f"use another engine, or write the program with the ops that it knows, {', '.join(sorted(OPS))}."
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
def test_packages_that_cannot_be_one_stage_are_refused(packages: Sequence[Program], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        load(*packages)


def test_functions_with_different_states_are_refused() -> None:
    one, two = (program([], [X], [X], [KV if kv else value("kv", 3)]).functions["decode"] for kv in (True, False))
    with pytest.raises(EngineError, match=r"the functions of block-000.mlpackage have different states: bake the pack"):
        load(Program(Path("block-000.mlpackage"), 9, {"decode": one, "prefill": two}))


def test_a_step_that_does_not_fit_is_refused_with_all_that_is_wrong() -> None:
    stage, other = load(block(1)), load(block(1))
    inputs = {"hidden": np.zeros((1, 1, 1, 4), np.float32), "cos": np.zeros((1, 1, 4, 8), F16)[:, :, 3:, ::2]}
    with pytest.raises(EngineError) as caught:
        stage.step("decode", inputs, other.new_state(), {"logits": ones()})
    assert str(caught.value) == (
        "'decode' of block-001.mlpackage cannot run (input 'hidden' is float32 (1, 1, 1, 4), not fp16 (1, 1, 1, 4); "
        "input 'cos' is not contiguous; output 'hidden_out' is missing; output 'logits' is not known; "
        "the state is not one of this stage's new_state()): pass what its ports declare."
    )
    with pytest.raises(EngineError, match=r"block-001.mlpackage cannot run 'encode': use one of decode, prefill."):
        stage.step("encode", {}, stage.new_state(), {})


def test_without_openvino_the_engine_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    spec = importlib.util.spec_from_file_location("engine_without", openvino.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "engine_without", module)
    spec.loader.exec_module(module)
    with pytest.raises(EngineError) as caught:
        module.CpuEngine("exact")
    assert str(caught.value) == "the cpu engine needs OpenVINO, which is not installed: pip install openvino."


def test_what_openvino_cannot_compile_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def compile_model(self, *_: Any) -> None:
            raise RuntimeError("Exception from a file:\nthis node is not supported.\n\n")

    engine = CpuEngine("exact")
    monkeypatch.setattr(engine, "_core", Refusing())
    with pytest.raises(EngineError) as caught:
        engine.load_programs([block(1, ["decode"])])
    assert str(caught.value) == (
        "OpenVINO cannot compile 'decode' of block-001.mlpackage, because this node is not supported: use the "
        "reference engine."
    )
