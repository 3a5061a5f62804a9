"""Ports, tensor names and the head's pieces, against numbers written out by hand."""

import json
from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anechain.bundle.spec import (
    MASKED,
    MAX_PIECE,
    Attention,
    ModelSpec,
    Port,
    Rope,
    head_pieces,
    head_ports,
    layer_tensors,
    matrices_of,
    ports_of,
    tensors_of,
)

QWEN3 = ModelSpec(
    family="qwen3", vocab_size=151936, hidden_size=1024, n_layers=28, n_heads=16, n_kv_heads=8, head_dim=128,
    ffn_size=3072, rms_eps=1e-6, attentions=(Attention("full", Rope(1e6)),), layer_attention=(0,) * 28,
    attention_scale=128**-0.5, max_context=40960, tied=True, qk_norm=True,
)  # fmt: skip
GEMMA3 = ModelSpec(
    family="gemma3", vocab_size=262144, hidden_size=640, n_layers=6, n_heads=4, n_kv_heads=1, head_dim=256,
    ffn_size=2048, rms_eps=1e-6,
    attentions=(Attention("full", Rope(1e6, "linear", 8.0)), Attention("sliding", Rope(1e4), window=512)),
    layer_attention=(1, 1, 1, 1, 1, 0), attention_scale=1 / 16, max_context=32768, activation="gelu_tanh", tied=True,
    qk_norm=True, sandwich_norms=True, embedding_scale=640**0.5, stream_scale=0.25,
)  # fmt: skip
BIASED = replace(QWEN3, n_layers=1, tied=False, qkv_bias=True, o_bias=True, ffn_bias=True, qk_norm=False)


@pytest.mark.parametrize("spec", [QWEN3, GEMMA3, BIASED], ids=["qwen3", "gemma3", "biased"])
def test_spec_and_its_json_are_each_other(spec: ModelSpec) -> None:
    again = ModelSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert again == spec
    assert hash(again) == hash(spec), "lists became tuples again"


def test_masked_is_exact_and_stays_finite_under_a_score() -> None:
    assert float(np.float16(MASKED)) == MASKED
    assert np.isfinite(np.float16(MASKED) + np.float16(-25500))
    assert np.exp(np.float32(MASKED + 25500)) == 0


def test_ports_of_one_kind_of_attention() -> None:
    ports = ports_of(QWEN3, query=64, context=1024, layers=range(14, 28))
    assert ports.inputs == (
        Port("hidden", (1, 1, 64, 1024)),
        Port("cos", (1, 1, 64, 128)),
        Port("sin", (1, 1, 64, 128)),
        Port("mask", (1, 1, 64, 1024)),
        Port("begin", (4,), "int32"),
        Port("end", (4,), "int32"),
    )
    assert ports.outputs == (Port("hidden_out", (1, 1, 64, 1024)),)
    assert ports.state == Port("kv", (28, 8, 1024, 128))


@pytest.mark.parametrize(
    ("layers", "suffixes"),
    [(range(6), ["_full", "_sliding"]), (range(5), ["_sliding"]), (range(5, 6), ["_full"])],
)
def test_ports_of_two_kinds_name_those_that_the_package_has(layers: range, suffixes: list[str]) -> None:
    ports = ports_of(GEMMA3, query=1, context=512, layers=layers)
    by_kind = [f"{name}{suffix}" for suffix in suffixes for name in ("cos", "sin", "mask")]
    assert [p.name for p in ports.inputs] == ["hidden", *by_kind, "begin", "end"]
    assert ports.state is not None and ports.state.shape == (2 * len(layers), 1, 512, 256)


def test_tensors_of_qwen3_are_its_596_million_weights() -> None:
    shapes = tensors_of(QWEN3)
    assert len(shapes) == 28 * 11 + 2
    assert sum(prod(s) for s in shapes.values()) == 596_049_920  # what the published checkpoint holds
    assert shapes["layers.27.q"] == (2048, 1024) and shapes["layers.0.k"] == (1024, 1024)
    assert shapes["layers.0.o"] == (1024, 2048) and shapes["layers.0.down"] == (1024, 3072)
    assert shapes["layers.3.q_norm"] == (128,) and shapes["final_norm"] == (1024,)
    assert "head" not in shapes and tensors_of(BIASED)["head"] == (151936, 1024)


def test_tensors_that_only_some_families_have() -> None:
    gemma, biased = set(layer_tensors(GEMMA3)), set(layer_tensors(BIASED))
    common = {"attn_norm", "q", "k", "v", "o", "ffn_norm", "gate", "up", "down"}
    assert gemma - common == {"q_norm", "k_norm", "attn_post_norm", "ffn_post_norm"}
    assert biased - common == {"q_bias", "k_bias", "v_bias", "o_bias", "gate_bias", "up_bias", "down_bias"}
    shapes = layer_tensors(BIASED)
    for matrix in ("q", "k", "v", "o", "gate", "up", "down"):
        assert shapes[f"{matrix}_bias"] == shapes[matrix][:1]


def test_matrices_are_what_a_recipe_decides_on() -> None:
    matrices = matrices_of(QWEN3)
    assert len(matrices) == 28 * 7 + 2
    assert matrices["head"] == matrices["embed"] == (151936, 1024), "the head is there when it is tied, too"
    assert matrices["layers.5.gate"] == (3072, 1024)


@pytest.mark.parametrize(
    ("vocabulary", "hidden", "pieces"),
    [
        (151936, 1024, (16, 9496)),  # Qwen3: exact, and clear of rule S16
        (49152, 576, (3, 16384)),  # SmolLM2
        (320, 64, (1, 320)),
        (MAX_PIECE, 64, (1, MAX_PIECE)),
        (MAX_PIECE + 1, 64, (2, 8193)),  # nothing divides it: the fewest pieces, the last one padded
        (3 * MAX_PIECE - 3, 64, (3, 16383)),  # fewest and exact
        (32768, 1024, (3, 10923)),  # 2 and 4 pieces are exact, but a core's share is 2 MiB and 1 MiB (rule S16)
    ],
)
def test_head_pieces(vocabulary: int, hidden: int, pieces: tuple[int, int]) -> None:
    assert head_pieces(replace(QWEN3, vocab_size=vocabulary, hidden_size=hidden)) == pieces


@given(st.integers(1, 300_000), st.sampled_from([576, 640, 1024, 2048, 4096]))
def test_head_pieces_hold_the_vocabulary(vocabulary: int, hidden: int) -> None:
    count, rows = head_pieces(replace(QWEN3, vocab_size=vocabulary, hidden_size=hidden))
    assert rows <= MAX_PIECE
    assert (count - 1) * rows < vocabulary <= count * rows, "no piece is empty, and every token has a row"


def test_head_ports() -> None:
    ports = head_ports(QWEN3)
    assert ports.inputs == (Port("hidden", (1, 1, 1, 1024)),)
    assert ports.outputs == tuple(Port(f"logits_{i}", (1, 1, 1, 9496)) for i in range(16))
    assert ports.state is None
