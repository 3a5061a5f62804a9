"""Prefill and decode: a prompt's token ids become an iterator of Token."""

import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Literal

import numpy as np

from anechain.errors import RequestError
from anechain.run.chain import Chain, Session
from anechain.run.detokenizer import Detokenizer
from anechain.run.grammar import Constraint
from anechain.run.sample import Sampler, Sampling, log_probabilities
from anechain.run.tokenizer import Tokenizer


@dataclass(frozen=True)
class Token:
    """One generated token. `text` is what can be printed now (possibly nothing, when a character is not complete).

    `ms` is the time that it took, without what the caller did between two tokens. `finish` is None except on the last
    token: "stop" for an end-of-sequence token, which has no text of its own, or where a grammar is complete; "length"
    at the limit or at the end of the context. The last token's `text` ends with U+FFFD where a character was not
    completed.
    """

    id: int
    text: str
    ms: float
    finish: Literal["stop", "length"] | None = None
    ranking: "Ranking | None" = None


@dataclass(frozen=True)
class Ranking:
    """How likely a token was to the model itself, and the likeliest ones in its place: ids and natural logarithms."""

    logprob: float
    top: tuple[tuple[int, float], ...]


def ranking(logits: np.ndarray, n_ids: int, token: int, count: int) -> Ranking:
    """The rank of `token` in `logits` [V], and the `count` likeliest of the tokenizer's ids. Raises EngineError."""
    values = log_probabilities(logits, n_ids)[:n_ids]
    best = np.argsort(-values, kind="stable")[:count] if count else np.empty(0, np.int64)
    return Ranking(float(values[token]), tuple((int(i), float(values[i])) for i in best))


def generate(
    chain: Chain,
    session: Session,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    sampling: Sampling,
    max_tokens: int,
    stop: Set[int] | None = None,
    constraint: Constraint | None = None,
    rank: int | None = None,
) -> Iterator[Token]:
    """Feeds `prompt` and yields what follows: at most `max_tokens`, and until prompt and answer fill the context.

    The first token's `ms` includes the prompt. Every yielded token but the last has been fed to the session. `stop`
    holds the ids that end it, by default the tokenizer's end-of-sequence ids. With a fresh `constraint` the answer
    keeps to its grammar, and is whole unless it ends by "length". With `rank`, every token carries its Ranking among so
    many. Raises RequestError, at once, when the prompt is
    empty or leaves no room for an answer.
    """
    if max_tokens < 1:
        raise RequestError(f"--max-tokens {max_tokens} is not a whole number of at least 1.")
    if not len(prompt):
        raise RequestError("the prompt has no tokens: give some text.")
    if len(prompt) >= chain.room(session):
        raise RequestError(
            f"the prompt has {len(prompt)} tokens and the context of {chain.bundle.context} has room for "
            f"{chain.room(session)}, answer included: shorten the prompt or bake with a larger --context."
        )
    ends = tokenizer.eos_ids if stop is None else stop
    sampler, stream = Sampler(sampling, tokenizer.n_ids), tokenizer.stream(prompt)
    return _tokens(chain, session, prompt, sampler, stream, max_tokens, ends, constraint, rank)


def _tokens(
    chain: Chain,
    session: Session,
    prompt: Sequence[int],
    sampler: Sampler,
    stream: Detokenizer,
    max_tokens: int,
    ends: Set[int],
    constraint: Constraint | None,
    rank: int | None,
) -> Iterator[Token]:
    fed = prompt
    for count in range(1, max_tokens + 1):
        started = time.perf_counter()
        logits = chain.feed(session, fed)
        token = sampler.choose(logits, constraint.allowed() if constraint else None)
        finish: Literal["stop", "length"] | None = None
        if token in ends or (constraint and _completes(constraint, token)):
            finish = "stop"
        elif count == max_tokens or chain.room(session) == 1:
            finish = "length"
        text = "" if token in ends else stream.feed(token)
        text += stream.flush() if finish else ""
        ranked = None if rank is None else ranking(logits, sampler.n_ids, token, rank)
        yield Token(token, text, (time.perf_counter() - started) * 1e3, finish, ranked)
        if finish:
            return
        fed = [token]


def _completes(constraint: Constraint, token: int) -> bool:
    constraint.accept(token)
    return constraint.complete
