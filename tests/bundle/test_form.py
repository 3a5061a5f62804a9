"""The form of a package: which scale lies at which end, and int8 hand-offs as the program's own ops make them."""

from typing import Any

import coremltools as ct
import numpy as np
import pytest
from coremltools import target
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Function, types
from hypothesis import given, settings
from hypothesis import strategies as st

from anechain.bundle.form import TARGETS, Form, boundary_scale, form_of, from_int8, to_int8
from anechain.bundle.spec import ports_of
from tests.bundle_maker import SPECS


def test_a_boundary_has_one_scale_on_both_sides() -> None:
    forms = [form_of(i, "macOS26", "blend", (0.5, 2.0)) for i in range(3)]
    assert [(f.takes, f.gives) for f in forms] == [(None, 0.5), (0.5, 2.0), (2.0, None)]
    assert {f.spec_version for f in forms} == {10}
    assert form_of(1, "iOS18", "slice", ()) == Form("iOS18")


def test_targets_are_the_versions_that_coremltools_says() -> None:
    assert {name: int(getattr(target, name)) for name in TARGETS} == TARGETS


def test_ports_of_each_form() -> None:
    spec = SPECS["qwen3"]
    plain = ports_of(spec, 32, 64, range(1))
    blended = ports_of(spec, 32, 64, range(1), Form(state_update="blend"))
    assert [p.name for p in plain.inputs if p not in blended.inputs] == ["begin", "end"]
    assert [(p.name, p.shape, p.dtype) for p in blended.inputs if p not in plain.inputs] == [
        ("write", (1, 1, 32, 64), "fp16")
    ]
    assert not any(p.dtype == "int32" for p in blended.inputs)
    narrow = ports_of(spec, 1, 64, range(1), Form("macOS26", takes=0.5, gives=0.5))
    assert [(p.name, p.dtype) for p in (narrow.inputs[0], *narrow.outputs)] == [
        ("hidden", "int8"),
        ("hidden_out", "int8"),
    ]


@pytest.mark.parametrize(("name", "dtype"), [("macOS15", "INT32"), ("macOS26", "INT8")])
def test_coremltools_makes_int8_ports_int32_before_macos_26(name: str, dtype: str) -> None:
    """Why int8 between packages is refused there: its converter changes them silently."""
    oldest = getattr(target, name)

    @mb.program(input_specs=[mb.TensorSpec((1, 64), types.int8)], opset_version=oldest)
    def program(x: Any) -> Any:
        y = mb.dequantize(input=x, scale=np.float16(0.5))
        return mb.quantize(input=mb.abs(x=y), scale=np.float16(0.5), output_dtype="int8", name="y")

    description = ct.convert(program, minimum_deployment_target=oldest, skip_model_load=True).get_spec().description
    word = ct.proto.FeatureTypes_pb2.ArrayFeatureType.ArrayDataType.Name
    features = [*description.input, *description.output]
    assert [word(f.type.multiArrayType.dataType) for f in features] == [dtype, dtype]


@given(st.floats(1e-30, 65504, allow_nan=False))
@settings(max_examples=200, deadline=None)
def test_no_value_up_to_the_peak_is_cut_off(largest: float) -> None:
    scale = boundary_scale(largest)
    assert np.float16(scale) == scale >= np.finfo(np.float16).smallest_normal
    assert scale * 127 >= largest
    if scale > np.finfo(np.float16).smallest_normal:
        assert float(np.nextafter(np.float16(scale), np.float16(0))) * 127 < largest


def test_rounding_on_the_host_is_that_of_coremltools() -> None:
    """The ops `quantize` and `dequantize` have a definition in coremltools that runs on numpy."""
    rng = np.random.default_rng(2)
    x = np.concatenate([rng.standard_normal(200) * 30, [0.125, 0.375, -0.125, 1000.0, -1000.0]]).astype(np.float16)
    scale = np.float16(0.25)
    with Function({"unused": mb.placeholder((1,), dtype=types.fp16)}, target.iOS26):
        steps = mb.quantize(input=x, scale=scale, output_dtype="int8").val
        back = mb.dequantize(input=steps, scale=scale).op.materialized_val_inference()
    assert np.array_equal(to_int8(x, float(scale)), steps) and steps.min() == -128 and steps.max() == 127
    assert np.array_equal(from_int8(steps, float(scale)), back.astype(np.float16))


@pytest.mark.parametrize("scale", [0.05, 3.0])
def test_a_step_is_as_wide_as_the_scale(scale: float) -> None:
    x = np.linspace(-100 * scale, 100 * scale, 999).astype(np.float16)
    error = np.abs(from_int8(to_int8(x, scale), scale).astype(np.float64) - x.astype(np.float64)).max()
    assert 0.4 * scale < error < 0.6 * scale
