"""Speaks JSON-RPC with one MCP server, both ways, over any transport.

An `McpConnection` matches answers to requests, leads progress to the request that it is about, and hands requests and
notifications of the server to its owner. Which era of the protocol is spoken is found out by `mcp_handshake.py`, and
kept here: modern requests carry it in `_meta`. Nothing here knows tools, processes and HTTP.
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

from toolbus.bus.mcp_client.transport import Busy, Lost, Outgoing, RequestId, Transport
from toolbus.errors import Stage
from toolbus.mcp import eras, jsonrpc
from toolbus.mcp.jsonrpc import JsonRpcMessage, McpCode, RpcError
from toolbus.text import clean_line, quote
from toolbus.version import VERSION

log = logging.getLogger("toolbus.mcp_client")

LEGACY_ACCEPTS = ("elicitation.form", "elicitation.url", "sampling")  # declared once; refused per call where needed
FEATURE_METHODS = ("prompts/get", "resources/read", "completion/complete")  # on behalf of some user too
MAX_BAD_MESSAGES_SHOWN = 64  # lines that are not messages, which are logged

OnResult = Callable[[msgspec.Raw | None, Exception | None], None]  # the result, or why there is none
OnProgress = Callable[[dict[str, Any]], None]  # params of notifications/progress


@dataclass(slots=True)
class _Waiting:
    """A request without an answer yet."""

    method: str
    on_result: OnResult
    on_progress: OnProgress | None


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request of the server.

    Attributes:
        stream: the request of ours on whose stream it came, as text; "" where the transport cannot say.
    """

    id: RequestId
    method: str
    params: dict[str, Any] = field(default_factory=dict)
    stream: str = ""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What the server has said about itself.

    Attributes:
        version: of the protocol that is spoken.
        capabilities: as the server declares them.
        info: its name and version.
        instructions: to models; "" where it gives none.
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
        on_request: takes a request of the server; it is answered by `respond` or `refuse`, now or later.
        on_notification: takes a notification other than progress: its method, its params, and the stream that it
            came on, as of `Incoming`.
        on_closed: called once when the server is gone; every request has ended by then.
        on_activity: called whenever the server does something.
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
        self._waiting: dict[RequestId, _Waiting] = {}
        self._ids = itertools.count(1)
        self._bad_messages = 0
        self._meta: dict[tuple[str, ...], bytes] = {}  # the fixed part of `_meta`, by what a caller accepts

    def __repr__(self) -> str:
        era = "?" if self.peer is None else self.peer.version
        return f"<McpConnection {self._name} {era} waiting={len(self._waiting)}>"

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
        """Makes a request and waits for its result. Cancelling the wait cancels the request.

        Args:
            name: for the header `Mcp-Name`.
            accepts: what the caller can answer in the middle of it.
            timeout: seconds; None: no limit.

        Raises:
            RpcError: the server answered with an error.
            Lost: the server is gone.
            Busy: it does not read.
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
        """Returns params as `send` takes them."""
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
            request: its id; None: the next number.
            more_meta: fields of `_meta` that this request has beside those of all; a JSON object as text.

        Returns:
            Its id.

        Raises:
            Busy: the server does not read; nothing was sent.
            Lost: the server is gone; nothing was sent.
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
        self._waiting[request] = _Waiting(method, on_result, on_progress)
        try:
            self.transport.send(Outgoing(data, request, method, name, version, headers or {}))
        except (Busy, Lost):
            self._waiting.pop(request, None)
            raise
        return request

    def asks(self, methods: Collection[str]) -> bool:
        """Tells whether a request of one of some methods has no answer yet."""
        return any(each.method in methods for each in self._waiting.values())

    def cancel(self, request: RequestId, reason: str) -> None:
        """Cancels a request that has no answer yet; a late answer is dropped."""
        if self._waiting.pop(request, None) is None or self.closed_why is not None:
            return
        try:
            self.notify("notifications/cancelled", {"requestId": request, "reason": reason})
            self.transport.cancel(request)
        except (Busy, Lost):  # it learns nothing, and its answer is dropped
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
        """Returns what each modern request says about the bus: version, name, what the caller can answer."""
        return {
            eras.META_VERSION: version,
            eras.META_CLIENT: client_info(),
            eras.META_CAPABILITIES: capabilities_of(accepts, modern=True),
            eras.META_LOG_LEVEL: "info",  # a server sends no log messages unasked
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
        """Answers a request of the server; a server that is gone gets nothing."""
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

    # -- what arrives (`Receiver`) ------------------------------------------------------------------------------------

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
        except Exception:  # of ours: what comes behind it is for others
            log.exception("%s: internal error with %.80r of the server", self._name, message.method or "an answer")

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
        waiting = self._waiting.pop(message.id, None)  # type: ignore[arg-type]  # None is the id of no request
        if waiting is not None:  # else it was cancelled meanwhile
            error = message.rpc_error
            waiting.on_result(message.result if error is None else None, error)

    def _take_progress(self, params: dict[str, Any]) -> None:
        token = params.get("progressToken")
        waiting = self._waiting.get(token) if isinstance(token, (str, int)) else None
        if waiting is not None and waiting.on_progress is not None:
            waiting.on_progress(params)

    def lost(self, request: RequestId, error: Lost) -> None:
        """Ends one request, which gets no answer any more."""
        waiting = self._waiting.pop(request, None)
        if waiting is not None:
            waiting.on_result(None, error)

    def closed(self, why: str) -> None:
        """Ends every request, since the server is gone."""
        if self.closed_why is not None:
            return
        self.closed_why = why
        waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            each.on_result(None, Lost(why, Stage.DISPATCHED))
        self._on_closed(why)

    async def close(self) -> None:
        """Ends the connection and what its transport started."""
        await self.transport.close()
        self.closed("the connection was closed")

    def _log_bad(self, data: bytes, why: str) -> None:
        self._bad_messages += 1
        if self._bad_messages <= MAX_BAD_MESSAGES_SHOWN:
            line = clean_line(quote(data.decode(errors="replace")))
            log.warning("%s: not a message of the protocol, so it is left out (%s): %s", self._name, why, line)
        elif self._bad_messages == MAX_BAD_MESSAGES_SHOWN + 1:
            log.warning("%s: further lines that are not messages are not shown", self._name)


def client_info() -> dict[str, Any]:
    """Returns how the bus names itself to servers."""
    return {"name": "toolbus", "title": "toolbus", "version": VERSION}


def capabilities_of(accepts: Collection[str], *, modern: bool) -> dict[str, Any]:
    """Returns what a client declares that can answer these questions of a server."""
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
    """Returns params as an object; whatever else a server sends counts as an empty one."""
    try:
        decoded = msgspec.json.decode(params) if params else {}
    except (msgspec.DecodeError, RecursionError):  # numbers without measure, half a character: not seen until now
        return {}
    return decoded if isinstance(decoded, dict) else {}
