"""Offers the bus's tools to another host's main server, where the configuration names one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolbus.bus.callback_url import parse_callback_url
from toolbus.bus.core import Core, Room
from toolbus.bus.rooms.gateway_room import GatewayRoom
from toolbus.errors import SetupError
from toolbus.parts.moving.upstream.settings import UpstreamSettings

if TYPE_CHECKING:
    from toolbus.parts.moving.upstream.sync import Upstream


class UpstreamRoom(Room):
    """The upstream of one bus; it needs the gateway, where the main server calls our tools back."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._upstream: Upstream | None = None  # None where the configuration names none

    async def open(self) -> None:
        """Checks the address; nothing is sent yet.

        Raises:
            SetupError: it is this bus, or the file of earlier registrations cannot be read.
        """
        url = self.core.config.part(UpstreamSettings).upstream
        gateway = self.core.rooms.find(GatewayRoom)
        if url is None or gateway is None or gateway.address is None:
            return
        if parse_callback_url(url).meets(gateway.own_url):
            raise SetupError(f"upstream {url} is this bus: name the main server, or choose another port with --http")
        from toolbus.parts.moving.upstream.ownership import StoredOwnership
        from toolbus.parts.moving.upstream.sync import Upstream

        self._upstream = Upstream(
            url,
            self.core.catalog.registry,
            self.core.catalog.view,
            callback_base=gateway.own_url.url.rstrip("/"),
            bus_id=self.core.config.bus_id,
            changed=self.core.signals.watch,
            on_warning=self.core.signals.catalog_changed,
            on_roles=self.core.catalog.roles.from_upstream,
            ownership_file=StoredOwnership(self.core.program.store, url)
            if self.core.program.store.persistent
            else None,
        )

    async def start(self) -> None:
        """Starts to offer; never waits for the main server."""
        if self._upstream is not None:
            await self._upstream.start()

    async def drain(self) -> None:
        """Withdraws all tools there, while calls of the main server still find them."""
        if self._upstream is not None:
            await self._upstream.stop()

    async def stop(self) -> None:
        """Withdraws all tools there, where `drain` has not done so."""
        await self.drain()
