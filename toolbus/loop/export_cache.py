"""What a model is offered now: the catalog as it is, exported once for as long as it stays the same."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TypeAlias

from toolbus.dialects.dialect import Dialect
from toolbus.dialects.export import Export
from toolbus.errors import PeerLost, ToolBusError
from toolbus.loop.loop_tools import OwnTools
from toolbus.loop.tool_source import ToolSource
from toolbus.tool import Tool

log = logging.getLogger("toolbus.loop")

EXPORTS_KEPT = 8  # conversations in deferred mode that take turns, each with tools of its own

_Key: TypeAlias = tuple[int, tuple[str, ...] | None]


class Offering:
    """The tools of a source in one dialect.

    Args:
        list_timeout: seconds to wait for the catalog.
    """

    def __init__(self, source: ToolSource, dialect: Dialect, list_timeout: float) -> None:
        self._source = source
        self._dialect = dialect
        self._list_timeout = list_timeout
        self._listed: tuple[int, Sequence[Tool]] | None = None  # the catalog as last seen; None: never yet
        self._exports: dict[_Key, Export] = {}  # by revision and what was asked for; the one used last stands last

    def __repr__(self) -> str:
        return f"<Offering {self._dialect.name} of {self._source!r}>"

    async def export(self, own: OwnTools) -> Export:
        """Returns what is offered now, together with the tools of the loop itself.

        Raises:
            PeerLost, RequestError: the catalog was never seen, and cannot be.
        """
        revision, tools = await self._list()
        own.see(tools)
        key = (revision, own.chosen)
        export = self._exports.pop(key, None)
        if export is None:
            export = self._dialect.export(own.offered(tools))
            for left_out in export.left_out:
                log.warning("tool %r is not offered to %s: %s", left_out.tool, self._dialect.name, left_out.why)
            if len(self._exports) >= EXPORTS_KEPT:
                del self._exports[next(iter(self._exports))]
        self._exports[key] = export
        return export

    async def _list(self) -> tuple[int, Sequence[Tool]]:
        try:
            async with asyncio.timeout(self._list_timeout):
                self._listed = await self._source.tools()
        except (ToolBusError, TimeoutError) as problem:
            trouble = problem if isinstance(problem, ToolBusError) else self._unanswered(problem)
            if self._listed is None:
                raise trouble from None
            log.warning("cannot list tools (%s): going on with those that are known", trouble)
        return self._listed

    def _unanswered(self, problem: TimeoutError) -> ToolBusError:
        """Returns what to raise after a silence. A host knows whom it asked, and the cure."""
        try:
            error: ToolBusError = self._source.unanswered(self._list_timeout)  # type: ignore[attr-defined]
        except AttributeError:
            why = str(problem) or f"no answer within {self._list_timeout:g} s"
            return PeerLost(f"cannot list tools: {why}")
        return error
