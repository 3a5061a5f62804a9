"""The program of a package, read back from the file: its ports, its ops one by one, its state, its dtypes."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from anechain.bake.check import ALLOWED, OPS_PER_FUNCTION, OPS_PER_LAYER
from anechain.bake.package import make_block, make_head
from anechain.bundle.program import Function, Op, Program, read_program
from anechain.bundle.recipe import FP16, load_recipe
from anechain.bundle.spec import DECODE, MASKED, PREFILL, ModelSpec, head_pieces, head_ports, ports_of
from tests import bundle_maker
from tests.bundle_maker import tiny_source

CONTEXT, CHUNK = 64, 32
SPECS = bundle_maker.SPECS | {"ungrouped": replace(bundle_maker.SPECS["llama"], n_kv_heads=4)}
FORMS = [(name, "fp16") for name in SPECS] + [("llama", "int8"), ("gemma3", "int8"), ("qwen3", "m8"), ("gemma3", "m8")]
QUERIES = {DECODE: 1, PREFILL: CHUNK}

Block = tuple[ModelSpec, Program]


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Block]:
    """All three layers of a form in one package, saved once and read back."""
    made: dict[tuple[str, str], Block] = {}

    def get(form: str, recipe: str) -> Block:
        if (form, recipe) not in made:
            source, path = tiny_source(SPECS[form]), tmp_path_factory.mktemp("block") / "block-000.mlpackage"
            make_block(source, source.spec, load_recipe(recipe), range(3), CONTEXT, CHUNK, path)
            made[form, recipe] = source.spec, read_program(path)
        return made[form, recipe]

    return get


def in_order(function: Function) -> dict[str, Op]:
    """Value name -> the op that gives it."""
    return {value.name: op for op in function.ops for value in op.outputs}


# -- ports -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "recipe"), FORMS)
def test_ports_are_those_of_the_spec(form: str, recipe: str, block: Callable[[str, str], Block]) -> None:
    spec, program = block(form, recipe)
    assert set(program.functions) == set(QUERIES)
    for name, query in QUERIES.items():
        function, ports = program.functions[name], ports_of(spec, query, CONTEXT, range(3))
        assert [(v.name, v.shape, v.dtype) for v in function.inputs] == [
            (p.name, p.shape, p.dtype) for p in ports.inputs
        ]
        assert [(v.name, v.shape, v.dtype) for v in function.outputs] == [("hidden_out", (1, 1, query, 64), "fp16")]
        assert [(v.name, v.shape, v.dtype) for v in function.states] == [
            ("kv", (6, spec.n_kv_heads, CONTEXT, spec.head_dim), "fp16")
        ]


def test_a_package_asks_only_for_the_rotations_that_its_layers_use(tmp_path: Path) -> None:
    source = tiny_source("gemma3")  # sliding, full, sliding
    for layers, suffix in ((range(0, 1), "sliding"), (range(1, 2), "full")):
        path = tmp_path / f"{suffix}.mlpackage"
        make_block(source, source.spec, load_recipe("fp16"), layers, CONTEXT, 0, path)
        functions = read_program(path).functions
        assert set(functions) == {DECODE}  # no prefill, no function for it
        names = [v.name for v in functions[DECODE].inputs]
        assert names == ["hidden", f"cos_{suffix}", f"sin_{suffix}", f"mask_{suffix}", "begin", "end"]


# -- ops ---------------------------------------------------------------------------------------------------------------

# A norm: |x|, max, at least 2^-10, x / k, squared, mean, eps / k, squared, sum, 1 / root, times it, times the gain.
NORM = Counter(abs=1, reduce_max=1, maximum=1, real_div=2, mul=4, reduce_mean=1, add=1, rsqrt=1)
ROTATION = Counter(split=1, mul=3, concat=1, add=1)
# q, k, v to heads and back; scores of past and present under one softmax; two products and their sum; the residual.
ATTENTION = Counter(conv=4, reshape=6, transpose=4, mul=1, matmul=4, add=3, concat=1, softmax=1, split=1)
FEED_FORWARD = Counter(conv=3, mul=1, add=1)
# The state and its rows, the new rows in one piece, the update; to channels and back.
FUNCTION = Counter(read_state=1, split=1, concat=1, slice_update=1, coreml_update_state=1, transpose=2)


def times(count: int, ops: Counter[str]) -> Counter[str]:
    return Counter({kind: count * number for kind, number in ops.items()})


def expected_ops(spec: ModelSpec, recipe: str, query: int, n_layers: int) -> Counter[str]:
    """Counted on paper: what a function of `n_layers` layers consists of."""
    norms = 2 + 2 * spec.qk_norm + 2 * spec.sandwich_norms
    layer = times(norms, NORM) + times(2, ROTATION) + ATTENTION + FEED_FORWARD
    layer["silu" if spec.activation == "silu" else "gelu"] += 1
    if query > 1:
        layer["add"] += 1  # the causal mask on the scores of the present
    if recipe != "fp16":
        layer["constexpr_blockwise_shift_scale"] = 7
    total = times(n_layers, layer) + FUNCTION
    kinds = len(spec.attentions)
    if query > 1 and spec.n_heads > spec.n_kv_heads:
        total["concat"] += kinds  # a mask's rows, once for each head of a group
    if recipe == "m8":
        total["cast"] = 4 + 3 * kinds  # the hidden state in and out, the state in and out, cos, sin and mask
    return total


@pytest.mark.parametrize(("form", "recipe"), FORMS)
def test_op_list_is_pinned(form: str, recipe: str, block: Callable[[str, str], Block]) -> None:
    spec, program = block(form, recipe)
    for name, query in QUERIES.items():
        ops = Counter(op.type for op in program.functions[name].ops)
        assert ops == expected_ops(spec, recipe, query, 3)
        assert set(ops) <= ALLOWED  # neither cos nor sin, no gather, nothing on integers


def test_ops_of_a_layer_at_a_glance() -> None:
    llama, qwen3, gemma3 = (
        (expected_ops(SPECS[form], recipe, query, 1) - FUNCTION).total()
        for form, recipe, query in (("llama", "fp16", 1), ("qwen3", "fp16", 1), ("gemma3", "int8", 1))
    )
    assert (llama, qwen3, gemma3) == (67, 91, 122)


def test_no_form_comes_near_the_ceiling_that_every_bake_asserts() -> None:
    worst = expected_ops(SPECS["gemma3"], "m8", CHUNK, 15).total()
    assert worst < 15 * OPS_PER_LAYER + OPS_PER_FUNCTION < 1.1 * worst


def test_biases_ride_on_their_convolutions(block: Callable[[str, str], Block]) -> None:
    _, program = block("llama-biases", "fp16")
    for function in program.functions.values():
        convolutions = [op for op in function.ops if op.type == "conv"]
        assert len(convolutions) == 21
        for op in convolutions:
            assert op.inputs["bias"] == (f"{op.inputs['weight'][0]}_bias",)


# -- state -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["llama", "gemma3"])
@pytest.mark.parametrize("name", QUERIES)
def test_state_is_read_once_and_updated_once_from_what_was_read(
    form: str, name: str, block: Callable[[str, str], Block]
) -> None:
    function = block(form, "fp16")[1].functions[name]
    by_type = {kind: [op for op in function.ops if op.type == kind] for kind in ALLOWED}
    (read,), (insert,), (update,) = (by_type[k] for k in ("read_state", "slice_update", "coreml_update_state"))
    touching = [op for op in function.ops if any("kv" in names for names in op.inputs.values())]
    assert touching == [read, update]
    assert insert.inputs["x"] == (read.outputs[0].name,)
    assert update.inputs["value"] == (insert.outputs[0].name,)
    assert insert.inputs["begin"] == ("begin",) and insert.inputs["end"] == ("end",)
    for mask in ("begin_mask", "end_mask"):
        assert function.consts[insert.inputs[mask][0]].tolist() == [True, True, False, True]


@pytest.mark.parametrize("name", QUERIES)
def test_rows_of_the_state_are_keys_and_values_layer_by_layer(name: str, block: Callable[[str, str], Block]) -> None:
    function = block("qwen3", "fp16")[1].functions[name]
    makers = in_order(function)
    insert = next(op for op in function.ops if op.type == "slice_update")
    fresh = makers[insert.inputs["update"][0]].inputs["values"]
    past = [v.name for op in function.ops if op.type == "split" and len(op.outputs) == 6 for v in op.outputs]
    assert len(fresh) == len(past) == 6

    def matrix_behind(value: str) -> str:
        """The weight of the only convolution that a row comes from; a rotated row adds two products of the same x."""
        while makers[value].type != "conv":
            op = makers[value]
            value = op.inputs["values" if op.type == "concat" else "x"][-1]
        return makers[value].inputs["weight"][0]

    assert [matrix_behind(value) for value in fresh] == [f"layers_{i}_{p}" for i in range(3) for p in "kv"]
    products = [op for op in function.ops if op.type == "matmul"]
    assert len(products) == 12
    for i in range(3):
        scores_past, scores_now, mix_past, mix_now = products[4 * i : 4 * i + 4]
        assert scores_past.inputs["y"] == (past[2 * i],) and scores_now.inputs["y"] == (fresh[2 * i],)
        assert mix_past.inputs["y"] == (past[2 * i + 1],) and mix_now.inputs["y"] == (fresh[2 * i + 1],)


# -- dtypes and constants ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "recipe"), FORMS)
def test_every_result_has_the_dtype_of_the_recipe(form: str, recipe: str, block: Callable[[str, str], Block]) -> None:
    _, program = block(form, recipe)
    compute = load_recipe(recipe).compute
    for function in program.functions.values():
        wrong = [op for op in function.ops if {v.dtype for v in op.outputs} != {compute}]
        if compute == "fp16":
            assert wrong == []
            assert {v.dtype for v in function.consts.values() if v.dtype.kind == "f"} == {np.dtype(np.float16)}
        else:  # its edges are fp16, and nothing else
            assert Counter(op.type for op in wrong) == Counter(
                read_state=1, slice_update=1, coreml_update_state=1, cast=2
            )
            assert {op.outputs[0].name for op in wrong if op.type == "cast"} == {"hidden_out", "fresh_state"}
            assert {v.dtype for v in function.consts.values() if v.dtype.kind == "f"} == {np.dtype(np.float32)}
        assert len(function.ops) > 200


@pytest.mark.parametrize("form", ["llama", "mistral", "gemma3", "qwen3", "ungrouped"])
def test_what_a_chunk_sees_of_itself_is_constant_and_finite(form: str, block: Callable[[str, str], Block]) -> None:
    spec, program = block(form, "fp16")
    assert not [n for n in program.functions[DECODE].consts if n.startswith("causal")]
    function = program.functions[PREFILL]
    group, seen = spec.n_heads // spec.n_kv_heads, set()
    for layer in range(3):
        window = spec.attentions[spec.layer_attention[layer]].window
        adding = next(op for op in function.ops if op.name == f"layers_{layer}_scores_now_masked")
        name = next(n for names in adding.inputs.values() for n in names if n in function.consts)
        mask = function.consts[name]
        assert mask.shape == (1, 1, group * CHUNK, CHUNK)
        for row in range(group * CHUNK):
            token = row % CHUNK
            visible = [j <= token and (window is None or token - j < window) for j in range(CHUNK)]
            assert (mask[0, 0, row] == np.where(visible, 0, np.float16(MASKED))).all()
        seen.add(name)
    assert len(seen) == len(spec.attentions)  # one constant for each kind, not for each layer
    assert np.float16(MASKED) == MASKED


@pytest.mark.parametrize(("form", "recipe"), FORMS)
def test_constants_are_finite(form: str, recipe: str, block: Callable[[str, str], Block]) -> None:
    _, program = block(form, recipe)
    for function in program.functions.values():
        floats = [v for v in function.consts.values() if v.dtype.kind == "f"]
        assert len(floats) > 20
        assert all(np.isfinite(v).all() for v in floats)


@pytest.mark.parametrize("form", ["llama", "gemma3"])
@pytest.mark.parametrize("recipe", ["int8", "m8"])
def test_expressions_are_data_times_scale_and_feed_a_convolution(
    form: str, recipe: str, block: Callable[[str, str], Block]
) -> None:
    _, program = block(form, recipe)
    for function in program.functions.values():
        expressions = [op for op in function.ops if op.type == "constexpr_blockwise_shift_scale"]
        assert len(expressions) == 21
        for op in expressions:
            assert set(op.inputs) == {"data", "scale"}  # no offset: symmetric
            data, scale = (function.consts[op.inputs[part][0]] for part in ("data", "scale"))
            assert data.dtype == np.int8 and data.min() >= -127
            blocks = data.shape[1] // 32 if recipe == "m8" else 1
            assert data.shape[2:] == (1, 1) and scale.shape == (data.shape[0], blocks, 1, 1)
            readers = [r for r in function.ops if any(op.outputs[0].name in names for names in r.inputs.values())]
            assert [r.type for r in readers] == ["conv"] and readers[0].inputs["weight"] == (op.outputs[0].name,)


def test_both_functions_name_the_same_weights(block: Callable[[str, str], Block]) -> None:
    _, program = block("gemma3", "int8")
    places = []
    for name in QUERIES:
        function = program.functions[name]
        arrays = {n: v for n, v in function.consts.items() if n.startswith("layers_") and n.endswith("_norm")}
        for op in function.ops:
            if op.type == "constexpr_blockwise_shift_scale":
                arrays |= {f"{op.name} {part}": function.consts[op.inputs[part][0]] for part in ("data", "scale")}
        assert len(arrays) == 3 * (7 * 2 + 6)
        places.append({n: v.__array_interface__["data"][0] for n, v in arrays.items()})
    assert places[0] == places[1]
    assert len(set(places[0].values())) == 3 * (7 * 2 + 6)


# -- head --------------------------------------------------------------------------------------------------------------

WEIGHED = {False: "conv", True: "constexpr_blockwise_shift_scale"}  # the op that holds a weight: plain, quantised


@pytest.mark.parametrize("recipe", ["fp16", "int8", "m8"])
@pytest.mark.parametrize("vocab", [320, 40001])
def test_head_gives_one_output_a_piece(vocab: int, recipe: str, tmp_path: Path) -> None:
    source = tiny_source(replace(SPECS["qwen3"], vocab_size=vocab, hidden_size=32))
    spec, path = source.spec, tmp_path / "head.mlpackage"
    make_head(source, spec, load_recipe(recipe), path)
    program = read_program(path)
    assert list(program.functions) == [DECODE]
    function = program.functions[DECODE]
    pieces, rows = head_pieces(spec)
    assert pieces == (1 if vocab == 320 else 3)
    assert [(v.name, v.shape, v.dtype) for v in function.inputs] == [("hidden", (1, 1, 1, 32), "fp16")]
    assert [(v.name, v.shape, v.dtype) for v in function.outputs] == [
        (p.name, p.shape, p.dtype) for p in head_ports(spec).outputs
    ]
    assert function.states == ()
    expected = NORM + Counter(transpose=1 + pieces, conv=pieces)
    quantised = load_recipe(recipe).scheme_for("head", 1) != FP16
    if quantised:
        expected["constexpr_blockwise_shift_scale"] = pieces
    if recipe == "m8":
        expected["cast"] = 1 + pieces
    assert Counter(op.type for op in function.ops) == expected
    assert quantised == (recipe == "int8")
    weights = [op.inputs["data" if quantised else "weight"][0] for op in function.ops if op.type == WEIGHED[quantised]]
    last = function.consts[weights[-1]]
    padding = pieces * rows - vocab
    assert padding == (0 if vocab == 320 else 1)
    assert last.shape == (rows, 32, 1, 1) and (last[rows - padding :] == 0).all()
    assert (last[: rows - padding] != 0).any(axis=1).all()
