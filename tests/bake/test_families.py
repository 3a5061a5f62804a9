"""qwen2, mistral, gemma3_text and the multimodal gemma3: what each config says, and what each may not say."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig

from anechain.bake.family import FAMILIES, spec_of
from anechain.bake.hf import HfSource
from anechain.bundle.spec import Attention, ModelSpec, Rope
from anechain.errors import SourceError
from tests.tiny import REMOVED, reconfigure, save_safetensors, tiny_config, tiny_shapes, tiny_tensors, write_tiny

WHERE = "dir/config.json"
GEMMA = "gemma3_text"
LINEAR = {"rope_type": "linear", "factor": 8.0}
FULL, SLIDING = "full_attention", "sliding_attention"


def spec_from(config: dict[str, Any], tensors: Any = None) -> ModelSpec:
    names = FAMILIES[config["model_type"]].names
    present = [names.canonical(own) for own in (tiny_shapes(config) if tensors is None else tensors)]
    return spec_of(config, [name for name in present if name], WHERE)


def spec(family: str, **changes: Any) -> ModelSpec:
    return spec_from(tiny_config(family, **changes))


def refusal(family: str, **changes: Any) -> str:
    with pytest.raises(SourceError) as caught:
        spec_from(tiny_config(family, **changes), tiny_shapes(tiny_config(family)))
    assert "\n" not in str(caught.value) and WHERE in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("family", ["qwen2", "mistral", GEMMA])
def test_spec_is_what_transformers_reads(family: str) -> None:
    config = tiny_config(family)
    theirs, ours = AutoConfig.for_model(**config), spec(family)
    assert ours.family == family
    assert (ours.n_layers, ours.n_heads, ours.n_kv_heads) == (
        theirs.num_hidden_layers, theirs.num_attention_heads, theirs.num_key_value_heads,
    )  # fmt: skip
    assert (ours.vocab_size, ours.hidden_size, ours.ffn_size) == (320, 64, 96)
    assert (ours.rms_eps, ours.max_context, ours.tied) == (
        theirs.rms_norm_eps, theirs.max_position_embeddings, theirs.tie_word_embeddings,
    )  # fmt: skip
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 16)
    if family == GEMMA:
        kinds = [f"{ours.attentions[kind].name}_attention" for kind in ours.layer_attention]
        assert kinds == theirs.layer_types == [SLIDING, SLIDING, FULL] * 2 or theirs.layer_types is None
        assert {a.name: a.window for a in ours.attentions} == {"full": None, "sliding": theirs.sliding_window}
        assert ours.attention_scale == theirs.query_pre_attn_scalar**-0.5
        assert ours.embedding_scale == 8.0 and ours.activation == "gelu_tanh"


@pytest.mark.parametrize("family", ["qwen2", "mistral", GEMMA])
def test_defaults_are_those_of_transformers(family: str) -> None:
    """A published config may leave out whatever has its type's default."""
    needed = {"model_type", "hidden_size", "intermediate_size", "num_hidden_layers"}
    if family != GEMMA:  # the others' published configs state these
        needed |= {"vocab_size", "num_attention_heads"}
    config = {key: value for key, value in tiny_config(family).items() if key in needed}
    if family == "mistral":
        config["num_attention_heads"] = 16  # of which its 8 key heads are a part
    theirs = AutoConfig.for_model(**config)
    ours = spec_of(config, [], WHERE)
    assert ours.n_heads == theirs.num_attention_heads and ours.vocab_size == theirs.vocab_size
    assert ours.rms_eps == theirs.rms_norm_eps and ours.tied is theirs.tie_word_embeddings
    assert ours.max_context == theirs.max_position_embeddings
    if family != "qwen2":  # its 32 heads are not the default of a model with fewer; the tensors' shapes decide
        assert ours.n_kv_heads == theirs.num_key_value_heads
    if family == GEMMA:
        parameters = theirs.rope_parameters
        assert spec(GEMMA, rope_theta=REMOVED, rope_local_base_freq=REMOVED, rope_scaling=None).attentions == (
            Attention("full", Rope(parameters[FULL]["rope_theta"])),
            Attention("sliding", Rope(parameters[SLIDING]["rope_theta"]), 8),
        )
        assert (ours.head_dim, ours.attention_scale) == (theirs.head_dim, theirs.query_pre_attn_scalar**-0.5)
    else:
        assert ours.attentions[0].rope == Rope(theirs.rope_parameters["rope_theta"])
    windows = {a.window for a in ours.attentions} - {None}
    assert windows == (set() if family == "qwen2" else {theirs.sliding_window})


def test_the_scale_of_an_embedding_is_the_root_in_float32() -> None:
    """640 has no whole root: float32's is meant, which is neither the exact one nor bfloat16's 25.25."""
    assert spec(GEMMA, hidden_size=640).embedding_scale == float(np.float32(640**0.5)) != 640**0.5


def test_mistral_s_window() -> None:
    assert spec("mistral").attentions == (Attention("sliding", Rope(10000.0), 8),)
    assert spec("mistral", sliding_window=None).attentions == (Attention("full", Rope(10000.0)),)
    assert spec("mistral", sliding_window=REMOVED).attentions[0].window == 4096
    assert spec("mistral", layer_types=[SLIDING] * 2).attentions[0].window == 8
    assert spec("mistral", head_dim=None).head_dim == 16


def test_qwen2_always_has_three_biases(tmp_path: Path) -> None:
    ours = spec("qwen2")
    assert (ours.qkv_bias, ours.o_bias, ours.ffn_bias) == (True, False, False)
    assert spec("qwen2", attention_bias=True) == ours == spec("qwen2", sliding_window=None, max_window_layers=28)
    write_tiny(tmp_path, "qwen2")
    tensors = tiny_tensors(tiny_config("qwen2"))
    extra = {"model.layers.0.self_attn.o_proj.bias": np.ones(64, np.float32)}
    save_safetensors(tmp_path / "model.safetensors", tensors | extra)
    with pytest.raises(SourceError, match=r"tensors that nothing uses: model\.layers\.0\.self_attn\.o_proj\.bias"):
        HfSource(tmp_path)
    bare = {name: values for name, values in tensors.items() if not name.endswith(".bias")}
    save_safetensors(tmp_path / "model.safetensors", bare)
    with pytest.raises(SourceError, match=r"missing tensors: model\.layers\.\{0,1\}\.self_attn\.q_proj\.bias"):
        HfSource(tmp_path)


@pytest.mark.parametrize(
    "family, changes, words",
    [
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window = True is not supported (only False is)"),
        ("qwen2", {"attention_bias": False}, "attention_bias = False is not supported (only True is)"),
        ("qwen2", {"layer_types": [FULL, SLIDING]}, "layer_types = "),
        ("qwen2", {"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "rope_type = 'mrope'"),
        ("mistral", {"sliding_window": 0}, "sliding_window = 0 (use a whole number of at least 1)"),
        ("mistral", {"sliding_window": "8"}, "sliding_window = '8'"),
        ("mistral", {"sliding_window": None, "layer_types": [SLIDING] * 2}, "(only full_attention, 2 times, is)"),
        ("mistral", {"layer_types": [FULL] * 2}, "(only sliding_attention, 2 times, is)"),
        ("mistral", {"attention_bias": True}, "attention_bias = True is not supported"),
        ("mistral", {"num_local_experts": 8}, "num_local_experts = 8 is not supported"),
        (GEMMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported"),
        (GEMMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not supported"),
        (GEMMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention = True is not supported"),
        (GEMMA, {"hidden_activation": "gelu"}, "hidden_activation = 'gelu' is not supported (only 'gelu_pytorch_tanh'"),
        (GEMMA, {"hidden_act": "silu"}, "hidden_act = 'silu' is not supported"),
        (GEMMA, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0 (use a positive number)"),
        (GEMMA, {"sliding_window": None}, "sliding_window is missing"),
        (GEMMA, {"sliding_window_pattern": 0}, "sliding_window_pattern = 0"),
        (GEMMA, {"_sliding_window_pattern": 2}, "sliding_window_pattern = 3 and _sliding_window_pattern = 2 differ"),
        (GEMMA, {"layer_types": [FULL] * 6}, "and sliding_window_pattern = 3 (they differ: keep the right one)"),
        (GEMMA, {"layer_types": [FULL] * 5}, "for each of 6 layers"),
        (GEMMA, {"layer_types": [FULL] * 5 + ["chunked_attention"]}, "for each of 6 layers"),
        (GEMMA, {"rope_local_base_freq": -1}, "top-level rope_local_base_freq = -1 (use a positive number) of sliding"),
        (
            GEMMA,
            {"rope_parameters": {SLIDING: {"rope_theta": 2e4}}},
            "rope_theta in rope_parameters = 20000.0 and top-level rope_local_base_freq = 10000.0 (they differ: keep",
        ),
        (GEMMA, {"rope_parameters": {FULL: {"rope_theta": 2e4}}}, "= 20000.0 and top-level rope_theta = 1000000.0"),
        (GEMMA, {"rope_parameters": {FULL: LINEAR | {"factor": 4.0}}}, "rope_parameters and rope_scaling differ"),
        (GEMMA, {"rope_parameters": LINEAR}, "(one set for full_attention and one for sliding_attention is understood"),
        (GEMMA, {"rope_parameters": {"chunked_attention": LINEAR}}, "(one set for full_attention and one for sliding"),
        (GEMMA, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
        (GEMMA, {"no_rope_layers": [1, 0]}, "no_rope_layers = [1, 0] is not supported"),
        (GEMMA, {"num_kv_shared_layers": 2}, "num_kv_shared_layers = 2 is not understood"),
    ],
)
def test_what_is_refused(family: str, changes: dict[str, Any], words: str) -> None:
    assert words in refusal(family, **changes)


def test_gemma_norms_and_heads_are_needed(tmp_path: Path) -> None:
    write_tiny(tmp_path, GEMMA)
    kept = {name: v for name, v in tiny_tensors(tiny_config(GEMMA)).items() if "pre_feedforward" not in name}
    save_safetensors(tmp_path / "model.safetensors", kept)
    with pytest.raises(SourceError, match=r"missing tensors: model\.layers\.\{0\.\.5\}\.pre_feedforward_layernorm"):
        HfSource(tmp_path)


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "gptq", "bits": 4}, {"quant_method": "awq"},
        {"quant_method": "bitsandbytes", "load_in_4bit": True}, {"quant_method": "compressed-tensors"},
        {"quant_method": "fp8"}, {},
    ],
)  # fmt: skip
def test_quantised_checkpoints_are_refused(tmp_path: Path, quantization: dict[str, Any]) -> None:
    """By the config; and, when a tool took that out, by the tensors that nothing uses."""
    write_tiny(tmp_path, "llama", quantization_config=quantization)
    with pytest.raises(SourceError, match=r"quantization_config = .* is not supported"):
        HfSource(tmp_path)
    tensors = tiny_tensors(tiny_config("llama"))
    packed = tensors.pop("model.layers.0.self_attn.q_proj.weight")
    for name in ("qweight", "qzeros", "scales", "g_idx"):
        tensors[f"model.layers.0.self_attn.q_proj.{name}"] = packed
    save_safetensors(tmp_path / "model.safetensors", tensors)
    reconfigure(tmp_path, quantization_config=REMOVED)
    with pytest.raises(SourceError) as caught:
        HfSource(tmp_path)
    for name in ("weight", "qweight", "qzeros", "scales", "g_idx"):
        assert f"model.layers.0.self_attn.q_proj.{name}" in str(caught.value)


def test_the_documented_family_is_the_real_one() -> None:
    """Every line that docs/families.md adds to a file is in that file, in that order and without a gap."""
    repo = Path(__file__).parents[2]
    text = (repo / "docs/families.md").read_text(encoding="utf-8")
    diff = text.partition("```diff\n")[2].partition("```")[0]
    files = {part.partition("\n")[0]: part for part in diff.split("+++ b/")[1:]}
    assert len(files) == 3
    for name, part in files.items():
        added = [line[1:] for line in part.splitlines() if line.startswith("+")]
        assert len(added) >= 3 and "\n".join(added) in (repo / name).read_text(encoding="utf-8"), name


# -- the multimodal wrapper --------------------------------------------------------------------------------------------


def wrapped(folder: Path, root: str = "model.language_model.", drop: str = "", add: str = "", **outer: Any) -> Path:
    write_tiny(folder, GEMMA)
    text = tiny_config(GEMMA, tie_word_embeddings=REMOVED, eos_token_id=REMOVED)
    tensors = {
        name.replace("model.", root, 1): v for name, v in tiny_tensors(tiny_config(GEMMA)).items() if name != drop
    }
    tensors["vision_tower.x.weight"] = np.ones(3, np.float32)
    if add:
        tensors[add] = np.ones(3, np.float32)
    save_safetensors(folder / "model.safetensors", tensors)
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 4}} | outer
    kept = {name: value for name, value in config.items() if value is not REMOVED}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def wrapper_refusal(*given: Any, **changes: Any) -> str:
    with pytest.raises(SourceError) as caught:
        HfSource(wrapped(*given, **changes))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_text_tensor_still_fails(tmp_path: Path) -> None:
    for root in ("model.language_model.", "language_model.model."):
        message = wrapper_refusal(tmp_path / root, root, "model.layers.1.mlp.up_proj.weight")
        assert f"missing tensors: {root}layers.1.mlp.up_proj.weight." in message


def test_no_text_tensors_at_all(tmp_path: Path) -> None:
    assert "missing tensors: model.language_model.embed_tokens.weight" in wrapper_refusal(tmp_path, "text.")


def test_a_tensor_of_neither_model(tmp_path: Path) -> None:
    for i, extra in enumerate(
        ("audio_tower.x", "model.layers.0.mlp.up_proj.weight", "language_model.model.norm.weight")
    ):
        message = wrapper_refusal(tmp_path / str(i), add=extra)
        assert extra in message


def test_fields_beside_the_text_config(tmp_path: Path) -> None:
    plain = HfSource(write_tiny(tmp_path / "plain", GEMMA)).spec
    ignored = {
        "mm_tokens_per_image": 256,
        "image_token_index": 300,
        "torch_dtype": "bfloat16",
        "transformers_version": "5",
    }
    assert HfSource(wrapped(tmp_path / "a", tie_word_embeddings=True, **ignored)).spec == plain
    for field, value in {"head_dim": 8, "rope_theta": 5.0, "audio_config": {"x": 1}}.items():
        message = wrapper_refusal(tmp_path / field, **{field: value})
        assert f"{field} = {value!r} is not understood beside text_config" in message
    assert "lm_head.weight is missing although tie_word_embeddings is false" in wrapper_refusal(
        tmp_path / "b", tie_word_embeddings=False
    )
    assert "quantization_config = {'quant_method': 'gptq'} is not supported" in wrapper_refusal(
        tmp_path / "c", quantization_config={"quant_method": "gptq"}
    )
    inside = tiny_config(GEMMA)
    ends = HfSource(wrapped(tmp_path / "h", text_config=inside | {"eos_token_id": 5}, eos_token_id=[1, 5])).text_files
    assert json.loads(ends["generation_config.json"])["eos_token_id"] == [257, 258, 5, 1], "either is an end"
    assert "tie_word_embeddings = False and True in text_config (they differ" in wrapper_refusal(
        tmp_path / "d", tie_word_embeddings=False, text_config=inside
    )
    assert "has model_type 'gemma3' and no text_config: fetch it again." in wrapper_refusal(
        tmp_path / "e", text_config=REMOVED
    )
    other = inside | {"model_type": "gemma4_text"}
    assert "has model_type 'gemma4_text', which is not supported" in wrapper_refusal(tmp_path / "f", text_config=other)
    assert HfSource(wrapped(tmp_path / "g", text_config=tiny_config(GEMMA, model_type=REMOVED))).spec == plain


def test_float8_vision_tensors_are_nobody_s_business(tmp_path: Path) -> None:
    wrapped(tmp_path)
    tensors = {n.replace("model.", "model.language_model.", 1): v for n, v in tiny_tensors(tiny_config(GEMMA)).items()}
    tensors["model.vision_tower.x.weight"] = np.ones(3, np.float32)
    save_safetensors(tmp_path / "model.safetensors", tensors, {"model.vision_tower.x.weight": "F8_E4M3"})
    assert HfSource(tmp_path).notes == (
        "1 tensors of other than the text model are skipped: what is baked reads text only",
    )
