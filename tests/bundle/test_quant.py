"""quantize against coremltools' linear_quantize_weights: the weight goes through a whole package on both sides."""

import warnings
from pathlib import Path
from typing import Any

import coremltools as ct
import coremltools.optimize as cto
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from anechain.bundle.program import read_program
from anechain.bundle.quant import Quantized, dequantize, quantize
from anechain.bundle.recipe import FP16, Scheme, parse_scheme
from anechain.bundle.stored import storage_bytes
from anechain.errors import RecipeError
from tests.tolerances import QUANTIZE_HALF_STEP

CHANNEL = Scheme(8)
SMALLEST_NORMAL = 2.0**-14
TINY = 127 * SMALLEST_NORMAL  # a row whose largest magnitude is below this has a subnormal scale in coremltools
RNG = np.random.default_rng(5)


def block(size: int, bits: int = 8) -> Scheme:
    return Scheme(bits, "block", size)


def coremltools_quantized(weight: np.ndarray, scheme: Scheme, kind: str, folder: Path) -> Quantized:
    """What linear_quantize_weights makes of `weight` [O, I], used in a linear or in a 1x1 conv, as saved."""
    o, i = weight.shape
    half = weight.astype(np.float16)

    @mb.program(
        input_specs=[mb.TensorSpec((1, i) if kind == "linear" else (1, i, 1, 1), types.fp16)],
        opset_version=ct.target.iOS18,
    )
    def program(x: Any) -> Any:
        if kind == "linear":
            return mb.linear(x=x, weight=half, name="y")
        return mb.conv(x=x, weight=half.reshape(o, i, 1, 1), pad_type="valid", name="y")

    options = {"minimum_deployment_target": ct.target.iOS18, "pass_pipeline": ct.PassPipeline.EMPTY}
    model = ct.convert(program, skip_model_load=True, **options)
    grain = {"channel": "per_channel", "block": "per_block"}[scheme.granularity]
    config = cto.coreml.OpLinearQuantizerConfig(
        mode="linear_symmetric",
        dtype=f"int{scheme.bits}",
        granularity=grain,
        block_size=scheme.block or 32,
        weight_threshold=0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # it divides by scales of zero, and overflows
        done = cto.coreml.linear_quantize_weights(model, cto.coreml.OptimizationConfig(global_config=config))
    done.save(str(folder / "model.mlpackage"))
    main = read_program(folder / "model.mlpackage").functions["main"]
    op = next(op for op in main.ops if op.type == "constexpr_blockwise_shift_scale")
    assert set(op.inputs) == {"data", "scale"}
    data, scale = (main.consts[op.inputs[k][0]] for k in ("data", "scale"))
    return Quantized(data.reshape(o, i), scale.reshape(o, -1), scheme.bits)


def outliers(shape: tuple[int, int]) -> np.ndarray:
    weight = RNG.standard_normal(shape) * 0.02
    weight[RNG.integers(0, shape[0], 9), RNG.integers(0, shape[1], 9)] = 60.0
    return weight


def ties(shape: tuple[int, int]) -> np.ndarray:
    """Quotients that lie half way between two steps: the maximum is 127 and everything else k + 1/2."""
    weight = RNG.integers(-126, 126, shape) + 0.5
    weight[:, ::32] = 127.0
    return weight * 2.0**-6


WEIGHTS = {
    "random": lambda shape: RNG.standard_normal(shape) * 0.05,
    "uniform": lambda shape: RNG.uniform(-1, 1, shape),
    "outliers": outliers,
    "large": lambda shape: RNG.uniform(-32000, 32000, shape),
    "small": lambda shape: np.where(np.arange(shape[1]) % 16 == 0, 0.0081, RNG.uniform(-0.008, 0.008, shape)),
    "one sign": lambda shape: -np.abs(RNG.standard_normal(shape)),
    "ties": ties,
    "mixed rows": lambda shape: RNG.standard_normal(shape) * np.logspace(-1, 3, shape[0])[:, None],
}


@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize("scheme", [CHANNEL, block(32), block(16), Scheme(4), block(32, 4)], ids=str)
def test_equals_coremltools_bit_for_bit(scheme: Scheme, kind: str, tmp_path: Path) -> None:
    weights = {name: make((48, 96)).astype(np.float32) for name, make in WEIGHTS.items()}
    weight = np.concatenate(list(weights.values()))  # rows are quantised apart, so that one package holds every case
    theirs = coremltools_quantized(weight, scheme, kind, tmp_path)
    ours = quantize(weight, scheme)
    assert ours.scale.shape == theirs.scale.shape and ours.data.dtype == theirs.data.dtype == np.int8
    normal = (theirs.scale >= SMALLEST_NORMAL) & np.isfinite(theirs.scale)
    wide = np.repeat(normal, 96 // normal.shape[1], axis=1)
    for number, name in enumerate(weights):
        rows = slice(48 * number, 48 * number + 48)
        here, everywhere = normal[rows], wide[rows]
        assert here.mean() > 0.9, f"{name}: too few scales are normal numbers to compare anything"
        assert np.array_equal(ours.scale[rows].view(np.uint16)[here], theirs.scale[rows].view(np.uint16)[here]), name
        assert np.array_equal(ours.data[rows][everywhere], theirs.data[rows][everywhere]), name
        assert np.abs(ours.data[rows]).max() == 2 ** (scheme.bits - 1) - 1, name


def test_float32_and_fp16_of_the_same_weight_are_quantized_alike() -> None:
    weight = RNG.standard_normal((8, 64)).astype(np.float32)
    single, double, half = (quantize(weight.astype(t), CHANNEL) for t in (np.float32, np.float64, np.float16))
    for other in (double, half):
        assert np.array_equal(single.data, other.data) and np.array_equal(single.scale, other.scale)


def test_many_slabs_are_the_rows_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = RNG.standard_normal((37, 64)).astype(np.float32)
    whole, back = quantize(weight, block(32)), dequantize(quantize(weight, block(32)))
    monkeypatch.setattr("anechain.bundle.quant._SLAB", 5 * 64)
    parts = quantize(weight, block(32))
    assert np.array_equal(whole.data, parts.data) and np.array_equal(whole.scale, parts.scale)
    assert np.array_equal(back, dequantize(parts))


def test_rows_wider_than_a_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = RNG.standard_normal((3, 64))
    expected = quantize(weight, CHANNEL)
    monkeypatch.setattr("anechain.bundle.quant._SLAB", 63)
    assert np.array_equal(quantize(weight, CHANNEL).data, expected.data)
    assert np.array_equal(dequantize(quantize(weight, CHANNEL)), dequantize(expected))


def test_scales_that_cut_off_the_largest_weights_saturate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method may choose smaller scales than the largest weight asks for; an integer must never wrap around."""
    monkeypatch.setattr(
        "anechain.bundle.quant._scale_of", lambda blocks, bits: np.full(blocks.shape[:2], 2.0**-7, np.float16)
    )
    quantized = quantize(np.array([[1.0, -1.0, 300.0, -300.0, 0.5]]), CHANNEL)
    assert quantized.data.tolist() == [[127, -127, 127, -127, 64]]


# -- where coremltools' scale is no normal number ----------------------------------------------------------------------


def steps_off(weight: np.ndarray, quantized: Quantized) -> np.ndarray:
    """Per row and block: the largest error, in steps, of what the integers and scales say exactly."""
    i = weight.shape[1]
    scale = np.repeat(quantized.scale.astype(np.float64), i // quantized.scale.shape[1], axis=1)
    return np.abs(weight.astype(np.float16) - quantized.data * scale) / scale


@pytest.mark.parametrize(
    ("scheme", "magnitude"),
    [
        *((s, m) for s in (CHANNEL, block(32)) for m in (0.0077, 1e-3, 1e-5, 6e-8)),
        (Scheme(4), 4e-4),
        (block(32, 4), 1e-5),
    ],
    ids=str,
)
def test_tiny_rows_take_the_smallest_normal_scale(scheme: Scheme, magnitude: float, tmp_path: Path) -> None:
    weight = RNG.uniform(-magnitude, magnitude, (16, 64))
    weight[:, ::16] = magnitude
    theirs = coremltools_quantized(weight, scheme, "linear", tmp_path)
    ours = quantize(weight, scheme)
    assert np.all(theirs.scale < SMALLEST_NORMAL), "coremltools writes subnormal scales, or zeros, here"
    assert np.all(ours.scale == SMALLEST_NORMAL)
    assert steps_off(weight, ours).max() <= 0.5


@pytest.mark.parametrize("bits", [8, 4])
def test_zero_rows_have_scale_one_where_coremltools_has_zero(bits: int, tmp_path: Path) -> None:
    weight = RNG.standard_normal((4, 64))
    weight[1] = 0
    weight[2, 32:] = -0.0
    theirs = coremltools_quantized(weight, block(32, bits), "conv", tmp_path)
    ours = quantize(weight, block(32, bits))
    zero = np.array([[0, 0], [1, 1], [0, 1], [0, 0]], bool)
    assert np.all(theirs.scale[zero] == 0) and np.all(ours.scale[zero] == 1)
    assert not ours.data[1].any() and not ours.data[2, 32:].any()
    assert np.array_equal(ours.scale[~zero], theirs.scale[~zero])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("largest", [32800.0, 65504.0])
def test_large_rows_stay_finite_where_coremltools_overflows(largest: float, bits: int, tmp_path: Path) -> None:
    weight = RNG.uniform(-largest, largest, (4, 64))
    weight[:, 3], weight[:, 5] = largest, -largest
    theirs = coremltools_quantized(weight, Scheme(bits), "linear", tmp_path)
    ours = quantize(weight, Scheme(bits))
    top = 2 ** (bits - 1) - 1
    assert np.all(np.isinf(theirs.scale)), "it takes max - min, which is beyond fp16 here"
    assert np.all(np.isfinite(ours.scale)) and np.all(np.isfinite(dequantize(ours)))
    assert steps_off(weight, ours).max() <= QUANTIZE_HALF_STEP
    assert np.all(ours.data[:, 3] == top) and np.all(ours.data[:, 5] == -top)


@given(
    arrays(np.float16, (3, 32), elements=st.floats(-65504, 65504, width=16, allow_subnormal=True)),
    st.sampled_from([CHANNEL, block(8), Scheme(4), block(8, 4)]),
    st.integers(-24, 0),
)
def test_any_finite_weight_is_within_half_a_step(weight: np.ndarray, scheme: Scheme, exponent: int) -> None:
    weight = np.ldexp(weight.astype(np.float32), exponent)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantized = quantize(weight, scheme)
        back = dequantize(quantized)
    assert np.all(quantized.scale >= SMALLEST_NORMAL) and np.all(np.isfinite(back))
    assert np.abs(quantized.data.astype(int)).max() <= 2 ** (scheme.bits - 1) - 1
    assert steps_off(weight, quantized).max() <= QUANTIZE_HALF_STEP


# -- back --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", [CHANNEL, block(16)], ids=str)
def test_dequantize_equals_coremltools(scheme: Scheme) -> None:
    quantized = quantize(RNG.standard_normal((24, 64)) * 0.3, scheme)

    @mb.program(input_specs=[mb.TensorSpec((24, 64), types.fp16)], opset_version=ct.target.iOS18)
    def program(x: Any) -> Any:
        weight = mb.constexpr_blockwise_shift_scale(data=quantized.data, scale=quantized.scale, name="w")
        return mb.add(x=x, y=weight)

    op = next(op for op in program.functions["main"].operations if op.op_type == "constexpr_blockwise_shift_scale")
    theirs = op.materialized_val_inference()
    back = dequantize(quantized)
    assert back.dtype == np.float16 and back.shape == (24, 64)
    assert np.array_equal(back.view(np.uint16), np.asarray(theirs).view(np.uint16))


# -- sizes and refusals ------------------------------------------------------------------------------------------------


def test_storage_bytes_is_what_the_arrays_take() -> None:
    weight = RNG.standard_normal((6, 96))
    assert storage_bytes((6, 96), FP16) == weight.astype(np.float16).nbytes
    for scheme, scales in [(CHANNEL, 6), (block(32), 18)]:
        quantized = quantize(weight, scheme)
        assert quantized.scale.shape == (6, scales // 6)
        assert storage_bytes((6, 96), scheme) == quantized.data.nbytes + quantized.scale.nbytes == 576 + 2 * scales
    assert storage_bytes((6, 96), block(32, 4)) == 288 + 2 * 18
    palettes = [("palette8", 576 + 512), ("palette6", 432 + 128), ("palette4-group2", 288 + 3 * 32)]
    for text, size in palettes:
        assert storage_bytes((6, 96), parse_scheme(text)) == size
    assert storage_bytes((6, 96), parse_scheme("int8+rank3")) == 576 + 12 + 2 * 3 * (6 + 96)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 65536.0])
def test_weight_that_is_not_finite_in_fp16(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anechain.bundle.quant._SLAB", 64)
    weight = np.zeros((5, 64), np.float32)
    weight[3, 7] = value
    with warnings.catch_warnings(), pytest.raises(RecipeError) as caught:
        warnings.simplefilter("error")
        quantize(weight, CHANNEL, "layers.3.down")
    assert str(caught.value) == (
        f"layers.3.down cannot be quantised, because the value {np.float32(value)} at row 3, column 7 "
        "is not finite in fp16: correct the checkpoint."
    )


@pytest.mark.parametrize(
    ("shape", "scheme", "text"),
    [
        ((4, 48), block(32), "head has 48 inputs, which blocks of 32 do not divide: use a block that divides them."),
        ((4, 8), FP16, "head cannot be quantised as fp16: use int8, int4 or one of them with -blockN."),
        ((4, 8), Scheme(6), "head cannot be quantised as int6: use int8, int4 or one of them with -blockN."),
        (
            (4, 8),
            Scheme(8, "tensor", kind="palette"),
            "head cannot be quantised as palette8: use int8, int4 or one of them with -blockN.",
        ),
        ((4,), CHANNEL, "head cannot be quantised, because it has the shape [4]: keep it fp16."),
        ((4, 0), CHANNEL, "head cannot be quantised, because it has the shape [4, 0]: keep it fp16."),
    ],
)
def test_refusals(shape: tuple[int, ...], scheme: Scheme, text: str) -> None:
    with pytest.raises(RecipeError) as caught:
        quantize(np.ones(shape, np.float32), scheme, "head")
    assert str(caught.value) == text
