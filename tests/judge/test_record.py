"""The record of a Mac: what goes into the zip comes out again, nothing of its user does, and nothing else is taken."""

import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anechain.errors import RequestError
from anechain.judge.record import (
    Configuration,
    Device,
    GateFigures,
    Record,
    Trial,
    read_record,
    without_paths,
    write_record,
)

PASS = GateFigures("pass", "strict", "coreml", 0.99987, 2.1e-5, None, 1.0, 330)
PLAN = {"block-000.mlpackage": {"decode": {"layers_0_q_out": Device("NE", 0.031), "whole": Device(None)}}}
TRIALS = (
    Trial(Configuration("demo", "fp16", "macOS15", 15), "", PASS, "zero-copy", {"decode_tok_per_s": 41.5}, PLAN),
    Trial(Configuration("demo", "int8", "macOS26", 1, "blend", function="prefill"), "cosine 0.3 at prompt 2"),
    Trial(Configuration("demo", "m8", "macOS15", 1)),
)
RECORD = Record("macOS 26.0.1", "M5 Pro", "Mac17,3", "9.0", "0.1", "coreml", TRIALS, {"ring": "", "lifetime": "lost"})


def changed(path: Path, change: Any) -> Path:
    """The record at `path` with its record.json changed."""
    with zipfile.ZipFile(path) as archive:
        members = {name: json.loads(archive.read(name)) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, value in members.items():
            archive.writestr(name, json.dumps(value))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_record(RECORD, tmp_path / "record.zip")
    return tmp_path / "record.zip"


def test_what_was_written_is_read(path: Path) -> None:
    assert read_record(path) == RECORD
    assert [trial.status for trial in RECORD.trials] == ["works", "broken", "unknown"]
    assert [f.name for f in path.parent.iterdir()] == ["record.zip"]


def test_a_gate_that_fails_alone_says_nothing_of_the_machine() -> None:
    assert replace(TRIALS[0], gate=replace(PASS, verdict="fail")).status == "unknown"


def test_a_plan_is_one_that_lint_takes(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist() == ["record.json", "plan-000.json"]
        plan = json.loads(archive.read("plan-000.json"))
    assert {key: plan[key] for key in ("machine", "os")} == {"machine": "Mac17,3", "os": "macOS 26.0.1"}
    op = plan["packages"]["block-000.mlpackage"]["decode"]["layers_0_q_out"]
    assert op == {"device": "NE", "cost": 0.031}


def test_the_same_record_is_the_same_file(path: Path, tmp_path: Path) -> None:
    write_record(RECORD, tmp_path / "again.zip")
    assert path.read_bytes() == (tmp_path / "again.zip").read_bytes()


@pytest.mark.parametrize(("text", "left"), [
    ("cannot open /Users/ada/models/b.mlpackage: -14", "cannot open b.mlpackage: -14"),
    ("at file:///private/var/x/y.mil, line 3", "at y.mil, line 3"),
    ("~/bundles/block-000.mlpackage died", "block-000.mlpackage died"),
    ("cannot read /Users/ada", "cannot read ~"),
    ("no room in /Users/ada/Library Two/cache", "no room in Library cache"),
    ("no b/c in bundles/ada", "no c in ada"),
    ("cosine 0.3 at 12/160\nand more", "cosine 0.3 at 12/160 and more"),
])  # fmt: skip
def test_of_a_path_only_its_last_part_leaves_the_machine(text: str, left: str, tmp_path: Path) -> None:
    assert without_paths(text) == left
    trial = replace(TRIALS[1], diverged=text)
    write_record(replace(RECORD, trials=(trial,)), tmp_path / "r.zip")
    assert read_record(tmp_path / "r.zip").trials[0].diverged == left


def test_numbers_that_json_lacks_are_null(tmp_path: Path) -> None:
    trial = replace(TRIALS[0], gate=replace(PASS, min_cosine=float("nan")), bench={"load_ms": float("inf")})
    write_record(replace(RECORD, trials=(trial,)), tmp_path / "r.zip")
    read = read_record(tmp_path / "r.zip").trials[0]
    assert read.gate is not None and read.gate.min_cosine is None and read.bench == {"load_ms": None}


def test_a_name_that_is_more_than_a_name_is_not_written(tmp_path: Path) -> None:
    bad = replace(
        RECORD, chip="M5 of\nAda", trials=(replace(TRIALS[2], configuration=Configuration("/a/b", "", "", 1)),)
    )
    with pytest.raises(RequestError) as caught:
        write_record(bad, tmp_path / "r.zip")
    assert str(caught.value) == (
        f"the record {tmp_path}/r.zip cannot be written: chip 'M5 of\\nAda' is more than a name; "
        "trial 0: model '/a/b' is more than a name."
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("change", "said"), [
    (lambda m: m["record.json"].update(format=2), "has format 2 and this anechain reads 1: use the version that"),
    (lambda m: m["record.json"].update(serial="C02"), "unexpected keyword argument 'serial'"),
    (lambda m: m["record.json"].pop("chip"), "missing 1 required positional argument: 'chip'"),
    (lambda m: m["record.json"].update(chip=5), "cannot be used: chip is 5"),
    (lambda m: m["record.json"].update(trials=[]), "there is no trial for plan-000.json"),
    (lambda m: m["record.json"]["trials"][0]["configuration"].update(layers_per_package="x"), "layers_per_package is"),
    (lambda m: m["record.json"]["trials"][1]["configuration"].update(state_update="cat"), "'cat' is none of 'slice'"),
    (lambda m: m["record.json"]["trials"][0]["bench"].update(load_ms="fast"), "trial 0: bench load_ms is no number"),
    (lambda m: m["record.json"]["trials"][0]["gate"].update(top1="all"), "trial 0: gate top1 is no number"),
    (lambda m: m["plan-000.json"]["packages"]["block-000.mlpackage"]["decode"].update(x={"device": "TPU"}), "'TPU' is"),
    (lambda m: m.pop("record.json"), "There is no item named 'record.json' in the archive"),
    (lambda m: m.update({"record.json": []}), "record.json holds no JSON object"),
])  # fmt: skip
def test_what_is_no_record_is_refused(path: Path, change: Any, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_record(changed(path, change))
    assert said in str(caught.value) and str(path) in str(caught.value)


def test_files_that_are_no_zip_or_cut_short(path: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"cannot be read .No such file or directory.: check the path"):
        read_record(tmp_path / "missing.zip")
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(RequestError, match=r"is not a record .File is not a zip file.: `anechain doctor --record`"):
        read_record(path)


def test_a_member_that_unpacks_to_too_much_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_record(RECORD, tmp_path / "r.zip")
    monkeypatch.setattr("anechain.judge.record._LARGEST_MEMBER", 10)
    with pytest.raises(RequestError, match=r"record.json has \d+ bytes"):
        read_record(tmp_path / "r.zip")
