"""Serves notifications of plugins to users, as a list or as server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import BaseModel, Field

from toolbus.bus.access.identity import Principal
from toolbus.bus.gateway.contract_models import UserId
from toolbus.bus.gateway.event_stream import RETRY, EventStream, event, revision_of, wants_events
from toolbus.bus.gateway.gateway_parts import GatewayParts, parts_of, principal_of
from toolbus.bus.gateway.json_response import json_response
from toolbus.bus.gateway.tool_routes import REFUSALS
from toolbus.bus.streams.notification_board import MAX_STORED, MAX_STORED_BYTES, BoardEntry
from toolbus.common.mailbox import Mailbox
from toolbus.sdk.notification import wants_of

MAX_WAITING_BYTES = 2 * MAX_STORED_BYTES  # of the events that one slow reader may have waiting


class ShownNotification(BaseModel):
    """What a plugin said to a user outside a call."""

    number: Annotated[int, Field(description="Rises with each, also over restarts of the bus.")]
    source: str
    user_id: Annotated[str, Field(description="Whom it is for; empty: everyone.")]
    text: str
    data: Annotated[Any, Field(description="JSON for programs; null: none.")]
    time_seconds: Annotated[float, Field(description="When the bus got it, since the epoch.")]
    wants: Annotated[str, Field(description="What a host should do: `reply`, `context` or `nothing`.")]


class Notifications(BaseModel):
    """The newest notifications."""

    ok: bool
    newest: Annotated[int, Field(description="The number of the newest that the bus has had: the next `since`.")]
    notifications: list[ShownNotification]


def router() -> APIRouter:
    """Returns the endpoint."""
    routes = APIRouter(prefix="/api/notifications", tags=["models"], responses=REFUSALS)

    @routes.get("", responses={200: {"model": Notifications, "content": {"text/event-stream": {}}}})
    async def list_notifications(
        request: Request,
        user_id: UserId = "",
        limit: Annotated[int, Query(ge=1, le=MAX_STORED, description="At most this many.")] = 50,
        since: Annotated[int | None, Query(ge=0, description="Only those with a higher number.")] = None,
        last_event_id: Annotated[str | None, Header(description="The same, as browsers send it.")] = None,
    ) -> Response:
        """Lists what plugins said to users outside calls: the newest, or those after `since`, oldest first.

        With `user_id` only what is for that user or for everyone. With `Accept: text/event-stream` the answer is a
        stream of events `notification`, each with its number as its id: what came after `since`, as far as it is still
        known, and then each as it comes. An event `lost` says how many this client will not get.
        """
        parts, known = parts_of(request), max(0, revision_of(last_event_id, since))
        principal = principal_of(request, user_id)
        if wants_events(request):
            return EventStream(_follow(parts, principal, user_id, known), parts.core.program.timings.ping_seconds)
        board = parts.core.sessions.presence.notifications
        entries = [each for each in board.since(known or 1, principal) if _is_for(each, user_id)]
        shown = entries[:limit] if known else entries[-limit:]
        return json_response(
            {"ok": True, "newest": board.newest, "notifications": [_described(each) for each in shown]}
        )

    return routes


async def _follow(parts: GatewayParts, principal: Principal, user_id: str, known: int) -> AsyncGenerator[bytes]:
    board = parts.core.sessions.presence.notifications
    lost = board.lost_after(known)
    mailbox: Mailbox[bytes] = Mailbox(MAX_WAITING_BYTES, on_lost=_lost, weigh=len)

    def put(notification: BoardEntry) -> None:
        if _is_for(notification, user_id):
            mailbox.put(event("notification", _described(notification), str(notification.number)))

    for notification in board.since(known, principal):
        put(notification)
    end = board.read(principal, put, mailbox.close)
    try:
        yield RETRY
        if lost:
            yield _lost(lost)
        async for item in mailbox:
            yield item
    finally:
        end()


def _lost(count: int) -> bytes:
    return event("lost", {"count": count})


def _is_for(notification: BoardEntry, user_id: str) -> bool:
    return not user_id or notification.user_id in ("", user_id)


def _described(notification: BoardEntry) -> dict[str, Any]:
    described = asdict(notification)
    data_json = described.pop("data_json")
    data = json.loads(data_json) if data_json else None
    return described | {"data": data, "wants": wants_of(data)}
