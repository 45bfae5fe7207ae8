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
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from lab.soak import plugin
from lab.soak.tally import Tally
from lab.stage import stop_event
from toolbus.sdk import CallContext, Host
from toolbus.tool import Result

NAME = "calls"
LEFT = "LEFT"
HELD_UP = "HELD_UP"  # this process was, until the answer of a call that it would have left was there
LEAVE_SECONDS = 0.05
RESULT_SECONDS = 30.0
# Over HTTP; a call that waits for one is late. aiohttp takes the one that rested longest, so all that were opened in a
# moment of trouble are used for ever, and would look like growth.
CONNECTIONS = 16
OK = frozenset({"OK"})
# What is called: how often beside the others, and how it may end.
KINDS: dict[str, tuple[float, frozenset[str]]] = {
    "stream": (45, OK),
    "callback": (12, OK),
    "rest": (13, OK),
    "progress": (4, OK),
    "nested": (6, OK),
    "user": (5, OK),  # one never used before
    "refused": (4, frozenset({"TOOL"})),
    "missing": (2, frozenset({"NOT_FOUND"})),  # a name never used before
    "wrong": (2, frozenset({"INVALID_ARGUMENTS"})),
    "late": (2, frozenset({"DEADLINE_EXCEEDED"})),
    "left": (2, frozenset({LEFT, HELD_UP})),
    "rest-left": (1, frozenset({LEFT, HELD_UP})),
    "task": (2, OK),
}
# The kinds with a latency of the bus alone: their tools answer at once.
TIMED = frozenset({"stream", "callback", "rest"})


class Calls:
    """Makes calls of all kinds, at one even pace."""

    def __init__(self, host: Host, session: aiohttp.ClientSession, tally: Tally) -> None:
        self._host = host
        self._session = session
        self._tally = tally
        self._calling: set[asyncio.Task[None]] = set()

    async def go_on(self, rate: float) -> None:
        """Calls for ever."""
        rng = random.Random("soak")
        kinds, weights = list(KINDS), [often for often, _ in KINDS.values()]
        began = time.perf_counter()
        for number in itertools.count():
            due = began + number / rate
            if (early := due - time.perf_counter()) > 0:
                await asyncio.sleep(early)
            # Each kind once at first, so that a short soak on a slow machine has all of them.
            kind = kinds[number] if number < len(kinds) else rng.choices(kinds, weights)[0]
            task = asyncio.create_task(self._one(kind, number, due))
            self._calling.add(task)
            task.add_done_callback(self._calling.discard)

    async def finish(self) -> None:
        """Waits for the calls in flight."""
        if self._calling:
            await asyncio.wait(self._calling, timeout=RESULT_SECONDS)
        for task in self._calling:
            task.cancel()
            self._tally.fault(f"a call had no result after {RESULT_SECONDS:g} s")

    async def _one(self, kind: str, number: int, due: float) -> None:
        try:
            code, why = await self._call(kind, number)
        except Exception as error:  # of whatever kind: it is counted, and the others go on
            code, why = type(error).__name__, str(error)
        taken = (time.perf_counter() - due) * 1e3
        self._tally.note(kind, code, taken if kind in TIMED else None, why)

    async def _call(self, kind: str, number: int) -> tuple[str, str]:
        arguments: dict[str, Any] = {"number": number}
        call = self._host.call
        match kind:
            case "rest":
                return await self._post(plugin.ANSWER, number)
            case "rest-left":
                return await _left(self._post(plugin.SLOW, number))
            case "left":
                return await _left(call(plugin.SLOW, arguments))
            case "callback":
                result = await call(plugin.CALLBACK, arguments)
            case "progress":
                result = await call(plugin.REPORT, arguments, on_progress=lambda progress: None)
            case "nested":
                result = await call(plugin.NEST, arguments)
            case "user":
                result = await call(plugin.ANSWER, arguments, context=CallContext(user_id=f"user {number}"))
            case "refused":
                result = await call(plugin.REFUSE, arguments)
            case "missing":
                result = await call(f"missing_{number}", arguments)
            case "wrong":
                result = await call(plugin.ANSWER, {"number": "none"})
            case "late":
                result = await call(plugin.SLOW, arguments, timeout=LEAVE_SECONDS)
            case "task":
                result = await call(plugin.SLOW, arguments, background_after=0.01)
            case _:
                result = await call(plugin.ANSWER, arguments)
        return _outcome(result, number, checked=kind in TIMED)

    async def _post(self, tool: str, number: int) -> tuple[str, str]:
        body = {"name": tool, "arguments": {"number": number}}
        async with self._session.post("/api/tools/invoke", json=body) as response:
            answer = await response.json()
        error = answer["error"]
        if error is None:
            return ("OK", "") if answer["output"] == {"number": number} else ("STRANGE", str(answer))
        return error["code"], error["message"]


def _outcome(result: Result, number: int, *, checked: bool) -> tuple[str, str]:
    if result.error is not None:
        return result.error.code.name, result.error.message
    if checked and result.output != {"number": number}:
        return "STRANGE", f"called with {number}, got {result.output!r}"
    return "OK", ""


async def _left(calling: Any) -> tuple[str, str]:
    """Cancels a call of the slow tool that is under way."""
    began = time.perf_counter()
    try:
        await asyncio.wait_for(calling, LEAVE_SECONDS)
    except TimeoutError:
        return LEFT, ""
    if time.perf_counter() - began >= plugin.SLOW_SECONDS:
        return HELD_UP, ""
    return "OK", "it was there before it was left"


async def main(grpc: str, http: str, folder: str, rate: str) -> None:
    """Calls until it is terminated."""
    logging.basicConfig(level=logging.WARNING)
    stops = stop_event()
    tally = Tally(Path(folder), NAME, {kind: codes for kind, (_, codes) in KINDS.items()})
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
