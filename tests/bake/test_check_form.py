"""Every fault in the form of a package is found from its files: version, blend, int8 edges, what an app is promised."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest

from anechain.bake import mil as mb
from anechain.bake import package
from anechain.bake.check import ONLY, OPS_PER_FUNCTION, OPS_PER_LAYER, check_block
from anechain.bundle.form import Form
from anechain.bundle.program import read_program
from anechain.bundle.recipe import load_recipe
from anechain.errors import BundleError
from tests.bundle.packages import edited
from tests.bundle_maker import tiny_source

CONTEXT, CHUNK, LAYERS = 64, 32, range(2)
SOURCE = tiny_source("llama")
BLEND = Form(state_update="blend")
MIDDLE = Form("macOS26", "blend", takes=0.25, gives=0.5)
FORMS = {"slice": Form(), "blend": BLEND, "iOS26": Form("iOS26"), "middle": MIDDLE}


def make(path: Path, form: Form, recipe: str = "fp16") -> Path:
    package.make_block(SOURCE, SOURCE.spec, load_recipe(recipe), LAYERS, CONTEXT, CHUNK, path, form)
    return path


def check(path: Path, form: Form, recipe: str = "fp16") -> None:
    loaded = load_recipe(recipe)
    weights = package.block_weights(SOURCE, loaded, SOURCE.spec, LAYERS)
    check_block(path, SOURCE.spec, loaded, LAYERS, CONTEXT, CHUNK, weights, form)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("saved")
    return {name: make(folder / f"{name}.mlpackage", form) for name, form in FORMS.items()}


def refused(path: Path, form: Form) -> str:
    with pytest.raises(BundleError) as caught:
        check(path, form)
    return str(caught.value)


def blocks(model: Any, name: str = "decode") -> Any:
    return next(iter(model.mlProgram.functions[name].block_specializations.values()))


def operation(model: Any, output: str, name: str = "decode") -> Any:
    return next(op for op in blocks(model, name).operations if any(o.name == output for o in op.outputs))


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_written_as_meant_and_taken_for_no_other(name: str, saved: dict[str, Path]) -> None:
    check(saved[name], FORMS[name])
    assert read_program(saved[name]).spec_version == FORMS[name].spec_version
    for other, form in FORMS.items():
        if other != name:
            refused(saved[name], form)


@pytest.mark.parametrize("form", [BLEND, MIDDLE])
def test_fp32_compute_has_every_form(form: Form, tmp_path: Path) -> None:
    make(tmp_path / "block-000.mlpackage", form, "m8")


def test_the_specification_version_is_that_of_the_target(saved: dict[str, Path]) -> None:
    assert "its specification version is 10, not 9" in refused(saved["iOS26"], Form("iOS18"))
    assert "its specification version is 9, not 10" in refused(saved["slice"], Form("macOS26"))


def test_no_integer_flows_in_a_blend(saved: dict[str, Path]) -> None:
    for function in read_program(saved["blend"]).functions.values():
        assert {v.dtype for v in (*function.inputs, *function.outputs, *function.states)} == {"fp16"}
        assert {v.dtype for op in function.ops for v in op.outputs} == {"fp16"}
        assert not {op.type for op in function.ops} & {"slice_update", "gather", "scatter"}


def test_int8_ports_in_the_program_and_in_what_an_app_is_promised(saved: dict[str, Path]) -> None:
    program = read_program(saved["middle"])
    for name, function in program.functions.items():
        promised = program.interfaces[name]
        edges = (function.inputs[0], *function.outputs, promised.inputs[0], *promised.outputs)
        assert [(v.name, v.dtype) for v in edges] == [("hidden", "int8"), ("hidden_out", "int8")] * 2


def test_an_op_of_another_form_is_not_allowed(saved: dict[str, Path], tmp_path: Path) -> None:
    for kind, part in ONLY.items():
        form = Form("iOS26") if part in ("takes", "gives") else FORMS["blend" if part == "slice" else "slice"]

        def edit(model: Any, kind: str = kind) -> None:
            extra = blocks(model).operations.add()
            extra.CopyFrom(operation(model, "layers_0_q_rope"))
            extra.type, extra.outputs[0].name = kind, "extra"

        path = saved["iOS26" if part in ("takes", "gives") else "blend" if part == "slice" else "slice"]
        assert f"decode: ops that a chain does not use: {kind}" in refused(edited(path, tmp_path / kind, edit), form)


def retyped(where: str, dtype: str) -> Callable[[Any], None]:
    def edit(model: Any) -> None:
        description = next(f for f in model.description.functions if f.name == "decode")
        feature = description.input[0] if where == "input" else description.output[0]
        feature.type.multiArrayType.dataType = getattr(ct.proto.FeatureTypes_pb2.ArrayFeatureType, dtype)

    return edit


def test_int8_that_became_int32_for_the_app(saved: dict[str, Path], tmp_path: Path) -> None:
    for where, said in (
        ("input", "the inputs cos "),
        ("output", "the outputs hidden_out [1, 1, 1, "),
    ):
        message = refused(edited(saved["middle"], tmp_path / where, retyped(where, "INT32")), MIDDLE)
        assert f"(decode: its description promises {said}" in message and "int32" in message


def test_a_flexible_input_in_the_description(saved: dict[str, Path], tmp_path: Path) -> None:
    def edit(model: Any) -> None:
        description = next(f for f in model.description.functions if f.name == "decode")
        for low, high in ((1, 1), (1, 1), (1, 64), (64, 64)):
            size = description.input[0].type.multiArrayType.shapeRange.sizeRanges.add()
            size.lowerBound, size.upperBound = low, high

    assert "decode: its description promises the inputs" in refused(edited(saved["slice"], tmp_path, edit), Form())


@pytest.mark.parametrize(("form", "said"), [
    (Form("macOS26", "blend", 0.25, 0.75), "the scale of hidden_out is not 0.75"),
    (Form("macOS26", "blend", 0.3, 0.5), "the scale of hidden_compute is not 0.3"),
])  # fmt: skip
def test_another_scale_than_calibrated(form: Form, said: str, saved: dict[str, Path]) -> None:
    assert refused(saved["middle"], form).endswith(f"(decode and prefill: {said}): report this, and do not use it.")


def test_a_zero_point_that_nobody_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(*, input: Any, name: str, **others: Any) -> Any:
        return mb.op("quantize", {"input": input, "zero_point": np.int8(3), **others}, input.shape, "int8", name)

    monkeypatch.setattr(mb, "quantize", shifted)
    with pytest.raises(BundleError, match="decode and prefill: hidden_out has zero_point"):
        make(tmp_path / "block-000.mlpackage", MIDDLE)


BLENDS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "of what was kept twice": ("add", lambda real, x, y: real(x=x, y=x), "add(mul(past, sub(1, "),
    "that keeps what it overwrites": ("sub", lambda real, x, y: real(x=np.float16(2), y=y), "sub(2, reshape(write))"),
}


@pytest.mark.parametrize("kind", BLENDS)
def test_a_blend_that_is_none(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    op, wrong, said = BLENDS[kind]
    real = getattr(mb, op)

    def replaced(*, x: Any, y: Any, name: str) -> Any:
        if not name.startswith(("kv", "write")):
            return real(x=x, y=y, name=name)
        return wrong(lambda **changed: real(name=name, **changed), x, y)

    monkeypatch.setattr(mb, op, replaced)
    with pytest.raises(BundleError) as caught:
        make(tmp_path / "block-000.mlpackage", BLEND)
    assert "decode: the state becomes " in str(caught.value) and said in str(caught.value)


def test_a_blend_with_a_second_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = mb.coreml_update_state

    def twice(*, name: str, **arguments: Any) -> Any:
        real(name=f"{name}_first", **arguments)
        return real(name=name, **arguments)

    monkeypatch.setattr(mb, "coreml_update_state", twice)
    said = "1 reads, 0 slice updates and 2 updates of the state, not one, none and one"
    with pytest.raises(BundleError, match=f"decode and prefill: {said}"):
        make(tmp_path / "block-000.mlpackage", BLEND)


def test_no_form_comes_near_the_ceiling(tmp_path: Path) -> None:
    """The largest: q/k norms, sandwich norms, int8, computed in fp32, blended, int8 at both ends."""
    source = tiny_source("gemma3")
    path = tmp_path / "block-000.mlpackage"
    package.make_block(source, source.spec, load_recipe("m8"), range(3), CONTEXT, CHUNK, path, MIDDLE)
    most = max(len(f.ops) for f in read_program(path).functions.values())
    assert most < 3 * OPS_PER_LAYER + OPS_PER_FUNCTION < 1.1 * most
