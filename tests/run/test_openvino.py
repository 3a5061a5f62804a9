"""The fast CPU engine against the reference engine: whole chains, and what becomes of their states."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anechain.bundle.manifest import Bundle
from anechain.bundle.program import Program
from anechain.errors import EngineError
from anechain.run import openvino
from anechain.run.chain import Chain, Session
from anechain.run.engine import Engine
from anechain.run.openvino import CpuEngine
from anechain.run.reference import ReferenceEngine, ReferenceState
from anechain.run.stage_plan import ROOM, HeldState
from tests.bundle_maker import deviation, make_bundle, tiny_source
from tests.run.test_reference import block, ones, op, program, two_writes, value
from tests.run.test_reference import step as step_two_writes
from tests.tolerances import CPU_EXACT, CPU_FAST, CPU_ORDER, CPU_STATE

Array = np.ndarray
F16 = np.float16
ENVIRONMENT = {"PYTHONPATH": str(Path(openvino.__file__).parents[2]), "PATH": ""}

CONTEXT, PREFILL, PROMPT, STEPS = 256, 32, 140, 5
IDS = np.random.default_rng(6).integers(0, 320, CONTEXT)
BUNDLES = {  # the name of a spec of tests.bundle_maker, the recipe, the layers of each package
    "fp16": ("qwen3", "fp16", (1, 2)),
    "int8": ("llama", "int8", (2, 1)),
    "int8-block32": ("qwen2", "int8-block32", (3,)),
    "m8": ("mistral", "m8", (1, 1, 1)),
    "gemma3": ("gemma3", "fp16", (1, 2)),
    "biases": ("llama-biases", "int8", (2, 1)),
}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    folder = tmp_path_factory.mktemp("bundles")
    return {
        name: make_bundle(tiny_source(spec), folder / name, recipe, CONTEXT, PREFILL, cuts)
        for name, (spec, recipe, cuts) in BUNDLES.items()
    }


@pytest.fixture(scope="module")
def right(bundles: dict[str, Bundle]) -> dict[str, Array]:
    """The reference engine's logits after a prompt and after each of some tokens more."""
    made = {name: prompt_and_steps(Chain(bundle, ReferenceEngine())) for name, bundle in bundles.items()}
    for name, logits in made.items():
        assert (logits.std(axis=1) > 2).all() and deviation(logits[1:], logits[:-1]) > 0.3, name
    return made


@pytest.fixture(scope="module")
def chain(bundles: dict[str, Bundle]) -> Chain:
    return Chain(bundles["gemma3"], CpuEngine("exact"))


def prompt_and_steps(chain: Chain, session: Session | None = None) -> Array:
    """[1 + STEPS, V]"""
    session = session or chain.start()
    return np.array([chain.feed(session, IDS[:PROMPT]), *(chain.feed(session, [i]) for i in IDS[PROMPT:][:STEPS])])


def load(*programs: Program, mode: Any = "exact") -> Any:
    return CpuEngine(mode).load_programs(programs)


def test_it_is_an_engine() -> None:
    engines: list[Engine] = [CpuEngine("exact"), CpuEngine("fast")]
    assert [e.name for e in engines] == ["cpu-openvino-exact", "cpu-openvino-fast"]
    assert all(e.stitches for e in engines)


@pytest.mark.parametrize(("mode", "precision"), [("exact", "float32"), ("fast", "bfloat16")])
def test_a_mode_is_a_precision(mode: str, precision: str) -> None:
    """Without int8 activations in either: OpenVINO would take them by itself."""
    compiled = load(block(1), mode=mode)._models["decode"]._request.get_compiled_model()
    hint = {"float32": "f32", "bfloat16": "bf16"}[precision]
    assert compiled.get_property("INFERENCE_PRECISION_HINT").to_string() == hint
    assert compiled.get_property("DYNAMIC_QUANTIZATION_GROUP_SIZE") == 0


# -- chains ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUNDLES)
def test_exact_is_as_the_reference(name: str, bundles: dict[str, Bundle], right: dict[str, Array]) -> None:
    chain = Chain(bundles[name], CpuEngine("exact"))
    assert len(chain.stages) == 1
    assert deviation(prompt_and_steps(chain), right[name]) < CPU_EXACT[bundles[name].recipe.compute]


@pytest.mark.parametrize("name", ["fp16", "int8"])
def test_one_package_at_a_time_is_as_stitched(name: str, bundles: dict[str, Bundle], right: dict[str, Array]) -> None:
    chain = Chain(bundles[name], CpuEngine("exact"), stitched=False)
    assert len(chain.stages) == 2
    assert deviation(prompt_and_steps(chain), right[name]) < CPU_EXACT[bundles[name].recipe.compute]


@pytest.mark.parametrize("name", ["fp16", "int8"])
def test_fast_is_near_the_reference(name: str, bundles: dict[str, Bundle], right: dict[str, Array]) -> None:
    error = deviation(prompt_and_steps(Chain(bundles[name], CpuEngine("fast"))), right[name])
    assert CPU_EXACT["fp16"] < error < CPU_FAST, "bfloat16 is coarser than what exact mode does"


def test_a_prompt_is_as_its_tokens_one_by_one(chain: Chain) -> None:
    session = chain.start()
    one_by_one = np.array([chain.feed(session, [i]) for i in IDS])
    assert session.position == CONTEXT
    lengths = [1, 8, 31, 32, 40, ROOM - 1, ROOM, ROOM + 1, 200, CONTEXT]
    at_once = np.array([chain.feed(chain.start(), IDS[:n]) for n in lengths])
    assert deviation(at_once, one_by_one[np.array(lengths) - 1]) < CPU_ORDER


def test_it_runs_without_torch_and_coremltools(bundles: dict[str, Bundle]) -> None:
    script = (
        "import sys; from pathlib import Path; from anechain.bundle.manifest import open_bundle; "
        "from anechain.run.chain import Chain; from anechain.run.openvino import CpuEngine; "
        "chain = Chain(open_bundle(Path(sys.argv[1])), CpuEngine('exact')); "
        "print(len(chain.feed(chain.start(), [1, 2]))); "
        "print([m for m in ('torch', 'coremltools', 'scipy') if m in sys.modules])"
    )
    path = str(bundles["fp16"].path)
    made = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, env=ENVIRONMENT)
    assert made.stdout.splitlines() == ["320", "[]"], made.stderr


# -- states ------------------------------------------------------------------------------------------------------------


def held(session: Session) -> list[Array]:
    states = [state for state in session.states if isinstance(state, HeldState)]
    return [array for state in states for package in state.packages for array in package.values()]


def test_a_state_holds_what_the_reference_holds_and_no_more_cells_than_were_seen(
    chain: Chain, bundles: dict[str, Bundle]
) -> None:
    other = Chain(bundles["gemma3"], ReferenceEngine())
    mine, its = chain.start(), other.start()
    for ids, cells in ((IDS[:70], ROOM), (IDS[70:100], ROOM), (IDS[100:108], CONTEXT)):
        chain.feed(mine, ids)
        other.feed(its, ids)
        states = [s for s in its.states if isinstance(s, ReferenceState)]
        expected = [array for state in states for package in state.packages for array in package.values()]
        assert len(expected) == len(held(mine)) == 2
        for got, wanted in zip(held(mine), expected, strict=True):
            assert got.shape[2] == cells and not wanted[:, :, cells:].any()
            assert np.array_equal(got, got.astype(F16)), "what is held is fp16, whatever the dtype"
            for mine_row, its_row in zip(got, wanted.astype(np.float32), strict=True):  # the keys or values of a layer
                error = (mine_row - its_row[:, :cells])[:, : mine.position]
                assert its_row[:, : mine.position].std() > 1
                assert np.sqrt((error**2).mean()) < CPU_STATE


def test_states_are_values(chain: Chain) -> None:
    one = chain.start()
    chain.feed(one, IDS[:40])
    two, fresh = one.copy(), chain.start()
    after_one = chain.feed(one, IDS[40:41])
    assert not np.array_equal(chain.feed(one, IDS[50:60]), after_one)
    assert np.array_equal(chain.feed(two, IDS[40:41]), after_one)
    assert np.array_equal(chain.feed(fresh, IDS[:41]), chain.feed(chain.start(), IDS[:41]))


def test_hidden_cells_do_not_matter(chain: Chain) -> None:
    """Neither those that a shorter state leaves out, nor what an earlier, longer conversation left in them."""
    short, long = chain.start(), chain.start()
    for state in long.states:
        assert isinstance(state, HeldState)
        assert state.grow(CONTEXT) == CONTEXT
        for array in (array for package in state.packages for array in package.values()):
            array[...] = 3
    a, b = ([chain.feed(session, IDS[:40]), chain.feed(session, IDS[40:41])] for session in (short, long))
    assert {array.shape[2] for array in held(short)} == {ROOM} and {array.shape[2] for array in held(long)} == {CONTEXT}
    assert deviation(np.array(a), np.array(b)) < CPU_ORDER


def test_an_update_that_starts_from_the_previous_one_keeps_both() -> None:
    stage = load(two_writes(second_onto="first"))
    state = stage.new_state()
    assert step_two_writes(stage, [1, 2], state)["second"].tolist() == [[1, 2], [1, 2]]
    result = step_two_writes(stage, [3, 4], state)
    assert result["out"].tolist() == [2, 4], "a state is read as it was when the step began"
    assert state.packages[0]["kv"].tolist() == result["second"].tolist() == [[3, 4], [3, 4]]


def test_an_update_that_starts_from_a_second_read_loses_the_first() -> None:
    stage = load(two_writes(second_onto="again"))
    state = stage.new_state()
    for x in ([1, 2], [3, 4]):
        assert step_two_writes(stage, x, state)["second"].tolist() == [[0, 0], x]
        assert state.packages[0]["kv"].tolist() == [[0, 0], x]


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_a_state_that_is_computed_as_a_whole(mode: str) -> None:
    """hidden_out = hidden * cos + (number of the package) * steps"""
    stage = load(block(1), block(2), mode=mode)
    assert stage.functions == ("decode", "prefill")
    state, outputs = stage.new_state(), {"hidden_out": ones()}
    for function, expected in (("prefill", 3), ("decode", 6), ("prefill", 9)):
        stage.step(function, {"hidden": ones(0), "cos": ones(1)}, state, outputs)
        assert outputs["hidden_out"].ravel().tolist() == [expected] * 4


def cache(*ops: Any, consts: dict[str, Any] | None = None, cells: int = 6) -> Program:
    """A program that writes x [1, 1, 2, 3] into the cells begin ... end of kv [1, 1, cells, 3], and gives `out`."""
    whole = np.array([True, True, False, True])
    x, kv = value("x", 1, 1, 2, 3), value("kv", 1, 1, cells, 3)
    box = {"begin": "begin", "end": "end", "begin_mask": "whole", "end_mask": "whole"}
    made = [
        op("read_state", value("past", *kv.shape), input="kv"),
        op("slice_update", value("next", *kv.shape), x="past", update="x", **box),
        op("coreml_update_state", value("written", *kv.shape), state="kv", value="next"),
        *ops,
    ]
    corners = [value(name, 4, dtype="int32") for name in ("begin", "end")]
    return program(made, [x, *corners], [value("out", *kv.shape)], [kv], {"whole": whole, **(consts or {})})


def at(begin: int, end: int, x: float) -> dict[str, Array]:
    numbers = {"begin": np.array([7, 7, begin, 7], np.int32), "end": np.array([0, 0, end, 0], np.int32)}
    return {"x": np.full((1, 1, 2, 3), x, F16), **numbers}


@pytest.mark.parametrize("name", ["next", "written"])
def test_a_program_that_reads_what_it_writes(name: str) -> None:
    stage = load(cache(op("identity", value("out", 1, 1, 6, 3), x=name)))
    state, out = stage.new_state(), np.empty((1, 1, 6, 3), F16)
    for begin, x, expected in ((0, 1, [1, 1, 0, 0, 0, 0]), (4, 2, [1, 1, 0, 0, 2, 2]), (1, 3, [1, 3, 3, 0, 2, 2])):
        stage.step("decode", at(begin, begin + 2, x), state, {"out": out})
        assert out[0, 0, :, 1].tolist() == state.packages[0]["kv"][0, 0, :, 2].tolist() == expected


@pytest.mark.parametrize(("begin", "end"), [(5, 7), (0, 3), (3, 2), (6, 8)])
def test_a_box_that_does_not_fit_is_refused_before_anything_is_written(begin: int, end: int) -> None:
    stage = load(cache(op("identity", value("out", 1, 1, 6, 3), x="past")))
    state, out = stage.new_state(), np.full((1, 1, 6, 3), 5, F16)
    expected = (
        f"[1, 1, 2, 3] values do not fit into [7, 7, {begin}, 7] to [0, 0, {end}, 0] of the state 'kv' of "
        "[1, 1, 6, 3]: start a new conversation, or bake with a larger --context."
    )
    with pytest.raises(EngineError) as caught:
        stage.step("decode", at(begin, end, 1), state, {"out": out})
    assert str(caught.value) == expected
    assert not state.packages[0]["kv"].any() and (out == 5).all()


def test_a_chunk_beyond_the_context_is_refused(chain: Chain) -> None:
    session = chain.start()
    chain.feed(session, IDS[:250])
    inputs = chain.ports("prefill", 250)
    with pytest.raises(EngineError, match=r"values do not fit into \[0, 0, 250, 0\] to \[0, 0, 282, 0\] of the state"):
        chain.stages[0].step("prefill", inputs, session.states[0], {"hidden_out": np.zeros_like(inputs["hidden"])})
