"""Where a bus listens: at the addresses it was told, and at a port for guarded sources once somebody asks for it."""

from __future__ import annotations

import asyncio

from toolbus.bus.streams.grpc_server import GrpcServer, ToolBusService
from toolbus.bus.streams.guarded_service import UntrustedService
from toolbus.bus.streams.health import Health
from toolbus.errors import SetupError
from toolbus.tool import Limits

GUARDED_HOST = "127.0.0.1"  # whatever the bus's own address is: the kernel's sandbox knows TCP ports, no unix sockets


class Listeners:
    """The gRPC servers of one bus."""

    def __init__(
        self, service: ToolBusService, guarded: UntrustedService, health: Health, limits: Limits, *, reflection: bool
    ) -> None:
        self._main = GrpcServer(service, limits, health=health, reflection=reflection)
        self._service = guarded
        self._limits = limits
        self._guarded: GrpcServer | None = None  # None until somebody has asked for it
        self._turn = asyncio.Lock()
        self._stopped = False

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where everybody may attach, ports filled in."""
        return self._main.addresses

    async def start(self, addresses: tuple[str, ...]) -> None:
        """Binds every address and starts to serve.

        Raises:
            SetupError: an address is taken or cannot be bound; none is served then.
        """
        await self._main.start(addresses)

    async def untrusted_address(self, port: int = 0) -> str:
        """Returns where guarded sources attach; listens there from the first time that this is asked.

        Args:
            port: the one that is wished for, from 1 to 65535; another one is taken where it is in use. 0 wishes for
                none.

        Raises:
            SetupError: the bus does not listen, or nothing can be bound.
        """
        async with self._turn:
            if self._stopped or not self._main.addresses:
                raise SetupError("the bus does not listen: ask while it runs")
            if self._guarded is None:
                self._guarded = await self._opened(port)
            return self._guarded.addresses[0]

    async def _opened(self, port: int) -> GrpcServer:
        if not 0 <= port <= 65535:
            raise SetupError(f"port is {port}, it must be from 0 (any) to 65535")
        if port:
            try:
                return await self._listening(port)
            except SetupError:  # somebody else has it
                pass
        return await self._listening(0)

    async def _listening(self, port: int) -> GrpcServer:
        server = GrpcServer(self._service, self._limits)
        await server.start((f"{GUARDED_HOST}:{port}",))
        return server

    async def stop(self) -> None:
        """Stops at once; first where the tools are, then where those are who call them."""
        self._stopped = True
        async with self._turn:
            if self._guarded is not None:
                await self._guarded.stop()
            await self._main.stop()
