"""Families: a config.json -> ModelSpec, and the names of its tensors. One small table each.

Nothing is assumed of a field that is not listed here: what decides the mathematics is read, or has the one value that
`bundle.spec` can express, or is refused.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from anechain.bake.attention import Windows, attentions_of
from anechain.bake.fields import Reader, field_faults
from anechain.bake.names import Names
from anechain.bundle.spec import ModelSpec
from anechain.errors import SourceError

_LAYER = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
_QKV_BIASES = {
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
}
_ATTENTION_BIASES = _QKV_BIASES | {"o_bias": "self_attn.o_proj.bias"}
_FFN_BIASES = {
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
}
_QK_NORMS = {"q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight"}
_SANDWICH = {
    "attn_post_norm": "post_attention_layernorm.weight",
    "ffn_norm": "pre_feedforward_layernorm.weight",
    "ffn_post_norm": "post_feedforward_layernorm.weight",
}


@dataclass(frozen=True)
class Family:
    """What sets one `model_type` apart. `read`, `fixed` and `ignored` add to the lists that hold for every family."""

    model_type: str
    layer: Mapping[str, str]  # canonical name -> the checkpoint's, within a layer
    default_theta: float
    default_max_context: int
    default_tied: bool
    default_local_theta: float = 10000.0
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of further fields that published configs leave out
    windows: Windows = "none"
    qkv_bias: bool = False  # q, k and v always have one; otherwise the tensors decide
    qk_norm: bool = False
    sandwich_norms: bool = False
    norms_less_one: bool = False  # a norm's tensor holds w where the gain is 1 + w
    scaled_embedding: bool = False  # by the root of the hidden size
    activation: Literal["silu", "gelu_tanh"] = "silu"
    bias_fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # field -> the biases it announces
    read: frozenset[str] = frozenset()
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()

    @property
    def names(self) -> Names:
        return self.names_below("model.", "lm_head.weight")

    def gain(self, name: str, stored: np.ndarray) -> np.ndarray:
        """What multiplies, of a checkpoint's tensor with the canonical `name`: itself, but for some families' norms."""
        return stored + np.float32(1) if self.norms_less_one and name.endswith("norm") else stored

    def names_below(self, root: str, head: str) -> Names:
        """The names of a checkpoint whose text model's tensors begin with `root`, and whose head is `head`."""
        top = {"embed": f"{root}embed_tokens.weight", "final_norm": f"{root}norm.weight", "head": head}
        return Names(top, self.layer, root + "layers.{}.")


FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            "llama",
            _LAYER | _ATTENTION_BIASES | _FFN_BIASES,
            default_theta=10000.0,
            default_max_context=2048,
            default_tied=False,
            bias_fields={"attention_bias": ("q_bias", "k_bias", "v_bias"), "mlp_bias": ("gate_bias", "up_bias")},
            ignored=frozenset({"is_llama_config"}),
        ),
        Family(
            "qwen2",
            _LAYER | _QKV_BIASES,
            default_theta=10000.0,
            default_max_context=32768,
            default_tied=False,
            qkv_bias=True,
            fixed={"attention_bias": (True,)},
            ignored=frozenset({"sliding_window", "max_window_layers"}),  # read only with use_sliding_window
        ),
        Family(
            "qwen3",
            _LAYER | _ATTENTION_BIASES | _QK_NORMS,
            default_theta=10000.0,
            default_max_context=32768,
            default_tied=False,
            qk_norm=True,
            bias_fields={"attention_bias": ("q_bias", "k_bias", "v_bias")},
            ignored=frozenset({"sliding_window", "max_window_layers"}),  # read only with use_sliding_window
        ),
        Family(
            "mistral",
            _LAYER,
            default_theta=10000.0,
            default_max_context=131072,
            default_tied=False,
            defaults={"num_key_value_heads": 8, "sliding_window": 4096},
            windows="all",
            fixed={"attention_bias": (False,)},
            read=frozenset({"sliding_window"}),
        ),
        Family(
            "gemma3_text",
            _LAYER | _ATTENTION_BIASES | _QK_NORMS | _SANDWICH,
            default_theta=1000000.0,
            default_max_context=131072,
            default_tied=True,
            defaults={
                "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                "query_pre_attn_scalar": 256, "sliding_window": 4096,
            },
            windows="by layer",
            qk_norm=True,
            sandwich_norms=True,
            norms_less_one=True,
            scaled_embedding=True,
            activation="gelu_tanh",
            bias_fields={"attention_bias": ("q_bias", "k_bias", "v_bias")},
            read=frozenset({
                "sliding_window", "sliding_window_pattern", "_sliding_window_pattern", "query_pre_attn_scalar",
                "rope_local_base_freq",
            }),
            fixed={
                "hidden_activation": ("gelu_pytorch_tanh",), "hidden_act": ("gelu_pytorch_tanh",),
                "use_bidirectional_attention": (False,),
            },
            ignored=frozenset({"cache_implementation"}),
        ),
    )
}  # fmt: skip


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """The family that `model_type` names; raises SourceError. `where` is the file, for the sentence."""
    model_type = config.get("model_type")
    known = ", ".join(FAMILIES)
    if model_type is None:
        raise SourceError(f"{where} has no model_type: add the one that the model was trained as ({known}).")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise SourceError(f"{where} has model_type {model_type!r}, which is not supported: use a model of {known}.")
    return family


def spec_of(
    config: Mapping[str, Any],
    present: Collection[str],
    where: str,
    *,
    field_names: Mapping[str, str] = MappingProxyType({}),
    also: Iterable[str] = (),
) -> ModelSpec:
    """What `config` (a config.json, parsed) says of the model whose canonical tensor names are `present`.

    Biases are decided by the tensors, everything else by the config. Raises SourceError that names every field whose
    value is wrong, contradicts another, or is not understood; `where` is the file, for the sentence, `field_names` is
    what it calls a config field, where it differs, and `also` are faults that the Source found.
    """
    family = family_of(config, where)
    config = {**family.defaults, **config}
    read = Reader(config, field_names)
    hidden, n_layers = read.whole("hidden_size"), read.whole("num_hidden_layers")
    n_heads = read.whole("num_attention_heads")
    n_kv_heads = read.whole("num_key_value_heads", n_heads)
    head_dim = read.whole("head_dim", max(hidden // n_heads, 1))
    max_context = read.whole("max_position_embeddings", family.default_max_context)
    if config.get("head_dim") is None and hidden % n_heads:
        read.faults.append(f"num_attention_heads = {n_heads} does not divide hidden_size = {hidden}; give head_dim")
    if n_heads % n_kv_heads:
        read.faults.append(f"num_key_value_heads = {n_kv_heads} does not divide num_attention_heads = {n_heads}")
    if not read.faults and head_dim % 2:
        read.faults.append(f"head_dim = {head_dim} is odd, and a rotation needs pairs")
    attentions, layer_attention = attentions_of(
        read, family.windows, family.default_theta, family.default_local_theta, max_context, n_layers
    )
    score_size = float(head_dim)
    if "query_pre_attn_scalar" in family.read:
        score_size = read.number("query_pre_attn_scalar", score_size)
    biases = {name.rpartition(".")[2] for name in present if name.endswith("_bias")}
    spec = ModelSpec(
        family=family.model_type,
        vocab_size=read.whole("vocab_size"),
        hidden_size=hidden,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        ffn_size=read.whole("intermediate_size"),
        rms_eps=read.number("rms_norm_eps", 1e-6),
        attentions=attentions,
        layer_attention=layer_attention,
        attention_scale=score_size**-0.5,
        max_context=max_context,
        activation=family.activation,
        tied=read.flag("tie_word_embeddings", family.default_tied),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias or not biases.isdisjoint({"q_bias", "k_bias", "v_bias"}),
        o_bias="o_bias" in biases,
        ffn_bias=not biases.isdisjoint({"gate_bias", "up_bias", "down_bias"}),
        sandwich_norms=family.sandwich_norms,
        # A float32 model multiplies by the root as float32 has it; rounded to bfloat16 it would be up to 0.4% off.
        embedding_scale=float(np.float32(hidden**0.5)) if family.scaled_embedding else 1.0,
    )
    known = family.read | family.ignored | {"layer_types", *family.bias_fields}
    faults = [*also, *read.faults, *_bias_faults(family, read, biases), *field_faults(config, known, family.fixed)]
    if faults:
        raise SourceError(f"{where} cannot be used: {'; '.join(faults)}.")
    return spec


def _bias_faults(family: Family, read: Reader, biases: Collection[str]) -> list[str]:
    """Where a bias field is given, it has to agree with the tensors."""
    faults = []
    for name, announced in family.bias_fields.items():
        stated, found = read.flag(name, False), not set(announced).isdisjoint(biases)
        if stated and not found:
            faults.append(f"{name} is true but the checkpoint has none of these biases")
        if found and not stated and read.config.get(name) is not None:
            faults.append(f"{name} is false but the checkpoint has these biases")
    return faults
