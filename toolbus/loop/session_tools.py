"""Keeps the tools of one realtime session equal to the catalog of a source."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from toolbus.dialects.conversation import Json
from toolbus.dialects.export import Export
from toolbus.dialects.realtime_dialect import RealtimeDialect
from toolbus.loop.export_cache import export_within
from toolbus.loop.realtime_events import NewSessionNeeded, SessionEvent, Sync, ToolsSent
from toolbus.loop.tool_source import ToolSource, missing_after_restart

log = logging.getLogger("toolbus.loop")

SETTLE_PAUSE = 0.25  # seconds between two checks whether a restarted bus still waits for its plugins


class SessionTools:
    """The tools of one session.

    Args:
        send: sends events to the provider.
        notify: receives `ToolsSent` and `NewSessionNeeded`.
        is_closed: tells whether the session is closed.

    Attributes:
        export: the tools that the session has.
        parser: reads the provider's events, with the names of these tools.
        waits: whether the last `sync` changed nothing, because the bus has just restarted and still lacks tools.
    """

    def __init__(
        self,
        dialect: RealtimeDialect,
        source: ToolSource,
        send: Callable[[Sequence[Json]], Awaitable[None]],
        notify: Callable[[SessionEvent], None],
        is_closed: Callable[[], bool],
    ) -> None:
        self._dialect = dialect
        self._source = source
        self._send = send
        self._notify = notify
        self._is_closed = is_closed
        self._lock = asyncio.Lock()  # one update at a time
        self.export = dialect.export(())
        self.parser = dialect.parser(self.export.names)
        self.waits = False

    async def setup(self) -> Json:
        """Returns the provider's message that sets the current tools, which then count as sent."""
        async with self._lock:
            _, tools = await self._source.tools()
            self._use(export_within(self._dialect, tools))
            return self._dialect.session_update(self.export)

    async def sync(self) -> Sync:
        """Sends the current tools if they have changed, as `RealtimeSession.sync` says."""
        async with self._lock:
            if self._is_closed():
                return Sync.CLOSED
            _, tools = await self._source.tools()
            missing = missing_after_restart(self._source, self.export.kept, tools)
            self.waits = bool(missing)
            if missing:
                log.info(
                    "%s session: the bus has restarted, and %d tools are not registered yet",
                    *(self._dialect.name, len(missing)),
                )
                return Sync.UNCHANGED
            export = export_within(self._dialect, tools)
            if export.tools == self.export.tools:
                self._use(export)  # schema hashes, which calls carry, may have changed
                return Sync.UNCHANGED
            if self._dialect.fixed_at_connect:
                self._notify(NewSessionNeeded(export))
                return Sync.NEW_SESSION
            try:
                await self._send([self._dialect.session_update(export)])
            except Exception:
                if self._is_closed():  # meanwhile: not an error for a caller that syncs many sessions
                    return Sync.CLOSED
                raise
            self._use(export)
            self._notify(ToolsSent(export))
            return Sync.SENT

    async def settled(self) -> None:
        """Waits until the source's bus no longer waits for plugins, as it does after a restart."""
        while getattr(self._source, "settling", False):
            await asyncio.sleep(SETTLE_PAUSE)

    def _use(self, export: Export) -> None:
        if export.left_out and export.left_out != self.export.left_out:
            last, count = export.left_out[-1], len(export.left_out)
            log.warning("%s session: %d tools are not offered; %r: %s", self._dialect.name, count, last.tool, last.why)
        self.export = export
        self.parser.names = export.names
