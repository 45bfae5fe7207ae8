"""Serves HTTP: the REST contract with callback URLs, calls, events, tasks and councils for programs without gRPC.

What serves is loaded when the address is bound, so a bus without HTTP does not pay for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolbus.bus.callback_url import CallbackUrl, parse_callback_url
from toolbus.bus.core import Core
from toolbus.bus.room import Room
from toolbus.bus.rooms.callbacks_room import CallbacksRoom
from toolbus.bus.rooms.council_room import CouncilRoom

if TYPE_CHECKING:
    from toolbus.bus.gateway.http_server import HttpServer


class GatewayRoom(Room):
    """The HTTP side of one bus; it has no address where the configuration turns HTTP off."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._server: HttpServer | None = None  # None where HTTP is off, and until it is bound

    @property
    def address(self) -> str | None:
        """HOST:PORT, port filled in; None where HTTP is off or not bound."""
        return self._server.address if self._server is not None else None

    @property
    def own_url(self) -> CallbackUrl:
        """Where the gateway is served: a callback URL there would call the bus itself."""
        return parse_callback_url(f"http://{self.address}")

    async def open(self) -> None:
        """Binds the address.

        Raises:
            SetupError: it is taken.
        """
        if self.core.config.http == "off":
            return
        from toolbus.bus.gateway.http_server import HttpServer

        self._server = HttpServer(self.core.limits.sessions, self.core.timings.head_seconds, self.core.neighbours)
        self._server.bind(self.core.config.http)

    async def start(self) -> None:
        """Serves."""
        if self._server is not None:
            from toolbus.bus.gateway.app import application
            from toolbus.bus.gateway.docs_page import DOCS_PATH, DocsPage
            from toolbus.bus.gateway.gateway_parts import GatewayParts

            callbacks, council = self.core.rooms.find(CallbacksRoom), self.core.rooms.find(CouncilRoom)
            registrations = callbacks.registrations if callbacks is not None else None
            service = council.service if council is not None else None
            parts = GatewayParts(self.core, registrations, self.own_url, service)
            await self._server.start(application(parts), {DOCS_PATH: DocsPage().policy})

    async def stop(self) -> None:
        """Stops listening and ends open requests."""
        if self._server is not None:
            await self._server.stop()
