"""Runs plugins as processes, one each, and restarts those that crash.

A plugin that dies is restarted after a backoff that doubles; one in a crash loop is given up, and the others continue.
No process that a plugin started outlives the supervisor: `SupervisedPlugin` kills the group with its leader, and if the
supervisor itself is killed, the `Lifeline` kills the groups and the kernel kills the leaders.

This file prints nothing and reads no options: ``toolbus run`` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from toolbus.common.text import list_names, quote
from toolbus.errors import InvalidRequest
from toolbus.processes.lifeline import Lifeline
from toolbus.processes.program_starter import CANNOT_START, SUPERVISOR_VARIABLE

# Each process leads a group of its own. Its output is passed on line by line. When the process has ended, its group is
# killed, so no process that the plugin started outlives it. The `Supervisor` decides when a new process starts.

LINE_BYTES = 64 * 1024  # a longer line is passed on in pieces
KILL_SECONDS = 5.0
_OUTPUT_SECONDS = 1.0  # how long the output of a dead process is read: a child that left its group may hold the pipe
_READ_BYTES = 64 * 1024
# A plugin may print without end. Its output is passed on in slices. After each half of a millisecond of that work there
# is a pause of nine, in which the plugin waits for its pipe and other tasks run.
SLICE_LINES = 20
SLICE_SECONDS = 0.0005
PAUSE = 9.0
_GROUP_POLL_SECONDS = 0.05  # no event reports the end of the last process of a group
_LIBRARIES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")  # some builds of Python do not start without
_STARTER = Path(__file__).with_name("program_starter.py")


class ReportKind(Enum):
    """The kind of a `PluginReport`."""

    OUTPUT = "output"
    STARTED = "started"
    OFFERED = "offered"  # the bus offers its tools; for drop-in tools only
    DIED = "died"  # it will be restarted
    ENDED = "ended"  # by itself with exit code 0, or it was stopped
    GIVEN_UP = "given_up"  # it will not be restarted


@dataclass(frozen=True, slots=True)
class PluginReport:
    """An event of a plugin, or a line of its output.

    Attributes:
        text: the line, or a sentence about the event.
        stream: ``stdout`` or ``stderr`` of a line; empty otherwise.
        pid: of the event's process; 0 without one, and for output.
    """

    plugin: str
    kind: ReportKind
    text: str
    stream: str = ""
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Command:
    """The program that runs as the process of one plugin.

    Attributes:
        arguments: the program and its arguments.
        environment: of the process; the supervisor adds its own process id.
        stdin: returns the process's standard input from the descriptor of the pipe for reports; None: it is empty.
        on_report: called with each line that the process reports on that pipe; None: it gets no such pipe.
        group_drains: whether processes that the leader leaves behind in a graceful shutdown may end gracefully too: a
            shell that runs the plugin ends with its first signal, and does not pass it on.
        runs_forever: whether any end that was not requested counts as a crash, exit code 0 included.
        fix: what a person should do if the plugin is given up.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    stdin: Callable[[int], bytes] | None = None
    on_report: Callable[[str], None] | None = None
    group_drains: bool = False
    runs_forever: bool = False
    fix: str = "correct it and run it again"

    @classmethod
    def of_file(cls, file: Path, environment: Mapping[str, str], secrets: Mapping[str, str] | None = None) -> Command:
        """Returns the command that runs a plugin file.

        Args:
            secrets: further variables in the plugin's `os.environ`. They are sent over standard input, so other
                processes can read them neither in its arguments nor in its environment.
        """
        stdin = json.dumps(dict(secrets or {})).encode()
        # -P: a plugin in the working directory may be called like a module of the standard library.
        arguments = (sys.executable, "-P", "-m", "toolbus.processes.plugin_process", str(file))
        return cls(arguments, environment, stdin=lambda report: stdin)

    @classmethod
    def of_program(cls, file: str, words: Sequence[str], environment: Mapping[str, str]) -> Command:
        """Returns the command that runs any program as a plugin.

        Args:
            file: the program.
            words: its arguments, from the zeroth on.
            environment: all of its variables. They are sent over standard input, so that no process can read them
                before the program runs; then processes of the same user can, since they are its environment.
        """
        variables = {**environment, "PYTHONUNBUFFERED": "1"}
        stdin = b"".join(b"%s=%s\0" % (os.fsencode(name), os.fsencode(value)) for name, value in variables.items())
        return cls(
            (sys.executable, "-I", "-S", str(_STARTER), file, *words),
            {name: os.environ[name] for name in _LIBRARIES if name in os.environ},
            stdin=lambda report: stdin,
            group_drains=True,
        )


@dataclass(frozen=True, slots=True)
class ShutdownPhases:
    """The later steps of a shutdown, which all plugins of a supervisor share.

    Attributes:
        terminate: set when every group gets SIGTERM.
        kill: set when every group gets SIGKILL.
        kill_seconds: from SIGTERM to a group until SIGKILL to it.
    """

    terminate: asyncio.Event = field(default_factory=asyncio.Event)
    kill: asyncio.Event = field(default_factory=asyncio.Event)
    kill_seconds: float = KILL_SECONDS


class SupervisedPlugin:
    """One plugin over all its processes.

    A shutdown has three steps. First the leader gets SIGTERM, and the SDK drains: the tools are withdrawn, and calls in
    flight continue. If the process has not ended in time, the whole group gets SIGTERM, which ends a plugin of the SDK
    at once. Last, remaining processes get SIGKILL. If the leader is any program, it may be a shell that ends at once:
    then its group gets SIGTERM in the first step too, and has the rest of that step's time.

    Attributes:
        stopping: set when a graceful shutdown was requested.
        restarting: whether the plugin starts again after that.
        has_ended: whether no process of it runs, or will run.
        stop_seconds: how long the first step may take; None: until `ShutdownPhases.terminate` is set.
    """

    def __init__(
        self, name: str, command: Command, emit: Callable[[PluginReport], None], phases: ShutdownPhases
    ) -> None:
        self.name = name
        self.command = command
        self.stopping = asyncio.Event()
        self.restarting = self.has_ended = False
        self.stop_seconds: float | None = None
        self._emit = emit
        self._phases = phases
        self._process_id = 0  # 0 while none runs
        self._last_process_id = 0  # 0 before the first

    def report(self, kind: ReportKind, text: str, stream: str = "") -> None:
        """Emits a report about this plugin."""
        self._emit(PluginReport(self.name, kind, text, stream, 0 if stream else self._last_process_id))

    def kill(self) -> None:
        """Kills the process that runs now, with its group."""
        if self._process_id:
            signal_group(self._process_id, signal.SIGKILL)

    async def run_process(self, lifeline: Lifeline) -> int:
        """Runs one process from start to end; returns its exit code, negative for a signal."""
        command, on_report = self.command, self.command.on_report or (lambda line: None)
        ended, readers, pipes = asyncio.Event(), list[asyncio.Task[None]](), list[int]()
        try:
            takers: list[Callable[[bytes], object]] = [
                *(functools.partial(self._report_output, stream) for stream in ("stdout", "stderr")),
                lambda line: on_report(line.decode(errors="replace")),
            ]
            for on_line in takers:
                read, write = os.pipe()
                pipes.append(write)
                readers.append(asyncio.create_task(read_lines(read, on_line, ended)))
            out, err, reports = pipes
            stdin = command.stdin(reports) if command.stdin is not None else None
            process = await asyncio.create_subprocess_exec(
                *command.arguments,
                stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
                stdout=out,
                stderr=err,
                pass_fds=() if command.on_report is None else (reports,),
                env={**command.environment, SUPERVISOR_VARIABLE: str(os.getpid()), "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        except OSError as error:  # no memory, process ids or descriptors: the next attempt may succeed
            self.report(ReportKind.OUTPUT, f"cannot start a process: {error}", "stderr")
            return 1
        finally:
            for pipe in pipes:
                os.close(pipe)
        self._process_id = self._last_process_id = group = process.pid  # the leader's id, by setsid
        lifeline.add(group)
        try:
            self.report(ReportKind.STARTED, f"started (pid {group})")
            if process.stdin is not None and stdin is not None:
                process.stdin.write(stdin)
                process.stdin.close()
            return await self._wait_for_end(process)
        finally:
            # Also after a cancellation. The rest of the group is killed with its leader.
            self._process_id = 0
            ended.set()
            signal_group(group, signal.SIGKILL)
            await process.wait()
            lifeline.remove(group)
            _, late = await asyncio.wait(readers, timeout=_OUTPUT_SECONDS)  # those whose pipes are still open
            for reader in late:
                reader.cancel()
            for reader in set(readers) - late:
                reader.result()

    async def _wait_for_end(self, process: asyncio.subprocess.Process) -> int:
        """Waits until a process ends by itself, or shuts it down in three steps."""
        ended = asyncio.create_task(self._until_ended(process))
        stopping, terminating, killing = (
            asyncio.create_task(event.wait()) for event in (self.stopping, self._phases.terminate, self._phases.kill)
        )
        first = asyncio.FIRST_COMPLETED
        try:
            await asyncio.wait((ended, stopping), return_when=first)
            if not ended.done():
                with contextlib.suppress(ProcessLookupError):  # it has ended, and `ended` does not know yet
                    process.terminate()
                await asyncio.wait((ended, terminating, killing), timeout=self.stop_seconds, return_when=first)
            if not ended.done():
                signal_group(process.pid, signal.SIGTERM)
                await asyncio.wait((ended, killing), timeout=self._phases.kill_seconds, return_when=first)
            signal_group(process.pid, signal.SIGKILL)
            return await ended
        finally:
            for task in (ended, stopping, terminating, killing):
                task.cancel()

    async def _until_ended(self, process: asyncio.subprocess.Process) -> int:
        """Waits for the end of a leader, in a graceful shutdown also for that of its group; returns its exit code."""
        code = await process.wait()
        if self.command.group_drains and self.stopping.is_set():
            signal_group(process.pid, signal.SIGTERM)
            while _group_runs(process.pid):
                await asyncio.sleep(_GROUP_POLL_SECONDS)
        return code

    def _report_output(self, stream: str, line: bytes) -> None:
        self.report(ReportKind.OUTPUT, line.decode(errors="replace").rstrip("\r"), stream)


def describe_exit(code: int) -> str:
    """Returns how a process ended: its exit code, or the signal's name."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


async def read_lines(pipe: int, on_line: Callable[[bytes], object], ended: asyncio.Event) -> None:
    """Reads a pipe to its end, line by line.

    Args:
        ended: set when the process has ended, so that the rest is read without pauses.
    """
    reader = asyncio.StreamReader()
    opened = os.fdopen(pipe, "rb", 0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), opened
    )
    rest = b""  # the beginning of an unfinished line
    seconds = 0.0  # of work since the last pause
    try:
        while chunk := await reader.read(_READ_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for first in range(0, len(lines), SLICE_LINES):
                began = time.perf_counter()
                for line in lines[first : first + SLICE_LINES]:
                    on_line(line)
                seconds += time.perf_counter() - began
                if seconds > SLICE_SECONDS:
                    await asyncio.sleep(0.0 if ended.is_set() else PAUSE * seconds)
                    seconds = 0.0
        if rest:
            on_line(rest)
    finally:
        transport.close()


def signal_group(group: int, number: signal.Signals) -> None:
    """Sends a signal to a process group, if it still exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended; on macOS only zombies may be left
        os.killpg(group, number)


def _group_runs(group: int) -> bool:
    """Tells whether a process of a group runs; zombies do not count, since in a container they may stay for ever."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):  # as in `signal_group`
        return False
    if not sys.platform.startswith("linux"):
        return True
    return any(stat[0] not in "ZX" for stat in stats_of_group(group))


def stats_of_group(group: int) -> Iterator[list[str]]:
    """Yields what the kernel says of each process of a group: the fields of proc(5)'s ``stat`` from the state on.

    A process that ends meanwhile is left out; there are none on other systems than Linux.
    """
    processes: Iterable[str] = ()
    with contextlib.suppress(OSError):  # a system without /proc
        processes = filter(str.isdecimal, os.listdir("/proc"))
    for process in processes:
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has just ended
            fields = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[2]) == group:
                yield fields


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
        longest = self.backoff_seconds * 2.0 ** min(attempt, 64)  # attempts have no end, floats have
        return min(self.max_backoff_seconds, longest) * random.uniform(0.5, 1.0)

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
