"""The oracle against itself: cut into pieces, batched, watched; and what it refuses."""

from dataclasses import replace

import numpy as np
import pytest

from anechain.errors import RequestError, SourceError
from anechain.judge import oracle as oracle_module
from anechain.judge.oracle import Cache, Oracle
from tests.judge.memory_source import plain_spec, random_source, torch_source
from tests.judge.models import IDS, build, error, ours, theirs
from tests.tolerances import ORACLE_LOGITS, ORACLE_PIECES


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3"])
def test_ragged_sequences_together_are_as_each_alone(family: str) -> None:
    _, source = build(family)
    oracle = Oracle(source)
    sequences = [IDS[:1], IDS[5:40], IDS[40:42], IDS[100:117]]
    together = oracle.forward(sequences)
    assert [h.shape for h in together] == [(len(s), 64) for s in sequences]
    for ids, hidden in zip(sequences, together, strict=True):
        assert error(oracle.logits(hidden), ours(source, ids)) < ORACLE_PIECES


@pytest.mark.parametrize("family", ["llama-yarn", "qwen3", "mistral", "gemma3"])
def test_pieces_through_caches_are_as_the_whole(family: str) -> None:
    """Two sequences of different lengths go on in pieces of different sizes; a third without a cache rides along."""
    _, source = build(family)
    oracle = Oracle(source)
    whole = [IDS[:60], IDS[60:97]]
    expected = [ours(source, ids) for ids in whole]
    caches = [Cache(), Cache()]
    cuts = [[0, 1, 20, 21, 22, 60], [0, 30, 31, 33, 36, 37]]
    got: list[list[np.ndarray]] = [[], []]
    for step in range(5):
        pieces = [ids[c[step] : c[step + 1]] for ids, c in zip(whole, cuts, strict=True)]
        hidden = oracle.forward([*pieces, IDS[:9]], [*caches, None])
        for rows, new in zip(got, hidden, strict=False):
            rows.append(oracle.logits(new))
        assert [cache.length for cache in caches] == [c[step + 1] for c in cuts]
    for rows, right in zip(got, expected, strict=True):
        assert error(np.concatenate(rows), right) < ORACLE_PIECES


def test_one_token_at_a_time_is_as_all_at_once() -> None:
    _, source = build("gemma3")
    oracle, cache = Oracle(source), Cache()
    rows = [oracle.logits(oracle.forward([IDS[i : i + 1]], [cache])[0]) for i in range(40)]
    assert error(np.concatenate(rows), ours(source, IDS[:40])) < ORACLE_PIECES


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in ("mistral", "gemma3"):
        _, source = build(family)
        right = ours(source)
        with monkeypatch.context() as patch:
            patch.setattr(oracle_module, "QUERY_ROWS", 7)
            patch.setattr(oracle_module, "FFN_ROWS", 11)
            assert error(ours(source), right) < ORACLE_PIECES


def test_an_interrupted_pass_leaves_the_cache_as_it_was() -> None:
    _, source = build("qwen3")
    oracle, cache = Oracle(source), Cache()
    oracle.forward([IDS[:10]], [cache])

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        oracle.forward([IDS[50:70]], [cache], progress=stop)
    assert cache.length == 10
    rest = oracle.logits(oracle.forward([IDS[10:20]], [cache])[0])
    assert error(rest, ours(source, IDS[:20])[10:]) < ORACLE_PIECES


def test_record_gives_what_enters_and_leaves_each_layer() -> None:
    model, source = build("qwen3")
    seen: dict[int, list[np.ndarray]] = {}
    oracle = Oracle(source)
    leaving = oracle.forward([IDS[:20], IDS[30:35]], record=lambda layer, hidden: seen.update({layer: hidden}))
    assert list(seen) == [0, 1, 2, 3]
    inputs: list[np.ndarray] = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0][0].numpy()))
    theirs(model, IDS[30:35])
    assert len(inputs) == 3
    for layer, expected in enumerate(inputs):
        assert error(seen[layer][1], expected) < ORACLE_LOGITS
    assert seen[3][0] is leaving[0] and seen[3][1] is leaving[1]


def test_stream_peak_is_the_largest_value_of_the_stream() -> None:
    model, source = build("llama-default")
    model.model.embed_tokens.weight.data = 8 * model.model.embed_tokens.weight.data  # some peaks are there on entering
    source = torch_source(model, source.spec)
    streams: list[float] = []
    for layer in model.model.layers:
        keep = lambda _, args: streams.append(float(args[0].abs().max()))  # noqa: E731
        layer.register_forward_pre_hook(keep)
        layer.post_attention_layernorm.register_forward_pre_hook(keep)
    model.model.norm.register_forward_pre_hook(keep)
    together, highest, where = Oracle(source), np.zeros(3), set()
    for token in range(12):
        streams.clear()
        theirs(model, np.array([token]))
        assert len(streams) == 7
        expected = [max(streams[2 * i : 2 * i + 3]) for i in range(3)]
        where |= {int(np.argmax(streams[2 * i : 2 * i + 3])) for i in range(3)}
        highest = np.maximum(highest, expected)
        alone = Oracle(source)
        for oracle, peak in ((alone, expected), (together, highest)):
            oracle.forward([np.array([token])])
            np.testing.assert_allclose(oracle.stream_peak, peak, rtol=ORACLE_LOGITS)
    assert where == {0, 1, 2}, "the peak was never on entering, between the halves, or on leaving"


def test_a_nan_in_the_stream_shows_in_its_peak() -> None:
    source = random_source(plain_spec(layers=3))
    tensors = {**source.tensors, "layers.1.o": np.full_like(source.tensors["layers.1.o"], np.nan)}
    oracle = Oracle(replace(source, tensors=tensors))
    oracle.forward([IDS[:3]])
    assert np.isnan(oracle.stream_peak).tolist() == [False, True, True]


def test_stream_scale_is_not_the_models() -> None:
    source = random_source(plain_spec())
    scaled = replace(source, spec=replace(source.spec, stream_scale=0.25))
    assert np.array_equal(ours(source), ours(scaled))


def test_progress_counts_layers() -> None:
    calls: list[tuple[int, int]] = []
    Oracle(random_source(plain_spec(layers=3))).forward([IDS[:2]], progress=lambda *c: calls.append(c))
    assert calls == [(1, 3), (2, 3), (3, 3)]


def test_a_batch_reads_each_weight_once_and_keeps_what_fits() -> None:
    source = random_source(plain_spec())
    oracle = Oracle(source, keep_bytes=0)
    oracle.forward([IDS[:5], IDS[:3], IDS[9:20]])
    assert len(source.reads) == 1 + 2 * 9 and set(source.reads.values()) == {1}
    oracle.forward([IDS[:2]])
    assert set(source.reads.values()) == {2}

    source.reads.clear()
    embed_bytes = source.tensors["embed"].nbytes
    some = Oracle(source, keep_bytes=embed_bytes + 4 * 32)
    for _ in range(3):
        some.logits(some.forward([IDS[:2]])[0])
    assert {name for name, reads in source.reads.items() if reads == 1} == {"embed", "layers.0.attn_norm"}
    assert sum(reads == 3 for reads in source.reads.values()) == 2 * 9 - 1 + 1

    source.reads.clear()
    everything = Oracle(source)
    for _ in range(3):
        everything.logits(everything.forward([IDS[:2]])[0])
    assert set(source.reads.values()) == {1}


def test_bad_requests_name_every_offender() -> None:
    oracle = Oracle(random_source(plain_spec()))
    with pytest.raises(RequestError) as refusal:
        oracle.forward([np.array([3, 97, -1]), np.array([], np.int32), IDS[:3]])
    assert str(refusal.value) == (
        "the oracle cannot run: sequence 1 is empty; sequence 0 has the ids -1, 97; give ids of 0 to 96, at least one."
    )
    with pytest.raises(RequestError, match=r"^the oracle cannot run: there is no sequence; give ids"):
        oracle.forward([])
    with pytest.raises(RequestError, match=r"^2 sequences came with 1 caches: give one \(or None\) for each\.$"):
        oracle.forward([IDS[:2], IDS[:2]], [Cache()])


def test_a_tensor_of_another_shape_or_type_is_refused() -> None:
    source = random_source(plain_spec())
    for wrong in (np.ones((1,), np.float32), np.ones((32,), np.float64)):
        with pytest.raises(SourceError, match=r"tensor layers\.1\.ffn_norm of memory came as float\d\d \[\d+\], where"):
            Oracle(replace(source, tensors={**source.tensors, "layers.1.ffn_norm": wrong})).forward([IDS[:2]])
