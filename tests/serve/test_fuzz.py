"""Whatever is sent, the answer is what the contract says: never a 500, errors of one shape, streams that end."""

import http.client
import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anechain.serve.schema import ChatRequest, CompletionRequest
from anechain.serve.stops import Held
from anechain.serve.thinking import Thinking
from tests.serve.scripted import Reply, Running, Scripted, says, serving, tokenizer
from tests.serve.test_constrained import TOOLS_TEMPLATE


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    chain = Scripted(says("ok 😊 <tool_call>"), context=256, prefill=64)
    with serving(chain, tokenizer(TOOLS_TEMPLATE), body_bytes=1 << 16) as running:
        yield running


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=6,
)
WORDS = st.sampled_from(["a", "hello", "tell me", "é😊", "<|im_end|>", "\x00", "x" * 300, "b assistant\n"])
ROLES = st.sampled_from(["user", "system", "assistant", "tool", ""])
PARTS = st.lists(st.fixed_dictionaries({"type": st.sampled_from(["text", "text", "image"]), "text": WORDS}), max_size=2)
CONTENT = st.one_of(WORDS, WORDS, WORDS, PARTS, JSON)
MESSAGES = st.lists(st.fixed_dictionaries({"role": ROLES, "content": CONTENT}), min_size=1, max_size=3)
SCHEMA = st.one_of(
    JSON,
    st.fixed_dictionaries({"type": st.sampled_from(["object", "array", "string", "integer", "x"])}),
    st.dictionaries(
        st.sampled_from(["type", "properties", "items", "enum", "anyOf", "$ref", "minimum", "pattern"]), JSON
    ),
)
FUNCTION = st.fixed_dictionaries({"name": WORDS}, optional={"parameters": SCHEMA, "description": WORDS})
PLAUSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "messages": MESSAGES,
    "prompt": st.one_of(WORDS, st.lists(WORDS, min_size=1, max_size=3), st.lists(st.integers(0, 260), min_size=1)),
    "max_tokens": st.integers(0, 9),
    "n": st.integers(0, 4),
    "stop": st.one_of(WORDS, st.lists(WORDS, max_size=4)),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.1, 1),
    "logit_bias": st.dictionaries(st.integers(0, 261).map(str), st.floats(-101, 100), max_size=3),
    "logprobs": st.one_of(st.booleans(), st.integers(0, 21)),
    "top_logprobs": st.integers(-1, 25),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "response_format": st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "json_object", "json_schema", "xml"])},
        optional={"schema": SCHEMA, "json_schema": st.fixed_dictionaries({"name": WORDS, "schema": SCHEMA})},
    ),
    "tools": st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTION}), max_size=2),
    "tool_choice": st.sampled_from(["none", "auto", "required", "x"]),
    "chat_template_kwargs": st.dictionaries(st.sampled_from(["tools", "messages", "bos_token", "x"]), JSON, max_size=2),
    "seed": st.integers(-(2**70), 2**70),
    "echo": st.booleans(),
    "model": st.just("tiny"),
    "user": WORDS,
    "metadata": st.dictionaries(WORDS, WORDS, max_size=1),
    "store": st.just(False),
    "service_tier": st.just("auto"),
    "best_of": st.just(1),
    "frequency_penalty": st.just(0),
    "presence_penalty": st.just(0.0),
    "top_k": st.integers(0, 300),
    "max_completion_tokens": st.integers(1, 9),
    "parallel_tool_calls": st.booleans(),
    "stream": st.booleans(),
}


def likely(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.integers(0, 15).flatmap(lambda number: JSON if number == 7 else values)


def bodies(kind: type[ChatRequest] | type[CompletionRequest]) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies of the fields that there are, mostly plausible, a few of them anything at all."""
    required = "messages" if kind is ChatRequest else "prompt"
    some = {name: likely(PLAUSIBLE.get(name, JSON)) for name in kind.model_fields if name != required}
    few = st.lists(st.sampled_from(sorted(some)), max_size=4, unique=True)
    if kind is CompletionRequest:
        some["logprobs"] = likely(st.integers(0, 20))
    rest = few.flatmap(lambda names: st.fixed_dictionaries({name: some[name] for name in names}))
    asked = likely(PLAUSIBLE[required])
    return st.builds(lambda first, more: {required: first, "max_tokens": 4, **more}, asked, rest)


def check(reply: Reply) -> None:
    assert reply.status < 500, reply.body
    if reply.status != 200:
        assert reply.error["type"] == "invalid_request_error" and reply.error["message"]
    elif reply.headers["content-type"].startswith("text/event-stream"):
        assert reply.events[-1] == "[DONE]"
    else:
        assert all(choice["finish_reason"] for choice in reply.json["choices"])


ANY = settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@ANY
@given(body=bodies(ChatRequest))
def test_chat(body: dict[str, Any], server: Running) -> None:
    check(server.ask("POST", "/v1/chat/completions", body))


@ANY
@given(body=bodies(CompletionRequest))
def test_completions(body: dict[str, Any], server: Running) -> None:
    check(server.ask("POST", "/v1/completions", body))


@settings(max_examples=60)
@given(body=st.one_of(st.binary(max_size=60), JSON.map(lambda v: json.dumps(v).encode())), path=st.text(max_size=12))
def test_anything_else(body: bytes, path: str, server: Running) -> None:
    check(server.ask("POST", "/v1/chat/completions", body))
    quoted = "/" + "".join(f"%{byte:02x}" for byte in path.encode("utf-8", "surrogatepass"))
    reply = server.ask("GET", f"/v1{quoted}")
    assert reply.status in (200, 404, 405) and (reply.status == 200 or reply.error["message"])


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'{"messages": NaN}', b"[" * 20000, b'{"messages":' + b"[" * 5000,
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", b'\xff{"a":1}',
        b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"prompt": "\\ud800"}', b'{"stop": ["\\ud800"], "prompt": "x"}',
    ],
)  # fmt: skip
def test_what_is_hardly_json(body: bytes, server: Running) -> None:
    for route in ("/v1/chat/completions", "/v1/completions"):
        check(server.ask("POST", route, body))


def test_the_server_outlived_all_that(server: Running) -> None:
    server.settle()
    ended = server.service.metrics.requests
    assert sum(count for (_, outcome), count in ended.items() if outcome in ("stop", "length")) > 40, ended
    assert server.chat(max_tokens=2).text == "ok" and server.ask("GET", "/health").status == 200
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("PUT", "/v1/models")
    assert connection.getresponse().status == 405
    connection.close()


def pieces(text: str, cuts: list[int]) -> list[str]:
    bounds = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(bounds)]


@settings(max_examples=300)
@given(
    text=st.text("abS", max_size=14),
    stops=st.lists(st.text("abS", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 20), max_size=14),
)
def test_stop_strings_are_those_of_the_whole_text(text: str, stops: list[str], cuts: list[int]) -> None:
    held, shown = Held(stops), ""
    for piece in pieces(text, cuts):
        shown += held.feed(piece)
        assert text.startswith(shown) and not any(stop in shown for stop in stops)
        if held.stopped:
            break
    shown += held.flush()
    assert held.stopped is any(stop in text for stop in stops)
    assert held.shown == len(shown) and (held.stopped or shown == text)
    if len(pieces(text, cuts)) == 1 and held.stopped:
        assert len(shown) == min(text.find(stop) for stop in stops if stop in text), "the leftmost one counts"


@settings(max_examples=300)
@given(
    thought=st.text("ab <\n", max_size=10),
    answer=st.text("ab <>/think\n", max_size=16),
    cuts=st.lists(st.integers(0, 60), max_size=20),
    how=st.sampled_from(["inside", "opened", "plain"]),
)
def test_thinking_is_split_the_same_however_it_is_cut(thought: str, answer: str, cuts: list[int], how: str) -> None:
    text = {"inside": f"{thought}</think>{answer}", "opened": f"<think>{thought}</think>{answer}", "plain": answer}[how]

    def split(parts: list[str]) -> tuple[str, str]:
        thinking = Thinking(how == "inside", True)
        both = [*(thinking.feed(part) for part in parts), thinking.flush()]
        return "".join(t for t, _ in both), "".join(a for _, a in both)

    whole = split([text])
    assert split(pieces(text, cuts)) == split(list(text)) == whole
    if how != "plain":
        assert whole[0] == thought.strip() and whole[1] == answer.lstrip()
    elif not answer.lstrip().startswith("<think>"):
        assert whole == ("", answer)
