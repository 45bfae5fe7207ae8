"""Makes the calls of a host, and writes down each of them and its result."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from lab.ledger import ONE_IN, Ledger
from lab.stage import stop_event

LEAVE_SECONDS = 40.0  # for the calls in flight when a host is terminated
LONG_TIMEOUT = 30.0


@dataclass(frozen=True, slots=True)
class Order:
    """A call to be made.

    Attributes:
        token: names the call in all ledgers; its result has to bring it back.
        seconds: how long the tool works.
        refuse: whether the tool refuses.
        leave: after how many seconds the caller takes it back; 0: it stays.
    """

    token: str
    tool: str
    seconds: float
    timeout: float
    refuse: bool
    leave: float

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the call."""
        return {"token": self.token, "seconds": self.seconds, "refuse": self.refuse}


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of a call, as its caller got it.

    Attributes:
        code: the error's code in the words of the protocol; OK; or what only callers see: LOST (the connection broke),
            AWAY (it could not be sent), LEFT (it did not wait).
        ran: the token in the result; None where there is none.
    """

    code: str
    ran: str | None = None
    stage: str = ""
    retry_safe: bool = False
    limit: str = ""
    message: str = ""


class Caller(Protocol):
    """One way of calling."""

    async def call(self, order: Order) -> Reply:
        """Makes a call."""
        ...

    async def close(self) -> None:
        """Ends the connection."""
        ...


def orders(seed: str, prefix: str, tools: Sequence[str], *, own_timeout: float = 0.0) -> Iterator[Order]:
    """Yields calls for ever, the same for the same seed.

    Args:
        own_timeout: of the tools, for hosts that cannot set one; they do not leave either.
    """
    rng = random.Random(seed)
    number = 0
    while True:
        number += 1
        long = rng.random()
        seconds = 0.0 if long < 0.65 else rng.uniform(0.02, 0.3) if long < 0.9 else rng.uniform(1.0, 2.5)
        length = rng.random()
        timeout = 8.0 if length < 0.75 else rng.uniform(1.0, 2.0) if length < 0.9 else LONG_TIMEOUT
        leave = rng.uniform(0.001, 0.2) if rng.random() < 0.03 else 0.0
        refuse = rng.random() < 0.03
        tool = rng.choice(tools)
        if own_timeout:
            timeout, leave = own_timeout, 0.0
        yield Order(f"{prefix}.{number}", tool, round(seconds, 3), round(timeout, 3), refuse, round(leave, 3))


class Load:
    """Makes calls at a steady rate until the process is terminated, then waits for those in flight.

    Args:
        broken: ``unheard`` does not write down some answers; ``safe`` calls every failure safe to repeat.
    """

    def __init__(self, ledger: Ledger, host: str, caller: Caller, broken: str = "") -> None:
        self._ledger = ledger
        self._host = host
        self._caller = caller
        self._broken = broken
        self._answers = 0
        self._running: set[asyncio.Task[None]] = set()

    async def run(self, calls: Iterator[Order], rate: float, rng: random.Random) -> None:
        """Runs until SIGTERM."""
        stops = stop_event()
        while not stops.is_set():
            self.begin(next(calls))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stops.wait(), rng.expovariate(rate))
        if self._running:
            await asyncio.wait(self._running, timeout=LEAVE_SECONDS)
        await self._caller.close()

    def begin(self, order: Order) -> None:
        """Starts a call."""
        task = asyncio.create_task(self._ask(order))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _ask(self, order: Order) -> None:
        self._ledger.write(asked=order.token, host=self._host, **asdict(order))
        reply = await self._caller.call(order)
        self._answers += 1
        if self._broken == "unheard" and self._answers % ONE_IN == 0:
            return
        if self._broken == "safe" and reply.code == "UNAVAILABLE":
            reply = replace(reply, stage="NOT_DISPATCHED", retry_safe=True)
        self._ledger.write(told=order.token, host=self._host, **asdict(reply))
