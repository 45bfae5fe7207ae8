"""Has a mount start again once a user has logged in: another process then writes its token file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from toolbus.bus.keys.private_files import stamp_of
from toolbus.bus.mcp_client.token_file import token_path

LOOK_SECONDS = 1.0  # one look at a file, and only while a mount needs a login


class LoginWatch:
    """Looks at the token files of the mounts that need a login.

    Args:
        directory: the data directory; None: there are no tokens.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._looking: dict[str, asyncio.Task[None]] = {}  # by mount

    def __repr__(self) -> str:
        return f"<LoginWatch {' '.join(self._looking)}>"

    def wait(self, name: str, then: Callable[[], object]) -> None:
        """Calls `then` once the token file of a mount changes."""
        if self._directory is not None and name not in self._looking:
            path = token_path(self._directory, name)
            task = self._looking[name] = asyncio.create_task(self._look(path, then), name=f"login of mount {name}")
            task.add_done_callback(lambda _: self._looking.pop(name, None))

    def close(self) -> None:
        """Looks no more."""
        for task in self._looking.values():
            task.cancel()

    async def _look(self, path: Path, then: Callable[[], object]) -> None:
        before = stamp_of(path)
        while stamp_of(path) == before:
            await asyncio.sleep(LOOK_SECONDS)
        then()
