"""Two bakes into one folder: the second is refused, or waits."""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from anechain.bake import jobs, place
from anechain.bundle.manifest import Bundle, open_bundle
from tests.bake.place.stand_ins import ONE, OTHER, refusal
from tests.in_process import tree


@contextmanager
def holding(tmp_path: Path, action: Callable[[], Any]) -> Iterator[Path]:
    """A child that has called `action` and keeps what it returned, until the file that is given here exists.

    Just before it ends it writes the file `ended`.
    """
    ready, go = tmp_path / "ready", tmp_path / "go"
    child = os.fork()
    if child == 0:
        try:
            _kept = action()
            ready.touch()
            while not go.exists():
                time.sleep(0.01)
            (tmp_path / "ended").touch()
        finally:
            os._exit(0)
    try:
        while not ready.exists():
            time.sleep(0.01)
        yield go
    finally:
        go.touch()
        os.waitpid(child, 0)


def test_the_second_bake_into_a_folder_is_refused(
    bake: Callable[..., Bundle], tmp_path: Path, wanted: dict[int, Any]
) -> None:
    path = tmp_path / "b"

    def first() -> Any:
        bake = place.only_one(path)
        bake.__enter__()
        return bake

    with holding(tmp_path, first):
        before = tree(path)
        message = f"{path} is being baked by another process: wait for it, or choose another folder."
        assert refusal(lambda: bake(path)) == message
        assert refusal(lambda: bake(path, **OTHER, force=True)) == message
        assert tree(path) == before
    bake(path)
    assert tree(path) == wanted[64]


def test_a_bake_waits_for_the_workers_of_one_that_was_killed(
    bake: Callable[..., Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "b"
    (path / ".baking").mkdir(parents=True)
    real, seen = fcntl.flock, []
    with holding(tmp_path, lambda: place.hold_as_worker(path)) as go:

        def flock(file: Any, operation: int) -> None:
            if operation == fcntl.LOCK_EX:  # the one that waits
                seen.append((tmp_path / "ended").exists())
                go.touch()
            real(file, operation)
            if operation == fcntl.LOCK_EX:
                seen.append((tmp_path / "ended").exists())

        monkeypatch.setattr(fcntl, "flock", flock)
        bake(path)
    assert seen == [False, True]


def test_a_lock_that_was_removed_is_not_taken_for_the_folders(
    bake: Callable[..., Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other bake ended, and removed its lock, between our opening and our locking it."""
    path, real = tmp_path / "b", fcntl.flock

    def flock(file: Any, operation: int) -> None:
        if operation == fcntl.LOCK_EX | fcntl.LOCK_NB:
            (path / ".baking/lock").unlink()
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    assert "is being baked by another process" in refusal(lambda: bake(path))
    monkeypatch.undo()


def test_another_bake_that_ended_meanwhile_is_seen_under_the_lock(
    bake: Callable[..., Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = tmp_path / "b", jobs._check_space

    def meanwhile(planned: jobs.Plan, out: Path) -> None:
        monkeypatch.setattr(jobs, "_check_space", real)
        bake(path, **OTHER)

    monkeypatch.setattr(jobs, "_check_space", meanwhile)
    assert "holds another bundle" in refusal(lambda: bake(path, **ONE))
    assert open_bundle(path, verify_hashes=True).context == 96
    assert not (path / ".baking").exists()
