"""Regressions that `ship` has to refuse: each is what some real mistake makes of a specialist."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.cli.outcome import Outcome
from tests.cli.specialist import (
    MODULES,
    World,
    adapter,
    baked,
    card_of,
    grafted,
    make_world,
    with_a_short_gate,
    without_drawing,
    without_measuring,
)  # fmt: skip
from tests.judge.self_suite import write_suite
from tests.tiny import write_tiny

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "candidate"


def changed_model(world: World, place: Path, change: Callable[[dict[str, np.ndarray]], None]) -> Path:
    """The checkpoint with tensors changed in place."""
    model = place / "model"
    shutil.copytree(world.model, model)
    tensors = dict(load_file(model / WEIGHTS))
    change(tensors)
    save_file(tensors, model / WEIGHTS)
    return model


def graft(part: str, donor: str) -> Callable[[World, Path], Path]:
    """One package as a faulty conversion writes it, under the baseline of the right model."""

    def make(world: World, place: Path) -> Path:
        return grafted(place / "bundle", world.good, donor_of(world, donor), part)

    return make


def donor_of(world: World, name: str) -> Path:
    """A bundle with several faults, of which only that of one package is taken; each is baked once."""
    place = world.root / "donors" / name
    if not (place / "bundle").is_dir():
        model, lora = (
            (world.model, None) if name == "dropped" else (changed_model(world, place, DONORS[name]), world.lora)
        )
        baked(place / "bundle", model, lora)
    return place / "bundle"


def donor(*changes: Callable[[dict[str, np.ndarray]], None]) -> Callable[[dict[str, np.ndarray]], None]:
    def change(tensors: dict[str, np.ndarray]) -> None:
        for one in changes:
            one(tensors)

    return change


def noise(name: str, size: float) -> Callable[[dict[str, np.ndarray]], None]:
    def change(tensors: dict[str, np.ndarray]) -> None:
        values = tensors[name]
        tensors[name] = values + size * values.std() * np.random.default_rng(0).standard_normal(values.shape).astype(
            "f4"
        )

    return change


def swapped_rows(tensors: dict[str, np.ndarray]) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = np.concatenate([tensors[name][32:], tensors[name][:32]])


def no_gain(tensors: dict[str, np.ndarray]) -> None:
    tensors["model.norm.weight"] = np.ones_like(tensors["model.norm.weight"])


def with_adapter(**options: object) -> Callable[[World, Path], Path]:
    def make(world: World, place: Path) -> Path:
        return baked(place / "bundle", world.model, adapter(place / "adapter", **options))  # type: ignore[arg-type]

    return make


def with_text(file: str, old: str, new: str) -> Callable[[World, Path], Path]:
    def make(world: World, place: Path) -> Path:
        return baked(place / "bundle", changed_text(world.model, place / "model", file, old, new), world.lora)

    return make


def with_template(old: str, new: str) -> Callable[[World, Path], Path]:
    """What a bake of a model with another chat template gives: nothing else of a bundle depends on it."""

    def make(world: World, place: Path) -> Path:
        changed_text(world.good, place / "donor", f"tokenizer/{TEMPLATE}", old, new)
        return grafted(place / "bundle", world.good, place / "donor", f"tokenizer/{TEMPLATE}")

    return make


def changed_text(folder: Path, place: Path, file: str, old: str, new: str) -> Path:
    shutil.copytree(folder, place)
    text = (place / file).read_text(encoding="utf-8")
    assert old in text
    (place / file).write_text(text.replace(old, new), encoding="utf-8")
    return place


def flipped(world: World, place: Path) -> Path:
    shutil.copytree(world.good, place)
    file = place / "head.mlpackage/Data/com.apple.CoreML/weights/weight.bin"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    return place


def exchanged(world: World, place: Path) -> Path:
    """A package of another bundle copied over, its manifest left as it was."""
    donor = donor_of(world, "dropped")
    shutil.copytree(world.good, place / "bundle")
    shutil.rmtree(place / "bundle/block-000.mlpackage")
    shutil.copytree(donor / "block-000.mlpackage", place / "bundle/block-000.mlpackage")
    return place / "bundle"


DOWN, EMBED, HEAD = "model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight", "lm_head.weight"
DONORS = {
    "noise": donor(noise(EMBED, 0.3), noise(HEAD, 0.3), noise(DOWN, 0.5)),
    "order": donor(swapped_rows, no_gain),
}
CONFIG, TEMPLATE = "config.json", "tokenizer_config.json"
# name -> (the candidate, exit code, what the report or the refusal says)
REGRESSIONS: dict[str, tuple[Callable[[World, Path], Path], int, str]] = {
    "the adapter is dropped": (lambda w, h: donor_of(w, "dropped"), 1, "pp were lost"),
    "the adapter at half its strength": (with_adapter(alpha=4), 1, "pp were lost"),
    "another adapter": (with_adapter(size=0.2), 1, "pp were lost"),
    "an adapter without one of its modules": (
        with_adapter(modules={k: v for k, v in MODULES.items() if "down" not in k}), 1, "pp were lost"),
    "the chat template writes another role": (with_template("assistant", "Assistant"), 2, "the prompts"),
    "the chat template loses a line break": (
        with_template("<|im_end|>\\n{% endfor", "<|im_end|>{% endfor"), 2, "the prompts"),
    "the rope base is another": (with_text(CONFIG, "10000.0", "10.0"), 1, "pp were lost"),
    "noise in the embedding": (graft("embedding.npy", "noise"), 1, "top tokens differ"),
    "noise in the head": (graft("head.mlpackage", "noise"), 1, "top tokens differ"),
    "noise in one matrix": (graft("block-000.mlpackage", "noise"), 1, "top tokens differ"),
    "the heads of q in another order": (graft("block-000.mlpackage", "order"), 1, "top tokens differ"),
    "the last norm without its gain": (graft("head.mlpackage", "order"), 1, "top tokens differ"),
    "the context is cut short": (
        lambda w, h: baked(h / "bundle", w.model, w.lora, context=32), 2, "has no m8 baseline"),
    "another model altogether": (
        lambda w, h: baked(h / "bundle", write_tiny(h / "model", "qwen3", num_hidden_layers=1), None), 1,
        "were lost"),
    "int8 by rounding to nearest": (
        lambda w, h: baked(h / "bundle", w.model, w.lora, recipe="int8"), 1, "gate: m8 on reference:"),
    "a form that the ANE does not take": (
        lambda w, h: baked(h / "bundle", w.model, w.lora, recipe="m8"), 1, "lint: "),
    "a flipped bit": (flipped, 2, "has another sha256 than recorded"),
    "a package of another bundle": (exchanged, 2, "than recorded"),
}  # fmt: skip


@pytest.mark.parametrize("name", REGRESSIONS)
def test_a_regression_is_refused(
    name: str, world: World, place: Path, anechain: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, code, said = REGRESSIONS[name]
    without_drawing(monkeypatch)
    with_a_short_gate(monkeypatch)
    candidate = make(world, place)
    shutil.rmtree(world.root / "card", ignore_errors=True)
    without_measuring(monkeypatch)
    found, out, err = anechain(*world.arguments(candidate))
    assert found == code and said in (out if code == 1 else err), (out, err)
    if code == 1:
        card = card_of(world)
        assert not card["ships"] and card["verdict"].startswith("REVERT (cpu, ")


@pytest.mark.parametrize("speed, cost, said", [(1.4, 1.2, "speed is 1.40x, below 1.5x"), (2.0, 0.9, "cost is 0.90x")])
def test_a_slow_or_a_costly_one_is_refused(
    speed: float,
    cost: float,
    said: str,
    world: World,
    anechain: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_measuring(monkeypatch, speed, cost)
    without_drawing(monkeypatch)
    with_a_short_gate(monkeypatch)
    code, out, _ = anechain(*world.arguments(world.good))
    assert code == 1 and said in out and "REVERT" in out


@pytest.mark.parametrize("change", [{"schema": {"type": "string", "pattern": "^[0-9]{4}$"}}, {"system": "zz"}])
def test_another_schema_or_system_prompt_is_refused(
    change: dict[str, object], world: World, tmp_path: Path, anechain: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Neither bundle does its task under them, so that none is better than the other."""
    without_measuring(monkeypatch)
    without_drawing(monkeypatch)
    with_a_short_gate(monkeypatch)
    rows = [
        {"name": f.name, "prompt": f.input, "expect": f.text.contains[0], "split": f.split}
        for f in world.suite.fixtures
    ]
    other = write_suite(tmp_path / "suite", rows, **change)  # type: ignore[arg-type]
    code, out, _ = anechain(*world.arguments(world.good, suite=other.path))
    assert code == 1 and "pass, less than 50%" in out


def test_there_are_at_least_twenty() -> None:
    assert len(REGRESSIONS) + 4 >= 20
