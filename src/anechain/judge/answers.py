"""A suite's requests to answers: from a chain, or from the original through the float32 oracle.

Answers are kept on disk as they come, under the hash of everything that decides them, so that an interrupted run goes
on where it stopped and a bundle that was judged before is not asked again.
"""

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from anechain.bake.source import Source
from anechain.bundle.manifest import MANIFEST, TOKENIZER, Bundle, sha256_of, write_atomically
from anechain.errors import RequestError
from anechain.judge.fixtures import Fixture
from anechain.judge.machine import this_machine, tools
from anechain.judge.oracle import Cache, Oracle
from anechain.judge.suite import Suite
from anechain.run.chain import Chain, Session
from anechain.run.chat import ChatTemplate, opens_thinking
from anechain.run.generate import generate
from anechain.run.grammar import Constraint, Grammar, Grammars
from anechain.run.sample import Sampler
from anechain.run.tokenizer import Tokenizer

TOGETHER = 16  # sequences that the oracle decodes side by side: its weights are read once for all of them
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Answer:
    """What was said. `first_token_ms` includes the whole prompt and is None where a part of it was not fed again; all
    times are None where several answers were made side by side."""

    text: str
    tokens: int
    finish: str  # "stop", or "length" where it was cut off
    first_token_ms: float | None = None
    rest_ms: float | None = None  # of the tokens after the first


class Answerer(Protocol):
    """`identity` is everything that decides the answers, as plain data."""

    @property
    def identity(self) -> Mapping[str, Any]: ...
    def answers(self, fixtures: Sequence[Fixture]) -> Iterator[Answer]: ...


class _Asker:
    """A suite's requests as token ids of one tokenizer, and its schema as constraints."""

    def __init__(self, suite: Suite, tokenizer: Tokenizer, context: int, where: str) -> None:
        self.suite, self.tokenizer = suite, tokenizer
        template = ChatTemplate(tokenizer)
        self.ids: dict[str, list[int]] = {}
        self.thinks: dict[str, bool] = {}
        self._grammars = Grammars(tokenizer) if suite.schema is not None else None
        self._grammar = None if suite.schema is None else Grammar.schema(suite.schema)
        system = [] if suite.system is None else [{"role": "system", "content": suite.system}]
        for fixture in suite.fixtures:
            messages = [*system, {"role": "user", "content": fixture.input}]
            text = template.render(messages)
            self.ids[fixture.name] = template.encode(messages)
            self.thinks[fixture.name] = opens_thinking(text)
        if long := [name for name, ids in self.ids.items() if len(ids) + suite.max_tokens > context]:
            raise RequestError(
                f"{len(long)} fixtures of {suite.name}, first {long[0]}, do not fit with {suite.max_tokens} tokens of "
                f"answer into the context of {context} of {where}: bake with a larger --context."
            )
        self.constraint(suite.fixtures[0])  # a schema that cannot be used is refused before any work

    def constraint(self, fixture: Fixture) -> Constraint | None:
        if self._grammars is None or self._grammar is None:
            return None
        return self._grammars.start(self._grammar, self.thinks[fixture.name])

    def identity(self, engine: str) -> dict[str, Any]:
        digest = hashlib.sha256()
        for name in sorted(self.ids):
            digest.update(name.encode() + np.asarray(self.ids[name], np.int64).tobytes() + b"|")
        return {
            "suite": self.suite.name, "suite_sha256": self.suite.sha256, "prompts_sha256": digest.hexdigest(),
            "engine": engine, "machine": this_machine(), "tools": tools(),
        }  # fmt: skip


class ChainAnswerer:
    """The answers of a bundle. Its files are taken as they are: open it with `verify_hashes`."""

    def __init__(self, suite: Suite, chain: Chain, reuse: bool = True) -> None:
        """Without `reuse` every prompt is fed as a whole. Raises RequestError when a fixture does not fit into the
        context, or the schema cannot be used."""
        bundle = chain.bundle
        self._reuse = reuse
        self.chain, self.tokenizer = chain, Tokenizer.load(bundle.path / TOKENIZER)
        self._asker = _Asker(suite, self.tokenizer, bundle.context, str(bundle.path))
        adapter = None if bundle.adapter is None else bundle.adapter.get("sha256")
        self.identity: Mapping[str, Any] = self._asker.identity(chain.engine.name) | {
            "model": {
                "manifest_sha256": sha256_of(bundle.path / MANIFEST), "key": bundle.key, "source": bundle.source_ref,
                "fingerprint": bundle.fingerprint, "recipe": bundle.recipe.name, "adapter_sha256": adapter,
                "context": bundle.context, "prefill": bundle.prefill,
            },
        }  # fmt: skip

    def answers(self, fixtures: Sequence[Fixture]) -> Iterator[Answer]:
        """One after another. Whole prefill chunks that all requests begin with are computed once: the cuts between the
        chunks are those of a fresh start, and so are the results."""
        suite, chain = self._asker.suite, self.chain
        kept = 0
        if self._reuse:
            kept = shared_chunks([self._asker.ids[f.name] for f in fixtures], chain.bundle.prefill)
        begun: Session | None = None
        for fixture in fixtures:
            ids, constraint = self._asker.ids[fixture.name], self._asker.constraint(fixture)
            if begun is None:
                begun = chain.start()
                if kept:
                    chain.feed(begun, ids[:kept])
            tokens = list(
                generate(
                    chain, begun.copy(), self.tokenizer, ids[kept:], suite.sampling, suite.max_tokens,
                    constraint=constraint,
                )
            )  # fmt: skip
            text, finish = "".join(t.text for t in tokens), str(tokens[-1].finish)
            yield Answer(
                text, len(tokens), finish, None if kept else tokens[0].ms, sum(t.ms for t in tokens[1:])
            )  # fmt: skip


def requests(suite: Suite, bundle: Bundle) -> dict[str, list[int]]:
    """The token ids that `bundle` is fed for every fixture, by its name."""
    return _Asker(suite, Tokenizer.load(bundle.path / TOKENIZER), bundle.context, str(bundle.path)).ids


def shared_chunks(prompts: Sequence[Sequence[int]], chunk: int) -> int:
    """How many ids all prompts begin with, in whole prefill chunks, at least one id less than the shortest."""
    if not chunk or len(prompts) < 2:
        return 0
    same = min(len(ids) for ids in prompts) - 1
    for ids in prompts[1:]:
        same = next((i for i in range(same) if ids[i] != prompts[0][i]), same)
    return same // chunk * chunk


class OracleAnswerer:
    """The answers of the original, unquantised model: the float32 oracle, several sequences side by side."""

    def __init__(self, suite: Suite, source: Source, context: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for name, content in source.text_files.items():
                (Path(folder) / name).write_bytes(content)
            self.tokenizer = Tokenizer.load(Path(folder))
        self._asker = _Asker(suite, self.tokenizer, context, source.ref)
        self._oracle = Oracle(source)
        self.identity: Mapping[str, Any] = self._asker.identity("oracle") | {
            "model": {"source": source.ref, "fingerprint": source.fingerprint, "recipe": "float32, from the source"},
        }

    def answers(self, fixtures: Sequence[Fixture]) -> Iterator[Answer]:
        for begin in range(0, len(fixtures), TOGETHER):
            yield from self._together(fixtures[begin : begin + TOGETHER])

    def _together(self, fixtures: Sequence[Fixture]) -> list[Answer]:
        suite, n_ids = self._asker.suite, self.tokenizer.n_ids
        fed = [np.asarray(self._asker.ids[f.name], np.int64) for f in fixtures]
        texts = [self.tokenizer.stream(ids.tolist()) for ids in fed]
        constraints = [self._asker.constraint(f) for f in fixtures]
        samplers = [Sampler(suite.sampling, n_ids) for _ in fixtures]
        caches = [Cache() for _ in fixtures]
        said: list[list[str]] = [[] for _ in fixtures]
        counts, finish = [0] * len(fixtures), [""] * len(fixtures)
        while going := [i for i, end in enumerate(finish) if not end]:
            hidden = self._oracle.forward([fed[i] for i in going], [caches[i] for i in going])
            rows = self._oracle.logits(np.stack([h[-1] for h in hidden]))  # [n, V] f32
            for i, logits in zip(going, rows, strict=True):
                constraint = constraints[i]
                token = samplers[i].choose(logits, constraint.allowed() if constraint else None)
                counts[i] += 1
                ended = token in self.tokenizer.eos_ids
                if constraint and not ended:
                    constraint.accept(token)
                if ended or (constraint and constraint.complete):
                    finish[i] = "stop"
                elif counts[i] == suite.max_tokens:
                    finish[i] = "length"
                said[i].append("" if ended else texts[i].feed(token))
                fed[i] = np.array([token], np.int64)
        return [
            Answer("".join(said[i]) + texts[i].flush(), counts[i], finish[i]) for i in range(len(fixtures))
        ]  # fmt: skip


class AnswerFile:
    """Answers on disk, a line each, under the hash of what decides them. Another identity is another file."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        text = json.dumps(identity, sort_keys=True)
        self.path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.jsonl"
        self._identity = text

    def read(self) -> dict[str, Answer]:
        """What is there, by fixture; lines that an interruption left broken are passed over."""
        if not self.path.is_file():
            return {}
        first, *lines = self.path.read_text(encoding="utf-8", errors="replace").split("\n")
        if first != self._identity:
            return {}
        kept = {}
        for line in lines:
            try:
                row = json.loads(line)
                name = row.pop("name")
                kept[name] = Answer(**row)
            except (ValueError, LookupError, TypeError, AttributeError):
                continue
        return kept

    def begin(self, known: Mapping[str, Answer] | None = None) -> None:
        """The file with what is `known` and nothing else: no broken line, and by default no answer."""
        rows = [_line(name, answer) for name, answer in (known or {}).items()]
        write_atomically(self.path, "".join([self._identity + "\n", *rows]).encode())

    def add(self, fixture: Fixture, answer: Answer) -> None:
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(_line(fixture.name, answer))


def _line(name: str, answer: Answer) -> str:
    return json.dumps({"name": name, **asdict(answer)}, ensure_ascii=False) + "\n"


def collect(
    answerer: Answerer, fixtures: Sequence[Fixture], kept: AnswerFile | None = None, progress: Progress | None = None
) -> list[Answer]:
    """The answers to `fixtures`, in their order; those in `kept` are not asked for again, others are added to it."""
    known = kept.read() if kept else {}
    if kept:
        kept.begin(known)
    missing = [f for f in fixtures if f.name not in known]
    for number, (fixture, answer) in enumerate(zip(missing, answerer.answers(missing), strict=True), 1):
        known[fixture.name] = answer
        if kept:
            kept.add(fixture, answer)
        if progress:
            progress(len(fixtures) - len(missing) + number, len(fixtures))
    return [known[f.name] for f in fixtures]
