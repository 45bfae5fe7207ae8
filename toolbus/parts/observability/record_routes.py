"""Serves the records of ended calls, as a list or as a stream that follows them.

A stream is notified of the first call after a silence and then reads in batches: followed
calls cost nothing more. An event `lost` stands for records that were overwritten before the stream read them. Streams
with the same filter and position share their events.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Annotated
from weakref import WeakValueDictionary

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from pydantic import BaseModel, Field

from toolbus.bus.calls.call_records import MAX_RECORDS, CallRecords, RecordFilter
from toolbus.bus.gateway.event_stream import RETRY, EventStream, event, revision_of, wants_events
from toolbus.bus.gateway.gateway_parts import GatewayParts, parts_of
from toolbus.bus.gateway.json_response import json_response
from toolbus.bus.gateway.tool_routes import REFUSALS

BATCH_SECONDS = 0.05  # between two batches of a stream
MAX_BATCH = 200  # records of a batch: a stream sends at most 4,000 calls/s, which bounds what a follower costs


def _filter(
    source: Annotated[str, Query(description="Only calls of this source's tools.")] = "",
    name: Annotated[str, Query(description="Only calls of this tool.")] = "",
    caller: Annotated[str, Query(description="Only calls by this source.")] = "",
    user_id: Annotated[str, Query(description="Only calls for this user.")] = "",
    outcome: Annotated[str, Query(description="Only calls that ended so: `OK`, or a code such as `TOOL`.")] = "",
) -> RecordFilter:
    return RecordFilter(source, name, caller, user_id, outcome)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class EncodedBatch:
    """The bytes of one batch, and the number of the last call that it covers."""

    data: bytes
    position: int


class SharedBatches:
    """The batches that streams are sending, shared by those with the same filter and the same position."""

    def __init__(self) -> None:
        self._made: WeakValueDictionary[tuple[RecordFilter, int], EncodedBatch] = WeakValueDictionary()

    def after(self, records: CallRecords, record_filter: RecordFilter, position: int) -> EncodedBatch:
        """Returns a batch of the records after a number, which another stream may have made before."""
        batch = self._made.get((record_filter, position))
        if batch is None:
            batch = self._made[record_filter, position] = self._make(records, record_filter, position)
        return batch

    @staticmethod
    def _make(records: CallRecords, record_filter: RecordFilter, position: int) -> EncodedBatch:
        read = records.batch(record_filter, position, MAX_BATCH)
        events = [event("call", each.described(records.began), str(each.number)) for each in read.records]
        if read.lost:
            last = position + read.lost
            events.insert(0, event("lost", {"count": read.lost, "first": position + 1, "last": last}, str(last)))
        return EncodedBatch(b"".join(events), read.position)


class RecordedRepair(BaseModel):
    """What the bus did to arguments before the tool got them; no values."""

    path: Annotated[str, Field(examples=["days", "where.city"])]
    from_type: Annotated[str, Field(alias="from", description="A type of JSON Schema, or `absent`.")]
    to: Annotated[str, Field(description="A type of JSON Schema, or `absent`.")]


class RecordedLimit(BaseModel):
    """A limit that a call exceeded."""

    name: str
    value: float


class RecordedFailure(BaseModel):
    """How a call failed."""

    message: Annotated[str, Field(description="Empty where it could repeat arguments or an output.")]
    stage: Annotated[str, Field(description="How far the call had got.", examples=["not_dispatched", "accepted"])]
    retry_safe: Annotated[bool, Field(description="Whether a retry repeats nothing.")]
    limit: RecordedLimit | None


class RecordedCall(BaseModel):
    """One call that has ended."""

    number: Annotated[int, Field(description="Which ended call of this bus it was, from 1.")]
    id: Annotated[str, Field(description="The bus's own id of the call; empty: it was refused.")]
    call_id: str
    name: str
    source: Annotated[str, Field(description="Whose tool was called.")]
    caller: str
    user_id: str
    round: Annotated[int, Field(description="The round of a turn that made the call, from 1; 0: unknown.")]
    order: Annotated[int, Field(description="Its place among the calls of that round, from 0.")]
    started: Annotated[float, Field(description="Seconds since the epoch.")]
    ended: float
    seconds: float
    outcome: Annotated[str, Field(description="`OK`, or the code of its error.", examples=["OK", "TOOL"])]
    arguments_size: int
    output_size: int
    repairs: Annotated[list[RecordedRepair], Field(description="At most 20; left out where there are none.")] = []
    parent: Annotated[str, Field(description="The `id` of the call that made it; left out where it is not nested.")] = (
        ""
    )
    trace_id: Annotated[str, Field(description="Of its trace; left out where that is not sampled.")] = ""
    failure: Annotated[RecordedFailure | None, Field(description="Left out where the call succeeded.")] = None
    arguments: Annotated[str | None, Field(description="Only where the bus keeps contents.")] = None
    output: Annotated[str | None, Field(description="Only where the bus keeps contents.")] = None


class RecordedCalls(BaseModel):
    """Records of ended calls."""

    ok: bool
    newest: Annotated[int, Field(description="The number of the newest record there is: the next `since`.")]
    calls: list[RecordedCall]


def router() -> APIRouter:
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
        ended after `since`, or after this request where it says none, and then each call as it ends. An event `lost`
        stands for calls that were overwritten before this client could read them: `count` of them, numbers `first` to
        `last`, whatever the filters say.
        """
        parts, known = parts_of(request), revision_of(last_event_id, since)
        if wants_events(request):
            return EventStream(_follow(parts, record_filter, known), parts.core.program.timings.ping_seconds)
        records = parts.core.calls.records
        selected = records.newest(record_filter, limit) if known < 0 else records.after(record_filter, known, limit)
        calls = [record.described(records.began) for record in selected]
        return json_response({"ok": True, "newest": records.ended, "calls": calls})

    return routes


async def _follow(parts: GatewayParts, record_filter: RecordFilter, known: int) -> AsyncGenerator[bytes]:
    batches = parts.cache(SharedBatches)
    records, signals = parts.core.calls.records, parts.core.signals
    if known < 0:
        known = records.ended
    elif known > records.ended:
        known = 0  # a number of an earlier bus, which has been restarted since
    yield RETRY
    while not signals.closed:
        if known == records.ended:
            await signals.next_call()
            continue
        batch = batches.after(records, record_filter, known)
        known = batch.position
        if batch.data:
            yield batch.data
        await asyncio.sleep(BATCH_SECONDS)
