"""The rules on shapes, ranks and sizes (S): each where it holds, and where it nearly does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb

from anechain.judge.compatibility import Machine
from tests.bundle.packages import WEIGHTS, edited
from tests.bundle.packages import body as body_of
from tests.judge.lint_programs import HALF, Spec, build, expect, half


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two inputs, a layer_norm; the tests give its inputs ranges and lists of shapes."""

    def body(x: Any, mask: Any) -> Any:
        y = mb.layer_norm(x=x, axes=[2], gamma=half(64), beta=half(64), name="norm")
        return mb.add(x=mb.linear(x=y, weight=half(64, 64), name="projected"), y=mask, name="out")

    return build(tmp_path_factory.mktemp("plain") / "plain.mlpackage", body, Spec((1, 32, 64)), Spec((1, 32, 64)))


@pytest.fixture(scope="module")
def stateful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def body(x: Any, mask: Any, kv: Any) -> Any:
        y = mb.add(x=mb.read_state(input=kv, name="past"), y=mb.add(x=x, y=mask), name="next")
        mb.coreml_update_state(state=kv, value=y, name="written")
        return mb.exp(x=y, name="out")

    path = tmp_path_factory.mktemp("stateful") / "stateful.mlpackage"
    return build(path, body, Spec((1, 32, 64)), Spec((1, 32, 64)), Spec((1, 32, 64), HALF, True))


def given(package: Path, folder: Path, inputs: dict[str, Any]) -> Path:
    """A copy whose inputs may have other shapes: a list of shapes, or a tuple of (lowest, highest)."""
    folder.mkdir()

    def edit(model: Any) -> None:
        for name, shapes in inputs.items():
            array = next(i for i in model.description.input if i.name == name).type.multiArrayType
            for one in shapes if isinstance(shapes, list) else ():
                array.enumeratedShapes.shapes.add(shape=one)
            for low, high in shapes if isinstance(shapes, tuple) else ():
                array.shapeRange.sizeRanges.add(lowerBound=low, upperBound=high)

    return edited(package, folder, edit)


RANGE = ((1, 1), (1, 32), (64, 64))
FIXED = ((1, 1), (32, 32), (64, 64))
LISTED = [(1, 32, 64), (1, 16, 64)]


def test_ranges_of_shapes(plain: Path, tmp_path: Path) -> None:
    found = expect(given(plain, tmp_path / "a", {"x": RANGE, "mask": FIXED}), "S1", {"x"}, near={"mask"}, severity="E")
    assert found[0].detail == "input x is [1, 1 to 32, 64]"
    assert found[0].function == "main"
    found = expect(given(plain, tmp_path / "b", {"x": ((1, 1), (32, -1), (64, 64))}), "S1", {"x"})
    assert found[0].detail == "input x is [1, 32 to any, 64]"
    expect(given(plain, tmp_path / "c", {"x": LISTED}), "S1", set(), near={"x"})


def test_an_input_without_fixed_shape_and_without_description(plain: Path, tmp_path: Path) -> None:
    def loosen(model: Any) -> None:
        dims = model.mlProgram.functions["main"].inputs[0].type.tensorType.dimensions
        dims[1].unknown.variadic = False

    expect(edited(plain, tmp_path, loosen), "S1", {"x"}, near={"mask"})


@pytest.mark.parametrize(("inputs", "hits"), [
    ({"x": LISTED, "mask": LISTED}, {"x, mask"}),
    ({"x": LISTED, "mask": RANGE}, {"x"}),
    ({"x": LISTED}, set()),
    ({"x": RANGE}, set()),
    ({"x": [(1, 32, 64)], "mask": LISTED}, set()),  # a list of one shape is a fixed shape
])  # fmt: skip
def test_enumerated_shapes_that_do_not_go_together(inputs: Any, hits: set[str], plain: Path, tmp_path: Path) -> None:
    expect(given(plain, tmp_path / "a", inputs), "S2", hits, near={"norm"})


def test_enumerated_shapes_and_a_state(stateful: Path, tmp_path: Path) -> None:
    expect(given(stateful, tmp_path / "a", {"x": LISTED}), "S2", {"x"}, severity="E")
    expect(stateful, "S2", set(), near={"x"})


def test_enumerated_shapes_and_layer_norm(plain: Path, stateful: Path, tmp_path: Path) -> None:
    expect(given(plain, tmp_path / "a", {"x": LISTED}), "S3", {"norm"}, near={"projected"}, severity="W")
    expect(given(plain, tmp_path / "b", {"x": RANGE}), "S3", set(), near={"norm"})
    expect(given(stateful, tmp_path / "c", {"x": LISTED}), "S3", set(), near={"next"})


def test_ranges_in_a_package_of_several_functions(tmp_path: Path) -> None:
    for size in (1, 32):
        path = tmp_path / f"{size}.mlpackage"
        build(path, lambda x: mb.linear(x=x, weight=half(64, 64), name="y"), Spec((1, size, 64)))
    merge = ct.utils.MultiFunctionDescriptor()
    merge.add_function(str(tmp_path / "1.mlpackage"), "main", "decode")
    merge.add_function(str(tmp_path / "32.mlpackage"), "main", "prefill")
    merge.default_function_name = "decode"
    merged = tmp_path / "merged.mlpackage"
    ct.utils.save_multifunction(merge, str(merged))
    expect(merged, "S5", set(), near={"y"})

    def loosen(model: Any) -> None:
        function = next(f for f in model.description.functions if f.name == "prefill")
        for low, high in RANGE:
            function.input[0].type.multiArrayType.shapeRange.sizeRanges.add(lowerBound=low, upperBound=high)

    ranged = edited(merged, tmp_path, loosen)
    found = expect(ranged, "S5", {"x"}, severity="E")
    assert [f.function for f in found] == ["prefill"]
    assert [f.function for f in expect(ranged, "S1", {"x"})] == ["prefill"]
    expect(given(build(tmp_path / "one.mlpackage", lambda x: mb.exp(x=x, name="y"), Spec((1, 32, 64))),
                 tmp_path / "b", {"x": RANGE}), "S5", set(), near={"x"})  # fmt: skip


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def body(x: Any, one: Any, nothing: Any) -> Any:
        six = mb.reshape(x=x, shape=[1, 4, 1, 8, 32], name="six")
        five = mb.reshape(x=six, shape=[1, 2, 2, 8, 32], name="five")
        return mb.exp(x=five, name="out"), mb.exp(x=one, name="e"), mb.exp(x=nothing, name="f")

    path = tmp_path_factory.mktemp("ranks") / "ranks.mlpackage"
    return build(path, body, Spec((1, 32, 32)), Spec((1,)), Spec((1, 1)))


def test_more_than_five_axes(ranks: Path, tmp_path: Path) -> None:
    """The converter refuses such a tensor, so the file is given one."""

    def add_axis(model: Any) -> None:
        six = next(op for op in body_of(model).operations if op.outputs[0].name == "six")
        six.outputs[0].type.tensorType.dimensions.add().constant.size = 1
        six.outputs[0].type.tensorType.rank = 6

    expect(ranks, "S6", set(), near={"six", "five"})
    found = expect(edited(ranks, tmp_path, add_axis), "S6", {"six"}, near={"five"}, severity="E")
    assert found[0].shape == (1, 4, 1, 8, 32, 1)


def test_input_without_axes(ranks: Path, tmp_path: Path) -> None:
    def flatten(model: Any) -> None:
        for feature in model.mlProgram.functions["main"].inputs:
            if feature.name == "nothing":
                del feature.type.tensorType.dimensions[:]
                feature.type.tensorType.rank = 0

    expect(ranks, "S8", set(), near={"one", "nothing"})
    expect(edited(ranks, tmp_path, flatten), "S8", {"nothing"}, near={"one"}, severity="E")


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three attentions: heads repeated through five axes, five axes throughout, four axes; and a far tensor of 5."""

    def body(q: Any, k: Any) -> Any:
        five = mb.reshape(x=k, shape=[1, 2, 1, 32, 64], name="k_five")
        many = mb.reshape(x=mb.tile(x=five, reps=[1, 1, 2, 1, 1], name="k_many"), shape=[1, 4, 32, 64], name="k_heads")
        a = mb.softmax(x=mb.matmul(x=q, y=many, transpose_y=True, name="s1"), axis=3, name="w1")
        a = mb.matmul(x=a, y=mb.tile(x=k, reps=[1, 2, 1, 1], name="v1"), name="mix1")
        q5, k5 = (mb.expand_dims(x=t, axes=[1], name=n) for t, n in ((q, "q5"), (many, "k5")))
        b = mb.softmax(x=mb.matmul(x=q5, y=k5, transpose_y=True, name="s2"), axis=4, name="w2")
        pairs = mb.reshape(x=q, shape=[1, 2, 64, 64], name="pairs")
        c = mb.softmax(x=mb.matmul(x=pairs, y=k, transpose_y=True, name="s3"), axis=3, name="w3")
        c = mb.matmul(x=c, y=k, name="mix3")
        far = mb.reshape(x=mb.linear(x=c, weight=half(64, 64), name="after"), shape=[1, 2, 2, 32, 64], name="far")
        return a, b, mb.exp(x=far, name="out")

    path = tmp_path_factory.mktemp("attention") / "attention.mlpackage"
    return build(path, body, Spec((1, 4, 32, 64)), Spec((1, 2, 32, 64)))


def test_five_axes_around_attention(attention: Path) -> None:
    hits = {"k_five", "k_many", "k_heads", "q5", "k5", "s2", "w2"}
    expect(attention, "S7", hits, near={"s1", "w1", "mix1", "v1", "pairs", "s3", "w3", "mix3", "far"}, severity="E")


def test_five_axes_are_fine_before_version_26(attention: Path) -> None:
    expect(attention, "S7", set(), near={"w2"}, machine=Machine("macOS", (15,)))
    expect(attention, "S7", {"k_five", "k_many", "k_heads", "q5", "k5", "s2", "w2"}, machine=Machine("iOS", (26, 1)))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def body(x: Any, tail: Any, even: Any) -> Any:
        flat = mb.transpose(x=x, perm=[0, 3, 1, 2], name="flat")  # [1, 64, 1, 1]
        three = mb.split(x=x, split_sizes=[32, 16, 16], axis=3, name="three")
        wide = mb.cast(x=flat, dtype="fp32", name="wide")
        more = mb.concat(values=[even, tail], axis=3, interleave=False, name="more")
        return flat, *three, mb.exp(x=wide, name="w"), mb.exp(x=more, name="out"), mb.exp(x=x, name="fits")

    path = tmp_path_factory.mktemp("rows") / "rows.mlpackage"
    return build(path, body, Spec((1, 1, 1, 64)), Spec((1, 1, 1, 1)), Spec((1, 1, 1, 1024)))


def test_rows_that_are_padded(rows: Path) -> None:
    found = expect(rows, "S9", {"flat", "three", "more", "out", "tail"}, near={"x", "even", "wide", "w", "fits"})
    details = {f.op: f.detail for f in found}
    assert details["flat"] == "transpose: a last axis of 1 takes 32 times its size"
    assert details["three"] == "split: a last axis of 16 takes 2 times its size"
    assert details["more"] == "concat: a last axis of 1025 takes 1.03 times its size"
    assert {f.severity for f in found} == {"W"}


def test_rows_of_128_bytes_on_an_m5(rows: Path) -> None:
    m5, m4 = Machine(chip="M5 Pro"), Machine(chip="M4")
    hits = {"tail", "flat", "three_0", "three_1", "three_2", "out"}
    expect(rows, "S10", hits, near={"x", "even", "fits"}, severity="I", machine=m5)
    expect(rows, "S10", set(), near={"tail"}, machine=m4)


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Matrices on both sides of every limit; few of their numbers are ever read."""

    def conv(x: Any, outputs: int, name: str) -> Any:
        weight = np.zeros((outputs, x.shape[1], 1, 1), np.float16)
        return mb.conv(x=x, weight=weight, pad_type="valid", name=name)

    def body(x: Any, deep: Any, big: Any) -> Any:
        weight = np.zeros((16, 16416), np.float16)
        data, scale = np.ones((8192, 32, 1, 1), np.int8), np.ones((8192, 1, 1, 1), np.float16)
        packed = mb.constexpr_blockwise_shift_scale(data=data, scale=scale, name="packed")
        head, one = np.ones((9504, 32, 1, 1), np.int8), np.ones((9504, 1, 1, 1), np.float16)
        far = mb.constexpr_blockwise_shift_scale(data=head, scale=one, name="far")
        turned = np.zeros((16416, 32), np.float16)
        return (
            conv(x, 16384, "widest"), conv(x, 16385, "too_wide"), mb.linear(x=deep, weight=weight, name="too_deep"),
            mb.matmul(x=mb.reshape(x=x, shape=[1, 32]), y=turned, transpose_y=True, name="too_wide_product"),
            conv(mb.reshape(x=big, shape=[1, 2048, 1, 32], name="cut"), 4096, "notch"),
            conv(mb.reshape(x=big, shape=[1, 2048, 1, 32]), 4352, "off_notch"), mb.exp(x=big, name="far_too_long"),
            mb.exp(x=mb.reshape(x=big, shape=[1, 65536], name="longest"), name="long"),
            mb.conv(x=x, weight=packed, pad_type="valid", name="w8192"), conv(x, 8192, "h8192"),
            mb.conv(x=x, weight=far, pad_type="valid", name="w9504"),
        )  # fmt: skip

    path = tmp_path_factory.mktemp("sizes") / "sizes.mlpackage"
    return build(path, body, Spec((1, 32, 1, 1)), Spec((1, 16416)), Spec((1, 65536)))


def test_matrices_that_are_too_wide(sizes: Path) -> None:
    near = {"widest", "notch", "w8192"}
    found = expect(sizes, "S11", {"too_wide", "too_deep", "too_wide_product"}, near=near, severity="E")
    assert {f.op: f.detail for f in found}["too_deep"] == "linear from 16416 to 16"
    assert {f.op: f.detail for f in found}["too_wide_product"] == "matmul from 32 to 16416"


def test_axes_that_are_too_long(sizes: Path, tmp_path: Path) -> None:
    expect(sizes, "S13", set(), near={"longest", "far_too_long", "too_wide"})

    def body(x: Any) -> Any:
        weight = np.zeros((65537, 32), np.float16)
        start = mb.slice_by_size(x=x, begin=[0, 0], size=[1, 32], name="start")
        return mb.exp(x=x, name="e"), mb.linear(x=start, weight=weight, name="l")

    package = build(tmp_path / "long.mlpackage", body, Spec((1, 65537)))
    found = expect(package, "S13", {"x", "e", "l"}, severity="E")
    assert {f.confidence for f in found} == {"L"}


def test_compressed_matrices_of_about_8192(sizes: Path) -> None:
    expect(sizes, "S14", {"w8192"}, near={"h8192", "w9504"}, severity="W")
    expect(sizes, "S14", set(), near={"w8192"}, machine=Machine("iOS", (18,)))


def test_compressed_matrices_of_about_8192_beside_fused_attention(tmp_path: Path) -> None:
    def body(x: Any, q: Any) -> Any:
        data, scale = np.ones((8192, 32), np.int8), np.ones((8192, 1), np.float16)
        packed = mb.constexpr_blockwise_shift_scale(data=data, scale=scale, name="packed")
        fused = mb.scaled_dot_product_attention(query=q, key=q, value=q, name="fused")
        return mb.linear(x=x, weight=packed, name="w8192"), fused

    package = build(tmp_path / "fused.mlpackage", body, Spec((1, 32)), Spec((1, 2, 32, 64)))
    found = expect(package, "S14", {"w8192"}, near={"fused"})
    assert [f.severity for f in found] == ["E"]


def test_weights_that_meet_the_notch(sizes: Path) -> None:
    found = expect(sizes, "S16", {"notch"}, near={"off_notch", "widest"}, severity="W", machine=Machine(chip="M4"))
    assert found[0].detail == "conv from 2048 to 4096: 1048576 bytes for each of 16 cores"
    expect(sizes, "S16", set(), near={"notch"}, machine=Machine(chip="M1"))


def test_programs_of_one_or_two_products(plain: Path, attention: Path, tmp_path: Path) -> None:
    assert "1 op with" in expect(plain, "S17", {None}, severity="W")[0].detail
    expect(attention, "S17", set(), near={"after"})
    nothing = build(tmp_path / "none.mlpackage", lambda x: mb.exp(x=x, name="e"), Spec((1, 32)))
    expect(nothing, "S17", set(), near={"e"})


def grown(package: Path, folder: Path, size: int) -> Path:
    """A copy whose weight file is of that size, most of it a hole."""
    folder.mkdir()
    copy = edited(package, folder, lambda model: None)
    with (copy / WEIGHTS).open("r+b") as file:
        file.truncate(size)
    return copy


@pytest.mark.parametrize(("size", "severity"), [
    (1_000_000_000, None), (1_000_000_001, "W"), (1_400_000_000, "W"), (1_400_000_001, "E"), (2**31, "E"),
])  # fmt: skip
def test_packages_that_are_too_large(size: int, severity: str | None, plain: Path, tmp_path: Path) -> None:
    package = grown(plain, tmp_path / "grown", size)
    found = expect(package, "S18", {None} if severity else set(), near={"projected"})
    assert [f.severity for f in found] == ([severity] if severity else [])
    assert [("beyond 2 GiB" in f.detail) for f in found] == ([size >= 2**31] if severity else [])
    on_mac = expect(package, "S18", {None} if severity == "E" else set(), machine=Machine("macOS"))
    assert [f.severity for f in on_mac] == (["E"] if severity == "E" else [])


def test_attention_over_many_positions(tmp_path: Path) -> None:
    def body(q: Any, k: Any) -> Any:
        weights = mb.softmax(x=mb.matmul(x=q, y=k, transpose_y=True), axis=-1, name="long")
        short = mb.slice_by_size(x=k, begin=[0, 0, 0, 0], size=[1, 1, 2016, 32])
        fewer = mb.softmax(x=mb.matmul(x=q, y=short, transpose_y=True), axis=-1, name="short")
        fused = mb.scaled_dot_product_attention(query=q, key=k, value=k, name="fused")
        choice = mb.softmax(x=mb.matmul(x=q, y=k, transpose_y=True), axis=-1, name="choice")
        return mb.matmul(x=weights, y=k, name="m"), mb.matmul(x=fewer, y=short, name="n"), fused, choice

    package = build(tmp_path / "long.mlpackage", body, Spec((1, 1, 1, 32)), Spec((1, 1, 2048, 32)))
    found = expect(package, "S20", {"long", "fused"}, near={"short", "choice"}, severity="W")
    assert found[0].detail == "attention over 2048 positions"


def test_the_helper_sees_what_is_not_there(plain: Path) -> None:
    cases: list[Callable[[], Any]] = [
        lambda: expect(plain, "S1", {"x"}), lambda: expect(plain, "S1", set(), near={"nobody"}),
    ]  # fmt: skip
    for case in cases:
        with pytest.raises(AssertionError):
            case()
