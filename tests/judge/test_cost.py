"""The cost model: refitted from its data, held against the files of a bundle, and computed by hand."""

import importlib.util
import json
import math
import sys
import tomllib
from dataclasses import asdict, replace
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from anechain import cli
from anechain.bundle.manifest import Bundle
from anechain.bundle.program import read_program
from anechain.bundle.spec import DECODE
from anechain.errors import RequestError
from anechain.judge.compatibility import Machine
from anechain.judge.cost import Chip, Constants, Parts, Work, blocks_work, chips, constants, head_work, parts, predict
from tests.bundle_maker import make_bundle, tiny_source

REPO = Path(__file__).parents[2]
DATA = tomllib.loads((resources.files("anechain") / "data/ane-measurements.toml").read_text(encoding="utf-8"))
ROWS: list[dict[str, Any]] = DATA["measurement"]
M4 = Machine("macOS", (15,), "M4")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fit_cost_model", REPO / "benchmarks/fit_cost_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return make_bundle(tiny_source("qwen3"), tmp_path_factory.mktemp("b") / "b", "int8", 64, 32, (2, 1))


def test_the_constants_are_what_the_script_fits(
    script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["fit_cost_model.py", "--json"])
    script.main()
    found = json.loads(capsys.readouterr().out)
    assert found["fit"] == asdict(constants())
    assert found["A19 Pro"] == chips()["A19 Pro"].bandwidth_gb_s
    unseen = found["summary"]["tested on, all"]
    assert abs(unseen["rows"] - len(ROWS) / 2) <= 1 and unseen["mean_error"] < 0.25
    # The page in the docs says just this.
    page = (REPO / "docs/cost.md").read_text(encoding="utf-8")
    for name, summary in found["summary"].items():
        if name.startswith("tested on"):
            kind = name.rpartition(" ")[2]
            row = f"| {kind} | {summary['rows']} | {summary['within_25_percent']} | {summary['mean_error']:.0%} |"
            assert row in page, row
    for row in ROWS:
        assert f"| {row['id']} |" in page and f"| {math.expm1(found['errors'][row['id']]):+.0%} |" in page, row["id"]


def test_the_halves_share_nothing_and_have_a_bit_of_everything(script: ModuleType) -> None:
    seen, unseen = script.halves(ROWS)
    names = [{row["id"] for row in half} for half in (seen, unseen)]
    assert not names[0] & names[1] and names[0] | names[1] == {row["id"] for row in ROWS} and len(ROWS) >= 30
    for half in (seen, unseen):
        assert {row["kind"] for row in half} == set(script.KINDS)


def test_a_fit_finds_the_constants_that_made_its_data(script: ModuleType) -> None:
    truth = {"layer_ms": 0.3, "compute_share": 0.5, "expansion": 0.2, "A19 Pro": 70.0}
    fit, known = script.model(truth, chips())
    rows = []
    for row in ROWS:
        made = {key: value for key, value in row.items() if key not in ("ms", "tok_per_s")}
        rows.append(made | {"ms": parts(script.work_of(row), known[row["chip"]], fit).ms})
    found = script.fitted(rows, chips())
    assert found == pytest.approx(truth, rel=0.02)


def test_every_figure_has_a_source_and_every_chip_is_known() -> None:
    for chip in chips().values():
        assert chip.fitted or chip.bandwidth_source.startswith("https://")
        assert chip.dispatch_source.startswith("https://") and chip.bandwidth_gb_s > 0
        assert (chip.tera_ops is None) == (chip.tera_ops_source == "")
    for row in ROWS:
        assert row["source"].startswith("https://") and ("ms" in row) != ("tok_per_s" in row) and row["chip"] in chips()
    assert all(set(row) == {"what", "published", "source", "reason"} for row in DATA["left_out"])


def test_a_step_by_hand() -> None:
    chip = Chip("X", 50.0, "", 0.5, "", tera_ops=10.0)
    fit = Constants(layer_ms=0.25, compute_share=0.4, expansion=0.1, decode_spread=2.0, chunk_spread=1.5)
    work = Work(weight_bytes=100e6, fp16_bytes=200e6, state_bytes=40e6, multiply_adds=1e9, layers=4, dispatches=3)
    read = (100e6 * 0.9 + 200e6 * 0.1 + 40e6) / 50e9 * 1e3
    got = parts(work, chip, fit)
    assert (got.dispatch_ms, got.layers_ms) == (1.5, 1.0)
    assert got.stream_ms == pytest.approx(read) and got.compute_ms == pytest.approx(2e9 / 4e12 * 1e3)
    assert got.ms == pytest.approx(2.5 + read)  # reading takes longer
    assert parts(work, chip, fit, expansion=1.0).stream_ms == pytest.approx(240e6 / 50e9 * 1e3)
    assert Parts(0.0, 0.0, 1.0, 7.0).ms == 7.0 and Parts(0.0, 0.0, 1.0, None).ms == 1.0


def test_bytes_are_those_of_the_files(bundle: Bundle) -> None:
    """All weights of the blocks and of the head, but for norms and the mask of a chunk."""
    for work, paths in ((blocks_work(bundle, 1), bundle.block_paths), (head_work(bundle), [bundle.head_path])):
        stored = 0
        for path in paths:
            function = read_program(path).functions[DECODE]
            for op in function.ops:
                if op.type == "constexpr_blockwise_shift_scale":
                    stored += sum(function.consts[op.inputs[part][0]].nbytes for part in ("data", "scale"))
        assert work.weight_bytes == stored > 0
        assert work.dispatches == len(paths)
    spec = bundle.spec
    assert blocks_work(bundle, 1).state_bytes == 2 * spec.n_layers * spec.n_kv_heads * 64 * spec.head_dim * 2
    blend = replace(bundle, state_update="blend")
    assert blocks_work(blend, 1).state_bytes == 2 * blocks_work(bundle, 1).state_bytes


def test_a_prediction_adds_up(bundle: Bundle) -> None:
    record = predict(bundle, M4, prompt=40)
    chip, fit = chips()["M4"], constants()
    token_ms = parts(blocks_work(bundle, 1), chip, fit).ms + parts(head_work(bundle), chip, fit).ms
    assert record["decode"]["tok_per_s"] == pytest.approx(1e3 / token_ms)
    assert record["decode"]["parts_ms"]["dispatch"] == pytest.approx(3 * chip.dispatch_ms)
    chunk_ms = parts(blocks_work(bundle, 32), chip, fit).ms
    head_ms = parts(head_work(bundle), chip, fit).ms
    assert record["first_token"]["ms"] == pytest.approx(2 * chunk_ms + head_ms)  # 40 tokens are two chunks of 32
    assert record["prefill"]["tok_per_s"] == pytest.approx(32 / chunk_ms * 1e3)
    for name, key in (("decode", "tok_per_s"), ("prefill", "tok_per_s"), ("first_token", "ms")):
        assert record[name]["low"] < record[name][key] < record[name]["high"]
    one_by_one = predict(replace(bundle, prefill=0), M4, prompt=40)
    block_ms = parts(blocks_work(bundle, 1), chip, fit).ms
    assert one_by_one["first_token"]["ms"] == pytest.approx(40 * block_ms + head_ms)
    assert "int8 and int4 may be read as fp16 (rule Q2): the low end of decode is computed so" in record["caveats"]


def test_what_is_not_published_is_not_predicted(bundle: Bundle) -> None:
    record = predict(bundle, Machine(chip="M5"))
    assert record["prefill"] is record["first_token"] is None and record["decode"]["tok_per_s"] > 0
    assert any("no operations per second of the M5's ANE are published" in text for text in record["caveats"])
    assert record["decode"]["parts_ms"]["compute"] is None


@pytest.mark.parametrize(("machine", "prompt", "said"), [
    (Machine(chip="M9"), 1, "--chip 'M9' is not known here: nothing is published of other chips than M1, M1 Pro, "),
    (Machine(), 1, "--chip is needed: nothing is published of other chips than M1, "),
    (M4, 65, "--prompt 65 is not a whole number from 1 to the context of 64."),
])  # fmt: skip
def test_refusals(machine: Machine, prompt: int, said: str, bundle: Bundle) -> None:
    with pytest.raises(RequestError) as caught:
        predict(bundle, machine, prompt)
    assert str(caught.value).startswith(said)


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["anechain", "cost", *map(str, words)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0), *capsys.readouterr()


def test_the_command_line(bundle: Bundle, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, text, _ = run(capsys, monkeypatch, bundle.path, "--chip", "apple m4 pro", "--os", "macOS15", "--prompt", 40)
    assert code == 0 and text.startswith("predicted for the Neural Engine of M4 Pro, macOS 15, from published figures")
    assert "decode       " in text and "first token  " in text and "source       https://" in text
    code, text, _ = run(capsys, monkeypatch, bundle.path, "--chip", "M4", "--prompt", 40, "--json")
    assert code == 0 and json.loads(text) == json.loads(
        json.dumps({"bundle": str(bundle.path), **predict(bundle, Machine(chip="M4"), 40)})
    )
    for chip in ("M9", "pentium"):
        code, out, err = run(capsys, monkeypatch, bundle.path, "--chip", chip)
        assert (code, out) == (2, "") and len(err.splitlines()) == 1 and "M1 Ultra, M2, " in err
