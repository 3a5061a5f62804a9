"""Whether an answer does what a fixture expects. It knows texts and schemas and nothing of bundles or models."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jsonschema

from anechain.errors import RequestError

OPTIONS = ("equals", "one_of", "matches", "contains", "max_words", "ignore_case")
KEYS = ("name", "input", "kind", "wording", "split", "fields", "text")


@dataclass(frozen=True)
class Check:
    """What one value has to be; every option that is given counts, and `ignore_case` goes with all of them.

    `equals` and `one_of` compare whole JSON values: true is not 1. `matches` is a regular expression that is searched,
    `contains` lists texts that must all occur, `max_words` counts what white space separates.
    """

    equals: Any = None
    one_of: tuple[Any, ...] = ()
    matches: str = ""
    contains: tuple[str, ...] = ()
    max_words: int | None = None
    ignore_case: bool = False
    has_equals: bool = False

    def fault(self, value: Any) -> str:
        """What is wrong with `value`, "" if nothing is."""
        fold = (lambda x: x.casefold() if isinstance(x, str) else x) if self.ignore_case else (lambda x: x)
        if self.has_equals and not _same(fold(value), fold(self.equals)):
            return f"is {_short(value)} instead of {_short(self.equals)}"
        if self.one_of and not any(_same(fold(value), fold(wanted)) for wanted in self.one_of):
            return f"is {_short(value)} and none of {', '.join(map(_short, self.one_of))}"
        if not (self.matches or self.contains or self.max_words is not None):
            return ""
        if not isinstance(value, str):
            return f"is {_short(value)} instead of a text"
        if self.matches and not re.search(self.matches, value, re.IGNORECASE if self.ignore_case else 0):
            return f"is {_short(value)}, which does not match {self.matches}"
        if missing := [text for text in self.contains if fold(text) not in fold(value)]:
            return f"is {_short(value)}, which lacks {', '.join(map(_short, missing))}"
        if self.max_words is not None and (words := len(value.split())) > self.max_words:
            return f"has {words} words, more than {self.max_words}"
        return ""


@dataclass(frozen=True)
class Fixture:
    """One request and what its answer has to be: `fields` of the JSON object, `text` of the answer as a whole."""

    name: str
    input: str
    kind: str = ""
    wording: str = ""
    split: str = ""
    fields: Mapping[str, Check] = field(default_factory=dict)
    text: Check = field(default_factory=Check)


@dataclass(frozen=True)
class Judgement:
    """`valid` says whether the answer is JSON under the schema (None where the suite has none); `faults` is empty when
    all checks hold."""

    valid: bool | None
    faults: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.faults


def judge(fixture: Fixture, answer: str, schema: Mapping[str, Any] | None) -> Judgement:
    """Holds `answer` against the schema and all checks of `fixture`."""
    faults: list[str] = []
    parsed, valid = None, None
    if schema is not None or fixture.fields:
        parsed, fault = _parsed(answer, schema)
        faults += [fault] if fault else []
        valid = not fault if schema is not None else None
    if not faults:
        for name, check in fixture.fields.items():
            if not isinstance(parsed, dict) or name not in parsed:
                faults.append(f"{name} is missing")
            elif fault := check.fault(parsed[name]):
                faults.append(f"{name} {fault}")
    if fault := fixture.text.fault(answer):
        faults.append(f"the answer {fault}")
    return Judgement(valid, tuple(faults))


def fixture_of(row: Mapping[str, Any], name: str, common: Mapping[str, Any] | None = None) -> Fixture:
    """A fixture from plain data: a TOML file of a suite, or a converted row of JSONL.

    `common` holds `fields` and `text` that every fixture of the suite is checked for; a fixture's own check of a field
    replaces the suite's. Raises RequestError, naming all offenders.
    """
    faults = [f"{key} is not a known key" for key in row if key not in KEYS]
    given = row.get("name", name)
    for key in ("input", "kind", "wording", "split"):
        if not isinstance(row.get(key, ""), str):
            faults.append(f"{key} is not a text")
    if not isinstance(given, str) or not given:
        faults.append("name is not a text")
    if not row.get("input"):
        faults.append("input is missing")
    fields = {**_table((common or {}).get("fields"), "fields", faults), **_table(row.get("fields"), "fields", faults)}
    text = {**_table((common or {}).get("text"), "text", faults), **_table(row.get("text"), "text", faults)}
    checks = {field: check_of(options, f"fields.{field}", faults) for field, options in fields.items()}
    whole = check_of(text, "text", faults) if text else Check()
    if faults:
        raise RequestError(f"fixture {name}: {'; '.join(dict.fromkeys(faults))}; see docs/eval.md.")
    words = {key: row.get(key, "") for key in ("kind", "wording", "split")}
    return Fixture(given, row["input"], **words, fields=checks, text=whole)


def check_of(options: Any, where: str, faults: list[str]) -> Check:
    """A Check from plain data; what is wrong with it is added to `faults`."""
    if not isinstance(options, dict) or not set(options) & set(OPTIONS[:-1]):
        faults.append(f"{where} gives none of {', '.join(OPTIONS[:-1])}")
        return Check()
    before = len(faults)
    faults += [f"{where}.{key} is not a known check" for key in options if key not in OPTIONS]
    contains = options.get("contains", ())
    contains = [contains] if isinstance(contains, str) else contains
    for key, right in (
        ("one_of", isinstance(options.get("one_of", []), list) and options.get("one_of") != []),
        ("contains", isinstance(contains, list | tuple) and all(isinstance(c, str) for c in contains)),
        ("matches", isinstance(options.get("matches", ""), str) and _compiles(options.get("matches", ""))),
        ("max_words", type(options.get("max_words", 0)) is int and options.get("max_words", 0) >= 0),
        ("ignore_case", type(options.get("ignore_case", False)) is bool),
    ):
        if not right:
            faults.append(f"{where}.{key} = {options.get(key)!r} cannot be used")
    if len(faults) > before:
        return Check()
    return Check(
        options.get("equals"), tuple(options.get("one_of", ())), options.get("matches", ""), tuple(contains),
        options.get("max_words"), options.get("ignore_case", False), "equals" in options,
    )  # fmt: skip


def row_to_fixture(row: Mapping[str, Any]) -> dict[str, Any]:
    """The one converter for JSONL: `{"prompt": ..., "expect": ...}` to what a fixture's TOML file holds.

    `expect` is a text that the answer has to contain, a list of texts that it has to contain, or an object: its keys
    are fields of the JSON answer, a plain value is what the field has to equal, an object gives checks. `name`, `kind`,
    `wording`, `split` and `text` are taken over as they are. Raises RequestError for a row without a prompt or
    expectations.
    """
    expect = row.get("expect")
    if not isinstance(row.get("prompt"), str) or expect is None:
        raise RequestError(
            f"a row of JSONL needs `prompt` and `expect`, and this one has {', '.join(row) or 'nothing'}."
        )
    kept = {key: value for key, value in row.items() if key not in ("prompt", "expect")} | {"input": row["prompt"]}
    if isinstance(expect, dict):
        kept["fields"] = {key: value if isinstance(value, dict) else {"equals": value} for key, value in expect.items()}
    else:
        text = row.get("text", {})
        kept["text"] = {**text, "contains": expect} if isinstance(text, dict) else text  # which fixture_of refuses
    return kept


def _table(value: Any, name: str, faults: list[str]) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        faults.append(f"{name} is not a table")
        return {}
    return value or {}


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def _parsed(answer: str, schema: Mapping[str, Any] | None) -> tuple[Any, str]:
    """The answer as JSON, or what keeps it from being that under the schema."""
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError) as error:
        return None, f"the answer is not JSON ({error})"
    if schema is not None:
        validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
        if error := jsonschema.exceptions.best_match(validator.iter_errors(value)):
            return None, f"the answer breaks the schema at {error.json_path}: {' '.join(error.message.split())[:200]}"
    return value, ""


def _same(a: Any, b: Any) -> bool:
    """Equality of JSON values, in which true is not 1 and 1 is 1.0."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return bool(a == b)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
