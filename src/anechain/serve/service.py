"""One bundle, ready to answer: the chain in its worker's thread, and what the routes share."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from anechain.run.chain import Chain
from anechain.run.tokenizer import Tokenizer
from anechain.serve.answer import Delta, Parts, Plan, answer
from anechain.serve.metrics import Metrics
from anechain.serve.planning import Planner
from anechain.serve.prefixes import Prefixes
from anechain.serve.problem import Problem
from anechain.serve.worker import Done, Worker

log = logging.getLogger("anechain.serve")


@dataclass(frozen=True)
class Settings:
    """What `anechain serve` can be told. Sizes in bytes, times in seconds; an empty `api_key` asks for none."""

    name: str
    api_key: str = ""
    cors: tuple[str, ...] = ()
    body_bytes: int = 2 << 20
    time_out_s: float = 600.0
    parallel: int = 4
    queue: int = 32
    prefix_bytes: int = 256 << 20
    log_prompts: bool = False


@dataclass
class Running:
    """One request on its way: what the log line and the metrics say of it."""

    id: str
    route: str
    prompt_tokens: int = 0
    cached: int = 0
    completion: int = 0
    started: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float | None = None

    def saw(self, delta: Delta) -> None:
        self.cached += delta.cached
        if delta.tokens:
            self.last = time.monotonic()
            self.first = self.first or self.last
            self.completion += delta.tokens


class Service:
    def __init__(self, chain: Chain, tokenizer: Tokenizer, settings: Settings) -> None:
        self.settings, self.tokenizer = settings, tokenizer
        self.created = int(time.time())
        self.context = chain.bundle.context
        self.engine = chain.engine.name
        self.prefixes = Prefixes(chain, settings.prefix_bytes)
        self.planner = Planner(tokenizer, chain.bundle.context)
        self.metrics = Metrics()
        self.worker = Worker(settings.parallel, settings.queue, settings.time_out_s)
        self._parts = Parts(chain, tokenizer, self.prefixes)
        # Templates, tokenizers and grammars may take long for a long prompt: not on the event loop.
        self._planners = ThreadPoolExecutor(2, "anechain-plan")

    async def planned(self, function, *arguments):  # type: ignore[no-untyped-def]
        return await asyncio.get_running_loop().run_in_executor(self._planners, function, *arguments)

    async def deltas(self, plan: Plan, running: Running) -> AsyncIterator[Delta]:
        """The answer as it comes. Raises Problem; whoever stops listening ends it."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Delta | Done | None]()

        def deliver(item: Delta | Done | None) -> None:
            if item is not None and not loop.is_closed():
                loop.call_soon_threadsafe(queue.put_nowait, item)

        running.prompt_tokens = sum(map(len, plan.prompts))
        ticket = self.worker.submit(answer(self._parts, plan), deliver)
        try:
            while True:
                item = await queue.get()
                if isinstance(item, Done):
                    if item.problem:
                        raise replace(item.problem)
                    return
                if item is not None:
                    running.saw(item)
                    yield item
        finally:
            ticket.cancel()

    def finished(self, running: Running, outcome: str) -> None:
        """Counts the request and writes its line."""
        metrics, span = self.metrics, None
        metrics.requests[running.route, outcome] += 1
        metrics.prompt_tokens += running.prompt_tokens
        metrics.cached_tokens += running.cached
        metrics.completion_tokens += running.completion
        if running.first is not None and running.last is not None:
            metrics.first_token_s += running.first - running.started
            metrics.first_tokens += 1
            metrics.decode_s += (span := running.last - running.first)
            metrics.decode_tokens += running.completion - 1
        first_ms = "-" if running.first is None else f"{(running.first - running.started) * 1e3:.0f}"
        pace = f"{(running.completion - 1) / span:.1f}" if span else "-"
        log.info(
            "%s %s prompt=%d cached=%d completion=%d first_ms=%s tok_s=%s outcome=%s",
            running.id, running.route, running.prompt_tokens, running.cached, running.completion, first_ms, pace,
            outcome,
        )  # fmt: skip

    def gauges(self) -> dict[str, float]:
        open_now, waiting = self.worker.load()
        return {
            "requests_open": open_now,
            "requests_waiting": waiting,
            "prefix_bytes": self.prefixes.bytes,
            "worker_alive": float(self.worker.alive),
        }

    def close(self, problem: Problem) -> None:
        self.worker.close(problem)
        self._planners.shutdown(wait=False, cancel_futures=True)
