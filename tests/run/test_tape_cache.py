"""Tapes that are kept between starts: the same answers, from the right entry, and never in the way."""

import os
from pathlib import Path

import numpy as np
import pytest

from anechain.bundle.manifest import Bundle
from anechain.errors import BundleError
from anechain.run import tape, tape_cache
from anechain.run.chain import Chain
from anechain.run.tape import TapeEngine
from tests.bundle_maker import make_bundle, tiny_source
from tests.run.native_case import needs_native

IDS = np.arange(40) * 7 % 320
pytestmark = needs_native


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return make_bundle(tiny_source("llama"), tmp_path_factory.mktemp("b") / "b", "int8", 64, 32, (2, 1))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "anechain" / "tapes"


def answers(bundle: Bundle, mode: str = "exact") -> np.ndarray:
    chain = Chain(bundle, TapeEngine(mode))  # type: ignore[arg-type]
    session = chain.start()
    return np.array([chain.feed(session, IDS), *(chain.feed(session, [i]) for i in range(3))])


def without_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(package: Path) -> None:
        raise BundleError(f"{package} was read")

    monkeypatch.setattr(tape, "read_program", refused)


def test_a_second_start_reads_no_program_and_says_the_same(
    bundle: Bundle, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = answers(bundle)
    assert len(list(cache.glob("*.tape"))) == 2 and len(list(cache.iterdir())) == 2
    assert cache.stat().st_mode & 0o077 == 0
    without_programs(monkeypatch)
    assert np.array_equal(answers(bundle), first)
    with pytest.raises(BundleError, match="was read"):
        answers(bundle, "fast")


@pytest.mark.parametrize("damage", ["cut", "garbage", "other"])
def test_a_damaged_entry_is_made_again(bundle: Bundle, cache: Path, damage: str) -> None:
    first = answers(bundle)
    for entry in cache.glob("*.tape"):
        whole = entry.read_bytes()
        other = whole.replace(entry.stem.encode(), b"0" * 64)
        entry.write_bytes({"cut": whole[: len(whole) // 2], "garbage": os.urandom(999), "other": other}[damage])
    assert np.array_equal(answers(bundle), first)
    assert all(entry.stem.encode() in entry.read_bytes() for entry in cache.glob("*.tape"))


def test_what_changes_makes_another_entry(bundle: Bundle) -> None:
    [package, *_] = bundle.block_paths
    before = tape_cache.key_of([package], 8)
    assert before is not None and before == tape_cache.key_of([package], 8) != tape_cache.key_of([package], 15)
    weights = package.joinpath("Data", "com.apple.CoreML", "weights", "weight.bin")
    seen = weights.stat()
    os.utime(weights, ns=(seen.st_atime_ns, seen.st_mtime_ns + 1))
    assert tape_cache.key_of([package], 8) != before
    os.utime(weights, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert tape_cache.key_of([package], 8) == before
    assert tape_cache.key_of([package.with_name("nothing.mlpackage")], 8) is None


def test_the_oldest_entries_go(bundle: Bundle, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir(parents=True)
    for i in range(5):
        (cache / f"{i}.tape").write_bytes(b"old")
        os.utime(cache / f"{i}.tape", (i, i))
    monkeypatch.setattr(tape_cache, "KEPT", 4)
    answers(bundle)
    assert {path.stem for path in cache.iterdir() if len(path.stem) == 1} == {"3", "4"}
    assert len(list(cache.iterdir())) == 4


def test_without_a_place_to_write_it_runs_all_the_same(bundle: Bundle, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder should be")
    assert np.isfinite(answers(bundle)).all()
