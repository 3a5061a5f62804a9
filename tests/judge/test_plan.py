"""`anechain plan` and its --bisect, against the double of Core ML."""

import json
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from anechain.bundle.manifest import Bundle
from anechain.bundle.program import read_program
from anechain.cli import plan as verb
from anechain.errors import BundleError, EngineError
from anechain.judge.bisect import Culprit, find_culprit, first_failure
from anechain.judge.lint import lint
from anechain.judge.plan import engine_share, make_plan
from anechain.run.coreml import CoreMLEngine, probe
from anechain.run.coreml_port import Placed
from tests.bundle_maker import make_bundle, tiny_source
from tests.run.coreml_double import Double, Manners, SameDouble

SOURCE = tiny_source("llama")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return make_bundle(SOURCE, tmp_path_factory.mktemp("plan") / "b", "fp16", 32, 32, (1, 2))


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages are taken to have been tried out."""
    monkeypatch.setattr("anechain.run.coreml.probe", lambda *arguments: None)


@pytest.mark.usefixtures("probed")
def test_a_plan_is_what_lint_takes(bundle: Bundle, tmp_path: Path) -> None:
    made = make_plan(bundle, CoreMLEngine(make_port=SameDouble(), cache=tmp_path / "c"), lambda done, total, what: None)
    assert made.strange == 0
    assert {(file, function) for file, function, *_ in made.rows()} == {
        ("block-000.mlpackage", "decode"), ("block-000.mlpackage", "prefill"),
        ("block-001.mlpackage", "decode"), ("block-001.mlpackage", "prefill"), ("head.mlpackage", "decode"),
    }  # fmt: skip
    for file, function, count, share in made.rows():
        ops = read_program(bundle.path / file).functions[function].ops
        convolutions = sum(op.type == "conv" for op in ops)
        assert count == {"NE": convolutions, "CPU": len(ops) - convolutions}
        assert share == pytest.approx(convolutions / len(ops))
    (tmp_path / "plan.json").write_text(json.dumps(made.to_json("Mac0,0 (double)", "macOS of the double")))
    report = lint(bundle.path, plan=tmp_path / "plan.json")
    assert report.plan is not None and report.plan.where == "Mac0,0 (double), macOS of the double"
    measured = [f for f in report.findings if f.rule == "plan"]
    assert {f.severity for f in measured if "matmul" in f.detail} == {"E"}
    assert not [f for f in measured if "conv on" in f.detail] and len(measured) > 100


@pytest.mark.usefixtures("probed")
def test_names_that_core_ml_made_up_are_counted(bundle: Bundle, tmp_path: Path) -> None:
    made = SameDouble()
    plan = made.double.plan
    made.double.plan = lambda *a: {**plan(*a), "made_up": Placed("CPU", None)}  # type: ignore[method-assign]
    planned = make_plan(bundle, CoreMLEngine(make_port=made, cache=tmp_path), lambda done, total, what: None)
    assert planned.strange == 5
    assert not [op for fs in planned.places.values() for ops in fs.values() for op in ops if op == "made_up"]


def test_a_package_that_core_ml_ends_is_not_planned(bundle: Bundle, tmp_path: Path) -> None:
    made = SameDouble(Manners(dies={"block-000": ("load decode", signal.SIGKILL)}))
    with pytest.raises(EngineError, match=r"block-000\.mlpackage loaded 'decode' was ended by SIGKILL: find the layer"):
        make_plan(bundle, CoreMLEngine(make_port=made, cache=tmp_path), lambda done, total, what: None)


def test_the_share_of_the_cost() -> None:
    ops = {"a": Placed("NE", 0.5), "b": Placed("CPU", 0.25), "c": Placed("GPU", 0.25), "d": Placed("NE", None)}
    assert engine_share(ops) == 0.5
    assert engine_share({"a": Placed("NE", None)}) is None


# -- bisect ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 7, 28])
def test_halving_finds_every_place_in_few_steps(count: int) -> None:
    for bad in range(count):
        asked: list[int] = []

        def fails(n: int, bad: int = bad, asked: list[int] = asked) -> str | None:
            asked.append(n)
            return f"at {n}" if n > bad else None

        assert first_failure(count, fails) == (bad, f"at {bad + 1}")
        assert len(asked) <= 1 + count.bit_length()
    assert first_failure(count, lambda n: None) == (None, "")


def scripted(bad: set[str], asked: list[list[str]]):  # type: ignore[no-untyped-def]
    """A probe that fails where one of the names in `bad` is among the packages, or stands for their layers."""

    def probe(paths: Sequence[Path]) -> str | None:
        asked.append([p.name for p in paths])
        return next((f"{p.name} is bad" for p in paths if p.name in bad), None)

    return probe


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (set(), Culprit("", "")),
        ({"head.mlpackage"}, Culprit("head.mlpackage", "head.mlpackage is bad")),
        (
            {"block-001.mlpackage", "layers-1-3.mlpackage"},
            Culprit("block-001.mlpackage", "block-001.mlpackage is bad", True, 2, "layers-1-3.mlpackage is bad"),
        ),
        (
            {"block-001.mlpackage", "layers-1-2.mlpackage", "layers-1-3.mlpackage"},
            Culprit("block-001.mlpackage", "block-001.mlpackage is bad", True, 1, "layers-1-2.mlpackage is bad"),
        ),
        ({"block-001.mlpackage"}, Culprit("block-001.mlpackage", "block-001.mlpackage is bad")),
    ],
    ids=["none", "the head", "a later layer", "the first layer", "no layer alone"],
)
def test_the_package_and_its_layer_are_named(bad: set[str], expected: Culprit, bundle: Bundle) -> None:
    said: list[str] = []
    assert find_culprit(bundle, SOURCE, scripted(bad, []), said.append) == expected
    assert said[0] == "the first 3 of 3 packages"


def test_layers_are_baked_in_the_form_of_their_package(tmp_path: Path) -> None:
    """Blend, and int8 only where the package itself hands on int8."""
    more = {"target": "macOS26", "state_update": "blend", "scales": (0.125,)}
    bundle = make_bundle(SOURCE, tmp_path / "b", "fp16", 32, 0, (2, 1), **more)
    seen: dict[str, dict[str, str]] = {}

    def probe(paths: Sequence[Path]) -> str | None:
        function = read_program(paths[0]).functions["decode"]
        seen[paths[0].name] = {v.name: v.dtype for v in (*function.inputs, *function.outputs)}
        return "bad" if paths[0].name in ("block-000.mlpackage", "layers-0-2.mlpackage") else None

    assert find_culprit(bundle, SOURCE, probe, lambda what: None).layer == 1
    assert seen["layers-0-1.mlpackage"] == seen["block-000.mlpackage"] | {"hidden_out": "fp16"}
    assert seen["layers-0-2.mlpackage"] == seen["block-000.mlpackage"]
    assert seen["block-000.mlpackage"]["hidden_out"] == "int8" and "write" in seen["block-000.mlpackage"]


def test_one_that_fails_only_after_others(bundle: Bundle) -> None:
    def probe(paths: Sequence[Path]) -> str | None:
        return "too many" if len(paths) > 1 else None

    assert find_culprit(bundle, SOURCE, probe, print) == Culprit("block-001.mlpackage", "too many", alone=False)


def test_another_source_is_refused(bundle: Bundle) -> None:
    with pytest.raises(BundleError, match=r"is not what .* was baked from"):
        find_culprit(bundle, tiny_source("llama", seed=1), lambda paths: None, print)


def test_with_real_processes(bundle: Bundle, tmp_path: Path) -> None:
    """The double dies where layer 2 is: alone in a package of its own, and in the package of the bundle."""
    manners = Manners(dies={"block-001": ("load decode", signal.SIGKILL), "layers-1-3": ("load decode", 9)})

    def try_out(paths: Sequence[Path]) -> str | None:
        return probe(paths, "cpu", partial(Double, manners), tmp_path / "c")

    found = find_culprit(bundle, SOURCE, try_out, lambda what: None)
    assert (found.package, found.layer) == ("block-001.mlpackage", 2)
    assert "was ended by SIGKILL" in found.reason and "layers-1-3.mlpackage loaded 'decode'" in found.layer_reason


# -- what is printed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("culprit", "code", "text"),
    [
        (Culprit("", ""), 0, "every package compiles, loads and predicts\n"),
        (Culprit("b", "why"), 1, "b fails, and no layer of it alone does: why\n"),
        (Culprit("b", "why", False), 1, "b fails only after the packages before it: why\n"),
        (Culprit("b", "why", True, 3, "for this"), 1, "b fails from layer 3 on: for this\n"),
    ],
)
def test_what_bisect_says(culprit: Culprit, code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert verb.show_culprit(culprit, as_json=False) == code
    assert capsys.readouterr().out == text
    assert verb.show_culprit(culprit, as_json=True) == code
    record = json.loads(capsys.readouterr().out)
    assert record == {
        "package": culprit.package or None, "alone": culprit.alone, "layer": culprit.layer,
        "reason": culprit.layer_reason or culprit.reason,
    }  # fmt: skip


@pytest.mark.usefixtures("probed")
def test_what_a_plan_says(bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = make_plan(bundle, CoreMLEngine(make_port=SameDouble(), cache=tmp_path), lambda done, total, what: None)
    verb.show(made)
    out, err = capsys.readouterr()
    assert out.count("block-00") == 4 and "head.mlpackage" in out and err == ""
