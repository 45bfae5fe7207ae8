"""Notices that a folder of tool files may offer something else.

The system says so within a fraction of a second, where it can. Each second the files are looked at anyway: links lead
elsewhere, and some file systems tell nothing. A folder that is deleted, replaced or made again is followed; one that is
not there is told twice, for somebody may be putting another one in its place.
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
from toolbus.dropin.file_loader import tool_files

SETTLE_MS = 60  # that a folder has to be quiet before it is looked at: editors write a file in several steps
LOOK_MS = 1000


async def changes(folder: Path, also: Callable[[], object] = lambda: None) -> AsyncGenerator[None]:
    """Yields at once, and then whenever a file of the folder was written, added or removed. Needs watchfiles.

    Args:
        also: what else is looked at each second, on another thread; it has changed when this is another value.
    """
    seen: object = None
    gone = 0  # how often in a row the folder was not there; no more than twice
    async with aclosing(_hints(folder)) as hints:
        async for _ in hints:
            looks = await asyncio.to_thread(lambda: (_outside(folder), also()))
            gone = min(gone + 1, 2) if looks[0] == errno.ENOENT else 0
            if (looks, gone) != seen:
                seen = looks, gone
                yield


async def _hints(folder: Path) -> AsyncGenerator[None]:
    """Yields when the system says that something changed, and each second."""
    import watchfiles

    while True:
        yield
        try:
            watched = os.stat(folder)
            events = watchfiles.awatch(
                folder,
                watch_filter=_matters,
                debounce=SETTLE_MS * 4,
                step=SETTLE_MS,
                rust_timeout=LOOK_MS,
                yield_on_timeout=True,
                recursive=False,
            )
            async with aclosing(events):
                while os.path.samestat(watched, os.stat(folder)):
                    await anext(events)
                    yield
        except (OSError, RuntimeError):  # it is not there, or the system watches no more folders
            await asyncio.sleep(LOOK_MS / 1000)


def _outside(folder: Path) -> object:
    """Returns what is different when a file was written, whatever stands in it now."""
    try:
        return [(name, _identity(folder / name)) for name in (*tool_files(folder), FILE)]
    except OSError as problem:
        return problem.errno


def _identity(file: Path) -> tuple[int, ...]:
    """Returns what of a file is different when it was written or replaced; links are followed."""
    try:
        found = file.stat()
    except OSError as problem:
        return (problem.errno or 0,)
    return (found.st_dev, found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _matters(change: Any, path: str) -> bool:
    name = os.path.basename(path)
    return name == FILE or (name.endswith(".py") and not name.startswith("."))
