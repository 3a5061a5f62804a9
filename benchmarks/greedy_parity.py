"""Greedy text of a GGUF model: its fp16 bundle on the cpu engine against transformers on the same weights.

    python benchmarks/greedy_parity.py MODEL.gguf build/parity [--tokens 32]

Where the two part, the original's margin between its first two tokens is printed: below 0.05 logits either may come.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from anechain.bundle.manifest import TOKENIZER, open_bundle
from anechain.cli.console import open_engine
from anechain.run.chain import Chain
from anechain.run.generate import generate
from anechain.run.sample import Sampling
from anechain.run.tokenizer import Tokenizer

PROMPTS = (
    "The capital of France is",
    "Photosynthesis is the process by which",
    "def fibonacci(n):",
    "Dear Sir or Madam,",
    "The three primary colours are",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    bake = [sys.executable, "-m", "anechain", "bake", options.model, "-o", options.bundle, "--context", "256"]
    subprocess.run(bake, check=True)
    model = AutoModelForCausalLM.from_pretrained(
        str(options.model.parent), gguf_file=options.model.name, dtype=torch.float32
    ).eval()
    bundle = open_bundle(options.bundle)
    tokenizer, chain = Tokenizer.load(bundle.path / TOKENIZER), Chain(bundle, open_engine("cpu"))
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt)
        said = generate(chain, chain.start(), tokenizer, ids, Sampling(), options.tokens, stop=frozenset())
        mine = [token.id for token in said]
        with torch.no_grad():  # one pass over our text tells whether each token is the likeliest after those before it
            logits = model(torch.tensor([ids + mine])).logits[0, len(ids) - 1 : -1].numpy()
        at = next((i for i, row in enumerate(logits) if row.argmax() != mine[i]), None)
        if at is None:
            print(f"{prompt!r}: the same {options.tokens} tokens")
        else:
            first, second = np.sort(logits[at])[-1:-3:-1]
            print(f"{prompt!r}: parts at token {at}, where the original's margin is {first - second:.4f} logits")


if __name__ == "__main__":
    main()
