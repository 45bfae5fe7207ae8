"""Shows operators the output of plugins, wherever they run: those of this bus, and those of attached supervisors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from toolbus.bus.access.principal import principal_of
from toolbus.bus.core import Core
from toolbus.bus.operators.plugin_outputs import OwnOutput, PluginOutputs
from toolbus.bus.room import Room
from toolbus.bus.rooms.dropin_room import DropinRoom
from toolbus.bus.rooms.mcp_client_room import McpClientRoom
from toolbus.sdk import ToolScope, llm_tool
from toolbus.tool import Result

MAX_WAIT_SECONDS = 60.0
DEFAULT_LINES = 100


class LogsRoom(Room):
    """What one bus shows of logs."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._outputs = PluginOutputs(core.registry, self._call, self._own)

    def tools(self) -> Iterable[Callable[..., Any]]:
        """Returns the operators' tools of this room."""
        return [self.plugin_logs, self.plugin_restart, self.plugin_stop]

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
        many after `since` are not kept any more; `next`, the `since` of the next request.
        """
        if not plugin:
            return await self._outputs.plugins(source)
        return await self._outputs.read(source, plugin, lines, since, max(0.0, min(wait_seconds, MAX_WAIT_SECONDS)))

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
