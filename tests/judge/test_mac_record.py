"""What `doctor --record` measures: every row of its table, against the double of Core ML. It proves the protocol."""

import os
import platform
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from anechain.cli import doctor as verb
from anechain.judge import mac_record
from anechain.judge.conformance import CHECKS
from anechain.judge.mac_record import NOT_AVAILABLE, ROWS, Mac, Row, describe, make_record
from anechain.judge.record import Record, read_record, write_record
from anechain.run.coreml import CoreMLEngine
from tests.cli.outcome import Outcome, anechain
from tests.in_process import InProcess
from tests.run.coreml_double import Manners, SameDouble
from tests.tiny import write_tiny

__all__ = ["anechain"]
POLITE = Manners()
MAC = Mac("macOS 26.0.1", "M5 Pro", "Mac17,3")


@dataclass(frozen=True)
class Engines:
    """Makes the engine with the double, here and in other processes."""

    cache: Path
    manners: Manners = POLITE

    def __call__(self) -> CoreMLEngine:
        return CoreMLEngine(make_port=SameDouble(self.manners), cache=self.cache)


def ends_the_process() -> CoreMLEngine:
    os._exit(9)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("model") / "tiny", "llama", num_hidden_layers=2))


@pytest.fixture(scope="module")
def passing(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One whose fp16 chain passes the gate."""
    return str(write_tiny(tmp_path_factory.mktemp("model") / "tiny", "llama", num_hidden_layers=1))


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Bakes and loads without worker processes; one folder for baselines."""
    monkeypatch.setattr("anechain.run.coreml.probe", lambda *arguments: None)
    monkeypatch.setattr("anechain.bake.jobs.ProcessPoolExecutor", InProcess)
    monkeypatch.setenv("ANECHAIN_CACHE", str(tmp_path_factory.getbasetemp() / "record-cache"))


def recorded(model: str, make: Callable[[], CoreMLEngine], *rows: Row) -> Record:
    return make_record(MAC, model, make, lambda line: None, rows, context=128)


def test_the_table_holds_what_was_asked_for() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert {row.layers for row in ROWS if row.scheme == "fp16"} == {None, 1, 2, 5, 1000}
    assert {"fp16", "int8", "int8-block32", "palette6-group16", "palette8", "m8"} == {row.scheme for row in ROWS}
    assert {row.norm for row in ROWS} == {"max-scaled", "layer_norm"}
    assert [row.options for row in ROWS if row.options] == [
        {"state_update": "blend"}, {"state_update": "blend"}, {"activations": "int8"},
    ]  # fmt: skip
    (control,) = (row for row in ROWS if row.name == "historical recipe")
    assert control.recipe().compute == "fp32" and control.layers == 1
    assert next(row for row in ROWS if row.norm == "layer_norm").recipe().norm == "layer_norm"


def test_a_row_is_baked_checked_gated_timed_and_planned(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mac_record, "ProcessPoolExecutor", InProcess)
    row = Row("int8, layer_norm, one layer a package", "int8", 1, "layer_norm")
    record = recorded(model, Engines(tmp_path / "c"), row)
    (first,) = record.trials
    assert (first.configuration.recipe, first.configuration.layers_per_package) == ("int8", 1)
    assert first.configuration.norm == "layer_norm"
    assert first.gate is not None and first.gate.engine == "coreml" and first.gate.positions == 40
    assert set(first.bench) == {
        "load_ms", "first_token_ms", "prefill_tok_per_s", "decode_tok_per_s", "peak_rss_bytes",
    }  # fmt: skip
    assert all(value is not None and value > 0 for value in first.bench.values())
    assert first.handoff.startswith("zero-copy") and first.diverged == ""
    assert set(first.plan) == {"block-000.mlpackage", "block-001.mlpackage", "head.mlpackage"}
    assert set(record.checks) == {f"{row.name}: {check}" for check in CHECKS}
    assert not any(record.checks.values())
    assert "tok/s, hand-off zero-copy" in describe(first)

    path = tmp_path / "out.zip"
    write_record(record, path)
    kept = read_record(path)
    assert kept == record and (kept.os, kept.chip, kept.machine) == (MAC.os, MAC.chip, MAC.machine)
    with zipfile.ZipFile(path) as archive:
        everything = b"".join(archive.read(name) for name in archive.namelist()).decode()
    assert str(tmp_path) not in everything and platform.node() not in everything
    assert os.environ.get("USER", "nobody-at-all") not in everything and "capital of France" not in everything


def test_what_this_version_cannot_bake_is_named(model: str, tmp_path: Path) -> None:
    record = recorded(
        model, Engines(tmp_path / "c"), Row("later", options={"state_of_tomorrow": "x"}), Row("thin", "int1")
    )
    assert [t.status for t in record.trials] == ["unknown", "unknown"] and record.checks == {}
    assert record.trials[0].handoff == f"{NOT_AVAILABLE}this anechain does not know state_of_tomorrow"
    assert record.trials[1].handoff.startswith(f"{NOT_AVAILABLE}thin.toml cannot be used: rule 1: scheme 'int1' is not")
    assert describe(record.trials[0]) == record.trials[0].handoff


def test_what_core_ml_refuses_is_a_divergence(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mac_record, "ProcessPoolExecutor", InProcess)
    make = Engines(tmp_path / "c", Manners(fails={"block-001": "load decode"}))
    (trial,) = recorded(model, make, Row("fp16, one", layers=1)).trials
    assert trial.diverged == "Core ML cannot load decode: it said that it will not."
    assert (trial.status, trial.gate, trial.plan) == ("broken", None, {})
    assert describe(trial) == trial.diverged


def test_a_process_that_ends_costs_its_row_alone(model: str, tmp_path: Path) -> None:
    (trial,) = recorded(model, ends_the_process, Row("fp16")).trials
    assert trial.diverged == "Core ML ended the process, after the package had been tried out alone"
    assert trial.status == "broken"


def test_on_a_mac_it_is_written(
    passing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anechain: Callable[..., Outcome]
) -> None:
    """The verb, with the double in Core ML's place and one row; copies are told, and are no divergence."""
    monkeypatch.setattr(mac_record, "ProcessPoolExecutor", InProcess)
    make = Engines(tmp_path / "c", Manners(refuses=frozenset({"hidden_out"})))
    monkeypatch.setattr("anechain.run.coreml.CoreMLEngine", make)
    monkeypatch.setattr(mac_record.make_record, "__defaults__", ((Row("fp16"),), 128))
    monkeypatch.setattr(mac_record, "open_merged", lambda m, lora, real=mac_record.open_merged: real(passing, lora))
    monkeypatch.setattr(verb, "_sysctl", lambda name: {"hw.model": "Mac17,3"}.get(name, "Apple M5 Pro"))
    monkeypatch.setattr(platform, "mac_ver", lambda: ("26.0.1", ("", "", ""), "arm64"))
    monkeypatch.setattr(verb, "_chip", lambda: "Apple M5 Pro")
    code, out, err = anechain("doctor", "--record", tmp_path / "out.zip")
    assert (code, out) == (0, "") and "1 of 1: fp16" in err
    record = read_record(tmp_path / "out.zip")
    assert (record.os, record.chip, record.machine) == ("macOS 26.0.1", "M5 Pro", "Mac17,3")
    (trial,) = record.trials
    assert trial.configuration.model == "demo"
    assert trial.handoff.startswith("copied ") and trial.diverged == "" and trial.status == "works"
    assert record.checks["fp16: the hand off copies nothing"].startswith("the hand-off is copied")
    code, _, err = anechain("doctor", "--record", tmp_path / "no" / "out.zip")
    assert code == 2 and f"there is no folder {tmp_path / 'no'}" in err
