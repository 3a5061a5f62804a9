"""The chain: however a prompt is cut and the layers are packed, the logits are those of one token after another."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from anechain.bundle.manifest import Bundle, open_bundle
from anechain.bundle.spec import head_pieces
from anechain.errors import RequestError
from anechain.run.chain import RING, Chain, Session
from anechain.run.engine import HostMemory, Stage, State
from anechain.run.reference import ReferenceEngine, ReferenceState
from tests.bundle_maker import SPECS, deviation, make_bundle, tiny_source
from tests.tolerances import CHAIN_CUT

CONTEXT, PREFILL = 64, 32
RNG = np.random.default_rng(5)
IDS = RNG.integers(0, 320, CONTEXT)
CUTS = {"one layer a package": (1, 1, 1), "one package": (3,), "uneven": (1, 2)}


class Recorder(HostMemory):
    """An engine around the reference engine that writes down what each step was given."""

    name, stitches = "recorder", False

    def __init__(self) -> None:
        self.calls: list[tuple[str, Mapping[str, np.ndarray], Mapping[str, np.ndarray]]] = []

    def load(self, packages: Sequence[Path]) -> Stage:
        return RecordedStage(ReferenceEngine().load(packages), self.calls)


class RecordedStage:
    def __init__(self, stage: Stage, calls: list) -> None:
        self._stage, self._calls, self.functions = stage, calls, stage.functions

    def new_state(self) -> State | None:
        return self._stage.new_state()

    def step(self, function: str, inputs: Mapping, state: State | None, outputs: Mapping) -> None:
        self._calls.append((function, dict(inputs), dict(outputs)))
        self._stage.step(function, inputs, state, outputs)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    folder = tmp_path_factory.mktemp("bundles")
    source = tiny_source("gemma3")  # two ropes, two masks, one of them with a window
    return {
        name: make_bundle(source, folder / str(len(cuts)), "fp16", CONTEXT, PREFILL, cuts)
        for name, cuts in CUTS.items()
    }


@pytest.fixture(scope="module")
def chain(bundles: dict[str, Bundle]) -> Chain:
    return Chain(bundles["uneven"], ReferenceEngine())


def one_by_one(chain: Chain, ids: Sequence[int] | np.ndarray = IDS) -> np.ndarray:
    session = chain.start()
    return np.array([chain.feed(session, [i]) for i in ids])  # [n, V]


@pytest.fixture(scope="module")
def right(chain: Chain) -> np.ndarray:
    """The logits after each of IDS, fed one by one."""
    logits = one_by_one(chain)
    spread = logits.std(axis=1)
    assert logits.shape == (CONTEXT, 320) and (spread > 3).all(), "the tolerance is meant for logits of this spread"
    assert deviation(logits[1:], logits[:-1]) > 0.5, "positions must differ, or nothing is compared"
    return logits


def contents(session: Session) -> list[np.ndarray]:
    states = [state for state in session.states if isinstance(state, ReferenceState)]
    return [array.copy() for state in states for package in state.packages for array in package.values()]


def test_the_bundle_is_one(bundles: dict[str, Bundle]) -> None:
    for name, bundle in bundles.items():
        opened = open_bundle(bundle.path, verify_hashes=True)
        assert opened == bundle
        assert [len(b.layers) for b in opened.blocks] == list(CUTS[name])


@pytest.mark.parametrize("cuts", CUTS)
def test_every_prompt_length_is_as_token_by_token(cuts: str, bundles: dict[str, Bundle], right: np.ndarray) -> None:
    chain = Chain(bundles[cuts], ReferenceEngine())
    got = np.array([chain.feed(chain.start(), IDS[:n]) for n in range(1, CONTEXT + 1)])
    assert deviation(got, right) < CHAIN_CUT


def test_packing_changes_no_bit(bundles: dict[str, Bundle], right: np.ndarray) -> None:
    """Between layers there is fp16 whether a package ends there or not."""
    for name, bundle in bundles.items():
        assert np.array_equal(one_by_one(Chain(bundle, ReferenceEngine()), IDS[:9]), right[:9]), name
        assert np.array_equal(one_by_one(Chain(bundle, ReferenceEngine(), stitched=True), IDS[:9]), right[:9]), name


STEPS = {  # (tokens that were there, tokens that come): the functions that take them, and how many tokens each
    (0, 1): [1],
    (0, 7): [1] * 7,
    (0, 8): [8],
    (0, 31): [31],
    (0, 32): [32],
    (0, 33): [32, 1],
    (0, 39): [32] + [1] * 7,
    (0, 40): [32, 8],
    (0, 63): [32, 31],
    (0, 64): [32, 32],
    (1, 63): [32] + [1] * 31,  # a second chunk would end at 65
    (5, 40): [32] + [1] * 8,
    (31, 33): [32, 1],
    (32, 32): [32],
    (32, 8): [8],
    (33, 31): [1] * 31,
    (56, 8): [1] * 8,
    (63, 1): [1],
}


@pytest.mark.parametrize(("before", "count"), STEPS)
def test_chunks_at_the_edges(before: int, count: int, bundles: dict[str, Bundle], right: np.ndarray) -> None:
    recorder = Recorder()
    chain = Chain(bundles["one package"], recorder)
    session = chain.start()
    for i in IDS[:before]:
        chain.feed(session, [i])
    recorder.calls.clear()
    logits = chain.feed(session, IDS[before : before + count])
    assert deviation(logits[None], right[before + count - 1][None]) < CHAIN_CUT
    assert session.position == before + count and chain.room(session) == CONTEXT - before - count
    steps = [(function, ports) for function, ports, _ in recorder.calls if "begin" in ports]
    expected = STEPS[before, count]
    assert [function for function, _ in steps] == ["prefill" if n > 1 else "decode" for n in expected]
    assert len(recorder.calls) == len(steps) + 1, "the head runs once, whatever the length"


def test_a_chunk_is_what_single_tokens_leave_behind(chain: Chain, right: np.ndarray) -> None:
    """After chunks with padding, all that follows is right too, though the padding was written to the state."""
    session = chain.start()
    for start, end in pairwise([0, 10, 11, 20, 21, 22, 23]):
        logits = chain.feed(session, IDS[start:end])
        assert deviation(logits[None], right[end - 1][None]) < CHAIN_CUT
    for i in range(23, CONTEXT):
        assert deviation(chain.feed(session, IDS[i : i + 1])[None], right[i][None]) < CHAIN_CUT


def test_a_bundle_without_prefill(tmp_path: Path, right: np.ndarray) -> None:
    bundle = make_bundle(tiny_source("gemma3"), tmp_path / "b", "fp16", CONTEXT, prefill=0)
    chain = Chain(bundle, ReferenceEngine())
    assert chain.stages[0].functions == ("decode",)
    for length in (1, 8, 40):
        assert np.array_equal(chain.feed(chain.start(), IDS[:length]), right[length - 1])


def test_a_head_in_pieces_with_a_row_of_padding(tmp_path: Path) -> None:
    """16 403 rows are two pieces of 8 202: the last row belongs to no token, and the embedding is read from both."""
    spec = replace(SPECS["qwen3"], vocab_size=16403, n_layers=1, layer_attention=(0,))
    assert head_pieces(spec) == (2, 8202)
    source = tiny_source(spec)
    chain = Chain(make_bundle(source, tmp_path / "b", "fp16", 32, 32), ReferenceEngine())
    ids = np.array([0, 8201, 8202, 16402])
    assert np.array_equal(chain.embedding.rows(ids), source.tensor("embed")[ids].astype(np.float16))
    logits = chain.feed(chain.start(), ids)
    assert logits.shape == (16403,) and logits.dtype == np.float32
    other = replace(source, tensors={**source.tensors, "embed": np.roll(source.tensor("embed"), 5, axis=0)})
    rolled = Chain(make_bundle(other, tmp_path / "c", "fp16", 32, 32), ReferenceEngine())
    assert np.array_equal(rolled.feed(rolled.start(), (ids + 5) % 16403), np.roll(logits, 5))


# -- sessions ----------------------------------------------------------------------------------------------------------


def test_two_conversations_take_turns(chain: Chain) -> None:
    """Each one's logits are, to the bit, those that it has alone."""
    talks = [[IDS[:10], IDS[10:11], IDS[11:20], IDS[20:53]], [IDS[40:43], IDS[43:60], IDS[:9], IDS[9:10]]]
    alone = []
    for talk in talks:
        session = chain.start()
        alone.append([chain.feed(session, ids) for ids in talk])
    sessions = [chain.start() for _ in talks]
    for turn in range(4):
        for session, talk, expected in zip(sessions, talks, alone, strict=True):
            assert np.array_equal(chain.feed(session, talk[turn]), expected[turn])
    assert not np.array_equal(alone[0][3], alone[1][3])


def test_a_copy_goes_its_own_way(chain: Chain) -> None:
    def told(*turns: slice) -> list[np.ndarray]:
        session = chain.start()
        return [chain.feed(session, IDS[turn]) for turn in (slice(12), *turns)]

    session = chain.start()
    chain.feed(session, IDS[:12])
    copy = session.copy()
    first = chain.feed(session, IDS[12:14])
    assert session.position == 14 and copy.position == 12
    other = chain.feed(copy, IDS[30:45])
    third = chain.feed(session, IDS[14:15])
    last = chain.feed(copy, IDS[45:46])
    assert np.array_equal([first, third], told(slice(12, 14), slice(14, 15))[1:])
    assert np.array_equal([other, last], told(slice(30, 45), slice(45, 46))[1:])
    assert not np.array_equal(first, other)


def test_a_conversation_that_overflowed_spoils_no_other(bundles: dict[str, Bundle], right: np.ndarray) -> None:
    """What it left in the buffers is not what the next one is padded with: a masked NaN would still be a NaN."""
    chain = Chain(bundles["uneven"], ReferenceEngine())
    table = np.array(chain.embedding.data[0])
    table[IDS[40]] = np.inf
    assert IDS[40] not in IDS[:40]
    chain.embedding = replace(chain.embedding, data=(table,))

    def overflow() -> None:
        session = chain.start()
        assert np.isnan(chain.feed(session, IDS[9:41])).all()
        for number in range(2):
            assert np.isnan(chain.stage_feed(number, chain.start(), chain.embedding.rows(IDS[9:41]))[-1]).all()

    overflow()
    assert deviation(chain.feed(chain.start(), IDS[:10])[None], right[9][None]) < CHAIN_CUT
    overflow()
    assert np.isfinite(chain.stage_feed(0, chain.start(), chain.embedding.rows(IDS[:10]))).all()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "there is no token to feed: give at least one."),
        ([[1, 2]], "there is no token to feed: give at least one."),
        ([3, 320], "token ids must lie in 0 ... 319: 3 ... 320 were given."),
        ([-1], "token ids must lie in 0 ... 319: -1 ... -1 were given."),
        (
            [1] * 45,
            "45 tokens do not fit: the context holds 64 and 20 are taken; "
            "shorten the prompt or bake with a larger --context.",
        ),
    ],
)
def test_a_refusal_changes_nothing(ids: list[int], message: str, chain: Chain) -> None:
    session = chain.start()
    chain.feed(session, IDS[:20])
    before, position = contents(session), session.position
    assert len(before) == 2
    with pytest.raises(RequestError) as refusal:
        chain.feed(session, ids)
    assert str(refusal.value) == message
    assert session.position == position == 20
    assert all(np.array_equal(a, b) for a, b in zip(before, contents(session), strict=True))
    untouched = chain.start()
    chain.feed(untouched, IDS[:20])
    assert np.array_equal(chain.feed(session, IDS[20:64]), chain.feed(untouched, IDS[20:64]))
    assert chain.room(session) == 0
    with pytest.raises(RequestError, match=r"^1 tokens do not fit"):
        chain.feed(session, [1])


# -- buffers -----------------------------------------------------------------------------------------------------------


def test_the_buffers_are_allocated_once(bundles: dict[str, Bundle]) -> None:
    recorder = Recorder()
    chain = Chain(bundles["one layer a package"], recorder)
    for _ in range(2):
        session = chain.start()
        for ids in (IDS[:40], IDS[40:41], IDS[41:42], IDS[42:64]):
            chain.feed(session, ids)
    kinds = {"prefill": PREFILL, "decode": 1}
    for function, query in kinds.items():
        calls = [(i, o) for f, i, o in recorder.calls if f == function and "begin" in i]
        assert len(calls) >= 3 * 2 * 2
        arrays: dict[str, set[int]] = {}
        for inputs, outputs in calls:
            for name, array in {**inputs, **outputs}.items():
                assert array.flags.c_contiguous
                arrays.setdefault(name, set()).add(array.ctypes.data)
            assert inputs["hidden"].shape == outputs["hidden_out"].shape == (1, 1, query, 64)
            assert not np.shares_memory(inputs["hidden"], outputs["hidden_out"])
        assert arrays["hidden"] == arrays["hidden_out"] and len(arrays["hidden"]) == RING
        assert {name: len(places) for name, places in arrays.items() if not name.startswith("hidden")} == dict.fromkeys(
            ("cos_full", "sin_full", "mask_full", "cos_sliding", "sin_sliding", "mask_sliding", "begin", "end"), 1
        )
        steps = [calls[i : i + 3] for i in range(0, len(calls), 3)]
        for stages in steps:  # what one stage writes is what the next one reads
            for (_, outputs), (inputs, _) in pairwise(stages):
                assert outputs["hidden_out"] is inputs["hidden"]
    heads = [(i, o) for f, i, o in recorder.calls if "begin" not in i]
    assert len(heads) == 8
    assert len({i["hidden"].ctypes.data for i, _ in heads}) == len({o["logits_0"].ctypes.data for _, o in heads}) == 1


def test_logits_belong_to_the_caller(chain: Chain) -> None:
    session = chain.start()
    first = chain.feed(session, IDS[:3])
    kept = first.copy()
    second = chain.feed(session, IDS[3:4])
    assert np.array_equal(first, kept) and not np.array_equal(first, second)
    first[:] = 0
    assert np.array_equal(chain.feed(chain.start(), IDS[:3]), kept)


def test_stages_one_by_one_are_the_chain(bundles: dict[str, Bundle]) -> None:
    chain = Chain(bundles["one layer a package"], ReferenceEngine())
    hidden = chain.embedding.rows(IDS[:41])
    for number in range(3):
        session = chain.start()
        first = chain.stage_feed(number, session, hidden[:40])
        hidden = np.concatenate([first, chain.stage_feed(number, session, hidden[40:])])
        assert session.position == 41
    logits = {"logits_0": np.zeros((1, 1, 1, 320), np.float16)}
    chain.head.step("decode", {"hidden": hidden[40][None, None, None].copy()}, None, logits)
    session = chain.start()
    chain.feed(session, IDS[:40])
    assert np.array_equal(chain.feed(session, IDS[40:41]), logits["logits_0"][0, 0, 0].astype(np.float32))
