"""Small transformers models of every family that the spec can express, and the same weights as a Source."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from anechain.bundle.spec import Attention, ModelSpec, Rope
from anechain.judge.oracle import Oracle
from tests.judge.memory_source import MemorySource, plain_spec, randomize, torch_source

LENGTH = 300  # positions; the scaled ropes below were "trained" on 32
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 200.0,  # several of few dimensions lie in the middle band
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
ROPES = {
    "default": ({"rope_type": "default", "rope_theta": 10000.0}, Rope(10000.0)),
    "linear": (LINEAR, Rope(10000.0, "linear", factor=4.0)),
    "llama3": (LLAMA3, Rope(200.0, "llama3", factor=8.0, original_context=32)),
    "yarn": (YARN, Rope(10000.0, "yarn", 8.0, original_context=32, attention_factor=0.1 * np.log(8.0) + 1)),
    "yarn-exact-ends": (
        YARN | {"truncate": False, "beta_fast": 4.0, "beta_slow": 0.5, "attention_factor": 0.8},
        Rope(10000.0, "yarn", 8.0, 1.0, 4.0, 32, beta_fast=4.0, beta_slow=0.5, attention_factor=0.8, truncate=False),
    ),
}
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "attn_implementation": "eager",
}
SPEC = replace(plain_spec(hidden=64, layers=3, dim=16, ffn=96), tied=False)
IDS = np.random.default_rng(7).integers(0, 97, LENGTH).astype(np.int32)


def llama(rope: str = "default") -> tuple[PreTrainedModel, ModelSpec]:
    theirs, ours = ROPES[rope]
    config = LlamaConfig(**SIZES, rms_norm_eps=1e-5, rope_parameters=dict(theirs))
    return LlamaForCausalLM(config), replace(SPEC, attentions=(Attention("full", ours),))


def llama_with_all_biases() -> tuple[PreTrainedModel, ModelSpec]:
    config = LlamaConfig(**SIZES, rms_norm_eps=1e-5, attention_bias=True, mlp_bias=True)
    return LlamaForCausalLM(config), replace(SPEC, qkv_bias=True, o_bias=True, ffn_bias=True)


def qwen2() -> tuple[PreTrainedModel, ModelSpec]:
    config = Qwen2Config(**SIZES, rms_norm_eps=1e-6, tie_word_embeddings=True)
    return Qwen2ForCausalLM(config), replace(SPEC, rms_eps=1e-6, qkv_bias=True, tied=True)


def qwen3() -> tuple[PreTrainedModel, ModelSpec]:
    rope = {"rope_type": "default", "rope_theta": 1000000.0}
    config = Qwen3Config(**SIZES, head_dim=24, rms_norm_eps=1e-6, tie_word_embeddings=True, rope_parameters=rope)
    spec = replace(SPEC, rms_eps=1e-6, head_dim=24, attention_scale=24**-0.5, qk_norm=True, tied=True)
    return Qwen3ForCausalLM(config), replace(spec, attentions=(Attention("full", Rope(1000000.0)),))


def mistral() -> tuple[PreTrainedModel, ModelSpec]:
    config = MistralConfig(**SIZES | {"num_key_value_heads": 1}, rms_norm_eps=1e-5, sliding_window=13)
    attention = Attention("sliding", Rope(10000.0), window=13)
    return MistralForCausalLM(config), replace(SPEC, n_kv_heads=1, attentions=(attention,))


def gemma3() -> tuple[PreTrainedModel, ModelSpec]:
    config = Gemma3TextConfig(
        **SIZES,
        head_dim=24,
        rms_norm_eps=1e-6,
        sliding_window=11,
        query_pre_attn_scalar=20,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
        },
    )
    spec = replace(
        SPEC,
        rms_eps=1e-6,
        head_dim=24,
        attention_scale=20**-0.5,
        attentions=(
            Attention("full", Rope(1000000.0, "linear", factor=8.0)),
            Attention("sliding", Rope(10000.0), window=11),
        ),
        layer_attention=(1, 0, 1),
        activation="gelu_tanh",
        qk_norm=True,
        sandwich_norms=True,
        embedding_scale=8.0,
        tied=True,
    )
    return Gemma3ForCausalLM(config), spec


FAMILIES: dict[str, Callable[[], tuple[PreTrainedModel, ModelSpec]]] = {
    **{f"llama-{rope}": (lambda rope=rope: llama(rope)) for rope in ROPES},
    "llama-biases": llama_with_all_biases,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "mistral": mistral,
    "gemma3": gemma3,
}


def build(family: str) -> tuple[PreTrainedModel, MemorySource]:
    model, spec = FAMILIES[family]()
    randomize(model, seed=len(family))
    return model.float().eval(), torch_source(model, spec)


def theirs(model: PreTrainedModel, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(ids[None], dtype=torch.long)).logits[0].numpy()  # [n, V]


def ours(source: MemorySource, ids: np.ndarray = IDS) -> np.ndarray:
    oracle = Oracle(source)
    return oracle.logits(oracle.forward([ids])[0])  # [n, V]


def error(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape and a.size > 0 and np.isfinite(a).all() and np.isfinite(b).all()
    return float(np.abs(a - b).max())
