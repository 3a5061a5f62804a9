"""What README and the pages under docs say exists: verbs, flags and linked files."""

import re
from pathlib import Path

import pytest
from typer.main import get_command

from anechain.cli import commands

REPO = Path(__file__).parents[1]
PAGES = sorted([REPO / "README.md", REPO / "CONTRIBUTING.md", *(REPO / "docs").rglob("*.md")])
COMMANDS = get_command(commands()).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(REPO).as_posix())
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_readme_begins_with_the_two_commands() -> None:
    text = (REPO / "README.md").read_text(encoding="utf-8")
    first = re.search(r"```\n(.*?)```", text, re.DOTALL)
    assert first and first[1].split("\n")[:2] == ["make demo", "make test"]
    makefile = (REPO / "Makefile").read_text(encoding="utf-8")
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in ("demo", "test", "check"))


def test_every_verb_is_documented_and_every_documented_verb_exists() -> None:
    text = (REPO / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^anechain (\w+)", text, re.MULTILINE))
    assert named and named | {"demo"} == set(COMMANDS)


@pytest.mark.parametrize("page", [p for p in PAGES if p.parent.name == "docs"], ids=lambda p: p.name)
def test_documented_flags_exist(page: Path) -> None:
    for verb, rest in re.findall(r"^anechain (\w+)(.*(?:\n {6,}.*)*)", page.read_text(encoding="utf-8"), re.MULTILINE):
        known = {flag for parameter in COMMANDS[verb].params for flag in parameter.opts}
        assert not set(re.findall(r"(--[a-z][a-z-]*)", rest)) - known - {"--help"}, (verb, rest)
