"""Palettes against coremltools: the packing bit for bit with the same table, the table by what it costs."""

from pathlib import Path
from typing import Any

import coremltools as ct
import coremltools.optimize as cto
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from scipy.cluster.vq import kmeans2

from anechain.bundle.palette import Palettized, depalettize, nearest, palettize
from anechain.bundle.program import read_program
from anechain.bundle.recipe import FP16, Scheme, parse_scheme
from anechain.errors import RecipeError
from tests.tolerances import PALETTE_COST

RNG = np.random.default_rng(11)


def random(shape: tuple[int, int]) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32) * 0.05


def outliers(shape: tuple[int, int]) -> np.ndarray:
    weight = random(shape)
    weight[RNG.integers(0, shape[0], 9), RNG.integers(0, shape[1], 9)] = 3.0
    return weight


def coremltools_palettized(weight: np.ndarray, ours: Palettized, folder: Path) -> Palettized:
    """What palettize_weights stores of `weight` when it is given our tables and places, group by group."""
    o, i = weight.shape
    half = weight.astype(np.float16)

    @mb.program(input_specs=[mb.TensorSpec((1, i, 1, 1), types.fp16)], opset_version=ct.target.iOS18)
    def program(x: Any) -> Any:
        return mb.conv(x=x, weight=half.reshape(o, i, 1, 1), pad_type="valid", name="y")

    options = {"minimum_deployment_target": ct.target.iOS18, "pass_pipeline": ct.PassPipeline.EMPTY}
    model = ct.convert(program, skip_model_load=True, **options)
    turn = iter(range(len(ours.table)))

    def given(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        group = next(turn)
        part = np.split(ours.indices, len(ours.table))[group]
        assert values.size == part.size
        return ours.table[group], part.ravel()

    config = cto.coreml.OpPalettizerConfig(
        mode="custom", lut_function=given, granularity="per_grouped_channel" if len(ours.table) > 1 else "per_tensor",
        group_size=o // len(ours.table), weight_threshold=0,
    )  # fmt: skip
    done = cto.coreml.palettize_weights(model, cto.coreml.OptimizationConfig(global_config=config))
    done.save(str(folder / "model.mlpackage"))
    main = read_program(folder / "model.mlpackage").functions["main"]
    op = next(op for op in main.ops if op.type == "constexpr_lut_to_dense")
    indices, table = (main.consts[op.inputs[k][0]] for k in ("indices", "lut"))
    assert (ours.bits == 8) == (op.inputs["indices"][0] not in main.packed)
    return Palettized(indices.reshape(o, i), table.reshape(len(ours.table), -1), ours.bits)


@pytest.mark.parametrize("make", [random, outliers])
@pytest.mark.parametrize("text", ["palette8", "palette6", "palette4", "palette8-group8", "palette4-group16"])
def test_packing_equals_coremltools_bit_for_bit(text: str, make: Any, tmp_path: Path) -> None:
    weight = make((48, 96))
    ours = palettize(weight, parse_scheme(text))
    theirs = coremltools_palettized(weight, ours, tmp_path)
    assert ours.table.shape == theirs.table.shape and ours.table.dtype == theirs.table.dtype == np.float16
    np.testing.assert_array_equal(ours.indices, theirs.indices)
    np.testing.assert_array_equal(ours.table.view(np.uint16), theirs.table.view(np.uint16))


@pytest.mark.parametrize("make", [random, outliers])
@pytest.mark.parametrize("bits", [8, 6, 4])
def test_tables_cost_no_more_than_scipys(bits: int, make: Any) -> None:
    weight = make((64, 256)).astype(np.float16).astype(np.float32)
    ours = depalettize(palettize(weight, Scheme(bits, "tensor", kind="palette")))
    centres, place = kmeans2(weight.reshape(-1, 1).astype(np.float64), 2**bits, iter=30, minit="++", rng=0)
    theirs = centres[place].reshape(weight.shape)
    cost, other = (float(np.mean((x - weight) ** 2)) for x in (ours.astype(np.float32), theirs))
    assert 0 < cost < PALETTE_COST * other


def test_every_weight_has_its_nearest_entry_and_rows_their_groups_table() -> None:
    weight = outliers((24, 40)) * np.repeat([0.1, 1.0, 10.0], 8)[:, None]
    palettized = palettize(weight, Scheme(4, "group", 8, "palette"))
    assert palettized.table.shape == (3, 16) and np.all(np.diff(palettized.table.astype(float)) >= 0)
    assert len({row.tobytes() for row in palettized.table}) == 3
    half = weight.astype(np.float16).astype(np.float32)
    distances = np.abs(half[:, :, None] - np.repeat(palettized.table, 8, axis=0)[:, None].astype(np.float32))
    error = np.abs(half - depalettize(palettized).astype(np.float32))
    np.testing.assert_array_equal(error, distances.min(axis=2))


def test_few_values_lose_nothing() -> None:
    weight = RNG.choice(np.array([-1.5, 0.0, 0.25, 7.0], np.float32), (6, 32))
    for weights in (weight, np.zeros((4, 8), np.float32)):
        palettized = palettize(weights, Scheme(4, "tensor", kind="palette"))
        np.testing.assert_array_equal(depalettize(palettized), weights.astype(np.float16))
        assert palettized.table.shape == (1, 16) and np.isfinite(palettized.table).all()


def test_half_way_is_the_lower_entry() -> None:
    table = np.array([-1, 0, 1, 3], np.float16)
    assert nearest(np.array([-5.0, -0.5, 0.5, 0.6, 2.0, 2.1, 9.0]), table).tolist() == [0, 0, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("shape", "scheme", "text"),
    [
        ((6, 8), parse_scheme("palette4-group4"),
         "head has 6 outputs, which groups of 4 do not divide: use a group that divides them."),
        ((6, 8), FP16, "head cannot be palettised as fp16: use palette8, palette6, palette4 or with -groupN."),
        ((6, 8), Scheme(2, "tensor", kind="palette"), "head cannot be palettised as palette2: use palette8, palette6, "
         "palette4 or with -groupN."),
        ((6,), parse_scheme("palette8"), "head cannot be quantised, because it has the shape [6]: keep it fp16."),
    ],
)  # fmt: skip
def test_refusals(shape: tuple[int, ...], scheme: Scheme, text: str) -> None:
    with pytest.raises(RecipeError) as caught:
        palettize(np.ones(shape, np.float32), scheme, "head")
    assert str(caught.value) == text


def test_a_value_that_is_not_finite() -> None:
    weight = np.zeros((4, 8), np.float32)
    weight[3, 2] = np.inf
    with pytest.raises(RecipeError, match="head cannot be quantised, because the value inf at row 3, column 2 is not"):
        palettize(weight, parse_scheme("palette8-group2"), "head")
