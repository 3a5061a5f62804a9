"""read_program against coremltools' own loader, on packages that coremltools wrote."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.frontend.milproto.load import load as milproto_load
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import get_new_symbol, types

from anechain.bundle.program import Function, Program, Value, read_program
from tests.bundle.packages import WEIGHTS, body, edited, save, stateful

RNG = np.random.default_rng(7)


def half(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float16)


def reference(package: Path) -> Any:
    spec = ct.models.utils.load_spec(str(package))
    return milproto_load(spec, spec.specificationVersion, str((package / WEIGHTS).parent))


BUILTIN = {types.fp16: "fp16", types.fp32: "fp32", types.int32: "int32", types.bool: "bool", types.str: "string"}


def assert_same_value(ours: Value, theirs: Any) -> None:
    assert ours.name == theirs.name
    assert ours.shape == tuple(d if isinstance(d, (int, np.integer)) else -1 for d in theirs.shape)
    assert ours.dtype == BUILTIN[theirs.dtype]


def assert_same_const(ours: np.ndarray, theirs: Any) -> None:
    if isinstance(theirs, list):  # a list of MIL scalars, as classify has
        theirs = np.array([getattr(v, "val", v) for v in theirs])
    theirs = np.asarray(theirs)
    assert ours.shape == theirs.shape
    assert ours.dtype.kind == theirs.dtype.kind and (ours.dtype.kind == "U" or ours.dtype == theirs.dtype)
    assert np.array_equal(ours, theirs)
    assert not ours.flags.writeable


def assert_same_block(ours: Function, theirs: Any, visible: dict[str, np.ndarray]) -> int:
    """Compares ops, inputs, outputs, constants and nested blocks; returns how many constants were compared."""
    consts = {**visible, **ours.consts}
    compared = 0
    for op in theirs.operations:
        if op.op_type == "const" and op.outputs[0].name in ours.consts:
            assert_same_const(ours.consts[op.outputs[0].name], op.outputs[0].val)
            compared += 1
    expected = [op for op in theirs.operations if op.op_type != "const"]
    assert [op.type for op in ours.ops] == [op.op_type for op in expected]
    for op, other in zip(ours.ops, expected, strict=True):
        if op.type != "coreml_update_state" or other.outputs[0].child_ops or other.outputs[0] in theirs.outputs:
            assert [o.name for o in op.outputs] == [o.name for o in other.outputs]
        if op.type != "make_list":
            for value, var in zip(op.outputs, other.outputs, strict=True):
                assert (value.shape, value.dtype) == (
                    tuple(d if isinstance(d, (int, np.integer)) else -1 for d in var.shape),
                    BUILTIN[var.dtype],
                )
        given = {k: v for k, v in other.inputs.items() if not k.startswith("_") and v is not None}
        assert set(op.inputs) <= set(given)
        for parameter, names in op.inputs.items():
            variables = given[parameter] if isinstance(given[parameter], (list, tuple)) else [given[parameter]]
            for name, var in zip(names, variables, strict=True):
                if var.op is not None and var.op.op_type == "const":
                    assert_same_const(consts[name], var.val)
                    compared += 1
                else:
                    assert name == var.name and name not in consts
        for block, other_block in zip(op.blocks, other.blocks, strict=True):
            compared += assert_same_block(block, other_block, consts)
    assert [v.name for v in ours.outputs] == [v.name for v in theirs.outputs]
    return compared


def assert_same_program(package: Path, constants: int) -> Program:
    ours, theirs = read_program(package), reference(package)
    assert ours.path == package
    assert set(ours.functions) == set(theirs.functions)
    compared = 0
    for name, function in ours.functions.items():
        other = theirs.functions[name]
        assert function.name == name
        placeholders = list(other.inputs.values())
        for value in function.inputs:
            assert_same_value(value, next(v for v in placeholders if v.name == value.name))
        assert {v.name for v in (*function.inputs, *function.states)} == {v.name for v in placeholders}
        assert {v.name for v in function.states} == {v.name for v in placeholders if types.is_state(v.sym_type)}
        compared += assert_same_block(function, other, {})
    assert compared >= constants, "fewer constants were compared than the program has"
    return ours


# -- what the chain's own packages hold --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def decode(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(stateful(1), tmp_path_factory.mktemp("decode") / "decode.mlpackage")


def test_ops_constants_and_states_are_those_of_coremltools(decode: Path) -> None:
    program = assert_same_program(decode, constants=12)
    main = program.functions["main"]
    assert program.spec_version == 9
    assert main.states == (Value("kv", (2, 4, 8, 4), "fp16"),)
    assert main.inputs == (Value("x", (1, 4, 1, 1), "fp16"), Value("begin", (4,), "int32"))
    assert main.outputs == (Value("both", (1, 192, 1, 1), "fp16"),)
    concat = next(op for op in main.ops if op.type == "concat")
    assert len(concat.inputs["values"]) == 3 and concat.inputs["values"][0] == "projected"
    weight = next(op for op in main.ops if op.type == "constexpr_blockwise_shift_scale")
    assert weight.inputs == {"data": ("weight.data",), "scale": ("weight.scale",)}
    assert main.consts["weight.data"].dtype == np.int8 and main.consts["weight.scale"].dtype == np.float16


def test_an_update_of_a_state_is_one_op_whether_or_not_its_result_is_read(decode: Path) -> None:
    main = read_program(decode).functions["main"]
    kinds = [op.type for op in main.ops if "state" in op.type]
    assert kinds == ["read_state", "coreml_update_state", "coreml_update_state"]
    first, second = (op for op in main.ops if op.type == "coreml_update_state")
    assert first.inputs["state"] == second.inputs["state"] == ("kv",)
    assert second.inputs["value"] == ("new",)
    assert first.outputs == (Value("first", (2, 4, 8, 4), "fp16"),)
    assert second.outputs == (Value("second_write_state.state", (2, 4, 8, 4), "fp16"),)


def test_a_later_read_of_a_written_state_stays_a_read(decode: Path, tmp_path: Path) -> None:
    package = edited(decode, tmp_path, lambda model: body(model).operations.append(later_read(body(model))))
    kinds = [op.type for op in read_program(package).functions["main"].ops if "state" in op.type]
    assert kinds == ["read_state", "coreml_update_state", "coreml_update_state", "read_state"]


def later_read(block: Any) -> Any:
    read = next(op for op in block.operations if op.type == "read_state")
    late = type(read)()
    late.CopyFrom(read)
    late.outputs[0].name = "late"
    other = next(op for op in block.operations if op.type == "concat")
    copied = block.operations.add()
    copied.CopyFrom(other)
    copied.outputs[0].name = "again"
    return late


def test_functions_that_share_a_weight_file(decode: Path, tmp_path: Path) -> None:
    save(stateful(8), tmp_path / "prefill.mlpackage")
    merged = ct.utils.MultiFunctionDescriptor()
    merged.add_function(str(decode), "main", "decode")
    merged.add_function(str(tmp_path / "prefill.mlpackage"), "main", "prefill")
    merged.default_function_name = "decode"
    ct.utils.save_multifunction(merged, str(tmp_path / "both.mlpackage"))
    program = assert_same_program(tmp_path / "both.mlpackage", constants=24)
    one, other = (program.functions[n].consts["weight.data"] for n in ("decode", "prefill"))
    assert np.shares_memory(one, other)
    assert program.functions["prefill"].inputs[0].shape == (1, 4, 1, 8)


def test_weights_are_views_of_the_file(decode: Path) -> None:
    weight = read_program(decode).functions["main"].consts["weight.data"]
    base: Any = weight
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap) and type(weight) is np.ndarray


# -- every kind of constant --------------------------------------------------------------------------------------------

CONSTANTS: dict[str, Any] = {
    "scalar_half": np.float16(-0.1),
    "scalar_single": np.float32(0.1),
    "scalar_int": np.int32(-5),
    "scalar_true": True,
    "scalar_text": "same_lower",
    "few_half": half(2, 3),
    "few_single": RNG.standard_normal((3, 2)).astype(np.float32),
    "few_int": np.arange(-3, 3, dtype=np.int32).reshape(2, 3),
    "few_int8": np.array([-128, 127, -1], np.int8),
    "few_uint8": np.array([0, 255, 128], np.uint8),
    "few_int16": np.array([-32768, 32767], np.int16),
    "few_uint16": np.array([0, 65535], np.uint16),
    "few_bool": np.array([[True, False], [False, False]]),
    "many_half": half(40, 5),
    "many_single": RNG.standard_normal((40, 5)).astype(np.float32),
    "many_int8": RNG.integers(-128, 128, (40, 5)).astype(np.int8),
    "many_uint8": RNG.integers(0, 256, (40, 5)).astype(np.uint8),
    "many_int16": RNG.integers(-(2**15), 2**15, (40, 5)).astype(np.int16),
    "many_uint16": RNG.integers(0, 2**16, (40, 5)).astype(np.uint16),
    "many_int": RNG.integers(-9, 9, (40, 5)).astype(np.int32),
    "many_bool": RNG.integers(0, 2, (40, 5)).astype(bool),
    "empty": np.zeros((0,), np.int32),
}


def test_every_kind_of_constant(tmp_path: Path) -> None:
    @mb.program(input_specs=[mb.TensorSpec((2,), types.fp16)], opset_version=ct.target.iOS18)
    def program(x: Any) -> Any:
        for name, value in CONSTANTS.items():
            mb.const(val=value, name=name)
        return mb.identity(x=x, name="y")

    consts = read_program(save(program, tmp_path / "c.mlpackage")).functions["main"].consts
    assert_same_program(tmp_path / "c.mlpackage", constants=len(CONSTANTS))
    assert set(consts) == set(CONSTANTS)
    for name, value in CONSTANTS.items():
        assert_same_const(consts[name], value)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("count", [3, 7 * 16])  # inline, and in the weight file
def test_palettes_of_every_width(bits: int, count: int, tmp_path: Path) -> None:
    palette_type = types.nptype_from_builtin(types.string_to_builtin(f"uint{bits}"))
    indices = RNG.integers(0, 2**bits, (count, 3)).astype(palette_type)

    @mb.program(input_specs=[mb.TensorSpec((count, 3), types.fp16)], opset_version=ct.target.iOS18)
    def program(x: Any) -> Any:
        weight = mb.constexpr_lut_to_dense(indices=indices, lut=half(1, 1, 2**bits, 1), name="weight")
        return mb.add(x=x, y=weight, name="y")

    main = assert_same_program(save(program, tmp_path / "p.mlpackage"), constants=2).functions["main"]
    assert np.array_equal(main.consts["weight.indices"], indices.astype(np.uint8))


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("count", [5, 64])
def test_four_bit_weights(signed: bool, count: int, tmp_path: Path) -> None:
    low = -8 if signed else 0
    values = np.tile(np.arange(low, low + 16), count)[: count * 15].reshape(count, 15)  # odd: a nibble is left over
    data = values.astype(types.np_int4_dtype if signed else types.np_uint4_dtype)

    @mb.program(input_specs=[mb.TensorSpec((count, 15), types.fp16)], opset_version=ct.target.iOS18)
    def program(x: Any) -> Any:
        weight = mb.constexpr_blockwise_shift_scale(data=data, scale=half(count, 5), name="weight")
        return mb.add(x=x, y=weight, name="y")

    main = assert_same_program(save(program, tmp_path / "q.mlpackage"), constants=2).functions["main"]
    assert np.array_equal(main.consts["weight.data"], values)
    assert main.consts["weight.data"].dtype == (np.int8 if signed else np.uint8)


# -- foreign programs --------------------------------------------------------------------------------------------------


def test_older_programs_hold_compressed_weights_in_attributes(tmp_path: Path) -> None:
    @mb.program(input_specs=[mb.TensorSpec((1, 64), types.fp16)], opset_version=ct.target.iOS16)
    def program(x: Any) -> Any:
        data = RNG.integers(-127, 128, (64, 64)).astype(np.int8)
        affine = mb.constexpr_affine_dequantize(
            quantized_data=data, zero_point=np.int8(3), scale=half(64), axis=np.int32(0), name="affine"
        )
        indices = RNG.integers(0, 256, 8 * 8 * 4 // 8).astype(np.uint8)  # four bits an index, packed
        shape = np.array([8, 8], np.uint32)
        dense = mb.constexpr_lut_to_dense(indices=indices, lut=half(16), shape=shape, name="dense")
        y = mb.linear(x=x, weight=affine, name="y")
        return mb.add(x=mb.reshape(x=y, shape=[8, 8], name="z"), y=dense, name="out")

    program_read = assert_same_program(save(program, tmp_path / "old.mlpackage", ct.target.iOS16), constants=9)
    affine = program_read.functions["main"].ops[0]
    assert program_read.spec_version == 7
    assert sorted(affine.inputs) == ["axis", "quantized_data", "scale", "zero_point"]
    assert program_read.functions["main"].consts["affine.zero_point"] == 3


@pytest.mark.parametrize("labels", [["cat", "dog", "fish"], [7, 8, 9]], ids=["text", "numbers"])
def test_a_list_among_the_arguments_is_a_constant(labels: list[Any], tmp_path: Path) -> None:
    @mb.program(input_specs=[mb.TensorSpec((3,), types.fp32)], opset_version=ct.target.iOS15)
    def program(x: Any) -> Any:
        return mb.softmax(x=x, name="y")

    options = {"compute_precision": ct.precision.FLOAT32, "classifier_config": ct.ClassifierConfig(labels)}
    package = save(program, tmp_path / "c.mlpackage", ct.target.iOS15, **options)
    main = read_program(package).functions["main"]
    op = next(op for op in main.ops if op.type == "classify")
    (classes,) = op.inputs["classes"]
    assert main.consts[classes].tolist() == labels
    assert [(v.name, v.dtype) for v in main.outputs] == [(v.name, v.dtype) for v in op.outputs]
    assert main.outputs[1].dtype == "dictionary"


def test_immediate_arguments_of_a_list_are_constants_of_their_own(decode: Path, tmp_path: Path) -> None:
    def inline(model: Any) -> None:
        values = next(op for op in body(model).operations if op.type == "concat").inputs["values"]
        for place in (0, 2):
            number = values.arguments[place].value
            number.type.tensorType.dataType = 23
            number.immediateValue.tensor.ints.values.append(40 + place)

    main = read_program(edited(decode, tmp_path, inline)).functions["main"]
    concat = next(op for op in main.ops if op.type == "concat")
    assert concat.inputs["values"][0] == "both.values.0" and concat.inputs["values"][2] == "both.values.2"
    assert [main.consts[concat.inputs["values"][place]].item() for place in (0, 2)] == [40, 42]


def test_flexible_dimensions_are_minus_one(tmp_path: Path) -> None:
    tokens = get_new_symbol()

    @mb.program(input_specs=[mb.TensorSpec((1, tokens, 4), types.fp32)], opset_version=ct.target.iOS15)
    def program(x: Any) -> Any:
        return mb.linear(x=x, weight=half(8, 4).astype(np.float32), name="y")

    inputs = [ct.TensorType(name="x", shape=(1, ct.RangeDim(1, 64), 4))]
    options = {"inputs": inputs, "compute_precision": ct.precision.FLOAT32}
    main = assert_same_program(save(program, tmp_path / "f.mlpackage", ct.target.iOS15, **options), 1).functions["main"]
    assert main.inputs == (Value("x", (1, -1, 4), "fp32"),)
    assert main.outputs == (Value("y", (1, -1, 8), "fp32"),)


def test_control_flow_is_read_with_its_blocks(tmp_path: Path) -> None:
    @mb.program(input_specs=[mb.TensorSpec((1,), types.bool), mb.TensorSpec((4,), types.fp32)])
    def program(flag: Any, x: Any) -> Any:
        return mb.cond(
            pred=mb.squeeze(x=flag, name="pred"),
            _true_fn=lambda: mb.add(x=x, y=np.float32(1), name="more"),
            _false_fn=lambda: mb.sub(x=x, y=np.float32(2), name="less"),
            name="either",
        )

    options = {"compute_precision": ct.precision.FLOAT32}
    main = assert_same_program(save(program, tmp_path / "w.mlpackage", ct.target.iOS15, **options), 2).functions["main"]
    cond = next(op for op in main.ops if op.type == "cond")
    assert [[op.type for op in block.ops] for block in cond.blocks] == [["add"], ["sub"]]
    assert [block.outputs[0].name for block in cond.blocks] == ["more", "less"]


# -- without coremltools -----------------------------------------------------------------------------------------------

ALONE = """
import sys
from pathlib import Path
from anechain.bundle.program import read_program
if sys.argv[2] == "hidden":
    sys.modules["coremltools"] = None
program = read_program(Path(sys.argv[1]))
print(len(program.functions["main"].ops), "coremltools" in sys.modules, "torch" in sys.modules)
"""


def alone(package: Path, mode: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", ALONE, str(package), mode], capture_output=True, text=True, timeout=60)


def test_reading_imports_neither_coremltools_nor_torch(decode: Path) -> None:
    done = alone(decode, "seen")
    assert done.stdout.split() == [str(len(read_program(decode).functions["main"].ops)), "False", "False"], done.stderr


def test_without_coremltools_the_error_says_what_to_install(decode: Path) -> None:
    last_line = alone(decode, "hidden").stderr.strip().splitlines()[-1]
    text = "packages can be neither read nor written, because coremltools is not installed: pip install coremltools."
    assert last_line == f"anechain.errors.EngineError: {text}"
