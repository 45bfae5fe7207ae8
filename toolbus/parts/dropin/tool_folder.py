"""Offers the tools of a folder: one process for each group of files, replaced when its files change.

The content of the folder is the plan of each source, and a task for each source carries it out. A new process attaches
beside the old one. Only then the old one is stopped; it finishes its calls on the old code. A new process that fails to
offer its tools is ended, and the old one stays, unless it has lost a file or a grant.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import importlib.util
import os
import re
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolbus.errors import SetupError
from toolbus.parts.dropin.file_loader import SUFFIXES, is_script, is_shared, load_order, not_loaded, tool_files
from toolbus.parts.dropin.group import Group, groups
from toolbus.parts.dropin.group_supervisor import (
    FOLDER_NAME,
    FolderTimings,
    GroupProcess,
    GroupSupervisor,
    Source,
    SourcePlan,
    grant_warnings,
    unavailable,
)
from toolbus.parts.dropin.javascript import EXTRA
from toolbus.parts.dropin.manifest import FILE, NO_GRANTS, SOURCE, FileGrants, Manifest, load_manifest, own_source
from toolbus.processes.supervisor import PluginReport, RestartPolicy
from toolbus.protocol.tool import MIB, is_source

# Reads a folder of tool files: which tools each source has to offer, and the faults of the folder or its manifest.
#
# It starts nothing and waits for nothing. Grants that are not available now, of a path in a folder that does not exist
# for example, are left out; `FolderReader.unavailable_grants` says when it is worth reading again.

_USES_SPINDLE = re.compile(rb"\bspindle\s*(?:\?\.|[.\[])")  # an extension, which has a scope of its own

MAX_CODE_BYTES = 4 * MIB  # of a file that are read for its fingerprint, in the process of the bus


@dataclass(frozen=True, slots=True)
class FolderPlan:
    """The plan of a whole folder.

    Attributes:
        sources: by name; None if the folder cannot be read now, so that what runs stays as it is.
        faults: what is wrong, one sentence each.
    """

    sources: dict[str, SourcePlan] | None
    faults: list[str]


class FolderReader:
    """Reads one folder, each time that it may have changed.

    Args:
        environment: where granted secrets come from.
        require_manifest: a folder without a manifest loads nothing.
        only: the files that are read, with the helpers in their languages; None means all.
        max_code_bytes: how much of a file is read to notice a change.
        missing_engine: returns why JavaScript cannot run, empty if it can; None asks which packages are installed.
    """

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        *,
        require_manifest: bool = False,
        only: Collection[str] | None = None,
        max_code_bytes: int = MAX_CODE_BYTES,
        missing_engine: Callable[[], str] | None = None,
    ) -> None:
        self._folder = folder
        self._environment = environment
        self._require_manifest = require_manifest
        self._only = only
        self._max_code_bytes = max_code_bytes
        self._missing_engine = missing_engine or _missing_engine
        self._waiting: tuple[FileGrants, ...] = ()  # grants that were not available at the last reading
        self._was_missing = False  # the folder did not exist at the last reading

    def unavailable_grants(self) -> list[str]:
        """Returns why grants of the last reading are still not available; another value is a reason to read again."""
        return [unavailable(grants) for grants in self._waiting]

    def read(self, current: Mapping[str, FileGrants]) -> FolderPlan:
        """Reads the folder and its manifest.

        A folder that is missing once may be about to be replaced; missing twice in a row it has no tools.

        Args:
            current: what each file is granted now.
        """
        was_missing, self._was_missing = self._was_missing, False
        try:
            files = tool_files(self._folder)
            manifest = load_manifest(self._folder, require=self._require_manifest)
        except FileNotFoundError as error:
            self._was_missing = True
            if was_missing and current:
                return FolderPlan({}, [f"{error}: its tools are withdrawn"])
            return FolderPlan(None, [str(error)])
        except (SetupError, OSError) as error:
            return FolderPlan(None, [str(error)])
        if self._only is not None:
            files = [file for file in files if self._is_selected(file, self._only)]
            manifest = manifest.of(files)
        faults = [f"{problem.file} {problem.reason}" for problem in not_loaded(files, manifest)]
        faults += grant_warnings(files, manifest, self._environment, self._is_extension)
        files, manifest = self._available(files, manifest, current, faults)
        files, extensions = self._scripts(files, manifest, faults)
        plans = {
            group.source: SourcePlan(group, self._fingerprint(group)) for group in groups(files, manifest, extensions)
        }
        return FolderPlan(plans, faults)

    @staticmethod
    def _is_selected(file: str, only: Collection[str]) -> bool:
        alike = [each for each in only if is_script(each) == is_script(file) and "/" not in each]
        return file in only or (is_shared(file) and bool(alike))

    def _scripts(self, files: list[str], manifest: Manifest, faults: list[str]) -> tuple[list[str], list[str]]:
        """Returns the files that can be loaded, and which are extensions; adds a fault for each script that cannot."""
        scripts = [file for file in files if is_script(file) and manifest.allows(file)]
        reasons = dict.fromkeys(scripts, self._missing_engine() if scripts else "")
        extensions = [file for file in scripts if not is_shared(file) and self._is_extension(file)]
        owners: dict[str, str] = {}  # the file of each source
        for file in (each for each in files if each in extensions or manifest.grants(each) != NO_GRANTS):
            owner = owners.setdefault(source := own_source(file), file)
            if not is_source(source):
                reasons[file] = "its name cannot be that of a source: use letters, digits, '_', '-' and '.'"
            elif owner != file:
                reasons[file] = f"its source would be {source}, as that of {owner}: rename one of them"
        faults += [f"{file} is not loaded: {reason}" for file, reason in reasons.items() if reason]
        return [file for file in files if not reasons.get(file)], extensions

    def _is_extension(self, file: str) -> bool:
        if "/" in file:
            return True
        try:
            return _USES_SPINDLE.search(read_code(self._folder / file, self._max_code_bytes)) is not None
        except OSError:
            return False

    def _available(
        self, files: list[str], manifest: Manifest, current: Mapping[str, FileGrants], faults: list[str]
    ) -> tuple[list[str], Manifest]:
        """Returns files and manifest without grants that are not available now, and adds a fault for each.

        A file keeps its current grants, unless the manifest has taken one of them away.
        """
        reasons = {
            file: reason for file in files if manifest.allows(file) and (reason := unavailable(manifest.grants(file)))
        }
        self._waiting = tuple(manifest.grants(file) for file in reasons)
        unchanged = {
            file: current[file] for file in reasons if file in current and manifest.grants(file).covers(current[file])
        }
        for file, reason in reasons.items():
            meanwhile = "it runs with its previous grants" if file in unchanged else "it is not loaded"
            faults.append(f'{file} has a "write" grant that is not available: {reason}. Until then {meanwhile}')
        loaded = [file for file in files if file not in reasons or file in unchanged]
        return loaded, replace(manifest, files={**manifest.files, **unchanged})

    def _fingerprint(self, group: Group) -> str:
        digest = hashlib.sha256(repr(group).encode(errors="surrogateescape"))
        for name in group.order:
            try:
                code = read_code(self._folder / name, self._max_code_bytes)
            except OSError as error:
                code = str(error.errno).encode()
            digest.update(hashlib.sha256(code).digest())
        return digest.hexdigest()


def _missing_engine() -> str:
    """Returns why JavaScript cannot run; empty if it can."""
    if importlib.util.find_spec("quickjs") is not None:
        return ""
    return f"JavaScript needs QuickJS, which is not installed: {EXTRA}"


def read_code(path: Path, limit: int = MAX_CODE_BYTES) -> bytes:
    """Returns what differs when a file has changed: its content, or its first ``limit`` bytes, size and time."""
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        content, status = file.read(limit), os.fstat(file.fileno())
    return content if len(content) < limit else content + repr((status.st_size, status.st_mtime_ns)).encode()


# The system reports most changes within a fraction of a second. The files are also checked each second: targets of
# links change, and some file systems report nothing. A folder that is deleted, replaced or created again is followed;
# a missing one is reported twice, since it may be about to be replaced.

SETTLE_MS = 60  # without an event before the folder is checked: editors write a file in several steps
POLL_MS = 1000


async def changes(folder: Path, also: Callable[[], object] = lambda: None) -> AsyncGenerator[None]:
    """Yields at once, and then whenever a file of the folder was written, added or removed. Needs watchfiles.

    Args:
        also: called each second too, on another thread; another return value is a change.
    """
    before: object = None
    missing = 0  # how often in a row the folder did not exist; counted to 2
    async with aclosing(_events(folder)) as events:
        async for _ in events:
            state = await asyncio.to_thread(lambda: (_identities(folder), also()))
            missing = min(missing + 1, 2) if state[0] == errno.ENOENT else 0
            if (state, missing) != before:
                before = state, missing
                yield


async def _events(folder: Path) -> AsyncGenerator[None]:
    """Yields when the system reports a change, and each second."""
    import watchfiles

    while True:
        yield
        try:
            watched = os.stat(folder)
            changed = watchfiles.awatch(
                folder,
                watch_filter=_is_relevant,
                debounce=SETTLE_MS * 4,
                step=SETTLE_MS,
                rust_timeout=POLL_MS,
                yield_on_timeout=True,
                recursive=False,
            )
            async with aclosing(changed):
                while os.path.samestat(watched, os.stat(folder)):
                    await anext(changed)
                    yield
        except* (OSError, RuntimeError):  # it does not exist, cannot be watched, or a changed file's name is not UTF-8
            await asyncio.sleep(POLL_MS / 1000)


def _identities(folder: Path) -> object:
    """Returns a value that changes whenever a file is written, also with the same content."""
    try:
        return [(name, _identity(folder / name)) for name in (*tool_files(folder), FILE)]
    except OSError as error:
        return error.errno


def _identity(file: Path) -> tuple[int, ...]:
    """Returns what changes when a file is written or replaced; links are followed."""
    try:
        status = file.stat()
    except OSError as error:
        return (error.errno or 0,)
    return (status.st_dev, status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _is_relevant(change: Any, path: str) -> bool:
    name = os.path.basename(path)
    return name == FILE or (name.endswith(SUFFIXES) and not name.startswith("."))


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
            if plan.bus and (current is None or not current.runs or current.plan != plan):
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
            if before is not None and before.runs and process.plan.keeps(before.plan):
                self.processes.log(f"{process.name} does not replace {before.name}, which keeps running")
                return
        source.process = process
        self._refresh()
        await self.processes.retire(before)
