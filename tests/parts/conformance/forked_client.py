"""Starts clients under test as forks of a process that has imported what they import."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from tests.support.fork_server import Forked, fork_python

_start = asyncio.create_subprocess_exec


class ForkedClient:
    """A fork with the attributes of `asyncio.subprocess.Process` that `ClientProcess` uses.

    Args:
        stdout: what it prints, errors too.
    """

    def __init__(self, forked: Forked, stdout: asyncio.StreamReader) -> None:
        self.pid = forked.pid
        self.stdout = stdout
        self.wait = forked.wait_async
        self._forked = forked

    def __repr__(self) -> str:
        return f"<ForkedClient {self.pid}>"

    @property
    def returncode(self) -> int | None:
        """The exit code; None while it runs."""
        return self._forked.poll()

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal, unless it has ended."""
        self._forked.send_signal(number)


async def fork_client(*command: str, env: Mapping[str, str], limit: int, **more: Any) -> Any:
    """Takes the place of `asyncio.create_subprocess_exec` for a Python file or module; starts anything else."""
    if command[0] != sys.executable or command[1] == "-c":
        return await _start(*command, env=env, limit=limit, **more)
    printed, out = os.pipe()
    null = os.open(os.devnull, os.O_RDONLY)
    try:
        forked = fork_python(command[1:], env, {0: null, 1: out, 2: out})
    finally:
        os.close(out)
        os.close(null)
    stdout = asyncio.StreamReader(limit=limit)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stdout), os.fdopen(printed, "rb", 0)
    )
    return ForkedClient(forked, stdout)
