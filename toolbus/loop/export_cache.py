"""Exports the current catalog of a source in one dialect, once for as long as the catalog stays the same."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TypeAlias

from toolbus.dialects.dialect import Dialect
from toolbus.dialects.export import Export
from toolbus.errors import PeerLost, ToolBusError
from toolbus.loop.loop_tools import LoopTools
from toolbus.loop.tool_source import ToolSource
from toolbus.newest import NewestCache
from toolbus.tool import Tool

log = logging.getLogger("toolbus.loop")

MAX_EXPORTS = 8  # of conversations in deferred mode that alternate, each with tools of its own

_Key: TypeAlias = tuple[int, tuple[str, ...] | None]


class ExportCache:
    """The exports of one source in one dialect.

    Args:
        list_timeout: seconds to wait for the catalog.
    """

    def __init__(self, source: ToolSource, dialect: Dialect, list_timeout: float) -> None:
        self._source = source
        self._dialect = dialect
        self._list_timeout = list_timeout
        self._catalog: tuple[int, Sequence[Tool]] | None = None  # revision and tools; None until they were listed
        self._exports: NewestCache[_Key, Export] = NewestCache(MAX_EXPORTS)  # by revision and injected names

    def __repr__(self) -> str:
        return f"<ExportCache {self._dialect.name} of {self._source!r}>"

    async def export(self, loop_tools: LoopTools) -> Export:
        """Returns the tools that are offered now, the loop's own included.

        Raises:
            PeerLost, RequestError: the catalog cannot be listed and was never listed before.
        """
        revision, tools = await self._list()
        loop_tools.use_catalog(tools)
        key = (revision, loop_tools.injected)
        export = self._exports.get(key)
        if export is None:
            export = self._dialect.export(loop_tools.offered(tools))
            for left_out in export.left_out:
                log.warning("tool %r is not offered to %s: %s", left_out.tool, self._dialect.name, left_out.why)
        self._exports[key] = export  # a used export counts as the newest
        return export

    async def _list(self) -> tuple[int, Sequence[Tool]]:
        try:
            async with asyncio.timeout(self._list_timeout):
                self._catalog = await self._source.tools()
        except (ToolBusError, TimeoutError) as problem:
            error = problem if isinstance(problem, ToolBusError) else self._timeout_error(problem)
            if self._catalog is None:
                raise error from None
            log.warning("cannot list tools (%s): using the last known catalog", error)
        return self._catalog

    def _timeout_error(self, timeout: TimeoutError) -> ToolBusError:
        """Returns the error of a listing that timed out. A host's error names the bus and how to fix it."""
        try:
            error: ToolBusError = self._source.unanswered(self._list_timeout)  # type: ignore[attr-defined]
        except AttributeError:
            why = str(timeout) or f"no answer within {self._list_timeout:g} s"
            return PeerLost(f"cannot list tools: {why}")
        return error
