"""The routes: an OpenAI-compatible API over one Service."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from anechain.serve.answer import Delta, Plan
from anechain.serve.bodies import DONE, Bodies, event
from anechain.serve.guards import Guard, plain
from anechain.serve.problem import Problem, problem_of
from anechain.serve.schema import ChatRequest, CompletionRequest, read
from anechain.serve.service import Running, Service, log

ROUTES = ("/v1/chat/completions", "/v1/completions")
# The page is one file that loads nothing and talks to this server alone.
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)
CLOSED_REQUEST = 499  # nobody is there to read it


def create_app(service: Service) -> FastAPI:
    app = FastAPI(title="anechain", docs_url=None, redoc_url=None, openapi_url=None)
    settings = service.settings
    app.add_middleware(Guard, api_key=settings.api_key, body_bytes=settings.body_bytes)
    if settings.cors:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.cors), allow_methods=["*"], allow_headers=["*"]
        )  # fmt: skip
    page = (files("anechain.serve") / "page.html").read_text(encoding="utf-8")

    def refused(request: Request, problem: Problem) -> Response:
        if not getattr(request.state, "counted", False):
            route = request.url.path if request.url.path in ROUTES else "other"
            service.finished(Running(_new_id(), route), _outcome(problem))
        return JSONResponse(problem.body(), problem.status, headers=dict(problem.headers))

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
            log.info("prompt %s", wanted.prompt)
        return await _answered(service, request, plan, False, wanted.stream, wanted.with_usage)

    return app


async def _answered(
    service: Service, request: Request, plan: Plan, chat: bool, stream: bool, with_usage: bool
) -> Response:
    running = Running(_new_id(), request.url.path)
    request.state.counted = True
    bodies = Bodies(chat, service.settings.name, plan, service.tokenizer)
    headers = {"x-request-id": running.id}
    deltas = service.deltas(plan, running)
    if not stream:
        return await _whole(service, request, running, bodies, deltas, headers)
    first: list[Delta] = []
    try:  # up to the first token a failure has a status of its own
        while not first or not (first[-1].tokens or first[-1].finish):
            first.append(await anext(deltas))
    except BaseException as error:
        service.finished(running, _outcome(error))
        raise
    events = _events(service, running, bodies, first, deltas, with_usage)
    return StreamingResponse(events, media_type="text/event-stream", headers={**headers, "cache-control": "no-cache"})


async def _whole(
    service: Service, request: Request, running: Running, bodies: Bodies, deltas: AsyncIterator[Delta], headers: Any
) -> Response:
    async def gathered() -> list[Delta]:
        async with contextlib.aclosing(deltas):  # type: ignore[type-var]
            return [delta async for delta in deltas]

    work, gone = asyncio.ensure_future(gathered()), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work
            service.finished(running, "disconnected")
            return Response(status_code=CLOSED_REQUEST)
        parts = work.result()
    except BaseException as error:
        work.cancel()
        service.finished(running, _outcome(error))
        raise
    finally:
        gone.cancel()
    for part in parts:
        bodies.usage.add(part)
    service.finished(running, next((p.finish for p in reversed(parts) if p.finish), "stop"))
    return JSONResponse(bodies.whole(parts), headers=headers)


async def _events(
    service: Service,
    running: Running,
    bodies: Bodies,
    first: list[Delta],
    deltas: AsyncIterator[Delta],
    with_usage: bool,
) -> AsyncIterator[bytes]:
    outcome = "disconnected"

    async def all_deltas() -> AsyncIterator[Delta]:
        for delta in first:
            yield delta
        async for delta in deltas:
            yield delta

    try:
        async with contextlib.aclosing(deltas):  # type: ignore[type-var]
            async for delta in all_deltas():
                bodies.usage.add(delta)
                for chunk in bodies.chunks(delta, with_usage):
                    yield event(chunk)
                outcome = delta.finish or outcome
        if with_usage:
            yield event(bodies.usage_chunk())
        yield DONE
    except Problem as problem:
        outcome = _outcome(problem)
        yield event(problem.body())
    finally:
        service.finished(running, outcome)


async def _gone(request: Request) -> None:
    """Returns when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


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
