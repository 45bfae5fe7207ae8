"""Defines `Core`, which all rooms of a bus share, and `Room`, a part of the bus with a life of its own.

A room gets only the `Core`, and a bus may be built without it. The bus knows rooms by the type `Room`: it opens,
starts, drains and stops them, and gets the health of sources from them. A room finds another one by `Rooms.find`, and
works without it where this bus does not have it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from toolbus.bus.access.neighbours import Neighbours
from toolbus.bus.audit import Audit
from toolbus.bus.calls.call_records import CallRecords
from toolbus.bus.calls.dispatcher import Dispatcher
from toolbus.bus.catalog.catalog_view import CatalogView
from toolbus.bus.catalog.policy import Policy
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.config import Config
from toolbus.bus.keys.doorman import Doorman
from toolbus.bus.keys.keyring import Keyring
from toolbus.bus.local import EmbeddedBus
from toolbus.bus.metrics.call_counts import CallMetrics
from toolbus.bus.roles import Roles
from toolbus.bus.signals import Signals
from toolbus.bus.storage.store import Store
from toolbus.bus.streams.presence import Presence
from toolbus.bus.web_paths import WebPaths
from toolbus.common.stall import StallWatch
from toolbus.errors import InvalidRequest
from toolbus.protocol.limits import Timings
from toolbus.v1 import tool_bus_service_pb2 as wire

log = logging.getLogger("toolbus")


@dataclass(frozen=True, slots=True)
class CoreCatalog:
    """What is offered, and to whom.

    Attributes:
        registry: what is offered, by which source.
        policy: who may offer and call what.
        view: what each caller sees of the registry.
        roles: adds and removes roles.
    """

    registry: Registry
    policy: Policy
    view: CatalogView
    roles: Roles


@dataclass(frozen=True, slots=True)
class CoreCalls:
    """Calls, those that run and those that ended.

    Attributes:
        dispatcher: the calls in flight.
        records: the newest calls.
        metrics: counts of the calls of each tool.
    """

    dispatcher: Dispatcher
    records: CallRecords
    metrics: CallMetrics


@dataclass(frozen=True, slots=True)
class CoreSessions:
    """Who is connected, and who may connect.

    Attributes:
        presence: the sessions of attached peers.
        neighbours: which users of this machine may use the bus.
        doorman: authenticates requests from other machines.
        keyring: the keys of identities on other machines; None where no address needs them.
    """

    presence: Presence
    neighbours: Neighbours
    doorman: Doorman
    keyring: Keyring | None


@dataclass(frozen=True, slots=True)
class CoreProgram:
    """The program that runs the bus.

    Attributes:
        local: the bus as its own process uses it.
        store: what is known across restarts; in memory where the bus has no data directory.
        timings: lengths of time.
        stalls: tells when the bus stood still.
        embedder: compares meanings for searches, where a program brings its own; None: the one that is installed;
            False: none.
        request_stop: requests the end of the whole bus; the program that runs it drains and stops it.
    """

    local: EmbeddedBus
    store: Store
    timings: Timings
    stalls: StallWatch
    embedder: Callable[[Sequence[str]], Any] | Literal[False] | None
    request_stop: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Core:
    """The shared parts of one bus. A room reads and calls them; no part is replaced while the bus runs.

    Attributes:
        audit: records who changed what.
        signals: notifies rooms of changes.
        rooms: the rooms of this bus, this one included, and the paths that they serve over HTTP.
    """

    config: Config
    catalog: CoreCatalog
    calls: CoreCalls
    sessions: CoreSessions
    signals: Signals
    audit: Audit
    rooms: Rooms
    program: CoreProgram

    @property
    def takes_calls(self) -> bool:
        """Whether the bus has started and is not draining."""
        return self.program.local.loop is not None and not self.sessions.presence.draining


class Room:
    """A part of the bus with a life of its own. Every method may be left as it is; all are called on the bus's loop."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._repeating: list[asyncio.Task[None]] = []

    def repeat(self, seconds: float, look: Callable[[], Awaitable[object] | None], what: str) -> None:
        """Calls a function, first after so many seconds and then again and again until the room stops.

        Args:
            what: it does, for the log if it fails: it is called again all the same.
        """

        async def run() -> None:
            while True:
                await asyncio.sleep(seconds)
                try:
                    if (working := look()) is not None:
                        await working
                except Exception:
                    log.exception("a fault of the bus while it %s", what)

        self._repeating.append(asyncio.get_running_loop().create_task(run(), name=f"toolbus {type(self).__name__}"))

    async def end_repeating(self) -> None:
        """Ends what `repeat` began; called right before `stop`."""
        for task in self._repeating:
            task.cancel()
        await asyncio.gather(*self._repeating, return_exceptions=True)

    def tools(self) -> Iterable[Callable[..., Any]]:
        """Returns the methods, each with `llm_tool`, that operators may call as tools of source ``toolbus``."""
        return ()

    def offered(self, group: str) -> Iterable[Callable[..., Any]]:
        """Returns the methods that models may call where the configuration offers a group (`Config.offered`)."""
        return ()

    async def open(self) -> None:
        """Locks files and binds addresses, and restores persisted state; serves nothing yet.

        Raises:
            SetupError: a file or an address cannot be used. Rooms that are open already are stopped.
        """

    async def start(self) -> None:
        """Begins to serve.

        Raises:
            SetupError: it cannot serve. Every room is stopped.
        """

    async def drain(self) -> None:
        """Prepares the graceful shutdown, while calls and sessions still go on."""

    async def stop(self) -> None:
        """Ends all that `open` and `start` began; called once, also after one of them failed halfway."""

    def provides(self) -> Iterable[object]:
        """Returns what other rooms may use of this one; they find it by its type, or by a protocol that it keeps."""
        return ()

    def routes(self) -> Iterable[str]:
        """Names functions that return endpoints over HTTP (`fastapi.APIRouter`), each as ``module:function``."""
        return ()

    def serving(self, source: str) -> bool | None:
        """Tells whether a source can be called through this room; None where the room does not know the source."""
        return None

    def sources(self) -> Iterable[str]:
        """Names the sources that this room knows."""
        return ()

    def register(self, request: wire.RegisterRequest) -> wire.RegisterResponse | None:
        """Registers tools that come without a session; None where the room does not register such tools.

        Raises:
            RequestError: nothing was registered.
        """
        return None


AnyRoom = TypeVar("AnyRoom", bound=Room)
Provided = TypeVar("Provided")


class Rooms:
    """The rooms of one bus, in the order in which they open; they stop in reverse order.

    Attributes:
        web: the paths that they serve over HTTP in addition to the gateway's endpoints.
    """

    def __init__(self) -> None:
        self.web = WebPaths()
        self._rooms: list[Room] = []

    def __iter__(self) -> Iterator[Room]:
        return iter(self._rooms)

    def add(self, room: Room) -> None:
        """Adds a room after the others."""
        self._rooms.append(room)

    def find(self, kind: type[AnyRoom]) -> AnyRoom | None:
        """Returns the room of a kind; None where this bus has none."""
        return next((room for room in self._rooms if isinstance(room, kind)), None)

    def providers(self, kind: type[Provided]) -> list[Provided]:
        """Returns what rooms provide of a kind: a class, or a protocol that can be checked at run time."""
        return [each for room in self._rooms for each in room.provides() if isinstance(each, kind)]

    def provider(self, kind: type[Provided]) -> Provided | None:
        """Returns the first that rooms provide of a kind; None where there is none."""
        return next(iter(self.providers(kind)), None)

    def routes(self) -> tuple[str, ...]:
        """Names the endpoints of all rooms."""
        return tuple(dict.fromkeys(home for room in self._rooms for home in room.routes()))

    def serving(self, source: str) -> bool | None:
        """Tells whether a source can be called through any room; None where no room knows it."""
        answers = [answer for room in self._rooms if (answer := room.serving(source)) is not None]
        return any(answers) if answers else None

    def sources(self) -> list[str]:
        """Names the sources that any room knows, each once."""
        return list(dict.fromkeys(source for room in self._rooms for source in room.sources()))

    def register(self, request: wire.RegisterRequest) -> wire.RegisterResponse:
        """Registers tools that come without a session.

        Raises:
            RequestError: nothing was registered.
        """
        for room in self._rooms:
            response = room.register(request)
            if response is not None:
                return response
        raise InvalidRequest("this bus takes no tools with a callback_url: attach, and register in the session")
