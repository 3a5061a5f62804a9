"""What lint judges at a path, what each finding comes with, and the shares of compute and weights that are clear."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from anechain.errors import BundleError, RequestError
from anechain.judge.lint import Report, lint, total
from tests.bundle.packages import MODEL, edited
from tests.judge.lint_programs import PRODUCTS, WEIGHTS, products, ranged


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return products(tmp_path_factory.mktemp("lint"))


@pytest.fixture(scope="module")
def report(package: Path) -> Report:
    return lint(package)


def test_shares_of_compute_and_weights(report: Report) -> None:
    (share,) = report.shares
    assert share.package == "one.mlpackage" and share.functions == ("main",)
    assert share.multiply_adds == sum(PRODUCTS.values())
    assert share.clear_multiply_adds == PRODUCTS["plain"] + PRODUCTS["square"]
    assert share.weight_bytes == sum(WEIGHTS.values())
    assert share.clear_weight_bytes == WEIGHTS["plain"]
    assert share.findings == {s: sum(f.severity == s for f in report.findings) for s in "EWI"}
    assert share.findings["E"] == 2 and not report.clean


def test_findings_come_with_everything(report: Report) -> None:
    assert {f.rule for f in report.findings if f.severity == "E"} == {"T1", "Q1"}
    (blocked,) = (f for f in report.findings if f.rule == "Q1")
    assert (blocked.package, blocked.function, blocked.op) == ("one.mlpackage", "main", "blocked")
    assert (blocked.shape, blocked.dtype, blocked.confidence) == ((64, 64, 1, 1), "fp16", "H")
    assert blocked.reason.startswith("published: weights with a scale for each block")
    assert "one int8 scale for each [1, 32, 1, 1]" in blocked.reason
    assert blocked.fix and "apple/coremltools#2510" in blocked.source
    gravity = ["EWI".index(f.severity) for f in report.findings]
    assert gravity == sorted(gravity) and set(gravity) == {0, 1, 2}


def test_a_finding_on_an_input_bars_the_whole_function(package: Path, tmp_path: Path) -> None:
    (share,) = lint(edited(package, tmp_path, ranged)).shares
    assert share.clear_multiply_adds == share.clear_weight_bytes == 0 < share.multiply_adds


def test_a_finding_on_the_package_bars_all_of_it(package: Path, tmp_path: Path) -> None:
    def newer(model: Any) -> None:
        model.specificationVersion = 10

    (share,) = lint(edited(package, tmp_path, newer)).shares
    assert share.clear_multiply_adds == share.clear_weight_bytes == 0


def test_ignored_rules_are_counted_and_no_more(package: Path) -> None:
    report = lint(package, ignore=["Q1", "T1", "K1"])
    assert report.ignored == {"Q1": 1, "T1": 1, "K1": 0} and report.clean
    assert not {"Q1", "T1"} & {f.rule for f in report.findings}
    assert report.shares[0].clear_multiply_adds == report.shares[0].multiply_adds
    with pytest.raises(RequestError, match="--ignore Q99, x: there is no such rule"):
        lint(package, ignore=["Q1", "Q99", "x"])


@pytest.fixture
def folder(package: Path, tmp_path: Path) -> Path:
    """Two programs, one of them deeper, a classic network, and models in other forms."""
    root = tmp_path / "folder"
    shutil.copytree(package, root / "b.mlpackage")
    shutil.copytree(package, root / "deep/a.mlpackage")
    classic = edited(package, tmp_path, lambda model: model.neuralNetwork.SetInParent())
    classic.rename(root / "classic.mlpackage")
    (root / "old.mlmodel").write_bytes(b"anything")
    (root / "made.mlmodelc").mkdir()
    (root / "made.mlmodelc/inner.mlpackage").mkdir()
    (root / "manifest.json").write_text('{"name": "another project\'s"}')
    return root


def test_a_folder_of_packages(folder: Path) -> None:
    report = lint(folder)
    assert [s.package for s in report.shares] == ["b.mlpackage", "deep/a.mlpackage"]
    assert report.skipped == {
        "classic.mlpackage": "a neuralNetwork, not an ML program",
        "made.mlmodelc": "compiled (lint the package that it came from)",
        "old.mlmodel": "a model in the older form of one file",
    }
    both = total(report.shares)
    assert both.multiply_adds == 2 * sum(PRODUCTS.values()) and both.findings["E"] == 4
    assert both.clear_weight_bytes == 2 * WEIGHTS["plain"] and both.ops == 2 * report.shares[0].ops


def test_all_damaged_packages_are_named_at_once(folder: Path) -> None:
    for name in ("b.mlpackage", "deep/a.mlpackage"):
        (folder / name / MODEL).write_bytes(b"no model")
    with pytest.raises(BundleError, match=r"b\.mlpackage cannot be read.*a\.mlpackage cannot be read"):
        lint(folder)


@pytest.mark.parametrize(("name", "reason"), [
    ("classic.mlpackage", "classic.mlpackage is a neuralNetwork, not an ML program"),
    ("old.mlmodel", "old.mlmodel is a model in the older form of one file"),
])  # fmt: skip
def test_nothing_but_a_classic_network(name: str, reason: str, folder: Path) -> None:
    with pytest.raises(RequestError) as error:
        lint(folder / name)
    assert str(error.value).startswith("there is no ML program to lint at ") and reason in str(error.value)


def test_nothing_at_all(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no \.mlpackage is in it"):
        lint(tmp_path)
    for missing in (tmp_path / "no", tmp_path / "no.mlpackage"):
        with pytest.raises(RequestError, match="is not there: check the path"):
            lint(missing)


@pytest.mark.parametrize("text", ['["blocks"]', '"blocks"', "{}", "1"])
def test_the_manifest_of_another_project(text: str, folder: Path) -> None:
    (folder / "manifest.json").write_text(text)
    assert [s.package for s in lint(folder).shares] == ["b.mlpackage", "deep/a.mlpackage"]


def test_a_damaged_bundle_is_no_folder(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"blocks": []}')
    with pytest.raises(BundleError, match="format"):
        lint(folder)
    (folder / "manifest.json").write_text('{"blocks": ')
    with pytest.raises(BundleError, match=r"manifest\.json cannot be read"):
        lint(folder)
