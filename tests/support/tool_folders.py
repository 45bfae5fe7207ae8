"""A folder of drop-in tools on a real bus, and what tests wait for: what the bus lists, and what was said."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.support.processes import environment
from toolbus.bus import Bus
from toolbus.dropin.tool_folder import ToolFolder
from toolbus.processes.supervised_plugin import PluginReport, ReportKind
from toolbus.processes.supervisor import RestartPolicy
from toolbus.testing import running_bus

SECONDS = 15.0
QUICK = RestartPolicy(backoff_seconds=0.01, max_deaths=3)
DIES = """
import os
register_tool(name="dies", execute=lambda args, env: os._exit(args["code"]), definition={"description": "-"})
"""


def tool(name: str, says: str, more: str = "") -> str:
    """The text of a file with one tool, which says something; its description tells the same."""
    definition = {"description": says}
    return f"{more}\nregister_tool(name={name!r}, execute=lambda args, env: {says!r}, definition={definition})\n"


def slow(name: str, says: str, folder: Path) -> str:
    """The text of a file with a tool that ends when there is a file `go`; its folder has to be granted."""
    return f"""
import asyncio, os
def exists():
    return os.path.exists({str(folder / "go")!r})
async def run():
    open({str(folder / "called")!r}, "w").close()
    while not exists():
        await asyncio.sleep(0.01)
    return {says!r}
TOOL_NAME = {name!r}
TOOL_DESCRIPTION = {says!r}
"""


class Offered:
    """A folder of tools that is offered on a bus, and everything that was said about it."""

    def __init__(self, path: Path, bus: Bus, address: str, **options: Any) -> None:
        self.path = path
        self.bus = bus
        self.reports: list[PluginReport] = []
        self._said = asyncio.Event()  # something more
        settings: dict[str, Any] = {"environment": environment({}), "restarts": QUICK, **options}
        self.tools = ToolFolder(path, address, self._emit, **settings)

    def _emit(self, report: PluginReport) -> None:
        self.reports.append(report)
        self._said.set()

    @property
    def text(self) -> str:
        return "\n".join(f"{report.plugin} {report.kind.value} {report.text}" for report in self.reports)

    def write(self, **files: str) -> None:
        for stem, text in files.items():
            (self.path / f"{stem}.py").write_text(text)

    def catalog(self) -> list[tuple[str, str, str]]:
        """Source, name and description of each tool of the folder, in order."""
        return [
            (each.entry.source, each.entry.tool.name, each.entry.tool.description)
            for each in self.bus.list()
            if each.entry.source.startswith("dropin")
        ]

    def names(self) -> list[str]:
        return [name for _, name, _ in self.catalog()]

    async def lists(self, *expected: tuple[str, str]) -> None:
        """Waits until the bus lists exactly these names and descriptions, in this order."""
        try:
            async with asyncio.timeout(SECONDS):
                async for _ in self.bus.watch():
                    if [(name, says) for _, name, says in self.catalog()] == list(expected):
                        return
        except TimeoutError:
            raise AssertionError(f"{self.catalog()} is not {expected}\n{self.text}") from None

    async def says(self, pattern: str, times: int = 1) -> list[str]:
        """Waits until something was said so often; returns what the pattern's group found."""
        try:
            async with asyncio.timeout(SECONDS):
                while len(found := re.findall(pattern, self.text)) < times:
                    self._said.clear()
                    await self._said.wait()
        except TimeoutError:
            raise AssertionError(f"{pattern!r} was not said {times} times\n{self.text}") from None
        return found

    async def pids(self, count: int = 1) -> list[int]:
        """The processes that were started so far."""
        return [int(pid) for pid in await self.says(r"started \(pid (\d+)", count)]

    def count(self, happened: ReportKind) -> int:
        return sum(report.kind is happened for report in self.reports)

    async def call(self, name: str, **arguments: Any) -> Any:
        """The output of a tool, or the error of its call."""
        result = await self.bus.call(name, arguments)
        return result.error or result.output


@asynccontextmanager
async def offered(path: Path, **options: Any) -> AsyncIterator[Offered]:
    """Runs a bus and the tools of a folder."""
    async with running_bus() as bus:
        folder = Offered(path, bus, await bus.dropin_address(), **options)
        running = asyncio.create_task(folder.tools.run())
        try:
            yield folder
        finally:
            folder.tools.stop()
            async with asyncio.timeout(SECONDS):
                await running
