"""Every fault that is looked for after a save is found, in packages that were tampered with."""

import shutil
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest

from anechain.bake import mil as mb
from anechain.bake import package
from anechain.bake.check import check_block, check_head
from anechain.bake.graph import _Graph
from anechain.bundle.quant import Quantized
from anechain.bundle.recipe import Recipe, load_recipe
from anechain.errors import BundleError
from tests.bundle.packages import MODEL, WEIGHTS, edited
from tests.bundle_maker import tiny_source

CONTEXT, CHUNK, LAYERS = 64, 32, range(2)
SOURCE = tiny_source("llama-biases")
SPEC = SOURCE.spec


def check(path: Path, recipe: str | Recipe = "int8", layers: range = LAYERS, chunk: int = CHUNK) -> None:
    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    weights = package.block_weights(SOURCE, recipe, SPEC, layers)
    check_block(path, SPEC, recipe, layers, CONTEXT, chunk, weights)


def make(path: Path, recipe: str) -> Path:
    package.make_block(SOURCE, SPEC, load_recipe(recipe), LAYERS, CONTEXT, CHUNK, path)
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("saved")
    paths = {recipe: make(folder / f"{recipe}.mlpackage", recipe) for recipe in ("fp16", "int8", "m8")}
    paths["head"] = folder / "head.mlpackage"
    package.make_head(SOURCE, SPEC, load_recipe("int8"), paths["head"])
    return paths


def blocks(model: Any, name: str = "decode") -> Any:
    return next(iter(model.mlProgram.functions[name].block_specializations.values()))


def operation(model: Any, output: str, name: str = "decode") -> Any:
    return next(op for op in blocks(model, name).operations if any(o.name == output for o in op.outputs))


# -- nothing wrong -----------------------------------------------------------------------------------------------------


def test_untouched_packages_have_no_fault(saved: dict[str, Path]) -> None:
    for recipe in ("fp16", "int8", "m8"):
        check(saved[recipe], recipe)
    recipe = load_recipe("int8")
    check_head(saved["head"], SPEC, recipe, package.head_weights(SOURCE, recipe, SPEC))


# -- weights -----------------------------------------------------------------------------------------------------------


def flipped(saved: Path, tmp_path: Path, content: bytes, at: int = 0, bit: int = 1) -> Path:
    """A copy in whose weight file one bit of the array `content` is flipped."""
    target = Path(shutil.copytree(saved, tmp_path / "flipped.mlpackage"))
    data = bytearray((target / WEIGHTS).read_bytes())
    assert data.count(content) == 1
    data[data.index(content) + at] ^= bit
    (target / WEIGHTS).write_bytes(data)
    return target


@pytest.mark.parametrize("name", ["layers.0.q", "layers.1.down"])
@pytest.mark.parametrize("part", ["data", "scale"])
def test_one_flipped_bit_of_a_quantised_weight(name: str, part: str, saved: dict[str, Path], tmp_path: Path) -> None:
    weight = package.block_weights(SOURCE, load_recipe("int8"), SPEC, LAYERS)[name]
    assert isinstance(weight, Quantized)
    content = (weight.data if part == "data" else weight.scale).tobytes()
    damaged = flipped(saved["int8"], tmp_path, content, at=len(content) - 2)
    with pytest.raises(BundleError) as caught:
        check(damaged)
    fault = f"{name} ({part}) has other values than it was given"
    assert str(caught.value) == (
        f"flipped.mlpackage was not written as meant (decode and prefill: {fault}): report this, and do not use it."
    )


@pytest.mark.parametrize("name", ["layers.0.attn_norm", "layers.1.k_bias", "layers.1.gate"])
def test_one_flipped_bit_of_a_plain_weight(name: str, saved: dict[str, Path], tmp_path: Path) -> None:
    weight = package.block_weights(SOURCE, load_recipe("fp16"), SPEC, LAYERS)[name]
    assert isinstance(weight, np.ndarray)
    damaged = flipped(saved["fp16"], tmp_path, weight.tobytes(), at=10)
    with pytest.raises(
        BundleError, match=rf"\(decode and prefill: {name} \(value\) has other values than it was given\)"
    ):
        check(damaged, "fp16")


def test_a_flipped_bit_of_the_head(saved: dict[str, Path], tmp_path: Path) -> None:
    recipe = load_recipe("int8")
    weights = package.head_weights(SOURCE, recipe, SPEC)
    piece = weights["head.0"]
    assert isinstance(piece, Quantized)
    damaged = flipped(saved["head"], tmp_path, piece.data.tobytes(), at=1000)
    with pytest.raises(BundleError, match=r"decode: head\.0 \(data\) has other values"):
        check_head(damaged, SPEC, recipe, weights)


@pytest.mark.parametrize(
    ("stored", "meant", "fault"),
    [
        ("fp16", "int8", r"layers\.0\.q \(data\) is not stored"),
        ("int8", "fp16", r"layers\.0\.q \(value\) is not stored"),
        ("int8", "int8-block32", r"layers\.0\.q \(scale\) has other values"),
        ("m8", "int8-block32", r"layers\.0\.q \(scale\) is stored as float32, not float16"),
        ("int8-block32", "m8", r"layers\.0\.q \(scale\) is stored as float16, not float32"),
        ("fp16", "fp32", r"layers\.0\.q \(value\) is stored as float16, not float32"),
    ],
)
def test_another_scheme_than_the_recipe_says(
    stored: str, meant: str, fault: str, saved: dict[str, Path], tmp_path: Path
) -> None:
    path = saved[stored] if stored in saved else make(tmp_path / "made.mlpackage", stored)
    with pytest.raises(BundleError, match=fault):
        check(path, Recipe("fp32", "fp32", ()) if meant == "fp32" else meant)


def test_other_layers_than_asked_for(saved: dict[str, Path]) -> None:
    with pytest.raises(
        BundleError,
        match=r"its states are kv \[4, 2, 64, 16\] fp16; .*; decode and prefill: layers\.2\.q \(data\) is not",
    ):
        check(saved["int8"], layers=range(3))


def test_a_weight_that_feeds_another_op(saved: dict[str, Path], tmp_path: Path) -> None:
    def edit(model: Any) -> None:
        operation(model, "layers_0_v_out").inputs["weight"].arguments[0].name = "layers_0_k_dense"

    with pytest.raises(BundleError) as caught:
        check(edited(saved["int8"], tmp_path, edit))
    assert str(caught.value) == (
        "copy.mlpackage was not written as meant (decode: layers.0.k is weight of the conv layers_0_k_out, weight of "
        "the conv layers_0_v_out, not the weight of the conv layers_0_k_out; decode: layers.0.v is read by no op, not "
        "the weight of the conv layers_0_v_out): report this, and do not use it."
    )


def test_exchanged_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, exchanged = _Graph.matrix, {"layers.0.k": "layers.0.v", "layers.0.v": "layers.0.k"}
    monkeypatch.setattr(_Graph, "matrix", lambda self, name: real(self, exchanged.get(name, name)))
    with pytest.raises(BundleError) as caught:
        make(tmp_path / "block-000.mlpackage", "int8")
    assert str(caught.value) == (
        "block-000.mlpackage was not written as meant (decode and prefill: layers.0.k is weight of the conv "
        "layers_0_v_out, not the weight of the conv layers_0_k_out; decode and prefill: layers.0.v is weight of the "
        "conv layers_0_k_out, not the weight of the conv layers_0_v_out): report this, and do not use it."
    )


def test_an_offset_beside_the_scale(saved: dict[str, Path], tmp_path: Path) -> None:
    def edit(model: Any) -> None:
        op = operation(model, "layers_1_up_dense")
        op.inputs["offset"].CopyFrom(op.inputs["scale"])

    with pytest.raises(BundleError, match=r"decode: layers\.1\.up has offset beside data and scale"):
        check(edited(saved["int8"], tmp_path, edit))


# -- ports and functions -----------------------------------------------------------------------------------------------


def test_a_dropped_function(saved: dict[str, Path], tmp_path: Path) -> None:
    def edit(model: Any) -> None:
        del model.mlProgram.functions["prefill"]

    damaged = edited(saved["int8"], tmp_path, edit)
    with pytest.raises(BundleError, match=r"was not written as meant \(its functions are decode\): report this"):
        check(damaged)
    check(damaged, chunk=0)


def test_a_function_too_many(saved: dict[str, Path]) -> None:
    with pytest.raises(BundleError, match=r"\(its functions are decode, prefill\)"):
        check(saved["int8"], chunk=0)


def test_a_head_without_its_function(saved: dict[str, Path], tmp_path: Path) -> None:
    def edit(model: Any) -> None:
        model.mlProgram.functions["main"].CopyFrom(model.mlProgram.functions["decode"])
        del model.mlProgram.functions["decode"]

    recipe = load_recipe("int8")
    with pytest.raises(BundleError, match=r"\(its functions are main\)"):
        check_head(edited(saved["head"], tmp_path, edit), SPEC, recipe, package.head_weights(SOURCE, recipe, SPEC))


def test_a_wrong_port_shape(saved: dict[str, Path], tmp_path: Path) -> None:
    def edit(model: Any) -> None:
        hidden = next(i for i in model.mlProgram.functions["prefill"].inputs if i.name == "hidden")
        hidden.type.tensorType.dimensions[2].constant.size = CHUNK + 1

    with pytest.raises(BundleError, match=r"\(prefill: its inputs are .*, hidden \[1, 1, 33, 64\] fp16, .*\): report"):
        check(edited(saved["int8"], tmp_path, edit))


def test_a_flexible_port_shape(saved: dict[str, Path], tmp_path: Path) -> None:
    def edit(model: Any) -> None:
        mask = next(i for i in model.mlProgram.functions["decode"].inputs if i.name == "mask")
        mask.type.tensorType.dimensions[3].unknown.variadic = False

    with pytest.raises(BundleError, match=r"its inputs are .*, mask \[1, 1, 1, -1\] fp16"):
        check(edited(saved["int8"], tmp_path, edit))


def test_a_port_of_another_dtype(saved: dict[str, Path], tmp_path: Path) -> None:
    def edit(model: Any) -> None:
        op = operation(model, "hidden_out")
        op.outputs[0].type.tensorType.dataType = ct.proto.MIL_pb2.FLOAT32

    with pytest.raises(BundleError) as caught:
        check(edited(saved["int8"], tmp_path, edit))
    assert "decode: hidden_out gives fp32 in a program of fp16" in str(caught.value)
    assert "decode: its outputs are hidden_out [1, 1, 1, 64] fp32" in str(caught.value)


# -- ops ---------------------------------------------------------------------------------------------------------------


def test_an_op_that_a_chain_does_not_use(saved: dict[str, Path], tmp_path: Path) -> None:
    def edit(model: Any) -> None:
        for kind in ("sin", "gather"):
            extra = blocks(model).operations.add()
            extra.CopyFrom(operation(model, "layers_0_q_rope"))
            extra.type = kind
            extra.outputs[0].name = f"extra_{kind}"

    with pytest.raises(BundleError, match=r"\(decode: ops that a chain does not use: gather, sin\)"):
        check(edited(saved["int8"], tmp_path, edit))


def test_more_ops_than_a_chain_needs(saved: dict[str, Path], tmp_path: Path) -> None:
    def edit(model: Any) -> None:
        for i in range(200):
            extra = blocks(model).operations.add()
            extra.CopyFrom(operation(model, "layers_0_q_rope"))
            extra.outputs[0].name = f"extra_{i}"

    with pytest.raises(BundleError, match=r"\(decode: \d{3} ops, more than 280\)"):
        check(edited(saved["int8"], tmp_path, edit))


@pytest.mark.parametrize(("recipe", "dtype"), [("int8", "FLOAT32"), ("int8", "INT32"), ("m8", "FLOAT16")])
def test_a_result_of_another_dtype(recipe: str, dtype: str, saved: dict[str, Path], tmp_path: Path) -> None:
    def edit(model: Any) -> None:
        op = operation(model, "layers_1_gated", "prefill")
        op.outputs[0].type.tensorType.dataType = getattr(ct.proto.MIL_pb2, dtype)

    word, compute = dtype.lower().replace("float", "fp"), load_recipe(recipe).compute
    with pytest.raises(BundleError, match=rf"\(prefill: layers_1_gated gives {word} in a program of {compute}\)"):
        check(edited(saved[recipe], tmp_path, edit), recipe)


def test_a_constant_that_is_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anechain.bake.graph.MASKED", -np.inf)
    with pytest.raises(BundleError, match=r"\(prefill: constant causal_full is not finite\)"):
        make(tmp_path / "block-000.mlpackage", "int8")


# -- state -------------------------------------------------------------------------------------------------------------


def test_a_second_write_from_a_stale_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = mb.coreml_update_state

    def twice(state: Any, value: Any, name: str) -> Any:
        """What a graph of one update a layer could do by mistake."""
        stale = mb.read_state(input=state, name="stale")
        real(state=state, value=value, name=f"{name}_first")
        return real(state=state, value=mb.mul(x=stale, y=np.float16(0.5), name="halved"), name=name)

    monkeypatch.setattr(mb, "coreml_update_state", twice)
    with pytest.raises(
        BundleError, match=r"decode and prefill: 2 reads, 1 slice updates and 2 updates of the state, not one each"
    ):
        make(tmp_path / "block-000.mlpackage", "int8")


@pytest.mark.parametrize(("repeated", "counts"), [("coreml_update_state", (1, 1, 2)), ("slice_update", (1, 2, 1))])
def test_a_second_write_without_a_read(
    repeated: str, counts: tuple[int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(mb, repeated)

    def twice(*, name: str, **arguments: Any) -> Any:
        real(name=f"{name}_first", **arguments)
        return real(name=name, **arguments)

    monkeypatch.setattr(mb, repeated, twice)
    reads, slices, updates = counts
    with pytest.raises(BundleError, match=f"{reads} reads, {slices} slice updates and {updates} updates of the state"):
        make(tmp_path / "block-000.mlpackage", "int8")


def test_an_update_that_forgets_the_past(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = mb.slice_update

    def on_something_else(x: Any, **others: Any) -> Any:
        return real(x=mb.mul(x=x, y=np.float16(0.5), name="halved"), **others)

    monkeypatch.setattr(mb, "slice_update", on_something_else)
    with pytest.raises(BundleError, match="decode and prefill: the state's update does not start from its read"):
        make(tmp_path / "block-000.mlpackage", "int8")


def test_an_update_with_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = mb.coreml_update_state

    def after(state: Any, value: Any, name: str) -> Any:
        return real(state=state, value=mb.mul(x=value, y=np.float16(0.5), name="halved"), name=name)

    monkeypatch.setattr(mb, "coreml_update_state", after)
    with pytest.raises(BundleError, match="decode and prefill: the state's update does not start from its read"):
        make(tmp_path / "block-000.mlpackage", "int8")


def test_a_state_of_another_shape(saved: dict[str, Path], tmp_path: Path) -> None:
    def edit(model: Any) -> None:
        state = next(i for i in model.mlProgram.functions["decode"].inputs if i.name == "kv")
        state.type.stateType.wrappedType.tensorType.dimensions[2].constant.size = CONTEXT // 2

    with pytest.raises(BundleError, match=r"decode: its states are kv \[4, 2, 32, 16\] fp16"):
        check(edited(saved["int8"], tmp_path, edit))


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", [MODEL, WEIGHTS, "Manifest.json"])
def test_a_file_that_is_cut_off(file: str, saved: dict[str, Path], tmp_path: Path) -> None:
    target = Path(shutil.copytree(saved["int8"], tmp_path / "short.mlpackage"))
    content = (target / file).read_bytes()
    (target / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(BundleError, match=r"short\.mlpackage cannot be read"):
        check(target)
