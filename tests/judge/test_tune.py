"""The search: its ladder, its bisection, its two ways of failing, and one search of a whole tiny model."""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from anechain.bundle.footprint import footprint
from anechain.bundle.recipe import Calibration, Recipe, Rule, load_recipe, parse_recipe, parse_scheme
from anechain.bundle.spec import matrices_of
from anechain.judge import search, tune
from anechain.judge.prompts import CHAT, M8, STRICT
from anechain.judge.search import Task, measure
from anechain.judge.tune import RANKS, Candidate, Tuned, bisect, make_ladder, verdict
from anechain.judge.tune_report import recipe_text, table, write_report
from tests.bundle_maker import SPECS
from tests.cli.outcome import Outcome, anechain, refusal  # noqa: F401
from tests.tiny import write_tiny

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


def test_recipe_text_is_read_back_as_the_recipe() -> None:
    rules = (
        Rule("layers.0.q", parse_scheme("fp16")), Rule("layers.1.q", parse_scheme("fp16")),
        Rule("layers.*", parse_scheme("int8+rank8"), layers=(1, 2), at_least=100), Rule("*", parse_scheme("palette8")),
    )  # fmt: skip
    recipe = Recipe("mine", "fp16", rules, 3, calibration=Calibration(("clip", "gptq"), 7, 50, 2))
    text = recipe_text(recipe, ["why", "and how"])
    assert text.startswith("# why\n# and how\n") and parse_recipe(text, "x.toml") == recipe


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


# -- a whole search ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny", "llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """No processes, a cache of our own; gives the names of what is measured."""
    measured: list[str] = []

    class Here(Executor):
        def submit(self, run: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
            future: Future[Any] = Future()
            try:
                future.set_result(run(*arguments, **named))
            except BaseException as error:
                future.set_exception(error)
            return future

    @contextmanager
    def pool(workers: int) -> Iterator[Executor]:
        yield Here()

    def counting(task: Task) -> dict[str, Any]:
        measured.append(task.name)
        if len(measured) == 4:  # stopped in the middle, once
            raise KeyboardInterrupt
        return measure(task)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANECHAIN_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(tune, "_pool", pool)
        patch.setattr(tune, "measure", counting)
        patch.setattr(tune, "RUNGS", (0.0, 0.02, 0.044))
        yield measured


def test_a_search_is_stopped_and_goes_on(
    tiny: Path, here: list[str], tmp_path: Path, anechain: Callable[..., Outcome]  # noqa: F811
) -> None:  # fmt: skip
    flags = ("tune", tiny, "-o", tmp_path / "mine.toml", "--ane", "--context", "256", "--sequences", "2", "--json")
    code, out, err = anechain(*flags)
    assert code == 130 and "interrupted" in err and not list(tmp_path.iterdir())
    code, out, err = anechain(*flags)
    record = json.loads(out)
    assert code == (0 if record["found"] else 1)
    alone = [name for name in here if name.startswith("layers.")]
    assert len(alone) == 8 and len(set(alone)) == 7, "only what was interrupted is measured twice"
    assert set(record["sensitivity"]) == set(alone) and all(0 < kl < 0.1 for kl in record["sensitivity"].values())
    assert len(record["candidates"]) >= 2
    assert all(c["found"][n]["mean_kl"] > 0 for c in record["candidates"] for n in ("search", "strict", "m8"))
    written = load_recipe(record["files"][0])
    assert written.calibration == Calibration(tune.METHODS, 2, tune.TEXT_LENGTH)
    count = len(here)
    again = json.loads(anechain(*flags)[1])
    assert len(here) == count and again["candidates"] == record["candidates"]
    schemes = {str(r.scheme) for c in record["candidates"] for r in parsed(c["recipe"]).rules}
    assert any("palette8-group16" in scheme for scheme in schemes)
    record = json.loads(anechain(*flags, "--linear")[1])
    schemes = {str(r.scheme) for c in record["candidates"] for r in parsed(c["recipe"]).rules}
    assert schemes and not any("palette" in scheme for scheme in schemes)
    assert {name for name in here[count:] if name.startswith("layers.")} == set(), "nothing alone is measured again"


SMALL = ("--context", "256", "--sequences", "2")


@pytest.fixture
def judging(here: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[str]], list[Task]]:
    """Float32 judging that takes every recipe. The reference engine refuses the tasks that are named, is content with
    others of these recipes, and is really asked about the rest.
    """

    def judging(refused: Sequence[str]) -> list[Task]:
        asked: list[Task] = []

        def measured(task: Task) -> dict[str, Any]:
            if task.bundle:
                asked.append(task)
            if task.bundle and any(name.startswith(task.name.split()[0]) for name in refused):
                result: dict[str, Any] = {
                    name: found(1e-4, True) | {"engine": "reference"} for name in ("strict", "m8")
                }
            else:
                result = measure(task)
            if task.recipe is not None:
                for figures in result.values():
                    figures["accepted"] = task.name not in refused
                    figures["reasons"] = ["planted"] if task.name in refused else []
            return result

        monkeypatch.setattr(tune, "measure", measured)
        monkeypatch.setenv("ANECHAIN_CACHE", str(tmp_path / "cache"))
        return asked

    return judging


def test_the_reference_engine_has_the_last_word(
    tiny: Path, judging: Callable[..., list[Task]], tmp_path: Path, anechain: Callable[..., Outcome]  # noqa: F811
) -> None:  # fmt: skip
    asked = judging(["tuned-0 on reference", "tuned-1 on reference under stress"])
    flags = ("tune", tiny, "-o", tmp_path / "mine.toml", "--ane", *SMALL, "--jobs", "3", "--json")
    code, out, _ = anechain(*flags)
    record = json.loads(out)
    assert code == 0 and record["recipe"]["name"] == "tuned-2", "the lower ones are good in float32 alone"
    assert [(t.recipe.name, t.stress) for t in asked if t.recipe] == [
        ("tuned-0", False),
        ("tuned-0", True),
        ("tuned-1", False),
        ("tuned-1", True),
        ("tuned-2", False),
        ("tuned-2", True),
    ]
    assert not list(Path(asked[0].bundle).parent.parent.glob("tmp*")), "no bundle is left behind"
    written = (tmp_path / "mine.toml").read_text()
    assert "# On reference-stress:" in written
    # What the gate says of the recipe when somebody bakes it.
    assert anechain("bake", tiny, "-o", tmp_path / "b", "--recipe", record["files"][0], "--context", "256")[0] == 0
    for profile in ("strict", "m8"):
        said = json.loads(anechain("gate", tmp_path / "b", "--profile", profile, "--json")[1])["runs"]
        for mine, theirs in zip(record["candidates"][-1]["engine"], said, strict=True):
            same = set(mine[profile]) - {"accepted", "reasons"}  # these were planted
            assert {key: mine[profile][key] for key in same} == {key: theirs[key] for key in same}
    count = len(asked)
    assert json.loads(anechain(*flags)[1])["candidates"] == record["candidates"] and len(asked) == count


def test_what_float32_takes_and_the_engine_refuses_is_no_recipe(
    tiny: Path, judging: Callable[..., list[Task]], tmp_path: Path, anechain: Callable[..., Outcome]  # noqa: F811
) -> None:  # fmt: skip
    judging([f"tuned-{i} on reference" for i in range(5)])
    code, out, _ = anechain("tune", tiny, "-o", tmp_path / "mine.toml", "--ane", *SMALL, "--json")
    record = json.loads(out)
    assert code == 1 and record["recipe"] is None
    assert "strict on reference: planted; m8 on reference: planted; the matrices" in record["verdict"]
    assert (
        "| refused |" in (tmp_path / "mine.md").read_text() and "| accepted |" not in (tmp_path / "mine.md").read_text()
    )


def parsed(recipe: dict[str, Any]) -> Recipe:
    rules = tuple(Rule(rule["match"], parse_scheme(rule["scheme"])) for rule in recipe["rules"])
    return Recipe(recipe["name"], recipe["compute"], rules)


def test_one_matrix_alone_costs_less_than_all_and_nothing_costs_nothing(tiny: Path, here: list[str]) -> None:
    moved = next(p for p in (Path(tune.cache_folder("tune"))).glob("*.npz"))
    costs = [measure(Task(str(tiny), None, 256, f"layers.0.{n}", str(moved)))["mean_kl"] for n in ("q", "down")]
    exact, _ = search._moved(str(tiny), None, str(moved))
    source = search._source(str(tiny), None)
    oracle = search.Oracle(search.RoundedSource(source, source.spec, exact))
    answers = search._search(str(tiny), None).answers[:: search.SOME]
    steps = search.steps_of(oracle, answers)
    assert sum(s.kl for s in steps) / len(steps) < 0.1 * min(costs)
    resumed = oracle.resumed(0, search._moved(str(tiny), None, str(moved))[1][0])
    assert search.steps_of(oracle, answers, resumed) == steps


def test_the_searchs_texts_are_no_profiles(tiny: Path, here: list[str]) -> None:
    baseline = search._search(str(tiny), None)
    assert len(baseline.prompts) >= 10 and len({p.ids.tobytes() for p in baseline.prompts}) == len(baseline.prompts)
    starts = (*search.BEGINNINGS[1::4], *search.QUESTIONS[1::2])
    assert not {s.lower() for s in starts} & {p.lower() for p in (*M8, *STRICT, *CHAT)}


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["-o", "{t}/mine"], "-o {t}/mine is not a .toml file: give the recipe's name, such as {t}/mine.toml."),
        (["-o", "{t}/no/mine.toml"], "there is no folder {t}/no: make it, or give another place with -o."),
        (
            ["-o", "{t}/mine.toml", "--jobs", "0", "--seed", "-1"],
            "--jobs 0, --seed -1 is too small: use a whole number of at least 1 (a seed may be 0).",
        ),
        (["-o", "{t}/mine.toml", "--context", "4096"], "--context 4096 is more than the 512 positions it knows."),
    ],
)
def test_refusals(
    flags: list[str], text: str, tiny: Path, tmp_path: Path, anechain: Callable[..., Outcome]  # noqa: F811
) -> None:  # fmt: skip
    said = refusal(anechain, tmp_path, "tune", tiny, *(f.format(t=tmp_path) for f in flags))
    assert said == text.format(t=tmp_path)
