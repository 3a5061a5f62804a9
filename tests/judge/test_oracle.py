"""The oracle against transformers' own classes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from anechain.bundle.spec import ModelSpec, Rope
from anechain.judge import oracle as oracle_module
from anechain.judge.oracle import frequencies, gelu_tanh, silu
from tests.judge.models import FAMILIES, IDS, LLAMA3, ROPES, YARN, build, error, ours, theirs
from tests.tolerances import ORACLE_ACTIVATION, ORACLE_FREQUENCY, ORACLE_LOGITS


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str) -> None:
    model, source = build(family)
    expected = theirs(model, IDS)
    assert 1 < expected.std() < 20, "the tolerance is meant for logits of this spread"
    assert error(ours(source), expected) < ORACLE_LOGITS


Change = Callable[[ModelSpec], ModelSpec]


def attention(index: int = 0, **changes: Any) -> Change:
    """`changes` to one attention's rope, or to its window."""

    def change(spec: ModelSpec) -> ModelSpec:
        old = spec.attentions[index]
        window = {"window": changes["window"]} if "window" in changes else {}
        rope = replace(old.rope, **{k: v for k, v in changes.items() if k != "window"})
        new = replace(old, rope=rope, **window)
        return replace(spec, attentions=(*spec.attentions[:index], new, *spec.attentions[index + 1 :]))

    return change


def field(**changes: Any) -> Change:
    return lambda spec: replace(spec, **changes)


WRONG_SPECS: list[tuple[str, str, Change]] = [
    ("llama-default", "rope base", attention(theta=10500.0)),
    ("llama-default", "eps", field(rms_eps=1e-4)),
    ("llama-default", "scale of the scores", field(attention_scale=0.251)),
    ("llama-default", "activation", field(activation="gelu_tanh")),
    ("llama-default", "embedding scale", field(embedding_scale=1.01)),
    ("llama-linear", "factor", attention(factor=4.1)),
    ("llama-linear", "kind", attention(kind="default")),
    ("llama-llama3", "factor", attention(factor=8.5)),
    ("llama-llama3", "low band", attention(low_freq_factor=1.1)),
    ("llama-llama3", "high band", attention(high_freq_factor=4.4)),
    ("llama-llama3", "original context", attention(original_context=36)),
    ("llama-yarn", "factor", attention(factor=8.5)),
    ("llama-yarn", "original context", attention(original_context=64)),
    ("llama-yarn", "attention factor", attention(attention_factor=1.0)),
    ("llama-yarn-exact-ends", "fast end", attention(beta_fast=4.5)),
    ("llama-yarn-exact-ends", "slow end", attention(beta_slow=0.55)),
    ("llama-yarn-exact-ends", "rounding of the ends", attention(truncate=True)),
    ("llama-biases", "q, k, v biases", field(qkv_bias=False)),
    ("llama-biases", "o bias", field(o_bias=False)),
    ("llama-biases", "feed-forward biases", field(ffn_bias=False)),
    ("qwen3", "q and k norms", field(qk_norm=False)),
    ("mistral", "window one short", attention(window=12)),
    ("mistral", "window one long", attention(window=14)),
    ("mistral", "no window", attention(window=None)),
    ("gemma3", "sliding window", attention(1, window=10)),
    ("gemma3", "sliding rope", attention(1, theta=11000.0)),
    ("gemma3", "full rope", attention(0, factor=8.5)),
    ("gemma3", "kinds of the layers", field(layer_attention=(0, 1, 0))),
    ("gemma3", "embedding scale", field(embedding_scale=1.0)),
    ("gemma3", "activation", field(activation="silu")),
]


@pytest.mark.parametrize(("family", "what", "change"), WRONG_SPECS, ids=lambda v: v if isinstance(v, str) else "")
def test_a_wrong_spec_is_seen(family: str, what: str, change: Change) -> None:
    """If a wrong field moved the logits less than the tolerance does, agreement would say nothing of that field."""
    model, source = build(family)
    wrong = replace(source, spec=change(source.spec))
    assert error(ours(wrong), theirs(model, IDS)) > 10 * ORACLE_LOGITS


@pytest.mark.parametrize("family", ["llama-biases", "qwen3", "gemma3"])
def test_every_tensor_matters(family: str) -> None:
    _, source = build(family)
    right = ours(source)
    rng = np.random.default_rng(3)
    moved = {}
    for name, tensor in source.tensors.items():
        other = tensor * (1 + 0.05 * rng.standard_normal(tensor.shape, dtype=np.float32))
        moved[name] = error(ours(replace(source, tensors={**source.tensors, name: other})), right)
    assert len(moved) >= 2 + 3 * 11
    assert {name: by for name, by in moved.items() if by < 10 * ORACLE_LOGITS} == {}


OTHER_ROPES = {
    "llama-3.2": (
        LLAMA3 | {"rope_theta": 500000.0, "factor": 32.0, "original_max_position_embeddings": 8192},
        Rope(500000.0, "llama3", factor=32.0, original_context=8192),
    ),
    "qwen2.5-yarn": (
        YARN | {"rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 32768},
        Rope(1000000.0, "yarn", factor=4.0, original_context=32768, attention_factor=0.1 * np.log(4.0) + 1),
    ),
    "yarn-cut-band": (  # the slow end lies beyond the last dimension
        YARN | {"rope_theta": 10.0, "original_max_position_embeddings": 32768, "beta_fast": 2000.0},
        Rope(10.0, "yarn", 8.0, original_context=32768, beta_fast=2000.0, attention_factor=0.1 * np.log(8.0) + 1),
    ),
}


@pytest.mark.parametrize(("given", "spec"), (ROPES | OTHER_ROPES).values(), ids=(ROPES | OTHER_ROPES).keys())
def test_frequencies_are_those_of_transformers(given: dict[str, Any], spec: Rope) -> None:
    for dim in (16, 24, 64, 128):
        config = LlamaConfig(head_dim=dim, rope_parameters=dict(given), max_position_embeddings=512)
        if given["rope_type"] == "default":
            expected, factor = given["rope_theta"] ** -(np.arange(0, dim, 2) / dim), 1.0
        else:
            tensor, factor = ROPE_INIT_FUNCTIONS[given["rope_type"]](config, "cpu")
            expected = tensor.numpy()
        assert expected.shape == (dim // 2,)
        np.testing.assert_allclose(frequencies(spec, dim), expected, rtol=ORACLE_FREQUENCY)
        assert spec.attention_factor == pytest.approx(factor)


@pytest.mark.parametrize("name", ["llama3", "yarn", "yarn-exact-ends", "llama-3.2", "qwen2.5-yarn"])
def test_the_tables_that_are_compared_have_all_three_bands(name: str) -> None:
    """Else a formula for the middle, or for an end, would be compared with nothing."""
    spec = (ROPES | OTHER_ROPES)[name][1]
    ratio = frequencies(spec, 128) * spec.theta ** (np.arange(0, 128, 2) / 128)
    assert (ratio > 0.999).any() and (ratio < 1.001 / spec.factor).any()
    assert ((ratio < 0.99) & (ratio > 1.01 / spec.factor)).sum() > 2


def test_yarn_with_a_band_of_no_width() -> None:
    given = YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False}
    config = LlamaConfig(head_dim=16, rope_parameters=dict(given), max_position_embeddings=512)
    expected, _ = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    rope = replace(ROPES["yarn"][1], beta_fast=1.0, beta_slow=1.0, truncate=False)
    np.testing.assert_allclose(frequencies(rope, 16), expected.numpy(), rtol=ORACLE_FREQUENCY)


def test_far_positions_are_turned_in_float64() -> None:
    rope = Rope(10000.0)
    cos, sin = oracle_module.rotation(rope, 8, np.array([131071]))
    angles = 131071 * 10000.0 ** (-np.arange(4) / 4)
    assert np.array_equal(cos[0, 0], np.cos(angles).astype(np.float32))
    assert np.array_equal(sin[0, 0], np.sin(angles).astype(np.float32))


def test_activations_are_torchs_also_far_out() -> None:
    x = np.concatenate([np.linspace(-12, 12, 2001), [-1e4, -200.0, -88.8, 88.8, 1e4]]).astype(np.float32)
    with np.errstate(all="raise", under="ignore"):
        assert error(silu(x), torch.nn.functional.silu(torch.tensor(x)).numpy()) < ORACLE_ACTIVATION
        expected = torch.nn.functional.gelu(torch.tensor(x), approximate="tanh").numpy()
        assert error(gelu_tanh(x), expected) < ORACLE_ACTIVATION
