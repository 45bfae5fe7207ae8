"""A folder of drop-in tools, kept offered: one process for each group of files, swapped when its files change.

What stands in the folder says what is wanted of each source, and a task a source sees to it: a new process attaches
beside the old one, and only then is the old one asked to end, which finishes the calls it has on the old code. One that
does not come to offer its tools is ended again, and the old one stays, unless something was taken away from it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import importlib.util
import json
import os
import re
import secrets
import sys
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path

from toolbus.dropin.child import Plan
from toolbus.dropin.folder import load_order, not_loaded, tool_files
from toolbus.dropin.group import Group, groups
from toolbus.dropin.manifest import load_manifest
from toolbus.dropin.sandbox import clean_environment
from toolbus.dropin.watcher import changes
from toolbus.errors import SetupError
from toolbus.supervisor import Command, Happened, Report, Restarts, Supervisor
from toolbus.tool import MAX_TIMEOUT_SECONDS, MIB
from toolbus.tool import NAME as NAME_RULE

FILE_SECONDS = 20.0  # for one file to load; it is skipped then, and the others of its group are offered
START_SECONDS = 60.0  # for a process to load all its files: imports may be slow
FINISH_SECONDS = MAX_TIMEOUT_SECONDS + 5.0  # for the calls of a process whose place another one has taken
NAME = "tools"  # of the folder itself, in reports
_MOST_TOOLS = 10_000  # of one process that are remembered: it may report anything
_TOO_SLOW = "Timeout ("  # how faulthandler begins to tell what a process did that it ended


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a source is to offer. Where it is another one, its process would be different.

    Attributes:
        print: of the files and the grants.
        taken: names of tools that a later file of another group registers as well, each with that file.
    """

    group: Group
    print: str
    taken: Mapping[str, str] = field(default_factory=dict)

    def keeps(self, before: _Wanted) -> bool:
        """Tells whether nothing is taken away that was offered or granted before; new code does not count."""
        return self.group.grants == before.group.grants and set(self.group.files) >= set(before.group.files)


@dataclass(slots=True)
class _Process:
    """One process of a source, restarts included.

    Attributes:
        tools: names that its files registered, each with its file, whether or not it offers them.
        slow: files that it does not load, since they took too long before, each with what is said about it.
        loading: the file that it loads; empty where it loads none.
        late: the file that it took too long to load, of which it ends; empty where there is none.
        late_line: where in that file it was; empty where nobody knows.
    """

    name: str
    wanted: _Wanted
    slow: dict[str, str]
    tools: dict[str, str] = field(default_factory=dict)
    loading: str = ""
    late: str = ""
    late_line: str = ""
    loaded: str = ""  # what it has to offer, in words; empty before it has loaded its files
    attached: bool = False
    over: bool = False  # nothing runs any more, and will not be started again
    ready: asyncio.Event = field(default_factory=asyncio.Event)  # it is attached or over


class _Source:
    """What is wanted of one source, and what there is."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.wanted: _Wanted | None = None  # None: nothing any more
        self.changed = asyncio.Event()  # what is wanted is something else
        self.running: _Process | None = None  # whose tools are offered, or should be; None before the first
        self.failed = False  # the newest process could not be had

    def want(self, wanted: _Wanted | None) -> None:
        if wanted is None or wanted != self.wanted:
            self.wanted = wanted
            self.changed.set()

    def registered(self) -> dict[str, str]:
        """Returns the tools that it has and is to keep, each with its file."""
        if self.wanted is None or self.running is None or self.running.over:
            return {}
        files = self.wanted.group.files
        return {name: file for name, file in self.running.tools.items() if file in files}


class ToolFolder:
    """Keeps the tools of a folder offered. Belongs to the loop that runs it.

    Args:
        bus: its address, ``HOST:PORT`` or ``unix:PATH``.
        emit: takes what happens to the processes and to the folder as a whole.
        environment: what processes get theirs from; None means this process's. A TOOLBUS_TOKEN in it binds the sources
            to whoever knows it, each by a token of its own made from it; else they are bound to this folder object.
        require_manifest: a folder without a manifest loads nothing.
        restarts: when a process that died is started again.
        stop_seconds: how long one gets to finish its calls when all are asked to end.

    Raises:
        SetupError: from the constructor; the library that watches folders is not installed.
    """

    def __init__(
        self,
        folder: Path,
        bus: str,
        emit: Callable[[Report], None],
        *,
        environment: Mapping[str, str] | None = None,
        require_manifest: bool = False,
        restarts: Restarts | None = None,
        stop_seconds: float = 12.0,
    ) -> None:
        if importlib.util.find_spec("watchfiles") is None:
            raise SetupError(
                "a folder of tools needs watchfiles, which is not installed: pip install 'toolbus[server]'"
            )
        self._folder = folder.absolute()
        self._bus = bus
        self._emit = emit
        self._environment = {**(os.environ if environment is None else environment), "TOOLBUS_ADDRESS": bus}
        self._require_manifest = require_manifest
        self._supervisor = Supervisor(self._happened, restarts=restarts, stop_seconds=stop_seconds, stays=True)
        # Nobody else can claim these sources while they run, and none of them another one: see `_token`.
        self._secret = self._environment.get("TOOLBUS_TOKEN") or secrets.token_hex(16)
        self._sources: dict[str, _Source] = {}  # by name
        self._processes: dict[str, _Process] = {}  # by name
        self._started = 0  # processes so far
        self._turn = asyncio.Lock()  # fair: processes start one by one, and end behind those that take their place
        self._told: set[str] = set()  # what was wrong with it as a whole, so that it is said once

    def __repr__(self) -> str:
        return f"<ToolFolder {self._folder} processes={len(self._processes)}>"

    async def run(self) -> bool:
        """Offers what is there and follows the folder until `stop`. Returns whether every process could be had."""
        following = asyncio.create_task(self._follow(), name=f"following {self._folder}")
        following.add_done_callback(lambda task: self._supervisor.stop())
        try:
            await self._supervisor.run()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            if not following.cancelled():
                following.result()
        return not any(
            source.failed or (source.running is not None and source.running.over) for source in self._sources.values()
        )

    def stop(self) -> None:
        """Asks every process to end; a second time, ends them."""
        self._supervisor.stop()

    # -- the folder ----------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        async with asyncio.TaskGroup() as keeping, aclosing(changes(self._folder)) as changed:
            async for _ in changed:
                self._want(keeping, await asyncio.to_thread(self._look))

    def _look(self) -> tuple[dict[str, _Wanted] | None, list[str]]:
        """Returns what the folder is to offer, by source, and what is wrong with it; None where it cannot be told."""
        try:
            manifest = load_manifest(self._folder, require=self._require_manifest)
            files = tool_files(self._folder)
        except (SetupError, OSError) as problem:
            return None, [str(problem)]
        wanted = {group.source: _Wanted(group, self._print(group)) for group in groups(files, manifest)}
        return wanted, [f"{stray.file} {stray.reason}" for stray in not_loaded(files, manifest)]

    def _print(self, group: Group) -> str:
        digest = hashlib.sha256(repr(group).encode(errors="surrogateescape"))
        for name in group.order:
            path = self._folder / name
            try:
                text = path.read_bytes() if path.is_file() else b""
            except OSError as problem:
                text = str(problem.errno).encode()
            digest.update(hashlib.sha256(text).digest())
        return digest.hexdigest()

    def _want(self, keeping: asyncio.TaskGroup, looked: tuple[dict[str, _Wanted] | None, list[str]]) -> None:
        """Tells each source what is wanted of it; those that are gone last, since others may take over their tools."""
        wanted, wrong = looked
        if wanted is None:
            wrong = [
                f"{each}: {'what runs goes on as it is' if self._sources else 'no tool is loaded'}" for each in wrong
            ]
        for text in wrong:
            if text not in self._told:
                self._say(text)
        self._told = set(wrong)
        if wanted is None:
            return
        for name, each in wanted.items():
            source = self._sources.get(name)
            if source is None:
                source = self._sources[name] = _Source(name)
                keeping.create_task(self._keep(source), name=f"keeping {name}")
            source.want(replace(each, taken=source.wanted.taken if source.wanted is not None else {}))
        gone = [self._sources.pop(name) for name in list(self._sources) if name not in wanted]
        self._settle()
        for source in gone:
            source.want(None)

    def _settle(self) -> None:
        """Has each source leave to others the tools that a later file registers as well, as within one process.

        By itself the bus gives a name to whoever attached last, which changes with every restart.
        """
        registered = {source: source.registered() for source in self._sources.values()}
        last: dict[str, str] = {}  # the file that has each name
        for tools in registered.values():
            for name, file in tools.items():
                last[name] = max(file, last.get(name, file), key=load_order)
        for source, tools in registered.items():
            if source.wanted is not None and tools:
                taken = {name: last[name] for name, file in tools.items() if last[name] != file}
                source.want(replace(source.wanted, taken=taken))

    # -- the processes -------------------------------------------------------------------------------------------

    async def _keep(self, source: _Source) -> None:
        """Sees to it that a source has the process that is wanted, until none is."""
        while (wanted := source.wanted) is not None:
            source.changed.clear()
            running = source.running
            if running is None or running.over or running.wanted != wanted:
                process = await self._start(source, wanted, {})
                while process.late:
                    process = await self._start(source, wanted, {**process.slow, process.late: _late(process)})
                await self._swap(source, process)
                self._settle()
            else:
                source.failed = False  # what failed has been taken back
            await source.changed.wait()
        await self._retire(source.running)

    async def _start(self, source: _Source, wanted: _Wanted, slow: dict[str, str]) -> _Process:
        """Starts a process and waits until it offers its tools or is over, or something else is wanted.

        Loading has its time. The bus may be away for as long as it likes.
        """
        async with self._turn:
            self._started += 1
            process = _Process(f"{source.name}#{self._started}", wanted, slow)
            if source.changed.is_set():
                return process
            self._processes[process.name] = process
            try:
                self._supervisor.add(process.name, self._command(process))
            except SetupError as problem:
                self._say(f"{', '.join(wanted.group.files)}: {problem}")
                self._end(process)
            await _first(process.ready, source.changed, seconds=START_SECONDS)
        if process.loaded:
            await _first(process.ready, source.changed)
        return process

    async def _swap(self, source: _Source, process: _Process) -> None:
        """Gives a process the place of the one before, if it came to offer its tools."""
        before = source.running
        if not process.attached and source.changed.is_set():
            self._end(process)
            return
        source.failed = not process.attached
        if not process.ready.is_set():
            self._say(f"{process.name} has not loaded its files after {START_SECONDS:g} s: it is ended")
        if not process.attached:
            self._end(process)
            if before is not None and process.wanted.keeps(before.wanted):
                self._say(f"{process.name} does not take the place of {before.name}, which goes on")
                return
        source.running = process
        await self._retire(before)

    async def _retire(self, process: _Process | None) -> None:
        """Has a process finish its calls and end, behind those that start now: they may take over its tools."""
        async with self._turn:
            if process is not None:
                self._processes.pop(process.name, None)
                self._supervisor.retire(process.name, FINISH_SECONDS)

    def _end(self, process: _Process) -> None:
        process.over = True
        process.ready.set()
        self._processes.pop(process.name, None)
        self._supervisor.retire(process.name)

    def _command(self, process: _Process) -> Command:
        return Command(
            (sys.executable, "-m", "toolbus.dropin.child"),
            clean_environment(process.wanted.group.grants.secrets, self._environment),
            told=lambda report: self._plan(process, report).written(),
            hear=lambda line: self._hear(process, line),
            endless=True,
        )

    def _token(self, source: str) -> str:
        """Returns the token of one source; who knows it learns nothing of the others'."""
        return hmac.new(self._secret.encode(), source.encode(), "sha256").hexdigest()

    def _plan(self, process: _Process, report: int) -> Plan:
        group = process.wanted.group
        grants = group.grants
        limits: dict[str, int] = {}
        if grants.memory_mb is not None:
            limits["memory_bytes"] = grants.memory_mb * MIB
        if grants.cpu_seconds is not None:
            limits["cpu_seconds_per_call"] = grants.cpu_seconds
        return Plan(
            folder=str(self._folder),
            source=group.source,
            files=group.order,
            offering=group.files,
            bus=self._bus,
            token=self._token(group.source),
            report=report,
            write=tuple(map(str, grants.write)),
            read=tuple(map(str, grants.read)),
            connect=tuple((target.host, target.port) for target in grants.connect),
            limits=limits,
            file_seconds=FILE_SECONDS,
            grace_seconds=FINISH_SECONDS,
            slow=process.slow,
            taken=dict(process.wanted.taken),
        )

    def _happened(self, report: Report) -> None:
        self._emit(report)
        process = self._processes.get(report.plugin)
        if process is None:
            return
        over = report.happened in (Happened.DIED, Happened.GIVEN_UP)
        if over and process.late:
            self._say(f"{process.late}: {_late(process)}")
            self._end(process)
            source = self._sources.get(process.wanted.group.source)
            if source is not None and source.running is process:  # it was started again, and nobody waits for that
                source.changed.set()
        elif report.happened is Happened.GIVEN_UP:
            process.over = True
            process.ready.set()
            self._settle()

    def _hear(self, process: _Process, line: str) -> None:
        """Takes a report of a process. Its tools can write there too, so it may be anything."""
        if process.loading and line.startswith(_TOO_SLOW):
            process.late, process.loading = process.loading, ""
        elif process.late:
            found = re.search(rf'/{re.escape(process.late)}", (line \d+)', line)
            process.late_line = process.late_line or (found[1] if found else "")
        try:
            said = json.loads(line)
            happened, text, file = said["happened"], str(said["text"]), said.get("file")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return
        if happened == "loading":
            process.loading = text if text in process.wanted.group.order else ""
        elif happened == "problem":
            self._say(text)
        elif happened == "tool" and file in process.wanted.group.files and NAME_RULE.fullmatch(text):
            if len(process.tools) < _MOST_TOOLS:
                process.tools[text] = file
        elif happened == "loaded":
            process.loading, process.loaded = "", text
        elif happened == "attached":
            process.attached = True
            process.ready.set()
            self._emit(Report(process.name, Happened.OFFERED, process.loaded))

    def _say(self, text: str) -> None:
        self._emit(Report(NAME, Happened.OUTPUT, text, "stderr"))


def _late(process: _Process) -> str:
    """Says that the file which a process was loading took too long."""
    where = f" ({process.late_line})" if process.late_line else ""
    return f"takes longer than {FILE_SECONDS:g} s to load: leave what is slow to the first call{where}"


async def _first(*events: asyncio.Event, seconds: float | None = None) -> None:
    """Waits for the first of several events, so long at most."""
    tasks = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
