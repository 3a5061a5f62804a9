"""Whether anything has run on a Mac stands in docs/status.md; every page that speaks of one says it in those words."""

import re
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
STATUS = REPO / "docs/status.md"
STATE = STATUS.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]
# Pages where something is said of what a Mac does with packages or with this program.
CONCERNED = {"README.md", "ane-rules.md", "gate.md", "lint.md", "map.md", "on-a-mac.md", "run.md", "ship.md"}


def links_of(page: Path) -> list[str]:
    """The words of the links that lead to the status."""
    found = re.findall(r"\[([^]]*)\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    return [words for words, target in found if (page.parent / target).resolve() == STATUS.resolve()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_says_it_with_these_words_or_not_at_all(page: Path) -> None:
    words = links_of(page)
    assert set(words) <= {STATE}
    assert bool(words) == (page.name in CONCERNED)
    if page != STATUS:
        rest = page.read_text(encoding="utf-8").replace(f"[{STATE}]", "")
        assert "pple hardware" not in rest, "said a second time, where nobody would change it"


def test_every_page_on_core_mls_own_doing_is_concerned() -> None:
    """A page that names the coreml engine, the compute plan or the record."""
    words = re.compile(r"--engine coreml|compute plan|doctor --record|`coreml`")
    naming = {page.name for page in PAGES if words.search(page.read_text(encoding="utf-8"))}
    assert naming - {"status.md"} <= CONCERNED and len(naming) >= 5


def test_code_and_decisions_point_there() -> None:
    for path in ("src/anechain/run/coreml.py", "src/anechain/run/coreml_port.py"):
        assert "docs/status.md" in (REPO / path).read_text(encoding="utf-8")
    decision = REPO / "docs/decisions/0021-how-the-macos-engine-is-verified.md"
    assert links_of(decision) == [STATE]
