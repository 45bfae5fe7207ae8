"""Starts commands, plugins and scripts as forks of a process that has imported what they do.

A new interpreter takes about a second of processor time until its bus is ready, and half a second until its tools are
offered, most of it for imports. A fork is a process like any other: of its own session, with its own environment and
files. What tests the start itself (`python -m toolbus.cli`, missing libraries) uses `toolbus_process`, which starts an
interpreter.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from pathlib import Path
from typing import IO, Any
from unittest import mock

from tests.support.waiting import WAIT_SECONDS, until_sync
from toolbus.parts.dropin.sandbox import clean_environment
from toolbus.processes.program_starter import SUPERVISOR_VARIABLE

_OPENAI = ("openai", "openai.resources.chat.completions")  # the second is what the client loads when it is used


class Program(Enum):
    """What a fork runs; each has a server of its own, with the modules that it imports.

    `COMMAND` is `toolbus`; the switch of grpcio comes first, as in the commands. `GROUP` is the process of a group of
    drop-in files: it may import grpc only in its sandbox, so that and what needs it is missing here. `SCRIPT` is a
    Python file or module that connects to a bus, `AGENT` one that talks to a model as well.
    """

    COMMAND = (
        *("toolbus.cli.command_line", "toolbus.cli.serve_command", "toolbus.cli.run_command", "toolbus.sdk", "uvloop"),
        *("toolbus.bus.wiring", "toolbus.bus.rooms.gateway_room", "toolbus.bus.gateway.http_server", "uvicorn"),
        "aiohttp",
    )
    GROUP = (
        *("toolbus.parts.dropin.group_process", "toolbus.parts.dropin.file_loader", "toolbus.v1.tool_bus_service_pb2"),
        *("toolbus.sdk.connection_settings", "toolbus.sdk.generation", "toolbus.sdk.notification"),
        *(
            "toolbus.sdk.outgoing_calls",
            "toolbus.sdk.shared_loop",
            "toolbus.sdk.tracing",
            "toolbus.functions.workers",
            "typing_extensions",
        ),
    )
    SCRIPT = (
        *("grpc.aio", "toolbus.v1.tool_bus_service_pb2_grpc", "toolbus.sdk", "toolbus.processes.plugin_program"),
        *("toolbus.processes.loader", "toolbus.sdk.plugin_client"),
    )
    AGENT = ("grpc.aio", "toolbus.v1.tool_bus_service_pb2_grpc", "toolbus.sdk", "toolbus.loop", *_OPENAI)


_PLUGINS = {"toolbus.parts.dropin.group_process": Program.GROUP, "toolbus.processes.plugin_process": Program.SCRIPT}
_MAX_FILES = 8  # descriptors with a request
_MAX_REQUEST = 1 << 20  # bytes: a command, its environment and its folder


class Forked:
    """A process of the fork server, with the methods of `subprocess.Popen` that tests use.

    Args:
        status: gets the exit code as a line when it has ended, and is closed.
    """

    def __init__(self, pid: int, status: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None  # None while it runs
        self._status = status

    def poll(self) -> int | None:
        """Returns the exit code, negative for a signal; None while it runs."""
        return self._wait(0)

    def wait(self, timeout: float = WAIT_SECONDS) -> int:
        """Waits for the end, at most so many seconds."""
        code = self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return code

    def _wait(self, seconds: float) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], seconds)[0]:
            line = self._status.recv(16)
            self._status.close()
            self.returncode = int(line or -signal.SIGKILL)  # the server has ended, and its forks with it
        return self.returncode

    async def wait_async(self) -> int:
        """Waits for the end, for any time, while the loop goes on."""
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_reader(self._status, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._status)
        return self.wait()

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ForkedPlugin:
    """A fork with the methods of `asyncio.subprocess.Process` that the product uses.

    Args:
        stdin: what writes its standard input.
    """

    def __init__(self, forked: Forked, stdin: IO[bytes]) -> None:
        self.pid = forked.pid
        self.stdin = stdin
        self.terminate = forked.terminate
        self._ended = asyncio.create_task(forked.wait_async())

    async def wait(self) -> int:
        """Waits for the end; returns the exit code."""
        return await asyncio.shield(self._ended)


def fork(words: Sequence[str], environment: Mapping[str, str], out: IO[bytes], err: IO[bytes]) -> Forked:
    """Starts `toolbus` with these words, in this process's folder, without standard input.

    Args:
        words: if the first is a Python file, that runs instead.
    """
    return _fork(Program.COMMAND, words, environment, {1: out.fileno(), 2: err.fileno()})


def fork_python(
    words: Sequence[str], environment: Mapping[str, str], files: Mapping[int, int], program: Program = Program.SCRIPT
) -> Forked:
    """Starts what `python` would with these words, a file or `-m` and a module, in this process's folder.

    Args:
        files: descriptors of this process, by the number that each has in the fork: 0, 1 and 2 at least.
    """
    return _fork(program, words, environment, files)


def forked_plugins() -> AbstractContextManager[object]:
    """Lets this process start plugin files, and the groups of a tool folder, as forks."""
    return mock.patch("asyncio.create_subprocess_exec", fork_plugin)


async def fork_plugin(
    *words: str, stdin: int, stdout: int, stderr: int, pass_fds: Sequence[int], env: Mapping[str, str], **_: bool
) -> ForkedPlugin:
    """Takes the place of `asyncio.create_subprocess_exec` for these programs."""
    module = words.index("-m")
    program = _PLUGINS[words[module + 1]]
    assert stdin == subprocess.PIPE
    read, write = os.pipe()
    try:
        files = {0: read, 1: stdout, 2: stderr, **{number: number for number in pass_fds}}
        forked = _fork(program, words[module:], env, files)
    finally:
        os.close(read)
    return ForkedPlugin(forked, os.fdopen(write, "wb"))


def _fork(program: Program, words: Sequence[str], environment: Mapping[str, str], files: Mapping[int, int]) -> Forked:
    """Forks a program.

    Args:
        files: descriptors of this process, by the number that each has in the fork.
    """
    control = _server(program)
    ours, theirs = socket.socketpair()
    with theirs:
        request = {"words": list(words), "environment": dict(environment), "folder": os.getcwd(), "files": list(files)}
        socket.send_fds(control, [json.dumps(request).encode()], [theirs.fileno(), *files.values()])
    pid = int(control.recv(16))
    with contextlib.suppress(ProcessLookupError):  # it has ended
        until_sync(lambda: os.getpgid(pid) == pid, "the session of a fork, which is killed as a group")
    return Forked(pid, ours)


@functools.cache
def _server(program: Program) -> socket.socket:
    """Starts the server of this process, which ends with it. Returns the socket that takes requests."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_REQUEST)
    root = Path(__file__).resolve().parents[2]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TOOLBUS_", "GRPC_"))}
    if program is Program.GROUP:
        environment = clean_environment(environment)  # some of it decides how an interpreter runs
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, program.name, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**environment, "PYTHONPATH": str(root)},
            start_new_session=True,
        )
    atexit.register(_end, ours, process)
    return ours


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()
    process.wait()


class _Server:
    """Forks on request, and tells who has ended how."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._statuses: dict[int, socket.socket] = {}  # of running forks, by process id
        self._ended, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)

    def serve(self) -> dict[str, Any] | None:
        """Serves until its client is gone. Returns a request in each fork, which has to carry it out, else None."""
        signal.set_wakeup_fd(self._wakeup.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while True:
            ready, _, _ = select.select([self._control, self._ended], [], [])
            if self._ended in ready:
                self._ended.recv(4096)
                self._reap()
            if self._control in ready:
                message, received, _, _ = socket.recv_fds(self._control, _MAX_REQUEST, _MAX_FILES)
                if not message:
                    for pid in self._statuses:
                        os.kill(pid, signal.SIGKILL)  # a fork is not reaped before its status is told
                    return None
                request: dict[str, Any] = json.loads(message)
                status, *files = received
                pid = os.fork()
                if not pid:
                    os.close(status)
                    self._become(request, files)
                    return request
                self._statuses[pid] = socket.socket(fileno=status)
                for file in files:
                    os.close(file)
                self._control.send(str(pid).encode())

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                with self._statuses.pop(pid) as ended, contextlib.suppress(OSError):
                    ended.send(str(os.waitstatus_to_exitcode(status)).encode())

    def _become(self, request: Mapping[str, Any], files: Sequence[int]) -> None:
        """Makes this fork the process of a request."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for held in (self._control, self._ended, self._wakeup, *self._statuses.values()):
            held.close()
        os.setsid()
        moved = [fcntl.fcntl(file, fcntl.F_DUPFD, max(request["files"]) + 1) for file in files]
        for file in files:
            os.close(file)
        for number, file in zip(request["files"], moved, strict=True):
            os.dup2(file, number)
            os.close(file)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        if SUPERVISOR_VARIABLE in os.environ:  # it ends with its parent, which is the server here
            os.environ[SUPERVISOR_VARIABLE] = str(os.getppid())
        time.tzset()
        sys.argv = ["toolbus", *request["words"]]
        buffering = 1 if "PYTHONUNBUFFERED" in os.environ else -1
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for as long as the process lives
        sys.stdout = open(1, "w", closefd=False, buffering=buffering)  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115


def _main() -> None:
    program = Program[sys.argv[1]]
    if program is Program.COMMAND:
        from toolbus.common.grpc_switch import set_switch

        set_switch()
    for module in program.value:
        importlib.import_module(module)
    if program is Program.COMMAND:
        from toolbus.bus.gateway.app import endpoints_of

        models = "toolbus.parts.models.export_routes:router"
        for homes in ((models,), (models, "toolbus.parts.council.routes:router")):
            endpoints_of(homes)
    gc.freeze()  # the forks share what is imported
    with socket.socket(fileno=int(sys.argv[2])) as control:
        request = _Server(control).serve()
    if request is None:
        return
    if program is Program.COMMAND and not request["words"][0].endswith(".py"):
        from toolbus.cli import main
    elif program is Program.GROUP:
        from toolbus.parts.dropin.group_process import main
    else:
        _run_script(request["words"])
        return
    main()


def _run_script(words: Sequence[str]) -> None:
    if os.environ.get("PYTHONWARNINGS") == "error":  # an interpreter reads it at its start
        warnings.simplefilter("error")
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    _main()
