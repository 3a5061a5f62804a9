"""Packages of a few bytes in the place of real ones, and bakes of them."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from anechain.bake import jobs
from anechain.bake.jobs import make_plan
from anechain.bake.source import open_source
from anechain.bundle.manifest import MANIFEST, Bundle
from anechain.bundle.recipe import load_recipe
from anechain.errors import BundleError
from tests.in_process import InProcess, tree
from tests.tiny import write_tiny

PARTS = ["block-000.mlpackage", "block-001.mlpackage", "embedding", "head.mlpackage"]
ONE, OTHER = {"context": 64, "per_package": 1}, {"context": 96, "per_package": 2}


class Package:
    """In the place of `anechain.bake.package`; `made` is what was asked of it."""

    made: tuple[str, ...] = ()

    @classmethod
    def _write(cls, path: Path, content: str) -> None:
        cls.made += (path.name,)
        (path / "Data").mkdir(parents=True)
        (path / "Manifest.json").write_text(path.name)
        (path / "Data/weight.bin").write_text(content)

    @classmethod
    def make_block(
        cls,
        source: Any,
        spec: Any,
        recipe: Any,
        layers: range,
        context: int,
        chunk: int,
        path: Path,
        form: Any,
        rounded: Any,
    ) -> None:
        cls._write(path, f"{source.fingerprint} {recipe.name} {layers} {context} {chunk} {form}")

    @classmethod
    def make_head(cls, source: Any, spec: Any, recipe: Any, path: Path, form: Any, rounded: Any) -> None:
        cls._write(path, f"{source.fingerprint} {recipe.name} {form}")

    @classmethod
    def make_embedding(cls, source: Any, recipe: Any, folder: Path) -> None:
        cls.made += ("embedding",)
        (folder / "embedding.npy").write_text(f"{source.fingerprint} {recipe.name}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny", "llama")


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "ProcessPoolExecutor", InProcess)
    monkeypatch.setattr(jobs, "package", Package)
    monkeypatch.setattr(Package, "made", ())
    monkeypatch.setattr(os, "fsync", lambda _: None)  # a kill does not lose what the system has not written yet


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A temporary folder, in memory where there is one: a sweep makes and removes thousands of folders."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def bake(model: Path) -> Callable[..., Bundle]:
    """bake(path, context=..., per_package=..., force=...); a long context attaches a file more."""

    source = open_source(str(model))

    def run(path: Path, context: int = 64, per_package: int = 1, force: bool = False) -> Bundle:
        planned = make_plan(source, load_recipe("fp16"), context, 32, "macOS15", per_package)

        def attach(folder: Path) -> None:
            assert not (path / MANIFEST).exists()  # what is not complete has none
            for name in ("baseline-m8.npz", "baseline-strict.npz")[: 2 if context == 64 else 1]:
                (folder / name).write_text(f"{context}")

        return jobs.bake(source, planned, path, 1, force, attach)

    return run


@pytest.fixture(scope="module")
def wanted(bake: Callable[..., Bundle], tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, str]]:
    """What an undisturbed bake of ONE and of OTHER leaves, by context."""
    folder, trees = tmp_path_factory.mktemp("wanted"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "ProcessPoolExecutor", InProcess)
        patch.setattr(jobs, "package", Package)
        for options in (ONE, OTHER):
            path = folder / str(options["context"])
            bake(path, **options)
            trees[options["context"]] = tree(path)
    return trees


def refusal(action: Callable[[], Any]) -> str:
    with pytest.raises(BundleError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".")
    return message


def flip(file: Path) -> None:
    """Changes the first byte, and not the size."""
    content = file.read_bytes()
    file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
