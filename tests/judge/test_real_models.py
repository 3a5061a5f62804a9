"""The two real models that packages carry: the same model in another format, and llama.cpp's opinion."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anechain.bake import package
from anechain.bake.family import FAMILIES
from anechain.bake.gguf import GgufSource
from anechain.bake.hf import HfSource
from anechain.bake.source import Source
from anechain.bundle.recipe import load_recipe
from anechain.bundle.spec import tensors_of
from anechain.judge.oracle import Cache, Oracle
from anechain.judge.stream import stream_scale
from anechain.run.tokenizer import Tokenizer
from tests.tiny import save_safetensors
from tests.tiny_gguf import demo_path, gemma_path
from tests.tolerances import LLAMA_CPP_COSINE

pytestmark = pytest.mark.slow
PROMPT = "The capital of France is"
STEPS = 6


def tokenizer_of(source: Source, folder: Path) -> Tokenizer:
    for name, content in source.text_files.items():
        (folder / name).write_bytes(content)
    return Tokenizer.load(folder)


def greedy(source: Source, ids: list[int]) -> list[int]:
    oracle, cache, out = Oracle(source), Cache(), []
    feed = np.array(ids)
    for _ in range(STEPS):
        (hidden,) = oracle.forward([feed], [cache])
        out.append(int(oracle.logits(hidden[-1:])[0].argmax()))
        feed = np.array(out[-1:])
    return out


def write_hf(source: GgufSource, folder: Path) -> Path:
    """The model in a GGUF file as a Hugging Face directory in float32, which holds its numbers exactly."""
    spec, names = source.spec, FAMILIES[source.spec.family].names
    folder.mkdir()
    save_safetensors(folder / "model.safetensors", {names.own(n): source.tensor(n) for n in tensors_of(spec)})
    config: dict[str, Any] = {
        "model_type": spec.family, "vocab_size": spec.vocab_size, "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_size, "num_hidden_layers": spec.n_layers, "num_attention_heads": spec.n_heads,
        "num_key_value_heads": spec.n_kv_heads, "rms_norm_eps": spec.rms_eps, "tie_word_embeddings": spec.tied,
        "rope_theta": spec.attentions[0].rope.theta, "max_position_embeddings": spec.max_context,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer_of(source, folder)
    return folder


def test_smollm2_is_the_same_from_both_formats(tmp_path: Path) -> None:
    """The same tensors, the same greedy text, and packages of the same bytes."""
    gguf = GgufSource(demo_path())
    hf = HfSource(write_hf(gguf, tmp_path / "hf"))
    assert hf.spec == gguf.spec and hf.text_files == gguf.text_files
    ids = Tokenizer.load(tmp_path / "hf").encode(PROMPT)
    texts = [Tokenizer.load(tmp_path / "hf").decode(greedy(source, ids)) for source in (gguf, hf)]
    assert texts[0] == texts[1] and "Paris" in texts[0]
    layers, made = range(10, 11), []
    for name, source in (("gguf", gguf), ("hf", hf)):
        (tmp_path / name).mkdir(exist_ok=True)
        block = tmp_path / name / "block-000.mlpackage"
        package.make_block(source, source.spec, load_recipe("int8"), layers, 64, 32, block)
        made.append({p.relative_to(block): p.read_bytes() for p in sorted(block.rglob("*")) if p.is_file()})
    assert made[0] == made[1] and len(made[0]) == 3


def test_gemma_says_what_llama_cpp_says(tmp_path: Path) -> None:
    """Norms, both ropes, windows and the scale of the embedding, on the real thing; and that it has to be scaled."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama_cpp, whose logits are the reference, is not installed")
    path = gemma_path(tmp_path)
    source = GgufSource(path)
    tokenizer = tokenizer_of(source, tmp_path)
    ids = tokenizer.encode("Paris is the capital of France. The capital of Italy is")
    reference = llama_cpp.Llama(model_path=str(path), n_ctx=64, logits_all=True, verbose=False, n_threads=1)
    reference.eval(ids)
    theirs = np.array(reference.scores[: len(ids)], np.float64)
    oracle = Oracle(source)
    ours = oracle.logits(oracle.forward([np.array(ids)])[0]).astype(np.float64)
    assert ours.shape == theirs.shape == (len(ids), 262144)
    a, b = (rows - rows.mean(axis=1, keepdims=True) for rows in (ours, theirs))
    cosine = (a * b).sum(axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    assert cosine.min() > LLAMA_CPP_COSINE
    assert (ours.argmax(axis=1) == theirs.argmax(axis=1)).mean() > 0.8
    assert tokenizer.decode([int(ours[-1].argmax())]) == " Rome"
    peak = float(oracle.stream_peak.max())
    assert 100_000 < peak < 110_000 and stream_scale(peak) == 0.25
