"""One set of tests for all engines: reference and cpu for real, coreml through a double of its port.

A double proves the protocol, not Core ML.
"""

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anechain.bundle.manifest import Bundle
from anechain.judge.conformance import CHECKS, run_checks
from anechain.run import coreml
from anechain.run.chain import Chain
from anechain.run.coreml import CoreMLEngine
from anechain.run.engine import Engine
from anechain.run.openvino import CpuEngine
from anechain.run.reference import ReferenceEngine
from tests.bundle_maker import make_bundle, tiny_source
from tests.run.coreml_double import Manners, SameDouble
from tests.tolerances import CONFORMANCE

BUNDLES: dict[str, tuple[str, str, tuple[int, ...], dict[str, Any]]] = {
    "qwen3, fp16": ("qwen3", "fp16", (1, 2), {}),
    "gemma3, int8": ("gemma3", "int8", (2, 1), {}),
    "llama, blend, int8 ports": (
        "llama", "fp16", (1, 1, 1), {"target": "macOS26", "state_update": "blend", "scales": (0.0625, 0.0625)}
    ),
}  # fmt: skip
ENGINES: dict[str, Callable[[Path], Engine]] = {
    "reference": lambda cache: ReferenceEngine(),
    "cpu-exact": lambda cache: CpuEngine("exact"),
    "coreml (double)": lambda cache: CoreMLEngine(make_port=SameDouble(Manners(row_alignment=256)), cache=cache),
}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    folder = tmp_path_factory.mktemp("bundles")
    return {
        name: make_bundle(tiny_source(spec), folder / spec, recipe, 64, 32, cuts, **more)
        for name, (spec, recipe, cuts, more) in BUNDLES.items()
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
