"""A conversation to the text that the model was trained on, by the checkpoint's own Jinja template.

A template is code from a download: it runs in Jinja's immutable sandbox, sees plain JSON data only, and whatever it
raises is one sentence. What it may call is what Hugging Face templates are written against: `raise_exception`,
`strftime_now`, `tojson` (no HTML escapes), `break` and `continue`, and `{% generation %}`, which marks the assistant's
text for training and is transparent here.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from anechain.errors import BundleError, RequestError
from anechain.run.tokenizer import Tokenizer

# What reasoning models write around what they think before they answer.
THINK, THINK_END = "<think>", "</think>"


class _Generation(Extension):
    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)  # what is set inside is not seen outside


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


def as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose content in parts has become their texts, one after another with nothing between.

    Raises RequestError, naming the types of all parts that are not text.
    """
    parts = message.get("content")
    if not isinstance(parts, list):
        return dict(message)
    kinds = [part.get("type") if isinstance(part, dict) else type(part).__name__ for part in parts]
    if strange := sorted({str(kind) for kind in kinds if kind != "text"}):
        raise RequestError(f"a message has content of type {', '.join(strange)}: this model reads text alone.")
    return {**message, "content": "".join(str(part.get("text", "")) for part in parts)}


def opens_thinking(rendered: str) -> bool:
    """Whether a rendered conversation ends inside the assistant's thinking, which the model then goes on with."""
    return rendered.rstrip().endswith(THINK)


class ChatTemplate:
    """The chat templates of a tokenizer, compiled."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises RequestError if the tokenizer has no template, BundleError if one is not valid Jinja."""
        if not tokenizer.chat_templates:
            raise RequestError("this model has no chat template: give it a plain prompt with `anechain run`.")
        environment, faults = _environment(), []
        self._tokenizer = tokenizer
        self._templates: dict[str, Template] = {}
        for name, text in tokenizer.chat_templates.items():
            try:
                self._templates[name] = environment.from_string(text)
            except TemplateSyntaxError as error:
                faults.append(f"{name!r}, line {error.lineno}: {error.message}")
        if faults:
            raise BundleError(f"the bundle's chat template is not valid Jinja ({'; '.join(faults)}): correct it.")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation; with `add_generation_prompt` it ends where the assistant's answer begins.

        A message is JSON: `role`, `content` and whatever else the template knows; a null counts as absent. `variables`
        are handed to the template (`enable_thinking`, `tools`); with `tools` one named "tool_use" is preferred.
        Raises RequestError when a message is malformed or the template refuses the conversation.
        """
        variables = dict(variables or {})
        if not messages:
            raise RequestError("the conversation is empty: give at least one message.")
        faulty = [
            str(number)
            for number, message in enumerate(messages, 1)
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str)
        ]
        if faulty:
            raise RequestError(f"message {', '.join(faulty)} of the conversation has no role: give each one a role.")
        try:
            plain = json.loads(json.dumps([[dict(message) for message in messages], variables]))
        except (TypeError, ValueError) as error:
            raise RequestError(f"the conversation is not plain JSON data ({error}): correct its messages.") from None
        chat = [{key: value for key, value in message.items() if value is not None} for message in plain[0]]
        values = {"tools": None, "documents": None, **self._tokenizer.special_tokens, **plain[1]}
        template = self._template(tools=values["tools"] is not None)
        try:
            try:
                return template.render(messages=chat, add_generation_prompt=add_generation_prompt, **values)
            except TypeError:  # a template of the older kind, which adds strings, has met a content in parts
                chat = [as_text(message) for message in chat]
                return template.render(messages=chat, add_generation_prompt=add_generation_prompt, **values)
        except RequestError:
            raise
        except Exception as error:  # a template is a program, and may fail in any way
            raise RequestError(
                f"the model's chat template refuses this conversation ({' '.join(str(error).split())}): "
                "change its messages."
            ) from None

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """`render`, as ids. The template writes its own first token, so the tokenizer adds none."""
        return self._tokenizer.encode(self.render(messages, add_generation_prompt, variables), add_special=False)

    def _template(self, tools: bool) -> Template:
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise RequestError(
                f"this model's chat templates are {', '.join(sorted(self._templates))}, and none is called default: "
                "add a chat_template.jinja to the checkpoint and bake again."
            )
        return self._templates[name]
