"""Streams changes of the catalog as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse

from toolbus.bus.access.identity import Principal, Scopes
from toolbus.bus.catalog.changes import CatalogChanges
from toolbus.bus.catalog.entry import ToolListing
from toolbus.bus.gateway.event_stream import RETRY, EventStream, event, revision_of
from toolbus.bus.gateway.gateway_parts import GatewayParts, parts_of, principal_of
from toolbus.bus.gateway.tool_routes import REFUSALS, describe_tool

MAX_CACHED_EVENTS = 16  # clients that reconnect may each know another revision


def router() -> APIRouter:
    """Returns the endpoint."""
    routes = APIRouter(prefix="/api/tools", tags=["tools"], responses=REFUSALS)

    @routes.get(
        "/events",
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
    )
    async def events(
        request: Request,
        since: Annotated[int | None, Query(ge=0, description="The revision that is known already.")] = None,
        last_event_id: Annotated[str | None, Header(description="The same, as browsers send it.")] = None,
    ) -> Response:
        """Streams the catalog: everything first, then what changes.

        Each event `catalog` has the revision as its id. A client that reconnects with it gets what it missed; after a
        long absence it gets everything (`full`) again.
        """
        parts = parts_of(request)
        principal = principal_of(request)
        # The scopes of an identity may have changed since that revision, so it gets the whole catalog.
        known = revision_of(last_event_id, since) if principal.identity.scopes is None else -1
        follow = _follow(parts, known, principal)
        return EventStream(follow, parts.core.program.timings.ping_seconds)

    return routes


async def _follow(parts: GatewayParts, revision: int, principal: Principal) -> AsyncGenerator[bytes]:
    cache = parts.cache(_EventCache)
    yield RETRY
    async for changes in parts.core.signals.watch(revision, principal):
        if changes.full or changes.added or changes.changed or changes.removed:
            yield cache.event(revision, changes, principal.identity.scopes)
        revision = changes.revision


class _EventCache:
    """Caches events as bytes while their revision is the newest: many clients get the same one at the same time."""

    def __init__(self) -> None:
        self._revision = 0  # that the events bring a client to
        # By the revision that the client knows, -1 for none, and its scopes.
        self._events: dict[tuple[int, Scopes | None], bytes] = {}

    def event(self, known: int, changes: CatalogChanges, scopes: Scopes | None) -> bytes:
        """Returns the event for a client that knows a revision."""
        if self._revision != changes.revision or len(self._events) >= MAX_CACHED_EVENTS:
            self._revision = changes.revision
            self._events.clear()
        key = (-1 if changes.full else known, scopes)
        if key not in self._events:
            self._events[key] = event("catalog", _describe(changes), str(changes.revision))
        return self._events[key]


def _describe(changes: CatalogChanges) -> dict[str, Any]:
    return {
        "revision": changes.revision,
        "full": changes.full,
        "added": [_describe_listing(listing) for listing in changes.added],
        "changed": [_describe_listing(listing) for listing in changes.changed],
        "removed": [{"name": name, "source": source} for name, source in changes.removed],
    }


def _describe_listing(listing: ToolListing) -> dict[str, Any]:
    """Returns a tool with all that a host needs to offer it to a model."""
    return {
        **describe_tool(listing),
        "roles": listing.roles,
        "parameters": listing.tool.parameters,
        "timeout_seconds": listing.entry.current.timeout if listing.entry.current else listing.tool.timeout_seconds,
        "schema_hash": listing.tool.schema_hash,
    }
