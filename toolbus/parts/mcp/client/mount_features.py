"""Provides prompts, resources, templates and completions of a mounted server to `Core.features`."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

from toolbus.parts.mcp.client.call_messages import number_of
from toolbus.parts.mcp.client.listening import Listening
from toolbus.parts.mcp.client.mcp_connection import FEATURE_METHODS, McpConnection, ServerInfo
from toolbus.parts.mcp.client.mount_entry import MountEntry
from toolbus.parts.mcp.client.transport import Busy, Lost
from toolbus.parts.mcp.features import OnUpdate, Requester
from toolbus.parts.mcp.messages.jsonrpc import McpCode, RpcError
from toolbus.protocol.tool import Progress

log = logging.getLogger("toolbus.mounts")

REQUEST_SECONDS = 60.0  # the timeout of a request to the server
_NAMED = {"prompts/get": "name", "resources/read": "uri"}  # params that HTTP repeats in the header Mcp-Name


class MountFeatures:
    """The features of one mount (`FeatureProvider`).

    Args:
        connected: returns the connection to the server; starts it first if it does not run.
        wake: starts the server if it does not run.
    """

    def __init__(
        self,
        entry: MountEntry,
        connected: Callable[[], Awaitable[McpConnection]],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.source = entry.name
        self.role = entry.role or ""
        self.min_level = entry.min_level
        self.capabilities: Collection[str] = ()
        self.instructions = ""
        self._connected = connected
        self._wake = wake
        self._lists: Mapping[str, Sequence[dict[str, Any]]] = {}
        self._listeners: dict[str, list[OnUpdate]] = {}  # by URI
        self._connection: McpConnection | None = None  # None while no server runs
        self._listening: Listening | None = None  # None unless a modern server runs

    def __repr__(self) -> str:
        return f"<MountFeatures {self.source} {' '.join(self.capabilities)}>"

    def prompts(self) -> Sequence[dict[str, Any]]:
        """Returns the declared prompts."""
        return self._lists.get("prompts", ())

    def resources(self) -> Sequence[dict[str, Any]]:
        """Returns the declared resources."""
        return self._lists.get("resources", ())

    def templates(self) -> Sequence[dict[str, Any]]:
        """Returns the declared templates of resources."""
        return self._lists.get("templates", ())

    async def request(self, method: str, params: Mapping[str, Any], asker: Requester) -> dict[str, Any]:
        """Forwards a request of an MCP client to the server.

        Raises:
            RpcError: the server refused it, or could not be reached.
        """
        if method not in FEATURE_METHODS:
            raise RpcError(McpCode.METHOD_NOT_FOUND, f"{method!r} is not forwarded to mounted servers")
        on_progress = asker.on_progress

        def progressed(values: Mapping[str, Any]) -> None:
            if on_progress is not None:
                on_progress(
                    Progress(
                        number_of(values.get("progress")),
                        number_of(values.get("total")),
                        str(values.get("message") or ""),
                    )
                )

        try:
            connection = await self._connected()
            result = await connection.request(
                method,
                {key: value for key, value in params.items() if key != "_meta"},
                name=str(params.get(_NAMED.get(method, ""), "")),
                accepts=asker.accepts,
                on_progress=progressed if on_progress is not None else None,
                timeout=REQUEST_SECONDS,
            )
        except (Lost, Busy) as error:
            raise RpcError(McpCode.INTERNAL, f"server {self.source!r} {error}") from None
        except TimeoutError:
            text = f"server {self.source!r} did not answer {method} within {REQUEST_SECONDS:g} s"
            raise RpcError(McpCode.INTERNAL, text) from None
        return {"resultType": "complete", **result}

    def subscribe(self, uri: str, on_update: OnUpdate) -> Callable[[], None]:
        """Calls `on_update` at each update of a resource; all listeners share one subscription at the server."""
        listeners = self._listeners.setdefault(uri, [])
        listeners.append(on_update)
        if len(listeners) == 1:
            self._follow(uri, "resources/subscribe")

        def end() -> None:
            if on_update in listeners:
                listeners.remove(on_update)
            if not listeners and self._listeners.get(uri) is listeners:
                del self._listeners[uri]
                self._follow(uri, "resources/unsubscribe")

        return end

    # -- calls of the mount -------------------------------------------------------------------------------------------

    def declare(self, peer_can: Callable[[str, str], bool], lists: Mapping[str, Sequence[Any]]) -> tuple[str, ...]:
        """Takes the declarations of the server. Returns the kinds that changed: `prompts`, `resources`."""
        before, capabilities = self._lists, set(self.capabilities)
        self._lists = {
            kind: [entry for entry in lists.get(kind, ()) if isinstance(entry, dict)]
            for kind in ("prompts", "resources", "templates")
        }
        named = [kind for kind in ("prompts", "resources", "completions") if peer_can(kind, "")]
        self.capabilities = (*named, *(["subscribe"] if peer_can("resources", "subscribe") else []))
        moved = {kind for kind, entries in self._lists.items() if entries != before.get(kind, [])}
        kinds = ["prompts"] if "prompts" in moved or ("prompts" in named) != ("prompts" in capabilities) else []
        return (*kinds, *(["resources"] if moved & {"resources", "templates"} else []))

    @property
    def subscribed(self) -> Collection[str]:
        """The URIs that MCP clients subscribe to."""
        return list(self._listeners)

    def attach(self, connection: McpConnection, peer: ServerInfo) -> None:
        """Subscribes at a server that has become ready."""
        self._connection = connection
        if peer.modern:
            self._listening = Listening(connection, peer, lambda: self.subscribed)
            self._listening.open()
        else:
            for uri in self._listeners:
                self._follow(uri, "resources/subscribe")

    def detach(self) -> None:
        """Forgets a server that has disconnected."""
        if self._listening is not None:
            self._listening.close()
        self._connection = self._listening = None

    def heard(self) -> None:
        """Notes that the server has reported a change."""
        if self._listening is not None:
            self._listening.heard()

    def updated(self, uri: str) -> None:
        """Reports an update of a resource to its listeners."""
        for listener in tuple(self._listeners.get(uri, ())):
            listener(uri)

    def _follow(self, uri: str, method: str) -> None:
        if self._connection is None and uri in self._listeners:
            self._wake()  # `attach` subscribes
        elif self._listening is not None:
            self._listening.open()
        elif self._connection is not None:
            params = McpConnection.text_of({"uri": uri})
            try:
                self._connection.send(method, params, lambda result, error: _log_refusal(uri, error), name=uri)
            except (Busy, Lost) as error:
                _log_refusal(uri, error)


def _log_refusal(uri: str, error: Exception | None) -> None:
    if error is not None:
        log.warning("updates of resource %.200r are not reported: %s", uri, error)
