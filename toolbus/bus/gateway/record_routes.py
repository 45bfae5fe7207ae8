"""Serves the records of ended calls, as a list or as a stream that follows them.

A stream polls the records: notifying it would cost every call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Request, Response

from toolbus.bus.calls.call_records import MAX_RECORDS, RecordFilter
from toolbus.bus.gateway.event_stream import RETRY, EventStream, event, revision_of, wants_events
from toolbus.bus.gateway.gateway_parts import GatewayParts
from toolbus.bus.gateway.host_models import RecordedCalls
from toolbus.bus.gateway.json_response import json_response
from toolbus.bus.gateway.tool_routes import REFUSALS

POLL_SECONDS = 0.1  # between two polls of a stream


def _filter(
    source: Annotated[str, Query(description="Only calls of this source's tools.")] = "",
    name: Annotated[str, Query(description="Only calls of this tool.")] = "",
    caller: Annotated[str, Query(description="Only calls by this source.")] = "",
    user_id: Annotated[str, Query(description="Only calls for this user.")] = "",
    outcome: Annotated[str, Query(description="Only calls that ended so: `OK`, or a code such as `TOOL`.")] = "",
) -> RecordFilter:
    return RecordFilter(source, name, caller, user_id, outcome)


def router(parts: GatewayParts) -> APIRouter:
    """Returns the endpoint over one bus."""
    routes = APIRouter(prefix="/api/calls", tags=["bus"], responses=REFUSALS)

    @routes.get("", responses={200: {"model": RecordedCalls, "content": {"text/event-stream": {}}}})
    async def list_calls(
        request: Request,
        record_filter: Annotated[RecordFilter, Depends(_filter)],
        limit: Annotated[int, Query(ge=1, le=MAX_RECORDS, description="At most this many.")] = 50,
        since: Annotated[int | None, Query(ge=0, description="Only calls with a higher number.")] = None,
        last_event_id: Annotated[str | None, Header(description="The same, as browsers send it.")] = None,
    ) -> Response:
        """Lists ended calls: the newest first, or with `since` those after a number, oldest first.

        With `Accept: text/event-stream` the answer is a stream of events `call`, each with its number as its id: what
        ended after `since`, or after this request where it says none, and then each call as it ends.
        """
        known = revision_of(last_event_id, since)
        if wants_events(request):
            return EventStream(_follow(parts, record_filter, known), parts.core.timings.ping_seconds)
        records = parts.core.records
        selected = records.newest(record_filter, limit) if known < 0 else records.after(record_filter, known, limit)
        calls = [record.described(records.began) for record in selected]
        return json_response({"ok": True, "newest": records.ended, "calls": calls})

    return routes


async def _follow(parts: GatewayParts, record_filter: RecordFilter, known: int) -> AsyncGenerator[bytes]:
    records = parts.core.records
    if known < 0:
        known = records.ended
    elif known > records.ended:
        known = 0  # a number of an earlier bus, which has been restarted since
    yield RETRY
    while not parts.core.signals.closed:
        newest = records.ended
        for record in records.after(record_filter, known, MAX_RECORDS):
            yield event("call", record.described(records.began), str(record.number))
        known = newest
        await asyncio.sleep(POLL_SECONDS)
