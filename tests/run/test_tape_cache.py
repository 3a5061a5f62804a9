"""Tapes that are kept between starts: the same answers, from the right entry, and never in the way."""

import hashlib
import json
import mmap
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from anechain.bundle.manifest import Bundle
from anechain.errors import BundleError
from anechain.run import file_hash, tape, tape_cache, tape_packed
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
    assert len(list(cache.glob("*.tape"))) == 2 and {path.suffix for path in cache.iterdir()} <= {".tape", ".json"}
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


def test_the_key_is_that_of_what_is_in_the_files(bundle: Bundle, tmp_path: Path) -> None:
    """A copy elsewhere and another time of change are the same; one other byte and other bits are not."""
    [package, *_] = bundle.block_paths
    before = tape_cache.key_of([package], (8, 15))
    assert before is not None and before != tape_cache.key_of([package], (15, 15))
    copy = tmp_path / "another.mlpackage"
    shutil.copytree(package, copy)
    weights = copy.joinpath("Data", "com.apple.CoreML", "weights", "weight.bin")
    os.utime(weights, ns=(1, 1))
    assert tape_cache.key_of([copy], (8, 15)) == before == tape_cache.key_of([copy], (8, 15))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert tape_cache.key_of([copy], (8, 15)) not in (before, None)
    assert tape_cache.key_of([package.with_name("nothing.mlpackage")], (8, 15)) is None


def test_a_hash_is_remembered_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, memory = tmp_path / "file", tmp_path / "kept" / "hashes.json"
    file.write_bytes(b"one")
    first = hashlib.sha256(b"one").hexdigest()
    assert file_hash.hashes([file, file], memory) == [first, first] and not memory.exists()  # it changed just now
    monkeypatch.setattr(file_hash, "SETTLED_NS", -1)
    assert file_hash.hashes([file], memory) == [first]
    kept = json.loads(memory.read_text())
    kept[str(file)][-1] = "from memory"
    memory.write_text(json.dumps(kept))
    assert file_hash.hashes([file], memory) == ["from memory"]
    os.utime(file, ns=(5, 5))
    assert file_hash.hashes([file], memory) == [first]
    for damaged in ("[]", "{", '{"a": 1}'):
        memory.write_text(damaged)
        assert file_hash.hashes([file], memory) == [first]


def test_the_oldest_entries_go(bundle: Bundle, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir(parents=True)
    for i in range(5):
        (cache / f"{i}.tape").write_bytes(b"old")
        os.utime(cache / f"{i}.tape", (i, i))
    (cache / "1.packed").write_bytes(b"old")
    (cache / "4.packed").write_bytes(b"not that old")
    (cache / "abandoned.part").write_bytes(b"")
    os.utime(cache / "abandoned.part", (1, 1))
    (cache / "going-on.part").write_bytes(b"")
    monkeypatch.setattr(tape_cache, "KEPT", 4)
    answers(bundle)
    left = {path.name for path in cache.iterdir() if len(path.stem) != 64} - {"hashes.json"}
    assert left == {"3.tape", "4.tape", "4.packed", "going-on.part"}
    assert len(list(cache.glob("*.tape"))) == 4


def test_large_entries_go_by_their_bytes(bundle: Bundle, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir(parents=True)
    for i in (1, 2):
        (cache / f"{i}.tape").write_bytes(b"old")
        (cache / f"{i}.packed").write_bytes(bytes(1 << 20))
        os.utime(cache / f"{i}.tape", (i, i))
    monkeypatch.setattr(tape_cache, "KEPT_BYTES", 2 << 20)
    answers(bundle)
    left = {path.name for path in cache.iterdir() if len(path.stem) == 1}
    assert left == {"2.tape", "2.packed"}


@pytest.fixture
def kept_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of this size are kept as if they were large, and taken from pages of any size."""
    monkeypatch.setattr(tape_packed, "LEAST_BYTES", 1)
    monkeypatch.setattr(tape_packed, "HUGE_SHARE", 0.0)


def settled() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("keep "):
            thread.join()


@pytest.mark.usefixtures("kept_packed")
def test_packed_matrices_are_mapped_by_the_next_start(
    bundle: Bundle, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = answers(bundle)
    settled()
    assert {path.stem for path in cache.glob("*.packed")} == {path.stem for path in cache.glob("*.tape")}
    assert not list(cache.glob("*.part"))
    with monkeypatch.context() as patch:
        patch.setattr(tape, "pack", None)
        assert np.array_equal(answers(bundle), first)
    for path in cache.glob("*.packed"):
        path.write_bytes(path.read_bytes()[:-1])  # another size: it is packed anew
    assert np.array_equal(answers(bundle), first)
    for path in cache.glob("*.packed"):
        path.unlink()
    assert np.array_equal(answers(bundle), first)


@pytest.mark.usefixtures("kept_packed")
def test_two_that_start_at_once_keep_one_entry(bundle: Bundle, cache: Path) -> None:
    results: list[np.ndarray] = []
    threads = [threading.Thread(target=lambda: results.append(answers(bundle))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    settled()
    assert np.array_equal(*results) and len(list(cache.glob("*.packed"))) == 2 and not list(cache.glob("*.part"))
    assert np.array_equal(answers(bundle), results[0])


def test_a_file_is_taken_only_from_large_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them the kernels are slower than packing takes."""
    (tmp_path / "file").write_bytes(bytes(range(256)) * 64)
    monkeypatch.setattr(tape_packed, "_huge_bytes", lambda address: 0)
    assert tape_packed.mapped(tmp_path / "file", 1 << 14) is None
    monkeypatch.setattr(tape_packed, "_huge_bytes", lambda address: 1 << 14)
    found = tape_packed.mapped(tmp_path / "file", 1 << 14)
    assert found is not None and found[1][:] == bytes(range(256)) * 64
    assert tape_packed.mapped(tmp_path / "file", 1 << 13) is None


def test_large_pages_are_counted_for_the_mapping_that_is_asked_about() -> None:
    """Anonymous memory has none that are a file's, whatever other mappings have."""
    held = mmap.mmap(-1, 4 << 20)
    assert tape_packed._huge_bytes(np.frombuffer(held, np.uint8).__array_interface__["data"][0]) == 0


def test_nothing_is_kept_where_the_disk_is_nearly_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape_packed, "LEAST_BYTES", 1)
    monkeypatch.setattr(tape_packed.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 399))
    array = np.ones(100, np.uint8)
    address = array.__array_interface__["data"][0]
    assert tape_packed.store(tmp_path / "file", address, 100, array, lambda: None) is None


def test_without_a_place_to_write_it_runs_all_the_same(bundle: Bundle, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder should be")
    assert np.isfinite(answers(bundle)).all()
