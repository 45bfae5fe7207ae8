"""Processes that a test starts, stops and kills."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from tests.support.waiting import WAIT_SECONDS

HERE = Path(__file__).parent


class Process:
    """One of the scripts beside this file, and what it has printed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    async def says(self, text: str) -> str:
        """Waits for a line that begins with a text."""
        assert self._process.stdout is not None
        async with asyncio.timeout(WAIT_SECONDS):
            while line := (await self._process.stdout.readline()).decode():
                if line.startswith(text):
                    return line.strip()
        raise AssertionError(f"the process ended before it said {text!r}")

    def send(self, number: signal.Signals) -> None:
        """Sends a signal."""
        os.kill(self.pid, number)

    async def kill(self) -> None:
        """Kills the process and waits for its end; a stopped one too."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


@contextlib.asynccontextmanager
async def run(script: str, *arguments: str) -> AsyncIterator[Process]:
    """Runs a script of this directory, until the block ends."""
    environment = dict(os.environ, PYTHONPATH=str(HERE.parent.parent))
    process = Process(
        await asyncio.create_subprocess_exec(
            sys.executable, str(HERE / script), *arguments, stdout=asyncio.subprocess.PIPE, env=environment
        )
    )
    try:
        yield process
    finally:
        await process.kill()
