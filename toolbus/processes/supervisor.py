"""Runs plugins as processes, and starts again what dies.

One process a plugin, each the leader of a group of its own. What a plugin prints comes out line by line with its name.
A plugin that dies is started again after a pause that doubles; one that dies too often is given up, the others go on.
Nothing that a plugin started outlives the supervisor: it ends the group with its leader, and where the supervisor is
killed itself, `toolbus.processes.lifeline` ends the groups and the kernel ends the leaders.

This file knows processes and time. It prints nothing and reads no options: ``toolbus run`` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from toolbus.processes.plugin_process import CANNOT_START, SUPERVISOR_VARIABLE

LINE_BYTES = 64 * 1024  # a longer line comes out in pieces
KILL_SECONDS = 5.0
_OUTPUT_SECONDS = 1.0  # how long the output of a dead process is read: somebody who left its group may hold the pipe
_READ_BYTES = 64 * 1024


class Happened(Enum):
    """What a `PluginReport` is about."""

    OUTPUT = "output"
    STARTED = "started"
    OFFERED = "offered"  # the bus offers its tools; said of drop-in tools only
    DIED = "died"  # it will be started again
    ENDED = "ended"  # it wanted to, or was told to
    GIVEN_UP = "given_up"  # it will not be started again


@dataclass(frozen=True, slots=True)
class PluginReport:
    """What happened to a plugin.

    Attributes:
        text: a line of output, or a sentence.
        stream: ``stdout`` or ``stderr`` of a line; empty otherwise.
    """

    plugin: str
    happened: Happened
    text: str
    stream: str = ""


@dataclass(frozen=True, slots=True)
class Command:
    """What runs as the process of one plugin.

    Attributes:
        arguments: the program and its arguments.
        environment: of the process; the supervisor adds its own id.
        told: given the number of a pipe that the process may report on, what it reads from standard input; None: it
            reads nothing and reports nothing.
        hear: takes each line of those reports.
        cure: what is to be done where it is given up.
        endless: whether it has no reason to end by itself: one that does has died, whatever its exit code.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    told: Callable[[int], bytes] | None = None
    hear: Callable[[str], None] = lambda line: None
    endless: bool = False
    cure: str = "correct it and run it again"

    @classmethod
    def of_file(cls, file: Path, environment: Mapping[str, str]) -> Command:
        """Returns what runs a plugin file."""
        return cls((sys.executable, "-m", "toolbus.processes.plugin_process", str(file)), environment)


@dataclass(frozen=True, slots=True)
class Restarts:
    """When a plugin that died is started again.

    Attributes:
        first_seconds: the first pause at most; each one draws from its upper half, so that plugins that died together
            do not come back together.
        longest_seconds: where doubling ends.
        deaths: how many within `within_seconds` are too many; a plugin that lived as long starts over.
        wanted: False: none at all.
    """

    first_seconds: float = 0.25
    longest_seconds: float = 30.0
    deaths: int = 5
    within_seconds: float = 30.0
    wanted: bool = True


class _Running:
    """One plugin that is being supervised."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.stopping = asyncio.Event()  # it is asked to end
        self.seconds: float | None = None  # for its answer, which is its end; None: until all are told to end
        self.process = 0  # its id; 0 while none runs


class Supervisor:
    """Runs plugins until all have ended or it is told to stop. Belongs to the loop that runs it.

    A plugin ends in three steps. Its leader gets SIGTERM, and the SDK says goodbye: the tools are gone, and calls in
    flight go on. Where it has not ended in time, the whole group gets SIGTERM, which ends a plugin of the SDK at once.
    What is left after that gets SIGKILL. With the process its stream ends, and the bus answers the calls that it had.

    Args:
        emit: takes what happens; an exception from it ends everything.
        stop_seconds: how long a plugin gets for the first step, its calls included.
        kill_seconds: how long for the second one.
        stays: whether it goes on when nothing runs, until it is told to stop.
    """

    def __init__(
        self,
        emit: Callable[[PluginReport], None],
        *,
        restarts: Restarts | None = None,
        stop_seconds: float = 12.0,  # above the 10 s that a plugin gives its calls
        kill_seconds: float = KILL_SECONDS,
        stays: bool = False,
    ) -> None:
        self._emit = emit
        self._restarts = restarts or Restarts()
        self._stop_seconds = stop_seconds
        self._kill_seconds = kill_seconds
        self._stays = stays
        self._plugins: dict[str, _Running] = {}  # those that are to run, by name
        self._group: asyncio.TaskGroup | None = None  # None while it does not run
        self._stopping = asyncio.Event()  # all are asked to end
        self._terminating = asyncio.Event()  # all are told to
        self._killing = asyncio.Event()  # SIGKILL to all
        self._timer: asyncio.TimerHandle | None = None  # from asking to telling; None until told to stop
        self._lifeline: subprocess.Popen[bytes] | None = None  # None until run
        self.failed: list[str] = []  # plugins that were given up

    def __repr__(self) -> str:
        return f"<Supervisor plugins={len(self._plugins)} failed={len(self.failed)}>"

    async def run(self) -> bool:
        """Runs everything. Returns whether no plugin had to be given up."""
        self._lifeline = subprocess.Popen(  # noqa: ASYNC220  # before anything else runs here
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("lifeline.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # a Ctrl-C is not meant for it
        )
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for name in list(self._plugins):
                    self._start(name)
                if self._stays:
                    await self._stopping.wait()
        finally:
            self._group = None
            if self._timer is not None:
                self._timer.cancel()
            assert self._lifeline.stdin is not None  # a pipe, see above
            self._lifeline.stdin.close()
            self._lifeline.wait()  # it ends as soon as it reads the end of the pipe
        return not self.failed

    def add(self, name: str, command: Command) -> None:
        """Has a plugin run, at once or as soon as the supervisor does. Names are the plugins', each used once."""
        self._plugins[name] = _Running(command)
        if self._group is not None and not self._stopping.is_set():
            self._start(name)

    def retire(self, name: str, seconds: float | None = None) -> None:
        """Asks one plugin to end; it is not started again. One that is not there is no error.

        Args:
            seconds: how long it gets before it is told to; None means the supervisor's. `stop` shortens it.
        """
        running = self._plugins.pop(name, None)
        if running is not None:
            running.seconds = self._stop_seconds if seconds is None else seconds
            running.stopping.set()

    def kill(self, name: str) -> None:
        """Ends the process of a plugin at once, as if it had died by itself: it is started again."""
        running = self._plugins.get(name)
        if running is not None and running.process:
            _signal(running.process, signal.SIGKILL)

    def stop(self) -> None:
        """Asks every plugin to end; a second time, ends them."""
        if self._stopping.is_set():
            self._killing.set()
        else:
            self._timer = asyncio.get_running_loop().call_later(self._stop_seconds, self._terminating.set)
        self._stopping.set()
        for running in self._plugins.values():
            running.stopping.set()

    def _start(self, name: str) -> None:
        assert self._group is not None  # see the callers
        self._group.create_task(self._supervise(name, self._plugins[name]), name=f"plugin {name}")

    async def _supervise(self, name: str, running: _Running) -> None:
        rule = self._restarts
        deaths: deque[float] = deque(maxlen=rule.deaths)
        attempt = 0
        while not running.stopping.is_set():
            started = time.monotonic()
            code = await self._live(name, running)
            now = time.monotonic()
            if running.stopping.is_set() or (code == 0 and not running.command.endless):
                self._emit(PluginReport(name, Happened.ENDED, f"ended ({ending(code)})"))
                return
            deaths.append(now)
            attempt = 0 if now - started > rule.within_seconds else attempt
            if why := self._give_up(code, deaths, running.command.cure):
                self.failed.append(name)
                self._emit(PluginReport(name, Happened.GIVEN_UP, why))
                return
            pause = min(rule.longest_seconds, rule.first_seconds * 2**attempt) * random.uniform(0.5, 1.0)
            attempt += 1
            self._emit(PluginReport(name, Happened.DIED, f"died ({ending(code)}): starting it again in {pause:.2g} s"))
            await _wait(running.stopping, pause)

    def _give_up(self, code: int, deaths: deque[float], cure: str) -> str:
        """Says why a plugin that died is not started again; empty where it is."""
        rule = self._restarts
        if code == CANNOT_START:
            return f"cannot start (its reason stands above): {cure}"
        if not rule.wanted:
            return f"died ({ending(code)})"
        if len(deaths) == rule.deaths and deaths[-1] - deaths[0] <= rule.within_seconds:
            return (
                f"died {rule.deaths} times within {rule.within_seconds:g} s, the last time with {ending(code)}: "
                f"given up: {cure}"
            )
        return ""

    async def _live(self, name: str, running: _Running) -> int:
        """Runs one process from start to end; returns its exit code, negative for a signal."""
        command, reports = running.command, os.pipe()
        out, err = os.pipe(), os.pipe()
        pumps = [
            asyncio.create_task(self._pump(functools.partial(self._line, name, "stdout"), out[0])),
            asyncio.create_task(self._pump(functools.partial(self._line, name, "stderr"), err[0])),
            asyncio.create_task(self._pump(lambda line: command.hear(line.decode(errors="replace")), reports[0])),
        ]
        told = command.told(reports[1]) if command.told is not None else None
        try:
            process = await asyncio.create_subprocess_exec(
                *command.arguments,
                stdin=subprocess.DEVNULL if told is None else subprocess.PIPE,
                stdout=out[1],
                stderr=err[1],
                pass_fds=() if told is None else (reports[1],),
                env={**command.environment, SUPERVISOR_VARIABLE: str(os.getpid()), "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        except OSError as problem:  # no memory, no process ids: it may be better after the pause
            self._emit(PluginReport(name, Happened.OUTPUT, f"cannot start a process: {problem}", "stderr"))
            return 1
        finally:
            for pipe in (out, err, reports):
                os.close(pipe[1])
        running.process = group = process.pid  # the leader's id, by setsid
        self._note(f"+{group}")
        try:
            self._emit(PluginReport(name, Happened.STARTED, f"started (pid {group})"))
            if process.stdin is not None and told is not None:
                process.stdin.write(told)
                process.stdin.close()
            return await self._wait_or_stop(process, running)
        finally:
            # Also the way out of a cancellation. What is left of the group dies with its leader.
            running.process = 0
            _signal(group, signal.SIGKILL)
            await process.wait()
            self._note(f"-{group}")
            _, late = await asyncio.wait(pumps, timeout=_OUTPUT_SECONDS)
            for pump in late:
                pump.cancel()
            for pump in set(pumps) - late:
                pump.result()

    async def _wait_or_stop(self, process: asyncio.subprocess.Process, running: _Running) -> int:
        """Waits for the end of a process, or brings it about in three steps."""
        ended = asyncio.create_task(process.wait())
        asked, told, killing = (
            asyncio.create_task(event.wait()) for event in (running.stopping, self._terminating, self._killing)
        )
        try:
            await asyncio.wait((ended, asked), return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                with contextlib.suppress(ProcessLookupError):  # it has ended, and `ended` does not know yet
                    process.terminate()
                await asyncio.wait((ended, told, killing), timeout=running.seconds, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                _signal(process.pid, signal.SIGTERM)
                await asyncio.wait((ended, killing), timeout=self._kill_seconds, return_when=asyncio.FIRST_COMPLETED)
            _signal(process.pid, signal.SIGKILL)
            return await ended
        finally:
            for task in (ended, asked, told, killing):
                task.cancel()

    async def _pump(self, take: Callable[[bytes], object], pipe: int) -> None:
        """Passes on what a process writes, line by line."""
        reader = asyncio.StreamReader()
        opened = os.fdopen(pipe, "rb", 0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), opened
        )
        begun = b""  # of a line that has not ended yet
        try:
            while read := await reader.read(_READ_BYTES):
                *lines, begun = (begun + read).split(b"\n")
                if len(begun) > LINE_BYTES:
                    lines, begun = [*lines, begun], b""
                for line in lines:
                    take(line)
            if begun:
                take(begun)
        finally:
            transport.close()

    def _line(self, name: str, stream: str, line: bytes) -> None:
        self._emit(PluginReport(name, Happened.OUTPUT, line.decode(errors="replace").rstrip("\r"), stream))

    def _note(self, line: str) -> None:
        """Tells the lifeline; where that has been killed, the kernel's way is left."""
        assert self._lifeline is not None  # started before any plugin
        assert self._lifeline.stdin is not None  # a pipe
        try:
            self._lifeline.stdin.write(f"{line}\n".encode())
        except BrokenPipeError:
            pass


def plugin_names(files: Sequence[Path]) -> list[str]:
    """Names plugins after their files: the stem, with the folder where stems are equal, numbered where those are."""
    stems = Counter(file.stem for file in files)
    names = [file.stem if stems[file.stem] == 1 else f"{file.resolve().parent.name}/{file.stem}" for file in files]
    seen: Counter[str] = Counter()
    for index, name in enumerate(names):
        seen[name] += 1
        if seen[name] > 1:
            names[index] = f"{name}#{seen[name]}"
    return names


def ending(code: int) -> str:
    """Says how a process ended."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _signal(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # gone; or, on macOS, nothing left but zombies
        pass


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        pass
