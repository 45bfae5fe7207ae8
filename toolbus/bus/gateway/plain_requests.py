"""Answers plain calls and lists without FastAPI, whose routing costs several times as much as the call itself.

A request is plain if it has the exact path, a whole small body of JSON, and no stream as the answer. All others, and
those that break a rule, go on to FastAPI unchanged, so each error has one text and one place. Both ways share the model
of the body and the functions that make a call of it and a response of its result: a new field is added to `InvokeBody`
and `call_routes` only.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

from fastapi import Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toolbus.bus.gateway.call_routes import INVOKE_PATH, call_of, invoked_response
from toolbus.bus.gateway.client_disconnect import disconnected_response
from toolbus.bus.gateway.contract_models import InvokeBody
from toolbus.bus.gateway.gateway_parts import GatewayParts
from toolbus.bus.gateway.http_connection import CONNECTION, BoundedProtocol
from toolbus.bus.gateway.json_response import json_bytes_response
from toolbus.bus.gateway.tool_routes import LIST_PATH, list_body
from toolbus.bus.local import LocalCaller
from toolbus.cancellation import is_being_cancelled
from toolbus.errors import ToolBusError
from toolbus.tool import Result
from toolbus.v1 import tool_pb2 as pb

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
        stalls = self._parts.core.stalls
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
            body = list_body(Request(scope))
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
