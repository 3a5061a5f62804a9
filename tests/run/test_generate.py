"""Generation: where it ends, what it says, what it has fed when it has said it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from anechain.bundle.manifest import TOKENIZER
from anechain.errors import RequestError
from anechain.run import generate as generate_module
from anechain.run.chain import Chain
from anechain.run.generate import Token, generate
from anechain.run.reference import ReferenceEngine
from anechain.run.sample import Sampling
from anechain.run.tokenizer import Tokenizer
from tests.bundle_maker import make_bundle, tiny_source
from tests.tiny import EOS, IM_END

CONTEXT = 32
GREEDY = Sampling()
NEVER: frozenset[int] = frozenset()


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    out = tmp_path_factory.mktemp("bundles") / "b"
    return Chain(make_bundle(tiny_source("qwen3"), out, "fp16", CONTEXT, 32), ReferenceEngine())


@pytest.fixture(scope="module")
def tokenizer(chain: Chain) -> Tokenizer:
    return Tokenizer.load(chain.bundle.path / TOKENIZER)


@dataclass
class Scripted:
    """A chain that says `answer` whatever it is fed."""

    answer: Sequence[int]
    context: int = 64
    fed: list[list[int]] = field(default_factory=list)

    @property
    def bundle(self) -> Any:
        return SimpleNamespace(context=self.context)

    def room(self, session: object) -> int:
        return self.context - sum(map(len, self.fed))

    def feed(self, session: object, ids: Sequence[int]) -> np.ndarray:
        self.fed.append(list(ids))
        return np.eye(320, dtype=np.float32)[self.answer[len(self.fed) - 1]]


def said(answer: Sequence[int], tokenizer: Tokenizer, prompt: str = "x", **options: Any) -> list[Token]:
    return list(generate(Scripted(answer), None, tokenizer, tokenizer.encode(prompt), GREEDY, 64, **options))


def plain_greedy(chain: Chain, tokenizer: Tokenizer, prompt: Sequence[int], n: int) -> list[int]:
    """The same in the plainest way: all of it is fed anew for every token."""
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(np.argmax(chain.feed(chain.start(), ids)[: tokenizer.n_ids])))
    return ids[len(prompt) :]


@pytest.mark.parametrize(("length", "answer"), [(30, 2), (31, 1), (8, 24), (1, 31)])
def test_prompt_and_answer_fill_the_context(length: int, answer: int, chain: Chain, tokenizer: Tokenizer) -> None:
    prompt = list(range(40, 40 + length))
    session = chain.start()
    tokens = list(generate(chain, session, tokenizer, prompt, GREEDY, 1000, NEVER))
    assert len(tokens) == answer and length + answer == CONTEXT
    assert [t.finish for t in tokens] == [None] * (answer - 1) + ["length"]
    assert session.position == CONTEXT - 1, "all but the last are fed"
    assert [t.id for t in tokens][:5] == plain_greedy(chain, tokenizer, prompt, min(answer, 5))


@pytest.mark.parametrize("length", [32, 33])
def test_a_prompt_that_leaves_no_room_is_refused_at_once(length: int, chain: Chain, tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError) as refusal:
        generate(chain, chain.start(), tokenizer, [65] * length, GREEDY, 5)
    assert str(refusal.value) == (
        f"the prompt has {length} tokens and the context of 32 has room for 32, answer included: shorten the prompt or "
        "bake with a larger --context."
    )


def test_a_second_turn_goes_on_where_the_first_ended(chain: Chain, tokenizer: Tokenizer) -> None:
    session = chain.start()
    first = [t.id for t in generate(chain, session, tokenizer, [65, 66, 67], GREEDY, 3, NEVER)]
    assert session.position == 3 + 2
    turn = [first[-1], 70, 71]
    second = [t.id for t in generate(chain, session, tokenizer, turn, GREEDY, 4, NEVER)]
    assert second == plain_greedy(chain, tokenizer, [65, 66, 67, *first[:-1], *turn], 4)
    with pytest.raises(RequestError, match=r"^the prompt has 21 tokens and the context of 32 has room for 21, answer"):
        generate(chain, session, tokenizer, [65] * 21, GREEDY, 1)
    assert len(list(generate(chain, session, tokenizer, [65] * 20, GREEDY, 5, NEVER))) == 1


def test_other_refusals(chain: Chain, tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"^--max-tokens 0 is not a whole number of at least 1\.$"):
        generate(chain, chain.start(), tokenizer, [65], GREEDY, 0)
    with pytest.raises(RequestError, match=r"^the prompt has no tokens: give some text\.$"):
        generate(chain, chain.start(), tokenizer, [], GREEDY, 1)
    with pytest.raises(RequestError, match=r"^token id 300 is not in the tokenizer"):
        generate(chain, chain.start(), tokenizer, [300], GREEDY, 1)


def test_the_limit(tokenizer: Tokenizer) -> None:
    for limit in (1, 4):
        chain = Scripted([65, 66, 67, 68, 69])
        tokens = list(generate(chain, None, tokenizer, [1, 2], GREEDY, limit))
        assert [t.id for t in tokens] == [65, 66, 67, 68][:limit]
        assert [t.finish for t in tokens] == [None] * (limit - 1) + ["length"]
        assert chain.fed == [[1, 2], [65], [66], [67]][:limit]


def test_an_end_token_stops_without_a_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_ids == {EOS, IM_END}
    for end in (EOS, IM_END):
        tokens = said([72, 105, end, 65], tokenizer)
        assert [(t.id, t.text, t.finish) for t in tokens] == [(72, "H", None), (105, "i", None), (end, "", "stop")]
    tokens = said([72, 105, EOS, 65], tokenizer, stop=frozenset({105}))
    assert [(t.id, t.text, t.finish) for t in tokens] == [(72, "H", None), (105, "", "stop")]
    assert len(said([EOS] * 64, tokenizer, stop=NEVER)) == 63


def test_an_end_token_at_the_limit_is_a_stop(tokenizer: Tokenizer) -> None:
    chain = Scripted([65, EOS], context=4)
    tokens = list(generate(chain, None, tokenizer, [1, 2], GREEDY, 2))
    assert [(t.text, t.finish) for t in tokens] == [("A", None), ("", "stop")]


def test_the_stream_is_the_text(tokenizer: Tokenizer) -> None:
    text = "Grüße, 日本 🌊!"
    ids = tokenizer.encode(text)
    assert len(ids) > len(text), "characters of several tokens are what this is about"
    tokens = said([*ids, EOS], tokenizer)
    assert "".join(t.text for t in tokens) == tokenizer.decode(ids) == text
    assert any(not t.text for t in tokens[:-1]) and not any("\ufffd" in t.text for t in tokens)


def test_a_character_that_is_not_completed_shows_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("日本")[:4]
    for answer, options in (([*ids, EOS], {}), ([*ids[:-1], ids[-1]], {"stop": NEVER})):
        chain = Scripted(answer)
        tokens = list(generate(chain, None, tokenizer, [65], GREEDY, len(answer), **options))
        assert "".join(t.text for t in tokens) == tokenizer.decode(ids) == "日\ufffd"
        assert tokens[-1].text == "\ufffd"


def test_a_seed_repeats_and_another_does_not(chain: Chain, tokenizer: Tokenizer) -> None:
    def drawn(seed: int | None) -> list[int]:
        sampling = Sampling(temperature=1.5, seed=seed)
        return [t.id for t in generate(chain, chain.start(), tokenizer, [65, 66], sampling, 12, NEVER)]

    once = drawn(7)
    assert drawn(7) == once and len(once) == 12
    assert drawn(8) != once and drawn(None) != drawn(None)
    assert max(once) < tokenizer.n_ids < 320, "rows of the head without a token are never drawn"


def test_a_token_takes_the_time_of_the_chain_not_of_the_caller(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = count()
    monkeypatch.setattr(generate_module.time, "perf_counter", lambda: next(clock) * 0.25)
    times = []
    for token in generate(Scripted([65] * 9), None, tokenizer, [1], GREEDY, 4):
        times.append(token.ms)
        for _ in range(40):
            generate_module.time.perf_counter()  # the caller takes ten seconds
    assert times == [250.0] * 4


def test_a_caller_that_stops_early_leaves_a_session_to_go_on_with(chain: Chain, tokenizer: Tokenizer) -> None:
    session = chain.start()
    tokens = generate(chain, session, tokenizer, [65, 66], GREEDY, 10, NEVER)
    first, second = next(tokens), next(tokens)
    tokens.close()
    assert session.position == 3, "the prompt and the first token"
    rest = [t.id for t in generate(chain, session, tokenizer, [second.id], GREEDY, 3, NEVER)]
    assert [first.id, second.id, *rest] == plain_greedy(chain, tokenizer, [65, 66], 5)
