"""Who comes, who goes, who dies: many clients at once, clients that leave, a worker that fails, the server's end."""

import json
import logging
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from anechain.serve import server as server_module
from anechain.serve import service as service_module
from tests.serve.scripted import Running, Scripted, says, serving
from tests.tiny import EOS


def own_answer(prompt: str, index: int) -> int:
    """Every prompt has an answer of its own, of its own length."""
    asked = prompt.rpartition("user\n")[2].partition("\n")[0]
    answer = (f"<{asked}>" * (1 + len(asked) % 4)).encode()
    return answer[index] if index < len(answer) else EOS


def body(text: str = "x", **fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}], **fields}).encode()


def send(server: Running, data: bytes, path: str = "/v1/chat/completions") -> socket.socket:
    """A request on a bare socket."""
    connection = socket.create_connection(("127.0.0.1", server.port))
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def wait_for(condition: Any, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    assert condition()


def test_no_word_of_another_in_sixteen_conversations_at_once() -> None:
    texts = [f"{'abcdefghijklmnop'[i] * (i + 1)}{i}" for i in range(16)]
    with serving(Scripted(own_answer, step_s=0.0005), parallel=4, queue=64) as server:
        alone = {text: server.chat(text).text for text in texts}
        assert len(set(alone.values())) == 16

        def ask(job: tuple[int, str]) -> tuple[str, str]:
            number, text = job
            return text, server.chat(text, stream=number % 2 == 0).text

        with ThreadPoolExecutor(16) as pool:
            jobs = [(i, text) for i, text in enumerate(texts * 3)]
            assert all(answer == alone[text] for text, answer in pool.map(ask, jobs))
        server.settle()


def test_a_request_leaves_nothing_behind() -> None:
    with serving(Scripted(own_answer, step_s=0.002)) as server:
        first, other = server.chat("one").text, server.chat("two, longer").text
        connection = send(server, body("one and only", stream=True))
        connection.recv(100)
        connection.close()
        assert (server.chat("one").text, server.chat("two, longer").text) == (first, other)


def test_a_short_request_does_not_wait_for_a_long_one() -> None:
    script = lambda prompt, index: ord("x") if "long" in prompt else (ord("s") if index < 3 else EOS)  # noqa: E731
    with serving(Scripted(script, step_s=0.003, context=512)) as server:
        connection = send(server, body("long", stream=True))
        connection.recv(100)
        assert server.chat("short").text == "sss"
        assert server.service.worker.load()[0] == 1, "the long one is still at work"
        connection.close()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("reset", [True, False])
def test_a_client_that_goes_stops_its_generation_within_two_tokens(stream: bool, reset: bool) -> None:
    chain = Scripted(says("x" * 400), step_s=0.05, prefill=0)
    with serving(chain) as server:
        connection = send(server, body(stream=stream))
        wait_for(lambda: chain.steps >= 4)
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        at = chain.steps
        server.settle()
        assert chain.steps - at <= 2
        started = time.monotonic()
        assert server.chat(max_tokens=1).text == "x" and time.monotonic() - started < 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_while_its_prompt_is_read(stream: bool) -> None:
    chain = Scripted(says("x"), step_s=0.05, prefill=32)
    with serving(chain) as server:
        connection = send(server, body("p" * 450, stream=stream))
        wait_for(lambda: chain.steps >= 2)
        connection.close()
        server.settle()
        assert chain.steps <= 4
        assert server.chat(max_tokens=1).text == "x"


def test_who_leaves_after_the_first_of_two_choices_has_left(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "anechain.serve")
    with serving(Scripted(says("x" * 20), step_s=0.01)) as server:
        connection = send(server, body(stream=True, n=2))
        heard = b""
        while b'"finish_reason":"stop"' not in heard:
            heard += connection.recv(4096)
        connection.close()
        server.settle()
    assert caplog.records[-1].getMessage().endswith("outcome=disconnected")


def test_a_full_line_is_429_with_a_time_to_come_back() -> None:
    chain = Scripted(says("x" * 400), step_s=0.02)
    with serving(chain, parallel=1, queue=1) as server:
        busy = [send(server, body(stream=True)) for _ in range(2)]
        wait_for(lambda: server.service.worker.load() == (1, 1))
        for stream in (True, False):
            reply = server.chat(stream=stream)
            assert (
                reply.status == 429 and reply.error["code"] == "queue_full" and int(reply.headers["retry-after"]) >= 1
            )
        for connection in busy:
            connection.close()
        server.settle()
        assert server.chat(max_tokens=2).text == "xx"


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_waits_and_leaves_is_forgotten(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "anechain.serve")
    chain = Scripted(says("x" * 60), step_s=0.01)
    with serving(chain, parallel=1, queue=8) as server:
        first = send(server, body(stream=True))
        wait_for(lambda: chain.steps >= 1)
        waiting = send(server, body("never", stream=stream))
        wait_for(lambda: server.service.worker.load() == (1, 1))
        waiting.close()
        wait_for(lambda: server.service.worker.load()[1] == 0)
        first.close()
        server.settle()
        assert not any(b"never" in bytes(i for i in f if i < 256) for f in chain.fed)
    outcomes = [record.getMessage().rpartition("outcome=")[2] for record in caplog.records]
    assert outcomes.count("disconnected") == 2, outcomes


def test_a_request_that_takes_too_long_ends_with_an_error() -> None:
    with serving(Scripted(says("x" * 400), step_s=0.02), time_out_s=0.3) as server:
        whole = server.chat()
        assert whole.status == 504 and whole.error["code"] == "timeout"
        stream = server.chat(stream=True)
        assert stream.status == 200 and stream.text.startswith("xx") and stream.events[-1]["error"]["code"] == "timeout"


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_whose_time_is_over_while_it_waits_ends_alone(stream: bool) -> None:
    chain = Scripted(says("x" * 400), step_s=0.02)
    with serving(chain, parallel=1, queue=8, time_out_s=10.0) as server:
        first = send(server, body(stream=True))
        wait_for(lambda: chain.steps >= 1)
        server.service.worker._time_out_s = 0.05  # the first one still has the limit it came with
        waited = server.chat("never", stream=stream)
        assert (waited.status, waited.error["code"]) == (504, "timeout")
        assert server.service.worker.alive and server.service.worker.load() == (1, 0), "the first one goes on"
        first.close()
        server.service.worker._time_out_s = 10.0
        assert server.chat(max_tokens=2).text == "xx"
        assert not any(b"never" in bytes(i for i in f if i < 256) for f in chain.fed)


@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_that_hangs_does_not_hold_the_client(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "GRACE_S", 0.1)
    free = threading.Event()

    def fail(step: int) -> None:
        if step == 3:
            free.wait(20)

    with serving(Scripted(says("hello"), fail=fail), time_out_s=0.3) as server:
        started = time.monotonic()
        reply = server.chat(stream=stream)
        assert time.monotonic() - started < 5
        error = reply.events[-1]["error"] if stream else reply.error
        assert error["code"] == "timeout" and reply.status == (200 if stream else 504)
        free.set()
        server.settle()
        assert server.chat().text == "hello", "its place is free again"


def test_plans_are_bounded_as_the_line_is(monkeypatch: pytest.MonkeyPatch) -> None:
    free = threading.Event()
    with serving(Scripted(says("hi")), parallel=1, queue=1) as server:
        plan = server.service.planner.chat
        monkeypatch.setattr(server.service.planner, "chat", lambda request: free.wait(20) and plan(request))
        with ThreadPoolExecutor(6) as pool:
            asked = [pool.submit(server.chat) for _ in range(6)]
            wait_for(lambda: sum(job.done() for job in asked) == 4)
            free.set()
            assert sorted(job.result().status for job in asked) == [200, 200, 429, 429, 429, 429]
        assert server.chat().text == "hi"


def test_a_plan_that_fails_says_nothing_of_what_it_held(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(request: Any) -> None:
        raise KeyError(request.messages[0].content)

    with serving(Scripted(says("hi"))) as server:
        monkeypatch.setattr(server.service.planner, "chat", broken)
        reply = server.chat("secret words")
        assert reply.status == 500 and "KeyError" in reply.error["message"]
    assert b"secret" not in reply.body and "secret" not in caplog.text


def test_an_engine_error_ends_one_request_and_not_the_server() -> None:
    asked = []

    def fail(step: int) -> None:
        if len(asked) == 2:
            raise RuntimeError("boom")

    with serving(Scripted(says("hi"), fail=fail)) as server:
        statuses = []
        for number in range(5):
            asked.append(number)
            statuses.append(server.chat(stream=number % 2 == 1).status)
        assert statuses == [200, 500, 200, 200, 200]
        assert server.ask("GET", "/health").status == 200


def test_a_worker_that_is_gone_shows() -> None:
    class Killed(BaseException):
        pass

    def fail(step: int) -> None:
        if step == 3:
            raise Killed

    hook, threading.excepthook = threading.excepthook, lambda *_: None
    try:
        with serving(Scripted(says("hello"), fail=fail)) as server:
            stream = server.chat(stream=True)
            assert stream.events[-1]["error"]["code"] == "worker_gone" and stream.text == "he"
            health = server.ask("GET", "/health")
            assert health.status == 503 and health.json["status"] == "the worker is gone"
            assert server.chat().status == 503 and server.chat().error["code"] == "worker_gone"
            assert b"anechain_worker_alive 0" in server.ask("GET", "/metrics").body
            assert server.ask("GET", "/v1/models").status == 200, "the door itself lives"
    finally:
        threading.excepthook = hook


def test_the_end_lets_answers_finish_or_tells_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "FINISH_S", 0.7)
    replies: dict[str, Any] = {}

    def ask(text: str) -> None:
        replies[text] = server.chat(text, stream=True)

    script = lambda prompt, index: ord("x") if "long" in prompt or index < 3 else EOS  # noqa: E731
    with serving(Scripted(script, step_s=0.02)) as server:
        threads = [threading.Thread(target=ask, args=(text,)) for text in ("long", "short")]
        for thread in threads:
            thread.start()
        wait_for(lambda: server.service.worker.load()[0] == 2)
        started = time.monotonic()
        server.server.handle_exit(15, None)
        for thread in threads:
            thread.join(10)
        server.thread.join(10)
        assert not server.thread.is_alive() and time.monotonic() - started < 5
    assert replies["short"].text == "x" * 3 and replies["short"].events[-1] == "[DONE]"
    assert replies["long"].events[-1]["error"]["code"] == "shutting_down"


def test_a_line_a_request_without_its_words(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "anechain.serve"):
        with serving(Scripted(says("answer words"))) as server:
            reply = server.chat("prompt words")
            others = [
                server.chat(banana=1), server.chat("prompt words", stream=True), server.ask("GET", "/v1/nothing/secret")
            ]  # fmt: skip
        lines = [record.getMessage() for record in caplog.records if record.name == "anechain.serve"]
        assert len(lines) == 4 and not any("words" in line or "secret" in line for line in lines)
        assert [line.split()[0] for line in lines] == [r.headers["x-request-id"] for r in (reply, *others)]
        assert lines[0].split(" prompt=")[0].endswith(" /v1/chat/completions")
        assert " completion=13 first_ms=" in lines[0] and lines[0].endswith(" outcome=stop")
        assert lines[1].endswith("outcome=invalid_request") and lines[3].endswith("outcome=unknown_route")
        caplog.clear()
        with serving(Scripted(says("hi")), log_prompts=True) as server:
            server.chat("prompt words")
        assert any("prompt words" in record.getMessage() for record in caplog.records)


def test_metrics_count() -> None:
    with serving(Scripted(says("hello"))) as server:
        server.chat()
        server.complete(max_tokens=2)
        server.chat(banana=1)
        reply = server.ask("GET", "/metrics")
        assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
        values = dict(line.rsplit(" ", 1) for line in reply.body.decode().splitlines() if not line.startswith("#"))
        assert values['anechain_requests_total{route="/v1/chat/completions",outcome="stop"}'] == "1"
        assert values['anechain_requests_total{route="/v1/chat/completions",outcome="invalid_request"}'] == "1"
        assert values['anechain_requests_total{route="/v1/completions",outcome="length"}'] == "1"
        assert values["anechain_completion_tokens_total"] == "8" and values["anechain_requests_open"] == "0"
