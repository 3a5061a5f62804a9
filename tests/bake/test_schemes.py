"""Every scheme through a whole bundle: what is stored, and what both engines make of it; field cases Q."""

import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.frontend.milproto.load import load as load_milproto

from anechain.bake import package
from anechain.bake.check import check_block
from anechain.bake.jobs import make_plan
from anechain.bundle.embedding import PALETTE, TABLE, open_embedding
from anechain.bundle.footprint import footprint
from anechain.bundle.manifest import HEAD, Bundle
from anechain.bundle.program import Function, read_program
from anechain.bundle.quant import Quantized, dequantize, quantize
from anechain.bundle.recipe import Recipe, Rule, load_recipe, parse_scheme
from anechain.bundle.spec import layer_tensors
from anechain.bundle.stored import compress, dense
from anechain.cli.console import open_engine
from anechain.cli.inspect import weight_bytes
from anechain.errors import BundleError, RequestError
from anechain.judge.lint import lint
from anechain.judge.oracle import Oracle
from anechain.run.chain import Chain
from tests.bundle_maker import SPECS, TensorSource, as_stored, deviation, make_bundle, tiny_source
from tests.tolerances import ENGINE_DEVIATION, QUANTIZE_HALF_STEP

RNG = np.random.default_rng(2)
MIXED = {
    "q": "palette8", "k": "palette6-group8", "v": "palette4", "o": "int4", "gate": "int4-block16", "up": "int8+rank4",
    "down": "palette6+rank3",
}  # fmt: skip


def rules(**schemes: str) -> tuple[Rule, ...]:
    return tuple(Rule(pattern, parse_scheme(text)) for pattern, text in schemes.items())


def mixed(**ends: str) -> Recipe:
    return Recipe("mixed", "fp16", (*rules(**{f"layers.*.{p}": s for p, s in MIXED.items()}), *rules(**ends)))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    recipe = mixed(head="palette4-group4", embed="palette8")
    return make_bundle(tiny_source("llama-biases"), tmp_path_factory.mktemp("mixed") / "bundle", recipe)


def functions(bundle: Bundle) -> list[Function]:
    return [f for path in (*bundle.block_paths, bundle.head_path) for f in read_program(path).functions.values()]


@pytest.mark.parametrize("engine", ["reference", "cpu"])
def test_both_engines_compute_what_is_stored(engine: str, bundle: Bundle) -> None:
    stored = as_stored(tiny_source("llama-biases"), bundle.recipe)
    ids = RNG.integers(0, bundle.spec.vocab_size, 45)
    chain = Chain(bundle, open_engine(engine))
    got = chain.feed(chain.start(), ids)[None]
    oracle = Oracle(stored)  # its vocabulary is one piece, which is stored as one matrix
    wanted = oracle.logits(oracle.forward([ids])[0][-1:])
    assert deviation(got, wanted) < ENGINE_DEVIATION
    plain = Oracle(tiny_source("llama-biases"))
    assert deviation(plain.logits(plain.forward([ids])[0][-1:]), wanted) > 5 * ENGINE_DEVIATION


def test_coremltools_reads_the_same_weights(bundle: Bundle, tmp_path: Path) -> None:
    copy = shutil.copytree(bundle.block_paths[0], tmp_path / "copy.mlpackage")  # opening one rewrites its manifest
    model = ct.models.MLModel(str(copy), skip_model_load=True)
    program = load_milproto(model.get_spec(), 9, model.weights_dir)
    stored, compared = package.block_weights(tiny_source("llama-biases"), bundle.recipe, bundle.spec, range(1)), 0
    for op in program.functions["decode"].operations:
        if op.op_type == "conv" and op.name.startswith("layers_0_") and "correction" not in op.name:
            weight = stored[f"layers.0.{op.name.split('_')[2]}"]
            base = getattr(weight, "base", weight)
            got = op.weight.op.materialized_val_inference()[:, :, 0, 0]
            np.testing.assert_array_equal(np.asarray(got, np.float16), dense(base))
            compared += 1
    assert compared == 7


def test_weight_bytes_are_those_of_the_footprint(bundle: Bundle) -> None:
    size = footprint(bundle.spec, bundle.recipe)
    found: dict[str, int] = {}
    for path in (*bundle.block_paths, bundle.head_path):
        for dtype, count in weight_bytes(list(read_program(path).functions.values())).items():
            found[dtype] = found.get(dtype, 0) + count
    assert set(found) == {"float16", "int8", "int4", "uint8", "uint6", "uint4"}
    embedding = sum(r.bytes for name, r in bundle.files.items() if name.startswith("embedding")) - 2 * 128
    per_layer = sum(shape[0] for shape in layer_tensors(bundle.spec).values() if len(shape) == 1)
    small = 2 * (per_layer * bundle.spec.n_layers + bundle.spec.hidden_size) + 2 * 2 * 32 * 32 * len(bundle.blocks)
    assert sum(found.values()) + embedding == size.bytes + small
    assert size.left == () and size.eight_bit_share > 0.9


def test_lint_names_the_forms(bundle: Bundle) -> None:
    found = {(f.rule, f.severity) for f in lint(bundle.path).findings}
    assert {("Q1", "E"), ("Q4", "I"), ("Q10", "E")} <= found


def test_a_palette_elsewhere_or_in_other_bits_is_found(bundle: Bundle) -> None:
    source, spec = tiny_source("llama-biases"), bundle.spec
    weights = package.block_weights(source, bundle.recipe, spec, range(spec.n_layers))
    good = bundle.block_paths[0], spec, bundle.recipe, range(spec.n_layers), bundle.context, bundle.prefill
    check_block(*good, weights)
    other = compress(source.tensor("layers.0.v") * 0.5, parse_scheme("palette4"))
    with pytest.raises(BundleError, match=r"layers\.0\.v \(lut\) has other values"):
        check_block(*good, {**weights, "layers.0.v": other})
    wide = replace(weights["layers.0.v"], bits=6)  # type: ignore[type-var]
    with pytest.raises(BundleError, match=r"layers\.0\.v is stored in 4 bits, not 6"):
        check_block(*good, {**weights, "layers.0.v": wide})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("embed", ["palette8", "fp16"])
def test_a_palette_as_the_embedding(embed: str, tied: bool, tmp_path: Path) -> None:
    spec = replace(SPECS["llama"], n_layers=1, layer_attention=(0,), tied=tied)
    recipe = Recipe("ends", "fp16", rules(embed=embed, head="palette8"))
    made = make_bundle(tiny_source(spec), tmp_path / "bundle", recipe, prefill=0)
    shared = tied and embed == "palette8"
    assert made.embedding == (HEAD if shared else TABLE) and (made.path / PALETTE).exists() == (
        embed == "palette8" and not shared
    )
    table = tiny_source(spec).tensor("embed")
    wanted = dense(compress(table, parse_scheme(embed))) if embed != "fp16" else table.astype(np.float16)
    rows = open_embedding(made).rows(np.arange(spec.vocab_size))
    np.testing.assert_array_equal(rows, wanted)


# -- field cases, group Q ----------------------------------------------------------------------------------------------


def test_q1_rows_of_zeros_and_of_almost_nothing(tmp_path: Path) -> None:
    source = tiny_source("llama")
    down = source.tensor("layers.0.down").copy()
    down[3], down[5] = 0, 1e-6 * np.sign(down[5])
    source = replace(source, tensors={**source.tensors, "layers.0.down": down})
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        bundle = make_bundle(source, tmp_path / "bundle", "int8", prefill=0)
        stored = quantize(down, parse_scheme("int8"))
    scales = [
        f.consts[op.inputs["scale"][0]]
        for f in functions(bundle)
        for op in f.ops
        if op.type == "constexpr_blockwise_shift_scale"
    ]
    assert len(scales) == 7 * source.spec.n_layers + 1 and all((s > 0).all() and np.isfinite(s).all() for s in scales)
    assert not stored.data[3].any()
    assert np.abs(dequantize(stored)[5] - down[5]).max() <= QUANTIZE_HALF_STEP * 2.0**-14


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("keep", [True, False])
def test_q3_embeddings_quantised_or_kept(keep: bool, tied: bool, tmp_path: Path) -> None:
    spec = replace(SPECS["qwen3"], tied=tied)
    recipe = Recipe("q3", "fp16", rules(head="int8", **({} if keep else {"embed": "int8"})))
    bundle = make_bundle(tiny_source(spec), tmp_path / "bundle", recipe, prefill=0)
    assert isinstance(package.head_weights(tiny_source(spec), recipe, spec)["head.0"], Quantized)
    assert bundle.embedding == (HEAD if tied and not keep else TABLE)
    assert open_embedding(bundle).data[0].dtype == (np.float16 if keep else np.int8)


def test_q5_only_matrices_are_compressed(bundle: Bundle) -> None:
    seen = 0
    for function in functions(bundle):
        for op in (op for op in function.ops if op.type.startswith("constexpr")):
            name = op.outputs[0].name
            readers = [r for r in function.ops if any(name in names for names in r.inputs.values())]
            assert [r.type for r in readers] == ["conv"] and readers[0].inputs["weight"] == (name,)
            seen += 1
        masks = [v for n, v in function.consts.items() if n.startswith("causal")]
        assert all(m.dtype == np.float16 for m in masks) and len(masks) == (function.name == "prefill")
    assert seen == 2 * 7 * bundle.spec.n_layers + 1


def test_q6_four_bits_for_an_older_system_are_refused_before_a_weight_is_read() -> None:
    class Closed(TensorSource):
        def tensor(self, name: str) -> np.ndarray:
            raise AssertionError(f"{name} was read")

    source = tiny_source("llama")
    closed = Closed(source.spec, source.tensors, text_files=source.text_files)
    with pytest.raises(RequestError) as caught:
        make_plan(closed, load_recipe("int4-block32"), 64, 32, "iOS17", None)
    assert (
        str(caught.value) == "this cannot be baked: --target iOS17 is not known (use macOS15, iOS18, macOS26, iOS26)."
    )


def test_q9_no_recipe_that_comes_along_stores_palettes_of_four_bits() -> None:
    for name in ("fp16", "int8", "int8-block32", "int8-ffn-qkv-only", "palette8", "int4-block32", "m8"):
        assert not any(r.scheme.kind == "palette" and r.scheme.bits == 4 for r in load_recipe(name).rules)


def test_q10_nothing_has_a_zero_point(bundle: Bundle) -> None:
    linear = [op for f in functions(bundle) for op in f.ops if op.type == "constexpr_blockwise_shift_scale"]
    assert linear and all(set(op.inputs) == {"data", "scale"} for op in linear)
