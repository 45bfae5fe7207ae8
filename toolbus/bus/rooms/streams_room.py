"""Serves gRPC: the streams of plugins and hosts, their health, and the clock of the heartbeats."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from toolbus.bus.access.identity import Identity, Principal
from toolbus.bus.core import Core, Room
from toolbus.bus.streams.doors import Doors
from toolbus.bus.streams.grpc_server import ToolBusService
from toolbus.bus.streams.health import SERVICE, Health
from toolbus.bus.streams.listeners import Listeners, UntrustedService
from toolbus.functions.tool_spec import llm_tool
from toolbus.protocol.tool import MAX_LEVEL


class StreamsRoom(Room):
    """The gRPC side of one bus."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.health = Health(
            lambda: core.takes_calls,
            core.rooms.serving,
            core.rooms.sources,
            self._hides_source,
            core.sessions.doorman.current,
        )
        shared = core.calls.dispatcher, core.sessions.presence, core.config.limits, core.program.timings
        service = ToolBusService(*shared, core.rooms.register, core.program.stalls)
        untrusted = UntrustedService(*shared, core.catalog.policy.is_untrusted, core.program.stalls)
        sessions, is_watched = core.sessions, self.health.is_watched
        doors = Doors(sessions.neighbours, sessions.doorman, core.audit, core.calls.dispatcher.seams, is_watched)
        how = {"reflection": core.config.grpc_reflection, "lane": core.config.lane}
        self.listeners = Listeners(service, untrusted, self.health, core.config.limits, doors, **how)
        core.signals.on_source.append(self.health.source_changed)
        core.signals.on_keys.append(lambda server: self.health.keys_changed())
        core.signals.on_readiness.append(self._readiness_changed)
        core.signals.on_notify.append(core.sessions.presence.watchers.notify)

    def tools(self) -> Iterable[Callable[..., Any]]:
        """Returns the tool that names the address for sandboxed tools."""
        return [self.dropin_address]

    @llm_tool(
        description="Where sandboxed tools attach: a port that takes guarded sources only; it opens on first use."
    )
    async def dropin_address(self, port: int = 0) -> str:
        """Names the address to which sandboxed tools attach.

        Args:
            port: which one to open, where it is free and no port is open yet; 0: any.
        """
        return await self.listeners.untrusted_address(port)

    async def start(self) -> None:
        """Binds every address and serves.

        Raises:
            SetupError: an address is taken.
        """
        await self.listeners.start(self.core.config.grpc)
        self.repeat(self.core.program.timings.tick_seconds, self._tick, "checked heartbeats")

    async def stop(self) -> None:
        """Stops listening; sessions have ended before."""
        await self.listeners.stop()

    def serving(self, source: str) -> bool | None:
        """Tells whether a session of a source answers; None where none is known."""
        return self.core.sessions.presence.serving(source)

    def sources(self) -> Iterable[str]:
        """Names the sources that are attached or in their grace period."""
        return self.core.sessions.presence.known_sources()

    def _hides_source(self, source: str, identity: Identity) -> bool:
        if identity.may_attach(source):
            return False
        return self.core.catalog.view.hides_source(source, MAX_LEVEL, Principal(identity=identity))

    def _readiness_changed(self) -> None:
        self.health.changed("")
        self.health.changed(SERVICE)

    def _tick(self) -> None:
        self.core.sessions.presence.tick(time.monotonic())
        self.core.sessions.presence.watchers.notify()  # again those who read too slowly the last time
