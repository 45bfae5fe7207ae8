"""Offers the tools of the bus to MCP clients, at ``/mcp``.

What serves is loaded by the first request, so a bus that no MCP client asks does not pay for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from toolbus.bus.core import Core
from toolbus.bus.room import Room

if TYPE_CHECKING:
    from toolbus.bus.mcp_server.endpoint import Endpoint
    from toolbus.bus.mcp_server.server import McpServer

PATH = "/mcp"

_Message = MutableMapping[str, Any]


class McpServerRoom(Room):
    """The endpoint for MCP clients; there is none where the configuration turns it off."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._server: McpServer | None = None  # None until it is first needed
        self._endpoint: Endpoint | None = None  # the same

    @property
    def server(self) -> McpServer:
        """What answers MCP clients, however they are connected; made when it is first needed."""
        if self._server is None:
            from toolbus.bus.mcp_server.server import McpServer

            self._server = McpServer(self.core)
        return self._server

    async def open(self) -> None:
        """Adds the path."""
        if self.core.config.mcp.enabled:
            self.core.web.add(PATH, self._serve)

    async def stop(self) -> None:
        """Ends what clients listen to; their sessions stay valid for the next bus."""
        if self._server is not None:
            self._server.close()

    async def _serve(
        self,
        scope: _Message,
        receive: Callable[[], Awaitable[_Message]],
        send: Callable[[_Message], Awaitable[None]],
    ) -> None:
        if self._endpoint is None:
            from toolbus.bus.mcp_server.endpoint import Endpoint

            self._endpoint = Endpoint(self.server)
        await self._endpoint(scope, receive, send)
