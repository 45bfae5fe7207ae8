"""Opens and closes the servers of one bus: gRPC, the lane beside it, and a port for untrusted sources when needed."""

from __future__ import annotations

import asyncio
import platform
import re
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from toolbus.bus.access.identity import Identity
from toolbus.bus.calls.dispatcher import Dispatcher
from toolbus.bus.streams.doors import Doors
from toolbus.bus.streams.grpc_server import GrpcServer, ToolBusService
from toolbus.bus.streams.health import Health
from toolbus.bus.streams.lane_server import LaneServer
from toolbus.bus.streams.presence import Presence
from toolbus.bus.streams.server_handshake import SHARE
from toolbus.common.stall import StallWatch
from toolbus.common.text import quote
from toolbus.errors import NotPermitted, SetupError
from toolbus.protocol.limits import Timings
from toolbus.protocol.tool import Limits
from toolbus.v1 import tool_bus_service_pb2 as wire

# A program that can reach the bus's main address may administer the bus, and a sandbox can allow a port but cannot
# choose the requests that are sent to it. So this port takes only sessions of untrusted sources: they offer tools and
# answer calls, and their own calls have no context, therefore no user and no level.

DROPIN = "dropin"  # this source and those that begin with it and a colon may attach here, whatever the policy is


class UntrustedService(ToolBusService):
    """The RPCs of the bus that untrusted sources may use.

    Args:
        is_untrusted: tells whether the policy counts a source as untrusted.
    """

    is_guarded = True

    def __init__(
        self,
        dispatcher: Dispatcher,
        presence: Presence,
        limits: Limits,
        timings: Timings,
        is_untrusted: Callable[[str], bool],
        stalls: StallWatch,
    ) -> None:
        limits = replace(limits, sessions=max(1, limits.sessions // SHARE))
        super().__init__(dispatcher, presence, limits, timings, _refuse, stalls)
        self._is_untrusted = is_untrusted
        self.unary["Unregister"] = wire.UnregisterRequest, self._unregister
        self.unary["Clear"] = wire.ClearRequest, _refuse
        self.unary["List"] = wire.ListRequest, _refuse

    def _check(self, attach: wire.Attach) -> None:
        source = attach.source
        if not (source == DROPIN or source.startswith(f"{DROPIN}:") or self._is_untrusted(source)):
            raise NotPermitted(
                f"source {quote(source)} is not guarded, and this port of the bus takes guarded sources only: attach "
                "at the address that `toolbus serve` prints, or add the source to `guarded` in the configuration"
            )
        if not attach.token:
            raise NotPermitted(f"the attach of {quote(source)} carries no token, but this port of the bus requires one")

    def _register(self, request: wire.RegisterRequest, identity: Identity) -> wire.RegisterResponse:
        self._check_session(request.session_id)
        return super()._register(request, identity)

    def _unregister(self, request: wire.UnregisterRequest, identity: Identity) -> wire.UnregisterResponse:
        self._check_session(request.session_id)
        return self._presence.unregister(request, identity)

    def _check_session(self, session_id: str) -> None:
        if not session_id or not self._presence.session(session_id).untrusted:
            raise NotPermitted(
                "this port of the bus takes Register and Unregister only for a session of a guarded source: pass "
                "Attached.session_id"
            )


def _refuse(request: object, identity: Identity | None = None) -> NoReturn:
    name = type(request).__name__.removesuffix("Request")
    raise NotPermitted(
        f"this port of the bus takes no {name}, it is for the tools of guarded sources: use the address that "
        "`toolbus serve` prints"
    )


SCOPED_SINCE = (6, 12)  # version of Linux


def scopes_sockets(release: str | None = None) -> bool:
    """Tells whether the kernel's sandbox keeps programs from abstract unix sockets, and so from the lane.

    Older kernels confine the TCP ports of a program only: there the lane closes when sandboxed programs come.
    """
    numbers = re.match(r"(\d+)\.(\d+)", platform.release() if release is None else release)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= SCOPED_SINCE


UNTRUSTED_HOST = "127.0.0.1"  # whatever the bus's address is: the kernel's sandbox can allow TCP ports only


class Listeners:
    """The servers of one bus."""

    def __init__(
        self,
        service: ToolBusService,
        untrusted: UntrustedService,
        health: Health,
        limits: Limits,
        doors: Doors,
        *,
        reflection: bool,
        lane: bool,
    ) -> None:
        self._lane = LaneServer(service, limits, doors.neighbours, doors.audit) if lane else None
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
        await self._main.start(addresses, self._lane.start if self._lane is not None else None)

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
        if self._lane is not None and not scopes_sockets():
            self._lane.close()
        server = GrpcServer(self._untrusted_service, self._limits, self._doors)
        await server.start((f"{UNTRUSTED_HOST}:{port}",))
        return server

    async def stop(self) -> None:
        """Stops at once; the port of untrusted sources first, since their tools are called from the main server."""
        self._stopped = True
        async with self._lock:
            if self._untrusted is not None:
                await self._untrusted.stop()
            if self._lane is not None:
                self._lane.stop()
            await self._main.stop()
