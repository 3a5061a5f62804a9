"""Lint on our own bundles: no finding of severity E by default, and no mercy for being ours."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from anechain.bake.package import make_block
from anechain.bundle.form import STATE_UPDATES, TARGETS, StateUpdate
from anechain.bundle.manifest import Bundle
from anechain.bundle.recipe import load_recipe
from anechain.judge.compatibility import Machine
from anechain.judge.lint import Finding, Report, lint
from anechain.judge.lint_packages import load_packages
from benchmarks.historical_package import REASONS, build
from tests.bundle.packages import edited
from tests.bundle_maker import SPECS, make_bundle, tiny_source

GRAVE_OF = {9: set[str](), 10: {"V1"}}  # by version of the format
DECISION = Path(__file__).parents[2] / "docs/decisions/0006-lint-findings-that-remain.md"


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    """The tiny Qwen 3 (head_dim 32) in every recipe, two packages and a head each."""
    folder = tmp_path_factory.mktemp("own")
    recipes = ("fp16", "int8", "int8-block32", "m8")
    return {r: make_bundle(tiny_source("qwen3"), folder / r, r, cuts=[1, 2]) for r in recipes}


@pytest.fixture(scope="module")
def reports(bundles: dict[str, Bundle]) -> dict[str, Report]:
    return {recipe: lint(bundle.path) for recipe, bundle in bundles.items()}


def grave(report: Report) -> set[str]:
    return {f.rule for f in report.findings if f.severity == "E"}


@pytest.mark.parametrize("recipe", ["fp16", "int8"])
def test_the_default_recipes_have_no_grave_finding(recipe: str, reports: dict[str, Report]) -> None:
    report = reports[recipe]
    assert grave(report) == set() and report.clean
    assert [s.package for s in report.shares] == ["block-000.mlpackage", "block-001.mlpackage", "head.mlpackage"]
    for share in report.shares:
        assert share.clear_multiply_adds == share.multiply_adds > 0
        assert share.clear_weight_bytes == share.weight_bytes > 0


FORMS = [(target, update) for target in TARGETS for update in STATE_UPDATES if (target, update) != ("macOS15", "slice")]


@pytest.mark.parametrize(("target", "update"), FORMS)
def test_no_form_of_the_default_recipe_has_a_grave_finding_but_version_10(
    target: str, update: StateUpdate, reports: dict[str, Report], tmp_path: Path
) -> None:
    """Beside what the default has: V1 for version 10, and no index of a state for a blend."""
    bundle = make_bundle(tiny_source("qwen3"), tmp_path / "b", cuts=[1, 2], target=target, state_update=update)
    report = lint(bundle.path)
    assert len(report.shares) == 3
    assert grave(report) == GRAVE_OF[TARGETS[target]]
    usual = {f.rule for f in reports["fp16"].findings}
    assert {f.rule for f in report.findings} - {"V1"} <= usual
    assert (usual - {f.rule for f in report.findings} >= {"T5", "K4"}) == (update == "blend")


def test_int8_in_blocks_is_found_and_only_there(reports: dict[str, Report]) -> None:
    report = reports["int8-block32"]
    assert grave(report) == {"Q1"}
    head = next(s for s in report.shares if s.package == "head.mlpackage")
    assert head.findings["E"] == 0 and head.clear_weight_bytes == head.weight_bytes
    packages, _ = load_packages(report.path)
    for package, share in list(zip(packages, report.shares, strict=True))[:2]:
        # what is left of a block: the products of attention, and the norms' gains and the masks
        products = [view.multiply_adds(op) for view in package.views for op in view.of("matmul")]
        assert share.clear_multiply_adds == sum(products) > 0
        assert 0 < share.clear_weight_bytes < 0.2 * share.weight_bytes


def test_the_two_reasons_that_remain_of_m8(reports: dict[str, Report]) -> None:
    report = reports["m8"]
    assert grave(report) == {"T1", "Q1"}
    assert all(s.clear_multiply_adds == 0 for s in report.shares)


@pytest.mark.slow
def test_all_four_reasons_of_the_historical_package(tmp_path: Path) -> None:
    report = lint(build(tmp_path / "old.mlpackage", 64, 4, 2, 32, 96, 64))
    assert set(REASONS) <= grave(report) and not report.clean
    (share,) = report.shares
    assert share.clear_multiply_adds == share.clear_weight_bytes == 0


@pytest.mark.parametrize("recipe", ["fp16", "int8"])
def test_what_remains_is_listed_with_its_reason(recipe: str, reports: dict[str, Report]) -> None:
    listed = set(re.findall(r"^\| ([A-Z][0-9]+) \|", DECISION.read_text(encoding="utf-8"), re.MULTILINE))
    remaining = {f.rule for f in reports[recipe].findings if f.severity != "E"}
    assert remaining and remaining <= listed


@pytest.mark.parametrize("family", [f for f in SPECS if f not in ("qwen3", "gemma3")])
def test_other_families_have_only_what_their_tiny_heads_bring(family: str, tmp_path: Path) -> None:
    """Heads of 16 numbers are a state's last axis (K9); no real model of these families has such."""
    report = lint(make_bundle(tiny_source(family), tmp_path / "b", "int8").path)
    assert grave(report) == {"K9"}


def test_a_context_that_is_no_multiple_of_32_shows(tmp_path: Path) -> None:
    """The planner refuses it; a package of it is seen all the same."""
    source = tiny_source("qwen3")
    path = tmp_path / "block.mlpackage"
    make_block(source, source.spec, load_recipe("fp16"), range(1), 1000, 0, path)
    assert [f.op for f in lint(path).findings if f.rule == "K9"] == ["kv"]


def test_the_system_that_breaks_our_prefill(bundles: dict[str, Bundle], tmp_path: Path) -> None:
    there = Machine("macOS", (26, 0, 1), "M5")
    wide = make_bundle(tiny_source("qwen3"), tmp_path / "b", "fp16", context=128, prefill=64)
    found = [f for f in lint(wide.path, there).findings if f.severity == "E"]
    assert {(f.rule, f.function, f.op) for f in found} == {("K4", "prefill", "kv_next")}
    assert lint(bundles["fp16"].path, there).clean  # chunks of 32
    assert lint(wide.path, Machine("macOS", (26, 6, 2), "M5")).clean


# -- a foreign twin ----------------------------------------------------------------------------------------------------


def renamed(model: Any) -> None:
    """Gives every function, value and op a name that says nothing, and takes away what the metadata says."""
    names: dict[str, str] = {}

    def new(name: str) -> str:
        return names.setdefault(name, f"v{len(names)}")

    for function in model.mlProgram.functions.values():
        for value in function.inputs:
            value.name = new(value.name)
        block = function.block_specializations[function.opset]
        for op in block.operations:
            for argument in op.inputs.values():
                for binding in argument.arguments:
                    if binding.WhichOneof("binding") == "name":
                        binding.name = new(binding.name)
            for value in op.outputs:
                value.name = new(value.name)
            if "name" in op.attributes:
                (old,) = op.attributes["name"].immediateValue.tensor.strings.values
                op.attributes["name"].immediateValue.tensor.strings.values[:] = [new(f"op {old}")]
        block.outputs[:] = [new(name) for name in block.outputs]
    for described in model.description.functions:
        for feature in (*described.input, *described.output, *described.state):
            feature.name = new(feature.name)
        other = {"decode": "generate", "prefill": "read"}[described.name]
        model.mlProgram.functions[other].CopyFrom(model.mlProgram.functions[described.name])
        del model.mlProgram.functions[described.name]
        described.name = other
    model.description.defaultFunctionName = "generate"
    model.description.metadata.userDefined.clear()
    model.description.metadata.userDefined["author"] = "somebody else"


def seen(finding: Finding) -> tuple[Any, ...]:
    where = {"generate": "decode", "read": "prefill"}.get(str(finding.function), finding.function)
    return (finding.rule, finding.severity, where, finding.op is None, finding.shape, finding.dtype)


@pytest.mark.parametrize("recipe", ["fp16", "int8", "int8-block32", "m8"])
def test_a_twin_under_foreign_names_has_the_same_findings(
    recipe: str, bundles: dict[str, Bundle], tmp_path: Path
) -> None:
    for number, package in enumerate([*bundles[recipe].block_paths, bundles[recipe].head_path]):
        (tmp_path / str(number)).mkdir()
        twin = edited(package, tmp_path / str(number), renamed).rename(tmp_path / f"model_{number}.mlpackage")
        ours, theirs = lint(package), lint(twin)
        assert Counter(map(seen, ours.findings)) == Counter(map(seen, theirs.findings))
        assert len(theirs.findings) > 0
        assert not {f.op for f in ours.findings if f.op} & {f.op for f in theirs.findings}
        assert (ours.shares[0].clear_multiply_adds, ours.shares[0].clear_weight_bytes) == (
            theirs.shares[0].clear_multiply_adds, theirs.shares[0].clear_weight_bytes,
        )  # fmt: skip


def test_no_rule_asks_who_made_a_program() -> None:
    """Neither a condition nor a feature names an op, a port or a function of ours."""
    judge = Path(__file__).parents[2] / "src/anechain/judge"
    texts = {f.name: f.read_text(encoding="utf-8") for f in judge.glob("lint_*.py") if f.name != "lint_packages.py"}
    assert len(texts) >= 8
    ours = re.compile(r"bundle\.(spec|manifest|recipe)|anechain\.bake|\"(kv|hidden|decode|prefill)\"")
    for name, text in texts.items():
        assert not ours.findall(text), name
