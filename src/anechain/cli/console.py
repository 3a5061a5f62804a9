"""What all verbs share: progress on stderr, one JSON object on stdout, engines by name."""

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from anechain.errors import EngineError, RequestError
from anechain.run.engine import Engine
from anechain.run.grammar import Grammar

# What is printed may be a path or a model's words: nothing in it is markup, and a pipe gets lines of any length.
_PLAIN: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False, "soft_wrap": True}
out = Console(**_PLAIN, width=None if sys.stdout.isatty() else 200)
err = Console(**_PLAIN, stderr=True)
ENGINES = ("reference", "cpu", "openvino", "coreml")

Report = Callable[[int, int, str], None]  # done, total, what is being done


@contextmanager
def progress(title: str) -> Iterator[Report]:
    """A bar on stderr with an estimate of the time that is left; a line for each step where stderr is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    if not err.is_terminal:
        seen: set[str] = set()

        def line(done: int, total: int, what: str) -> None:
            if what not in seen:
                seen.add(what)
                err.print(f"{title}: {what} ({done} of {total})")

        yield line
        return
    with Progress(*columns, TimeRemainingColumn(), console=err, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=f"{title}: {what}")


def print_json(value: dict[str, Any]) -> None:
    """The one object that `--json` puts on stdout; what JSON has no number for (NaN, infinity) becomes null."""
    json.dump(plain(value), sys.stdout, allow_nan=False, indent=1)
    sys.stdout.write("\n")


def plain(value: Any) -> Any:
    """As JSON holds it: what it has no number for becomes null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def open_engine(name: str, stress: bool = False, fast: bool = False, compute_units: str = "") -> Engine:
    """The engine that `--engine` names.

    Raises EngineError when it is not there, RequestError when there is no such one or it has no such mode.
    """
    if compute_units and name != "coreml":
        raise RequestError(f"--compute-units are Core ML's: use --engine coreml, or {name} without them.")
    if fast and name not in ("cpu", "openvino"):
        raise RequestError(f"--fast is a mode of the cpu engine: use --engine cpu, or {name} without it.")
    if name == "reference":
        from anechain.run.reference import ReferenceEngine

        return ReferenceEngine(stress)
    if name in ("cpu", "openvino"):
        from anechain.run.cpu import cpu_engine

        return cpu_engine("fast" if fast else "exact", native=name == "cpu")
    if name == "coreml":
        from anechain.run.coreml import CoreMLEngine

        return CoreMLEngine(compute_units) if compute_units else CoreMLEngine()
    raise RequestError(f"--engine {name} is not known: use {', '.join(ENGINES)}.")


def open_grammar(schema: Path | None, regex: str | None, grammar: Path | None) -> Grammar | None:
    """What `--schema`, `--regex` or `--grammar` asks for; None for none of them. Raises RequestError."""
    named = {"--schema": schema, "--regex": regex, "--grammar": grammar}
    if len(given := [flag for flag, value in named.items() if value is not None]) > 1:
        raise RequestError(f"{' and '.join(given)} exclude each other: give one of them.")
    if regex is not None:
        return Grammar("regex", regex)
    path = schema or grammar
    if path is None:
        return None
    try:
        return Grammar("schema" if schema else "lark", path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = (isinstance(error, OSError) and error.strerror) or "it is not UTF-8 text"
        raise RequestError(f"{given[0]} {path} cannot be read ({why}): name a file with one.") from None


def megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def folder(path: Path) -> int:
    """Bytes of all files below `path`."""
    return sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
