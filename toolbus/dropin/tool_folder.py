"""Offers the tools of a folder: one process for each group of files, replaced when its files change.

The content of the folder is the plan of each source, and a task for each source carries it out. A new process attaches
beside the old one. Only then the old one is stopped; it finishes its calls on the old code. A new process that fails to
offer its tools is ended, and the old one stays, unless it has lost a file or a grant.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

from toolbus.dropin.file_grants import SOURCE
from toolbus.dropin.file_loader import load_order
from toolbus.dropin.folder_reader import FolderPlan, FolderReader
from toolbus.dropin.folder_watcher import changes
from toolbus.dropin.group import Group
from toolbus.dropin.group_supervisor import FOLDER_NAME, FolderTimings, GroupSupervisor
from toolbus.dropin.source_state import GroupProcess, Source, SourcePlan
from toolbus.errors import SetupError
from toolbus.processes.supervised_plugin import PluginReport
from toolbus.processes.supervisor import RestartPolicy


class ToolFolder:
    """Offers the tools of a folder and follows its changes. Belongs to the loop that runs it.

    Args:
        bus: the bus's address for drop-in tools, see `Bus.dropin_address`; empty if `move` will give it. Processes can
            connect to nothing else.
        emit: takes what happens to the processes and to the folder as a whole.
        environment: the source of their variables; None means this process's. A TOOLBUS_TOKEN in it binds the sources
            to programs that know it, each by a token of its own made from it; else they are bound to this object.
        require_manifest: a folder without a manifest loads nothing.
        only: the files that are offered, with their helpers; None means all.
        restarts: when a process that died is restarted; None means the supervisor's default.
        stop_seconds: how long a process gets to finish its calls when all are stopped.

    Attributes:
        processes: starts and ends the processes.

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
        only: Collection[str] | None = None,
        restarts: RestartPolicy | None = None,
        stop_seconds: float = 12.0,
        timings: FolderTimings | None = None,
    ) -> None:
        if importlib.util.find_spec("watchfiles") is None:
            raise SetupError(
                "a folder of tools needs watchfiles, which is not installed: pip install 'toolbus[server]'"
            )
        environment = dict(os.environ if environment is None else environment)
        self._folder = folder.absolute()
        self._bus = bus
        self._reader = FolderReader(self._folder, environment, require_manifest=require_manifest, only=only)
        self.processes = GroupSupervisor(
            self._folder,
            environment,
            emit,
            self._refresh,
            restarts=restarts,
            stop_seconds=stop_seconds,
            timings=timings or FolderTimings(),
        )
        self._sources: dict[str, Source] = {}  # by name
        self._faults: list[str] = []  # what is wrong with the folder as a whole
        self._tasks: asyncio.TaskGroup | None = None  # one for each source; None before the run
        self._notice_source: Source | None = None  # offers nothing and carries notices; None without notices

    def __repr__(self) -> str:
        return f"<ToolFolder {self._folder} sources={len(self._sources)}>"

    async def run(self) -> bool:
        """Offers the tools and follows the folder until `stop`. Returns whether every process could be started."""
        following = asyncio.create_task(self._follow(), name=f"following {self._folder}")
        following.add_done_callback(lambda task: self.stop())
        try:
            await self.processes.run()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            if not following.cancelled():
                following.result()
        return not any(
            source.failed or (source.process is not None and source.process.ended) for source in self._sources.values()
        )

    def stop(self) -> None:
        """Stops every process gracefully; the second call kills them."""
        self.processes.stop()

    def move(self, bus: str) -> None:
        """Has the tools offered at this address from now on; if it has changed, by new processes."""
        self._bus = bus
        for source in self._sources.values():
            if source.plan is not None:
                source.set_plan(replace(source.plan, bus=bus))
        self._refresh()

    # -- the plan of each source -------------------------------------------------------------------------------

    async def _follow(self) -> None:
        async with (
            asyncio.TaskGroup() as self._tasks,
            aclosing(changes(self._folder, self._reader.unavailable_grants)) as folder_changes,
        ):
            self._tasks.create_task(self.processes.kill_frozen(), name=f"heartbeats of {self._folder}")
            async for _ in folder_changes:
                current = {
                    file: source.plan.group.grants
                    for source in self._sources.values()
                    if source.plan is not None
                    for file in source.plan.group.files
                }
                self._apply(await asyncio.to_thread(self._reader.read, current))

    def _apply(self, plan: FolderPlan) -> None:
        """Gives each source its plan; removed sources come last, since others may take over their tools."""
        faults = plan.faults
        if plan.sources is None:
            effect = "running tools stay as they are" if self._sources else "no tool is loaded"
            faults = [f"{fault}: {effect}" for fault in faults]
        for fault in faults:
            if fault not in self._faults:
                self.processes.log(fault)
        self._faults = faults
        removed: list[Source] = []
        if plan.sources is not None:
            for name, source_plan in plan.sources.items():
                source = self._sources.get(name)
                if source is None:
                    source = self._sources[name] = self._new_source(name)
                overridden = source.plan.overridden if source.plan is not None else {}
                source.set_plan(replace(source_plan, bus=self._bus, overridden=overridden))
            removed = [self._sources.pop(name) for name in list(self._sources) if name not in plan.sources]
        self._refresh()
        for source in removed:
            source.set_plan(None)

    def _new_source(self, name: str) -> Source:
        """Returns a new source, whose plan is carried out from now on."""
        assert self._tasks is not None  # the folder is followed
        source = Source(name)
        self._tasks.create_task(self._carry_out(source), name=f"source {name}")
        return source

    def _refresh(self) -> None:
        """Updates what depends on several sources: which of them offers each name, and the notices for operators."""
        self._resolve_duplicates()
        self._publish_notices()

    def _resolve_duplicates(self) -> None:
        """Has each source leave out the tools that a later file registers too, as within one process.

        By itself the bus gives a name to the source that attached last, which changes with every restart.
        """
        registered = {source: source.registered() for source in self._sources.values()}
        winners: dict[str, str] = {}  # the last file that registers each name
        for tools in registered.values():
            for name, file in tools.items():
                winners[name] = max(file, winners.get(name, file), key=load_order)
        for source, tools in registered.items():
            if source.plan is not None and tools:
                overridden = {name: winners[name] for name, file in tools.items() if winners[name] != file}
                source.set_plan(replace(source.plan, overridden=overridden))

    def _publish_notices(self) -> None:
        """Lets a process without files publish the faults that no other process can report; the log has them too."""
        notices = (*self._faults, *(source.fault for source in self._sources.values() if source.fault))
        source, self._notice_source = self._notice_source, None
        if notices:
            self._notice_source = source = source or self._new_source(FOLDER_NAME)
        if source is not None:
            source.set_plan(SourcePlan(Group(SOURCE, ()), "", self._bus, notices=notices) if notices else None)

    # -- the process of a source -----------------------------------------------------------------------------------

    async def _carry_out(self, source: Source) -> None:
        """Keeps a source at the process that its plan needs, until it has no plan any more."""
        while (plan := source.plan) is not None:
            source.plan_changed.clear()
            current = source.process
            if plan.bus and (current is None or current.ended or current.plan != plan):
                await self._replace_process(source, await self.processes.start(source, plan))
            else:
                source.failed, source.fault = False, ""  # the change that failed was undone
            self._refresh()
            await source.plan_changed.wait()
        await self.processes.retire(source.process)

    async def _replace_process(self, source: Source, process: GroupProcess) -> None:
        """Gives a new process the place of the current one, if it could attach."""
        before = source.process
        if not process.attached and source.plan_changed.is_set():
            self.processes.end(process)
            return
        source.failed = not process.attached
        if process.attached:
            source.fault = ""
        if not process.ready.is_set():
            self.processes.refuse_slow(process)
        if not process.attached:
            self.processes.end(process)
            if before is not None and process.plan.keeps(before.plan):
                self.processes.log(f"{process.name} does not replace {before.name}, which keeps running")
                return
        source.process = process
        self._refresh()
        await self.processes.retire(before)
