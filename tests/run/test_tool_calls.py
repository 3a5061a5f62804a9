"""A grammar with free text before a call, where the tags are text, and where each is one token."""

import json

import pytest
from tokenizers import AddedToken

from anechain.errors import RequestError
from anechain.run.grammar import Grammar, Grammars
from anechain.run.tokenizer import Tokenizer
from anechain.run.tool_calls import CALL, CALL_END, call_schema, calls_in, free_or_call
from tests.bundle_maker import tokenizer_files
from tests.tiny import EOS

FUNCTIONS = {
    "f": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False},
    "g": {"$defs": {"n": {"const": 7}}, "type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2},
}
GOOD = '{"name": "f", "arguments": {"x": 3}}'


@pytest.fixture(scope="module", params=["text", "tokens"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    for name, content in tokenizer_files().items():
        (folder / name).write_bytes(content)
    loaded = Tokenizer.load(folder)
    if request.param == "tokens":
        tags = (CALL, CALL_END, "<think>", "</think>")
        loaded.library.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
        loaded.library.save(str(folder / "tokenizer.json"))
        loaded = Tokenizer.load(folder)
        assert loaded.n_ids == 264 and loaded.decode(loaded.encode(f"a{CALL}b")) == f"a{CALL}b"
    return loaded


def accepted(tokenizer: Tokenizer, grammar: Grammar, text: str, after_thinking: bool = False) -> str:
    """ "whole", "open" (it may go on but not end), or what is left of the text where it leaves the grammar."""
    constraint = Grammars(tokenizer).start(grammar, after_thinking)
    ids = tokenizer.encode(text, add_special=False)
    for place, token_id in enumerate(ids):
        if not constraint.allowed()[token_id]:
            return tokenizer.decode(ids[place:])
        constraint.accept(token_id)
    return "whole" if constraint.complete or constraint.allowed()[EOS] else "open"


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("", "whole"),
        ("just <b>text</b> {}", "whole"),
        (f"{CALL}{GOOD}{CALL_END}", "whole"),
        (f"Well. {CALL}\n{GOOD}\n{CALL_END}", "whole"),
        (f"{CALL}{GOOD}", "open"),
        (f'{CALL}{{"name": "h"', 'h"'),
        (f'{CALL}{{"name": "f", "arguments": {{"y"', 'y"'),
        (f'{CALL}{{"name": "g", "arguments": [7, 7]}}{CALL_END}', "whole"),
        (f'{CALL}{{"name": "g", "arguments": [8', "8"),
        (f"{CALL}{GOOD}{CALL_END}{CALL}{GOOD}{CALL_END}", "whole"),
        (f"{CALL}{GOOD}{CALL_END} and", " and"),
    ],
)
def test_free_text_and_calls(text: str, result: str, tokenizer: Tokenizer) -> None:
    assert accepted(tokenizer, free_or_call(FUNCTIONS, tokenizer, several=True), text) == result


def test_one_call_alone(tokenizer: Tokenizer) -> None:
    single = free_or_call(FUNCTIONS, tokenizer, several=False)
    assert accepted(tokenizer, single, f"{CALL}{GOOD}{CALL_END}") == "whole"
    assert accepted(tokenizer, single, f"{CALL}{GOOD}{CALL_END}{CALL}").startswith(CALL[:1])


def test_a_call_after_thinking(tokenizer: Tokenizer) -> None:
    grammar = Grammar.schema(call_schema(FUNCTIONS))
    assert accepted(tokenizer, grammar, f"hm, {{</think>{GOOD}", after_thinking=True) == "whole"
    assert accepted(tokenizer, grammar, "hm, {", after_thinking=True) == "open"
    assert accepted(tokenizer, grammar, "hm</think>no", after_thinking=True) == "no"


def test_calls_are_read() -> None:
    both = f"{CALL}\n{GOOD}\n{CALL_END}\n{CALL}{json.dumps({'name': 'g', 'arguments': ['é']})}{CALL_END}"
    assert calls_in(both) == [("f", '{"x": 3}'), ("g", '["é"]')]
    assert calls_in(GOOD) == [("f", '{"x": 3}')]
    assert calls_in(f"{CALL}{GOOD[:-4]}") == calls_in("[1]") == calls_in("") == []


def test_a_tool_that_cannot_be_kept_is_named() -> None:
    with pytest.raises(
        RequestError, match=r"^the parameters of k: this JSON schema cannot be used: minProperties 2 at #"
    ):
        call_schema({"f": FUNCTIONS["f"], "k": {"minProperties": 2}})
