"""Runs the attempts of `breakouts.py`; ``python -m tests.parts.dropin.sandbox.trial`` prints what stopped each.

A launcher with a clean environment forks a process for each attempt, which sandboxes itself and runs the attempt. It
inherits its stdout and the descriptor of a file that it must not read."""

from __future__ import annotations

import gc
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

from tests.parts.dropin.sandbox.breakouts import ALL, BUS, Breakout
from tests.support.fork_server import Program
from toolbus.parts.dropin.sandbox import SandboxGrants, apply, clean_environment, run_beside_main
from toolbus.processes.supervisor import describe_exit

ESCAPED = "escaped"
STOPPED = {"audit hook", "Landlock", "limit", "not there", "the bus"}
BOTH: Mapping[str, bool] = {}
AUDIT_ALONE = {"landlock": False}
LANDLOCK_ALONE = {"audit": False}

ROOT = Path(__file__).resolve().parents[4]
_SECONDS = 120  # for one attempt, on a busy machine, which gives one the second of processor time that it may use
_PROCESSOR_SECONDS = 10.0  # for one attempt that nothing has stopped
_SECRET = "hunter2"


def try_all(layers: Mapping[str, bool], breakouts: Sequence[Breakout] = ALL) -> dict[str, str]:
    """Runs attempts with these layers; returns by name `ESCAPED`, or the exception or signal that stopped each."""
    hidden = {"BREAKOUT_SECRET": _SECRET, "TOOLBUS_TOKEN": _SECRET}
    chosen = [breakout.name for breakout in breakouts]
    with _surroundings() as names:
        plan = json.dumps({"chosen": chosen, "names": names, "layers": layers})
        done = subprocess.run(
            [sys.executable, "-m", "tests.parts.dropin.sandbox.trial", plan],
            env={**clean_environment({**os.environ, **hidden}), "PYTHONSAFEPATH": ""},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            timeout=_SECONDS * len(chosen),
            check=True,
        )
        outcomes: dict[str, str] = json.loads(done.stdout)
    return outcomes


def stopped_by(outcome: str) -> str:
    """Returns the layer that an outcome comes from."""
    if outcome == ESCAPED:
        return ESCAPED
    if "the sandbox" in outcome:
        return "audit hook"
    if outcome.startswith(("NotPermitted", "PermissionError: the bus")):
        return "the bus"
    if outcome.startswith(("MemoryError", "SIGXCPU", "OSError: [Errno 27]", "OSError: [Errno 24]")):
        return "limit"
    # SIGINT ends the process, since Python's handler of it was removed.
    if outcome.startswith(("KeyError", "OSError: [Errno 9]", "ValueError: signal only works in main thread", "SIGINT")):
        return "not there"
    kernel = ("ermission", "not permitted", "nothing could be executed", "unable to open database", "cross-device link")
    return "Landlock" if any(words in outcome for words in kernel) else outcome


@contextmanager
def _surroundings() -> Iterator[dict[str, object]]:
    """Creates what attempts try to reach; yields it by the names that their code uses."""
    with (
        tempfile.TemporaryDirectory(prefix="breakout-") as top,
        socket.create_server(("127.0.0.1", 0)) as tcp,
        _running_bus() as bus,
    ):
        root = Path(os.path.realpath(top))
        for folder in ("folder", "outside/empty", "home/.ssh", "bus_data"):
            (root / folder).mkdir(parents=True)
        for file in ("outside/secret", "home/.ssh/id_ed25519", "bus_data/bus.db", "other_tool.db"):
            (root / file).write_text(_SECRET, encoding="utf-8")
        (root / "folder/link").symlink_to(root / "outside/secret")
        for library in Path(sysconfig.get_config_var("DESTSHARED")).glob("_csv.*.so"):
            shutil.copy(library, root / "folder/_csv.so")
        with socket.socket(socket.AF_UNIX) as unix:
            unix.bind(str(root / "unix"))
            unix.listen()
            yield {
                **{name: str(root / name) for name in ("folder", "outside", "home", "bus_data", "unix")},
                "secret": str(root / "outside/secret"),
                "other_tool": str(root / "other_tool.db"),
                "port": tcp.getsockname()[1],
                **bus,
            }


@contextmanager
def _running_bus() -> Iterator[dict[str, str]]:
    """Runs a bus with a tool for an access level; yields its addresses."""
    from toolbus.sdk.shared_loop import SharedLoop  # not in what sandboxes itself: they bring grpc
    from toolbus.testing import running_bus

    thread, running = SharedLoop("breakout-bus"), AsyncExitStack()

    async def start() -> dict[str, str]:
        bus = await running.enter_async_context(running_bus())
        bus.dispatcher.admission.settled_at = 0.0  # a bus that has just started answers UNAVAILABLE to unknown names

        def high() -> None:
            """Needs an access level."""

        bus.tool(min_level=50)(high)
        return {"bus_itself": bus.grpc_addresses[0], "bus": await bus.dropin_address()}

    thread.start()
    try:
        yield thread.submit(start()).result(_SECONDS)
    finally:
        thread.submit(running.aclose()).result(_SECONDS)
        thread.stop()


def _launch(chosen: Sequence[str], names: dict[str, Any], layers: dict[str, Any]) -> None:
    """Runs in the launcher: forks a process for each attempt, and writes the outcomes to stdout."""
    descriptor = os.open(names["secret"], os.O_RDWR)
    os.set_inheritable(descriptor, True)
    names |= {"inherited": descriptor, "parent": os.getpid(), "os": os, "__file__": __file__}
    outcomes = {}
    gc.collect()
    gc.freeze()  # else each process copies what it inherits when it collects garbage
    for breakout in (each for each in ALL if each.name in chosen):
        if breakout in BUS:  # the last ones
            _import_sdk()
        read_end, write_end = os.pipe()
        if (child := os.fork()) == 0:
            os.dup2(write_end, 1)
            signal.alarm(_SECONDS)  # its default ends the process, as that of the next
            signal.setitimer(signal.ITIMER_PROF, _PROCESSOR_SECONDS)
            _attempt(textwrap.dedent(breakout.code), names, layers)
        os.close(write_end)
        with open(read_end, encoding="utf-8") as pipe:
            output = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        outcomes[breakout.name] = output if status == 0 else describe_exit(status)
    json.dump(outcomes, sys.stdout)


def _import_sdk() -> None:
    """Imports what attempts on the bus use, once for all; grpc is imported in the sandbox only."""
    for module in Program.GROUP.value:
        importlib.import_module(module)
    gc.freeze()


def _attempt(code: str, names: dict[str, Any], layers: dict[str, Any]) -> None:
    """Runs in the forked process: sandboxes it, runs the code, writes the outcome and ends."""
    write, end = os.write, os._exit  # an attempt may replace them
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    grants = SandboxGrants(write=(Path(names["folder"]),), cpu_seconds_per_call=1)
    protection = apply(grants, bus=names["bus"], **layers)

    def run() -> NoReturn:
        outcome = ESCAPED
        try:
            exec(code, {**names, "protection": protection})
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}"
        write(1, outcome.encode())
        end(0)

    run_beside_main(run, lambda name: None)


def _print_table() -> None:
    columns = [try_all(layers) for layers in (BOTH, AUDIT_ALONE, LANDLOCK_ALONE)]
    print("| attempt | both layers | audit hooks alone | Landlock alone |\n| --- | --- | --- | --- |")
    for breakout in ALL:
        print(f"| {breakout.name} | " + " | ".join(stopped_by(outcomes[breakout.name]) for outcomes in columns) + " |")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        _launch(**json.loads(sys.argv[1]))
    else:
        _print_table()
