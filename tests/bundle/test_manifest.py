"""The manifest: a bundle is what it says, file by file, or is refused with everything that is wrong."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anechain.bundle.manifest import (
    MANIFEST,
    Bundle,
    FileRecord,
    open_bundle,
    record_files,
    sha256_of,
    write_atomically,
)
from anechain.errors import BundleError
from tests.bundle_maker import make_bundle, tiny_source

WEIGHTS = "block-001.mlpackage/Data/com.apple.CoreML/weights/weight.bin"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return make_bundle(
        tiny_source("gemma3"), tmp_path_factory.mktemp("made") / "bundle", "int8", prefill=0, cuts=(1, 2)
    )


@pytest.fixture
def path(made: Bundle, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made.path, tmp_path / "bundle"))


def rewrite(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads((path / MANIFEST).read_text())
    edit(data)
    (path / MANIFEST).write_text(json.dumps(data))


# -- what is there -----------------------------------------------------------------------------------------------------


def test_a_bundle_reads_back_as_it_was_written(made: Bundle) -> None:
    assert open_bundle(made.path, verify_hashes=True) == made
    assert [p.name for p in made.block_paths] == ["block-000.mlpackage", "block-001.mlpackage"]
    assert [list(b.layers) for b in made.blocks] == [[0], [1, 2]]
    assert made.head_path.is_dir()


def test_the_manifest_names_every_file_with_its_size_and_hash(made: Bundle) -> None:
    on_disk = {f.relative_to(made.path).as_posix(): f for f in made.path.rglob("*") if f.is_file()}
    assert set(made.files) == set(on_disk) - {MANIFEST}
    assert len(made.files) == 3 * 3 + 3  # three packages, and the tokenizer
    for name, record in made.files.items():
        content = on_disk[name].read_bytes()
        assert record == FileRecord(len(content), hashlib.sha256(content).hexdigest())


# -- what is wrong with the files --------------------------------------------------------------------------------------


def test_a_truncated_file_is_named_without_reading_hashes(path: Path) -> None:
    size = (path / WEIGHTS).stat().st_size
    os.truncate(path / WEIGHTS, size - 1)
    with pytest.raises(BundleError) as caught:
        open_bundle(path)
    fault = f"{WEIGHTS} has {size - 1} bytes instead of {size}"
    assert str(caught.value) == f"bundle {path} is damaged: {fault}: bake it again."


def test_a_flipped_byte_is_found_by_its_hash(path: Path) -> None:
    data = bytearray((path / WEIGHTS).read_bytes())
    data[1000] ^= 1
    (path / WEIGHTS).write_bytes(data)
    open_bundle(path)  # sizes alone do not tell
    with pytest.raises(BundleError, match=f"is damaged: {WEIGHTS} has another sha256 than recorded: bake it again"):
        open_bundle(path, verify_hashes=True)


def test_all_files_at_fault_are_named_at_once(path: Path) -> None:
    (path / "tokenizer/tokenizer.json").unlink()
    shutil.rmtree(path / "head.mlpackage")
    (path / WEIGHTS).write_bytes(b"short")
    with pytest.raises(BundleError) as caught:
        open_bundle(path)
    message = str(caught.value)
    assert message.startswith(f"bundle {path} is damaged: {WEIGHTS} has 5 bytes instead of ")
    for name in ("Manifest.json", "Data/com.apple.CoreML/model.mlmodel", "Data/com.apple.CoreML/weights/weight.bin"):
        assert f"; head.mlpackage/{name} is missing" in message
    assert message.endswith("; tokenizer/tokenizer.json is missing: bake it again.")


def test_a_folder_in_place_of_a_file_is_a_missing_file(path: Path) -> None:
    (path / WEIGHTS).unlink()
    (path / WEIGHTS).mkdir()
    with pytest.raises(BundleError, match=f"{WEIGHTS} is missing"):
        open_bundle(path)


def test_files_that_are_not_ours_do_not_matter(path: Path) -> None:
    (path / "notes.txt").write_text("mine")
    open_bundle(path, verify_hashes=True)


# -- what is wrong with the manifest -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: None, "is not there"),
        (lambda p: p.write_text("{}"), "is not there"),
        (lambda p: p.mkdir(), "has no manifest.json: it is not a bundle, or its bake did not finish"),
    ],
)
def test_what_is_no_bundle(make: Callable[[Path], Any], reason: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    make(path)
    with pytest.raises(BundleError) as caught:
        open_bundle(path)
    assert str(caught.value) == f"bundle {path} {reason}; make one with `anechain bake MODEL -o {path}`."


def test_another_format_number(path: Path) -> None:
    rewrite(path, lambda data: data.update(format=2))
    with pytest.raises(BundleError) as caught:
        open_bundle(path)
    assert str(caught.value) == f"bundle {path} has format 2 and this anechain reads 1: bake it again."


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "JSONDecodeError: Expecting value"),
        (b'{"format": 1, "mod', "JSONDecodeError: Unterminated string"),
        (b"[]", "TypeError: it is not a JSON object"),
        (b"null", "TypeError: it is not a JSON object"),
        (b'{"format": 1}', "KeyError: 'model'"),
        (b"\xff\xfe", "UnicodeDecodeError"),
    ],
)
def test_a_manifest_that_cannot_be_read(content: bytes, reason: str, path: Path) -> None:
    (path / MANIFEST).write_bytes(content)
    with pytest.raises(BundleError) as caught:
        open_bundle(path)
    assert str(caught.value).startswith(f"{path / MANIFEST} cannot be read ({reason}")
    assert str(caught.value).endswith("): bake the bundle again.")


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda d: d["model"].pop("hidden_size"), "TypeError: ModelSpec"),
        (lambda d: d["model"].update(colour="red"), "TypeError: ModelSpec"),
        (lambda d: d["recipe"]["rules"][0].update(scheme="int5"), "RecipeError: scheme 'int5' is not known"),
        (lambda d: d.update(files=[1]), "AttributeError: 'list' object"),
        (lambda d: d["blocks"][0].update(layers=[0]), "IndexError: list index out of range"),
        (lambda d: d["source"].pop("ref"), "KeyError: 'ref'"),
    ],
)
def test_a_manifest_that_makes_no_sense(edit: Callable[[dict[str, Any]], None], reason: str, path: Path) -> None:
    rewrite(path, edit)
    with pytest.raises(BundleError) as caught:
        open_bundle(path)
    assert str(caught.value).startswith(f"{path / MANIFEST} cannot be read ({reason}")


def test_parts_that_the_manifest_does_not_list(path: Path) -> None:
    def edit(data: dict[str, Any]) -> None:
        kept = ("block-000", "tokenizer")
        data["files"] = {name: r for name, r in data["files"].items() if name.startswith(kept)}
        data["embedding"] = "embedding.npy"
        data["blocks"][1]["layers"] = [1, 2]

    rewrite(path, edit)
    with pytest.raises(BundleError) as caught:
        open_bundle(path)
    assert str(caught.value) == (
        f"bundle {path} is damaged: block-001.mlpackage is not among its files; head.mlpackage is not among its files; "
        "embedding.npy is not among its files; its packages do not hold the layers 0 to 2 in order: bake it again."
    )


def test_packages_out_of_order(path: Path) -> None:
    rewrite(path, lambda data: data["blocks"].reverse())
    with pytest.raises(BundleError, match="its packages do not hold the layers 0 to 2 in order"):
        open_bundle(path)


# -- writing -----------------------------------------------------------------------------------------------------------


def test_an_atomic_write_replaces_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    write_atomically(file, b"first")
    assert file.read_bytes() == b"first"
    with file.open("rb") as reader:
        write_atomically(file, b"second")
        assert reader.read() == b"first"  # it was replaced, not written over
    assert file.read_bytes() == b"second"

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(file, b"third")
    assert file.read_bytes() == b"second"
    assert list(tmp_path.iterdir()) == [file]


def test_records_of_a_file_and_of_a_folder(tmp_path: Path) -> None:
    for name, content in {"a": b"1", "b/c": b"22", "b/d/e": b""}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert set(record_files(tmp_path, tmp_path / "a")) == {"a"}
    records = record_files(tmp_path, tmp_path / "b")
    assert {name: r.bytes for name, r in records.items()} == {"b/c": 2, "b/d/e": 0}
    assert records["b/c"].sha256 == hashlib.sha256(b"22").hexdigest() == sha256_of(tmp_path / "b/c")
