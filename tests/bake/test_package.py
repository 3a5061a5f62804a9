"""A package as a folder of files: what is in them, what Apple's readers see in it, and that it is always the same."""

import hashlib
import json
import resource
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.frontend.milproto.load import load as load_milproto

from anechain.bake import package
from anechain.bake.graph import block_program
from anechain.bundle.program import read_program
from anechain.bundle.quant import Quantized, dequantize, quantize
from anechain.bundle.recipe import FP16, Recipe, Rule, Scheme, load_recipe
from anechain.bundle.spec import DECODE, LAYER_MATRICES, PREFILL, layer_tensors, ports_of
from anechain.errors import RecipeError
from tests.bundle_maker import SPECS, TensorSource, tiny_source

CONTEXT, CHUNK = 64, 32
WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"
MODEL = "Data/com.apple.CoreML/model.mlmodel"
RECIPES = ["fp16", "int8", "m8"]


def make(path: Path, form: str = "llama", recipe: str = "fp16", layers: range = range(2), chunk: int = CHUNK) -> Path:
    source = tiny_source(form)
    package.make_block(source, source.spec, load_recipe(recipe), layers, CONTEXT, chunk, path)
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    made: dict[tuple[str, str], Path] = {}

    def get(form: str, recipe: str) -> Path:
        if (form, recipe) not in made:
            made[form, recipe] = make(tmp_path_factory.mktemp("saved") / "block-000.mlpackage", form, recipe)
        return made[form, recipe]

    return get


def digests(folder: Path) -> dict[str, str]:
    files = sorted(f for f in folder.rglob("*") if f.is_file())
    return {f.relative_to(folder).as_posix(): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_both_functions_share_one_copy_of_the_weights(recipe: str, tmp_path: Path) -> None:
    spec, scheme = SPECS["llama"], {"fp16": FP16, "int8": Scheme(8), "m8": Scheme(8, "block", 32)}[recipe]
    wide = 4 if recipe == "m8" else 2
    sizes = []  # of the arrays that a package of two layers has to hold
    for shape in list(layer_tensors(spec).values()) * 2:
        if len(shape) == 1 or scheme == FP16:
            sizes.append(wide * int(np.prod(shape)))
        else:
            sizes += [shape[0] * shape[1], wide * shape[0] * (shape[1] // 32 if recipe == "m8" else 1)]
    causal = [wide * 2 * CHUNK * CHUNK]  # two heads a group
    for name, chunk, arrays in (("one", 0, sizes), ("both", CHUNK, sizes + causal)):
        path = make(tmp_path / f"{name}.mlpackage", recipe=recipe, chunk=chunk)
        # Blob storage: a header of 64 bytes, then for each array a record of 64 bytes and its data, aligned to 64.
        assert (path / WEIGHTS).stat().st_size == 64 + sum(64 + -(-size // 64) * 64 for size in arrays)
    assert len(sizes) in (18, 32)


def test_the_folder_holds_three_files(saved: Callable[[str, str], Path]) -> None:
    path = saved("llama", "fp16")
    assert set(digests(path)) == {"Manifest.json", MODEL, WEIGHTS}
    manifest = json.loads((path / "Manifest.json").read_text())
    items = manifest["itemInfoEntries"]
    assert items[manifest["rootModelIdentifier"]]["path"] == "com.apple.CoreML/model.mlmodel"
    assert {item["path"] for item in items.values()} == {"com.apple.CoreML/model.mlmodel", "com.apple.CoreML/weights"}


def test_saved_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = (make(tmp_path / folder / "block-000.mlpackage", "gemma3", "int8") for folder in "ab")
    assert digests(first) == digests(second)


def test_names_do_not_depend_on_what_the_process_built_before(tmp_path: Path) -> None:
    before = make(tmp_path / "a" / "block-000.mlpackage")
    source, recipe = tiny_source("gemma3"), load_recipe("int8")
    weights = package.block_weights(source, recipe, source.spec, range(3))
    block_program(source.spec, recipe, range(3), CONTEXT, CHUNK, weights)  # built, and never saved
    assert digests(before) == digests(make(tmp_path / "b" / "block-000.mlpackage"))


def test_a_package_of_other_layers_has_other_weights_and_the_same_form(tmp_path: Path) -> None:
    first, second = (make(tmp_path / f"{i}.mlpackage", layers=range(i, i + 1)) for i in range(2))
    assert digests(first)[WEIGHTS] != digests(second)[WEIGHTS]
    ops = [[op.type for op in read_program(path).functions[DECODE].ops] for path in (first, second)]
    assert ops[0] == ops[1] and len(ops[0]) == 74


def test_a_full_disk_is_an_error_of_the_disk(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            make(tmp_path / "block-000.mlpackage")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# -- as Apple's readers see it -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_coremltools_opens_it_as_a_multifunction_model(recipe: str, saved: Callable[[str, str], Path]) -> None:
    model = ct.models.MLModel(str(saved("qwen3", recipe)), skip_model_load=True)
    assert model.user_defined_metadata == {"layers": "0-1", "recipe": recipe}
    spec = model.get_spec()
    assert spec.specificationVersion == 9
    assert spec.description.defaultFunctionName == DECODE
    described = {f.name: f for f in spec.description.functions}
    assert set(described) == {DECODE, PREFILL}
    array = ct.proto.FeatureTypes_pb2.ArrayFeatureType
    dtypes = {"fp16": array.FLOAT16, "int32": array.INT32}
    for name, query in ((DECODE, 1), (PREFILL, CHUNK)):
        ports = ports_of(SPECS["qwen3"], query, CONTEXT, range(2))
        for features, wanted in ((described[name].input, ports.inputs), (described[name].output, ports.outputs)):
            arrays = [f.type.multiArrayType for f in features]
            assert [f.name for f in features] == [p.name for p in wanted]
            assert [tuple(a.shape) for a in arrays] == [p.shape for p in wanted]
            assert [a.dataType for a in arrays] == [dtypes[p.dtype] for p in wanted]
            assert {a.WhichOneof("ShapeFlexibility") for a in arrays} == {None}
        (state,) = described[name].state
        assert state.name == "kv"
        assert tuple(state.type.stateType.arrayType.shape) == (4, 2, CONTEXT, 32)
        assert state.type.stateType.arrayType.dataType == array.FLOAT16


@pytest.mark.parametrize("recipe", RECIPES)
def test_milproto_loads_it_with_the_weights_that_were_meant(recipe: str, saved: Callable[[str, str], Path]) -> None:
    path = saved("qwen3", recipe)
    model = ct.models.MLModel(str(path), skip_model_load=True)
    program = load_milproto(model.get_spec(), 9, model.weights_dir)
    ours, source = read_program(path), tiny_source("qwen3")
    assert set(program.functions) == set(ours.functions)
    for name, function in program.functions.items():
        ops = [op for op in function.operations if op.op_type != "const"]
        assert Counter(op.op_type for op in ops) == Counter(op.type for op in ours.functions[name].ops)
        scheme = load_recipe(recipe).scheme_for("layers.0.q", 1)
        compared = 0
        for op in ops:
            if op.op_type != "conv":
                continue
            layer, part = op.name.removeprefix("layers_").removesuffix("_out").split("_")
            wanted = source.tensor(f"layers.{layer}.{part}").astype(np.float16)
            if scheme.bits == 8:
                got = op.weight.op.materialized_val_inference()
                quantized = quantize(wanted, scheme)
                wanted = dequantize(quantized)
                if recipe == "m8":  # scales are fp32 there, and the products are not rounded
                    scale = np.repeat(quantized.scale.astype(np.float32), 32, axis=1)
                    wanted = quantized.data * scale
            else:
                got = op.weight.val
            np.testing.assert_array_equal(got[:, :, 0, 0], wanted)
            compared += 1
        assert compared == 14


# -- weights -----------------------------------------------------------------------------------------------------------


def test_weights_are_rounded_to_what_the_recipe_says() -> None:
    source = tiny_source("llama-biases")
    rules = (Rule("layers.0.down", Scheme(8)), Rule("layers.1.*", Scheme(8, "block", 16)))
    weights = package.block_weights(source, Recipe("mixed", "fp16", rules), source.spec, range(2))
    assert set(weights) == {f"layers.{i}.{part}" for i in range(2) for part in layer_tensors(source.spec)}
    for name, weight in weights.items():
        tensor, (_, layer, part) = source.tensor(name), name.split(".")
        if part not in LAYER_MATRICES or (layer == "0" and part != "down"):
            assert isinstance(weight, np.ndarray) and weight.dtype == np.float16
            np.testing.assert_array_equal(weight, tensor.astype(np.float16))
        else:
            wanted = quantize(tensor, Scheme(8) if layer == "0" else Scheme(8, "block", 16))
            assert isinstance(weight, Quantized)
            np.testing.assert_array_equal(weight.data, wanted.data)
            np.testing.assert_array_equal(weight.scale, wanted.scale)


@pytest.mark.parametrize(
    ("sandwich", "scaled"), [(False, {"o", "o_bias", "down", "down_bias"}), (True, {"attn_post_norm", "ffn_post_norm"})]
)
def test_what_writes_to_the_stream_carries_its_scale(sandwich: bool, scaled: set[str]) -> None:
    spec = replace(SPECS["llama-biases"], stream_scale=0.125, sandwich_norms=sandwich)
    source = tiny_source(spec)
    weights = package.block_weights(source, load_recipe("fp16"), spec, range(1))
    for name, weight in weights.items():
        factor = np.float32(0.125 if name.split(".")[2] in scaled else 1)
        np.testing.assert_array_equal(weight, (source.tensor(name) * factor).astype(np.float16))
    assert {name.split(".")[2] for name in weights} >= scaled


def damaged(**changes: Callable[[np.ndarray], None]) -> TensorSource:
    """The qwen3 form with some of its tensors changed; `layers_0_q` stands for `layers.0.q`."""
    source = tiny_source("qwen3")
    tensors = {name: tensor.copy() for name, tensor in source.tensors.items()}
    for name, change in changes.items():
        change(tensors[name.replace("_", ".", 2) if name.startswith("layers") else name])
    return replace(source, tensors=tensors)


def put(value: float) -> Callable[[np.ndarray], None]:
    return lambda tensor: tensor.reshape(-1).__setitem__(5, value)


def test_all_weights_that_a_recipe_cannot_hold_are_named(tmp_path: Path) -> None:
    source = damaged(
        layers_0_q=put(np.nan), layers_0_o=put(70000), layers_1_attn_norm=put(-66000), layers_1_v=put(65504)
    )
    path = tmp_path / "block-000.mlpackage"
    with pytest.raises(RecipeError) as caught:
        package.make_block(source, source.spec, load_recipe("fp16"), range(2), CONTEXT, CHUNK, path)
    assert str(caught.value) == (
        "recipe 'fp16' cannot be applied to this model: layers.0.q holds values that are not finite (the checkpoint "
        "is damaged); layers.0.o reaches 70000, above the 65504 that fp16 holds; layers.1.attn_norm reaches 66000, "
        "above the 65504 that fp16 holds: use another checkpoint or, where fp16 is too small, a recipe with "
        'compute = "fp32" that leaves these weights fp16.'
    )
    assert not path.exists()


def test_a_recipe_that_computes_in_fp32_holds_larger_weights_unquantised(tmp_path: Path) -> None:
    source = damaged(layers_0_o=put(70000))
    wide = Recipe("wide", "fp32", ())
    package.make_block(source, source.spec, wide, range(1), CONTEXT, 0, tmp_path / "block-000.mlpackage")
    with pytest.raises(RecipeError, match=r"layers\.0\.o reaches 70000"):
        package.block_weights(source, load_recipe("m8"), source.spec, range(1))


def test_head_and_embedding_are_held_to_the_same(tmp_path: Path) -> None:
    source = damaged(embed=put(80000), final_norm=put(np.inf))
    with pytest.raises(RecipeError, match=r"final_norm holds values that are not finite .*; head\.0 reaches 80000"):
        package.make_head(source, source.spec, load_recipe("fp16"), tmp_path / "head.mlpackage")
    for recipe in ("fp16", "int8", "m8"):  # the table is never wider than fp16
        with pytest.raises(RecipeError, match="embed reaches 80000"):
            package.make_embedding(source, load_recipe(recipe), tmp_path)
    assert not list(tmp_path.iterdir())


def test_head_is_cut_into_equal_pieces_and_filled_up_with_zeros() -> None:
    source = tiny_source(replace(SPECS["llama"], vocab_size=40001, hidden_size=32))
    head = source.tensor("head").astype(np.float16)
    weights = package.head_weights(source, load_recipe("fp16"), source.spec)
    pieces = [weights[f"head.{i}"] for i in range(len(weights) - 1)]
    assert len(pieces) == 3 and {len(piece) for piece in pieces} == {13334}
    np.testing.assert_array_equal(np.concatenate(pieces)[:40001], head)
    np.testing.assert_array_equal(np.concatenate(pieces)[40001:], np.zeros((1, 32)))


def test_a_tied_head_is_the_embedding() -> None:
    source = tiny_source("qwen3")
    weights = package.head_weights(source, load_recipe("fp16"), source.spec)
    np.testing.assert_array_equal(weights["head.0"], source.tensor("embed").astype(np.float16))
