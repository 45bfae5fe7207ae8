"""Cancels the work for a request when its HTTP client disconnects before the response."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import TypeVar

from fastapi import Request, Response

from toolbus.bus.gateway.gateway_parts import parts_of

SETTLE_SECONDS = 0.05  # until the loop has read the end of a connection that follows a request
STATUS_DISCONNECTED = 499  # as servers log it for a client that disconnected; never sent

T = TypeVar("T")


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T | None:
    """Waits for the work; cancels it, and returns None, when the client disconnects first."""
    if await left_in_stall(request):
        asyncio.ensure_future(work).cancel()
        return None
    running = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((running, watching), return_when=asyncio.FIRST_COMPLETED)
        return running.result() if running.done() else None
    finally:
        for task in (running, watching):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def left_in_stall(request: Request) -> bool:
    """Tells whether the client has disconnected, where its request may have arrived while the bus stood still.

    The end of its connection is then behind the request in the socket.
    """
    stalls = parts_of(request).core.stalls
    if stalls.clock() > stalls.due:
        stalls.notice()
    if not stalls.unsettled:
        return False
    watching = asyncio.ensure_future(_disconnected(request))
    await asyncio.wait((watching,), timeout=SETTLE_SECONDS)
    watching.cancel()
    return watching.done() and not watching.cancelled()


def disconnected_response() -> Response:
    """Returns the response that ends a request whose client has disconnected."""
    return Response(status_code=STATUS_DISCONNECTED)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
