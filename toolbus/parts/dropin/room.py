"""Offers the folder of drop-in tools that the configuration names, for as long as the bus runs.

The files run in sandboxed processes of their own, which attach to the guarded listener; `toolbus.dropin` runs them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from toolbus.bus.core import Core, Room
from toolbus.bus.rooms.streams_room import StreamsRoom
from toolbus.common.log_limit import LogLimit
from toolbus.common.text import shorten
from toolbus.errors import InvalidRequest, SetupError
from toolbus.parts.dropin.settings import DropinSettings

if TYPE_CHECKING:
    from toolbus.parts.dropin.tool_folder import ToolFolder
    from toolbus.processes.supervisor import PluginReport

log = logging.getLogger("toolbus.dropin")

LINES_PER_SECOND, MAX_LINE = 30, 500  # of a group in the log, and characters of one; its whole tail is in memory
STOP_SECONDS = 2.0  # for processes to end by themselves: the bus has ended their sessions, so they have no calls
_LEVELS = {logging.getLevelName(level): level for level in range(logging.DEBUG, logging.CRITICAL + 1, 10)}


class DropinOutput:
    """The output of the groups of drop-in tools of one bus: stored, and logged within a limit.

    Args:
        later: calls a function after so many seconds.

    Attributes:
        folder: runs them; None before the start.
    """

    source = "toolbus.dropin"

    def __init__(self, later: Callable[[float, Callable[[], None]], object]) -> None:
        from toolbus.processes.output_tail import OutputTails

        self.folder: ToolFolder | None = None
        self._later = later
        self._tails = OutputTails()
        self._limits: dict[str, LogLimit] = {}  # by group

    def take(self, report: PluginReport) -> None:
        """Stores a report, and logs it unless its group logs too much."""
        from toolbus.parts.dropin.group_supervisor import group_report

        of_group = group_report(report)
        self._tails(of_group)
        group = of_group.plugin
        limit = self._limits.get(group)
        if limit is None:
            limit = self._limits[group] = LogLimit(LINES_PER_SECOND, partial(_log_more, group), self._later)
        if not report.stream or limit.passes():
            log_report(report)

    def plugins(self) -> list[dict[str, Any]]:
        """Returns the state of each group."""
        return self._tails.described()

    async def read(self, plugin: str, lines: int, since: int, wait_seconds: float) -> dict[str, Any]:
        """Returns lines of one group."""
        return await self._tails.read(plugin, lines, since, wait_seconds)

    def restart(self, plugin: str) -> None:
        """Restarts the processes of a group."""
        if self.folder is None:
            raise InvalidRequest("the drop-in tools of this bus have not started")
        self.folder.processes.restart(plugin)

    def stop(self, plugin: str) -> None:
        """Refuses: all files of a folder are offered."""
        from toolbus.parts.dropin.group_supervisor import refuse_stop

        refuse_stop(plugin)


class DropinRoom(Room):
    """The folder of drop-in tools of one bus; nothing where the configuration names none."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.output: DropinOutput | None = None  # None until started, and without a folder
        self._folder: ToolFolder | None = None  # the same
        self._running: asyncio.Task[bool] | None = None  # runs the folder

    def provides(self) -> Iterable[object]:
        """Returns the output of the groups."""
        return () if self.output is None else (self.output,)

    async def start(self) -> None:
        """Starts the folder; the tools of its files are offered as soon as their processes have loaded them.

        Raises:
            SetupError: the bus has no streams that processes could attach to, or `watchfiles` is not installed.
        """
        config = self.core.config.part(DropinSettings)
        if config.tools_dir is None:
            return
        streams = self.core.rooms.find(StreamsRoom)
        if streams is None:
            raise SetupError("tools_dir needs StreamsRoom, which this bus was made without: add it to its rooms")
        from toolbus.parts.dropin.tool_folder import ToolFolder

        address = await streams.dropin_address()
        self.output = output = DropinOutput(asyncio.get_running_loop().call_later)
        folder = ToolFolder(config.tools_dir, address, output.take, require_manifest=config.require_manifest)
        self._folder = output.folder = folder
        self._running = asyncio.create_task(self._folder.run(), name=f"drop-in tools of {config.tools_dir}")
        self._running.add_done_callback(_log_error)

    async def stop(self) -> None:
        """Ends the processes; those that do not end by themselves are killed."""
        if self._folder is None or self._running is None:
            return
        self._folder.stop()
        await asyncio.wait([self._running], timeout=STOP_SECONDS)
        self._folder.stop()
        await asyncio.wait([self._running])


def _log_error(running: asyncio.Task[bool]) -> None:
    if not running.cancelled() and (error := running.exception()) is not None:
        log.error("drop-in tools have stopped: restart the bus", exc_info=error)


def _log_more(group: str, lines: int) -> None:
    log.warning("%s: and %d more lines: `toolbus logs %s` shows them", group, lines, group)


def log_report(report: PluginReport) -> None:
    """Logs a report of a process; a line of its own log has its own level."""
    from toolbus.processes.supervisor import ReportKind

    is_problem = report.stream == "stderr" or report.kind in (ReportKind.DIED, ReportKind.GIVEN_UP)
    level, text = logging.WARNING if is_problem else logging.INFO, report.text
    level_name, _, rest = text.partition(" ")
    if report.stream == "stderr" and rest and level_name in _LEVELS:
        level, text = _LEVELS[level_name], rest
    log.log(level, "%s: %s", report.plugin, shorten(text, MAX_LINE))
