"""The reference engine on packages that coremltools saved: an attention layer with a state, in two functions."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import types

from anechain.errors import EngineError
from anechain.run.engine import Stage
from anechain.run.reference import ReferenceEngine
from tests.tolerances import ATTENTION_FP16

Array = np.ndarray
F16 = np.float16

WIDTH, HEADS, DIM, CONTEXT, CHUNK = 64, 2, 8, 32, 4
INNER = HEADS * DIM


def weights() -> dict[str, Array]:
    """int8 matrices [outputs, inputs, 1, 1] of one attention layer."""
    random = np.random.default_rng(11)
    shapes = {"q": (INNER, WIDTH), "k": (INNER, WIDTH), "v": (INNER, WIDTH), "o": (WIDTH, INNER)}
    return {n: random.integers(-127, 128, (*shape, 1, 1)).astype(np.int8) for n, shape in shapes.items()}


def scale(matrix: Array) -> Array:
    return (np.linspace(0.5, 1, len(matrix)) / 127 / 4).astype(F16).reshape(-1, 1, 1, 1)


def layer(query: int) -> Any:
    """One attention layer without rotation or norm, on ports like those of a block."""
    ports = [
        mb.TensorSpec((1, 1, query, WIDTH), dtype=types.fp16),
        mb.TensorSpec((1, 1, query, CONTEXT), dtype=types.fp16),
        mb.TensorSpec((4,), dtype=types.int32),
        mb.TensorSpec((4,), dtype=types.int32),
        mb.StateTensorSpec((2, HEADS, CONTEXT, DIM), dtype=types.fp16),
    ]

    @mb.program(input_specs=ports, opset_version=ct.target.iOS18)
    def build(hidden: Any, mask: Any, begin: Any, end: Any, kv: Any) -> Any:
        def project(x: Any, name: str) -> Any:
            data = weights()[name]
            return mb.conv(x=x, weight=mb.constexpr_blockwise_shift_scale(data=data, scale=scale(data)))

        def heads(x: Any) -> Any:
            return mb.transpose(x=mb.reshape(x=x, shape=[1, HEADS, DIM, query]), perm=[0, 1, 3, 2])

        x = mb.transpose(x=hidden, perm=[0, 3, 1, 2])  # [1, H, 1, Q]
        q, k, v = (heads(project(x, name)) for name in "qkv")  # [1, heads, Q, D]
        past = mb.read_state(input=kv)
        old_k, old_v = mb.split(x=past, num_splits=2, axis=0)  # [1, heads, context, D]
        causal = np.triu(np.full((query, query), -40000, F16), 1)[None, None]
        seen = mb.add(x=mb.matmul(x=q, y=old_k, transpose_y=True), y=mask)
        new = mb.add(x=mb.matmul(x=q, y=k, transpose_y=True), y=causal)
        shares = mb.softmax(x=mb.concat(values=[seen, new], axis=-1), axis=-1)
        to_old, to_new = mb.split(x=shares, split_sizes=[CONTEXT, query], axis=-1)
        mixed = mb.add(x=mb.matmul(x=to_old, y=old_v), y=mb.matmul(x=to_new, y=v))
        mixed = mb.reshape(x=mb.transpose(x=mixed, perm=[0, 1, 3, 2]), shape=[1, INNER, 1, query])
        written = mb.slice_update(x=past, update=mb.concat(values=[k, v], axis=0), begin=begin, end=end)
        mb.coreml_update_state(state=kv, value=written)
        y = mb.add(x=x, y=project(mixed, "o"))
        return mb.transpose(x=y, perm=[0, 2, 3, 1], name="hidden_out")

    return build


def save(program: Any, path: Path) -> Path:
    model = ct.convert(
        program,
        convert_to="mlprogram",
        minimum_deployment_target=ct.target.iOS18,
        compute_precision=ct.precision.FLOAT32,
        skip_model_load=True,
    )
    model.save(str(path))
    return path


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """coremltools warns about the versions of what it was not tested with."""
    logging.getLogger("coremltools").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    both = ct.utils.MultiFunctionDescriptor()
    for name, query in (("decode", 1), ("prefill", CHUNK)):
        both.add_function(str(save(layer(query), folder / f"{name}.mlpackage")), "main", name)
    both.default_function_name = "decode"
    ct.utils.save_multifunction(both, str(folder / "block-000.mlpackage"))
    return folder / "block-000.mlpackage"


def feed(hidden: Array, position: int) -> dict[str, Array]:
    query = hidden.shape[2]
    mask = np.where(np.arange(CONTEXT) < position, 0, -40000).astype(F16)
    return {
        "hidden": hidden,
        "mask": np.broadcast_to(mask, (1, 1, query, CONTEXT)).copy(),
        "begin": np.int32([0, 0, position, 0]),
        "end": np.int32([2, HEADS, position + query, DIM]),
    }


def attention(hidden: Array) -> Array:
    """The whole sequence at once in float64: [T, width] -> [T, width]."""
    q, k, v, o = ((w.astype(np.float64) * scale(w))[:, :, 0, 0] for w in weights().values())
    split = lambda x: x.reshape(len(x), HEADS, DIM).transpose(1, 0, 2)  # noqa: E731  [heads, T, D]
    x = hidden.astype(np.float64)
    scores = split(x @ q.T) @ split(x @ k.T).transpose(0, 2, 1) + np.triu(np.full((len(x), len(x)), -1e9), 1)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = shares / shares.sum(-1, keepdims=True) @ split(x @ v.T)
    return x + mixed.transpose(1, 0, 2).reshape(len(x), INNER) @ o.T


def walk(stage: Stage, hidden: Array, chunks: Sequence[int]) -> Array:
    """Runs the tokens in chunks of 1 (decode) or CHUNK (prefill) -> [T, width]."""
    state, done, position = stage.new_state(), [], 0
    for query in chunks:
        outputs = {"hidden_out": np.empty((1, 1, query, WIDTH), F16)}
        part = np.ascontiguousarray(hidden[None, None, position : position + query])
        stage.step("decode" if query == 1 else "prefill", feed(part, position), state, outputs)
        done.append(outputs["hidden_out"][0, 0])
        position += query
    return np.concatenate(done)


@pytest.mark.parametrize("stress", [False, True])
def test_decode_and_prefill_from_disk(package: Path, stress: bool) -> None:
    stage = ReferenceEngine(stress).load([package])
    assert stage.functions == ("decode", "prefill")
    hidden = np.random.default_rng(4).normal(size=(12, WIDTH)).astype(F16)
    expected = attention(hidden)
    assert np.abs(expected - hidden).max() > 0.3
    for chunks in ([1] * 12, [CHUNK] * 3, [CHUNK, 1, 1, 1, 1, CHUNK]):
        actual = walk(stage, hidden, chunks)
        assert actual.shape == expected.shape
        np.testing.assert_allclose(actual, expected, rtol=0, atol=ATTENTION_FP16)


def test_stress_differs_from_disk(package: Path) -> None:
    hidden = np.random.default_rng(4).normal(size=(12, WIDTH)).astype(F16)
    plain, stress = (walk(ReferenceEngine(s).load([package]), hidden, [CHUNK] * 3) for s in (False, True))
    assert np.any(plain != stress)


def test_a_chunk_beyond_the_context_is_refused(package: Path) -> None:
    stage = ReferenceEngine().load([package])
    outputs = {"hidden_out": np.empty((1, 1, CHUNK, WIDTH), F16)}
    with pytest.raises(EngineError, match="slice_update"):
        stage.step("prefill", feed(np.zeros((1, 1, CHUNK, WIDTH), F16), CONTEXT - 1), stage.new_state(), outputs)


def test_a_weight_of_both_functions_is_held_once(package: Path) -> None:
    stage = ReferenceEngine().load([package])
    per_function = []
    for name in stage.functions:
        [prepared] = stage._chain[name]
        kinds = {o.type for o, _ in prepared.calls}
        assert "constexpr_blockwise_shift_scale" not in kinds and "conv" in kinds
        large = {n: a for n, a in prepared.constants.items() if a.size == INNER * WIDTH}
        assert {a.dtype for a in large.values()} == {np.dtype(np.float32)}
        per_function.append(sorted(a.__array_interface__["data"][0] for a in large.values()))
    assert len(set(per_function[0])) == 4
    assert per_function[0] == per_function[1]


@pytest.mark.parametrize("threaded", [True, False])
def test_a_second_read_in_a_saved_package_loses_the_first_write(tmp_path: Path, threaded: bool) -> None:
    ports = [mb.TensorSpec((1, 4), dtype=types.fp16), mb.StateTensorSpec((2, 4), dtype=types.fp16)]

    @mb.program(input_specs=ports, opset_version=ct.target.iOS18)
    def build(x: Any, kv: Any) -> Any:
        before = mb.read_state(input=kv)
        first = mb.coreml_update_state(state=kv, value=mb.slice_update(x=before, update=x, begin=[0, 0], end=[1, 4]))
        onto = first if threaded else mb.read_state(input=kv)
        second = mb.slice_update(x=onto, update=x, begin=[1, 0], end=[2, 4])
        mb.coreml_update_state(state=kv, value=second)
        return mb.reduce_sum(x=before, axes=[1], keep_dims=False, name="sums")

    stage = ReferenceEngine().load([save(build, tmp_path / "two.mlpackage")])
    state, sums = stage.new_state(), np.empty(2, F16)
    for expected in ([0, 0], [4 if threaded else 0, 4]):
        stage.step("main", {"x": np.ones((1, 4), F16)}, state, {"sums": sums})
        assert sums.tolist() == expected
