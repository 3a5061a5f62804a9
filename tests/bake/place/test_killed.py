"""A bake that was killed at any step does no harm, and the next one goes on."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anechain.bake import jobs, place
from anechain.bake.jobs import make_plan
from anechain.bake.source import open_source
from anechain.bundle.manifest import MANIFEST, Bundle
from anechain.bundle.recipe import load_recipe
from anechain.errors import BundleError
from tests.bake.place.stand_ins import ONE, OTHER, PARTS, Package, flip, refusal
from tests.in_process import dies, tree


def sweep(
    memory: Path, start: Callable[[Path], Any], action: Callable[[Path], Any], after: list[Callable[[Path], Any]]
) -> int:
    """Kills `action`, which finds what `start` made, before each of its steps in turn; each of `after` goes on from a
    copy of what is left. Returns the number of steps.
    """
    for step in range(1000):
        path = memory / f"{step}"
        start(path)
        if not dies(lambda path=path: action(path), step):
            return step
        for number, go_on in enumerate(after):
            copy = memory / f"{step}-{number}"
            if path.exists():
                shutil.copytree(path, copy)
            go_on(copy)
            shutil.rmtree(copy)
        shutil.rmtree(path, ignore_errors=True)
    raise AssertionError("it never ends")


@pytest.mark.slow
def test_a_first_bake_killed_at_any_step(bake: Callable[..., Bundle], memory: Path, wanted: dict[int, Any]) -> None:
    """The same command ends what was begun; another one, with --force, leaves no trace of it."""

    def same(path: Path) -> None:
        assert not (path / MANIFEST).exists() or (path / "baseline-m8.npz").exists()
        bake(path, **ONE)
        assert tree(path) == wanted[64]

    def other(path: Path) -> None:
        bake(path, **OTHER, force=True)
        assert tree(path) == wanted[96]

    assert sweep(memory, lambda path: None, lambda path: bake(path, **ONE), [same, other]) > 60


@pytest.mark.slow
def test_a_replacement_killed_at_any_step(bake: Callable[..., Bundle], memory: Path, wanted: dict[int, Any]) -> None:
    def start(path: Path) -> None:
        shutil.copytree(memory / "complete", path)

    def go_on(path: Path, options: dict[str, int]) -> None:
        bake(path, **options, force=True)
        assert (path / "notes.txt").read_text() == "mine"
        (path / "notes.txt").unlink()
        assert tree(path) == wanted[options["context"]]

    bake(memory / "complete", **ONE)
    (memory / "complete/notes.txt").write_text("mine")
    replace = lambda path: bake(path, **OTHER, force=True)  # noqa: E731
    after = [lambda path: go_on(path, OTHER), lambda path: go_on(path, ONE)]  # once more, and back to what it was
    assert sweep(memory, start, replace, after) > 60


@pytest.mark.slow
def test_a_repair_killed_at_any_step(bake: Callable[..., Bundle], memory: Path, wanted: dict[int, Any]) -> None:
    def start(path: Path) -> None:
        shutil.copytree(memory / "complete", path)
        (path / "block-000.mlpackage/Data/weight.bin").write_text("x")

    def again(path: Path) -> None:
        bake(path, **ONE)
        assert tree(path) == wanted[64]

    bake(memory / "complete", **ONE)

    def other(path: Path) -> None:
        bake(path, **OTHER, force=True)
        assert tree(path) == wanted[96]

    assert sweep(memory, start, lambda path: bake(path, **ONE), [again, other]) > 30


def test_going_on_does_not_trust_what_was_changed_meanwhile(
    bake: Callable[..., Bundle], tmp_path: Path, wanted: dict[int, Any]
) -> None:
    assert dies(lambda: bake(tmp_path), 45)
    assert place.finished(tmp_path, "block-000.mlpackage")
    flip(tmp_path / "block-000.mlpackage/Data/weight.bin")
    Package.made = ()
    bake(tmp_path)
    assert "block-000.mlpackage" in Package.made and tree(tmp_path) == wanted[64]


def test_a_failure_after_the_packages_leaves_nothing_temporary(model: Path, tmp_path: Path) -> None:
    def attach(folder: Path) -> None:
        raise BundleError("the baseline cannot be written.")

    source = open_source(str(model))
    planned = make_plan(source, load_recipe("fp16"), 64, 32, "macOS15", 1)
    assert refusal(lambda: jobs.bake(source, planned, tmp_path, 1, attach=attach)) == "the baseline cannot be written."
    left = {path.name for path in (tmp_path / ".baking").iterdir()}
    assert left == {"plan.json", "lock", "workers", *(f"{part}.json" for part in PARTS)}


def test_going_on_makes_only_what_is_missing(bake: Callable[..., Bundle], memory: Path) -> None:
    made = set()
    for step in range(0, 60, 3):
        path = memory / str(step)
        if not dies(lambda path=path: bake(path), step):
            break
        whole = (path / MANIFEST).is_file()
        there = [part for part in PARTS if whole or place.finished(path, part)]
        Package.made = ()
        bake(path)
        assert sorted([*there, *Package.made]) == PARTS
        made.add(len(there))
    assert made == {0, 1, 2, 3, 4}
