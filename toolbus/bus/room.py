"""Defines what a room is: a part of the bus with a life of its own, which may be left out.

A room gets the `Core` and nothing else. The bus knows rooms by this type only: it opens, starts, drains and stops them,
and asks them for the health of sources. A room that needs another one asks `Rooms.find`, and does without it where it
is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from toolbus.errors import InvalidRequest
from toolbus.v1 import tool_bus_service_pb2 as wire

if TYPE_CHECKING:
    from toolbus.bus.core import Core


class Room:
    """A part of the bus with a life of its own. Every method may be left as it is; all are called on the bus's loop."""

    def __init__(self, core: Core) -> None:
        self.core = core

    def tools(self) -> Iterable[Callable[..., Any]]:
        """Returns the methods that operators may call as tools of source ``toolbus``."""
        return ()

    def offered(self, group: str) -> Iterable[Callable[..., Any]]:
        """Returns the methods that models may call where the configuration offers a group (`Config.offered`)."""
        return ()

    async def open(self) -> None:
        """Takes what only one bus can have (files, addresses) and restores what was persisted; serves nothing yet.

        Raises:
            SetupError: it cannot be had. Rooms that are open already are stopped.
        """

    async def start(self) -> None:
        """Begins to serve.

        Raises:
            SetupError: it cannot. Every room is stopped.
        """

    async def drain(self) -> None:
        """Prepares the graceful shutdown, while calls and sessions still go on."""

    async def stop(self) -> None:
        """Ends whatever `open` and `start` began; is called once, also where these failed halfway."""

    def serving(self, source: str) -> bool | None:
        """Tells whether a source can be called through this room; None where the room does not know the source."""
        return None

    def sources(self) -> Iterable[str]:
        """Names the sources that this room knows."""
        return ()

    def register(self, request: wire.RegisterRequest) -> wire.RegisterResponse | None:
        """Registers tools that come without a session; None where that is not this room's business.

        Raises:
            RequestError: nothing was registered.
        """
        return None


AnyRoom = TypeVar("AnyRoom", bound=Room)


class Rooms:
    """The rooms of one bus, in the order in which they open; they stop in reverse order."""

    def __init__(self) -> None:
        self._rooms: list[Room] = []

    def __iter__(self) -> Iterator[Room]:
        return iter(self._rooms)

    def add(self, room: Room) -> None:
        """Adds a room behind those that are there."""
        self._rooms.append(room)

    def find(self, kind: type[AnyRoom]) -> AnyRoom | None:
        """Returns the room of a kind; None where this bus has none."""
        return next((room for room in self._rooms if isinstance(room, kind)), None)

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
