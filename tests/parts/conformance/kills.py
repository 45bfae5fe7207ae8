"""Kills bus and plugin again and again under the calls of a client library, and counts how often each call ran.

    python -m tests.parts.conformance.kills [--kills 10] [NAME …]

Host and plugin are the programs of `toolbus conformance` of one library. Each call carries a number, which the tool
`record` of the plugin appends to a file. It is not idempotent, so a number that stands there twice is a call that ran
twice. Clients in other languages have to be built (`make clients`). The exit code is 1 where a call ran twice, where
its outcome does not agree with the file, or where it took too long until calls succeeded again.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.parts.conformance.matrix import PROGRAMS, Bus, chosen
from toolbus.sdk import Host

CALLERS = 32  # calls in flight
WORK_SECONDS = 0.03  # of each call, after it has written its number
CALM_SECONDS = 0.5  # between an answer after a kill and the next kill
AGAIN_SECONDS = 1.5  # from the start of what was killed until a call succeeds
PATIENCE = 60.0  # seconds for one call


@dataclass
class Tally:
    """What the host of a run saw, and what its plugins did."""

    outcomes: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # by the number of the call
    recorded: Counter[int] = field(default_factory=Counter)  # how often each number was written
    again: dict[str, list[float]] = field(default_factory=lambda: {"bus": [], "plugin": []})  # seconds after each kill

    def read(self, file: Path) -> None:
        """Counts the numbers that plugins wrote."""
        self.recorded.update(map(int, file.read_text("ascii").split()))

    def faults(self) -> list[str]:
        """Returns a line for each call that ran twice, or whose outcome does not agree with what ran."""
        lines = [f"call {number} ran {count} times" for number, count in self.recorded.items() if count > 1]
        lines += [f"call {number} ran, and the host never made it" for number in self.recorded.keys() - self.outcomes]
        for number, seen in self.outcomes.items():
            ran = self.recorded[number] > 0
            if not seen["failed"] and (not ran or seen["output"] != str(number)):
                lines.append(f"call {number} succeeded with {seen['output']!r}, and {'ran' if ran else 'did not run'}")
            elif seen["failed"] and ran and (seen["stage"] == "NOT_DISPATCHED" or seen["retry_safe"]):
                lines.append(f"call {number} ran, and failed at {seen['stage']}, retry_safe {seen['retry_safe']}")
        return lines

    def late(self) -> list[str]:
        """Returns a line for each kill after which calls took too long to succeed again."""
        slow = [(what, took) for what, times in self.again.items() for took in times if took > AGAIN_SECONDS]
        return [f"{took:.2f} s until a call succeeded after the {what} was killed" for what, took in slow]

    def row(self, name: str) -> str:
        """Returns the line of the table."""
        failed = [seen for seen in self.outcomes.values() if seen["failed"]]
        ran = sum(self.recorded[number] > 0 for number, seen in self.outcomes.items() if seen["failed"])
        twice = sum(count > 1 for count in self.recorded.values())
        slowest = (f"{len(times)}, {max(times, default=0):.2f} s" for times in self.again.values())
        return f"| {name} | {len(self.outcomes):,} | {len(failed)} | {ran} | {twice} | {' | '.join(slowest)} |"


HEAD = (
    "| client | calls | failed | of these ran | ran twice | kills of the bus, slowest answer after | of the plugin |\n"
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
)


class Plugin:
    """The program of a client on a bus, which can be killed and started again."""

    def __init__(self, command: Sequence[str], bus: Bus) -> None:
        self._command = command
        self._variables = {**os.environ, "TOOLBUS_ADDRESS": bus.address}
        self._process: asyncio.subprocess.Process | None = None  # None before the start

    async def start(self) -> None:
        """Starts it, and does not wait until it has attached."""
        null = asyncio.subprocess.DEVNULL
        self._process = await asyncio.create_subprocess_exec(
            *self._command, env=self._variables, stdout=null, stderr=null
        )

    async def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ends it by a signal."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)
            await self._process.wait()


@asynccontextmanager
async def _offered(bus: Bus, tool: str) -> AsyncIterator[Host]:
    """Yields a host on a bus once the tool is offered there."""
    async with Host(bus.address) as host:
        while not any(each.name == tool for each in await host.list()):
            await asyncio.sleep(0.05)
        yield host


class Load:
    """Callers that have the host of a library make one call after the other."""

    def __init__(self, driver: Host, address: str, file: Path, tally: Tally) -> None:
        self._request = {"address": address, "name": "record", "timeout": 20.0}
        self._driver = driver
        self._file = file
        self._tally = tally
        self._numbers = itertools.count()
        self._over = False
        self._succeeded = asyncio.Event()

    async def call(self) -> None:
        """Makes calls until the end."""
        while not self._over:
            number = next(self._numbers)
            arguments = {"file": str(self._file), "text": str(number), "seconds": WORK_SECONDS}
            request = {**self._request, "arguments": arguments}
            seen = (await self._driver.call("host", request, timeout=PATIENCE)).unwrap()
            self._tally.outcomes[number] = seen
            if seen["failed"]:
                await asyncio.sleep(WORK_SECONDS)  # else failures are counted, not calls
            else:
                self._succeeded.set()

    async def succeed(self) -> None:
        """Returns once a call succeeds that is not answered yet."""
        self._succeeded.clear()
        await asyncio.wait_for(self._succeeded.wait(), PATIENCE)

    def end(self) -> None:
        """Makes no more calls."""
        self._over = True


async def play(command: Sequence[str], kills: int) -> Tally:
    """Kills bus and plugin in turns under the calls of a client."""
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "recorded")
        buses = [Bus(Path(tempfile.mkdtemp(dir=folder))) for _ in range(2)]  # of the driver, and the one that is killed
        async with AsyncExitStack() as stack:
            for bus in buses:
                stack.push_async_callback(bus.end)
                await bus.start()
            programs = [Plugin(command, bus) for bus in buses]
            for each in programs:
                stack.push_async_callback(each.end)
                await each.start()
            driver = await stack.enter_async_context(_offered(buses[0], "host"))
            await stack.enter_async_context(_offered(buses[1], "record"))
            load = Load(driver, buses[1].address, file, tally)
            async with asyncio.TaskGroup() as callers:
                for _ in range(CALLERS):
                    callers.create_task(load.call())
                await load.succeed()
                for _ in range(kills):
                    for what, victim in (("bus", buses[1]), ("plugin", programs[1])):
                        await asyncio.sleep(CALM_SECONDS)
                        await victim.end(signal.SIGKILL)
                        await victim.start()
                        began = time.monotonic()
                        await load.succeed()
                        tally.again[what].append(time.monotonic() - began)
                load.end()
        tally.read(file)
    return tally


async def table(names: Sequence[str], kills: int) -> list[str]:
    """Plays each client and prints the table; returns what is wrong."""
    print(HEAD)
    wrong = []
    for name in names:
        tally = await play(PROGRAMS[name], kills)
        print(tally.row(name), flush=True)
        wrong += [f"{name}: {line}" for line in (*tally.faults(), *tally.late())]
    return wrong


def main() -> int:
    """Reads the command line and plays."""
    parser = argparse.ArgumentParser(description="Kill bus and plugin under the calls of each client.")
    parser.add_argument("--kills", type=int, default=10, help="how often each of the two is killed")
    options = chosen(parser)
    logging.disable(logging.WARNING)  # of the hosts here, whose buses are killed
    wrong = asyncio.run(table(options.names, options.kills))
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
