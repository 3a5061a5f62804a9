"""A conversation says what a fresh start over the same messages says, and feeds only what is new."""

from dataclasses import replace
from pathlib import Path

import pytest

from anechain.bundle.manifest import TOKENIZER
from anechain.errors import RequestError
from anechain.run.chain import Chain
from anechain.run.conversation import Conversation
from anechain.run.reference import ReferenceEngine
from anechain.run.sample import Sampling
from anechain.run.tokenizer import Tokenizer
from tests.bundle_maker import make_bundle, tiny_source

CONTEXT = 128
# The second one does what reasoning templates do: it cuts earlier answers short.
PLAIN = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}a:"
CUTTING = "{% for m in messages %}{{ m.role[0] }}:{{ m.content[:3] }}\n{% endfor %}a:"


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    out = tmp_path_factory.mktemp("bundles") / "b"
    return Chain(make_bundle(tiny_source("qwen3"), out, "fp16", CONTEXT, 32), ReferenceEngine())


@pytest.fixture
def tokenizer(chain: Chain) -> Tokenizer:
    return replace(Tokenizer.load(chain.bundle.path / TOKENIZER), chat_templates={"default": PLAIN})


class Counting:
    """A chain that counts the tokens that it is fed."""

    def __init__(self, chain: Chain) -> None:
        self.chain, self.bundle, self.start, self.room = chain, chain.bundle, chain.start, chain.room
        self.fed = 0

    def feed(self, session, ids):  # type: ignore[no-untyped-def]
        self.fed += len(ids)
        return self.chain.feed(session, ids)


def answer(conversation: Conversation, text: str, max_tokens: int = 6) -> list[int]:
    return [token.id for token in conversation.say(text, max_tokens)]


@pytest.mark.parametrize("template", [PLAIN, CUTTING], ids=["plain", "cutting"])
def test_each_turn_is_that_of_a_fresh_start(chain: Chain, tokenizer: Tokenizer, template: str) -> None:
    tokenizer = replace(tokenizer, chat_templates={"default": template})
    kept = Conversation(chain, tokenizer, Sampling(), system="be")
    for text in ("one", "two", "three"):
        fresh = Conversation(chain, tokenizer, Sampling(), system="be")
        fresh.messages = list(kept.messages)
        assert answer(kept, text) == answer(fresh, text)
        assert kept.messages == fresh.messages
    assert [m["role"] for m in kept.messages] == ["system"] + ["user", "assistant"] * 3


def test_what_the_chain_has_seen_is_not_fed_again(chain: Chain, tokenizer: Tokenizer) -> None:
    counting = Counting(chain)
    conversation = Conversation(counting, tokenizer, Sampling())  # type: ignore[arg-type]
    answer(conversation, "first words")
    first = counting.fed
    answer(conversation, "more")
    # What is new: the answer's last token, which was not fed, the turn around "more", and five tokens of the answer. An
    # answer whose bytes are no text comes back as other ids, and is then fed again from where they part.
    assert first > 0 and counting.fed - first <= 6 + len("\nu:more\na:") + 5
    whole = len(tokenizer.encode("u:first words\na:"))
    assert counting.fed - first < whole + 6 + len("\nu:more\na:") + 5


def test_an_answer_that_is_cut_off_stays_what_was_said(chain: Chain, tokenizer: Tokenizer) -> None:
    conversation = Conversation(chain, tokenizer, Sampling())
    stream = conversation.say("one", 20)
    heard = [next(stream), next(stream)]
    stream.close()  # type: ignore[attr-defined]
    assert conversation.messages[-1] == {"role": "assistant", "content": "".join(t.text for t in heard)}
    fresh = Conversation(chain, tokenizer, Sampling())
    fresh.messages = list(conversation.messages)
    assert answer(conversation, "two") == answer(fresh, "two")


def test_reset_forgets_all_but_the_system_prompt(chain: Chain, tokenizer: Tokenizer) -> None:
    conversation = Conversation(chain, tokenizer, Sampling(), system="be")
    first = answer(conversation, "one")
    answer(conversation, "two")
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "be"}]
    assert answer(conversation, "one") == first


def test_a_full_context_is_said_and_changes_nothing(chain: Chain, tokenizer: Tokenizer) -> None:
    conversation = Conversation(chain, tokenizer, Sampling())
    answer(conversation, "one")
    before = list(conversation.messages)
    with pytest.raises(RequestError, match=r"context is full: the conversation takes \d+ of 128 tokens"):
        answer(conversation, "x" * CONTEXT)
    assert conversation.messages == before
    fresh = Conversation(chain, tokenizer, Sampling())
    fresh.messages = list(before)
    assert answer(conversation, "two") == answer(fresh, "two")


def test_a_model_without_a_template_cannot_chat(chain: Chain, tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no chat template"):
        Conversation(chain, replace(tokenizer, chat_templates={}), Sampling())


def test_the_same_turn_again_after_an_answer_that_failed(
    chain: Chain, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the prompt has been fed, and nothing was said: its last token is fed again for the logits."""
    conversation = Conversation(chain, tokenizer, Sampling())
    with monkeypatch.context() as patch:
        patch.setattr("anechain.run.sample.Sampler.choose", lambda *_: (_ for _ in ()).throw(RuntimeError("lost")))
        with pytest.raises(RuntimeError, match="lost"):
            answer(conversation, "one")
    assert conversation.messages == []
    assert answer(conversation, "one") == answer(Conversation(chain, tokenizer, Sampling()), "one")
