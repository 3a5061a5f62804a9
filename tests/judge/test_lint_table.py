"""The table of rules against docs/ane-rules.md."""

from pathlib import Path

from anechain.judge.lint_rules import RULES

REQUIRED = {
    "T": (1, 2, 3, 4, 5, 6, 8), "S": (1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 13, 16, 18, 20), "K": (1, 2, 3, 4, 5, 6, 9, 10),
    "Q": (1, 2, 4, 5, 6, 7, 8, 10, 11, 12, 13, 15), "O": (1, 2, 3, 4, 5, 8, 9, 10, 11, 12), "R": (3,), "V": (1, 3, 9),
}  # fmt: skip
DOCUMENT = Path(__file__).parents[2] / "docs/ane-rules.md"


def test_every_rule_is_a_row_of_the_document() -> None:
    rows = {cells[1].strip(): cells for line in DOCUMENT.read_text().splitlines() if len(cells := line.split("|")) > 4}
    required = {f"{group}{n}" for group, numbers in REQUIRED.items() for n in numbers}
    assert required <= {rule.id for rule in RULES} <= set(rows)
    compared = 0
    for rule in RULES:
        graded = next((c.strip() for c in rows[rule.id] if c.strip()[:2] in ("E/", "W/", "I/")), None)
        if graded and sum(r.id == rule.id for r in RULES) == 1 and "conflict" not in graded:
            assert f"{rule.severity}/{rule.confidence}" == graded[:3], rule.id
            compared += 1
    assert compared > 40


def test_every_rule_has_its_tests() -> None:
    text = "".join(f.read_text() for f in Path(__file__).parent.glob("test_lint_*.py"))
    assert not [rule.id for rule in RULES if f'"{rule.id}"' not in text]


def test_the_words_of_a_rule() -> None:
    for rule in RULES:
        for words in (rule.what, rule.fix, rule.source):
            assert words and not words.endswith((".", " ")) and "measured here" not in words, rule.id
    assert len({(rule.id, rule.severity) for rule in RULES}) == len(RULES)
