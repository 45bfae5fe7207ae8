"""Builds a bus: its core, and the rooms around it. Embed it in a program, or let ``toolbus serve`` run it.

async with Bus(Config(grpc=("127.0.0.1:0",), http="off")) as bus:
    @bus.tool
    def add(a: int, b: int) -> int:
        return a + b
    result = await bus.call("add", {"a": 1, "b": 2})
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from toolbus.bus.access.neighbours import Neighbours
from toolbus.bus.audit import Audit
from toolbus.bus.calls.call_records import CallRecords
from toolbus.bus.calls.dispatcher import Dispatcher
from toolbus.bus.catalog.entry import BUS_SOURCE
from toolbus.bus.catalog.policy import Policy
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.config import Config
from toolbus.bus.core import AnyRoom, Core, CoreCalls, CoreCatalog, CoreProgram, CoreSessions, Room, Rooms
from toolbus.bus.keys.doorman import Doorman
from toolbus.bus.keys.keyring import Keyring
from toolbus.bus.local import EmbeddedBus
from toolbus.bus.metrics.call_counts import CallMetrics, Times
from toolbus.bus.operators.grants import Grants
from toolbus.bus.roles import Roles
from toolbus.bus.rooms.callbacks_room import CallbacksRoom
from toolbus.bus.rooms.gateway_room import GatewayRoom
from toolbus.bus.rooms.keys_room import KeysRoom
from toolbus.bus.rooms.notifications_room import NotificationsRoom
from toolbus.bus.rooms.operators_room import OperatorsRoom
from toolbus.bus.rooms.streams_room import StreamsRoom
from toolbus.bus.signals import Signals
from toolbus.bus.storage.store import Store
from toolbus.bus.streams.presence import Presence
from toolbus.common.part import installed, load
from toolbus.common.stall import StallWatch
from toolbus.common.version import VERSION
from toolbus.errors import SetupError
from toolbus.functions.tool_spec import spec_of_method
from toolbus.protocol.limits import Timings

log = logging.getLogger("toolbus")

# Those of the core, in the order in which they open and start; they stop in reverse order. A room goes with its line.
CORE_ROOMS: tuple[type[Room], ...] = (
    CallbacksRoom,
    KeysRoom,
    OperatorsRoom,
    GatewayRoom,  # binds before gRPC is served, and stops after the rooms that its requests wait for
    NotificationsRoom,
    StreamsRoom,
)


def all_rooms() -> tuple[type[Room], ...]:
    """Returns the rooms of the core and of the parts that are installed, in the order in which they open."""
    rooms = list(CORE_ROOMS)
    for part in installed():
        for entry in part.rooms:
            place = next((i for i, room in enumerate(rooms) if room.__name__ == entry.before), len(rooms))
            rooms.insert(place, load(entry.home))
    return tuple(rooms)


class SweepTimer:
    """Wakes a dispatcher at its next deadline; one timer for all calls."""

    def __init__(self, times: Times) -> None:
        self._times = times  # of the sweeps
        self._timer: asyncio.TimerHandle | None = None  # None while no deadline is near
        self._sweep: Callable[[float], object] | None = None  # None until started

    def start(self, sweep: Callable[[float], object]) -> None:
        """Has ``sweep`` called with the time of the monotonic clock, on the running loop."""
        self._sweep = sweep

    def arm(self, when: float) -> None:
        """Moves the next sweep to a time of the monotonic clock."""
        self.cancel()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, when - time.monotonic()), self._wake)

    def cancel(self) -> None:
        """Cancels the next sweep."""
        if self._timer is not None:
            self._timer.cancel()

    def _wake(self) -> None:
        assert self._sweep is not None  # calls come only to a started bus
        self._timer = None
        began = time.monotonic()
        self._sweep(began)
        self._times.add(time.monotonic() - began)


class Bus(EmbeddedBus):
    """A running bus; use it as an async context manager. All methods belong to the loop that started it.

    Args:
        config: what to listen on and what to accept; by default what ``toolbus serve`` does.
        rooms: that it has; by default all of them (`all_rooms`).
        timings: lengths of time, most of them no configuration; by default with the heartbeats of the configuration.
        neighbours: the check of who may use the bus; by default the one that the configuration describes.
        embedder: compares the meanings of tools for searches; None: that of the extra `semantic`, where it is
            installed; False: none.

    Raises:
        SetupError: from the constructor, where an address needs keys and they cannot be read.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        rooms: Sequence[type[Room]] | None = None,
        timings: Timings | None = None,
        neighbours: Neighbours | None = None,
        embedder: Callable[[Sequence[str]], Any] | Literal[False] | None = None,
    ) -> None:
        config = config or Config()
        timings = timings or config.timings
        limits = config.limits
        registry = _registry(config)
        self.policy = Policy(frozenset(config.silenced), config.permissions, config.guarded, config.generation)
        contents, texts = config.record_contents, config.records_errors
        self.records = CallRecords(contents=contents, texts=texts, began=time.time() - time.monotonic())
        self._metrics = CallMetrics(config.metrics_tools, counts=config.metrics)
        self._sweeps = SweepTimer(self._metrics.sweeps)
        dispatcher = self._dispatcher(config, registry, timings)
        audit = Audit()
        signals = Signals(registry, dispatcher.view, self.records, timings.watch_seconds)
        super().__init__(registry, dispatcher, signals, limits)
        self._stopped = asyncio.Event()
        self._running = contextlib.AsyncExitStack()  # the rooms that stop with the bus, the last first
        roles = Roles(registry, config, audit, signals.catalog_changed)
        presence = self._presence(config, signals, timings, audit, roles)
        keyring = Keyring(config.keys_dir) if config.needs_keys and config.keys_dir is not None else None
        self.core = Core(
            config=config,
            catalog=CoreCatalog(registry, self.policy, dispatcher.view, roles),
            calls=CoreCalls(dispatcher, self.records, self._metrics),
            sessions=CoreSessions(presence, neighbours or Neighbours(config.neighbours), Doorman(keyring), keyring),
            signals=signals,
            audit=audit,
            rooms=Rooms(),
            program=CoreProgram(
                local=self,
                store=_store(config),
                timings=timings,
                stalls=StallWatch(timings.tick_seconds, timings.stall_seconds),
                embedder=embedder,
                request_stop=self._stopped.set,
            ),
        )
        signals.on_change.append(self.core.sessions.presence.catalog_changed)
        for room in all_rooms() if rooms is None else rooms:
            self.core.rooms.add(room(self.core))
        self._check_rooms()
        self._offer_own()

    def _dispatcher(self, config: Config, registry: Registry, timings: Timings) -> Dispatcher:
        return Dispatcher(
            registry,
            self.policy,
            self.records,
            config.limits,
            arm=self._sweeps.arm,
            stuck_seconds=timings.stuck_seconds,
            first_id=secrets.randbits(48),
            repairs=config.repair_arguments,
            metrics=self._metrics if config.metrics else None,
        )

    def _presence(self, config: Config, signals: Signals, timings: Timings, audit: Audit, roles: Roles) -> Presence:
        return Presence(
            self.registry,
            self.dispatcher,
            self.policy,
            config.limits,
            identity=(config.bus_id, secrets.token_hex(8), VERSION),
            on_source=signals.source_changed,
            on_change=signals.catalog_changed,
            timings=timings,
            audit=audit,
            adopt=roles.first_use,
        )

    def __repr__(self) -> str:
        where = ",".join(self.grpc_addresses) or "not started"
        return f"<Bus {where} {self.core.sessions.presence!r} {self.dispatcher!r}>"

    def _check_rooms(self) -> None:
        """Refuses a configuration that asks for a protection which no room of this bus gives."""
        names = {room.__name__ for kind in map(type, self.core.rooms) for room in kind.__mro__}
        for record in self.core.config.parts:
            needed = getattr(record, "needed_room", "")
            if needed and needed not in names:
                raise SetupError(
                    f"the configuration needs {needed}, and this bus was made without it: add it to its rooms"
                )

    def _offer_own(self) -> None:
        """Offers the tools of rooms: all of them to operators, the groups that the configuration names to models."""
        for room in self.core.rooms:
            for method in room.tools():
                self.offer(BUS_SOURCE, spec_of_method(method), qualified=True)
        for group in self.core.config.offered:
            for method in (method for room in self.core.rooms for method in room.offered(group)):
                self.offer(f"{BUS_SOURCE}.{group}", spec_of_method(method))

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Binds every address, restores what was persisted, and serves.

        Raises:
            SetupError: an address is taken, or the data directory cannot be used; nothing is left listening.
        """
        self.loop = asyncio.get_running_loop()
        self._sweeps.start(self.dispatcher.deadlines.sweep)
        self.core.program.stalls.start()
        self.core.signals.start()
        self.core.sessions.neighbours.check_system()
        self.dispatcher.admission.settled_at = time.monotonic() + self.core.config.grace_seconds
        async with contextlib.AsyncExitStack() as opened:
            opened.callback(self.core.program.store.close)
            self.core.program.store.open()  # first: it locks the data directory
            for room in self.core.rooms:
                opened.push_async_callback(room.stop)
                opened.push_async_callback(room.end_repeating)
                await room.open()
            for room in self.core.rooms:
                await room.start()
            self._running = opened.pop_all()

    async def drain(self, grace_seconds: float | None = None) -> None:
        """Shuts down gracefully: takes no new calls, lets those in flight end and peers leave.

        A peer leaves when it has answered each of its calls, the stuck ones too, whose callers wait no longer.

        Args:
            grace_seconds: at most so long; None means the configured ``drain_seconds``.
        """
        grace = self.core.config.drain_seconds if grace_seconds is None else grace_seconds
        presence, started = self.core.sessions.presence, time.monotonic()
        presence.drain_ends = started + grace
        for room in self.core.rooms:
            await room.drain()
        if not presence.draining:
            in_flight, stuck = self.dispatcher.in_flight.active, presence.stuck_calls
            log.info("draining sessions=%d in_flight=%d stuck=%d", len(presence.sessions), in_flight, stuck)
            presence.drain(grace)
            self.core.signals.readiness_changed()
        while (left := started + grace - time.monotonic()) > 0:
            presence.drain(left)
            if time.monotonic() - started > self.core.program.timings.quiet_seconds:
                presence.end_idle(time.monotonic())
            if not presence.sessions and not self.dispatcher.in_flight.active:
                return
            await asyncio.sleep(min(0.01, left))

    async def stop(self) -> None:
        """Ends every session and stops listening. Calls in flight end in UNAVAILABLE."""
        self.core.signals.close()
        now = time.monotonic()
        for peer in list(self.core.sessions.presence.sessions.values()):
            self.core.sessions.presence.end(peer, "the bus stopped", now)
        self.dispatcher.stop(now)
        self._sweeps.cancel()
        self.core.program.stalls.stop()
        await asyncio.sleep(0)  # lets the streams end with the status of the reason
        try:
            await self._running.aclose()
        finally:
            self._workers.stop()
            self._stopped.set()
            log.info("stopped")

    async def wait_stopped(self) -> None:
        """Waits until an operator drains the whole bus, or it has stopped."""
        await self._stopped.wait()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    # -- what rooms have -----------------------------------------------------------------------------------------

    @property
    def grpc_addresses(self) -> tuple[str, ...]:
        """Where gRPC listens: ``HOST:PORT`` or ``unix:PATH``, ports filled in."""
        streams = self.core.rooms.find(StreamsRoom)
        return streams.listeners.addresses if streams is not None else ()

    @property
    def https_address(self) -> str | None:
        """Where HTTPS listens; None where it does not."""
        gateway = self.core.rooms.find(GatewayRoom)
        return gateway.secure_address if gateway is not None else None

    @property
    def http_address(self) -> str | None:
        """Where HTTP listens; None where it does not."""
        gateway = self.core.rooms.find(GatewayRoom)
        return gateway.address if gateway is not None else None

    async def dropin_address(self, port: int = 0) -> str:
        """Returns where sandboxed tools attach: `Listeners.untrusted_address`, listening from the first time on.

        Raises:
            SetupError: the bus does not listen, or nothing can be bound.
        """
        return await self._room(StreamsRoom).dropin_address(port)

    @property
    def tasks(self) -> Any:
        """The tasks of the bus, a `toolbus.tools.TaskManager`; None where the bus has none."""
        return self.dispatcher.seams.background

    def add_role(self, role: str) -> None:
        """Adds a role: `Roles.add`."""
        self.core.catalog.roles.add(role)

    def remove_role(self, role: str) -> None:
        """Removes a role: `Roles.remove`."""
        self.core.catalog.roles.remove(role)

    def permit(self, kind: str, name: str, users: Sequence[str] | None) -> None:
        """Sets which users may call tools: `Grants.permit`."""
        self._grants.permit(kind, name, users)

    def grant(self, source: str, permission: str = "tools") -> None:
        """Lets a source offer tools: `Grants.grant`."""
        self._grants.grant(source, permission)

    def revoke(self, source: str, permission: str = "tools") -> int:
        """Forbids a source to offer tools: `Grants.revoke`. Returns how many tools were withdrawn."""
        return self._grants.revoke(source, permission)

    @property
    def _grants(self) -> Grants:
        return self._room(OperatorsRoom).grants

    def _room(self, kind: type[AnyRoom]) -> AnyRoom:
        room = self.core.rooms.find(kind)
        if room is None:
            raise SetupError(f"this bus was made without {kind.__name__}: add it to its rooms")
        return room


def _registry(config: Config) -> Registry:
    return Registry(
        config.roles,
        tools_per_role=config.limits.tools_per_role,
        unconfigured_roles=config.limits.unconfigured_roles,
        grace_seconds=config.grace_seconds,
        first_owner=config.name_owner == "first",
        first_revision=time.time_ns() // 1_000_000,  # so that it rises across restarts too
    )


def _store(config: Config) -> Store:
    """Returns the store of the data directory, or that of a part where the configuration says so."""
    home = next(filter(None, (getattr(record, "store", "") for record in config.parts)), "")
    return load(home)(config) if home else Store.of(config.data_dir)
