"""Baselines in a bundle: those that fit into the context, computed once, never taken from a file that is not right."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anechain.bake.jobs import make_plan
from anechain.bundle.cache import cache_directory
from anechain.bundle.manifest import Bundle, open_bundle
from anechain.bundle.recipe import load_recipe
from anechain.errors import BundleError, RequestError
from anechain.judge import prepare
from anechain.judge.baseline import Baseline
from anechain.judge.gate import run_gate
from anechain.judge.oracle import Oracle
from anechain.judge.prepare import bake_with_baselines, baseline_file, load_baseline
from anechain.judge.prompts import TEXTS
from anechain.run.chain import Chain
from anechain.run.reference import ReferenceEngine
from tests.bundle_maker import SPECS, TensorSource, bake_here, tiny_source

SMALL, LARGE = 64, 192  # in the byte-level tokenizer m8 needs 38 positions and strict 170
SPEC = replace(SPECS["qwen3"], n_layers=1, layer_attention=(0,))


class Counting(Oracle):
    """An oracle that counts how many there were."""

    made = 0

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        Counting.made += 1


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of its own, a count of oracles, and a bake in this process."""
    monkeypatch.setenv("ANECHAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(prepare, "Oracle", Counting)
    monkeypatch.setattr(Counting, "made", 0)

    def bake(source: Any, plan: Any, out: Path, workers: int, force: bool, attach: Any, progress: Any) -> Bundle:
        return bake_here(source, plan, out, attach)

    monkeypatch.setattr(prepare, "bake", bake)


def baked(source: TensorSource, out: Path, context: int = SMALL, recipe: str = "fp16", **options: Any) -> Bundle:
    plan = make_plan(source, load_recipe(recipe), context, 32, "macOS15", None)
    return bake_with_baselines(source, plan, out, 1, **options)


def cached() -> list[Path]:
    return sorted((cache_directory() / "baselines").rglob("*"))


def test_a_bundle_carries_its_baselines(tmp_path: Path) -> None:
    source = tiny_source(SPEC)
    steps: list[tuple[int, int, str]] = []
    bundle = baked(source, tmp_path / "b", LARGE, oracle_progress=lambda *now: steps.append(now))
    assert Counting.made == 2 and {name for _, _, name in steps} == {"stream", "m8", "strict"}
    assert steps[-1] == (16, 16, "strict")
    opened = open_bundle(bundle.path, verify_hashes=True)
    chain = Chain(opened, ReferenceEngine())
    for profile in prepare.PROFILES:
        assert baseline_file(profile) in opened.files
        baseline = load_baseline(opened, profile)
        assert (baseline.profile, baseline.fingerprint, baseline.context) == (profile, source.fingerprint, LARGE)
    assert [p.name for p in baseline.prompts[-3:]] == ["chat-0", "chat-1", "long"], "the tokenizer has a chat template"
    assert max(s.kl for s in run_gate(chain, load_baseline(opened, "m8")).steps) < 1e-3


def test_a_context_too_small_for_strict_leaves_m8(tmp_path: Path) -> None:
    opened = open_bundle(baked(tiny_source(SPEC), tmp_path / "b").path)
    assert Counting.made == 1 and [f for f in opened.files if f.startswith("baseline")] == ["baseline-m8.npz"]
    assert load_baseline(opened, "m8").context == SMALL
    with pytest.raises(RequestError) as refusal:
        load_baseline(opened, "strict")
    assert str(refusal.value) == (
        f"{opened.path} has no strict baseline, because its context of 64 is too small for the prompts: bake it with a "
        "larger --context, or use another --profile."
    )
    tiny = baked(tiny_source(SPEC), tmp_path / "c", 32)
    assert not [f for f in tiny.files if f.startswith("baseline")]


@pytest.mark.parametrize(("length", "fits"), [(57, True), (58, False)])
def test_a_prompt_and_its_eight_tokens_may_fill_the_context(
    length: int, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of the eight is not fed."""
    monkeypatch.setitem(TEXTS, "m8", ("a", "b" * length))
    bundle = baked(tiny_source(SPEC), tmp_path / "b")
    assert ("baseline-m8.npz" in bundle.files) is fits
    if fits:
        assert load_baseline(bundle, "m8").positions.max() == SMALL - 1


def test_the_oracle_runs_once(tmp_path: Path) -> None:
    """Whatever the recipe; another context, other weights or other prompts are another baseline."""
    source = tiny_source(SPEC)
    first = baked(source, tmp_path / "a")
    assert Counting.made == 1 and len(cached()) == 1
    second = baked(source, tmp_path / "b", recipe="int8")
    assert Counting.made == 1
    assert (first.path / "baseline-m8.npz").read_bytes() == (second.path / "baseline-m8.npz").read_bytes()
    baked(source, tmp_path / "c", 96)
    assert Counting.made == 2
    other = baked(tiny_source(SPEC, seed=1), tmp_path / "d")
    assert Counting.made == 3 and load_baseline(other, "m8").fingerprint != source.fingerprint
    files = dict(source.text_files)
    files["tokenizer.json"] = files["tokenizer.json"].replace(b'"add_prefix_space":false', b'"add_prefix_space":true')
    assert files != source.text_files
    baked(replace(source, text_files=files), tmp_path / "e")
    assert Counting.made == 4 and len(cached()) == 4


def truncated(path: Path, _: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4000])


def flipped(path: Path, _: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 64
    path.write_bytes(data)


def emptied(path: Path, _: Path) -> None:
    path.write_bytes(b"")


def of_another_source(path: Path, bundle: Path) -> None:
    Path(path).write_bytes((bundle / "baseline-m8.npz").read_bytes())


def with_other_prompts(path: Path, _: Path) -> None:
    baseline = Baseline.load(path)
    first = replace(baseline.prompts[0], ids=baseline.prompts[0].ids + 1)
    replace(baseline, logits=np.array(baseline.logits), prompts=(first, *baseline.prompts[1:])).save(path)


def of_another_context(path: Path, _: Path) -> None:
    baseline = Baseline.load(path)
    replace(baseline, logits=np.array(baseline.logits), context=96).save(path)


DAMAGE = (truncated, flipped, emptied, of_another_source, with_other_prompts, of_another_context)


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda f: f.__name__)
def test_a_wrong_file_in_the_cache_is_computed_again(damage: Any, tmp_path: Path) -> None:
    source = tiny_source(SPEC)
    other = baked(tiny_source(SPEC, seed=1), tmp_path / "other").path
    right = (baked(source, tmp_path / "a").path / "baseline-m8.npz").read_bytes()
    (path,) = (p for p in cached() if p.is_file() and p.read_bytes() == right)
    damage(path, other)
    assert path.read_bytes() != right and Counting.made == 2
    again = baked(source, tmp_path / "b")
    assert Counting.made == 3
    assert (again.path / "baseline-m8.npz").read_bytes() == right == path.read_bytes()


def test_a_baseline_of_another_source_is_refused(tmp_path: Path) -> None:
    bundle, other = (baked(tiny_source(SPEC, seed), tmp_path / str(seed)) for seed in (0, 1))
    with pytest.raises(BundleError, match=r"^the baseline was made from another source \(fingerprint"):
        run_gate(Chain(bundle, ReferenceEngine()), load_baseline(other, "m8"))


def test_a_fault_that_is_not_the_contexts_is_not_hidden(tmp_path: Path) -> None:
    """A chat template that refuses a plain user message is said at the bake, not as a baseline that is missing."""
    source = tiny_source(SPEC)
    files = source.text_files | {"chat_template.jinja": b"{{ raise_exception('no system message') }}"}
    with pytest.raises(RequestError, match=r"^the model's chat template refuses this conversation \(no system message"):
        baked(replace(source, text_files=files), tmp_path / "b", LARGE)


def test_a_cache_that_cannot_be_made_is_said_before_the_bake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ANECHAIN_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(RequestError) as refusal:
        baked(tiny_source(SPEC), tmp_path / "b")
    assert str(refusal.value) == (
        f"the cache folder {tmp_path}/file/cache/baselines cannot be made (Not a directory): set ANECHAIN_CACHE to a "
        "folder of your own."
    )
    assert not (tmp_path / "b").exists()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANECHAIN_CACHE", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_directory() == Path("/own")
    monkeypatch.delenv("ANECHAIN_CACHE")
    assert cache_directory() == Path("/xdg/anechain")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_directory() == Path("/home/someone/.cache/anechain")
