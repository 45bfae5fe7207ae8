"""Offers the tools of the bus to MCP clients, at ``/mcp``.

Its code is loaded by the first request, so a bus without MCP clients does not pay for it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING

from toolbus.bus.core import Core, Room
from toolbus.bus.web_paths import Message, Receive, Send
from toolbus.parts.mcp.features import Features
from toolbus.parts.mcp.server.pipe_listener import PipeListener
from toolbus.parts.mcp.settings import McpConfig

if TYPE_CHECKING:
    from toolbus.parts.mcp.server.mcp_endpoint import McpEndpoint
    from toolbus.parts.mcp.server.server import McpServer

log = logging.getLogger("toolbus.mcp")

PATH = "/mcp"


class McpServerRoom(Room):
    """The endpoint for MCP clients, unless the configuration turns it off."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._server: McpServer | None = None  # None until it is first needed
        self._endpoint: McpEndpoint | None = None  # the same
        self._listener: PipeListener | None = None  # None where nothing is persisted
        self._features = Features(core.config.data_dir)  # of mounted servers

    @property
    def server(self) -> McpServer:
        """The server of MCP clients over HTTP and pipes; made when it is first needed."""
        if self._server is None:
            from toolbus.parts.mcp.server.server import McpServer

            self._server = McpServer(self.core)
        return self._server

    def provides(self) -> Iterable[object]:
        """Returns the features that mounted servers add to."""
        return (self._features,)

    async def open(self) -> None:
        """Adds the path, and listens to bridges where there is a data directory."""
        config = self.core.config
        if not config.part(McpConfig).mcp.enabled:
            return
        self.core.rooms.web.add(PATH, self._serve)
        if config.data_dir is not None and hasattr(socket, "AF_UNIX"):
            self._listener = PipeListener(config.data_dir, self._serve_pipe)
            try:
                await self._listener.open()
            except OSError as error:
                log.warning("no pipe for toolbus mcp at %s, which uses HTTP instead: %s", self._listener.path, error)

    async def stop(self) -> None:
        """Ends the streams of clients; their sessions stay valid for the next bus."""
        if self._listener is not None:
            await self._listener.close()
        if self._server is not None:
            self._server.close()

    async def _serve(self, scope: Message, receive: Receive, send: Send) -> None:
        if self._endpoint is None:
            from toolbus.parts.mcp.server.mcp_endpoint import McpEndpoint

            self._endpoint = McpEndpoint(self.server)
        await self._endpoint(scope, receive, send)

    async def _serve_pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from toolbus.parts.mcp.server.pipe import Pipe

        await Pipe(self.server, reader, writer).run()
