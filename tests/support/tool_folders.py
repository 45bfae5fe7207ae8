"""Runs a folder of drop-in tools on a real bus, and waits for what the bus lists and what the folder reports."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

from tests.support.fork_server import forked_plugins
from tests.support.processes import environment
from tests.support.waiting import WAIT_SECONDS
from toolbus.bus import Bus
from toolbus.parts.dropin.tool_folder import ToolFolder
from toolbus.processes.supervisor import PluginReport, ReportKind, RestartPolicy
from toolbus.testing import running_bus

QUICK = RestartPolicy(backoff_seconds=0.01, max_deaths=3)
DIES = """
import os
register_tool(name="dies", execute=lambda args, env: os._exit(args["code"]), definition={"description": "-"})
"""


def tool(name: str, output: str, more: str = "") -> str:
    """Returns a file with one tool, which returns a text; its description is the same text."""
    definition = {"description": output}
    return f"{more}\nregister_tool(name={name!r}, execute=lambda args, env: {output!r}, definition={definition})\n"


def slow(name: str, output: str, folder: Path) -> str:
    """Returns a file with a tool that ends when the file `go` exists; its folder has to be granted."""
    return f"""
import asyncio, os
def exists():
    return os.path.exists({str(folder / "go")!r})
async def run():
    open({str(folder / "called")!r}, "w").close()
    while not exists():
        await asyncio.sleep(0.01)
    return {output!r}
TOOL_NAME = {name!r}
TOOL_DESCRIPTION = {output!r}
"""


class OfferedFolder:
    """A folder of tools that is offered on a bus, and all of its reports."""

    def __init__(self, path: Path, bus: Bus, address: str, **options: Any) -> None:
        self.path = path
        self.bus = bus
        self.reports: list[PluginReport] = []
        self._reported = asyncio.Event()  # a further report
        settings: dict[str, Any] = {"environment": environment({}), "restarts": QUICK, **options}
        self.tools = ToolFolder(path, address, self._emit, **settings)

    def _emit(self, report: PluginReport) -> None:
        self.reports.append(report)
        self._reported.set()

    @property
    def text(self) -> str:
        return "\n".join(f"{report.plugin} {report.kind.value} {report.text}" for report in self.reports)

    def write(self, **files: str) -> None:
        for stem, text in files.items():
            (self.path / f"{stem}.py").write_text(text)

    def catalog(self) -> list[tuple[str, str, str]]:
        """Returns source, name and description of each tool of the folder, in order."""
        return [
            (each.entry.source, each.entry.tool.name, each.entry.tool.description)
            for each in self.bus.list()
            if each.entry.source.startswith("dropin")
        ]

    def names(self) -> list[str]:
        return [name for _, name, _ in self.catalog()]

    async def wait_for_tools(self, *expected: tuple[str, str]) -> None:
        """Waits until the bus lists exactly these names and descriptions, in this order."""
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                async for _ in self.bus.watch():
                    if [(name, description) for _, name, description in self.catalog()] == list(expected):
                        return
        except TimeoutError:
            raise AssertionError(f"{self.catalog()} is not {expected}\n{self.text}") from None

    async def wait_for_report(self, pattern: str, times: int = 1) -> list[str]:
        """Waits until a pattern was reported this often; returns what its group matched."""
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while len(matches := re.findall(pattern, self.text)) < times:
                    self._reported.clear()
                    await self._reported.wait()
        except TimeoutError:
            raise AssertionError(f"{pattern!r} was not reported {times} times\n{self.text}") from None
        return matches

    async def pids(self, count: int = 1) -> list[int]:
        """Returns the ids of the processes that were started so far."""
        return [int(pid) for pid in await self.wait_for_report(r"started \(pid (\d+)", count)]

    def count(self, happened: ReportKind) -> int:
        return sum(report.kind is happened for report in self.reports)

    async def call(self, name: str, **arguments: Any) -> Any:
        """Returns the output of a tool, or the error of its call."""
        result = await self.bus.call(name, arguments)
        return result.error or result.output


@asynccontextmanager
async def offered_folder(path: Path, *, forked: bool = True, **options: Any) -> AsyncIterator[OfferedFolder]:
    """Runs a bus and the tools of a folder.

    Args:
        forked: whether each process of the folder is a fork of one that has imported what it imports. False starts an
            interpreter for each, for tests of what depends on it: its environment, its arguments, its memory.
    """
    async with running_bus() as bus:
        folder = OfferedFolder(path, bus, await bus.dropin_address(), **options)
        running = asyncio.create_task(folder.tools.run())
        try:
            with forked_plugins() if forked else nullcontext():
                yield folder
        finally:
            folder.tools.stop()
            async with asyncio.timeout(WAIT_SECONDS):
                await running
