"""Shares the loop between the bus's own programs and all other peers: these wait after each piece of work.

Peers that are trusted less take turns by account, and use a part of the loop at most, all together, while programs of
this machine call. So whatever one of them sends, calls of others wait for a piece of its work, not for a queue of them.
What a peer sends meanwhile stays in its connection (backpressure): nothing is lost or refused.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar
from weakref import WeakValueDictionary

from toolbus.common.newest import NewestCache

log = logging.getLogger("toolbus.budgets")

Answer = TypeVar("Answer")
SHARE = 0.2  # of the loop, while own programs call
LOOK_SECONDS = 0.25  # between two looks whether they do
BURST_SECONDS = 0.001  # of work that is done without a pause after a rest
MAX_ACCOUNTS = 1_000  # whose waits are counted
LOGGED_SECONDS = 60.0  # between two lines about one account
LONG_SECONDS = 1.0  # a wait that is logged


class LoopShare:
    """The share of the loop that peers have which are trusted less.

    Args:
        own_calls: tells whether the bus's own programs call.
        clock: the seconds since some moment.
        worked: the processor time of the running thread.
        sleep: waits so many seconds.

    Attributes:
        waits: how often each account waited for its turn, of the newest `MAX_ACCOUNTS`.
    """

    def __init__(
        self,
        own_calls: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        worked: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.waits: NewestCache[str, int] = NewestCache(MAX_ACCOUNTS)
        self._own_calls, self._clock, self._worked, self._sleep = own_calls, clock, worked, sleep
        self._share, self._looked = 1.0, -math.inf  # now, and as of when
        self._free_at = 0.0  # when the next piece of work may begin
        self._turn = asyncio.Lock()  # held by the account whose turn it is, or is next
        # One piece of work of each account waits for the turn, so that accounts take turns and not their connections.
        self._accounts: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._logged: NewestCache[str, float] = NewestCache(MAX_ACCOUNTS)

    def __repr__(self) -> str:
        return f"<LoopShare accounts={len(self._accounts)} waits={sum(self.waits.values())}>"

    @property
    def is_busy(self) -> bool:
        """Whether the bus's own programs called when work was last counted."""
        return self._share < 1.0

    async def run(self, account: str, work: Callable[[], Answer]) -> Answer:
        """Works for an account when it is its turn."""
        async with self.turn(account):
            began = self._worked()
            try:
                answer = work()
                await self._sleep(0)  # what the work has scheduled counts too
                return answer
            finally:
                self.spent(self._worked() - began)

    @asynccontextmanager
    async def turn(self, account: str) -> AsyncIterator[None]:
        """Waits for the turn of an account; nobody else has one meanwhile.

        A thread that works beside the loop takes half of the interpreter's time: with the work of others the loop would
        have more to do than the other half.
        """
        async with self._accounts.setdefault(account, asyncio.Lock()), self._turn:
            if self._free_at > self._clock():
                await self._wait(account)
            yield

    def spent(self, seconds: float) -> None:
        """Counts work that has just been done."""
        now = self._clock()
        if now > self._looked + LOOK_SECONDS:
            self._share, self._looked = SHARE if self._own_calls() else 1.0, now
        self._free_at = max(self._free_at, now - seconds - BURST_SECONDS) + seconds / self._share

    async def _wait(self, account: str) -> None:
        began = self._clock()
        self.waits[account] = self.waits.get(account, 0) + 1
        while (left := self._free_at - self._clock()) > 0:
            await self._sleep(left)
        waited = self._clock() - began
        if waited > LONG_SECONDS and self._logged.get(account, -LOGGED_SECONDS) + LOGGED_SECONDS < self._clock():
            self._logged[account] = self._clock()
            log.warning("%s waited %.1f s: peers like it use more than %d %% of the loop", account, waited, SHARE * 100)
