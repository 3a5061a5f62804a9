"""The kernels of the native library against numpy: integers bit for bit, floats within what float32 sums are off by."""

import importlib.machinery
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from anechain.errors import EngineError
from anechain.run import native
from anechain.run import tape_graph as kinds
from anechain.run.tape_plan import MAX_DIMS, Code
from tests.run.native_case import aligned, needs_native, run
from tests.tolerances import OP_FP32

Array = np.ndarray
F32, I32 = np.float32, np.int32
pytestmark = needs_native
SHAPES = [(1, 64, 32), (1, 200, 96), (3, 70, 64), (7, 130, 96), (64, 128, 256)]  # tokens, rows, depth


def packed8(weights: Array, padded: int) -> Array:
    """[N, K] i8 -> [N / 64][padded / 4][64][4] of w + 128, in numpy."""
    rows, depth = weights.shape
    full = np.zeros((-(-rows // 64) * 64, padded), np.int16)
    full[:rows, :depth] = weights
    return (full + 128).astype(np.uint8).reshape(-1, 64, padded // 4, 4).transpose(0, 2, 1, 3)


def rounded(x: Array, bits: int, group: int) -> tuple[Array, Array]:
    """[T, K] f32 -> integers of up to `bits` bits and scales [T, K / group], as the engine defines them."""
    steps = F32({8: 127, 15: 16256}[bits])
    grouped = x.reshape(len(x), -1, group)
    largest = np.abs(grouped).max(axis=2, keepdims=True)
    inverse = np.divide(steps, largest, out=np.zeros_like(largest), where=largest > 0)
    return np.rint(grouped * inverse).astype(I32).reshape(x.shape), (largest / steps)[:, :, 0]


def at_once(tokens: int, bits: int) -> int:
    return 1 if tokens == 1 else {8: 6, 15: 3}[bits]


def quantise(x: Array, bits: int, group: int, padded: int) -> list[Array]:
    tokens, r = len(x), at_once(len(x), bits)
    size = -(-tokens // r) * r * padded
    made = [aligned((size,), np.int8), aligned((size,), np.int8)]
    made += [aligned((tokens, padded // group), F32), aligned((tokens, padded // group), I32)]
    run(Code.QUANTISE, bits > 8, tokens, x.shape[1], padded, group, x, x.shape[1], x.shape[1], 0, *made)
    return made


@pytest.mark.parametrize(("rows", "depth"), [(64, 64), (70, 33), (130, 96), (16, 200)])
def test_packing(rows: int, depth: int) -> None:
    weights = np.random.default_rng(0).integers(-128, 128, (rows, depth)).astype(np.int8)
    padded = -(-depth // 32) * 32
    expected = packed8(weights, padded)
    out = aligned(expected.shape, np.uint8)
    run(Code.PACK8, rows, depth, padded, weights, out)
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_packing_of_floats(dtype: type) -> None:
    weights = np.random.default_rng(0).standard_normal((21, 50)).astype(dtype)
    out = aligned((2, 50, 16), dtype)
    out[...] = np.nan
    run(Code.PACK_FLOAT, weights.itemsize, 21, 50, weights, out)
    full = np.zeros((32, 50), dtype)
    full[:21] = weights
    assert np.array_equal(out, full.reshape(2, 16, 50).transpose(0, 2, 1))


@pytest.mark.parametrize("bits", [8, 15])
@pytest.mark.parametrize("tokens", [1, 2, 13])
def test_rounding_of_activations(tokens: int, bits: int) -> None:
    """With a group of zeros, one of a massive value, and a depth that ends inside a group."""
    x = np.random.default_rng(1).standard_normal((tokens, 90)).astype(F32)
    x[:, 32:64] = 0
    x[0, 70] = 3e4
    high, low, scales, starts = quantise(x, bits, 32, 96)
    wide = np.zeros((tokens, 96), F32)
    wide[:, :90] = x
    integers, expected = rounded(wide, bits, 32)
    r = at_once(tokens, bits)

    def plain(packed: Array) -> Array:
        return packed.reshape(3, -1, 8, r, 4).transpose(1, 3, 0, 2, 4).reshape(-1, 96)[:tokens].astype(I32)

    assert np.array_equal(plain(high) * 128 + plain(low) if bits > 8 else plain(high), integers)
    assert np.array_equal(scales, expected)
    assert np.array_equal(starts, -128 * integers.reshape(tokens, 3, 32).sum(axis=2))
    assert np.abs(integers).max() == {8: 127, 15: 16256}[bits]


@pytest.mark.parametrize("group", [32, 64])
def test_rounding_of_activations_that_lie_in_pieces(group: int) -> None:
    """What attention leaves: each token's 3 pieces of 48 numbers are rows of another axis, and groups cross them."""
    pieces = np.random.default_rng(5).standard_normal((3, 7, 48)).astype(F32)  # [piece, token, 48]
    x, padded = np.ascontiguousarray(pieces.transpose(1, 0, 2).reshape(7, 144)), 192
    wide = np.zeros((7, padded), F32)
    wide[:, :144] = x
    expected = quantise(wide, 8, group, padded)
    made = [np.zeros_like(array) for array in expected]
    made[0], made[1] = aligned(made[0].shape, np.int8), aligned(made[1].shape, np.int8)
    run(Code.QUANTISE, False, 7, 144, padded, group, pieces, 48, 48, 7 * 48, *made)
    assert all(np.array_equal(a, b) for a, b in zip(made, expected, strict=True)) and made[0].any()


@pytest.mark.parametrize("kind", [kinds.SIGMOID, kinds.SILU])
def test_sigmoids_to_the_ends_of_float32(kind: int) -> None:
    x = np.concatenate([np.linspace(-130, 130, 4001), [0, -0.0, 3e38, -3e38, np.inf, 1e-30]]).astype(F32)
    out = np.full(x.size, np.nan, F32)
    words = [1, x.size, *[1] * (MAX_DIMS - 1)]
    strides = [1, *[0] * (MAX_DIMS - 1)]
    run(Code.ELEMENT, kind, 0, *words, out, *strides, 0, x, *strides, 0, x, *strides, 0)
    with np.errstate(over="ignore"):
        expected = 1 / (1 + np.exp(-x.astype(np.float64)))
    expected *= x.astype(np.float64) if kind == kinds.SILU else 1
    np.testing.assert_allclose(out, expected, rtol=OP_FP32, atol=1e-35)


@pytest.mark.parametrize("bits", [8, 15])
@pytest.mark.parametrize(("tokens", "rows", "depth"), SHAPES)
def test_products_of_integers_are_exact(tokens: int, rows: int, depth: int, bits: int) -> None:
    """All scales are 1 and one group fills the depth of at most 256: sums below 2^24 are whole numbers in float32."""
    rng = np.random.default_rng(2)
    weights = rng.integers(-128, 128, (rows, depth)).astype(np.int8)
    most = 127 if bits == 8 else 2**23 // (128 * depth)
    x = rng.integers(-most, most + 1, (tokens, depth))
    high, low = (x, x) if bits == 8 else ((x + 64) >> 7, x - ((x + 64) >> 7) * 128)
    r = at_once(tokens, bits)
    padding = np.zeros((-tokens % r, depth), np.int64)

    def laid(part: Array) -> Array:
        full = np.concatenate([part, padding]).reshape(-1, r, depth // 4, 4).transpose(0, 2, 1, 3)
        made = aligned(full.shape, np.int8)
        made[...] = full
        return made

    matrix = aligned(packed8(weights, depth).shape, np.uint8)
    matrix[...] = packed8(weights, depth)
    starts, ones = (-128 * x.sum(axis=1)).astype(I32), np.ones(tokens, F32)
    bias, out = np.arange(rows, dtype=F32), np.full((tokens, rows + 3), np.nan, F32)
    words = (bits > 8, tokens, rows, depth, depth, matrix, laid(high), laid(low), ones, starts, None, None, bias)
    run(Code.LINEAR8, *words, out, rows + 3)
    assert np.array_equal(out[:, :rows], (x @ weights.T.astype(np.int64) + np.arange(rows)).astype(F32))
    assert np.isnan(out[:, rows:]).all(), "it writes beyond its rows"


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("bits", [8, 15])
@pytest.mark.parametrize(("tokens", "rows", "depth"), SHAPES)
def test_products_with_scales(tokens: int, rows: int, depth: int, bits: int, parts: bool) -> None:
    rng = np.random.default_rng(3)
    weights = rng.integers(-127, 128, (rows, depth)).astype(np.int8)
    matrix = aligned(packed8(weights, depth).shape, np.uint8)
    matrix[...] = packed8(weights, depth)
    x = rng.standard_normal((tokens, depth)).astype(F32)
    made = quantise(x, bits, 32, depth)
    scales = rng.uniform(0.5, 2, (rows, depth // 32 if parts else 1)).astype(F32)
    full = np.zeros((-(-rows // 64) * 64, depth // 32), F32)
    full[:rows] = scales
    tiled = np.ascontiguousarray(full.reshape(-1, 64, depth // 32).transpose(0, 2, 1))
    given = (None, tiled) if parts else (scales.ravel(), None)
    out = np.full((tokens, rows), np.nan, F32)
    run(Code.LINEAR8, bits > 8, tokens, rows, depth, 32, matrix, *made, *given, None, out, rows)
    integers, of_group = rounded(x, bits, 32)
    dense = (weights.reshape(rows, -1, 32) * scales[:, :, None].astype(np.float64)).reshape(rows, depth)
    expected = (integers.reshape(tokens, -1, 32) * of_group[:, :, None].astype(np.float64)).reshape(
        tokens, depth
    ) @ dense.T
    np.testing.assert_allclose(out, expected, rtol=0, atol=OP_FP32 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(("tokens", "rows", "depth"), [(1, 16, 5), (1, 100, 33), (8, 70, 64)])
def test_products_of_floats(tokens: int, rows: int, depth: int, dtype: type) -> None:
    rng = np.random.default_rng(4)
    weights, x = rng.standard_normal((rows, depth)).astype(dtype), rng.standard_normal((tokens, depth)).astype(F32)
    matrix, out = aligned((-(-rows // 16), depth, 16), dtype), np.full((tokens, rows), np.nan, F32)
    run(Code.PACK_FLOAT, weights.itemsize, rows, depth, weights, matrix)
    bias = rng.standard_normal(rows).astype(F32)
    run(Code.LINEAR_FLOAT, dtype is np.float16, tokens, rows, depth, matrix, x, depth, bias, out, rows)
    expected = x.astype(np.float64) @ weights.T.astype(np.float64) + bias
    np.testing.assert_allclose(out, expected, rtol=0, atol=OP_FP32 * np.abs(expected).max())


# -- where it is not ---------------------------------------------------------------------------------------------------

PROBE = "from anechain.run.native import library, threads_wanted; print(library().threads, threads_wanted())"


def test_threads_are_as_many_as_omp_num_threads_says() -> None:
    environment = {"PYTHONPATH": str(Path(native.__file__).parents[2]), "PATH": "", "OMP_NUM_THREADS": "3"}
    made = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, env=environment)
    assert made.stdout == "3 3\n", made.stderr
    del environment["OMP_NUM_THREADS"]
    made = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, env=environment)
    assert made.stdout == f"{len(os.sched_getaffinity(0))} {len(os.sched_getaffinity(0))}\n", made.stderr


def test_where_it_was_not_built_the_engine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.machinery, "EXTENSION_SUFFIXES", [".nothing"])
    with pytest.raises(EngineError) as caught:
        native.library.__wrapped__()
    assert str(caught.value) == (
        "the native engine was not built when anechain was installed: install it again where a C compiler is, or use "
        "OpenVINO."
    )


def test_a_library_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "_native.so").write_text("this is no library")
    monkeypatch.setattr(importlib.machinery, "EXTENSION_SUFFIXES", [".so"])
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    with pytest.raises(EngineError, match=r"_native.so cannot be loaded \(.*\): install anechain again, or use OpenV"):
        native.library.__wrapped__()
