"""Runs the core of a bus without sockets and timers: its rooms on a clock that is moved by hand, and streams as lists.

Nothing here is a mock: the streams are shells round real sessions, as the gRPC server is one. Fuzz targets drive them,
and the tests of the core do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from toolbus.bus.access.identity import Principal
from toolbus.bus.calls.call_records import CallRecords
from toolbus.bus.calls.dispatcher import Dispatcher
from toolbus.bus.catalog.policy import Policy
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.metrics.call_counts import CallMetrics
from toolbus.bus.streams.peer import Peer
from toolbus.bus.streams.presence import Presence
from toolbus.errors import RequestError, ToolBusError, grpc_status
from toolbus.protocol.session import State
from toolbus.protocol.tool import Limits, Tool
from toolbus.v1 import tool_bus_service_pb2 as wire


class CoreOnAClock:
    """Registry, dispatcher and presence wired as the bus wires them, on a clock that its owner moves."""

    def __init__(
        self,
        roles: Sequence[str] = ("default",),
        *,
        limits: Limits | None = None,
        denied: frozenset[str] = frozenset(),
        untrusted: Iterable[str] = (),
        grace_seconds: float = 5.0,
        repairs: bool = True,
        metrics: bool = True,
        adopt: Callable[[str, Principal], bool] = lambda role, principal: False,
    ) -> None:
        self.now = 1_000.0
        self.armed_at = math.inf  # when the bus's timer would fire
        self.limits = limits or Limits()
        unconfigured = self.limits.unconfigured_roles
        self.registry = Registry(roles, grace_seconds=grace_seconds, unconfigured_roles=unconfigured)
        self.policy = Policy(denied, untrusted=untrusted)
        self.records = CallRecords()
        self.metrics = CallMetrics(counts=metrics)
        self.dispatcher = Dispatcher(
            self.registry,
            self.policy,
            self.records,
            self.limits,
            arm=self._arm,
            repairs=repairs,
            metrics=self.metrics if metrics else None,
        )
        self.sources: list[str] = []  # sources whose health may have changed
        self.changes = 0  # how often the catalog may have changed
        self.presence = Presence(
            self.registry,
            self.dispatcher,
            self.policy,
            self.limits,
            identity=("bus", "boot", "0"),
            on_source=self.sources.append,
            on_change=self._changed,
            adopt=adopt,
        )

    def _arm(self, when: float) -> None:
        self.armed_at = when  # one timer, as in the bus: the newest request replaces the one before

    def _changed(self) -> None:
        self.changes += 1
        self.presence.catalog_changed()

    def advance(self, seconds: float) -> None:
        """Moves the clock, firing the timer as often as it asks to be fired."""
        until = self.now + seconds
        while self.armed_at <= until:
            self.now, self.armed_at = max(self.now, self.armed_at), math.inf
            self.dispatcher.deadlines.sweep(self.now)
        self.now = until

    @property
    def held(self) -> int:
        """Bytes of arguments that the bus holds."""
        return self.dispatcher.in_flight.held


class StreamDouble:
    """A shell round a real peer of the bus: frames go in as messages, and come out as a list."""

    def __init__(self, core: CoreOnAClock) -> None:
        self._core = core
        self.peer = Peer(core.limits, core.now)
        self.peer.close = self._close
        self.peer.outbox.flooded = self._flood
        self.status: tuple[str, str] | None = None  # how the RPC ended: (gRPC status, text)
        self.closes = 0
        self.floods = 0

    def _close(self, status: str, text: str) -> None:
        self.status = (status, text)
        self.closes += 1

    def _flood(self) -> None:
        self.floods += 1

    def attach(self, source: str, *tools: Tool, **more: Any) -> None:
        attach = wire.Attach(**{"protocol_version": 1, "source": source, **more})
        attach.tools.extend(tool.to_wire() for tool in tools)
        self.send(attach=attach)

    def send(self, **fields: Any) -> None:
        """Takes in one frame, parsed from its bytes, as the server's read loop does."""
        core, peer = self._core, self.peer
        frame = wire.InvokeRequest.FromString(wire.InvokeRequest(**fields).SerializeToString())
        handle = {
            "attach": lambda value: core.presence.attach(peer, value, core.now),
            "calls": lambda value: core.dispatcher.calls(peer, value, core.now),
            "progress": lambda value: core.dispatcher.progress(peer, value, core.now),
            "results": lambda value: core.dispatcher.results(peer, value, core.now),
            "cancels": lambda value: core.dispatcher.endings.cancels(peer, value, core.now),
            "heartbeat": lambda value: None,
            "drain": lambda value: core.presence.drain_received(peer),
        }
        suspect = peer.suspect
        try:
            for field, value in peer.receive(frame, core.now):
                handle[field](value)
        except (RequestError, ToolBusError) as error:
            status, text = grpc_status(error)
            core.presence.end(peer, text, core.now, status=status)
        if suspect:
            core.presence.recovered(peer)

    def half_close(self) -> None:
        self._core.presence.half_closed(self.peer, self._core.now)

    def end(self, why: str = "its connection broke", status: str = "UNAVAILABLE") -> None:
        self._core.presence.end(self.peer, why, self._core.now, status=status)

    def written(self) -> list[wire.InvokeResponse]:
        """Takes every frame that waits, as the peer gets them."""
        frames = []
        while (frame := self.peer.outbox.take()) is not None:
            frames.append(wire.InvokeResponse.FromString(frame.SerializeToString()))
        return frames

    def read(self, name: str) -> list[Any]:
        """Takes every frame and returns the items of one field; the others are dropped."""
        found: list[Any] = []
        for frame in self.written():
            for field, value in frame.ListFields():
                if field.name == name:
                    found.extend([value] if name in ("attached", "heartbeat", "drain") else value)
        return found

    @property
    def ended(self) -> bool:
        return self.peer.state is State.CLOSED
