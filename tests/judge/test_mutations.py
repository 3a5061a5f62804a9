"""The chain says what the oracle says, and every way of getting a transformer wrong turns the gate red.

Each mutation is one mistake that a graph, a chain or a file could have. It must fail both profiles, and move the logits
ten times further than the tolerance of the agreement: a tolerance that hides a mistake would be none.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anechain.bundle.manifest import Bundle
from anechain.bundle.program import Function, Op, Value
from anechain.bundle.spec import MASKED, ModelSpec, head_pieces
from anechain.judge import gate
from anechain.judge.baseline import Baseline, Profile
from anechain.judge.gate import Result, run_gate
from anechain.judge.oracle import Oracle
from anechain.run.chain import Chain
from anechain.run.reference import ReferenceEngine
from tests.bundle_maker import SPECS, as_stored, deviation, make_bundle, tiny_source
from tests.judge.cases import CONTEXT, MARGIN, PREFILL, Case, Mutate, make_case, margins, program, weight
from tests.tolerances import CHAIN_ORACLE, CHAIN_ORACLE_FP32, CHAIN_QUANTISED

PROFILES: tuple[Profile, ...] = ("m8", "strict")
TWO_PIECES = replace(SPECS["qwen3"], vocab_size=16403, n_layers=1, layer_attention=(0,))
MakeCase = Callable[[str], Case]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> MakeCase:
    """The case of a family, made once."""
    folder, known = tmp_path_factory.mktemp("cases"), {}

    def make(family: str) -> Case:
        if family not in known:
            known[family] = make_case(TWO_PIECES if family == "two pieces" else family, folder / family)
        return known[family]

    return make


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Callable[[Chain, Baseline], tuple[Result, float]]:
    """Runs the gate; its result, and the deviation of the logits that it compared."""

    def run(chain: Chain, baseline: Baseline) -> tuple[Result, float]:
        pairs = []
        compare = gate.compare

        def spy(prompt: str, position: int, wanted: np.ndarray, got: np.ndarray) -> gate.Step:
            pairs.append((got, np.asarray(wanted)))
            return compare(prompt, position, wanted, got)

        with monkeypatch.context() as patch:
            patch.setattr(gate, "compare", spy)
            patch.setattr(gate, "_alone", lambda chain, prompt, wanted, mine: mine)  # takes time, and no part in it
            result = run_gate(chain, baseline)
        assert len(pairs) == len(result.steps) == len(baseline.logits) >= 15
        got, wanted = (np.array(side) for side in zip(*pairs, strict=True))
        return result, deviation(got, wanted)

    return run


# -- agreement ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*SPECS, "two pieces"])
def test_the_chain_is_the_oracle(family: str, case: MakeCase, judge: Any) -> None:
    for profile, baseline in case(family).baselines.items():
        assert margins(baseline.logits).min() >= MARGIN, "a near-tie would make the verdict a matter of luck"
        assert (baseline.logits.std(axis=1) > 3).all(), "the tolerance is meant for logits of this spread"
        for stress in (False, True):
            result, error = judge(Chain(case(family).bundle, ReferenceEngine(stress)), baseline)
            assert result.passed and result.profile == profile, result.reasons
            assert error < CHAIN_ORACLE


@pytest.mark.parametrize("recipe", ["int8", "int8-block32", "m8"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_quantised_chain_is_the_oracle_of_what_is_stored(family: str, recipe: str, tmp_path: Path) -> None:
    """Near the original; and as near as an fp16 chain to the model whose weights are those that the recipe stores."""
    source = tiny_source(family)
    chain = Chain(make_bundle(source, tmp_path / "b", recipe, CONTEXT, PREFILL), ReferenceEngine())
    ids = np.random.default_rng(1).integers(0, source.spec.vocab_size, 40)
    session = chain.start()
    got = np.array([chain.feed(session, ids[:30]), *(chain.feed(session, [i]) for i in ids[30:])])

    def oracle(of: Any) -> np.ndarray:
        model = Oracle(of)
        return model.logits(model.forward([ids])[0])[29:]

    stored = oracle(as_stored(source, recipe))
    assert deviation(got, stored) < (CHAIN_ORACLE_FP32 if recipe == "m8" else CHAIN_ORACLE)
    assert 2 * CHAIN_ORACLE < deviation(got, oracle(source)) < CHAIN_QUANTISED[recipe]


# -- mutations ---------------------------------------------------------------------------------------------------------


def exchange_heads(matrix: np.ndarray) -> np.ndarray:
    return np.roll(matrix, len(matrix) // 2, axis=0)


def scale_scores(function: Function) -> Function:
    consts = dict(function.consts)
    for op in function.ops:
        if op.name.endswith("_q_scaled"):
            consts[op.inputs["y"][0]] = (consts[op.inputs["y"][0]] * 2**0.5).astype(np.float16)
    return replace(function, consts=consts)


def values_first(function: Function) -> Function:
    """The state gets the values where the keys belong."""

    def swap(op: Op) -> Op:
        if op.name != "fresh_state":
            return op
        names = op.inputs["values"]
        return replace(op, inputs={**op.inputs, "values": tuple(names[i ^ 1] for i in range(len(names)))})

    return replace(function, ops=tuple(swap(op) for op in function.ops))


def stale_read(function: Function) -> Function:
    """Two layers write to the state one after the other, and the second starts from what was read at the beginning."""
    fresh = next((op for op in function.ops if op.name == "fresh_state"), None)
    if fresh is None or len(fresh.inputs["values"]) != 4:
        return function
    update = next(op for op in function.ops if op.type == "slice_update")
    write = next(op for op in function.ops if op.type == "coreml_update_state")
    state, (*_, query, depth) = update.outputs[0], fresh.outputs[0].shape
    half = (2, *state.shape[1:])
    consts = {**function.consts, "two": np.int32(2), "axis_0": np.int32(0), "apart": np.bool_(False)}
    old = (Value("old_0", half, "fp16"), Value("old_1", half, "fp16"))
    ops = [Op("split", "old", {"x": update.inputs["x"], "num_splits": ("two",), "axis": ("axis_0",)}, old)]

    def concat(name: str, values: tuple[str, ...], shape: tuple[int, ...]) -> None:
        inputs = {"values": values, "axis": ("axis_0",), "interleave": ("apart",)}
        ops.append(Op("concat", name, inputs, (Value(name, shape, "fp16"),)))

    for j in range(2):
        concat(f"new_{j}", fresh.inputs["values"][2 * j : 2 * j + 2], (2, state.shape[1], query, depth))
        box = {**update.inputs, "x": (old[j].name,), "update": (f"new_{j}",)}
        ops.append(Op("slice_update", f"half_{j}", box, (Value(f"half_{j}", half, "fp16"),)))
        whole = ("half_0", "old_1") if j == 0 else ("old_0", "half_1")
        concat(f"state_{j}", whole, state.shape)
        ops.append(replace(write, name=f"write_{j}", inputs={**write.inputs, "value": (f"state_{j}",)}))
    kept = tuple(op for op in function.ops if op not in (update, write))
    return replace(function, ops=kept + tuple(ops), consts=consts)


def host(change: Callable[[ModelSpec], ModelSpec]) -> Mutate:
    """What the host computes is that of another spec: rotations and masks."""
    return lambda bundle: Chain(replace(bundle, spec=change(bundle.spec)), ReferenceEngine())


def rope_base(spec: ModelSpec) -> ModelSpec:
    attentions = [replace(a, rope=replace(a.rope, theta=100 * a.rope.theta)) for a in spec.attentions]
    return replace(spec, attentions=tuple(attentions))


def windows(by: int) -> Callable[[ModelSpec], ModelSpec]:
    return lambda spec: replace(
        spec, attentions=tuple(replace(a, window=a.window and a.window + by) for a in spec.attentions)
    )


def exchange_ropes(spec: ModelSpec) -> ModelSpec:
    full, sliding = spec.attentions
    return replace(spec, attentions=(replace(full, rope=sliding.rope), replace(sliding, rope=full.rope)))


def feed(function: str, change: Callable[[dict[str, np.ndarray], int], None]) -> Mutate:
    """The ports of one function are changed after they were filled for a position."""

    def mutate(bundle: Bundle) -> Chain:
        chain = Chain(bundle, ReferenceEngine())
        ports = chain._feeds[function]
        fill = ports.fill

        def wrong(position: int) -> None:
            fill(position)
            change(ports.ports, position)

        ports.fill = wrong
        return chain

    return mutate


def decode_rotates_ahead(bundle: Bundle) -> Chain:
    chain = Chain(bundle, ReferenceEngine())
    ports = chain._feeds["decode"]
    fill = ports.fill

    def wrong(position: int) -> None:
        fill(position + 1)
        turned = {name: array.copy() for name, array in ports.ports.items() if name.startswith(("cos", "sin"))}
        fill(position)
        ports.ports.update(turned)

    ports.fill = wrong
    return chain


def one_row_early(ports: dict[str, np.ndarray], position: int) -> None:
    for corner in ("begin", "end"):
        ports[corner][2] -= position > 0


def too_wide(ports: dict[str, np.ndarray], position: int) -> None:
    ports["mask"][..., position] = 0


def too_narrow(ports: dict[str, np.ndarray], position: int) -> None:
    ports["mask"][..., max(position - 1, 0)] = MASKED


def without_last_layer(bundle: Bundle) -> Chain:
    chain = Chain(bundle, ReferenceEngine())
    assert len(bundle.blocks[-1].layers) == 1
    del chain.stages[-1]
    return chain


def wrong_row(bundle: Bundle) -> Chain:
    chain = Chain(bundle, ReferenceEngine())
    table = chain.embedding.data[0]
    chain.embedding = replace(chain.embedding, data=(np.roll(table, 1, axis=0),))
    return chain


def without_multiplier(bundle: Bundle) -> Chain:
    chain = Chain(bundle, ReferenceEngine())
    chain.embedding = replace(chain.embedding, multiplier=bundle.spec.stream_scale)
    return chain


def exchange_pieces(bundle: Bundle) -> Chain:
    chain = Chain(bundle, ReferenceEngine())
    assert head_pieces(bundle.spec)[0] == 2
    chain.logits = dict(reversed(chain.logits.items()))
    return chain


def other_activation(function: Function) -> Function:
    ops = (replace(op, type="sigmoid") if op.type == "silu" else op for op in function.ops)
    return replace(function, ops=tuple(ops))


def gate_and_up(function: Function) -> Function:
    return replace(
        function,
        consts={name.replace("_up", "_?").replace("_gate", "_up").replace("_?", "_gate"): array
                for name, array in function.consts.items()},
    )  # fmt: skip


def widened(by: int) -> Callable[[np.ndarray], np.ndarray]:
    """The fixed mask of a chunk [1, 1, G*Q, Q] with a window that is `by` longer."""

    def change(mask: np.ndarray) -> np.ndarray:
        window = int((mask[0, 0, PREFILL - 1] == 0).sum()) + by
        row, column = np.arange(mask.shape[2])[:, None] % PREFILL, np.arange(PREFILL)
        return np.where((column <= row) & (column > row - window), 0, MASKED)[None, None]

    return change


MUTATIONS: dict[str, tuple[str, Mutate]] = {
    "rope base": ("llama", host(rope_base)),
    "key heads exchanged": ("llama", weight("layers_1_k", exchange_heads)),
    "value heads exchanged": ("llama", weight("layers_1_v", exchange_heads)),
    "attention scale": ("llama", program(scale_scores)),
    "last layer skipped": ("llama", without_last_layer),
    "norm without gain": ("llama", weight("layers_2_ffn_norm", np.ones_like)),
    "final norm without gain": ("llama", weight("final_norm", np.ones_like)),
    "gate for up": ("llama", program(gate_and_up)),
    "activation": ("llama", program(other_activation)),
    "decode rotates ahead": ("llama", decode_rotates_ahead),
    "chunk one row early": ("llama", feed("prefill", one_row_early)),
    "token one row early": ("llama", feed("decode", one_row_early)),
    "mask too wide, decode": ("llama", feed("decode", too_wide)),
    "mask too wide, chunk": ("llama", feed("prefill", too_wide)),
    "mask too narrow, decode": ("llama", feed("decode", too_narrow)),
    "mask too narrow, chunk": ("llama", feed("prefill", too_narrow)),
    "chunk sees its future": ("llama", weight("causal_full", np.zeros_like)),
    "stale read": ("llama", program(stale_read)),
    "keys for values in the state": ("llama", program(values_first)),
    "wrong row of the embedding": ("llama", wrong_row),
    "no query norm": ("qwen3", weight("layers_1_q_norm", np.ones_like)),
    "no key norm": ("qwen3", weight("layers_0_k_norm", np.ones_like)),
    "no query bias": ("qwen2", weight("layers_0_q_bias", np.zeros_like)),
    "no key bias": ("qwen2", weight("layers_1_k_bias", np.zeros_like)),
    "no value bias": ("qwen2", weight("layers_2_v_bias", np.zeros_like)),
    "no output bias": ("llama-biases", weight("layers_1_o_bias", np.zeros_like)),
    "no down bias": ("llama-biases", weight("layers_2_down_bias", np.zeros_like)),
    "window short": ("mistral", host(windows(-1))),
    "window long": ("mistral", host(windows(1))),
    "window short in a chunk": ("mistral", weight("causal_13", widened(-1))),
    "window long in a chunk": ("mistral", weight("causal_13", widened(1))),
    "second norm without gain": ("gemma3", weight("layers_0_attn_post_norm", np.ones_like)),
    "ropes exchanged": ("gemma3", host(exchange_ropes)),
    "embedding not scaled": ("gemma3", without_multiplier),
    "head pieces exchanged": ("two pieces", exchange_pieces),
}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda name: name.replace(" ", "_"))
def test_a_mutation_turns_the_gate_red(mutation: str, case: MakeCase, judge: Any) -> None:
    family, mutate = MUTATIONS[mutation]
    chain, errors = mutate(case(family).bundle), []
    for baseline in case(family).baselines.values():
        result, error = judge(chain, baseline)
        assert not result.passed and result.reasons and not result.accepted
        errors.append(error)
    assert len(errors) == 2 and max(errors) > 10 * CHAIN_ORACLE
