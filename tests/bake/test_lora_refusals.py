"""Adapters that are refused: each with one sentence that names what is at fault, all of it, and how much of it fits."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from anechain.bake.adapter import Adapter
from anechain.bake.hf import HfSource
from anechain.bake.lora import Merged, open_merged
from anechain.errors import SourceError
from tests.tiny import REMOVED, write_tiny
from tests.tiny_lora import PREFIX, pair, random, write_adapter

Q0, Q1, Q2 = (f"model.layers.{i}.self_attn.q_proj" for i in (0, 1, 2))
K0 = "model.layers.0.self_attn.k_proj"
Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {
        "llama": write_tiny(folder / "llama", "llama"),
        "qwen3": write_tiny(folder / "qwen3", "qwen3"),
        "biased": write_tiny(folder / "biased", "llama", attention_bias=True),
    }


def refusal(base: Path, adapter: Path) -> str:
    """The sentence, without what both folders are called."""
    with pytest.raises(SourceError) as caught:
        Merged(HfSource(base), Adapter(adapter))
    text = str(caught.value)
    assert text.endswith(".") and "\n" not in text and ": " in text
    return text.replace(str(adapter), "ADAPTER").replace(str(base), "BASE")


def whole(name: str, shape: tuple[int, ...]) -> Tensors:
    return {f"{PREFIX}{name}": random(name, shape)}


def only(tensors: Tensors, *parts: str) -> Tensors:
    return {key: value for key, value in tensors.items() if any(part in key for part in parts)}


def q(layers: range, inputs: int = 64) -> Tensors:
    return {key: value for i in layers for key, value in pair(f"model.layers.{i}.self_attn.q_proj", 64, inputs).items()}


NAN = {f"{PREFIX}{Q0}.lora_A.weight": np.full((4, 64), np.nan, np.float32)}
# The base, the adapter's tensors, fields of its config; how many tensors match and do not; what is said of these.
FITS: dict[str, tuple[str, Tensors, dict[str, Any], tuple[int, int], str]] = {
    "nothing": ("llama", pair("transformer.h.0.attn.c_attn", 64, 64), {}, (0, 2),
        "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight, "
        "base_model.model.transformer.h.0.attn.c_attn.lora_B.weight (a llama model has no such module)"),
    "multi-modal": ("llama", pair(f"language_model.{Q0}", 64, 64), {}, (0, 2),
        "base_model.model.language_model.model.layers.0.self_attn.q_proj.lora_A.weight, "
        "base_model.model.language_model.model.layers.0.self_attn.q_proj.lora_B.weight "
        "(a llama model has no such module)"),
    "half": ("llama", q(range(2)) | pair("model.layers.1.mlp.experts.3.up_proj", 96, 64), {}, (4, 2),
        "base_model.model.model.layers.1.mlp.experts.3.up_proj.lora_A.weight, "
        "base_model.model.model.layers.1.mlp.experts.3.up_proj.lora_B.weight (a llama model has no such module)"),
    "more-layers": ("llama", q(range(32)), {}, (4, 60),
        "base_model.model.model.layers.{2..31}.self_attn.q_proj.lora_A.weight, "
        "base_model.model.model.layers.{2..31}.self_attn.q_proj.lora_B.weight (the model has 2 layers)"),
    "another-width": ("llama", q(range(2), 128), {}, (2, 2),
        "base_model.model.model.layers.{0,1}.self_attn.q_proj.lora_A.weight ([4, 128] instead of [4, 64])"),
    "a-without-b": ("llama", q(range(2)) | only(pair(K0, 32, 64), "lora_A"), {}, (4, 1),
        "base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight (without its lora_B)"),
    "b-without-a": ("llama", only(pair(K0, 32, 64), "lora_B"), {}, (0, 1),
        "base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight (without its lora_A)"),
    "no-tensors": ("llama", {}, {}, (0, 0), "it holds no tensors"),
    "rank": ("llama", pair(Q0, 64, 64, r=16), {"r": 8}, (0, 2),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight, "
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight (of rank 16, and 8 by r and rank_pattern)"),
    "rank-pattern": ("llama", q(range(2)), {"rank_pattern": {"1.self_attn.q_proj": 2}}, (2, 2),
        "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight, "
        "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight (of rank 4, and 2 by r and rank_pattern)"),
    "one-dimension": ("llama", pair(Q0, 64, 64) | {f"{PREFIX}{Q0}.lora_B.weight": random("b", (256,))}, {}, (1, 1),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight ([256] instead of [64, 4])"),
    "norm": ("llama", pair("model.norm", 64, 64), {}, (0, 2),
        "base_model.model.model.norm.lora_A.weight, base_model.model.model.norm.lora_B.weight "
        "(the model has no matrix there)"),
    "linear-embedding": ("llama", pair("model.embed_tokens", 320, 64), {}, (0, 2),
        "base_model.model.model.embed_tokens.lora_A.weight, base_model.model.model.embed_tokens.lora_B.weight "
        "(an embedding has embedding_A and embedding_B)"),
    "embedded-linear": ("llama", pair(Q0, 64, 64) | whole(f"{Q0}.lora_embedding_A", (4, 64)), {}, (2, 1),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_embedding_A (not for q)"),
    "dora-half": ("llama", q(range(2)) | whole(f"{Q0}.lora_magnitude_vector", (64,)), {"use_dora": True}, (3, 2),
        "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight, "
        "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight "
        "(use_dora is true, and its lora_magnitude_vector is missing)"),
    "dora-off": ("llama", pair(Q0, 64, 64) | whole(f"{Q0}.lora_magnitude_vector", (64,)), {}, (2, 1),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector (use_dora is false)"),
    "bias-off": ("biased", pair(Q0, 64, 64) | whole(f"{Q0}.lora_B.bias", (64,)), {}, (2, 1),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias (lora_bias is false)"),
    "bias-half": ("biased", pair(Q0, 64, 64), {"lora_bias": True}, (0, 2),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight, "
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight "
        "(lora_bias is true, and its lora_B.bias is missing)"),
    "bias-nowhere": ("llama", pair(Q0, 64, 64) | whole(f"{Q0}.lora_B.bias", (64,)), {"lora_bias": True}, (2, 1),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias (the model has no bias there)"),
    "unknown-whole": ("llama", pair(Q0, 64, 64) | whole("score.weight", (2, 64)), {}, (2, 1),
        "base_model.model.score.weight (a llama model has no such module)"),
    "unknown-part": ("llama", pair(Q0, 64, 64) | whole("model.embed_tokens.token_adapter.delta", (2, 64)), {}, (2, 1),
        "base_model.model.model.embed_tokens.token_adapter.delta (no part of a LoRA)"),
    "twice": ("llama", pair(Q0, 64, 64) | whole(f"{Q0}.lora_A.default.weight", (4, 64)), {}, (2, 1),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight (no part of a LoRA)"),
    "two-names": ("llama", pair(Q0, 64, 64) | whole("model.embed_tokens.lora_embedding_A.x.y", (4, 320)), {}, (2, 1),
        "base_model.model.model.embed_tokens.lora_embedding_A.x.y (no part of a LoRA)"),
    "another-method": ("llama", pair(Q0, 64, 64) | whole(f"{Q0}.lora_E.weight", (4, 1)), {}, (2, 1),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_E.weight (a llama model has no such module)"),
    "lora-and-whole": ("llama", pair(Q0, 64, 64) | whole(f"{Q0}.modules_to_save.weight", (64, 64)), {}, (0, 3),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight, "
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight, "
        "base_model.model.model.layers.0.self_attn.q_proj.modules_to_save.weight "
        "(a LoRA and a whole tensor for one place)"),
    "two-wholes": ("llama", whole("lm_head.weight", (320, 64)) | whole("lm_head.modules_to_save.weight", (320, 64)),
        {}, (0, 2),
        "base_model.model.lm_head.modules_to_save.weight, base_model.model.lm_head.weight "
        "(two different tensors for one place)"),
    "two-bases": ("llama", pair("lm_head", 320, 64) | whole("lm_head.weight", (320, 64))
        | whole("lm_head.base_layer.weight", (320, 64)), {}, (2, 2),
        "base_model.model.lm_head.base_layer.weight, base_model.model.lm_head.weight "
        "(two different tensors for one place)"),
    "two-tables": ("qwen3", pair("lm_head", 320, 64) | whole("lm_head.base_layer.weight", (320, 64))
        | whole("model.embed_tokens.lora_embedding_A", (4, 320)) | whole("model.embed_tokens.lora_embedding_B", (64, 4))
        | whole("model.embed_tokens.base_layer.weight", (320, 64)), {}, (4, 2),
        "base_model.model.lm_head.base_layer.weight, base_model.model.model.embed_tokens.base_layer.weight "
        "(two different tables of one tied model)"),
    "rows-at-one-end": ("llama", whole("model.embed_tokens.weight", (324, 64)), {}, (0, 1),
        "base_model.model.model.embed_tokens.weight (324 rows, while lm_head.weight keeps 320)"),
    "rows-at-the-other-end": ("llama", whole("lm_head.weight", (324, 64)), {}, (0, 1),
        "base_model.model.lm_head.weight (324 rows, while model.embed_tokens.weight keeps 320)"),
    "rows-below-a-lora": ("llama", pair("lm_head", 324, 64) | whole("lm_head.base_layer.weight", (324, 64)), {}, (2, 1),
        "base_model.model.lm_head.base_layer.weight (324 rows, while model.embed_tokens.weight keeps 320)"),
    "lora-of-other-rows": ("llama", pair("lm_head", 324, 64), {}, (1, 1),
        "base_model.model.lm_head.lora_B.weight ([324, 4] instead of [320, 4])"),
    "does-the-head-follow": ("qwen3", whole("model.embed_tokens.weight", (320, 64)), {}, (0, 1),
        "base_model.model.model.embed_tokens.weight (the model is tied, and neither a tensor for its head nor "
        "modules_to_save says whether the head follows)"),
    "not-alike": ("qwen3", pair("lm_head", 320, 64), {"ensure_weight_tying": True}, (2, 0),
        "ensure_weight_tying is true, but the embedding and the head do not change alike"),
    "layer-not-named": ("llama", q(range(2)), {"layers_to_transform": [1]}, (2, 2),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight, "
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight (layers_to_transform does not name layer 0)"),
    "layer-not-there": ("llama", q(range(1, 2)), {"layers_to_transform": [1, 0, 7]}, (2, 0),
        "layers_to_transform names 0, 7, without a tensor for them"),
    "not-finite": ("llama", pair(Q0, 64, 64) | NAN, {}, (1, 1),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight (not finite)"),
    "all-at-once": ("llama", q(range(3)) | only(pair(K0, 32, 64), "lora_A") | whole("score.weight", (2, 64)),
        {"layers_to_transform": [0, 1, 5]}, (4, 4),
        "base_model.model.score.weight (a llama model has no such module); "
        "base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight, "
        "base_model.model.model.layers.2.self_attn.q_proj.lora_B.weight (the model has 2 layers); "
        "base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight (without its lora_B); "
        "layers_to_transform names 5, without a tensor for them"),
}  # fmt: skip


@pytest.mark.parametrize("name", FITS)
def test_what_does_not_fit(name: str, bases: dict[str, Path], tmp_path: Path) -> None:
    base, tensors, config, (matching, others), said = FITS[name]
    text = refusal(bases[base], write_adapter(tmp_path / "adapter", tensors, **config))
    total = matching + others
    assert text == (
        f"adapter ADAPTER does not fit BASE: {matching} of its {total} tensors match and {others} do not: {said}: "
        "use the model that it was trained on, and the whole adapter."
    )


def test_a_dtype_that_is_no_float(bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", {})
    save_file(
        {key: values.astype(np.float64) for key, values in pair(Q0, 64, 64).items()},
        adapter / "adapter_model.safetensors",
    )
    assert "lora_B.weight (F64 instead of F32, F16 or BF16)" in refusal(bases["llama"], adapter)


def test_two_adapters_in_one_file(bases: dict[str, Path], tmp_path: Path) -> None:
    both = {
        k.replace(".weight", f".{name}.weight"): v
        for name in ("x", "y")
        for k, v in pair(f"model.layers.{name == 'y':d}.self_attn.q_proj", 64, 64).items()
    }
    text = refusal(bases["llama"], write_adapter(tmp_path / "adapter", both))
    assert text == "adapter ADAPTER holds several adapters, x, y: save the one that is meant alone."


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "qalora": ({"use_qalora": True}, "use_qalora = True is not supported"),
    "alora": ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens = [1, 2] is not supported"),
    "tokens": ({"trainable_token_indices": [1]}, "trainable_token_indices = [1] is not supported"),
    "megatron": ({"megatron_config": {"x": 1}}, "megatron_config = {'x': 1} is not supported"),
    "replication": ({"layer_replication": [[0, 2]]}, "layer_replication = [[0, 2]] is not supported"),
    "parameters": ({"target_parameters": ["experts.up"]}, "target_parameters = ['experts.up'] is not supported"),
    "kasa": ({"kasa_config": {"beta": 1}}, "kasa_config = {'beta': 1} is not supported"),
    "unknown": ({"new_maths": 0.5}, "new_maths = 0.5 is not understood (remove it if no weight depends on it)"),
    "dora-bias": ({"use_dora": True, "lora_bias": True}, "lora_bias does not go together with use_dora"),
    "bias": ({"bias": "some"}, "bias = 'some' (use none, all, lora_only)"),
    "no-r": ({"r": REMOVED}, "r = None (a whole number of at least 1 is needed)"),
    "r": ({"r": 0}, "r = 0 (a whole number of at least 1 is needed)"),
    "alpha": ({"lora_alpha": "16"}, "lora_alpha = '16' (a number is needed)"),
    "no-alpha": ({"lora_alpha": REMOVED}, "lora_alpha = None (a number is needed)"),
    "flag": ({"use_rslora": 1}, "use_rslora = 1 (use true or false)"),
    "pattern": ({"rank_pattern": {"q_proj": 1.5}}, "rank_pattern has 1.5 for 'q_proj'"),
    "pattern-kind": ({"alpha_pattern": [1]}, "alpha_pattern = [1] (an object is needed)"),
    "regex": ({"alpha_pattern": {"(": 1}}, "alpha_pattern has '(', which is no regular expression "
              "(missing ), unterminated subpattern at position 7)"),
    "saved": ({"modules_to_save": "lm_head"}, "modules_to_save = 'lm_head' (a list of names is needed)"),
    "layers": ({"layers_to_transform": ["1"]}, "layers_to_transform = ['1'] (layer numbers are needed)"),
    "several": ({"use_qalora": True, "r": -1}, "r = -1 (a whole number of at least 1 is needed); "
                "use_qalora = True is not supported"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_is_not_understood(name: str, bases: dict[str, Path], tmp_path: Path) -> None:
    changes, said = CONFIGS[name]
    text = refusal(bases["llama"], write_adapter(tmp_path / "adapter", pair(Q0, 64, 64), **changes))
    assert text == f"ADAPTER/adapter_config.json cannot be used: {said}."


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "new", 1])
def test_initialisations_that_change_the_base(init: Any, bases: dict[str, Path], tmp_path: Path) -> None:
    text = refusal(bases["llama"], write_adapter(tmp_path / "adapter", pair(Q0, 64, 64), init_lora_weights=init))
    assert text == (
        f"ADAPTER/adapter_config.json cannot be used: init_lora_weights = {init!r} (such an adapter belongs to weights "
        "that its initialisation changed: save it in peft with path_initial_model_for_weight_conversion, which makes "
        "an ordinary one of it)."
    )


@pytest.mark.parametrize(
    ("kind", "what"), [("LOHA", "peft_type 'LOHA'"), ("ADALORA", "peft_type 'ADALORA'"), (REMOVED, "no peft_type")]
)
def test_another_kind_of_adapter(kind: Any, what: str, bases: dict[str, Path], tmp_path: Path) -> None:
    text = refusal(bases["llama"], write_adapter(tmp_path / "adapter", pair(Q0, 64, 64), peft_type=kind))
    assert text == (f"ADAPTER/adapter_config.json has {what}, and only LORA can be merged: merge it where it was made.")


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("executed"),)


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt"])
def test_a_pickle_is_never_opened(
    name: str, bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    adapter = write_adapter(tmp_path / "adapter", pair(Q0, 64, 64))
    (adapter / name).write_bytes(pickle.dumps(Malicious()))
    assert Adapter(adapter).modules, "beside a safetensors file it does not count"
    (adapter / "adapter_model.safetensors").unlink()
    assert refusal(bases["llama"], adapter) == (
        f"adapter ADAPTER has its weights in {name} only, a pickle, which can run any code when it is opened and is "
        "therefore not opened: where you trust it, convert it with "
        "`PeftModel.from_pretrained(base, DIR).save_pretrained(DIR)`, which writes adapter_model.safetensors."
    )
    assert not (tmp_path / "executed").exists()
    pickle.loads((adapter / name).read_bytes())
    assert (tmp_path / "executed").exists(), "the pickle was harmless"


def test_folders_that_are_no_adapter(bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    give = "give the directory that holds adapter_config.json and adapter_model.safetensors."
    assert refusal(bases["llama"], adapter) == f"adapter ADAPTER is not there: {give}"
    adapter.write_text("")
    assert refusal(bases["llama"], adapter) == f"adapter ADAPTER is not a directory: {give}"
    adapter.unlink()
    adapter.mkdir()
    text = refusal(bases["llama"], adapter)
    assert text == "adapter ADAPTER has no adapter_config.json: give a directory that peft's save_pretrained wrote."
    (adapter / "adapter_config.json").write_text("[]")
    assert refusal(bases["llama"], adapter) == (
        "adapter ADAPTER has no adapter_model.safetensors: save it with peft's save_pretrained."
    )
    (adapter / "adapter_model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    assert "holds no JSON object" in refusal(bases["llama"], adapter)
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4}))
    assert "is a Git LFS pointer" in refusal(bases["llama"], adapter)


def test_a_tokenizer_config_that_is_no_object(bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", pair(Q0, 64, 64))
    (adapter / "tokenizer_config.json").write_text("[]")
    text = refusal(bases["llama"], adapter)
    assert text == "the tokenizer_config.json of adapter ADAPTER or its model holds no JSON object: correct it."


def test_a_base_that_is_not_there_comes_first(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="there is no nowhere"):
        open_merged("nowhere", str(tmp_path / "neither"))
