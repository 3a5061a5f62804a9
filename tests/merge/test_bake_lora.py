"""`bake --lora` with the gate, through the command line, as a user meets them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from anechain.bake import jobs
from anechain.bake.adapter import Adapter
from anechain.bake.hf import HfSource
from anechain.bake.lora import Merged
from anechain.bundle.manifest import open_bundle
from anechain.judge.baseline import build_baseline
from anechain.judge.gate import run_gate
from anechain.judge.oracle import Oracle
from anechain.judge.prepare import load_baseline
from anechain.run.chain import Chain
from anechain.run.reference import ReferenceEngine
from tests.in_process import tree
from tests.merge.runs import BAKE, Q0, Run, adapter_for, refused
from tests.tiny import REMOVED, write_tiny
from tests.tiny_lora import PREFIX, pair, write_adapter


def test_a_bundle_with_an_adapter_is_gated_against_both(cache: None, run: Run, tmp_path: Path) -> None:
    base, adapter = write_tiny(tmp_path / "base", "qwen3"), adapter_for("qwen3", tmp_path)
    out, err = run("bake", base, "--lora", adapter, "-o", tmp_path / "b", *BAKE, "--json")
    assert "note: the adapter changes 2 matrices in 2 of 2 layers (rank 4)" in err and "warning" not in err
    source = Merged(HfSource(base), Adapter(adapter))
    bundle = open_bundle(tmp_path / "b", verify_hashes=True)
    assert bundle.fingerprint == source.fingerprint and bundle.source_ref == str(base)
    plan = jobs.make_plan(source, bundle.recipe, 64, 32, "macOS15", 1)
    assert (plan.adapter_ref, plan.adapter_sha256) == (str(adapter), source.adapter.sha256)
    record = bundle.adapter
    assert record is not None and json.loads(out)["adapter"] == record
    assert {k: v for k, v in record.items() if k != "survival"} == source.provenance
    assert record["survival"]["matrices"] == 2 and 0.99 < record["survival"]["min_share"] <= 1
    figures = {n: json.loads((tmp_path / f"b/{n}").read_text()) for n in bundle.files if n.startswith("adapter-")}
    assert figures.keys() == {"adapter-block-000.json", "adapter-block-001.json", "adapter-head.json"}
    assert [list(f) for _, f in sorted(figures.items())] == [["layers.0.q"], ["layers.1.up"], []]

    verdict, _ = run("gate", tmp_path / "b", "--by-package", "--json")
    assert json.loads(verdict)["verdict"] == "pass" and len(json.loads(verdict)["packages"]) == 2
    shown, _ = run("inspect", tmp_path / "b")
    assert f"with the adapter {adapter}: the adapter changes 2 matrices" in shown
    assert json.loads(run("inspect", tmp_path / "b", "--json")[0])["adapter"] == record

    own = load_baseline(bundle, "m8")
    of_base = build_baseline(Oracle(HfSource(base)), own.prompts, "m8", own.context)
    assert of_base.fingerprint != own.fingerprint
    alone = run_gate(Chain(bundle, ReferenceEngine()), replace(of_base, fingerprint=own.fingerprint))
    assert not alone.passed, "the adapter makes no difference that the gate could see"


def test_a_bake_goes_on_only_with_the_same_adapter(cache: None, run: Run, tmp_path: Path) -> None:
    base, adapter = write_tiny(tmp_path / "base", "qwen3"), adapter_for("qwen3", tmp_path)
    bundle = tmp_path / "b"
    run("bake", base, "--lora", adapter, "-o", bundle, *BAKE, "--recipe", "int8")
    made = tree(bundle)
    run("bake", base, "--lora", adapter, "-o", bundle, *BAKE, "--recipe", "int8")
    assert tree(bundle) == made
    (bundle / "adapter-block-001.json").unlink()
    run("bake", base, "--lora", adapter, "-o", bundle, *BAKE, "--recipe", "int8")
    assert tree(bundle) == made, "only what was missing was made again, and is the same"
    for other in ([], ["--lora", str(adapter_for("qwen3", tmp_path, lora_alpha=7))]):
        text = refused(run, "bake", base, *other, "-o", bundle, *BAKE, "--recipe", "int8")
        assert text.startswith(f"{bundle} holds another bundle")
    adapter_for("qwen3", tmp_path)
    moved = adapter.rename(tmp_path / "moved")
    run("bake", base, "--lora", moved, "-o", bundle, *BAKE, "--recipe", "int8")
    assert tree(bundle) == made, "where the adapter lies decides nothing"
    _, err = run("bake", base, "-o", bundle, *BAKE, "--recipe", "int8", "--force")
    assert "adapter" not in err and not list(bundle.glob("adapter-*"))
    assert open_bundle(bundle).adapter is None


def test_a_delta_of_a_quarter_step_is_a_warning_of_the_bake(cache: None, run: Run, tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base", "qwen3")
    weight = HfSource(base).tensor("layers.0.q")
    tensors = pair(Q0, 128, 64)
    b, a = (f"{PREFIX}{Q0}.lora_{part}.weight" for part in "BA")
    steps = np.abs(weight).max(axis=1) / 127
    delta = np.abs(1.5 * tensors[b].astype(np.float64) @ tensors[a])
    tensors[b] *= (0.25 * steps / delta.max(axis=1)).astype(np.float32)[:, None]
    adapter = write_adapter(tmp_path / "adapter", tensors)
    out, err = run("bake", base, "--lora", adapter, "-o", tmp_path / "int8", *BAKE, "--recipe", "int8", "--json")
    found = json.loads(out)["adapter"]["survival"]
    assert 0 < found["min_share"] < 0.25 and found["low"] == 1 and found["worst_matrix"] == "layers.0.q"
    assert "warning: in 1 of 1 matrices rounding changes more than the adapter does" in err
    out, err = run("bake", base, "--lora", adapter, "-o", tmp_path / "fp16", *BAKE, "--json")
    assert json.loads(out)["adapter"]["survival"]["min_share"] > 0.9 and "warning" not in err


def test_the_adapters_tokenizer_is_in_the_bundle_and_checked_first(cache: None, run: Run, tmp_path: Path) -> None:
    base, adapter = write_tiny(tmp_path / "base", "qwen3"), adapter_for("qwen3", tmp_path)
    (adapter / "chat_template.jinja").write_text("{{ messages[0].content }}")
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    (adapter / "tokenizer.json").write_text("{}")
    assert f"{adapter}/tokenizer.json is not a tokenizer" in refused(
        run, "bake", base, "--lora", adapter, "-o", tmp_path / "b", *BAKE
    )
    assert not (tmp_path / "b").exists()
    (adapter / "tokenizer.json").write_text(json.dumps(tokenizer))
    (base / "tokenizer.json").unlink()
    _, err = run("bake", base, "--lora", adapter, "-o", tmp_path / "b", *BAKE)
    assert "note: chat_template.jinja, tokenizer.json are the adapter's, not the model's" in err
    assert (tmp_path / "b/tokenizer/chat_template.jinja").read_text() == "{{ messages[0].content }}"
    assert json.loads((tmp_path / "b/tokenizer/tokenizer.json").read_text()) == tokenizer


def test_a_config_without_the_field_gets_it(run: Run, tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base", "llama", torch_dtype=REMOVED)
    adapter = adapter_for("llama", tmp_path)
    run("merge", base, "--lora", adapter, "-o", tmp_path / "m", "--dtype", "bfloat16")
    assert json.loads((tmp_path / "m/config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "m").dtype == torch.bfloat16
