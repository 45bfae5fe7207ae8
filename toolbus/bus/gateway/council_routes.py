"""Serves the council over HTTP: members that run tools before the main model is called, for hosts in any language.

A tool that fails is part of the response, never an error of the request. A client that disconnects before the response
ends its run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse

from toolbus.bus.gateway.call_response import call_body
from toolbus.bus.gateway.client_disconnect import disconnected_response, unless_disconnected
from toolbus.bus.gateway.contract_models import Invoked, Problem
from toolbus.bus.gateway.council_models import (
    MAX_ID,
    CouncilAnswer,
    CouncilRetryBody,
    CouncilRunBody,
    CouncilRuns,
    CouncilShown,
    CouncilTools,
    InlineBody,
    InlineInvokeBody,
    InlineOffer,
)
from toolbus.bus.gateway.event_stream import RETRY, EventStream, event, wants_events
from toolbus.bus.gateway.gateway_parts import parts_of, principal_of
from toolbus.bus.gateway.host_models import Level, UserId
from toolbus.bus.gateway.json_response import json_bytes_response, json_response, write_json
from toolbus.bus.gateway.tool_routes import REFUSALS
from toolbus.dialects import find_dialect
from toolbus.errors import PeerLost, SetupError
from toolbus.functions.call_context import CallContext
from toolbus.mailbox import Mailbox
from toolbus.text import quote
from toolbus.tool import level_of

if TYPE_CHECKING:
    from toolbus.council.council_service import CouncilService, Start
    from toolbus.council.inline_tools import InlineTarget, InlineTools

MAX_RUN_EVENTS = 1_000  # that wait for a slow client: a run has one for each of its 100 members, and a few more
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"model": CouncilAnswer, "content": {"text/event-stream": {}}},
    503: {"model": Problem, "description": "The bus stopped meanwhile."},
}
_NO_RUN: dict[int | str, dict[str, Any]] = {
    404: {"model": Problem, "description": "The run is unknown, or newer runs have replaced it."}
}


def router() -> APIRouter:
    """Returns the endpoints, for buses that have a council."""
    routes = APIRouter(prefix="/api/council", tags=["council"], responses=REFUSALS)
    for add in (_shows, _runs, _inline, _follows):
        add(routes)
    return routes


def _shows(routes: APIRouter) -> None:
    @routes.get("", responses={200: {"model": CouncilShown}})
    async def get_council(request: Request) -> Response:
        """Shows settings and members in force: those of the council file."""
        return json_response({"ok": True, **(await _council_of(request)).described()})

    @routes.get("/tools", responses={200: {"model": CouncilTools}})
    async def list_council_tools(request: Request, user_id: UserId = "", level: Level = 0) -> Response:
        """Lists what members can be assigned for a user: tools made for councils, and prompt tools."""
        principal_of(request, user_id, level)
        tools = await (await _council_of(request)).tools(user_id, {"level": str(level)})
        return json_response({"ok": True, "count": len(tools), "tools": tools})

    @routes.get("/runs", responses={200: {"model": CouncilRuns}})
    async def list_council_runs(request: Request) -> Response:
        """Lists the runs that are stored, the newest first, without what their tools gave."""
        runs = (await _council_of(request)).runs()
        return json_response({"ok": True, "count": len(runs), "runs": runs})

    @routes.get("/runs/{run_id}", responses={200: {"model": CouncilAnswer}, **_NO_RUN})
    async def get_council_run(
        run_id: Annotated[str, Path(description="`runId` of its answer.", examples=["0123456789abcdef"])],
        request: Request,
    ) -> Response:
        """Shows the result of a run, retries included. Only the newest runs are stored."""
        run = (await _council_of(request)).find(run_id)
        return _not_found(run_id) if run is None else json_response(run)


def _runs(routes: APIRouter) -> None:
    @routes.post("/run", responses=_RESPONSES)
    async def run_council(body: CouncilRunBody, request: Request) -> Response:
        """Rolls the dice and runs the tools of the members that take part. A failed tool is a result like any other.

        With `Accept: text/event-stream` the answer is a stream: the run's events as they happen, then one event
        `result`. Closing the connection ends the run and cancels its calls.
        """
        fields = body.known()
        principal_of(request, body.user_id, level_of(body.attributes))
        try:
            run = (await _council_of(request)).begin({**fields, "unknown": body.unknown})
        except SetupError as error:
            raise _invalid(error, fields) from None
        return await _run_response(request, run)

    @routes.post("/retry", responses={**_RESPONSES, **_NO_RUN})
    async def retry_council(body: CouncilRetryBody, request: Request) -> Response:
        """Runs again what failed in a run, without dice, and answers with the whole run.

        The answer is a stream where a run's is.
        """
        only = None if body.only is None else [(each.member_id, each.tool_name) for each in body.only]
        try:
            run = (await _council_of(request)).begin_retry(body.run_id, only, body.unknown)
        except SetupError as error:
            raise _invalid(error, body.known()) from None
        return _not_found(body.run_id) if run is None else await _run_response(request, run)


def _inline(routes: APIRouter) -> None:
    @routes.post("/inline", responses={200: {"model": InlineOffer}})
    async def offer_inline(body: InlineBody, request: Request) -> Response:
        """Offers the members' tools to the main model itself: each once for every member that has it, without dice.

        Tools that are `inline_available` are offered too, with or without members. The same members and tools give the
        same names.
        """
        dialect, (inline, _, ignored) = find_dialect(body.dialect), await _inline_of(body, request)
        offered = await inline.export()
        export = dialect.export(offered.tools)
        hashes = {tool.name: tool.schema_hash for tool in offered.tools}
        answer: dict[str, Any] = {
            "ok": True,
            "dialect": body.dialect,
            "tools": list(export.tools),
            "names": {name: _target(target, hashes[name]) for name, target in offered.targets.items()},
            "missing": [{"memberId": member, "toolName": name} for member, name in offered.missing],
        }
        return json_response({**answer, "ignored": ignored} if ignored else answer)

    @routes.post("/inline/invoke", responses={200: {"model": Invoked}})
    async def invoke_inline(body: InlineInvokeBody, request: Request) -> Response:
        """Calls what a name of the main model stands for, on behalf of its member.

        Give the members, settings, dialect and user with which the name was offered. A failed call is an answer like
        any other, also that of an unknown name.
        """
        inline, context, _ = await _inline_of(body, request)
        arguments = body.arguments if isinstance(body.arguments, str) else write_json(body.arguments).decode()
        timeout = body.timeout_seconds
        calling = inline.call(body.name, arguments, context=context, schema_hash=body.schema_hash, timeout=timeout)
        result = await unless_disconnected(request, calling)
        return disconnected_response() if result is None else json_bytes_response(await call_body(result))


async def _inline_of(body: InlineBody, request: Request) -> tuple[InlineTools, CallContext, list[str]]:
    fields = body.known()
    principal_of(request, body.user_id, level_of(body.attributes))
    try:
        rule = find_dialect(body.dialect).name_rule
        return (await _council_of(request)).inline({**fields, "unknown": body.unknown}, rule)
    except SetupError as error:
        raise _invalid(error, fields) from None


def _target(target: InlineTarget, schema_hash: str) -> dict[str, Any]:
    member = target.member
    return {
        "tool": target.tool_name,
        "member_id": member.id if member is not None else "",
        "member_name": member.name if member is not None else "",
        "schema_hash": schema_hash,
    }


def _follows(routes: APIRouter) -> None:
    @routes.get(
        "/events",
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
    )
    async def council_events(
        request: Request,
        chat_id: Annotated[str, Query(max_length=MAX_ID, description="Of this chat only; empty: of all.")] = "",
    ) -> Response:
        """Streams what councils do, as it happens, under the events' own names.

        No event is repeated: a client that reconnects has missed those in between. A client that reads too slowly loses
        the oldest events; `COUNCIL_EVENTS_LOST` says how many.
        """
        council = await _council_of(request)
        return EventStream(_follow(council, chat_id), parts_of(request).core.timings.ping_seconds)


async def _council_of(request: Request) -> CouncilService:
    find = parts_of(request).find_council
    assert find is not None  # else the application has no such routes
    return await find()


async def _run_response(request: Request, run: Start) -> Response:
    if wants_events(request):
        return EventStream(_stream(run), parts_of(request).core.timings.ping_seconds)
    result = await unless_disconnected(request, run(None))
    return disconnected_response() if result is None else json_response(result)


async def _stream(run: Start) -> AsyncGenerator[bytes]:
    """Yields the events of a run, then its result; without a result where the bus stopped."""
    events = Mailbox[Mapping[str, Any]](MAX_RUN_EVENTS)
    running = asyncio.ensure_future(run(events.put))
    running.add_done_callback(lambda task: events.close())
    try:
        async for each in events:
            yield _event(each)
        yield event("result", running.result())
    except PeerLost:
        return
    finally:
        running.cancel()


async def _follow(council: CouncilService, chat_id: str) -> AsyncGenerator[bytes]:
    watcher = council.watch(chat_id)
    try:
        yield RETRY  # a client that has read this gets every event from now on
        async for each in watcher:
            yield _event(each)
    finally:
        watcher.close()


def _event(council_event: Mapping[str, Any]) -> bytes:
    return event(council_event["event"], dict(council_event))


def _invalid(error: SetupError, body: Any) -> RequestValidationError:
    """Returns the error for a body that breaks a rule; where a value is missing, it echoes what should have it."""
    for step in error.loc:
        try:
            body = body[step]
        except (LookupError, TypeError):
            break
    fault = {"type": "value_error", "loc": ("body", *error.loc), "msg": str(error), "input": body}
    return RequestValidationError([fault])


def _not_found(run_id: str) -> Response:
    detail = f"there is no run {quote(run_id)}: it has not ended, or newer runs have replaced it. Run the council again"
    return json_response({"detail": detail}, 404)
