"""The search: its ladder, its bisection, whom it asks, what it says and writes."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from anechain.bundle.footprint import footprint
from anechain.bundle.recipe import Calibration, Recipe, Rule, load_recipe, parse_recipe, parse_scheme
from anechain.bundle.spec import matrices_of
from anechain.judge import tune
from anechain.judge.tune import RANKS, Candidate, Tuned, bisect, climb, closest_of, make_ladder, verdict
from anechain.judge.tune_report import recipe_text, table, write_report
from tests.bundle_maker import SPECS
from tests.cli.outcome import Outcome, anechain, refusal  # noqa: F401

PLAIN = Recipe("plain", "fp16", (Rule("layers.*", parse_scheme("int8")),), calibration=Calibration(("gptq",)))
SPEC = SPECS["qwen3"]
BLOCKS = [name for name in matrices_of(SPEC) if name.startswith("layers.")]
HALVES = {name: {f"int8+rank{r}": share for r, share in ((8, 0.5), (16, 0.4), (32, 0.3))} for name in BLOCKS}


# -- the ladder --------------------------------------------------------------------------------------------------------


def test_bytes_go_where_they_save_most() -> None:
    sensitivity = dict.fromkeys(BLOCKS, 1e-6) | {"layers.1.v": 1e-3, "layers.0.down": 5e-4}
    ladder = make_ladder(SPEC, PLAIN, sensitivity, HALVES)
    assert ladder[0].rules == PLAIN.rules and len(ladder) > 2
    sizes = [footprint(SPEC, recipe) for recipe in ladder]
    assert [s.bytes for s in sizes] == sorted({s.bytes for s in sizes})
    assert all(s.eight_bit_share >= tune.EIGHT_BITS for s in sizes)
    chosen = [{r.pattern: r.scheme for r in recipe.rules[:-1]} for recipe in ladder]
    first = next(c for c in chosen if c)
    assert set(first) <= {"layers.1.v", "layers.0.down"} and "layers.1.v" in first
    for before, after in pairwise(chosen):
        assert set(before) <= set(after), "what was bought stays bought, or is bought better"
    for recipe in ladder:
        recipe.check(SPEC)


def test_a_correction_that_helps_nothing_is_skipped_for_fp16() -> None:
    alike = {name: {f"int8+rank{rank}": 1.0 for rank in RANKS} for name in BLOCKS}
    ladder = make_ladder(SPEC, PLAIN, dict.fromkeys(BLOCKS, 1e-4), alike)
    assert {str(r.scheme) for recipe in ladder for r in recipe.rules} == {"fp16", "int8"}


def test_a_table_for_some_rows_is_bought_first_and_keeps_the_channel_of_the_level() -> None:
    plain = replace(PLAIN, rules=(Rule("layers.*.o", parse_scheme("int8+rank1")), *PLAIN.rules))
    left = {name: {"int8+rank8": 0.9, "palette8-group16": 0.5, "palette8-group16+rank8": 0.45} for name in BLOCKS}
    ladder = make_ladder(SPEC, plain, dict.fromkeys(BLOCKS, 1e-4), left)
    schemes = {r.pattern: str(r.scheme) for r in ladder[-1].rules}
    tables = [name for name in BLOCKS if schemes.get(name, "").startswith("palette8-group16")]
    assert len(tables) > len(BLOCKS) / 3
    assert {schemes[name] for name in tables if name.endswith(".o")} <= {
        "palette8-group16+rank1", "palette8-group16+rank8",
    }  # fmt: skip
    assert any(name.endswith(".o") for name in tables)


def test_a_table_that_is_most_of_the_model_is_tried_at_8_bits() -> None:
    mostly = replace(SPECS["gemma3"], vocab_size=32768, hidden_size=512)
    tables = tune._tables(mostly)
    assert [(r.pattern, str(r.scheme)) for r in tables] == [(end, str(tune.TABLE)) for end in ("embed", "head")]
    rounded = replace(PLAIN, rules=(*tables, *PLAIN.rules))
    rounded.check(mostly)
    assert footprint(mostly, rounded).share < 0.65 < footprint(mostly, PLAIN).share
    assert tune._tables(replace(mostly, vocab_size=256)) == (), "a small table"
    assert tune._tables(replace(mostly, hidden_size=64)) == (), "its own tables would take as much"
    assert tune._tables(replace(mostly, tied=False)) == (), "two tables"
    assert tune._tables(replace(mostly, vocab_size=32769)) == (), "rows that do not divide"


@pytest.mark.parametrize("first", [0, 3, 9])
@pytest.mark.parametrize("at_once", [1, 2, 3])
@pytest.mark.parametrize("lowest", [0, 3, 6, 7])
def test_bisection_finds_the_lowest_that_passes(lowest: int, at_once: int, first: int) -> None:
    judged: list[int] = []

    def judge(places: Sequence[int]) -> None:
        assert 1 <= len(places) <= at_once and not set(places) & set(judged)
        judged.extend(places)

    bisect(7, at_once, judge, lambda i: i >= lowest, first)
    assert (min((i for i in judged if i >= lowest), default=7)) == lowest
    assert lowest == 0 or lowest - 1 in judged
    assert judged[0] <= min(first, 6) and (lowest != 3 or first != 3 or at_once == 1 or len(judged) == at_once)


@pytest.mark.parametrize(
    ("float32", "engine", "at_once", "asked", "best"),
    [
        # places that float32 takes, that the engine would take; what is asked, and what is found
        ("  ..xx", "....xx", 2, [4], 4),
        ("..xxxx", "...xxx", 2, [2, 3], 3),  # refused at 2, and nothing below it is promising
        (".xxxxx", "..xxxx", 2, [2, 1], 2),
        ("xxxxxx", "xxxxxx", 2, [2, 0], 0),
        ("..xxxx", "......", 2, [2, 3, 4, 5], None),
        ("..xxxx", ".....x", 1, [3, 4, 5], 5),
        ("...xxx", "...xxx", 6, [3], 3),
        ("......", "xxxxxx", 2, [], None),
    ],
)
def test_the_engine_is_asked_of_the_lowest_that_float32_takes(
    float32: str, engine: str, at_once: int, asked: list[int], best: int | None
) -> None:
    judged: list[int] = []
    said: dict[int, bool] = {}

    def ask(place: int) -> bool:
        assert place in judged and place not in said and float32[place] == "x"
        said[place] = engine[place] == "x"
        return said[place]

    climb(len(engine), at_once, 3, judged.extend, lambda place: float32[place] == "x", ask)
    assert list(said) == asked
    assert min((place for place, good in said.items() if good), default=None) == best


# -- what it says ------------------------------------------------------------------------------------------------------


def found(kl: float, accepted: bool, *reasons: str, ties: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {
        "mean_kl": kl, "max_kl": 2 * kl, "min_cosine": 0.998, "min_centred_cosine": 0.9985, "top1": 0.99,
        "accepted": accepted, "verdict": "pass" if accepted else "fail", "reasons": reasons, "near_ties": ties,
    }  # fmt: skip


def candidate(name: str, size: int, strict: dict[str, Any]) -> Candidate:
    recipe = Recipe(name, "fp16", PLAIN.rules, calibration=PLAIN.calibration)
    good = found(1e-4, True)
    return Candidate(recipe, size, size / 1000, 0.95, {"search": good, "strict": strict, "m8": good})


BAD = found(3e-3, False, "the mean KL divergence is 3.00e-03, above 1e-03")
SENSITIVITY = {"layers.0.q": 1e-4, "layers.1.down": 9e-4, "layers.0.o": 2e-4, "layers.0.k": 1e-5}


def test_verdict_that_nothing_passes() -> None:
    text = verdict(None, [candidate("a", 600, found(5e-3, False, "x")), candidate("b", 640, BAD)], SENSITIVITY)
    assert text == (
        "no recipe passes; the closest, b with 0.640 of the fp16 bytes, fails in strict: the mean KL divergence is "
        "3.00e-03, above 1e-03; the matrices that cost most alone are layers.1.down, layers.0.o, layers.0.q"
    )


def test_verdict_that_the_baseline_is_unstable() -> None:
    ties = [{"prompt": f"strict-{i:02d}", "position": 20 + i, "margin": 0.02 * i} for i in range(3)]
    strict = found(1e-4, False, "9 near-ties among 373 positions are more than 2%", ties=ties)
    assert verdict(None, [candidate("a", 600, strict)], SENSITIVITY) == (
        "the baseline itself is unstable: nothing but near-ties stands in the way, at strict-00 position 20 (margin "
        "0.000), strict-01 position 21 (margin 0.020), strict-02 position 22 (margin 0.040)"
    )


TIED = ("2 of 40 top tokens differ (1 of them a near-tie), first m8-01 position 7",)


def asked(candidate: Candidate, *refused: tuple[str, str]) -> Candidate:
    """The candidate with two runs of an engine, which refuse what is named as (profile, reason)."""
    runs = []
    for engine in ("reference", "reference-stress"):
        run = {name: found(1e-4, True) | {"engine": engine} for name in ("strict", "m8")}
        runs.append(run | {name: found(1e-4, False, reason) | {"engine": engine} for name, reason in refused})
    return replace(candidate, engine=tuple(runs))


def test_a_miss_beside_a_tie_is_not_called_an_unstable_baseline() -> None:
    refused = asked(candidate("a", 640, found(1e-4, True)), ("m8", *TIED))
    assert verdict(None, [refused], SENSITIVITY) == (
        f"no recipe passes; the closest, a with 0.640 of the fp16 bytes, fails in m8 on reference: {TIED[0]}; m8 on "
        f"reference-stress: {TIED[0]}; the matrices that cost most alone are layers.1.down, layers.0.o, layers.0.q"
    )


def test_ties_of_an_engine_are_named_once() -> None:
    few = candidate("a", 640, found(1e-4, True))
    refused = asked(few, ("strict", "9 near-ties among 373 positions are more than 2%"))
    tie = {"prompt": "strict-00", "position": 7, "margin": 0.0151}
    for run in refused.engine:
        run["strict"]["near_ties"] = [tie]
    assert verdict(None, [refused], SENSITIVITY) == (
        "the baseline itself is unstable: nothing but near-ties stands in the way, at strict-00 position 7 (margin "
        "0.015)"
    )


def test_closest_is_what_got_as_far_as_the_engine() -> None:
    good = candidate("engine", 640, found(3e-4, True))
    one = asked(good, ("m8", *TIED))
    both = replace(asked(good, ("m8", *TIED), ("strict", "x")), recipe=replace(good.recipe, name="worse"))
    low = candidate("float32", 660, found(1e-4, False, "1 of 373 top tokens differ"))
    assert [closest_of(c).recipe.name for c in ([low, both, one], [low, both], [low])] == ["engine", "worse", "float32"]
    assert one.promising and not one.passes and not good.passes, "nobody passes unasked"
    assert asked(good).passes and not asked(low).passes


def test_recipe_text_is_read_back_as_the_recipe() -> None:
    rules = (
        Rule("layers.0.q", parse_scheme("fp16")), Rule("layers.1.q", parse_scheme("fp16")),
        Rule("layers.*", parse_scheme("int8+rank8"), layers=(1, 2), at_least=100), Rule("*", parse_scheme("palette8")),
    )  # fmt: skip
    recipe = Recipe("mine", "fp16", rules, 3, calibration=Calibration(("clip", "gptq"), 7, 50, 2))
    text = recipe_text(recipe, ["why", "and how"])
    assert text.startswith("# why\n# and how\n") and parse_recipe(text, "x.toml") == recipe


def test_a_search_takes_away_what_says_the_opposite(tmp_path: Path) -> None:
    good = asked(candidate("a", 600, found(1e-4, True)))
    names = [["mine.closest.toml", "mine.md", "mine.png"], ["mine.md", "mine.png", "mine.toml"]]
    for best in (good, None, good):
        write_report(Tuned(best, (good,), SENSITIVITY, "so"), tmp_path / "mine.toml", "MODEL")
        assert sorted(f.name for f in tmp_path.iterdir()) == names[best is not None]
    (tmp_path / "mine.toml").write_text("name = 'by hand'")
    write_report(Tuned(None, (good,), SENSITIVITY, "so"), tmp_path / "mine.toml", "MODEL")
    assert (tmp_path / "mine.toml").read_text() == "name = 'by hand'"


def test_report_without_a_pass(tmp_path: Path) -> None:
    candidates = (candidate("a", 600, found(5e-3, False, "x")), candidate("b", 640, BAD))
    tuned = Tuned(None, candidates, SENSITIVITY, "no recipe passes")
    files = write_report(tuned, tmp_path / "mine.toml", "MODEL")
    assert [f.name for f in files] == ["mine.closest.toml", "mine.md", "mine.png"]
    assert {f.name for f in tmp_path.iterdir()} == {f.name for f in files}
    text = files[0].read_text(encoding="utf-8")
    assert "# Found by `anechain tune MODEL`: no recipe passes." in text and load_recipe(str(files[0])).name == "b"
    assert "layers.1.down 9.0e-04" in text and "strict: fail, accepted False" in text
    rows = table(tuned).splitlines()
    assert len(rows) == 4 and rows[2].startswith("| a | 0.0 | 0.600 | 95.0% |") and rows[3].endswith("| yes | no |")
    assert files[2].read_bytes()[:4] == b"\x89PNG"
