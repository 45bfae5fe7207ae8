"""Runs the demo: a bus, four plugins in processes of their own, and this process as the host that calls them.

    python -m examples.demo

It goes on until Ctrl-C or SIGTERM and then ends everything it has started. The bus keeps nothing and listens on free
ports, so it is in no other bus's way; TOOLBUS_GRPC and TOOLBUS_HTTP set others.
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
from toolbus.sdk import Host, Result
from toolbus.sdk.listing import Listing

ROOT = Path(__file__).resolve().parents[1]
WEATHER = ROOT / "examples" / "weather" / "plugin.py"
DOCS = ROOT / "examples" / "docs_search" / "plugin.py"
CLIENT = ROOT / "clients" / "python"
REST = ROOT / "clients" / "rest" / "plugin.py"
FREE = "127.0.0.1:0"
TIMEOUT_SECONDS = 30.0
ROUNDS = 200  # calls in a row for the measurement
SHOWN_CHARACTERS = 600  # of an answer

# What the host calls, and what each call shows.
CALLS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("get_sun_times", {"city": "Tokyo"}, "a plugin class as N.E.K.O. has them, run by `toolbus run`"),
    ("get_local_time", {"city": "Tokio"}, "the tool returns an error that a model can act on"),
    ("search_docs", {"query": "heartbeat", "limit": 3}, "progress before the answer; the first call builds the index"),
    ("read_doc", {"id": "python:textwrap.shorten"}, "the index is there now"),
    ("convert_units", {"value": 42.195, "from": "km", "to": "mi"}, "a plugin on the generated stubs alone, no SDK"),
    ("convert_units", {"value": "far", "from": "km", "to": "mi"}, "refused by the bus; the plugin never sees it"),
    ("text_statistics", {"text": "A tool bus. One stream a plugin, one catalog for all."}, ""),
    ("roll_dice", {"dice": "3d6+2"}, "a legacy plugin: plain HTTP, registered by REST, called at its callback URL"),
)
EXPECTED = {name for name, _, _ in CALLS}


def _beside_python(command: str) -> str:
    """Returns the path of a command of this environment, for where it is not on PATH."""
    return os.path.relpath(Path(sys.executable).with_name(command))


class DemoFailed(Exception):
    """The demo cannot go on, for the reason in the text; empty where the reason has been printed."""


class Demo:
    """One run of the demo."""

    def __init__(self, console: Console, children: Children) -> None:
        self._console = console
        self._children = children
        self._sources: dict[str, str] = {}  # by tool, once they are listed

    async def run(self, ready: asyncio.Event) -> None:
        """Starts everything, shows it, and then waits for the bus to end.

        Args:
            ready: set when everything has been shown.

        Raises:
            DemoFailed: something did not start, or ended by itself.
        """
        bus = await self._children.start(
            *("-m", "toolbus.cli", "serve", "--ephemeral", "--log-level", "warning"),
            reads_output=True,
            TOOLBUS_GRPC=os.environ.get("TOOLBUS_GRPC") or FREE,
            TOOLBUS_HTTP=os.environ.get("TOOLBUS_HTTP") or FREE,
        )
        address, http = await self._addresses(bus)
        await self._children.start("-m", "toolbus.cli", "run", str(WEATHER), str(DOCS), "--bus", address)
        await self._children.start(str(CLIENT / "units.py"), address)
        await self._children.start(str(REST), "0", MAIN_SERVER=f"http://{http}", LOG_LEVEL="WARNING")
        async with Host(address, source="demo") as host:
            self._show_tools(await self._listed(host))
            for name, arguments, why in CALLS:
                await self._call(host, name, arguments, why)
            await self._measure(host)
        await self._other_host(address)
        self._print(f"\nThe bus stays at {address}. From another terminal:", style="bold")
        at = "" if address == "127.0.0.1:48930" else f" --bus {address}"
        command = "toolbus" if shutil.which("toolbus") else _beside_python("toolbus")
        self._print(f'  {command} list{at}\n  {command} call{at} get_sun_times \'{{"city": "Lima"}}\'')
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
        self._print(line, style="dim")
        addresses = dict(part.split("=", 1) for part in line.split()[2:])
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
        self._print(f"\n{len(listing)} tools, from processes that do not know one another:", style="bold")
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for head in ("tool", "source", "state", "description"):
            table.add_column(head, no_wrap=head != "description")
        for each in listing:
            self._sources[each.name] = each.source
            about = each.tool.description.splitlines()[0]
            table.add_row(*(Text(cell) for cell in (each.name, each.source, each.state, about)))
        self._console.print(table)

    async def _call(self, host: Host, name: str, arguments: dict[str, Any], why: str) -> None:
        progress_count = 0

        def on_progress(progress: Any) -> None:
            nonlocal progress_count
            progress_count += 1

        started = time.perf_counter()
        result = await host.call(name, arguments, on_progress=on_progress)
        micros = (time.perf_counter() - started) * 1e6
        source = self._sources[name]
        self._print(f"\ndemo calls {name} of {source}", style="bold", end="")
        self._print(f"  {why}" if why else "", style="dim")
        self._print(f"  with      {json.dumps(arguments, ensure_ascii=False)}")
        if progress_count:
            self._print(f"  progress  {progress_count} messages before the answer")
        verdict = f"error {_code(result)}" if result.is_error else "answer"
        self._print(f"  {verdict} after {micros:,.0f} µs", style="red" if result.is_error else "green")
        text = result.text
        shown = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} … ({len(text)} characters)"
        for line in shown.splitlines():
            self._print(f"    {line}")

    async def _measure(self, host: Host) -> None:
        durations = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            (await host.call("convert_units", {"value": 1, "from": "h", "to": "s"})).unwrap()
            durations.append((time.perf_counter() - started) * 1e6)
        median = statistics.median(durations)
        self._print(
            f"\n{ROUNDS} calls of convert_units one after another: median {median:,.0f} µs from host "
            "to plugin and back, over two sockets and three processes"
        )

    async def _other_host(self, address: str) -> None:
        self._print(
            "\nThe same bus, seen by a host on the generated stubs alone (clients/python/show.py):", style="bold"
        )
        host = await self._children.start(
            *(str(CLIENT / "show.py"), "--bus", address, "text_statistics", '{"text": "To be, or not to be."}')
        )
        if code := await asyncio.wait_for(host.wait(), TIMEOUT_SECONDS):
            raise DemoFailed(f"clients/python/show.py ended with exit code {code}")

    def _print(self, text: str, *, style: str = "", end: str = "\n") -> None:
        """Prints text as it is: it may come from a plugin and is not markup."""
        self._console.print(Text(text, style=style), end=end, soft_wrap=True)
        self._console.file.flush()


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
