"""Checkpoints of every family, as they lie on disk: transformers, the oracle and the chain say the same of each."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3ForConditionalGeneration

from anechain.bake.source import Source, open_source
from anechain.bundle.spec import ModelSpec, Rope, tensors_of
from anechain.judge.oracle import Oracle
from anechain.run.chain import Chain
from anechain.run.reference import ReferenceEngine
from tests.bundle_maker import deviation, make_bundle
from tests.judge.cases import CONTEXT, PREFILL
from tests.tiny import FAMILIES, REMOVED, save_safetensors, tiny_config, tiny_tensors, write_tiny
from tests.tolerances import CHAIN_ORACLE, ORACLE_LOGITS

IDS = np.random.default_rng(5).integers(0, 256, CONTEXT)
LINEAR = {"rope_type": "linear", "factor": 8.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
PATTERN = ["sliding_attention", "sliding_attention", "full_attention"] * 2
OLD_ROPES = dict.fromkeys(["rope_theta", "rope_scaling", "rope_local_base_freq"], REMOVED)
NESTED = {
    "full_attention": LINEAR | {"rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
# Spellings of config.json that transformers understands, by family; the first is the plain one.
SPELLINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3": ("llama", {"rope_scaling": LLAMA3, "rope_theta": 200.0}),
    "llama, rope_parameters": ("llama", {"rope_parameters": LLAMA3 | {"rope_theta": 200.0}, "rope_theta": REMOVED}),
    "qwen2": ("qwen2", {}),
    "qwen2 untied": ("qwen2", {"tie_word_embeddings": False, "use_sliding_window": REMOVED}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "mistral, derived head size": ("mistral", {"head_dim": None}),
    "gemma3": ("gemma3_text", {}),
    "gemma3, layer types": ("gemma3_text", {"sliding_window_pattern": REMOVED, "layer_types": PATTERN}),
    "gemma3, nested rope": ("gemma3_text", OLD_ROPES | {"rope_parameters": NESTED}),
    "gemma3, all local": ("gemma3_text", {"sliding_window_pattern": 7}),
    "gemma3, defaults": (
        "gemma3_text",
        OLD_ROPES | {"query_pre_attn_scalar": REMOVED, "sliding_window_pattern": REMOVED, "rope_scaling": None},
    ),
}


@dataclass(frozen=True)
class OnDisk:
    folder: Path
    source: Source


MakeCase = Callable[[str], OnDisk]


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory: pytest.TempPathFactory) -> MakeCase:
    known: dict[str, OnDisk] = {}

    def make(name: str) -> OnDisk:
        if name not in known:
            family, changes = SPELLINGS[name]
            folder = write_tiny(tmp_path_factory.mktemp("family"), family, **changes)
            known[name] = OnDisk(folder, open_source(str(folder)))
        return known[name]

    return make


def oracle_logits(source: Any, spec: ModelSpec | None = None) -> np.ndarray:
    """[CONTEXT, V] f32, of the source as another spec describes it, if there is one."""
    oracle = Oracle(source)
    oracle.spec = spec or source.spec
    return oracle.logits(oracle.forward([IDS])[0])


def torch_logits(folder: Path) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor(IDS[None])).logits[0].numpy()


def relative(got: np.ndarray, wanted: np.ndarray) -> float:
    assert got.shape == wanted.shape == (CONTEXT, 320)
    return float(np.abs(got - wanted).max() / wanted.std())


def test_every_family_is_here() -> None:
    assert {family for family, _ in SPELLINGS.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", SPELLINGS)
def test_the_oracle_is_transformers(name: str, on_disk: MakeCase) -> None:
    case = on_disk(name)
    assert relative(oracle_logits(case.source), torch_logits(case.folder)) < ORACLE_LOGITS


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "gemma3"])
def test_the_chain_is_the_oracle(name: str, on_disk: MakeCase, tmp_path: Path) -> None:
    """One by one and in chunks, at both sides of a window's and of a chunk's edge, to the last position."""
    source = on_disk(name).source
    windows = [a.window for a in source.spec.attentions if a.window]
    positions = sorted({0, 1, 64, CONTEXT - 1, *(w + d for w in windows for d in (-1, 0, 1))})
    wanted = oracle_logits(source)[positions]
    bundle = make_bundle(source, tmp_path / "b", "fp16", CONTEXT, PREFILL)
    for stress in (False, True):
        chain = Chain(bundle, ReferenceEngine(stress))
        session = chain.start()
        pieces = np.split(IDS, np.array(positions[:-1]) + 1)
        assert sum(map(len, pieces)) == CONTEXT
        got = np.array([chain.feed(session, piece) for piece in pieces])
        assert deviation(got, wanted) < CHAIN_ORACLE


def other_ropes(spec: ModelSpec, full: Rope | None = None, sliding: Rope | None = None) -> ModelSpec:
    ropes = {"full": full, "sliding": sliding}
    return replace(spec, attentions=tuple(replace(a, rope=ropes[a.name] or a.rope) for a in spec.attentions))


def other_window(spec: ModelSpec, window: int | None) -> ModelSpec:
    return replace(spec, attentions=tuple(replace(a, window=a.window and window) for a in spec.attentions))


MISREADINGS: dict[str, tuple[str, Callable[[ModelSpec], ModelSpec]]] = {
    "llama3 scaling left out": ("llama 3", lambda s: other_ropes(s, full=Rope(200.0))),
    "query, key and value biases left out": ("qwen2", lambda s: replace(s, qkv_bias=False)),
    "rope base left out": ("qwen2", lambda s: other_ropes(s, full=Rope(10000.0))),
    "window left out": ("mistral", lambda s: other_window(s, None)),
    "window one short": ("mistral", lambda s: other_window(s, 7)),
    "window one long": ("gemma3", lambda s: other_window(s, 9)),
    "local layers scaled": ("gemma3", lambda s: other_ropes(s, sliding=Rope(1e4, "linear", 8.0))),
    "local layers with the global base": ("gemma3", lambda s: other_ropes(s, sliding=Rope(1e6))),
    "global layers without scaling": ("gemma3", lambda s: other_ropes(s, full=Rope(1e6))),
    "another pattern": ("gemma3", lambda s: replace(s, layer_attention=(1, 0) * 3)),
    "scores by the head size": ("gemma3", lambda s: replace(s, attention_scale=24**-0.5)),
    "embedding not scaled": ("gemma3", lambda s: replace(s, embedding_scale=1.0)),
    "silu for gelu": ("gemma3", lambda s: replace(s, activation="silu")),
    "no second norms": ("gemma3", lambda s: replace(s, sandwich_norms=False)),
    "no query and key norms": ("gemma3", lambda s: replace(s, qk_norm=False)),
}


@pytest.mark.parametrize("misreading", MISREADINGS, ids=lambda name: name.replace(" ", "_").replace(",", ""))
def test_a_misread_config_is_far_off(misreading: str, on_disk: MakeCase) -> None:
    name, change = MISREADINGS[misreading]
    source = on_disk(name).source
    spec = change(source.spec)
    assert spec != source.spec
    partial = replace_spec(source, spec)
    assert deviation(oracle_logits(partial, spec), oracle_logits(source)) > 10 * CHAIN_ORACLE


@dataclass
class Respecified:
    """A source of which another spec is said."""

    source: Source
    spec: ModelSpec
    ref: str = "respecified"
    fingerprint: str = ""

    def tensor(self, name: str) -> np.ndarray:
        return self.source.tensor(name)


def replace_spec(source: Source, spec: ModelSpec) -> Respecified:
    return Respecified(source, spec)


def test_norms_stored_less_one(on_disk: MakeCase) -> None:
    """Every kind of norm of Gemma 3, the final one too."""
    source = on_disk("gemma3").source
    stored = tiny_tensors(tiny_config("gemma3_text"))
    norms = [name for name in tensors_of(source.spec) if name.endswith("norm")]
    assert len(norms) == 6 * 6 + 1
    for name in norms:
        np.testing.assert_array_equal(source.tensor(name), 1 + stored[source.names.own(name)])  # type: ignore[attr-defined]


# -- equal in meaning --------------------------------------------------------------------------------------------------

SAME_GEMMA = [
    {"sliding_window_pattern": REMOVED, "_sliding_window_pattern": 3},
    {"sliding_window_pattern": REMOVED, "layer_types": PATTERN},
    {"layer_types": PATTERN},
    {"layer_types": PATTERN, "sliding_window_pattern": REMOVED, "_sliding_window_pattern": 6},  # as it is saved
    OLD_ROPES | {"rope_parameters": NESTED},
    {"rope_parameters": NESTED},
    OLD_ROPES | {"rope_parameters": {"full_attention": LINEAR}},
    {"rope_local_base_freq": REMOVED, "rope_theta": REMOVED},
    {"rope_scaling": {"type": "linear", "factor": 8}},
    {"use_bidirectional_attention": False, "hidden_act": "gelu_pytorch_tanh"},
]


@pytest.mark.parametrize("changes", SAME_GEMMA)
def test_spellings_of_one_gemma(changes: dict[str, Any], tmp_path: Path, on_disk: MakeCase) -> None:
    assert open_source(str(write_tiny(tmp_path, "gemma3_text", **changes))).spec == on_disk("gemma3").source.spec


@pytest.mark.parametrize("name", ["qwen2", "mistral", "gemma3"])
def test_what_transformers_saves_again_is_the_same_model(name: str, tmp_path: Path, on_disk: MakeCase) -> None:
    case = on_disk(name)
    AutoModelForCausalLM.from_pretrained(case.folder, dtype=torch.float32).save_pretrained(tmp_path)
    again = open_source(str(tmp_path))
    assert again.spec == case.source.spec
    np.testing.assert_array_equal(oracle_logits(again), oracle_logits(case.source))


# -- the multimodal wrapper --------------------------------------------------------------------------------------------

VISION = {"vision_tower.vision_model.head.bias": 3, "multi_modal_projector.mm_soft_emb_norm.weight": 5}


def wrapped(folder: Path, root: str, **outer: Any) -> Path:
    """T-gemma3 inside a multimodal checkpoint whose text tensors begin with `root`, with two of the vision model's."""
    write_tiny(folder, "gemma3_text")
    text = tiny_config("gemma3_text", vocab_size=320)
    tensors = {name.replace("model.", root, 1): values for name, values in tiny_tensors(text).items()}
    above = "model." if root.startswith("model.") else ""
    tensors |= {above + name: np.ones(size, np.float32) for name, size in VISION.items()}
    save_safetensors(folder / "model.safetensors", tensors)
    for name in ("tie_word_embeddings", "eos_token_id", "bos_token_id"):
        del text[name]
    config = {
        "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text,
        "vision_config": {"model_type": "siglip_vision_model"}, "mm_tokens_per_image": 4, "image_token_index": 300,
        "boi_token_index": 301, "eoi_token_index": 302, "initializer_range": 0.02, "eos_token_id": [1, 106],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | outer))
    return folder


@pytest.mark.parametrize("root", ["language_model.model.", "model.language_model."])
def test_the_text_model_of_a_multimodal_checkpoint(root: str, tmp_path: Path, on_disk: MakeCase) -> None:
    source = open_source(str(wrapped(tmp_path, root)))
    assert source.spec == on_disk("gemma3").source.spec
    np.testing.assert_array_equal(oracle_logits(source), oracle_logits(on_disk("gemma3").source))
    assert source.notes == (  # type: ignore[attr-defined]
        "2 tensors of other than the text model are skipped: what is baked reads text only",
    )
    assert json.loads(source.text_files["generation_config.json"])["eos_token_id"] == [257, 258, 1, 106]


def test_a_multimodal_checkpoint_of_transformers(tmp_path: Path) -> None:
    """Written by transformers itself, with a real vision tower."""
    text = tiny_config("gemma3_text")
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 16, "patch_size": 8,
    }  # fmt: skip
    config = Gemma3ForConditionalGeneration.config_class(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=319
    )
    model = Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.2, 0.2)
        wanted = model(torch.tensor(IDS[None])).logits[0].numpy()
    model.save_pretrained(tmp_path)
    source = open_source(str(tmp_path))
    assert relative(oracle_logits(source), wanted) < ORACLE_LOGITS
    assert "tensors of other than the text model are skipped" in source.notes[0]  # type: ignore[attr-defined]
