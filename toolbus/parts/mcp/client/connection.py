"""Speaks JSON-RPC with one MCP server, in both directions, over any transport.

An `McpConnection` matches responses and progress to requests, and passes requests and notifications of the server to
its owner. `open_connection` detects the era of the protocol, which is stored in the connection: modern requests have
it in `_meta`. `read_lists` reads what a server offers. Nothing here knows processes and HTTP.

A server of unknown era gets `server/discover`. On one pipe a `ping` follows at once, because some servers do not answer
unknown methods, and every server answers a ping:

- discover is answered with a modern version and capabilities → modern;
- discover is refused, or its answer is unusable → `initialize` on the same pipe;
- the ping is answered first → the server does not answer discover → `initialize`;
- the pipe ends → the server exits at a message before `initialize`: `DiedOfProbe`, start it again as legacy.

Over HTTP requests have no order, so no ping is sent: whatever is not the answer of a modern server (a status, an empty
body, a page) leads to `initialize`. A server that refuses that too, but has answered discover in part, is taken as
modern.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from toolbus.common.text import clean_line, dump_json, quote
from toolbus.errors import Stage
from toolbus.parts.mcp.client.transport import Busy, Lost, NeedsLogin, Outgoing, RequestId, Transport, other_form
from toolbus.parts.mcp.messages import eras, jsonrpc
from toolbus.parts.mcp.messages.jsonrpc import JsonRpcMessage, McpCode, RpcError
from toolbus.protocol.input_requests import capabilities_for
from toolbus.protocol.questions import ACCEPTED_BY, ACCEPTS, FORM, SAMPLING, URL

log = logging.getLogger("toolbus.mounts")

LEGACY_ACCEPTS = (FORM, URL, ACCEPTED_BY[SAMPLING], eras.SAMPLING_TOOLS)  # declared once; each call may still refuse
FEATURE_METHODS = ("prompts/get", "resources/read", "completion/complete")  # other requests on behalf of users
MAX_USELESS_MESSAGES = 10_000  # in a row: of a server that writes them without end
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
        self._useless = 0  # messages in a row that were none, or answered nothing
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
        unread: str = "",
    ) -> dict[str, Any]:
        """Makes a request and waits for its result. A cancelled wait cancels the request.

        Args:
            name: for the header `Mcp-Name`.
            accepts: the questions that the caller answers in the middle of it.
            timeout: seconds; None: no limit.
            unread: a field of the result: the items of its list are returned as they are written, `msgspec.Raw`.

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
            if not unread:
                return msgspec.json.decode(raw, type=dict[str, Any])
            fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
            return {key: (_items if key == unread else msgspec.json.decode)(value) for key, value in fields.items()}
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
        pending = self._pending.pop(request, None)
        if pending is None or self.closed_why is not None:
            return
        try:
            if pending.method != "initialize":  # the protocol forbids it
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
            eras.META_CLIENT: eras.BUS_INFO,
            eras.META_CAPABILITIES: {
                **capabilities_for(word for word in (*ACCEPTS, eras.SAMPLING_TOOLS) if word in accepts),
                "extensions": {eras.TASKS_EXTENSION: {}},
            },
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

    def received(self, data: bytes, stream: str = "") -> bool:
        """Takes one message of the server; returns whether nobody asked for it."""
        if self.closed_why is not None:
            return True
        self._useless += 1
        try:
            message = jsonrpc.decode(data)
        except RpcError as error:
            self._log_bad(data, error.message)
            self._check_useless(data)
            return True
        try:
            self.activity()
            self._take(message, stream)
        except Exception:  # a bug of the bus: other requests must continue
            log.exception("%s: internal error with %.80r of the server", self._name, message.method or "a response")
        return bool(message.method or self._useless)

    def _take(self, message: JsonRpcMessage, stream: str) -> None:
        method, request = message.method, message.id
        if method:
            self._useless = 0
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
        if pending is None:  # the request was cancelled, or there was none
            self._check_useless(b"an answer to no request")
            return
        self._useless = 0
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

    def _check_useless(self, data: bytes) -> None:
        if self._useless >= MAX_USELESS_MESSAGES:
            shown = clean_line(quote(data[:200].decode(errors="replace")))
            self.closed(f"wrote {self._useless} lines in a row that are of no use to the bus, the last: {shown}")

    def _log_bad(self, data: bytes, why: str) -> None:
        self._bad_messages += 1
        if self._bad_messages <= MAX_BAD_MESSAGES_LOGGED:
            line = clean_line(quote(data.decode(errors="replace")))
            log.warning("%s: a message that breaks the protocol is ignored (%s): %s", self._name, why, line)
        elif self._bad_messages == MAX_BAD_MESSAGES_LOGGED + 1:
            log.warning("%s: further messages that break the protocol are not logged", self._name)


def _object(params: msgspec.Raw | None) -> dict[str, Any]:
    """Returns params as an object; an empty one for any other value of a server."""
    try:
        decoded = msgspec.json.decode(params) if params else {}
    except (msgspec.DecodeError, RecursionError):  # `jsonrpc.decode` does not check numbers and surrogates
        return {}
    return decoded if isinstance(decoded, dict) else {}


# -- the handshake -----------------------------------------------------------------------------------------------------

DISCOVER_SECONDS = 10.0  # the timeout of discover
AUTO = "auto"
AFTER_PING_SECONDS = 0.1  # a server that runs requests in parallel may answer the ping first


class DiedOfProbe(Lost):
    """The server exited at `server/discover`: it accepts no other message before `initialize`."""


async def open_connection(connection: McpConnection, *, modern: bool | None, era: str = AUTO) -> ServerInfo:
    """Performs the handshake, and sets `McpConnection.peer`.

    Args:
        modern: the era of the last handshake; None: unknown, it is detected. A server that has changed since is
            detected again.
        era: the operator's choice: ``auto`` detects it, ``legacy`` and ``modern`` accept no other.

    Raises:
        DiedOfProbe: start the server again, with ``modern=False``.
        NeedsLogin: a user has to log in first.
        Lost: the server has disconnected.
        RpcError: the server refuses the handshake.
    """
    legacy_first = era == "legacy" or (era == AUTO and modern is False)
    found = _Discovered(None) if legacy_first else await _discover(connection, probes=modern is None)
    peer = found.peer if found.is_certain else None
    if peer is None and era != "modern":
        try:
            peer = await _initialize(connection)
        except RpcError as error:
            if era == AUTO and (legacy_first or error.code == McpCode.UNSUPPORTED_VERSION):
                found = await _discover(connection, probes=False)
            if found.peer is None:
                raise
            log.info("%s: initialize is refused (%s): it is spoken to as discovered", connection, error.message)
    peer = peer or found.peer
    if peer is None:
        raise RpcError(
            McpCode.UNSUPPORTED_VERSION,
            f"the server does not speak {' or '.join(eras.MODERN_VERSIONS)}, which era = modern demands: remove era "
            "from the mount, or update the server",
        )
    connection.peer = peer
    connection.transport.agreed(peer.version, modern=peer.modern)
    if not peer.modern:
        connection.notify("notifications/initialized")
    return peer


@dataclass(frozen=True, slots=True)
class _Discovered:
    """The answer to `server/discover`.

    Attributes:
        peer: the server by its answer; None if that has nothing of a modern server.
        is_certain: whether it is modern beyond doubt. Other servers are asked with `initialize` first.
    """

    peer: ServerInfo | None
    is_certain: bool = False


async def _discover(connection: McpConnection, *, probes: bool) -> _Discovered:
    asking = asyncio.create_task(_request_discover(connection, eras.NEWEST))
    try:
        if probes and connection.transport.shares_one_pipe:
            return await _before_ping(connection, asking)
        return await asking
    except NeedsLogin:
        raise
    except Lost as error:
        if connection.closed_why is None:  # only this request failed; where nothing can be reached, `initialize` tells
            log.info("%s: no answer to server/discover: %s", connection, clean_line(str(error)))
            return _Discovered(None)
        if connection.transport.shares_one_pipe:
            raise DiedOfProbe(str(error), error.stage) from None
        raise
    finally:
        asking.cancel()


async def _before_ping(connection: McpConnection, asking: asyncio.Task[_Discovered]) -> _Discovered:
    ping = asyncio.create_task(connection.request("ping"))
    try:
        await asyncio.wait((asking, ping), return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            refused = ping.exception() is not None  # a modern server has no ping
            await asyncio.wait((asking,), timeout=DISCOVER_SECONDS if refused else AFTER_PING_SECONDS)
        return await asking if asking.done() else _Discovered(None)
    finally:
        ping.cancel()
        await asyncio.gather(ping, return_exceptions=True)


async def _request_discover(connection: McpConnection, version: str, *, again: bool = True) -> _Discovered:
    """Sends `server/discover`; once more if the server refuses the version and names one that the bus knows."""
    params = {"_meta": connection.modern_meta(version)}
    try:
        result = await connection.request("server/discover", params, timeout=DISCOVER_SECONDS)
    except TimeoutError:
        return _Discovered(None)
    except RpcError as error:
        other = _common(_mapping(error.data).get("supported")) if error.code == McpCode.UNSUPPORTED_VERSION else None
        if other is None or not again:
            return _Discovered(None)
        return await _request_discover(connection, other, again=False)
    offered, capabilities = result.get("supportedVersions"), result.get("capabilities")
    known = _common(offered)
    has_capabilities = isinstance(capabilities, Mapping)
    if known is None and (offered is not None or not has_capabilities):
        return _Discovered(None)
    peer = ServerInfo(
        modern=True,
        version=known or version,
        capabilities=_mapping(capabilities),
        info=_mapping(result.get("serverInfo") or _mapping(result.get("_meta")).get(eras.META_SERVER)),
        instructions=_text(result.get("instructions")),
    )
    return _Discovered(peer, known is not None and has_capabilities)


async def _initialize(connection: McpConnection) -> ServerInfo:
    params = {
        "protocolVersion": eras.NEWEST_LEGACY,
        "capabilities": capabilities_for(LEGACY_ACCEPTS),
        "clientInfo": eras.BUS_INFO,
    }
    result = await connection.request("initialize", params)
    version = result.get("protocolVersion")
    if version not in eras.LEGACY_VERSIONS:
        raise RpcError(
            McpCode.UNSUPPORTED_VERSION,
            f"the server speaks version {str(version)[:40]!r} of the protocol: the bus speaks "
            f"{', '.join((*eras.LEGACY_VERSIONS, *eras.MODERN_VERSIONS))}; update the server",
        )
    return ServerInfo(
        modern=False,
        version=str(version),
        capabilities=_mapping(result.get("capabilities")),
        info=_mapping(result.get("serverInfo")),
        instructions=_text(result.get("instructions")),
    )


def _common(versions: object) -> str | None:
    """Returns the newest modern version that both sides speak; None if they share none."""
    known = versions if isinstance(versions, list) else []
    return next((version for version in reversed(eras.MODERN_VERSIONS) if version in known), None)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _items(written: msgspec.Raw) -> Any:
    """Returns the items of a list as they are written; what is no list is read."""
    try:
        return msgspec.json.decode(written, type=list[msgspec.Raw])
    except msgspec.ValidationError:
        return msgspec.json.decode(written)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


# -- lists -------------------------------------------------------------------------------------------------------------

MAX_ENTRIES = 10_000  # of one list; a longer one is cut, with a notice for operators
MAX_PAGES = 1_000
MAX_EMPTY_PAGES = 3  # in a row: a server may filter what a page would have
MAX_ATTEMPTS = 3  # to read a list whose cursors end because it changes
UNDECLARED_SECONDS = 5.0  # for a server that declares no tools to list some
# Kind → method, key of the result, capability that declares such a list.
METHODS: Mapping[str, tuple[str, str, str]] = {
    "tools": ("tools/list", "tools", "tools"),
    "prompts": ("prompts/list", "prompts", "prompts"),
    "resources": ("resources/list", "resources", "resources"),
    "templates": ("resources/templates/list", "resourceTemplates", "resources"),
}
CHANGED: Mapping[str, tuple[str, ...]] = {
    "notifications/tools/list_changed": ("tools",),
    "notifications/prompts/list_changed": ("prompts",),
    "notifications/resources/list_changed": ("resources", "templates"),
}
"""Notification → kinds of changed lists."""


@dataclass(slots=True)
class ServerLists:
    """What a server lists.

    Attributes:
        entries: by kind, each entry once; a list that the server does not have is empty. Tools are as they are written
            (`msgspec.Raw`).
        notices: for operators, by method: why a list ends before its server says so, or what it repeats.
    """

    entries: dict[str, list[Any]] = field(default_factory=dict)
    notices: dict[str, tuple[str, ...]] = field(default_factory=dict)


async def read_lists(
    connection: McpConnection, peer: ServerInfo, kinds: tuple[str, ...] = tuple(METHODS)
) -> ServerLists:
    """Reads lists of a server. Tools are listed also by a server that does not declare them, if it has any.

    Raises:
        RpcError, Lost, Busy: as for `McpConnection.request`.
    """
    listing = ServerLists()
    for kind in kinds:
        method, key, capability = METHODS[kind]
        listing.entries[kind], notices = [], list[str]()
        if peer.can(capability):
            listing.entries[kind] = await _read_list(connection, method, key, notices)
        elif kind == "tools":
            with contextlib.suppress(RpcError, TimeoutError):  # it has none
                async with asyncio.timeout(UNDECLARED_SECONDS):
                    listing.entries[kind] = await _read_list(connection, method, key, notices)
        listing.notices[method] = tuple(notices)
    return listing


async def _read_list(connection: McpConnection, method: str, key: str, notices: list[str]) -> list[Any]:
    """Reads all pages of one list; once more from its start if the list changes meanwhile, which ends its cursors."""
    for attempt in range(MAX_ATTEMPTS):
        try:
            entries, why = await _read_pages(connection, method, key)
        except RpcError as error:
            if error.code == McpCode.METHOD_NOT_FOUND:  # a server may have resources without templates
                return []
            if error.code != McpCode.INVALID_PARAMS or attempt + 1 == MAX_ATTEMPTS:
                raise
        else:
            if why:
                log.warning("%s: %s %s", connection, method, why)
                notices.append(why)
            return entries
    raise AssertionError("the last attempt returns or raises")


async def _read_pages(connection: McpConnection, method: str, key: str) -> tuple[list[Any], str]:
    """Returns the entries of all pages, and why reading ended early; "" if it did not."""
    entries: list[Any] = []
    names: set[object] = set()
    cursors: set[object] = set()
    cursor: object = None
    empty_pages = repeated = 0
    for number in range(1, MAX_PAGES + 1):
        # Megabytes of tools, which would hold the loop and take ten times their size, are read on a thread later.
        unread = key if key == "tools" else ""
        page = await connection.request(method, {} if cursor is None else {"cursor": cursor}, unread=unread)
        content = page.get(key)
        content = content if isinstance(content, list) else []
        # Two entries of one page that share a name are told apart later: only pages repeat each other.
        named = [(_name_of(each), each) for each in content]
        news = [each for name, each in named if name not in names]
        names.update(name for name, _ in named)
        entries += news
        repeated += len(content) - len(news)
        empty_pages = 0 if content else empty_pages + 1
        cursor = page.get("nextCursor")
        if cursor is None or cursor == "" or len(entries) > MAX_ENTRIES:
            break
        if isinstance(cursor, bool) or not isinstance(cursor, str | int):
            return entries, f"page {number} names the next one by something other than text: the rest is not read"
        if cursor in cursors:
            return entries, f"page {number} leads back to an earlier page, so reading ends there"
        if (content and not news) or empty_pages == MAX_EMPTY_PAGES:
            return entries, f"page {number} has nothing new, and leads to another: reading ends there"
        cursors.add(cursor)
    else:
        return entries, f"it has more than {MAX_PAGES} pages: the rest is not read"
    why = f"{repeated} entries came on more than one page, and are offered once" if repeated else ""
    return entries[: MAX_ENTRIES + 1], why  # one more, so that the cut is noticed


class _Named(msgspec.Struct):
    name: Any = None


def name_of_written(tool: msgspec.Raw) -> Any:
    """Returns the name of a tool as it is written; None where it has none, or cannot be read."""
    try:
        return msgspec.json.decode(tool, type=_Named).name
    except (msgspec.DecodeError, RecursionError):
        return None


def _name_of(entry: object) -> str:
    """Returns what tells an entry from others of its list: the name, the URI of a resource, else all of it."""
    if isinstance(entry, msgspec.Raw):
        name = name_of_written(entry)
        return name if isinstance(name, str) else bytes(entry).decode("utf-8", "replace")
    names = [entry.get(each) for each in ("uri", "uriTemplate", "name")] if isinstance(entry, Mapping) else []
    return next((name for name in names if isinstance(name, str)), "") or dump_json(entry)
