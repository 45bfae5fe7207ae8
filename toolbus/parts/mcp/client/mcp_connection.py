"""Speaks JSON-RPC with one MCP server, in both directions, over any transport.

An `McpConnection` matches responses and progress to requests, and passes requests and notifications of the server to
its owner. `mcp_handshake.py` detects the era of the protocol, which is stored here: modern requests have it in `_meta`.
Nothing here knows tools, processes and HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from toolbus.common.text import clean_line, quote
from toolbus.common.version import VERSION
from toolbus.errors import Stage
from toolbus.parts.mcp.client.transport import Busy, Lost, Outgoing, RequestId, Transport, other_form
from toolbus.parts.mcp.messages import eras, jsonrpc
from toolbus.parts.mcp.messages.jsonrpc import JsonRpcMessage, McpCode, RpcError

log = logging.getLogger("toolbus.mounts")

LEGACY_ACCEPTS = ("elicitation.form", "elicitation.url", "sampling")  # declared once; each call may still refuse
FEATURE_METHODS = ("prompts/get", "resources/read", "completion/complete")  # other requests on behalf of users
MAX_BAD_MESSAGES_LOGGED = 64

OnResult = Callable[[msgspec.Raw | None, Exception | None], None]  # the result, or the error in its place
OnProgress = Callable[[dict[str, Any]], None]  # params of notifications/progress


@dataclass(slots=True)
class _Pending:
    """A request without a response."""

    method: str
    on_result: OnResult
    on_progress: OnProgress | None


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request of the server.

    Attributes:
        stream: the id of our request on whose stream it came, as text; "" if the transport has one stream for all.
    """

    id: RequestId
    method: str
    params: dict[str, Any] = field(default_factory=dict)
    stream: str = ""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The server's description of itself, from the handshake.

    Attributes:
        version: of the protocol.
        capabilities: those that it declares.
        info: its name and version.
        instructions: for models; "" if it sends none.
    """

    modern: bool
    version: str
    capabilities: Mapping[str, Any]
    info: Mapping[str, Any]
    instructions: str = ""

    def can(self, capability: str, part: str = "") -> bool:
        """Tells whether the server declares a capability, or a part of one (`tools`, `listChanged`)."""
        declared = self.capabilities.get(capability)
        if not part:
            return declared is not None and declared is not False
        return isinstance(declared, Mapping) and bool(declared.get(part))


class McpConnection:
    """One connection, from its first message until its transport is closed.

    Args:
        on_request: takes a request of the server, which needs `respond` or `refuse`, now or later.
        on_notification: takes a notification other than progress: its method, its params and its stream, see
            `Incoming`.
        on_closed: called once when the server has disconnected, after all requests have ended.
        on_activity: called whenever the server sends or logs something.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        on_request: Callable[[Incoming], None],
        on_notification: Callable[[str, dict[str, Any], str], None],
        on_closed: Callable[[str], None],
        on_activity: Callable[[], None] = lambda: None,
        name: str = "",
    ) -> None:
        self.transport = transport
        self.peer: ServerInfo | None = None  # None until the handshake is done
        self.activity = on_activity
        self.closed_why: str | None = None  # None while it is open
        self._name = name
        self._on_request = on_request
        self._on_notification = on_notification
        self._on_closed = on_closed
        self._pending: dict[RequestId, _Pending] = {}
        self._ids = itertools.count(1)
        self._turns_ids = False  # whether the server answers numbers as text, and text as numbers
        self._bad_messages = 0
        self._meta: dict[tuple[str, ...], bytes] = {}  # the fixed part of `_meta`, by the questions a caller accepts

    def __repr__(self) -> str:
        era = "?" if self.peer is None else self.peer.version
        return f"<McpConnection {self._name} {era} pending={len(self._pending)}>"

    # -- requests of ours ---------------------------------------------------------------------------------------------

    async def request(
        self,
        method: str,
        params: Mapping[str, Any] | None = None,
        *,
        name: str = "",
        accepts: Collection[str] = (),
        on_progress: OnProgress | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Makes a request and waits for its result. A cancelled wait cancels the request.

        Args:
            name: for the header `Mcp-Name`.
            accepts: the questions that the caller answers in the middle of it.
            timeout: seconds; None: no limit.

        Raises:
            RpcError: the server answered with an error.
            Lost: the server has disconnected.
            Busy: it does not read its input.
            TimeoutError: it did not answer in time; the request is cancelled.
        """
        future: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()

        def on_result(result: msgspec.Raw | None, error: Exception | None) -> None:
            if future.done():
                return
            if result is None:
                future.set_exception(error or Lost("the server gave no result"))
            else:
                future.set_result(result)

        request = self.send(
            method, self.text_of(params or {}), on_result, name=name, accepts=accepts, on_progress=on_progress
        )
        try:
            async with asyncio.timeout(timeout):
                raw = await future
        except (asyncio.CancelledError, TimeoutError) as error:
            self.cancel(request, "timed out" if isinstance(error, TimeoutError) else "cancelled")
            raise
        try:
            return msgspec.json.decode(raw, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            text = f"the server answered {method} with a result that cannot be read: {error}"
            raise RpcError(McpCode.INTERNAL, text) from None

    @staticmethod
    def text_of(params: Mapping[str, Any]) -> bytes:
        """Returns params as the text that `send` takes."""
        return json.dumps(params, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")

    def send(
        self,
        method: str,
        params: bytes,
        on_result: OnResult,
        *,
        request: RequestId | None = None,
        name: str = "",
        accepts: Collection[str] = (),
        on_progress: OnProgress | None = None,
        headers: Mapping[str, str] | None = None,
        more_meta: bytes = b"",
    ) -> RequestId:
        """Sends a request; `on_result` is called once, unless the request is cancelled.

        Args:
            params: a JSON object as text, without `_meta`.
            request: the id; None: the next number.
            more_meta: additional fields of `_meta`; a JSON object as text.

        Returns:
            The id of the request.

        Raises:
            Busy: the server does not read its input; nothing was sent.
            Lost: the server has disconnected; nothing was sent.
        """
        if self.closed_why is not None:
            raise Lost(self.closed_why, Stage.NOT_DISPATCHED)
        request = next(self._ids) if request is None else request
        meta = self._meta_of(tuple(accepts), request if on_progress is not None else None)
        if more_meta:
            meta = more_meta if not meta else meta[:-1] + b"," + more_meta[1:]
        if meta:
            params = params[:-1] + (b'"_meta":' if len(params) <= 2 else b',"_meta":') + meta + b"}"
        data = jsonrpc.request(request, method, msgspec.Raw(params))
        version = "" if self.peer is None else self.peer.version
        self._pending[request] = _Pending(method, on_result, on_progress)
        try:
            self.transport.send(Outgoing(data, request, method, name, version, headers or {}))
        except (Busy, Lost):
            self._pending.pop(request, None)
            raise
        return request

    def has_pending(self, methods: Collection[str]) -> bool:
        """Tells whether a request of one of these methods is pending."""
        return any(each.method in methods for each in self._pending.values())

    def cancel(self, request: RequestId, reason: str) -> None:
        """Cancels a pending request; a late response is dropped."""
        if self._pending.pop(request, None) is None or self.closed_why is not None:
            return
        try:
            self.notify("notifications/cancelled", {"requestId": request, "reason": reason})
            self.transport.cancel(request)
        except (Busy, Lost):  # the server continues, and its response is dropped
            log.debug("%s: could not cancel request %.80r", self._name, request)

    def notify(self, method: str, params: Mapping[str, Any] | None = None) -> None:
        """Sends a notification.

        Raises:
            Busy, Lost: as for `send`.
        """
        if self.closed_why is not None:
            raise Lost(self.closed_why, Stage.NOT_DISPATCHED)
        version = "" if self.peer is None else self.peer.version
        fields = dict(params or {})
        if self.peer is not None and self.peer.modern:
            fields["_meta"] = {**fields.get("_meta", {}), eras.META_VERSION: version}
        self.transport.send(Outgoing(jsonrpc.notification(method, fields), method=method, version=version))

    def modern_meta(self, version: str, accepts: Collection[str] = ()) -> dict[str, Any]:
        """Returns the `_meta` of each modern request: version, name, and the questions that the caller answers."""
        return {
            eras.META_VERSION: version,
            eras.META_CLIENT: client_info(),
            eras.META_CAPABILITIES: capabilities_of(accepts, modern=True),
            eras.META_LOG_LEVEL: "info",  # without it a server sends no log messages
        }

    def _meta_of(self, accepts: tuple[str, ...], token: RequestId | None) -> bytes:
        fixed = b""
        if self.peer is not None and self.peer.modern:
            fixed = self._meta.get(accepts, b"")
            if not fixed:
                fixed = self._meta[accepts] = msgspec.json.encode(self.modern_meta(self.peer.version, accepts))
        if token is None:
            return fixed
        text = b'"progressToken":' + msgspec.json.encode(token) + b"}"
        return b"{" + text if not fixed else fixed[:-1] + b"," + text

    # -- requests of the server ---------------------------------------------------------------------------------------

    def respond(self, incoming: Incoming, result: Mapping[str, Any]) -> None:
        """Answers a request of the server; does nothing if the server has disconnected."""
        self._answer(incoming, jsonrpc.answer(incoming.id, result))

    def refuse(self, incoming: Incoming, code: int, message: str) -> None:
        """Answers a request of the server with an error."""
        self._answer(incoming, jsonrpc.refusal(incoming.id, RpcError(code, message)))

    def _answer(self, incoming: Incoming, data: bytes) -> None:
        version = "" if self.peer is None else self.peer.version
        try:
            self.transport.send(Outgoing(data, version=version, stream=incoming.stream))
        except (Busy, Lost) as error:
            log.debug("%s: no answer to %s of the server: %s", self._name, incoming.method, error)

    # -- messages of the server (`Receiver`) ---------------------------------------------------------------------------

    def received(self, data: bytes, stream: str = "") -> None:
        """Takes one message of the server."""
        try:
            message = jsonrpc.decode(data)
        except RpcError as error:
            self._log_bad(data, error.message)
            return
        try:
            self.activity()
            self._take(message, stream)
        except Exception:  # a bug of the bus: other requests must continue
            log.exception("%s: internal error with %.80r of the server", self._name, message.method or "a response")

    def _take(self, message: JsonRpcMessage, stream: str) -> None:
        method, request = message.method, message.id
        if not method:
            self._take_answer(message)
        elif method == "notifications/progress":
            self._take_progress(_object(message.params))
        elif not isinstance(request, (int, str)):
            self._on_notification(method, _object(message.params), stream)
        elif method == "ping":
            self.respond(Incoming(request, method, stream=stream), {})
        else:
            self._on_request(Incoming(request, method, _object(message.params), stream))

    def _take_answer(self, message: JsonRpcMessage) -> None:
        request = self._request_of(message.id)
        pending = None if request is None else self._pending.pop(request)
        if pending is not None:  # else the request was cancelled
            error = message.rpc_error
            pending.on_result(message.result if error is None else None, error)

    def _request_of(self, written: object) -> RequestId | None:
        """Returns the pending request of an id as the server writes it; None if there is none."""
        if not isinstance(written, str | int):
            return None
        forms = (written, other_form(written))
        for form in reversed(forms) if self._turns_ids else forms:
            if form in self._pending:
                self._turns_ids = self._turns_ids or form != written
                return form
        return None

    def _take_progress(self, params: dict[str, Any]) -> None:
        token = params.get("progressToken")
        request = self._request_of(token)
        pending = None if request is None else self._pending[request]
        if pending is not None and pending.on_progress is not None:
            pending.on_progress(params)

    def lost(self, request: RequestId, error: Lost) -> None:
        """Ends one request that gets no response."""
        pending = self._pending.pop(request, None)
        if pending is not None:
            pending.on_result(None, error)

    def closed(self, why: str) -> None:
        """Ends every request, since the server has disconnected."""
        if self.closed_why is not None:
            return
        self.closed_why = why
        pending, self._pending = self._pending, {}
        for each in pending.values():
            each.on_result(None, Lost(why, Stage.DISPATCHED))
        self._on_closed(why)

    async def close(self) -> None:
        """Ends the connection and the processes of its transport."""
        await self.transport.close()
        self.closed("the connection was closed")

    def _log_bad(self, data: bytes, why: str) -> None:
        self._bad_messages += 1
        if self._bad_messages <= MAX_BAD_MESSAGES_LOGGED:
            line = clean_line(quote(data.decode(errors="replace")))
            log.warning("%s: a message that breaks the protocol is ignored (%s): %s", self._name, why, line)
        elif self._bad_messages == MAX_BAD_MESSAGES_LOGGED + 1:
            log.warning("%s: further messages that break the protocol are not logged", self._name)


def client_info() -> dict[str, Any]:
    """Returns the name and version of the bus, for servers."""
    return {"name": "toolbus", "title": "toolbus", "version": VERSION}


def capabilities_of(accepts: Collection[str], *, modern: bool) -> dict[str, Any]:
    """Returns the capabilities of a client that accepts these questions."""
    capabilities: dict[str, Any] = {}
    modes: dict[str, Any] = {mode: {} for mode in ("form", "url") if f"elicitation.{mode}" in accepts}
    if modes:
        capabilities["elicitation"] = modes
    for each in ("sampling", "roots"):
        if each in accepts:
            capabilities[each] = {}
    if modern:
        capabilities["extensions"] = {eras.TASKS_EXTENSION: {}}
    return capabilities


def _object(params: msgspec.Raw | None) -> dict[str, Any]:
    """Returns params as an object; an empty one for any other value of a server."""
    try:
        decoded = msgspec.json.decode(params) if params else {}
    except (msgspec.DecodeError, RecursionError):  # `jsonrpc.decode` does not check numbers and surrogates
        return {}
    return decoded if isinstance(decoded, dict) else {}
