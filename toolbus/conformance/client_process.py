"""Runs the client under test: its environment, its output, its signals, its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Mapping, Sequence

MAX_LINES = 200
LINE_BYTES = 1 << 20


class ClientProcess:
    """One process of the client under test, in a group of its own, which `stop` kills with its children.

    Attributes:
        lines: the last lines of its output and its errors, in the order in which they came.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._changed = asyncio.Condition()
        self.lines: deque[str] = deque(maxlen=MAX_LINES)
        self.exited = asyncio.create_task(process.wait())
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str]) -> ClientProcess:
        """Starts a client.

        Raises:
            OSError: it cannot be started.
        """
        process = await asyncio.create_subprocess_exec(
            *command,
            env={**os.environ, **environment},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            limit=LINE_BYTES,
        )
        return cls(process)

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.returncode

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the program that was started, not to its children."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def shows(self, text: str) -> None:
        """Waits until its output has a text."""
        async with self._changed:
            await self._changed.wait_for(lambda: any(text in line for line in self.lines))

    async def stop(self) -> None:
        """Ends it at once, with its children, and reads the rest of its output."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self.exited
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._reading, 1.0)  # a child in a group of its own may hold the pipe

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # a line longer than the limit is dropped
                continue
            if not line:
                return
            async with self._changed:
                self.lines.append(line.decode(errors="replace").rstrip())
                self._changed.notify_all()
