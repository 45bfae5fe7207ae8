"""Server-sent events, as every stream of the gateway sends them, and the first of these: changes of the catalog."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.sse import format_sse_event
from starlette.types import Send

from toolbus.bus.catalog.changes import CatalogChanges
from toolbus.bus.catalog.listing import ToolListing
from toolbus.bus.gateway.parts import GatewayParts
from toolbus.bus.gateway.tool_routes import REFUSALS, line

PING_SECONDS = 15.0  # below the minute or so after which proxies and clients give up on silence
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
MAX_WRITTEN = 16  # events kept: watchers that come back may each know another revision
_PING = b": ping\n\n"


def router(parts: GatewayParts) -> APIRouter:
    """Returns the endpoint over one bus."""
    routes = APIRouter(prefix="/api/tools", tags=["tools"], responses=REFUSALS)
    written = _Written()

    @routes.get(
        "/events",
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
    )
    async def events(
        since: Annotated[int | None, Query(ge=0, description="The revision that is known already.")] = None,
        last_event_id: Annotated[str | None, Header(description="The same, as browsers send it.")] = None,
    ) -> Response:
        """Streams the catalog: everything first, then what changes.

        Each event `catalog` has the revision as its id. Whoever comes back with it gets what was missed; one that has
        been away for too long gets everything (`full`) again.
        """
        return EventStream(_changes(parts, revision_of(last_event_id, since), written))

    return routes


class EventStream(StreamingResponse):
    """Events with pings between them. Whatever ends it, the generator ends at once, and not when it is collected."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        self._pinged = _with_pings(events)
        super().__init__(self._pinged, headers=_HEADERS)

    async def stream_response(self, send: Send) -> None:
        """Sends everything; cancelled when the reader goes."""
        async with contextlib.aclosing(self._pinged):
            await super().stream_response(send)


def wants_events(request: Request) -> bool:
    """Whether a request asks for a stream where there is a plain answer too."""
    return "text/event-stream" in request.headers.get("accept", "")


def revision_of(last_event_id: str | None, since: int | None) -> int:
    """Returns the number from which a reader wants to go on; -1 where it says none that could be one."""
    known = last_event_id if last_event_id is not None else str(since if since is not None else -1)
    return int(known) if known.isascii() and known.isdecimal() and len(known) < 19 else -1


def event(name: str, data: dict[str, Any], id: str | None = None) -> bytes:
    """Returns one event, its data as JSON."""
    return format_sse_event(event=name, data_str=json.dumps(data, separators=(",", ":")), id=id)


async def _with_pings(events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Yields events, and a comment wherever none came for a while, so that a dead reader is noticed."""
    waiting: asyncio.Task[bytes] | None = None
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(anext(events))
            done, _ = await asyncio.wait((waiting,), timeout=PING_SECONDS)
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


async def _changes(parts: GatewayParts, revision: int, written: _Written) -> AsyncGenerator[bytes]:
    yield b"retry: 1000\n\n"
    async for changes in parts.core.signals.watch(revision):
        if changes.full or changes.added or changes.changed or changes.removed:
            yield written.event(revision, changes)
        revision = changes.revision


class _Written:
    """Events as bytes while their revision is the newest: watchers are told the same at the same time."""

    def __init__(self) -> None:
        self._revision = 0  # for which the events hold
        self._events: dict[int, bytes] = {}  # by the revision that their watcher knows, -1 being none

    def event(self, known: int, changes: CatalogChanges) -> bytes:
        """Returns what a watcher that knows a revision is sent."""
        if self._revision != changes.revision or len(self._events) >= MAX_WRITTEN:
            self._revision = changes.revision
            self._events.clear()
        known = -1 if changes.full else known
        if known not in self._events:
            self._events[known] = event("catalog", _described(changes), str(changes.revision))
        return self._events[known]


def _described(changes: CatalogChanges) -> dict[str, Any]:
    return {
        "revision": changes.revision,
        "full": changes.full,
        "added": [_detailed(listing) for listing in changes.added],
        "changed": [_detailed(listing) for listing in changes.changed],
        "removed": [{"name": name, "source": source} for name, source in changes.removed],
    }


def _detailed(listing: ToolListing) -> dict[str, Any]:
    """Returns a tool with what a host needs to offer it to a model."""
    return {
        **line(listing),
        "roles": listing.roles,
        "parameters": listing.tool.parameters,
        "timeout_seconds": listing.entry.current.timeout if listing.entry.current else listing.tool.timeout_seconds,
        "schema_hash": listing.tool.schema_hash,
    }
