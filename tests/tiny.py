"""Tiny random checkpoints as Hugging Face directories, written with safetensors: `from tests.tiny import write_tiny`.

Every tensor has a seed of its own and no symmetry (norm gains of 0.5 to 2.5, biases of 1 to 5), so that a tensor which
is dropped, swapped with another or read in the wrong row order changes the result.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import TensorSpec, serialize_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

REMOVED = object()  # `write_tiny(dir, "llama", head_dim=REMOVED)` writes a config without that field

IM_START, IM_END, EOS, BOS = 256, 257, 258, 259
SPECIALS = {"<|im_start|>": IM_START, "<|im_end|>": IM_END, "<|endoftext|>": EOS, "<|startoftext|>": BOS}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "hidden_act": "silu", "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "rope_scaling": None, "attention_bias": False, "torch_dtype": "float32",
    "bos_token_id": BOS, "eos_token_id": EOS,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _COMMON
    | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False, "mlp_bias": False},
    "qwen3": _COMMON
    | {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True, "head_dim": 32,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "use_sliding_window": False, "sliding_window": None,
        "max_window_layers": 2,
    },
    "qwen2": _COMMON
    | {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "use_sliding_window": False, "sliding_window": 131072,
        "max_window_layers": 1, "attention_bias": REMOVED,
    },
    "mistral": _COMMON
    | {
        "model_type": "mistral", "architectures": ["MistralForCausalLM"], "tie_word_embeddings": False,
        "sliding_window": 8, "head_dim": 24, "attention_bias": REMOVED,
    },
    "gemma3_text": _COMMON
    | {
        "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "tie_word_embeddings": True,
        "num_hidden_layers": 6, "head_dim": 24, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window": 8,
        "sliding_window_pattern": 3, "query_pre_attn_scalar": 20, "hidden_act": REMOVED,
        "hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": None, "final_logit_softcapping": None,
        "cache_implementation": "hybrid",
    },
}  # fmt: skip


def tiny_config(family: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a tiny model of `family`, with fields changed, added, or left out (`REMOVED`)."""
    return {key: value for key, value in (FAMILIES[family] | changes).items() if value is not REMOVED}


def tiny_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Hugging Face tensor name -> shape of the checkpoint that `config` describes."""
    h, f = config["hidden_size"], config["intermediate_size"]
    d = config.get("head_dim") or h // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    projections = {
        "self_attn.q_proj": (q, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h),
        "self_attn.o_proj": (h, q),
        "mlp.gate_proj": (f, h), "mlp.up_proj": (f, h), "mlp.down_proj": (h, f),
    }  # fmt: skip
    biased = [name for name in projections if config.get("attention_bias" if "attn" in name else "mlp_bias")]
    if config["model_type"] == "qwen2":
        biased = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    norms = {"input_layernorm": h, "post_attention_layernorm": h}
    if config["model_type"] in ("qwen3", "gemma3_text"):
        norms |= {"self_attn.q_norm": d, "self_attn.k_norm": d}
    if config["model_type"] == "gemma3_text":
        norms |= {"pre_feedforward_layernorm": h, "post_feedforward_layernorm": h}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], h)}
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in projections.items()}
        shapes |= {f"model.layers.{i}.{name}.bias": projections[name][:1] for name in biased}
        shapes |= {f"model.layers.{i}.{name}.weight": (size,) for name, size in norms.items()}
    shapes["model.norm.weight"] = (h,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], h)
    return shapes


def tiny_tensors(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Hugging Face tensor name -> float32 values; the same name and shape always give the same values."""
    tensors = {}
    for name, shape in tiny_shapes(config).items():
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        if name.endswith(".bias"):
            values = rng.uniform(1, 5, shape) * rng.choice([-1, 1], shape)
        elif "norm" in name:
            values = rng.uniform(0.5, 2.5, shape) - (config["model_type"] == "gemma3_text")  # it stores w for 1 + w
        else:
            embedding = 0.25 if config["model_type"] == "gemma3_text" else 1.0  # which it multiplies by 8
            values = rng.standard_normal(shape) * (embedding if "embed" in name else 1.5 / np.sqrt(shape[1]))
        tensors[name] = values.astype(np.float32)
    return tensors


def to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 -> the bits of the nearest bfloat16 (ties to even), as uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


_STORED = {  # safetensors' name of a dtype, and the array whose bytes are those of it
    "F32": ("float32", lambda values: values.astype(np.float32)),
    "F16": ("float16", lambda values: values.astype(np.float16)),
    "BF16": ("bfloat16", to_bf16),
    "F8_E4M3": ("float8_e4m3fn", lambda values: np.clip(values * 8, -100, 100).astype(np.int8)),  # any bytes will do
}


def save_safetensors(path: Path, tensors: Mapping[str, np.ndarray], dtypes: Mapping[str, str] | str = "F32") -> None:
    """Write float32 `tensors` with a dtype of `_STORED`: one for all, or one for each name (F32 where absent)."""
    arrays, specs = {}, {}
    for name, values in tensors.items():
        kind, stored = _STORED[dtypes if isinstance(dtypes, str) else dtypes.get(name, "F32")]
        array = arrays[name] = np.ascontiguousarray(stored(values))  # kept alive: a spec holds its address only
        specs[name] = TensorSpec(dtype=kind, shape=values.shape, data_ptr=array.ctypes.data, data_len=array.nbytes)
    serialize_file(specs, str(path), {"format": "pt"})


def byte_alphabet() -> list[str]:
    """The character that byte-level BPE writes for each byte, by value (as GPT-2: a printable one is itself)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]


def tiny_tokenizer() -> Tokenizer:
    """The byte tokenizer: token id = byte value for 0 to 255, no merges, then SPECIALS."""
    vocab = {char: byte for byte, char in enumerate(byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return tokenizer


def write_tokenizer(directory: Path) -> None:
    """tokenizer.json, tokenizer_config.json (with CHAT_TEMPLATE), generation_config.json (with two end tokens)."""
    (directory / "tokenizer.json").write_text(tiny_tokenizer().to_str(), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>",
        "add_bos_token": False, "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    generation = {"bos_token_id": BOS, "eos_token_id": [IM_END, EOS], "do_sample": False}
    (directory / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")


def write_tiny(directory: Path, family: str, *, dtypes: Mapping[str, str] | str = "F32", **changes: Any) -> Path:
    """Write the tiny model of `family` (one of FAMILIES) and its tokenizer to `directory`, which is made.

    `changes` are fields of config.json and decide the tensors' shapes too: `head_dim=None`, `num_hidden_layers=3`,
    `tie_word_embeddings=True`, `attention_bias=True`, `rope_theta=REMOVED`.
    """
    config = tiny_config(family, **changes)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_safetensors(directory / "model.safetensors", tiny_tensors(config), dtypes)
    write_tokenizer(directory)
    return directory


def reconfigure(directory: Path, **changes: Any) -> Path:
    """Change config.json alone, so that it may contradict the tensors; returns `directory`."""
    config = json.loads((directory / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not REMOVED}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def shard(
    directory: Path, names: tuple[str, str, str] = ("s-1.safetensors", "s-2.safetensors", "s-3.safetensors")
) -> Path:
    """Split the weights of `directory` into three files with an index."""
    tensors = tiny_tensors(json.loads((directory / "config.json").read_text()))
    (directory / "model.safetensors").unlink()
    place = {own: names[i % 3] for i, own in enumerate(tensors)}
    for name in names:
        save_safetensors(directory / name, {own: values for own, values in tensors.items() if place[own] == name})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    return directory
