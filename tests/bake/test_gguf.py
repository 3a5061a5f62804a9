"""GgufSource against the safetensors originals and transformers' GGUF loader, and every metadata that is refused."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from anechain.bake.family import FAMILIES
from anechain.bake.gguf import GgufSource
from anechain.bake.gguf_file import GgufFile
from anechain.bake.hf import HfSource
from anechain.bundle.spec import Rope, tensors_of
from anechain.errors import SourceError
from tests.tiny import tiny_config, write_tiny
from tests.tiny_gguf import (
    demo_path,
    gguf_metadata,
    gguf_tensors,
    write_gguf,
    write_tiny_gguf,
)

ROPE_FACTORS = "rope_freqs.weight"


def refusal(path: Path) -> str:
    with pytest.raises(SourceError) as caught:
        GgufSource(path)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".") and str(path) in message
    return message


def assert_same_tensors(source: GgufSource, expected: dict[str, np.ndarray]) -> None:
    """`expected` is by Hugging Face name; bit for bit."""
    names = FAMILIES[source.spec.family].names
    compared = 0
    for name, shape in tensors_of(source.spec).items():
        ours = source.tensor(name)
        assert ours.shape == shape and ours.dtype == np.float32
        np.testing.assert_array_equal(ours.view(np.uint32), expected[names.own(name)].view(np.uint32), err_msg=name)
        compared += 1
    assert compared >= 21


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text"])
def test_equals_the_safetensors_original(tmp_path: Path, family: str) -> None:
    """16 rows a head, fewer key heads than query heads: a permutation that is only right for heads of 4 shows here.

    And every norm of Gemma 3, which its file keeps as what multiplies.
    """
    changes = {"query_pre_attn_scalar": 24} if family == "gemma3_text" else {}  # the head's size, which GGUF leaves out
    original = HfSource(write_tiny(tmp_path, family, **changes))
    source = GgufSource(write_tiny_gguf(tmp_path / "x.gguf", family, **changes))
    eps = float(np.float32(original.spec.rms_eps))
    assert {**source.spec.to_json(), "rms_eps": None} == {**original.spec.to_json(), "rms_eps": None}
    assert source.spec.rms_eps == eps
    names = FAMILIES[family].names
    assert_same_tensors(source, {names.own(name): original.tensor(name) for name in tensors_of(original.spec)})


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_equals_transformers_on_a_tiny_file(tmp_path: Path, family: str) -> None:
    # transformers takes a qwen3 file's head size for 128, whatever the file says
    path = write_tiny_gguf(tmp_path / "x.gguf", family, **({"head_dim": 128} if family == "qwen3" else {}))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name)
    assert_same_tensors(GgufSource(path), {name: t.float().numpy() for name, t in theirs.state_dict().items()})


def test_biases_are_permuted_with_their_rows(tmp_path: Path) -> None:
    changes = {"attention_bias": True, "mlp_bias": True}
    original = HfSource(write_tiny(tmp_path, "llama", **changes))
    source = GgufSource(write_tiny_gguf(tmp_path / "x.gguf", "llama", **changes))
    assert source.spec.qkv_bias and source.spec.o_bias and source.spec.ffn_bias
    names = FAMILIES["llama"].names
    assert_same_tensors(source, {names.own(name): original.tensor(name) for name in tensors_of(original.spec)})


def test_demo_equals_transformers(tmp_path: Path) -> None:
    """On three of its blocks and without its vocabulary, over which gguf's reader takes seconds."""
    blocks = (0, 11, 29)
    demo = GgufSource(demo_path())
    file = GgufFile(demo_path())
    places = {f"blk.{block}.": f"blk.{i}." for i, block in enumerate(blocks)}
    tensors, kinds = {}, {}
    for name, tensor in file.tensors.items():
        place = next((place for place in places if name.startswith(place)), None)
        if place is None and name.startswith("blk."):
            continue
        new_name = name if place is None else name.replace(place, places[place])
        raw = np.fromfile(file.path, np.uint8, tensor.end - tensor.begin, offset=tensor.begin)
        rows = raw.reshape(*tensor.shape[:-1], tensor.row_bytes)
        tensors[new_name] = rows.view(np.float32) if tensor.kind == Type.F32 else rows
        kinds[new_name] = tensor.kind
    assert set(kinds.values()) == {Type.F32, Type.Q4_1, Type.Q8_0}
    metadata = {k.removeprefix("llama."): v for k, v in file.metadata.items() if k.startswith("llama.")}
    path = write_gguf(tmp_path / "x.gguf", "llama", tensors, metadata | {"block_count": 3}, kinds=kinds)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name)
    excerpt = GgufSource(path)
    assert_same_tensors(excerpt, {name: t.float().numpy() for name, t in theirs.state_dict().items()})
    for name in ("embed", "layers.29.q", "layers.11.down"):
        place = name.replace("29", "2").replace("11", "1")
        np.testing.assert_array_equal(demo.tensor(name), excerpt.tensor(place))
    config, spec = theirs.config, demo.spec
    assert spec.attentions[0].rope == Rope(config.rope_parameters["rope_theta"]) == Rope(100000.0)
    assert (spec.n_kv_heads, spec.head_dim) == (config.num_key_value_heads, config.head_dim) == (3, 64)
    assert (spec.rms_eps, spec.max_context) == (config.rms_norm_eps, config.max_position_embeddings)
    assert spec.tied and spec.n_layers == 30 and len(tensors_of(spec)) == 272


def test_one_matrix_in_several_types(tmp_path: Path) -> None:
    """BF16 arrives as bytes, shapes are stored in reverse: all come out as [rows, columns] float32."""
    name = "blk.0.ffn_down.weight"
    tensors = gguf_tensors("llama")
    exact = tensors[name]
    for kind, worst in ((Type.F16, 2**-11), (Type.BF16, 2**-8), (Type.Q8_0, 1 / 127), (Type.Q4_1, 1 / 15)):
        path = write_gguf(tmp_path / "x.gguf", "llama", tensors, gguf_metadata("llama"), kinds={name: kind})
        ours = GgufSource(path).tensor("layers.0.down")
        assert ours.shape == exact.shape == (64, 96) and ours.dtype == np.float32
        np.testing.assert_array_equal(ours, dequantize(quantize(exact, kind), kind))
        assert 0 < np.abs(ours - exact).max() <= worst * np.abs(exact).max()


def test_quantised_query_rows_are_permuted_after_dequantising(tmp_path: Path) -> None:
    tensors = gguf_tensors("llama")
    kinds = {name: Type.Q8_0 for name in tensors if "attn_q" in name or "attn_k" in name}
    assert len(kinds) == 4
    source = GgufSource(write_gguf(tmp_path / "x.gguf", "llama", tensors, gguf_metadata("llama"), kinds=kinds))
    original = HfSource(write_tiny(tmp_path, "llama"))
    for name in ("layers.0.q", "layers.1.k"):
        exact = original.tensor(name)
        np.testing.assert_array_equal(source.tensor(name), dequantize(quantize(exact, Type.Q8_0), Type.Q8_0))


def test_head(tmp_path: Path) -> None:
    """Without output.weight the model is tied; with it that tensor is the head, whatever else it equals."""
    untied = GgufSource(write_tiny_gguf(tmp_path / "a.gguf", "qwen3", tie_word_embeddings=False))
    assert not untied.spec.tied and not np.array_equal(untied.tensor("head"), untied.tensor("embed"))
    tied = GgufSource(write_tiny_gguf(tmp_path / "b.gguf", "llama", tie_word_embeddings=True))
    assert tied.spec.tied and "head" not in tensors_of(tied.spec)


def test_missing_unused_and_contradicting_tensors(tmp_path: Path) -> None:
    tensors = gguf_tensors("llama")
    del tensors["blk.1.attn_v.weight"]
    tensors["blk.0.attn_q_norm.weight"] = np.ones(16, np.float32)
    tensors["blk.0.ffn_gate_inp.weight"] = np.ones((4, 64), np.float32)
    metadata = gguf_metadata("llama", intermediate_size=80, num_key_value_heads=4)
    message = refusal(write_gguf(tmp_path / "x.gguf", "llama", tensors, metadata))
    for part in (
        "missing tensors: blk.1.attn_v.weight;",
        "tensors that nothing uses: blk.0.attn_q_norm.weight, blk.0.ffn_gate_inp.weight;",
        "blk.0.ffn_up.weight is [96, 64], but [80, 64] by llama.feed_forward_length",
        "blk.0.attn_k.weight is [32, 64], but [64, 64] by llama.attention.head_count_kv and llama.attention.key_length",
    ):
        assert part in message


def with_metadata(path: Path, family: str = "llama", **changes: Any) -> Path:
    """The tiny file with metadata changed (`__` for a dot) or, with None, left out."""
    metadata = gguf_metadata(family) | {key.replace("__", "."): value for key, value in changes.items()}
    kept = {key: value for key, value in metadata.items() if value is not None}
    return write_gguf(path, family, gguf_tensors(family), kept)


def test_what_is_optional(tmp_path: Path) -> None:
    plain = GgufSource(with_metadata(tmp_path / "x.gguf")).spec
    absent = {"vocab_size": None, "rope__dimension_count": None, "rope__freq_base": None}
    harmless = {
        "attention__causal": True, "expert_count": 0, "tensor_data_layout": "Meta AI original pth",
        "rope__scaling__type": "none",
    }  # fmt: skip
    explicit = {"attention__key_length": 16, "attention__value_length": 16}
    for changes in (absent, harmless, explicit):
        assert GgufSource(with_metadata(tmp_path / "y.gguf", **changes)).spec == plain
    all_heads = gguf_tensors("llama", num_key_value_heads=4)
    metadata = {key: v for key, v in gguf_metadata("llama").items() if key != "attention.head_count_kv"}
    assert GgufSource(write_gguf(tmp_path / "z.gguf", "llama", all_heads, metadata)).spec.n_kv_heads == 4


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"block_count": None, "context_length": None},
            ["llama.block_count is missing", "llama.context_length is missing"],
        ),
        ({"attention__layer_norm_rms_epsilon": None}, ["llama.attention.layer_norm_rms_epsilon is missing"]),
        ({"attention__head_count": [4, 4]}, ["llama.attention.head_count = [4, 4] (use a whole number"]),
        ({"embedding_length": "64"}, ["llama.embedding_length = '64'"]),
        (
            {"expert_count": 8, "logit_scale": 0.5},
            ["llama.expert_count = 8 is not understood", "llama.logit_scale = 0.5"],
        ),
        ({"attention__sliding_window": 4096}, ["llama.attention.sliding_window = 4096 is not understood"]),
        ({"attention__causal": False}, ["llama.attention.causal = False is not understood"]),
        ({"rope__scaling__attn_factor": 2.0}, ["llama.rope.scaling.attn_factor = 2.0 is not understood"]),
        ({"rope__dimension_count": 8}, ["llama.rope.dimension_count = 8: only the head's size 16 is supported"]),
        ({"attention__value_length": 8}, ["llama.attention.value_length = 8: only the head's size 16 is supported"]),
        ({"rope__scaling__type": "longrope"}, ["rope_type = 'longrope' (the supported ones are default, linear"]),
        ({"rope__scaling__type": "linear"}, ["rope_type 'linear' without factor"]),
        ({"rope__freq_base": -1.0}, ["rope_theta = -1.0"]),
    ],
)
def test_metadata_that_is_refused(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    message = refusal(with_metadata(tmp_path / "x.gguf", **changes))
    assert all(part in message for part in words), message


def test_rope_scaling(tmp_path: Path) -> None:
    linear = Rope(10000.0, "linear", 4.0)
    for changes in ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, {"rope__scale_linear": 4.0}):
        assert GgufSource(with_metadata(tmp_path / "x.gguf", **changes)).spec.attentions[0].rope == linear
    yarn = {
        "rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 128,
        "rope__scaling__yarn_beta_fast": 16.0, "rope__scaling__yarn_beta_slow": 2.0,
    }  # fmt: skip
    assert GgufSource(with_metadata(tmp_path / "x.gguf", "qwen3", **yarn)).spec.attentions[0].rope == Rope(
        1e6, "yarn", 4.0, original_context=128, beta_fast=16.0, beta_slow=2.0, attention_factor=0.1 * math.log(4) + 1
    )


def llama3_divisors(
    original: int, factor: float, head_dim: int = 16, low: float = 1.0, high: float = 4.0
) -> np.ndarray:
    """By what transformers divides each frequency, in float32."""
    scaling = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }  # fmt: skip
    config = AutoConfig.for_model(**tiny_config("llama", rope_scaling=scaling, max_position_embeddings=4 * original))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 10000.0 ** -(np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    return (plain / scaled.numpy()).astype(np.float32)


@pytest.mark.parametrize("original, metadata", [(8192, {}), (256, {"rope.scaling.original_context_length": 256})])
def test_frequency_divisors_are_understood_as_llama3(tmp_path: Path, original: int, metadata: dict[str, Any]) -> None:
    divisors = llama3_divisors(original, 8.0)
    assert divisors[0] == pytest.approx(1) and divisors[-1] == pytest.approx(8) and len(set(divisors.round(3))) > 2
    tensors = gguf_tensors("llama") | {ROPE_FACTORS: divisors}
    source = GgufSource(write_gguf(tmp_path / "x.gguf", "llama", tensors, gguf_metadata("llama") | metadata))
    rope = source.spec.attentions[0].rope
    assert rope.factor == pytest.approx(8.0, rel=1e-6)
    assert rope == Rope(10000.0, "llama3", rope.factor, 1.0, 4.0, original)


@pytest.mark.parametrize(
    "divisors, metadata",
    [
        (llama3_divisors(8192, 8.0, low=2.0), {}),
        (llama3_divisors(4096, 8.0), {}),
        (llama3_divisors(8192, 8.0)[:-1], {}),
        (llama3_divisors(8192, 8.0)[::-1].copy(), {}),
        (llama3_divisors(8192, 8.0), {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}),
    ],
)
def test_other_frequency_divisors_are_refused(tmp_path: Path, divisors: np.ndarray, metadata: dict[str, Any]) -> None:
    tensors = gguf_tensors("llama") | {ROPE_FACTORS: divisors}
    path = write_gguf(tmp_path / "x.gguf", "llama", tensors, gguf_metadata("llama") | metadata)
    assert (
        "rope_freqs.weight that are not those of llama3 scaling (low 1.0, high 4.0, original context 8192)"
        in refusal(path)
    )


@pytest.mark.parametrize(
    "architecture, general, words",
    [
        (
            "smollm3",
            {},
            "has architecture 'smollm3' and type 'model': a model of llama or qwen2 or qwen3 or",
        ),
        ("llama", {"general.type": "adapter"}, "has architecture 'llama' and type 'adapter'"),
        ("llama", {"split.count": 3}, "is one of 3 parts: join them with `gguf-split --merge`"),
    ],
)
def test_files_of_another_kind(tmp_path: Path, architecture: str, general: dict[str, Any], words: str) -> None:
    path = write_gguf(tmp_path / "x.gguf", architecture, gguf_tensors("llama"), gguf_metadata("llama"), general)
    assert words in refusal(path)


def test_fingerprint(tmp_path: Path) -> None:
    a, b = (write_tiny_gguf(tmp_path / name, "llama") for name in ("a.gguf", "b.gguf"))
    assert GgufSource(a).fingerprint == GgufSource(b).fingerprint and len(GgufSource(a).fingerprint) == 64
    content = bytearray(b.read_bytes())
    content[-40] ^= 1
    b.write_bytes(content)
    assert GgufSource(a).fingerprint != GgufSource(b).fingerprint
