"""Constrained decoding: which ids may come next so that the text keeps to a JSON schema, a regex or a Lark grammar.

`Grammar` is what was asked for, as plain data. `Grammars` compiles it against one tokenizer, with llguidance, and
`Constraint` is one sequence's place in it. Whatever can be refused is refused when it is compiled, before any token.

What is stricter than llguidance's defaults, because an answer could otherwise break its schema or never end: white
space between JSON tokens is one space, or one line feed and an indent; strings are written with the short escapes
alone, so that a property's name has one spelling; and what `schema_check` refuses.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from anechain.errors import EngineError, RequestError
from anechain.run.chat import THINK_END
from anechain.run.detokenizer import Vocabulary
from anechain.run.schema_check import faults_of
from anechain.run.tokenizer import Tokenizer

MAX_BYTES = 128 * 1024  # of a schema, a regex or a grammar
COMPILED_KEPT = 32
# A chain of references is compiled by recursion: 5000 of them, which is what fits into MAX_BYTES, overflow the usual
# 8 MB and take the process with them. A stack is address space, not memory, until it is used.
STACK_BYTES = 256 << 20
JSON_OPTIONS = {"whitespace_pattern": r"(\x0A\x20{0,16}|\x20)", "json_allowed_escapes": '"\\bfnrt'}

Kind = Literal["schema", "regex", "lark"]
WHAT: dict[Kind, str] = {"schema": "JSON schema", "regex": "regex", "lark": "grammar"}


@dataclass(frozen=True)
class Grammar:
    """What an answer has to keep to: the text of a JSON schema, of a regex that it matches as a whole, or of a Lark
    grammar whose start rule is `start`."""

    kind: Kind
    text: str

    @staticmethod
    def schema(schema: Any) -> "Grammar":
        """The schema as parsed JSON. Raises RequestError when it is not plain JSON data."""
        try:
            return Grammar("schema", json.dumps(schema, allow_nan=False, ensure_ascii=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise _refused("schema", f"it is not plain JSON data ({error})") from None


class Constraint:
    """One sequence's place in a grammar."""

    def __init__(self, matcher: LLMatcher, n_ids: int) -> None:
        self._matcher, self._n_ids = matcher, n_ids

    def allowed(self) -> np.ndarray:
        """The ids that may come next, [n_ids] bool; end-of-sequence ids where the text may end.

        Raises RequestError when the grammar cannot go on: too complex, or nothing fits.
        """
        try:
            bits = self._matcher.compute_bitmask()  # a bit an id, lowest first
        except ValueError as error:
            raise _stuck(str(error)) from None
        if self._matcher.is_error():
            raise _stuck(self._matcher.get_error())
        return np.unpackbits(np.frombuffer(bits, np.uint8), count=self._n_ids, bitorder="little").astype(np.bool_)

    def accept(self, token_id: int) -> None:
        """Moves on by an id that `allowed` named. Raises RequestError as `allowed` does."""
        if not self._matcher.consume_token(token_id):
            raise _stuck(self._matcher.get_error())

    @property
    def complete(self) -> bool:
        """Whether nothing but the end can follow."""
        return bool(self._matcher.is_stopped())


class Grammars:
    """Compiles grammars for one tokenizer. What was compiled lately is kept; a Constraint starts as a copy of it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises RequestError when the tokenizer's texts are not the ones that llguidance knows.

        It takes about a second for a vocabulary of 150 000.
        """
        self._tokenizer = tokenizer
        try:
            self._library = LLTokenizer(
                tokenizer.library.to_str(), n_vocab=tokenizer.n_ids, eos_token=sorted(tokenizer.eos_ids)
            )
        except ValueError as error:
            raise RequestError(f"this model's tokenizer cannot be constrained by a grammar ({error}).") from None
        if others := _other_texts(self._library, tokenizer.vocabulary):
            raise RequestError(
                f"this model's tokenizer cannot be constrained by a grammar: {len(others)} of its tokens have another "
                f"text there, the first is id {others[0]}."
            )
        self._compiled: OrderedDict[tuple[Grammar, bool], LLMatcher] = OrderedDict()

    def start(self, grammar: Grammar, after_thinking: bool = False) -> Constraint:
        """The beginning of `grammar`; with `after_thinking`, the text may first be anything up to a `</think>`.

        Raises RequestError, naming what is at fault, for a grammar that cannot be used.
        """
        key = (grammar, after_thinking)
        if key not in self._compiled:
            self._compiled[key] = self._compile(grammar, after_thinking)
            if len(self._compiled) > COMPILED_KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return Constraint(self._compiled[key].deep_copy(), self._tokenizer.n_ids)

    def _compile(self, grammar: Grammar, after_thinking: bool) -> LLMatcher:
        if (size := len(grammar.text.encode())) > MAX_BYTES:
            raise _refused(grammar.kind, f"it has {size} bytes, and {MAX_BYTES} are the most")
        schema = checked_schema(grammar.text) if grammar.kind == "schema" else None
        part = {"name": "answer"} | _part(grammar)
        matcher = _on_a_large_stack(lambda: LLMatcher(self._library, json.dumps({"grammars": [part]}), log_level=0))
        if matcher.is_error():
            faults = matcher.get_error() if schema is None else self._schema_faults(schema, matcher.get_error())
            raise _refused(grammar.kind, faults)
        if not _begins(matcher):
            raise _refused(grammar.kind, "no text can keep to it")
        if after_thinking:
            grammars = {"grammars": [{"lark_grammar": self._thinking()}, part]}
            matcher = _on_a_large_stack(lambda: LLMatcher(self._library, json.dumps(grammars), log_level=0))
            if matcher.is_error():
                raise _refused(grammar.kind, matcher.get_error())
        return matcher

    def _thinking(self) -> str:
        """Any text up to the end of the thinking, which many tokenizers have as one token, and then the answer."""
        token_id = self._tokenizer.library.token_to_id(THINK_END)
        if token_id is not None:
            return f"start: ANYTHING <[{token_id}]> @answer\nANYTHING: /(?s:.*)/\n"
        return f"start: thinking @answer\nthinking[lazy]: /(?s:.*){THINK_END.replace('/', chr(92) + '/')}/\n"

    def _schema_faults(self, schema: dict[str, Any], error: str) -> str:
        """All keywords that are not supported, with where they are; else `error` itself.

        llguidance names those of the first subschema that has any. They are taken out of a copy until it names others.
        """
        named: list[str] = []
        while error.startswith("Unimplemented keys: "):
            keys = json.loads(error.removeprefix("Unimplemented keys: "))
            named += [key for key in keys if key not in named]
            schema = _without(schema, set(keys))
            _, messages = LLMatcher.validate_grammar_with_warnings(_json_grammar(schema), self._library)
            error = messages[0] if messages else ""
        if not named:
            return error
        return f"constrained decoding does not support {', '.join(named)}"


def _part(grammar: Grammar) -> dict[str, Any]:
    """llguidance's form of `grammar`; raises RequestError."""
    if grammar.kind == "schema":
        return {"json_schema": json.loads(grammar.text) | {"x-guidance": JSON_OPTIONS}}
    if grammar.kind == "regex":
        inner: dict[str, Any] = json.loads(LLMatcher.grammar_from_regex(grammar.text))["grammars"][0]
        return {"lark_grammar": inner["lark_grammar"]}
    return {"lark_grammar": grammar.text}


def _json_grammar(schema: dict[str, Any]) -> str:
    return json.dumps({"grammars": [{"json_schema": schema | {"x-guidance": JSON_OPTIONS}}]})


def checked_schema(text: str) -> dict[str, Any]:
    """The schema in `text`, before it is compiled. Raises RequestError, naming all that could not be kept."""
    try:
        schema = json.loads(text)
        if not isinstance(schema, dict):
            raise _refused("schema", f"it is a JSON {type(schema).__name__} and not an object")
        faults = faults_of(schema)
    except (ValueError, RecursionError) as error:
        raise _refused("schema", f"it is not JSON ({error})") from None
    if faults:
        raise _refused("schema", "; ".join(faults))
    return schema


def _without(node: Any, keys: set[str]) -> Any:
    if isinstance(node, dict):
        return {key: _without(item, keys) for key, item in node.items() if key not in keys}
    return [_without(item, keys) for item in node] if isinstance(node, list) else node


def _begins(matcher: LLMatcher) -> bool:
    """Whether there is a first id. Asks a copy: without one, the matcher stops for good."""
    probe = matcher.deep_copy()
    try:
        return any(probe.compute_bitmask()) and not probe.is_error()
    except ValueError:
        return False


def _other_texts(library: LLTokenizer, vocabulary: Vocabulary) -> list[int]:
    """The ids whose bytes in the middle of a text differ from the detokenizer's, special ones aside."""
    return [
        i
        for i in range(vocabulary.n_ids)
        if vocabulary.has(i)
        and not library.is_special_token(i)
        and library.decode_bytes([i]) != vocabulary.rules.token_bytes(vocabulary.token(i), first=False)
    ]


def _on_a_large_stack(build: Callable[[], LLMatcher]) -> LLMatcher:
    built: list[LLMatcher] = []
    before = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=lambda: built.append(build()))
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    if not built:
        raise EngineError("the grammar's compiler failed: simplify the grammar.")
    return built[0]


def _refused(kind: Kind, why: str) -> RequestError:
    """The first line of `why`, which may go on with an excerpt of the grammar."""
    text = " ".join(why.split())
    return RequestError(f"this {WHAT[kind]} cannot be used: {text[:400].rstrip('.')}; change it.")


def _stuck(why: str) -> RequestError:
    reason = why.partition("<state>")[0] or "it is too complex"
    return RequestError(f"the grammar leads to a place where it cannot go on ({reason.strip()}): simplify it.")
