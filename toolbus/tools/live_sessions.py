"""Sends changed tools to live sessions, each on its own event loop, and waits until all have them (REST-63)."""

from __future__ import annotations

import asyncio
from typing import Protocol


class LiveSession(Protocol):
    """A conversation that stays open and knows the tools (a realtime session)."""

    async def sync(self) -> object:
        """Sends the current tools to the model; raises where it refuses them."""


class LiveSessions:
    """The sessions that receive changes."""

    def __init__(self) -> None:
        self._loops: dict[LiveSession, asyncio.AbstractEventLoop] = {}  # by session, the loop that it belongs to

    def __repr__(self) -> str:
        return f"<LiveSessions {len(self._loops)}>"

    def add(self, session: LiveSession) -> None:
        """Adds a session of the running event loop.

        Raises:
            RuntimeError: no event loop is running.
        """
        self._loops[session] = asyncio.get_running_loop()

    def remove(self, session: LiveSession) -> None:
        """Removes a session; an unknown one is not an error."""
        self._loops.pop(session, None)

    async def sync(self) -> None:
        """Returns when every session has received the tools.

        Raises:
            Exception: the first error of a session; the others have received them then.
        """
        syncs = [_sync_on(session, loop) for session, loop in list(self._loops.items())]
        for result in await asyncio.gather(*syncs, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result


async def _sync_on(session: LiveSession, loop: asyncio.AbstractEventLoop) -> object:
    """Syncs a session on its own loop; a session whose loop is closed has ended and is skipped."""
    if loop is asyncio.get_running_loop():
        return await session.sync()
    syncing = _sync(session)
    try:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(syncing, loop))
    except RuntimeError:
        if not loop.is_closed():
            raise
        syncing.close()
        return None


async def _sync(session: LiveSession) -> object:
    return await session.sync()
