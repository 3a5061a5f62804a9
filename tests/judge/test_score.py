"""The score: its formula, its refusals, and what is measured of a real process."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from anechain.bundle.manifest import open_bundle
from anechain.cli.score import open_chain
from anechain.errors import BundleError, RequestError
from anechain.judge.score import Measurement, Run, Score, compared, disk_bytes, measure, peak_rss_bytes
from tests.bundle_maker import make_bundle, tiny_source

CONDITIONS = {
    "suite_sha256": "1", "prompt_sha256": "2", "engine": "cpu-exact", "machine": {"cores": 2}, "tools": {},
    "tokens": 48,
}  # fmt: skip
GIB = 2**30


def measurement(first_ms: float = 120.0, pace: float = 50.0, disk: int = GIB, peak: int = GIB) -> Measurement:
    runs = tuple(Run(first_ms * f, pace / f) for f in (0.9, 0.8, 1.0, 1.3, 2.0))
    return Measurement(CONDITIONS, "0" * 64, runs, peak, disk)


def test_the_formula() -> None:
    """(120 / median first-token ms) x (median tok/s / 50) x pass rate x 2 / GiB, all of it 1 here."""
    score = Score(measurement(), 1.0)
    assert (score.speed, score.cost, score.total) == pytest.approx((1.0, 1.0, 1.0))
    score = Score(measurement(60.0, 75.0, GIB // 2, GIB // 2), 0.8)
    assert (score.speed, score.cost, score.total) == pytest.approx((3.0, 2.0, 3.0 * 0.8 * 2.0))
    assert score.to_json()["first_token_ms_range"] == pytest.approx([48.0, 120.0])


def test_ratios_and_what_a_loss_is() -> None:
    pair = compared(Score(measurement(60.0), 0.9), Score(measurement(disk=3 * GIB), 0.94))
    assert (pair.speed_ratio, pair.cost_ratio, pair.accuracy_loss_pp) == pytest.approx((2.0, 2.0, 4.0))
    assert pair.to_json()["score_ratio"] == pytest.approx(2 * 2 * 0.9 / 0.94)


@pytest.mark.parametrize(
    "change, name",
    [
        ({"runs": ()}, "first-token time, tok/s"),
        ({"peak_rss_bytes": 0}, "peak memory"),
        ({"disk_bytes": 0}, "disk size"),
    ],
)
def test_what_was_not_measured_is_an_error(change: dict[str, Any], name: str) -> None:
    with pytest.raises(RequestError, match=f"there is no score without {name}: measure again"):
        Score(replace(measurement(), **change), 1.0)
    with pytest.raises(RequestError, match="without pass rate"):
        Score(measurement(), float("nan"))


@pytest.mark.parametrize("key", [key for key in CONDITIONS])
def test_what_was_measured_otherwise_is_not_compared(key: str) -> None:
    other = replace(measurement(), conditions=CONDITIONS | {key: "other"})
    with pytest.raises(RequestError, match="cannot be compared: they differ in the "):
        compared(Score(measurement(), 1.0), Score(other, 1.0))


def test_two_bundles_are_measured_in_turns_in_processes_of_their_own(tmp_path: Path) -> None:
    paths = [
        make_bundle(tiny_source("llama"), tmp_path / "a", context=64).path,
        make_bundle(tiny_source("qwen3"), tmp_path / "b", context=64).path,
    ]  # fmt: skip
    steps: list[str] = []
    opener = partial(open_chain, engine="cpu", fast=False)
    prompts = [[1, 2, 3, 4], [1, 2, 3, 5]]
    found = measure(paths, opener, prompts, "s", lambda done, total, what: steps.append(what), runs=3)
    assert [len(m.runs) for m in found] == [3, 3] and len(steps) == 2 * (1 + 1 + 3)
    assert steps[:4] == ["load a", "load b", "warm-up", "warm-up"] and steps[4:] == [
        f"run {i // 2 + 1}" for i in range(6)
    ]
    for m, path in zip(found, paths, strict=True):
        assert all(r.first_token_ms > 0 and r.tok_per_s > 0 for r in m.runs)
        assert 50e6 < m.peak_rss_bytes < 2e9 and m.disk_bytes == disk_bytes(path)
        assert m.conditions["engine"] == "cpu-native-exact" and m.conditions["prompt_tokens"] == 4
    with pytest.raises(RequestError, match="differ in the prompt "):
        compared(Score(found[0], 1.0), Score(found[1], 1.0))


def test_a_bundle_that_cannot_be_opened_there_says_so_here(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="is not there"):
        measure([tmp_path / "no"], partial(open_chain, engine="cpu", fast=False), [[1]], "s")


def test_cards_and_histories_are_not_the_bundle(tmp_path: Path) -> None:
    bundle = make_bundle(tiny_source("llama"), tmp_path / "a", context=64)
    size = disk_bytes(bundle.path)
    assert size == sum(f.stat().st_size for f in bundle.path.rglob("*") if f.is_file())
    (bundle.path / "card.html").write_text("x" * 1000, encoding="utf-8")
    assert disk_bytes(open_bundle(bundle.path).path) == size


def test_the_peak_is_that_of_the_whole_tree_and_of_this_program_alone() -> None:
    """A child that takes 200 MB counts while it lives; what the parent took before it does not."""
    code = "x = bytearray(200_000_000); print(len(x), flush=True); input()"
    mine = psutil.Process(os.getpid()).memory_info().rss
    assert peak_rss_bytes() >= mine
    before = peak_rss_bytes()
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    child.stdout.readline()
    during = peak_rss_bytes()
    child.communicate(b"\n")
    assert 195e6 < during - before < 260e6
