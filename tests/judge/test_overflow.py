"""When a chain's logits are not finite, the gate says which op of which package was the first."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from anechain.judge.gate import run_gate
from anechain.judge.overflow import first_overflow
from anechain.run.chain import Chain
from anechain.run.reference import ReferenceEngine, ReferenceStage
from tests.judge.cases import Case, Mutate, make_case, weight


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case("llama", tmp_path_factory.mktemp("case") / "b")


def too_large(matrix: np.ndarray) -> np.ndarray:
    """Finite, with products that are not."""
    large = matrix * 2.0**15
    assert np.abs(large).max() < 65504
    return large


def one_is(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(matrix: np.ndarray) -> np.ndarray:
        changed = matrix.copy()
        changed.flat[5] = value
        return changed

    return change


POISON: dict[str, tuple[Mutate, str]] = {
    "attention": (weight("layers_0_q", too_large), "op 'layers_0_q_out' (conv) in block-000.mlpackage"),
    "second layer of a package": (
        weight("layers_1_down", too_large),
        "op 'layers_1_down_out' (conv) in block-000.mlpackage",
    ),
    "last package": (weight("layers_2_up", too_large), "op 'layers_2_up_out' (conv) in block-001.mlpackage"),
    "NaN": (weight("layers_2_ffn_norm", one_is(np.nan)), "op 'layers_2_ffn_norm_out' (mul) in block-001.mlpackage"),
    "head": (weight("head_0", one_is(np.inf)), "op 'head_0_out' (conv) in head.mlpackage"),
}


@pytest.mark.parametrize("where", POISON, ids=lambda name: name.replace(" ", "_"))
def test_the_first_op_is_named(where: str, case: Case) -> None:
    mutate, place = POISON[where]
    chain = mutate(case.bundle)
    result = run_gate(chain, case.baselines["m8"])
    first = next(s for s in result.steps if not s.sound)
    assert result.reasons[-1] == (
        f"the first result that is not finite is that of {place}, {first.prompt} position {first.position}"
    )
    assert "not finite or all alike" in result.reasons[0] and not result.passed
    stages = [*chain.stages, chain.head]
    assert len(stages) == 3 and all(isinstance(s, ReferenceStage) and s.watch is None for s in stages)


def test_a_row_of_the_embedding_is_named_where_it_is_used(case: Case) -> None:
    """One token's row overflows; the first prompt does not have it, so the verdict on it stands."""
    answers = case.baselines["m8"].answers
    token = next(int(t) for t in answers[2].ids if not any(t in a.ids for a in answers[:2]))
    chain = Chain(case.bundle, ReferenceEngine(stress=True))
    table = np.array(chain.embedding.data[0])
    table[token, 3] = np.inf
    chain.embedding = replace(chain.embedding, data=(table,))
    result = run_gate(chain, case.baselines["m8"])
    position = int(answers[2].positions[0])
    assert result.reasons[-1] == (
        f"the first result that is not finite is that of a row of the embedding, {answers[2].name} position {position}"
    )
    assert all(s.sound for s in result.steps[:6])


def test_a_sound_chain_has_none(case: Case) -> None:
    chain = Chain(case.bundle, ReferenceEngine())
    assert first_overflow(chain, [np.arange(12), np.arange(3)]) == ""


def test_a_stage_of_several_packages_is_named_by_all_of_them(case: Case) -> None:
    engine = weight("layers_2_up", too_large)(case.bundle).engine
    chain = Chain(case.bundle, engine, stitched=True)
    assert first_overflow(chain, [np.arange(12)]) == (
        "op 'layers_2_up_out' (conv) in block-000.mlpackage or block-001.mlpackage"
    )


def test_an_engine_that_cannot_be_watched_leaves_the_reason_out(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    class Opaque:
        def __init__(self, stage: ReferenceStage) -> None:
            self.functions, self.new_state, self.step = stage.functions, stage.new_state, stage.step

    class Engine(ReferenceEngine):
        def load(self, packages: list[Path]) -> Opaque:  # type: ignore[override]
            return Opaque(spoilt.load(packages))

    spoilt = weight("layers_1_down", too_large)(case.bundle).engine
    result = run_gate(Chain(case.bundle, Engine()), case.baselines["m8"])
    assert len(result.reasons) >= 1 and not any("the first result" in reason for reason in result.reasons)
    assert not result.passed
