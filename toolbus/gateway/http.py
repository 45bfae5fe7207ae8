"""The HTTP side of the bus, in its process and on its loop. It serves health to probes.

``/healthz`` says that the process runs and its loop turns; ``/readyz`` says whether calls are taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from toolbus.errors import SetupError

log = logging.getLogger("toolbus.http")

STOP_SECONDS = 2.0  # how long open requests get when the bus stops


class HttpServer:
    """Serves the gateway's application.

    Args:
        ready: whether the bus takes calls.
    """

    def __init__(self, ready: Callable[[], bool]) -> None:
        self._ready = ready
        self._server: uvicorn.Server | None = None  # None until started
        self._serving: asyncio.Task[None] | None = None  # None until started
        self.address = ""  # HOST:PORT, once started

    async def start(self, address: str) -> None:
        """Binds and starts to serve.

        Raises:
            SetupError: the address is taken or cannot be bound.
        """
        listening = _bind(address)
        host, port = listening.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        config = uvicorn.Config(
            self._application(), log_config=None, access_log=False, lifespan="off", server_header=False, loop="none"
        )
        self._server = _QuietServer(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]), name="toolbus http")
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.001)

    def _application(self) -> Starlette:
        return Starlette(routes=[Route("/healthz", self._healthz), Route("/readyz", self._readyz)])

    async def _healthz(self, request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def _readyz(self, request: Request) -> JSONResponse:
        ready = self._ready()
        return JSONResponse({"status": "ready" if ready else "draining"}, status_code=200 if ready else 503)

    async def stop(self) -> None:
        """Stops listening and ends what is open."""
        if self._server is None or self._serving is None:
            return
        self._server.should_exit = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._serving), STOP_SECONDS)
        self._server.force_exit = True
        await self._serving


class _QuietServer(uvicorn.Server):
    """Leaves signals to the bus."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


def _bind(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        # A port in TIME_WAIT may be taken again at once, one that somebody listens on may not.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, int(port)))
        listening.listen(1024)
    except OSError as problem:
        listening.close()
        raise SetupError(
            f"{address} is taken or cannot be bound ({problem.strerror}): stop who has it, choose another with "
            f"--http {host}:PORT (port 0 picks a free one), or do without with --http off"
        ) from None
    listening.setblocking(False)
    return listening
