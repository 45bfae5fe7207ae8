"""Runs calls over HTTP: for hosts without gRPC, for main servers that speak the REST contract, and for operators.

A client that disconnects before the response cancels its call: the connection is watched while the call runs.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Annotated, Any
from urllib.parse import unquote

from fastapi import APIRouter, Body, Query, Request, Response
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toolbus.bus.catalog.entry import BUS_SOURCE, Entry
from toolbus.bus.gateway import callback_messages
from toolbus.bus.gateway.call_response import call_body, describe_result
from toolbus.bus.gateway.contract_models import CallbackBody, Context, Envelope, InvokeBody, Invoked, Problem
from toolbus.bus.gateway.event_stream import (
    EventStream,
    disconnected_response,
    event,
    left_in_stall,
    unless_disconnected,
    wants_events,
)
from toolbus.bus.gateway.gateway_parts import GatewayParts, parts_of, principal_of
from toolbus.bus.gateway.http_connection import CONNECTION, BoundedProtocol
from toolbus.bus.gateway.json_response import json_bytes_response, json_response
from toolbus.bus.gateway.tool_routes import CALLBACK_PATH, LIST_PATH, REFUSALS, UNKNOWN_ROLE, list_body
from toolbus.bus.local import LocalCaller
from toolbus.common.cancellation import is_being_cancelled
from toolbus.common.mailbox import Mailbox
from toolbus.common.text import quote, repair_utf8
from toolbus.errors import Code, Stage, ToolBusError, UnknownRole
from toolbus.protocol.tool import MAX_CALL_ID, PLUGIN_PREFIX, CallError, Progress, Result, dump_arguments
from toolbus.v1 import tool_pb2 as pb

# Where many updates wait, newer progress replaces older; chunks are pieces of the output and all stay, up to the size
# of an output. A client that reads more slowly than that ends its call.

MAX_WAITING = 128  # updates that wait before newer progress replaces older
OVERHEAD_BYTES = 256  # of one that waits: the record around its text


class ProgressBuffer:
    """The progress of one call that waits for its reader. Belongs to the loop that it was made on.

    Attributes:
        overflowed: whether more came than may wait; nothing more is accepted then.
        on_overflow: called when that happens.
    """

    def __init__(self, max_bytes: int) -> None:
        self.overflowed = False
        self.on_overflow: Callable[[], object] = bool
        self._max_bytes = max_bytes
        self._limit_bytes = max_bytes + MAX_WAITING * OVERHEAD_BYTES
        self._waiting_bytes = 0
        self._waiting = Mailbox[Progress](self._limit_bytes // OVERHEAD_BYTES + 1)  # bounded by bytes before that
        self._newest = 0  # number of the newest progress without a chunk, read or not; 0 before the first

    def __repr__(self) -> str:
        return f"<ProgressBuffer waiting={len(self._waiting)} bytes={self._waiting_bytes}>"

    def put(self, update: Progress) -> None:
        """Adds an update; where many wait, it replaces the newest progress that has not been read."""
        if self.overflowed:
            return
        if not update.chunk and len(self._waiting) >= MAX_WAITING:
            replaced = self._waiting.take_back(self._newest)
            self._waiting_bytes -= 0 if replaced is None else _weight(replaced)
        self._waiting_bytes += _weight(update)
        if self._waiting_bytes > self._limit_bytes:
            self.overflowed = True
            self.on_overflow()
            return
        number = self._waiting.put(update)
        if not update.chunk:
            self._newest = number

    def close(self) -> None:
        """Ends `events` after the updates that wait."""
        self._waiting.close()

    async def events(self) -> AsyncGenerator[bytes]:
        """Yields the updates as server-sent events, until `close`."""
        async for update in self._waiting:
            self._waiting_bytes -= _weight(update)
            yield _events(update)

    def refusal(self, call: pb.ToolCall) -> Result:
        """Returns the result of a call that ended because its client read too slowly."""
        limit = self._max_bytes
        message = (
            f"more than {limit} bytes of output (limit result_bytes) wait for the client that called {call.name!r}: "
            "read the stream faster"
        )
        error = CallError(Code.RESULT_TOO_LARGE, message, Stage.ACCEPTED, limit=("result_bytes", limit))
        return Result(call.call_id, is_error=True, error=error)


def _events(update: Progress) -> bytes:
    """Returns an update as one event, or as two."""
    events = event("chunk", {"text": update.chunk}) if update.chunk else b""
    if update.message or update.progress or update.total or not update.chunk:
        events += event("progress", {"progress": update.progress, "total": update.total, "message": update.message})
    return events


def _weight(update: Progress) -> int:
    return len(update.chunk.encode()) + len(update.message.encode()) + OVERHEAD_BYTES


_IDS = random.Random()  # of its own: a program that seeds the shared one would draw the same ids again
INVOKE_PATH = "/api/tools/invoke"


class _RestOfPath(PathConvertor):
    """The rest of a path, line breaks included: REST-3 allows them in names."""

    regex = "(?s:.*)"


def router() -> APIRouter:
    """Returns the endpoints."""
    register_url_convertor("rest", _RestOfPath())  # starlette knows convertors by name only, so one for the process
    routes = APIRouter(responses=REFUSALS)
    for add in (_for_hosts, _for_main_servers, _for_operators):
        add(routes)
    return routes


def _for_hosts(routes: APIRouter) -> None:
    @routes.post(
        INVOKE_PATH,
        tags=["calls"],
        responses={200: {"model": Invoked, "content": {"text/event-stream": {}}}, **UNKNOWN_ROLE},
    )
    async def invoke(body: InvokeBody, request: Request) -> Response:
        """Calls a tool, wherever it runs. A failed call is an answer like any other, with `is_error` and `error`.

        With `Accept: text/event-stream` the answer is a stream: events `progress` and `chunk` while the tool works,
        then one event `result`. Closing the connection cancels the call.
        """
        caller, call = call_of(body, request)
        if wants_events(request):
            if await left_in_stall(request):
                return disconnected_response()
            core = parts_of(request).core
            stream = _stream(caller, call, core.config.limits.result_bytes)
            return EventStream(stream, core.program.timings.ping_seconds)
        result = await unless_disconnected(request, caller.call(call))
        return disconnected_response() if result is None else await invoked_response(result)


def _for_main_servers(routes: APIRouter) -> None:
    @routes.post(CALLBACK_PATH + "{plugin_id}/{tool_name:rest}", tags=["calls"], responses={200: {"model": Envelope}})
    async def run_for_main_server(
        plugin_id: str,
        tool_name: str,
        body: CallbackBody,
        request: Request,
        role: Annotated[str, Query(description="For which role the tool was registered; empty: for all.")] = "",
    ) -> Response:
        """Runs a plugin's tool for a main server that has it with a callback URL to here (REST-50)."""
        parts = parts_of(request)
        plugin_id, tool_name = _path_names(request)
        entry = find_plugin_tool(parts, plugin_id, tool_name, role)
        if entry is None or entry.current is None:
            return json_response(_not_offered(parts, plugin_id, tool_name, entry))
        arguments = body.arguments if isinstance(body.arguments, dict) else {}
        call = pb.ToolCall(
            call_id=_call_id(body.call_id),  # two calls may have the same: each request is a caller of its own
            name=entry.name,
            role=entry.table.role if role or parts.core.catalog.registry.find(entry.name) is not entry else None,
            arguments_json=repair_utf8(callback_messages.written_arguments(arguments, body.raw_arguments))
            or _json_text(arguments),
        )
        take_trace(call, request)
        result = await unless_disconnected(request, parts.caller(request).call(call))
        return disconnected_response() if result is None else _envelope_response(result)


def _for_operators(routes: APIRouter) -> None:
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
        parts = parts_of(request)
        qualified = f"{BUS_SOURCE}:{name}"
        if parts.core.catalog.registry.find(qualified) is None:
            return json_response(
                {"detail": f"the bus has no tool {quote(name)}: `toolbus plugins tools` lists them"}, 404
            )
        call = pb.ToolCall(call_id=_call_id(""), name=qualified, arguments_json=_json_text(arguments or {}))
        result = await unless_disconnected(request, parts.caller(request, is_admin=True).call(call))
        return disconnected_response() if result is None else json_bytes_response(await call_body(result))


# -- requests become calls -----------------------------------------------------------------------------------------


def call_of(body: InvokeBody, request: Request) -> tuple[LocalCaller, pb.ToolCall]:
    """Returns the call of an invoke, and who makes it.

    Raises:
        UnknownRole: the role is not configured.
        NotPermitted: the identity may not call.
    """
    parts = parts_of(request)
    if body.role and body.role not in parts.core.catalog.view.roles(principal_of(request)):
        raise UnknownRole(body.role)
    call = _call(body)
    take_trace(call, request)
    return parts.caller(request), call


def take_trace(call: pb.ToolCall, request: Request) -> None:
    """Copies the trace context of a request's headers into its call."""
    for name, value in request.scope["headers"]:
        if name == b"traceparent":
            call.traceparent = value.decode("latin-1")
        elif name == b"tracestate":  # a list, which may stand in several lines
            text = value.decode("latin-1")
            call.tracestate = f"{call.tracestate},{text}" if call.tracestate else text


def _call(body: InvokeBody) -> pb.ToolCall:
    return pb.ToolCall(
        call_id=_call_id(body.call_id),
        name=body.name,
        arguments_json=repair_utf8(body.arguments) if isinstance(body.arguments, str) else _json_text(body.arguments),
        role=body.role or None,
        timeout_seconds=body.timeout_seconds or 0.0,
        context=_context(body.context) if body.context is not None else None,
        schema_hash=repair_utf8(body.schema_hash),
        background_after_seconds=body.background_after_seconds or 0.0,
        accepts=map(repair_utf8, body.accepts),
        input_responses_json="" if body.input_responses is None else _json_text(body.input_responses),
        request_state=repair_utf8(body.request_state),
    )


def _context(context: Context) -> pb.CallContext:
    return pb.CallContext(
        user_id=repair_utf8(context.user_id),
        attributes={repair_utf8(name): repair_utf8(value) for name, value in context.attributes.items()},
        member_json="" if context.member is None else _json_text(context.member),
        messages=[
            pb.ContextMessage(
                role=repair_utf8(each.role), content=repair_utf8(each.content), name=repair_utf8(each.name)
            )
            for each in context.messages
        ],
        traceparent=repair_utf8(context.traceparent),
    )


def _json_text(value: Any) -> str:
    """Returns a value of a request's body as JSON text; NaN as Python writes it, so that it is refused later.

    None, no arguments, becomes the empty text, as where a model wrote none.
    """
    if value is None:
        return ""
    try:
        text = dump_arguments(value) if isinstance(value, dict) else json.dumps(value, ensure_ascii=False)
        text.encode()
    except ValueError:  # NaN, or half of a surrogate pair
        text = json.dumps(value)
    return text


def _call_id(call_id: Any) -> str:
    """Returns the host's call id, or a new one where the host's is missing or breaks a rule.

    A new one need not be secret, and asking the system for random bytes would cost more than checking the body.
    """
    if isinstance(call_id, str) and 0 < len(call_id) <= MAX_CALL_ID:
        return repair_utf8(call_id)
    return f"http-{_IDS.getrandbits(64):016x}"


# -- calls of a main server ----------------------------------------------------------------------------------------


def _path_names(request: Request) -> tuple[str, str]:
    """Returns plugin and tool from the raw path: a slash in either is `%2F`, which the routing has decoded."""
    raw: bytes = request.scope["raw_path"]
    plugin_id, _, tool_name = raw.decode("ascii", "replace").partition(CALLBACK_PATH)[2].partition("/")
    return unquote(plugin_id), unquote(tool_name)


def find_plugin_tool(parts: GatewayParts, plugin_id: str, tool_name: str, role: str = "") -> Entry | None:
    """Returns a plugin's tool by the plugin's id, which is its source without `plugin:` (REST-51).

    Args:
        role: for which it was registered, where its source has several of that name; "" means all.
    """
    sources = (f"{PLUGIN_PREFIX}{plugin_id}", plugin_id)
    # A main server states no access level, so tools that require one are hidden from it.
    entries = [
        entry
        for source in sources
        for entry in parts.core.catalog.registry.entries_of(source, tool_name)
        if not entry.tool.min_level
    ]
    # First what was registered for that role, even while offline; then what is offered; of equals the first.
    return max(entries, key=lambda entry: ((entry.tool.role or "") == role, entry.current is not None), default=None)


def _not_offered(parts: GatewayParts, plugin_id: str, tool_name: str, entry: Entry | None) -> dict[str, Any]:
    running = any(parts.core.rooms.serving(source) for source in (f"{PLUGIN_PREFIX}{plugin_id}", plugin_id))
    if entry is not None or not running:
        reason = f" ({entry.last_error})" if entry is not None and entry.last_error else ""
        error, text = "PLUGIN_NOT_RUNNING", f"plugin {quote(plugin_id)} is not running{reason}: start it"
    else:
        error, text = "TOOL_NOT_REGISTERED", f"plugin {quote(plugin_id)} offers no tool {quote(tool_name)} now"
    return {"output": {"error": text}, "is_error": True, "error": error}


# -- results become responses --------------------------------------------------------------------------------------


async def invoked_response(result: Result) -> Response:
    """Returns the response of an invoke."""
    return json_bytes_response(await call_body(result), headers=_retry_after(result))


def _retry_after(result: Result) -> dict[str, str]:
    """Returns the header Retry-After, in whole seconds, since HTTP has no fractions."""
    seconds = result.error.retry_after_seconds if result.error is not None else 0.0
    return {"Retry-After": str(math.ceil(seconds))} if seconds > 0 else {}


def _envelope_response(result: Result) -> Response:
    content = callback_messages.envelope(result)
    try:
        return json_response(content)
    except RecursionError:  # the output alone could be parsed; inside the envelope it is nested one level deeper
        return json_response({**content, "output": result.output_json})


async def _stream(caller: LocalCaller, call: pb.ToolCall, max_bytes: int) -> AsyncGenerator[bytes]:
    """Yields a call's progress as events; the last event is its result."""
    progress = ProgressBuffer(max_bytes)
    running = asyncio.ensure_future(caller.call(call, progress.put))
    progress.on_overflow = running.cancel
    running.add_done_callback(lambda task: progress.close())
    try:
        async for each in progress.events():
            yield each
        yield event("result", describe_result(progress.refusal(call) if progress.overflowed else running.result()))
    finally:
        running.cancel()


# A request is plain if it has the exact path, a whole small body of JSON, and no stream as the answer. All others,
# and those that break a rule, go on to FastAPI unchanged, so each error has one text and one place. Both ways share
# the model of the body and the functions that make a call of it and a response of its result: a new field is added to
# `InvokeBody` and `call_routes` only.

MAX_BYTES = 65_536  # of a plain body: uvicorn pauses reading beyond, and would not see the client disconnect
# Lists and objects in a plain body: whether a text that is nested deeper can be read depends on the stack around it.
MAX_NESTED = 500
_JSON_TYPES = frozenset({b"application/json", b"application/json; charset=utf-8", b"application/json;charset=utf-8"})


class PlainRequests:
    """ASGI application that answers plain requests, and passes on the others.

    Args:
        app: the endpoints.
        fault: makes the response to an exception that is a fault of the bus.
    """

    def __init__(
        self, app: ASGIApp, parts: GatewayParts, fault: Callable[[Request, Exception], Awaitable[Response]]
    ) -> None:
        self._app = app
        self._parts = parts
        self._fault = fault

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        path = scope["path"]
        if path == INVOKE_PATH and scope["method"] == "POST" and self._is_plain(scope):
            await self._invoke(scope, receive, send)
        elif path == LIST_PATH and scope["method"] == "GET" and not scope["query_string"]:
            await self._list(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_plain(self, scope: Scope) -> bool:
        """Tells whether the head of a call is plain."""
        connection: BoundedProtocol | None = scope.get(CONNECTION)
        stalls = self._parts.core.program.stalls
        if connection is None or connection.pipeline or stalls.unsettled or stalls.clock() > stalls.due:
            return False
        length, kinds = b"", 0
        for name, value in scope["headers"]:
            if name == b"content-length":
                length = value
            elif name == b"content-type":
                kinds += 1
                if value not in _JSON_TYPES:
                    return False
            elif name == b"transfer-encoding" or (name == b"accept" and b"event-stream" in value.lower()):
                return False
        return kinds < 2 and 0 < int(length or b"0") <= MAX_BYTES

    async def _invoke(self, scope: Scope, receive: Receive, send: Send) -> None:
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())
        request = Request(scope)
        try:
            caller, call = call_of(_read(messages), request)
        except (ValueError, RecursionError, ToolBusError):
            await self._app(scope, _replaying(messages, receive), send)
            return
        try:
            result = await _result(scope[CONNECTION], caller, call)
            response = disconnected_response() if result is None else await invoked_response(result)
        except Exception as error:
            response = await self._fault(request, error)
        await response(scope, receive, send)

    async def _list(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await list_body(Request(scope))
        except ToolBusError:
            await self._app(scope, receive, send)
            return
        await json_bytes_response(body)(scope, receive, send)


def _read(messages: list[Message]) -> InvokeBody:
    """Reads the messages of a request as FastAPI does.

    Raises:
        ValueError: they are not a plain and valid body.
    """
    if messages[-1]["type"] != "http.request":
        raise ValueError("the client has disconnected")
    body = messages[0]["body"] if len(messages) == 1 else b"".join(message["body"] for message in messages)
    if body.count(b"[") + body.count(b"{") > MAX_NESTED:
        raise ValueError("it may be nested deeply")
    return InvokeBody.model_validate(json.loads(body))


def _replaying(messages: list[Message], receive: Receive) -> Receive:
    """Returns a receive function that yields these messages first."""
    again = iter(messages)

    async def replay() -> Message:
        message = next(again, None)
        return await receive() if message is None else message

    return replay


async def _result(connection: BoundedProtocol, caller: LocalCaller, call: pb.ToolCall) -> Result | None:
    """Makes a call; None where the client disconnects first, which cancels it.

    The connection itself says that it was lost, so that no task waits for it.
    """
    connection.on_lost = lambda: caller.give_up(call.call_id)
    try:
        return await caller.call(call)
    except asyncio.CancelledError:
        if is_being_cancelled():
            raise
        return None
    finally:
        connection.on_lost = None
