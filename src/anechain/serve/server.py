"""uvicorn, with an end that is sure: running answers get a few seconds, then an error event, and the process ends."""

import asyncio
import logging
from types import FrameType

import uvicorn
from fastapi import FastAPI

from anechain.serve.problem import Problem
from anechain.serve.service import Service

FINISH_S = 6.0  # for running answers after SIGTERM; with CLOSE_S less than the 10 s that supervisors often give
CLOSE_S = 2.0
CLOSING = Problem(503, "the server is shutting down: try again later.", "server_error", code="shutting_down")


class Server(uvicorn.Server):
    def __init__(self, app: FastAPI, service: Service, host: str, port: int) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host,
                port,
                log_level=logging.WARNING,
                access_log=False,
                log_config=None,
                timeout_graceful_shutdown=int(FINISH_S + CLOSE_S),
                lifespan="off",
            )
        )
        self._service = service
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)  # type: ignore[arg-type]
        self._service.close(CLOSING)
        await asyncio.to_thread(self._service.worker.join, CLOSE_S)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.call_later, FINISH_S, self._service.close, CLOSING)
