"""Follows a bus: holds what its digests say, what time it is there, and since when it does not answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from toolbus.cli.top.bus_state import BusState
from toolbus.cli.top.digest_reader import BusLost, DigestReader


class ConnectionLoss(NamedTuple):
    """Why a bus does not answer, and since when, in seconds since the epoch."""

    why: str
    since: float


class LiveState:
    """What is known of a bus, and as of when.

    Args:
        clock: what ages are measured with between two digests.
    """

    def __init__(self, reader: DigestReader, clock: Callable[[], float]) -> None:
        self._reader = reader
        self._clock = clock
        self._arrived = 0.0  # when the newest digest came, on this program's clock
        self._reading = asyncio.Event()  # not while it is paused
        self._reading.set()
        self._held: float | None = None  # what time is shown while it is paused; None: it is not
        self.bus = BusState()
        self.loss: ConnectionLoss | None = None  # why the bus does not answer; None while it does

    @property
    def is_paused(self) -> bool:
        """Whether it stays as it is."""
        return self._held is not None

    @property
    def now(self) -> float:
        """The time on the bus's clock: that of its newest digest, and what has passed since."""
        if self._held is not None:
            return self._held
        passed = 0.0 if self.loss is not None else self._clock() - self._arrived
        return self.bus.at + passed if self.bus.known else 0.0

    def pause(self) -> None:
        """Stops to read, or goes on."""
        if self._held is None:
            self._held = self.now
            self._reading.clear()
        else:
            self._held = None
            self._reading.set()

    async def follow(self, turned: Callable[[], None]) -> None:
        """Reads for ever.

        Args:
            turned: is called when the bus is lost, is back, or has answered for the first time.

        Raises:
            RequestError: the bus has no digests, or refuses them to this program.
        """
        while True:
            await self._reading.wait()
            before = self.bus.known and self.loss is None
            try:
                digest = await self._reader.read()
            except BusLost as error:
                before = self.loss is not None
                self.loss = ConnectionLoss(str(error), self.loss.since if self.loss is not None else time.time())
            else:
                self.bus.apply(digest)
                self._arrived, self.loss = self._clock(), None
            if not before:
                turned()
