"""What a verdict says of the ANE: nothing without a record, and no SHIP with one that leaves a question open."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anechain.bundle.manifest import Bundle
from anechain.judge.ane import AneAnswer, ane_answer, engine_share, trial_of
from anechain.judge.measured import configuration_of
from anechain.judge.record import Device, GateFigures, Record, Trial, read_record, write_record
from tests.bundle_maker import make_bundle, tiny_source

LIMITS = {"min_share": 0.9, "min_speed_ratio": 1.5}
PASS = GateFigures("pass", "m8", "coreml", 0.9999, 1e-5, 1e-4, 1.0, 40)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Bundle]:
    folder = tmp_path_factory.mktemp("b")
    made = (
        make_bundle(tiny_source("llama"), folder / f"{n}layers", cuts=cuts) for n, cuts in ((3, [3]), (1, [1, 1, 1]))
    )
    candidate, base = made
    return candidate, base


def plan(share: float) -> Mapping[str, Mapping[str, Mapping[str, Device]]]:
    ops = {"conv": Device("NE", share), "softmax": Device("CPU", 1 - share), "w": Device(None)}
    return {"block-000.mlpackage": {"decode": ops}}


def trial(bundle: Bundle, speed: float = 1.0, share: float = 0.95, **changes: Any) -> Trial:
    bench = {"first_token_ms": 100.0, "decode_tok_per_s": 40.0 * speed}
    form = replace(configuration_of(bundle), model="tensors")
    return replace(Trial(form, gate=PASS, handoff="zero-copy", bench=bench, plan=plan(share)), **changes)


def answered(
    bundles: tuple[Bundle, Bundle], mine: Trial | None, theirs: Trial | None = None, **changes: Any
) -> AneAnswer:
    candidate, base = bundles
    trials = tuple(t for t in (mine, theirs or trial(base)) if t is not None)
    record = Record("macOS 26.0.1", "M5 Pro", "Mac17,3", candidate.tools["coremltools"], "0.1", "coreml", trials)
    return ane_answer(candidate, base, replace(record, **changes), (), LIMITS)


def test_without_a_record_nothing_is_said(bundles: tuple[Bundle, Bundle]) -> None:
    assert ane_answer(*bundles, None, (), LIMITS) == AneAnswer() and AneAnswer().title == "not measured"


def test_a_record_of_both_forms_ships(bundles: tuple[Bundle, Bundle], tmp_path: Path) -> None:
    answer = answered(bundles, trial(bundles[0], 2.0))
    assert (answer.title, answer.reasons) == ("SHIP (ane, macOS 26.0.1, M5 Pro)", ())
    assert answer.figures["speed_ratio"] == pytest.approx(2.0)
    assert answer.figures["engine_share"] == pytest.approx(0.95)
    record = Record("macOS 26.0.1", "M5 Pro", "Mac17,3", bundles[0].tools["coremltools"], "0.1", "coreml",
                    (trial(bundles[0], 2.0), trial(bundles[1])))  # fmt: skip
    write_record(record, tmp_path / "r.zip")  # and it survives being written and read
    assert ane_answer(*bundles, read_record(tmp_path / "r.zip"), (), LIMITS).title == answer.title


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"speed": 1.4}, "speed there is 1.40x, below 1.5x"),
        ({"share": 0.85}, "85.0% of the plan's cost is on the ANE, less than 90%"),
        ({"plan": {}}, "the record has no compute plan of the form"),
        ({"gate": None}, "the form did not pass the gate there"),
        ({"gate": replace(PASS, verdict="fail")}, "the form did not pass the gate there"),
        ({"diverged": "cosine 0.3"}, "the form diverged there: cosine 0.3"),
        ({"bench": {"first_token_ms": 100.0}}, "the record has no decode_tok_per_s of 3layers's form"),
        ({"bench": {"first_token_ms": None, "decode_tok_per_s": 0.0}}, "has no first_token_ms, decode_tok_per_s of"),
    ],
)
def test_a_record_that_leaves_a_question_open_does_not_ship(
    bundles: tuple[Bundle, Bundle], change: dict[str, Any], said: str
) -> None:
    answer = answered(bundles, trial(bundles[0], **({"speed": 2.0} | change)))
    assert answer.title == "REVERT (ane, macOS 26.0.1, M5 Pro)" and any(said in r for r in answer.reasons), answer


def test_trials_of_something_else_say_nothing(bundles: tuple[Bundle, Bundle]) -> None:
    mine = trial(bundles[0], 2.0)
    for other in (
        replace(mine, configuration=replace(mine.configuration, recipe="int8")),
        replace(mine, configuration=replace(mine.configuration, model="demo")),
        replace(mine, configuration=replace(mine.configuration, context=128)),
    ):
        assert "has no trial of 3layers's form" in answered(bundles, other).reasons[0]
    assert len(answered(bundles, mine, coremltools="8.3").reasons) == 2
    assert "no trial of 1layers's" in answered(bundles, mine, replace(mine, bench={})).reasons[0]


def test_one_that_diverged_outweighs_one_that_did_not(bundles: tuple[Bundle, Bundle]) -> None:
    good = trial(bundles[0], 2.0)
    record = Record("macOS 26.0.1", "M5 Pro", "Mac17,3", bundles[0].tools["coremltools"], "0.1", "coreml",
                    (good, replace(good, diverged="NaN"), trial(bundles[1])))  # fmt: skip
    assert trial_of(record, bundles[0]).diverged == "NaN"  # type: ignore[union-attr]


def test_a_part_that_failed_here_is_not_overruled_there(bundles: tuple[Bundle, Bundle]) -> None:
    record = Record("macOS 26.0.1", "M5 Pro", "Mac17,3", bundles[0].tools["coremltools"], "0.1", "coreml",
                    (trial(bundles[0], 2.0), trial(bundles[1])))  # fmt: skip
    answer = ane_answer(*bundles, record, ("fixtures",), LIMITS)
    assert answer.title.startswith("REVERT") and answer.reasons == ("fixtures failed",)


def test_the_share_is_weighted_by_cost() -> None:
    assert engine_share(Trial(configuration=None, plan=plan(0.25))) == pytest.approx(0.25)  # type: ignore[arg-type]
    assert engine_share(Trial(configuration=None)) is None  # type: ignore[arg-type]
