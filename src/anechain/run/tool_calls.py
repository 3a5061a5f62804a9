"""Calls of functions in an answer, in the form that most chat templates teach: `<tool_call>` around a JSON object.

`{"name": ..., "arguments": ...}`; the grammar makes the name one of those offered and the arguments valid.
"""

import json
from collections.abc import Mapping
from typing import Any

from anechain.errors import RequestError
from anechain.run.grammar import JSON_OPTIONS, Grammar, checked_schema
from anechain.run.tokenizer import Tokenizer

CALL, CALL_END = "<tool_call>", "</tool_call>"


def call_schema(functions: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One call of one of `functions`, name -> JSON schema of its arguments. Raises RequestError as a Grammar does."""
    options: list[dict[str, Any]] = []
    for name, parameters in functions.items():
        try:
            checked_schema(json.dumps(parameters))
        except RequestError as error:
            raise RequestError(f"the parameters of {name}: {error}") from None
        arguments = _rooted(parameters, f"#/anyOf/{len(options)}/properties/arguments")
        properties = {"name": {"const": name}, "arguments": arguments}
        closed = {"required": ["name", "arguments"], "additionalProperties": False}
        options.append({"type": "object", "properties": properties, **closed})
    return {"anyOf": options}


def _rooted(node: Any, root: str) -> Any:
    """A schema that has become part of another one: its references lead into itself as before."""
    if isinstance(node, Mapping):
        moved = {key: _rooted(item, root) for key, item in node.items()}
        ref = node.get("$ref")
        if isinstance(ref, str) and (ref == "#" or ref.startswith("#/")):
            moved["$ref"] = root + ref[1:]
        return moved
    return [_rooted(item, root) for item in node] if isinstance(node, list) else node


def free_or_call(functions: Mapping[str, Mapping[str, Any]], tokenizer: Tokenizer, several: bool) -> Grammar:
    """Any text, and after it possibly a call of one of `functions`; with `several`, any number of them."""
    begin, end = (_tag(tag, tokenizer) for tag in (CALL, CALL_END))
    # Where the tag is text, the lexer has to take it together with what is before it: it never goes back.
    if begin.startswith('"'):
        text = f"/(?s:.*)/ & ~/(?s:.*{CALL}.*)/"
        before = f"before[lazy]: /(?s:.*){CALL}/"
    else:
        text, before = "/(?s:.*)/", f"before: TEXT {begin}"
    more = f"(/\\n?/ {begin} call)*" if several else ""
    schema = json.dumps(call_schema(functions) | {"x-guidance": JSON_OPTIONS})
    rules = (
        f"start: TEXT | before call {more}", before, f"TEXT: {text}",
        f"call: /\\n?/ body /\\n?/ {end}", f"body: %json {schema}",
    )  # fmt: skip
    return Grammar("lark", "\n".join(rules))


def _tag(tag: str, tokenizer: Tokenizer) -> str:
    token_id = tokenizer.library.token_to_id(tag)
    return json.dumps(tag) if token_id is None else f"<[{token_id}]>"


def calls_in(text: str) -> list[tuple[str, str]]:
    """Name and arguments (JSON text) of every whole call in `text`, which is a call itself or holds tagged ones."""
    found = []
    for part in text.split(CALL)[1:] if CALL in text else [text]:
        body, _, _ = part.partition(CALL_END)
        try:
            call = json.loads(body)
        except ValueError:  # cut off by the limit
            continue
        if isinstance(call, dict) and isinstance(call.get("name"), str):
            found.append((call["name"], json.dumps(call.get("arguments"), ensure_ascii=False)))
    return found
