"""The one thread that touches the chain, and the bounded queue before it.

A request is an iterator: every `next` is one step of the chain (a chunk of the prompt, or one token). Up to `parallel`
requests are open and take turns step by step, so a short one does not wait for a long one to end; others wait in line.
A request that is cancelled, too late, or failing ends alone.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from anechain.serve.problem import Problem, problem_of

Deliver = Callable[[Any], None]


@dataclass(frozen=True)
class Done:
    """The last thing that a request is told; `problem` is None when it ended well."""

    problem: Problem | None = None


@dataclass(eq=False)
class Ticket:
    """A request in the worker's hands."""

    steps: Iterator[Any]
    deliver: Deliver
    deadline: float  # of time.monotonic()
    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Ends it before its next step."""
        self.cancelled.set()


class Worker:
    """Starts its thread at once."""

    def __init__(self, parallel: int, depth: int, time_out_s: float) -> None:
        self._parallel, self._depth, self._time_out_s = parallel, depth, time_out_s
        self._waiting: deque[Ticket] = deque()
        self._open: deque[Ticket] = deque()
        self._change = threading.Condition()
        self._closing: Problem | None = None
        self._mean_s = 1.0  # of a request, lately
        self._thread = threading.Thread(target=self._run, name="anechain-worker", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._closing is None and self._thread.is_alive()

    def load(self) -> tuple[int, int]:
        """How many requests are open, how many wait."""
        return len(self._open), len(self._waiting)

    def submit(self, steps: Iterator[Any], deliver: Deliver) -> Ticket:
        """Puts a request into the line. `deliver` gets whatever `steps` yields, then one Done, in the worker's thread.

        Raises Problem: 429 when the line is full, 503 when the worker is gone or going.
        """
        ticket = Ticket(steps, deliver, time.monotonic() + self._time_out_s)
        with self._change:
            self.check()
            self._waiting.append(ticket)
            self._change.notify()
        return ticket

    def check(self, more: int = 0) -> None:
        """Raises what `submit` would raise now if `more` requests were in the line already."""
        if self._closing or not self.alive:
            raise replace(self._closing or _GONE)  # an exception of its own: tracebacks pile up on a shared one
        ahead = len(self._waiting) + len(self._open) + more
        if ahead >= self._parallel + self._depth:
            wait_s = max(1, min(60, round(self._mean_s * ahead / self._parallel)))
            raise Problem(
                429, f"{ahead} requests are being worked on or wait: try again in {wait_s} s.",
                "rate_limit_error", code="queue_full", headers=(("Retry-After", str(wait_s)),),
            )  # fmt: skip

    def close(self, problem: Problem) -> None:
        """Ends every request with `problem`, takes no more, and ends the thread."""
        with self._change:
            self._closing = problem
            self._change.notify()

    def join(self, time_out_s: float) -> None:
        self._thread.join(time_out_s)

    def _run(self) -> None:
        ending = _GONE
        try:
            while self._admit():
                ticket = self._open[0]
                self._open.rotate(-1)
                self._step(ticket)
            ending = self._closing or _GONE
        finally:
            with self._change:
                self._closing = ending
                left = [*self._open, *self._waiting]
                self._open.clear()
                self._waiting.clear()
            for ticket in left:
                self._end(ticket, ending)

    def _admit(self) -> bool:
        """Opens those whose turn it is; waits while there are none. False when the worker closes."""
        with self._change:
            while not self._closing:
                while self._waiting and len(self._open) < self._parallel:
                    self._open.append(self._waiting.popleft())
                if self._open:
                    over = [t for t in self._waiting if t.cancelled.is_set() or time.monotonic() > t.deadline]
                    for ticket in over:
                        self._waiting.remove(ticket)
                    break
                self._change.wait()
            else:
                return False
        for ticket in over:
            self._end(ticket, None if ticket.cancelled.is_set() else late(self._time_out_s))
        return True

    def _step(self, ticket: Ticket) -> None:
        problem: Problem | None = None
        if ticket.cancelled.is_set():
            pass
        elif time.monotonic() > ticket.deadline:
            problem = late(self._time_out_s)
        else:
            try:
                ticket.deliver(next(ticket.steps))
                return
            except StopIteration:
                self._mean_s += 0.2 * (time.monotonic() - ticket.deadline + self._time_out_s - self._mean_s)
            except Exception as error:
                problem = problem_of(error)
        self._open.remove(ticket)
        self._end(ticket, problem)

    def _end(self, ticket: Ticket, problem: Problem | None) -> None:
        try:
            close = getattr(ticket.steps, "close", None)
            if close is not None:
                close()
        finally:
            ticket.deliver(Done(problem))


_GONE = Problem(503, "the worker of this server is gone: start the server again.", "server_error", code="worker_gone")


def late(limit_s: float) -> Problem:
    return Problem(504, f"the request took longer than the limit of {limit_s:g} s.", "timeout_error", code="timeout")
