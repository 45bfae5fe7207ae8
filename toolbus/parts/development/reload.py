"""Runs plugins so that saving a file replaces them: the new process takes over when its tools are offered.

Until then the old process answers, and it finishes its calls. A file that cannot be loaded keeps the old one running,
with the author's line in the output.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from toolbus.bus.keys.private_files import Stamp, stamp_of
from toolbus.errors import InvalidRequest
from toolbus.processes.plugin_process import REPORT_VARIABLE
from toolbus.processes.supervisor import Command, PluginReport, ReportKind, RestartPolicy, Supervisor

POLL_SECONDS = 0.15
SETTLE_SECONDS = 0.05  # an editor that writes a file in two steps
MAX_FILES = 2_000  # watched below the folder of a plugin; more are not looked at
_SUFFIXES = (".py", ".toml", ".json")
_SKIPPED = frozenset({"__pycache__", ".venv", "venv", "node_modules", ".git"})

Stamps = dict[Path, Stamp]


@dataclass(slots=True)
class _Watched:
    """One plugin: its file or folder, and the processes that run it.

    Attributes:
        path: None for a program, which is not watched.
        number: of the newest process.
        serving: the number of the one that last offered its tools; 0 before the first.
    """

    path: Path | None
    command: Command
    number: int = 0
    serving: int = 0


class WatchedPlugins:
    """Plugins that `toolbus run --watch` and `toolbus dev` run; a `Running`.

    Args:
        commands: of each plugin, by name.
        emit: takes what happens to the plugins, and their output.
        on_offered: called with a plugin's name and the names of its tools whenever a process offers them.
    """

    def __init__(
        self,
        commands: Mapping[str, Command],
        emit: Callable[[PluginReport], None],
        restarts: RestartPolicy,
        stop_seconds: float,
        on_offered: Callable[[str, list[str]], object] = lambda name, tools: None,
    ) -> None:
        self._emit = emit
        self._on_offered = on_offered
        self._supervisor = Supervisor(self._report, restarts=restarts, stop_seconds=stop_seconds, stays=True)
        self._stopping = asyncio.Event()
        self._plugins: dict[str, _Watched] = {}
        for name, command in commands.items():
            path = None if command.group_drains else Path(command.arguments[-1]).resolve()
            self._plugins[name] = _Watched(path, command)

    def __repr__(self) -> str:
        return f"<WatchedPlugins {', '.join(self._plugins)}>"

    async def run(self) -> bool:
        """Runs them until `stop`; returns True: what cannot be loaded waits for the next save."""
        watching = asyncio.create_task(self._watch(), name="watch files")
        try:
            for name in self._plugins:
                self._start(name)
            await self._supervisor.run()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        return True

    def stop(self) -> None:
        """Shuts all down gracefully; the second call kills them."""
        self._stopping.set()
        self._supervisor.stop()

    def restart(self, name: str) -> None:
        """Replaces one.

        Raises:
            InvalidRequest: there is no plugin of that name.
        """
        self._known(name)
        self._start(name)

    def stop_plugin(self, name: str) -> None:
        """Shuts one down gracefully; the next save starts it again.

        Raises:
            InvalidRequest: there is no plugin of that name.
        """
        plugin = self._known(name)
        for number in range(1, plugin.number + 1):
            self._supervisor.remove(f"{name}@{number}")
        plugin.serving = 0

    def _known(self, name: str) -> _Watched:
        if name not in self._plugins:
            raise InvalidRequest(f"there is no plugin {name!r} here; there are: {', '.join(self._plugins)}")
        return self._plugins[name]

    def _start(self, name: str) -> None:
        """Starts a new process beside the one that serves; one that was still starting is ended."""
        plugin = self._plugins[name]
        for number in range(plugin.serving + 1, plugin.number + 1):
            self._supervisor.remove(f"{name}@{number}", 0.0)
        plugin.number += 1
        self._supervisor.add(f"{name}@{plugin.number}", self._reporting(name, plugin.number, plugin.command))

    def _reporting(self, name: str, number: int, command: Command) -> Command:
        """Returns a command whose process reports when its tools are offered."""
        own = command.stdin
        if command.group_drains or own is None:
            return command

        def stdin(pipe: int) -> bytes:
            return json.dumps({**json.loads(own(pipe)), REPORT_VARIABLE: str(pipe)}).encode()

        return replace(command, stdin=stdin, on_report=functools.partial(self._offered, name, number))

    def _offered(self, name: str, number: int, line: str) -> None:
        plugin = self._plugins[name]
        if number <= plugin.serving:
            return  # it has reconnected, or is being replaced
        for older in range(max(1, plugin.serving), number):
            self._supervisor.remove(f"{name}@{older}")
        again, plugin.serving = bool(plugin.serving), number
        tools: list[str] = json.loads(line)
        shown = f"{len(tools)} tool{'' if len(tools) == 1 else 's'}: {', '.join(tools) or 'none'}"
        self._emit(PluginReport(name, ReportKind.OFFERED, f"{'reloaded' if again else 'attached'}, {shown}"))
        self._on_offered(name, tools)

    def _report(self, report: PluginReport) -> None:
        """Passes a report on under the plugin's name; what happens to processes that are replaced is not told."""
        name, _, number = report.plugin.rpartition("@")
        plugin, report = self._plugins[name], replace(report, plugin=name)
        if report.kind is ReportKind.GIVEN_UP:
            rest = "the earlier one keeps running" if plugin.serving else "nothing of it runs"
            text = f"{report.text.partition(':')[0]}: {rest}; save it again when it is corrected"
            self._emit(replace(report, kind=ReportKind.DIED, text=text))
        elif report.kind is ReportKind.OUTPUT or int(number) == plugin.serving or self._stopping.is_set():
            self._emit(report)

    # -- files -------------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        before = await asyncio.to_thread(self._stamps)
        while not self._stopping.is_set():
            await asyncio.sleep(POLL_SECONDS)
            now = await asyncio.to_thread(self._stamps)
            if now == before:
                continue
            await asyncio.sleep(SETTLE_SECONDS)
            now = await asyncio.to_thread(self._stamps)
            changed = {path for path in now.keys() | before.keys() if now.get(path) != before.get(path)}
            before = now
            for name in self._affected(changed):
                self._start(name)

    def _affected(self, changed: set[Path]) -> list[str]:
        """Returns the plugins that changed files are of: a plugin's own file is of that plugin alone."""
        own = {plugin.path for plugin in self._plugins.values()}
        return [
            name
            for name, plugin in self._plugins.items()
            if plugin.path is not None
            and any(
                path == plugin.path or (path not in own and path.is_relative_to(_folder(plugin.path)))
                for path in changed
            )
        ]

    def _stamps(self) -> Stamps:
        """Returns what differs for each watched file after it was written."""
        folders = {_folder(plugin.path) for plugin in self._plugins.values() if plugin.path is not None}
        return {path: stamp_of(path) for folder in folders for path in _files(folder)}


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _files(folder: Path) -> list[Path]:
    """Returns the files of a plugin's folder that it may consist of, as far as its folders can be read."""
    found: list[Path] = []
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(each for each in folders if each not in _SKIPPED and not each.startswith("."))
        found += (Path(place, name) for name in sorted(names) if name.endswith(_SUFFIXES))
        if len(found) >= MAX_FILES:
            break
    return found[:MAX_FILES]
