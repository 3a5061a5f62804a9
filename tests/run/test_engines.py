"""One set of tests for all engines: reference and cpu for real, coreml through a double of its port.

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
from anechain.judge.conformance import CHECKS, run_checks
from anechain.run import coreml
from anechain.run.chain import Chain
from anechain.run.coreml import CoreMLEngine
from anechain.run.engine import Engine
from anechain.run.openvino import CpuEngine
from anechain.run.reference import ReferenceEngine
from tests.bundle_maker import SPECS, make_bundle, tiny_source
from tests.run.coreml_double import Manners, SameDouble
from tests.tolerances import CONFORMANCE

# A model of two layers in two packages, as is; and with all that a form can have: two kinds of layers, int8 weights,
# the blend, hidden states in int8.
BUNDLES: dict[str, tuple[ModelSpec, str, dict[str, Any]]] = {
    "qwen3, fp16": (replace(SPECS["qwen3"], n_layers=2, layer_attention=(0, 0)), "fp16", {}),
    "gemma3, int8, blend, int8 ports": (
        replace(SPECS["gemma3"], n_layers=2, layer_attention=(1, 0)),
        "int8",
        {"target": "macOS26", "state_update": "blend", "scales": (0.0625,)},
    ),
}
ENGINES: dict[str, Callable[[Path], Engine]] = {
    "reference": lambda cache: ReferenceEngine(),
    "cpu-exact": lambda cache: CpuEngine("exact"),
    "coreml (double)": lambda cache: CoreMLEngine(make_port=SameDouble(Manners(row_alignment=256)), cache=cache),
}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    folder = tmp_path_factory.mktemp("bundles")
    return {
        name: make_bundle(tiny_source(spec), folder / spec.family, recipe, 64, 32, (1, 1), **more)
        for name, (spec, recipe, more) in BUNDLES.items()
    }


@pytest.fixture(scope="module")
def results(bundles: dict[str, Bundle], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict]:
    cache, found = tmp_path_factory.mktemp("compiled"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coreml, "probe", lambda *arguments: None)  # test_coreml.py has the processes
        for bundle_name, bundle in bundles.items():
            reference = Chain(bundle, ReferenceEngine())
            for engine_name, make in ENGINES.items():
                found[engine_name, bundle_name] = run_checks(Chain(bundle, make(cache)), reference, CONFORMANCE)
    return found


@pytest.mark.parametrize("bundle", BUNDLES)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: str, engine: str, bundle: str, results: dict[tuple[str, str], dict]) -> None:
    assert set(results[engine, bundle]) == set(CHECKS)
    assert results[engine, bundle][check] == ""


@pytest.mark.skipif(
    platform.system() != "Darwin",
    reason="engine coreml was skipped: no Mac here; its double proves the protocol, not Core ML",
)
@pytest.mark.parametrize("bundle", BUNDLES)
def test_conformance_of_core_ml_itself(bundle: str, bundles: dict[str, Bundle], tmp_path: Path) -> None:
    chain = Chain(bundles[bundle], CoreMLEngine(cache=tmp_path))
    assert not any(run_checks(chain, Chain(bundles[bundle], ReferenceEngine()), CONFORMANCE).values())
