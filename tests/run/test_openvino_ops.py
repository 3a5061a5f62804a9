"""Every op of the fast CPU engine against coremltools' own value inference, with its axes in order and transposed."""

from pathlib import Path

import numpy as np
import pytest

from anechain.bundle.program import Function, Op, Program, Value
from anechain.errors import EngineError
from anechain.run.openvino import CpuEngine
from anechain.run.openvino_ops import OPS
from anechain.run.ops import DTYPES
from anechain.run.tape import TapeEngine
from anechain.run.tape_ops import OPS as NATIVE_OPS
from tests.run.native_case import MISSING
from tests.run.test_ops import CASES, Case, Draw, inferred, mil, program_of
from tests.tolerances import OP_FP32, OP_TORCH_FP32

Array = np.ndarray
FLOWING = ("x", "y", "values", "input", "update")  # of the parameters, what a block computes
VOCABULARY = (
    "abs add cast concat constexpr_blockwise_shift_scale constexpr_lut_to_dense conv coreml_update_state dequantize "
    "exp expand_dims gelu identity layer_norm linear matmul maximum minimum mul quantize read_state real_div "
    "reduce_max reduce_mean reduce_sum reshape rsqrt sigmoid silu slice_by_index slice_by_size slice_update softmax "
    "split sqrt square squeeze sub tanh tile transpose"
)


@pytest.fixture(scope="module")
def engine() -> CpuEngine:
    return CpuEngine("exact")


def both_ways(program: Program, inputs: dict[str, Array]) -> tuple[Program, dict[str, Array]]:
    """The op twice in one program: on its inputs, and on transposes of inputs that lie the other way round."""
    [function] = program.functions.values()
    [op] = function.ops
    ops, outputs = [op], list(function.outputs)
    consts = dict(function.consts) | {name: x for name, x in inputs.items() if name.rpartition("_")[0] not in FLOWING}
    given = {name: x for name, x in inputs.items() if name not in consts}
    words = {dtype: word for word, dtype in DTYPES.items()}
    ports = [Value(name, x.shape, words[x.dtype]) for name, x in given.items()]
    turned = {}
    for port in [port for port in ports if len(port.shape) > 1]:
        name, perm = f"{port.name}.back", f"{port.name}.perm"
        consts[perm] = np.arange(len(port.shape), dtype=np.int32)[::-1]
        ports.append(Value(f"{port.name}.turned", port.shape[::-1], port.dtype))
        given[f"{port.name}.turned"] = np.ascontiguousarray(given[port.name].T)
        back = Value(name, port.shape, port.dtype)
        ops.append(Op("transpose", name, {"x": (f"{port.name}.turned",), "perm": (perm,)}, (back,)))
        turned[port.name] = name
    if turned:
        again = tuple(Value(f"{v.name}.again", v.shape, v.dtype) for v in op.outputs)
        reads = {p: tuple(turned.get(n, n) for n in names) for p, names in op.inputs.items()}
        ops.append(Op(op.type, "again", reads, again))
        outputs += again
    made = Function("main", tuple(ports), (), tuple(ops), tuple(outputs), consts)
    return Program(Path("case.mlpackage"), 9, {"main": made}), given


def run(engine: CpuEngine, program: Program, inputs: dict[str, Array]) -> list[Array]:
    outputs = {v.name: np.empty(v.shape, DTYPES[v.dtype]) for v in program.functions["main"].outputs}
    engine.load_programs([program]).step("main", inputs, None, outputs)
    return list(outputs.values())


KNOWN = [(f"{case.op}-{i}", case) for i, case in enumerate(CASES) if case.op in OPS]


def test_the_ops_are_those_of_the_vocabulary() -> None:
    assert sorted(OPS) == VOCABULARY.split()
    assert {case.op for _, case in KNOWN} == set(OPS) - {"read_state", "coreml_update_state"}


def refusal(function: Function) -> str:
    """What this engine says to the few forms of its ops that it does not take; nothing for the others."""
    [op] = function.ops
    fixed = {p: function.consts.get(names[0], np.array(0)) for p, names in op.inputs.items()}
    if op.type == "conv":
        simple = max(fixed["weight"].shape[2:]) == 1 and fixed["groups"] == 1 and (fixed["strides"] == 1).all()
        padded = str(fixed["pad_type"]) == "custom" and fixed["pad"].any()
        return "" if simple and not padded else "only 1x1 convolutions without strides, padding and groups"
    squeezed = op.type == "slice_update" and fixed.get("squeeze_mask", np.array(False)).any()
    return "squeeze_mask is not supported" if squeezed else ""


@pytest.mark.parametrize("case", [case for _, case in KNOWN], ids=[name for name, _ in KNOWN])
def test_fp32(engine: CpuEngine, case: Case) -> None:
    variables = mil(lambda: case.build(Draw(np.float32)))
    expected = inferred(variables) if case.expected is None else case.expected(Draw(np.float32))
    program, inputs = both_ways(*program_of(variables, flowing=True))
    if refused := refusal(program_of(variables, flowing=False)[0].functions["main"]):
        with pytest.raises(EngineError, match=f"op {case.op} named .* of case.mlpackage cannot .*{refused}"):
            run(engine, program, inputs)
        return
    actual = run(engine, program, inputs)
    assert len(actual) in (len(expected), 2 * len(expected)) and len(expected) > 0
    tolerance = OP_FP32 if case.expected is None else OP_TORCH_FP32
    same(actual, expected, tolerance)
    if MISSING or case.op not in NATIVE_OPS:
        return
    if any(x.dtype.kind != "f" for x in (*expected, *inputs.values())) or strided(program):
        with pytest.raises(
            EngineError, match=r"dtype|floats alone|a constant|stride and squeeze_mask are not supported"
        ):
            run(TapeEngine("exact"), program, inputs)
        return
    same(run(TapeEngine("exact"), program, inputs), expected, OP_TORCH_FP32 if case.op == "matmul" else tolerance)


def same(actual: list[Array], expected: list[Array], tolerance: float) -> None:
    for a, e in zip(actual, expected * 2, strict=False):
        assert a.size > 0
        assert a.shape == e.shape
        np.testing.assert_allclose(a.astype(np.float64), e.astype(np.float64), rtol=tolerance, atol=tolerance)


def strided(program: Program) -> bool:
    [op, *_] = program.functions["main"].ops
    consts = program.functions["main"].consts
    return op.type == "slice_update" and "stride" in op.inputs and bool(np.any(consts[op.inputs["stride"][0]] != 1))


def one_op(kind: str, shape: tuple[int, ...], dtype: str, result: tuple[int, ...], **consts: Array) -> Program:
    """A program of one op that reads the port `x`."""
    names = {"x": ("x",)} | {name: (name,) for name in consts}
    y = (Value("y", result, dtype),)
    made = Function("main", (Value("x", shape, dtype),), (), (Op(kind, "op", names, y),), y, consts)
    return Program(Path("case.mlpackage"), 9, {"main": made})


def test_an_epsilon_that_is_left_out_has_the_dtype_of_the_op(engine: CpuEngine) -> None:
    """1e-12 is 0 in fp16, and not in fp32."""
    for dtype, expected in (("fp16", np.inf), ("fp32", 1e6)):
        [y] = run(engine, one_op("rsqrt", (2,), dtype, (2,)), {"x": np.array([0, 4], DTYPES[dtype])})
        np.testing.assert_allclose(y, [expected, 0.5], rtol=OP_FP32)


def test_what_fp16_cannot_hold_becomes_infinite_at_a_port_and_not_before(engine: CpuEngine) -> None:
    x = np.array([300, -3], np.float16)
    [y] = run(engine, one_op("square", (2,), "fp16", (2,)), {"x": x})
    assert y.tolist() == [np.inf, 9]
    program = one_op("square", (2,), "fp16", (2,))
    function = program.functions["main"]
    root = Op("sqrt", "root", {"x": ("y",)}, (Value("z", (2,), "fp16"),))
    made = Function("main", function.inputs, (), (*function.ops, root), root.outputs, {})
    [z] = run(engine, Program(program.path, 9, {"main": made}), {"x": x})
    assert z.tolist() == [300, 3]


RESHAPES = [  # the shape of x, how it is turned, the shape that it then gets
    ((1, 24, 1, 5), (0, 2, 3, 1), (1, 5, 4, 6)),  # channels last, cut into heads
    ((1, 4, 5, 6), (0, 2, 1, 3), (1, 5, 24)),  # heads that lie apart become channels
    ((1, 4, 5, 6), (0, 1, 3, 2), (1, 4, 6, 5)),
    ((8, 5, 6), (2, 0, 1), (2, 3, 40)),
    ((8, 5, 6), (2, 1, 0), (3, 2, 5, 2, 4)),
    ((4, 6, 5), (1, 2, 0), (10, 12)),  # cut where no factor ends
    ((4, 6), (1, 0), (3, 8)),
    ((2, 1, 3, 1), (3, 2, 1, 0), (3, 2)),
    ((1, 1, 1), (2, 1, 0), (1,)),
]


@pytest.mark.parametrize(("shape", "perm", "result"), RESHAPES)
def test_a_reshape_of_a_transpose(
    engine: CpuEngine, shape: tuple[int, ...], perm: tuple[int, ...], result: tuple[int, ...]
) -> None:
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    turned = Value("t", tuple(shape[p] for p in perm), "fp32")
    program = one_op("reshape", turned.shape, "fp32", result)
    [last] = program.functions["main"].ops
    first = Op("transpose", "turn", {"x": ("x",), "perm": ("perm",)}, (turned,))
    second = Op("reshape", "cut", {"x": ("t",), "shape": ("shape",)}, last.outputs)
    consts = {"perm": np.array(perm, np.int32), "shape": np.array(result, np.int32)}
    made = Function("main", (Value("x", shape, "fp32"),), (), (first, second), last.outputs, consts)
    [y] = run(engine, Program(program.path, 9, {"main": made}), {"x": x})
    np.testing.assert_array_equal(y, x.transpose(perm).reshape(result))


def test_a_parameter_that_is_computed_is_refused(engine: CpuEngine) -> None:
    axis = Op("cast", "one", {"x": ("x",)}, (Value("axis", (), "int32"),))
    softmax = Op("softmax", "share", {"x": ("y",), "axis": ("axis",)}, (Value("z", (3,), "fp32"),))
    ports = (Value("x", (), "fp32"), Value("y", (3,), "fp32"))
    made = Function("main", ports, (), (axis, softmax), softmax.outputs, {})
    with pytest.raises(EngineError, match=r"'share' in function 'main' of case.mlpackage .* because axis is computed"):
        engine.load_programs([Program(Path("case.mlpackage"), 9, {"main": made})])


def test_a_result_of_another_shape_than_declared_is_refused(engine: CpuEngine) -> None:
    with pytest.raises(EngineError, match=r"it gives \(3, 2\) where the program declares \(2, 3\)"):
        engine.load_programs([one_op("tile", (3, 1), "fp32", (2, 3), reps=np.array([1, 2], np.int32))])
