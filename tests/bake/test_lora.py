"""Adapters made by hand: the product in float64, whole tensors, tied and resized tables, notes, provenance, files."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anechain.bake import lora
from anechain.bake.adapter import Adapter, LoraConfig
from anechain.bake.hf import HfSource
from anechain.bake.lora import Merged, open_merged
from anechain.bake.source import Source, open_source
from anechain.bundle.spec import tensors_of
from tests.bundle_maker import tiny_source
from tests.tiny import CHAT_TEMPLATE, REMOVED, write_tiny
from tests.tiny_gguf import write_tiny_gguf
from tests.tiny_lora import PREFIX, pair, random, write_adapter
from tests.tolerances import LORA_MERGE

Q0, Q1 = (f"model.layers.{i}.self_attn.q_proj" for i in (0, 1))
V1 = "model.layers.1.self_attn.v_proj"
Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("llama") / "base", "llama")


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied."""
    return write_tiny(tmp_path_factory.mktemp("qwen3") / "base", "qwen3")


def merged(base: Path, folder: Path, tensors: Tensors, **config: Any) -> Merged:
    return Merged(HfSource(base), Adapter(write_adapter(folder / "adapter", tensors, **config)))


def product(tensors: Tensors, module: str, scale: float) -> np.ndarray:
    """scale * B A in float64."""
    a, b = (tensors[f"{PREFIX}{module}.lora_{part}.weight"].astype(np.float64) for part in "AB")
    return scale * (b @ a)


def assert_only(source: Merged, wanted: dict[str, np.ndarray]) -> None:
    """The tensors of `wanted` are these, all others are the base's bit for bit."""
    names = tensors_of(source.spec)
    assert wanted.keys() <= names.keys() and len(names) > len(wanted) > 0
    for name, shape in names.items():
        found, base = source.tensor(name), source.base_tensor(name)
        assert found.shape == shape and found.dtype == np.float32
        if name in wanted:
            assert np.abs(found - wanted[name]).max() <= LORA_MERGE * np.abs(wanted[name]).max(), name
            assert found.shape != base.shape or not np.array_equal(found, base), name
        else:
            assert np.array_equal(found, base), name


@pytest.mark.parametrize(("changes", "scale"), [
    ({"r": 16, "lora_alpha": 16, "use_rslora": True}, 4.0),
    ({"r": 16, "lora_alpha": 16}, 1.0),
    ({"r": 16, "lora_alpha": 24.5}, 24.5 / 16),
    ({"r": 16, "lora_alpha": -8}, -0.5),
    ({"r": 3, "lora_alpha": 2, "rank_pattern": {"q_proj": 16}, "use_rslora": True}, 0.5),
    ({"r": 16, "lora_alpha": 2, "alpha_pattern": {".*": 32}}, 2.0),
])  # fmt: skip
def test_the_scale(changes: dict[str, Any], scale: float, llama: Path, tmp_path: Path) -> None:
    tensors = pair(Q0, 64, 64, r=16)
    source = merged(llama, tmp_path, tensors, **changes)
    assert_only(source, {"layers.0.q": source.base_tensor("layers.0.q") + product(tensors, Q0, scale)})


def test_patterns_decide_rank_and_alpha_of_each_module(llama: Path, tmp_path: Path) -> None:
    tensors = pair(Q0, 64, 64, r=8) | pair(Q1, 64, 64, r=2) | pair(V1, 32, 64, r=8)
    patterns = {"rank_pattern": {"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"q_proj": 64}}
    source = merged(llama, tmp_path, tensors, r=8, lora_alpha=16, **patterns)
    scales = {"layers.0.q": (Q0, 8.0), "layers.1.q": (Q1, 32.0), "layers.1.v": (V1, 2.0)}
    assert_only(source, {n: source.base_tensor(n) + product(tensors, *at) for n, at in scales.items()})
    assert source.provenance["ranks"] == [2, 8]


def test_a_pattern_is_the_end_of_a_path_and_the_first_one_decides() -> None:
    patterns = {"proj": 1, "q_proj|v_proj": 2, "^model.layers.1": 3, "layers.1.self_attn.q_proj": 4}
    config = LoraConfig.read({"peft_type": "LORA", "r": 8, "lora_alpha": 8, "alpha_pattern": patterns}, "here")
    assert [config.scale(f"model.layers.1.self_attn.{m}") * 8 for m in ("q_proj", "k_proj")] == [2, 8]
    assert config.scale("layers.1") * 8 == 8 and config.scale("model.layers.1") * 8 == 3


@pytest.mark.parametrize("name", ["", ".default", ".other"])
@pytest.mark.parametrize("prefix", [PREFIX, ""])
def test_the_adapters_name_and_the_prefix_may_be_in_the_keys(
    name: str, prefix: str, llama: Path, tmp_path: Path
) -> None:
    tensors = pair(Q0, 64, 64)
    stored = {key.replace(".weight", f"{name}.weight").replace(PREFIX, prefix): v for key, v in tensors.items()}
    source = merged(llama, tmp_path, stored)
    assert_only(source, {"layers.0.q": source.base_tensor("layers.0.q") + product(tensors, Q0, 1.5)})


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_precision_adapters(dtype: str, llama: Path, tmp_path: Path) -> None:
    whole = merged(llama, tmp_path / "a", pair(Q0, 64, 64)).tensor("layers.0.q")
    half = Adapter(write_adapter(tmp_path / "b", pair(Q0, 64, 64), dtype))
    step = {"F16": 2**-11, "BF16": 2**-8}[dtype]
    read = {key: half.read(key) for key in half.entries}
    exact = product(read, Q0, 1.5)
    got = Merged(HfSource(llama), half).tensor("layers.0.q")
    assert np.abs(got - (HfSource(llama).tensor("layers.0.q") + exact)).max() <= LORA_MERGE * np.abs(got).max()
    rounding = 2 * step * np.abs(product({k: np.abs(v) for k, v in read.items()}, Q0, 1.5)).max()
    assert 0 < np.abs(got - whole).max() <= 1.1 * rounding


def test_dora_scales_rows_to_their_magnitude(llama: Path, tmp_path: Path) -> None:
    tensors = pair(Q0, 64, 64) | {f"{PREFIX}{Q0}.lora_magnitude_vector": np.linspace(-1, 3, 64, dtype=np.float32)}
    source = merged(llama, tmp_path, tensors, use_dora=True)
    direction = source.base_tensor("layers.0.q") + product(tensors, Q0, 1.5)
    length = np.sqrt((direction**2).sum(axis=1, keepdims=True))
    assert_only(source, {"layers.0.q": direction / length * np.linspace(-1, 3, 64)[:, None]})


def test_an_embedding_is_transposed(llama: Path, tmp_path: Path) -> None:
    module = f"{PREFIX}model.embed_tokens.lora_embedding_"
    a, b = random("a", (4, 320), 0.3), random("b", (64, 4), 0.3)
    source = merged(llama, tmp_path, {f"{module}A": a, f"{module}B.default": b})
    wanted = source.base_tensor("embed") + 1.5 * (b.astype(np.float64) @ a.astype(np.float64)).T
    assert_only(source, {"embed": wanted})


def test_a_product_is_made_in_slabs(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = pair("lm_head", 320, 64)
    source = merged(llama, tmp_path, tensors)
    monkeypatch.setattr(lora, "_SLAB", 64 * 7)
    assert_only(source, {"head": source.base_tensor("head") + product(tensors, "lm_head", 1.5)})


def test_whole_tensors_and_a_lora(llama: Path, tmp_path: Path) -> None:
    tensors = pair(Q0, 64, 64) | {
        f"{PREFIX}lm_head.modules_to_save.default.weight": random("head", (320, 64)),
        f"{PREFIX}lm_head.original_module.weight": random("old", (320, 64)),
        f"{PREFIX}model.norm.weight": random("norm", (64,)),
        f"{PREFIX}model.layers.1.mlp.up_proj.weight": random("up", (96, 64)),
        f"{PREFIX}{V1}.base_layer.weight": random("v", (32, 64)),
    }
    tensors |= pair(V1, 32, 64)
    source = merged(llama, tmp_path, tensors, modules_to_save=["lm_head"])
    assert_only(source, {
        "layers.0.q": source.base_tensor("layers.0.q") + product(tensors, Q0, 1.5),
        "layers.1.v": random("v", (32, 64)) + product(tensors, V1, 1.5),
        "head": random("head", (320, 64)), "final_norm": random("norm", (64,)), "layers.1.up": random("up", (96, 64)),
    })  # fmt: skip
    assert source.provenance["replaced"] == ["final_norm", "head", "layers.1.up", "layers.1.v"]
    assert source.provenance["tensors"] == {"final_norm": 1, "head": 1, "q": 1, "up": 1, "v": 1}
    assert source.notes[0] == "the adapter changes 3 matrices in 2 of 2 layers, the head, 1 norms or biases (rank 4)"


def test_an_adapter_on_the_head_of_a_tied_model_leaves_the_embedding(qwen3: Path, tmp_path: Path) -> None:
    tensors = pair("lm_head", 320, 64)
    source = merged(qwen3, tmp_path, tensors)
    assert HfSource(qwen3).spec.tied and not source.spec.tied
    assert np.array_equal(source.tensor("embed"), HfSource(qwen3).tensor("embed"))
    assert_only(source, {"head": source.base_tensor("embed") + product(tensors, "lm_head", 1.5)})
    assert source.notes[1:] == ["the model is no longer tied: its embedding and its head are two matrices from here on"]


def test_a_whole_head_of_a_tied_model(qwen3: Path, tmp_path: Path) -> None:
    source = merged(qwen3, tmp_path, {f"{PREFIX}lm_head.weight": random("head", (320, 64))})
    assert not source.spec.tied
    assert_only(source, {"head": random("head", (320, 64))})


def test_a_whole_embedding_of_a_tied_model_has_to_say_what_the_head_does(qwen3: Path, tmp_path: Path) -> None:
    table = {f"{PREFIX}model.embed_tokens.weight": random("embed", (320, 64))}
    source = merged(qwen3, tmp_path / "listed", table, modules_to_save=["embed_tokens"])
    assert not source.spec.tied
    assert_only(source, {"embed": random("embed", (320, 64))})
    both = table | {f"{PREFIX}lm_head.weight": random("embed", (320, 64))}
    together = merged(qwen3, tmp_path / "both", both)
    assert together.spec.tied and together.changes.keys() == {"embed"}
    assert_only(together, {"embed": random("embed", (320, 64))})
    same = {f"{PREFIX}model.embed_tokens.weight": HfSource(qwen3).tensor("embed")} | pair(Q0, 128, 64)
    unchanged = merged(qwen3, tmp_path / "same", same)
    assert unchanged.spec.tied and unchanged.changes.keys() == {"layers.0.q"}


def test_a_key_can_say_that_the_embedding_was_trained_alone(qwen3: Path, tmp_path: Path) -> None:
    table = random("embed", (320, 64))
    source = merged(qwen3, tmp_path, {f"{PREFIX}model.embed_tokens.modules_to_save.default.weight": table})
    assert not source.spec.tied
    assert_only(source, {"embed": table})


def test_the_table_that_peft_saves_beside_an_end_is_no_change(qwen3: Path, tmp_path: Path) -> None:
    tensors = pair("lm_head", 320, 64) | {f"{PREFIX}lm_head.base_layer.weight": HfSource(qwen3).tensor("embed")}
    source = merged(qwen3, tmp_path, tensors)
    assert source.changes.keys() == {"head"} and source.provenance["replaced"] == []


@pytest.mark.parametrize("differ", ["", "a", "b", "scale", "dora"])
def test_a_tied_model_stays_tied_only_when_both_ends_change_alike(differ: str, qwen3: Path, tmp_path: Path) -> None:
    a, b = random("a", (4, 320), 0.3), random("b", (64, 4), 0.3)
    tensors = {f"{PREFIX}model.embed_tokens.lora_embedding_A": a, f"{PREFIX}model.embed_tokens.lora_embedding_B": b}
    tensors[f"{PREFIX}lm_head.lora_A.weight"] = b.T + (differ == "b")
    tensors[f"{PREFIX}lm_head.lora_B.weight"] = a.T + (differ == "a")
    config: dict[str, Any] = {"alpha_pattern": {"lm_head": 7 if differ == "scale" else 6}}
    if differ == "dora":
        config["use_dora"] = True
        tensors[f"{PREFIX}model.embed_tokens.lora_magnitude_vector"] = random("m", (64,))
        tensors[f"{PREFIX}lm_head.lora_magnitude_vector"] = random("m", (320,))
    source = merged(qwen3, tmp_path, tensors, **config)
    assert source.spec.tied == (not differ) and source.changes.keys() == ({"embed", "head"} if differ else {"embed"})
    if not differ:
        assert_only(source, {"embed": source.base_tensor("embed") + 1.5 * (b.astype(np.float64) @ a).T})


@pytest.mark.parametrize("ends", [("embed_tokens",), ("lm_head",), ("embed_tokens", "lm_head")])
def test_more_rows_on_a_tied_model(ends: tuple[str, ...], qwen3: Path, tmp_path: Path) -> None:
    table = random("table", (324, 64))
    names = {"embed_tokens": "model.embed_tokens", "lm_head": "lm_head"}
    source = merged(qwen3, tmp_path, {f"{PREFIX}{names[end]}.weight": table for end in ends} | pair(Q0, 128, 64))
    assert source.spec.tied and source.spec.vocab_size == 324 and np.array_equal(source.tensor("embed"), table)
    assert "the vocabulary has 324 rows instead of 320" in source.notes


def test_more_rows_and_different_ends(qwen3: Path, tmp_path: Path) -> None:
    embed, head = random("embed", (324, 64)), random("head", (324, 64))
    tensors = {f"{PREFIX}model.embed_tokens.weight": embed, f"{PREFIX}lm_head.weight": head}
    source = merged(qwen3, tmp_path, tensors)
    assert not source.spec.tied and tensors_of(source.spec)["head"] == (324, 64)
    assert np.array_equal(source.tensor("embed"), embed) and np.array_equal(source.tensor("head"), head)


def test_a_gguf_base_gets_the_same_as_its_hugging_face_form(llama: Path, tmp_path: Path) -> None:
    """Its q and k rows are stored in another order, which is not the adapter's."""
    write_tiny_gguf(tmp_path / "base.gguf", "llama")
    tensors = pair(Q0, 64, 64) | pair("model.layers.1.self_attn.k_proj", 32, 64)
    adapter = write_adapter(tmp_path / "adapter", tensors)
    source, other = open_merged(str(tmp_path / "base.gguf"), str(adapter)), open_merged(str(llama), str(adapter))
    assert len(other.changes) == 2  # type: ignore[attr-defined]
    for name in tensors_of(other.spec):
        assert np.array_equal(source.tensor(name), other.tensor(name)), name


@pytest.mark.parametrize("root", ["model.", "language_model.model.", "model.language_model."])
def test_an_adapter_of_the_multimodal_model_fits_its_text_model(root: str, tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base", "gemma3_text")
    tensors = pair("model.layers.5.mlp.up_proj", 96, 64) | {f"{PREFIX}model.norm.weight": random("norm", (64,))}
    renamed = {key.replace(f"{PREFIX}model.", PREFIX + root): values for key, values in tensors.items()}
    source = merged(base, tmp_path, renamed, alpha_pattern={f"{root}layers.5.mlp.up_proj": 12})
    up = source.base_tensor("layers.5.up") + product(tensors, "model.layers.5.mlp.up_proj", 3)
    assert_only(source, {"layers.5.up": up, "final_norm": 1 + random("norm", (64,))})


def test_opening_reads_nothing_of_the_base(llama: Path, tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Unread:
        base: Source

        def __getattr__(self, name: str) -> Any:
            assert name != "tensor", "a tensor was read"
            return getattr(self.base, name)

    tensors = pair(Q0, 64, 64) | {f"{PREFIX}lm_head.weight": random("head", (324, 64))}
    tensors |= {f"{PREFIX}model.embed_tokens.weight": random("embed", (324, 64))}
    source = Merged(Unread(HfSource(llama)), Adapter(write_adapter(tmp_path / "adapter", tensors)))  # type: ignore[arg-type]
    assert source.spec.vocab_size == 324


def test_without_an_adapter_a_source_is_itself(llama: Path) -> None:
    assert isinstance(open_merged(str(llama), None), HfSource)
    assert open_merged(str(llama), None).fingerprint == open_source(str(llama)).fingerprint


def test_the_fingerprint_is_of_both(llama: Path, qwen3: Path, tmp_path: Path) -> None:
    tensors = {f"{PREFIX}model.norm.weight": random("norm", (64,))}
    first = merged(llama, tmp_path / "1", tensors)
    assert first.fingerprint == merged(llama, tmp_path / "2", tensors).fingerprint
    others = [
        merged(qwen3, tmp_path / "3", tensors),
        merged(llama, tmp_path / "4", tensors, lora_alpha=7),
        merged(llama, tmp_path / "5", {key: value + 1 for key, value in tensors.items()}),
    ]
    prints = {first.fingerprint, HfSource(llama).fingerprint, *(other.fingerprint for other in others)}
    assert len(prints) == 5 and all(len(p) == 64 for p in prints)
    provenance = first.provenance
    assert provenance["base_fingerprint"] == HfSource(llama).fingerprint and provenance["base_model"] == "tiny"
    assert provenance["ref"] == str(tmp_path / "1/adapter") and provenance["sha256"] == first.adapter.sha256


def test_layers_without_an_adapter_are_normal(llama: Path, tmp_path: Path) -> None:
    tensors = pair(Q1, 64, 64) | pair(V1, 32, 64)
    for number, config in enumerate(({"layers_to_transform": [1]}, {"layers_to_transform": 1}, {})):
        source = merged(llama, tmp_path / str(number), tensors, target_modules=["q_proj", "v_proj"], **config)
        assert source.notes == ["the adapter changes 2 matrices in 1 of 2 layers (rank 4)"]
        assert source.provenance["layers"] == [1] and source.provenance["tensors"] == {"q": 1, "v": 1}


def test_no_effect_is_a_warning(llama: Path, tmp_path: Path) -> None:
    idle = pair(Q0, 64, 64)
    idle[f"{PREFIX}{Q0}.lora_B.weight"][:] = 0
    source = merged(llama, tmp_path / "all", idle)
    assert source.warnings == ("the adapter has no effect: its product is zero in all 1 matrices",)
    assert source.provenance["notes"] == [*source.notes, *source.warnings] and len(source.notes) == 1
    assert np.array_equal(source.tensor("layers.0.q"), source.base_tensor("layers.0.q"))
    some = merged(llama, tmp_path / "some", idle | pair(Q1, 64, 64))
    assert some.warnings == ("the adapter has no effect on 1 of its 2 matrices, where its product is zero: layers.0.q",)
    norm = merged(llama, tmp_path / "norm", idle | {f"{PREFIX}model.norm.weight": random("norm", (64,))})
    assert "no effect on 1 of its 1 matrices" in norm.warnings[0], "the norm has one"
    unscaled = merged(llama, tmp_path / "scale", pair(Q0, 64, 64), lora_alpha=0)
    assert "no effect" in unscaled.warnings[0]
    magnitude = {f"{PREFIX}{Q0}.lora_magnitude_vector": np.ones(64, np.float32)}
    assert merged(llama, tmp_path / "dora", idle | magnitude, use_dora=True).warnings == ()


def test_targets_without_tensors_are_a_note(llama: Path, tmp_path: Path) -> None:
    source = merged(llama, tmp_path, pair(Q0, 64, 64), target_modules=["q_proj", "v_proj", "self_attn.o_proj"])
    assert source.notes[1:] == ["target_modules names self_attn.o_proj, v_proj, for which the adapter has no tensors"]


def test_a_source_that_is_no_file(tmp_path: Path) -> None:
    """Whatever gives tensors by their canonical names can be a base."""
    base = tiny_source("qwen2")
    tensors = pair(Q0, 64, 64) | {f"{PREFIX}{Q0}.bias": random("bias", (64,))}
    source = Merged(base, Adapter(write_adapter(tmp_path / "adapter", tensors, bias="all")))
    assert_only(source, {
        "layers.0.q": base.tensor("layers.0.q") + product(tensors, Q0, 1.5), "layers.0.q_bias": random("bias", (64,)),
    })  # fmt: skip


def test_the_adapters_tokenizer_wins(llama: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", pair(Q0, 64, 64))
    base = HfSource(llama)
    assert Merged(base, Adapter(adapter)).text_files == base.text_files
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (adapter / name).write_bytes(base.text_files[name])
    same = Merged(base, Adapter(adapter))
    assert same.text_files == base.text_files and len(same.notes) == 1, "the same files are no note"
    (adapter / "tokenizer.json").write_bytes(base.text_files["tokenizer.json"] + b"\n")
    (adapter / "chat_template.jinja").write_text("{{ 1 }}")
    (adapter / "generation_config.json").write_text("{}")
    other = Merged(base, Adapter(adapter))
    assert other.text_files == base.text_files | {
        "tokenizer.json": base.text_files["tokenizer.json"] + b"\n", "chat_template.jinja": b"{{ 1 }}",
    }  # fmt: skip
    assert other.notes[1:] == ["chat_template.jinja, tokenizer.json are the adapter's, not the model's"]


@pytest.mark.parametrize(("of_base", "of_adapter", "wanted"), [
    ({"inline": "base"}, {"inline": "own"}, {"inline": "own"}),
    ({"file": "base"}, {"inline": "own"}, {"inline": "own"}),
    ({"inline": "base"}, {"file": "own"}, {"inline": "base", "file": "own"}),
    ({"file": "base"}, {"file": "own", "config": "x"}, {"file": "own"}),
    ({"inline": "base"}, {"config": "x"}, {"inline": "base"}),
    ({"file": "base"}, {"config": "x"}, {"file": "base"}),
    ({"inline": "base", "file": "base"}, {"config": "x"}, {"file": "base"}),
    ({}, {"config": "x"}, {}),
])  # fmt: skip
def test_a_chat_template_wins_wherever_it_is_written(
    of_base: dict[str, str], of_adapter: dict[str, str], wanted: dict[str, str], tmp_path: Path
) -> None:
    """A file of its own is read before tokenizer_config.json; the adapter's template counts in either."""
    base = write_tiny(tmp_path / "base", "llama")
    adapter = write_adapter(tmp_path / "adapter", pair(Q0, 64, 64))
    for folder, has in ((base, of_base), (adapter, of_adapter)):
        if folder == base or "inline" in has or "config" in has:
            config = {"eos_token": "<|endoftext|>"} | ({"chat_template": has["inline"]} if "inline" in has else {})
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
        if "file" in has:
            (folder / "chat_template.jinja").write_text(has["file"])
    files = Merged(HfSource(base), Adapter(adapter)).text_files
    inline = json.loads(files["tokenizer_config.json"]).get("chat_template")
    found = ({"inline": inline} if inline else {}) | (
        {"file": files["chat_template.jinja"].decode()} if "chat_template.jinja" in files else {}
    )
    assert found == wanted and CHAT_TEMPLATE not in found.values()


def test_tokens_that_only_a_slow_tokenizer_knows_are_a_note(llama: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", pair(Q0, 64, 64))
    (adapter / "added_tokens.json").write_text('{"[PAD]": 320}')
    assert Merged(HfSource(llama), Adapter(adapter)).notes[1:] == [
        "the adapter has added_tokens.json but no tokenizer.json: tokens that it adds are not known"
    ]


def test_fields_that_change_no_weight(llama: Path, tmp_path: Path) -> None:
    tensors = pair(Q0, 64, 64)
    source = merged(
        llama, tmp_path, tensors, fan_in_fan_out=True, lora_dropout=0.5, target_modules=".*q_proj",
        exclude_modules=["k_proj"], init_lora_weights="gaussian", qalora_group_size=8, loftq_config={"loftq_bits": 4},
        use_dora=REMOVED, rank_pattern=None, revision="main", bias="lora_only", something_new=None, also_new=False,
    )  # fmt: skip
    assert_only(source, {"layers.0.q": source.base_tensor("layers.0.q") + product(tensors, Q0, 1.5)})
    assert math.isclose(source.adapter.config.scale(Q0), 1.5) and len(source.notes) == 1
