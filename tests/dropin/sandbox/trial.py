"""Tries the ways out of `breakouts.py`; ``python -m tests.dropin.sandbox.trial`` prints what stopped each, as a table.

A launcher with a clean environment forks a process for each attempt, which sandboxes itself and tries. What it
inherits, its stdout apart, is a descriptor of a file that is none of its business.
"""

from __future__ import annotations

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
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

from tests.dropin.sandbox.breakouts import ALL
from toolbus.dropin.sandbox import Grants, apply, clean_environment, run_beside_main
from toolbus.processes.supervised_plugin import describe_exit

ESCAPED = "escaped"
STOPPED = {"audit hook", "Landlock", "limit", "not there", "the bus"}
BOTH: Mapping[str, bool] = {}
AUDIT_ALONE = {"landlock": False}
LANDLOCK_ALONE = {"audit": False}

ROOT = Path(__file__).resolve().parents[3]
_SECONDS = 10  # for one attempt
_SECRET = "hunter2"


def try_all(layers: Mapping[str, bool]) -> dict[str, str]:
    """Tries every way out with these layers; returns by name `ESCAPED`, or the exception or signal that stopped it."""
    hidden = {"BREAKOUT_SECRET": _SECRET, "TOOLBUS_TOKEN": _SECRET}
    with _surroundings() as names:
        done = subprocess.run(
            [sys.executable, "-m", "tests.dropin.sandbox.trial", json.dumps({"names": names, "layers": layers})],
            env={**clean_environment(environment={**os.environ, **hidden}), "PYTHONSAFEPATH": ""},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            timeout=_SECONDS * len(ALL),
            check=True,
        )
        outcomes: dict[str, str] = json.loads(done.stdout)
    return outcomes


def by_whom(outcome: str) -> str:
    """Says in a word or two which layer an outcome comes from."""
    if outcome == ESCAPED:
        return ESCAPED
    if "the sandbox" in outcome:
        return "audit hook"
    if outcome.startswith(("NotPermitted", "PermissionError: the bus")):
        return "the bus"
    if outcome.startswith(("MemoryError", "SIGXCPU", "OSError: [Errno 27]", "OSError: [Errno 24]")):
        return "limit"
    # SIGINT ends the process where Python's handler of it is not there.
    if outcome.startswith(("KeyError", "OSError: [Errno 9]", "ValueError: signal only works in main thread", "SIGINT")):
        return "not there"
    kernel = ("ermission", "not permitted", "nothing could be executed", "unable to open database", "cross-device link")
    return "Landlock" if any(words in outcome for words in kernel) else outcome


@contextmanager
def _surroundings() -> Iterator[dict[str, object]]:
    """Lays out what attempts aim at; yields the names that they know it by."""
    with (
        tempfile.TemporaryDirectory(prefix="breakout-") as top,
        socket.create_server(("127.0.0.1", 0)) as tcp,
        _running_bus() as bus,
    ):
        at = Path(os.path.realpath(top))
        for folder in ("folder", "outside/empty", "home/.ssh", "bus_data"):
            (at / folder).mkdir(parents=True)
        for file in ("outside/secret", "home/.ssh/id_ed25519", "bus_data/toolbus.db", "other_tool.db"):
            (at / file).write_text(_SECRET, encoding="utf-8")
        (at / "folder/link").symlink_to(at / "outside/secret")
        for library in Path(sysconfig.get_config_var("DESTSHARED")).glob("_csv.*.so"):
            shutil.copy(library, at / "folder/_csv.so")
        with socket.socket(socket.AF_UNIX) as unix:
            unix.bind(str(at / "unix"))
            unix.listen()
            yield {
                **{name: str(at / name) for name in ("folder", "outside", "home", "bus_data", "unix")},
                "secret": str(at / "outside/secret"),
                "other_tool": str(at / "other_tool.db"),
                "port": tcp.getsockname()[1],
                **bus,
            }


@contextmanager
def _running_bus() -> Iterator[dict[str, str]]:
    """Runs a bus with a tool for some users only; yields where it listens."""
    from toolbus.functions.threads import LoopThread  # not in what sandboxes itself: they bring grpc
    from toolbus.testing import running_bus

    thread, running = LoopThread("breakout-bus"), AsyncExitStack()

    async def start() -> dict[str, str]:
        bus = await running.enter_async_context(running_bus())
        bus.dispatcher.settled_at = 0.0  # a bus that has just started calls unknown names UNAVAILABLE

        def high() -> None:
            """For some."""

        bus.tool(min_level=50)(high)
        return {"bus_itself": bus.grpc_addresses[0], "bus": await bus.dropin_address()}

    thread.start()
    try:
        yield thread.ask(start()).result(_SECONDS)
    finally:
        thread.ask(running.aclose()).result(_SECONDS)
        thread.stop()


def _launch(names: dict[str, Any], layers: dict[str, Any]) -> None:
    """Runs in the launcher: forks for each attempt, and writes the outcomes to stdout."""
    opened = os.open(names["secret"], os.O_RDWR)
    os.set_inheritable(opened, True)
    names |= {"inherited": opened, "parent": os.getpid(), "os": os, "__file__": __file__}
    outcomes = {}
    for breakout in ALL:
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            os.dup2(writing, 1)
            signal.alarm(_SECONDS)  # its default ends the process
            _attempt(textwrap.dedent(breakout.code), names, layers)
        os.close(writing)
        with open(reading, encoding="utf-8") as pipe:
            said = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        outcomes[breakout.name] = said if status == 0 else describe_exit(status)
    json.dump(outcomes, sys.stdout)


def _attempt(code: str, names: dict[str, Any], layers: dict[str, Any]) -> None:
    """Runs in the forked process: sandboxes it, tries the code, writes the outcome and ends."""
    write, leave = os.write, os._exit  # an attempt may replace them
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    grants = Grants(write=(Path(names["folder"]),), cpu_seconds_per_call=1)
    protection = apply(grants, bus=names["bus"], **layers)

    def run() -> NoReturn:
        outcome = ESCAPED
        try:
            exec(code, {**names, "protection": protection})
        except BaseException as problem:
            outcome = f"{type(problem).__name__}: {problem}"
        write(1, outcome.encode())
        leave(0)

    run_beside_main(run, lambda name: None)


def _print_table() -> None:
    columns = [try_all(layers) for layers in (BOTH, AUDIT_ALONE, LANDLOCK_ALONE)]
    print("| attempt | both layers | audit hooks alone | Landlock alone |\n| --- | --- | --- | --- |")
    for breakout in ALL:
        print(f"| {breakout.name} | " + " | ".join(by_whom(outcomes[breakout.name]) for outcomes in columns) + " |")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        _launch(**json.loads(sys.argv[1]))
    else:
        _print_table()
