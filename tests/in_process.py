"""Bakes without worker processes, which import coremltools for seconds, and their death at any step."""

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


class InProcess(Executor):
    """In the place of ProcessPoolExecutor: a job runs when it is submitted, in this process."""

    def __init__(self, *_: Any) -> None: ...

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


def tree(folder: Path) -> dict[str, str]:
    """Every file and every folder below `folder`, hidden ones too, with the sha256 of what a file holds."""
    return {
        path.relative_to(folder).as_posix(): "" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
    }


class Died(BaseException):
    """Nothing that this process does from here on has an effect."""


@contextmanager
def dying(step: int) -> Iterator[None]:
    """From call `step` on, nothing that changes a folder happens: what a kill leaves, whatever is done to clean up.

    Locks are let go on the way out, as they are when a process ends.
    """
    left = step

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Died
            return real(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("mkdir", "replace", "rename", "unlink", "rmdir", "fsync"):
            patch.setattr(os, name, counted(getattr(os, name)))
        patch.setattr(os, "getpid", lambda: 10**7 + step)  # whoever goes on is another process
        yield


def dies(action: Callable[[], Any], step: int) -> bool:
    """Whether `action` was killed before its step of that number; False when it ended before it came there."""
    try:
        with dying(step):
            action()
    except Died:
        return True
    return False
