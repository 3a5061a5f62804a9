"""The rules on compressed weights (Q): each where it holds, and where it nearly does."""

from pathlib import Path
from typing import Any

import coremltools as ct
import coremltools.optimize.coreml as cto
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

from anechain.judge.compatibility import Machine
from tests.bundle.packages import edited
from tests.judge.lint_programs import HALF, Spec, build, expect, half

VERSION = "com.github.apple.coremltools.version"


def linear(name: str, data: np.ndarray, scale: np.ndarray) -> Any:
    return mb.constexpr_blockwise_shift_scale(data=data, scale=scale.astype(np.float16), name=name)


def palette(name: str, groups: tuple[int, int], entries: int, lut: Any = None, rows: int = 64) -> Any:
    kind = types.nptype_from_builtin(types.string_to_builtin(f"uint{entries.bit_length() - 1}"))
    indices = np.zeros((rows, 64), kind)
    table = half(*groups, entries, 1) if lut is None else lut
    return mb.constexpr_lut_to_dense(indices=indices, lut=table, name=name)


@pytest.fixture(scope="module")
def scales(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """int8 in every granularity, in the places of conv, linear and matmul."""
    int8 = np.random.default_rng(0).integers(-127, 128, (96, 64)).astype(np.int8)

    def body(x: Any, y: Any) -> Any:
        conv = int8[:, :, None, None]
        scale = np.full((96, 64), 0.01)
        dead = scale[:, :1].copy()
        dead[5] = 0
        wrong = scale[:, :1].copy()
        wrong[7] = np.nan
        tiled = linear("tiled", int8, scale[:3, :2])
        outs = [
            mb.conv(x=y, weight=linear("conv_channel", conv, scale[:, :1, None, None]), pad_type="valid", name="c1"),
            mb.conv(x=y, weight=linear("conv_block", conv, scale[:, :2, None, None]), pad_type="valid", name="c2"),
            mb.conv(x=y, weight=linear("conv_inputs", conv, scale[:1, :, None, None]), pad_type="valid", name="c3"),
            mb.linear(x=x, weight=linear("whole", int8, scale[:1, :1]), name="l1"),
            mb.linear(x=x, weight=linear("rows_grouped", int8, scale[:48, :1]), name="l2"),
            mb.linear(x=x, weight=tiled, name="l3"),
            mb.matmul(x=x, y=linear("product_channel", int8.T.copy(), scale.T[:1]), name="m1"),
            mb.matmul(x=x, y=linear("product_rows", int8.T.copy(), scale.T[:, :1]), name="m2"),
            mb.matmul(x=x, y=linear("turned", int8, scale[:, :1]), transpose_y=True, name="m3"),
            mb.linear(x=x, weight=linear("dead", int8, dead), name="l4"),
            mb.linear(x=x, weight=linear("wrong", int8, wrong), name="l5"),
            mb.linear(x=x, weight=linear("empty", np.zeros_like(int8), np.ones((96, 1))), name="l6"),
            mb.linear(x=x, weight=half(96, 64), name="l7"),
        ]
        return tuple(outs)

    path = tmp_path_factory.mktemp("scales") / "scales.mlpackage"
    return build(path, body, Spec((1, 64)), Spec((1, 64, 1, 1)))


BLOCKED = {"conv_block", "conv_inputs", "rows_grouped", "tiled", "product_rows"}
TAKEN = {"conv_channel", "whole", "product_channel", "turned", "empty"}


def test_a_scale_for_each_block(scales: Path) -> None:
    found = expect(scales, "Q1", BLOCKED, near=TAKEN | {"l7"}, severity="E")
    details = {f.op: f.detail for f in found}
    assert details["conv_block"] == "one int8 scale for each [1, 32, 1, 1] of [96, 64, 1, 1]"
    assert details["tiled"] == "one int8 scale for each [32, 32] of [96, 64]"


def test_int8_of_channels(scales: Path, palettes: Path) -> None:
    found = expect(scales, "Q2", {None}, severity="I")
    assert found[0].detail.startswith(f"{len(TAKEN) + 2} int8 matrices")  # dead and wrong are of channels as well
    expect(palettes, "Q2", set(), near={"whole"})


def test_int8_on_an_a16(scales: Path, palettes: Path) -> None:
    assert expect(scales, "Q12", {None}, severity="W", machine=Machine(chip="A16"))[0].detail == "12 int8 matrices"
    expect(scales, "Q12", set(), near={"whole"}, machine=Machine(chip="A17 Pro"))
    expect(palettes, "Q12", set(), near={"whole"})


def test_scales_that_say_nothing(scales: Path) -> None:
    found = expect(scales, "Q7", {"dead", "wrong"}, near={"empty", "whole"}, severity="E")
    assert {f.detail for f in found} == {"1 of 96 scales are 0 or not a number"}


def test_what_the_converter_makes_of_a_matrix_of_zeros(tmp_path: Path) -> None:
    source = mb.program(input_specs=[mb.TensorSpec((1, 64), HALF)], opset_version=ct.target.iOS18)(
        lambda x: (mb.linear(x=x, weight=np.zeros((64, 64), np.float16), name="zeros"),
                   mb.linear(x=x, weight=half(64, 64), name="full"))
    )  # fmt: skip
    model = ct.convert(source, minimum_deployment_target=ct.target.iOS18, skip_model_load=True)
    config = cto.OpLinearQuantizerConfig(mode="linear_symmetric", weight_threshold=10)
    with np.errstate(all="ignore"):
        model = cto.linear_quantize_weights(model, cto.OptimizationConfig(global_config=config))
    model.save(str(tmp_path / "zeros.mlpackage"))
    assert len(expect(tmp_path / "zeros.mlpackage", "Q7", {"zeros_weight_0_quantized"}, near={"full"})) == 1


@pytest.fixture(scope="module")
def palettes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def body(x: Any) -> Any:
        return (
            mb.linear(x=x, weight=palette("whole", (1, 1), 16), name="l1"),
            mb.linear(x=x, weight=palette("grouped", (4, 1), 64), name="l2"),
        )

    return build(tmp_path_factory.mktemp("palettes") / "palettes.mlpackage", body, Spec((1, 64)))


@pytest.fixture(scope="module")
def odd_palettes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Palettes of rows and columns, and one whose entries are scaled."""

    def body(x: Any) -> Any:
        entries = np.ones((4, 64, 16, 1), np.float16)
        lut = linear("scaled_lut", entries, np.full((1, 64, 1, 1), 0.1))
        return (
            mb.linear(x=x, weight=palette("both", (4, 2), 16), name="l1"),
            mb.linear(x=x, weight=palette("scaled", (4, 64), 16, lut), name="l2"),
        )

    return build(tmp_path_factory.mktemp("odd") / "odd.mlpackage", body, Spec((1, 64)))


def test_palettes(palettes: Path, odd_palettes: Path, scales: Path) -> None:
    found = expect(palettes, "Q4", {None}, severity="I")
    assert found[0].detail == "2 palettised weights of 4 and 6 bits, at most 4 palettes in one"
    expect(odd_palettes, "Q4", set(), near={"both"})
    expect(scales, "Q4", set(), near={"whole"})


def test_palettes_of_rows_and_columns(palettes: Path, odd_palettes: Path) -> None:
    found = expect(odd_palettes, "Q1", {"both"}, near={"scaled", "scaled_lut"}, severity="E")
    assert found[0].detail == "palettes for 4 x 2 groups of rows and columns"
    expect(palettes, "Q1", set(), near={"whole", "grouped"})


def test_palette_with_scales(palettes: Path, odd_palettes: Path) -> None:
    expect(odd_palettes, "Q5", {"scaled"}, near={"both"}, severity="E")
    expect(odd_palettes, "Q5", set(), near={"scaled"}, machine=Machine("macOS", (15,)))
    expect(palettes, "Q5", set(), near={"whole", "grouped"})


def test_quantised_activations(tmp_path: Path) -> None:
    def body(x: Any) -> Any:
        scale = np.float16(0.1)
        flows = mb.quantize(input=x, scale=scale, output_dtype="int8", name="flows")
        back = mb.dequantize(input=flows, scale=scale, name="back")
        stored = mb.dequantize(input=np.ones((64, 64), np.int8), scale=scale, name="stored")
        return mb.matmul(x=back, y=stored, name="out")

    package = build(tmp_path / "a.mlpackage", body, Spec((1, 64)))
    expect(package, "Q6", {"flows", "back"}, near={"stored", "out"}, severity="E")


def merged(path: Path, first: Any, second: Any) -> Path:
    def body(weight: Any) -> Any:
        return lambda x: mb.linear(x=x, weight=weight(), name="y")

    merge = ct.utils.MultiFunctionDescriptor()
    for name, weight in (("decode", first), ("prefill", second)):
        part = build(path.with_name(f"{path.stem}_{name}.mlpackage"), body(weight), Spec((1, 64)))
        merge.add_function(str(part), "main", name)
    merge.default_function_name = "decode"
    ct.utils.save_multifunction(merge, str(path))
    return path


def test_functions_that_hold_a_matrix_in_two_forms(tmp_path: Path) -> None:
    def int8() -> Any:
        return linear("w", np.ones((64, 64), np.int8), np.full((64, 1), 0.1))

    def plain() -> np.ndarray:
        return half(64, 64)

    def narrower() -> np.ndarray:
        return half(32, 64)

    found = expect(merged(tmp_path / "mixed.mlpackage", plain, int8), "Q8", {"y"}, severity="E")
    assert found[0].detail == "y is 8-bit linear here, 16-bit plain in decode"
    expect(merged(tmp_path / "alike.mlpackage", int8, int8), "Q8", set(), near={"y"})
    expect(merged(tmp_path / "other.mlpackage", narrower, int8), "Q8", set(), near={"y"})


def palettised_with_state(path: Path, entries: int) -> Path:
    def body(x: Any, kv: Any) -> Any:
        y = mb.linear(x=mb.read_state(input=kv, name="past"), weight=palette("w", (1, 1), entries), name="y")
        mb.coreml_update_state(state=kv, value=y, name="written")
        return mb.add(x=x, y=y, name="out")

    return build(path, body, Spec((1, 64)), Spec((1, 64), HALF, True))


def test_4_bit_palettes_and_a_state(palettes: Path, tmp_path: Path) -> None:
    four = palettised_with_state(tmp_path / "four.mlpackage", 16)
    expect(four, "Q10", {None}, severity="E")
    expect(palettised_with_state(tmp_path / "six.mlpackage", 64), "Q10", set(), near={"w"})
    expect(palettes, "Q10", set(), near={"whole"})

    def written_by_83(model: Any) -> None:
        model.description.metadata.userDefined[VERSION] = "8.3.0"

    expect(edited(four, tmp_path, written_by_83), "Q10", set(), near={"w"})


def test_forms_that_need_ios_18(scales: Path, palettes: Path, tmp_path: Path) -> None:
    expect(scales, "Q11", set(), near=BLOCKED)

    def older(model: Any) -> None:
        model.specificationVersion = 8

    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    expect(edited(palettes, folders[0], older), "Q11", {"whole", "grouped"}, near={"l1"}, severity="E")
    expect(edited(scales, folders[1], older), "Q11", BLOCKED | TAKEN | {"dead", "wrong"}, near={"l7"})

    def body(x: Any) -> Any:
        data, scale = np.ones((64, 64), np.int8), np.ones(64, np.float16)
        old = mb.constexpr_affine_dequantize(
            quantized_data=data, zero_point=np.int8(0), scale=scale, axis=0, name="old"
        )
        return mb.linear(x=x, weight=old, name="y")

    iOS16 = build(tmp_path / "old.mlpackage", body, Spec((1, 64)), target=ct.target.iOS17)
    expect(iOS16, "Q11", set(), near={"old"})


def test_4_bits_in_a_small_model(palettes: Path, scales: Path, tmp_path: Path) -> None:
    found = expect(palettes, "Q13", {None}, severity="W")
    assert found[0].detail == "1 matrices of 4 bits in a model of 0 M weights"
    expect(scales, "Q13", set(), near={"whole"})

    def body(x: Any) -> Any:
        data = np.ones((64, 64), types.nptype_from_builtin(types.int4))
        return mb.linear(x=x, weight=linear("int4", data, np.full((64, 1), 0.1)), name="y")

    expect(build(tmp_path / "int4.mlpackage", body, Spec((1, 64))), "Q13", {None})


@pytest.mark.parametrize(("name", "metadata", "hit"), [
    ("model-int8", {}, True), ("model_w4a16", {}, True), ("q4", {}, True), ("lut6_head", {}, True),
    ("model", {"weight_format": "Palettized"}, True), ("model", {"": "an int8 quantised model"}, True),
    ("model", {"quantization": "not quantized"}, False), ("model", {"": "unquantized"}, False),
    ("model", {"plan": "int8"}, False), ("point8", {}, False), ("print4", {}, False), ("block-004", {}, False),
])  # fmt: skip
def test_names_that_promise_compression(name: str, metadata: dict[str, str], hit: bool, tmp_path: Path) -> None:
    plain = build(tmp_path / "made.mlpackage", lambda x: mb.linear(x=x, weight=half(64, 64), name="y"), Spec((1, 64)))

    def describe(model: Any) -> None:
        model.description.metadata.shortDescription = metadata.pop("", "")
        model.description.metadata.userDefined.update(metadata)

    package = edited(plain, tmp_path, describe).rename(tmp_path / f"{name}.mlpackage")
    expect(package, "Q15", {None} if hit else set(), near={"y"})


def test_a_name_that_keeps_its_promise(scales: Path, tmp_path: Path) -> None:
    kept = edited(scales, tmp_path, lambda model: None).rename(tmp_path / "model-int8.mlpackage")
    expect(kept, "Q15", set(), near={"whole"})
