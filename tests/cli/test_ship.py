"""`ship`, `score` and `eval` as a user meets them: the verdict both ways, the card, the history, the sign-off."""

import json
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import pytest

from anechain.bundle.manifest import open_bundle
from anechain.judge import card as card_module
from anechain.judge.card import html, layer_bytes, model_card
from anechain.judge.measured import configuration_of
from anechain.judge.record import Device, GateFigures, Record, Trial, write_record
from anechain.judge.ship import HISTORY, Thresholds
from tests.cli.outcome import Outcome, refusal
from tests.cli.specialist import (
    THRESHOLDS,
    World,
    baked,
    card_of,
    make_world,
    with_a_short_gate,
    without_drawing,
    without_measuring,
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def dropped(world: World) -> Path:
    return baked(world.root / "dropped", world.model, None)


def test_one_that_is_as_good_and_faster_ships(
    world: World, anechain: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same specialist with another prefill: other chunks, another manifest, the same answers."""
    without_measuring(monkeypatch)
    candidate = baked(world.root / "candidate", world.model, world.lora, prefill=0)
    code, out, _ = anechain(*world.arguments(candidate), "--model-card")
    assert code == 0 and re.search(r"^SHIP \(cpu, [\w-]+\)$", out, re.MULTILINE) and "ANE: not measured" in out
    card = card_of(world)
    assert card["ships"] and card["passed"] and not card["reasons"] and not card["override"]
    assert [p["name"] for p in card["parts"]] == ["lint", "gate", "traces", "fixtures", "score"]
    assert all(p["passed"] for p in card["parts"])
    assert {(g["profile"], g["engine"]) for g in card["gate"]} == {("m8", "reference"), ("m8", "reference-stress")}
    assert card["eval"]["passed"] == card["eval"]["n"] == 8 and card["score"]["speed_ratio"] == pytest.approx(2.0)
    page = (world.root / "card/card.html").read_text(encoding="utf-8")
    assert "accuracy +0.00 pp" in out and "+0.00 pp" in page and "-0.00" not in out + page
    assert "SHIP (cpu, " in page and page.count("<svg") == 6 and "prefers-color-scheme: dark" in page
    assert not re.search(r"""(?:src|href)=["'](?!#)|url\((?!#)|<script""", page.replace("xmlns:xlink", ""))
    ElementTree.fromstring(re.search(r"<svg.*?</svg>", page, re.DOTALL)[0])  # type: ignore[index]
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids)) and "#0" + "1" * 5 not in page
    readme = (world.root / "card/README.md").read_text(encoding="utf-8")
    assert readme.startswith("---\n") and "| ANE | not measured |" in readme and "runs on the ANE" not in readme + page
    known = [float(x) for x in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", json.dumps(card))]
    figures = set(re.findall(r"\d+\.\d+", readme)) - set(re.findall(r"\d+\.\d+", json.dumps(card)))
    for figure in figures:  # a rounding of something in the card
        digits = len(figure.partition(".")[2])
        assert any(f"{scale * x:.{digits}f}" == figure for x in known for scale in (1, 100, 1e-6)) or re.search(
            rf"{re.escape(figure)}e-\d\d", readme
        ), figure  # fmt: skip
    history = [json.loads(line) for line in (candidate / HISTORY).read_text(encoding="utf-8").splitlines()]
    assert len(history) == 1 and history[0]["ships"] and history[0]["evaluation_sha256"] == card["eval"]["sha256"]
    open_bundle(candidate, verify_hashes=True)  # which a history does not disturb


def test_one_that_forgot_its_task_is_reverted_and_signed_off_in_red(
    world: World, dropped: Path, anechain: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_measuring(monkeypatch)
    without_drawing(monkeypatch)
    with_a_short_gate(monkeypatch)
    code, out, _ = anechain(*world.arguments(dropped))
    assert code == 1 and re.search(r"^REVERT \(cpu, [\w-]+\)$", out, re.MULTILINE)
    card = card_of(world)
    assert not card["ships"] and any(r.startswith("fixtures: ") and "pp were lost" in r for r in card["reasons"])
    monkeypatch.setattr(card_module, "_drawn", lambda card: defaultdict(str))  # the test above looks at the plots
    page = html(card)
    for pair in card["eval"]["against"]["discordant"]:
        assert f"<code>{pair['other']['text'].replace(chr(34), '&#34;')}</code>" in page
    assert card["eval"]["against"]["discordant"] and 'class="override"' not in page
    code, out, _ = anechain(*world.arguments(dropped), "--override", "wanted for <b>a demo</b>", "--json")
    card = json.loads(out)
    assert code == 0 and card["ships"] and not card["passed"] and card["verdict"].endswith(", OVERRIDDEN")
    assert card["reasons"] and "Reason given: wanted for &lt;b&gt;a demo" in html(card)
    assert "**Signed off with a failed part.**" in model_card(card)
    lines = (dropped / HISTORY).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["ships"] for line in lines] == [False, True]


def test_an_override_of_nothing_is_no_override(
    world: World, anechain: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_measuring(monkeypatch)
    with_a_short_gate(monkeypatch)
    without_drawing(monkeypatch)
    code, out, _ = anechain(*world.arguments(world.good), "--override", "just in case", "--json")
    assert code == 0 and json.loads(out)["override"] == "" and "OVERRIDDEN" not in out


def test_every_threshold_decides(
    world: World, dropped: Path, anechain: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A loss of everything passes under limits that allow it, and the card has the hash of those limits."""
    without_measuring(monkeypatch, speed=1.0, cost=0.5)
    with_a_short_gate(monkeypatch)
    without_drawing(monkeypatch)
    lax = THRESHOLDS
    for old, new in (
        ("max_loss_pp = 1.0", "max_loss_pp = 100.0"), ("min_pass_rate = 0.5", "min_pass_rate = 0.0"),
        ("min_speed_ratio = 1.5", "min_speed_ratio = 1"), ("max_accuracy_loss_pp = 2.0", "max_accuracy_loss_pp = 100"),
        ("min_cost_ratio = 1.0", "min_cost_ratio = 0.5"),
    ):  # fmt: skip
        assert old in lax
        strict = (tmp_path / "strict.toml", lax)
        lax = lax.replace(old, new)
    (tmp_path / "lax.toml").write_text(lax, encoding="utf-8")
    code, out, _ = anechain(*world.arguments(dropped, thresholds=tmp_path / "lax.toml"), "--json")
    card = json.loads(out)
    assert code == 0 and card["passed"] and card["thresholds"]["values"]["fixtures"]["max_loss_pp"] == 100.0
    assert card["thresholds"]["sha256"] == Thresholds.load(tmp_path / "lax.toml").sha256 != Thresholds.load().sha256
    strict[0].write_text(strict[1], encoding="utf-8")
    code, out, _ = anechain(*world.arguments(dropped, thresholds=strict[0]), "--json")
    assert code == 1 and [r.partition(":")[0] for r in json.loads(out)["reasons"]] == ["score"]


def test_thresholds_that_cannot_be_used_say_all_that_is_wrong(
    world: World, tmp_path: Path, anechain: Callable[..., Outcome]
) -> None:
    text = THRESHOLDS.replace("min_valid = 1.0", "min_valid = 'all'").replace("max_errors", "errors")
    (tmp_path / "x.toml").write_text(text.replace('["m8"]', '["m9"]') + "[more]\nx = 1\n", encoding="utf-8")
    said = refusal(anechain, world.root, *world.arguments(world.good, thresholds=tmp_path / "x.toml"))
    for fault in (
        "lint.errors is not a known threshold", "lint.max_errors is missing", "gate.profiles = ['m9'] is not a list",
        "traces.min_valid = 'all' is not a number", "more is not a known table",
    ):  # fmt: skip
        assert fault in said
    assert "needs a reason" in refusal(anechain, world.root, *world.arguments(world.good), "--override", " ")


def test_eval_alone_paired_and_as_junit(
    world: World, dropped: Path, tmp_path: Path, anechain: Callable[..., Outcome]
) -> None:
    told = ["--suite", world.suite.path, "--engine", "cpu"]
    code, out, _ = anechain("eval", world.good, *told, "--junit", tmp_path / "r.xml", "--split", "gate")
    assert code == 0 and "2 of 2" in out and "100.0%" in out
    assert len(ElementTree.parse(tmp_path / "r.xml").findall(".//testcase")) == 2
    code, out, _ = anechain("eval", dropped, *told, "--against", world.good)
    assert code == 0 and "exact McNemar p = " in out and "lost f0" in out and "pp (Tango)" in out
    code, out, _ = anechain("eval", dropped, *told, "--against", world.good, "--json")
    record = json.loads(out)
    assert record["against"]["lost"] > 3 and record["identity"]["model"]["adapter_sha256"] is None
    assert record["against"]["other"]["identity"]["model"]["adapter_sha256"]
    code, out, _ = anechain("eval", world.good, *told, "--json", "--against-source", world.model, "--against-lora",
                            world.lora)  # fmt: skip
    record = json.loads(out)
    assert code == 0 and record["against"]["other"]["identity"]["engine"] == "oracle" and record["against"]["lost"] == 0
    code, out, _ = anechain("eval", world.good, *told, "--traces", "--json")
    assert code == 0 and json.loads(out)["valid"] == 6 and json.loads(out)["first_token_ms"]["median"] > 0


def test_what_eval_cannot_do_it_refuses(world: World, dropped: Path, anechain: Callable[..., Outcome]) -> None:
    for arguments, said in (
        (["--against", dropped, "--against-source", "demo"], "are two opponents"),
        (["--against-lora", "x"], "belongs to --against-source"),
        (["--traces", "--against", dropped], "judges one bundle alone"),
        (["--split", "half"], "--split half is not known"),
        (["--suite", "nowhere"], "--suite nowhere is neither"),
    ):  # fmt: skip
        told = ["--suite", world.suite.path] if "--suite" not in arguments else []
        assert said in refusal(anechain, world.root, "eval", world.good, *told, *arguments)


def test_a_record_of_a_mac_gives_the_verdict_a_second_line(
    world: World, dropped: Path, tmp_path: Path, anechain: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record speaks of the form, which both share; that the fixtures were lost here stays a reason."""
    without_measuring(monkeypatch)
    with_a_short_gate(monkeypatch)
    without_drawing(monkeypatch)
    form = replace(configuration_of(open_bundle(world.good)), model=world.model.name)
    plan = {"block-000.mlpackage": {"decode": {"conv": Device("NE", 1.0)}}}
    gate = GateFigures("pass", "m8", "coreml", 0.9999, 1e-5, 1e-4, 1.0, 40)
    bench = {"first_token_ms": 100.0, "decode_tok_per_s": 40.0}
    write_record(
        Record("macOS 26.0.1", "M5 Pro", "Mac17,3", version("coremltools"), "0.1", "coreml",
               (Trial(form, gate=gate, bench=bench, plan=plan),)), tmp_path / "mac.zip",
    )  # fmt: skip
    limits = tmp_path / "same.toml"
    limits.write_text(THRESHOLDS.replace("0.9\nmin_speed_ratio = 1.5", "0.9\nmin_speed_ratio = 1.0"), encoding="utf-8")
    told = world.arguments(world.good, record=tmp_path / "mac.zip", thresholds=limits)
    code, out, _ = anechain(*told, "--model-card")
    assert code == 0 and "ANE: SHIP (ane, macOS 26.0.1, M5 Pro)" in out
    readme = (world.root / "card/README.md").read_text(encoding="utf-8")
    assert "| runs on the ANE | 100.0% of the recorded compute plan's cost, macOS 26.0.1, M5 Pro |" in readme
    code, out, _ = anechain(*world.arguments(dropped, record=tmp_path / "mac.zip", thresholds=limits), "--model-card")
    assert code == 1 and "ANE: REVERT (ane, macOS 26.0.1, M5 Pro)\n    fixtures failed" in out
    assert "runs on the ANE" not in (world.root / "card/README.md").read_text(encoding="utf-8")
    refused = refusal(anechain, world.root, *world.arguments(world.good, record=limits))
    assert "same.toml is not a record" in refused


def test_the_layers_hold_all_weights(world: World) -> None:
    parts = {p["name"]: p["bytes"] for p in layer_bytes(open_bundle(world.good))}
    matrices = 2 * (128 * 64 + 2 * 64 * 64 + 64 * 128 + 3 * 96 * 64)
    assert matrices < parts["0"] < matrices + 1000  # and the norms
    assert parts["head"] > 2 * 320 * 64 and parts["embedding"] >= 2 * 320 * 64 and next(iter(parts)) == "0"
