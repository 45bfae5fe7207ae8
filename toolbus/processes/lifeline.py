"""Makes process groups end with the process that started them, also where that process gets SIGKILL.

A helper process reads from a pipe which groups there are, and kills those that are left when the pipe ends. Processes
that left their group are found by a variable in their environment, where one marks them.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

# Where some builds of Python find themselves: they do not start without. The helper gets nothing else.
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
            start_new_session=True,  # a Ctrl-C is not meant for it
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
        """Has a process group killed if this process ends before `remove`."""
        self._write(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Forgets a process group that has ended: its id may be used again."""
        self._write(f"-{group}\n")

    def mark(self, variable: str) -> None:
        """Has every process with a variable, ``NAME=VALUE``, killed if this process ends before `unmark`.

        A supervisor that marks before it starts a process leaves none behind, at whatever moment it is killed.
        """
        self._write(f"+{variable}\n")

    def unmark(self, variable: str) -> None:
        """Forgets a variable: no process has it any more."""
        self._write(f"-{variable}\n")

    def close(self) -> None:
        """Ends the helper process, which kills the groups that are left; may be called again."""
        assert self._process.stdin is not None  # a pipe
        self._process.stdin.close()
        self._process.wait()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None  # a pipe
        with contextlib.suppress(BrokenPipeError):  # the helper was killed; the groups are still ended one by one
            self._process.stdin.write(line.encode())
