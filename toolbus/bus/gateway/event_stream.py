"""Sends server-sent events: the response class, the encoding and the pings that every stream of the gateway uses."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse
from fastapi.sse import format_sse_event
from starlette.types import Send

from toolbus.bus.metrics.exposition import quality_of

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
