"""Exports the current catalog of a source in one dialect, and caches the export until the catalog changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from toolbus.common.newest import NewestCache
from toolbus.common.text import list_names, nearest
from toolbus.errors import InvalidRequest, PeerLost, ToolBusError
from toolbus.parts.models.dialects.dialect import Dialect
from toolbus.parts.models.dialects.export import Export, LeftOut, ToolWriter
from toolbus.parts.models.loop.loop_tools import LoopTools
from toolbus.parts.models.loop.tool_refusal import EndpointRefusals
from toolbus.parts.models.loop.tool_source import ToolSource, missing_after_restart
from toolbus.protocol.tool import Tool

log = logging.getLogger("toolbus.loop")

MAX_EXPORTS = 8  # of conversations in deferred mode that alternate, each with its own tools

_Key: TypeAlias = tuple[int, tuple[str, ...] | None, int | None, int]  # revision, injected names, limit, refusals


class ExportCache:
    """The exports of one source in one dialect.

    Args:
        list_timeout: seconds to wait for the catalog.
        max_tools: see `LoopSettings`.
        refused: the refusals of the endpoint, which are not exported; None: no refusals.
        pinned: names that a program pins, which are checked with the first catalog.
    """

    def __init__(
        self,
        source: ToolSource,
        dialect: Dialect,
        list_timeout: float,
        max_tools: int | None = None,
        refused: EndpointRefusals | None = None,
        pinned: Sequence[str] = (),
    ) -> None:
        self._source = source
        self._dialect = dialect
        self._list_timeout = list_timeout
        self._refused = refused or EndpointRefusals()
        self._setting = dialect.max_tools if max_tools is None else max_tools or None  # None: any number of tools
        self._unchecked = pinned  # names that the first catalog must have; empty once it had them
        self._warned = False  # whether a catalog was too large
        self._catalog: tuple[int, Sequence[Tool]] | None = None  # revision and tools; None until they were listed
        self._exports: NewestCache[_Key, Export] = NewestCache(MAX_EXPORTS)

    def __repr__(self) -> str:
        return f"<ExportCache {self._dialect.name} of {self._source!r}>"

    async def export(self, loop_tools: LoopTools) -> Export:
        """Returns the tools that are offered now, the loop's own included.

        Raises:
            PeerLost, RequestError: the catalog cannot be listed and was never listed before; or it lacks a pinned tool.
        """
        revision, tools = await self._list()
        self._check_pinned(tools)
        tools, refused = self._refused.split(tools)  # so that a search does not find them either
        await loop_tools.use_catalog(tools, self._max_tools)
        self._warn_once(loop_tools, len(tools))
        key = (revision, loop_tools.injected, self._max_tools, self._refused.revision)
        export = self._exports.get(key)
        if export is None:
            offered, own = self._refused.split(loop_tools.offered(tools))
            export = self._dialect.export(offered)
            for left_out in export.left_out:
                log.warning("tool %r is not offered to %s: %s", left_out.tool, self._dialect.name, left_out.why)
            if refused or own:
                export = replace(export, left_out=(*export.left_out, *refused, *own))
        self._exports[key] = export  # a used export counts as the newest
        return export

    def _check_pinned(self, tools: Sequence[Tool]) -> None:
        """Checks that the first catalog has all pinned tools; later ones may miss some for a while.

        Raises:
            InvalidRequest: naming those that are unknown.
        """
        if not self._unchecked or getattr(self._source, "settling", False):
            return
        names = [tool.name for tool in tools]
        unknown = [name for name in self._unchecked if name not in names]
        if unknown:
            near = nearest(unknown[0], names)
            fix = f"did you mean {near!r}?" if near else f"there are: {list_names(names)}"
            raise InvalidRequest(f"pinned has {', '.join(map(repr, unknown))}, which the source does not offer: {fix}")
        self._unchecked = ()

    @property
    def _max_tools(self) -> int | None:
        """How many tools a request takes; None: any number."""
        setting, refused = self._setting, self._refused.max_tools
        return setting if refused is None else min(setting or refused, refused)

    def _warn_once(self, loop_tools: LoopTools, count: int) -> None:
        if self._warned or not (loop_tools.limited or loop_tools.unpinned):
            return
        self._warned = True
        limit = f"a request of {self._dialect.name} takes {self._max_tools} (LoopSettings(max_tools=…) sets it)"
        if loop_tools.unpinned:
            log.warning(
                "%s: %d pinned tools are not offered from the start, to leave room for others; pin fewer",
                limit,
                loop_tools.unpinned,
            )
        else:
            log.warning(
                "the catalog has %d tools and %s: only those that match the conversation are offered, and the model "
                "finds the others with search_tools. ToolLoop(pinned=[…]) names tools that are always offered",
                count,
                limit,
            )

    async def _list(self) -> tuple[int, Sequence[Tool]]:
        try:
            async with asyncio.timeout(self._list_timeout):
                catalog = await self._source.tools()
        except (ToolBusError, TimeoutError) as problem:
            error = problem if isinstance(problem, ToolBusError) else self._timeout_error(problem)
            if self._catalog is None:
                raise error from None
            log.warning("cannot list tools (%s): using the last known catalog", error)
            return self._catalog
        if self._catalog is not None:
            missing = missing_after_restart(self._source, (tool.name for tool in self._catalog[1]), catalog[1])
            if missing:
                text = "the bus has just restarted, and %d tools are not registered yet: using the last known catalog"
                log.info(text, len(missing))
                return self._catalog
        self._catalog = catalog
        return catalog

    def _timeout_error(self, timeout: TimeoutError) -> ToolBusError:
        """Returns the error of a listing that timed out. A host's error names the bus and how to fix it."""
        try:
            error: ToolBusError = self._source.unanswered(self._list_timeout)  # type: ignore[attr-defined]
        except AttributeError:
            why = str(timeout) or f"no answer within {self._list_timeout:g} s"
            return PeerLost(f"cannot list tools: {why}")
        return error


def export_within(dialect: ToolWriter, tools: Sequence[Tool]) -> Export:
    """Returns the tools for a session: the first ones of the catalog, as many as its provider takes.

    A search would need a list of tools that changes in the middle of an answer, which not every session has.
    """
    limit = dialect.max_tools
    if limit is None or len(tools) <= limit:
        return dialect.export(tools)
    export = dialect.export(tools[:limit])
    why = (
        f"the catalog has {len(tools)} tools, and a session takes {limit}: offer fewer, by role or "
        "source_of(…, names=…)"
    )
    return replace(export, left_out=(*export.left_out, *(LeftOut(tool.name, why) for tool in tools[limit:])))
