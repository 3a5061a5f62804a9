"""Our writer against coremltools': the same graph.py through its MIL Builder and its exporter gives the same bytes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.backend.mil.load import load as export
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Function, Program, types

from anechain.bake import graph, mil, package
from anechain.bake.mil_file import packed
from anechain.bundle.form import Form
from anechain.bundle.program import read_program
from anechain.bundle.recipe import Recipe, load_recipe
from anechain.bundle.spec import DECODE, PREFILL
from tests.bake.test_schemes import mixed
from tests.bundle_maker import SPECS, tiny_source
from tests.in_process import tree

CONTEXT, CHUNK = 64, 32
MIL = {"fp16": types.fp16, "fp32": types.fp32, "int32": types.int32, "int8": types.int8}
PACKED = {"int4": types.np_int4_dtype, "uint4": types.np_uint4_dtype, "uint6": types.np_uint6_dtype}
OPSETS = {9: ct.target.iOS18, 10: ct.target.iOS26}
MIDDLE = Form("macOS26", takes=0.25, gives=0.5)
# Every family, scheme, precision and form in one of these at least.
CASES = {
    "fp16": ("mistral", load_recipe("fp16"), Form()),
    "int8": ("qwen3", load_recipe("int8"), Form()),
    "fp32": ("qwen2", load_recipe("m8"), Form()),
    "fp32, gemma": ("gemma3", load_recipe("m8"), Form()),
    "blend": ("llama", load_recipe("int8-block32"), Form(state_update="blend")),
    "int8 edges": ("llama", load_recipe("int8"), MIDDLE),
    "int8 edges, blend, fp32": ("llama", load_recipe("m8"), replace(MIDDLE, state_update="blend")),
    "palettes, int4, corrections, biases": ("llama-biases", mixed(head="palette4-group4"), Form()),
    "layer_norm, gemma": ("gemma3", replace(load_recipe("int8"), norm="layer_norm"), Form()),
}


class Theirs:
    """coremltools' Builder under the name by which graph.py calls ours."""

    def __getattr__(self, name: str) -> Any:
        return getattr(mb, name)

    def placeholder(self, shape: tuple[int, ...], dtype: str) -> Any:
        return mb.placeholder(shape, dtype=MIL[dtype])

    def state_placeholder(self, shape: tuple[int, ...]) -> Any:
        return mb.state_tensor_placeholder(shape, dtype=types.fp16)

    def const(self, val: Any, name: str, dtype: str | None, weight_id: str) -> Any:
        var = mb.const(val=val.astype(PACKED.get(str(dtype), val.dtype)), name=name)
        var.op.weight_id = weight_id
        return var


@contextmanager
def through_coremltools(spec_version: int) -> Iterator[None]:
    def function(inputs: Mapping[str, Any]) -> Any:
        mb.name_count.clear()
        return Function(inputs, OPSETS[spec_version])

    def program(functions: Mapping[str, Any]) -> Any:
        whole = Program()
        for name, made in functions.items():
            whole.add_function(name, made)
        whole.default_function_name, whole.export_as_multifunction = DECODE, True
        return whole

    def write(program: Any, folder: Path, description: Mapping[str, str], version: int) -> None:
        (folder / "weights").mkdir(parents=True)
        model = export(program, weights_dir=str(folder / "weights"), specification_version=version)
        model.description.metadata.userDefined.update(description)
        (folder / "model.mlmodel").write_bytes(model.SerializeToString(deterministic=True))

    with pytest.MonkeyPatch.context() as patch:
        for name, double in (("mb", Theirs()), ("Function", function), ("Program", program)):
            patch.setattr(graph, name, double)
        patch.setattr(package, "write_model", write)
        yield


def make(folder: Path, name: str, recipe: Recipe, form: Form) -> None:
    source = tiny_source(replace(SPECS[name], vocab_size=332))  # the head's last array ends between multiples of 64
    package.make_block(source, source.spec, recipe, range(2), CONTEXT, CHUNK, folder / "block.mlpackage", form)
    package.make_head(source, source.spec, recipe, folder / "head.mlpackage", Form(form.target))


@pytest.mark.parametrize("case", CASES)
def test_files_are_those_of_coremltools_byte_for_byte(case: str, tmp_path: Path) -> None:
    name, recipe, form = CASES[case]
    make(tmp_path / "ours", name, recipe, form)
    with through_coremltools(form.spec_version):
        make(tmp_path / "theirs", name, recipe, form)
    ours, theirs = tree(tmp_path / "ours"), tree(tmp_path / "theirs")
    parts = ("Manifest.json", "Data/com.apple.CoreML/model.mlmodel", "Data/com.apple.CoreML/weights/weight.bin")
    assert {f"{package}.mlpackage/{part}" for package in ("block", "head") for part in parts} < set(ours)
    for package_name in ("block", "head"):  # what differs, op by op, before the bytes
        mine, other = (read_program(tmp_path / side / f"{package_name}.mlpackage") for side in ("ours", "theirs"))
        for function in mine.functions:
            assert mine.functions[function].ops == other.functions[function].ops
    assert set(read_program(tmp_path / "ours" / "block.mlpackage").functions) == {DECODE, PREFILL}
    assert ours == theirs


def test_a_state_that_is_read_back_after_its_update(tmp_path: Path) -> None:
    """No chain does that; a graph that does must not lose it on the way to the file."""

    def write(folder: Path) -> bytes:
        inputs = {"x": graph.mb.placeholder((1, 1, 32, 32), "fp16"), "kv": graph.mb.state_placeholder((1, 1, 32, 32))}
        with graph.Function(inputs) as function:
            state, x = function.inputs["kv"], function.inputs["x"]
            updated = graph.mb.coreml_update_state(state=state, value=x, name="updated")
            twice = graph.mb.mul(x=updated, y=np.float16(2), name="twice")
            function.set_outputs([graph.mb.coreml_update_state(state=state, value=twice, name="again")])
        package.write_model(graph.Program({DECODE: function}), folder, {}, 9)
        return (folder / "model.mlmodel").read_bytes()

    ours = write(tmp_path / "ours")
    with through_coremltools(9):
        assert write(tmp_path / "theirs") == ours
    assert b"read_state" in ours


@pytest.mark.parametrize("bits", [4, 6])
def test_elements_of_less_than_a_byte_lie_without_gaps(bits: int) -> None:
    values = np.random.default_rng(bits).integers(0, 2**bits, 37, np.uint8)
    whole = int.from_bytes(packed(values, bits).tobytes(), "little")
    assert [whole >> bits * i & 2**bits - 1 for i in range(37)] == values.tolist()
    assert len(packed(values, bits)) == -(-37 * bits // 8)
    if bits == 4:
        signed = np.arange(-8, 8, dtype=np.int8)
        assert packed(signed, 4).tobytes() == bytes.fromhex("98badcfe10325476")


def wrong(build: Any) -> None:
    x = mil.placeholder((1, 8, 1, 4), "fp16")
    state = mil.state_placeholder((2, 1, 4, 8))
    with mil.Function({"x": x, "kv": state}), pytest.raises(AssertionError):
        build(x, state)


def test_what_does_not_fit_is_refused_while_it_is_built() -> None:
    other = mil.placeholder((1, 8, 1, 4), "fp32")
    wrong(lambda x, kv: mil.add(x=x, y=other))
    wrong(lambda x, kv: mil.reshape(x=x, shape=[1, 8, 1, 5]))
    wrong(lambda x, kv: mil.transpose(x=x, perm=[0, 1, 2, 2]))
    wrong(lambda x, kv: mil.concat(values=[x, other], axis=1))
    wrong(lambda x, kv: mil.split(x=x, axis=1, num_splits=3))
    wrong(lambda x, kv: mil.split(x=x, axis=1, split_sizes=[3, 4]))
    wrong(lambda x, kv: mil.matmul(x=x, y=x))
    wrong(lambda x, kv: mil.conv(x=x, weight=mil.placeholder((3, 7, 1, 1), "fp16"), pad_type="valid"))
    wrong(lambda x, kv: mil.coreml_update_state(state=kv, value=x))
    wrong(lambda x, kv: mil.slice_update(x=kv, update=other, begin=x, end=x))
