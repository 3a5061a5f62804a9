"""`merge`, through the command line, as a user meets it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from anechain.bake import write_hf
from anechain.bake.adapter import Adapter
from anechain.bake.hf import HfSource
from anechain.bake.lora import Merged
from anechain.bundle.spec import tensors_of
from anechain.judge.oracle import Oracle
from tests.in_process import tree
from tests.merge.runs import BAKE, PROMPT, Q0, Run, adapter_for, refused
from tests.tiny import tiny_config, tiny_shapes, write_tiny
from tests.tiny_gguf import write_tiny_gguf
from tests.tiny_lora import PREFIX, pair, random, write_adapter
from tests.tolerances import ORACLE_LOGITS


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_merged_directory_is_what_the_merged_source_is(family: str, run: Run, tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base", family)
    adapter = adapter_for(family, tmp_path)
    before = tree(tmp_path)
    out, err = run("merge", base, "--lora", adapter, "-o", tmp_path / "new/merged")
    assert out == "" and "note: the adapter changes 2 matrices in 2 of 2 layers (rank 4)" in err
    assert {path: digest for path, digest in tree(tmp_path).items() if not path.startswith("new")} == before
    source = Merged(HfSource(base), Adapter(adapter))
    found = HfSource(tmp_path / "new/merged")
    assert found.spec == source.spec and found.text_files == source.text_files
    with (found.directory / "model.safetensors").open("rb") as file:
        assert int.from_bytes(file.read(8), "little") % 8 == 0, "tensors are not aligned"
    for name in tensors_of(source.spec):
        assert np.array_equal(found.tensor(name), source.tensor(name)), name
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["merged"]
    assert sorted(p.name for p in found.directory.iterdir()) == sorted(p.name for p in base.iterdir())
    assert json.loads((found.directory / "config.json").read_text()) == json.loads((base / "config.json").read_text())

    model = AutoModelForCausalLM.from_pretrained(found.directory, dtype=torch.float32)
    with torch.no_grad():
        wanted = model(torch.tensor(PROMPT)[None]).logits[0].numpy()
    oracle = Oracle(source)
    got = oracle.logits(oracle.forward([PROMPT])[0])
    assert np.abs(got - wanted).max() <= ORACLE_LOGITS * np.abs(wanted).max() > 0


@pytest.mark.parametrize("stored", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("wanted", ["", "float32", "float16", "bfloat16"])
def test_dtypes(stored: str, wanted: str, run: Run, tmp_path: Path) -> None:
    """Beside torch's own rounding; what is stored as it was and not changed is the same bits."""
    mixed = {"model.norm.weight": "F32"}
    base = write_tiny(
        tmp_path / "base", "llama", dtypes=dict.fromkeys(tiny_shapes(tiny_config("llama")), stored) | mixed
    )
    adapter = adapter_for("llama", tmp_path)
    out, _ = run(
        "merge", base, "--lora", adapter, "-o", tmp_path / "m", "--json", *(["--dtype", wanted] if wanted else [])
    )
    source, found = Merged(HfSource(base), Adapter(adapter)), HfSource(tmp_path / "m")
    kinds = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    for name in tensors_of(source.spec):
        own = found.names.own(name)
        dtype = wanted or names[mixed.get(own, stored)]
        exact = torch.from_numpy(np.array(source.tensor(name)))
        assert names[found.files[own].entries[own].dtype] == dtype
        assert np.array_equal(found.tensor(name), exact.to(kinds[dtype]).float().numpy()), name
    config = json.loads((tmp_path / "m/config.json").read_text())
    assert config["torch_dtype"] == (wanted or "float32") and "dtype" not in config
    record = json.loads(out)
    assert record["tensors"] == len(tensors_of(source.spec)) and record["changed"] == 2
    assert record["bytes"] == sum(e.end - e.begin for f in set(found.files.values()) for e in f.entries.values())
    assert (record["adapter"]["survival"]["min_share"] < 1) == ((wanted or names[stored]) == "bfloat16")
    assert record["adapter"]["sha256"] == source.adapter.sha256 and record["directory"] == str(tmp_path / "m")


def test_a_delta_below_the_steps_of_the_dtype_is_a_warning(run: Run, tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base", "llama", dtypes="BF16")
    adapter = write_adapter(tmp_path / "adapter", pair(Q0, 64, 64, size=0.004))
    _, err = run("merge", base, "--lora", adapter, "-o", tmp_path / "m")
    assert "warning: in 1 of 1 matrices rounding changes more than the adapter does" in err
    _, err = run("merge", base, "--lora", adapter, "-o", tmp_path / "f", "--dtype", "float32")
    assert "warning" not in err


def test_an_adapter_without_effect_is_merged_with_a_warning(cache: None, run: Run, tmp_path: Path) -> None:
    base, tensors = write_tiny(tmp_path / "base", "qwen3"), pair(Q0, 128, 64)
    tensors[f"{PREFIX}{Q0}.lora_B.weight"][:] = 0
    adapter = write_adapter(tmp_path / "adapter", tensors)
    said = "warning: the adapter has no effect: its product is zero in all 1 matrices"
    _, err = run("merge", base, "--lora", adapter, "-o", tmp_path / "m")
    assert said in err and np.array_equal(
        HfSource(tmp_path / "m").tensor("layers.0.q"), HfSource(base).tensor("layers.0.q")
    )
    out, err = run("bake", base, "--lora", adapter, "-o", tmp_path / "b", *BAKE, "--json")
    assert said in err and json.loads(out)["adapter"]["survival"] is None


def test_untied_and_resized_models_are_read_by_others(run: Run, tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base", "qwen3")
    embed, head = random("embed", (324, 64)), random("head", (324, 64), 0.3)
    tensors = {f"{PREFIX}model.embed_tokens.weight": embed, f"{PREFIX}lm_head.weight": head}
    adapter = write_adapter(tmp_path / "adapter", tensors | pair(Q0, 128, 64))
    _, err = run("merge", base, "--lora", adapter, "-o", tmp_path / "m")
    assert "the vocabulary has 324 rows instead of 320" in err and "no longer tied" in err
    config = json.loads((tmp_path / "m/config.json").read_text())
    assert (config["vocab_size"], config["tie_word_embeddings"]) == (324, False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    assert np.array_equal(model.get_input_embeddings().weight.detach().numpy(), embed)
    assert np.array_equal(model.get_output_embeddings().weight.detach().numpy(), head)
    prompt = np.array([3, 323, 320])
    with torch.no_grad():
        wanted = model(torch.tensor(prompt)[None]).logits[0].numpy()
    oracle = Oracle(Merged(HfSource(base), Adapter(adapter)))
    got = oracle.logits(oracle.forward([prompt])[0])
    assert wanted.shape == (3, 324) and np.abs(got - wanted).max() <= ORACLE_LOGITS * np.abs(wanted).max()


def test_a_head_alone_unties_and_keeps_the_dtype(run: Run, tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base", "qwen3", dtypes="BF16", tie_word_embeddings=True)
    adapter = write_adapter(tmp_path / "adapter", pair("lm_head", 320, 64))
    run("merge", base, "--lora", adapter, "-o", tmp_path / "m")
    found = HfSource(tmp_path / "m")
    assert not found.spec.tied and {e.dtype for f in found.files.values() for e in f.entries.values()} == {"BF16"}
    assert np.array_equal(found.tensor("embed"), HfSource(base).tensor("embed"))
    assert not np.array_equal(found.tensor("head"), found.tensor("embed"))


def test_shards_become_one_file_and_strangers_stay_behind(run: Run, tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base", "llama")
    everything = load_file(base / "model.safetensors")
    (base / "model.safetensors").unlink()
    names, index = sorted(everything), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        save_file({name: everything[name] for name in part}, base / f"model-{number}.safetensors")
        index |= dict.fromkeys(part, f"model-{number}.safetensors")
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for name in ("tokenizer.model", "LICENSE", "vocab.json"):
        (base / name).write_text(name)
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json", "adapter_config.json", "notes.md"):
        (base / name).write_text(name)
    run("merge", base, "--lora", adapter_for("llama", tmp_path), "-o", tmp_path / "m")
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == [
        "LICENSE", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer.model",
        "tokenizer_config.json", "vocab.json",
    ]  # fmt: skip
    assert load_file(tmp_path / "m/model.safetensors").keys() == everything.keys()


@pytest.mark.parametrize("dtype", ["", "bfloat16"])
def test_a_text_model_inside_a_multimodal_one(dtype: str, run: Run, tmp_path: Path) -> None:
    """What is no part of the text model is copied; a norm is written as the family stores it, as w for 1 + w."""
    base = write_tiny(tmp_path / "base", "gemma3_text")
    text = json.loads((base / "config.json").read_text())
    outer = {"model_type": "gemma3", "text_config": text, "vision_config": {"size": 3}, "tie_word_embeddings": True}
    (base / "config.json").write_text(json.dumps(outer))
    tensors = {f"language_model.{name}": v for name, v in load_file(base / "model.safetensors").items()}
    tensors["vision_tower.patch.weight"] = random("patch", (3, 5))
    tensors["vision_tower.position_ids"] = np.arange(7)
    save_file(tensors, base / "model.safetensors")
    norm, head = random("norm", (64,)), "language_model.lm_head"
    adapter = write_adapter(
        tmp_path / "adapter", {f"{PREFIX}language_model.model.norm.weight": norm} | pair(head, 320, 64)
    )
    run("merge", base, "--lora", adapter, "-o", tmp_path / "m", *(["--dtype", dtype] if dtype else []))
    found, source = HfSource(tmp_path / "m"), Merged(HfSource(base), Adapter(adapter))
    assert found.spec == source.spec and not found.spec.tied and f"{head}.weight" in found.files
    config = json.loads((tmp_path / "m/config.json").read_text())
    assert config["tie_word_embeddings"] is config["text_config"]["tie_word_embeddings"] is False
    assert config["vision_config"] == {"size": 3}
    ids = found.files["vision_tower.position_ids"].entries["vision_tower.position_ids"]
    raw = (tmp_path / "m/model.safetensors").read_bytes()
    assert ids.dtype == "I64" and raw[ids.begin : ids.end] == np.arange(7).tobytes()
    if not dtype:
        stored = load_file(tmp_path / "m/model.safetensors")
        assert np.array_equal(stored["language_model.model.norm.weight"], norm)
        assert np.array_equal(found.tensor("final_norm"), norm + 1)
        assert stored.keys() == {*tensors, f"{head}.weight"}
        same = set(tensors) - {"language_model.model.norm.weight"}
        assert all(np.array_equal(stored[name], tensors[name]) for name in same) and len(same) > 50


def test_the_adapters_tokenizer_and_template(run: Run, tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base", "llama")
    config = json.loads((base / "tokenizer_config.json").read_text())
    (base / "chat_template.jinja").write_text("the model's")
    adapter = adapter_for("llama", tmp_path)
    (adapter / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "the adapter's"}))
    (adapter / "README.md").write_text("not a part of a model")
    _, err = run("merge", base, "--lora", adapter, "-o", tmp_path / "m")
    assert "note: tokenizer_config.json is the adapter's, not the model's" in err
    assert not (tmp_path / "m/chat_template.jinja").exists() and not (tmp_path / "m/README.md").exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "m").chat_template == "the adapter's"


def test_nothing_is_overwritten(run: Run, tmp_path: Path) -> None:
    base, adapter = write_tiny(tmp_path / "base", "llama"), adapter_for("llama", tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    before = tree(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("empty", "file", "link", "base", "adapter"):
        text = refused(run, "merge", base, "--lora", adapter, "-o", tmp_path / name)
        assert text == f"{tmp_path / name} is there already, and nothing is overwritten: choose another folder with -o."
    (tmp_path / "link").unlink()
    assert tree(tmp_path) == before


def test_a_gguf_base_and_a_dtype_that_is_not_known(run: Run, tmp_path: Path) -> None:
    gguf = tmp_path / "base.gguf"
    write_tiny_gguf(gguf, "llama")
    adapter = adapter_for("llama", tmp_path)
    assert refused(run, "merge", gguf, "--lora", adapter, "-o", tmp_path / "m") == (
        f"{gguf} is a GGUF file, and a merged model is written as a Hugging Face directory: give the model as one, or "
        "use `anechain bake --lora`, which takes both."
    )
    base = write_tiny(tmp_path / "base", "llama")
    assert refused(run, "merge", base, "--lora", adapter, "-o", tmp_path / "m", "--dtype", "int8") == (
        "--dtype int8 is not known: use float32, float16, bfloat16, or none to keep the base's."
    )
    assert not (tmp_path / "m").exists()
    assert "Missing option '--lora'" in refused(run, "merge", base, "-o", tmp_path / "m")


def test_a_value_that_a_dtype_does_not_hold_leaves_nothing_behind(run: Run, tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base", "llama")
    adapter = write_adapter(tmp_path / "adapter", pair(Q0, 64, 64, size=300))
    before = tree(tmp_path)
    assert refused(run, "merge", base, "--lora", adapter, "-o", tmp_path / "a/b/m", "--dtype", "float16") == (
        f"{Q0}.weight holds values that are not finite as F16: use --dtype bfloat16 or float32, or correct the "
        "checkpoint or its adapter."
    )
    assert tree(tmp_path) == before


def test_what_is_written_is_read_again(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, adapter = write_tiny(tmp_path / "base", "llama"), adapter_for("llama", tmp_path)
    before, real = tree(tmp_path), write_hf._write_beside

    def another_epsilon(source: Merged, base: HfSource, folder: Path, dtype: str | None) -> None:
        real(source, base, folder, dtype)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))

    monkeypatch.setattr(write_hf, "_write_beside", another_epsilon)
    text = refused(run, "merge", base, "--lora", adapter, "-o", tmp_path / "m")
    assert text == f"{tmp_path / 'm'} would not be read as the model that was merged: report this."
    assert tree(tmp_path) == before


def test_bfloat16_ties_go_to_even(run: Run, tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base", "llama")
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"] = (1 + np.arange(64) * 2.0**-8).astype(np.float32)  # every other one is a tie
    save_file(tensors, base / "model.safetensors")
    run("merge", base, "--lora", adapter_for("llama", tmp_path), "-o", tmp_path / "m", "--dtype", "bfloat16")
    wanted = torch.from_numpy(tensors["model.norm.weight"]).bfloat16().float().numpy()
    assert np.array_equal(HfSource(tmp_path / "m").tensor("final_norm"), wanted)


def test_a_full_disk_and_what_a_killed_merge_left(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, adapter = write_tiny(tmp_path / "base", "llama"), adapter_for("llama", tmp_path)
    (tmp_path / ".m.merge-4194999").mkdir()  # above what a process id can be
    (tmp_path / ".m.merge-4194999/model.safetensors").write_text("half")
    (tmp_path / f".m.merge-{1}").mkdir()  # of a process that runs
    with monkeypatch.context() as patch:
        patch.setattr(write_hf.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 17_000_000})())
        text = refused(run, "merge", base, "--lora", adapter, "-o", tmp_path / "m")
        assert text.startswith(f"{tmp_path / 'm'} would take 17 MB and its disk has 17 MB left: make room")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(write_hf.os, "fsync", full)
        text = refused(run, "merge", base, "--lora", adapter, "-o", tmp_path / "m")
        what = f"{tmp_path / 'm'} could not be written (No space left on device)"
        assert text == f"{what}: make room or choose another folder with -o."
    assert sorted(p.name for p in tmp_path.iterdir()) == [".m.merge-1", "adapter", "base"]
    run("merge", base, "--lora", adapter, "-o", tmp_path / "m")
    assert (tmp_path / "m/model.safetensors").exists()


def test_an_adapter_that_does_not_fit(run: Run, tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base", "llama")
    adapter = write_adapter(tmp_path / "adapter", pair("model.layers.7.self_attn.q_proj", 64, 64))
    for verb in (["merge"], ["bake", "--context", "64"]):
        text = refused(run, *verb, base, "--lora", adapter, "-o", tmp_path / "out")
        assert "0 of its 2 tensors match and 2 do not" in text and "the model has 2 layers" in text
    assert "adapter nowhere is not there" in refused(run, "bake", base, "--lora", "nowhere", "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()
