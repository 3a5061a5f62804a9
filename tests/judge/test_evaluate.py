"""Evaluation: answers of a chain and of the original, kept on disk; pass rates; what may be compared."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from anechain.errors import RequestError
from anechain.judge.answers import Answer, AnswerFile, ChainAnswerer, OracleAnswerer, collect, shared_chunks
from anechain.judge.evaluate import Evaluation, compare, evaluate, junit, traces
from anechain.judge.fixtures import Fixture
from anechain.judge.suite import Suite
from anechain.run.chain import Chain
from anechain.run.reference import ReferenceEngine
from tests.bundle_maker import make_bundle, tiny_source
from tests.judge.self_suite import self_suite, write_suite

SOURCE = tiny_source("llama")


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return Chain(make_bundle(SOURCE, tmp_path_factory.mktemp("b") / "fp16", "fp16", 96, 32), ReferenceEngine())


@pytest.fixture(scope="module")
def suite(chain: Chain, tmp_path_factory: pytest.TempPathFactory) -> Suite:
    return self_suite(chain.bundle, tmp_path_factory.mktemp("s"), 12)


@dataclass
class Scripted:
    """Says `says` of a fixture's name; counts what it was asked."""

    says: dict[str, str]
    identity: dict[str, Any] = field(
        default_factory=lambda: {
            "suite": "self", "suite_sha256": "1" * 64, "prompts_sha256": "2" * 64, "engine": "scripted", "machine": {},
            "tools": {}, "model": "m",
        }
    )  # fmt: skip
    asked: list[str] = field(default_factory=list)
    breaks_at: str = ""

    def answers(self, fixtures: Sequence[Fixture]) -> Iterator[Answer]:
        for fixture in fixtures:
            if fixture.name == self.breaks_at:
                raise KeyboardInterrupt
            self.asked.append(fixture.name)
            yield Answer(self.says.get(fixture.name, "{}"), 3, "stop", 10.0, 20.0)


def right(suite: Suite) -> dict[str, str]:
    return {f.name: f.text.contains[0] for f in suite.fixtures}


def scripted(suite: Suite, wrong: Sequence[str] = (), **changes: Any) -> Evaluation:
    answerer = Scripted(right(suite) | dict.fromkeys(wrong, '"zzzz"'))
    answerer.identity |= changes
    return evaluate(suite, "all", answerer)


def test_a_bundle_says_what_it_said(chain: Chain, suite: Suite) -> None:
    found = evaluate(suite, "all", ChainAnswerer(suite, chain))
    assert found.rate == 1.0 and len(found.outcomes) == 12
    assert all(o.judgement.valid and o.answer.finish == "stop" and o.answer.tokens == 6 for o in found.outcomes)


def test_the_beginning_that_all_share_is_computed_once_and_changes_nothing(chain: Chain, suite: Suite) -> None:
    long = write_suite(suite.path.parent / "long", [{"prompt": f.input, "expect": "a", "name": f.name}
                       for f in suite.fixtures], system="s" * 40)  # fmt: skip
    reused, whole = (ChainAnswerer(long, chain, reuse).answers(long.fixtures) for reuse in (True, False))
    a, b = list(reused), list(whole)
    assert [x.text for x in a] == [x.text for x in b]
    assert {x.first_token_ms for x in a} == {None} and all(x.first_token_ms for x in b)
    assert shared_chunks([[1] * 40 + [2], [1] * 40 + [3]], 32) == 32
    assert shared_chunks([[1] * 33, [1] * 33], 32) == 32 and shared_chunks([[1] * 32, [1] * 32], 32) == 0
    assert shared_chunks([[1] * 40, [2] * 40], 32) == 0 == shared_chunks([[1] * 40] * 2, 0)


def test_the_original_answers_as_its_fp16_chain(chain: Chain, suite: Suite) -> None:
    """Several sequences side by side, in float32, and without packages: the same words."""
    original = evaluate(suite, "all", OracleAnswerer(suite, SOURCE, 96))
    candidate = evaluate(suite, "all", ChainAnswerer(suite, chain))
    comparison = compare(candidate, original, engines_may_differ=True)
    assert comparison.to_json()["same_answers"] >= 11 and comparison.pairs.lost <= 1
    with pytest.raises(RequestError, match=r"differ in the engine \(reference and oracle\)"):
        compare(candidate, original)


def test_what_does_not_fit_is_refused_before_any_work(chain: Chain, suite: Suite) -> None:
    with pytest.raises(RequestError, match=r"fixtures of self, first f00, do not fit with 80 tokens of answer"):
        ChainAnswerer(replace(suite, max_tokens=80), chain)
    with pytest.raises(RequestError, match="uniqueItems"):
        ChainAnswerer(replace(suite, schema={"type": "array", "uniqueItems": True}), chain)


def test_an_interrupted_run_goes_on_and_asks_nothing_twice(suite: Suite, tmp_path: Path) -> None:
    first = Scripted(right(suite), breaks_at="f05")
    kept = AnswerFile(tmp_path, first.identity)
    with pytest.raises(KeyboardInterrupt):
        collect(first, suite.fixtures, kept)
    assert first.asked == [f"f{i:02d}" for i in range(5)]
    with kept.path.open("a", encoding="utf-8") as stream:
        stream.write('{"name": "f05", "text": "cut of')  # as a kill leaves it
    second = Scripted(right(suite))
    steps: list[tuple[int, int]] = []
    answers = collect(second, suite.fixtures, AnswerFile(tmp_path, second.identity), lambda d, t: steps.append((d, t)))
    assert second.asked == [f"f{i:02d}" for i in range(5, 12)] and steps[0] == (6, 12) and steps[-1] == (12, 12)
    assert answers == list(Scripted(right(suite)).answers(suite.fixtures))
    third = Scripted(right(suite))
    assert collect(third, suite.fixtures, AnswerFile(tmp_path, third.identity)) == answers and not third.asked
    other = Scripted({}, identity=third.identity | {"model": "another"})
    collect(other, suite.fixtures, AnswerFile(tmp_path, other.identity))
    assert len(other.asked) == 12
    moved = AnswerFile(tmp_path, other.identity)
    moved.path.write_bytes(kept.path.read_bytes())  # the answers of one under the name of another
    assert kept.read() and not moved.read()


def test_rates_by_kind_and_wording(suite: Suite) -> None:
    found = scripted(suite, ["f00", "f01", "f02"])
    record = found.to_json()
    assert (record["passed"], record["n"], record["fixture_pp"]) == (9, 12, pytest.approx(100 / 12))
    groups = {g["name"]: (g["passed"], g["n"]) for g in record["groups"]}
    assert groups["do"] == (4, 6) and groups["ask"] == (5, 6) and groups["new"] == (4, 6)
    assert groups["do, old"] == (2, 3) and len(groups) == 8
    assert record["interval"][0] < 0.75 < record["interval"][1]
    assert found.sha256 == scripted(suite, ["f00", "f01", "f02"]).sha256 != scripted(suite, ["f00", "f01"]).sha256


class Cut(Scripted):
    """What it says is whole, and yet it was stopped by the limit."""

    def answers(self, fixtures: Sequence[Fixture]) -> Iterator[Answer]:
        return (replace(a, finish="length") for a in super().answers(fixtures))


def test_an_answer_that_was_cut_off_fails(suite: Suite) -> None:
    found = evaluate(suite, "all", Cut(right(suite)))
    assert found.rate == 0 and found.outcomes[0].judgement.faults == ("the answer was cut off at 16 tokens",)
    assert traces(evaluate(suite, "trace", Cut(right(suite))))["valid"] == 0


def test_what_is_thought_before_the_answer_is_not_judged(suite: Suite) -> None:
    thinking = {name: f'<think>"a"?</think>{text}' for name, text in right(suite).items()}
    assert evaluate(suite, "all", Scripted(thinking)).rate == 1.0


def test_pairs_and_their_answers(suite: Suite) -> None:
    comparison = compare(scripted(suite, ["f00", "f01", "f02"]), scripted(suite, ["f02", "f03"]))
    record = comparison.to_json()
    assert [record[k] for k in ("both", "gained", "lost", "neither")] == [8, 1, 2, 1]
    assert comparison.loss_pp == pytest.approx(100 / 12) == -record["difference_pp"]
    assert record["interval_pp"][0] < record["difference_pp"] < record["interval_pp"][1]
    assert [(p["candidate"]["name"], p["candidate"]["passed"]) for p in record["discordant"]] == [
        ("f00", False), ("f01", False), ("f03", True)
    ]  # fmt: skip
    assert record["discordant"][0]["candidate"]["text"] != record["discordant"][0]["other"]["text"]
    assert record["same_answers"] == 9 and record["mcnemar_p"] == 1.0


@pytest.mark.parametrize(
    ("key", "what"),
    [("suite_sha256", "the suite"), ("prompts_sha256", "the prompts"), ("engine", "the engine"),
     ("machine", "the machine"), ("tools", "the versions of the tools")],
)  # fmt: skip
def test_what_was_not_made_alike_is_not_compared(suite: Suite, key: str, what: str) -> None:
    with pytest.raises(RequestError, match=f"cannot be compared: they differ in {what} "):
        compare(scripted(suite), scripted(suite, **{key: "other"}))


def test_other_fixtures_are_not_compared(suite: Suite) -> None:
    other = evaluate(replace(suite, fixtures=suite.fixtures[:-1]), "all", Scripted(right(suite)))
    with pytest.raises(RequestError, match="differ in the fixtures"):
        compare(scripted(suite), other)
    with pytest.raises(RequestError, match=r"differ in the split \(all and gate\)"):
        compare(scripted(suite), evaluate(suite, "gate", Scripted(right(suite))))


def test_traces_look_at_form_and_time_alone(suite: Suite) -> None:
    said = dict.fromkeys(right(suite), '"pppp"') | {"f01": "no", "f02": '"ppp?"'}
    record = traces(evaluate(suite, "trace", Scripted(said)))
    assert (record["n"], record["valid"]) == (9, 7) and [b["name"] for b in record["broken"]] == ["f01", "f02"]
    assert record["first_token_ms"] == {"median": 10.0, "p95": 10.0} and record["answer_ms"]["median"] == 30.0
    assert record["decode_tok_per_s"] == pytest.approx(100.0)


def test_junit_is_xml_whatever_a_model_says(suite: Suite) -> None:
    answerer = Scripted(right(suite) | {"f03": 'a\x00b<&"'})
    root = ElementTree.fromstring(junit(evaluate(suite, "all", answerer)).encode())
    cases = root.findall("./testsuite/testcase")
    assert len(cases) == 12 and root.find("testsuite").get("failures") == "1"  # type: ignore[union-attr]
    failed = [c for c in cases if c.find("failure") is not None]
    assert [c.get("name") for c in failed] == ["f03"] and 'a\ufffdb<&"' in str(failed[0].find("failure").text)  # type: ignore[union-attr]
