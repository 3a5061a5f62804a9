"""data/compatibility.toml, and how its rows are matched with a machine and the coremltools that wrote a package."""

import tomllib
from importlib import resources

import pytest

from anechain.errors import RequestError
from anechain.judge.compatibility import (
    Machine,
    Scope,
    chip_name,
    known_problems,
    parse_machine,
    parse_version,
    within,
)
from anechain.judge.lint_features import FEATURES
from anechain.judge.lint_rules import RULES

FIELDS = {"id", "feature", "status", "severity", "confidence", "rule", "system", "os", "chips", "coremltools", "what"}


def test_every_row_is_complete() -> None:
    rows = known_problems()
    assert len(rows) > 20
    assert len({row.id for row in rows}) == len(rows)
    for row in rows:
        assert row.status in ("works", "broken", "unknown"), row.id
        assert row.confidence in ("H", "M", "L") and row.severity in ("E", "W", "I"), row.id
        assert row.what and row.source and row.rule, row.id
        assert row.fix or row.status != "broken", row.id
        assert row.feature in FEATURES or row.feature == "environment", row.id
        assert row.scope.system in ("", "macOS", "iOS"), row.id
        within((26, 1), row.scope.os), within((9, 0), row.scope.coremltools)  # a bad comparison raises
        assert all(chip_name(chip) == chip for chip in row.scope.chips), row.id


def test_no_row_has_a_field_that_nothing_reads() -> None:
    text = (resources.files("anechain") / "data" / "compatibility.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    assert set(data) == {"row"}
    assert {field for row in data["row"] for field in row} <= FIELDS | {"fix", "source"}
    assert all("severity" in row for row in data["row"] if row["status"] == "broken")


def test_features_that_a_rule_speaks_of_are_its_rows() -> None:
    """A row that names a rule of the table names one that is there (the others are published, and not visible)."""
    ids = {rule.id for rule in RULES}
    invisible = {"K12", "Q3", "V2", "V6", "V10", "R8", "R10"}
    assert {row.rule for row in known_problems()} <= ids | invisible


@pytest.mark.parametrize(("feature", "machine", "tool", "status", "answer"), [
    ("target-26", Machine("macOS", (26, 0)), "9.0", "broken", "yes"),
    ("target-26", Machine("macOS", (26, 0)), "", "broken", "maybe"),
    ("long-slice-update", Machine("iOS", (26, 0, 1)), "", "broken", "yes"),
    ("long-slice-update", Machine("iOS", (26,)), "", "broken", "maybe"),
    ("state", Machine("iOS", (26, 1)), "", "broken", "yes"),
    ("palette-4bit-state", Machine("macOS", (26, 5), "M5 Max"), "9.0", "broken", "yes"),
    ("palette-4bit-state", Machine("macOS", (26, 5), "M5 Max"), "8.3", "works", "yes"),
    ("spec-9", Machine("macOS", (14, 6)), "", "broken", "yes"),
    ("spec-9", Machine("iOS", (17,)), "", "broken", "yes"),
    ("int8-channel", Machine(chip="M4"), "", "unknown", "yes"),
    ("argmax-not-there", Machine("macOS", (26,)), "", "none", "no"),
])  # fmt: skip
def test_what_is_published(feature: str, machine: Machine, tool: str, status: str, answer: str) -> None:
    answers = [r.scope.holds(machine, tool) for r in known_problems() if (r.feature, r.status) == (feature, status)]
    assert (max(answers, key=["no", "maybe", "yes"].index) if answers else "no") == answer


@pytest.mark.parametrize(("version", "comparisons", "answer"), [
    ((26, 0, 1), "==26.0.1", "yes"), ((26, 0), "==26.0.1", "no"), ((26,), "==26.0.1", "maybe"),
    ((26, 4), ">=26.4,<26.6", "yes"), ((26, 5, 3), ">=26.4,<26.6", "yes"), ((26, 6), ">=26.4,<26.6", "no"),
    ((26, 3, 9), ">=26.4,<26.6", "no"), ((26,), ">=26.4,<26.6", "maybe"), ((26,), ">=26", "yes"),
    ((27, 1), ">=26", "yes"), ((18, 5), ">=26", "no"), ((15,), "<15", "no"), ((14,), "<15", "yes"),
    ((14, 7, 1), "<15", "yes"), ((9, 0), "==9.0", "yes"), ((9, 0, 1), "==9.0", "no"), ((), "==26.0.1", "maybe"),
    ((26, 1), "", "yes"), ((), "", "yes"), ((26,), ">=26,<26.5", "maybe"), ((26,), "<26.5", "maybe"),
])  # fmt: skip
def test_versions(version: tuple[int, ...], comparisons: str, answer: str) -> None:
    assert within(version, comparisons) == answer


def test_a_comparison_that_is_none() -> None:
    with pytest.raises(ValueError, match="'~26' is no comparison"):
        within((26,), "~26")


@pytest.mark.parametrize(("scope", "machine", "answer"), [
    (Scope(), Machine(), "yes"), (Scope("iOS"), Machine("macOS"), "no"), (Scope("iOS"), Machine(chip="M4"), "maybe"),
    (Scope(chips=("M5",)), Machine(chip="M5 Pro"), "yes"), (Scope(chips=("M5 Pro",)), Machine(chip="M5"), "no"),
    (Scope(chips=("M4", "M5")), Machine(chip="M50"), "no"), (Scope(chips=("M4", "M5")), Machine(chip="M5"), "yes"),
    (Scope(chips=("M5",)), Machine("macOS"), "maybe"), (Scope("macOS", ">=26"), Machine("macOS", (15,), "M5"), "no"),
    (Scope(coremltools="==9.0"), Machine("macOS"), "maybe"),
])  # fmt: skip
def test_scopes(scope: Scope, machine: Machine, answer: str) -> None:
    assert scope.holds(machine) == answer


@pytest.mark.parametrize(("os", "chip", "machine"), [
    ("macOS15", "M4", Machine("macOS", (15,), "M4")), ("macOS 26.0.1", "", Machine("macOS", (26, 0, 1))),
    ("ios18.2", "apple a17 pro", Machine("iOS", (18, 2), "A17 Pro")),
    ("26.1", "m5 pro", Machine("", (26, 1), "M5 Pro")), ("iPadOS 26", "", Machine("iOS", (26,))),
    ("macOS", "", Machine("macOS")), ("", "", Machine()),
])  # fmt: skip
def test_what_a_person_writes(os: str, chip: str, machine: Machine) -> None:
    assert parse_machine(os, chip) == machine


@pytest.mark.parametrize("os", ["windows11", "macOS 15.x", "Sequoia", "15.1.2.3", "-"])
def test_systems_that_are_none(os: str) -> None:
    with pytest.raises(RequestError, match=r"--os .* is not understood: write it like macOS15"):
        parse_machine(os, "")


@pytest.mark.parametrize("chip", ["Intel", "4", "M", "M4;"])
def test_chips_that_are_none(chip: str) -> None:
    with pytest.raises(RequestError, match=r"--chip .* is not understood: write it like M4"):
        parse_machine("", chip)


def test_versions_with_words_behind() -> None:
    assert parse_version("9.0b1") == (9, 0)
    assert parse_version("26.0.1.5") == (26, 0, 1)
    assert parse_version("unknown") == ()


def test_how_a_machine_and_a_scope_read() -> None:
    assert str(Machine("macOS", (26, 0, 1), "M5 Pro")) == "macOS 26.0.1, M5 Pro"
    assert str(Machine("", (26,))) == "OS 26"
    assert str(Machine("iOS")) == "iOS" and str(Machine("iOS", (), "A17")) == "iOS, A17"
    assert str(Machine()) == "any machine"
    assert str(Scope("", ">=26", ("M4", "M5"), "==9.0")) == "OS >=26, M4 or M5, coremltools ==9.0"
    assert str(Scope()) == ""
