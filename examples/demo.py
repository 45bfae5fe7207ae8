"""Runs the demo: a bus, four plugins in processes of their own, and this process as the host that calls them.

    python -m examples.demo

It kills and freezes one of them in the middle of calls, and shows what a host and a model get. It goes on until Ctrl-C
or SIGTERM and then ends everything it has started. The bus keeps nothing and listens on free ports, so it is in no
other bus's way; TOOLBUS_GRPC and TOOLBUS_HTTP set others.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import statistics
import sys
import time
from asyncio.subprocess import Process
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from examples.children import Children
from toolbus.loop import ToolLoop
from toolbus.sdk import Host, Progress, Result
from toolbus.sdk.listing import Listing
from toolbus.testing import ScriptedModel, calls, says

ROOT = Path(__file__).resolve().parents[1]
WEATHER = ROOT / "examples" / "weather" / "plugin.py"
COUNTER = ROOT / "examples" / "counter" / "plugin.py"
CLIENT = ROOT / "clients" / "python"
REST = ROOT / "clients" / "rest" / "plugin.py"
FREE = "127.0.0.1:0"
TIMEOUT_SECONDS = 30.0
ROUNDS = 200  # calls in a row for the measurement
SHOWN_CHARACTERS = 200  # of an answer

# What the host calls first, and what each call shows.
CALLS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("get_sun_times", {"city": "Tokyo"}, "a Python plugin, run by `toolbus run`"),
    ("convert_units", {"value": 42.195, "from": "km", "to": "mi"}, "a plugin on the generated stubs alone, as in Go"),
    ("convert_units", {"value": "far", "from": "km", "to": "mi"}, "refused by the bus; the plugin never sees it"),
    ("roll_dice", {"dice": "3d6+2"}, "plain HTTP, called at its callback URL"),
)
EXPECTED = {"count_to", "get_local_time", *(name for name, _, _ in CALLS)}


class DemoFailed(Exception):
    """The demo cannot go on, for the reason in the text; empty where the reason has been printed."""


class Demo:
    """One run of the demo."""

    def __init__(self, console: Console, children: Children) -> None:
        self._console = console
        self._children = children

    async def run(self, ready: asyncio.Event) -> None:
        """Starts everything, shows it, and then waits for the bus to end.

        Args:
            ready: set when everything has been shown.

        Raises:
            DemoFailed: something did not start, or ended by itself.
        """
        bus = await self._children.start(
            *("-m", "toolbus.cli", "serve", "--ephemeral", "--log-level", "error"),
            reads_output=True,
            TOOLBUS_GRPC=os.environ.get("TOOLBUS_GRPC") or FREE,
            TOOLBUS_HTTP=os.environ.get("TOOLBUS_HTTP") or FREE,
        )
        address, http = await self._addresses(bus)
        await self._children.start("-m", "toolbus.cli", "run", str(WEATHER), str(COUNTER), "--bus", address)
        await self._children.start(str(CLIENT / "units.py"), address)
        await self._children.start(str(REST), "0", MAIN_SERVER=f"http://{http}", LOG_LEVEL="WARNING")
        async with Host(address, source="demo") as host:
            self._show_tools(await self._listed(host))
            for name, arguments, why in CALLS:
                await self._call(host, name, arguments, why)
            await self._measure(host)
            await self._strike(host, signal.SIGKILL)
            await self._strike(host, signal.SIGSTOP)
            await self._correct(host)
        self._head(f"The bus stays at {address}. From another terminal:")
        at = "" if address == "127.0.0.1:48930" else f" --bus {address}"
        command = "toolbus" if shutil.which("toolbus") else _beside_python("toolbus")
        self._print(f"  {command} list{at}\n  {command} call{at} get_sun_times city=Lima")
        self._print(f"MCP clients: http://{http}/mcp")
        self._print(f"In a browser: the console at http://{http}/console, the API at http://{http}/docs")
        self._print("Ctrl-C ends everything.")
        ready.set()
        raise DemoFailed(f"the bus ended (exit code {await bus.wait()})")

    async def _addresses(self, bus: Process) -> tuple[str, str]:
        """Returns where the bus listens, for gRPC and for HTTP."""
        assert bus.stdout is not None  # a pipe
        try:
            line = (await asyncio.wait_for(bus.stdout.readline(), TIMEOUT_SECONDS)).decode().strip()
        except TimeoutError:
            raise DemoFailed(f"the bus was not ready within {TIMEOUT_SECONDS:g} s") from None
        if not line.startswith("toolbus ready "):
            await bus.wait()
            raise DemoFailed("the bus did not start")  # it has printed the reason
        addresses = dict(part.split("=", 1) for part in line.split()[2:])
        self._print(f"A bus: gRPC at {addresses['grpc']}, HTTP at {addresses['http']}", style="dim")
        if addresses["http"] == "off":
            raise DemoFailed("one of the plugins knows HTTP only: leave TOOLBUS_HTTP unset, or set it to 127.0.0.1:0")
        return addresses["grpc"].split(",")[0], addresses["http"]

    async def _listed(self, host: Host) -> Listing:
        """Waits until the tools of every plugin are listed."""
        names: set[str] = set()
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                while True:
                    listing: Listing = await host.list()
                    names = {tool.name for tool in listing}
                    if names >= EXPECTED:
                        return listing
                    await asyncio.sleep(0.05)
        except TimeoutError:
            missing = ", ".join(sorted(EXPECTED - names))
            raise DemoFailed(f"these tools were not listed after {TIMEOUT_SECONDS:g} s: {missing}") from None

    def _show_tools(self, listing: Listing) -> None:
        self._head(f"{len(listing)} tools, from {len({each.source for each in listing})} programs:")
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for head in ("tool", "source", "description"):
            table.add_column(head, no_wrap=head != "description")
        for each in listing:
            about = each.tool.description.splitlines()[0]
            table.add_row(*(Text(cell) for cell in (each.name, each.source, about)))
        self._console.print(table)

    async def _call(self, host: Host, name: str, arguments: dict[str, Any], why: str) -> None:
        self._head(f"{name} {json.dumps(arguments)}", why)
        started = time.perf_counter()
        self._show(await host.call(name, arguments), started)

    async def _measure(self, host: Host) -> None:
        durations = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            (await host.call("convert_units", {"value": 1, "from": "h", "to": "s"})).unwrap()
            durations.append(_ms_since(started))
        median = statistics.median(durations)
        self._print(f"\n{ROUNDS} calls of convert_units, one after another: median {median:.2f} ms")

    async def _strike(self, host: Host, number: signal.Signals) -> None:
        """Kills or freezes the process of a tool in the middle of its call, and shows what the host gets and when."""
        kills = number is signal.SIGKILL
        self._head(f"{'kill -9' if kills else 'SIGSTOP'} of a plugin in the middle of a call", "count_to 50")
        struck: list[tuple[int, float]] = []

        def on_progress(progress: Progress) -> None:
            if not struck:
                process = int(progress.message.split()[-1])
                os.kill(process, number)
                struck.append((process, time.perf_counter()))

        result = await host.call("count_to", {"number": 50}, on_progress=on_progress)
        if not struck:
            raise DemoFailed(f"count_to told no progress, and ended with: {result.text}")
        process, since = struck[0]
        self._show(result, since)
        if result.error is not None:
            safe = "safe: it did not run" if result.error.retry_safe else "not safe: it may have run"
            self._print(f"  a retry is {safe}")
        other = time.perf_counter()
        (await host.call("convert_units", {"value": 1, "from": "h", "to": "s"})).unwrap()
        self._print(f"  another tool answers meanwhile, after {_ms_since(other):.1f} ms")
        if not kills:
            os.kill(process, signal.SIGCONT)
            since = time.perf_counter()
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while (await host.call("count_to", {"number": 0})).is_error:
                await asyncio.sleep(0.02)
        self._print(f"  it answers again {_ms_since(since):,.0f} ms after {'the kill' if kills else 'SIGCONT'}")

    async def _correct(self, host: Host) -> None:
        """Has a model, whose steps are written down here, use a tool wrongly once."""
        self._head("A model reads an error and corrects itself", "the tool loop, with a scripted model")
        model = ScriptedModel(
            calls("get_local_time", {"city": "Tokio"}),
            calls("get_local_time", {"city": "Tokyo"}),
            says("I have looked it up under its English name."),
        )
        reply = await ToolLoop(host, model.endpoint).run("What time is it in Tokio?")
        for call in reply.calls:
            self._print(f"  calls {call.call.name} {call.call.arguments_json}")
            for line in _shown(call.result.text).splitlines():
                self._print(f"    {line}", style="red" if call.result.is_error else "green")
        self._print(f"  says: {reply.text}")

    def _show(self, result: Result, since: float) -> None:
        verdict = f"{_code(result)}" if result.is_error else "answer"
        self._print(f"  {verdict} after {_ms_since(since):,.1f} ms", style="red" if result.is_error else "green")
        for line in _shown(result.text).splitlines():
            self._print(f"    {line}")

    def _head(self, text: str, why: str = "") -> None:
        self._print(f"\n{text}", style="bold", end="" if why else "\n")
        if why:
            self._print(f"  {why}", style="dim")

    def _print(self, text: str, *, style: str = "", end: str = "\n") -> None:
        """Prints text as it is: it may come from a plugin and is not markup."""
        self._console.print(Text(text, style=style), end=end, soft_wrap=True)
        self._console.file.flush()


def _beside_python(command: str) -> str:
    """Returns the path of a command of this environment, for where it is not on PATH."""
    return os.path.relpath(Path(sys.executable).with_name(command))


def _ms_since(since: float) -> float:
    return (time.perf_counter() - since) * 1e3


def _shown(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} … ({len(text)} characters)"


def _code(result: Result) -> str:
    return result.error.code.name if result.error is not None else "TOOL"


async def main() -> int:
    """Runs the demo until a signal; returns the exit code."""
    tty = sys.stdout.isatty()
    console = Console(highlight=False, width=None if tty else 120)
    children = Children({**os.environ, "PYTHONPATH": _path(), "PYTHONUNBUFFERED": "1"})
    stopping, ready = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        if stopping.is_set():
            children.kill()
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    async with children:
        running = asyncio.create_task(Demo(console, children).run(ready))
        waiting = asyncio.create_task(stopping.wait())
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if stopping.is_set():
            console.print("\nending …")
        running.cancel()
        waiting.cancel()
        try:
            await running
        except asyncio.CancelledError:
            return 0 if ready.is_set() else 130
        except DemoFailed as error:
            if str(error):
                print(f"demo: {error}", file=sys.stderr)
            return 1
    return 0


def _path() -> str:
    """Returns the PYTHONPATH with which children find this checkout where it is not installed."""
    before = os.environ.get("PYTHONPATH")
    return f"{ROOT}{os.pathsep}{before}" if before else str(ROOT)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
