"""What a request passes before its route: size, key, and answers of one shape for whatever goes wrong on the way."""

import hmac
import json
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from anechain.serve.problem import Problem

OPEN = ("/", "/health")  # what needs no key: the page holds none of anybody's words


class Guard:
    """ASGI middleware, innermost of all. Refuses before a body is read where that is possible."""

    def __init__(self, app: ASGIApp, api_key: str, body_bytes: int) -> None:
        self._app, self._key, self._limit = app, api_key.encode(), body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        if self._key and scope["path"] not in OPEN and scope["method"] != "OPTIONS":
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, b"Bearer " + self._key):
                problem = Problem(
                    401, "the API key is missing or wrong: send it as a Bearer token.", code="invalid_api_key"
                )
                await _refuse(send, problem)
                return
        length = headers.get(b"content-length", b"")
        too_long = Problem(413, f"the body is longer than the limit of {self._limit} bytes.", code="body_too_long")
        if length.isdigit() and int(length) > self._limit:
            await _refuse(send, too_long)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._limit:
                raise too_long
            return message

        await self._app(scope, counted, send)


async def _refuse(send: Send, problem: Problem) -> None:
    body = json.dumps(problem.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers.append((b"connection", b"close"))  # the rest of the body is not read
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def plain(status: int, detail: Any, path: str) -> Problem:
    """What the framework itself refuses: an unknown route, another method."""
    if status == 404:
        return Problem(404, f"there is no route {path[:200]}.", code="unknown_route")
    if status == 405:
        return Problem(405, f"{path[:200]} does not take this method.", code="method_not_allowed")
    return Problem(status, f"{detail}.", "invalid_request_error" if status < 500 else "server_error")
