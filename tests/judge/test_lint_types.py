"""The rules on dtypes (T), on the hand-off (R) and on versions (V): each where it holds, and where it nearly does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb

from tests.bundle.packages import edited
from tests.judge.lint_programs import HALF, INT, WIDE, Spec, build, expect, half


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An fp16 program with an island of fp32, whole numbers, and 16-bit ids."""
    table, short = half(70000, 32), half(65536, 32, seed=1)

    def body(x: Any, ids: Any, wide: Any) -> Any:
        y = mb.conv(x=x, weight=half(64, 64, 1, 1), pad_type="valid", name="half_conv")
        up = mb.cast(x=y, dtype="fp32", name="up")
        island = mb.exp(x=up, name="island")
        down = mb.cast(x=island, dtype="fp16", name="down")
        idle = mb.cast(x=mb.cast(x=y, dtype="fp32", name="idle_up"), dtype="fp16", name="idle_down")
        later = mb.add(x=ids, y=np.int32(1), name="later")
        inside = mb.cast(x=wide, dtype="fp16", name="inside")
        ids16 = mb.cast(x=later, dtype="uint16", name="ids16")
        rows = mb.gather(x=table, indices=ids16, axis=0, validate_indices=False, name="rows")
        enough = mb.gather(x=short, indices=ids16, axis=0, validate_indices=False, name="enough")
        plain = mb.gather(x=table, indices=later, axis=0, validate_indices=False, name="plain")
        _, best = mb.topk(x=mb.reshape(x=table, shape=[1, -1]), k=1, output_indices_dtype="uint16", name="top_far")
        _, good = mb.topk(x=mb.reshape(x=x, shape=[1, -1]), k=1, output_indices_dtype="uint16", name="top_near")
        outside = mb.cast(x=mb.mul(x=down, y=idle, name="half_mul"), dtype="fp32", name="outside")
        return outside, mb.add(x=inside, y=inside, name="kept_half"), rows, enough, plain, best, good

    path = tmp_path_factory.mktemp("types") / "types.mlpackage"
    return build(path, body, Spec((1, 64, 1, 32)), Spec((4,), INT), Spec((1, 64, 1, 32), WIDE))


def test_fp32_compute(package: Path) -> None:
    found = expect(package, "T1", {"island"}, near={"up", "half_conv", "idle_up", "outside", "inside"}, severity="E")
    assert found[0].dtype == "fp32" and found[0].shape == (1, 64, 1, 32)
    assert found[0].function == "main" and found[0].package == "types.mlpackage"


def test_fp32_island(package: Path) -> None:
    expect(package, "T2", {"up"}, near={"idle_up", "outside"}, severity="W")


def test_a_program_of_fp32_has_no_island(tmp_path: Path) -> None:
    def body(x: Any) -> Any:
        y = mb.exp(x=mb.cast(x=x, dtype="fp32", name="up"), name="first")
        return mb.cast(x=mb.exp(x=y, name="second"), dtype="fp16", name="down")

    package = build(tmp_path / "wide.mlpackage", body, Spec((1, 32)))
    expect(package, "T2", set(), near={"up"})
    expect(package, "T1", {"first", "second"})


def test_upcast_that_the_fp16_pass_removed(tmp_path: Path) -> None:
    """The converter marks what it narrowed: ops by _cast_fp16, weights by _to_fp16."""

    def body(weight: str) -> Callable[[Any], Any]:
        def program(x: Any) -> Any:
            w = mb.const(val=half(32, 32), name=weight)
            y = mb.linear(x=x, weight=w, name="projected")
            y = mb.reshape(x=y, shape=[1, 32], name="moved_cast_fp16")
            return mb.exp(x=y, name="protected_cast_fp16")

        return program

    was_half = build(tmp_path / "was_half.mlpackage", body("w"), Spec((1, 32)))
    expect(was_half, "T3", {"protected_cast_fp16"}, near={"moved_cast_fp16", "projected"}, severity="E")
    was_wide = build(tmp_path / "was_wide.mlpackage", body("w_to_fp16"), Spec((1, 32)))
    expect(was_wide, "T3", set(), near={"protected_cast_fp16"})


def test_int32_tensors(package: Path) -> None:
    hits = {"later", "ids16", "plain", "cast_0", "cast_1"}  # the last two are the converter's, at the outputs of topk
    expect(package, "T5", hits, near={"rows", "enough", "half_conv", "top_far"}, severity="W")


def test_ids_that_are_too_short(package: Path) -> None:
    expect(package, "T6", {"rows", "top_far"}, near={"enough", "plain", "top_near"}, severity="E")


def test_fp32_edges(package: Path) -> None:
    found = expect(package, "T8", {"wide", "outside"}, near={"x", "ids", "kept_half", "island"}, severity="W")
    assert {f.dtype for f in found} == {"fp32"}


def test_fp32_edges_of_images_are_no_arrays(package: Path, tmp_path: Path) -> None:
    def as_images(model: Any) -> None:
        for feature in (*model.description.input, *model.description.output):
            if feature.name in ("wide", "outside"):
                feature.type.imageType.width, feature.type.imageType.height = 32, 1

    expect(edited(package, tmp_path, as_images), "T8", set(), near={"wide", "outside"})


def test_fp32_edge_of_an_fp32_program_is_no_cast(tmp_path: Path) -> None:
    package = build(tmp_path / "all.mlpackage", lambda x: mb.exp(x=x, name="e"), Spec((1, 32), WIDE))
    expect(package, "T8", set(), near={"x", "e"})
    expect(package, "R3", {"e"})


def test_output_that_no_buffer_can_back(package: Path, tmp_path: Path) -> None:
    hits = {"outside", "top_far_1", "top_near_1"}
    expect(package, "R3", hits, near={"kept_half", "rows"}, severity="W")

    def loosen(model: Any) -> None:
        array = next(o for o in model.description.output if o.name == "kept_half").type.multiArrayType
        for low, high in ((1, 1), (64, 64), (1, 1), (1, 32)):
            array.shapeRange.sizeRanges.add(lowerBound=low, upperBound=high)

    expect(edited(package, tmp_path, loosen), "R3", {*hits, "kept_half"}, near={"rows"})


@pytest.fixture(scope="module")
def stateful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def body(x: Any, kv: Any) -> Any:
        y = mb.add(x=mb.read_state(input=kv, name="past"), y=x, name="next")
        mb.coreml_update_state(state=kv, value=y, name="written")
        return mb.exp(x=y, name="out")

    path = tmp_path_factory.mktemp("state") / "state.mlpackage"
    return build(path, body, Spec((1, 32)), Spec((1, 32), HALF, True))


def test_dtype_of_a_state(stateful: Path, tmp_path: Path) -> None:
    expect(stateful, "T4", set(), near={"kv"})

    def widen(model: Any) -> None:
        function = model.mlProgram.functions["main"]
        kv = next(i for i in function.inputs if i.name == "kv")
        kv.type.stateType.wrappedType.tensorType.dataType = 11  # fp32

    expect(edited(stateful, tmp_path, widen), "T4", {"kv"}, severity="E")


@pytest.mark.parametrize(("version", "v1", "v3", "v9"), [
    (8, set(), set(), {"kv"}), (9, set(), set(), set()), (10, {None}, set(), set()),
])  # fmt: skip
def test_versions_of_a_stateful_package(
    version: int, v1: set[None], v3: set[None], v9: set[str], stateful: Path, tmp_path: Path
) -> None:
    def set_version(model: Any) -> None:
        model.specificationVersion = version

    package = edited(stateful, tmp_path, set_version)
    expect(package, "V1", v1)
    expect(package, "V3", v3)
    expect(package, "V9", v9)


def test_the_tool_that_wrote_a_package_for_macos_26(stateful: Path, tmp_path: Path) -> None:
    def written_by(tool: str) -> Callable[[Any], None]:
        def edit(model: Any) -> None:
            model.specificationVersion = 10
            model.description.metadata.userDefined["com.github.apple.coremltools.version"] = tool

        return edit

    for number, (tool, hits) in enumerate((("9.0", {None}), ("9.1b1", {None}), ("10.0", set()), ("8.3", set()))):
        folder = tmp_path / str(number)
        folder.mkdir()
        expect(edited(stateful, folder, written_by(tool)), "V1", hits)


def test_ios_18_target_that_nothing_needs(tmp_path: Path) -> None:
    def body(x: Any) -> Any:
        return mb.linear(x=x, weight=half(32, 32), name="y")

    new = build(tmp_path / "new.mlpackage", body, Spec((1, 32)))
    expect(new, "V3", {None}, severity="I")
    old = build(tmp_path / "old.mlpackage", body, Spec((1, 32)), target=ct.target.iOS17)
    expect(old, "V3", set())

    def compressed(x: Any) -> Any:
        data, scale = np.ones((32, 32), np.int8), np.ones((32, 1), np.float16)
        return mb.linear(x=x, weight=mb.constexpr_blockwise_shift_scale(data=data, scale=scale), name="y")

    expect(build(tmp_path / "c.mlpackage", compressed, Spec((1, 32))), "V3", set(), near={"y"})
