"""Runs plugins as processes, one each, and restarts those that crash.

A plugin that dies is restarted after a backoff that doubles; one in a crash loop is given up, and the others continue.
No process that a plugin started outlives the supervisor: `SupervisedPlugin` kills the group with its leader, and if the
supervisor itself is killed, the `Lifeline` kills the groups and the kernel kills the leaders.

This file prints nothing and reads no options: ``toolbus run`` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolbus.errors import InvalidRequest
from toolbus.processes.lifeline import Lifeline
from toolbus.processes.program_starter import CANNOT_START
from toolbus.processes.supervised_plugin import (
    KILL_SECONDS,
    Command,
    PluginReport,
    ReportKind,
    ShutdownPhases,
    SupervisedPlugin,
    describe_exit,
)
from toolbus.text import list_names, quote


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a plugin that died is restarted.

    Attributes:
        backoff_seconds: the longest first backoff. Each backoff is a random part of it, half of it at least, so that
            plugins that died together are not restarted together.
        max_backoff_seconds: the longest backoff.
        max_deaths: how many within `window_seconds` are a crash loop.
        window_seconds: see `max_deaths`; a plugin that lived longer begins with the first backoff again.
        enabled: False: a plugin that died is never restarted.
    """

    backoff_seconds: float = 0.25
    max_backoff_seconds: float = 30.0
    max_deaths: int = 5
    window_seconds: float = 30.0
    enabled: bool = True

    def backoff(self, attempt: int) -> float:
        """Returns the seconds to wait before a restart; attempts count from 0."""
        return min(self.max_backoff_seconds, self.backoff_seconds * 2.0**attempt) * random.uniform(0.5, 1.0)

    def give_up_reason(self, code: int, deaths: Sequence[float], fix: str) -> str:
        """Returns why a plugin that died is not restarted; "" if it is.

        Args:
            code: its exit code, negative for a signal.
            deaths: the times of its deaths, the newest last.
            fix: what a person should do.
        """
        if code == CANNOT_START:
            return f"cannot start (the reason is above): {fix}"
        if not self.enabled:
            return f"died ({describe_exit(code)})"
        newest = deaths[-self.max_deaths :]
        if len(newest) == self.max_deaths and newest[-1] - newest[0] <= self.window_seconds:
            return (
                f"died {self.max_deaths} times within {self.window_seconds:g} s, the last time with "
                f"{describe_exit(code)} (a crash loop, so it is given up): {fix}"
            )
        return ""


class Supervisor:
    """Runs plugins until all have ended or `stop` is called. Belongs to the event loop that runs it.

    Attributes:
        failed: names of the plugins that were given up.
    """

    def __init__(
        self,
        emit: Callable[[PluginReport], None],
        *,
        restarts: RestartPolicy | None = None,
        stop_seconds: float = 12.0,  # above the 10 s that a plugin gives its calls
        kill_seconds: float = KILL_SECONDS,
        stays: bool = False,
    ) -> None:
        """Makes a supervisor without plugins.

        Args:
            emit: called with each report; an exception from it ends everything.
            stop_seconds: how long a graceful shutdown may take, the calls in flight included.
            kill_seconds: from SIGTERM to a plugin's whole group until SIGKILL.
            stays: whether it continues without plugins until `stop`.
        """
        self._emit = emit
        self._restarts = restarts or RestartPolicy()
        self._stop_seconds = stop_seconds
        self._stays = stays
        self._plugins: dict[str, SupervisedPlugin] = {}  # by name, without those that were removed
        self._group: asyncio.TaskGroup | None = None  # None while it does not run
        self._stopping = asyncio.Event()  # a graceful shutdown of all was requested
        self._phases = ShutdownPhases(kill_seconds=kill_seconds)
        self._timer: asyncio.TimerHandle | None = None  # for the end of the graceful shutdown; None before it
        self._lifeline: Lifeline | None = None  # None while it does not run
        self.failed: list[str] = []

    def __repr__(self) -> str:
        return f"<Supervisor plugins={len(self._plugins)} failed={len(self.failed)}>"

    async def run(self) -> bool:
        """Runs all plugins; returns whether no plugin was given up."""
        self._lifeline = Lifeline()
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for plugin in list(self._plugins.values()):
                    self._start(plugin)
                if self._stays:
                    await self._stopping.wait()
        finally:
            self._group = None
            if self._timer is not None:
                self._timer.cancel()
            self._lifeline.close()
        return not self.failed

    def add(self, name: str, command: Command) -> None:
        """Runs a plugin, at once or as soon as the supervisor runs.

        Args:
            name: not used before.
        """
        self._plugins[name] = plugin = SupervisedPlugin(name, command, self._emit, self._phases)
        if self._group is not None and not self._stopping.is_set():
            self._start(plugin)

    def remove(self, name: str, stop_seconds: float | None = None) -> None:
        """Shuts one plugin down gracefully, without a restart. An unknown name is not an error.

        Args:
            stop_seconds: how long that may take; None means the supervisor's. `stop` shortens it.
        """
        plugin = self._plugins.pop(name, None)
        if plugin is not None:
            plugin.stop_seconds = self._stop_seconds if stop_seconds is None else stop_seconds
            plugin.stopping.set()

    def restart(self, name: str) -> None:
        """Shuts one plugin down gracefully and starts it again; starts one that has ended or was given up.

        Raises:
            InvalidRequest: there is no plugin of that name, or all are being shut down.
        """
        plugin = self._running(name)
        if plugin.has_ended:
            self._start_anew(plugin)
        else:
            plugin.restarting = True
            plugin.stop_seconds = self._stop_seconds
            plugin.stopping.set()

    def stop_plugin(self, name: str) -> None:
        """Shuts one plugin down gracefully; as long as another one runs, `restart` starts it again.

        Raises:
            InvalidRequest: there is no plugin of that name, or all are being shut down.
        """
        plugin = self._running(name)
        plugin.restarting = False
        plugin.stop_seconds = self._stop_seconds
        plugin.stopping.set()

    def _running(self, name: str) -> SupervisedPlugin:
        plugin = self._plugins.get(name)
        if plugin is None:
            raise InvalidRequest(f"there is no plugin {quote(name)} here; there are: {list_names(self._plugins)}")
        if self._group is None or self._stopping.is_set():
            raise InvalidRequest(f"plugin {quote(name)} and all others are being shut down")
        return plugin

    def kill(self, name: str) -> None:
        """Kills the process of a plugin at once; it is restarted, as after a crash."""
        if (plugin := self._plugins.get(name)) is not None:
            plugin.kill()

    def stop(self) -> None:
        """Shuts every plugin down gracefully; a second call kills them."""
        if self._stopping.is_set():
            self._phases.kill.set()
        else:
            self._timer = asyncio.get_running_loop().call_later(self._stop_seconds, self._phases.terminate.set)
        self._stopping.set()
        for plugin in self._plugins.values():
            plugin.stopping.set()

    def _start(self, plugin: SupervisedPlugin) -> None:
        assert self._group is not None  # see the callers
        self._group.create_task(self._run_plugin(plugin), name=f"plugin {plugin.name}")

    def _start_anew(self, plugin: SupervisedPlugin) -> None:
        self.failed = [name for name in self.failed if name != plugin.name]
        self.add(plugin.name, plugin.command)

    async def _run_plugin(self, plugin: SupervisedPlugin) -> None:
        """Supervises a plugin to its end, and starts it again if that was requested."""
        await self._supervise(plugin)
        plugin.has_ended = True
        if plugin.restarting and self._plugins.get(plugin.name) is plugin and not self._stopping.is_set():
            self._start_anew(plugin)

    async def _supervise(self, plugin: SupervisedPlugin) -> None:
        """Runs one process after another until the plugin ends, is stopped, or is given up."""
        assert self._lifeline is not None  # it runs
        deaths: deque[float] = deque(maxlen=self._restarts.max_deaths)
        attempt = 0
        while not plugin.stopping.is_set():
            started = time.monotonic()
            code = await plugin.run_process(self._lifeline)
            now = time.monotonic()
            if plugin.restarting and not self._stopping.is_set():
                plugin.report(ReportKind.DIED, f"ended ({describe_exit(code)}): restarting, as an operator asked")
                return
            if plugin.stopping.is_set() or (code == 0 and not plugin.command.runs_forever):
                plugin.report(ReportKind.ENDED, f"ended ({describe_exit(code)})")
                return
            deaths.append(now)
            if reason := self._restarts.give_up_reason(code, tuple(deaths), plugin.command.fix):
                self.failed.append(plugin.name)
                plugin.report(ReportKind.GIVEN_UP, reason)
                return
            attempt = 0 if now - started > self._restarts.window_seconds else attempt
            backoff = self._restarts.backoff(attempt)
            attempt += 1
            plugin.report(ReportKind.DIED, f"died ({describe_exit(code)}): restarting in {backoff:.2g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(plugin.stopping.wait(), backoff)
        if attempt and (self._stopping.is_set() or not plugin.restarting):
            plugin.report(ReportKind.ENDED, "was not restarted: it was stopped during the backoff")


def plugin_name(path: Path) -> str:
    """Returns the name of a plugin in the output: a file's name without .py, a folder's name."""
    return path.resolve().name if path.is_dir() else path.stem


def plugin_names(files: Sequence[Path]) -> list[str]:
    """Returns plugins' names: `plugin_name`; if not unique, with the parent folder; if still not, with a number."""
    counts = Counter(plugin_name(file) for file in files)
    names = [
        name if counts[name := plugin_name(file)] == 1 else f"{file.resolve().parent.name}/{name}" for file in files
    ]
    seen: Counter[str] = Counter()
    for index, name in enumerate(names):
        seen[name] += 1
        if seen[name] > 1:
            names[index] = f"{name}#{seen[name]}"
    return names
