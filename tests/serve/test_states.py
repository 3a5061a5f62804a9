"""States of earlier prompts are used again without changing a bit of the answer; a damaged chain does not start."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from anechain.bundle.manifest import open_bundle, record_files, write_manifest
from anechain.cli.serve import serve
from anechain.errors import BundleError
from anechain.run.chain import Chain
from anechain.run.openvino import CpuEngine
from anechain.run.reference import ReferenceEngine
from anechain.serve.prefixes import Prefixes
from anechain.serve.selfcheck import Expected, self_check
from tests.bundle_maker import make_bundle, tiny_source
from tests.serve.scripted import Scripted, says, serving

CONTEXT, CHUNK = 256, 32


@pytest.fixture(scope="module", params=["reference", "cpu"])
def chain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    out = tmp_path_factory.mktemp("bundles") / "b"
    bundle = make_bundle(tiny_source("gemma3"), out, "fp16", CONTEXT, CHUNK)
    return Chain(bundle, ReferenceEngine() if request.param == "reference" else CpuEngine("exact"))


def cold(chain: Chain, ids: list[int]) -> np.ndarray:
    return chain.feed(chain.start(), ids)


def test_an_answer_after_a_hit_is_the_cold_one_bit_for_bit(chain: Chain) -> None:
    rng = np.random.default_rng(5)
    long = rng.integers(0, 256, 200).tolist()
    prefixes = Prefixes(chain, 1 << 30)
    session = prefixes.start(long)
    assert session.position == 0
    chain.feed(session, long[:192])
    prefixes.keep(long, session)
    others = rng.integers(0, 256, 40).tolist()
    for ids, seen in (
        (long, 192), (long[:192], 160), (long[:191], 160), (long[:193], 192), (long[:150] + others, 128),
        (long[:31] + others, 0), (long[:33], 32), (long[:32], 0), (others, 0),
    ):  # fmt: skip
        session = prefixes.start(ids)
        assert session.position == seen
        for start in range(seen, len(ids) - 1, CHUNK):
            logits = chain.feed(session, ids[start : start + CHUNK])
        if session.position < len(ids):
            logits = chain.feed(session, ids[session.position :])
        assert np.array_equal(logits, cold(chain, ids)), len(ids)
    assert (prefixes.hits, prefixes.misses) == (6, 4)


def test_a_state_that_is_cut_back_is_as_long_as_a_cold_one(chain: Chain) -> None:
    """More hidden cells would be other sums, if only in the last bit, whenever an engine blocks them differently."""
    ids = list(range(200))
    session, short = chain.start(), chain.start()
    chain.feed(session, ids)
    chain.feed(short, ids[:96])
    cut = session.copy(96)
    assert cut.position == 96 and session.position == 200
    for states, wanted in zip(cut.states, short.states, strict=True):
        for package, other in zip(states.packages, wanted.packages, strict=True):  # type: ignore[union-attr]
            assert package.keys() == other.keys() and package
            for name, array in package.items():
                assert array.shape == other[name].shape
                assert np.array_equal(array[:, :, :96], other[name][:, :, :96])


def test_what_is_kept_is_bounded(chain: Chain) -> None:
    rng = np.random.default_rng(6)
    one = Prefixes(chain, 1 << 30)
    session = chain.start()
    chain.feed(session, list(range(64)))
    one.keep(list(range(64)), session)
    size = one.bytes
    few = Prefixes(chain, 3 * size)
    prompts = [rng.integers(0, 256, 64).tolist() for _ in range(6)]
    for ids in prompts:
        session = chain.start()
        chain.feed(session, ids)
        few.keep(ids, session)
        few.start([*prompts[0], 1])  # which keeps it young
    assert few.bytes == 3 * size
    assert [few.start([*ids, 1]).position for ids in prompts] == [64, 0, 0, 0, 64, 64]
    none = Prefixes(chain, 0)
    none.keep(prompts[0], session)
    assert none.bytes == 0 and none.start([*prompts[0], 1]).position == 0


def test_a_longer_state_replaces_the_shorter_one_it_holds(chain: Chain) -> None:
    prefixes, ids = Prefixes(chain, 1 << 30), list(range(100))
    for length in (32, 64, 96, 64):
        session = chain.start()
        chain.feed(session, ids[:length])
        prefixes.keep(ids, session)
    assert len(prefixes._entries) == 1 and prefixes.start(ids).position == 96


def test_a_conversation_that_goes_on_feeds_only_what_is_new() -> None:
    double = Scripted(says("answer"), prefill=32)
    with serving(double) as server:
        first = [{"role": "user", "content": "q" * 100}]
        server.ask("POST", "/v1/chat/completions", {"messages": first})
        fed = sum(map(len, double.fed))
        more = [*first, {"role": "assistant", "content": "answer"}, {"role": "user", "content": "and"}]
        reply = server.ask("POST", "/v1/chat/completions", {"messages": more})
        usage = reply.json["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 96
        assert sum(map(len, double.fed)) - fed == usage["prompt_tokens"] - 96 + usage["completion_tokens"] - 1


@pytest.fixture(scope="module")
def expected(chain: Chain) -> Expected:
    ids = tuple(range(40, 60))
    logits = list(chain.feed_each(chain.start(), ids))
    return Expected(ids, np.stack(logits[-4:]))


def test_the_self_check(chain: Chain, expected: Expected) -> None:
    cosine = self_check(chain, expected)
    assert cosine is not None and cosine > 0.9999
    assert self_check(chain, None) is None
    with pytest.raises(BundleError, match=r"is not what was baked: its logits have a cosine of -?0\.\d+"):
        self_check(chain, Expected(expected.ids, expected.logits[:, ::-1]))
    shifted = Expected(expected.ids, np.concatenate([expected.logits[:3], np.roll(expected.logits[3:], 5, axis=1)]))
    with pytest.raises(BundleError, match=r"is not what was baked"):
        self_check(chain, shifted)


@pytest.mark.parametrize(("value", "word"), [(np.nan, "not finite"), (np.inf, "not finite"), (2.0, "constant")])
def test_logits_that_are_no_answer_do_not_start(value: float, word: str, expected: Expected, chain: Chain) -> None:
    class Broken(Scripted):
        def feed(self, session, ids):  # type: ignore[no-untyped-def]
            return np.full(320, value, np.float32)

    for recorded in (expected, None):
        with pytest.raises(BundleError, match=f"its logits are {word}"):
            self_check(Broken(says("x")), recorded)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    out = tmp_path_factory.mktemp("bundles") / "tiny"
    make_bundle(tiny_source("qwen3"), out, "fp16", 64, 32)
    yield out


def start(bundle: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "anechain", "serve", str(bundle), "--engine", "reference", "--port", "0", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))


def test_a_process_that_serves_and_ends(bundle: Path) -> None:
    process = start(bundle, "--name", "m")
    line = process.stderr.readline()  # type: ignore[union-attr]
    assert line.startswith("m on reference (self-check: not compared, no logits are recorded): http://127.0.0.1:"), line
    port = int(line.partition("127.0.0.1:")[2].partition(",")[0])
    with socket.create_connection(("127.0.0.1", port)) as client:
        data = b'{"prompt": "x", "max_tokens": 2}'
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\nconnection: close\r\n\r\n"
        client.sendall(head.encode() + data)
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 200") and b'"text_completion"' in answer
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=10)
    assert time.monotonic() - started < 10 and "Traceback" not in err
    assert process.returncode in (0, -signal.SIGTERM) and " outcome=length" in err and err.count("\n") == 1


def test_a_damaged_bundle_does_not_start(bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    weights = next(copy.glob("block-*/Data/com.apple.CoreML/weights/weight.bin"))
    data = bytearray(weights.read_bytes())
    data[-40] ^= 0x55
    weights.write_bytes(data)
    with pytest.raises(BundleError, match=r"has another sha256 than recorded"):
        serve(copy, engine="reference")
    data[len(data) // 2 : len(data) // 2 + 2000] = b"\xff\x7f" * 1000  # fp16 NaN, recorded as if it were right
    weights.write_bytes(data)
    opened = open_bundle(bundle)
    files = {**opened.files, **record_files(copy, weights)}
    write_manifest(replace(opened, path=copy, files=files))
    with pytest.raises(BundleError, match=r"does not answer on the reference engine: its logits are not finite"):
        serve(copy, engine="reference")
