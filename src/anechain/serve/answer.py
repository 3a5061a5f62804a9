"""A planned request becomes Deltas, a step of the chain at a time: what streams and whole answers are both made of."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from anechain.run.chain import Chain, Session
from anechain.run.generate import Ranking, Token, generate, ranking
from anechain.run.grammar import Constraint
from anechain.run.sample import Sampling
from anechain.run.tokenizer import Tokenizer
from anechain.run.tool_calls import CALL, calls_in
from anechain.serve.prefixes import Prefixes
from anechain.serve.stops import Held
from anechain.serve.thinking import Thinking

PIECE = 16  # tokens of a prompt in one step, where the bundle has no prefill
Finish = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class Entry:
    """A token with its rank; None for the first of a prompt, which nothing came before."""

    id: int
    ranking: Ranking | None


@dataclass(frozen=True)
class Delta:
    """What is new of one choice. `tokens` were generated; `cached` prompt tokens did not have to be fed."""

    choice: int
    text: str = ""
    thought: str = ""
    entries: tuple[Entry, ...] = ()
    calls: tuple[tuple[str, str], ...] = ()
    finish: Finish | None = None
    tokens: int = 0
    cached: int = 0


@dataclass(frozen=True)
class Plan:
    """A request that has been checked. Every prompt is answered `n` times; `limit` None is as long as the context."""

    prompts: tuple[tuple[int, ...], ...]
    n: int
    sampling: Sampling
    limit: int | None
    stops: tuple[str, ...] = ()
    constraint: Callable[[], Constraint] | None = None
    rank: int | None = None
    echo: tuple[str, ...] | None = None  # the text of every prompt, when it is part of the answer
    thinking: tuple[bool, bool] = (False, False)  # inside, possible
    tools: Literal["none", "free", "call"] = "none"
    ends_ranked: bool = False  # an end-of-sequence token has an entry, too
    started: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Parts:
    """What answering takes; all of it belongs to the worker's thread."""

    chain: Chain
    tokenizer: Tokenizer
    prefixes: Prefixes


def answer(parts: Parts, plan: Plan) -> Iterator[Delta | None]:
    """Deltas, and None after a step that has no text. Raises what `generate` raises."""
    for number, prompt in enumerate(plan.prompts):
        for again in range(plan.n):
            choice, seed = number * plan.n + again, plan.sampling.seed
            sampling = plan.sampling if seed is None else replace(plan.sampling, seed=seed + again)
            yield from _choice(parts, plan, choice, number, list(prompt), sampling)


def _choice(
    parts: Parts, plan: Plan, choice: int, number: int, prompt: list[int], sampling: Sampling
) -> Iterator[Delta | None]:
    chain, tokenizer = parts.chain, parts.tokenizer
    ranked = plan.echo is not None and plan.rank is not None
    session = chain.start() if ranked else parts.prefixes.start(prompt)
    cached = session.position if choice == number * plan.n else 0  # usage counts a prompt once, whatever `n`
    if ranked:
        entries = [Entry(prompt[0], None)]
        for logits, token_id in zip(chain.feed_each(session, prompt[:-1] or prompt), prompt[1:], strict=False):
            entries.append(Entry(token_id, ranking(logits, tokenizer.n_ids, token_id, plan.rank or 0)))
            yield None
        if len(prompt) == 1:
            session = chain.start()
        yield Delta(choice, plan.echo[number] if plan.echo else "", entries=tuple(entries))
    else:
        yield from _prefill(parts, session, prompt)
        yield Delta(choice, plan.echo[number] if plan.echo else "", cached=cached)
    if plan.limit == 0:
        yield Delta(choice, finish="length")
        return
    limit = plan.limit or chain.bundle.context
    constraint = plan.constraint() if plan.constraint else None
    before, rest = prompt[: session.position], prompt[session.position :]
    tokens = generate(
        chain, session, tokenizer, rest, sampling, limit, constraint=constraint, rank=plan.rank, before=before
    )
    shown = _Shown(plan, choice, tokenizer)
    for token in tokens:
        delta = shown.feed(token)
        yield delta
        if delta is not None and delta.finish:
            return


def _prefill(parts: Parts, session: Session, prompt: Sequence[int]) -> Iterator[None]:
    """Feeds the prompt's whole chunks but the last token, cut as `Chain.feed` cuts them, and keeps that state."""
    piece = parts.chain.bundle.prefill or PIECE
    fed = session.position
    while len(prompt) - session.position > piece:
        parts.chain.feed(session, prompt[session.position : session.position + piece])
        yield None
    if session.position > fed:
        parts.prefixes.keep(prompt, session)


class _Shown:
    """The tokens of one choice as Deltas: thinking apart, stop strings held back, calls read."""

    def __init__(self, plan: Plan, choice: int, tokenizer: Tokenizer) -> None:
        self._plan, self._choice, self._ends = plan, choice, tokenizer.eos_ids
        self._thinking, self._held = Thinking(*plan.thinking), Held(plan.stops)
        # Before a tagged call comes free text; an untagged call is the whole answer.
        self._free = Held([CALL]) if plan.tools == "free" else None
        self._called = ""
        self._entries: list[tuple[int, Entry]] = []  # with the number of characters before each
        self._seen = 0

    def feed(self, token: Token) -> Delta | None:
        thought, text = self._thinking.feed(token.text)
        if token.finish:
            more = self._thinking.flush()
            thought, text = thought + more[0], text + more[1]
        if token.ranking and (token.id not in self._ends or self._plan.ends_ranked):
            self._entries.append((self._seen, Entry(token.id, token.ranking)))
        self._seen += len(text)
        shown = self._held.feed(text)
        finish: Finish | None = "stop" if self._held.stopped else token.finish
        if finish:
            shown += self._held.flush()
        entries = self._ready(finish)
        calls: tuple[tuple[str, str], ...] = ()
        if self._plan.tools != "none":
            shown = self._without_calls(shown, finish)
            if finish:
                calls = tuple(calls_in(self._called)) if self._called else ()
                finish = "tool_calls" if calls and finish == "stop" else finish
        return Delta(self._choice, shown, thought, entries, calls, finish, tokens=1)

    def _without_calls(self, text: str, finish: Finish | None) -> str:
        if self._plan.tools == "call":
            self._called += text
            return ""
        assert self._free is not None
        if self._free.stopped:
            self._called += text
            return ""
        before = self._free.pending + text
        shown = self._free.feed(text) + (self._free.flush() if finish else "")
        self._called = before[len(shown) :] if self._free.stopped else ""
        return shown

    def _ready(self, finish: Finish | None) -> tuple[Entry, ...]:
        """The entries of what is shown by now: those of a stop string are not among them."""
        last = finish is not None and not self._held.stopped
        ready = [entry for begin, entry in self._entries if last or begin < self._held.shown]
        self._entries = self._entries[len(ready) :]
        return tuple(ready)
