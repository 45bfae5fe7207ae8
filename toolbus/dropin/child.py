"""The process of one group of drop-in files: ``python -m toolbus.dropin.child``. A `ToolFolder` starts it.

It reads its `Plan` from standard input, puts itself into the sandbox, loads the files and offers their tools until it
is told to end. What became of that it says on a pipe, a line of JSON each: a ``problem`` each, then ``loaded`` with the
tools and the protection, then ``attached``. The token of its source comes with the plan, and stands nowhere else.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolbus.dropin.sandbox import Grants, Protection, apply
from toolbus.errors import NotPermitted, PeerLost, RequestError, SetupError
from toolbus.sdk.child import CANNOT_START, SUPERVISOR_VARIABLE, end_with

if TYPE_CHECKING:
    from types import FrameType

    from toolbus.sdk.tool_spec import ToolSpec

_NAMES_SAID = 20  # of tools: a report is a line that fits into a pipe
_REFUSED_SECONDS = 10.0  # between attempts where the bus binds the source to somebody else, for a grace period say


@dataclass(frozen=True, slots=True)
class Plan:
    """What a process is to do.

    Attributes:
        folder: where the files lie.
        source: whose tools they are on the bus.
        files: what is loaded, in order.
        offering: those of them whose tools are offered.
        bus: its address.
        token: binds the source.
        report: the descriptor of the pipe that it reports on.
        write, read: absolute paths that it may change, or read beside its files.
        connect: hosts and ports that it may connect to.
        limits: memory_bytes, cpu_seconds_per_call and file_bytes, where they are not the defaults.
        file_seconds: how long one file may take to load.
        grace_seconds: how long calls in flight are given when the process is told to end.
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
    grace_seconds: float = 10.0

    def written(self) -> bytes:
        """Returns it as the process reads it."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read_from(cls, text: str) -> Plan:
        """Reads what `written` made."""
        said = json.loads(text)
        lists = ("files", "offering", "write", "read")
        return cls(
            **said
            | {name: tuple(said[name]) for name in lists}
            | {"connect": tuple((host, port) for host, port in said["connect"])}
        )

    def grants(self) -> Grants:
        """Returns what the sandbox allows."""
        return Grants(tuple(map(Path, self.write)), tuple(map(Path, self.read)), self.connect, **(self.limits or {}))


def main() -> int:
    """Runs the process; returns its exit code."""
    supervisor = os.environ.pop(SUPERVISOR_VARIABLE, "")
    if supervisor:
        end_with(int(supervisor))
    plan = Plan.read_from(sys.stdin.read())
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("toolbus.dropin.folder").setLevel(logging.ERROR)  # its warnings are reported
    try:
        folder = Path(plan.folder)
        protection = apply(
            plan.grants(), bus=plan.bus, readable=[folder / name for name in plan.files], keep_fds=(plan.report,)
        )
        _offer(plan, protection)
    except NotPermitted as error:
        print(f"{error} (it tries again in {_REFUSED_SECONDS:g} s)", file=sys.stderr)
        time.sleep(_REFUSED_SECONDS)
        return 1
    except (SetupError, RequestError, PeerLost) as error:  # lost: an operator asked it to go
        print(error, file=sys.stderr)
        return CANNOT_START
    return 0


def _offer(plan: Plan, protection: Protection) -> None:
    from toolbus.dropin.folder import load_files
    from toolbus.sdk import Plugin

    guard = functools.partial(_in_time, plan.file_seconds)
    loaded = load_files(Path(plan.folder), plan.files, offering=plan.offering, guard=guard)
    report = functools.partial(_report, plan.report)
    for problem in loaded.problems:
        report(happened="problem", text=f"{problem.file}: {problem.reason}")
    names = [spec.tool.name for spec in loaded.specs[:_NAMES_SAID]]
    more = [f"{len(loaded.specs) - len(names)} more"] if len(loaded.specs) > len(names) else []
    report(happened="loaded", text=f"offers {', '.join(names + more) or 'no tools'} ({protection.as_text()})")
    notices = [f"protected by {protection.as_text()}", *(f"{each.file}: {each.reason}" for each in loaded.problems)]
    plugin = Plugin(plan.source, address=plan.bus, token=plan.token, notices=notices)
    for spec in loaded.specs:
        plugin.add_tool(_guarded(spec, protection))
    plugin.run(lambda: report(happened="attached", text=""), grace_seconds=plan.grace_seconds)


@contextlib.contextmanager
def _in_time(seconds: float) -> Iterator[None]:
    """Interrupts what goes on in it, once, when that takes too long."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise SetupError(f"takes longer than {seconds:g} s to load: leave what is slow to the first call")

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


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


def _report(descriptor: int, **what: str) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        os.write(descriptor, json.dumps(what).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
