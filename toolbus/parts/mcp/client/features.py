"""Provides prompts, resources, templates and completions of a mounted server to `toolbus.parts.mcp.features`.

A modern server reports changes on one `subscriptions/listen`, which is opened again whenever it ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from toolbus.parts.mcp.client.calls import progress_of
from toolbus.parts.mcp.client.connection import FEATURE_METHODS, McpConnection, ServerInfo
from toolbus.parts.mcp.client.entries import MountEntry
from toolbus.parts.mcp.client.transport import Busy, Lost, RequestId
from toolbus.parts.mcp.features import OnUpdate, Requester
from toolbus.parts.mcp.messages.eras import LIST_CHANGES
from toolbus.parts.mcp.messages.jsonrpc import McpCode, RpcError
from toolbus.processes.supervisor import RestartPolicy

log = logging.getLogger("toolbus.mounts")

REQUEST_SECONDS = 60.0  # the timeout of a request to the server
_NAMED = {"prompts/get": "name", "resources/read": "uri"}  # params that HTTP repeats in the header Mcp-Name


class MountFeatures:
    """The features of one mount (`FeatureProvider`).

    Args:
        connected: returns the connection for a client's request; starts the server first if it does not run.
        wake: starts the server if it does not run.
    """

    def __init__(
        self,
        entry: MountEntry,
        connected: Callable[[Requester], Awaitable[McpConnection]],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.source = entry.name
        self.role = entry.role or ""
        self.min_level = entry.min_level
        self.capabilities: Collection[str] = ()
        self.instructions = ""
        self._subscribes = not entry.is_per_user  # the server that lists is not that of a client's user
        self._connected = connected
        self._wake = wake
        self._lists: Mapping[str, Sequence[dict[str, Any]]] = {}
        self._listeners: dict[str, list[OnUpdate]] = {}  # by URI
        self._connection: McpConnection | None = None  # None while no server runs
        self._listening: Listening | None = None  # None unless a modern server runs

    def __repr__(self) -> str:
        return f"<MountFeatures {self.source} {' '.join(self.capabilities)}>"

    def declared(self, kind: str) -> Sequence[dict[str, Any]]:
        return self._lists.get(kind, ())

    async def request(self, method: str, params: Mapping[str, Any], asker: Requester) -> dict[str, Any]:
        """Forwards a request of an MCP client to the server.

        Raises:
            RpcError: the server refused it, or could not be reached.
        """
        if method not in FEATURE_METHODS:
            raise RpcError(McpCode.METHOD_NOT_FOUND, f"{method!r} is not forwarded to mounted servers")
        on_progress = asker.on_progress

        try:
            connection = await self._connected(asker)
            result = await connection.request(
                method,
                {key: value for key, value in params.items() if key != "_meta"},
                name=str(params.get(_NAMED.get(method, ""), "")),
                accepts=asker.accepts,
                on_progress=None if on_progress is None else lambda params: on_progress(progress_of(params)),
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
        if not self._subscribes:
            return lambda: None
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
        subscribes = self._subscribes and peer_can("resources", "subscribe")
        self.capabilities = (*named, *(["subscribe"] if subscribes else []))
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


# -- changes of modern servers -----------------------------------------------------------------------------------------

RESTARTS = RestartPolicy()  # whose backoff comes before a new listen


class Listening:
    """The subscription of one connection.

    Args:
        uris: returns the resources that MCP clients subscribe to.
    """

    def __init__(self, connection: McpConnection, peer: ServerInfo, uris: Callable[[], Collection[str]]) -> None:
        self._connection = connection
        self._lists = {name: True for kind, name in LIST_CHANGES.items() if peer.can(kind, "listChanged")}
        self._uris = uris
        self._request: RequestId | None = None  # the open listen; None while none is open
        self._failures = 0
        self._timer: asyncio.TimerHandle | None = None  # opens the next listen; None before the first backoff
        self._closed = False

    def open(self) -> None:
        """Opens the listen, in place of one that is open; does nothing if there is nothing to subscribe to."""
        self.close()
        self._closed = False
        subscribed: dict[str, Any] = dict(self._lists)
        if uris := sorted(self._uris()):
            subscribed["resourceSubscriptions"] = uris
        if not subscribed:
            return
        params = json.dumps({"notifications": subscribed}).encode()
        try:
            self._request = self._connection.send("subscriptions/listen", params, self._ended)
        except (Busy, Lost) as error:
            self._ended(None, error)

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        request, self._request = self._request, None
        if request is not None:
            self._connection.cancel(request, "no longer needed")

    def heard(self) -> None:
        """Resets the backoff, since a notification has arrived."""
        self._failures = 0

    def _ended(self, result: msgspec.Raw | None, error: Exception | None) -> None:
        self._request = None
        if self._closed or self._connection.closed_why is not None:
            return
        if isinstance(error, RpcError) and error.code == McpCode.METHOD_NOT_FOUND:
            log.debug("the server declares that lists change, and has no subscriptions/listen")
            return
        self._timer = asyncio.get_running_loop().call_later(RESTARTS.backoff(self._failures), self.open)
        self._failures += 1
