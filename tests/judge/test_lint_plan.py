"""A compute plan that was recorded on a Mac: what it overrules, what it adds, and plans of other packages."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb

from anechain.errors import RequestError
from anechain.judge.lint import lint
from tests.bundle.packages import edited
from tests.judge.lint_programs import PRODUCTS, Spec, build, planned, products, ranged


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return products(tmp_path_factory.mktemp("lint"))


def test_a_plan_overrules_where_a_rule_says_something_runs(package: Path, tmp_path: Path) -> None:
    report = lint(package, plan=planned(tmp_path, {"in_blocks": "NE", "in_fp32": "NE", "blocked": {"device": None}}))
    assert {(f.rule, f.op) for f in report.overruled} >= {("Q1", "blocked"), ("T1", "in_fp32")}
    assert report.clean
    assert report.shares[0].clear_multiply_adds == report.shares[0].multiply_adds


def test_a_plan_says_nothing_of_ops_that_it_does_not_name(package: Path, tmp_path: Path) -> None:
    report = lint(package, plan=planned(tmp_path, {"plain": "NE"}))
    assert {("Q1", "blocked"), ("T1", "in_fp32")} <= {(f.rule, f.op) for f in report.findings if f.severity == "E"}


def test_a_plan_that_puts_ops_elsewhere(package: Path, tmp_path: Path) -> None:
    report = lint(package, plan=planned(tmp_path, {"plain": "CPU", "rows": "GPU", "square": "NE"}))
    measured = {f.op: f for f in report.findings if f.rule == "plan"}
    assert {op: f.severity for op, f in measured.items()} == {"plain": "E", "rows": "W"}
    assert measured["plain"].reason.startswith("measured on Mac16,9, macOS 15.5: the compute plan puts this op on")
    assert measured["plain"].reason.endswith("conv on the CPU")
    assert report.shares[0].clear_multiply_adds == PRODUCTS["square"]
    assert all(f.basis == "published" for f in report.findings if f.rule != "plan")


def test_a_plan_refutes_no_numbers(tmp_path: Path) -> None:
    """That an op ran on the ANE says nothing of what it computed there."""

    def body(x: Any) -> Any:
        mean = mb.reduce_mean(x=mb.square(x=x), axes=[-1], keep_dims=True, name="mean")
        return mb.rsqrt(x=mean, epsilon=np.float16(1e-5), name="root")

    package = build(tmp_path / "one.mlpackage", body, Spec((1, 64)))
    report = lint(package, plan=planned(tmp_path, {"mean": "NE", "root": "NE"}))
    assert [(f.rule, f.op) for f in report.findings if f.severity == "E"] == [("O1", "mean")]
    assert not report.overruled


def test_a_plan_and_findings_on_a_whole_function(package: Path, tmp_path: Path) -> None:
    copy = edited(package, tmp_path, ranged)
    refuted = lint(copy, plan=planned(tmp_path, {"plain": "NE"}, copy.name))
    assert "S1" in {f.rule for f in refuted.overruled}
    agreed = lint(copy, plan=planned(tmp_path, {"plain": "CPU"}, copy.name))
    assert "S1" in {f.rule for f in agreed.findings} and not agreed.overruled


def test_the_cost_that_went_to_the_engine(package: Path, tmp_path: Path) -> None:
    places = {
        "plain": {"device": "NE", "cost": 0.5}, "square": {"device": "CPU", "cost": 0.25},
        "rows": {"device": "NE", "cost": 0.25}, "in_blocks": {"device": "NE"},
    }  # fmt: skip
    assert lint(package, plan=planned(tmp_path, places)).shares[0].engine_cost == 0.75
    assert lint(package, plan=planned(tmp_path, {"plain": "NE"})).shares[0].engine_cost is None
    assert lint(package).shares[0].engine_cost is None


@pytest.mark.parametrize(("ops", "package_name", "function", "reason"), [
    ({"plain": "NE", "nobody": "NE"}, "one.mlpackage", "main", "one.mlpackage has no op nobody in main"),
    ({"plain": "NE"}, "two.mlpackage", "main", "there is no two.mlpackage"),
    ({"plain": "NE"}, "one.mlpackage", "decode", "one.mlpackage has no function decode"),
    ({"plain": "TPU"}, "one.mlpackage", "main", "plain is on 'TPU', which is none of NE, GPU, CPU"),
    ({"plain": {}}, "one.mlpackage", "main", "is not a compute plan"),
    ({"plain": {"device": "NE", "cost": -1}}, "one.mlpackage", "main", "plain has the cost -1, which is no share"),
    ({"plain": {"device": "NE", "cost": float("nan")}}, "one.mlpackage", "main", "plain has the cost nan"),
])  # fmt: skip
def test_plans_of_something_else(
    ops: Any, package_name: str, function: str, reason: str, package: Path, tmp_path: Path
) -> None:
    with pytest.raises(RequestError) as error:
        lint(package, plan=planned(tmp_path, ops, package_name, function))
    assert reason in str(error.value)


def test_many_strange_names_are_counted(package: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError) as error:
        lint(package, plan=planned(tmp_path, {f"op{i}": "NE" for i in range(7)}))
    assert "no op op4 in main and 2 more): record it again" in str(error.value)
    assert "op5" not in str(error.value)
    with pytest.raises(RequestError, match=r"no op op4 in main\): record it again"):
        lint(package, plan=planned(tmp_path, {f"op{i}": "NE" for i in range(5)}))


@pytest.mark.parametrize("text", ["", "[]", '{"packages": {}}', '{"machine": 1, "os": 2, "packages": [1]}'])
def test_files_that_are_no_plan(text: str, package: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(RequestError, match=r"is not a compute plan .* docs/lint\.md shows the form"):
        lint(package, plan=tmp_path / "plan.json")
    with pytest.raises(RequestError, match="cannot be read"):
        lint(package, plan=tmp_path / "missing.json")
