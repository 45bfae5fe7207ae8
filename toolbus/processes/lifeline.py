"""Makes process groups end with the process that started them, also if that process gets SIGKILL.

A helper process reads the ids of the groups from a pipe, and kills the remaining groups when the pipe ends. It finds
processes that have left their group by a variable in their environment, if one marks them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

# Some builds of Python do not start without these. The helper gets no other variables.
_LIBRARIES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
_PROGRAM = Path(__file__).with_name("lifeline_program.py")


class Lifeline:
    """The helper process, from the constructor to `close`; a context manager."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # so that Ctrl-C does not end it
            env={name: os.environ[name] for name in _LIBRARIES if name in os.environ},
        )

    def __repr__(self) -> str:
        return f"<Lifeline pid={self._process.pid}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, group: int) -> None:
        """Adds a process group, which is killed if this process ends before `remove`."""
        self._write(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Forgets a process group that has ended: its id may be used again."""
        self._write(f"-{group}\n")

    def mark(self, variable: str) -> None:
        """Adds a variable, ``NAME=VALUE``; all processes with it are killed if this process ends before `unmark`.

        A supervisor that calls this before it starts a process leaves none behind, whenever it is killed.
        """
        self._write(f"+{variable}\n")

    def unmark(self, variable: str) -> None:
        """Forgets a variable: no process has it any more."""
        self._write(f"-{variable}\n")

    def close(self) -> None:
        """Ends the helper process, which kills the remaining groups; may be called again."""
        assert self._process.stdin is not None  # a pipe
        self._process.stdin.close()
        self._process.wait()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None  # a pipe
        with contextlib.suppress(BrokenPipeError):  # the helper was killed; the supervisor still ends each group
            self._process.stdin.write(line.encode())


_FORWARDED = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH", "SIGCONT")
    if hasattr(signal, name)
)


def work_below_init() -> None:
    """Returns in a child of this process, which stays as its init: for a program that is the first of a container.

    The first process gets every orphan, and an orphan that has ended stays as a zombie until it is waited for. Only a
    process without other children may wait for any: one that runs plugins would take their exit codes from those that
    wait for them. The init passes signals on, and ends as the child does. Call it before threads start.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)  # else one that comes now would be lost
    child = os.fork()
    if child == 0:
        # A group of its own: Ctrl-C in a terminal reaches it once.
        os.setpgid(0, 0)
        with contextlib.suppress(OSError):  # no terminal
            ignored = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
            try:
                os.tcsetpgrp(0, os.getpid())
            finally:
                signal.signal(signal.SIGTTOU, ignored)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        return

    def pass_on(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for each in _FORWARDED:
        signal.signal(each, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
