"""Provides the standard error of mounted MCP servers like the output of plugins, across restarts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from toolbus.common.text import list_names, quote
from toolbus.errors import InvalidRequest
from toolbus.parts.mcp.client.mount import Mount
from toolbus.processes.output_tail import OutputTails
from toolbus.processes.supervisor import PluginReport, ReportKind


class MountOutput:
    """The output of the mounts of one bus.

    Args:
        mounts: returns the current mounts.
    """

    source = "toolbus.mounts"

    def __init__(self, mounts: Callable[[], Iterable[Mount]]) -> None:
        self._mounts = mounts
        self._tails = OutputTails()

    def take(self, name: str, line: str) -> None:
        """Stores a line of a server."""
        if not self._tails.has(name):
            self._tails.keep({name, *(mount.name for mount in self._mounts())})
        self._tails(PluginReport(name, ReportKind.OUTPUT, line, "stderr"))

    def plugins(self) -> list[dict[str, Any]]:
        """Returns the state of each mount that runs a program."""
        tails = {row["plugin"]: row for row in self._tails.described()}
        rows = []
        for mount in self._mounts():
            if mount.entry.is_remote:
                continue
            status, row = mount.status(), tails.get(mount.name, {"lines": 0, "next": 0, "since": 0.0})
            about = {"state": status.state.value, "pid": status.pid, "restarts": status.restarts}
            rows.append({**row, "plugin": mount.name, **about, "last_exit": status.last_error})
        return rows

    async def read(self, plugin: str, lines: int, since: int, wait_seconds: float) -> dict[str, Any]:
        """Returns lines of one mount."""
        if not self._tails.has(plugin):
            self._find(plugin)
            return {"lines": [], "lost": 0, "next": 0}
        return await self._tails.read(plugin, lines, since, wait_seconds)

    def restart(self, plugin: str) -> None:
        """Restarts a server."""
        self._find(plugin).restart()

    def stop(self, plugin: str) -> None:
        """Refuses: a mount runs as long as it is in the file of mounts."""
        raise InvalidRequest(f"{quote(plugin)} is a mount: `toolbus unmount {plugin}` removes it")

    def _find(self, name: str) -> Mount:
        for mount in self._mounts():
            if mount.name == name:
                return mount
        raise InvalidRequest(
            f"there is no mount {quote(name)}; there are: {list_names(each.name for each in self._mounts())}"
        )
