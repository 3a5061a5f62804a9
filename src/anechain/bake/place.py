"""The folder that a bake works in: who may write there, what an earlier bake left, what is finished.

The folder `.baking` inside the bundle is a bake's own: the key of what is being made, one record for each finished
part, a private folder for each running job, two locks. It goes away when the manifest is there. A part is recorded
before it is moved into place, so that there is never a file of ours that no record names, whenever a bake is killed.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from anechain.bundle.manifest import MANIFEST, FileRecord, damaged, open_bundle, record_files, write_atomically
from anechain.errors import BundleError

WORK = ".baking"
_PLAN, _LOCK, _WORKERS, _JOB = "plan.json", "lock", "workers", "job-"
_EARLIER = "earlier"  # the record of everything that the folder held of ours before this bake


def check_place(out: Path, *sources: str | None) -> None:
    """Raises BundleError when no bake of `sources` (a checkpoint, an adapter) may go to `out`; writes nothing."""
    for parent in out.parents:
        if parent.exists() and not parent.is_dir():
            raise BundleError(f"{out} cannot be made, because {parent} is a file: choose another folder with -o.")
    if out.exists() and not out.is_dir():
        raise BundleError(f"{out} is a file: choose another folder with -o.")
    for source in (Path(ref) for ref in sources if ref not in (None, "demo")):
        if source.is_dir() and out.resolve().is_relative_to(source.resolve()):
            where = "is" if out.resolve() == source.resolve() else "lies inside"
            raise BundleError(f"{out} {where} what is baked, {source}: choose another folder with -o.")
    ours = (out / WORK).is_dir() or _stored_key(out / MANIFEST) is not None
    if out.is_dir() and any(out.iterdir()) and not ours:
        raise BundleError(f"{out} holds files that anechain did not make: choose another folder with -o.")


def check_unforced(out: Path, key: str) -> None:
    """Raises BundleError when `out` holds, finished or not, something else than the bundle with `key`."""
    if holds_another(out, key):
        state = "another bundle" if (out / MANIFEST).is_file() else "the beginning of another bake"
        raise BundleError(f"{out} holds {state}: choose another folder with -o, or replace it with --force.")


def holds_another(out: Path, key: str) -> bool:
    """Whether an earlier bake, finished or not, was for something else than `key`."""
    stored = _stored_key(out / WORK / _PLAN) or _stored_key(out / MANIFEST)
    return stored != key if stored else bool(_records(out))  # records without a plan: a removal that was cut short


def is_complete(out: Path, key: str) -> bool:
    """Whether `out` is the finished and undamaged bundle with `key`."""
    if (out / WORK).exists() or _stored_key(out / MANIFEST) != key:
        return False
    with suppress(BundleError):
        open_bundle(out, verify_hashes=True)
        return True
    return False


@contextmanager
def only_one(out: Path) -> Iterator[None]:
    """Makes `out` and its `.baking`, and holds them against other bakes: they would write over each other.

    Raises BundleError for the second. Nothing is left behind that has no record in it.
    """
    missing = [folder for folder in (out, *out.parents) if not folder.exists()]
    work = out / WORK
    work.mkdir(parents=True, exist_ok=True)
    with (work / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.path.samestat(os.fstat(lock.fileno()), (work / _LOCK).stat())  # not one that was just removed
        except (BlockingIOError, FileNotFoundError):
            mine = False
        if not mine:
            raise BundleError(f"{out} is being baked by another process: wait for it, or choose another folder.")
        # Workers of a bake that was killed end at once, but not at the same instant as the lock.
        with (work / _WORKERS).open("w") as workers:
            fcntl.flock(workers, fcntl.LOCK_EX)
        try:
            yield
        finally:
            if not _records(out):  # nothing that could be gone on from
                shutil.rmtree(work, ignore_errors=True)
                with suppress(OSError):  # not empty: the bundle is there
                    for folder in missing:
                        folder.rmdir()


def hold_as_worker(out: Path) -> None:
    """Makes the next bake wait until this process, a worker, has ended."""
    never_closed = os.open(out / WORK / _WORKERS, os.O_RDWR | os.O_CREAT)
    fcntl.flock(never_closed, fcntl.LOCK_SH)


@contextmanager
def private(out: Path, job: str) -> Iterator[Path]:
    """An empty folder that is gone afterwards."""
    folder = out / WORK / f"{_JOB}{job}-{os.getpid()}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def clear_private(out: Path) -> None:
    """Removes the private folders of workers that were killed."""
    for folder in (out / WORK).glob(f"{_JOB}*"):
        shutil.rmtree(folder, ignore_errors=True)


def begin(out: Path, key: str, jobs: Iterable[tuple[str, Iterable[str]]]) -> None:
    """Readies `out`, held with `only_one`, for the bake with `key`: removes what belongs to another one, keeps what is
    finished of this one. `jobs` are the parts and how the paths of each one's files begin.
    """
    work = out / WORK
    if holds_another(out, key):
        remove_ours(out)
    for left in [*work.iterdir(), *out.glob(f".{MANIFEST}.*.tmp")]:  # what a killed bake was working on
        if left.is_dir():
            shutil.rmtree(left)
        elif left.name.startswith("."):
            left.unlink()
    write_atomically(work / _PLAN, json.dumps({"key": key}).encode())
    if files := _files(out / MANIFEST):  # a bundle that is damaged, or was about to lose its `.baking`
        _write_record(out, _EARLIER, files)
        for job, beginnings in jobs:
            _write_record(out, job, {name: r for name, r in files.items() if name.startswith(tuple(beginnings))})
    (out / MANIFEST).unlink(missing_ok=True)


def end(out: Path) -> None:
    """Forgets the records: the manifest is there, or there is no file of ours any more."""
    for record in (out / WORK).glob("*.json"):
        record.unlink()


def publish(made: Path, out: Path, job: str) -> dict[str, FileRecord]:
    """Records what lies in the folder `made`, as the files of `job`, and moves it into place."""
    files = record_files(made, made)
    _write_record(out, job, files)
    for part in sorted(made.iterdir()):
        place = out / part.name
        if place.is_dir():  # a rename cannot replace a folder
            shutil.rmtree(place)
        part.replace(place)
    return files


def finished(out: Path, job: str) -> dict[str, FileRecord] | None:
    """The record of a job that an earlier run finished, if its files are still what it says."""
    files = _files(out / WORK / f"{job}.json")
    return files if files and not damaged(out, files, verify_hashes=True) else None


def remove_ours(out: Path) -> None:
    """Removes what an earlier bake made in `out`, and nothing else; killed half way, it is begun again."""
    files = {name: r for record in [out / MANIFEST, *_records(out)] for name, r in _files(record).items()}
    _write_record(out, _EARLIER, files)
    (out / MANIFEST).unlink(missing_ok=True)  # first: from here on the folder is no bundle
    root, folders = out.resolve(), set()
    for file in (out / name for name in files):
        if file.resolve().is_relative_to(root):
            file.unlink(missing_ok=True)
            folders |= {parent for parent in file.parents if parent.is_relative_to(out) and parent != out}
    for folder in sorted(folders, reverse=True):
        with suppress(OSError):  # not empty: somebody else's files are in it
            folder.rmdir()
    end(out)


def _write_record(out: Path, job: str, files: dict[str, FileRecord]) -> None:
    content = {"files": {name: asdict(record) for name, record in files.items()}}
    write_atomically(out / WORK / f"{job}.json", json.dumps(content).encode())


def _records(out: Path) -> list[Path]:
    return [file for file in (out / WORK).glob("*.json") if file.name != _PLAN]


def _read(file: Path) -> dict[str, Any]:
    """The object in a plan, a record or a manifest; empty when there is none."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _stored_key(file: Path) -> str | None:
    """The key of the bake that a plan or a manifest of ours belongs to. Others write a manifest.json, too."""
    data = _read(file)
    ours = file.name == _PLAN or ("format" in data and "blocks" in data and isinstance(data.get("files"), dict))
    return str(data["key"]) if ours and "key" in data else None


def _files(file: Path) -> dict[str, FileRecord]:
    """The files that a record or a manifest names; none when it is not one."""
    try:
        return {name: FileRecord(r["bytes"], r["sha256"]) for name, r in _read(file)["files"].items()}
    except (AttributeError, KeyError, TypeError):
        return {}
