"""Measures mounted MCP servers: what a killed one costs its callers, and what is left of those that were unmounted.

Every function starts a bus of its own, with `lab.load.mcp_child` as the mounted server.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import uvloop

from lab.benchmarks.contest import Plan
from lab.benchmarks.facts import Fact
from lab.child import ChildFailed
from lab.load import peer
from lab.stage import LOOPBACK, ROOT, Stage, until, until_async
from toolbus.v1 import tool_pb2 as pb

CHILD = ROOT / "lab" / "load" / "mcp_child.py"
NAME = "bench"
HELD = 50  # calls that a server runs when it is killed
SECONDS = 30.0  # in which anything has to happen
BURST = 3  # deaths in a row, with pauses between: a server that dies too often is not started again
WINDOW_SECONDS = 31.0
GONE_SECONDS = 10.0  # in which processes of an unmounted server have to end
WARM_UP = 3  # mounts and unmounts before memory is read
LOOK_SECONDS = 0.002
WILD_SHARE = 5  # of so many servers that are mounted and unmounted one is wild: each takes the whole time to end


class MountedServer:
    """A bus that follows a file of mounts, and the log of the server in it."""

    def __init__(self, stage: Stage) -> None:
        self._http = httpx.Client(timeout=SECONDS, trust_env=False, verify=False)
        self.folder = Path(stage.folder())
        self.log = self.folder / "server.log"
        self.log.touch()
        self._file = self.folder / "mounts.json"
        self.unmount()
        options = ("--data-dir", str(self.folder / "data"), "--mcp-servers", str(self._file))
        self.bus = stage.bus(*options, http=LOOPBACK)

    def mount(self, *, wild: bool = False) -> None:
        """Writes the server into the file."""
        arguments = [str(CHILD), "--log", str(self.log), *(("--wild",) if wild else ())]
        entry = {"command": sys.executable, "args": arguments, "toolbus": {"maxInFlight": HELD, "eager": True}}
        self._write({NAME: entry})

    def unmount(self) -> None:
        self._write({})

    def _write(self, servers: dict[str, Any]) -> None:
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps({"mcpServers": servers}))
        part.chmod(0o600)
        part.replace(self._file)

    @property
    def offered(self) -> bool:
        return f'"{NAME}:forecast"' in self.get("/api/tools").text

    @property
    def revision(self) -> int:
        return int(self.get("/api/tools/export?dialect=openai").json()["revision"])

    def get(self, path: str) -> httpx.Response:
        return self._http.get(f"{self.bus.http}{path}")

    def wait(self, offered: bool) -> None:
        """Waits until the tools are listed, or not.

        Raises:
            ChildFailed: it did not happen in time.
        """
        if not until(lambda: self.offered is offered, SECONDS, LOOK_SECONDS):
            raise ChildFailed(f"after {SECONDS:g} s the tools are {'not ' if offered else ''}listed")

    @property
    def pid(self) -> int:
        """The newest process of the server; 0 before the first."""
        starts = [line for line in self.log.read_text().splitlines() if line.startswith("start ")]
        return int(starts[-1].split()[1]) if starts else 0

    def left(self) -> list[psutil.Process]:
        """Returns the processes that the mounted server has, or has left: those with its log in their command."""
        return [each for each in psutil.process_iter() if _is_of(each, str(self.folder))]


def _is_of(process: psutil.Process, folder: str) -> bool:
    """Tells whether a process is a mounted server of a folder, or was started by one."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        command = process.cmdline()
        if str(CHILD) in command:
            return any(folder in part for part in command)
        return tuple(command) == ("sleep", "1000") and "TOOLBUS_MOUNT" in process.environ()
    except (psutil.Error, OSError):
        return False


# -- a server that is killed -----------------------------------------------------------------------------------------


def _own_start() -> float:
    """Returns how long a server takes by itself from its start to its tools."""
    began_at = time.monotonic()
    command = (sys.executable, str(CHILD))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        for number, method in enumerate(("server/discover", "tools/list")):
            server.stdin.write(json.dumps({"jsonrpc": "2.0", "id": number, "method": method}).encode() + b"\n")
            server.stdin.flush()
            server.stdout.readline()
        taken = (time.monotonic() - began_at) * 1e3
        server.stdin.close()
    return taken


def server_killed(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Kills a mounted server that runs calls, again and again: its calls end, it comes back, nothing runs twice."""
    server = MountedServer(stage)
    server.mount()
    server.wait(True)
    ended, back, changes = uvloop.run(_kill_again(server, max(BURST, repeats // 3)))
    ran = Counter(line for line in server.log.read_text().splitlines() if line.startswith("call held-"))
    twice = sum(count - 1 for count in ran.values())
    calls = f"SIGKILL of a mounted server with {HELD} calls in flight"
    return (
        Fact("server_killed", f"{calls}, to the last error at the caller", "ms", 10.0, ended),
        Fact("server_killed", f"{calls}, to a call that succeeds", "ms", 1000.0 + _own_start(), back),
        Fact("server_killed", f"{calls}: changes of the catalog", "changes", 0.0, (float(changes),)),
        Fact("server_killed", f"{calls}: calls that ran twice", "calls", 0.0, (float(twice),)),
    )


async def _kill_again(server: MountedServer, repeats: int) -> tuple[tuple[float, ...], tuple[float, ...], int]:
    host = peer.Peer(server.bus.grpc)
    await host.attach("bench-host", [])
    ended, back = [], []
    await _call(host, "warm-up")
    first = server.revision
    for number in range(repeats):
        if number and number % BURST == 0:
            await asyncio.sleep(WINDOW_SECONDS)
        ids = {f"held-{number}-{each}" for each in range(HELD)}
        host.calls += [_call_of("hold", each) for each in ids]
        host.flush()
        if not await until_async(partial(_runs, server, frozenset(ids)), SECONDS):
            raise ChildFailed(f"after {SECONDS:g} s the server did not run its calls")
        pid = server.pid
        began_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(SECONDS):
            while ids:
                for result in await host.next_results():
                    if result.error.code != pb.ERROR_CODE_UNAVAILABLE or result.error.retry_safe:
                        raise ChildFailed(f"expected UNAVAILABLE that is not safe to retry, got {result}")
                    if result.error.stage not in (pb.CALL_STAGE_DISPATCHED, pb.CALL_STAGE_ACCEPTED):
                        raise ChildFailed(f"the stage is wrong: {result}")
                    ids.discard(result.call_id)
        ended.append((time.monotonic() - began_at) * 1e3)
        await _call(host, f"again-{number}")
        back.append((time.monotonic() - began_at) * 1e3)
    changes = server.revision - first
    await host.close()
    return tuple(ended), tuple(back), changes


def _runs(server: MountedServer, ids: frozenset[str]) -> bool:
    return ids <= {line.removeprefix("call ") for line in server.log.read_text().splitlines()}


def _call_of(tool: str, call_id: str) -> pb.ToolCall:
    return pb.ToolCall(call_id=call_id, name=f"{NAME}:{tool}", arguments_json=json.dumps({"id": call_id}))


async def _call(host: peer.Peer, name: str) -> None:
    """Calls a tool that answers, until it does."""
    async with asyncio.timeout(SECONDS):
        for number in range(10**6):
            host.calls.append(_call_of("forecast", f"{name}-{number}"))
            host.flush()
            if not (await host.next_results())[0].is_error:
                return
            await asyncio.sleep(0.01)


# -- what is left ----------------------------------------------------------------------------------------------------


def mount_leaks(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Mounts and unmounts a server again and again; some of them are wild."""
    server = MountedServer(stage)
    bus = psutil.Process(server.bus.child.pid)
    for number in range(WARM_UP + repeats):
        if number == WARM_UP:
            _await_none(server)
            open_before, memory_before = bus.num_fds(), bus.memory_info().rss
        server.mount(wild=number % WILD_SHARE == 0)
        server.wait(True)
        server.unmount()
        server.wait(False)
    left = _await_none(server)
    until(lambda: bus.num_fds() <= open_before, GONE_SECONDS)
    grown = (bus.memory_info().rss - memory_before) / 1e6
    what = f"{repeats} × mount and unmount, one of {WILD_SHARE} servers wild"
    return (
        Fact("mount_leaks", f"{what}: processes left", "processes", 0.0, (float(left),)),
        Fact("mount_leaks", f"{what}: descriptors left", "files", 0.0, (float(bus.num_fds() - open_before),)),
        Fact("mount_leaks", f"{what}: memory of the bus", "MB", 2.0, (grown,)),
    )


def _await_none(server: MountedServer) -> int:
    """Waits until no process of the server is left; returns how many are after all."""
    until(lambda: not server.left(), GONE_SECONDS)
    return len(server.left())
