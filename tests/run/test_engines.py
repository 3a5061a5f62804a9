"""One set of tests for all engines: reference and both cpu engines for real, coreml through a double of its port.

A double proves the protocol, not Core ML.
"""

import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anechain.bundle.manifest import Bundle
from anechain.bundle.spec import ModelSpec
from anechain.errors import EngineError
from anechain.judge.conformance import CHECKS, run_checks
from anechain.run import coreml
from anechain.run.chain import Chain
from anechain.run.coreml import CoreMLEngine
from anechain.run.engine import Engine
from anechain.run.openvino import CpuEngine
from anechain.run.reference import ReferenceEngine
from anechain.run.tape import TapeEngine
from tests.bundle_maker import SPECS, make_bundle, tiny_source
from tests.run.coreml_double import Manners, SameDouble
from tests.run.native_case import MISSING
from tests.tolerances import CONFORMANCE

# A model of two layers in two packages, as is; and with all that a form can have: two kinds of layers, int8 weights,
# the blend, hidden states in int8. The native engine has no int8 hidden states, and has the form without them.
QWEN3 = replace(SPECS["qwen3"], n_layers=2, layer_attention=(0, 0))
GEMMA3 = replace(SPECS["gemma3"], n_layers=2, layer_attention=(1, 0))
INT8_PORTS, NATIVE = "gemma3, int8, blend, int8 ports", "cpu-native-exact"
BUNDLES: dict[str, tuple[ModelSpec, str, dict[str, Any]]] = {
    "qwen3, fp16": (QWEN3, "fp16", {}),
    INT8_PORTS: (GEMMA3, "int8", {"target": "macOS26", "state_update": "blend", "scales": (0.0625,)}),
    "gemma3, int8, blend": (GEMMA3, "int8", {"state_update": "blend"}),
}
ENGINES: dict[str, Callable[[Path], Engine]] = {
    "reference": lambda cache: ReferenceEngine(),
    "cpu-exact": lambda cache: CpuEngine("exact"),
    NATIVE: lambda cache: TapeEngine("exact"),
    "coreml (double)": lambda cache: CoreMLEngine(make_port=SameDouble(Manners(row_alignment=256)), cache=cache),
}
CASES = [
    *((engine, bundle) for engine in ENGINES if engine != NATIVE for bundle in ("qwen3, fp16", INT8_PORTS)),
    *((NATIVE, bundle) for bundle in ("qwen3, fp16", "gemma3, int8, blend")),
]
HERE = [case for case in CASES if not (MISSING and case[0] == NATIVE)]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    folder = tmp_path_factory.mktemp("bundles")
    return {
        name: make_bundle(tiny_source(spec), folder / str(number), recipe, 64, 32, (1, 1), **more)
        for number, (name, (spec, recipe, more)) in enumerate(BUNDLES.items())
    }


@pytest.fixture(scope="module")
def results(bundles: dict[str, Bundle], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict]:
    cache, found = tmp_path_factory.mktemp("compiled"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coreml, "probe", lambda *arguments: None)  # test_coreml.py has the processes
        references = {name: Chain(bundle, ReferenceEngine()) for name, bundle in bundles.items()}
        for engine, bundle in HERE:
            chain = Chain(bundles[bundle], ENGINES[engine](cache))
            found[engine, bundle] = run_checks(chain, references[bundle], CONFORMANCE)
    return found


@pytest.mark.parametrize(("engine", "bundle"), [
    pytest.param(*case, marks=() if case in HERE else pytest.mark.skip(reason=MISSING)) for case in CASES
])  # fmt: skip
@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: str, engine: str, bundle: str, results: dict[tuple[str, str], dict]) -> None:
    assert set(results[engine, bundle]) == set(CHECKS)
    assert results[engine, bundle][check] == ""


@pytest.mark.skipif(bool(MISSING), reason=MISSING or "it is there")
def test_the_native_engine_says_that_it_has_no_int8_hidden_states(bundles: dict[str, Bundle]) -> None:
    with pytest.raises(EngineError, match=r"cannot run op quantize .*op dequantize .*: use --engine openvino, or"):
        Chain(bundles[INT8_PORTS], TapeEngine("exact"))


@pytest.mark.skipif(
    platform.system() != "Darwin",
    reason="engine coreml was skipped: no Mac here; its double proves the protocol, not Core ML",
)
@pytest.mark.parametrize("bundle", ["qwen3, fp16", INT8_PORTS])
def test_conformance_of_core_ml_itself(bundle: str, bundles: dict[str, Bundle], tmp_path: Path) -> None:
    chain = Chain(bundles[bundle], CoreMLEngine(cache=tmp_path))
    assert not any(run_checks(chain, Chain(bundles[bundle], ReferenceEngine()), CONFORMANCE).values())
