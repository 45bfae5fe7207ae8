"""Serves MCP for one bus, whatever carries the messages: reads requests, refuses them, takes notifications.

What carries messages (`endpoint` over HTTP, a pipe) does four things with a message that `jsonrpc.decode` read:

- a request: ``request = server.read(message, …)``, then `methods.answer`, whose bytes it sends;
- a notification or an answer of a legacy client: ``server.notice(message, session)``;
- it gives each request a `Channel` for messages before the answer;
- it cancels the task of an answer when its client leaves, if the era says so.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

import msgspec

from toolbus.bus.access.identity import Identity
from toolbus.bus.core import Core
from toolbus.bus.mcp_server.calls import Calls
from toolbus.bus.mcp_server.client import Channel, ClientCapabilities
from toolbus.bus.mcp_server.feature_view import FeatureView
from toolbus.bus.mcp_server.mcp_listing import Listings
from toolbus.bus.mcp_server.mcp_request import PARAMS, McpRequest, Meta, Params
from toolbus.bus.mcp_server.returning import Returning
from toolbus.bus.mcp_server.seal import Sealer
from toolbus.bus.mcp_server.sessions import McpSession, Sessions
from toolbus.bus.mcp_server.subscriptions import Subscriptions
from toolbus.bus.mcp_server.tool_names import STATE_FILE, ToolNames
from toolbus.bus.mcp_settings import Profile
from toolbus.mcp import jsonrpc
from toolbus.mcp.eras import META_CAPABILITIES, META_VERSION, MODERN_VERSIONS, Era, era_of
from toolbus.mcp.jsonrpc import JsonRpcMessage, McpCode, RpcError
from toolbus.newest import NewestCache
from toolbus.text import quote

MAX_CLIENTS = 256  # capabilities that are cached
_ANYBODY = ClientCapabilities()
_NO_HEADERS: Mapping[str, str] = {}


class McpServer:
    """What MCP clients of one bus reach.

    Attributes:
        settings: of the configuration.
        sealer: seals what clients bring back.
        names: the names of tools towards clients.
        listings: what clients see.
        returning: waits for tools that a bus had before it restarted.
        calls: makes their calls.
        features: what clients see of mounted servers beside tools.
        sessions: of legacy clients over HTTP.
        subscriptions: who wants to know what changes.
    """

    def __init__(self, core: Core) -> None:
        data_dir = core.config.data_dir
        self.core = core
        self.settings = core.config.mcp
        self.sealer = Sealer.of(data_dir)
        self.names = ToolNames(data_dir / STATE_FILE if data_dir is not None else None)
        self.listings = Listings(core, self.names, self.sealer)
        self.returning = Returning(core, self.names, self.listings)
        self.calls = Calls(core)
        self.features = FeatureView(core.features, core.policy, self.names)
        self.sessions = Sessions(self.sealer)
        self.subscriptions = Subscriptions(core, self.listings, self.features)
        self._clients: NewestCache[bytes, ClientCapabilities] = NewestCache(MAX_CLIENTS)

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
            session: of the client, if it has one; over a pipe, the one that `initialize` began.
            headers: of HTTP, by lower-case name.
            header_version: the header MCP-Protocol-Version.

        Raises:
            RpcError: it breaks a rule of its era.
        """
        method = message.method
        params = jsonrpc.read(message.params, PARAMS.get(method, Params))
        meta = params.meta
        named = bool(headers) and session is not None  # over a pipe a session is not named, and eras may alternate
        era = era_of(method, meta_version=meta.version, header_version=header_version, session=named)
        modern = era is Era.MODERN
        if modern:
            self._check_meta(meta, header_version)
            version, client, session = meta.version or "", self._client(meta.capabilities), None
        elif session is not None:
            version, client = session.version, session.client
        else:
            version, client = "", _ANYBODY
        assert isinstance(message.id, int | str)  # a request has one
        return McpRequest(
            *(message.id, method, params, bytes(message.params), modern, version, profile, identity, client),
            session,
            channel,
            headers,
        )

    def refuse(self, request: McpRequest, error: RpcError) -> tuple[int, bytes]:
        """Returns the HTTP status and the message that refuse a request."""
        status = jsonrpc.HTTP_STATUS.get(error.code, 200) if request.modern else 200
        return status, jsonrpc.refusal(request.id, error)

    def notice(self, message: JsonRpcMessage, session: McpSession | None) -> None:
        """Takes a notification, or an answer to a question of ours. What is not known is ignored."""
        if session is None:
            return
        if not message.method:
            session.answered(message)
        elif message.method == "notifications/cancelled":
            with contextlib.suppress(RpcError):  # nobody waits for an answer that could say what is wrong with it
                id = jsonrpc.read(message.params, dict).get("requestId")
                if isinstance(id, int | str):
                    session.cancel(id)

    def begin_session(self, request: McpRequest, version: str, client: ClientCapabilities) -> None:
        """Begins the session of a client that initializes; `request.session` is it from then on."""
        request.session = self.sessions.begin(version, client, request.profile, request.identity)

    async def save_names(self) -> None:
        """Persists names that are new, before a client learns of them."""
        if self.names.unsaved:
            await asyncio.to_thread(self.names.save, list(self.listings.offered()))

    def follow(self, session: McpSession) -> Callable[[], None]:
        """Tells a session about changes of what it sees from now on. Returns what ends that."""
        return self.subscriptions.follow(session)

    def close(self) -> None:
        """Ends all sessions; their ids stay valid."""
        self.subscriptions.close()
        self.sessions.close()

    def _check_meta(self, meta: Meta, header_version: str | None) -> None:
        """Checks what each modern request has to say.

        Raises:
            RpcError: it does not, in its header something else, or its version is unknown.
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
        if not bytes(meta.capabilities):
            raise RpcError(
                McpCode.INVALID_PARAMS, f"params._meta needs {META_CAPABILITIES}: send {{}} where there are none"
            )

    def _client(self, capabilities: msgspec.Raw) -> ClientCapabilities:
        key = bytes(capabilities)
        client = self._clients.get(key)
        if client is None:
            client = ClientCapabilities.of(jsonrpc.read(capabilities, dict, "clientCapabilities"))
            if len(key) <= 4096:
                self._clients[key] = client
        return client
