"""A conversation that keeps its keys and values: each turn feeds only what the chain has not seen yet."""

from collections.abc import Iterator, Mapping
from typing import Any

from anechain.errors import RequestError
from anechain.run.chain import Chain
from anechain.run.chat import ChatTemplate, opens_thinking
from anechain.run.generate import Token, generate
from anechain.run.grammar import Grammar, Grammars
from anechain.run.sample import Sampling
from anechain.run.tokenizer import Tokenizer


class Conversation:
    """Messages, and one session that has seen a prefix of their ids.

    A template may rewrite earlier turns (drop the reasoning of an answer, say). So each turn renders the whole
    conversation, goes back to where its ids part from what was fed, and feeds the rest: the answer is that of a fresh
    start. Cells beyond a session's position are masked, so going back is nothing but setting it.
    """

    def __init__(
        self,
        chain: Chain,
        tokenizer: Tokenizer,
        sampling: Sampling,
        system: str | None = None,
        variables: Mapping[str, Any] | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        """`variables` are handed to the template. Every answer keeps to `grammar`, after its thinking if there is any.

        Raises RequestError if the tokenizer has no chat template, or for a grammar that cannot be used.
        """
        self._chain, self._tokenizer, self._sampling = chain, tokenizer, sampling
        self._template, self._variables = ChatTemplate(tokenizer), dict(variables or {})
        self._system, self._grammar = system, grammar
        self._grammars = Grammars(tokenizer) if grammar else None
        if self._grammars and grammar:
            self._grammars.start(grammar)
        self.reset()

    def reset(self) -> None:
        """Forgets everything but the system prompt."""
        self.messages: list[dict[str, str]] = []
        if self._system is not None:
            self.messages.append({"role": "system", "content": self._system})
        self._session, self._fed = self._chain.start(), list[int]()

    def say(self, text: str, max_tokens: int) -> Iterator[Token]:
        """Adds the user's `text` and yields the answer, which becomes part of the conversation, cut off or not.

        Raises RequestError, the conversation as it was, when the context has no room for the turn and an answer.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        rendered = self._template.render(messages, variables=self._variables)
        ids = self._tokenizer.encode(rendered, add_special=False)
        if len(ids) >= self._chain.bundle.context:
            raise RequestError(
                f"the context is full: the conversation takes {len(ids)} of {self._chain.bundle.context} tokens and "
                "leaves no room for an answer; start a new one, or bake with a larger --context."
            )
        constraint = None
        if self._grammars and self._grammar:
            constraint = self._grammars.start(self._grammar, opens_thinking(rendered))
        self._session.position = seen = self._common(ids)
        chain, session, sampling = self._chain, self._session, self._sampling
        answer: list[Token] = []
        try:
            for token in generate(
                chain, session, self._tokenizer, ids[seen:], sampling, max_tokens, constraint=constraint
            ):
                answer.append(token)
                yield token
        finally:
            self._fed = (ids + [t.id for t in answer])[: self._session.position]
            if answer:
                self.messages = [*messages, {"role": "assistant", "content": "".join(t.text for t in answer)}]

    def _common(self, ids: list[int]) -> int:
        """How many of `ids` the session has seen, one less than all: the last one is fed for its logits."""
        same = next((i for i, (a, b) in enumerate(zip(self._fed, ids, strict=False)) if a != b), len(self._fed))
        return min(same, len(ids) - 1)
