"""Waits after a restart of the bus for tools that it had before: their plugins reconnect within moments.

Without it, a client that lists right after a restart would see no tools until it lists again, and the call of a model
that knows a tool from before would fail as unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from toolbus.bus.access.identity import Identity
from toolbus.bus.core import Core
from toolbus.bus.mcp_server.mcp_listing import Listings, TargetTool
from toolbus.bus.mcp_server.tool_names import ToolNames
from toolbus.bus.mcp_settings import Profile


class Returning:
    """Waits for the tools of one bus."""

    def __init__(self, core: Core, names: ToolNames, listings: Listings) -> None:
        self._core = core
        self._names = names
        self._listings = listings
        self._changed = asyncio.Event()  # set and replaced at each change of the catalog
        core.signals.on_change(self._wake)

    def __repr__(self) -> str:
        return f"<Returning {self._names!r}>"

    async def wait_for_lists(self, profile: Profile, identity: Identity, *, modern: bool) -> None:
        """Waits until a profile has all its earlier tools, at most until the bus has settled."""

        def complete() -> bool:
            self._listings.catalog(profile, identity, modern=modern)  # marks its tools as present
            return not self._names.has_missing(profile)

        await self._wait(complete)

    async def find(self, profile: Profile, identity: Identity, wire: str) -> TargetTool | None:
        """Returns the tool of a name towards clients; None if it is unknown or does not return in time."""
        target = self._listings.find(profile, identity, wire)
        if target is not None or not self._names.is_missing(profile, wire):
            return target
        await self._wait(lambda: self._listings.find(profile, identity, wire) is not None)
        return self._listings.find(profile, identity, wire)

    async def _wait(self, is_there: Callable[[], bool]) -> None:
        """Waits until a condition is true, at most until the bus has settled."""
        while (seconds := self._core.dispatcher.admission.settled_at - time.monotonic()) > 0:
            changed = self._changed
            if is_there():
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
