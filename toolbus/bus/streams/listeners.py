"""Opens and closes the gRPC servers of one bus: the main one, and a port for untrusted sources when it is needed."""

from __future__ import annotations

import asyncio

from toolbus.bus.streams.doors import Doors
from toolbus.bus.streams.grpc_server import GrpcServer, ToolBusService
from toolbus.bus.streams.health import Health
from toolbus.bus.streams.untrusted_service import UntrustedService
from toolbus.errors import SetupError
from toolbus.tool import Limits

UNTRUSTED_HOST = "127.0.0.1"  # whatever the bus's address is: the kernel's sandbox can allow TCP ports only


class Listeners:
    """The gRPC servers of one bus."""

    def __init__(
        self,
        service: ToolBusService,
        untrusted: UntrustedService,
        health: Health,
        limits: Limits,
        doors: Doors,
        *,
        reflection: bool,
    ) -> None:
        self._main = GrpcServer(service, limits, doors, health=health, reflection=reflection)
        self._doors = doors
        self._untrusted_service = untrusted
        self._limits = limits
        self._untrusted: GrpcServer | None = None  # None until it is needed
        self._lock = asyncio.Lock()  # one opens or stops at a time
        self._stopped = False

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of the main server, ports filled in."""
        return self._main.addresses

    async def start(self, addresses: tuple[str, ...]) -> None:
        """Binds every address and starts to serve.

        Raises:
            SetupError: an address is taken or cannot be bound; none is served then.
        """
        await self._main.start(addresses)

    async def untrusted_address(self, port: int = 0) -> str:
        """Returns the address where untrusted sources attach; the first request opens it.

        Args:
            port: the preferred one, from 1 to 65535; another port is taken if it is in use. 0: any port.

        Raises:
            SetupError: the bus does not listen, or nothing can be bound.
        """
        async with self._lock:
            if self._stopped or not self._main.addresses:
                raise SetupError("the bus does not listen, so it has no port for untrusted sources: ask while it runs")
            if self._untrusted is None:
                self._untrusted = await self._opened(port)
            return self._untrusted.addresses[0]

    async def _opened(self, port: int) -> GrpcServer:
        if not 0 <= port <= 65535:
            raise SetupError(f"port is {port}: use a number from 1 to 65535, or 0 for any free port")
        if port:
            try:
                return await self._listen(port)
            except SetupError:  # another process uses it
                pass
        return await self._listen(0)

    async def _listen(self, port: int) -> GrpcServer:
        server = GrpcServer(self._untrusted_service, self._limits, self._doors)
        await server.start((f"{UNTRUSTED_HOST}:{port}",))
        return server

    async def stop(self) -> None:
        """Stops at once; the port of untrusted sources first, since their tools are called from the main server."""
        self._stopped = True
        async with self._lock:
            if self._untrusted is not None:
                await self._untrusted.stop()
            await self._main.stop()
