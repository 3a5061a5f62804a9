"""HfSource against transformers and safetensors, which wrote and read the same files; and every bad file."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from anechain.bake.family import FAMILIES
from anechain.bake.hf import INDEX, WEIGHTS, HfSource
from anechain.bundle.spec import tensors_of
from anechain.errors import SourceError
from tests.tiny import (
    BOS,
    EOS,
    IM_END,
    REMOVED,
    reconfigure,
    save_safetensors,
    shard,
    tiny_config,
    tiny_shapes,
    tiny_tensors,
    to_bf16,
    write_tiny,
)

Q0 = "model.layers.0.self_attn.q_proj.weight"


def loaded(source: HfSource) -> dict[str, np.ndarray]:
    """Every tensor that the spec names, under its Hugging Face name."""
    names = FAMILIES[source.spec.family].names
    tensors = {names.own(name): source.tensor(name) for name in tensors_of(source.spec)}
    for (name, shape), values in zip(tensors_of(source.spec).items(), tensors.values(), strict=True):
        assert values.shape == shape and values.dtype == np.float32 and values.flags.aligned, name
    return tensors


def assert_same(source: HfSource, expected: dict[str, np.ndarray]) -> None:
    ours = loaded(source)
    assert set(ours) == set(expected) and len(ours) >= 21
    for name, values in expected.items():
        np.testing.assert_array_equal(ours[name].view(np.uint32), values.view(np.uint32), err_msg=name)


def refusal(directory: Path) -> str:
    with pytest.raises(SourceError) as caught:
        HfSource(directory)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".") and str(directory) in message
    return message


def rewrite(directory: Path, change: Callable[[dict[str, np.ndarray]], Any], **config: Any) -> Path:
    """Write the weights of `directory` again after `change` has edited them."""
    tensors = tiny_tensors(json.loads((directory / "config.json").read_text()))
    change(tensors)
    save_safetensors(directory / WEIGHTS, tensors)
    return directory


# -- what is read ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard_size", ["10GB", "60KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_reads_what_transformers_saved(tmp_path: Path, family: str, dtype: torch.dtype, shard_size: str) -> None:
    config = AutoConfig.for_model(
        **tiny_config(family, **({"attention_bias": True, "mlp_bias": True} if family == "llama" else {}))
    )
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-3, 3)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / INDEX).exists() == (shard_size == "60KB")
    tied = config.tie_word_embeddings
    expected = {
        name: values.float().numpy() for name, values in model.state_dict().items() if not (tied and "lm_head" in name)
    }
    source = HfSource(tmp_path)
    assert_same(source, expected)
    biased = family == "llama"
    assert (source.spec.qkv_bias, source.spec.o_bias, source.spec.ffn_bias) == (
        biased or family == "qwen2",
        biased,
        biased,
    )


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_every_float_dtype(tmp_path: Path, dtype: str) -> None:
    source = HfSource(write_tiny(tmp_path, "llama", dtypes=dtype))
    assert_same(source, {name: values.float().numpy() for name, values in load_file(tmp_path / WEIGHTS).items()})


def test_mixed_dtypes_and_values_that_bf16_has_no_neighbour_for(tmp_path: Path) -> None:
    names = list(tiny_shapes(tiny_config("qwen3")))
    dtypes = {name: "F32" if "norm" in name else ("F16" if "embed" in name else "BF16") for name in names}
    write_tiny(tmp_path, "qwen3", dtypes=dtypes)
    assert_same(HfSource(tmp_path), {k: v.float().numpy() for k, v in load_file(tmp_path / WEIGHTS).items()})
    special = np.array([0.0, -0.0, np.inf, -np.inf, 1e-40, 3.389e38, -1.0, 257.0], np.float32)
    tensors = tiny_tensors(tiny_config("qwen3"))
    tensors["model.norm.weight"][:8] = special
    save_safetensors(tmp_path / WEIGHTS, tensors, "BF16")
    bits = HfSource(tmp_path).tensor("final_norm").view(np.uint32)
    np.testing.assert_array_equal(bits[:8], to_bf16(special).astype(np.uint32) << 16)


def test_tensors_at_odd_offsets_come_out_aligned(tmp_path: Path) -> None:
    """The format pads its header to 8 bytes, but nothing makes other writers do so."""
    write_tiny(tmp_path, "llama")
    content = (tmp_path / WEIGHTS).read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = content[8 : 8 + length].rstrip(b" ")
    header += b" " * (1 - len(header) % 2)  # an odd length: all data moves to odd addresses
    (tmp_path / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])
    assert_same(HfSource(tmp_path), tiny_tensors(tiny_config("llama")))


def test_one_tensor_is_read_alone_and_float32_is_not_copied(tmp_path: Path) -> None:
    source = HfSource(write_tiny(tmp_path, "llama"))
    first, second = source.tensor("embed"), source.tensor("embed")
    assert not first.flags.writeable and not first.flags.owndata
    np.testing.assert_array_equal(first, second)


def test_head_dim_null_or_absent(tmp_path: Path) -> None:
    for i, head_dim in enumerate((None, REMOVED)):
        source = HfSource(write_tiny(tmp_path / str(i), "qwen3", head_dim=head_dim))
        assert source.spec.head_dim == 16
        assert_same(source, tiny_tensors(tiny_config("qwen3", head_dim=None)))


def test_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    plain = HfSource(write_tiny(tmp_path, "llama")).spec
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    assert HfSource(rewrite(tmp_path, lambda tensors: tensors.update(buffer))).spec == plain


def test_odd_shard_names_and_decoys(tmp_path: Path) -> None:
    """With an index, exactly its files count: not a quantised model.safetensors, not the original's other format."""
    names = ("model.safetensors-00001-of-00003.safetensors", "b.safetensors", "weights_3.safetensors")
    shard(write_tiny(tmp_path, "llama"), names)
    zeros = {name: np.zeros_like(values) for name, values in tiny_tensors(tiny_config("llama")).items()}
    before = HfSource(tmp_path).fingerprint
    for decoy in (WEIGHTS, "consolidated.safetensors", "adapter_model.safetensors"):
        save_safetensors(tmp_path / decoy, zeros)
    assert_same(HfSource(tmp_path), tiny_tensors(tiny_config("llama")))
    assert HfSource(tmp_path).fingerprint == before


def test_a_tensor_in_two_shards_is_read_from_the_one_that_the_index_names(tmp_path: Path) -> None:
    shard(write_tiny(tmp_path, "llama"))
    place = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    other = next(name for name in sorted(set(place.values())) if name != place[Q0])
    tensors = tiny_tensors(tiny_config("llama"))
    stale = {own: tensors[own] for own in place if place[own] == other} | {Q0: np.zeros_like(tensors[Q0])}
    save_safetensors(tmp_path / other, stale)
    assert_same(HfSource(tmp_path), tensors)


def test_without_an_index(tmp_path: Path) -> None:
    write_tiny(tmp_path, "llama")
    save_safetensors(tmp_path / "consolidated.safetensors", {"x": np.zeros(3, np.float32)})
    assert_same(HfSource(tmp_path), tiny_tensors(tiny_config("llama")))  # model.safetensors is the one
    (tmp_path / "consolidated.safetensors").unlink()
    (tmp_path / WEIGHTS).rename(tmp_path / "odd.safetensors")
    assert_same(HfSource(tmp_path), tiny_tensors(tiny_config("llama")))  # so is the only one there is
    save_safetensors(tmp_path / "adapter_model.safetensors", {"x": np.zeros(3, np.float32)})
    assert_same(HfSource(tmp_path), tiny_tensors(tiny_config("llama")))  # an adapter is no candidate
    save_safetensors(tmp_path / "another.safetensors", {"x": np.zeros(3, np.float32)})
    assert "has another.safetensors and odd.safetensors but neither" in refusal(tmp_path)


def test_tied_head(tmp_path: Path) -> None:
    source = HfSource(write_tiny(tmp_path, "qwen3"))
    assert source.spec.tied and "head" not in tensors_of(source.spec)

    def same(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    def other(tensors: dict[str, np.ndarray]) -> None:
        same(tensors)
        tensors["lm_head.weight"][7, 3] += 1e-3

    assert HfSource(rewrite(tmp_path, same)).spec.tied
    message = refusal(rewrite(tmp_path, other))
    assert "tie_word_embeddings true and a lm_head.weight that is not the embedding" in message

    embed = np.round(tiny_tensors(tiny_config("qwen3"))["model.embed_tokens.weight"] * 4)  # exact in every dtype
    tensors = tiny_tensors(tiny_config("qwen3")) | {"model.embed_tokens.weight": embed, "lm_head.weight": embed}
    for dtypes in ("BF16", {"lm_head.weight": "BF16"}, {"lm_head.weight": "BF16", "model.embed_tokens.weight": "F16"}):
        save_safetensors(tmp_path / WEIGHTS, tensors, dtypes)
        assert HfSource(tmp_path).spec.tied
    save_safetensors(tmp_path / WEIGHTS, tensors | {"lm_head.weight": embed + 1}, {"lm_head.weight": "BF16"})
    assert "that is not the embedding" in refusal(tmp_path)
    save_safetensors(tmp_path / WEIGHTS, tensors | {"lm_head.weight": embed[:-1]})
    assert "lm_head.weight is [319, 64], but [320, 64] by vocab_size" in refusal(tmp_path)


# -- fingerprint and text ----------------------------------------------------------------------------------------------


def test_fingerprint_follows_the_mathematics_and_nothing_else(tmp_path: Path) -> None:
    a, b = write_tiny(tmp_path / "a", "llama"), write_tiny(tmp_path / "b", "llama")
    base = HfSource(a).fingerprint
    assert len(base) == 64 and HfSource(b).fingerprint == base
    (b / "tokenizer.json").write_text("{}")
    assert HfSource(b).fingerprint == base
    reconfigure(b, rms_norm_eps=1e-4)
    changed_config = HfSource(b).fingerprint
    write_tiny(b, "llama")

    def nudge(tensors: dict[str, np.ndarray]) -> None:
        tensors[Q0][-1, -1] += 1

    changed_weight = HfSource(rewrite(b, nudge)).fingerprint
    sharded = shard(write_tiny(b, "llama"))
    changed_files = HfSource(sharded).fingerprint
    # The same files, but the index takes one tensor from the other of two that hold it.
    place = json.loads((b / INDEX).read_text())["weight_map"]
    other = next(name for name in sorted(set(place.values())) if name != place[Q0])
    tensors = tiny_tensors(tiny_config("llama"))
    doubled = {own: tensors[own] for own in place if place[own] == other} | {Q0: -tensors[Q0]}
    save_safetensors(b / other, doubled)
    doubled_files = HfSource(b).fingerprint
    (b / INDEX).write_text(json.dumps({"weight_map": place | {Q0: other}}))
    assert len({base, changed_config, changed_weight, changed_files, doubled_files, HfSource(b).fingerprint}) == 6


def test_text_files(tmp_path: Path) -> None:
    write_tiny(tmp_path, "llama", eos_token_id=EOS)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    files = HfSource(tmp_path).text_files
    assert set(files) == {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"}
    assert all(content == (tmp_path / name).read_bytes() for name, content in files.items())
    for name in files:
        (tmp_path / name).unlink()
    reconfigure(tmp_path, bos_token_id=REMOVED, eos_token_id=REMOVED)
    assert HfSource(tmp_path).text_files == {}


@pytest.mark.parametrize(
    "in_config, in_generation, expected",
    [
        (EOS, None, {"bos_token_id": BOS, "eos_token_id": EOS}),
        ([EOS, IM_END], None, {"bos_token_id": BOS, "eos_token_id": [EOS, IM_END]}),
        (EOS, {"eos_token_id": IM_END, "top_k": 20}, {"eos_token_id": [IM_END, EOS], "top_k": 20}),
        (EOS, {"eos_token_id": [IM_END, EOS]}, {"eos_token_id": [IM_END, EOS]}),
        ([7, EOS], {"eos_token_id": [IM_END, EOS]}, {"eos_token_id": [IM_END, EOS, 7]}),
        (EOS, {"temperature": 0.6}, {"temperature": 0.6, "eos_token_id": EOS}),
        (None, {"eos_token_id": 7}, {"eos_token_id": 7}),
    ],
)
def test_end_tokens_of_config_and_generation_config(
    tmp_path: Path, in_config: Any, in_generation: dict[str, Any] | None, expected: dict[str, Any]
) -> None:
    write_tiny(tmp_path, "llama", eos_token_id=in_config)
    (tmp_path / "generation_config.json").unlink()
    if in_generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(in_generation))
    assert json.loads(HfSource(tmp_path).text_files["generation_config.json"]) == expected


def test_tiny_tokenizer_is_what_its_description_says(tmp_path: Path) -> None:
    write_tiny(tmp_path, "llama")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "né 42\n<|im_end|>🙂"
    assert tokenizer.encode(text) == [*"né 42\n".encode(), IM_END, *"🙂".encode()]
    assert tokenizer.decode(tokenizer.encode(text)) == text and len(tokenizer) == 260
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], add_generation_prompt=True, tokenize=False)
    assert chat == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_missing_and_unused_tensors_are_all_named(tmp_path: Path) -> None:
    write_tiny(tmp_path, "llama")

    def change(tensors: dict[str, np.ndarray]) -> None:
        for name in ("model.norm.weight", *(f"model.layers.{i}.mlp.up_proj.weight" for i in range(2))):
            del tensors[name]
        tensors["model.layers.0.self_attn.q_proj.extra"] = np.ones(3, np.float32)
        tensors["model.layers.0.self_attn.q_norm.weight"] = np.ones(16, np.float32)
        tensors["model.layers.2.mlp.down_proj.weight"] = np.ones((64, 96), np.float32)
        tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] = np.ones(1, np.float32)

    assert refusal(rewrite(tmp_path, change)) == (
        f"{tmp_path} does not fit its configuration: missing tensors: model.layers.{{0,1}}.mlp.up_proj.weight, "
        "model.norm.weight; tensors that nothing uses: model.layers.0.mlp.up_proj.weight_scale_inv, "
        "model.layers.0.self_attn.q_norm.weight, model.layers.0.self_attn.q_proj.extra, "
        "model.layers.2.mlp.down_proj.weight."
    )


def test_qk_norms_are_needed_by_qwen3(tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        del tensors["model.layers.1.self_attn.k_norm.weight"]

    message = refusal(rewrite(write_tiny(tmp_path, "qwen3"), change))
    assert "missing tensors: model.layers.1.self_attn.k_norm.weight." in message


def test_a_bias_in_one_layer_is_needed_in_all(tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.1.self_attn.q_proj.bias"] = np.ones(64, np.float32)

    message = refusal(rewrite(write_tiny(tmp_path, "llama", attention_bias=REMOVED), change))
    for name in ("model.layers.0.self_attn.q_proj.bias", "model.layers.{0,1}.self_attn.v_proj.bias"):
        assert name in message


def test_untied_without_a_head(tmp_path: Path) -> None:
    message = refusal(rewrite(write_tiny(tmp_path, "llama"), lambda tensors: tensors.pop("lm_head.weight")))
    assert (
        "lm_head.weight is missing although tie_word_embeddings is false (set it to true if the head is tied)"
        in message
    )
    assert HfSource(reconfigure(tmp_path, tie_word_embeddings=True)).spec.tied
    assert "lm_head.weight is missing" in refusal(reconfigure(tmp_path, tie_word_embeddings=REMOVED))


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"head_dim": 16},
            [f"{Q0} is [128, 64], but [64, 64] by num_attention_heads and head_dim", "q_norm.weight is [32]"],
        ),
        ({"head_dim": REMOVED}, [f"{Q0} is [128, 64], but [64, 64] by num_attention_heads and head_dim"]),
        ({"num_key_value_heads": 4}, ["k_proj.weight is [64, 64], but [128, 64] by num_key_value_heads and head_dim"]),
        ({"intermediate_size": 80}, ["down_proj.weight is [64, 96], but [64, 80] by intermediate_size"]),
        ({"vocab_size": 319}, ["embed_tokens.weight is [320, 64], but [319, 64] by vocab_size"]),
        (
            {"hidden_size": 128},
            ["model.norm.weight is [64], but [128] by hidden_size", f"{Q0} is [128, 64], but [128, 128]"],
        ),
        ({"num_hidden_layers": 1}, ["tensors that nothing uses: model.layers.1.input_layernorm.weight"]),
        ({"num_hidden_layers": 3}, ["missing tensors: model.layers.2.input_layernorm.weight"]),
    ],
)
def test_shapes_that_contradict_the_config(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    message = refusal(reconfigure(write_tiny(tmp_path, "qwen3"), **changes))
    assert all(part in message for part in words), message


def test_a_tensor_of_another_rank(tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[Q0] = tensors[Q0].reshape(64, 64, 1)

    assert f"{Q0} is [64, 64, 1], but [64, 64] by num_attention_heads and head_dim and hidden_size" in refusal(
        rewrite(write_tiny(tmp_path, "llama"), change)
    )


def test_float8_is_refused_with_and_without_its_config(tmp_path: Path) -> None:
    config = tiny_config("llama")
    tensors = tiny_tensors(config) | {"model.layers.0.self_attn.q_proj.weight_scale_inv": np.ones(1, np.float32)}
    write_tiny(tmp_path, "llama", quantization_config={"quant_method": "fp8"})
    save_safetensors(tmp_path / WEIGHTS, tensors, {Q0: "F8_E4M3"})
    assert "quantization_config = {'quant_method': 'fp8'} is not supported" in refusal(tmp_path)
    message = refusal(reconfigure(tmp_path, quantization_config=REMOVED))
    assert f"{Q0} stored as F8_E4M3 (use a checkpoint in F32, F16 or BF16)" in message
    assert "tensors that nothing uses: model.layers.0.self_attn.q_proj.weight_scale_inv" in message
