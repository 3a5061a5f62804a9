"""The card of a verdict: one HTML file that needs nothing else, and the model card in the form of Hugging Face.

Both are written from what `card.json` holds, and hold no figure that is not in it.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined

from anechain.bundle.embedding import TABLE
from anechain.bundle.manifest import Bundle
from anechain.bundle.program import read_program
from anechain.judge import plots
from anechain.judge.gate import MAX_MEAN_KL, MIN_COSINE, Result

_LAYER = re.compile(r"layers_(\d+)_")
_SMALLEST = 10  # values; smaller constants lie in the program itself


def series(bundle: Bundle, results: Sequence[Result]) -> dict[str, Any]:
    """What is only drawn: every judged step's cosine and KL, and the weight bytes of every layer."""
    return {
        "steps": [
            {
                "name": f"{r.profile}, {r.engine}",
                "profile": r.profile,
                # m8 judges the plain cosine, strict the one of logits less their mean
                "cosine": [s.cosine if r.profile == "m8" else s.centred_cosine for s in r.steps],
                "kl": [s.kl for s in r.steps],
            }
            for r in results
        ],
        "layers": layer_bytes(bundle),
    }


def layer_bytes(bundle: Bundle) -> list[dict[str, Any]]:
    """[{"name", "bytes"}] of the weights as stored: the layers in order, then the embedding where it is stored apart,
    then the head. What two functions share counts once."""
    totals: Counter[str] = Counter()
    for path in [*bundle.block_paths, bundle.head_path]:
        seen: dict[int, tuple[str, int]] = {}
        for function in read_program(path).functions.values():
            for name, value in function.consts.items():
                if isinstance(value, np.ndarray) and value.size >= _SMALLEST and value.dtype.kind in "fiu":
                    layer = _LAYER.match(name)
                    part = layer[1] if layer else "head" if path == bundle.head_path else "shared"
                    seen[value.__array_interface__["data"][0]] = (part, value.nbytes)
        for part, size in seen.values():
            totals[part] += size
    if bundle.embedding == TABLE:
        totals["embedding"] = sum(r.bytes for name, r in bundle.files.items() if name.startswith("embedding"))
    layers = [{"name": str(i), "bytes": totals.pop(str(i), 0)} for i in range(bundle.spec.n_layers)]
    return layers + [{"name": n, "bytes": totals[n]} for n in ("shared", "embedding", "head") if totals.get(n)]


def html(card: Mapping[str, Any]) -> str:
    """card.html from what card.json holds."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"mb": lambda n: f"{n / 1e6:.1f} MB", "gib": lambda n: f"{n / 2**30:.3f} GiB"}
    source = files("anechain").joinpath("data", "card.html.j2").read_text(encoding="utf-8")
    return environment.from_string(source).render(card=card, drawn=_drawn(card))


def _drawn(card: Mapping[str, Any]) -> dict[str, str]:
    """The plots that there is data for, by name."""
    drawn: dict[str, str] = {}
    steps = card["plots"]["steps"]
    for profile in dict.fromkeys(s["profile"] for s in steps):
        mine = [s for s in steps if s["profile"] == profile]
        drawn[f"cosine-{profile}"] = plots.cosine_by_step(mine, MIN_COSINE, profile)
        drawn[f"kl-{profile}"] = plots.kl_by_step(mine, MAX_MEAN_KL if profile == "strict" else None, profile)
    if score := card["score"]:
        names = (card["bundle"]["name"], card["base"]["name"])
        both = [
            {
                "name": name,
                "first_token_ms": [r["first_token_ms"] for r in score[which]["runs"]],
                "tok_per_s": [r["tok_per_s"] for r in score[which]["runs"]],
            }
            for name, which in zip(names, ("candidate", "other"), strict=True)
        ]
        drawn["first-token"], drawn["decode"] = plots.latency(both)
    if evaluation := card["eval"]:
        others = {g["name"]: g for g in evaluation["against"]["other"]["groups"]}
        groups = [
            {**g, "other": others[g["name"]]["rate"], "other_interval": others[g["name"]]["interval"]}
            for g in evaluation["groups"]
        ]
        if groups:
            drawn["rates"] = plots.rates(groups, (card["bundle"]["name"], card["base"]["name"]))
    drawn["bytes"] = plots.bytes_by_layer(card["plots"]["layers"])
    return drawn


def model_card(card: Mapping[str, Any]) -> str:
    """README.md with the metadata that Hugging Face reads; every figure in it was measured, and says with what."""
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    source = files("anechain").joinpath("data", "model-card.md.j2").read_text(encoding="utf-8")
    return environment.from_string(source).render(card=card)
