"""The folder of a bake: what is never touched, what is replaced, what is made again."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anechain.bake import place
from anechain.bundle.manifest import MANIFEST, Bundle, open_bundle
from tests.bake.place.stand_ins import ONE, OTHER, Package, flip, refusal
from tests.in_process import dies, tree


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_of_somebody_else_is_refused_and_untouched(
    force: bool, bake: Callable[..., Bundle], tmp_path: Path
) -> None:
    path = tmp_path / "theirs"
    (path / "deep").mkdir(parents=True)
    (path / "deep/notes.txt").write_text("mine")
    before = tree(tmp_path)
    assert refusal(lambda: bake(path, force=force)) == (
        f"{path} holds files that anechain did not make: choose another folder with -o."
    )
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        '{"name": "an app", "icons": [], "key": "MIIBIjANBg"}',
        '{"files": {"index.html": {"bytes": 1, "sha256": "x"}}, "key": "k"}',
        "[1, 2]",
        "not json",
    ],
)
def test_a_manifest_of_something_else_is_no_reason_to_remove_anything(
    content: str, bake: Callable[..., Bundle], tmp_path: Path
) -> None:
    (tmp_path / MANIFEST).write_text(content)
    (tmp_path / "index.html").write_text("x")
    before = tree(tmp_path)
    assert "holds files that anechain did not make" in refusal(lambda: bake(tmp_path, force=True))
    assert tree(tmp_path) == before


def test_an_empty_folder_is_taken(bake: Callable[..., Bundle], tmp_path: Path, wanted: dict[int, Any]) -> None:
    bake(tmp_path)
    assert tree(tmp_path) == wanted[64]


def test_missing_parents_are_made(bake: Callable[..., Bundle], tmp_path: Path, wanted: dict[int, Any]) -> None:
    bake(tmp_path / "a" / "b c" / "é")
    assert tree(tmp_path / "a" / "b c" / "é") == wanted[64]


def test_a_file_in_the_way(bake: Callable[..., Bundle], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    assert refusal(lambda: bake(file, force=True)) == f"{file} is a file: choose another folder with -o."
    for below in (file / "b", file / "b" / "c"):
        assert refusal(lambda below=below: bake(below)) == (
            f"{below} cannot be made, because {file} is a file: choose another folder with -o."
        )
    assert file.read_text() == "mine" and list(tmp_path.iterdir()) == [file]


def test_the_checkpoint_itself_and_what_is_inside_it(bake: Callable[..., Bundle], model: Path, tmp_path: Path) -> None:
    before = tree(model)
    (tmp_path / "link").symlink_to(model)
    for path in (model, tmp_path / "link", model / ".." / model.name):
        assert (
            refusal(lambda path=path: bake(path)) == f"{path} is what is baked, {model}: choose another folder with -o."
        )
    for path in (model / "b", model / "b" / "c", tmp_path / "link" / "b"):
        message = refusal(lambda path=path: bake(path))
        assert message == f"{path} lies inside what is baked, {model}: choose another folder with -o."
    assert "holds files that anechain did not make" in refusal(lambda: bake(model.parent))
    assert tree(model) == before


def test_a_folder_that_is_called_demo_is_not_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    place.check_place(Path("demo"), "demo", None)
    (tmp_path / "adapter").mkdir()
    assert refusal(lambda: place.check_place(Path("adapter/b"), "demo", "adapter")) == (
        "adapter/b lies inside what is baked, adapter: choose another folder with -o."
    )


# -- another bundle is there -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partial", [False, True])
def test_other_options_are_refused_unless_forced(
    partial: bool, bake: Callable[..., Bundle], tmp_path: Path, wanted: dict[int, Any]
) -> None:
    path = tmp_path / "b"
    if partial:
        assert dies(lambda: bake(path, **ONE), 40)
        assert (path / ".baking").is_dir() and (path / "block-001.mlpackage").is_dir()
    else:
        bake(path, **ONE)
    theirs = {path / "notes.txt": "mine", path / "more/deep/notes.txt": "too", path / ".x.tmp": "hidden"}
    for file, content in theirs.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    (path / "empty").mkdir()
    before = tree(path)
    state = "the beginning of another bake" if partial else "another bundle"
    assert refusal(lambda: bake(path, **OTHER)) == (
        f"{path} holds {state}: choose another folder with -o, or replace it with --force."
    )
    assert tree(path) == before
    bake(path, **OTHER, force=True)
    kept = {name for name in tree(path) if name not in wanted[96]}
    assert kept == {"notes.txt", "more", "more/deep", "more/deep/notes.txt", ".x.tmp", "empty"}
    assert {name: digest for name, digest in tree(path).items() if name not in kept} == wanted[96]
    assert all(file.read_text() == content for file, content in theirs.items())


def test_force_does_not_make_again_what_is_there(bake: Callable[..., Bundle], tmp_path: Path) -> None:
    bake(tmp_path)
    Package.made = ()
    bake(tmp_path, force=True)
    assert Package.made == ()


def test_paths_in_a_manifest_that_lead_elsewhere_are_not_followed(bake: Callable[..., Bundle], tmp_path: Path) -> None:
    path, precious = tmp_path / "b", tmp_path / "precious"
    bake(path)
    precious.write_text("mine")
    data = json.loads((path / MANIFEST).read_text())
    data["files"]["../precious"] = data["files"][str(precious)] = {"bytes": 4, "sha256": ""}
    (path / MANIFEST).write_text(json.dumps(data))
    bake(path, **OTHER, force=True)
    assert precious.read_text() == "mine"


# -- a damaged bundle --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "made"),
    [
        (lambda p: flip(p / "block-001.mlpackage/Data/weight.bin"), ("block-001.mlpackage",)),
        (lambda p: shutil.rmtree(p / "head.mlpackage"), ("head.mlpackage",)),
        (lambda p: (p / "embedding.npy").unlink(), ("embedding",)),
        (lambda p: (p / "tokenizer/tokenizer.json").unlink(), ()),
        (lambda p: flip(p / "baseline-m8.npz"), ()),
    ],
)
def test_the_same_command_makes_what_is_damaged_again(
    damage: Callable[[Path], Any],
    made: tuple[str, ...],
    bake: Callable[..., Bundle],
    tmp_path: Path,
    wanted: dict[int, Any],
) -> None:
    bake(tmp_path)
    Package.made = ()
    damage(tmp_path)
    bake(tmp_path)
    assert Package.made == made
    assert tree(tmp_path) == wanted[64]
    open_bundle(tmp_path, verify_hashes=True)


def test_a_lost_manifest_is_written_again(bake: Callable[..., Bundle], memory: Path, wanted: dict[int, Any]) -> None:
    """Killed after the manifest, before `.baking` went away: nothing has to be made again."""
    for step in range(1000):
        path = memory / str(step)
        if dies(lambda path=path: bake(path), step) and (path / MANIFEST).is_file():
            break
    Package.made = ()
    assert (path / ".baking").is_dir()
    bake(path)
    assert Package.made == () and tree(path) == wanted[64]
