"""The routes: an OpenAI-compatible API over one Service."""

import asyncio
import contextlib
import math
import secrets
from collections.abc import AsyncIterator, Coroutine
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from anechain.serve.answer import Delta, Plan
from anechain.serve.bodies import DONE, Bodies, event
from anechain.serve.guards import REQUEST_ID, Cors, Guard, plain
from anechain.serve.problem import Problem, problem_of
from anechain.serve.schema import ChatRequest, CompletionRequest, read
from anechain.serve.service import Running, Service, log

ROUTES = ("/v1/chat/completions", "/v1/completions")
# The page is one file that loads nothing and talks to this server alone.
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# Otherwise a path with a slash too many is sent on to an address made of the request's own Host header.
PLAIN_ROUTES = {"docs_url": None, "redoc_url": None, "openapi_url": None, "redirect_slashes": False}

STREAM_S = 1 / 30  # between two writes to one client, at least: 30 a second are more than an eye can read
CLOSED_REQUEST = 499  # nobody is there to read it
Result = TypeVar("Result")


def create_app(service: Service) -> FastAPI:
    app = FastAPI(title="anechain", **PLAIN_ROUTES)  # type: ignore[arg-type]
    settings = service.settings

    def counted(path: str, problem: Problem) -> str:
        """The id under which the line of a refusal is written."""
        running = Running(_new_id(), path if path in ROUTES else "other")
        service.finished(running, _outcome(problem))
        return running.id

    app.add_middleware(Guard, settings.api_key, settings.body_bytes, settings.loopback, settings.cors, counted)
    if settings.cors:
        app.add_middleware(Cors, settings.cors)
    page = (files("anechain.serve") / "page.html").read_text(encoding="utf-8")

    def refused(request: Request, problem: Problem) -> Response:
        request_id = getattr(request.state, "request_id", None) or counted(request.url.path, problem)
        return JSONResponse(problem.body(), problem.status, headers={REQUEST_ID: request_id, **dict(problem.headers)})

    @app.exception_handler(Problem)
    async def on_problem(request: Request, problem: Problem) -> Response:
        return refused(request, problem)

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        return refused(request, plain(error.status_code, error.detail, request.url.path))

    @app.exception_handler(Exception)
    async def on_fault(request: Request, error: Exception) -> Response:
        return refused(request, problem_of(error))

    @app.get("/")
    async def index() -> Response:
        return HTMLResponse(page, headers={"content-security-policy": PAGE_POLICY})

    @app.get("/health")
    async def health() -> Response:
        alive = service.worker.alive
        body = {"status": "ok" if alive else "the worker is gone", "model": settings.name, "engine": service.engine}
        return JSONResponse(body, 200 if alive else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(service.metrics.text(service.gauges()), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(service)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        _check_model(service, name)
        return JSONResponse(_model(service))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        wanted = read(ChatRequest, await request.body())
        _check_model(service, wanted.model)
        plan = await service.planned(service.planner.chat, wanted)
        if settings.log_prompts:
            log.info("messages %s", [message.model_dump() for message in wanted.messages])
        return await _answered(service, request, plan, True, wanted.stream, wanted.with_usage)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        wanted = read(CompletionRequest, await request.body())
        _check_model(service, wanted.model)
        plan = await service.planned(service.planner.completion, wanted)
        if settings.log_prompts:
            log.info("prompt %r", wanted.prompt)
        return await _answered(service, request, plan, False, wanted.stream, wanted.with_usage)

    return app


async def _answered(
    service: Service, request: Request, plan: Plan, chat: bool, stream: bool, with_usage: bool
) -> Response:
    running = Running(_new_id(), request.url.path)
    request.state.request_id = running.id
    bodies = Bodies(chat, service.settings.name, plan, service.tokenizer)
    headers = {REQUEST_ID: running.id}
    deltas = service.deltas(plan, running, STREAM_S if stream else math.inf)

    async def gathered() -> list[Delta]:
        """All of a whole answer; of a stream what comes with the first token: until then a failure has a status."""
        parts: list[Delta] = []
        async for batch in deltas:
            parts += batch
            if stream and any(delta.tokens or delta.finish for delta in batch):
                break
        return parts

    try:
        parts = await _unless_gone(request, gathered())
    except _Gone:
        service.finished(running, "disconnected")
        return Response(status_code=CLOSED_REQUEST)
    except BaseException as error:
        service.finished(running, _outcome(error))
        raise
    if stream:
        events = _events(service, running, bodies, parts, deltas, with_usage)
        headers["cache-control"] = "no-cache"
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)
    for part in parts:
        bodies.usage.add(part)
    service.finished(running, next((p.finish for p in reversed(parts) if p.finish), "stop"))
    return JSONResponse(bodies.whole(parts), headers=headers)


async def _events(
    service: Service,
    running: Running,
    bodies: Bodies,
    first: list[Delta],
    deltas: AsyncIterator[list[Delta]],
    with_usage: bool,
) -> AsyncIterator[bytes]:
    outcome, reason = "disconnected", "stop"

    def events(batch: list[Delta]) -> bytes:
        """An event for each of them, for the client to get at once."""
        nonlocal reason
        made = []
        for delta in batch:
            bodies.usage.add(delta)
            made += [event(chunk) for chunk in bodies.chunks(delta, with_usage)]
            reason = delta.finish or reason
        return b"".join(made)

    try:
        async with contextlib.aclosing(deltas):  # type: ignore[type-var]
            if sent := events(first):
                yield sent
            async for batch in deltas:
                if sent := events(batch):
                    yield sent
        if with_usage:
            yield event(bodies.usage_chunk())
        yield DONE
        outcome = reason
    except Problem as problem:
        outcome = _outcome(problem)
        yield event(problem.body())
    finally:
        service.finished(running, outcome)


class _Gone(Exception):
    """The client has closed the connection."""


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """What `work` returns or raises. Raises _Gone, and ends `work`, when the client closes the connection before."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _Gone
        return working.result()
    finally:
        leaving.cancel()
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await working


def _outcome(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError):
        return "disconnected"
    problem = problem_of(error)
    return problem.code or problem.type


def _new_id() -> str:
    return f"req-{secrets.token_hex(6)}"


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.settings.name,
        "object": "model",
        "created": service.created,
        "owned_by": "anechain",
        "context_length": service.context,
    }


def _check_model(service: Service, name: str | None) -> None:
    """Raises Problem for another name than the one that is served; nothing is ever loaded because of a request."""
    if name is not None and name != service.settings.name:
        raise Problem(
            404,
            f"the model {name[:200]!r} does not exist here: this server has {service.settings.name!r}.",
            param="model",
            code="model_not_found",
        )
