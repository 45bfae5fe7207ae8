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
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

from toolbus.dropin.file_grants import SOURCE, FileGrants
from toolbus.dropin.file_loader import load_order, not_loaded, tool_files
from toolbus.dropin.folder_watcher import changes
from toolbus.dropin.grant_checks import doubts, limit_hit, temporary, unavailable
from toolbus.dropin.group import Group, groups
from toolbus.dropin.group_process import ProcessPlan
from toolbus.dropin.manifest import Manifest, load_manifest
from toolbus.dropin.sandbox import clean_environment
from toolbus.dropin.source_state import Process, Source, SourcePlan
from toolbus.errors import SetupError
from toolbus.processes.supervisor import Command, Happened, PluginReport, Restarts, Supervisor
from toolbus.tool import MAX_TIMEOUT_SECONDS, MIB
from toolbus.tool import NAME as NAME_RULE

FILE_SECONDS = 20.0  # for one file to load; it is skipped then, and the others of its group are offered
START_SECONDS = 60.0  # for a process to load all its files: imports may be slow
FINISH_SECONDS = MAX_TIMEOUT_SECONDS + 5.0  # for the calls of a process whose place another one has taken
BEAT_SECONDS = 5.0  # between signs of life of a process
FROZEN_SECONDS = 25.0  # without one; the bus takes a session for lost after 22 s, and calls elsewhere
NAME = "tools"  # of the folder itself, in reports
_MAX_CODE = 4 * MIB  # of a file that are held here, in the process of the bus
_MAX_TEXT = 2_000  # characters of what a process says that the bus said
_MAX_TOOLS = 10_000  # of one process that are remembered: it may report anything
_TOO_SLOW = "Timeout ("  # how faulthandler begins to tell what a process did that it ended


class ToolFolder:
    """Keeps the tools of a folder offered. Belongs to the loop that runs it.

    Args:
        bus: where it takes drop-in tools in, see `Bus.dropin_address`; empty where `move` will say so. Processes can
            reach nothing else.
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
        emit: Callable[[PluginReport], None],
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
        self._environment = dict(os.environ if environment is None else environment)
        self._require_manifest = require_manifest
        self._supervisor = Supervisor(self._happened, restarts=restarts, stop_seconds=stop_seconds, stays=True)
        # Nobody else can claim these sources while they run, and none of them another one: see `_token`.
        self._secret = self._environment.get("TOOLBUS_TOKEN") or secrets.token_hex(16)
        self._sources: dict[str, Source] = {}  # by name
        self._processes: dict[str, Process] = {}  # by name
        self._started: Counter[str] = Counter()  # processes so far, of each source
        self._turn = asyncio.Lock()  # fair: processes start one by one, and end behind those that take their place
        self._wrong: list[str] = []  # what is wrong with it as a whole
        self._waiting: tuple[FileGrants, ...] = ()  # what cannot be granted for now
        self._gone = False  # it was not there when it was looked at last
        self._keeping: asyncio.TaskGroup | None = None  # of the sources; None before the run
        self._teller: Source | None = None  # offers nothing and tells operators what is wrong; None where nothing is

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

    def move(self, bus: str) -> None:
        """Has the tools offered at this address from now on; where it is another one, by new processes."""
        self._bus = bus
        for source in self._sources.values():
            if source.wanted is not None:
                source.want(replace(source.wanted, bus=bus))
        self._tell_operators()

    # -- the folder ----------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        async with (
            asyncio.TaskGroup() as self._keeping,
            aclosing(changes(self._folder, lambda: [unavailable(each) for each in self._waiting])) as changed,
        ):
            self._keeping.create_task(self._end_frozen(), name=f"watching over {self._folder}")
            async for _ in changed:
                held = {
                    file: source.wanted.group.grants
                    for source in self._sources.values()
                    if source.wanted is not None
                    for file in source.wanted.group.files
                }
                self._want(*await asyncio.to_thread(self._look, held))

    def _look(self, held: Mapping[str, FileGrants]) -> tuple[dict[str, SourcePlan] | None, list[str]]:
        """Returns what the folder is to offer, by source, and what is wrong with it; None where it cannot be told.

        Args:
            held: what each file is granted now.
        """
        gone, self._gone = self._gone, False
        try:
            files = tool_files(self._folder)
            manifest = load_manifest(self._folder, require=self._require_manifest)
        except FileNotFoundError as problem:
            self._gone = True
            return ({}, [f"{problem}: its tools are gone"]) if gone and held else (None, [str(problem)])
        except (SetupError, OSError) as problem:
            return None, [str(problem)]
        wrong = [f"{stray.file} {stray.reason}" for stray in not_loaded(files, manifest)]
        wrong += doubts(files, manifest, self._environment)
        loaded, manifest = self._available(files, manifest, held, wrong)
        return {group.source: SourcePlan(group, self._print(group)) for group in groups(loaded, manifest)}, wrong

    def _available(
        self, files: list[str], manifest: Manifest, held: Mapping[str, FileGrants], wrong: list[str]
    ) -> tuple[list[str], Manifest]:
        """Returns files and manifest without grants that cannot be had for now, and adds what it says of them.

        A file goes on with what it has, where nothing of that is taken away.
        """
        lacking = {file: why for file in files if manifest.allows(file) and (why := unavailable(manifest.grants(file)))}
        self._waiting = tuple(manifest.grants(file) for file in lacking)
        kept = {file: held[file] for file in lacking if file in held and manifest.grants(file).covers(held[file])}
        for file, why in lacking.items():
            then = "with the grants that it had" if file in kept else "not at all"
            wrong.append(f"{file} is granted to write what it cannot: {why}; until then it is run {then}")
        loaded = [file for file in files if file not in lacking or file in kept]
        return loaded, replace(manifest, files={**manifest.files, **kept})

    def _print(self, group: Group) -> str:
        digest = hashlib.sha256(repr(group).encode(errors="surrogateescape"))
        for name in group.order:
            try:
                text = _code(self._folder / name)
            except OSError as problem:
                text = str(problem.errno).encode()
            digest.update(hashlib.sha256(text).digest())
        return digest.hexdigest()

    def _want(self, wanted: dict[str, SourcePlan] | None, wrong: list[str]) -> None:
        """Tells each source what is wanted of it; those that are gone last, since others may take over their tools."""
        if wanted is None:
            wrong = [
                f"{each}: {'what runs goes on as it is' if self._sources else 'no tool is loaded'}" for each in wrong
            ]
        for text in wrong:
            if text not in self._wrong:
                self._say(text)
        self._wrong = wrong
        if wanted is None:
            self._tell_operators()
            return
        for name, each in wanted.items():
            source = self._sources.get(name)
            if source is None:
                source = self._sources[name] = self._kept(name)
            source.want(replace(each, bus=self._bus, taken=source.wanted.taken if source.wanted is not None else {}))
        gone = [self._sources.pop(name) for name in list(self._sources) if name not in wanted]
        self._settle()
        self._tell_operators()
        for source in gone:
            source.want(None)

    def _kept(self, name: str) -> Source:
        """Returns a new source, whose process is kept running."""
        assert self._keeping is not None  # it is followed
        source = Source(name)
        self._keeping.create_task(self._keep(source), name=f"keeping {name}")
        return source

    def _tell_operators(self) -> None:
        """Has a process without files say, beside what goes on in the log, what is wrong and no other process says."""
        notices = (*self._wrong, *(source.trouble for source in self._sources.values() if source.trouble))
        teller, self._teller = self._teller, None
        if notices:
            self._teller = teller = teller or self._kept(NAME)
        if teller is not None:
            teller.want(SourcePlan(Group(SOURCE, ()), "", self._bus, notices=notices) if notices else None)

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

    async def _keep(self, source: Source) -> None:
        """Sees to it that a source has the process that is wanted, until none is."""
        while (wanted := source.wanted) is not None:
            source.changed.clear()
            running = source.running
            if wanted.bus and (running is None or running.over or running.wanted != wanted):
                process = await self._start(source, wanted, {})
                while left_out := _left_out(process):
                    process = await self._start(source, wanted, process.slow | left_out)
                await self._swap(source, process)
                self._settle()
            else:
                source.failed, source.trouble = False, ""  # what failed has been taken back
                self._tell_operators()
            await source.changed.wait()
        await self._retire(source.running)

    async def _start(self, source: Source, wanted: SourcePlan, slow: dict[str, str]) -> Process:
        """Starts a process and waits until it offers its tools or is over, or something else is wanted.

        Loading has its time. The bus may be away for as long as it likes.
        """
        async with self._turn:
            self._started[source.name] += 1
            process = Process(f"{source.name}#{self._started[source.name]}", wanted, slow)
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

    async def _swap(self, source: Source, process: Process) -> None:
        """Gives a process the place of the one before, if it came to offer its tools."""
        before = source.running
        if not process.attached and source.changed.is_set():
            self._end(process)
            return
        source.failed = not process.attached
        if process.attached:
            source.trouble = ""
        if not process.ready.is_set():
            text = f"has not loaded its files after {START_SECONDS:g} s: it is ended"
            self._say(f"{process.name} {text}")
            self._trouble(process, text)
        if not process.attached:
            self._end(process)
            if before is not None and process.wanted.keeps(before.wanted):
                self._say(f"{process.name} does not take the place of {before.name}, which goes on")
                return
        source.running = process
        self._tell_operators()
        await self._retire(before)

    async def _retire(self, process: Process | None) -> None:
        """Has a process finish its calls and end, behind those that start now: they may take over its tools."""
        async with self._turn:
            if process is not None:
                self._processes.pop(process.name, None)
                self._supervisor.retire(process.name, FINISH_SECONDS)

    def _end(self, process: Process) -> None:
        process.over = True
        process.ready.set()
        self._processes.pop(process.name, None)
        self._supervisor.retire(process.name)

    async def _end_frozen(self) -> None:
        """Kills processes that neither work nor end: stopped ones, and those that hang in native code."""
        loop = asyncio.get_running_loop()
        while True:
            slept = loop.time()
            await asyncio.sleep(BEAT_SECONDS)
            now = loop.time()
            for process in [each for each in self._processes.values() if each.heard is not None]:
                allowed = FROZEN_SECONDS if process.beats else START_SECONDS
                if now - slept > 2 * BEAT_SECONDS:  # we stood still ourselves: a suspended machine, a debugger
                    process.heard = now
                elif process.heard is not None and now - process.heard > allowed:
                    process.heard = None
                    self._say(f"{process.name} has said nothing for {allowed:g} s: it is killed and started again")
                    self._supervisor.kill(process.name)

    def _command(self, process: Process) -> Command:
        return Command(
            (sys.executable, "-m", "toolbus.dropin.group_process"),
            clean_environment(
                process.wanted.group.grants.secrets, {**self._environment, "TOOLBUS_ADDRESS": process.wanted.bus}
            )
            | temporary(process.wanted.group.grants),
            told=lambda report: self._plan(process, report).written(),
            hear=lambda line: self._hear(process, line),
            endless=True,
            cure="correct the file and save it",
        )

    def _token(self, source: str) -> str:
        """Returns the token of one source; who knows it learns nothing of the others'."""
        return hmac.new(self._secret.encode(), source.encode(), "sha256").hexdigest()

    def _plan(self, process: Process, report: int) -> ProcessPlan:
        group = process.wanted.group
        grants = group.grants
        limits: dict[str, int] = {}
        if grants.memory_mb is not None:
            limits["memory_bytes"] = grants.memory_mb * MIB
        if grants.cpu_seconds is not None:
            limits["cpu_seconds_per_call"] = grants.cpu_seconds
        return ProcessPlan(
            folder=str(self._folder),
            source=group.source,
            files=group.order,
            offering=group.files,
            bus=process.wanted.bus,
            token=self._token(group.source),
            report=report,
            write=tuple(map(str, grants.write)),
            read=tuple(map(str, grants.read)),
            connect=tuple((target.host, target.port) for target in grants.connect),
            limits=limits,
            file_seconds=FILE_SECONDS,
            beat_seconds=BEAT_SECONDS,
            grace_seconds=FINISH_SECONDS,
            slow=process.slow,
            taken=dict(process.wanted.taken),
            notices=process.wanted.notices,
        )

    def _happened(self, report: PluginReport) -> None:
        process = self._processes.get(report.plugin)
        over = report.happened in (Happened.DIED, Happened.GIVEN_UP)
        if process is None or not (over and process.refused):  # the death of a process that wanted it says nothing
            self._emit(report)
        if process is None:
            return
        if report.happened is not Happened.OUTPUT:
            process.heard = asyncio.get_running_loop().time() if report.happened is Happened.STARTED else None
            process.beats = False
        if over and (why := limit_hit(process.wanted.group.grants, report.text)):
            self._say(f"{process.name} {why}")
            self._trouble(process, why)
        if over and (left_out := _left_out(process)):
            for file, why in left_out.items():
                self._say(f"{file}: {why}")
            self._end(process)
            source = self._sources.get(process.wanted.group.source)
            if source is not None and source.running is process:  # it was started again, and nobody waits for that
                source.changed.set()
        elif report.happened is Happened.GIVEN_UP:
            process.over = True
            process.ready.set()
            self._trouble(process, report.text)
            self._settle()

    def _hear(self, process: Process, line: str) -> None:
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
        process.heard = asyncio.get_running_loop().time()
        if happened == "loading":
            process.loading = text if text in process.wanted.group.order else ""
        elif happened == "problem":
            self._say(text)
        elif happened == "tool" and file in process.wanted.group.files and NAME_RULE.fullmatch(text):
            if len(process.tools) < _MAX_TOOLS:
                process.tools[text] = file
        elif happened == "loaded":
            process.loading, process.loaded = "", text
        elif happened == "attached":
            process.attached = True
            process.ready.set()
            self._emit(PluginReport(process.name, Happened.OFFERED, process.loaded))
        elif happened == "denied":
            process.attached = True
            process.ready.set()
            self._say(f"{process.name} waits, for the bus does not take its tools: {text[:_MAX_TEXT]}")
        elif happened == "refused" and file in process.wanted.group.files:
            process.refused[file] = text
        elif happened == "alive":
            process.beats = True

    def _trouble(self, process: Process, text: str) -> None:
        """Notes why a source has no process, for operators; the log has it from the supervisor, or gets it here."""
        source = self._sources.get(process.wanted.group.source)
        if source is not None:
            source.trouble = f"{', '.join(process.wanted.group.files)}: {process.name} {text}"
            self._tell_operators()

    def _say(self, text: str) -> None:
        self._emit(PluginReport(NAME, Happened.OUTPUT, text, "stderr"))


def _code(path: Path) -> bytes:
    """Returns what tells whether a file is another one now: all of it, or its beginning and when it was written."""
    if not path.is_file():
        return b""
    with path.open("rb") as opened:
        text, found = opened.read(_MAX_CODE), os.fstat(opened.fileno())
    return text if len(text) < _MAX_CODE else text + repr((found.st_size, found.st_mtime_ns)).encode()


def _left_out(process: Process) -> dict[str, str]:
    """Returns the files without which a process has to be started anew, each with why."""
    return process.refused | ({process.late: _late(process)} if process.late else {})


def _late(process: Process) -> str:
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
