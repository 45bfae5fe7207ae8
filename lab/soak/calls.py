"""Makes so many calls a second, answered or not: ``python -m lab.soak.calls GRPC HTTP FOLDER RATE``.

Each call has its moment, whatever became of those before it, and its latency counts from that moment: a bus that
stands still for a second is late for all that was to be called in that second.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from lab.load.callers import LEFT, InFlight, Reply, invoke, reply_of, unless_left
from lab.soak import plugin
from lab.soak.tally import Tally
from lab.stage import stop_event
from toolbus.sdk import CallContext, Host

NAME = "calls"
HELD_UP = "HELD_UP"  # this process was, until the answer of a call that it would have left was there
LEAVE_SECONDS = 0.05
RESULT_SECONDS = 30.0
# Over HTTP; a call that waits for one is late. aiohttp takes the one that rested longest, so all that were opened in a
# moment of trouble are used for ever, and would look like growth.
CONNECTIONS = 16


@dataclass(frozen=True, slots=True)
class CallKind:
    """What is called.

    Attributes:
        often: how often beside the others.
        tool: its name, in which ``{}`` is the number of the call.
        ends: the codes in which it may end.
        timed: whether its latency is that of the bus alone, since the tool answers at once.
        leave: seconds after which it is cancelled; 0: it is not.
    """

    often: float
    tool: str
    ends: tuple[str, ...] = ("OK",)
    timed: bool = False
    over_rest: bool = False
    leave: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)


_LEFT = (LEFT, HELD_UP)
KINDS: dict[str, CallKind] = {
    "stream": CallKind(45, plugin.ANSWER, timed=True),
    "callback": CallKind(12, plugin.CALLBACK, timed=True),
    "rest": CallKind(13, plugin.ANSWER, timed=True, over_rest=True),
    "progress": CallKind(4, plugin.REPORT, options={"on_progress": lambda progress: None}),
    "nested": CallKind(6, plugin.NEST),
    "user": CallKind(5, plugin.ANSWER),  # one never used before
    "refused": CallKind(4, plugin.REFUSE, ("TOOL",)),
    "missing": CallKind(2, "missing_{}", ("NOT_FOUND",)),  # a name never used before
    "wrong": CallKind(2, plugin.ANSWER, ("INVALID_ARGUMENTS",)),
    "late": CallKind(2, plugin.SLOW, ("DEADLINE_EXCEEDED",), options={"timeout": LEAVE_SECONDS}),
    "left": CallKind(2, plugin.SLOW, _LEFT, leave=LEAVE_SECONDS),
    "rest-left": CallKind(1, plugin.SLOW, _LEFT, over_rest=True, leave=LEAVE_SECONDS),
    "task": CallKind(2, plugin.SLOW, options={"background_after": 0.01}),
}


class Calls:
    """Makes calls of all kinds, at one even pace."""

    def __init__(self, host: Host, session: aiohttp.ClientSession, tally: Tally) -> None:
        self._host = host
        self._session = session
        self._tally = tally
        self._calling = InFlight()

    async def go_on(self, rate: float) -> None:
        rng = random.Random("soak")
        kinds, weights = list(KINDS), [kind.often for kind in KINDS.values()]
        began = time.perf_counter()
        for number in itertools.count():
            due = began + number / rate
            if (early := due - time.perf_counter()) > 0:
                await asyncio.sleep(early)
            # Each kind once at first, so that a short soak on a slow machine has all of them.
            name = kinds[number] if number < len(kinds) else rng.choices(kinds, weights)[0]
            self._calling.begin(self._one(name, number, due))

    async def finish(self) -> None:
        """Waits for the calls in flight."""
        for _ in range(await self._calling.finish(RESULT_SECONDS)):
            self._tally.fault(f"a call had no result after {RESULT_SECONDS:g} s")

    async def _one(self, name: str, number: int, due: float) -> None:
        kind, began = KINDS[name], time.perf_counter()
        try:
            reply = await unless_left(self._call(name, number), kind.leave)
        except Exception as error:  # of whatever kind: it is counted, and the others go on
            reply = Reply(type(error).__name__, message=str(error))
        if kind.leave and reply.code == "OK" and time.perf_counter() - began >= plugin.SLOW_SECONDS:
            reply = Reply(HELD_UP)
        elif kind.timed and reply.code == "OK" and reply.output != {"number": number}:
            reply = Reply("STRANGE", message=f"called with {number}, got {reply.output!r}")
        taken = (time.perf_counter() - due) * 1e3
        self._tally.note(name, reply.code, taken if kind.timed else None, reply.message)

    async def _call(self, name: str, number: int) -> Reply:
        kind = KINDS[name]
        tool, arguments = kind.tool.format(number), {"number": "none" if name == "wrong" else number}
        if kind.over_rest:
            return await invoke(self._session, {"name": tool, "arguments": arguments})
        options = {"context": CallContext(user_id=f"user {number}")} if name == "user" else kind.options
        give_up = time.monotonic() + RESULT_SECONDS
        while True:
            reply = reply_of(await self._host.call(tool, arguments, **options))
            # The SDK sends a call again up to its soft deadline, which is over when a bus stood still for a moment.
            bounded = not options.keys().isdisjoint(("background_after", "timeout"))
            if not (reply.retry_safe and bounded and time.monotonic() < give_up):
                return reply


async def main(grpc: str, http: str, folder: str, rate: str) -> None:
    logging.basicConfig(level=logging.WARNING)
    stops = stop_event()
    tally = Tally(Path(folder), NAME, {name: frozenset(kind.ends) for name, kind in KINDS.items()})
    connector = aiohttp.TCPConnector(limit=CONNECTIONS)
    timeout = aiohttp.ClientTimeout(RESULT_SECONDS)
    async with (
        Host(grpc, source="soak-calls", max_in_flight=plugin.MAX_IN_FLIGHT) as host,
        aiohttp.ClientSession(f"http://{http}", connector=connector, timeout=timeout) as session,
    ):
        await host.ready()
        calls = Calls(host, session, tally)
        working = [asyncio.create_task(calls.go_on(float(rate))), asyncio.create_task(tally.write_every_second())]
        await asyncio.wait([*working, asyncio.create_task(stops.wait())], return_when=asyncio.FIRST_COMPLETED)
        for task in working:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await calls.finish()
    tally.write()


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
