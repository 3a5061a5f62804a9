"""The Core ML engine's protocol: ring, identity check, probe, states, locks. Against a double, not against Core ML."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anechain.bundle.manifest import Bundle
from anechain.errors import EngineError
from anechain.judge.conformance import CHECKS
from anechain.run import chain as chain_module
from anechain.run import coreml
from anechain.run.chain import Chain
from anechain.run.coreml import CoreMLEngine, CoreMLStage, Handoff, probe
from anechain.run.coreml_port import COMPUTE_UNITS, row_strides
from anechain.run.reference import ReferenceEngine
from tests.bundle_maker import make_bundle, tiny_source
from tests.run.coreml_double import Double, Manners, SameDouble
from tests.tolerances import CONFORMANCE

IDS = np.random.default_rng(3).integers(0, 320, 64)
N_STAGES = 3
POLITE = Manners()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return make_bundle(tiny_source("qwen3"), tmp_path_factory.mktemp("b") / "b", "fp16", 64, 32, (1, 1, 1))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, bundle: Bundle) -> Path:
    """Where the packages of `bundle` are compiled and probed already."""
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coreml, "probe", lambda *arguments: None)
        Chain(bundle, CoreMLEngine(make_port=SameDouble(), cache=folder))
    return folder


@pytest.fixture(scope="module")
def right(bundle: Bundle) -> np.ndarray:
    return talk(Chain(bundle, ReferenceEngine()))


def talk(chain: Chain, tokens: int = 6) -> np.ndarray:
    """Logits after a prompt of 33 tokens, a chunk and one, and after each token that follows."""
    session = chain.start()
    return np.array([chain.feed(session, IDS[:33]), *(chain.feed(session, [i]) for i in IDS[33:][:tokens])])


def opened(bundle: Bundle, cache: Path, manners: Manners = POLITE) -> tuple[Chain, Double]:
    made = SameDouble(manners)
    return Chain(bundle, CoreMLEngine(make_port=made, cache=cache)), made.double


# -- the hand-off ------------------------------------------------------------------------------------------------------


def test_nothing_is_copied(bundle: Bundle, cache: Path, right: np.ndarray) -> None:
    chain, double = opened(bundle, cache)
    assert chain.engine.handoff == "not measured: nothing was predicted"
    assert np.array_equal(talk(chain), right)
    assert chain.engine.handoff.startswith("zero-copy (") and double.faults == []
    assert ("refused",) not in {event[:1] for event in double.events}
    predictions = [event for event in double.events if event[0] == "predict" and len(event) == 3]
    assert len(predictions) >= N_STAGES * 8 and double.pools >= len(predictions) / 2


@pytest.mark.parametrize("depth", [1, 2])
def test_a_shorter_ring_is_refused_and_reported(
    depth: int, bundle: Bundle, cache: Path, right: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """... and still right: depth 1 reads what it writes, 2 swaps."""
    monkeypatch.setattr(chain_module, "RING", depth)
    chain, double = opened(bundle, cache)
    assert np.array_equal(talk(chain), right)
    assert {event[2] for event in double.events if event[0] == "refused"} == {"hidden_out"}
    assert chain.engine.handoff.startswith("copied ") and "hidden_out is not in its backing" in chain.engine.handoff


@pytest.mark.parametrize("cuts", [(3,), (1, 2)], ids=str)
@pytest.mark.parametrize(("depth", "holds"), [(chain_module.RING, True), (chain_module.RING - 1, False)])
def test_the_ring_is_just_deep_enough(
    cuts: tuple[int, ...], depth: int, holds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that follow each other without a head between them, through any number of packages."""
    monkeypatch.setattr(coreml, "probe", lambda *arguments: None)
    monkeypatch.setattr(chain_module, "RING", depth)
    chain, double = opened(make_bundle(tiny_source("llama"), tmp_path / "b", "fp16", 32, 0, cuts), tmp_path / "c")
    session = chain.start()
    for length in (7, 1, 1, 5, 1):
        chain.feed(session, IDS[:length])
    assert chain.engine.handoff.startswith("zero-copy") == holds
    assert double.faults == []


@pytest.mark.parametrize("own_strides", [False, True])
def test_an_array_that_is_not_its_backing_is_found_and_copied(
    own_strides: bool, bundle: Bundle, cache: Path, right: np.ndarray
) -> None:
    manners = Manners(refuses=frozenset({"hidden_out", "logits_0"}), own_strides=own_strides, row_alignment=256)
    chain, double = opened(bundle, cache, manners)
    assert np.array_equal(talk(chain), right)
    outputs = sum(event[0] == "refused" for event in double.events)
    assert outputs == 8 * N_STAGES + 7, "each stage for the chunk and 7 tokens, the head for each feed"
    assert f"copied {outputs} of " in chain.engine.handoff
    assert "block-000.mlpackage: decode hidden_out is not in its backing, 7 times" in chain.engine.handoff


def test_without_the_identity_check_the_answer_would_be_another(
    bundle: Bundle, cache: Path, right: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the check is for: here every output says that it lies in its backing."""
    chain, double = opened(bundle, cache, Manners(refuses=frozenset({"hidden_out"})))
    honest = double.predict

    def claims(request, state):  # type: ignore[no-untyped-def]
        outputs = honest(request, state)
        return {name: type(o)(o.array, request[2][name].address) for name, o in outputs.items()}

    monkeypatch.setattr(double, "predict", claims)
    assert not np.array_equal(talk(chain), right)
    assert chain.engine.handoff.startswith("zero-copy")


def test_nothing_is_allocated_once_the_ring_has_gone_round(bundle: Bundle, cache: Path) -> None:
    chain, double = opened(bundle, cache)
    session = chain.start()
    chain.feed(session, IDS[:32])
    for i in IDS[32:40]:
        chain.feed(session, [i])
    double.events.clear()
    for i in IDS[40:60]:
        chain.feed(session, [i])
    assert {event[0] for event in double.events} == {"predict"}


def test_arrays_of_others_are_taken_and_reported(bundle: Bundle, cache: Path) -> None:
    chain, _ = opened(bundle, cache)
    stage, state = chain.stages[0], chain.start().states[0]
    ports = {name: array.copy() for name, array in chain.ports("decode", 0).items()}
    ports["hidden"][...] = 1
    out = {"hidden_out": np.zeros_like(ports["hidden"])}
    stage.step("decode", ports, state, out)
    wanted = {"hidden_out": np.zeros_like(ports["hidden"])}
    other = ReferenceEngine().load(chain.packages[0])
    other.step("decode", ports, other.new_state(), wanted)
    assert wanted["hidden_out"].any() and np.array_equal(out["hidden_out"], wanted["hidden_out"])
    assert "decode hidden_out is not one of this engine's buffers" in chain.engine.handoff or "hidden is" in (
        chain.engine.handoff
    )
    assert chain.engine.handoff.startswith("copied 7 of 7")


def test_row_strides() -> None:
    f16 = np.dtype(np.float16)
    assert row_strides((1, 1, 64, 576), f16, 1152) == np.zeros((1, 1, 64, 576), f16).strides
    assert row_strides((1, 1, 64, 576), f16, 1280) == (64 * 1280, 64 * 1280, 1280, 2)
    assert row_strides((2, 3, 4), f16, 64) == (192, 64, 2)
    assert row_strides((4,), np.dtype(np.int8), 64) == (1,)
    with pytest.raises(EngineError, match="rows of 64 bytes do not hold 33 values of float16"):
        row_strides((1, 33), f16, 64)


def test_the_report_counts_by_place() -> None:
    handoff = Handoff()
    for _ in range(3):
        handoff.note("a", 2, ["x"])
    handoff.note("b", 1, ["y"])
    assert str(handoff) == "copied 4 of 7 (a: x, 3 times; b: y, 1 times)"


# -- states ------------------------------------------------------------------------------------------------------------


def test_one_state_a_package_serves_both_functions(bundle: Bundle, cache: Path) -> None:
    chain, double = opened(bundle, cache)
    double.events.clear()
    session = chain.start()
    chain.feed(session, IDS[:32])
    chain.feed(session, IDS[32:33])
    assert [e for e in double.events if e[0] == "new_state"] == [("new_state", f"block-{i:03}") for i in range(3)]


@pytest.mark.parametrize("check", ["two conversations", "a copy goes its own way"])
def test_a_state_that_two_conversations_share_is_found(
    check: str, bundle: Bundle, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, double = opened(bundle, cache)
    assert CHECKS[check](chain, chain, CONFORMANCE) == ""
    new_state, made = double.new_state, dict[str, Any]()
    monkeypatch.setattr(double, "new_state", lambda model: made.setdefault(model.name, new_state(model)))
    assert "off by" in CHECKS[check](chain, chain, CONFORMANCE)


def test_a_new_state_is_cleared(bundle: Bundle, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The double leaves it full of NaN, which a masked cell would bring into every sum."""
    chain, double = opened(bundle, cache)
    assert np.isfinite(chain.feed(chain.start(), IDS[:3])).all()
    monkeypatch.setattr(double, "visit_state", lambda state, name, visit: None)
    assert np.isnan(chain.feed(chain.start(), IDS[:3])).all()


def test_a_state_of_another_stage_is_refused(bundle: Bundle, cache: Path) -> None:
    chain, _ = opened(bundle, cache)
    session = chain.start()
    session.states.reverse()
    with pytest.raises(EngineError, match=r"the state is not one of this stage's new_state\(\)"):
        chain.feed(session, IDS[:3])


def test_predictions_on_one_state_never_overlap(bundle: Bundle, cache: Path) -> None:
    chain, double = opened(bundle, cache, Manners(predict_s=0.02))
    stage, state = chain.stages[0], chain.start().states[0]
    sets = [{name: array.copy() for name, array in chain.ports("decode", 0).items()} for _ in range(3)]
    threads = [
        threading.Thread(
            target=stage.step, args=("decode", ports, state, {"hidden_out": np.zeros_like(ports["hidden"])})
        )
        for ports in sets
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(e[0] == "predict" and e[2] == "decode" for e in double.events if len(e) == 3) == 3
    assert double.faults == []


def test_buffers_are_the_hosts_again_after_a_failed_prediction(bundle: Bundle, cache: Path) -> None:
    chain, double = opened(bundle, cache, Manners(fails={"block-001": "predict decode"}))
    with pytest.raises(EngineError) as caught:
        chain.feed(chain.start(), IDS[:1])
    assert str(caught.value) == (
        "block-001.mlpackage, function 'decode': Core ML cannot predict decode: it said that it will not."
    )
    assert not double.lent


# -- loading and the probe ---------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Bundle]:
    yield make_bundle(tiny_source("llama"), tmp_path / "small", "fp16", 32, 0, (2, 1))


def test_a_package_is_compiled_and_probed_once(small: Bundle, tmp_path: Path) -> None:
    first, second = (SameDouble() for _ in range(2))
    for made in (first, second):
        chain = Chain(small, CoreMLEngine(make_port=made, cache=tmp_path / "cache"))
        assert len(chain.stages) == 2 and chain.engine.loaders >= 1
    compiled = sorted(path.name for path in (tmp_path / "cache").rglob("*.mlmodelc"))
    assert compiled == ["block-000.mlmodelc", "block-001.mlmodelc", "head.mlmodelc"]
    assert [e[0] for e in (*first.double.events, *second.double.events)].count("compile") == 0, "the probe did it"
    assert not [p for p in (tmp_path / "cache").rglob(".*")]


@pytest.mark.parametrize(
    ("manners", "message"),
    [
        (
            Manners(dies={"block-001": ("load decode", signal.SIGKILL)}),
            "the process in which block-001.mlpackage loaded 'decode' was ended by SIGKILL: find the layer with "
            "`anechain plan BUNDLE --bisect`, or try other --compute-units.",
        ),
        (
            Manners(dies={"block-001": ("predict decode", signal.SIGTRAP)}),
            "the process in which block-001.mlpackage predicted with 'decode' was ended by SIGTRAP: find the layer "
            "with `anechain plan BUNDLE --bisect`, or try other --compute-units.",
        ),
        (
            Manners(dies={"block-001": ("compile", -7)}),
            "the process in which block-001.mlpackage was compiled ended with exit code 7: find the layer with "
            "`anechain plan BUNDLE --bisect`, or try other --compute-units.",
        ),
        (
            Manners(fails={"block-001": "load decode"}, throws=frozenset({"block-001"})),
            "while block-001.mlpackage loaded 'decode': ValueError: NSInvalidArgumentException - no.",
        ),
        (
            Manners(fails={"block-001": "load decode"}),
            "Core ML cannot load decode: it said that it will not.",
        ),
    ],
    ids=["killed", "trapped", "exited", "thrown", "refused"],
)
def test_what_ends_the_probe_becomes_a_sentence(manners: Manners, message: str, small: Bundle, tmp_path: Path) -> None:
    """And this process, in which nothing was loaded, lives on."""
    engine = CoreMLEngine(make_port=SameDouble(manners), cache=tmp_path / "cache")
    with pytest.raises(EngineError) as caught:
        engine.load([small.block_paths[1]])
    assert str(caught.value) == message
    assert probe([small.block_paths[1]], "cpu", SameDouble(manners), tmp_path / "cache") == message


def test_what_it_refuses(small: Bundle, tmp_path: Path) -> None:
    with pytest.raises(EngineError) as caught:
        CoreMLEngine("gpu", SameDouble())
    assert str(caught.value) == "--compute-units gpu is not known: use cpu-and-ne, all, cpu-and-gpu, cpu."
    assert COMPUTE_UNITS[0] == CoreMLEngine(make_port=SameDouble(), cache=tmp_path).units == "cpu-and-ne"
    with pytest.raises(EngineError, match="runs one package a stage"):
        CoreMLEngine(make_port=SameDouble(), cache=tmp_path).load(small.block_paths)


def test_it_is_an_engine() -> None:
    engine = CoreMLEngine(make_port=SameDouble())
    assert (engine.name, engine.stitches) == ("coreml", False)
    assert isinstance(engine.buffer((2, 2), np.int32), np.ndarray) and CoreMLStage.__name__ == "CoreMLStage"
