"""Sends server-sent events: the response class, the encoding and the pings that every stream of the gateway uses."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from fastapi.sse import format_sse_event
from starlette.types import Send

from toolbus.bus.gateway.gateway_parts import parts_of
from toolbus.bus.web_paths import disconnected, quality_of

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
RETRY = b"retry: 1000\n\n"  # begins a stream: after a lost connection the client reconnects in one second
_PING = b": ping\n\n"
_ENCODER = json.JSONEncoder(separators=(",", ":"))  # made once: that takes as long as encoding


class EventStream(StreamingResponse):
    """Events with pings between them. However it ends, the generator is closed at once, not when it is collected.

    Args:
        ping_seconds: as in `Timings`.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], ping_seconds: float) -> None:
        self._events = _with_pings(events, ping_seconds)
        super().__init__(self._events, headers=_HEADERS)

    async def stream_response(self, send: Send) -> None:
        """Sends all events; cancelled when the client disconnects."""
        async with contextlib.aclosing(self._events):
            await super().stream_response(send)


def wants_events(request: Request) -> bool:
    """Returns whether a request names a stream in Accept, at an endpoint that also has a plain response."""
    for accepted in ",".join(request.headers.getlist("accept")).lower().split(","):
        media, _, parameters = accepted.partition(";")
        if media.strip() == EventStream.media_type and quality_of(parameters) > 0.0:
            return True
    return False


def revision_of(last_event_id: str | None, since: int | None) -> int:
    """Returns the number after which a client continues; -1 where it sent no valid one."""
    known = last_event_id if last_event_id is not None else str(since if since is not None else -1)
    return int(known) if known.isascii() and known.isdecimal() and len(known) < 19 else -1


def event(name: str, data: dict[str, Any], id: str | None = None) -> bytes:
    """Returns one event, its data as JSON."""
    return format_sse_event(event=name, data_str=_ENCODER.encode(data), id=id)


async def _with_pings(events: AsyncGenerator[bytes], ping_seconds: float) -> AsyncGenerator[bytes]:
    """Yields events, and a comment where none came for a while, so that a dead client is detected."""
    waiting: asyncio.Task[bytes] | None = None
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(anext(events))
            done, _ = await asyncio.wait((waiting,), timeout=ping_seconds)
            if not done:
                yield _PING
                continue
            task, waiting = waiting, None
            try:
                yield task.result()
            except StopAsyncIteration:
                return
    finally:
        if waiting is not None:
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                await waiting
        await events.aclose()


SETTLE_SECONDS = 0.05  # until the loop has read the end of a connection that follows a request
STATUS_DISCONNECTED = 499  # as servers log it for a client that disconnected; never sent

T = TypeVar("T")


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T | None:
    """Waits for the work; cancels it, and returns None, when the client disconnects first."""
    if await left_in_stall(request):
        asyncio.ensure_future(work).cancel()
        return None
    running = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(disconnected(request.receive))
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
    stalls = parts_of(request).core.program.stalls
    if stalls.clock() > stalls.due:
        stalls.notice()
    if not stalls.unsettled:
        return False
    watching = asyncio.ensure_future(disconnected(request.receive))
    await asyncio.wait((watching,), timeout=SETTLE_SECONDS)
    watching.cancel()
    return watching.done() and not watching.cancelled()


def disconnected_response() -> Response:
    """Returns the response that ends a request whose client has disconnected."""
    return Response(status_code=STATUS_DISCONNECTED)
