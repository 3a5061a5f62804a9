"""A Hugging Face checkpoint of the Llama or Qwen3 kind as a GGUF file with Q8_0 matrices: what the peers here read.

    python benchmarks/peers/_q8_gguf.py MODEL OUT.gguf

Every matrix is rounded to 8 bits with one scale for 32 inputs; norms stay float32.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

MATRICES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}  # fmt: skip
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def written(model: Path, out: Path) -> Path:
    """`out`, made unless it is there."""
    if out.is_file():
        return out
    config = json.loads((model / "config.json").read_text())
    writer = gguf.GGUFWriter(str(out) + ".part", config["model_type"])
    heads = config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    depth = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_key_length(depth)
    writer.add_value_length(depth)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(depth)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    _add_tokenizer(writer, model, config)
    turned = {"q_proj": heads, "k_proj": config["num_key_value_heads"]} if config["model_type"] == "llama" else {}
    for name, array in _tensors(model / "model.safetensors"):
        count = turned.get(name.split(".")[-2])
        _add(writer, name, _paired(array, count) if count else array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    Path(str(out) + ".part").rename(out)
    return out


def _tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """float32, from a safetensors file of F32, F16 or BF16, which numpy does not know."""
    data = np.memmap(path, np.uint8, "r")
    size = int(data[:8].view(np.uint64)[0])
    for name, entry in json.loads(data[8 : 8 + size].tobytes()).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + size + n for n in entry["data_offsets"])
        raw = data[begin:end]
        if entry["dtype"] == "BF16":
            array = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            array = raw.view({"F32": np.float32, "F16": np.float16}[entry["dtype"]]).astype(np.float32)
        yield name, array.reshape(entry["shape"])


def _paired(array: np.ndarray, heads: int) -> np.ndarray:
    """The rows of each head in the order of the format for Llama: the two halves of a rotation, in turn."""
    return array.reshape(heads, 2, len(array) // heads // 2, -1).swapaxes(1, 2).reshape(array.shape)


def _add(writer: gguf.GGUFWriter, name: str, array: np.ndarray) -> None:
    stem = name.removesuffix(".weight")
    if stem in WHOLE:
        own = WHOLE[stem]
    else:
        _, _, layer, part = stem.split(".", 3)
        own = f"blk.{layer}.{MATRICES[part]}"
    if array.ndim == 1:
        writer.add_tensor(f"{own}.weight", array.astype(np.float32))
    else:
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(f"{own}.weight", gguf.quantize(array, kind), raw_dtype=kind)


def _add_tokenizer(writer: gguf.GGUFWriter, model: Path, config: dict[str, Any]) -> None:
    made = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = [f"[unused{i}]" for i in range(config["vocab_size"])]
    types = [gguf.TokenType.UNUSED] * config["vocab_size"]
    for text, number in made["model"]["vocab"].items():
        tokens[number], types[number] = text, gguf.TokenType.NORMAL
    for added in made["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], gguf.TokenType.CONTROL
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in made["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2" if config["model_type"] == "qwen3" else "smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    ends = [added["id"] for added in made["added_tokens"] if added["content"] in ("<|endoftext|>", "<|im_end|>")]
    writer.add_bos_token_id(ends[0])
    writer.add_eos_token_id(ends[-1])


if __name__ == "__main__":
    written(Path(sys.argv[1]), Path(sys.argv[2]))
