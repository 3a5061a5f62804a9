"""The rules on states and their updates (K): each where it holds, and where it nearly does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb

from anechain.judge.compatibility import Machine
from tests.bundle.packages import edited
from tests.judge.lint_programs import HALF, INT, Spec, build, expect, half

CACHE = (1, 2, 64, 32)


def kept(*states: Any) -> None:
    """Every state is read, added to and written."""
    for state in states:
        read = mb.read_state(input=state)
        mb.coreml_update_state(state=state, value=mb.add(x=read, y=np.float16(1)))


def with_states(path: Path, *shapes: tuple[int, ...]) -> Path:
    programs: dict[int, Callable[..., Any]] = {
        1: lambda x, a: kept(a) or mb.exp(x=x, name="out"),
        2: lambda x, a, b: kept(a, b) or mb.exp(x=x, name="out"),
        3: lambda x, a, b, c: kept(a, b, c) or mb.exp(x=x, name="out"),
    }
    return build(path, programs[len(shapes)], Spec((1, 32)), *(Spec(shape, HALF, True) for shape in shapes))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_states(tmp_path_factory.mktemp("two") / "two.mlpackage", CACHE, CACHE)


@pytest.fixture(scope="module")
def unlike(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_states(tmp_path_factory.mktemp("unlike") / "unlike.mlpackage", CACHE, (1, 2, 48, 32))


def test_more_than_two_states(two: Path, tmp_path: Path) -> None:
    expect(two, "K1", set(), near={"a", "b"})
    expect(with_states(tmp_path / "three.mlpackage", CACHE, CACHE, CACHE), "K1", {"a, b, c"}, severity="E")


def test_states_of_different_forms(two: Path, unlike: Path) -> None:
    expect(two, "K2", set(), near={"a", "b"})
    expect(unlike, "K2", {"a, b"}, severity="E")
    expect(unlike, "K2", {"a, b"}, machine=Machine("macOS", (26, 0, 1)))
    expect(unlike, "K2", set(), machine=Machine("macOS", (26, 1)))


def shifting(path: Path, tied: bool, shift: bool) -> Path:
    table = half(96, 32)

    def body(x: Any, ids: Any, kv: Any) -> Any:
        embedding = mb.const(val=table, name="embedding")
        past = mb.read_state(input=kv, name="past")
        new = mb.gather(x=embedding, indices=ids, axis=0, validate_indices=False, name="rows")
        old = mb.slice_by_index(x=past if shift else x, begin=[4, 0], end=[64, 32], name="old")
        mb.coreml_update_state(state=kv, value=mb.concat(values=[old, new], axis=0, interleave=False), name="shift")
        return mb.linear(x=past, weight=embedding if tied else half(96, 32, seed=1), name="head")

    return build(path, body, Spec((64, 32)), Spec((4,), INT), Spec((64, 32), HALF, True))


def test_cache_that_is_shifted_beside_a_tied_embedding(tmp_path: Path) -> None:
    tied = shifting(tmp_path / "tied.mlpackage", True, True)
    found = expect(tied, "K3", {"shift_write_state"}, near={"head", "rows"}, severity="E")
    assert "shifts the state kv" in found[0].detail
    expect(shifting(tmp_path / "untied.mlpackage", False, True), "K3", set(), near={"shift_write_state"})
    expect(shifting(tmp_path / "fresh.mlpackage", True, False), "K3", set(), near={"shift_write_state"})


@pytest.fixture(scope="module")
def updates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Updates of a state at a fixed place, of one, 32 and 33 cells at a place that moves, and through other shapes."""

    def body(begin: Any, end: Any, one: Any, some: Any, many: Any, kv: Any, other: Any, fresh: Any) -> Any:
        moving = {"begin": begin, "end": end}
        past = mb.read_state(input=kv, name="past")
        fixed = mb.slice_update(x=past, update=one, begin=[0, 0, 0, 0], end=[1, 2, 1, 32], name="fixed")
        single = mb.slice_update(x=fixed, update=one, **moving, name="single")
        chunk = mb.slice_update(x=single, update=some, **moving, name="chunk")
        chunk = mb.slice_update(x=chunk, update=many, **moving, name="long")
        kv_next = mb.coreml_update_state(state=kv, value=chunk, name="written")
        turned = mb.transpose(x=mb.read_state(input=other, name="other_past"), perm=[0, 1, 3, 2], name="turned")
        late = mb.slice_update(x=turned, update=one, begin=[0, 0, 0, 0], end=[1, 2, 1, 32], name="late")
        back = mb.transpose(x=late, perm=[0, 1, 3, 2], name="back")
        mb.coreml_update_state(state=other, value=back, name="other_written")
        alone = mb.slice_update(x=many, update=one, begin=[0, 0, 0, 0], end=[1, 2, 1, 32], name="alone")
        tilted = mb.transpose(x=many, perm=[0, 1, 3, 2], name="tilted")
        apart = mb.slice_update(x=tilted, update=one, begin=[0, 0, 0, 0], end=[1, 2, 1, 32], name="apart")
        mb.coreml_update_state(state=fresh, value=mb.reshape(x=one, shape=[1, 2, 32], name="anew"), name="replaced")
        blank = mb.slice_update(x=np.zeros((1, 2, 8, 32), np.float16), update=one, **moving, name="blank")
        return alone, apart, blank, mb.exp(x=kv_next, name="out")

    sizes = [Spec((1, 2, cells, 32)) for cells in (1, 32, 33)]
    states = [Spec(CACHE, HALF, True), Spec((1, 2, 32, 32), HALF, True), Spec((1, 2, 32), HALF, True)]
    path = tmp_path_factory.mktemp("updates") / "updates.mlpackage"
    return build(path, body, Spec((4,), INT), Spec((4,), INT), *sizes, *states)


def test_update_whose_place_is_an_input(updates: Path) -> None:
    found = expect(updates, "K4", {"single", "chunk", "long", "blank"}, near={"fixed", "late", "alone"}, severity="W")
    assert {f.op: f.detail for f in found}["single"] == "slice_update of 1 cell whose place is an input"


def test_long_update_on_26_0_1(updates: Path) -> None:
    there = Machine("iOS", (26, 0, 1))
    expect(updates, "K4", {"long"}, near={"chunk", "single"}, severity="E", machine=there)
    expect(updates, "K4", {"single", "chunk", "blank"}, near={"long"}, severity="W", machine=there)
    for other in ((26,), (26, 0), (26, 1), (18,)):
        expect(updates, "K4", set(), near={"long"}, severity="E", machine=Machine("iOS", other))


def test_update_outside_of_the_pattern(updates: Path) -> None:
    hits = {"late", "alone", "apart", "blank", "other_written_write_state"}
    found = expect(updates, "K5", hits, near={"fixed", "single", "chunk", "long", "written", "anew"}, severity="W")
    details = {f.op: f.detail for f in found}
    assert details["late"] == "slice_update of a state after its transpose"
    assert details["apart"] == details["alone"] == "slice_update whose result is not written to a state"
    assert details["other_written_write_state"] == "transpose of the state before it is written"


def test_state_without_fixed_shape(two: Path, tmp_path: Path) -> None:
    def ranged(model: Any) -> None:
        array = model.description.state[0].type.stateType.arrayType
        for low, high in ((1, 1), (2, 2), (1, 64), (32, 32)):
            array.shapeRange.sizeRanges.add(lowerBound=low, upperBound=high)

    expect(two, "K6", set(), near={"a", "b"})
    expect(edited(two, tmp_path, ranged), "K6", {"a"}, near={"b"}, severity="E")

    def unfixed(model: Any) -> None:
        kinds = {i.name: i.type for i in model.mlProgram.functions["main"].inputs}
        kinds["b"].stateType.wrappedType.tensorType.dimensions[3].unknown.variadic = False

    folder = tmp_path / "b"
    folder.mkdir()
    loose = edited(two, folder, unfixed)
    expect(loose, "K6", {"b"}, near={"a"})
    expect(loose, "K9", set(), near={"b"})


@pytest.mark.parametrize(("shape", "width", "height"), [
    ((1, 2, 64, 32), False, False), ((1, 2, 64, 24), True, False), ((1, 2, 64, 270), True, False),
    ((1, 2, 1000, 64), False, True), ((1, 2, 33, 40), True, True), ((30, 3, 31, 64), False, False),
    ((40, 32), False, True), ((32,), False, False), ((40,), True, False),
])  # fmt: skip
def test_axes_of_a_state(shape: tuple[int, ...], width: bool, height: bool, tmp_path: Path) -> None:
    package = with_states(tmp_path / "a.mlpackage", shape)
    expect(package, "K9", {"a"} if width else set(), severity="E")
    expect(package, "K9", {"a"} if height and not width else set(), severity="W")  # the gravest of a place counts


def test_long_states(tmp_path: Path) -> None:
    expect(with_states(tmp_path / "a.mlpackage", (1, 1, 1024, 32)), "K10", set(), near={"a"})
    expect(with_states(tmp_path / "b.mlpackage", (1, 1, 1056, 32)), "K10", {"a"}, severity="W")
    expect(with_states(tmp_path / "c.mlpackage", (1, 1, 32, 1056)), "K10", {"a"})
    expect(with_states(tmp_path / "d.mlpackage", (1, 2048, 32)), "K10", set(), near={"a"})
