"""Serves HTTP: the REST contract with callback URLs, calls, events, tasks and councils for programs without gRPC.

Its code is loaded when the address is bound, so a bus without HTTP does not pay for it.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from toolbus.bus.callback_url import CallbackUrl, parse_callback_url
from toolbus.bus.core import Core, Room
from toolbus.bus.rooms.callbacks_room import CallbacksRoom
from toolbus.bus.web_paths import Cookies
from toolbus.errors import SetupError

if TYPE_CHECKING:
    from toolbus.bus.gateway.http_server import HttpServer, TlsContext
    from toolbus.bus.gateway.remote_access import RemoteAccess

log = logging.getLogger("toolbus.http")

FALLBACK_PORTS = 12  # ports after the configured one that are tried where that is taken


class GatewayRoom(Room):
    """The HTTP side of one bus; it has no address where the configuration turns HTTP off."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._server: HttpServer | None = None  # None where HTTP is off, and until it is bound
        self._secure: HttpServer | None = None  # the same for HTTPS
        self._tls: TlsContext | None = None  # None where HTTPS is off, and until started
        self._remote: RemoteAccess | None = None  # None until started
        core.signals.on_keys.append(self._keys_changed)

    @property
    def address(self) -> str | None:
        """HOST:PORT, port filled in; None where HTTP is off or not bound."""
        return self._server.address if self._server is not None else None

    @property
    def secure_address(self) -> str | None:
        """HOST:PORT of HTTPS, port filled in; None where it is off or not bound."""
        return self._secure.address if self._secure is not None else None

    @property
    def own_url(self) -> CallbackUrl:
        """Where the gateway is served: a callback URL there would call the bus itself."""
        return parse_callback_url(f"http://{self.address}")

    async def open(self) -> None:
        """Binds the address.

        Raises:
            SetupError: it is taken.
        """
        config = self.core.config
        if config.http == "off" and config.https is None:
            return
        from toolbus.bus.gateway.http_server import HttpServer

        if config.http != "off":
            self._server = HttpServer(
                self.core.config.limits.sessions, self.core.program.timings.head_seconds, self.core.sessions.neighbours
            )
            self._bind(self._server)
        if config.https is not None:
            self._secure = HttpServer(
                self.core.config.limits.sessions, self.core.program.timings.head_seconds, self.core.sessions.neighbours
            )
            self._secure.bind(config.https)

    def _bind(self, server: HttpServer) -> None:
        """Binds the address of HTTP, or the next free one where the configuration allows it.

        Raises:
            SetupError: it is taken.
        """
        config = self.core.config
        try:
            server.bind(config.http)
            return
        except SetupError:
            if not config.http_fallback:
                raise
        host, _, port = config.http.rpartition(":")
        # The following ports first, so that a restart finds the same one; then any.
        reserved = {address.rpartition(":")[2] for address in config.reserved}
        following = [str(each) for each in range(int(port) + 1, min(int(port) + 1 + FALLBACK_PORTS, 65536))]
        for each in (*following, "0"):
            if each not in reserved:
                with contextlib.suppress(SetupError):
                    server.bind(f"{host}:{each}")
                    break
        else:
            server.bind(config.http)
        log.warning(
            "http port %s is taken, by another plugin server perhaps: listening on %s instead (--http chooses a port)",
            port, server.address,
        )  # fmt: skip

    async def start(self) -> None:
        """Serves."""
        if self._server is not None or self._secure is not None:
            from toolbus.bus.gateway.app import DOCS_PATH, application, docs_page
            from toolbus.bus.gateway.gateway_parts import GatewayParts
            from toolbus.bus.gateway.http_server import TlsContext
            from toolbus.bus.gateway.remote_access import RESOURCE, RemoteAccess, ResourceMetadata

            callbacks = self.core.rooms.find(CallbacksRoom)
            registrations = callbacks.registrations if callbacks is not None else None
            has_mcp = self.core.rooms.web.find(RESOURCE) is not None
            issuers = self.core.sessions.doorman.issuers
            metadata = ResourceMetadata(issuers.names if has_mcp and issuers is not None else [])
            self._remote = RemoteAccess(
                self.core.sessions.doorman, metadata, self.core.rooms.web, self.core.rooms.provider(Cookies)
            )
            own_url = self.own_url if self._server is not None else None
            served = application(GatewayParts(self.core, registrations, own_url, self._remote))
            policies = {DOCS_PATH: docs_page()[1], **self.core.rooms.web.policies}
            if self._server is not None:
                await self._server.start(served, policies)
            if self._secure is not None:
                assert self.core.sessions.keyring is not None  # the configuration needs keys
                self._tls = TlsContext(self.core.sessions.keyring)
                await self._secure.start(served, policies, self._tls.context)

    def _keys_changed(self, server: bool) -> None:
        if self._tls is not None and server:
            self._tls.refresh()
        if self._remote is not None:
            self._remote.refresh()

    async def stop(self) -> None:
        """Stops listening and ends open requests."""
        for server in (self._server, self._secure):
            if server is not None:
                await server.stop()
