"""Controls the admission of HTTP requests: a burst of hundreds starts one by one, so that the event loop stays free.

A request costs the loop about half a millisecond. Where five hundred start in one pass of the loop, frames of gRPC
streams and health probes wait for all of them, in each of the several passes that they need. So a burst is admitted one
request per pass, in the order of arrival; health probes never wait. A few requests start together, because calls that
start together also travel to plugins together, which costs less. This is backpressure by delay: no request is refused.
"""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

from toolbus.bus.gateway.http_connection import PROBE_PATHS

MAX_TOGETHER = 64  # requests that may start in one pass of the loop; where more wait, they are a burst


class Admission:
    """ASGI middleware that admits a burst of requests one by one.

    Args:
        together: how many may start in one pass of the loop.
    """

    def __init__(self, app: ASGIApp, together: int = MAX_TOGETHER) -> None:
        self._app = app
        self._together = together
        self._free = together  # requests that may still start in this pass
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._scheduled = False  # whether `_next_pass` is going to run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request once it is admitted."""
        if scope["type"] == "http" and scope["path"] not in PROBE_PATHS:
            await self._admitted()
        await self._app(scope, receive, send)

    async def _admitted(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._next_pass)
        if self._free:  # then no request waits
            self._free -= 1
            return
        admitted = loop.create_future()
        self._waiting.append(admitted)
        await admitted

    def _next_pass(self) -> None:
        """Admits the requests that may start in this pass of the loop."""
        burst = len(self._waiting) > self._together
        free = 1 if burst else self._together
        while free and self._waiting:
            admitted = self._waiting.popleft()
            if not admitted.done():  # else its client has disconnected
                admitted.set_result(None)
                free -= 1
        self._free = 0 if burst else free
        self._scheduled = self._free < self._together
        if self._scheduled:
            asyncio.get_running_loop().call_soon(self._next_pass)
