"""What goes over the wire, request by request: reasons, usage, stop strings, characters, refusals. A scripted chain."""

import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tokenizers import processors

from tests.serve.scripted import VOCABULARY, Script, Scripted, Session, says, serving, tokenizer
from tests.tiny import BOS, EOS, IM_END


def both(server: Any, text: str = "x", **fields: Any) -> tuple[Any, Any]:
    """The same request whole and as a stream, which must agree: text, reason, usage."""
    whole = server.chat(text, **fields)
    stream = server.chat(text, **fields, stream=True, stream_options={"include_usage": True})
    assert (whole.status, stream.status) == (200, 200), (whole.body, stream.body)
    assert whole.text == stream.text
    reasons = [c["finish_reason"] for e in stream.events if e != "[DONE]" for c in e["choices"] if c["finish_reason"]]
    assert reasons == [c["finish_reason"] for c in whole.json["choices"]]
    got, wanted = stream.events[-2]["usage"], whole.json["usage"]
    assert {k: got[k] for k in ("prompt_tokens", "completion_tokens", "total_tokens")} == {
        k: wanted[k] for k in ("prompt_tokens", "completion_tokens", "total_tokens")
    }
    return whole, stream


@pytest.mark.parametrize(
    ("script", "fields", "text", "reason", "tokens"),
    [
        (says("hello"), {}, "hello", "stop", 6),
        (says("hello", IM_END), {}, "hello", "stop", 6),
        (says("hello"), {"max_tokens": 3}, "hel", "length", 3),
        (says("hello"), {"max_completion_tokens": 3}, "hel", "length", 3),
        (says("hello"), {"max_tokens": 5}, "hello", "length", 5),
        (says("hello"), {"max_tokens": 6}, "hello", "stop", 6),
        (says("hello"), {"stop": "lo"}, "hel", "stop", 5),
        (says(""), {}, "", "stop", 1),
    ],
)
def test_the_reason_is_right_and_usage_counts_tokens(
    script: Script, fields: Any, text: str, reason: str, tokens: int
) -> None:
    with serving(Scripted(script)) as server:
        whole, stream = both(server, **fields)
        assert whole.text == text and whole.json["choices"][0]["finish_reason"] == reason
        prompt = len(b"<x>user\nx<y>\n<x>assistant\n") - 6  # three specials are one token each
        assert whole.json["usage"]["completion_tokens"] == tokens and whole.json["usage"]["prompt_tokens"] == prompt
        assert stream.events[-1] == "[DONE]" and stream.headers["content-type"].startswith("text/event-stream")


def test_usage_comes_only_when_it_is_asked_for() -> None:
    with serving(Scripted(says("hi"))) as server:
        plain = server.chat(stream=True)
        assert all(e["choices"] and "usage" not in e for e in plain.events[:-1])
        asked = server.chat(stream=True, stream_options={"include_usage": True}).events
        assert all(e["usage"] is None and e["choices"] for e in asked[:-2])
        assert asked[-2]["choices"] == [] and asked[-2]["usage"]["total_tokens"] > 0
        for options in (None, {}, {"include_usage": False}, {"include_usage": None}):
            assert server.chat(stream=True, stream_options=options).status == 200
        refused = server.chat(stream_options={"include_usage": True})
        assert refused.status == 400 and refused.error["param"] == "stream_options"
        assert server.chat(stream=False, stream_options=None).status == 200


@pytest.mark.parametrize(
    ("said", "stop", "text"),
    [
        ("abcSTOPdef", ["STOP"], "abc"),
        ("abcSTO", ["STOP"], "abcSTO"),
        ("abcSTOSTOPx", "STOP", "abcSTO"),
        ("one two three", ["three", "two"], "one "),
        ("le café noir", "fé", "le ca"),
        ("aaab", "aab", "a"),
        ("abc", None, "abc"),
        ("abc", "", "abc"),
        ("abc", [], "abc"),
        ("abc", ["", "c"], "ab"),
    ],
)
def test_a_stop_string_leaks_nothing(said: str, stop: Any, text: str) -> None:
    with serving(Scripted(says(said))) as server:
        whole, stream = both(server, stop=stop)
        assert whole.text == text and whole.json["choices"][0]["finish_reason"] == "stop"
        assert not any("S" in c["delta"].get("content", "") for e in stream.events[:-1] for c in e["choices"]) or (
            "S" in text
        )
        assert server.complete(stop=stop).json["choices"][0]["text"] == text


def test_five_stop_strings_are_too_many() -> None:
    with serving(Scripted(says("x"))) as server:
        refused = server.chat(stop=["a", "b", "c", "d", "e"])
        assert refused.status == 400 and refused.error["param"] == "stop"


def test_a_stop_string_holds_with_json_too() -> None:
    with serving(Scripted(says('{"a": 1, "b": 2}'))) as server:
        whole, _ = both(server, stop=[', "b"'], response_format={"type": "json_object"})
        assert whole.text == '{"a": 1' and whole.json["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("text", ["a😊é", "👨‍👩‍👧‍👦", "日本 🌊", "line\u2028separator\u0085"])
def test_no_chunk_holds_half_a_character(text: str) -> None:
    with serving(Scripted(says(text))) as server:
        whole, stream = both(server)
        assert whole.text == text and "\\ufffd" not in stream.body.decode()


def test_broken_bytes_are_one_replacement_and_delay_nothing() -> None:
    with serving(Scripted(says([0xFF, *b"abc"]))) as server:
        whole, stream = both(server)
        assert whole.text == "\ufffdabc"
        pieces = [c["delta"].get("content") for e in stream.events[:-1] for c in e["choices"]]
        assert [p for p in pieces if p] == ["\ufffd", "a", "b", "c"]
    with serving(Scripted(says("ab😊"))) as server:
        whole, _ = both(server, max_tokens=4)
        assert whole.text == "ab\ufffd" and whole.json["choices"][0]["finish_reason"] == "length"


def test_the_text_goes_on_from_the_whole_prompt_wherever_it_is_cut() -> None:
    begun = "😊".encode()[:2]
    for prefill in (32, 0):
        with serving(Scripted(says("😊"), prefill=prefill), prefix_bytes=1 << 20) as server:
            for length in [*range(28, 38), 33]:
                ids = [*b"x" * (length - len(b"assistant\n") - 2), *b"assistant\n", *begun]
                assert len(ids) == length
                assert server.complete(ids).json["choices"][0]["text"] == "😊", (prefill, length)


def test_a_failure_before_the_first_token_has_a_status() -> None:
    def fail(step: int) -> None:
        raise RuntimeError("a secret prompt")

    with serving(Scripted(says("hello"), fail=fail)) as server:
        for stream in (False, True):
            reply = server.chat(stream=stream)
            assert (
                reply.status == 500 and reply.error["type"] == "server_error" and "secret" not in reply.error["message"]
            )
            assert reply.headers["content-type"] == "application/json"


def test_a_failure_inside_a_stream_is_one_event_and_its_end() -> None:
    def fail(step: int) -> None:
        if step == 4:
            raise RuntimeError("a secret prompt")

    with serving(Scripted(says("hello"), fail=fail)) as server:
        reply = server.chat(stream=True)
        events = reply.events
        assert reply.status == 200 and reply.text == "hel" and set(events[-1]) == {"error"}
        assert set(events[-1]["error"]) == {"message", "type", "param", "code"}
        assert not any(c["finish_reason"] for e in events[:-1] for c in e["choices"]), "it did not end well"
        assert server.chat().text == "hello"


def test_a_stream_survives_any_cut() -> None:
    with serving(Scripted(says("a😊 b\n\n{é}"))) as server:
        body = server.chat(stream=True).body
    rng = random.Random(0)
    for _ in range(20):
        cuts = sorted(rng.sample(range(len(body)), 10))
        pieces = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
        events = b"".join(pieces).split(b"\n\n")
        chunks = [json.loads(e[6:]) for e in events if e and e != b"data: [DONE]"]
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "a😊 b\n\n{é}"


def test_usage_counts_a_prompt_once_whatever_n() -> None:
    chain = Scripted(says("hi"))
    with serving(chain) as server:
        for known in (0, 96):
            usage = server.chat("q" * 100, n=3).json["usage"]
            assert usage["prompt_tokens"] == len(b"<x>user\n<y>\n<x>assistant\n") - 6 + 100
            assert usage["prompt_tokens_details"]["cached_tokens"] == known


def test_several_choices_and_nulls() -> None:
    with serving(Scripted(says("hi"))) as server:
        whole = server.chat(n=2).json
        assert [c["index"] for c in whole["choices"]] == [0, 1] and whole["usage"]["completion_tokens"] == 6
        events = server.chat(n=2, stream=True).events[:-1]
        for index in (0, 1):
            own = [c for e in events for c in e["choices"] if c["index"] == index]
            assert "".join(c["delta"].get("content", "") for c in own) == "hi"
            assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["stop"]
        nulls = dict.fromkeys(("n", "stop", "logprobs", "tools", "seed", "logit_bias", "max_tokens", "banana", "user"))
        assert server.chat(**nulls).text == "hi"
        assert server.chat(n=1, logprobs=False, frequency_penalty=0, presence_penalty=0.0, logit_bias={}).text == "hi"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("banana", 1), ("frequency_penalty", 0.5), ("presence_penalty", -1), ("n", 0), ("n", 99), ("temperature", 3),
        ("top_p", 0), ("logit_bias", {"x": 1}), ("logit_bias", {"319": 1}), ("logit_bias", {"5": 101}), ("seed", "a"),
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("top_logprobs", 3), ("stream", "yes"),
        ("store", True), ("response_format", {"type": "xml"}), ("response_format", {"type": "json_schema"}),
        ("functions", []), ("response_format", {"type": "text", "schema": {}}),
        ("response_format", {"type": "json_object", "schema": {}, "json_schema": {"name": "n", "schema": {}}}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "n"}}), ("tool_choice", "required"),
        ("messages", []), ("messages", [{"content": "x"}]), ("messages", "hi"), ("reasoning_effort", "low"),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ],
)  # fmt: skip
def test_what_is_not_done_is_refused_by_name(field: str, value: Any) -> None:
    chain = Scripted(says("hi"))
    with serving(chain) as server:
        reply = server.chat(**{field: value})
        assert reply.status == 400 and reply.error["type"] == "invalid_request_error"
        assert reply.error["param"] == field
        assert field in reply.error["message"] or field in ("messages", "logit_bias")
        assert chain.steps == 0, "refused before any step"


def test_two_limits_that_differ_are_refused() -> None:
    with serving(Scripted(says("hello"))) as server:
        reply = server.chat(max_tokens=3, max_completion_tokens=4)
        assert reply.status == 400 and reply.error["param"] == "max_tokens"
        assert server.chat(max_tokens=3, max_completion_tokens=3).text == "hel"


def test_logit_bias_is_honoured() -> None:
    with serving(Scripted(lambda prompt, index: EOS if index else np.zeros(VOCABULARY, np.float32))) as server:
        assert server.chat(temperature=0, logit_bias={str(ord("q")): 5}).text == "q"
        assert server.chat(temperature=0, logit_bias={"0": -100, "1": -100}).text == "\x02"


def test_content_in_parts_is_joined() -> None:
    chain = Scripted(says("hi"))
    with serving(chain) as server:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        assert server.chat(parts).text == server.chat("ab").text == "hi"
        asked = [b"".join(bytes([i]) for f in chain.fed for i in f if i < 256)]
        assert asked[0].count(b"user\nab") == 2
        for parts, kind in (([], "tokens"), ([{"type": "image_url", "image_url": {"url": "x"}}], "image_url")):
            if kind == "image_url":
                assert server.chat(parts).status == 400 and kind in server.chat(parts).error["message"]
            else:
                assert server.chat(parts).text == "hi"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_refused_with_both_counts(stream: bool) -> None:
    chain = Scripted(says("x" * 100), context=32, prefill=0)
    with serving(chain) as server:
        for length in (32, 33):
            reply = server.complete([65] * length, stream=stream)
            assert reply.status == 400 and reply.error["code"] == "context_length_exceeded"
            assert "32" in reply.error["message"] and str(length) in reply.error["message"]
        assert chain.steps == 0
        prompt = list(b"x" * 20 + b"assistant\n")
        reply = server.complete(prompt, max_tokens=100)
        assert reply.json["choices"][0]["text"] == "xx" and reply.json["choices"][0]["finish_reason"] == "length"
        usage = reply.json["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (30, 2, 32)


def test_without_a_limit_it_ends_at_the_context() -> None:
    with serving(Scripted(lambda prompt, index: ord("x"), context=64)) as server:
        whole, _ = both(server)
        assert whole.json["choices"][0]["finish_reason"] == "length" and whole.json["usage"]["total_tokens"] == 64


def test_models() -> None:
    with serving(Scripted(says("hi"))) as server:
        assert [m["id"] for m in server.ask("GET", "/v1/models").json["data"]] == ["tiny"]
        assert server.ask("GET", "/v1/models/tiny").json["id"] == "tiny"
        assert server.chat(model="tiny").json["model"] == server.chat().json["model"] == "tiny"
        for name in ("gpt-4", "../../etc", "/etc/passwd", "Qwen/Qwen3-0.6B", ""):
            reply = server.chat(model=name)
            assert (
                reply.status == 404 and reply.error["code"] == "model_not_found" and "'tiny'" in reply.error["message"]
            )
        assert server.ask("GET", "/v1/models/../../etc/passwd").status == 404


def test_exactly_one_first_token() -> None:
    chain = Scripted(says("hi"))
    with_bos = tokenizer("{{ bos_token }}{{ messages[0].content }}assistant{{ '\\n' }}")
    with_bos.library.post_processor = processors.TemplateProcessing(
        single="<|startoftext|> $A", special_tokens=[("<|startoftext|>", BOS)]
    )
    with_bos = replace(with_bos, bos_id=BOS, special_tokens={"bos_token": "<|startoftext|>"})
    with serving(chain, with_bos) as server:
        for ask in (server.chat, server.complete):
            for text in ("hello assistant\n", "<|startoftext|>hello assistant\n"):
                if ask == server.chat and text.startswith("<"):
                    continue
                chain.fed.clear()
                assert ask(text).status == 200
                assert sum(f.count(BOS) for f in chain.fed) == 1, (ask, text)
        chain.fed.clear()
    plain = type(with_bos)(
        **{**vars(with_bos), "chat_templates": {"default": "{{ messages[0].content }}assistant{{ '\\n' }}"}}
    )
    with serving(chain, plain) as server:
        assert server.chat("hi").status == 200 and not any(BOS in f for f in chain.fed), "the template decides"


def test_a_model_without_a_template_completes_and_does_not_chat() -> None:
    with serving(Scripted(says("hi")), tokenizer(None)) as server:
        reply = server.chat()
        assert reply.status == 400 and reply.error["code"] == "no_chat_template"
        assert server.complete().json["choices"][0]["text"] == "hi"
    with serving(Scripted(says("hi")), tokenizer("{{ raise_exception('roles must alternate') }}")) as server:
        reply = server.chat()
        assert reply.status == 400 and "roles must alternate" in reply.error["message"]


def test_variables_reach_the_template() -> None:
    chain = Scripted(says("hi"))
    template = "{{ messages[0].content }}{% if enable_thinking is false %}!{% endif %}assistant{{ '\\n' }}"
    with serving(chain, tokenizer(template)) as server:
        for kwargs, wanted in (({"enable_thinking": False}, True), ({}, False), ({"unknown": 1}, False), (None, False)):
            chain.fed.clear()
            assert server.chat("q", chat_template_kwargs=kwargs).text == "hi"
            assert (ord("!") in chain.fed[0]) is wanted
        for name in ("messages", "tools", "add_generation_prompt"):
            reply = server.chat("q", chat_template_kwargs={name: [], "enable_thinking": False})
            assert reply.status == 400 and reply.error["param"] == "chat_template_kwargs", name
            assert name in reply.error["message"]


def test_session_double_is_one() -> None:
    session = Session([1, 2, 3], 3)
    assert session.copy(2) == Session([1, 2], 2) and session.copy() == session
