"""Pass rates of a suite, and what can be said of two of them that were judged on the same fixtures."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any
from xml.etree import ElementTree

from anechain.errors import RequestError
from anechain.judge.answers import Answer, Answerer, AnswerFile, Progress, collect
from anechain.judge.fixtures import Fixture, Judgement, judge
from anechain.judge.paired import CONFIDENCE, Interval, Pairs, mcnemar, paired_interval, pairs_of, wilson
from anechain.judge.suite import Suite
from anechain.run.chat import THINK_END

# What two evaluations must share to be compared, and how a person calls it.
SHARED = {
    "suite_sha256": "the suite", "split": "the split", "prompts_sha256": "the prompts", "engine": "the engine",
    "machine": "the machine", "tools": "the versions of the tools",
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """One fixture, what was answered, and how that was judged."""

    fixture: Fixture
    answer: Answer
    judgement: Judgement

    @property
    def passed(self) -> bool:
        return self.judgement.passed

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.fixture.name, "kind": self.fixture.kind, "wording": self.fixture.wording,
            "split": self.fixture.split, "input": self.fixture.input, "passed": self.passed,
            "valid": self.judgement.valid, "faults": list(self.judgement.faults), **asdict(self.answer),
        }  # fmt: skip


@dataclass(frozen=True)
class Group:
    """The fixtures of one kind and wording."""

    name: str
    passed: int
    n: int

    @property
    def rate(self) -> float:
        return self.passed / self.n

    @property
    def interval(self) -> Interval:
        return wilson(self.passed, self.n)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name, "passed": self.passed, "n": self.n, "rate": self.rate,
            "interval": [self.interval.low, self.interval.high],
        }  # fmt: skip


@dataclass(frozen=True)
class Evaluation:
    """All outcomes of one model on one split of one suite. `identity` is everything that decided them."""

    identity: Mapping[str, Any]
    outcomes: tuple[Outcome, ...]

    @property
    def total(self) -> Group:
        return _group("all", self.outcomes)

    @property
    def rate(self) -> float:
        return self.total.rate

    @property
    def sha256(self) -> str:
        """Of the identity and of every answer and judgement."""
        said = [[o.fixture.name, o.answer.text, o.answer.finish, list(o.judgement.faults)] for o in self.outcomes]
        return hashlib.sha256(json.dumps([self.identity, said], sort_keys=True).encode()).hexdigest()

    def groups(self) -> list[Group]:
        """A group for each kind, each wording, and each kind in each wording, in the order of their names."""
        kinds = sorted({o.fixture.kind for o in self.outcomes} - {""})
        wordings = sorted({o.fixture.wording for o in self.outcomes} - {""})
        chosen = [(kind, [o for o in self.outcomes if o.fixture.kind == kind]) for kind in kinds]
        chosen += [(wording, [o for o in self.outcomes if o.fixture.wording == wording]) for wording in wordings]
        for kind in kinds:
            for wording in wordings:
                both = [o for o in self.outcomes if (o.fixture.kind, o.fixture.wording) == (kind, wording)]
                chosen.append((f"{kind}, {wording}", both))
        return [_group(name, outcomes) for name, outcomes in chosen if outcomes]

    def to_json(self) -> dict[str, Any]:
        return {
            **self.total.to_json(), "confidence": CONFIDENCE, "fixture_pp": 100 / len(self.outcomes),
            "groups": [g.to_json() for g in self.groups()], "identity": dict(self.identity), "sha256": self.sha256,
            "fixtures": [o.to_json() for o in self.outcomes],
        }  # fmt: skip


def _group(name: str, outcomes: Sequence[Outcome]) -> Group:
    return Group(name, sum(o.passed for o in outcomes), len(outcomes))


def evaluate(
    suite: Suite,
    split: str,
    answerer: Answerer,
    kept: AnswerFile | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Asks for every fixture of `split` and judges the answers. What is in `kept` is judged anew, not asked again."""
    fixtures = suite.of_split(split)
    answers = collect(answerer, fixtures, kept, progress)
    outcomes = [Outcome(f, a, _judge(f, a, suite)) for f, a in zip(fixtures, answers, strict=True)]
    return Evaluation({**answerer.identity, "split": split}, tuple(outcomes))


def _judge(fixture: Fixture, answer: Answer, suite: Suite) -> Judgement:
    """An answer that was cut off is at fault even if what there is of it would do."""
    said = answer.text.rpartition(THINK_END)[2]  # what a model that thinks aloud says after that
    judgement = judge(fixture, said, suite.schema)
    if answer.finish == "length":
        cut = f"the answer was cut off at {suite.max_tokens} tokens"
        return Judgement(judgement.valid, (cut, *judgement.faults))
    return judgement


@dataclass(frozen=True)
class Comparison:
    """Two evaluations of the same fixtures, `candidate` against `other`."""

    candidate: Evaluation
    other: Evaluation
    pairs: Pairs

    @property
    def loss_pp(self) -> float:
        """By how many percentage points the candidate passes less; negative when it passes more."""
        return -100 * self.pairs.difference

    def discordant(self) -> Iterator[tuple[Outcome, Outcome]]:
        """The fixtures that one of the two passed: (the candidate's outcome, the other's)."""
        for mine, theirs in zip(self.candidate.outcomes, self.other.outcomes, strict=True):
            if mine.passed != theirs.passed:
                yield mine, theirs

    def to_json(self) -> dict[str, Any]:
        interval = paired_interval(self.pairs)
        return {
            "other": self.other.to_json(), "both": self.pairs.both, "gained": self.pairs.gained,
            "lost": self.pairs.lost, "neither": self.pairs.neither, "mcnemar_p": mcnemar(self.pairs),
            "difference_pp": -self.loss_pp, "interval_pp": [100 * interval.low, 100 * interval.high],
            "confidence": CONFIDENCE, "fixture_pp": 100 / self.pairs.n,
            "same_answers": sum(
                a.answer.text == b.answer.text
                for a, b in zip(self.candidate.outcomes, self.other.outcomes, strict=True)
            ),
            "discordant": [{"candidate": a.to_json(), "other": b.to_json()} for a, b in self.discordant()],
        }  # fmt: skip


def compare(candidate: Evaluation, other: Evaluation, engines_may_differ: bool = False) -> Comparison:
    """Pairs two evaluations. Raises RequestError, naming all that differs, unless they were made alike; the original
    has an engine of its own, which is for the caller to allow."""
    differing = [
        f"{what} ({_told(candidate.identity.get(key))} and {_told(other.identity.get(key))})"
        for key, what in SHARED.items()
        if candidate.identity.get(key) != other.identity.get(key) and not (key == "engine" and engines_may_differ)
    ]
    if [o.fixture for o in candidate.outcomes] != [o.fixture for o in other.outcomes] and not differing:
        differing.append("the fixtures")
    if differing:
        raise RequestError(f"the two cannot be compared: they differ in {'; '.join(differing)}.")
    passed = [[o.passed for o in evaluation.outcomes] for evaluation in (candidate, other)]
    return Comparison(candidate, other, pairs_of(*passed))


def _told(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text[:12] if len(text) == 64 else text


def traces(evaluation: Evaluation) -> dict[str, Any]:
    """The smoke run: whether the answers are whole, valid JSON, and how long they took; no expectations.

    Times in ms: of the first token with the whole prompt, of a whole answer; median and 95th percentile.
    """
    outcomes = evaluation.outcomes
    sound = [o for o in outcomes if o.judgement.valid is not False and o.answer.finish == "stop"]
    broken = [o for o in outcomes if o not in sound]
    firsts = sorted(o.answer.first_token_ms for o in outcomes if o.answer.first_token_ms is not None)
    wholes = sorted(
        o.answer.first_token_ms + o.answer.rest_ms
        for o in outcomes
        if o.answer.first_token_ms is not None and o.answer.rest_ms is not None
    )
    rest_ms = sum(o.answer.rest_ms or 0.0 for o in outcomes)
    rest = sum(o.answer.tokens - 1 for o in outcomes)
    return {
        "n": len(outcomes), "valid": len(sound), "valid_rate": len(sound) / len(outcomes),
        "first_token_ms": _spread(firsts), "answer_ms": _spread(wholes),
        "decode_tok_per_s": 1e3 * rest / rest_ms if rest_ms else None,
        "broken": [o.to_json() for o in broken], "identity": dict(evaluation.identity),
    }  # fmt: skip


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median and 95th percentile (nearest rank) of sorted values."""
    if not values:
        return None
    return {"median": median(values), "p95": values[min(len(values) - 1, -(-95 * len(values) // 100) - 1)]}


def junit(evaluation: Evaluation) -> str:
    """The outcomes as JUnit XML, a test case for each fixture."""
    failed = sum(not o.passed for o in evaluation.outcomes)
    suite = ElementTree.Element(
        "testsuite", name=str(evaluation.identity["suite"]), tests=str(len(evaluation.outcomes)), failures=str(failed)
    )
    for outcome in evaluation.outcomes:
        seconds = ((outcome.answer.first_token_ms or 0.0) + (outcome.answer.rest_ms or 0.0)) / 1e3
        case = ElementTree.SubElement(
            suite, "testcase", classname=outcome.fixture.kind or "fixture", name=outcome.fixture.name,
            time=f"{seconds:.3f}",
        )  # fmt: skip
        if not outcome.passed:
            failure = ElementTree.SubElement(case, "failure", message=_xml("; ".join(outcome.judgement.faults)))
            failure.text = _xml(f"input: {outcome.fixture.input}\nanswer: {outcome.answer.text}")
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _xml(text: str) -> str:
    """Without the control characters that XML 1.0 has no way to write; a model may say anything."""
    return "".join(c if c in "\t\n\r" or (c >= " " and c not in "\ufffe\uffff") else "\ufffd" for c in text)
