"""Starts clients under test as forks of a process that has imported what they import."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

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


def forked_clients(*, first_starts: bool = False) -> AbstractContextManager[object]:
    """Lets the suite start clients in Python as forks.

    Args:
        first_starts: the first process of each command is a new interpreter, as its user starts it.
    """
    started: set[tuple[str, ...]] = set()

    async def start(*command: str, **more: Any) -> Any:
        if first_starts and command not in started:
            started.add(command)
            return await _start(*command, **more)
        return await fork_client(*command, **more)

    return mock.patch("asyncio.create_subprocess_exec", start)
