"""Formats, tools and thinking through the door: what is asked for is kept, whatever the logits; the rest is refused."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from tests.serve.scripted import VOCABULARY, Script, Scripted, says, serving, tokenizer
from tests.tiny import CHAT_TEMPLATE, EOS, IM_END

SCHEMA = {
    "type": "object",
    "properties": {"action": {"enum": ["open", "close"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["action", "count"],
    "additionalProperties": False,
}
OPENED = "<think>\n"
THINKS = CHAT_TEMPLATE + "{% if enable_thinking is not false %}<think>{{ '\\n' }}{% endif %}"
TOOLS_TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHAT_TEMPLATE
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": PARAMETERS}}


def prose(favourite: int = 319) -> Script:
    """Logits that prefer prose, or a row of the head that no token has."""

    def script(prompt: str, index: int) -> np.ndarray:
        logits = np.random.default_rng([index, len(prompt)]).standard_normal(VOCABULARY).astype(np.float32)
        logits[list(b"Sure, here it is")] += 3
        logits[ord('"')] += 4
        logits[favourite] += 50
        return logits

    return script


FORMATS: list[tuple[Any, Any]] = [
    ({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}, SCHEMA),
    ({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}, SCHEMA),
    ({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": False}}, SCHEMA),
    ({"type": "json_schema", "schema": SCHEMA}, SCHEMA),
    ({"type": "json_object"}, {"type": "object"}),
    ({"type": "json_object", "schema": SCHEMA}, SCHEMA),
]


@pytest.mark.parametrize("favourite", [319, EOS, ord("S")])
def test_a_format_is_enforced(favourite: int) -> None:
    with serving(Scripted(prose(favourite))) as server:
        for form, schema in FORMATS:
            if favourite == ord("S") and schema == {"type": "object"}:
                continue  # a free string of S alone never ends
            for stream in (False, True):
                reply = server.chat(response_format=form, stream=stream, temperature=0)
                assert reply.status == 200
                Draft202012Validator(schema).validate(json.loads(reply.text))
        assert server.chat(response_format={"type": "text"}, max_tokens=3, temperature=0).status == 200


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"), ({"not": {}}, "not"), ({"type": "banana"}, "banana"),
        ({"propertyNames": {}}, "propertyNames"), ({"type": "string", "format": "x"}, "format"),
        ({"enum": []}, "anyOf"), ({"minimum": 3, "maximum": 1, "type": "integer"}, "minimum"), ({"$ref": "#"}, "$ref"),
        ({"enum": ["x" * (1 << 20)]}, "bytes"),
    ],
)  # fmt: skip
def test_a_schema_that_cannot_be_kept_is_refused_before_the_first_step(schema: Any, named: str) -> None:
    chain = Scripted(prose())
    with serving(chain) as server:
        for stream in (False, True):
            form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
            reply = server.chat(response_format=form, stream=stream)
            assert reply.status == 400 and named in reply.error["message"] and reply.error["param"] == "response_format"
        assert chain.steps == 0
        reply = server.chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": [1]}})
        assert reply.status == 400 and reply.error["param"] == "response_format"
        assert server.chat(max_tokens=1).status == 200


def test_a_padded_row_never_comes() -> None:
    with serving(Scripted(prose(319))) as server:
        for form in ({"type": "text"}, {"type": "json_object"}):
            reply = server.chat(response_format=form, max_tokens=20, temperature=1, seed=1)
            assert reply.status == 200 and reply.json["usage"]["completion_tokens"] > 0


def thinker(thought: str) -> Script:
    def script(prompt: str, index: int) -> np.ndarray:
        logits = prose(EOS)(prompt, index)
        text = (OPENED + thought).encode()  # what the template opens counts as said
        if index < len(text):
            logits[text[index]] += 200
        return logits

    return script


def test_the_format_begins_after_the_thinking() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    with serving(Scripted(thinker("Let me {see}.\n</think>")), tokenizer(THINKS)) as server:
        for stream in (False, True):
            reply = server.chat(response_format=form, stream=stream, temperature=0)
            Draft202012Validator(SCHEMA).validate(json.loads(reply.text))
            chunks = [c["delta"] for e in reply.events[:-1] for c in e["choices"]] if stream else None
            thought = (
                "".join(d.get("reasoning_content", "") for d in chunks)
                if chunks
                else reply.json["choices"][0]["message"]["reasoning_content"]
            )
            assert thought == "Let me {see}."
        short = server.chat(response_format=form, max_tokens=5, temperature=0)
        assert short.status == 200 and short.text == "" and short.json["choices"][0]["finish_reason"] == "length"
        assert short.json["choices"][0]["message"]["reasoning_content"] == "Let m"
    with serving(Scripted(prose(ord("<"))), tokenizer(THINKS)) as server:
        off = server.chat(response_format=form, chat_template_kwargs={"enable_thinking": False}, temperature=0)
        Draft202012Validator(SCHEMA).validate(json.loads(off.text))
        assert "reasoning_content" not in off.json["choices"][0]["message"]


def test_thinking_that_the_answer_opens_itself_is_apart_too() -> None:
    template = CHAT_TEMPLATE + "{# <think> #}"
    for said, thought, text in (
        ("<think>\nhm\n</think>\n\nyes", "hm", "yes"),
        ("<thi", "", "<thi"),
        ("plain <think>", "", "plain <think>"),
        ("<think>never ends", "never ends", ""),
    ):
        with serving(Scripted(says(said)), tokenizer(template)) as server:
            whole, stream = server.chat(), server.chat(stream=True)
            assert whole.text == stream.text == text
            assert whole.json["choices"][0]["message"].get("reasoning_content", "") == thought
    with serving(Scripted(says("<think>x</think>y"))) as server:
        assert server.chat().text == "<think>x</think>y", "this template knows nothing of thinking"


def calls(reply: Any) -> list[tuple[str, Any]]:
    if reply.body.startswith(b"data: "):
        found = [c for e in reply.events[:-1] for c in e["choices"][0]["delta"].get("tool_calls", [])]
        assert [c["index"] for c in found] == list(range(len(found)))
    else:
        found = reply.json["choices"][0]["message"].get("tool_calls", [])
    assert all(c["type"] == "function" and c["id"].startswith("call_") for c in found)
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in found]


def reason(reply: Any) -> str:
    if reply.body.startswith(b"data: "):
        return next(c["finish_reason"] for e in reply.events[:-1] for c in e["choices"] if c["finish_reason"])
    return str(reply.json["choices"][0]["finish_reason"])


@pytest.mark.parametrize(
    ("choice", "stream"), [("required", True), ({"type": "function", "function": {"name": "weather"}}, False)]
)
def test_a_call_that_is_required_is_valid(choice: Any, stream: bool) -> None:
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    other = {"type": "function", "function": {"name": "time", "parameters": nothing}}
    with serving(Scripted(prose(IM_END), context=2048), tokenizer(TOOLS_TEMPLATE)) as server:
        reply = server.chat(tools=[TOOL, other], tool_choice=choice, stream=stream, temperature=0)
        assert reply.status == 200 and reason(reply) == "tool_calls" and reply.text == ""
        ((name, arguments),) = calls(reply)
        assert name in ("weather", "time") and (name == "weather" or choice == "required")
        if name == "weather":
            Draft202012Validator(PARAMETERS).validate(arguments)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_free_is_made_or_not(stream: bool) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    for said, text, wanted in (
        ("It is <b>fine</b>.", "It is <b>fine</b>.", 0),
        (call, "", 1),
        ("Let me see. " + call, "Let me see. ", 1),
        (call + "\n" + call, "", 2),
    ):
        with serving(Scripted(says(said), context=2048), tokenizer(TOOLS_TEMPLATE)) as server:
            reply = server.chat(tools=[TOOL], stream=stream)
            assert reply.text == text and reason(reply) == ("tool_calls" if wanted else "stop")
            assert calls(reply) == [("weather", {"city": "Oslo"})] * wanted
    broken = '<tool_call>{"name": "rm", "arguments": {"x": 1}}</tool_call>'
    with serving(Scripted(says(broken), context=2048), tokenizer(TOOLS_TEMPLATE)) as server:
        for name, arguments in calls(server.chat(tools=[TOOL], stream=stream, temperature=0)):
            assert name == "weather"
            Draft202012Validator(PARAMETERS).validate(arguments)


def test_tools_that_cannot_be_kept_are_refused() -> None:
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "array", "uniqueItems": True}}}
    with serving(Scripted(says("x")), tokenizer(TOOLS_TEMPLATE)) as server:
        for choice in ("auto", "required"):
            reply = server.chat(tools=[bad], tool_choice=choice)
            assert reply.status == 400 and reply.error["param"] == "tools" and "uniqueItems" in reply.error["message"]
        assert server.chat(tools=[bad], tool_choice="none").text == "x"
        both = server.chat(tools=[TOOL], response_format={"type": "json_object"})
        assert both.status == 400 and both.error["param"] == "response_format"
    with serving(Scripted(says("x")), replace(tokenizer(), chat_templates={"default": "{{ messages }}"})) as server:
        assert server.chat(tools=[TOOL]).error["param"] == "tools"
