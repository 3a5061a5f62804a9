"""The files of bundles as they are baked by default: what the macOS side asks of names, shapes and rows.

A hidden state is handed over in a pixel buffer of 16-bit values: its last axis is a row, which begins at a multiple of
64 bytes (128 on an M5), and the program's own shapes are fixed.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from anechain.bundle.interface import Feature
from anechain.bundle.manifest import Bundle
from anechain.bundle.program import Program, read_program
from anechain.bundle.spec import DECODE, PREFILL, STATE
from anechain.run.coreml_port import row_strides
from tests.bundle_maker import SPECS, make_bundle, tiny_source

ALIGNMENTS = (64, 128)  # bytes
RECIPES = ("fp16", "int8", "int8-block32", "m8")
INTEGERS = {"begin", "end"}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Bundle]:
    made: dict[tuple[str, str], Bundle] = {}

    def get(form: str, recipe: str) -> Bundle:
        if (form, recipe) not in made:
            folder = tmp_path_factory.mktemp("b") / "b"
            made[form, recipe] = make_bundle(tiny_source(form), folder, recipe, 64, 32, (1, 2))
        return made[form, recipe]

    return get


FORMS = [(name, "fp16") for name in SPECS] + [("llama", recipe) for recipe in RECIPES[1:]]


@pytest.mark.parametrize(("form", "recipe"), FORMS)
def test_every_package_is_what_the_macos_side_needs(
    form: str, recipe: str, bundle: Callable[[str, str], Bundle]
) -> None:
    opened = bundle(form, recipe)
    for path in opened.block_paths:
        program = read_program(path)
        _version_and_functions(program, {DECODE, PREFILL})
        for name, interface in program.interfaces.items():
            assert [state.name for state in interface.states] == [STATE]
            assert [output.name for output in interface.outputs] == ["hidden_out"]
            assert interface.inputs[0].name == "hidden"
            assert interface.inputs[0].shape == interface.outputs[0].shape
            query = {DECODE: 1, PREFILL: opened.prefill}[name]
            assert interface.inputs[0].shape == (1, 1, query, opened.spec.hidden_size)
            _features(interface.inputs, interface.outputs, interface.states)
        decode, prefill = (program.interfaces[name] for name in (DECODE, PREFILL))
        assert decode.states == prefill.states, "one state serves both functions"
        assert [f.name for f in decode.inputs] == [f.name for f in prefill.inputs]
    head = read_program(opened.head_path)
    _version_and_functions(head, {DECODE})
    interface = head.interfaces[DECODE]
    assert interface.states == () and [f.name for f in interface.inputs] == ["hidden"]
    assert interface.inputs[0].shape == (1, 1, 1, opened.spec.hidden_size)
    assert [f.name for f in interface.outputs] == [f"logits_{i}" for i in range(len(interface.outputs))]
    _features(interface.inputs, interface.outputs, ())


def _version_and_functions(program: Program, wanted: set[str]) -> None:
    assert program.spec_version == 9  # macOS 15 and iOS 18
    assert set(program.functions) == set(program.interfaces) == wanted


def _features(inputs: tuple[Feature, ...], outputs: tuple[Feature, ...], states: tuple[Feature, ...]) -> None:
    assert len(inputs) + len(outputs) >= 2
    for feature in (*inputs, *outputs, *states):
        assert not feature.flexible and feature.enumerated == () and feature.ranges == ()
        assert all(size > 0 for size in feature.shape)
        assert (feature.dtype, feature.kind) == (
            "int32" if feature.name in INTEGERS else "fp16", "state" if feature.name == STATE else "multiArray",
        )  # fmt: skip
    for feature in (*inputs, *outputs):
        if feature.dtype == "fp16":
            _fits_a_pixel_buffer(feature)


def _fits_a_pixel_buffer(feature: Feature) -> None:
    """Its last axis is a row; only a single row may end off the grid, as a piece of the vocabulary does."""
    assert len(feature.shape) == 4 and feature.shape[:2] == (1, 1)
    width = feature.shape[-1] * 2
    for alignment in ALIGNMENTS:
        row = -(-width // alignment) * alignment
        strides = row_strides(feature.shape, np.dtype(np.float16), row)
        assert strides[-1] == 2 and strides[-2] == row >= width
    if feature.name.startswith("hidden"):
        assert width % 64 == 0, "no byte between two rows where they are 64 bytes apart"


@pytest.mark.parametrize(
    ("hidden", "head_dim", "context"), [(1024, 128, 1024), (576, 64, 1024), (640, 256, 1024)], ids=str
)
def test_rows_of_the_models_that_are_supported(hidden: int, head_dim: int, context: int) -> None:
    """Qwen3-0.6B, SmolLM2-135M, Gemma3-270M: no gap between rows on any chip, whatever the port."""
    for size in (hidden, head_dim, context):
        assert all(size * 2 % alignment == 0 for alignment in ALIGNMENTS)


def test_the_walk_is_not_blind(bundle: Callable[[str, str], Bundle]) -> None:
    program = read_program(Path(bundle("gemma3", "fp16").block_paths[1]))
    names = {f.name for f in program.interfaces[DECODE].inputs}
    assert {"hidden", "begin", "end", "cos_full", "mask_sliding"} <= names
