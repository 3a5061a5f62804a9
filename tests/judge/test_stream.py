"""A residual stream that fp16 cannot hold: it is measured, scaled by a power of two, and named where it overflows."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anechain.bake.jobs import make_plan
from anechain.bundle.cache import cache_directory
from anechain.bundle.manifest import Bundle, open_bundle
from anechain.bundle.recipe import load_recipe
from anechain.errors import SourceError
from anechain.judge import prepare
from anechain.judge.gate import run_gate
from anechain.judge.oracle import Oracle
from anechain.judge.prepare import bake_with_baselines, load_baseline, with_stream_scale
from anechain.judge.stream import FP16_MAX, HEADROOM, TOKENS, kept_peak, probes, stream_peak, stream_scale
from anechain.run.chain import Chain
from anechain.run.reference import ReferenceEngine
from tests.bundle_maker import TensorSource, bake_here, deviation, make_bundle, tiny_source
from tests.tolerances import CHAIN_ORACLE

CONTEXT = 64
LOUD = 80.0  # times what a branch writes to the stream


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of its own, and a bake in this process."""
    monkeypatch.setenv("ANECHAIN_CACHE", str(tmp_path / "cache"))

    def bake(source: Any, plan: Any, out: Path, workers: int, force: bool, attach: Any, progress: Any) -> Bundle:
        return bake_here(source, plan, out, attach)

    monkeypatch.setattr(prepare, "bake", bake)


def loud(family: str = "gemma3") -> TensorSource:
    """The tiny model with everything that enters the residual stream made so much larger that it is 100 000 at most.

    Norms take the size away again before it is looked at, so the model says nearly what it said.
    """
    source = tiny_source(family)
    source = replace(source, spec=replace(source.spec, stream_scale=1.0))
    writers = ("attn_post_norm", "ffn_post_norm") if source.spec.sandwich_norms else ("o", "down")

    def larger(factor: float) -> TensorSource:
        tensors = {
            name: np.float32(factor) * values if name.endswith(writers) or name == "embed" else values
            for name, values in source.tensors.items()
        }
        if source.spec.tied:
            tensors["final_norm"] = tensors["final_norm"] / np.float32(factor)
        return replace(source, tensors=tensors)

    first = larger(LOUD)
    peak = stream_peak(first, [np.arange(200)])
    return larger(LOUD * 100_000 / peak)


def plan_of(source: TensorSource) -> Any:
    return make_plan(source, load_recipe("fp16"), CONTEXT, 32, "macOS15", None)


@pytest.mark.parametrize(
    "peak, scale",
    [(0, 1), (1, 1), (29_303, 1), (32_752, 1), (32_753, 0.5), (65_504, 0.5), (104_061, 0.25), (1e6, 2.0**-5)],
)
def test_the_scale_is_the_largest_that_leaves_room(peak: float, scale: float) -> None:
    assert stream_scale(peak) == scale
    assert peak * scale * HEADROOM <= FP16_MAX
    assert scale == 1 or peak * 2 * scale * HEADROOM > FP16_MAX


def test_a_peak_that_is_no_number_is_refused() -> None:
    source = tiny_source("llama")
    broken = replace(source, tensors={**source.tensors, "layers.1.o": source.tensors["layers.1.o"] * np.nan})
    with pytest.raises(SourceError, match="the residual stream of tensors is not finite in float32: its weights are"):
        stream_peak(broken, [np.arange(5)])


def test_the_peak_is_the_oracles(tmp_path: Path) -> None:
    source = loud()
    ids = np.arange(40)
    seen = [0.0]
    Oracle(source).forward([ids], record=lambda layer, hidden: seen.append(float(np.abs(hidden[0]).max())))
    assert stream_peak(source, [ids]) >= math.ceil(max(seen)) > FP16_MAX


def test_probes_are_beginnings_with_and_without_the_first_token() -> None:
    found = probes(lambda text, special: [1] * special + [ord(c) % 100 for c in text])
    assert all(0 < len(ids) <= TOKENS for ids in found)
    assert sum(ids[0] == 1 for ids in found) > 10 and sum(ids[0] != 1 for ids in found) > 10


@pytest.mark.parametrize(
    "content", [None, b"", b"{}", b"[1]", b'{"peak": "1"}', b'{"peak": NaN}', b'{"peak": -1}', b"\xff"]
)
def test_a_kept_peak_that_is_not_right_is_measured_again(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)
    assert kept_peak(path, lambda: 7.0) == 7.0
    assert json.loads(path.read_bytes()) == {"peak": 7.0}
    assert kept_peak(path, lambda: 8.0) == 7.0


def test_it_is_measured_once_for_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    measure = prepare.stream_peak
    monkeypatch.setattr(prepare, "stream_peak", lambda *given: calls.append("x") or measure(*given))
    a, b = loud(), tiny_source("llama")
    scales = [with_stream_scale(plan_of(source), source).spec.stream_scale for source in (a, a, b, a, b)]
    assert scales == [0.25, 0.25, 1, 0.25, 1] and len(calls) == 2
    assert len(list((cache_directory() / "streams").iterdir())) == 2


@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_a_loud_model_is_baked_scaled(family: str, tmp_path: Path) -> None:
    source = loud(family)
    plan = plan_of(source)
    bundle = open_bundle(bake_with_baselines(source, plan, tmp_path / "b", 1).path, verify_hashes=True)
    assert bundle.spec == replace(source.spec, stream_scale=0.25)
    assert bundle.stream_peak is not None and 65_504 < bundle.stream_peak < 131_008
    assert bundle.key != plan.key
    ids = np.random.default_rng(2).integers(0, 320, 40)
    oracle = Oracle(source)
    wanted = oracle.logits(oracle.forward([ids])[0])[[31, 39]]
    for stress in (False, True):
        chain = Chain(bundle, ReferenceEngine(stress))
        session = chain.start()
        got = np.array([chain.feed(session, ids[:32]), chain.feed(session, ids[32:])])
        assert deviation(got, wanted) < CHAIN_ORACLE
        result = run_gate(chain, load_baseline(bundle, "m8"))
        assert all(step.sound for step in result.steps)


@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_without_the_scale_the_gate_names_the_layer(family: str, tmp_path: Path) -> None:
    source = loud(family)
    scaled = bake_with_baselines(source, plan_of(source), tmp_path / "scaled", 1)
    unscaled = make_bundle(source, tmp_path / "unscaled", "fp16", CONTEXT)
    assert unscaled.spec.stream_scale == 1 and unscaled.stream_peak is None
    with np.errstate(over="ignore"):
        result = run_gate(Chain(unscaled, ReferenceEngine()), load_baseline(scaled, "m8"))
    assert not result.passed
    peaks = [0.0] * (source.spec.n_layers + 1)

    def keep(layer: int, hidden: list[np.ndarray]) -> None:
        peaks[layer] = float(np.abs(hidden[0]).max())

    first = next(a for a in load_baseline(scaled, "m8").answers)
    Oracle(source).forward([first.ids], record=keep)
    layer = next(i for i in range(source.spec.n_layers) if peaks[i + 1] > FP16_MAX)
    assert f"the first result that is not finite is that of op 'layers_{layer}_" in result.reasons[-1]
    assert "in block-000.mlpackage" in result.reasons[-1]
