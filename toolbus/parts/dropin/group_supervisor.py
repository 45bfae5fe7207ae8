"""Starts, watches and ends the processes of a folder of tools, one for each group of files.

It writes the reports of the processes into their `GroupProcess`. `ToolFolder` decides which of them run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from toolbus.common.cancellation import wait_first
from toolbus.common.text import list_names, parse_json, quote, shorten
from toolbus.errors import InvalidRequest, SetupError
from toolbus.parts.dropin.file_loader import is_script
from toolbus.parts.dropin.group import Group
from toolbus.parts.dropin.group_process import SCRIPT_CPU_FACTOR, ProcessPlan
from toolbus.parts.dropin.manifest import FILE, FileGrants, Manifest
from toolbus.parts.dropin.sandbox import clean_environment, granted_secrets
from toolbus.parts.dropin.sandbox.sandbox_grants import CPU_SECONDS, MEMORY_BYTES
from toolbus.processes.child_environment import token_of
from toolbus.processes.supervisor import Command, PluginReport, ReportKind, RestartPolicy, Supervisor
from toolbus.protocol.tool import MAX_TIMEOUT_SECONDS, MIB
from toolbus.protocol.tool import NAME as NAME_RULE


@dataclass(frozen=True, slots=True)
class SourcePlan:
    """The tools that a source has to offer. A different plan needs a different process.

    Attributes:
        fingerprint: of the files and the grants.
        bus: the address where it attaches; empty while it is unknown.
        overridden: names of tools that a later file of another group registers too, each with that file.
        notices: for operators, besides those that the process adds.
    """

    group: Group
    fingerprint: str
    bus: str = ""
    overridden: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()

    def keeps(self, before: SourcePlan) -> bool:
        """Tells whether every file and grant of an earlier plan is in this one too; changed code does not count."""
        same = self.bus == before.bus and self.group.grants.covers(before.group.grants)
        return same and set(self.group.files) >= set(before.group.files)


class Source:
    """One source: its plan, and the process that carries it out."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.plan: SourcePlan | None = None  # None: it is to offer nothing any more
        self.plan_changed = asyncio.Event()
        self.process: GroupProcess | None = None  # whose tools are offered, or should be; None before the first
        self.failed = False  # the newest process could not be started
        self.fault = ""  # why, for operators; empty if nothing is wrong
        self.scope_ends: deque[float] = deque(maxlen=_MAX_SCOPE_ENDS)  # when scripts ended their scope, the newest last

    def set_plan(self, plan: SourcePlan | None) -> None:
        if plan is None or plan != self.plan:
            self.plan = plan
            self.plan_changed.set()

    def registered(self) -> dict[str, str]:
        """Returns the tools that it has and is to keep, each with its file."""
        if self.plan is None or self.process is None or self.process.ended:
            return {}
        files = self.plan.group.files
        return {name: file for name, file in self.process.tools.items() if file in files}


@dataclass(slots=True)
class GroupProcess:
    """One process of a source, restarts included.

    Attributes:
        name: in reports.
        plan: what it was started for.
        skipped: files that it does not load, since they took too long or ended their scope, each with the reason.
        tools: names that its files registered, each with its file, whether or not they are offered.
        loading_file: the file that it loads now; empty if it loads none.
        timed_out_file: the file that took too long to load and so ended the process; empty if none did.
        timed_out_line: where in that file it was; empty if that is not known.
        ended_scope: the file that ended the scope, or again and again the process, while it was loaded, with the
            reason; empty if none did.
        has_scope: False: scripts have ended their scope, so it refuses all calls until another process is there.
        last_report: when it last reported anything, by the loop's time; None while no process runs.
        has_heartbeat: whether it sends heartbeats; it does not while it loads.
        offers: what it offers, as a text for people; empty until its files are loaded.
        ended: nothing runs any more, and will not be restarted.
        ready: it is attached or ended.
    """

    name: str
    source: Source
    plan: SourcePlan
    skipped: dict[str, str]
    tools: dict[str, str] = field(default_factory=dict)
    loading_file: str = ""
    timed_out_file: str = ""
    timed_out_line: str = ""
    ended_scope: dict[str, str] = field(default_factory=dict)
    has_scope: bool = True
    last_report: float | None = None
    has_heartbeat: bool = False
    offers: str = ""
    attached: bool = False
    ended: bool = False
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def runs(self) -> bool:
        """Whether it answers calls, or will once it has been restarted."""
        return self.has_scope and not self.ended


# The manifest itself is valid then. These facts may change without it.
def unavailable(grants: FileGrants) -> str:
    """Returns why a granted path cannot be written now; empty if all can be."""
    for path in grants.write:
        if path.exists():
            if not os.access(path, os.W_OK):
                return f"this user may not write {str(path)!r}: change its permissions"
        elif not path.parent.is_dir():
            return f"{str(path)!r} cannot be created: the folder {str(path.parent)!r} does not exist: create it"
        elif not os.access(path.parent, os.W_OK):
            return (
                f"{str(path)!r} cannot be created: this user may not write {str(path.parent)!r}: change its permissions"
            )
    return ""


def grant_warnings(
    files: Sequence[str], manifest: Manifest, environment: Mapping[str, str], is_extension: Callable[[str], bool]
) -> list[str]:
    """Returns warnings about grants without effect: for missing files, or of secrets and paths that do not exist."""
    warnings = []
    for file, grants in manifest.files.items():
        if file not in files:
            warnings.append(f'{file} has an entry in {FILE} under "files", but is not in the folder: check the name')
            continue
        unused: tuple[str, ...] = ()
        if is_script(file):
            unused = ("read",) if is_extension(file) else ("write", "read", "connect", "secrets")
        if used := [key for key in unused if getattr(grants, key)]:
            others = [key for key in ("write", "connect", "secrets") if key not in unused]
            warnings.append(
                f"{file} is granted {', '.join(used)}, which JavaScript cannot use: only "
                f"{list_names([*others, 'memory_mb', 'cpu_seconds'])} have an effect. Write the tool in Python if it "
                "needs them"
            )
        warnings += [
            f"{file} is granted the secret {name}, which is not set: set it for the bus or for `toolbus run`"
            for name in grants.secrets
            if name not in environment
        ]
        warnings += [
            f"{file} is granted to read {str(path)!r}, which does not exist: create it, and save the file again"
            for path in grants.read
            if not _exists(path)
        ]
    return warnings


def temporary_folder(grants: FileGrants) -> dict[str, str]:
    """Returns the variable that makes `tempfile` use the first folder that may be written."""
    folder = next((path for path in grants.write if path.is_dir()), None)
    return {} if folder is None else {"TMPDIR": str(folder)}


def limit_hit(group: Group, exit_text: str) -> str:
    """Returns which limit ended a process, as far as its exit shows; empty if none did."""
    grants = group.grants
    if "SIGXCPU" in exit_text:
        seconds = CPU_SECONDS if grants.cpu_seconds is None else grants.cpu_seconds
        limit, user = f"its limit cpu_seconds = {seconds}", "a call"
        if any(map(is_script, group.files)):  # each of their calls has its limit in the engine
            limit, user = f"{SCRIPT_CPU_FACTOR} times {limit}", "its calls together"
        return (
            f"was ended by {limit}: {user}, or a minute without one, took more processor "
            "time. Make its tools do less at once, or grant more in _manifest.json"
        )
    if "SIGABRT" in exit_text or "SIGSEGV" in exit_text:
        memory = MEMORY_BYTES // MIB if grants.memory_mb is None else grants.memory_mb
        return f"may have hit its limit memory_mb = {memory}: make its tools hold less at once, or grant more"
    return ""


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a folder on the way cannot be read
        return False


FOLDER_NAME = "tools"  # of the folder itself, in reports
_MAX_BUS_TEXT = 2_000  # characters of the bus's own error text in a report
_MAX_SCOPE_ENDS = 8  # of a source that count towards the next backoff
_MAX_TOOLS = 10_000  # names that are stored for one process: its tools can write into its reports
_FILE_TIMEOUT = "Timeout ("  # how faulthandler begins the traceback of the process that it ends


@dataclass(frozen=True, slots=True)
class FolderTimings:
    """How long the processes of a folder may take.

    Attributes:
        file_seconds: for one file to load. It is skipped then, and the other files of its group are offered.
        start_seconds: for a process to load all its files; imports may be slow.
        finish_seconds: for the calls in flight of a process that was replaced; above the longest timeout of a call.
        heartbeat_seconds: between two heartbeats of a process.
        frozen_seconds: without a heartbeat, before a process is killed. The bus ends its calls after 6 s, and its
            session after 22 s.
    """

    file_seconds: float = 20.0
    start_seconds: float = 60.0
    finish_seconds: float = MAX_TIMEOUT_SECONDS + 5.0
    heartbeat_seconds: float = 5.0
    frozen_seconds: float = 25.0


class GroupSupervisor:
    """Runs the processes of one folder. Belongs to the loop that runs it.

    Args:
        environment: the source of their variables and secrets.
        emit: takes what happens to the processes and to the folder as a whole.
        changed: called when a process has been given up or has a new fault.
        restarts: when a process that died is restarted.
        stop_seconds: how long a process gets to finish its calls when all are stopped.
        timings: may be replaced; processes that start later follow the new ones.
    """

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        emit: Callable[[PluginReport], None],
        changed: Callable[[], None],
        *,
        restarts: RestartPolicy | None,
        stop_seconds: float,
        timings: FolderTimings,
    ) -> None:
        self.timings = timings
        self._folder = folder
        self._environment = environment
        self._emit = emit
        self._changed = changed
        self._restarts = restarts or RestartPolicy()
        self._supervisor = Supervisor(self._take_report, restarts=restarts, stop_seconds=stop_seconds, stays=True)
        # No other program can attach as these sources while they run, and no source as another one: see `token_of`.
        self._secret = environment.get("TOOLBUS_TOKEN") or secrets.token_hex(16)
        self._processes: dict[str, GroupProcess] = {}  # those that run or start, by name
        self._started: Counter[str] = Counter()  # processes so far, of each source
        self._turn = asyncio.Lock()  # fair: processes start one by one, and end after those that replace them

    def __repr__(self) -> str:
        return f"<GroupSupervisor {self._folder} processes={len(self._processes)}>"

    async def run(self) -> None:
        """Runs the processes that are started, until `stop`."""
        await self._supervisor.run()

    def stop(self) -> None:
        """Stops every process gracefully; the second call kills them."""
        self._supervisor.stop()

    async def start(self, source: Source, plan: SourcePlan) -> GroupProcess:
        """Starts a process and waits until it offers its tools, has ended, or the source gets another plan.

        A process that fails because of single files is started again without them. Loading has a time limit. The bus
        may be away for any length of time.
        """
        process = await self._start(source, plan, {})
        while faulty := self._faulty_files(process):
            process = await self._start(source, plan, process.skipped | faulty)
        return process

    async def _start(self, source: Source, plan: SourcePlan, skipped: dict[str, str]) -> GroupProcess:
        async with self._turn:
            self._started[source.name] += 1
            process = GroupProcess(f"{source.name}#{self._started[source.name]}", source, plan, skipped)
            if source.plan_changed.is_set():
                return process
            self._processes[process.name] = process
            try:
                self._supervisor.add(process.name, self._command(process))
            except SetupError as error:
                self.log(f"{', '.join(plan.group.files)}: {error}")
                self.end(process)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.timings.start_seconds):
                    await wait_first(process.ready.wait(), source.plan_changed.wait())
        if process.offers:
            await wait_first(process.ready.wait(), source.plan_changed.wait())
        return process

    def refuse_slow(self, process: GroupProcess) -> None:
        """Reports that a process has not loaded its files in time."""
        text = f"did not load its files within {self.timings.start_seconds:g} s, so it is ended"
        self.log(f"{process.name} {text}")
        self._set_fault(process, text)

    async def retire(self, process: GroupProcess | None) -> None:
        """Lets a process finish its calls and end, after those that start now: they may take over its tools."""
        async with self._turn:
            if process is not None:
                self._processes.pop(process.name, None)
                self._supervisor.remove(process.name, self.timings.finish_seconds)

    def end(self, process: GroupProcess) -> None:
        """Ends a process that offers nothing."""
        process.ended = True
        process.ready.set()
        self._processes.pop(process.name, None)
        self._supervisor.remove(process.name)

    def restart(self, group: str) -> None:
        """Has the processes of a group end and start anew.

        Args:
            group: its name, as `group_report` has it.

        Raises:
            InvalidRequest: no process runs for that group.
        """
        names = [name for name in self._processes if _group_of(name) == group]
        for name in names:
            self._supervisor.restart(name)
        if not names:
            shown = list_names(dict.fromkeys(map(_group_of, self._processes)))
            raise InvalidRequest(f"no process runs for {quote(group)} here; some do for: {shown}")

    async def kill_frozen(self) -> None:
        """Kills processes that send no heartbeat, to be restarted: stopped ones, and those that hang in native code."""
        loop = asyncio.get_running_loop()
        while True:
            timings, last = self.timings, loop.time()
            await asyncio.sleep(timings.heartbeat_seconds)
            now = loop.time()
            for process in [each for each in self._processes.values() if each.last_report is not None]:
                allowed = timings.frozen_seconds if process.has_heartbeat else timings.start_seconds
                if now - last > 2 * timings.heartbeat_seconds:  # this process itself stood still: a suspended machine
                    process.last_report = now
                elif process.last_report is not None and now - process.last_report > allowed:
                    process.last_report = None
                    self.log(f"{process.name} has sent no heartbeat for {allowed:g} s: it is killed and restarted")
                    self._supervisor.kill(process.name)

    def log(self, text: str) -> None:
        """Reports a problem of the folder as a whole."""
        self._emit(PluginReport(FOLDER_NAME, ReportKind.OUTPUT, text, "stderr"))

    # -- what a process is started with ----------------------------------------------------------------------------

    def _command(self, process: GroupProcess) -> Command:
        group = process.plan.group
        variables = {**self._environment, "TOOLBUS_ADDRESS": process.plan.bus}
        secrets = granted_secrets(group.grants.secrets, variables)
        return Command(
            (sys.executable, "-m", "toolbus.parts.dropin.group_process"),
            clean_environment(variables) | temporary_folder(group.grants),
            stdin=lambda report: self._process_plan(process, report, secrets).as_json(),
            on_report=lambda line: self._take_line(process, line),
            runs_forever=True,
            fix="correct the file and save it",
        )

    def _process_plan(self, process: GroupProcess, report: int, secrets: Mapping[str, str]) -> ProcessPlan:
        plan, grants = process.plan, process.plan.group.grants
        limits: dict[str, int] = {}
        if grants.memory_mb is not None:
            limits["memory_bytes"] = grants.memory_mb * MIB
        if grants.cpu_seconds is not None:
            limits["cpu_seconds_per_call"] = grants.cpu_seconds
        return ProcessPlan(
            folder=str(self._folder),
            source=plan.group.source,
            files=plan.group.order,
            offering=plan.group.files,
            bus=plan.bus,
            token=token_of(self._secret, plan.group.source),
            secrets=dict(secrets),
            report=report,
            write=tuple(map(str, grants.write)),
            read=tuple(map(str, grants.read)),
            connect=tuple((target.host, target.port) for target in grants.connect),
            limits=limits,
            file_seconds=self.timings.file_seconds,
            heartbeat_seconds=self.timings.heartbeat_seconds,
            grace_seconds=self.timings.finish_seconds,
            skipped=process.skipped,
            overridden=dict(plan.overridden),
            notices=plan.notices,
            is_extension=plan.group.is_extension,
        )

    # -- what the processes report ---------------------------------------------------------------------------------

    def _take_report(self, report: PluginReport) -> None:
        """Takes what the supervisor reports of a process."""
        process = self._processes.get(report.plugin)
        died = report.kind in (ReportKind.DIED, ReportKind.GIVEN_UP)
        self._emit(report)
        if process is None:
            return
        if report.kind is not ReportKind.OUTPUT:
            process.last_report = asyncio.get_running_loop().time() if report.kind is ReportKind.STARTED else None
            process.has_heartbeat = False
        if report.kind is ReportKind.STARTED:
            process.loading_file = ""
        elif report.kind is ReportKind.GIVEN_UP and self._is_one_of_several(process, process.loading_file):
            process.ended_scope = {process.loading_file: f"is not loaded, since {process.name} {report.text}"}
        if died and (limit := limit_hit(process.plan.group, report.text)):
            self.log(f"{process.name} {limit}")
            self._set_fault(process, limit)
        if died and (faulty := self._faulty_files(process)):
            for file, reason in faulty.items():
                self.log(f"{file}: {reason}")
            self.end(process)
            if process.source.process is process:  # it had been restarted, so its source does not wait for it
                process.source.plan_changed.set()
        elif report.kind is ReportKind.GIVEN_UP:
            process.ended = True
            process.ready.set()
            self._set_fault(process, report.text)

    def _take_line(self, process: GroupProcess, line: str) -> None:
        """Takes a line that a process reports. Its tools can write there too, so it may be anything."""
        if process.loading_file and line.startswith(_FILE_TIMEOUT):
            process.timed_out_file, process.loading_file = process.loading_file, ""
        elif process.timed_out_file and not process.timed_out_line:
            match = re.search(rf'/{re.escape(process.timed_out_file)}", (line \d+)', line)
            process.timed_out_line = match[1] if match else ""
        try:
            record = parse_json(line)
            event, text, file = record["event"], str(record["text"]), record.get("file")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return
        process.last_report = asyncio.get_running_loop().time()
        group = process.plan.group
        match event:
            case "loading":
                process.loading_file = text if text in group.order else ""
            case "problem":
                self.log(text)
            case "tool" if file in group.files and NAME_RULE.fullmatch(text) and len(process.tools) < _MAX_TOOLS:
                process.tools[text] = file
            case "loaded":
                process.loading_file, process.offers = "", text
            case "attached":
                process.attached = True
                process.ready.set()
                self._emit(PluginReport(process.name, ReportKind.OFFERED, process.offers))
            case "denied":
                process.attached = True
                process.ready.set()
                reason = shorten(text, _MAX_BUS_TEXT)
                self.log(f"{process.name} waits, since the bus does not accept its tools: {reason}")
            case "heartbeat":
                process.has_heartbeat = True
            case "scope_ended" if process.loading_file:
                reason = f"is not loaded, since {shorten(text, _MAX_BUS_TEXT)}"
                process.ended_scope = {process.loading_file: reason}
            case "scope_ended" if process.name in self._processes and process.has_scope:
                process.has_scope = False
                loop, ends = asyncio.get_running_loop(), process.source.scope_ends
                ends.append(loop.time())
                recent = sum(ends[-1] - end < self._restarts.window_seconds for end in ends) - 1
                loop.call_later(recent and self._restarts.backoff(recent), process.source.plan_changed.set)

    def _faulty_files(self, process: GroupProcess) -> dict[str, str]:
        """Returns the files without which a process has to be started again, each with the reason."""
        if not process.timed_out_file:
            return process.ended_scope
        line = f" ({process.timed_out_line})" if process.timed_out_line else ""
        reason = (
            f"takes longer than {self.timings.file_seconds:g} s to load: move slow work into the first call of the "
            f"tool{line}"
        )
        return {process.timed_out_file: reason}

    def _is_one_of_several(self, process: GroupProcess, file: str) -> bool:
        """Tells whether a process can do without a file, and no earlier one still offers its tools."""
        others = set(process.plan.group.files) - {file, *process.skipped}
        return bool(file and others) and process.source.process in (None, process)

    def _set_fault(self, process: GroupProcess, text: str) -> None:
        """Notes for operators why a source has no process; the log has it already."""
        process.source.fault = f"{', '.join(process.plan.group.files)}: {process.name} {text}"
        self._changed()


def group_report(report: PluginReport) -> PluginReport:
    """Returns a report of a process as one of its group: a change of a file replaces the process, not the group."""
    return replace(report, plugin=_group_of(report.plugin))


def refuse_stop(group: str) -> NoReturn:
    """Refuses to stop a group: what a folder holds is offered."""
    raise InvalidRequest(f"{quote(group)} is a group of drop-in tools: remove its file to stop it")


def _group_of(process: str) -> str:
    return process.rpartition("#")[0] or process
