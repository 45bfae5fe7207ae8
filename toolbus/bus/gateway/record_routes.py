"""Which calls there were: the bus's records of ended calls, asked for or followed.

The records tell nobody when there is a new one, since that would cost every call, so a follower's stream looks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Request, Response

from toolbus.bus.calls.call_records import RECORDS_KEPT, CallRecord, CallRecords, RecordFilter
from toolbus.bus.gateway import callback_messages
from toolbus.bus.gateway.event_stream import EventStream, event, revision_of, wants_events
from toolbus.bus.gateway.host_models import RecordedCalls
from toolbus.bus.gateway.parts import GatewayParts
from toolbus.bus.gateway.tool_routes import REFUSALS

LOOK_SECONDS = 0.1  # between two looks of a follower


def _wanted(
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
        wanted: Annotated[RecordFilter, Depends(_wanted)],
        limit: Annotated[int, Query(ge=1, le=RECORDS_KEPT, description="At most this many.")] = 50,
        since: Annotated[int | None, Query(ge=0, description="Only calls with a higher number.")] = None,
        last_event_id: Annotated[str | None, Header(description="The same, as browsers send it.")] = None,
    ) -> Response:
        """Lists ended calls: the newest first, or with `since` those after a number, oldest first.

        With `Accept: text/event-stream` the answer is a stream of events `call`, each with its number as its id: what
        ended after `since`, or after this request where it says none, and then each call as it ends.
        """
        known = revision_of(last_event_id, since)
        if wants_events(request):
            return EventStream(_followed(parts, wanted, known))
        records = parts.core.records
        found = records.newest(wanted, limit) if known < 0 else records.after(wanted, known, limit)
        return Response(_listed(records, found), media_type="application/json")

    return routes


def _listed(records: CallRecords, found: list[CallRecord]) -> bytes:
    calls = [record.described(records.began) for record in found]
    return callback_messages.write_json({"ok": True, "newest": records.ended, "calls": calls})


async def _followed(parts: GatewayParts, wanted: RecordFilter, known: int) -> AsyncGenerator[bytes]:
    records = parts.core.records
    if known < 0:
        known = records.ended
    elif known > records.ended:
        known = 0  # of a bus that has been restarted since
    yield b"retry: 1000\n\n"
    while not parts.core.signals.closed:
        newest = records.ended
        for record in records.after(wanted, known, RECORDS_KEPT):
            yield event("call", record.described(records.began), str(record.number))
        known = newest
        await asyncio.sleep(LOOK_SECONDS)
