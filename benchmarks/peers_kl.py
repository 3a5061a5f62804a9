"""How far engines are from the original's float32 pass: this project's in both modes, and the peers that are installed.

    python benchmarks/peers_kl.py BUNDLE [--profile m8|strict] [--peers-python PYTHON]

Everybody is fed the contexts of the bundle's own gate: a prompt, then single tokens. The peers read the bundle's
source, a Hugging Face directory, and round it in their own way, so a figure holds what the weights lose and what the
arithmetic does. One JSON object a line.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from anechain.bundle.manifest import open_bundle
from anechain.judge.baseline import Baseline
from anechain.judge.gate import compare
from anechain.run.chain import Chain
from anechain.run.cpu import cpu_engine

PEERS = Path(__file__).with_name("peers")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--profile", choices=("m8", "strict"), default="strict")
    parser.add_argument("--peers-python", default=sys.executable)
    given = parser.parse_args()
    bundle = open_bundle(given.bundle)
    baseline = Baseline.load(bundle.path / f"baseline-{given.profile}.npz")
    for mode in ("exact", "fast"):
        chain = Chain(bundle, cpu_engine(mode))
        told(chain.engine.name, baseline, own(chain, baseline), {"bundle": str(given.bundle)})
    with tempfile.TemporaryDirectory() as folder:
        contexts, out = Path(folder) / "contexts.npz", Path(folder) / "logits.npy"
        arrays = {}
        for i, answer in enumerate(baseline.answers):
            arrays |= {f"ids_{i}": answer.ids, f"positions_{i}": answer.positions}
        np.savez(contexts, **arrays)
        for script in sorted(path for path in PEERS.glob("*.py") if not path.name.startswith("_")):
            command = [given.peers_python, str(script), "--source", bundle.source_ref, "--answers", contexts, out]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(json.dumps({"engine": script.stem, "not_measured": done.stderr.strip().splitlines()[-1:]}))
                continue
            told(script.stem, baseline, np.load(out), json.loads(done.stdout.strip().splitlines()[-1]))


def own(chain: Chain, baseline: Baseline) -> np.ndarray:
    made = []
    for answer in baseline.answers:
        session, begin = chain.start(), 0
        for position in answer.positions:
            made.append(chain.feed(session, answer.ids[begin : position + 1]))
            begin = position + 1
    return np.array(made)


def told(name: str, baseline: Baseline, logits: np.ndarray, more: dict[str, str]) -> None:
    steps = [
        compare("", int(position), wanted, got[: baseline.vocab_size])
        for position, wanted, got in zip(baseline.positions, baseline.logits, logits, strict=True)
    ]
    record = {
        "engine": name,
        "mean_kl": float(np.mean([step.kl for step in steps])),
        "max_kl": max(step.kl for step in steps),
        "min_cosine": min(step.cosine for step in steps),
        "top1": sum(not step.miss for step in steps) / len(steps),
        "positions": len(steps),
    }
    print(json.dumps(record | more), flush=True)


main()
