"""Restarts a mount when a user has logged in: another process then writes its token file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from toolbus.bus.keys.private_files import stamp_of
from toolbus.parts.mcp.client.token_file import token_path

POLL_SECONDS = 1.0  # between two looks at the file


class LoginWatch:
    """Polls the token files of the mounts that need a login.

    Args:
        directory: the data directory; None: the bus stores no tokens.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by mount

    def __repr__(self) -> str:
        return f"<LoginWatch {' '.join(self._tasks)}>"

    def wait(self, name: str, then: Callable[[], object]) -> None:
        """Calls `then` once the token file of a mount changes."""
        if self._directory is not None and name not in self._tasks:
            path = token_path(self._directory, name)
            task = self._tasks[name] = asyncio.create_task(_poll(path, then), name=f"login of mount {name}")
            task.add_done_callback(lambda _: self._tasks.pop(name, None))

    def close(self) -> None:
        """Stops polling."""
        for task in self._tasks.values():
            task.cancel()


async def _poll(path: Path, then: Callable[[], object]) -> None:
    before = stamp_of(path)
    while stamp_of(path) == before:
        await asyncio.sleep(POLL_SECONDS)
    then()
