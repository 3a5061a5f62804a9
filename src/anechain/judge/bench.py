"""How fast a bundle is on this machine: medians of fresh processes, beside other engines in turn, and against memory.

Differences of under a tenth between two runs are noise on a small machine; how much of it others used is in the record.
"""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from anechain.bundle.manifest import Bundle
from anechain.errors import EngineError
from anechain.judge.measure import weight_bytes
from anechain.run.native import library

MEASURES = ("decode_tok_per_s", "prefill_tok_per_s", "first_token_ms", "load_ms", "start_to_first_token_ms")
MEASURES = (*MEASURES, "peak_rss_bytes")
NOT_INSTALLED = 3  # the exit code of a peer's script whose library is not there
CALM = 0.03  # a run is calm when others use less than this share of the processors
TRIES = 6  # of a run that is to be calm

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Contender:
    """A name for the table, and the command of one fresh process that prints one JSON object."""

    name: str
    command: tuple[str, ...]


def own(bundle: Bundle, engine: str, mode: str, prompt: int, tokens: int) -> Contender:
    command = (sys.executable, "-m", "anechain.judge.measure", str(bundle.path), engine, mode)
    return Contender(f"{engine} {mode}", (*command, "--prompt", str(prompt), "--tokens", str(tokens)))


def peers(folder: Path, python: str, source: str, prompt: int, tokens: int) -> list[Contender]:
    """The scripts that `folder` holds for other engines; EngineError where there is no such folder."""
    scripts = sorted(path for path in folder.glob("*.py") if not path.name.startswith("_"))
    if not scripts:
        raise EngineError(f"{folder} holds no scripts for peers: run the bench from a checkout, or name their folder.")
    flags = ("--source", source, "--prompt", str(prompt), "--tokens", str(tokens))
    return [Contender(script.stem, (python, str(script), *flags)) for script in scripts]


def run_bench(
    bundle: Bundle, contenders: Sequence[Contender], runs: int, curves: bool, report: Progress, calm: bool = False
) -> dict[str, Any]:
    """The first contender is what the record is about; all are run `runs` times, in turn.

    With `calm` a run that others disturbed is made again, a few times at most; each says how much they used.
    Raises EngineError when a process fails; a peer that is not installed is left out and named.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    missing: dict[str, str] = {}
    before = clocks()
    total = runs * len(contenders)
    for turn in range(runs):
        for place, contender in enumerate(contenders):
            if contender.name in missing:
                continue
            report(turn * len(contenders) + place, total, contender.name)
            extra = ("--curves",) if curves and place == 0 and turn == runs - 1 else ()
            made = _process(contender, extra)
            for _ in range(TRIES - 1 if calm else 0):
                if isinstance(made, str) or made["cpu_used_by_others"] < CALM:
                    break
                again = _process(contender, extra)
                if isinstance(again, str) or again["cpu_used_by_others"] < made["cpu_used_by_others"]:
                    made = again
            if isinstance(made, str):
                missing[contender.name] = made
            else:
                found.setdefault(contender.name, []).append(made)
    others = used_by_others(before)
    first = found[contenders[0].name]
    bandwidth, weights = read_bandwidth_bytes_per_s(), weight_bytes(bundle)
    middle = {key: median(made[key] for made in first) for key in MEASURES}
    achieved = weights * middle["decode_tok_per_s"]
    return {
        **middle,
        "engine": first[0]["engine"],
        "weight_bytes_per_token": weights,
        "achieved_bytes_per_s": achieved,
        "read_bandwidth_bytes_per_s": bandwidth,
        "share_of_read_bandwidth": achieved / bandwidth if bandwidth else None,
        "runs": runs,
        "cpu_used_by_others": others,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "contenders": {
            name: {"runs": made, **{key: median(m[key] for m in made) for key in MEASURES if key in made[0]}}
            for name, made in found.items()
        },
        "not_installed": missing,
        **{key: value for key, value in first[-1].items() if key not in (*MEASURES, "engine", "cpu_used_by_others")},
    }


def _process(contender: Contender, extra: Sequence[str]) -> dict[str, Any] | str:
    command = [*contender.command, "--started", str(time.time()), *extra]
    before = clocks()
    done = subprocess.run(command, capture_output=True, text=True)
    words = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
    if done.returncode == NOT_INSTALLED:
        return words
    try:
        if done.returncode:
            raise ValueError
        record: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise EngineError(
            f"the process that measures {contender.name} failed ({words}): run it alone to see why."
        ) from None
    return {**record, "cpu_used_by_others": used_by_others(before)}


def read_bandwidth_bytes_per_s() -> float | None:
    """Bytes a second; None where the native library, which reads with all cores, is not there."""
    try:
        return library().read_bandwidth()
    except EngineError:
        return None


def clocks() -> tuple[float, float, float]:
    return time.perf_counter(), _busy_s(), _children_s()


def used_by_others(before: tuple[float, float, float]) -> float:
    """The share of all processors that other processes have used since then."""
    wall_s, busy_s, own_s = (now - then for now, then in zip(clocks(), before, strict=True))
    return max(0.0, busy_s - own_s) / (wall_s * (os.cpu_count() or 1))


def _busy_s() -> float:
    """Seconds that all processors were at work since the system started; 0 where /proc does not say."""
    try:
        fields = Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    except OSError:
        return 0.0
    user, nice, system, _, _, irq, softirq, *_ = map(int, fields)
    return (user + nice + system + irq + softirq) / float(os.sysconf("SC_CLK_TCK"))


def _children_s() -> float:
    spent = os.times()
    return spent.children_user + spent.children_system + spent.user + spent.system
