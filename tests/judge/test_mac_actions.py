"""The suite mac-actions: what it promises, and that the specialist's training data holds nothing of it."""

import hashlib
import importlib.util
import json
import re
import sys
from collections import Counter
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from types import ModuleType

import jsonschema
import pytest

from anechain.judge.fixtures import Fixture, judge
from anechain.judge.suite import load_suite

EXAMPLE = Path(__file__).parents[2] / "examples/specialist"
KINDS = {"do-it", "ambiguous", "destructive", "out-of-scope", "plain-talk"}
TRAINED_ROWS = 12_000  # several times what a training run uses
SUITE = load_suite("mac-actions")


@pytest.fixture(scope="module")
def made() -> ModuleType:
    """examples/specialist/data.py, whose neighbours are imported by their plain names."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        spec = importlib.util.spec_from_file_location("specialist_data", EXAMPLE / "data.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["specialist_data"] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(EXAMPLE))


def test_five_kinds_in_two_wordings_and_two_splits() -> None:
    assert len(SUITE.fixtures) >= 150
    counts = Counter((f.kind, f.wording) for f in SUITE.fixtures)
    assert set(counts) == {(kind, wording) for kind in KINDS for wording in ("train-like", "held-out")}
    assert min(counts.values()) >= 15
    assert Counter(f.split for f in SUITE.fixtures) == {"gate": 50, "trace": 100}
    for split in ("gate", "trace"):
        assert len({(f.kind, f.wording) for f in SUITE.of_split(split)}) == 10
    assert len({f.input.casefold() for f in SUITE.fixtures}) == len(SUITE.fixtures)


def test_every_fixture_can_be_passed_and_failed(made: ModuleType) -> None:
    """By an answer that keeps to the schema, which is what constrained decoding guarantees."""
    said = {row.kind: row.answer for row in made.rows(0, 200)}
    for fixture in SUITE.fixtures:
        wanted = {name: check.equals for name, check in fixture.fields.items() if check.has_equals}
        say = "I can't. Really?" if "?" in fixture.fields["say"].matches else "I can't."
        answer = {"target": "", "say": say, **wanted}
        assert judge(fixture, made.json.dumps(answer), SUITE.schema).passed, fixture.name
        for field in fixture.fields:
            other = {"action": "turn_on", "target": "x", "confirm": not wanted["confirm"], "say": "no " * 40}[field]
            other = "take_screenshot" if other == answer[field] else other
            assert not judge(fixture, made.json.dumps(answer | {field: other}), SUITE.schema).passed
        elsewhere = next(a for kind, a in said.items() if kind != fixture.kind)
        assert not judge(fixture, elsewhere, SUITE.schema).passed, fixture.name


def test_what_the_specialist_is_taught_keeps_to_the_schema(made: ModuleType) -> None:
    validator, actions = jsonschema.Draft202012Validator(SUITE.schema), set()
    for said in {row.answer for row in made.rows(0, 1000)}:
        answer = made.json.loads(said)
        assert validator.is_valid(answer), said
        actions.add(answer["action"])
    assert actions == set(SUITE.schema["properties"]["action"]["enum"])  # type: ignore[index]
    assert made.system_prompt() == SUITE.system


def words(text: str) -> str:
    """Small letters, without punctuation at the ends of words."""
    return " ".join(re.sub(r"[^\w{}'+.-]+", " ", re.sub(r"[.?!,:]+(?=\s|$)", " ", text.casefold())).split())


class Masks:
    """Texts whose values (names of programs, files, numbers ...) are all the same `{}`."""

    def __init__(self, made: ModuleType, fixtures: tuple[Fixture, ...]) -> None:
        values = {value.casefold() for listed in made.VALUES.values() for value in listed}
        values |= {str(f.fields["target"].equals).casefold() for f in fixtures if "target" in f.fields}
        longest = sorted(values - {""}, key=len, reverse=True)
        self._values = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest))})(?!\w)")

    def __call__(self, text: str) -> str:
        return words(self._values.sub("{}", re.sub(r"\{\w*\}", "{}", text.casefold())))


def test_the_training_data_holds_no_fixture_by_text_or_by_template(made: ModuleType) -> None:
    masked = Masks(made, SUITE.fixtures)
    texts = {words(row.text) for seed in (0, 1) for row in made.rows(seed, TRAINED_ROWS)}
    known, masked_parts = made.templates(), cache(masked)

    def whole(template: str) -> str:
        """`masked`, which takes long, of the few frames' halves and cores instead of every pair of them."""
        return " ".join(filter(None, map(masked_parts, known[template])))

    templates = set(map(whole, known))
    assert len(texts) > 5000 and len(templates) > 5000
    assert not [f.name for f in SUITE.fixtures if words(f.input) in texts]
    assert not [f.name for f in SUITE.fixtures if masked(f.input) in templates]
    # Every row comes from a template of the list that was just compared, and the comparison can find one.
    for row in made.rows(0, 500):
        assert row.template in known and masked(row.template) == whole(row.template)
    assert words("Please open Safari!") == "please open safari" and masked("Please OPEN Safari!") in templates


def test_train_like_fixtures_use_trained_words_in_new_frames_and_held_out_ones_do_not(made: ModuleType) -> None:
    masked = Masks(made, SUITE.fixtures)
    cores = {kind: {masked(core) for core in listed} for kind, listed in made.cores().items()}
    assert set(cores) == KINDS
    for fixture in SUITE.fixtures:
        text = masked(fixture.input)
        found = [core for core in cores[fixture.kind] if f" {core} " in f" {text} "]
        assert bool(found) == (fixture.wording == "train-like"), (fixture.name, text, found)


def test_the_same_seed_makes_the_same_rows(made: ModuleType) -> None:
    assert made.rows(5, 300) == made.rows(5, 300) != made.rows(6, 300)


def test_the_adapter_is_what_its_record_says_and_was_trained_on_these_rows(made: ModuleType) -> None:
    adapter = EXAMPLE / "adapter"
    record = made.json.loads((adapter / "training.json").read_text(encoding="utf-8"))
    weights = (adapter / "adapter_model.safetensors").read_bytes()
    assert len(weights) == record["adapter_bytes"] < 4_000_000
    assert hashlib.sha256(weights).hexdigest() == record["adapter_sha256"]
    rows = made.rows(record["seed"], record["rows"])
    kept = {row.template for row in made.rows(0, 2000, validation=True)}
    assert len(kept) > 200 and not kept & {row.template for row in rows}
    text = "\n".join(f"{row.text}\t{row.answer}" for row in rows)
    assert hashlib.sha256(text.encode()).hexdigest() == record["data_sha256"]
    assert record["cpu_s"] < 30 * 60


def resemblance(masked: Masks, fixture: Fixture, cores: dict[str, set[str]]) -> float:
    """Of a request and the trained wording of its kind that is most like it: 2 x words in common, in order, / words."""
    mine = masked(fixture.input).split()
    return max(SequenceMatcher(None, mine, masked(core).split()).ratio() for core in cores[fixture.kind])


def test_the_figures_are_of_this_suite_and_say_what_was_asked_for(made: ModuleType) -> None:
    """Judged anew from the answers that are kept: the base fails most held-out fixtures, the specialist few, and no
    more of those that nothing in the training data resembles."""
    figures = json.loads((EXAMPLE / "figures.json").read_text(encoding="utf-8"))
    assert figures["suite_sha256"] == SUITE.sha256 and len(figures["answers"]) == len(SUITE.fixtures)
    held_out = [f for f in SUITE.fixtures if f.wording == "held-out"]
    passed = {f.name: judge(f, figures["answers"][f.name], SUITE.schema).passed for f in held_out}
    counted = figures["specialist, schema"]["held-out"]
    assert (sum(passed.values()), len(passed)) == (counted["passed"], counted["n"])
    assert counted["rate"] >= 0.8 and figures["base, schema"]["held-out"]["rate"] < 0.5
    masked, cores = Masks(made, SUITE.fixtures), made.cores()
    unlike = [passed[f.name] for f in held_out if resemblance(masked, f, cores) < 0.7]
    assert len(unlike) > 60 and sum(unlike) >= 0.8 * len(unlike)
