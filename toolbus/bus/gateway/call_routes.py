"""Calls over HTTP: for hosts without gRPC, for main servers that speak the contract, and for operators.

Whoever goes away before the answer takes the call back: its connection is watched while the call runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import secrets
from collections.abc import AsyncGenerator, Awaitable
from typing import Annotated, Any, TypeVar
from urllib.parse import unquote

from fastapi import APIRouter, Body, Query, Request, Response
from fastapi.responses import JSONResponse
from starlette.convertors import PathConvertor, register_url_convertor

from toolbus.bus.catalog.entry import Entry
from toolbus.bus.catalog.handler import BUS_SOURCE
from toolbus.bus.gateway import callback_messages
from toolbus.bus.gateway.call_answer import invoked, written
from toolbus.bus.gateway.contract_models import CallbackBody, Context, Envelope, InvokeBody, Invoked, Problem
from toolbus.bus.gateway.event_stream import EventStream, event, wants_events
from toolbus.bus.gateway.parts import GatewayParts
from toolbus.bus.gateway.progress_buffer import ProgressBuffer
from toolbus.bus.gateway.tool_routes import CALLBACK_PATH, REFUSALS, UNKNOWN_ROLE
from toolbus.bus.local import LocalCaller
from toolbus.errors import UnknownRole
from toolbus.tool import MAX_CALL_ID, Result, dump_arguments
from toolbus.v1 import tool_pb2 as pb

PLUGIN_PREFIX = "plugin:"  # REST-51
GONE = 499  # what servers log for a client that left; nobody receives it

T = TypeVar("T")


class _Rest(PathConvertor):
    """The rest of a path, line breaks included: REST-3 lets names have them."""

    regex = "(?s:.*)"


def router(parts: GatewayParts) -> APIRouter:
    """Returns the endpoints over one bus."""
    register_url_convertor("rest", _Rest())  # starlette knows them by name only, so once for the process
    routes = APIRouter(responses=REFUSALS)
    for add in (_for_hosts, _for_main_servers, _for_operators):
        add(routes, parts)
    return routes


def _for_hosts(routes: APIRouter, parts: GatewayParts) -> None:
    @routes.post(
        "/api/tools/invoke",
        tags=["calls"],
        responses={200: {"model": Invoked, "content": {"text/event-stream": {}}}, **UNKNOWN_ROLE},
    )
    async def invoke(body: InvokeBody, request: Request) -> Response:
        """Calls a tool, wherever it runs. A failed call is an answer like any other, with `is_error` and `error`.

        With `Accept: text/event-stream` the answer is a stream: events `progress` and `chunk` while the tool works,
        then one event `result`. Closing the connection cancels the call.
        """
        if body.role and body.role not in parts.core.registry.roles:
            raise UnknownRole(body.role)
        call = _call(body)
        asker = parts.caller()
        if wants_events(request):
            return EventStream(_streamed(asker, call, parts.core.limits.result_bytes))
        result = await unless_gone(request, asker.call(call))
        return Response(status_code=GONE) if result is None else _answer(await written(result), _hint(result))


def _for_main_servers(routes: APIRouter, parts: GatewayParts) -> None:
    @routes.post(CALLBACK_PATH + "{plugin_id}/{tool_name:rest}", tags=["calls"], responses={200: {"model": Envelope}})
    async def run_for_main_server(
        plugin_id: str,
        tool_name: str,
        body: CallbackBody,
        request: Request,
        role: Annotated[str, Query(description="For which role the tool was registered; empty: for all.")] = "",
    ) -> Response:
        """Runs a plugin's tool for a main server that has it with a callback URL to here (REST-50)."""
        plugin_id, tool_name = _names_in(request)
        entry = find_of(parts, plugin_id, tool_name, role)
        if entry is None or entry.current is None:
            return _json(_not_there(parts, plugin_id, tool_name, entry))
        arguments = body.arguments if isinstance(body.arguments, dict) else {}
        call = pb.ToolCall(
            call_id=_call_id(body.call_id),  # two calls may have the same: each request is a caller of its own
            name=entry.name,
            role=entry.table.role,
            arguments_json=_text(arguments),
        )
        result = await unless_gone(request, parts.caller().call(call))
        return Response(status_code=GONE) if result is None else _enveloped(result)


def _for_operators(routes: APIRouter, parts: GatewayParts) -> None:
    @routes.post(
        "/api/bus/{name}",
        tags=["bus"],
        responses={200: {"model": Invoked}, 404: {"model": Problem, "description": "The bus has no such tool."}},
    )
    async def administer(
        name: str,
        request: Request,
        arguments: dict[str, Any] | None = Body(default=None, examples=[{}, {"limit": 10}]),  # noqa: B008
    ) -> Response:
        """Calls one of the bus's own tools, such as drain, stats or permit."""
        qualified = f"{BUS_SOURCE}:{name}"
        if parts.core.registry.find(qualified) is None:
            detail = f"the bus has no tool {name[:80]!r}: `toolbus tools` lists them"
            return JSONResponse({"detail": detail}, status_code=404)
        call = pb.ToolCall(call_id=_call_id(""), name=qualified, arguments_json=_text(arguments or {}))
        result = await unless_gone(request, parts.caller(is_admin=True).call(call))
        return Response(status_code=GONE) if result is None else _answer(await written(result))


# -- calls in ------------------------------------------------------------------------------------------------------


def _call(body: InvokeBody) -> pb.ToolCall:
    return pb.ToolCall(
        call_id=_call_id(body.call_id),
        name=body.name,
        arguments_json=_utf8(body.arguments) if isinstance(body.arguments, str) else _text(body.arguments),
        role=body.role or None,
        timeout_seconds=body.timeout_seconds or 0.0,
        context=_context(body.context) if body.context is not None else None,
        schema_hash=_utf8(body.schema_hash),
        background_after_seconds=body.background_after_seconds or 0.0,
    )


def _context(said: Context) -> pb.CallContext:
    return pb.CallContext(
        user_id=_utf8(said.user_id),
        attributes={_utf8(name): _utf8(value) for name, value in said.attributes.items()},
        member_json="" if said.member is None else _text(said.member),
        messages=[
            pb.ContextMessage(role=_utf8(each.role), content=_utf8(each.content), name=_utf8(each.name))
            for each in said.messages
        ],
        traceparent=_utf8(said.traceparent),
    )


def _utf8(text: str) -> str:
    """Returns a text that the wire can carry: JSON may hold half of a surrogate pair, UTF-8 may not."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _text(value: Any) -> str:
    """Returns a value of a request's body as JSON text again; what cannot be (NaN) as Python writes it, to be refused.

    No arguments are the empty text, as where a model wrote none.
    """
    if value is None:
        return ""
    try:
        text = dump_arguments(value) if isinstance(value, dict) else json.dumps(value, ensure_ascii=False)
        text.encode()
    except ValueError:  # NaN, or half of a surrogate pair
        text = json.dumps(value)
    return text


def _call_id(given: Any) -> str:
    """Returns the host's call id, or one of ours where it gave none that fits."""
    if isinstance(given, str) and 0 < len(given) <= MAX_CALL_ID:
        return _utf8(given)
    return f"http-{secrets.token_hex(8)}"


# -- a main server's way in ----------------------------------------------------------------------------------------


def _names_in(request: Request) -> tuple[str, str]:
    """Returns plugin and tool as the path has them: a slash in either is `%2F`, which the routing has decoded."""
    raw: bytes = request.scope["raw_path"]
    plugin_id, _, tool_name = raw.decode("ascii", "replace").partition(CALLBACK_PATH)[2].partition("/")
    return unquote(plugin_id), unquote(tool_name)


def find_of(parts: GatewayParts, plugin_id: str, tool_name: str, role: str = "") -> Entry | None:
    """Returns a plugin's tool by the plugin's id, which is its source without `plugin:` (REST-51).

    Args:
        role: for which it was registered, where its source has several of that name; "" means all.
    """
    sources = (f"{PLUGIN_PREFIX}{plugin_id}", plugin_id)
    # A main server states no access level, so what asks for one is as if there were none.
    found = [
        entry
        for source in sources
        for entry in parts.core.registry.entries_of(source, tool_name)
        if not entry.tool.min_level
    ]
    # What was registered for that role, even while offline; of those what is offered; of equals the first.
    return max(found, key=lambda entry: ((entry.tool.role or "") == role, entry.current is not None), default=None)


def _not_there(parts: GatewayParts, plugin_id: str, tool_name: str, entry: Entry | None) -> dict[str, Any]:
    running = any(parts.core.rooms.serving(source) for source in (f"{PLUGIN_PREFIX}{plugin_id}", plugin_id))
    if entry is not None or not running:
        why = f" ({entry.last_error})" if entry is not None and entry.last_error else ""
        error, text = "PLUGIN_NOT_RUNNING", f"plugin {plugin_id[:80]!r} is not running{why}: start it"
    else:
        error, text = "TOOL_NOT_REGISTERED", f"plugin {plugin_id[:80]!r} offers no tool {tool_name[:80]!r} now"
    return {"output": {"error": text}, "is_error": True, "error": error}


# -- results out ---------------------------------------------------------------------------------------------------


def _json(content: dict[str, Any]) -> Response:
    return _answer(callback_messages.write_json(content))


def _answer(body: bytes, headers: dict[str, str] | None = None) -> Response:
    return Response(body, media_type="application/json", headers=headers)


def _hint(result: Result) -> dict[str, str]:
    """Returns the header that says when to ask again, in whole seconds: HTTP knows no others."""
    seconds = result.error.retry_after_seconds if result.error is not None else 0.0
    return {"Retry-After": str(math.ceil(seconds))} if seconds > 0 else {}


def _enveloped(result: Result) -> Response:
    content = callback_messages.envelope(result)
    try:
        return _json(content)
    except RecursionError:  # it could just be read
        return _json({**content, "output": result.output_json})


async def unless_gone(request: Request, work: Awaitable[T]) -> T | None:
    """Waits for what a request asked for; cancels it, and returns None, when whoever asked has gone."""
    running = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((running, watching), return_when=asyncio.FIRST_COMPLETED)
        return running.result() if running.done() else None
    finally:
        for task in (running, watching):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _streamed(asker: LocalCaller, call: pb.ToolCall, max_bytes: int) -> AsyncGenerator[bytes]:
    """Yields a call's progress as events; the last event is its result."""
    progress = ProgressBuffer(max_bytes)
    running = asyncio.ensure_future(asker.call(call, progress.put))
    progress.on_overflow = running.cancel
    running.add_done_callback(lambda task: progress.close())
    try:
        async for each in progress.events():
            yield each
        yield event("result", invoked(progress.refusal(call) if progress.overflowed else running.result()))
    finally:
        running.cancel()
