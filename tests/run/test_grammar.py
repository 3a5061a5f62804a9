"""Whatever the logits, a constrained answer keeps to its grammar; what cannot be kept is refused before the start.

jsonschema is the independent answer to "does this document keep to that schema".
"""

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, FormatChecker

from anechain.errors import EngineError, RequestError
from anechain.run.generate import Token, generate
from anechain.run.grammar import MAX_BYTES, Grammar, Grammars
from anechain.run.sample import Sampling
from anechain.run.tokenizer import Tokenizer
from tests.bundle_maker import tokenizer_files
from tests.tiny import EOS, IM_END

VOCABULARY = 320
GREEDY = Sampling()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    for name, content in tokenizer_files().items():
        (folder / name).write_bytes(content)
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer)


class Random:
    """A chain whose logits are noise, with one favourite: an id, here often one that the grammar forbids."""

    def __init__(self, seed: int, favourite: int = 319, context: int = 4096) -> None:
        self._rng, self._favourite, self._fed, self.context = np.random.default_rng(seed), favourite, 0, context

    @property
    def bundle(self) -> Any:
        return replace_context(self.context)

    def room(self, session: object) -> int:
        return self.context - self._fed

    def feed(self, session: object, ids: Any) -> np.ndarray:
        self._fed += len(ids)
        logits = self._rng.standard_normal(VOCABULARY).astype(np.float32)
        logits[ord('"')] += 2.0  # strings end
        logits[self._favourite] += 1000.0
        return logits


def replace_context(context: int) -> Any:
    return type("Bundle", (), {"context": context})()


def said(
    chain: Any, tokenizer: Tokenizer, constraint: Any, limit: int = 3000, sampling: Sampling = GREEDY
) -> list[Token]:
    return list(generate(chain, None, tokenizer, [65], sampling, limit, constraint=constraint))


def text_of(tokens: list[Token]) -> str:
    return "".join(token.text for token in tokens)


# Everything that is supported in some combination; the leaves end soon, so that most documents are whole.
NAMES = st.sampled_from(["a", "b", "name", "a b", 'q"', "é", "ключ", "back\\slash", "line\nfeed", "x/y"])
WHOLE = st.integers(0, 4)
LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda a, b: {"type": "string", "minLength": a, "maxLength": a + b}, WHOLE, WHOLE),
    st.builds(
        lambda a, b: {"type": "integer", "minimum": a, "maximum": a + b}, st.integers(-50, 50), st.integers(0, 900)
    ),
    st.builds(lambda a, b: {"type": "number", "exclusiveMinimum": a, "maximum": a + b + 1}, st.integers(-9, 9), WHOLE),
    st.builds(lambda m: {"type": "integer", "multipleOf": m, "minimum": 0, "maximum": 10 * m}, st.integers(1, 12)),
    st.builds(lambda v: {"enum": v}, st.lists(st.sampled_from([1, "x", None, "ü\n", [1, {"k": 2}]]), min_size=1)),
    st.builds(lambda v: {"const": v}, st.sampled_from(["c", 3, -2.5, {"a": [True]}, ""])),
    st.sampled_from([{"pattern": p} for p in ("^[a-c]{2,4}$", "^\\d+\\.x?$", "^(ab|\\\\)*$", "^é+\n?$")]).map(
        lambda s: {"type": "string", **s}
    ),
    st.builds(lambda f: {"type": "string", "format": f}, st.sampled_from(["date", "uuid", "ipv4"])),
)


def _composite(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def an_object(properties: dict[str, Any], needed: set[str], more: Any) -> dict[str, Any]:
        required = sorted(needed & set(properties))
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": more}

    def an_array(items: Any, least: int, more: int) -> dict[str, Any]:
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + more}

    def a_tuple(items: list[Any]) -> dict[str, Any]:
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}

    few = st.lists(inner, min_size=1, max_size=3)
    others = st.one_of(st.just(False), inner)
    return st.one_of(
        st.builds(an_object, st.dictionaries(NAMES, inner, max_size=4), st.sets(NAMES), others),
        st.builds(an_array, inner, st.integers(0, 2), st.integers(0, 2)),
        st.builds(a_tuple, few),
        st.builds(lambda options: {"anyOf": options}, few),
    )


SCHEMAS = st.recursive(LEAVES, _composite, max_leaves=8)


@settings(max_examples=100)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32 - 1), hot=st.booleans())
def test_whatever_the_logits_the_answer_validates(
    schema: dict[str, Any], seed: int, hot: bool, grammars: Grammars, tokenizer: Tokenizer
) -> None:
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=seed) if hot else GREEDY
    favourite = [319, EOS, ord("x"), ord(" "), ord("\n"), 0xFF][seed % 6]
    tokens = said(Random(seed, favourite), tokenizer, grammars.start(Grammar.schema(schema)), 600, sampling)
    text = text_of(tokens)
    assert all(token.id < tokenizer.n_ids for token in tokens)
    assert "   " * 6 not in text and not re.search(r"[ \n]{18}", re.sub(r'"(\\.|[^"\\])*"', "", text)), (
        "white space runs"
    )
    if tokens[-1].finish == "length":
        return
    Draft202012Validator(schema, format_checker=FormatChecker()).validate(json.loads(text))


def test_most_of_those_documents_are_whole(grammars: Grammars, tokenizer: Tokenizer) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "string"}}},
    }
    ends = [said(Random(i), tokenizer, grammars.start(Grammar.schema(schema)), 400)[-1].finish for i in range(30)]
    assert ends.count("stop") > 20, "or the property above compares next to nothing"


def test_a_padded_id_never_comes_guided_or_free(grammars: Grammars, tokenizer: Tokenizer) -> None:
    for constraint in (None, grammars.start(Grammar.schema({"type": "object"}))):
        tokens = said(Random(0, favourite=319), tokenizer, constraint, 40)
        assert tokens and max(token.id for token in tokens) < tokenizer.n_ids < 319


def test_a_complete_answer_stops_and_costs_no_further_step(grammars: Grammars, tokenizer: Tokenizer) -> None:
    tokens = said(Random(1), tokenizer, grammars.start(Grammar("regex", "yes|no")))
    assert text_of(tokens) in ("yes", "no") and tokens[-1].finish == "stop" and tokens[-1].text in ("s", "o")
    tokens = said(Random(1, favourite=IM_END), tokenizer, grammars.start(Grammar("regex", "a{2,}")))
    assert text_of(tokens) == "aa" and (tokens[-1].id, tokens[-1].finish) == (IM_END, "stop")
    cut = said(Random(1, favourite=ord("a")), tokenizer, grammars.start(Grammar("regex", "a{2,}")), 5)
    assert text_of(cut) == "aaaaa" and cut[-1].finish == "length"


@pytest.mark.parametrize("regex", ["[0-9]{3}-[a-f]{2}", "(foo|bär)+x", "a/b\\nc", "[a-zé]{2,5} [0-9]?"])
def test_a_regex_matches_the_whole_answer(regex: str, grammars: Grammars, tokenizer: Tokenizer) -> None:
    whole = 0
    for seed in range(12):
        tokens = said(Random(seed, favourite=EOS), tokenizer, grammars.start(Grammar("regex", regex)), 60)
        if tokens[-1].finish == "stop":
            whole += 1
            assert re.fullmatch(regex, text_of(tokens)), text_of(tokens)
    assert whole >= 6


def test_a_lark_grammar(grammars: Grammars, tokenizer: Tokenizer) -> None:
    lark = 'start: verb " " noun\nverb: "open" | "close"\nnoun: /[a-z]{3}/ | "door"'
    for seed in range(8):
        text = text_of(said(Random(seed, favourite=EOS), tokenizer, grammars.start(Grammar("lark", lark))))
        assert re.fullmatch("(open|close) ([a-z]{3}|door)", text)


def test_thinking_is_free_and_the_answer_is_not(grammars: Grammars, tokenizer: Tokenizer) -> None:
    said_first = list(b"hm, {\xc3\xa9} </thin</think>")

    class Thinks(Random):
        def feed(self, session: object, ids: Any) -> np.ndarray:
            logits = super().feed(session, ids)
            logits[[EOS, IM_END]] += 3000.0  # it would rather stop at once
            if said_first:
                logits[said_first.pop(0)] += 2000.0
            return logits

    tokens = said(Thinks(3), tokenizer, grammars.start(Grammar.schema({"const": {"a": 1}}), after_thinking=True))
    thought, _, answer = text_of(tokens).rpartition("</think>")
    assert thought.endswith("</thin") and json.loads(answer) == {"a": 1} and tokens[-1].finish == "stop"
    assert not {EOS, IM_END} & {token.id for token in tokens}


def test_logits_that_cannot_be_trusted_are_not_hidden_by_a_mask(grammars: Grammars, tokenizer: Tokenizer) -> None:
    class Poisoned(Random):
        def feed(self, session: object, ids: Any) -> np.ndarray:
            logits = super().feed(session, ids)
            logits[ord("q")] = np.nan  # which the grammar forbids
            return logits

    with pytest.raises(EngineError, match=r"^the engine gave 1 logits that are NaN"):
        said(Poisoned(0), tokenizer, grammars.start(Grammar("regex", "yes")))

    class Shut(Random):
        def feed(self, session: object, ids: Any) -> np.ndarray:
            logits = super().feed(session, ids)
            logits[ord("y")] = -np.inf
            return logits

    with pytest.raises(EngineError, match=r"^the logits of all ids that the grammar allows are -inf"):
        said(Shut(0), tokenizer, grammars.start(Grammar("regex", "yes")))


CIRCLE = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
REFUSED: dict[str, tuple[Any, str]] = {
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "does not support uniqueItems;"),
    "all at once": ({"items": {"not": {}, "if": {}}, "uniqueItems": True}, "does not support uniqueItems, if, not;"),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "a"}}, "does not support propertyNames;"),
    "format": ({"type": "string", "format": "banana"}, "Unknown format: banana;"),
    "type": ({"type": "banana"}, "Invalid type: banana;"),
    "empty enum": ({"enum": []}, "Unsatisfiable schema: anyOf is empty;"),
    "min above max": ({"type": "integer", "minimum": 3, "maximum": 1}, "minimum (3) is greater than maximum (1);"),
    "not an object": ([1], "it is a JSON list and not an object;"),
    "remote": ({"$ref": "https://example.com/s.json"}, "is not present in a registry"),
    "nowhere": ({"$ref": "#/nowhere"}, "Pointer '/nowhere' does not exist;"),
    "circle": ({"$ref": "#"}, "the $ref at # describes nothing that ends;"),
    "inner circle": ({"properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": CIRCLE}, "$ref at #/properties/x describes"),
    "endless": ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "the $ref at #/properties/a describes"),
    "endless array": ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "the $ref at #/items describes"),
    "options": ({"type": "object", "x-guidance": {"lenient": True}}, "x-guidance at # is not a keyword"),
    "repeated keys": ({"items": {"minProperties": 2}}, "minProperties 2 at #/items, where 0 are required,"),
    "control": ({"const": "\x01"}, "#/const holds a control character, which is never written;"),
    "control in a name": ({"properties": {"\x02": {}}}, "a name at #/properties holds a control character"),
    "look-around": ({"type": "string", "pattern": "^(?=a)b"}, "look-around"),
    "size": ({"enum": ["x" * MAX_BYTES]}, f"and {MAX_BYTES} are the most;"),
    "depth": (None, "recursion limit exceeded"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_schema_that_cannot_be_kept_is_refused_by_name(case: str, grammars: Grammars) -> None:
    schema, why = REFUSED[case]
    text = '{"items":' * 500 + "{}" + "}" * 500 if schema is None else json.dumps(schema)
    with pytest.raises(RequestError) as refusal:
        grammars.start(Grammar("schema", text))
    message = str(refusal.value)
    assert message.startswith("this JSON schema cannot be used: ") and message.endswith("; change it.")
    assert why in message and "\n" not in message


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar("schema", "{"), "this JSON schema cannot be used: it is not JSON"),
        (Grammar("regex", "("), "this regex cannot be used: at 1(8): invalid regex"),
        (Grammar("regex", "[^\\s\\S]"), "this regex cannot be used: no text can keep to it; change it."),
        (Grammar("lark", "start: foo"), 'this grammar cannot be used: at 1(8): unknown name: "foo"'),
        (Grammar("lark", "a" * MAX_BYTES + "b"), f"this grammar cannot be used: it has {MAX_BYTES + 1} bytes"),
    ],
)  # fmt: skip
def test_other_refusals(grammar: Grammar, message: str, grammars: Grammars) -> None:
    with pytest.raises(RequestError, match=f"^{re.escape(message)}"):
        grammars.start(grammar)
    with pytest.raises(RequestError, match=r"^this JSON schema cannot be used: it is not plain JSON data"):
        Grammar.schema({"const": float("nan")})


def test_recursion_that_ends_is_kept(grammars: Grammars, tokenizer: Tokenizer) -> None:
    properties = {"v": {"type": "boolean"}, "next": {"$ref": "#"}}
    schema = {"type": "object", "properties": properties, "required": ["v"], "additionalProperties": False}
    for seed in range(8):
        tokens = said(Random(seed), tokenizer, grammars.start(Grammar.schema(schema)), 500)
        if tokens[-1].finish == "stop":
            Draft202012Validator(schema).validate(json.loads(text_of(tokens)))


def _chains() -> Iterator[Grammar]:
    n = 2700
    definitions = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(n)} | {f"d{n}": {}}
    yield Grammar.schema({"$defs": definitions, "$ref": "#/$defs/d0"})
    yield Grammar("lark", "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(9500)) + 'r9500: "a"')


def test_long_chains_of_references_do_not_end_the_process(grammars: Grammars) -> None:
    for grammar in _chains():
        assert 0.8 * MAX_BYTES < len(grammar.text) <= MAX_BYTES
        assert grammars.start(grammar).allowed().any()


def test_a_kept_grammar_starts_anew(tokenizer: Tokenizer) -> None:
    grammars, grammar = Grammars(tokenizer), Grammar("regex", "ab")
    first = grammars.start(grammar)
    first.accept(ord("a"))
    assert np.flatnonzero(first.allowed()).tolist() == [ord("b")]
    assert np.flatnonzero(grammars.start(grammar).allowed()).tolist() == [ord("a")]
    for number in range(100):
        grammars.start(Grammar("regex", f"x{number}"))
    assert len(grammars._compiled) == 32


@pytest.mark.parametrize(
    "document", ['{"\\u0022": "x"}', '{"\\u0061": "x"}', '{"a": 1, "a": 2}', '{"a":  1}', '{"a": "\\/"}']
)
def test_a_name_has_one_spelling(document: str, grammars: Grammars) -> None:
    schema = {"properties": {'"': {"type": "integer"}, "a": {"type": "integer"}}}
    constraint = grammars.start(Grammar.schema(schema))
    for byte in document.encode():
        if not constraint.allowed()[byte]:
            return
        constraint.accept(byte)
    pytest.fail(f"{document} was accepted")


def test_a_tokenizer_whose_texts_differ_is_refused(tokenizer: Tokenizer) -> None:
    rules = replace(tokenizer.vocabulary.rules, form="text")
    vocabulary = copy.copy(tokenizer.vocabulary)
    vocabulary.rules = rules
    with pytest.raises(RequestError, match=r"tokenizer cannot be constrained by a grammar: \d+ of its tokens"):
        Grammars(replace(tokenizer, vocabulary=vocabulary))
