"""Starts, watches and ends the processes of a folder of tools, one for each group of files.

It writes the reports of the processes into their `GroupProcess`. `ToolFolder` decides which of them run.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from toolbus.dropin.grant_checks import limit_hit, temporary_folder
from toolbus.dropin.group_process import ProcessPlan
from toolbus.dropin.sandbox import clean_environment, granted_secrets
from toolbus.dropin.source_state import GroupProcess, Source, SourcePlan
from toolbus.errors import InvalidRequest, SetupError
from toolbus.processes.child_environment import token_of
from toolbus.processes.supervised_plugin import Command, PluginReport, ReportKind
from toolbus.processes.supervisor import RestartPolicy, Supervisor
from toolbus.text import list_names, parse_json, quote, shorten
from toolbus.tool import MAX_TIMEOUT_SECONDS, MIB
from toolbus.tool import NAME as NAME_RULE

FOLDER_NAME = "tools"  # of the folder itself, in reports
_MAX_BUS_TEXT = 2_000  # characters of the bus's own error text in a report
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
            await _wait_first(process.ready, source.plan_changed, seconds=self.timings.start_seconds)
        if process.offers:
            await _wait_first(process.ready, source.plan_changed)
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
            (sys.executable, "-m", "toolbus.dropin.group_process"),
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
        if died and (limit := limit_hit(process.plan.group.grants, report.text)):
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

    def _faulty_files(self, process: GroupProcess) -> dict[str, str]:
        """Returns the files without which a process has to be started again, each with the reason."""
        if not process.timed_out_file:
            return {}
        line = f" ({process.timed_out_line})" if process.timed_out_line else ""
        reason = (
            f"takes longer than {self.timings.file_seconds:g} s to load: move slow work into the first call of the "
            f"tool{line}"
        )
        return {process.timed_out_file: reason}

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


async def _wait_first(*events: asyncio.Event, seconds: float | None = None) -> None:
    """Waits for the first of several events, or until the time is over."""
    tasks = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
