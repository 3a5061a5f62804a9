"""Where the head's table lies, kept between starts: the same rows, and nothing that is damaged is believed."""

from pathlib import Path

import numpy as np
import pytest

from anechain.bundle.embedding import open_embedding
from anechain.bundle.manifest import HEAD, Bundle
from anechain.run import embedding_cache
from anechain.run.embedding_cache import embedding_of
from tests.bundle_maker import make_bundle, tiny_source

IDS = np.array([0, 7, 319, 100])


@pytest.fixture(scope="module", params=["int8", "fp16", "palette8"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return make_bundle(tiny_source("gemma3"), tmp_path_factory.mktemp("b") / "b", request.param, 64, 32, (2, 1))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "anechain" / "tapes"


def test_a_second_start_reads_no_program(bundle: Bundle, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bundle.embedding == HEAD
    expected = open_embedding(bundle).rows(IDS)
    assert np.array_equal(embedding_of(bundle).rows(IDS), expected) and expected.any()
    [entry] = cache.glob("*.embedding")
    with monkeypatch.context() as patch:
        patch.setattr(embedding_cache, "open_embedding", None)
        assert np.array_equal(embedding_of(bundle).rows(IDS), expected)
    for damage in ("", "{}", '{"multiplier": 1, "data": [], "scale": [], "palette": []}', entry.read_text()[:-9]):
        entry.write_text(damage)
        assert np.array_equal(embedding_of(bundle).rows(IDS), expected)


def test_another_program_is_another_entry(bundle: Bundle, cache: Path) -> None:
    embedding_of(bundle)
    program = bundle.head_path.joinpath("Data", "com.apple.CoreML", "model.mlmodel")
    whole = program.read_bytes()
    try:
        program.write_bytes(whole + b"\xd2\x3e\x00")  # one more field, empty, that the format does not know
        embedding_of(bundle)
    finally:
        program.write_bytes(whole)
    assert len(list(cache.glob("*.embedding"))) == 2


def test_without_a_place_to_write_it_is_read_each_time(bundle: Bundle, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder should be")
    assert np.array_equal(embedding_of(bundle).rows(IDS), open_embedding(bundle).rows(IDS))
