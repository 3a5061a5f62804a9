"""GgufSource: a .gguf file with its configuration, tensors and tokenizer, opened but not loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from anechain.bake import gguf_tokenizer
from anechain.bake.attention import FULL, SLIDING
from anechain.bake.family import FAMILIES, spec_of
from anechain.bake.gguf_split import GgufParts
from anechain.bake.names import Names, check_tensors
from anechain.bundle.spec import ModelSpec, Rope
from anechain.errors import SourceError

_TOP = {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight"}
_LAYER = {
    "attn_norm": "attn_norm.weight", "q": "attn_q.weight", "k": "attn_k.weight", "v": "attn_v.weight",
    "o": "attn_output.weight", "q_bias": "attn_q.bias", "k_bias": "attn_k.bias", "v_bias": "attn_v.bias",
    "o_bias": "attn_output.bias", "q_norm": "attn_q_norm.weight", "k_norm": "attn_k_norm.weight",
    "ffn_norm": "ffn_norm.weight", "gate": "ffn_gate.weight", "up": "ffn_up.weight", "down": "ffn_down.weight",
    "gate_bias": "ffn_gate.bias", "up_bias": "ffn_up.bias", "down_bias": "ffn_down.bias",
    "attn_post_norm": "post_attention_norm.weight", "ffn_post_norm": "post_ffw_norm.weight",
}  # fmt: skip
_ROPE_FACTORS = "rope_freqs.weight"

# config.json's field -> the metadata key, after the architecture's name
_FIELDS = {
    "num_hidden_layers": "block_count", "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length", "rope_theta": "rope.freq_base", "vocab_size": "vocab_size",
}  # fmt: skip
_REQUIRED = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count", "context_length",
             "attention.layer_norm_rms_epsilon")  # fmt: skip
_SCALING = {
    "rope.scaling.factor": "factor", "rope.scale_linear": "factor", "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}  # fmt: skip
# Keys with the values under which they change nothing; None stands for any value.
_NEUTRAL: dict[str, tuple[Any, ...] | None] = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.sliding_window": (0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.finetuned": None,
    "tensor_data_layout": None,
}
# Llama 3's frequency bands, as its reference implementation has them; a file's factors are compared with them.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192
_LLAMA3_TOLERANCE = 1e-4  # relative: the factors were computed and stored in float32


@dataclass(frozen=True)
class Architecture:
    """What `general.architecture` decides. `interleaved`: the rows of q and k are in pairs (x0, y0, x1, y1, ...).

    `fields` and `required` are further ones. Norms are stored as what multiplies, whatever the family's checkpoints do.
    """

    model_type: str
    interleaved: bool = False
    fields: Mapping[str, str] = field(default_factory=dict)
    required: tuple[str, ...] = ()


ARCHITECTURES = {
    "llama": Architecture("llama", interleaved=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "gemma3": Architecture(
        "gemma3_text",
        fields={
            "sliding_window": "attention.sliding_window",
            "sliding_window_pattern": "attention.sliding_window_pattern",
            "rope_local_base_freq": "rope.freq_base_swa",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        required=("attention.sliding_window", "attention.key_length", "rope.freq_base"),
    ),
}
_GEMMA3_27B_LAYERS = 62


class GgufSource:
    """The model in a GGUF file, checked from its header; see `bake.source.Source`.

    Raises SourceError for a file that is damaged, an architecture, a quantisation, a metadata key or a tokenizer that
    is not understood, and for tensors that are missing, unused, or of another shape than the metadata says.
    """

    def __init__(self, path: Path, ref: str | None = None) -> None:
        self.ref = str(path) if ref is None else ref
        self._file = GgufParts(path)
        metadata, tensors = self._file.metadata, self._file.tensors
        name = metadata.get("general.architecture")
        if name not in ARCHITECTURES or metadata.get("general.type", "model") != "model":
            what = f"architecture {name!r} and type {metadata.get('general.type', 'model')!r}"
            raise SourceError(f"{path} has {what}: a model of {' or '.join(ARCHITECTURES)} is what is supported.")
        self._architecture = ARCHITECTURES[name]
        family = FAMILIES[self._architecture.model_type]
        self._names = Names(_TOP, {part: own for part, own in _LAYER.items() if part in family.layer}, "blk.{}.")
        canonical = {own: self._names.canonical(own) for own in tensors if own != _ROPE_FACTORS}
        shapes = {to: tensors[own].shape for own, to in canonical.items() if to is not None}
        keys = {to: f"{name}.{key}" for to, key in {**_FIELDS, **self._architecture.fields}.items()}
        config, faults = self._config(name, shapes)
        spec = spec_of(config, shapes, str(path), field_names=keys, also=faults)
        for key in ("rope.dimension_count", "attention.value_length"):
            if (size := metadata.get(f"{name}.{key}", spec.head_dim)) != spec.head_dim:
                raise SourceError(
                    f"{path} has {name}.{key} = {size!r}: only the head's size {spec.head_dim} is supported."
                )
        self.spec: ModelSpec = self._with_rope_factors(name, spec) if _ROPE_FACTORS in tensors else spec
        unknown = [own for own, to in canonical.items() if to is None]
        check_tensors(self.spec, shapes, unknown, self._names, str(path), field_names=keys)
        gguf_tokenizer.check_tokenizer(metadata, str(path))

    def tensor(self, name: str) -> np.ndarray:
        values = self._file.read(self._names.own(name))
        part = name.rpartition(".")[2]
        if self._architecture.interleaved and part in ("q", "q_bias", "k", "k_bias"):
            heads = self.spec.n_heads if part.startswith("q") else self.spec.n_kv_heads
            return half_split(values, heads)
        return values

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the file, or over those of all its parts."""
        return self._file.fingerprint()

    @cached_property
    def text_files(self) -> dict[str, bytes]:
        return gguf_tokenizer.text_files(self._file.metadata, str(self._file.path))

    def _config(self, name: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, Any], list[str]]:
        """The metadata in the words of a config.json, and what is wrong with it."""
        given = {k.removeprefix(f"{name}."): v for k, v in self._file.metadata.items() if k.startswith(f"{name}.")}
        fields = {**_FIELDS, **self._architecture.fields}
        config = {to: given.get(key) for to, key in fields.items()}  # null: no default of the family's
        config |= {"model_type": self._architecture.model_type, "tie_word_embeddings": "head" not in shapes}
        if config["vocab_size"] is None:
            config["vocab_size"] = shapes["embed"][0] if "embed" in shapes else None
        if self._architecture.model_type == "gemma3_text":
            config["query_pre_attn_scalar"] = _gemma3_score_size(config)
            if isinstance(listed := config["sliding_window_pattern"], list):  # whether each layer has a window
                config["layer_types"] = [SLIDING if window else FULL for window in listed]
                config["sliding_window_pattern"] = None
        scaling = {to: given[key] for key, to in _SCALING.items() if key in given}
        kind = given.get("rope.scaling.type", "linear" if "factor" in scaling else "none")
        if kind != "none":
            config["rope_scaling"] = scaling | {"rope_type": kind}
        required = (*_REQUIRED, *self._architecture.required)
        faults = [f"{name}.{key} is missing" for key in required if key not in given]
        read = {*fields.values(), *_SCALING, "rope.scaling.type", "rope.dimension_count", "attention.value_length"}
        for key, value in given.items():
            neutral = _NEUTRAL.get(key, ())
            if key not in read and neutral is not None and value not in neutral:
                faults.append(f"{name}.{key} = {value!r} is not understood")
        return config, faults

    def _with_rope_factors(self, name: str, spec: ModelSpec) -> ModelSpec:
        """`spec` with the llama3 scaling whose divisors of each frequency `rope_freqs.weight` holds; or SourceError."""
        stored = self._file.read(_ROPE_FACTORS).astype(np.float64)  # [head_dim / 2]
        rope = spec.attentions[0].rope
        original = self._file.metadata.get(f"{name}.rope.scaling.original_context_length", _LLAMA3_CONTEXT)
        scaled = Rope(rope.theta, "llama3", float(stored.max()), _LLAMA3_LOW, _LLAMA3_HIGH, original)
        frequency = rope.theta ** -(np.arange(0, spec.head_dim, 2) / spec.head_dim)
        turns = original * frequency / (2 * np.pi)  # in the original context
        smooth = np.clip((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0, 1)
        expected = 1 / ((1 - smooth) / scaled.factor + smooth)
        fits = stored.shape == expected.shape and np.allclose(stored, expected, rtol=_LLAMA3_TOLERANCE, atol=0)
        if len(spec.attentions) > 1 or rope.kind != "default" or not fits:
            raise SourceError(
                f"{self._file.path} has {_ROPE_FACTORS} that are not those of llama3 scaling (low {_LLAMA3_LOW}, high "
                f"{_LLAMA3_HIGH}, original context {original}): use the model's Hugging Face directory."
            )
        return replace(spec, attentions=(replace(spec.attentions[0], rope=scaled),))


def half_split(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from pairs (x0, y0, x1, y1, ...) to halves (x0, x1, ..., y0, y1, ...), which spec.py wants."""
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])  # [heads, head_dim / 2, 2, ...]
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _gemma3_score_size(config: Mapping[str, Any]) -> float | None:
    """Whose root divides the scores: GGUF leaves it out. Only the 27B model's is not the head's size (llama.cpp)."""
    if config["num_hidden_layers"] == _GEMMA3_27B_LAYERS and config["hidden_size"] and config["num_attention_heads"]:
        return float(config["hidden_size"] / config["num_attention_heads"])
    size: float | None = config["head_dim"]
    return size
