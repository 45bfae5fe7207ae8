"""Runs child processes that end with the program that started them, however it ends.

Each child leads a group of its own, so that a Ctrl-C in the terminal does not reach it before the program has decided
the order. A child gets SIGTERM, and SIGKILL if it does not end in time. If the program itself is killed, a
`toolbus.processes.lifeline.Lifeline` kills the groups that are left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from toolbus.processes.lifeline import Lifeline

GRACE_SECONDS = 8.0  # longer than the 5 s that `toolbus run` gives its plugins


class Children:
    """The processes of one program, in the order in which they were started; an async context manager."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._started: list[Process] = []
        self._killing = asyncio.Event()  # set when children that still run are killed
        self._lifeline: Lifeline | None = None  # None until entered

    async def __aenter__(self) -> Self:
        self._lifeline = Lifeline()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The newest first: plugins disconnect from a bus that still runs.
        for process in reversed(self._started):
            await self._end(process)
        assert self._lifeline is not None  # entered
        self._lifeline.close()

    async def start(self, *command: str, reads_output: bool = False, **variables: str) -> Process:
        """Starts a program of this Python's.

        Args:
            command: the arguments after `python`.
            reads_output: whether the caller reads its standard output; otherwise it is our standard error, so that
                what we print stays whole.
            variables: of its environment, besides those that every child has.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE if reads_output else sys.stderr.fileno(),
            env={**self._environment, **variables},
            start_new_session=True,
        )
        self._started.append(process)
        assert self._lifeline is not None  # entered
        self._lifeline.add(process.pid)
        return process

    def kill(self) -> None:
        """Ends a graceful shutdown: children that still run are killed."""
        self._killing.set()

    async def _end(self, process: Process) -> None:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            ended, killing = asyncio.create_task(process.wait()), asyncio.create_task(self._killing.wait())
            await asyncio.wait({ended, killing}, timeout=GRACE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            killing.cancel()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the rest of its group ends with it
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        assert self._lifeline is not None  # entered
        self._lifeline.remove(process.pid)
