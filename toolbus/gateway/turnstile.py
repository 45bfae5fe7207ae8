"""Lets requests begin a few at a time, so that hundreds which come at once do not hold up whatever else the loop does.

A request costs the loop about half a millisecond. Where five hundred begin in one pass of it, frames of streams and
questions about health wait for all of them. Here so many begin in one pass, and the others in the passes after it, in
the order in which they came; probes wait for nobody. Nothing is refused, and nobody waits while there is room.
"""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

from toolbus.gateway.http import PROBES

AT_ONCE = 16  # requests that begin in one pass of the loop
_FREE = frozenset(path.decode() for path in PROBES)


class Turnstile:
    """An application that is entered a few requests at a time.

    Args:
        at_once: how many begin in one pass of the loop.
    """

    def __init__(self, app: ASGIApp, at_once: int = AT_ONCE) -> None:
        self._app = app
        self._at_once = at_once
        self._left = at_once  # that may still begin in this pass
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
        self._left = self._at_once
        while self._left and self._waiting:
            first = self._waiting.popleft()
            if not first.done():  # else its request was given up
                first.set_result(None)
                self._left -= 1
        self._turns = self._left < self._at_once
        if self._turns:
            asyncio.get_running_loop().call_soon(self._turned)
