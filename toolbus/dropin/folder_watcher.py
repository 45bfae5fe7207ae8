"""Watches a folder of tool files, and yields whenever what it offers may have changed.

The system reports most changes within a fraction of a second. The files are also checked each second: targets of links
change, and some file systems report nothing. A folder that is deleted, replaced or created again is followed; a missing
one is reported twice, since it may be about to be replaced.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

from toolbus.dropin.file_grants import FILE
from toolbus.dropin.file_loader import SUFFIXES, tool_files

SETTLE_MS = 60  # without an event before the folder is checked: editors write a file in several steps
POLL_MS = 1000


async def changes(folder: Path, also: Callable[[], object] = lambda: None) -> AsyncGenerator[None]:
    """Yields at once, and then whenever a file of the folder was written, added or removed. Needs watchfiles.

    Args:
        also: called each second too, on another thread; another return value is a change.
    """
    before: object = None
    missing = 0  # how often in a row the folder did not exist; counted to 2
    async with aclosing(_events(folder)) as events:
        async for _ in events:
            state = await asyncio.to_thread(lambda: (_identities(folder), also()))
            missing = min(missing + 1, 2) if state[0] == errno.ENOENT else 0
            if (state, missing) != before:
                before = state, missing
                yield


async def _events(folder: Path) -> AsyncGenerator[None]:
    """Yields when the system reports a change, and each second."""
    import watchfiles

    while True:
        yield
        try:
            watched = os.stat(folder)
            changed = watchfiles.awatch(
                folder,
                watch_filter=_is_relevant,
                debounce=SETTLE_MS * 4,
                step=SETTLE_MS,
                rust_timeout=POLL_MS,
                yield_on_timeout=True,
                recursive=False,
            )
            async with aclosing(changed):
                while os.path.samestat(watched, os.stat(folder)):
                    await anext(changed)
                    yield
        except (OSError, RuntimeError):  # it does not exist, or the system can watch no more folders
            await asyncio.sleep(POLL_MS / 1000)


def _identities(folder: Path) -> object:
    """Returns a value that changes whenever a file is written, also with the same content."""
    try:
        return [(name, _identity(folder / name)) for name in (*tool_files(folder), FILE)]
    except OSError as error:
        return error.errno


def _identity(file: Path) -> tuple[int, ...]:
    """Returns what changes when a file is written or replaced; links are followed."""
    try:
        status = file.stat()
    except OSError as error:
        return (error.errno or 0,)
    return (status.st_dev, status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _is_relevant(change: Any, path: str) -> bool:
    name = os.path.basename(path)
    return name == FILE or (name.endswith(SUFFIXES) and not name.startswith("."))
