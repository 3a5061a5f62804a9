"""A search of a whole tiny model: stopped, gone on with, with the last word of the reference engine, and refused."""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anechain.bundle.embedding import open_embedding
from anechain.bundle.manifest import open_bundle
from anechain.bundle.recipe import Calibration, Recipe, Rule, load_recipe, parse_scheme
from anechain.judge import search, search_pool, tune
from anechain.judge.prompts import CHAT, M8, STRICT
from anechain.judge.search import Task, measure
from tests.cli.outcome import Outcome, anechain, refusal  # noqa: F401
from tests.in_process import InProcess
from tests.judge.test_tune import found
from tests.tiny import write_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny", "llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """No processes, a cache of our own; gives the names of what is measured."""
    measured: list[str] = []

    @contextmanager
    def pool(workers: int) -> Iterator[Executor]:
        yield InProcess()

    def counting(task: Task) -> dict[str, Any]:
        measured.append(task.name)
        if len(measured) == 4:  # stopped in the middle, once
            raise KeyboardInterrupt
        return measure(task)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANECHAIN_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(tune, "processes", pool)
        patch.setattr(search_pool, "measure", counting)
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

        monkeypatch.setattr(search_pool, "measure", measured)
        monkeypatch.setenv("ANECHAIN_CACHE", str(tmp_path / "cache"))
        return asked

    return judging


def test_the_reference_engine_has_the_last_word(
    tiny: Path, judging: Callable[..., list[Task]], tmp_path: Path,
    anechain: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch,  # noqa: F811
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
    assert not list(Path(asked[0].bundle).parent.glob("*.bundle")), "no bundle is left behind"
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
    monkeypatch.setattr(search_pool, "_program_sha256", lambda: "another program")
    assert anechain(*flags)[0] == 0 and len(asked) == 2 * count, "what another program said is not taken over"


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


def test_a_cache_without_room_for_the_bundle(
    tiny: Path, judging: Callable[..., list[Task]], tmp_path: Path,
    anechain: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch,  # noqa: F811
) -> None:  # fmt: skip
    asked = judging([])
    monkeypatch.setattr("anechain.bake.jobs.shutil.disk_usage", lambda folder: shutil._ntuple_diskusage(1, 1, 1000))
    flags = ("tune", tiny, "-o", tmp_path / "mine.toml", "--ane", *SMALL)
    code, _, err = anechain(*flags)
    assert code == 2 and not asked
    assert re.search(
        r"tuned-\d cannot be baked in the cache for the reference engine: \S+\.bundle would take 0\.\d MB and its disk "
        r"has 0\.0 MB left\. Make room there, or set ANECHAIN_CACHE to another folder; what was measured is kept\.\s*$",
        " ".join(err.split()),
    ), err
    assert not list((tmp_path / "cache" / "tune").glob("*.bundle"))


def test_a_table_at_both_ends_is_judged_as_it_is_baked(
    here: list[str],
    tmp_path: Path,
    anechain: Callable[..., Outcome],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ANECHAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(search_pool, "measure", measure)
    monkeypatch.setattr(tune, "TABLE_SHARE", 0.0)
    monkeypatch.setattr(tune, "TABLE", parse_scheme("palette8-group64"))
    model = write_tiny(tmp_path / "tied", "qwen3", num_hidden_layers=1)
    code, out, _ = anechain("tune", model, "-o", tmp_path / "mine.toml", "--ane", *SMALL, "--jobs", "9", "--json")
    candidates = {c["recipe"]["name"]: c for c in json.loads(out)["candidates"]}
    assert code in (0, 1) and {"tuned-table-0", "tuned-0"} <= set(candidates)
    assert candidates["tuned-table-0"]["share"] < candidates["tuned-0"]["share"]
    recipe = tmp_path / "tables.toml"
    recipe.write_text(
        'name = "tables"\ncompute = "fp16"\n[[rule]]\nmatch = ["embed", "head"]\nscheme = "palette8-group64"\n'
    )
    assert anechain("bake", model, "-o", tmp_path / "b", "--recipe", recipe, "--context", "256")[0] == 0
    source = search._source(str(model), None)
    judged = search._table(source, load_recipe(str(recipe)))["embed"]
    rows = open_embedding(open_bundle(tmp_path / "b")).rows(np.arange(source.spec.vocab_size))
    assert np.array_equal(rows, judged)
    assert search._table(source, load_recipe("fp16")) == {}
    alone = replace(load_recipe(str(recipe)), calibration=Calibration(("gptq",), 2, 128))
    kl = measure(Task(str(model), None, 256, recipe=alone))["strict"]["mean_kl"]
    assert kl > 1e-6, "what the table costs is seen"


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


def test_the_searchs_texts_are_kept_by_how_they_begin(
    tiny: Path, here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begins = search._search(str(tiny), None).prompts[0].ids
    search._search.cache_clear()
    monkeypatch.setattr(search, "STARTS", ("Something else", *search.STARTS[1:]))
    assert begins.tolist() != search._search(str(tiny), None).prompts[0].ids.tolist()
    search._search.cache_clear()


def test_the_searchs_texts_are_no_profiles(tiny: Path, here: list[str]) -> None:
    baseline = search._search(str(tiny), None)
    assert len(baseline.prompts) >= 10 and len({p.ids.tobytes() for p in baseline.prompts}) == len(baseline.prompts)
    starts = (*search.STARTS, *search.ASKED)
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
        (
            ["-o", "{t}/mine.toml", "--context", "100"],
            "this cannot be baked: --context 100 is not a multiple of 32 (use 128).",
        ),
    ],
)
def test_refusals(
    flags: list[str], text: str, tiny: Path, tmp_path: Path, anechain: Callable[..., Outcome]  # noqa: F811
) -> None:  # fmt: skip
    said = refusal(anechain, tmp_path, "tune", tiny, *(f.format(t=tmp_path) for f in flags))
    assert said == text.format(t=tmp_path)
