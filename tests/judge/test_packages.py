"""`--by-package` names the package with the fault, and only that one: each is fed what the oracle says enters it."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from anechain.bundle.manifest import Bundle
from anechain.bundle.program import Function
from anechain.errors import BundleError
from anechain.judge.baseline import Baseline
from anechain.judge.packages import PackageReport, judge_packages
from anechain.run.chain import Chain
from anechain.run.reference import ReferenceEngine
from tests.bundle_maker import SPECS, TensorSource, make_bundle, tiny_source
from tests.judge.cases import CONTEXT, PREFILL, Altered, Change, make_baseline


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[TensorSource, Bundle, Baseline]:
    """A model whose stream carries a scale, in four packages of which one holds two layers."""
    spec = replace(SPECS["gemma3"], n_layers=5, layer_attention=(1, 0, 1, 1, 0))
    source = tiny_source(spec)
    bundle = make_bundle(source, tmp_path_factory.mktemp("bundle") / "b", "fp16", CONTEXT, PREFILL, (1, 1, 2, 1))
    baseline = make_baseline(source, "m8")
    return source, bundle, replace(baseline, prompts=baseline.prompts[:3])


def reports(made: tuple[TensorSource, Bundle, Baseline], change: Change | None = None) -> list[PackageReport]:
    source, bundle, baseline = made
    return judge_packages(Chain(bundle, Altered(change) if change else ReferenceEngine()), source, baseline)


def spoilt(layer: int, tensor: str, change: Callable[[np.ndarray], np.ndarray], only: str = "") -> Change:
    """One constant of the package with `layer`, in all of its functions or in one."""

    def alter(function: Function) -> Function:
        if f"layers_{layer}_q" not in function.consts or only not in ("", function.name):
            return function
        changed = np.ascontiguousarray(change(function.consts[tensor])).astype(np.float16)
        return replace(function, consts={**function.consts, tensor: changed})

    return alter


def half(x: np.ndarray) -> np.ndarray:
    return x / 2


def test_a_sound_chain_has_no_bad_package(made: tuple[TensorSource, Bundle, Baseline]) -> None:
    found = reports(made)
    assert [r.file for r in found] == [f"block-00{i}.mlpackage" for i in range(4)]
    assert all(r.first_bad == "" and 0.9999 < r.min_cosine < 1 and 0 < r.max_error < 0.05 for r in found)


LAYERS = {0: 0, 1: 1, 2: 2, 3: 2, 4: 3}  # layer -> number of its package


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("tensor", ["attn_post_norm", "v"])
def test_the_package_with_the_fault_is_named(
    layer: int, tensor: str, made: tuple[TensorSource, Bundle, Baseline]
) -> None:
    found = reports(made, spoilt(layer, f"layers_{layer}_{tensor}", lambda x: np.roll(x, 1)))
    assert [bool(r.first_bad) for r in found] == [number == LAYERS[layer] for number in range(4)]
    bad = found[LAYERS[layer]]
    assert bad.first_bad == f"{made[2].answers[0].name} position 0 (one by one)"
    assert bad.min_cosine < 0.99 and bad.max_error > 10 * max(r.max_error for r in found if r is not bad)


def test_a_fault_of_one_function_is_found_in_it(made: tuple[TensorSource, Bundle, Baseline]) -> None:
    """The prompts of 1 and 5 tokens, with their answers, make no chunk; the third does."""
    third = made[2].answers[2]
    assert [len(a.ids) for a in made[2].answers] == [3, 7, 22]
    chunk = reports(made, spoilt(1, "causal_full", np.zeros_like, only="prefill"))
    assert [r.first_bad for r in chunk] == ["", f"{third.name} position 0 (in chunks)", "", ""]
    decode = reports(made, spoilt(4, "layers_4_attn_post_norm", half, only="decode"))
    assert [r.first_bad for r in decode][:3] == ["", "", ""]
    assert decode[3].first_bad.endswith(" position 0 (one by one)")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_bad(value: float, made: tuple[TensorSource, Bundle, Baseline]) -> None:
    found = reports(made, spoilt(2, "layers_3_down", lambda x: np.full_like(x, value)))
    assert [bool(r.first_bad) for r in found] == [False, False, True, False]
    assert found[2].to_json() == {
        "file": "block-002.mlpackage", "min_cosine": 0.0, "max_error": float("inf"),
        "first_bad": f"{made[2].answers[0].name} position 0 (one by one)",
    }  # fmt: skip


def test_another_source_is_refused(made: tuple[TensorSource, Bundle, Baseline]) -> None:
    source, bundle, baseline = made
    other = replace(tiny_source(source.spec, seed=1), ref="elsewhere")
    assert other.fingerprint != source.fingerprint
    with pytest.raises(BundleError, match=r"^elsewhere is not what .* was baked from .* give the original checkpoint"):
        judge_packages(Chain(bundle, ReferenceEngine()), other, baseline)


def test_progress_counts_packages(made: tuple[TensorSource, Bundle, Baseline]) -> None:
    source, bundle, baseline = made
    few = replace(baseline, prompts=baseline.prompts[:1])
    seen: list[tuple[int, int, str]] = []
    judge_packages(Chain(bundle, ReferenceEngine()), source, few, lambda *now: seen.append(now))
    assert seen == [(i, 4, f"block-00{i}.mlpackage") for i in range(4)]
