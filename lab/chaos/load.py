"""Makes the calls of a host, and writes down each of them and its result."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lab.chaos.cast import part_of
from lab.ledger import ONE_IN, Ledger
from lab.load.callers import InFlight, Reply
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
        return {"token": self.token, "seconds": self.seconds, "refuse": self.refuse}


Call = Callable[[Order], Awaitable[Reply]]


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


async def call_until_terminated(
    call: Call, ledger: Ledger, name: str, life: tuple[str, str], tools: Sequence[str], *, own_timeout: float = 0.0
) -> None:
    """Calls at the rate of a host until SIGTERM, then waits for the calls in flight.

    ``CHAOS_BROKEN`` has it misbehave: ``unheard`` does not record some results, ``safe`` records
    failures as safe to repeat.

    Args:
        life: the seed, and how often the host was started.
    """
    broken, stops, answers, calling = os.environ.get("CHAOS_BROKEN", ""), stop_event(), itertools.count(1), InFlight()
    seed, generation = life
    drawn = f"{seed}/{name}/{generation}"
    rng = random.Random(drawn)

    async def ask(order: Order) -> None:
        ledger.write(called=order.token, host=name, **asdict(order))
        reply = await call(order)
        if broken == "unheard" and next(answers) % ONE_IN == 0:
            return
        if broken == "safe" and reply.code == "UNAVAILABLE":
            reply = replace(reply, stage="NOT_DISPATCHED", retry_safe=True)
        ledger.write(answered=order.token, host=name, ran=(reply.output or {}).get("ran"), **asdict(reply))

    for order in orders(drawn, f"{name}.{generation}", tools, own_timeout=own_timeout):
        calling.begin(ask(order))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stops.wait(), rng.expovariate(part_of(name).rate))
            break
    await calling.finish(LEAVE_SECONDS)
