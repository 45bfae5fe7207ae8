"""Starts `toolbus` commands as forks of one process that has imported what they import.

A new interpreter takes about a second of processor time until its bus is ready, most of it for imports. A fork is a
process like any other: of its own session, with its own environment and files. What tests the start itself
(`python -m toolbus.cli`, missing libraries) uses `toolbus_process`, which starts an interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.support.waiting import WAIT_SECONDS

# What `serve` and `run` import; the switch of grpcio comes first, as in the commands.
_PRELOADED = (
    *("toolbus.cli.command_line", "toolbus.cli.serve_command", "toolbus.cli.run_command", "toolbus.sdk", "uvloop"),
    *("toolbus.bus.wiring", "toolbus.bus.rooms.gateway_room", "toolbus.bus.gateway.http_server", "uvicorn", "aiohttp"),
)
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


def fork(words: Sequence[str], environment: Mapping[str, str], out: IO[bytes], err: IO[bytes]) -> Forked:
    """Starts `toolbus` with these words, in this process's folder, without standard input."""
    control = _server()
    ours, theirs = socket.socketpair()
    with theirs:
        request = json.dumps({"words": list(words), "environment": dict(environment), "folder": os.getcwd()})
        socket.send_fds(control, [request.encode()], [out.fileno(), err.fileno(), theirs.fileno()])
    pid = int(control.recv(16))
    return Forked(pid, ours)


@functools.lru_cache(maxsize=1)
def _server() -> socket.socket:
    """Starts the server of this process, which ends with it. Returns the socket that takes requests."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_REQUEST)
    root = Path(__file__).resolve().parents[2]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TOOLBUS_", "GRPC_"))}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, str(theirs.fileno())],
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
                message, files, _, _ = socket.recv_fds(self._control, _MAX_REQUEST, 3)
                if not message:
                    for pid in self._statuses:
                        os.kill(pid, signal.SIGKILL)  # a fork is not reaped before its status is told
                    return None
                request: dict[str, Any] = json.loads(message)
                out, err, status = files
                pid = os.fork()
                if not pid:
                    self._become(request, out, err, status)
                    return request
                self._statuses[pid] = socket.socket(fileno=status)
                os.close(out)
                os.close(err)
                self._control.send(str(pid).encode())

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                with self._statuses.pop(pid) as ended, contextlib.suppress(OSError):
                    ended.send(str(os.waitstatus_to_exitcode(status)).encode())

    def _become(self, request: Mapping[str, Any], out: int, err: int, status: int) -> None:
        """Makes this fork the process of a request."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for held in (self._control, self._ended, self._wakeup, *self._statuses.values()):
            held.close()
        os.close(status)
        os.setsid()
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.close(out)
        os.close(err)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        time.tzset()
        sys.argv = ["toolbus", *request["words"]]
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - for as long as the process lives
        sys.stderr = open(2, "w", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115


def _main() -> None:
    from toolbus.cli.grpc_switch import set_switch

    set_switch()
    for module in _PRELOADED:
        importlib.import_module(module)
    from toolbus.bus.gateway.app import endpoints_of

    for has_council in (False, True):
        endpoints_of(has_council)
    gc.freeze()  # the forks share what is imported
    with socket.socket(fileno=int(sys.argv[1])) as control:
        request = _Server(control).serve()
    if request is not None:
        from toolbus.cli import main

        main()


if __name__ == "__main__":
    _main()
