"""Sources that live in memory: one around a transformers model, one of random weights for any spec."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from anechain.bundle.spec import Attention, ModelSpec, Rope, tensors_of

LAYER = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
}
SANDWICH = LAYER | {
    "attn_post_norm": "post_attention_layernorm.weight",
    "ffn_norm": "pre_feedforward_layernorm.weight",
    "ffn_post_norm": "post_feedforward_layernorm.weight",
}
OUTSIDE = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}


@dataclass
class MemorySource:
    """Tensors by canonical name. `reads` counts how often each was asked for."""

    spec: ModelSpec
    tensors: Mapping[str, np.ndarray]
    ref: str = "memory"
    fingerprint: str = "0" * 64
    text_files: dict[str, bytes] = field(default_factory=dict)
    reads: dict[str, int] = field(default_factory=dict)

    def tensor(self, name: str) -> np.ndarray:
        self.reads[name] = self.reads.get(name, 0) + 1
        return self.tensors[name]


def torch_source(model: PreTrainedModel, spec: ModelSpec) -> MemorySource:
    """The weights of a transformers causal LM; a tensor of the model that `spec` has no name for is a KeyError."""
    state = {name: tensor.detach().float().numpy() for name, tensor in model.state_dict().items()}
    if spec.tied:
        del state["lm_head.weight"]
    tensors = {}
    for name in tensors_of(spec):
        if name.startswith("layers."):
            _, number, short = name.split(".")
            theirs = f"model.layers.{number}.{(SANDWICH if spec.sandwich_norms else LAYER)[short]}"
        else:
            theirs = OUTSIDE[name]
        tensors[name] = state.pop(theirs)
        if spec.sandwich_norms and name.endswith("norm"):
            tensors[name] = 1 + tensors[name]  # Gemma 3 stores w for 1 + w
    if state:
        raise KeyError(f"the spec has no place for {sorted(state)}")
    return MemorySource(spec, tensors)


def randomize(model: PreTrainedModel, seed: int) -> None:
    """Weights with which every part of the model matters: scores, gains and biases of order 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            centre = 0.0 if "gemma" in model.config.model_type else 1.0
            parameter.data = centre + 0.3 * noise
        elif parameter.ndim == 1:
            parameter.data = 0.5 * noise
        elif "embed_tokens" in name:
            parameter.data = noise / 4
        else:
            parameter.data = 1.2 * noise / parameter.shape[1] ** 0.5


def plain_spec(
    vocab: int = 97, hidden: int = 32, layers: int = 2, heads: int = 4, n_kv: int = 2, dim: int = 8, ffn: int = 48
) -> ModelSpec:
    """A llama with default rope and a tied head."""
    return ModelSpec(
        family="llama",
        vocab_size=vocab,
        hidden_size=hidden,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=n_kv,
        head_dim=dim,
        ffn_size=ffn,
        rms_eps=1e-5,
        attentions=(Attention("full", Rope(10000.0)),),
        layer_attention=(0,) * layers,
        attention_scale=dim**-0.5,
        max_context=4096,
        tied=True,
    )


def random_source(spec: ModelSpec, seed: int = 0) -> MemorySource:
    """Random weights for `spec`, and the fingerprint that they deserve."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensors_of(spec).items():
        noise = rng.standard_normal(shape, dtype=np.float32)
        tensors[name] = 1 + 0.1 * noise if len(shape) == 1 else noise / np.float32(shape[1] ** 0.5)
    digest = hashlib.sha256(b"".join(t.tobytes() for t in tensors.values())).hexdigest()
    return MemorySource(spec, tensors, fingerprint=digest)
