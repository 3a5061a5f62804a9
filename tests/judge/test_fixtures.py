"""Checks of an answer, and the suite's two formats."""

import json
from pathlib import Path
from typing import Any

import pytest

from anechain.errors import RequestError
from anechain.judge.fixtures import fixture_of, judge, row_to_fixture
from anechain.judge.suite import load_suite, shipped

SCHEMA = {
    "type": "object",
    "properties": {"action": {"enum": ["open", "ask"]}, "n": {"type": "integer"}, "say": {"type": "string"}},
    "required": ["action"],
    "additionalProperties": False,
}


def faults(answer: str, schema: Any = SCHEMA, **row: Any) -> tuple[str, ...]:
    return judge(fixture_of({"input": "x", **row}, "f"), answer, schema).faults


@pytest.mark.parametrize(
    ("check", "value", "fault"),
    [
        ({"equals": "open"}, "open", ""),
        ({"equals": "Open"}, "open", 'is "open" instead of "Open"'),
        ({"equals": "Open", "ignore_case": True}, "oPEN", ""),
        ({"equals": True}, 1, "is 1 instead of true"),
        ({"equals": 1}, True, "is true instead of 1"),
        ({"equals": 1}, 1.0, ""),
        ({"equals": [1, True]}, [1, 1], "is [1, 1] instead of [1, true]"),
        ({"equals": {"a": 0}}, {"a": False}, 'is {"a": false} instead of {"a": 0}'),
        ({"equals": None}, None, ""),
        ({"equals": None}, "", 'is "" instead of null'),
        ({"equals": ""}, "", ""),
        ({"one_of": ["a", "b"]}, "b", ""),
        ({"one_of": ["a", "b"]}, "c", 'is "c" and none of "a", "b"'),
        ({"matches": r"\?$"}, "why?", ""),
        ({"matches": r"\?$"}, "why", r'is "why", which does not match \?$'),
        ({"matches": "WHY", "ignore_case": True}, "why", ""),
        ({"matches": "1"}, 1, "is 1 instead of a text"),
        ({"contains": "can"}, "cannot", ""),
        ({"contains": ["can", "Not"]}, "cannot", 'is "cannot", which lacks "Not"'),
        ({"contains": ["can", "Not"], "ignore_case": True}, "cannot", ""),
        ({"max_words": 2}, "one two", ""),
        ({"max_words": 2}, "one two three", "has 3 words, more than 2"),
        ({"equals": "a b", "max_words": 1}, "a b", "has 2 words, more than 1"),
    ],
)
def test_a_check_of_a_field(check: dict[str, Any], value: Any, fault: str) -> None:
    found = faults(json.dumps({"say": value}), None, fields={"say": check})
    assert found == ((f"say {fault}",) if fault else ())


def test_all_checks_of_all_fields_count() -> None:
    fields = {"action": {"equals": "open"}, "say": {"max_words": 1}, "n": {"equals": 3}}
    assert faults('{"action":"open","say":"ok","n":3}', fields=fields) == ()
    assert faults('{"action":"ask","say":"o k","n":4}', fields=fields) == (
        'action is "ask" instead of "open"',
        "say has 2 words, more than 1",
        "n is 4 instead of 3",
    )
    assert faults('{"action":"open","n":3}', fields=fields) == ("say is missing",)


def test_the_schema_is_judged_and_what_breaks_it_is_not_looked_into() -> None:
    row = {"fields": {"action": {"equals": "open"}}}
    for answer, fault in (
        ("open", "the answer is not JSON"),
        ('{"action":"open"', "the answer is not JSON"),
        ('{"action":"close"}', "the answer breaks the schema at $.action"),
        ('{"action":"open","more":1}', "the answer breaks the schema at $: Additional properties"),
        ('{"action":"open","n":true}', "the answer breaks the schema at $.n"),
    ):
        judgement = judge(fixture_of({"input": "x", **row}, "f"), answer, SCHEMA)
        assert judgement.valid is False and len(judgement.faults) == 1 and judgement.faults[0].startswith(fault)
    assert judge(fixture_of({"input": "x", **row}, "f"), '{"action":"open"}', SCHEMA).valid is True


def test_free_text_needs_no_json() -> None:
    row = {"text": {"contains": "Paris", "max_words": 3}}
    judgement = judge(fixture_of({"input": "x", **row}, "f"), "It is Paris", None)
    assert judgement.passed and judgement.valid is None
    assert faults("It is Rome", None, **row) == ('the answer is "It is Rome", which lacks "Paris"',)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({}, "input is missing"),
        ({"input": 3}, "input is not a text"),
        ({"input": "x", "fields": {"a": {}}}, "fields.a gives none of equals, one_of"),
        ({"input": "x", "fields": {"a": {"ignore_case": True}}}, "fields.a gives none of"),
        ({"input": "x", "fields": {"a": {"equal": 1}}}, "fields.a gives none of"),
        ({"input": "x", "fields": {"a": {"equals": 1, "equal": 1}}}, "fields.a.equal is not a known check"),
        ({"input": "x", "fields": {"a": {"matches": "("}}}, "fields.a.matches = '(' cannot be used"),
        ({"input": "x", "fields": {"a": {"max_words": True}}}, "fields.a.max_words = True cannot be used"),
        ({"input": "x", "fields": {"a": {"one_of": []}}}, "fields.a.one_of = [] cannot be used"),
        ({"input": "x", "text": {"contains": [1]}}, "text.contains = [1] cannot be used"),
        ({"input": "x", "field": {}}, "field is not a known key"),
    ],
)
def test_a_fixture_that_cannot_be_used_says_why(row: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=r"^fixture f: .*see docs/eval.md\.$") as caught:
        fixture_of(row, "f")
    assert said in str(caught.value)


def test_the_converter_of_jsonl() -> None:
    whole = {"text": {"contains": "4"}, "input": "2+2?"}
    assert row_to_fixture({"prompt": "2+2?", "expect": "4"}) == whole
    assert row_to_fixture({"prompt": "2+2?", "expect": ["4", "four"]})["text"] == {"contains": ["4", "four"]}
    row = {"prompt": "open it", "expect": {"action": "open", "say": {"max_words": 3}}, "kind": "do", "split": "gate"}
    assert row_to_fixture(row) == {
        "input": "open it", "kind": "do", "split": "gate",
        "fields": {"action": {"equals": "open"}, "say": {"max_words": 3}},
    }  # fmt: skip
    with pytest.raises(RequestError, match="needs `prompt` and `expect`, and this one has question"):
        row_to_fixture({"question": "?"})


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def test_toml_and_jsonl_are_the_same_suite(tmp_path: Path) -> None:
    settings = 'name = "s"\nsystem = "Do."\nschema = "a.json"\n[checks.fields]\nsay = { max_words = 2 }\n'
    toml = write(
        tmp_path / "toml", suite_dot_toml=settings, a_dot_json=json.dumps(SCHEMA),
        fixtures__one_dot_toml='input = "go"\nkind = "k"\n[fields]\naction = { equals = "open" }\n',
    )  # fmt: skip
    rows = '{"name": "one", "prompt": "go", "kind": "k", "expect": {"action": "open"}}\n\n'
    lines = write(tmp_path / "lines", suite_dot_toml=settings, a_dot_json=json.dumps(SCHEMA), fixtures_dot_jsonl=rows)
    a, b = load_suite(str(toml)), load_suite(str(lines))
    assert a.fixtures == b.fixtures and a.sha256 == b.sha256 and a.fixtures[0].fields["say"].max_words == 2
    alone = write(tmp_path, more_dot_jsonl='{"prompt": "2+2?", "expect": "4"}\n{"prompt": "3+3?", "expect": "6"}')
    suite = load_suite(str(alone / "more.jsonl"))
    assert (suite.system, suite.schema, [f.name for f in suite.fixtures]) == (None, None, ["line-0001", "line-0002"])


@pytest.mark.parametrize(
    "change",
    ['system = "Do it."', "schema = 'b.json'", "[sampling]\nmax_tokens = 9", "[checks.text]\nmax_words = 9", "fixture"],
)
def test_whatever_decides_an_answer_or_its_judgement_is_in_the_hash(change: str, tmp_path: Path) -> None:
    def made(name: str, more: str, text: str) -> str:
        folder = write(
            tmp_path / name, suite_dot_toml=more, fixtures__one_dot_toml=f'input = "{text}"\n',
            b_dot_json=json.dumps(SCHEMA),
        )  # fmt: skip
        return load_suite(str(folder)).sha256

    plain = made("plain", "", "go")
    assert plain == made("again", "", "go")
    assert plain != (made("other", "", "went") if change == "fixture" else made("other", change, "go"))


def test_a_suite_that_cannot_be_used_says_all_that_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(
        RequestError, match=r"is neither a folder with a suite.toml, nor a .jsonl file, nor one of mac-"
    ):
        load_suite("no-such-suite")
    folder = write(
        tmp_path / "a", suite_dot_toml="sistem = 'x'\n[sampling]\ntemperature = 0.5\nmax_tokens = 0\n",
        fixtures__one_dot_toml='input = "x"\n',
    )  # fmt: skip
    with pytest.raises(RequestError) as caught:
        load_suite(str(folder))
    for fault in ("sistem is not a known key", "max_tokens = 0", "temperature is above 0 without a seed"):
        assert fault in str(caught.value)
    folder = write(tmp_path / "b", suite_dot_toml="", fixtures__1_dot_toml="kind = 1", fixtures__2_dot_toml="input = '")
    with pytest.raises(RequestError, match=r"fixture 1: .*; .*2\.toml cannot be read"):
        load_suite(str(folder))
    with pytest.raises(RequestError, match=r"has neither fixtures/\*\.toml nor fixtures\.jsonl"):
        load_suite(str(write(tmp_path / "c", suite_dot_toml="")))
    rows = '{"name": "a", "prompt": "x", "expect": "y"}\n'
    with pytest.raises(RequestError, match="there are several fixtures a"):
        load_suite(str(write(tmp_path / "d", suite_dot_toml="", fixtures_dot_jsonl=rows * 2)))
    with pytest.raises(RequestError, match=r"cannot be read: line 1: .*; line 2: a row of JSONL needs"):
        load_suite(str(write(tmp_path / "e", x_dot_jsonl="nothing\n{}\n") / "x.jsonl"))
    bad = write(
        tmp_path / "f", suite_dot_toml="schema = 's.json'", s_dot_json='{"type": "banana"}', fixtures_dot_jsonl=rows
    )
    with pytest.raises(RequestError, match=r"the schema .*s\.json cannot be used"):
        load_suite(str(bad))


def test_splits(tmp_path: Path) -> None:
    rows = '{"prompt": "x", "expect": "y", "split": "gate"}\n{"prompt": "z", "expect": "y"}\n'
    suite = load_suite(str(write(tmp_path, x_dot_jsonl=rows) / "x.jsonl"))
    assert [len(suite.of_split(s)) for s in ("all", "gate")] == [2, 1]
    with pytest.raises(RequestError, match="--split half is not known: use all, gate, trace"):
        suite.of_split("half")
    with pytest.raises(RequestError, match="has no fixture of the split trace"):
        suite.of_split("trace")


def test_what_is_shipped_can_be_loaded() -> None:
    assert shipped() == ["mac-actions"]
    assert load_suite("mac-actions").schema is not None
