"""A lint report as JSON, as SARIF, and on the command line."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from coremltools.converters.mil.mil import Builder as mb

from anechain.cli import main
from anechain.judge.compatibility import Machine
from anechain.judge.lint import Report, lint
from anechain.judge.lint_report import to_json, to_sarif
from tests.judge.lint_programs import PRODUCTS, WEIGHTS, Spec, build, planned, products


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return products(tmp_path_factory.mktemp("lint"))


@pytest.fixture(scope="module")
def report(package: Path) -> Report:
    return lint(package)


def test_json(report: Report) -> None:
    record = json.loads(json.dumps(to_json(report), allow_nan=False))
    assert record["findings"] and len(record["findings"]) == len(report.findings)
    for finding in record["findings"]:
        assert {"rule", "severity", "package", "op", "reason", "fix", "source"} <= set(finding)
        assert all(finding[k] for k in ("rule", "severity", "package", "reason", "fix", "source"))
        assert (finding["shape"] is None) == (finding["dtype"] is None)
    assert record["packages"][0]["compute_share"] == report.shares[0].clear_multiply_adds / sum(PRODUCTS.values())
    assert record["total"]["weight_bytes"] == sum(WEIGHTS.values())
    assert "measured" not in record["findings"][0]["reason"] and record["plan"] is None
    assert record["compatibility"] == []


def test_json_of_a_named_machine(package: Path) -> None:
    record = to_json(lint(package, Machine("iOS", (27, 0), "A18 Pro")))
    rows = {(row["feature"], row["status"]) for row in record["compatibility"]}
    assert ("per-block", "broken") in rows
    blocked = [f for f in record["findings"] if f["rule"] == "Q1"]
    assert len(blocked) == 1 and blocked[0]["severity"] == "E"


def test_a_feature_that_no_report_speaks_of_is_unknown(tmp_path: Path) -> None:
    def body(q: Any) -> Any:
        return mb.scaled_dot_product_attention(query=q, key=q, value=q, name="fused")

    package = build(tmp_path / "fused.mlpackage", body, Spec((1, 2, 32, 64)))
    report = lint(package, Machine("macOS", (15, 5)))
    assert report.unknown_features == ("fused-attention",)
    assert not any(row.feature == "fused-attention" for row, _, _ in report.compatibility)
    maybe = lint(package, Machine(chip="M4"))
    assert [answer for row, answer, _ in maybe.compatibility if row.feature == "fused-attention"] == ["maybe"]
    assert maybe.clean


def test_sarif(report: Report) -> None:
    """The properties that SARIF 2.1.0 requires, and the values that it allows (OASIS, sections 3.13 to 3.27)."""
    log = json.loads(json.dumps(to_sarif(report)))
    assert log["version"] == "2.1.0" and log["$schema"].endswith("sarif-schema-2.1.0.json")
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] == "anechain lint"
    assert len({rule["id"] for rule in driver["rules"]}) == len(driver["rules"])
    assert len(run["results"]) == len(report.findings) > 3
    for result, finding in zip(run["results"], report.findings, strict=True):
        assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == finding.rule
        assert result["level"] == {"E": "error", "W": "warning", "I": "note"}[finding.severity]
        assert result["message"]["text"]
        (location,) = result["locations"]
        assert location["physicalLocation"]["artifactLocation"]["uri"].endswith("one.mlpackage")
        assert location["logicalLocations"][0]["fullyQualifiedName"].startswith("one.mlpackage")


def test_sarif_names_files_from_where_one_stands(
    package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(package, tmp_path / "a folder/one.mlpackage")
    monkeypatch.chdir(tmp_path)
    for path in (Path("a folder"), Path("a folder/one.mlpackage")):
        result = to_sarif(lint(path))["runs"][0]["results"][0]
        assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "a%20folder/one.mlpackage"


# -- the command line --------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["anechain", "lint", *map(str, words)])
    with pytest.raises(SystemExit) as exit_code:
        main()
    captured = capsys.readouterr()
    return int(exit_code.value.code or 0), captured.out, captured.err


def test_exit_codes(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clean = build(tmp_path / "clean.mlpackage", lambda x: mb.exp(x=x, name="e"), Spec((1, 64)))
    assert run(capsys, monkeypatch, clean)[0] == 0
    assert run(capsys, monkeypatch, package)[0] == 1
    code, out, err = run(capsys, monkeypatch, tmp_path / "missing")
    assert code == 2 and out == "" and err.count("\n") == 1 and "is not there" in err
    assert run(capsys, monkeypatch, package, "--ignore", "Q1", "--ignore", "T1")[0] == 0
    assert run(capsys, monkeypatch, package, "--os", "Windows")[0] == 2


def test_the_table(package: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _, out, _ = run(capsys, monkeypatch, package)
    assert out.startswith("Published rules, held against the files. Nothing was measured here.")
    assert "E Q1  published, confidence H: weights with a scale for each block fall back to the CPU" in out
    assert "    one.mlpackage  main  blocked  fp16 [64, 64, 1, 1]: one int8 scale for each [1, 32, 1, 1]" in out
    compute = (PRODUCTS["plain"] + PRODUCTS["square"]) / sum(PRODUCTS.values())
    assert f"{compute:.1%} of 0.5 M" in out and f"{WEIGHTS['plain'] / sum(WEIGHTS.values()):.1%} of 0.0 MB" in out
    assert "measured on" not in out


def test_the_table_of_a_named_machine_and_a_plan(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(tmp_path, {"in_blocks": "NE", "plain": {"device": "CPU", "cost": 1.0}})
    _, out, _ = run(capsys, monkeypatch, package, "--os", "iOS 27.0", "--chip", "A18 Pro", "--plan", plan)
    assert "What is published of iOS 27.0, A18 Pro:" in out
    assert "E plan  measured on Mac16,9, macOS 15.5" in out
    assert "overruled: " in out and "the plan shows it on the ANE" in out


def test_long_lists_are_cut_unless_all_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(x: Any) -> Any:
        for i in range(9):
            x = mb.exp(x=x, name=f"e{i}")
        return x

    package = build(tmp_path / "long.mlpackage", body, Spec((1, 1)))
    _, out, _ = run(capsys, monkeypatch, package)
    assert "and 6 more (--all lists them)" in out and "e5  fp16" not in out
    _, out, _ = run(capsys, monkeypatch, package, "--all")
    assert "more (--all" not in out and "e5  fp16" in out


def test_json_and_sarif_on_stdout(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run(capsys, monkeypatch, package, "--json", "--sarif", tmp_path / "lint.sarif")
    assert code == 1 and json.loads(out)["clean"] is False
    assert json.loads((tmp_path / "lint.sarif").read_text())["version"] == "2.1.0"
    code, out, _ = run(capsys, monkeypatch, package, "--sarif", "-")
    assert code == 1 and json.loads(out)["version"] == "2.1.0"
    code, _, err = run(capsys, monkeypatch, package, "--json", "--sarif", "-")
    assert code == 2 and "both want stdout" in err
