"""Runs the measurements of a search, in processes that share the processors, and keeps what was found."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from anechain.bake.source import Source
from anechain.errors import BundleError, RequestError
from anechain.judge.prepare import bake_with_baselines, cache_folder
from anechain.judge.search import Task, measure, rounded_plan

Progress = Callable[[int, int, str], None]


class Kept:
    """Measurements by name, in a file of the cache that belongs to what `key` stands for."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._path = cache_folder("tune") / f"{key}.jsonl"
        self._found: dict[str, dict[str, Any]] = {}
        if self._path.exists():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                try:
                    entry = json.loads(line)
                    self._found[entry["task"]] = entry["found"]
                except (ValueError, LookupError, TypeError):
                    continue  # the line that was being written when the search was stopped

    def get(self, task: Task) -> dict[str, Any] | None:
        return self._found.get(self._name(task))

    def add(self, task: Task, found: dict[str, Any]) -> None:
        self._found[self._name(task)] = found
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"task": self._name(task), "found": found}) + "\n")

    def _name(self, task: Task) -> str:
        if task.recipe is None:
            return task.matrix
        if task.bundle:
            # The file's name is a hash of all that decides the verdict.
            return f"{'stressed ' if task.stress else ''}bundle {Path(task.bundle).stem}"
        rules = {**task.recipe.to_json(), "name": ""}
        return f"recipe {hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()}"


def run_all(pool: Executor, kept: Kept, tasks: Sequence[Task], report: Progress) -> dict[str, dict[str, Any]]:
    """What each task found, by its name; those that are kept are not run."""
    results = {task.name: found for task in tasks if (found := kept.get(task)) is not None}
    running: dict[Future[dict[str, Any]], Task] = {
        pool.submit(measure, task): task for task in tasks if task.name not in results
    }
    try:
        while running:
            done = wait(running, return_when=FIRST_COMPLETED).done
            # What is finished is kept before a failure ends the search.
            for future in sorted(done, key=lambda future: future.exception() is not None):
                task = running.pop(future)
                results[task.name] = future.result()
                kept.add(task, results[task.name])
                report(len(results), len(tasks), task.name)
    finally:
        for future in running:
            future.cancel()
    return results


def engine_verdicts(
    pool: Executor, kept: Kept, source: Source, task: Task, workers: int, report: Progress
) -> tuple[Mapping[str, Any], ...]:
    """What the gate says of the task's recipe, baked, on the reference engine: plain, and under stress.

    A verdict is kept for these weights and this program only. What an interruption left of the bundle is gone on with.
    Raises RequestError when the cache cannot take the bundle.
    """
    assert task.recipe is not None
    plan = rounded_plan(source, task.recipe, task.context)
    key = hashlib.sha256(f"{plan.key} {_program_sha256()}".encode()).hexdigest()
    path = cache_folder("tune") / f"{key[:32]}.bundle"
    tasks = [replace(task, bundle=str(path), stress=stress) for stress in (False, True)]
    try:
        if any(kept.get(t) is None for t in tasks):
            bake_with_baselines(source, plan, path, workers, progress=lambda d, t, _: report(d, t, "packages"))
        found = run_all(pool, kept, tasks, report)
    except BundleError as error:
        reason = str(error).split(": make room")[0]
        raise RequestError(
            f"{task.recipe.name} cannot be baked in the cache for the reference engine: {reason}. Make room there, or "
            "set ANECHAIN_CACHE to another folder; what was measured is kept."
        ) from None
    finally:
        shutil.rmtree(path, ignore_errors=True)
    return tuple(found[t.name] for t in tasks)


@cache
def _program_sha256() -> str:
    """Of this project's own code: another program's verdicts are not ours."""
    decided = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        decided.update(file.read_bytes())
    return decided.hexdigest()


@contextmanager
def processes(workers: int) -> Iterator[Executor]:
    """Fresh processes that share the processors evenly."""
    threads = str(max(1, (os.cpu_count() or 1) // workers))
    before = {name: os.environ.get(name) for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")}
    os.environ |= {name: value or threads for name, value in before.items()}
    pool = ProcessPoolExecutor(workers, get_context("spawn"))
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
