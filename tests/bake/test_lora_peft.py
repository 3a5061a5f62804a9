"""A merged source beside peft itself: the weights of its merge_and_unload and, because that changes both ends of a tied
model, the logits of the model with the adapter beside it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from anechain.bake.adapter import Adapter
from anechain.bake.family import FAMILIES
from anechain.bake.hf import HfSource
from anechain.bake.lora import Merged
from anechain.bundle.spec import tensors_of
from anechain.judge.oracle import Oracle
from tests.tiny import write_tiny
from tests.tolerances import LORA_MERGE, ORACLE_LOGITS

pytestmark = pytest.mark.filterwarnings("ignore")  # peft's own about tied weights, which is what is tested
PROMPT = (3, 250, 17, 99, 0, 299, 64, 128, 5, 5, 201, 77)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
Alter = Callable[[PeftModel], None]


@dataclass(frozen=True)
class Case:
    """A base and an adapter of it; `rows` resizes the vocabulary first, `alter` changes what no initialisation does."""

    family: str
    config: dict[str, Any]
    base: dict[str, Any]
    rows: int = 0
    tied: bool = False  # what the merged model is
    alters: str = ""  # a part of the names of further parameters that training changed


def case(family: str, base: dict[str, Any] | None = None, rows: int = 0, tied: bool = False, alters: str = "",
         **config: Any) -> Case:  # fmt: skip
    return Case(family, {"target_modules": LINEAR, "r": 4, "lora_alpha": 6} | config, base or {}, rows, tied, alters)


BIASED = {"attention_bias": True, "mlp_bias": True}
CASES = {
    "plain": case("llama", target_modules=["q_proj", "v_proj"]),
    "every-linear": case("llama", target_modules="all-linear"),
    "rslora": case("llama", r=9, lora_alpha=16, use_rslora=True),
    "dora": case("llama", use_dora=True),
    "dora-rslora": case("qwen3", use_dora=True, use_rslora=True, tied=True),
    "patterns": case(
        "llama",
        r=8,
        lora_alpha=16,
        rank_pattern={"layers.1.self_attn.q_proj": 2, "^model.layers.0.mlp.(up|gate)_proj": 3, "_proj": 5},
        alpha_pattern={"q_proj": 64, r"1\..*down_proj": 7, "self_attn.q_proj": 1},
    ),
    "rslora-patterns": case("llama", use_rslora=True, rank_pattern={"o_proj": 9}, alpha_pattern={"k_proj": 1.5}),
    "layers": case("llama", layers_to_transform=[1]),
    "layers-pattern": case("qwen3", layers_to_transform=0, layers_pattern="layers", tied=True),
    "excluded": case("llama", exclude_modules=["k_proj"]),
    "regex": case("qwen3", target_modules=r".*\.(0|1)\..*(q|down)_proj", tied=True),
    "bias-in-the-lora": case("llama", BIASED, lora_bias=True),
    "bias-all": case("llama", BIASED, bias="all", target_modules=ATTENTION, alters=".bias"),
    "bias-lora-only": case(
        "llama", BIASED, bias="lora_only", target_modules=["q_proj", "up_proj"], alters="q_proj.base_layer.bias"
    ),
    "bias-both": case("llama", BIASED, bias="lora_only", lora_bias=True, alters=".base_layer.bias"),
    "norms-saved": case("qwen3", modules_to_save=["norm", "input_layernorm"], alters="norm.modules_to_save", tied=True),
    "head-saved": case("llama", modules_to_save=["lm_head"], alters="lm_head.modules_to_save"),
    "both-saved": case("llama", modules_to_save=["lm_head", "embed_tokens"], alters="modules_to_save"),
    "both-ends": case("llama", target_modules=["lm_head", "embed_tokens", "q_proj"]),
    "both-ends-dora": case("llama", target_modules=["lm_head", "embed_tokens"], use_dora=True, use_rslora=True),
    "qwen2": case("qwen2", bias="all", alters="q_proj.base_layer.bias", tied=True),
    "mistral": case("mistral", use_dora=True),
    "gemma3": case("gemma3_text", use_dora=True, modules_to_save=["norm"], alters="norm.modules_to_save", tied=True),
    "gemma3-embedding": case("gemma3_text", target_modules=["embed_tokens", "o_proj"], r=16),
    "resized": case("llama", rows=324),
    "resized-both-ends": case("llama", rows=352, target_modules=["lm_head", "embed_tokens"]),
    "minor-components": case("llama", init_lora_weights="mica"),
    "tied-embedding": case("qwen3", target_modules=["embed_tokens"]),
    "tied-head": case("qwen3", target_modules=["lm_head", "q_proj"]),
    "tied-both": case("qwen3", target_modules=["lm_head", "embed_tokens"]),
    "tied-both-dora": case("qwen3", target_modules=["lm_head", "embed_tokens"], use_dora=True),
    "tied-embedding-saved": case("qwen3", modules_to_save=["embed_tokens"], alters="modules_to_save"),
    "tied-head-saved": case("qwen3", modules_to_save=["lm_head"], alters="modules_to_save"),
    "tied-head-saved-embedding": case(
        "qwen3", target_modules=["embed_tokens"], modules_to_save=["lm_head"], alters="modules_to_save"
    ),
    "tied-together": case("qwen3", target_modules=["embed_tokens"], ensure_weight_tying=True, tied=True),
    "tied-together-saved": case(
        "qwen3", modules_to_save=["embed_tokens"], ensure_weight_tying=True, tied=True, alters="modules_to_save"
    ),
    "tied-resized": case("qwen3", rows=324, tied=True),
    "tied-resized-embedding": case("qwen3", rows=324, target_modules=["embed_tokens"]),
    "tied-resized-head": case("qwen3", rows=324, target_modules=["lm_head"]),
    "tied-resized-saved": case(
        "qwen3", rows=324, modules_to_save=["embed_tokens", "lm_head"], alters="modules_to_save"
    ),
    "tied-resized-embedding-saved": case("qwen3", rows=324, modules_to_save=["embed_tokens"], alters="modules_to_save"),
    "tied-resized-mixed": case(
        "qwen3", rows=324, target_modules=["lm_head"], modules_to_save=["embed_tokens"], alters="modules_to_save"
    ),
    "tied-shrunk": case("qwen3", rows=300, tied=True, target_modules=["v_proj"]),
}  # fmt: skip


def trained(chosen: Case, directory: Path) -> PeftModel:
    """The base in `directory`/base with an adapter that looks trained, saved by peft as `directory`/adapter."""
    torch.manual_seed(7)
    write_tiny(directory / "base", chosen.family, **chosen.base)
    model = AutoModelForCausalLM.from_pretrained(directory / "base", dtype=torch.float32)
    if chosen.rows:
        model.resize_token_embeddings(chosen.rows, mean_resizing=False)
    peft = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **{"init_lora_weights": False} | chosen.config))
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_magnitude" in name:
                parameter *= torch.rand_like(parameter) + 0.5
            elif "lora_" in name and not chosen.config.get("ensure_weight_tying"):
                parameter += 0.2 * torch.randn_like(parameter)
            elif chosen.alters and chosen.alters in name:
                parameter += 0.5 * torch.randn_like(parameter)
    peft.save_pretrained(directory / "adapter")
    return peft.eval()


@pytest.mark.parametrize("name", CASES)
def test_weights_and_logits_are_pefts(name: str, tmp_path: Path) -> None:
    chosen = CASES[name]
    peft = trained(chosen, tmp_path)
    source = Merged(HfSource(tmp_path / "base"), Adapter(tmp_path / "adapter"))
    assert source.spec.tied == chosen.tied and source.spec.vocab_size == (chosen.rows or 320)

    prompt = np.array([*PROMPT, source.spec.vocab_size - 1])
    with torch.no_grad():
        wanted = peft(torch.tensor(prompt)[None]).logits[0].numpy()
    oracle = Oracle(source)
    got = oracle.logits(oracle.forward([prompt])[0])
    assert got.shape == wanted.shape and np.abs(wanted).max() > 1
    assert np.abs(got - wanted).max() <= ORACLE_LOGITS * max(1.0, float(np.abs(wanted).max()))

    merged = peft.merge_and_unload().state_dict()
    own = FAMILIES[chosen.family].names.own
    # Of a tied model peft adds every product to the one matrix that both ends still are, even twice.
    ends = chosen.family in ("llama", "mistral") or (
        chosen.tied and "embed_tokens" not in chosen.config["target_modules"]
    )
    names = [n for n in tensors_of(source.spec) if ends or n not in ("embed", "head")]
    assert source.changes.keys() <= {*names, "embed", "head"} and (not ends or source.changes.keys() <= set(names))
    for tensor in names:
        expected = merged[own(tensor)].numpy() + (tensor.endswith("norm") and FAMILIES[chosen.family].norms_less_one)
        found = source.tensor(tensor)
        assert found.shape == expected.shape and found.dtype == np.float32
        assert np.abs(found - expected).max() <= LORA_MERGE * np.abs(expected).max(), tensor
        if tensor in source.changes and source.changes[tensor].a:
            assert not np.array_equal(found, source.base_tensor(tensor)), tensor
