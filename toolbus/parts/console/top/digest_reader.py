"""Reads the digests of a bus one after the other, across restarts of the bus."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from toolbus.errors import Code, RequestError
from toolbus.parts.console.top.bus_state import DIGEST_TOOL, BusState

if TYPE_CHECKING:
    from toolbus.protocol.tool import Result
    from toolbus.sdk import Host


_GONE = (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.CANCELLED, Code.OVERLOADED)


@dataclass(frozen=True, slots=True)
class ReaderTimings:
    """Lengths of time, in seconds.

    Attributes:
        wait: how long the bus may wait for a newer digest.
        late: after that, the bus counts as lost.
        look: between two looks at the connection, while an answer is awaited.
        pause: between two requests. A digest comes every 0.5 s, and one may be left out, so none is missed.
    """

    wait: float = 1.0
    late: float = 1.0
    look: float = 0.25
    pause: float = 0.2


class BusLost(Exception):
    """The bus does not answer now; it may come back."""


class DigestReader:
    """Asks a bus for its digests.

    Args:
        host: connected, or about to be; it reconnects by itself.
    """

    def __init__(self, host: Host, timings: ReaderTimings) -> None:
        self._host = host
        self._timings = timings
        self._since = -1  # the number of the digest that was read last; -1: none, or of a bus that is gone
        self._instance: object = None  # of the bus that made it; None before the first one
        self._next = 0.0  # when the bus may be asked again, on the loop's clock

    async def read(self, wait_seconds: float | None = None) -> Mapping[str, Any]:
        """Returns the next digest; the newest one again where nothing changed for a while.

        Args:
            wait_seconds: how long the bus may wait for a newer one; None means as long as the timings say.

        Raises:
            BusLost: no bus answers. The next digest that comes is a full one.
            RequestError: the bus has no digests, or refuses them to this program.
        """
        loop = asyncio.get_running_loop()
        if wait_seconds is None:
            wait_seconds = self._timings.wait
        await asyncio.sleep(self._next - loop.time())
        try:
            digest = await self._ask(wait_seconds)
            if self._instance not in (None, digest.get("instance")) and not digest.get("full"):
                self._since = -1  # changes of another bus, since the number happens to fit
                digest = await self._ask(wait_seconds)
        except BusLost:
            self._since = -1
            raise
        finally:
            self._next = loop.time() + self._timings.pause
        self._since, self._instance = int(digest["number"]), digest.get("instance")
        return digest

    async def _ask(self, wait_seconds: float) -> Mapping[str, Any]:
        arguments = {"since": self._since, "wait_seconds": wait_seconds if self._since >= 0 else 0.0}
        timeout = wait_seconds + self._timings.late
        call = asyncio.ensure_future(self._host.call(DIGEST_TOOL, arguments, timeout=timeout))
        try:
            result = await self._answer(call, timeout)
        finally:
            call.cancel()
        if (error := result.error) is not None:
            if error.code in _GONE:
                raise BusLost(error.message)
            if error.code is Code.NOT_FOUND:
                raise RequestError(
                    f"the bus has no tool {DIGEST_TOOL}: it is of an older version. `toolbus calls --follow` shows its "
                    "calls, `toolbus list` its tools"
                )
            raise RequestError(error.message)
        digest: Mapping[str, Any] = result.output
        return digest

    async def _answer(self, call: asyncio.Future[Result], timeout: float) -> Result:
        """Waits for the answer of a call, which would wait for another bus itself: not without a connection."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        while not (await asyncio.wait((call,), timeout=self._timings.look))[0]:
            if not self._host.connected:
                raise BusLost("the connection broke")
            if loop.time() >= until:
                raise BusLost(f"it has not answered for {timeout:g} s")
        return call.result()


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
