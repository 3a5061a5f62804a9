"""The native CPU engine against the reference engine: whole chains, what becomes of their states, what it refuses."""

import gc
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anechain.bundle.manifest import Bundle
from anechain.bundle.program import Function, Op, Program, Value
from anechain.bundle.spec import MASKED
from anechain.errors import EngineError
from anechain.run.chain import Chain, Session
from anechain.run.engine import Engine
from anechain.run.reference import ReferenceEngine
from anechain.run.tape import CellState, TapeEngine
from anechain.run.tape_ops import OPS, PATTERNS, Translation
from tests.bundle_maker import deviation, make_bundle, tiny_source
from tests.run.native_case import needs_native
from tests.run.test_openvino import BUNDLES, CONTEXT, IDS, PREFILL, PROMPT, STEPS
from tests.run.test_openvino_ops import RESHAPES, one_op
from tests.run.test_reference import block, head, ones, op, program, two_writes, value
from tests.run.test_reference import step as step_two_writes
from tests.tolerances import CPU_EXACT, CPU_NATIVE_FAST, CPU_ORDER, CPU_STATE

Array = np.ndarray
F16 = np.float16
pytestmark = needs_native


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    folder = tmp_path_factory.mktemp("bundles")
    return {
        name: make_bundle(tiny_source(spec), folder / name, recipe, CONTEXT, PREFILL, cuts)
        for name, (spec, recipe, cuts) in BUNDLES.items()
    }


@pytest.fixture(scope="module")
def right(bundles: dict[str, Bundle]) -> dict[str, Array]:
    return {name: prompt_and_steps(Chain(bundle, ReferenceEngine())) for name, bundle in bundles.items()}


@pytest.fixture(scope="module")
def chain(bundles: dict[str, Bundle]) -> Chain:
    return Chain(bundles["gemma3"], TapeEngine("exact"))


def prompt_and_steps(chain: Chain, session: Session | None = None) -> Array:
    """[1 + STEPS, V]"""
    session = session or chain.start()
    return np.array([chain.feed(session, IDS[:PROMPT]), *(chain.feed(session, [i]) for i in IDS[PROMPT:][:STEPS])])


def load(*programs: Program) -> Any:
    return TapeEngine("exact").load_programs(programs)


def test_it_is_an_engine() -> None:
    engines: list[Engine] = [TapeEngine("exact"), TapeEngine("fast")]
    assert [e.name for e in engines] == ["cpu-native-exact", "cpu-native-fast"]
    assert all(e.stitches for e in engines)


# -- chains ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stitched", [True, False])
@pytest.mark.parametrize("name", BUNDLES)
def test_exact_is_as_the_reference(
    name: str, stitched: bool, bundles: dict[str, Bundle], right: dict[str, Array]
) -> None:
    chain = Chain(bundles[name], TapeEngine("exact"), stitched)
    assert len(chain.stages) == (1 if stitched else len(bundles[name].block_paths))
    assert deviation(prompt_and_steps(chain), right[name]) < CPU_EXACT[bundles[name].recipe.compute]


@pytest.mark.parametrize("name", ["fp16", "int8", "int8-block32"])
def test_fast_is_near_the_reference(name: str, bundles: dict[str, Bundle], right: dict[str, Array]) -> None:
    """Only int8 matrices make a difference."""
    chain = Chain(bundles[name], TapeEngine("fast"))
    logits = prompt_and_steps(chain)
    assert deviation(logits, right[name]) < CPU_NATIVE_FAST
    exact = prompt_and_steps(Chain(bundles[name], TapeEngine("exact")))
    assert np.array_equal(logits, exact) == (name == "fp16")


def test_attention_norms_rotations_and_gates_are_one_instruction_each(
    bundles: dict[str, Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And say what their ops say one by one."""
    names: set[str] = set()
    plain = Translation._matches

    def seen(self: Translation) -> Any:
        found = plain(self)
        names.update(name.split("_", 2)[2] for name in found if name.startswith("layers_"))
        return found

    monkeypatch.setattr(Translation, "_matches", seen)
    monkeypatch.setattr("anechain.run.tape.key_of", lambda packages, bits: None)  # nothing is kept
    together = prompt_and_steps(Chain(bundles["gemma3"], TapeEngine("exact")))
    wanted = {"attn_norm_out", "ffn_norm_out", "q_norm_out", "k_norm_out", "attn_post_norm_out", "ffn_post_norm_out"}
    assert wanted | {"q_scaled", "k_rope", "mix"} <= names
    names.clear()
    Chain(bundles["int8"], TapeEngine("exact"))
    assert {"gated", "mix", "attn_norm_out"} <= names
    monkeypatch.setattr("anechain.run.tape_ops.PATTERNS", {})
    one_by_one = prompt_and_steps(Chain(bundles["gemma3"], TapeEngine("exact")))
    assert not np.array_equal(together, one_by_one), "nothing was taken apart"
    assert deviation(together, one_by_one) < CPU_ORDER
    assert PATTERNS


def test_a_prompt_is_as_its_tokens_one_by_one(chain: Chain) -> None:
    session = chain.start()
    one_by_one = np.array([chain.feed(session, [i]) for i in IDS])
    lengths = [1, 8, 31, 32, 40, 127, 200, CONTEXT]
    at_once = np.array([chain.feed(chain.start(), IDS[:n]) for n in lengths])
    assert deviation(at_once, one_by_one[np.array(lengths) - 1]) < CPU_ORDER


def test_one_thread_computes_what_several_do(bundles: dict[str, Bundle]) -> None:
    """Parts of a result may be made by different threads, sums never are."""
    script = (
        "import sys; import numpy as np; from pathlib import Path; from anechain.bundle.manifest import open_bundle; "
        "from anechain.run.chain import Chain; from anechain.run.tape import TapeEngine; "
        "chain = Chain(open_bundle(Path(sys.argv[1])), TapeEngine('exact')); session = chain.start(); "
        "ids = np.arange(40) * 7 % 320; "
        "logits = [chain.feed(session, ids), *(chain.feed(session, [i]) for i in range(5))]; "
        "assert not {'torch', 'coremltools', 'openvino'} & set(sys.modules); print(np.array(logits).tobytes().hex())"
    )
    import subprocess
    import sys

    from anechain.run import tape

    made = []
    for threads in ("1", "2", "3"):
        environment = {"PYTHONPATH": str(Path(tape.__file__).parents[2]), "PATH": "", "OMP_NUM_THREADS": threads}
        command = [sys.executable, "-c", script, str(bundles["int8"].path)]
        made.append(subprocess.run(command, capture_output=True, text=True, env=environment))
    assert made[0].stdout and made[0].stdout == made[1].stdout == made[2].stdout, made[0].stderr + made[1].stderr


def test_a_step_allocates_nothing_that_stays_and_no_tensor(bundles: dict[str, Bundle]) -> None:
    chain = Chain(bundles["int8"], TapeEngine("fast"), stitched=False)
    session = chain.start()
    chain.feed(session, IDS[:40])
    feed, stage = chain._feeds["decode"], chain.stages[0]
    feed.fill(session.position)
    inputs, outputs = {"hidden": feed.here(None), **feed.ports}, {"hidden_out": feed.advance(None)}
    for _ in range(3):
        stage.step("decode", inputs, session.states[0], outputs)
    tracemalloc.start()
    before = tracemalloc.take_snapshot()
    tracemalloc.reset_peak()
    start = tracemalloc.get_traced_memory()[0]
    for _ in range(100):  # so that even the smallest array kept at each step (240 bytes) stands out from Python's own
        stage.step("decode", inputs, session.states[0], outputs)
    gc.collect()
    now, peak = tracemalloc.get_traced_memory()
    after = tracemalloc.take_snapshot()
    tracemalloc.stop()
    stays = [
        s for s in after.compare_to(before, "filename") if "anechain/run" in str(s.traceback) and s.size_diff > 8192
    ]
    assert not stays
    assert peak - start < 16384, "more than a few small Python objects"
    assert now - start < 16384


# -- states ------------------------------------------------------------------------------------------------------------


def held(session: Session) -> list[Array]:
    states = [state for state in session.states if isinstance(state, CellState)]
    return [array for state in states for package in state.packages for array in package.values()]


def test_a_state_holds_what_the_reference_holds(chain: Chain, bundles: dict[str, Bundle]) -> None:
    other = Chain(bundles["gemma3"], ReferenceEngine())
    mine, its = chain.start(), other.start()
    chain.feed(mine, IDS[:100])
    other.feed(its, IDS[:100])
    expected = [array for s in its.states for package in s.packages for array in package.values()]  # type: ignore[union-attr]
    assert len(expected) == len(held(mine)) == 2
    for got, wanted in zip(held(mine), expected, strict=True):
        for mine_row, its_row in zip(got.astype(np.float32), wanted.astype(np.float32), strict=True):
            assert its_row[:, :100].std() > 1
            assert np.sqrt(((mine_row - its_row)[:, :100] ** 2).mean()) < CPU_STATE


def test_states_are_values(chain: Chain) -> None:
    one = chain.start()
    chain.feed(one, IDS[:40])
    two, fresh = one.copy(), chain.start()
    after_one = chain.feed(one, IDS[40:41])
    assert not np.array_equal(chain.feed(one, IDS[50:60]), after_one)
    assert np.array_equal(chain.feed(two, IDS[40:41]), after_one)
    assert np.array_equal(chain.feed(fresh, IDS[:41]), chain.feed(chain.start(), IDS[:41]))


def test_hidden_cells_do_not_matter(chain: Chain) -> None:
    """What an earlier, longer conversation left in them."""
    clean, used = chain.start(), chain.start()
    for array in held(used):
        array[...] = 3
    for ids in (IDS[:40], IDS[40:41]):
        assert np.array_equal(chain.feed(clean, ids), chain.feed(used, ids))


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


def test_a_state_that_is_computed_as_a_whole() -> None:
    """hidden_out = hidden * cos + (number of the package) * steps"""
    stage = load(block(1), block(2))
    assert stage.functions == ("decode", "prefill")
    state, outputs = stage.new_state(), {"hidden_out": ones()}
    for function, expected in (("prefill", 3), ("decode", 6), ("prefill", 9)):
        stage.step(function, {"hidden": ones(0), "cos": ones(1)}, state, outputs)
        assert outputs["hidden_out"].ravel().tolist() == [expected] * 4


def test_a_program_that_reads_what_it_writes() -> None:
    whole = np.array([True, True, False, True])
    x, kv = value("x", 1, 1, 2, 3), value("kv", 1, 1, 6, 3)
    box = {"begin": "begin", "end": "end", "begin_mask": "whole", "end_mask": "whole"}
    ops = [
        op("read_state", value("past", *kv.shape), input="kv"),
        op("slice_update", value("next", *kv.shape), x="past", update="x", **box),
        op("coreml_update_state", value("written", *kv.shape), state="kv", value="next"),
        op("identity", value("out", *kv.shape), x="next"),
    ]
    corners = [value(name, 4, dtype="int32") for name in ("begin", "end")]
    stage = load(program(ops, [x, *corners], [value("out", *kv.shape)], [kv], {"whole": whole}))
    state, out = stage.new_state(), np.empty((1, 1, 6, 3), F16)
    for begin, number, expected in ((0, 1, [1, 1, 0, 0, 0, 0]), (4, 2, [1, 1, 0, 0, 2, 2]), (1, 3, [1, 3, 3, 0, 2, 2])):
        places = {n: np.array([7, 7, begin + d, 7], np.int32) for n, d in (("begin", 0), ("end", 2))}
        stage.step("decode", {"x": np.full((1, 1, 2, 3), number, F16), **places}, state, {"out": out})
        assert out[0, 0, :, 1].tolist() == state.packages[0]["kv"][0, 0, :, 2].tolist() == expected


@pytest.mark.parametrize("function", ["decode", "prefill"])
def test_a_mask_may_have_holes_and_other_values(function: str, bundles: dict[str, Bundle]) -> None:
    """What a chain never says: some cells in between hidden, others lowered, and rows that differ."""
    gave = []
    for engine in (TapeEngine("exact"), ReferenceEngine()):
        chain = Chain(bundles["int8"], engine, stitched=False)
        session = chain.start()
        chain.feed(session, IDS[:70])
        feed = chain._feeds[function]
        feed.fill(70)
        rng = np.random.default_rng(8)
        feed.here(None)[...] = rng.standard_normal(feed.here(None).shape)
        mask = feed.ports["mask"]
        mask[..., :70] = rng.choice([0, -1.5, MASKED], mask[..., :70].shape)
        inputs, outputs = {"hidden": feed.here(None), **feed.ports}, {"hidden_out": feed.advance(None)}
        chain.stages[0].step(function, inputs, session.states[0], outputs)
        gave.append(outputs["hidden_out"][0, 0].astype(np.float32))
    assert gave[0].std() > 0.5
    assert deviation(*gave) < CPU_EXACT["fp16"]


# -- edges -------------------------------------------------------------------------------------------------------------


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
    assert load(head()).new_state() is None


@pytest.mark.parametrize(("shape", "perm", "result"), RESHAPES)
def test_a_reshape_of_a_transpose(shape: tuple[int, ...], perm: tuple[int, ...], result: tuple[int, ...]) -> None:
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    turned = Value("t", tuple(shape[p] for p in perm), "fp32")
    first = Op("transpose", "turn", {"x": ("x",), "perm": ("perm",)}, (turned,))
    [last] = one_op("reshape", turned.shape, "fp32", result).functions["main"].ops
    second = Op("reshape", "cut", {"x": ("t",), "shape": ("shape",)}, last.outputs)
    consts = {"perm": np.array(perm, np.int32), "shape": np.array(result, np.int32)}
    made = Function("main", (Value("x", shape, "fp32"),), (), (first, second), last.outputs, consts)
    y = np.empty(result, np.float32)
    load(Program(Path("case.mlpackage"), 9, {"main": made})).step("main", {"x": x}, None, {"y": y})
    assert np.array_equal(y, x.transpose(perm).reshape(result))


def test_what_is_not_known_is_all_named_with_the_ops_that_are_known() -> None:
    x = value("x", 2)
    ops = [
        op("lstm", value("a", 2), x="x"),
        op("softmax", value("c", 2), x="x", alpha="x"),
        op("cast", value("d", 2, dtype="int8"), x="x", dtype="x"),
    ]
    with pytest.raises(EngineError) as caught:
        load(program(ops, [x], [x], [value("kv", 2, dtype="fp32")]))
    assert str(caught.value) == (
        "the cpu-native-exact engine cannot run op lstm ('a_op' in function 'decode' of block-000.mlpackage); "
        "parameter alpha of softmax ('c_op' in function 'decode' of block-000.mlpackage); "
        "dtype int8 of cast ('d_op' in function 'decode' of block-000.mlpackage); "
        "dtype fp32 of a state ('kv' in function 'decode' of block-000.mlpackage): "
        f"use --engine openvino, or write the program with the ops that it knows, {', '.join(sorted(OPS))}."
    )


def test_an_op_that_cannot_be_translated_is_named() -> None:
    with pytest.raises(EngineError) as caught:
        load(one_op("tile", (3, 1), "fp32", (2, 3), reps=np.array([1, 2], np.int32)))
    assert str(caught.value) == (
        "op tile named 'op' in function 'main' of case.mlpackage cannot be translated, because it gives (3, 2) where "
        "the program declares (2, 3): use --engine openvino, or check the package with `anechain lint`."
    )
