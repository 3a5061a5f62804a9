"""States of prompts that were fed lately, by their ids: a conversation that goes on feeds only what is new.

An answer after a hit is the cold one, bit for bit. Floating point sums depend on how a prompt is cut, so only whole
chunks of the prefill are kept and used again: they are cut as a cold start cuts them. At least one token is always fed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from anechain.run.chain import Chain, Session


@dataclass
class _Entry:
    ids: list[int]
    session: Session
    bytes: int


class Prefixes:
    """At most `limit_bytes` of states, the least recently used go first. Used by the worker's thread alone."""

    def __init__(self, chain: Chain, limit_bytes: int) -> None:
        spec = chain.bundle.spec
        self._chain, self._limit_bytes = chain, limit_bytes
        self._bytes_per_token = spec.n_layers * 2 * spec.n_kv_heads * spec.head_dim * 4  # fp16, in fp32 at the most
        self._entries: list[_Entry] = []  # the one used last is last
        self.hits = self.misses = 0

    @property
    def chunk(self) -> int:
        """Tokens of what is kept come in multiples of this."""
        return self._chain.bundle.prefill or 1

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self._entries)

    def start(self, ids: Sequence[int]) -> Session:
        """A session of its own that has seen as much of `ids` as is known, and not the last of them."""
        best, length = None, 0
        for entry in self._entries:
            same = next((i for i, (a, b) in enumerate(zip(entry.ids, ids, strict=False)) if a != b), None)
            same = min(len(entry.ids), len(ids)) if same is None else same
            usable = min(same, len(ids) - 1) // self.chunk * self.chunk
            if usable > length:
                best, length = entry, usable
        if best is None:
            self.misses += 1
            return self._chain.start()
        self.hits += 1
        self._entries.remove(best)
        self._entries.append(best)
        return best.session.copy(length)

    def keep(self, ids: Sequence[int], session: Session) -> None:
        """Keeps the state of a session that has seen the first `session.position` of `ids`: whole chunks."""
        length = session.position
        known = list(ids[:length])
        size = length * self._bytes_per_token
        if not length or length % self.chunk or size > self._limit_bytes:
            return
        if any(entry.ids[:length] == known for entry in self._entries):
            return
        self._entries = [entry for entry in self._entries if entry.ids != known[: len(entry.ids)]]
        self._entries.append(_Entry(known, session.copy(length), size))
        while self.bytes > self._limit_bytes:
            self._entries.pop(0)
