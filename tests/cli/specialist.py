"""A tiny specialist, what it is judged by, and ways to spoil it: shared by the tests of `ship`."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anechain.bundle.manifest import Bundle, open_bundle, record_files, write_manifest
from anechain.cli import bake as bake_module
from anechain.cli import ship as ship_module
from anechain.judge.baseline import Baseline, Profile
from anechain.judge.evaluate import Comparison
from anechain.judge.prepare import load_baseline
from anechain.judge.score import CONDITIONS, Measurement, Run, Score, ScorePair, compared
from anechain.judge.suite import Suite
from anechain.run.cpu import cpu_engine
from tests.judge.self_suite import self_suite
from tests.tiny import write_tiny
from tests.tiny_lora import pair, write_adapter

# Heads of 32, which the rules of the ANE ask for; the state's last axis is that of a head.
SHAPE = {"num_hidden_layers": 1, "head_dim": 32}
MODULES = {"self_attn.q_proj": (128, 64), "self_attn.v_proj": (64, 64), "mlp.down_proj": (64, 96)}
THRESHOLDS = """
[lint]
max_errors = 0
[gate]
profiles = ["m8"]
[traces]
min_valid = 1.0
[fixtures]
max_loss_pp = 1.0
min_pass_rate = 0.5
[score]
min_speed_ratio = 1.5
max_accuracy_loss_pp = 2.0
min_cost_ratio = 1.0
[ane]
min_share = 0.9
min_speed_ratio = 1.5
"""


def adapter(folder: Path, size: float = 0.3, alpha: int = 8, modules: dict[str, tuple[int, int]] = MODULES) -> Path:
    tensors: dict[str, np.ndarray] = {}
    for module, (outputs, inputs) in modules.items():
        tensors |= pair(f"model.layers.0.{module}", outputs, inputs, size=size)
    return write_adapter(folder, tensors, lora_alpha=alpha, target_modules=[m.rpartition(".")[2] for m in modules])


def baked(folder: Path, model: Path, lora: Path | None, **options: Any) -> Path:
    settings = {"context": 64, "prefill": 32, "jobs": 1} | options
    bake_module.bake_bundle(str(model), folder, lora=str(lora) if lora else None, **settings)
    return folder


def grafted(folder: Path, good: Path, donor: Path, part: str) -> Path:
    """`good` with one part of `donor`, and a manifest that says so: what a bad conversion makes, its hashes right."""
    shutil.copytree(good, folder)
    shutil.rmtree(folder / part) if (folder / part).is_dir() else (folder / part).unlink()
    source = donor / part
    shutil.copytree(source, folder / part) if source.is_dir() else shutil.copyfile(source, folder / part)
    bundle = open_bundle(good)
    files = {name: r for name, r in bundle.files.items() if not name.startswith(part)}
    write_manifest(replace(bundle, path=folder, files=files | record_files(folder, folder / part)))
    return folder


@dataclass
class World:
    """A model, its specialist as a bundle, and a suite that the specialist passes."""

    root: Path
    model: Path
    lora: Path
    good: Path
    suite: Suite
    thresholds: Path

    def arguments(self, candidate: Path, **options: Any) -> list[Any]:
        given = {
            "against": self.good, "suite": self.suite.path, "thresholds": self.thresholds, "engine": "cpu",
            "output": self.root / "card", **options,
        }  # fmt: skip
        return ["ship", candidate, *(part for name, value in given.items() for part in (f"--{name}", value))]


def make_world(root: Path) -> World:
    model = write_tiny(root / "model", "llama", **SHAPE)
    lora = adapter(root / "adapter")
    good = baked(root / "good", model, lora)
    (root / "limits.toml").write_text(THRESHOLDS, encoding="utf-8")
    suite = self_suite(open_bundle(good), root / "suite", 8, cpu_engine("exact"))
    return World(root, model, lora, good, suite, root / "limits.toml")


def scripted_score(speed: float = 2.0, cost: float = 1.2) -> Callable[..., ScorePair]:
    """In place of `score_pair`: the candidate is `speed` and `cost` times the other; the pass rates are those found."""

    def measured(bundles: tuple[Bundle, Bundle], comparison: Comparison, *_: Any) -> ScorePair:
        conditions = dict.fromkeys(CONDITIONS, "same") | {
            "machine": {"processor": "p", "cores": 2, "system": "s"}, "tokens": 48, "prompt_tokens": 34,
        }  # fmt: skip

        def one(runs: int, factor: float, gib: float) -> Measurement:
            spread = [Run(100 + i, 50 * factor) for i in range(runs)]
            return Measurement(conditions, "0" * 64, tuple(spread), int(gib * 2**29), int(gib * 2**29))

        mine, theirs = one(5, speed, 1 / cost), one(5, 1.0, 1.0)
        return compared(Score(mine, comparison.candidate.rate), Score(theirs, comparison.other.rate))

    return measured


def without_measuring(patch: pytest.MonkeyPatch, speed: float = 2.0, cost: float = 1.2) -> None:
    patch.setattr(ship_module, "score_pair", scripted_score(speed, cost))


def without_drawing(patch: pytest.MonkeyPatch) -> None:
    """The card's HTML is not what is tested, and its plots take longer than all the rest."""
    patch.setattr(ship_module, "html", lambda card: "")


def with_a_short_gate(patch: pytest.MonkeyPatch, prompts: int = 1) -> None:
    """The first prompt of the baseline in place of all five: enough to refuse what is refused here."""

    def load(bundle: Bundle, profile: Profile) -> Baseline:
        whole = load_baseline(bundle, profile)
        kept = whole.prompts[:prompts]
        n = sum(len(p.positions) for p in kept)
        return replace(
            whole, prompts=kept, positions=whole.positions[:n], tokens=whole.tokens[:n], logits=whole.logits[:n]
        )

    patch.setattr(ship_module, "load_baseline", load)


def card_of(world: World) -> dict[str, Any]:
    return dict(json.loads((world.root / "card/card.json").read_text(encoding="utf-8")))
