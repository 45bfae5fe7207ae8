"""Has the hosts of every client library call the plugins of every other, and prints the table.

    python -m tests.parts.conformance.matrix [NAME …]

The programs are those of `toolbus conformance`: the tool `host` of one makes calls, on a bus between them, of the tools
of the other. Clients in other languages have to be built (`make clients`). The exit code is 1 where a cell fails.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.parts.conformance.clients import BUILT, CLIENTS, environment
from toolbus.sdk import Host

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncIterator, Sequence

PROGRAMS: Mapping[str, Sequence[str]] = {"python": CLIENTS["sdk"], **BUILT}
LARGE = 123_456_789_012_345_678_901_234_567_890
PATIENCE = 60.0  # seconds for one cell


class Bus:
    """A bus of its own process at a socket, which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.address = f"unix:{folder / 'bus.sock'}"
        self._process: Process | None = None  # None before the start

    async def start(self) -> None:
        """Starts it; returns once it is ready."""
        options = ("serve", "--grpc", self.address, "--http", "off", "--ephemeral")
        command = (sys.executable, "-m", "toolbus.cli", *options)
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        self._process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=null)
        assert self._process.stdout is not None
        while not (line := await self._process.stdout.readline()).startswith(b"toolbus ready"):
            if not line:
                raise RuntimeError("the bus ended before it was ready")

    async def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ends it by a signal."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)
            await self._process.wait()


@asynccontextmanager
async def running(command: Sequence[str], bus: Bus) -> AsyncIterator[Host]:
    """Runs the program of a client on a bus; yields a host there once its tools are offered."""
    variables = {**os.environ, "TOOLBUS_ADDRESS": bus.address}
    null = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, env=variables, stdout=null, stderr=null)
    try:
        async with Host(bus.address) as host:
            while not any(tool.name == "host" for tool in await host.list()):
                await asyncio.sleep(0.05)
            yield host
    finally:
        process.terminate()
        await process.wait()


class Cell:
    """A host of one library and a plugin of another; each method with a letter of its own in the table is a check."""

    def __init__(self, driver: Host, bus: Bus) -> None:
        self._driver = driver
        self._bus = bus
        self.seconds = 0.0  # from the ready line of the new bus to the answer

    async def call(self, name: str, arguments: Mapping[str, Any] | None = None, **more: Any) -> Any:
        """Has the host make a call; returns what its application saw."""
        request = {"address": self._bus.address, "name": name, "arguments": arguments or {}, **more}
        return (await self._driver.call("host", request, timeout=PATIENCE)).unwrap()

    async def progress(self) -> bool:
        seen = await self.call("steps", {"count": 3})
        return bool(seen["progress"] == [[n, 3, f"step {n}"] for n in (1, 2, 3)] and seen["output"] == {"count": 3})

    async def chunks(self) -> bool:
        seen = await self.call("chunks", {"texts": ["a", "é", "🥐"]})
        return bool(seen["chunks"] == ["a", "é", "🥐"] and seen["output"] == "aé🥐")

    async def picture(self) -> bool:
        return bool((await self.call("picture"))["content"] == ["image/png"])

    async def integer(self) -> bool:
        return bool((await self.call("echo", {"n": LARGE}))["output"] == {"n": LARGE})

    async def nested(self) -> bool:
        seen = await self.call("relay", {"name": "echo", "arguments": {"n": LARGE}})
        return bool(seen["output"] == {"n": LARGE})

    async def cancel(self) -> bool:
        return bool((await self.call("slow", cancel_after=0.2))["cancelled"])

    async def question(self) -> bool:
        output = (await self.call("ask", form={"text": "yes"}))["output"]
        return all(output[key] == {"action": "accept", "content": {"text": "yes"}} for key in ("first", "second"))

    async def _lasting(self, arguments: Mapping[str, Any]) -> Any:
        seen = await self.call("echo", arguments, timeout=PATIENCE)
        if seen["stage"] == "UNKNOWN":  # sent before the host saw that its bus was killed: nobody knows whether it ran
            seen = await self.call("echo", arguments, timeout=PATIENCE)
        return seen

    async def restart(self) -> bool:
        await self._bus.end(signal.SIGKILL)
        waiting = asyncio.create_task(self._lasting({"n": 1}))
        await self._bus.start()
        ready = time.monotonic()
        seen = await waiting
        self.seconds = time.monotonic() - ready
        return bool(seen["output"] == {"n": 1})


CHECKS = (Cell.progress, Cell.chunks, Cell.picture, Cell.integer, Cell.nested, Cell.cancel, Cell.question, Cell.restart)


async def play(host: Sequence[str], plugin: Sequence[str]) -> tuple[list[str], float]:
    """Plays all checks of a cell; returns those that fail, and the time after a restart."""
    with tempfile.TemporaryDirectory() as folder:
        buses = [Bus(Path(tempfile.mkdtemp(dir=folder))) for _ in range(2)]  # of the driver, and between the two
        async with AsyncExitStack() as stack:
            for bus in buses:
                stack.push_async_callback(bus.end)
                await bus.start()
            driver = await stack.enter_async_context(running(host, buses[0]))
            await stack.enter_async_context(running(plugin, buses[1]))
            cell, wrong = Cell(driver, buses[1]), []
            for check in CHECKS:
                try:
                    kept, why = await check(cell), "another result"
                except Exception as failure:
                    kept, why = False, str(failure)
                if not kept:
                    wrong.append(f"{check.__name__}: {why}")
            return wrong, cell.seconds


async def table(names: Sequence[str]) -> list[str]:
    """Plays every pair and prints the table; returns a line for each check that fails."""
    print("each cell: checks that hold, of", ", ".join(check.__name__ for check in CHECKS))
    print("and the seconds from a restarted bus to the answer of a call that waited\n")
    print("| host, plugin |", " | ".join(names), "|\n| --- |", " | ".join("---" for _ in names), "|")
    broken = []
    for host in names:
        cells = []
        for plugin in names:
            wrong, seconds = await play(PROGRAMS[host], PROGRAMS[plugin])
            cells.append(f"{len(CHECKS) - len(wrong)}/{len(CHECKS)}, {seconds:.2f} s")
            broken += [f"{host} calls {plugin}: {each}" for each in wrong]
        print(f"| {host} |", " | ".join(cells), "|", flush=True)
    return broken


def unbuilt(names: Sequence[str]) -> str:
    """Returns which of these clients cannot be started, and why; empty where all can."""
    if unknown := set(names) - set(PROGRAMS):
        return f"there is no client {', '.join(sorted(unknown))}"
    for name in names:
        command = PROGRAMS[name]
        if shutil.which(command[0]) is None or (not Path(command[-1]).exists() and name in BUILT):
            return f"the client {name} is not built: run make clients"
    return ""


def chosen(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Reads a command line with names of clients, which are all by default; ends the program if one is not built."""
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PROGRAMS)}; all by default")
    options = parser.parse_args()
    options.names = options.names or list(PROGRAMS)
    if why := unbuilt(options.names):
        parser.error(why)
    environment()
    return options


def main() -> int:
    """Reads the command line and plays."""
    parser = argparse.ArgumentParser(description="Have the hosts of every client call the plugins of every other.")
    options = chosen(parser)
    logging.disable(logging.WARNING)  # of the hosts here, whose buses are killed
    broken = asyncio.run(table(options.names))
    print(*broken, sep="\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
