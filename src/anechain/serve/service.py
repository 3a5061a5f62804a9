"""One bundle, ready to answer: the chain in its worker's thread, and what the routes share."""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar, TypeVarTuple

from anechain.run.chain import Chain
from anechain.run.tokenizer import Tokenizer
from anechain.serve.answer import Delta, Parts, Plan, answer
from anechain.serve.metrics import Metrics
from anechain.serve.planning import Planner
from anechain.serve.prefixes import Prefixes
from anechain.serve.problem import Problem, problem_of
from anechain.serve.worker import Done, Worker, late

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")
GRACE_S = 2.0  # for a step that is at work when a request's time is over
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
    loopback: bool = False  # nobody but this machine can reach it


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

    def saw(self, delta: Delta, at: float) -> None:
        """Counts what came `at` that time.monotonic()."""
        self.cached += delta.cached
        if delta.tokens:
            self.last = at
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
        self._planning = 0

    async def planned(self, function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """What `function` returns, from a thread. Raises Problem, also when more plan already than could be served."""
        self.worker.check(self._planning)
        self._planning += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._planners, function, *arguments)
        except Exception as error:  # a traceback of the framework would print the message, which may hold data
            raise problem_of(error) from None
        finally:
            self._planning -= 1

    async def deltas(self, plan: Plan, running: Running, apart_s: float) -> AsyncIterator[list[Delta]]:
        """The answer as it comes, all that has come at a time. Raises Problem; whoever stops listening ends it.

        A batch with tokens is followed by a pause of `apart_s`: tokens that come meanwhile are the next batch, which
        takes less from the chain than waking the loop for each. Only the end of it all ends a pause early.
        """
        loop, ready, arrived = asyncio.get_running_loop(), asyncio.Event(), deque[tuple[float, Delta | Done]]()
        pausing = math.isinf(apart_s)

        def deliver(item: Delta | Done | None) -> None:  # in the worker's thread
            if item is None:
                return
            arrived.append((time.monotonic(), item))
            # `pausing` is read after the append, and `arrived` after the pause: one of the two sees the other.
            if (not pausing or isinstance(item, Done)) and not loop.is_closed():
                loop.call_soon_threadsafe(ready.set)

        def paused() -> None:
            nonlocal pausing
            pausing = False
            if arrived:
                ready.set()

        def overrun() -> None:
            arrived.append((time.monotonic(), Done(late(self.settings.time_out_s))))
            ready.set()

        running.prompt_tokens = sum(map(len, plan.prompts))
        ticket = self.worker.submit(answer(self._parts, plan), deliver)
        # The worker looks at the time between two steps. An engine that hangs inside one must not hold the client.
        overdue = loop.call_later(self.settings.time_out_s + GRACE_S, overrun)
        pause: asyncio.TimerHandle | None = None
        try:
            while True:
                await ready.wait()
                ready.clear()
                batch: list[Delta] = []
                done: Done | None = None
                while arrived and done is None:
                    at, item = arrived.popleft()
                    if isinstance(item, Done):
                        done = item
                    else:
                        running.saw(item, at)
                        batch.append(item)
                if any(delta.tokens for delta in batch) and not math.isinf(apart_s):
                    if pause is not None:
                        pause.cancel()
                    pausing, pause = True, loop.call_later(apart_s, paused)
                if batch:
                    yield batch
                if done is not None:
                    if done.problem:
                        raise replace(done.problem)
                    return
        finally:
            overdue.cancel()
            if pause is not None:
                pause.cancel()
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
        self._planners.shutdown(wait=False)
