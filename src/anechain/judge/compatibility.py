"""Where published reports say that something works or is broken: data/compatibility.toml, and how it is matched."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from anechain.errors import RequestError

Answer = Literal["yes", "maybe", "no"]
Status = Literal["works", "broken", "unknown"]
Version = tuple[int, ...]

SYSTEMS = {"macos": "macOS", "ios": "iOS", "ipados": "iOS"}
_ANY: tuple[Version, Version] = ((0, 0, 0), (10**6, 0, 0))


@dataclass(frozen=True)
class Machine:
    """What a package is to run on, as far as it is known: `system` "macOS", "iOS" or "", `os` a version, `chip`."""

    system: str = ""
    os: Version = ()
    chip: str = ""

    @property
    def known(self) -> bool:
        return bool(self.system or self.os or self.chip)

    def __str__(self) -> str:
        system = f"{self.system or 'OS'} {'.'.join(map(str, self.os))}".strip() if self.system or self.os else ""
        return ", ".join(part for part in (system, self.chip) if part) or "any machine"


@dataclass(frozen=True)
class Scope:
    """Where something holds. Empty fields hold everywhere; versions are comparisons such as ">=26.4,<26.6"."""

    system: str = ""
    os: str = ""
    chips: tuple[str, ...] = ()
    coremltools: str = ""

    def __str__(self) -> str:
        system = f"{self.system or 'OS'} {self.os}".strip() if self.system or self.os else ""
        tool = f"coremltools {self.coremltools}" if self.coremltools else ""
        return ", ".join(part for part in (system, " or ".join(self.chips), tool) if part)

    def holds(self, machine: Machine, coremltools: str = "") -> Answer:
        """Whether it holds for this machine and the coremltools that wrote a package; "maybe" where that is unknown."""
        answers = [
            _equal(self.system, machine.system),
            within(machine.os, self.os),
            within(parse_version(coremltools), self.coremltools),
            _chip(self.chips, machine.chip),
        ]
        return "no" if "no" in answers else "maybe" if "maybe" in answers else "yes"


@dataclass(frozen=True)
class Known:
    """One row of data/compatibility.toml: a feature of a package, where it was seen, and what became of it."""

    id: str
    feature: str
    status: Status
    severity: str
    confidence: str
    rule: str
    scope: Scope
    what: str
    fix: str
    source: str


@cache
def known_problems() -> tuple[Known, ...]:
    """The table that comes with anechain, in its order."""
    text = (resources.files("anechain") / "data" / "compatibility.toml").read_text(encoding="utf-8")
    return tuple(_row(row) for row in tomllib.loads(text)["row"])


def _row(row: Mapping[str, Any]) -> Known:
    text = {key: row.get(key, "") for key in ("id", "feature", "confidence", "rule", "what", "fix", "source")}
    scope = Scope(row.get("system", ""), row.get("os", ""), tuple(row.get("chips", ())), row.get("coremltools", ""))
    return Known(status=row["status"], severity=row.get("severity", "I"), scope=scope, **text)


def parse_machine(os: str, chip: str) -> Machine:
    """The words of `--os` ("macOS 26.0.1", "iOS18", "26.1") and `--chip` ("M4", "A17 Pro"); raises RequestError."""
    system = ""
    version: Version = ()
    if os:
        match = re.fullmatch(r"\s*([A-Za-z]*)\s*v?([0-9]+(?:\.[0-9]+){0,2})?\s*", os)
        if match is None or (match[1] and match[1].lower() not in SYSTEMS) or not any(match.groups()):
            raise RequestError(f"--os {os!r} is not understood: write it like macOS15, 'macOS 26.0.1' or iOS18.")
        system, version = SYSTEMS.get(match[1].lower(), ""), parse_version(match[2] or "")
    if chip and not re.fullmatch(r"\s*(Apple )?[AM][0-9]+[A-Z]?(\s+[A-Za-z]+)*\s*", chip, re.IGNORECASE):
        raise RequestError(f"--chip {chip!r} is not understood: write it like M4, 'M5 Pro' or A17.")
    return Machine(system, version, chip_name(chip))


def chip_name(chip: str) -> str:
    """ "apple m4 pro" -> "M4 Pro"."""
    words = chip.split()
    words = words[1:] if words and words[0].lower() == "apple" else words
    return " ".join([w.upper() if i == 0 else w.capitalize() for i, w in enumerate(words)])


def parse_version(text: str) -> Version:
    """ "26.0.1" -> (26, 0, 1); what follows the numbers ("9.0b1") is left out, and () stands for an unknown version."""
    match = re.match(r"[0-9]+(\.[0-9]+)*", text)
    return tuple(int(n) for n in match.group().split(".")[:3]) if match else ()


def within(version: Version, comparisons: str) -> Answer:
    """Whether a version fulfils comparisons such as ">=26.4,<26.6" or "==26.0.1".

    A single number stands for all that begin with it: (26,) is "maybe" within "==26.0.1", and (26, 0) is not.
    """
    if not comparisons:
        return "yes"
    if not version:
        return "maybe"
    low, high = _span(version)
    least, most = _ANY
    for part in comparisons.split(","):
        match = re.fullmatch(r"\s*(>=|<|==)\s*([0-9.]+)\s*", part)
        if match is None:
            raise ValueError(f"{part!r} is no comparison of versions")
        start, end = _span(parse_version(match[2]))
        least = max(least, start) if match[1] != "<" else least
        most = min(most, {">=": _ANY[1], "<": start, "==": end}[match[1]])
    if high <= least or low >= most:
        return "no"
    return "yes" if least <= low and high <= most else "maybe"


def _span(version: Version) -> tuple[Version, Version]:
    """From the first version that is meant to the first that is not, both of three numbers."""
    padded = (*version, 0, 0)[:3]
    return padded, (version[0] + 1, 0, 0) if len(version) == 1 else (*padded[:2], padded[2] + 1)


def _equal(wanted: str, got: str) -> Answer:
    return "yes" if not wanted or wanted == got else "no" if got else "maybe"


def _chip(wanted: tuple[str, ...], got: str) -> Answer:
    """A chip belongs to its family: "M5" holds for an M5 Pro, "M5 Pro" for no M5 Max."""
    if not wanted:
        return "yes"
    if not got:
        return "maybe"
    words = got.split()
    return "yes" if any(w.split() == words[: len(w.split())] for w in wanted) else "no"
