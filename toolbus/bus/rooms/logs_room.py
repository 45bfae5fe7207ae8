"""Shows operators the output of plugins and slow calls, and changes levels of the log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from toolbus.bus.access.principal import principal_of
from toolbus.bus.core import Core, Room
from toolbus.bus.operators.log_levels import DEFAULT_SECONDS, LogLevels, Timer
from toolbus.bus.operators.plugin_outputs import OwnOutput, PluginOutputs
from toolbus.bus.rooms.dropin_room import DropinRoom
from toolbus.bus.rooms.mcp_client_room import McpClientRoom
from toolbus.sdk import ToolScope, llm_tool
from toolbus.tool import Result

MAX_WAIT_SECONDS = 60.0
DEFAULT_LINES = 100
RECENT_SECONDS = 3600.0  # of slow calls that are shown


class LogsRoom(Room):
    """The logs of one bus."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._outputs = PluginOutputs(core.registry, self._call, self._own)
        self._levels = LogLevels(_later)
        self._draining = asyncio.Event()  # set once the bus shuts down

    def tools(self) -> Iterable[Callable[..., Any]]:
        """Returns the operators' tools of this room."""
        return [self.plugin_logs, self.plugin_restart, self.plugin_stop, self.log_level, self.slow_calls]

    async def start(self) -> None:
        """Begins to note slow calls."""
        self.core.dispatcher.slow_calls.watch(self.core.config.slow_seconds, _later)

    async def drain(self) -> None:
        """Ends requests that wait for output, which would hold the shutdown up."""
        self._draining.set()

    async def stop(self) -> None:
        """Restores the levels that were changed."""
        self._levels.close()

    def _own(self) -> Iterator[OwnOutput]:
        for room in (self.core.rooms.find(DropinRoom), self.core.rooms.find(McpClientRoom)):
            if room is not None and room.output is not None:
                yield room.output

    async def _call(self, name: str, arguments: Mapping[str, Any], timeout: float) -> Result:
        return await self.core.local.call(name, arguments, timeout=timeout)

    @llm_tool(
        description="Shows which plugins have output, wherever they run; with a plugin its newest lines, or those "
        "after a number.",
        read_only=True,
        allow_repeat=True,
        timeout=MAX_WAIT_SECONDS + 30.0,
    )
    async def plugin_logs(
        self,
        plugin: str = "",
        source: str = "",
        lines: int = DEFAULT_LINES,
        since: int = -1,
        wait_seconds: float = 0.0,
    ) -> dict[str, Any]:
        """Shows output.

        Args:
            plugin: its name; "" for a table of all.
            source: where it runs, as in the table; "" where the name is enough.
            lines: at most so many, 2,000 at the most.
            since: the `next` of the answer before; -1: the newest lines.
            wait_seconds: how long to wait for a line after that number, at most 60.

        The table is `plugins` (source, plugin, state, pid, restarts, since, last_exit, lines, next) and `errors` of
        supervisors that did not answer. The lines are `lines` (number, at, stream, text), oldest first; `lost`, how
        many after `since` are not stored any more; `next`, the `since` of the next request.
        """
        if not plugin:
            return await self._outputs.plugins(source)
        wait = max(0.0, min(wait_seconds, MAX_WAIT_SECONDS))
        reading = asyncio.ensure_future(self._outputs.read(source, plugin, lines, since, wait))
        draining = asyncio.ensure_future(self._draining.wait())
        try:
            await asyncio.wait((reading, draining) if wait else (reading,), return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                return reading.result()
            return {"source": source, "plugin": plugin, "lines": [], "lost": 0, "next": since}
        finally:
            reading.cancel()
            draining.cancel()
            await asyncio.gather(reading, draining, return_exceptions=True)

    @llm_tool(description="Shuts a plugin that a supervisor runs down gracefully, and starts it anew.")
    async def plugin_restart(self, scope: ToolScope, plugin: str, source: str = "") -> dict[str, Any]:
        """Restarts a plugin; `source` as for plugin_logs."""
        with self.core.audit.operation("plugin.restart", principal_of(scope), target=plugin, why=source):
            where = await self._outputs.act("restart", source, plugin)
        return {"plugin": plugin, "source": where, "restarted": True}

    @llm_tool(description="Shuts a plugin that a supervisor runs down gracefully; it stays so until it is restarted.")
    async def plugin_stop(self, scope: ToolScope, plugin: str, source: str = "") -> dict[str, Any]:
        """Stops a plugin; `source` as for plugin_logs."""
        with self.core.audit.operation("plugin.stop", principal_of(scope), target=plugin, why=source):
            where = await self._outputs.act("stop", source, plugin)
        return {"plugin": plugin, "source": where, "stopped": True}

    @llm_tool(
        description="Changes the level of a logger of the bus for a while; without arguments shows the levels in force."
    )
    async def log_level(
        self, scope: ToolScope, logger: str = "", level: str = "", seconds: float = DEFAULT_SECONDS
    ) -> dict[str, Any]:
        """Changes a level.

        Args:
            logger: `toolbus`, or one below it such as `toolbus.calls`; "" only shows.
            level: debug, info, warning or error; "" restores the level before.
            seconds: how long, 86,400 at the most; then the level before comes back.

        The answer is `levels`, the effective one of each logger, and `changed`: those that go back, with `before` (""
        where the logger had none of its own) and `seconds` until then.
        """
        if logger:
            what = f"{level or 'back'} for {seconds:g} s"
            with self.core.audit.operation("log.level", principal_of(scope), target=logger, why=what):
                self._levels.set(logger, level, seconds)
        return self._levels.show()

    @llm_tool(
        description="Shows the slowest calls of the last hour, slowest first: those above slow_seconds.",
        read_only=True,
        allow_repeat=True,
    )
    async def slow_calls(self, limit: int = 50) -> dict[str, Any]:
        """Shows slow calls, without contents.

        Args:
            limit: at most this many.

        The answer is `slow_seconds` (0: none is noted), `count` since the start of the bus, and `calls`: call_id, id,
        tool, source, identity, caller, seconds, ended (seconds since the epoch), outcome, and trace_id if there is one.
        """
        slow = self.core.dispatcher.slow_calls
        calls = slow.slowest(limit, time.monotonic() - RECENT_SECONDS)
        return {
            "slow_seconds": self.core.config.slow_seconds,
            "count": slow.count,
            "calls": [each.described(self.core.records.began) for each in calls],
        }


def _later(seconds: float, function: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(seconds, function)
