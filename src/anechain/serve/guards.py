"""What a request passes before its route: size, key, and answers of one shape for whatever goes wrong on the way."""

import hmac
import json
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from anechain.serve.problem import Problem

REQUEST_ID = "x-request-id"
OPEN = ("/", "/health")  # what needs no key: the page holds none of anybody's words


class Guard:
    """ASGI middleware, under Cors alone. Refuses before a body is read where that is possible.

    A browser lets any web page send requests to this machine. So a POST that says which page it comes from has to come
    from the page here or from one of `origins`. And where the server is for this machine alone and has no key, its
    name has to be this machine's: a page's own name may lead here (DNS rebinding), and then it could read answers, too.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_key: str,
        body_bytes: int,
        loopback: bool,
        origins: Sequence[str],
        refused: Callable[[str, Problem], str],
    ) -> None:
        self._app, self._key, self._limit, self._refused = app, api_key.encode(), body_bytes, refused
        self._any, self._origins = "*" in origins, {origin.lower() for origin in origins}
        self._hosts = {urlsplit(origin).hostname for origin in self._origins}
        self._checks_host = loopback and not api_key and not self._any

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        if stranger := self._stranger(scope["method"], headers):
            await self._refuse(send, scope["path"], stranger)
            return
        if self._key and scope["path"] not in OPEN and scope["method"] != "OPTIONS":
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, b"Bearer " + self._key):
                problem = Problem(
                    401, "the API key is missing or wrong: send it as a Bearer token.", code="invalid_api_key"
                )
                await self._refuse(send, scope["path"], problem)
                return
        length = headers.get(b"content-length", b"")
        too_long = Problem(413, f"the body is longer than the limit of {self._limit} bytes.", code="body_too_long")
        if length.isdigit() and int(length) > self._limit:
            await self._refuse(send, scope["path"], too_long)
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

    def _stranger(self, method: str, headers: dict[bytes, bytes]) -> Problem | None:
        """Why a request is not one of this server's own clients', if so."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if self._checks_host and host and not (_is_local(host) or _name(host) in self._hosts):
            return Problem(
                403,
                f"this server is for its own machine and is not called {host[:200]!r}: ask for 127.0.0.1, start it "
                "with --api-key, or name a page's origin with --cors.",
                code="unknown_host",
            )
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        own = origin in self._origins or origin.partition("://")[2] == host
        if method == "POST" and origin and not (self._any or own):
            return Problem(
                403, f"pages of {origin[:200]!r} may not ask here: name that origin with --cors.", code="unknown_origin"
            )
        return None

    async def _refuse(self, send: Send, path: str, problem: Problem) -> None:
        request_id = self._refused(path, problem)
        body = json.dumps(problem.body()).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers.append((REQUEST_ID.encode(), request_id.encode()))
        headers.append((b"connection", b"close"))  # the rest of the body is not read
        await send({"type": "http.response.start", "status": problem.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class Cors(CORSMiddleware):
    """For the pages of `origins`, which may read when to come back, too. A refusal has the shape of all others."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        super().__init__(
            app,
            allow_origins=list(origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, "retry-after"],
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        answer = super().preflight_response(request_headers)
        if answer.status_code < 400:
            return answer
        problem = Problem(answer.status_code, f"{bytes(answer.body).decode()}.", code="unknown_origin")
        kept = {key: value for key, value in answer.headers.items() if not key.startswith("content-")}
        return JSONResponse(problem.body(), problem.status, headers=kept)


def _name(host: str) -> str:
    """A Host header without its port; "" for one that is malformed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_local(host: str) -> bool:
    """Whether a Host header names this machine, or an address, which no name server can lead elsewhere."""
    name = _name(host)
    try:
        return name == "localhost" or name.endswith(".localhost") or bool(ip_address(name))
    except ValueError:
        return False


def plain(status: int, detail: Any, path: str) -> Problem:
    """What the framework itself refuses: an unknown route, another method."""
    if status == 404:
        return Problem(404, f"there is no route {path[:200]}.", code="unknown_route")
    if status == 405:
        return Problem(405, f"{path[:200]} does not take this method.", code="method_not_allowed")
    return Problem(status, f"{detail}.", "invalid_request_error" if status < 500 else "server_error")
