"""Serves MCP over HTTP, at ``/mcp`` and ``/mcp/PROFILE``: an ASGI application without a framework under it.

The gateway has authenticated the request and limited its body. An answer is plain JSON, or a stream of events if
messages are sent before it. A fast call takes no second task: only after `WATCH_SECONDS` does a task watch for a client
that disconnects.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from toolbus.bus.access.identity import Identity
from toolbus.bus.gateway.gateway_parts import IDENTITY
from toolbus.bus.web_paths import disconnected
from toolbus.common.cancellation import wait_first
from toolbus.common.text import quote
from toolbus.errors import Code, LimitExceeded, NotPermitted, Stage, ToolBusError, http_status
from toolbus.parts.mcp.messages import headers as mcp_headers
from toolbus.parts.mcp.messages import jsonrpc
from toolbus.parts.mcp.messages.eras import LEGACY_VERSIONS, MODERN_VERSIONS
from toolbus.parts.mcp.messages.jsonrpc import McpCode, RpcError
from toolbus.parts.mcp.server import methods
from toolbus.parts.mcp.server.calls import ERROR_META, describe
from toolbus.parts.mcp.server.mcp_request import McpRequest
from toolbus.parts.mcp.server.message_stream import MessageStream
from toolbus.parts.mcp.server.server import McpServer
from toolbus.parts.mcp.server.sessions import CANCELLED, STANDING, McpSession, UnknownSession
from toolbus.parts.mcp.settings import DEFAULT_PROFILE, Profile
from toolbus.protocol.limits import Timings
from toolbus.protocol.tool import CallError

# The id of each event names the request of its stream, or says that the stream belongs to none. So a call that was lost
# with a bus ends when its client resumes the stream, and not at the client's own timeout.

MAX_ID = 64  # characters of a request's id in the id of its stream
_CALL, _REQUEST = "c", "r"
_LOST = (
    "the bus has restarted, has dropped the stream of this request, or the request was made at another bus, which had "
    "it; how far it got is not known"
)


def stream_of_request(request: McpRequest) -> str:
    """Returns the part of a stream's id that names its request."""
    id = msgspec.json.encode(request.id)
    if len(id) > MAX_ID:
        return "x"
    kind = _CALL if request.method == "tools/call" else _REQUEST
    return f"{kind}.{base64.urlsafe_b64encode(id).decode().rstrip('=').replace('-', '~')}"


def lost_answer(event_id: str) -> bytes | None:
    """Returns the answer to the request of an event's stream; None if the event names none."""
    kind, _, rest = event_id.partition(".")
    encoded = rest.partition(".")[0].replace("~", "-")
    if kind not in (_CALL, _REQUEST) or len(encoded) > 2 * MAX_ID:
        return None
    try:
        id: Any = msgspec.json.decode(base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)))
    except (binascii.Error, ValueError):
        return None
    if not isinstance(id, int | str):
        return None
    meta = {ERROR_META: describe(CallError(Code.UNAVAILABLE, _LOST, Stage.UNKNOWN))}
    if kind == _CALL:
        return jsonrpc.answer(id, {"content": [{"type": "text", "text": _LOST}], "isError": True, "_meta": meta})
    return jsonrpc.refusal(id, RpcError(McpCode.INTERNAL, _LOST, meta))


def is_standing(event_id: str) -> bool:
    """Tells whether an event is of a standing stream, which belongs to no request."""
    return event_id.startswith(f"{STANDING}.")


METHODS = ("POST", "GET", "DELETE")
VERSIONS = (*LEGACY_VERSIONS, *MODERN_VERSIONS)
WATCH_SECONDS = 0.05  # after which a task watches for the client's disconnect
POLLED_SINCE = "2025-11-25"  # the first revision whose clients resume a stream that was closed

_JSON = (b"content-type", b"application/json")
_ACCEPTED = 202
_SINGLE = frozenset({"mcp-protocol-version", "mcp-session-id", "mcp-method", "mcp-name", "content-type"})


class RefusedRequest(Exception):
    """A request is refused before it is read as a message."""

    def __init__(
        self,
        status: int,
        message: str,
        code: int = McpCode.INVALID_REQUEST,
        allow: tuple[str, ...] = (),
        data: Any = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = [(b"allow", ", ".join(allow).encode())] if allow else []
        self.error = RpcError(code, message, data)


class McpEndpoint:
    """The application."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._timings = server.core.program.timings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            profile = self._profile(scope["path"])
            headers = _headers(scope["headers"])
            identity: Identity = scope[IDENTITY]
            identity.check_claims(profile.user, profile.level)
            match scope["method"]:
                case "POST":
                    await self._post(profile, identity, headers, receive, send)
                case "GET" | "DELETE" as method if "mcp-session-id" not in headers:
                    raise RefusedRequest(
                        405,
                        f"{method} needs Mcp-Session-Id, which the answer to initialize has: without it, use POST",
                        allow=("POST",),
                    )
                case "GET":
                    await self._listen(profile, identity, headers, receive, send)
                case "DELETE":
                    session = await self._session(profile, identity, headers)
                    self._server.sessions.end(session)
                    await self._server.sessions.save(session)
                    await _respond(send, 204, b"")
                case _:
                    raise RefusedRequest(405, f"the methods of this endpoint are {', '.join(METHODS)}", allow=METHODS)
        except RefusedRequest as refused:
            await _respond(send, refused.status, jsonrpc.refusal(None, refused.error), *refused.headers)
        except UnknownSession as error:
            await _respond(send, 404, jsonrpc.refusal(None, RpcError(McpCode.INVALID_REQUEST, str(error))))
        except HTTPException as error:  # the body is too long
            refusal = jsonrpc.refusal(None, RpcError(McpCode.INVALID_REQUEST, error.detail))
            await _respond(send, error.status_code, refusal)
        except ToolBusError as error:
            code = McpCode.INVALID_REQUEST if isinstance(error, NotPermitted) else McpCode.INTERNAL
            await _respond(send, http_status(error), jsonrpc.refusal(None, RpcError(code, str(error))))

    def _profile(self, path: str) -> Profile:
        name = path.removeprefix("/mcp").strip("/") or DEFAULT_PROFILE
        profile = self._server.settings.profiles.get(name)
        if profile is None:
            raise RefusedRequest(404, f"there is no profile {quote(name)}: the configuration has them at mcp.profiles")
        return profile

    async def _session(self, profile: Profile, identity: Identity, headers: Mapping[str, str]) -> McpSession:
        """Returns the session that a request names.

        Raises:
            RefusedRequest: the request names none, or a version that the bus does not know.
            UnknownSession: no session has that id.
        """
        version = headers.get("mcp-protocol-version")
        if version is not None and version not in VERSIONS:
            data = {"supported": list(VERSIONS), "requested": version}
            raise RefusedRequest(400, "Unsupported protocol version", McpCode.UNSUPPORTED_VERSION, data=data)
        id = headers.get("mcp-session-id")
        if id is None:
            raise RefusedRequest(400, "Mcp-Session-Id is missing: send the one that the answer to initialize had")
        return await self._server.sessions.find(id, profile, identity)

    # -- POST ----------------------------------------------------------------------------------------------------

    async def _post(
        self, profile: Profile, identity: Identity, headers: Mapping[str, str], receive: Receive, send: Send
    ) -> None:
        if not _is_json(headers.get("content-type", "")):
            given = quote(headers.get("content-type", ""))
            raise RefusedRequest(415, f"Content-Type is {given}: send application/json")
        try:
            message = jsonrpc.decode(await _body(receive))
        except RpcError as error:
            await _respond(send, 400, jsonrpc.refusal(None, error))
            return
        session = None
        version = headers.get("mcp-protocol-version")
        if message.method != "initialize" and "mcp-session-id" in headers:
            session = await self._session(profile, identity, headers)
        if not message.is_request:
            if session is None and (version is None or version in LEGACY_VERSIONS):
                await self._session(profile, identity, headers)  # refuses
            self._server.notice(message, session)
            await _respond(send, _ACCEPTED, b"")
            return
        streams = "text/event-stream" in headers.get("accept", "")
        exchange = _Exchange(receive, send, session, streams, self._timings)
        try:
            request = self._server.read(
                message, profile, identity, exchange, session=session, headers=headers, header_version=version
            )
            if request.modern:
                _check_headers(request, headers)
            elif session is None and message.method != "initialize":
                await self._session(profile, identity, headers)  # refuses
        except RpcError as error:
            refusal = jsonrpc.refusal(message.id, error)  # type: ignore[arg-type]  # a request has an id
            await _respond(send, jsonrpc.HTTP_STATUS.get(error.code, 400), refusal)
            return
        await exchange.run(self._server, request)

    # -- GET -----------------------------------------------------------------------------------------------------

    async def _listen(
        self, profile: Profile, identity: Identity, headers: Mapping[str, str], receive: Receive, send: Send
    ) -> None:
        """Opens the standing stream of a session, or resumes a stream."""
        if "text/event-stream" not in headers.get("accept", ""):
            raise RefusedRequest(406, "GET opens a stream: send Accept: text/event-stream")
        session = await self._session(profile, identity, headers)
        stream, after = self._resumed(session, headers.get("last-event-id"))
        polled = session.version >= POLLED_SINCE
        writing = stream.write(send, after=after, ping_seconds=self._timings.ping_seconds, primed=polled)
        await wait_first(writing, disconnected(receive))

    def _resumed(self, session: McpSession, last: str | None) -> tuple[MessageStream, int]:
        """Returns the stream that a client asks for, and the number of the last event that it has.

        Raises:
            RefusedRequest: the client has all of that stream, or the stream does not exist.
        """
        found = session.stream_of(last) if last is not None else None
        if found is not None and not found[0].ended_with(found[1]):
            return found
        if last is None or (found is None and is_standing(last)):
            stream = session.new_stream()
            try:
                session.stand(stream, self._server.subscriptions.follow)
            except LimitExceeded:
                stream.close()
                raise
            return stream, 0
        answer = lost_answer(last) if found is None else None
        if answer is None:
            text = f"no stream goes on after the event {quote(last)}: open one without Last-Event-ID"
            raise RefusedRequest(404, text)
        stream = MessageStream()
        stream.send(answer)
        stream.close()
        return stream, 0


class _Exchange:
    """One POST: its answer, and the messages before it. It is the request's channel.

    Args:
        session: of a legacy client, which can resume its stream; None in the modern era, and for `initialize`.
        streams: whether the client accepts a stream.
    """

    def __init__(
        self, receive: Receive, send: Send, session: McpSession | None, streams: bool, timings: Timings
    ) -> None:
        self._receive = receive
        self._send = send
        self._session = session
        self._timings = timings
        self._request: McpRequest | None = None  # None before `run`
        self._has_left = False  # whether the client has disconnected, which cancels the request
        self._stream: MessageStream | None = None  # None until a message is sent before the answer
        self._writing: asyncio.Task[None] | None = None  # of that stream
        self._watching: asyncio.Task[None] | None = None  # for the client's disconnect; None before `WATCH_SECONDS`
        self._timer: asyncio.TimerHandle | None = None  # the next step of a slow request
        self._task: asyncio.Task[Any] | None = None  # answers the request; None before `run`
        self.takes_messages = streams

    def send(self, message: bytes) -> None:
        """Sends a message before the answer; drops it if the client accepts no stream."""
        if self.takes_messages:
            self._open().send(message)

    async def run(self, server: McpServer, request: McpRequest) -> None:
        self._task = asyncio.current_task()
        self._request = request
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(WATCH_SECONDS, self._late)
        try:
            status, body = await methods.answer(server, request)
            await self._finish(status, body, request)
        except asyncio.CancelledError as cancelled:
            if not self._has_left and CANCELLED not in cancelled.args:
                raise
            self._task.uncancel()  # type: ignore[union-attr]  # an application runs in a task
            if self._has_left:
                return
            if self._stream is None:
                await _respond(self._send, _ACCEPTED, b"")
            else:
                await self._end(self._stream)
        finally:
            self._timer.cancel()
            for task in (self._watching, self._writing):
                if task is not None:
                    task.cancel()

    async def _finish(self, status: int, body: bytes, request: McpRequest) -> None:
        self._timer.cancel()  # type: ignore[union-attr]  # `run` has set it
        if self._stream is not None:
            self._stream.send(body)
            await self._end(self._stream)
            return
        more = []
        if request.method == "initialize" and request.session is not None and request.session.id and status == 200:
            more.append((b"mcp-session-id", request.session.id.encode()))
        await _respond(self._send, status, body, *more)

    async def _end(self, stream: MessageStream) -> None:
        """Ends the stream after all of it is written, or its response has ended."""
        stream.close()
        if self._writing is not None:
            await self._writing

    def _open(self) -> MessageStream:
        """Returns the stream; the first call begins the response."""
        if self._stream is None:
            session = self._session
            polled = session is not None and session.version >= POLLED_SINCE
            self._stream = MessageStream()
            if session is not None and self._request is not None:
                with contextlib.suppress(LimitExceeded):  # then the client cannot resume the stream
                    self._stream = session.new_stream(stream_of_request(self._request))
            self._writing = asyncio.create_task(
                self._stream.write(
                    self._send,
                    ping_seconds=self._timings.ping_seconds,
                    primed=polled,
                    poll_seconds=self._timings.poll_seconds if polled and self._stream.id else None,
                )
            )
        return self._stream

    def _late(self) -> None:
        """Watches for the disconnect of a modern client; later begins a stream, whose pings hold it open."""
        loop = asyncio.get_running_loop()
        if self._session is None:
            self._watching = loop.create_task(self._watch())
        if self.takes_messages:
            timings = self._timings
            seconds = timings.ping_seconds if self._session is None else timings.resumable_seconds
            self._timer = loop.call_later(seconds, self._open)

    async def _watch(self) -> None:
        await disconnected(self._receive)
        self._has_left = True
        if self._task is not None:
            self._task.cancel()


# -- HTTP ------------------------------------------------------------------------------------------------------------


def _headers(raw: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """Returns the headers by their names.

    Raises:
        RefusedRequest: a header that must be unique occurs twice.
    """
    headers: dict[str, str] = {}
    for name_bytes, value in raw:
        name = name_bytes.decode("latin-1")
        if name in headers:
            if name in _SINGLE or name.startswith("mcp-param-"):
                raise RefusedRequest(400, f"the header {name} occurs twice: send it once", McpCode.HEADER_MISMATCH)
            headers[name] += ", " + value.decode("latin-1")
        else:
            headers[name] = value.decode("latin-1")
    return headers


def _check_headers(request: McpRequest, headers: Mapping[str, str]) -> None:
    """Checks the headers that repeat parts of a modern request.

    Raises:
        RpcError: one is missing, or differs from the body.
    """
    if headers.get("mcp-protocol-version") is None:
        raise RpcError(McpCode.HEADER_MISMATCH, f"the header MCP-Protocol-Version is missing: send {request.version}")
    _check_header(mcp_headers.METHOD, headers, request.method)
    param = mcp_headers.NAMED_BY.get(request.method)
    if param is not None:
        name = getattr(request.params, param, None)
        _check_header(mcp_headers.NAME, headers, name if isinstance(name, str) else request.text(param))


def _check_header(header: str, headers: Mapping[str, str], expected: str) -> None:
    given = headers.get(header.lower())
    if given != expected and (given is None or mcp_headers.read_value(given) != expected):
        raise RpcError(
            McpCode.HEADER_MISMATCH,
            f"the header {header} is {quote(given) if given is not None else 'missing'}, and the body says "
            f"{quote(expected)}: they must agree",
        )


def _is_json(content_type: str) -> bool:
    return content_type == "application/json" or content_type.partition(";")[0].strip().lower() == "application/json"


async def _body(receive: Receive) -> bytes:
    """Returns the body of a request; an incomplete one if the client disconnects."""
    parts: list[bytes] = []
    more = True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


async def _respond(send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [_JSON, length, *headers]})
    await send({"type": "http.response.body", "body": body})
