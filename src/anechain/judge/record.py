"""What `anechain doctor --record` writes on a Mac and `doctor --import` reads: one zip of JSON, written down once.

`record.json` says where it was made and lists the trials; `plan-NNN.json` is the compute plan of trial NNN, in the
form that `anechain lint --plan` takes. There is no field for a prompt, a serial number or a user's name, and a path in
a reason is cut down to its last part.
"""

import json
import math
import re
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from anechain.bundle.manifest import write_atomically
from anechain.errors import RequestError
from anechain.judge.compatibility import Status

FORMAT = 1
RECORD = "record.json"
DEVICES = ("NE", "GPU", "CPU")
_FIGURES = ("min_cosine", "mean_kl", "max_kl", "top1", "positions")
_LARGEST_MEMBER = 2**26  # bytes; a plan of 30 packages has 3 MB
_HOME = re.compile(r"(?:[A-Za-z]:)?[/\\](?:Users|home)[/\\][^/\\\s:'\"]+")
_PATH = re.compile(r"(?:file://)?(?:[A-Za-z]:)?[^/\\\s:'\"]*(?:[/\\][^/\\\s:'\"]+)*[/\\]([^/\\\s:'\"]+)")
_FRACTION = re.compile(r"[\d.]+/[\d.]+[.,;)]?")
_WORD = re.compile(r"[\w .,+()-]{0,80}")

Ops = Mapping[str, "Device"]  # op -> where it was put
Packages = Mapping[str, Mapping[str, Ops]]  # package file -> function -> ops


@dataclass(frozen=True)
class Configuration:
    """What was tried: a form of bundle, and one of its functions ("" where both are meant)."""

    model: str  # a name such as "demo", never a path
    recipe: str
    target: str
    layers_per_package: int  # of the package that holds most
    state_update: Literal["slice", "blend"] = "slice"
    norm: str = "max-scaled"
    activations: Literal["fp16", "int8"] = "fp16"
    function: Literal["", "decode", "prefill"] = ""
    context: int = 1024
    prefill: int = 64


@dataclass(frozen=True)
class GateFigures:
    """The gate's verdict, with names and figures as in `anechain gate --json`; None for what is not finite."""

    verdict: Literal["pass", "fail"]
    profile: str
    engine: str
    min_cosine: float | None
    mean_kl: float | None
    max_kl: float | None
    top1: float | None
    positions: int


@dataclass(frozen=True)
class Device:
    """Where the compute plan puts one op, None for constants, and its share of the function's cost, 0 to 1."""

    device: Literal["NE", "GPU", "CPU"] | None
    cost: float | None = None


@dataclass(frozen=True)
class Trial:
    """One configuration on one machine.

    `diverged` is the reason when Core ML failed or said something else than the reference engine, "" when it did not.
    `gate` is None where the gate did not run. `bench` maps a figure's name, which carries its unit, to its value.
    """

    configuration: Configuration
    diverged: str = ""
    gate: GateFigures | None = None
    handoff: str = ""  # "zero-copy", or what was copied and why
    bench: Mapping[str, float | None] = field(default_factory=dict)
    plan: Packages = field(default_factory=dict)

    @property
    def status(self) -> Status:
        """A gate that fails without a divergence says that the bundle is bad, not that the machine is."""
        if self.diverged:
            return "broken"
        return "works" if self.gate is not None and self.gate.verdict == "pass" else "unknown"


@dataclass(frozen=True)
class Record:
    """One run of `anechain doctor --record`. `checks` maps a check of the engine to "" or the reason why it failed."""

    os: str  # "macOS 26.0.1"
    chip: str  # "M5 Pro"
    machine: str  # the kind: "Mac17,3"
    coremltools: str
    anechain: str
    engine: str
    trials: tuple[Trial, ...]
    checks: Mapping[str, str] = field(default_factory=dict)


def write_record(record: Record, path: Path) -> None:
    """Writes the zip; the same record gives the same bytes. Raises RequestError, naming every offender, for fields
    that could not be read again."""
    members = {RECORD: {"format": FORMAT, **_plain(record), "trials": [_head(t) for t in record.trials]}}
    for number, trial in enumerate(record.trials):
        if trial.plan:
            members[_plan_file(number)] = {"machine": record.machine, "os": record.os, "packages": _plain(trial.plan)}
    if faults := _faults(record):
        raise RequestError(f"the record {path} cannot be written: {'; '.join(faults)}.")
    temporary = path.with_name(f".{path.name}.part")
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, value in members.items():
                text = json.dumps(value, indent=1, sort_keys=True, allow_nan=False)
                archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), text, zipfile.ZIP_DEFLATED)
        write_atomically(path, temporary.read_bytes())
    except OSError as error:
        raise RequestError(f"the record {path} cannot be written ({error.strerror}): check the folder.") from None
    finally:
        temporary.unlink(missing_ok=True)


def read_record(path: Path) -> Record:
    """Reads the zip. Raises RequestError for what is no record, is damaged, or is of another format."""
    try:
        with zipfile.ZipFile(path) as archive:
            data = _member(archive, RECORD)
            if data.get("format") != FORMAT:
                raise RequestError(
                    f"the record {path} has format {data.get('format')!r} and this anechain reads {FORMAT}: use the "
                    "version that wrote it."
                )
            plans = {n: _member(archive, n) for n in archive.namelist() if n != RECORD}
        record = _record(data, plans)
    except OSError as error:
        raise RequestError(f"the record {path} cannot be read ({error.strerror}): check the path.") from None
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise RequestError(f"{path} is not a record ({error}): `anechain doctor --record` writes one.") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RequestError(
            f"{path} is not a record ({type(error).__name__}: {error}): `anechain doctor --record` writes one."
        ) from None
    if faults := _faults(record):
        raise RequestError(f"the record {path} cannot be used: {'; '.join(faults)}.")
    return record


def without_paths(text: str) -> str:
    """A reason as it may leave the machine: one line, of each path only the last part, at most 500 characters."""
    line = _HOME.sub("~", " ".join(text.split()))
    return _PATH.sub(lambda m: m[0] if _FRACTION.fullmatch(m[0]) else m[1], line)[:500]


def _plan_file(number: int) -> str:
    return f"plan-{number:03}.json"


def _plain(value: Any) -> Any:
    """Frozen dataclasses and mappings -> JSON; a number that JSON lacks becomes null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return _plain(asdict(value)) if hasattr(value, "__dataclass_fields__") else value


def _head(trial: Trial) -> dict[str, Any]:
    """A trial without its plan, which is a member of its own."""
    head: dict[str, Any] = _plain(trial)
    del head["plan"]
    return {**head, "diverged": without_paths(trial.diverged), "handoff": without_paths(trial.handoff)}


def _member(archive: zipfile.ZipFile, name: str) -> dict[str, Any]:
    size = archive.getinfo(name).file_size
    if size > _LARGEST_MEMBER:
        raise ValueError(f"{name} has {size} bytes")
    data = json.loads(archive.read(name))
    if not isinstance(data, dict):
        raise TypeError(f"{name} holds no JSON object")
    return data


def _record(data: Mapping[str, Any], plans: Mapping[str, Mapping[str, Any]]) -> Record:
    trials = []
    for number, trial in enumerate(data["trials"]):
        plan = plans.get(_plan_file(number), {}).get("packages", {})
        packages = {
            p: {f: {op: Device(**d) for op, d in ops.items()} for f, ops in fs.items()} for p, fs in plan.items()
        }
        gate = None if trial["gate"] is None else GateFigures(**trial["gate"])
        rest = {key: value for key, value in trial.items() if key not in ("configuration", "gate")}
        trials.append(Trial(configuration=Configuration(**trial["configuration"]), gate=gate, plan=packages, **rest))
    if strangers := set(plans) - {_plan_file(n) for n in range(len(trials))}:
        raise ValueError(f"there is no trial for {', '.join(sorted(strangers))}")
    rest = {key: value for key, value in data.items() if key not in ("format", "trials")}
    return Record(trials=tuple(trials), **rest)


def _faults(record: Record) -> list[str]:
    """Fields of another type than declared, words that may be more than a word, values that nobody knows."""
    faults = _wrong(record, "", {"trials": tuple, "checks": Mapping})
    for name in ("os", "chip", "machine", "coremltools", "anechain", "engine"):
        faults += _not_a_word(name, getattr(record, name))
    faults += [f"check {n!r} is no text" for n, reason in record.checks.items() if not isinstance(reason, str)]
    if not record.trials:
        faults.append("it has no trial")
    for number, trial in enumerate(record.trials):
        at, tried = f"trial {number}: ", trial.configuration
        faults += _wrong(tried, at, {}) + _wrong(trial, at, {"bench": Mapping, "plan": Mapping})
        for name in ("model", "recipe", "target", "norm"):
            faults += _not_a_word(at + name, getattr(tried, name))
        for name, value, known in (
            ("state_update", tried.state_update, ("slice", "blend")),
            ("activations", tried.activations, ("fp16", "int8")),
            ("function", tried.function, ("", "decode", "prefill")),
            ("gate verdict", trial.gate.verdict if trial.gate else "pass", ("pass", "fail")),
        ):
            if value not in known:
                faults.append(f"{at}{name} {value!r} is none of {', '.join(map(repr, known))}")
        faults += [f"{at}bench {n} is no number" for n, v in trial.bench.items() if not _number(v)]
        figures = {n: getattr(trial.gate, n) for n in _FIGURES} if trial.gate else {}
        faults += [f"{at}gate {n} is no number" for n, v in figures.items() if not _number(v)]
        devices = {d.device for fs in trial.plan.values() for ops in fs.values() for d in ops.values()}
        faults += [f"{at}device {d!r} is none of {', '.join(DEVICES)}" for d in devices - {*DEVICES, None}]
    return faults


def _wrong(item: Any, at: str, others: Mapping[str, Any]) -> list[str]:
    """Fields of text and whole numbers that hold something else, and those of `others` that are of no such type."""
    wanted = {f.name: {"str": str, "int": int}.get(str(getattr(f.type, "__name__", f.type))) for f in fields(item)}
    kinds = {name: kind for name, kind in wanted.items() if kind} | dict(others)
    return [f"{at}{n} is {getattr(item, n)!r}" for n, kind in kinds.items() if not isinstance(getattr(item, n), kind)]


def _not_a_word(name: str, value: Any) -> list[str]:
    return [f"{name} {value!r} is more than a name"] if isinstance(value, str) and not _WORD.fullmatch(value) else []


def _number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
