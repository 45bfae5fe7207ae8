"""The process of one group of drop-in files: ``python -m toolbus.dropin.group_process``. A `ToolFolder` starts it.

It reads its `ProcessPlan` from standard input, puts itself into the sandbox, loads the files and offers their tools
until it is told to end. What became of that it says on a pipe, a line of JSON each: ``loading`` with the name of each
file, a ``problem`` each, a ``tool`` each with its file, then ``loaded`` with what it offers and the protection, then
``attached``. Where a file takes too long to load, the last lines are no JSON: `faulthandler` ends the process and tells
where it was, for whatever the file hangs in need not let Python have a word. The token of its source comes with the
plan, and stands nowhere else.

Where the bus refuses tools because of what they are, the process says ``refused`` with the file of each and why, and
ends: it is started again without those files. Where it refuses all of them for now, for lack of a right, it says
``denied``, stays, and ``attached`` once that has changed. While it is attached it says ``alive`` every few seconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from toolbus.dropin.sandbox import Grants, Protection, apply, beside_main
from toolbus.errors import NotPermitted, PeerLost, RequestError, SetupError
from toolbus.processes.plugin_process import CANNOT_START, SUPERVISOR_VARIABLE, end_with

if TYPE_CHECKING:
    from toolbus.dropin.file_loader import Loaded
    from toolbus.functions.tool_spec import ToolSpec
    from toolbus.sdk import Plugin

_NAMES_SAID = 20  # of tools: a report is a line that fits into a pipe
_ALIVE = b'{"happened": "alive", "text": ""}\n'
_REFUSED_SECONDS = 10.0  # between attempts where the bus binds the source to somebody else, for a grace period say


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """What a process is to do.

    Attributes:
        folder: where the files lie.
        source: whose tools they are on the bus.
        files: what is loaded, in order.
        offering: those of them whose tools are offered.
        bus: where it takes drop-in tools in.
        token: binds the source, and no other one.
        report: the descriptor of the pipe that it reports on.
        write, read: absolute paths that it may change, or read beside its files.
        connect: hosts and ports that it may connect to.
        limits: memory_bytes, cpu_seconds_per_call and file_bytes, where they are not the defaults.
        file_seconds: how long one file may take to load.
        beat_seconds: how often it says that it is alive.
        grace_seconds: how long calls in flight are given when the process is told to end.
        notices: what else operators should know.
        slow: files that took too long to load before, or whose tools the bus refused, each with what is said about it;
            they are not loaded.
        taken: names of tools that another group's file offers, each with that file; they are not offered here.
    """

    folder: str
    source: str
    files: tuple[str, ...]
    offering: tuple[str, ...]
    bus: str
    token: str
    report: int
    write: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    connect: tuple[tuple[str, int], ...] = ()
    limits: dict[str, int] | None = None
    file_seconds: float = 10.0
    beat_seconds: float = 5.0
    notices: tuple[str, ...] = ()
    grace_seconds: float = 10.0
    slow: dict[str, str] = field(default_factory=dict)
    taken: dict[str, str] = field(default_factory=dict)

    def written(self) -> bytes:
        """Returns it as the process reads it."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read_from(cls, text: str) -> ProcessPlan:
        """Reads what `written` made."""
        said = json.loads(text)
        lists = ("files", "offering", "write", "read", "notices")
        return cls(
            **said
            | {name: tuple(said[name]) for name in lists}
            | {"connect": tuple((host, port) for host, port in said["connect"])}
        )

    def grants(self) -> Grants:
        """Returns what the sandbox allows."""
        return Grants(tuple(map(Path, self.write)), tuple(map(Path, self.read)), self.connect, **(self.limits or {}))


def main() -> NoReturn:
    """Runs the process to its end."""
    supervisor = os.environ.pop(SUPERVISOR_VARIABLE, "")
    if supervisor:
        end_with(int(supervisor))
    plan = ProcessPlan.read_from(sys.stdin.read())
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("toolbus.dropin.file_loader").setLevel(logging.ERROR)  # its warnings are reported
    folder = Path(plan.folder)
    with contextlib.suppress(OSError):  # the folder is gone: so are its files
        os.chdir(folder)  # where relative paths of the manifest begin too
    try:
        protection = apply(
            plan.grants(), bus=plan.bus, readable=[folder / name for name in plan.files], keep_fds=(plan.report,)
        )
    except SetupError as error:
        print(error, file=sys.stderr)
        sys.exit(CANNOT_START)
    process = _Process(plan, protection)
    beside_main(process.work, process.stop)


class _Process:
    """What runs in the sandbox, beside the main thread."""

    def __init__(self, plan: ProcessPlan, protection: Protection) -> None:
        self._plan = plan
        self._protection = protection
        self._plugin: Plugin | None = None  # None while the files load
        self._offered: list[ToolSpec] = []  # what the plugin offers

    def stop(self, name: str) -> None:
        """Has the plugin say goodbye and finish its calls; where it has not come so far, nothing is to be finished."""
        if self._plugin is None or not self._plugin.leave(name, self._plan.grace_seconds):
            os._exit(0)

    def work(self) -> int:
        """Loads the files and offers their tools; returns the exit code."""
        try:
            self._plugin = self._made(self._load())
            threading.Thread(target=self._protection.cpu.watch, name="toolbus processor time", daemon=True).start()
            threading.Thread(target=self._beat, name="toolbus sign of life", daemon=True).start()
            self._plugin.run(lambda: self._report("attached", ""), grace_seconds=self._plan.grace_seconds)
        except NotPermitted as error:
            print(f"{error} (it tries again in {_REFUSED_SECONDS:g} s)", file=sys.stderr)
            time.sleep(_REFUSED_SECONDS)
            return 1
        except (SetupError, RequestError, PeerLost) as error:  # lost: an operator asked it to go
            if isinstance(error, RequestError) and (refused := _refused(self._offered, str(error))):
                for file, why in refused.items():
                    self._report("refused", why, file=file)
                return 1
            print(error, file=sys.stderr)
            return CANNOT_START
        return 0

    def _load(self) -> Loaded:
        from toolbus.dropin.file_loader import FileProblem, load_files

        plan = self._plan
        files = [file for file in plan.files if file not in plan.slow]
        loaded = load_files(Path(plan.folder), files, offering=plan.offering, guard=self._in_time)
        again = [
            FileProblem(
                json.loads(spec.tool.metadata_json)["file"],
                f'tool "{spec.tool.name}" registered twice (later wins): again in {plan.taken[spec.tool.name]}. '
                "Rename one of them",
                skipped=False,
            )
            for spec in loaded.specs
            if spec.tool.name in plan.taken
        ]
        slow = [FileProblem(file, reason) for file, reason in plan.slow.items()]
        return replace(loaded, problems=(*loaded.problems, *slow, *again))

    def _made(self, loaded: Loaded) -> Plugin:
        from toolbus.sdk import Plugin

        plan, protection = self._plan, self._protection.as_text()
        for problem in loaded.problems:
            if problem.file not in plan.slow:  # which has been said
                self._report("problem", f"{problem.file}: {problem.reason}")
        for spec in loaded.specs:
            self._report("tool", spec.tool.name, file=json.loads(spec.tool.metadata_json)["file"])
        offered = [spec for spec in loaded.specs if spec.tool.name not in plan.taken]
        self._report("loaded", f"offers {_names(offered)} ({protection})")
        notices = [f"protected by {protection}"] if plan.files else []
        notices += [*plan.notices, *(f"{each.file}: {each.reason}" for each in loaded.problems)]
        plugin = Plugin(plan.source, address=plan.bus, token=plan.token, notices=notices)
        for spec in offered:
            plugin.add_tool(_guarded(spec, self._protection))
        self._offered = offered
        lacks = f"source {plan.source!r} may not offer any (an operator lets it: toolbus grant {plan.source})"
        plugin.on_permission_denied(lambda permission, operation: self._report("denied", lacks))
        plugin.on_permission_changed(lambda name, granted, every: self._report("attached", "") if granted else None)
        return plugin

    def _beat(
        self, pause: Callable[[float], object] = time.sleep, write: Callable[[int, bytes], object] = os.write
    ) -> None:
        """Says that the process is alive, to its end: one that is stopped, or hangs in native code, does not."""
        with contextlib.suppress(OSError):  # nobody listens any more
            while True:
                write(self._plan.report, _ALIVE)
                pause(self._plan.beat_seconds)

    @contextlib.contextmanager
    def _in_time(self, file: str) -> Iterator[None]:
        """Ends the process when what goes on in it takes too long, and reports where it hangs."""
        self._report("loading", file)
        faulthandler.dump_traceback_later(self._plan.file_seconds, exit=True, file=self._plan.report)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _report(self, happened: str, text: str, **more: str) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more
            os.write(self._plan.report, json.dumps({"happened": happened, "text": text, **more}).encode() + b"\n")


def _refused(specs: Sequence[ToolSpec], why: str) -> dict[str, str]:
    """Returns the files of the tools that a refusal of the bus names, each with what it says of them."""
    refused: dict[str, list[str]] = {}
    for fault in re.split(r"; (?=tool )", why):
        for spec in specs:
            name, role = spec.tool.name, spec.tool.role
            if fault.startswith((f"tool {name!r}", f"tool name {name!r}")) or (
                role and fault.endswith(f"role: {role}")
            ):
                refused.setdefault(json.loads(spec.tool.metadata_json)["file"], []).append(fault)
    return {file: f"the bus refuses its tools: {'; '.join(faults)}" for file, faults in refused.items()}


def _names(specs: Sequence[ToolSpec]) -> str:
    names = [spec.tool.name for spec in specs[:_NAMES_SAID]]
    more = [f"{len(specs) - len(names)} more"] if len(specs) > len(names) else []
    return ", ".join(names + more) or "no tools"


def _guarded(spec: ToolSpec, protection: Protection) -> ToolSpec:
    """Returns a tool whose calls may only take so much processor time."""
    handler, guard = spec.handler, protection.cpu.call

    def run(*given: Any, **arguments: Any) -> Any:
        with guard():
            returned = handler(*given, **arguments)
        return awaited(returned) if inspect.isawaitable(returned) else returned

    async def awaited(returned: Any) -> Any:
        with guard():
            return await returned

    async def run_async(*given: Any, **arguments: Any) -> Any:
        with guard():
            return await handler(*given, **arguments)

    def generate(*given: Any, **arguments: Any) -> Any:
        with guard():
            return (yield from handler(*given, **arguments))

    async def generate_async(*given: Any, **arguments: Any) -> Any:
        with guard():
            async for chunk in handler(*given, **arguments):
                yield chunk

    ways = {"sync": run, "async": run_async, "generator": generate, "async generator": generate_async}
    return replace(spec, handler=ways[spec.kind.value])


if __name__ == "__main__":
    main()
