"""The embedding: rows of the table as they are stored, wherever they are stored, scaled and rounded once."""

import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from anechain.bundle.embedding import SCALE, TABLE, open_embedding, write_embedding
from anechain.bundle.manifest import HEAD, Bundle, open_bundle
from anechain.bundle.quant import quantize
from anechain.bundle.recipe import Recipe, Rule, Scheme, load_recipe
from anechain.bundle.spec import ModelSpec
from anechain.errors import BundleError
from tests.bundle_maker import SPECS, make_bundle, tiny_source
from tests.tolerances import QUANTIZE_HALF_STEP

SMALL = replace(SPECS["llama"], n_layers=1, layer_attention=(0,))
TIED = replace(SMALL, tied=True)
# Three pieces of 13 334 rows, the last of them filled up with one row of zeros.
PIECES = replace(TIED, vocab_size=40001, hidden_size=32)
BLOCKS = Recipe("blocks", "fp16", tuple(Rule(m, Scheme(8, "block", 16)) for m in ("embed", "head")))
CHANNELS = load_recipe("int8")


def bundle_of(spec: ModelSpec, recipe: Recipe | str, tmp_path: Path) -> tuple[Bundle, np.ndarray]:
    """A bundle, and the table [V, H] f32 that it was made from."""
    source = tiny_source(spec)
    return make_bundle(source, tmp_path / "bundle", recipe, prefill=0), source.tensor("embed")


def ids_of(spec: ModelSpec) -> np.ndarray:
    """First, last, both sides of every edge, in no order, one twice."""
    edges = [13333, 13334, 26667, 26668, 40000]
    return np.array([e for e in (5, 0, spec.vocab_size - 1, 7, 7, *edges, 1) if e < spec.vocab_size])


@pytest.mark.parametrize(
    ("spec", "recipe", "place"),
    [
        (SMALL, "fp16", TABLE),
        (TIED, "fp16", HEAD),
        (PIECES, "fp16", HEAD),
        (TIED, "m8", TABLE),  # the head of a program in fp32 is fp32, the table never
        (SMALL, Recipe("head", "fp16", (Rule("head", Scheme(8)),)), TABLE),
        (TIED, Recipe("head", "fp16", (Rule("head", Scheme(8)),)), TABLE),
    ],
)
def test_rows_of_a_plain_table(spec: ModelSpec, recipe: Recipe | str, place: str, tmp_path: Path) -> None:
    bundle, table = bundle_of(spec, recipe, tmp_path)
    assert bundle.embedding == place and not (bundle.path / SCALE).exists()
    ids = ids_of(spec)
    rows = open_embedding(bundle).rows(ids)
    assert rows.dtype == np.float16 and rows.shape == (len(ids), spec.hidden_size)
    np.testing.assert_array_equal(rows, table[ids].astype(np.float16))
    assert np.ptp(rows.astype(np.float32), axis=1).min() > 0.5  # no row of zeros


@pytest.mark.parametrize(
    ("spec", "recipe", "place"),
    [
        (SMALL, CHANNELS, TABLE),
        (SMALL, BLOCKS, TABLE),
        (TIED, CHANNELS, HEAD),
        (TIED, BLOCKS, HEAD),
        (PIECES, CHANNELS, HEAD),
        (PIECES, BLOCKS, HEAD),
        (TIED, Recipe("embed", "fp16", (Rule("embed", Scheme(8)),)), TABLE),
    ],
)
def test_rows_of_a_quantised_table(spec: ModelSpec, recipe: Recipe, place: str, tmp_path: Path) -> None:
    bundle, table = bundle_of(spec, recipe, tmp_path)
    assert bundle.embedding == place and (bundle.path / SCALE).exists() == (place == TABLE)
    ids = ids_of(spec)
    rows = open_embedding(bundle).rows(ids)
    stored = quantize(table, recipe.scheme_for("embed", table.size))
    scale = np.repeat(stored.scale.astype(np.float32), spec.hidden_size // stored.scale.shape[1], axis=1)[ids]
    np.testing.assert_array_equal(rows, (stored.data[ids] * scale).astype(np.float16))
    error = np.abs(rows.astype(np.float32) - table[ids])
    rounding = np.abs(table[ids]) * 2.0**-11 * 2  # the table's own to fp16 and the product's
    assert (error <= QUANTIZE_HALF_STEP * scale + rounding).all()
    assert (error > 0).mean() > 0.5


def test_every_row_is_found_where_the_head_holds_it(tmp_path: Path) -> None:
    bundle, table = bundle_of(replace(PIECES, vocab_size=16400, hidden_size=32), "fp16", tmp_path)
    np.testing.assert_array_equal(open_embedding(bundle).rows(np.arange(16400)), table.astype(np.float16))
    assert len(open_embedding(bundle).data) == 2


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recipe", ["fp16", "int8"])
def test_multiplier_is_applied_in_fp32_to_the_row_as_stored(recipe: str, tied: bool, tmp_path: Path) -> None:
    spec = replace(SMALL, tied=tied, embedding_scale=11.3137085, stream_scale=0.25)
    bundle, table = bundle_of(spec, recipe, tmp_path)
    ids = ids_of(spec)
    plain = replace(open_embedding(bundle), multiplier=1.0).rows(ids)
    scaled = open_embedding(bundle).rows(ids)
    np.testing.assert_array_equal(scaled, (plain.astype(np.float32) * np.float32(11.3137085 * 0.25)).astype(np.float16))
    nonzero = plain != 0
    assert nonzero.mean() > 0.9
    assert np.abs(scaled[nonzero] / plain[nonzero] - 2.828).max() < 0.01
    if recipe == "fp16":
        np.testing.assert_array_equal(plain, table[ids].astype(np.float16))


def test_what_fp16_cannot_hold_becomes_infinite_in_silence(tmp_path: Path) -> None:
    bundle, _ = bundle_of(replace(SMALL, embedding_scale=1e6), "fp16", tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = open_embedding(bundle).rows(np.array([1]))
    assert np.isinf(rows).any() and not np.isnan(rows).any()


def test_no_id_gives_no_row(tmp_path: Path) -> None:
    bundle, _ = bundle_of(SMALL, "fp16", tmp_path)
    assert open_embedding(bundle).rows(np.array([], np.int64)).shape == (0, 64)


def test_tables_stay_in_their_files(tmp_path: Path) -> None:
    for spec, recipe in ((SMALL, "fp16"), (SMALL, "int8"), (PIECES, "int8")):
        bundle, _ = bundle_of(spec, recipe, tmp_path / f"{spec.vocab_size}-{recipe}")
        embedding = open_embedding(bundle)
        for array in (*embedding.data, *embedding.scale):
            mapped = array
            while mapped is not None and not isinstance(mapped, np.memmap):
                mapped = mapped.base
            assert mapped is not None, "an array was read into memory"


def test_int8_takes_two_files(tmp_path: Path) -> None:
    table = tiny_source(SMALL).tensor("embed")
    write_embedding(tmp_path, quantize(table, Scheme(8)))
    assert {f.name for f in tmp_path.iterdir()} == {TABLE, SCALE}
    assert np.load(tmp_path / TABLE).dtype == np.int8 and np.load(tmp_path / SCALE).dtype == np.float16
    assert np.load(tmp_path / TABLE).shape == (320, 64) and np.load(tmp_path / SCALE).shape == (320, 1)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return bundle_of(SMALL, "int8", tmp_path_factory.mktemp("untied"))[0]


def test_a_table_of_another_shape(untied: Bundle, tmp_path: Path) -> None:
    path = Path(shutil.copytree(untied.path, tmp_path / "bundle"))
    bundle = replace(untied, path=path)
    for shape in ((319, 64), (320, 32)):
        np.save(path / TABLE, np.zeros(shape, np.float16))
        with pytest.raises(BundleError) as caught:
            open_embedding(bundle)
        wanted = f"the embedding of {path} has shape {shape} instead of (320, 64): bake it again."
        assert str(caught.value) == wanted


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.zeros((320, 64), np.float32), "holds float32 [320, 64], which is no table"),
        (np.zeros(320, np.int8), "holds int8 [320], which is no table"),
        (np.array([{}], dtype=object), "cannot be read ("),
    ],
)
def test_a_table_of_something_else(array: np.ndarray, reason: str, untied: Bundle, tmp_path: Path) -> None:
    path = Path(shutil.copytree(untied.path, tmp_path / "bundle"))
    np.save(path / TABLE, array)
    with pytest.raises(BundleError) as caught:
        open_embedding(replace(untied, path=path))
    assert str(caught.value).startswith(f"{path / TABLE} {reason}")
    assert str(caught.value).endswith(": bake it again.")


@pytest.mark.parametrize("file", [TABLE, SCALE])
def test_a_table_whose_header_is_damaged(file: str, untied: Bundle, tmp_path: Path) -> None:
    path = Path(shutil.copytree(untied.path, tmp_path / "bundle"))
    (path / file).write_bytes(b"?" + (path / file).read_bytes()[1:])
    bundle = open_bundle(path)  # the size is right
    with pytest.raises(BundleError) as caught:
        open_embedding(bundle)
    assert str(caught.value).startswith(f"{path / file} cannot be read (")


def test_a_head_that_is_not_the_manifests(tmp_path: Path) -> None:
    bundle, _ = bundle_of(TIED, "fp16", tmp_path)
    other = replace(bundle, spec=replace(bundle.spec, vocab_size=20000))  # two pieces
    with pytest.raises(BundleError, match=r"head\.mlpackage does not hold the head that its manifest describes: bake"):
        open_embedding(other)
