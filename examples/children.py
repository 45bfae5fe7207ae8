"""Processes that end with the program that started them, however it ends.

Each child leads a group of its own, so that a Ctrl-C in the terminal does not reach it before the program has decided
the order. `end` asks with SIGTERM and insists with SIGKILL. Where the program itself is killed,
`toolbus.processes.lifeline` notices the end of its pipe and kills the groups that are left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import toolbus

GRACE_SECONDS = 8.0  # longer than the 5 s that `toolbus run` gives its plugins
LIFELINE = Path(toolbus.__file__).with_name("processes") / "lifeline.py"


class Children:
    """The processes of one program, in the order in which they were started; an async context manager."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._started: list[Process] = []
        self._at_once = asyncio.Event()  # set when nobody wants to wait any more
        self._lifeline: subprocess.Popen[bytes] | None = None  # None until entered

    async def __aenter__(self) -> Self:
        self._lifeline = subprocess.Popen(  # noqa: ASYNC220  # before anything else runs here
            [sys.executable, "-I", "-S", str(LIFELINE)], stdin=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The last first: plugins say goodbye to a bus that is still there.
        for process in reversed(self._started):
            await self._end(process)
        assert self._lifeline is not None  # entered
        assert self._lifeline.stdin is not None  # a pipe
        self._lifeline.stdin.close()
        self._lifeline.wait()  # it ends as soon as it reads the end of the pipe

    async def start(self, *command: str, reads_output: bool = False, **variables: str) -> Process:
        """Starts a program of this Python's.

        Args:
            command: the arguments after `python`.
            reads_output: whether the caller reads its standard output; otherwise it is ours.
            variables: of its environment, beside those that every child has.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE if reads_output else None,
            env={**self._environment, **variables},
            start_new_session=True,
        )
        self._started.append(process)
        self._note(f"+{process.pid}")
        return process

    def hurry(self) -> None:
        """Ends the waiting: whatever still runs is killed."""
        self._at_once.set()

    async def _end(self, process: Process) -> None:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            ended, hurry = asyncio.create_task(process.wait()), asyncio.create_task(self._at_once.wait())
            await asyncio.wait({ended, hurry}, timeout=GRACE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            hurry.cancel()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # what is left of its group goes with it
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        self._note(f"-{process.pid}")

    def _note(self, line: str) -> None:
        assert self._lifeline is not None  # entered
        assert self._lifeline.stdin is not None  # a pipe
        with contextlib.suppress(BrokenPipeError):  # somebody killed it; the clean way out is left
            self._lifeline.stdin.write(f"{line}\n".encode())
