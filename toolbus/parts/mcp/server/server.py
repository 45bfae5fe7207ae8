"""Serves MCP for one bus over any transport: reads requests, refuses them, takes notifications.

A transport (the endpoint over HTTP, a pipe) does four things with a message from `jsonrpc.decode`:

- a request: ``request = server.read(message, …)``, then `methods.answer`, whose bytes it sends;
- a notification or a response of a legacy client: ``server.notice(message, session)``;
- it gives each request a `Channel` for messages before the answer;
- it cancels the task of an answer when its client disconnects, if the era requires that.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Mapping

import msgspec

from toolbus.bus.access.identity import Identity
from toolbus.bus.core import Core
from toolbus.bus.keys.seal import Sealer
from toolbus.common.newest import NewestCache
from toolbus.common.text import quote
from toolbus.parts.mcp.features import features_of
from toolbus.parts.mcp.messages import jsonrpc
from toolbus.parts.mcp.messages.eras import META_CAPABILITIES, META_VERSION, MODERN_VERSIONS, is_modern
from toolbus.parts.mcp.messages.jsonrpc import JsonRpcMessage, McpCode, RpcError
from toolbus.parts.mcp.server.calls import Calls
from toolbus.parts.mcp.server.feature_view import FeatureView
from toolbus.parts.mcp.server.mcp_listing import Listings, TargetTool, ToolNames
from toolbus.parts.mcp.server.mcp_request import PARAMS, McpRequest, Meta, Params
from toolbus.parts.mcp.server.sessions import Channel, ClientCapabilities, McpSession, Sessions
from toolbus.parts.mcp.server.subscriptions import Subscriptions
from toolbus.parts.mcp.settings import McpConfig, Profile
from toolbus.parts.tasks import TaskManager


# Without it, a client that lists right after a restart would see no tools until it lists again, and the call of a model
# that knows a tool from before would fail as unknown.
class Returning:
    """Waits for the tools of one bus."""

    def __init__(self, core: Core, names: ToolNames, listings: Listings) -> None:
        self._core = core
        self._names = names
        self._listings = listings
        self._changed = asyncio.Event()  # set and replaced at each change of the catalog
        core.signals.on_change.append(self._wake)

    def __repr__(self) -> str:
        return f"<Returning {self._names!r}>"

    def may_have_missed(self, profile: Profile) -> bool:
        """Tells whether clients of a profile may know lists of an earlier run of this bus, which has ended just now."""
        settled = time.monotonic() >= self._core.calls.dispatcher.admission.settled_at
        return not settled and self._names.had_names(profile)

    async def wait_for_lists(self, profile: Profile, identity: Identity, *, modern: bool) -> None:
        """Waits until a profile has all its earlier tools, at most until the bus has settled."""

        def complete() -> bool:
            self._listings.catalog(profile, identity, modern=modern)  # marks its tools as present
            return not self._names.has_missing(profile)

        await self._wait(complete)

    async def find(self, profile: Profile, identity: Identity, wire: str) -> TargetTool | None:
        """Returns the tool of a name towards clients; None if it is unknown or does not return in time."""
        target = self._listings.find(profile, identity, wire)
        if target is not None or not self._names.is_missing(profile, wire):
            return target
        await self._wait(lambda: self._listings.find(profile, identity, wire) is not None)
        return self._listings.find(profile, identity, wire)

    async def _wait(self, is_there: Callable[[], bool]) -> None:
        """Waits until a condition is true, at most until the bus has settled."""
        while (seconds := self._core.calls.dispatcher.admission.settled_at - time.monotonic()) > 0:
            changed = self._changed
            if is_there():
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


MAX_CLIENTS = 256  # in the cache of capabilities
_ANYBODY = ClientCapabilities()
_NO_HEADERS: Mapping[str, str] = {}


class McpServer:
    """The MCP server of one bus.

    Attributes:
        settings: from the configuration.
        sealer: seals texts that clients send back.
        names: the names of tools towards clients.
        listings: the tools that clients see.
        returning: waits for tools after a restart of the bus.
        calls: makes the calls of clients.
        features: the prompts, resources and templates that clients see.
        sessions: of legacy clients over HTTP.
        subscriptions: notifies clients of changes.
    """

    def __init__(self, core: Core) -> None:
        self.core = core
        self.settings = core.config.part(McpConfig).mcp
        self.sealer = Sealer.of(core.config.data_dir, shared=core.program.store.secret("mcp"))
        self.names = ToolNames(core.program.store)
        self.listings = Listings(core, self.names, self.sealer)
        self.returning = Returning(core, self.names, self.listings)
        self.calls = Calls(core)
        self.features = FeatureView(features_of(core), core.catalog.policy, self.names)
        self.subscriptions = Subscriptions(core, self.listings, self.features)
        self.sessions = Sessions(self.sealer, store=core.program.store, on_restore=self.subscriptions.resume)
        self._clients: NewestCache[bytes, ClientCapabilities] = NewestCache(MAX_CLIENTS)
        self._saving = asyncio.Lock()  # held while new names are persisted
        core.signals.on_close.append(self._end_listening)

    @functools.cached_property
    def tasks(self) -> TaskManager:
        """The background tasks of the bus; an empty manager where the bus has none."""
        return self.core.rooms.provider(TaskManager) or TaskManager()

    def __repr__(self) -> str:
        return f"<McpServer {self.sessions!r} {self.calls!r}>"

    def read(
        self,
        message: JsonRpcMessage,
        profile: Profile,
        identity: Identity,
        channel: Channel,
        *,
        session: McpSession | None = None,
        headers: Mapping[str, str] = _NO_HEADERS,
        header_version: str | None = None,
    ) -> McpRequest:
        """Reads a request.

        Args:
            session: of the client, if it has one; over a pipe, that of `initialize`.
            headers: of HTTP, by lower-case name.
            header_version: the header MCP-Protocol-Version.

        Raises:
            RpcError: the request breaks a rule of its era.
        """
        method = message.method
        params = jsonrpc.read(message.params, PARAMS.get(method, Params))
        meta = params.meta
        named = bool(headers) and session is not None  # over a pipe requests name no session, and eras may alternate
        modern = is_modern(method, meta_version=meta.version, header_version=header_version, session=named)
        if modern:
            self._check_meta(meta, header_version)
            version, client, session = meta.version or "", self._client(meta.capabilities), None
        elif session is not None:
            version, client = session.version, session.client
        else:
            version, client = "", _ANYBODY
        assert isinstance(message.id, int | str)  # a request has one
        written = bytes(message.params)
        return McpRequest(
            *(message.id, method, params, written, modern, version, profile, identity, client, session),
            *(channel, headers),
        )

    def refuse(self, request: McpRequest, error: RpcError) -> tuple[int, bytes]:
        """Returns the HTTP status and the message that refuse a request."""
        status = jsonrpc.HTTP_STATUS.get(error.code, 200) if request.modern else 200
        return status, jsonrpc.refusal(request.id, error)

    def notice(self, message: JsonRpcMessage, session: McpSession | None) -> None:
        """Takes a notification, or a response to a question of the bus. Unknown ones are ignored."""
        if session is None:
            return
        if not message.method:
            session.answered(message)
        elif message.method == "notifications/cancelled":
            with contextlib.suppress(RpcError):  # a notification has no response that could carry the error
                id = jsonrpc.read(message.params, dict).get("requestId")
                if isinstance(id, int | str):
                    session.running.cancel(id)

    async def save_names(self) -> None:
        """Persists new names, before a client sees them."""
        if self.names.unsaved or self._saving.locked():  # another client's request may be persisting them
            async with self._saving:
                await asyncio.to_thread(self.names.save, self.listings.offered())

    def close(self) -> None:
        """Ends all sessions; their ids stay valid."""
        self.subscriptions.close()
        self.sessions.close()

    def _end_listening(self) -> None:
        """Ends the streams that wait for changes, before the bus ends its connections: clients see a proper end."""
        self.subscriptions.end_all()
        self.sessions.end_standing()

    def _check_meta(self, meta: Meta, header_version: str | None) -> None:
        """Checks the `_meta` of a modern request.

        Raises:
            RpcError: a field is missing, the header differs, or the version is unknown.
        """
        version = meta.version
        if version is None:
            raise RpcError(McpCode.INVALID_PARAMS, f"params._meta needs {META_VERSION}: each request names its version")
        if header_version is not None and header_version != version:
            raise RpcError(
                McpCode.HEADER_MISMATCH,
                f"the header MCP-Protocol-Version is {quote(header_version)}, and _meta names {quote(version)}: they "
                "must agree",
            )
        if version not in MODERN_VERSIONS:
            data = {"supported": list(MODERN_VERSIONS), "requested": version}
            raise RpcError(McpCode.UNSUPPORTED_VERSION, "Unsupported protocol version", data)
        if bytes(meta.capabilities) in (b"", b"null"):
            raise RpcError(
                McpCode.INVALID_PARAMS, f"params._meta needs {META_CAPABILITIES}: send {{}} if the client has none"
            )

    def _client(self, capabilities: msgspec.Raw) -> ClientCapabilities:
        key = bytes(capabilities)
        client = self._clients.get(key)
        if client is None:
            client = ClientCapabilities.of(jsonrpc.read(capabilities, dict, "clientCapabilities"))
            if len(key) <= 4096:
                self._clients[key] = client
        return client
