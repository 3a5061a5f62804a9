"""Between two writes to a stream there is a pause; it holds no first token back, no last one, and none for ever."""

import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from anechain.serve import app as app_module
from tests.serve.scripted import Running, Scripted, says, serving
from tests.tiny import EOS

SAID = b"abcdefgh"


@pytest.fixture
def going_on() -> Iterator[threading.Event]:
    """What a script waits for in the middle of its answer."""
    event = threading.Event()
    yield event
    event.set()


def waiting(event: threading.Event, before: int) -> Scripted:
    def script(prompt: str, index: int) -> int:
        if index == before:
            event.wait(20)
        return SAID[index] if index < len(SAID) else EOS

    return Scripted(script, step_s=0.01)


def opened(server: Running, **fields: object) -> socket.socket:
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "stream": True, **fields}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    connection.sendall(f"{head}connection: close\r\n\r\n".encode() + body)
    return connection


def said(data: bytes) -> str:
    lines = [line for line in data.splitlines() if line.startswith(b"data: {")]
    return "".join(c["delta"].get("content") or "" for line in lines for c in json.loads(line[6:])["choices"])


def read_until(connection: socket.socket, text: str) -> bytes:
    data = b""
    while text not in said(data[: data.rfind(b"\n\n") + 2]):
        more = connection.recv(1 << 16)
        assert more, data
        data += more
    return data


def test_the_first_token_comes_at_once_and_the_rest_together(
    going_on: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "STREAM_S", 60.0)
    started = time.monotonic()
    with serving(waiting(going_on, 1)) as server, opened(server) as connection:
        data = read_until(connection, "a")
        assert said(data) == "a"
        going_on.set()
        pieces = []
        while more := connection.recv(1 << 16):
            pieces.append(more)
        assert said(b"".join(pieces)) == "bcdefgh" and b"data: [DONE]" in pieces[-1]
        assert sum(b'"content"' in piece for piece in pieces) == 1, "one write for what came in the pause"
    assert time.monotonic() - started < 20, "the end does not wait for the pause"


def test_a_token_that_no_other_follows_is_shown_when_the_pause_is_over(
    going_on: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "STREAM_S", 0.05)
    with serving(waiting(going_on, 3)) as server, opened(server) as connection:
        assert said(read_until(connection, "abc")) == "abc"
        assert not going_on.is_set()


def test_the_end_of_several_choices_ends_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "STREAM_S", 60.0)
    started = time.monotonic()
    with serving(Scripted(says("hi"))) as server:
        reply = server.chat(stream=True, n=3, stream_options={"include_usage": True})
        chunks = [event for event in reply.events if event != "[DONE]"]
        texts = ["", "", ""]
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            texts[choice["index"]] += choice["delta"].get("content") or ""
        assert texts == ["hi"] * 3 and chunks[-1]["usage"]["completion_tokens"] == 9
    assert time.monotonic() - started < 20


def test_who_leaves_in_a_pause_stops_the_chain_within_two_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "STREAM_S", 60.0)
    chain = Scripted(says("x" * 400), step_s=0.05)
    with serving(chain) as server:
        with opened(server) as connection:
            read_until(connection, "x")
        at = chain.steps
        server.settle()
        assert chain.steps <= at + 2


def test_times_are_those_of_the_chain() -> None:
    """A whole answer is looked at once, at its end, which must not be the first token's time."""
    with serving(Scripted(says("x" * 9), step_s=0.02)) as server:
        server.chat()
        assert server.service.metrics.decode_tokens == 9 and server.service.metrics.decode_s >= 0.17
