"""Cancels the work for a request when its HTTP client disconnects before the response."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import TypeVar

from fastapi import Request, Response

STATUS_DISCONNECTED = 499  # what servers log for a client that left; it never arrives anywhere

T = TypeVar("T")


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T | None:
    """Waits for the work; cancels it, and returns None, when the client disconnects first."""
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


def disconnected_response() -> Response:
    """Returns the response that ends a request whose client is gone."""
    return Response(status_code=STATUS_DISCONNECTED)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
