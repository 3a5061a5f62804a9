"""The state update "blend": it says what a slice update says, on every engine, and engines know it for what it is."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anechain.bundle.manifest import Bundle
from anechain.bundle.program import Function, Op, Value, read_program
from anechain.errors import EngineError
from anechain.run.blend import blend_of, first_cell
from anechain.run.chain import Chain
from anechain.run.engine import Engine
from anechain.run.openvino import CpuEngine
from anechain.run.past_cells import needs_visible_only
from anechain.run.reference import ReferenceEngine
from anechain.run.stage_plan import StagePlan
from tests.bundle_maker import make_bundle, tiny_source

ENGINES: dict[str, Callable[[], Engine]] = {
    "reference": ReferenceEngine,
    "stress": lambda: ReferenceEngine(stress=True),
    "cpu": lambda: CpuEngine("exact"),
}
UPDATES = ("slice", "blend")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Bundle]:
    folder = tmp_path_factory.mktemp("updates")
    return {
        (recipe, update): make_bundle(
            tiny_source("qwen3"), folder / f"{recipe}-{update}", recipe, cuts=[1, 2], state_update=update
        )
        for recipe in ("fp16", "m8")
        for update in UPDATES
    }


def decode(bundle: Bundle) -> Function:
    return read_program(bundle.block_paths[1]).functions["decode"]


@pytest.mark.parametrize("recipe", ["fp16", "m8"])
@pytest.mark.parametrize("stitched", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_both_updates_give_the_same_bits(
    engine: str, stitched: bool, recipe: str, bundles: dict[tuple[str, str], Bundle]
) -> None:
    """A chunk, then single tokens up to the last cell of the context."""
    ids = np.random.default_rng(5).integers(0, 300, 64)
    logits = {}
    for update in UPDATES:
        chain = Chain(bundles[recipe, update], ENGINES[engine](), stitched)
        session = chain.start()
        logits[update] = [chain.feed(session, ids[:40])] + [chain.feed(session, [int(i)]) for i in ids[40:]]
    assert len(logits["slice"]) == 25
    assert np.array_equal(np.stack(logits["slice"]), np.stack(logits["blend"]))
    assert np.ptp(np.stack(logits["slice"]), axis=0).max() > 0.1


def test_states_hold_what_was_written_and_nothing_else(bundles: dict[tuple[str, str], Bundle]) -> None:
    for update in UPDATES:
        chain = Chain(bundles["fp16", update], ReferenceEngine())
        session = chain.start()
        chain.feed(session, np.arange(3))
        (kv,) = session.states[1].packages[0].values()  # type: ignore[union-attr]
        assert kv[:, :, :3].any() and not kv[:, :, 3:].any()


def test_the_cpu_engine_writes_rows_and_keeps_only_what_is_seen(bundles: dict[tuple[str, str], Bundle]) -> None:
    plan = StagePlan([read_program(path) for path in bundles["fp16", "blend"].block_paths])
    assert plan.trims
    for step in plan.steps.values():
        assert [write.value for write in step.writes] == ["fresh", "fresh"]
        assert step.replaced(0) == {"kv_placed", "kv_kept", "kv_next"}


@pytest.mark.parametrize(("recipe", "replaced"), [
    ("fp16", {"kv_placed", "kv_kept", "kv_next"}),
    ("m8", {"kv_placed", "kv_kept", "kv_blended", "kv_next"}),
])  # fmt: skip
def test_what_is_recognised(recipe: str, replaced: set[str], bundles: dict[tuple[str, str], Bundle]) -> None:
    blend = blend_of(decode(bundles[recipe, "blend"]), "kv", "kv_next")
    assert blend is not None and (blend.port, blend.fresh, blend.replaced) == ("write", "fresh", replaced)
    assert blend_of(decode(bundles[recipe, "slice"]), "kv", "kv_next") is None


def rewired(function: Function, name: str, **changes: Any) -> Function:
    """The function with one op's inputs, or its type, changed."""

    def change(op: Op) -> Op:
        kind = changes.get("type", op.type)
        inputs = {**op.inputs, **{p: (v,) for p, v in changes.items() if p != "type"}}
        return replace(op, type=kind, inputs=inputs)

    assert any(op.name == name for op in function.ops)
    return replace(function, ops=tuple(change(op) if op.name == name else op for op in function.ops))


def made(function: Function, name: str) -> Value:
    return next(op.outputs[0] for op in function.ops if op.name == name)


NEAR_MISSES: dict[str, Callable[[Function], Function]] = {
    "something is subtracted": lambda f: rewired(f, "kv_next", type="sub"),
    "another past": lambda f: rewired(f, "kv_kept", x="kv_placed"),
    "kept where it is written": lambda f: rewired(f, "kv_kept", y="write_cells"),
    "one minus something else": lambda f: rewired(f, "write_not", y="mask_cells"),
    "two minus": lambda f: replace(f, consts={**f.consts, "write_not_x_0": np.float16(2)}),
    "placed elsewhere": lambda f: rewired(f, "kv_placed", y="write_not"),
    "a mask that is computed": lambda f: rewired(f, "write_cells", x="hidden_rows"),
    "shown to the outside": lambda f: replace(f, outputs=(*f.outputs, made(f, "kv_next"))),
}


@pytest.mark.parametrize("miss", NEAR_MISSES)
def test_what_is_not_a_blend(miss: str, bundles: dict[tuple[str, str], Bundle]) -> None:
    function = NEAR_MISSES[miss](decode(bundles["fp16", "blend"]))
    assert any(op.name == "kv_next" for op in function.ops)
    assert blend_of(function, "kv", "kv_next") is None


def test_a_chunk_that_sums_another_axis_or_turns_the_other_side(bundles: dict[tuple[str, str], Bundle]) -> None:
    chunk = read_program(bundles["fp16", "blend"].block_paths[0]).functions["prefill"]
    assert blend_of(chunk, "kv", "kv_next") is not None
    for consts in ({"write_any_axes_0": np.int32([1])}, {"kv_placed_transpose_x_0": np.array(False)}):
        assert set(consts) <= set(chunk.consts)
        assert blend_of(replace(chunk, consts={**chunk.consts, **consts}), "kv", "kv_next") is None


def test_a_blend_that_is_computed_needs_every_cell(bundles: dict[tuple[str, str], Bundle]) -> None:
    function = decode(bundles["fp16", "blend"])
    assert not needs_visible_only(function)
    assert needs_visible_only(function, frozenset({"kv_placed", "kv_kept", "kv_next"}))


def test_another_reader_of_the_written_state_keeps_it_whole(bundles: dict[tuple[str, str], Bundle]) -> None:
    function = decode(bundles["fp16", "blend"])
    reader = replace(function.ops[0], name="spy", type="abs", inputs={"x": ("kv_next",)})
    assert blend_of(replace(function, ops=(*function.ops, reader)), "kv", "kv_next") is None


def mask(rows: list[int], cells: int = 8) -> np.ndarray:
    return (np.arange(cells) == np.array(rows)[:, None]).astype(np.float16)[None, None]


def test_where_a_mask_writes() -> None:
    assert first_cell(mask([5]), "write") == 5
    assert first_cell(mask([0, 1, 2]), "write") == 0
    assert first_cell(mask([5, 6, 7]), "write") == 5


@pytest.mark.parametrize("wrong", [
    mask([9]), mask([3, 3]), mask([3, 5]), mask([4, 3]), mask([7, 8]), mask([2]) * np.float16(0.5),
    mask([2]) + mask([3]), np.full((1, 1, 1, 8), np.nan, np.float16),
])  # fmt: skip
def test_a_mask_that_names_no_consecutive_cells(wrong: np.ndarray) -> None:
    with pytest.raises(EngineError) as caught:
        first_cell(wrong, "write")
    assert str(caught.value) == (
        "the input 'write' does not say one cell for each row, one after another: the context is full, so start a new "
        "conversation, or bake with a larger --context."
    )


def test_int8_between_packages_on_both_engines(tmp_path: Path) -> None:
    """Whole or in parts, by either engine; and the steps of the boundary are seen in what comes out."""
    ids = np.random.default_rng(6).integers(0, 300, 40)
    seen = {}
    for name, scales, target in (("fp16", (), "macOS15"), ("fine", (0.1,), "macOS26"), ("rough", (1.0,), "macOS26")):
        bundle = make_bundle(
            tiny_source("qwen3"), tmp_path / name, cuts=[1, 2], target=target, scales=scales, state_update="blend"
        )
        for engine, stitched in (("reference", False), ("stress", True), ("cpu", True)):
            chain = Chain(bundle, ENGINES[engine](), stitched)
            session = chain.start()
            chain.feed(session, ids)
            seen[name, engine, stitched] = chain.feed(session, [7])
    for name in ("fp16", "fine", "rough"):
        for engine, stitched in (("stress", True), ("cpu", True)):
            spread = seen[name, "reference", False].std()
            assert np.abs(seen[name, engine, stitched] - seen[name, "reference", False]).max() < 0.5 * spread
    exact = seen["fp16", "reference", False]
    fine, rough = (np.abs(seen[name, "reference", False] - exact).max() for name in ("fine", "rough"))
    assert 0 < fine < rough


def test_a_stage_alone_is_fed_and_read_in_fp16(tmp_path: Path) -> None:
    bundle = make_bundle(tiny_source("qwen3"), tmp_path / "b", cuts=[1, 2], target="macOS26", scales=(0.0625,))
    chain = Chain(bundle, ReferenceEngine())
    assert chain.scales == [(None, 0.0625), (0.0625, None)]
    rows = (np.random.default_rng(7).standard_normal((3, 64)) * 2).astype(np.float16)
    leaving = chain.stage_feed(0, chain.start(), rows)
    assert leaving.dtype == np.float16 and np.array_equal(leaving, np.rint(leaving / 0.0625) * np.float16(0.0625))
    other = chain.stage_feed(1, chain.start(), leaving)
    nudged = chain.stage_feed(1, chain.start(), leaving + np.float16(0.02))  # less than half a step
    assert np.array_equal(other, nudged)
