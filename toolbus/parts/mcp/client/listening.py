"""Subscribes to the changes of a modern server: one `subscriptions/listen`, opened again whenever it ends."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from toolbus.parts.mcp.client.mcp_connection import McpConnection, ServerInfo
from toolbus.parts.mcp.client.transport import Busy, Lost, RequestId
from toolbus.parts.mcp.messages.jsonrpc import McpCode, RpcError

log = logging.getLogger("toolbus.mounts")

FIRST_SECONDS, MAX_SECONDS = 0.25, 30.0  # the backoff before a new listen
_LISTS = {"tools": "toolsListChanged", "prompts": "promptsListChanged", "resources": "resourcesListChanged"}


class Listening:
    """The subscription of one connection.

    Args:
        uris: returns the resources that MCP clients subscribe to.
    """

    def __init__(self, connection: McpConnection, peer: ServerInfo, uris: Callable[[], Collection[str]]) -> None:
        self._connection = connection
        self._lists = {name: True for kind, name in _LISTS.items() if peer.can(kind, "listChanged")}
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
        """Ends the listen."""
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
        seconds = min(MAX_SECONDS, FIRST_SECONDS * 2.0**self._failures) * random.uniform(0.5, 1.0)
        self._failures += 1
        self._timer = asyncio.get_running_loop().call_later(seconds, self.open)
