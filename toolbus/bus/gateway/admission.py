"""Has requests begin one by one where hundreds come at once, so that they do not hold up whatever else the loop does.

A request costs the loop about half a millisecond. Where five hundred begin in one pass of it, frames of streams and
questions about health wait for all of them, in each of the several passes that they need. So a crowd is let in one by
one, a pass for each, in the order in which they came; probes wait for nobody. Those who are few begin together, since
what begins together also travels to plugins together, which costs less. Nothing is refused.
"""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

from toolbus.bus.gateway.http_server import PROBES

TOGETHER = 64  # requests that may begin in one pass of the loop; where more wait, they are a crowd
_FREE = frozenset(path.decode() for path in PROBES)


class Admission:
    """An application that a crowd of requests enters one by one.

    Args:
        together: how many may begin in one pass of the loop.
    """

    def __init__(self, app: ASGIApp, together: int = TOGETHER) -> None:
        self._app = app
        self._together = together
        self._left = together  # that may still begin in this pass
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turns = False  # whether the next pass will be noticed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request when it is its turn."""
        if scope["type"] == "http" and scope["path"] not in _FREE:
            await self._turn()
        await self._app(scope, receive, send)

    async def _turn(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._turns:
            self._turns = True
            loop.call_soon(self._turned)
        if self._left:  # then nobody waits
            self._left -= 1
            return
        mine = loop.create_future()
        self._waiting.append(mine)
        await mine

    def _turned(self) -> None:
        """Lets in those whose pass has come."""
        crowded = len(self._waiting) > self._together
        room = 1 if crowded else self._together
        while room and self._waiting:
            first = self._waiting.popleft()
            if not first.done():  # else its request was given up
                first.set_result(None)
                room -= 1
        self._left = 0 if crowded else room
        self._turns = self._left < self._together
        if self._turns:
            asyncio.get_running_loop().call_soon(self._turned)
