"""What rounding by calibration would buy: int8 per channel, to nearest, by GPTQ, and by GPTQ after moving scales.

    anechain bake demo -o build/fp16
    python benchmarks/calibrated_rounding.py build/fp16 [--methods nearest,gptq,gptq+scales] [--sequences 32] [--seed 0]

Blocks only: head and embedding stay as they are. The arithmetic is float32 (the oracle on the rounded weights), judged
on the bundle's own two baselines. Calibration inputs are a small text of ours and what the model itself says at
temperature 1; none of the gate's prompts is in them. Layer by layer: a layer's second moments are those behind the
rounded layers before it.

GPTQ: Frantar et al. 2022, algorithm 1, columns in the order of their input's power, damping 1%. Moving scales: input
channel j of a matrix is multiplied by t_j before rounding and its producer divided by it (the norm's gain for q, k, v
and for gate and up; the rows of up for down; the rows of v, shared by a group of heads, for o), t = power of the input
to alpha, alpha the best of five by the error of rounding to nearest (Lin et al. 2023, AWQ, section 3.2).
"""

import argparse
import time
from importlib import resources
from pathlib import Path

import numpy as np

from anechain.bake.source import Source, open_source
from anechain.bundle.manifest import TOKENIZER, open_bundle
from anechain.bundle.quant import Quantized, dequantize, quantize
from anechain.bundle.recipe import Scheme
from anechain.judge.baseline import Baseline
from anechain.judge.gate import compare
from anechain.judge.oracle import Cache, Oracle, rotation
from anechain.judge.prepare import load_baseline
from anechain.run.tokenizer import Tokenizer

INT8, DAMPING, COLUMNS = Scheme(8), 0.01, 128
ALPHAS = (0.125, 0.25, 0.375, 0.5)
CONSUMERS = {"q": ("q", "k", "v"), "o": ("o",), "gate": ("gate", "up"), "down": ("down",)}
BEGINNINGS = (
    *("The", "In", "A", "How", "Once", "When", "It", "def", "import", "Write", "What", "1.", "On", "She", "He", "This"),
    *("There", "If", "For", "My", "Our", "We", "#", "-", "Q:", "To", "As", "New", "Most", "Le", "Die", "El"),
)


class Replaced:
    """A source with some tensors replaced."""

    def __init__(self, source: Source) -> None:
        self.source, self.tensors = source, dict[str, np.ndarray]()
        self.spec, self.fingerprint, self.ref = source.spec, source.fingerprint, source.ref

    def tensor(self, name: str) -> np.ndarray:
        return self.tensors[name] if name in self.tensors else self.source.tensor(name)


class Watching(Oracle):
    """An oracle that adds up x x^T of what enters the matrices, by the first matrix that it enters."""

    moments: dict[str, np.ndarray] | None = None

    def _linear(self, layer: int, name: str, x: np.ndarray) -> np.ndarray:
        if self.moments is not None and name in CONSUMERS:
            self.moments[name] = self.moments.get(name, 0) + (x.T @ x).astype(np.float64)
        return super()._linear(layer, name, x)


def generated(source: Source, tokenizer: Tokenizer, sequences: int, length: int, seed: int) -> list[np.ndarray]:
    """What the model itself says after some beginnings, drawn from its 50 likeliest tokens."""
    rng, oracle = np.random.default_rng(seed), Oracle(source)
    ids = [list(tokenizer.encode(BEGINNINGS[i % len(BEGINNINGS)])) for i in range(sequences)]
    caches, feed = [Cache() for _ in ids], [np.array(i) for i in ids]
    while len(ids[0]) < length:
        rows = np.stack([h[-1] for h in oracle.forward(feed, caches)])
        logits = oracle.logits(rows).astype(np.float64)[:, : tokenizer.n_ids]
        top = np.argpartition(-logits, 50, axis=1)[:, :50]
        for sequence, row, kept in zip(ids, logits, top, strict=True):
            weights = np.exp(row[kept] - row[kept].max())
            sequence.append(int(rng.choice(kept, p=weights / weights.sum())))
        feed = [np.array(sequence[-1:]) for sequence in ids]
    return [np.array(sequence[:length]) for sequence in ids]


def gptq(weight: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """[O, I] -> what int8 data and scales stand for, rounded so that the outputs change least."""
    columns, scale = weight.shape[1], quantize(weight, INT8).scale
    order = np.argsort(-np.diag(moment), kind="stable")
    damped = moment[np.ix_(order, order)] + DAMPING * np.diag(moment).mean() * np.eye(columns)
    inverse = np.linalg.cholesky(np.linalg.inv(damped)).T.astype(np.float32)  # upper triangle
    rest, step = weight.astype(np.float16).astype(np.float32)[:, order], scale.astype(np.float32)[:, 0]
    data = np.empty(rest.shape, np.int8)
    for left in range(0, columns, COLUMNS):
        part = slice(left, min(left + COLUMNS, columns))
        block, errors = rest[:, part], np.empty((len(rest), part.stop - left), np.float32)
        for at in range(part.stop - left):
            data[:, left + at] = np.clip(np.rint(block[:, at] / step), -127, 127)
            errors[:, at] = (block[:, at] - data[:, left + at] * step) / inverse[left + at, left + at]
            block[:, at + 1 :] -= errors[:, at, None] * inverse[left + at, left + at + 1 : part.stop]
        rest[:, part.stop :] -= errors @ inverse[part, part.stop :]
    back = np.empty_like(data)
    back[:, order] = data
    return dequantize(Quantized(back, scale)).astype(np.float32)


def nearest(weight: np.ndarray) -> np.ndarray:
    return dequantize(quantize(weight, INT8)).astype(np.float32)


def moved(weights: list[np.ndarray], moment: np.ndarray, shared: tuple[int, int, int] | None) -> np.ndarray:
    """The factors t [I] of a matrix' input channels that round best; `shared` (n_kv, group, D) ties heads together."""
    power, best = np.sqrt(np.diag(moment) + 1e-12), np.ones(len(moment), np.float32)
    lowest = np.inf
    for alpha in (0.0, *ALPHAS):
        logs = alpha * np.log(power)
        if shared:
            logs = np.broadcast_to(logs.reshape(shared).mean(axis=1, keepdims=True), shared).ravel()
        t = np.clip(np.exp(logs - logs.mean()), 1 / 64, 64).astype(np.float32)
        errors = [(nearest(w * t) - w * t) / t for w in weights]
        lost = sum(float(np.einsum("ij,ij->", e @ moment.astype(np.float32), e)) for e in errors)
        if lost < lowest:
            lowest, best = lost, t
    return best


def rounded(source: Source, tokens: list[np.ndarray], method: str) -> Replaced:
    """The source with the matrices of all blocks rounded by `method`, layer by layer."""
    replaced, spec = Replaced(source), source.spec
    oracle = Watching(replaced, keep_bytes=0)
    ends = np.cumsum([len(t) for t in tokens]).tolist()
    spans = [slice(end - len(t), end) for end, t in zip(ends, tokens, strict=True)]
    positions = np.concatenate([np.arange(len(t)) for t in tokens])
    turns = [rotation(a.rope, spec.head_dim, positions) for a in spec.attentions]
    x = oracle._tensor("embed")[np.concatenate(tokens)] * np.float32(spec.embedding_scale)
    heads = (spec.n_kv_heads, spec.n_heads // spec.n_kv_heads, spec.head_dim)

    def through(layer: int) -> np.ndarray:
        caches = [None] * len(tokens)
        middle = x + oracle._attention(layer, x, turns[spec.layer_attention[layer]], spans, caches)
        return middle + oracle._ffn(layer, middle)

    for layer in range(spec.n_layers):
        oracle.moments = {}
        through(layer)
        moments, oracle.moments = oracle.moments, None
        at = {n: source.tensor(f"layers.{layer}.{n}") for n in ("q", "k", "v", "o", "gate", "up", "down")}
        if method == "gptq+scales":
            for first, names in CONSUMERS.items():
                t = moved([at[n] for n in names], moments[first], heads if first == "o" else None)
                at |= {n: at[n] * t for n in names}
                moments[first] = moments[first] / np.outer(t, t)
                if first == "o":
                    at["v"] = at["v"] / t.reshape(heads)[:, 0].reshape(-1, 1)
                elif first == "down":
                    at["up"] = at["up"] / t[:, None]
                else:
                    norm = f"layers.{layer}.{'attn_norm' if first == 'q' else 'ffn_norm'}"
                    replaced.tensors[norm] = (source.tensor(norm) / t).astype(np.float16).astype(np.float32)
        for first, names in CONSUMERS.items():
            for n in names:
                value = nearest(at[n]) if method == "nearest" else gptq(at[n], moments[first])
                replaced.tensors[f"layers.{layer}.{n}"] = value
        x = through(layer)
    return replaced


def judged(source: Source, baseline: Baseline) -> str:
    oracle = Oracle(source)
    hidden = oracle.forward([a.ids for a in baseline.answers])
    steps = [
        compare(a.name, int(p), wanted, got)
        for a, h in zip(baseline.answers, hidden, strict=True)
        for p, wanted, got in zip(a.positions, a.logits, oracle.logits(h[a.positions]), strict=True)
    ]
    misses = [s for s in steps if s.miss]
    return (
        f"min cosine {min(s.cosine for s in steps):.5f}, centred {min(s.centred_cosine for s in steps):.5f}, "
        f"mean KL {np.mean([s.kl for s in steps]):.2e}, top-1 {1 - len(misses) / len(steps):.2%}, misses' margins "
        f"{sorted(round(s.margin, 4) for s in misses)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--methods", default="nearest,gptq,gptq+scales")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    bundle = open_bundle(options.bundle)
    source, tokenizer = open_source(bundle.source_ref), Tokenizer.load(bundle.path / TOKENIZER)
    text = tokenizer.encode((resources.files("anechain") / "data" / "calibration.txt").read_text(encoding="utf-8"))
    tokens = [np.array(text[i : i + 512]) for i in range(0, len(text), 512)]
    tokens += generated(source, tokenizer, options.sequences, options.length, options.seed)
    print(f"calibrated on {sum(map(len, tokens))} tokens")
    for method in options.methods.split(","):
        started = time.perf_counter()
        result = rounded(source, tokens, method)
        print(f"{method} ({time.perf_counter() - started:.0f} s)", flush=True)
        for profile in ("m8", "strict"):
            print(f"  {profile}: {judged(result, load_baseline(bundle, profile))}", flush=True)


if __name__ == "__main__":
    main()
