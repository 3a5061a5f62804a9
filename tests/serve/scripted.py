"""A chain that says what a script says, and a server around it: `with serving(Scripted(says("hi"))) as server:`."""

import contextlib
import http.client
import json
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from anechain.run.tokenizer import Tokenizer
from anechain.serve.app import create_app
from anechain.serve.server import Server
from anechain.serve.service import Service, Settings
from tests.bundle_maker import tokenizer_files
from tests.tiny import EOS

VOCABULARY = 320
ASKED = b"assistant\n"  # where a prompt ends and the answer begins
Script = Callable[[str, int], int | np.ndarray]  # the prompt's text, how many tokens of the answer there are -> an id


@dataclass
class Session:
    ids: list[int] = field(default_factory=list)
    position: int = 0

    def copy(self, position: int | None = None) -> "Session":
        kept = self.position if position is None else position
        return Session(self.ids[:kept], kept)


@dataclass
class Scripted:
    """`step_s` is what a step takes; `steps` counts them. `fail` may raise, given the number of the feed."""

    script: Script
    context: int = 512
    prefill: int = 32
    step_s: float = 0.0
    steps: int = 0
    fed: list[list[int]] = field(default_factory=list)
    fail: Callable[[int], None] | None = None

    @property
    def bundle(self) -> Any:
        spec = SimpleNamespace(vocab_size=VOCABULARY, n_layers=2, n_kv_heads=2, head_dim=16)
        return SimpleNamespace(context=self.context, prefill=self.prefill, spec=spec, path=Path("scripted"))

    @property
    def engine(self) -> Any:
        return SimpleNamespace(name="scripted")

    def start(self) -> Session:
        return Session()

    def room(self, session: Session) -> int:
        return self.context - session.position

    def feed(self, session: Session, ids: Sequence[int]) -> np.ndarray:
        self.steps += 1
        self.fed.append(list(ids))
        if self.step_s:
            time.sleep(self.step_s)
        if self.fail:
            self.fail(self.steps)
        session.ids = [*session.ids[: session.position], *ids]
        session.position = len(session.ids)
        assert session.position <= self.context
        return self._logits(session.ids)

    def feed_each(self, session: Session, ids: Sequence[int]) -> Iterator[np.ndarray]:
        for token_id in ids:
            yield self.feed(session, [token_id])

    def _logits(self, ids: list[int]) -> np.ndarray:
        text = bytes(i for i in ids if i < 256)
        if ASKED not in text:
            return np.linspace(0, 1, VOCABULARY, dtype=np.float32)
        start = (
            len(ids)
            - next(n for n in range(len(ids)) if bytes(i for i in ids[len(ids) - n :] if i < 256).startswith(ASKED))
            + len(ASKED)
        )
        said = self.script(bytes(i for i in ids[:start] if i < 256).decode(errors="replace"), len(ids) - start)
        if isinstance(said, np.ndarray):
            return said
        logits = np.random.default_rng(len(ids)).standard_normal(VOCABULARY).astype(np.float32)
        logits[said] += 100
        return logits


def says(text: str | Sequence[int], end: int = EOS) -> Script:
    """Always the same answer, and then `end`."""
    ids = list(text.encode()) if isinstance(text, str) else list(text)
    return lambda prompt, index: ids[index] if index < len(ids) else end


def tokenizer(template: str | None = "", **changes: Any) -> Tokenizer:
    """The byte tokenizer; `template` instead of its own, None for no template at all."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in tokenizer_files().items():
            (Path(folder) / name).write_bytes(content)
        loaded = Tokenizer.load(Path(folder))
    if template is None:
        loaded = replace(loaded, chat_templates={})
    elif template:
        loaded = replace(loaded, chat_templates={"default": template})
    return replace(loaded, **changes)


@dataclass
class Running:
    """A server on a port of its own."""

    chain: Any
    service: Service
    port: int
    thread: threading.Thread
    server: Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> "Reply":
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, data, {"content-type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        reply = Reply(answer.status, dict(answer.getheaders()), answer.read())
        connection.close()
        return reply

    def chat(self, text: str = "x", **fields: Any) -> "Reply":
        return self.ask("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields})

    def complete(self, prompt: Any = "x assistant\n", **fields: Any) -> "Reply":
        return self.ask("POST", "/v1/completions", {"prompt": prompt, **fields})

    def settle(self, seconds: float = 5.0) -> None:
        """Waits until nothing is open."""
        end = time.monotonic() + seconds
        while self.service.worker.load() != (0, 0) and time.monotonic() < end:
            time.sleep(0.005)
        assert self.service.worker.load() == (0, 0)


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        assert set(self.json) == {"error"} and set(self.json["error"]) == {"message", "type", "param", "code"}
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """The data of a stream, strictly: each event is one `data:` line and an empty one. [DONE] is "[DONE]"."""
        *events, rest = self.body.decode("ascii").split("\n\n")
        assert rest == "" and all(e.startswith("data: ") and "\n" not in e for e in events)
        return [e[6:] if e[6:] == "[DONE]" else json.loads(e[6:]) for e in events]

    @property
    def text(self) -> str:
        """What a chat stream or a whole chat answer says."""
        if self.body.startswith(b"data: "):
            chunks = [e for e in self.events if isinstance(e, dict)]
            return "".join(c["delta"].get("content") or "" for e in chunks for c in e.get("choices", []))
        return self.json["choices"][0]["message"]["content"] or ""


@contextlib.contextmanager
def serving(chain: Any, tokens: Tokenizer | None = None, **settings: Any) -> Iterator[Running]:
    service = Service(chain, tokens or tokenizer(), Settings(**{"name": "tiny", **settings}))
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = Server(create_app(service), service, "127.0.0.1", 0)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.002)
    running = Running(chain, service, listening.getsockname()[1], thread, server)
    try:
        yield running
    finally:
        server.should_exit = True
        thread.join(12)
        listening.close()
        assert not thread.is_alive()
