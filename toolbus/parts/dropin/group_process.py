"""Runs one group of drop-in files, for a `ToolFolder`: ``python -m toolbus.parts.dropin.group_process``.

The files of a group are all Python or all JavaScript; those in JavaScript have one scope, in `ScriptGroup`.

It reads its `ProcessPlan` from standard input, enters the sandbox, loads the files and offers their tools until it is
stopped. It reports on a pipe, one line of JSON for each event: ``loading`` with the name of each file, a
``problem`` each, a ``tool`` each with its file, then ``loaded`` with what it offers and the protection, then
``attached``, and ``scope_ended`` if scripts ended their scope. If a file takes too long to load, the last lines are not
JSON: `faulthandler` ends the process and prints where it was, since the file may hang in code that runs no Python. The
token of its source is in the plan only.

Tools that the bus refuses are a ``problem`` each, and the others are offered. If it refuses all of them, or the source
lacks the permission to offer any, the process reports ``denied`` and stays; then ``attached`` follows once the
permission is granted. While it is attached it sends a ``heartbeat`` every few seconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from toolbus.errors import NotPermitted, PeerLost, RequestError, SetupError
from toolbus.parts.dropin.manifest import EXTENSION, FileGrants, Target
from toolbus.parts.dropin.sandbox import Protection, SandboxGrants, apply, run_beside_main
from toolbus.processes.plugin_process import end_with
from toolbus.processes.program_starter import CANNOT_START, SUPERVISOR_VARIABLE

if TYPE_CHECKING:
    from toolbus.functions.tool_spec import ToolSpec
    from toolbus.parts.dropin.file_loader import Loaded
    from toolbus.parts.dropin.script_group import ScriptGroup
    from toolbus.sdk import Plugin

_MAX_NAMES = 20  # of tools in a report: it is a line that fits into a pipe
_HEARTBEAT = b'{"event": "heartbeat", "text": ""}\n'
SCRIPT_CPU_FACTOR = 10  # the kernel's limit on processor time, for scripts, as a multiple of their own
_RETRY_SECONDS = 10.0  # between attempts while the source is bound to another token, for a grace period for example


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """The task of a process.

    Attributes:
        folder: of the files.
        source: of the tools, on the bus.
        files: what is loaded, in order.
        offering: those of them whose tools are offered.
        bus: its address for drop-in tools.
        token: binds this source and no other.
        secrets: variables that its tools may read; here, since other processes can read its first environment.
        report: the descriptor of the pipe that it reports on.
        write, read: absolute paths that it may change, or read besides its files.
        connect: hosts and ports that it may connect to.
        limits: memory_bytes, cpu_seconds_per_call and file_bytes; the default for those that are missing.
        file_seconds: how long one file may take to load.
        heartbeat_seconds: between two heartbeats.
        grace_seconds: how long calls in flight get when the process is stopped.
        notices: further notices for operators.
        skipped: files that are not loaded, since they took too long before, each with the reason.
        overridden: names of tools that a file of another group offers, each with that file; they are not offered here.
        is_extension: whether the only file is an extension in JavaScript.
    """

    folder: str
    source: str
    files: tuple[str, ...]
    offering: tuple[str, ...]
    bus: str
    token: str = field(repr=False)
    report: int
    write: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    connect: tuple[tuple[str, int], ...] = ()
    limits: dict[str, int] | None = None
    file_seconds: float = 10.0
    heartbeat_seconds: float = 5.0
    notices: tuple[str, ...] = ()
    grace_seconds: float = 10.0
    skipped: dict[str, str] = field(default_factory=dict)
    overridden: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    is_extension: bool = False

    @property
    def readable(self) -> list[Path]:
        """What the process reads of the folder: its files, and what describes an extension."""
        folder = Path(self.folder)
        described = [folder / file.partition("/")[0] / EXTENSION for file in self.files if "/" in file]
        return [*(folder / file for file in self.files), *(path for path in described if path.is_file())]

    @property
    def is_scripts(self) -> bool:
        """Whether the files are JavaScript."""
        return any(file.endswith(".js") for file in self.files)

    def as_json(self) -> bytes:
        """Returns the plan as the process reads it."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: str) -> ProcessPlan:
        """Reads what `as_json` wrote."""
        record = json.loads(text)
        lists = ("files", "offering", "write", "read", "notices")
        return cls(
            **record
            | {name: tuple(record[name]) for name in lists}
            | {"connect": tuple((host, port) for host, port in record["connect"])}
        )

    def grants(self) -> SandboxGrants:
        """Returns what the sandbox allows; of scripts, which can use no other grant, only the limits."""
        grants = SandboxGrants(
            tuple(map(Path, self.write)), tuple(map(Path, self.read)), self.connect, **(self.limits or {})
        )
        return replace(grants, write=(), read=(), connect=()) if self.is_scripts and not self.is_extension else grants


def main() -> NoReturn:
    """Runs the process to its end."""
    supervisor = os.environ.pop(SUPERVISOR_VARIABLE, "")
    if supervisor:
        end_with(int(supervisor))
    plan = ProcessPlan.from_json(sys.stdin.read())
    os.environ.update(plan.secrets)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("toolbus.dropin.file_loader").setLevel(logging.ERROR)  # the process reports its warnings
    folder = Path(plan.folder)
    with contextlib.suppress(OSError):  # the folder was deleted, and its files with it
        os.chdir(folder)  # relative paths of the manifest begin here too
    try:
        protection = apply(plan.grants(), bus=plan.bus, readable=plan.readable, keep_fds=(plan.report,))
    except SetupError as error:
        print(error, file=sys.stderr)
        sys.exit(CANNOT_START)
    runner = _GroupRunner(plan, protection)
    run_beside_main(runner.work, runner.stop)


class _GroupRunner:
    """Loads the files and offers their tools, in the sandbox and beside the main thread."""

    def __init__(self, plan: ProcessPlan, protection: Protection) -> None:
        self._plan = plan
        self._protection = protection
        self._plugin: Plugin | None = None  # None while the files load
        self._offered: list[ToolSpec] = []  # the tools of the plugin
        self._scripts: ScriptGroup | None = None  # the files, if they are JavaScript

    def stop(self, name: str) -> None:
        """Shuts the plugin down gracefully; before it has attached, there is nothing to finish."""
        if self._plugin is None or not self._plugin.leave(name, self._plan.grace_seconds):
            os._exit(0)

    def work(self) -> int:
        """Loads the files and offers their tools; returns the exit code."""
        try:
            self._plugin = self._make_plugin(self._load())
            threading.Thread(target=self._protection.cpu.watch, name="toolbus processor time", daemon=True).start()
            threading.Thread(target=self._send_heartbeats, name="toolbus heartbeat", daemon=True).start()
            self._plugin.run(self._attached, grace_seconds=self._plan.grace_seconds)
        except NotPermitted as error:
            print(f"{error} (it tries again in {_RETRY_SECONDS:g} s)", file=sys.stderr)
            time.sleep(_RETRY_SECONDS)
            return 1
        except (SetupError, RequestError, PeerLost) as error:  # PeerLost: an operator drained the source
            print(error, file=sys.stderr)
            return CANNOT_START
        return 0

    def _load(self) -> Loaded:
        from toolbus.parts.dropin.file_loader import FileProblem, load_files

        plan = self._plan
        files = [file for file in plan.files if file not in plan.skipped]
        if plan.is_scripts:
            self._scripts = self._make_scripts(files)
            loaded = self._scripts.load(offering=plan.offering, guard=self._time_limit)
        else:
            loaded = load_files(Path(plan.folder), files, offering=plan.offering, guard=self._time_limit)
        duplicates = [
            FileProblem(
                json.loads(spec.tool.metadata_json)["file"],
                f'tool "{spec.tool.name}" registered twice (later wins): again in {plan.overridden[spec.tool.name]}. '
                "Rename one of them",
                skipped=False,
            )
            for spec in loaded.specs
            if spec.tool.name in plan.overridden
        ]
        skipped = [FileProblem(file, reason) for file, reason in plan.skipped.items()]
        return replace(loaded, problems=(*loaded.problems, *skipped, *duplicates))

    def _make_scripts(self, files: Sequence[str]) -> ScriptGroup:
        from toolbus.parts.dropin.javascript import EngineLimits
        from toolbus.parts.dropin.script_group import ScriptGroup

        plan, grants = self._plan, self._plan.grants()
        # Half of the memory and a third of the time: the rest is for texts on their way, and for what cannot be stopped
        # inside of the engine, which ends the process.
        seconds = grants.cpu_seconds_per_call / 3
        limits = EngineLimits(grants.memory_bytes // 2, seconds, seconds, grants.cpu_seconds_per_call)
        # The engine holds the limit of a call, and says so; the kernel's would end all calls.
        self._protection.cpu.seconds *= SCRIPT_CPU_FACTOR
        return ScriptGroup(
            Path(plan.folder),
            files,
            is_extension=plan.is_extension,
            grants=FileGrants(
                write=grants.write,
                connect=tuple(Target(host, port) for host, port in grants.connect),
                secrets=tuple(plan.secrets),
            ),
            limits=limits,
            ended=self._scripts_ended,
        )

    def _scripts_ended(self, reason: str) -> None:
        """Reports that another process has to take the place of this one; until then it refuses calls as not begun.

        It cannot end by itself: it is not known of calls that were sent to a process that ends whether they ran.
        """
        self._report("scope_ended", reason)
        if self._plugin is None:  # a file that is loaded ended it
            os._exit(1)
        print(f"{', '.join(self._plan.offering)}: {reason}; they are started again", file=sys.stderr)

    def _make_plugin(self, loaded: Loaded) -> Plugin:
        from toolbus.sdk import Plugin

        plan, protection = self._plan, self._protection.as_text()
        for problem in loaded.problems:
            if problem.file not in plan.skipped:  # those were reported before
                self._report("problem", f"{problem.file}: {problem.reason}")
        for spec in () if plan.is_extension else loaded.specs:  # an extension's tools have its name before theirs
            self._report("tool", spec.tool.name, file=json.loads(spec.tool.metadata_json)["file"])
        offered = [spec for spec in loaded.specs if spec.tool.name not in plan.overridden]
        self._report("loaded", f"offers {_shown_names(offered)} ({protection})")
        notices = [f"protected by {protection}"] if plan.files else []
        notices += [*plan.notices, *(f"{each.file}: {each.reason}" for each in loaded.problems)]
        plugin = Plugin(plan.source, address=plan.bus, token=plan.token, notices=notices, qualified=plan.is_extension)
        for spec in offered:
            plugin.add_tool(_with_cpu_limit(spec, self._protection))
        if self._scripts is not None:
            self._scripts.attach(plugin, lambda spec: _with_cpu_limit(spec, self._protection))
        self._offered = offered
        denied = f"source {plan.source!r} may not offer tools (an operator can allow it: toolbus grant {plan.source})"
        plugin.on_refused(self._refused)
        plugin.on_permission_denied(lambda permission, operation: self._report("denied", denied))
        plugin.on_permission_changed(lambda name, granted, every: self._report("attached", "") if granted else None)
        return plugin

    def _attached(self) -> None:
        plugin = self._plugin
        if plugin is None:
            return
        if not self._offered or len(plugin.refused) < len(self._offered):
            self._report("attached", "")
        elif plugin.permissions.has("tools"):  # else that is reported already
            self._report("denied", "; ".join(dict.fromkeys(each.error for each in plugin.refused)))

    def _refused(self, names: Sequence[str], reason: str) -> None:
        """Reports tools that the bus refused, with the file that each is in; the others are offered."""
        files = {spec.tool.name: json.loads(spec.tool.metadata_json)["file"] for spec in self._offered}
        for file in dict.fromkeys(files[name] for name in names if name in files):
            self._report("problem", f"{file}: the bus refuses its tool: {reason}")

    def _send_heartbeats(
        self, pause: Callable[[float], object] = time.sleep, write: Callable[[int, bytes], object] = os.write
    ) -> None:
        """Reports until the end that the process works: a stopped one, or one that hangs in native code, does not."""
        with contextlib.suppress(OSError):  # the reader has ended
            while True:
                write(self._plan.report, _HEARTBEAT)
                pause(self._plan.heartbeat_seconds)

    @contextlib.contextmanager
    def _time_limit(self, file: str) -> Iterator[None]:
        """Ends the process if loading a file takes too long, and reports where it hangs."""
        self._report("loading", file)
        faulthandler.dump_traceback_later(self._plan.file_seconds, exit=True, file=self._plan.report)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _report(self, event: str, text: str, **fields: str) -> None:
        with contextlib.suppress(OSError):  # the reader has ended
            os.write(self._plan.report, json.dumps({"event": event, "text": text, **fields}).encode() + b"\n")


def _shown_names(specs: Sequence[ToolSpec]) -> str:
    names = [spec.tool.name for spec in specs[:_MAX_NAMES]]
    more = [f"{len(specs) - len(names)} more"] if len(specs) > len(names) else []
    return ", ".join(names + more) or "no tools"


def _with_cpu_limit(spec: ToolSpec, protection: Protection) -> ToolSpec:
    """Returns a tool whose calls have the limit on processor time."""
    handler, guard = spec.handler, protection.cpu.call

    def run(*positional: Any, **arguments: Any) -> Any:
        with guard():
            returned = handler(*positional, **arguments)
        return awaited(returned) if inspect.isawaitable(returned) else returned

    async def awaited(returned: Any) -> Any:
        with guard():
            return await returned

    async def run_async(*positional: Any, **arguments: Any) -> Any:
        with guard():
            return await handler(*positional, **arguments)

    def generate(*positional: Any, **arguments: Any) -> Any:
        with guard():
            return (yield from handler(*positional, **arguments))

    async def generate_async(*positional: Any, **arguments: Any) -> Any:
        with guard():
            async for chunk in handler(*positional, **arguments):
                yield chunk

    wrappers = {"sync": run, "async": run_async, "generator": generate, "async generator": generate_async}
    return replace(spec, handler=wrappers[spec.kind.value])


if __name__ == "__main__":
    main()
