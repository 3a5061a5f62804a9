"""A loaded bundle: token ids go in, through the embedding, the stages and the head; logits come out.

The chain owns the hand-off: the hidden state goes round a ring of buffers for each number of tokens, and each stage
reads one and writes the next. Everything that a step needs is allocated once, by the engine.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from anechain.bundle.form import from_int8, to_int8
from anechain.bundle.manifest import Bundle
from anechain.bundle.spec import DECODE, MASKED, PREFILL, WRITE, head_pieces, kind_suffix
from anechain.errors import RequestError
from anechain.run.embedding_cache import embedding_of
from anechain.run.engine import Engine, Stage, State
from anechain.run.rope import rotations

# Two buffers that swap are not enough: Core ML is reported to refuse as an output what the prediction before took as
# its input, and to allocate another, silently. A buffer that was read is written again RING - 1 steps later.
RING = 4
MIN_CHUNK = 8  # fewer tokens than this are cheaper one by one than in a chunk that is mostly padding


@dataclass
class Session:
    """One conversation: how many tokens the chain has seen, and every stage's keys and values for them."""

    position: int
    states: list[State | None]

    def copy(self, position: int | None = None) -> "Session":
        """Another one that goes on from here, or from an earlier `position`: cells beyond it are masked."""
        kept = self.position if position is None else position
        return Session(kept, [state and state.copy(position) for state in self.states])


class _Feed:
    """The arrays of one function's ports, filled anew for every step: Q tokens at `position`.

    The hidden states go round a ring, and on from token to token, so that no step writes what was just read.
    """

    def __init__(self, bundle: Bundle, engine: Engine, query: int) -> None:
        spec, f16 = bundle.spec, np.float16
        self.query, self._spec, self._context = query, spec, bundle.context
        shape, dtypes = (1, 1, query, spec.hidden_size), (f16, np.int8) if bundle.boundary_scales else (f16,)
        self._rings = {np.dtype(d): deque(engine.buffer(shape, d) for _ in range(RING)) for d in dtypes}
        self.ports: dict[str, np.ndarray]
        if bundle.state_update == "blend":
            self.ports = {WRITE: engine.buffer((1, 1, query, bundle.context), f16)}
        else:
            self.ports = {"begin": engine.buffer((4,), np.int32), "end": engine.buffer((4,), np.int32)}
        for kind, _ in enumerate(spec.attentions):
            suffix = kind_suffix(spec, kind)
            self.ports |= {f"{p}{suffix}": engine.buffer((1, 1, query, spec.head_dim), f16) for p in ("cos", "sin")}
            self.ports[f"mask{suffix}"] = engine.buffer((1, 1, query, bundle.context), f16)

    def here(self, scale: float | None) -> np.ndarray:
        """The buffer [1, 1, Q, H] that was written last: f16, or int8 for hidden states that have a scale."""
        return self._rings[np.dtype(np.float16 if scale is None else np.int8)][0]

    def advance(self, scale: float | None) -> np.ndarray:
        """The next buffer of that ring, for a step to write and the one after it to read."""
        self._rings[np.dtype(np.float16 if scale is None else np.int8)].rotate(-1)
        return self.here(scale)

    def fill(self, position: int) -> None:
        rows = position + np.arange(self.query)
        cells = np.arange(self._context)
        for kind, attention in enumerate(self._spec.attentions):
            suffix = kind_suffix(self._spec, kind)
            cos, sin = rotations(attention.rope, self._spec.head_dim, rows)
            self.ports[f"cos{suffix}"][0, 0], self.ports[f"sin{suffix}"][0, 0] = cos, sin
            visible = np.broadcast_to(cells < position, (self.query, self._context))
            if attention.window is not None:
                visible = visible & (cells > rows[:, None] - attention.window)
            self.ports[f"mask{suffix}"][0, 0] = np.where(visible, 0.0, MASKED)
        if WRITE in self.ports:
            self.ports[WRITE][0, 0] = cells == rows[:, None]
        else:
            self.ports["begin"][2], self.ports["end"][2] = position, position + self.query


class Chain:
    """The packages of `bundle` on `engine`, as one stage where the engine stitches, else one stage a package.

    A chain runs one step at a time; several sessions may take turns.
    """

    def __init__(self, bundle: Bundle, engine: Engine, stitched: bool | None = None) -> None:
        self.bundle, self.engine = bundle, engine
        self.embedding = embedding_of(bundle)
        self.packages: Sequence[Sequence[Path]] = [[path] for path in bundle.block_paths]  # of each stage
        if engine.stitches if stitched is None else stitched:
            self.packages = [bundle.block_paths]
        with ThreadPoolExecutor(engine.loaders) as pool:
            *stages, self.head = pool.map(engine.load, [*self.packages, [bundle.head_path]])
        self.stages: list[Stage] = stages
        self.scales: list[tuple[float | None, float | None]] = []  # of what enters and what leaves each stage, if int8
        done = 0
        for group in self.packages:
            last = done + len(group) - 1
            self.scales.append((bundle.form(done).takes, bundle.form(last).gives))
            done += len(group)
        pieces, rows = head_pieces(bundle.spec)
        queries = {DECODE: 1} | ({PREFILL: bundle.prefill} if bundle.prefill else {})
        self._feeds = {function: _Feed(bundle, engine, query) for function, query in queries.items()}
        self._last = engine.buffer((1, 1, 1, bundle.spec.hidden_size), np.float16)
        self.logits = {f"logits_{i}": engine.buffer((1, 1, 1, rows), np.float16) for i in range(pieces)}

    def start(self) -> Session:
        """A conversation that has seen nothing."""
        return Session(0, [stage.new_state() for stage in self.stages])

    def room(self, session: Session) -> int:
        """How many tokens the context still takes."""
        return self.bundle.context - session.position

    def feed(self, session: Session, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Feeds `ids` (at least one) to the session and returns the logits [V] f32 after the last of them.

        Full and partly filled prefill chunks as long as they fit into the context, single tokens for the rest: the
        result is that of feeding the tokens one by one. Raises RequestError when the context has no room for them; the
        session is then as it was.
        """
        tokens = self._checked(session, ids)
        for function, count in self._parts(session.position, len(tokens)):
            hidden = self._through(session, function, tokens[:count])
            session.position += count
            tokens = tokens[count:]
        return self._head(hidden[0, 0, count - 1])

    def feed_each(self, session: Session, ids: Sequence[int] | np.ndarray) -> Iterator[np.ndarray]:
        """The logits [V] f32 after each of `ids`, which are fed in the chunks of `feed`; raises what that raises.

        Other sessions may be fed between two of them.
        """
        tokens = self._checked(session, ids)
        for function, count in self._parts(session.position, len(tokens)):
            hidden = self._through(session, function, tokens[:count])[0, 0, :count].copy()  # [count, H] f16
            session.position += count
            tokens = tokens[count:]
            for row in hidden:
                yield self._head(row)

    def _checked(self, session: Session, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        tokens = np.asarray(ids, np.int64)
        vocab_size = self.bundle.spec.vocab_size
        if tokens.ndim != 1 or not len(tokens):
            raise RequestError("there is no token to feed: give at least one.")
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            raise RequestError(
                f"token ids must lie in 0 ... {vocab_size - 1}: {tokens.min()} ... {tokens.max()} were given."
            )
        if len(tokens) > self.room(session):
            raise RequestError(
                f"{len(tokens)} tokens do not fit: the context holds {self.bundle.context} and {session.position} are "
                "taken; shorten the prompt or bake with a larger --context."
            )
        return tokens

    def stage_feed(self, number: int, session: Session, hidden: np.ndarray) -> np.ndarray:
        """Runs stage `number` alone: `hidden` [n, H] f16 enters, cut as in `feed`; what leaves is returned, [n, H] f16.

        For looking at stages one by one: each call takes the next n positions, counted in `session`. Where the stage
        takes or gives int8, it is rounded on the way in, and widened on the way out.
        """
        takes, gives = self.scales[number]
        leaving = np.empty_like(hidden)
        done = 0
        for function, count in self._parts(session.position, len(hidden)):
            feed = self._feeds[function]
            feed.fill(session.position)
            source, rows = feed.here(takes), hidden[done : done + count]
            source[0, 0, :count] = rows if takes is None else to_int8(rows, takes)
            source[0, 0, count:] = 0
            target = feed.advance(gives)
            self._step(number, function, session, source, target)
            rows = target[0, 0, :count]
            leaving[done : done + count] = rows if gives is None else from_int8(rows, gives)
            session.position += count
            done += count
        return leaving

    def ports(self, function: str, position: int) -> dict[str, np.ndarray]:
        """What a step of the first stage takes at `position`, the hidden state included, for looking at it."""
        feed = self._feeds[function]
        feed.fill(position)
        return {"hidden": feed.here(self.scales[0][0]), **feed.ports}

    def _parts(self, position: int, count: int) -> Iterator[tuple[str, int]]:
        """Which function takes how many, in order, of `count` tokens from `position` on."""
        chunk = self.bundle.prefill
        while count:
            whole = chunk > 0 and count >= MIN_CHUNK and position + chunk <= self.bundle.context
            taken = min(chunk, count) if whole else 1
            yield PREFILL if whole else DECODE, taken
            position, count = position + taken, count - taken

    def _through(self, session: Session, function: str, tokens: np.ndarray) -> np.ndarray:
        """Embeds `tokens`, runs all stages, returns the hidden buffer [1, 1, Q, H] f16; more rows are padding."""
        feed = self._feeds[function]
        feed.fill(session.position)
        source = feed.here(None)
        source[0, 0, : len(tokens)] = self.embedding.rows(tokens)
        source[0, 0, len(tokens) :] = 0
        for number, (_, gives) in enumerate(self.scales):
            target = feed.advance(gives)
            self._step(number, function, session, source, target)
            source = target
        return source

    def _step(self, number: int, function: str, session: Session, source: np.ndarray, target: np.ndarray) -> None:
        inputs = {"hidden": source, **self._feeds[function].ports}
        self.stages[number].step(function, inputs, session.states[number], {"hidden_out": target})

    def _head(self, hidden: np.ndarray) -> np.ndarray:
        """The logits [V] f32 of one row [H] f16."""
        self._last[0, 0, 0] = hidden
        self.head.step(DECODE, {"hidden": self._last}, None, self.logits)
        parts = [part[0, 0, 0] for part in self.logits.values()]
        return np.concatenate(parts)[: self.bundle.spec.vocab_size].astype(np.float32)
